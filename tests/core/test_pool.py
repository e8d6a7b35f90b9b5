"""The page pool: examples of each refusal, and a machine beside a model that is a plain dict."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstream.core.pool import PagePool
from kvstream.core.types import AccountingBug, PageId


def test_reserve_or_nothing() -> None:
    pool = PagePool(4)
    assert pool.try_take(3) == (0, 1, 2)
    assert pool.try_take(2) is None
    assert pool.free == 1
    assert pool.try_take(0) == ()


def test_promised_pages_are_not_taken_by_others() -> None:
    pool = PagePool(4)
    assert pool.try_promise(3)
    assert not pool.try_promise(2)
    assert pool.try_take(2) is None
    assert len(pool.redeem(2)) == 2
    pool.release(1)
    assert (pool.free, pool.promised) == (2, 0)


def test_reclaimable_pages_back_promises_but_cannot_be_taken() -> None:
    pool = PagePool(4)
    pool.try_take(3)
    assert pool.try_promise(4, reclaimable=3)
    assert pool.try_take(1, reclaimable=4) == (3,)
    assert pool.try_take(1, reclaimable=9) is None


@pytest.mark.parametrize("deed", [
    lambda pool: pool.drop([PageId(0), PageId(0), PageId(0)]),
    lambda pool: pool.drop([PageId(3)]),
    lambda pool: pool.share([PageId(3)]),
    lambda pool: pool.release(1),
    lambda pool: pool.redeem(1),
    lambda pool: pool.release(-1),
    lambda pool: pool.try_promise(-1),
    lambda pool: pool.try_take(-1),
    lambda pool: PagePool(-1),
])
def test_bugs_are_raised(deed: object) -> None:
    pool = PagePool(4)
    pages = pool.try_take(1)
    assert pages is not None
    pool.share(pages)
    with pytest.raises(AccountingBug):
        deed(pool)  # type: ignore[operator]


def test_an_overdraft_uses_ids_that_do_not_exist_and_heals() -> None:
    pool = PagePool(2)
    pages = pool.overdraw(4)
    assert (pool.free, pool.overdrawn) == (0, 2)
    pool.drop(pages[:2])
    assert (pool.free, pool.overdrawn) == (0, 0)
    pool.drop(pages[2:])
    assert sorted(pool.try_take(2) or ()) == [0, 1]


class PoolMachine(RuleBasedStateMachine):
    """Model: owners per page in a dict, a promised number, a total."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(6)
        self.total = 6
        self.owners: dict[PageId, int] = {}
        self.promised = 0

    @rule(n=st.integers(0, 8), reclaimable=st.integers(0, 3))
    def take(self, n: int, reclaimable: int) -> None:
        free = max(0, self.total - len(self.owners))
        pages = self.pool.try_take(n, reclaimable=reclaimable)
        assert (pages is not None) == (n <= free and self.promised + n <= free + reclaimable)
        self.fresh(pages or (), exist=True)

    @rule(n=st.integers(0, 3))
    def overdraw(self, n: int) -> None:
        self.fresh(self.pool.overdraw(n), exist=len(self.owners) + n <= self.total)

    def fresh(self, pages: tuple[PageId, ...], exist: bool) -> None:
        assert len(set(pages)) == len(pages) and not set(pages) & set(self.owners), "a page was given away twice"
        assert not exist or all(page < self.total for page in pages), "a page that does not exist"
        self.owners |= dict.fromkeys(pages, 1)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.owners)))
        self.pool.share([page])
        self.owners[page] += 1

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.owners)))
        self.pool.drop([page])
        self.owners[page] -= 1
        if not self.owners[page]:
            del self.owners[page]

    @rule(n=st.integers(0, 8), reclaimable=st.integers(0, 3))
    def promise(self, n: int, reclaimable: int) -> None:
        fits = self.promised + n <= max(0, self.total - len(self.owners)) + reclaimable
        assert self.pool.try_promise(n, reclaimable=reclaimable) == fits
        self.promised += n * fits

    @precondition(lambda self: self.promised)
    @rule(data=st.data(), keep=st.booleans())
    def settle(self, data: st.DataObject, keep: bool) -> None:
        n = data.draw(st.integers(1, self.promised))
        self.promised -= n
        if keep:
            self.fresh(self.pool.redeem(n), exist=len(self.owners) + n <= self.total)
        else:
            self.pool.release(n)

    @rule(total=st.integers(0, 10))
    def resize(self, total: int) -> None:
        self.pool.resize(total)
        self.total = total

    @invariant()
    def agree(self) -> None:
        self.pool.check()
        assert self.pool.held == len(self.owners)
        assert all(self.pool.count(page) == n for page, n in self.owners.items())
        assert self.pool.promised == self.promised
        assert self.pool.free == max(0, self.total - len(self.owners))
        assert self.pool.overdrawn == max(0, len(self.owners) - self.total)


TestPoolMachine = PoolMachine.TestCase
