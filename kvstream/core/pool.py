"""Reference-counted pages of one tier.

Theory of operation. A page is *free*, or *held* by one or more owners (tables and prefix-tree nodes); the count per
page is the number of its owners. On top of that the pool keeps one number, *promised*: pages that running requests
have been told they will get. A promise may be backed by free pages or by pages that somebody is ready to give up (the
unlocked part of the prefix tree, ``reclaimable``), because evicting a cached prefix for an answer that may never
grow that long would be waste. The one who redeems a promise makes room first; ``redeem`` itself never fails.

``try_take`` is reserve-or-nothing and never touches what is promised. ``overdraw`` takes pages that do not exist: the
runtime has already used the memory, so the honest thing is to count it. ``overdrawn`` is simply held - total, which is
also what a shrunk pool shows, and it heals by itself as pages are dropped.

Ids below ``total`` are preferred at all times, so that a pool that is never overdrawn only hands out real indexes.
"""

from __future__ import annotations

from collections.abc import Iterable

from .types import AccountingBug, PageId, Tier


class PagePool:
    """``total`` pages of one tier. All counts are pages. Errors: ``AccountingBug`` for impossible requests."""

    __slots__ = ("_counts", "_minted", "_promised", "_recycled", "_surplus", "tier", "total")

    def __init__(self, total: int, tier: Tier = Tier.DEVICE) -> None:
        if total < 0:
            raise AccountingBug(f"a pool of {total} pages")
        self.tier = tier
        self.total = total
        self._counts: dict[PageId, int] = {}
        self._recycled: list[PageId] = []  # free ids below total
        self._surplus: list[PageId] = []  # free ids at or above total, only for overdrafts
        self._minted = 0  # ids below this have been handed out at least once
        self._promised = 0

    @property
    def held(self) -> int:
        """Distinct pages with at least one owner."""
        return len(self._counts)

    @property
    def free(self) -> int:
        return max(0, self.total - len(self._counts))

    @property
    def overdrawn(self) -> int:
        return max(0, len(self._counts) - self.total)

    @property
    def promised(self) -> int:
        return self._promised

    def count(self, page: PageId) -> int:
        """How many owners the page has; 0 when it is free."""
        return self._counts.get(page, 0)

    def try_take(self, n: int, *, reclaimable: int = 0) -> tuple[PageId, ...] | None:
        """``n`` fresh pages with one owner each, or None and nothing changes.

        ``reclaimable`` pages are not free but stand in for promises; they cannot be taken here.
        """
        if n > self.free or n > self.free + reclaimable - self._promised:
            return None
        return self.overdraw(n)

    def overdraw(self, n: int) -> tuple[PageId, ...]:
        """``n`` pages whether or not they exist. Only for memory that the runtime has used already."""
        if n < 0:
            raise AccountingBug(f"take {n} pages")
        cut = max(0, len(self._recycled) - n)
        pages = self._recycled[cut:]
        del self._recycled[cut:]
        while len(pages) < n:
            if self._minted >= self.total and self._surplus:
                pages.append(self._surplus.pop())
            else:
                pages.append(PageId(self._minted))
                self._minted += 1
        self._counts.update(dict.fromkeys(pages, 1))
        return tuple(pages)

    def share(self, pages: Iterable[PageId]) -> None:
        """One owner more for each page."""
        for page in pages:
            if page not in self._counts:
                raise AccountingBug(f"share of free page {page}")
            self._counts[page] += 1

    def drop(self, pages: Iterable[PageId]) -> None:
        """One owner less for each page; the last one frees it."""
        counts = self._counts
        for page in pages:
            left = counts.get(page, 0) - 1
            if left > 0:
                counts[page] = left
            elif left == 0:
                del counts[page]
                (self._recycled if page < self.total else self._surplus).append(page)
            else:
                raise AccountingBug(f"drop of free page {page}")

    def try_promise(self, n: int, *, reclaimable: int = 0) -> bool:
        """Set ``n`` pages aside for an answer, if free and reclaimable pages cover all promises."""
        if n < 0:
            raise AccountingBug(f"promise {n} pages")
        if self._promised + n > self.free + reclaimable:
            return False
        self._promised += n
        return True

    def redeem(self, n: int) -> tuple[PageId, ...]:
        """Turn ``n`` promised pages into held ones. Overdraws only if the pool was shrunk, or overdrawn, meanwhile."""
        self.release(n)
        return self.overdraw(n)

    def release(self, n: int) -> None:
        """Give ``n`` promised pages back unused."""
        if not 0 <= n <= self._promised:
            raise AccountingBug(f"release of {n} promised pages, {self._promised} are promised")
        self._promised -= n

    def resize(self, total: int) -> None:
        """A new total. Held pages stay; those above a smaller total show as ``overdrawn``."""
        self.total = max(0, total)
        idle = self._recycled + self._surplus
        self._recycled = [page for page in idle if page < self.total]
        self._surplus = [page for page in idle if page >= self.total]

    def check(self) -> None:
        """Free + distinct held = total (unless overdrawn), every id in one place."""
        assert self.free + self.held - self.overdrawn == self.total, "pages lost or invented"
        assert all(count > 0 for count in self._counts.values()), "a held page without an owner"
        idle = self._recycled + self._surplus
        assert len(idle) == len(set(idle)), "a page is free twice"
        assert not any(page in self._counts for page in idle), "a page is free and held"
        assert len(idle) + len(self._counts) == self._minted, "an id was lost"
        assert all(page < self.total for page in self._recycled), "an id that does not exist would be handed out"
        assert self._promised >= 0
