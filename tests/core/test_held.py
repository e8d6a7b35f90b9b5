"""The prefix tree tells the truth about slots: a cached page is in one of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstream.core.ledger import Ledger
from kvstream.core.settings import SchedulerSettings
from kvstream.core.state import Running, Waiting
from kvstream.core.tokens import common_pages
from kvstream.core.types import Limits, PoolMode
from tests.play import PAGE, keys_of, submit
from tests.strategies import prompts

LIMITS = Limits(PoolMode.SPLIT, seats=4, pages=64, page_tokens=PAGE, request_tokens_max=256, shares_prefix=True)


def ran(ledger: Ledger, prompt: str, tokens: int, now: float = 0.0) -> None:
    ledger.close(opened(ledger, prompt, tokens, now), now, register=True)


def opened(ledger: Ledger, prompt: str, tokens: int, now: float = 0.0) -> Running:
    waiting = Waiting.of(submit(1, tokens, prompt=prompt), 0.0, 9.0, 0)
    waiting.pages = ledger.entitlement(tokens, 16)
    return ledger.open(waiting, ledger.cached_run(waiting, now), now)


def test_what_no_slot_holds_any_more_is_forgotten() -> None:
    ledger = Ledger(SchedulerSettings(), LIMITS)
    ran(ledger, "aab", 80)
    ran(ledger, "aac", 64)
    assert ledger.tree.size == 7
    ledger.forget(keys_of("aab", 80), [keys_of("aac", 64)])  # the slot of the first was overwritten
    assert ledger.tree.size == 4
    ledger.check_held([keys_of("aac", 64)])
    ledger.check([])
    ledger.forget(keys_of("aac", 64), [(), keys_of("ab", 32)])
    assert ledger.tree.size == 1
    ledger.check([])
    with pytest.raises(AssertionError):
        ledger.check_held([keys_of("bbb", 64)])
    ledger.forget(keys_of("ab", 32), ())
    assert ledger.tree.size == 0 and ledger.pool.held == 0 and ledger.evicted == 7


def test_what_continues_forgotten_pages_goes_with_them() -> None:
    """A prefix longer than what the slot is known to hold cannot be in it."""
    ledger = Ledger(SchedulerSettings(), LIMITS)
    ran(ledger, "abcd", 64)
    ledger.forget(keys_of("ab", 32), [keys_of("a", 16)])
    assert ledger.tree.size == 1


def test_a_running_request_keeps_its_pages_and_only_those() -> None:
    ledger = Ledger(SchedulerSettings(), LIMITS)
    ran(ledger, "abcd", 64)
    run = opened(ledger, "abx", 48)
    assert len(run.path) == 2
    ledger.forget(keys_of("abcd", 64), ())
    assert ledger.tree.size == ledger.tree.locked == 2
    ledger.check([run])
    ledger.close(run, 1.0, register=False)
    ledger.check([])
    ledger.forget(keys_of("abx", 48), ())
    assert ledger.tree.size == 0


def test_pages_in_a_slot_that_is_at_work_are_counted_once() -> None:
    """Two slots hold one prefix: each has its own cells of a split pool, and the books count it once."""
    ledger = Ledger(SchedulerSettings(), LIMITS)
    ran(ledger, "ab", 96)
    first, other = opened(ledger, "ab", 112), opened(ledger, "ab", 112)
    assert ledger.pool.held == 6 + 2
    ledger.check([first, other])


@given(prompts, prompts, st.integers(0, 90), st.integers(0, 90))
def test_common_pages_is_the_common_beginning(one: str, other: str, tokens: int, others: int) -> None:
    mine, its = keys_of(one, tokens), keys_of(other, others)
    naive = next((i for i, pair in enumerate(zip(mine, its, strict=False)) if pair[0] != pair[1]),
                 min(len(mine), len(its)))
    assert common_pages(mine, its) == naive
