"""When silence proves that a backend hangs."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from kvstream.core.liveness import SAFETY, SLOWEST_PER_S, TOKENS_MIN, PrefillRate, Work, wedged_at


def at(
    *works: Work, last: float = -inf, rate: float | None = None, wedged_s: float = 90, start_s: float = 600
) -> float:
    known = PrefillRate()
    known.per_s = rate
    return wedged_at(works, last, known, wedged_s=wedged_s, start_s_max=start_s)


def test_nothing_runs_nothing_hangs() -> None:
    assert at() == inf
    assert at(Work(0, 0), wedged_s=0) == inf


def test_silence_counts_from_the_last_sign_of_life() -> None:
    assert at(Work(0, 0), last=100) == 190
    assert at(Work(0, 0), Work(50, 0), last=100) == 190


def test_silence_before_anything_was_sent_counts_for_nothing() -> None:
    assert at(Work(1000, 0), last=3) == 1090


def test_a_prompt_that_is_read_has_the_time_that_it_takes() -> None:
    assert at(Work(0, 100_000), last=-inf, rate=1000) == 90 + SAFETY * 100
    assert at(Work(0, 0), Work(10, 50_000), Work(20, 50_000), last=20, rate=1000) == 20 + 90 + SAFETY * 100


def test_no_longer_than_a_first_event_may_take_at_all() -> None:
    assert at(Work(0, 1_000_000), rate=1) == 690
    assert at(Work(0, 1_000_000), rate=1, start_s=0) == 90 + SAFETY * 1_000_000


def test_where_nothing_is_known_of_a_start_only_the_time_out_ends_it() -> None:
    assert at(Work(0, None), rate=1000) == 690
    assert at(Work(0, None), rate=1000, start_s=0) == inf


def test_the_rate_is_believed_slow_at_once_and_fast_slowly() -> None:
    rate = PrefillRate()
    rate.learn(TOKENS_MIN - 1, 10)
    assert rate.per_s is None and rate.budget_s(20) == SAFETY * 20 / SLOWEST_PER_S
    rate.learn(1000, 1)
    rate.learn(1000, 10)
    assert rate.per_s == 100
    rate.learn(1000, 1)
    assert 100 < (rate.per_s or 0) < 500


@given(st.lists(st.builds(Work, st.floats(0, 1e4), st.none() | st.integers(0, 10**6)), min_size=1), st.floats(0, 1e4),
       st.none() | st.floats(0.1, 1e5))
def test_never_sooner_than_wedged_s_after_progress_and_more_work_never_hastens_it(
    works: list[Work], last: float, rate: float | None
) -> None:
    due = at(*works, last=last, rate=rate)
    assert due >= last + 90
    assert at(*works, Work(1e5, 500), last=last, rate=rate) >= due, "one that came later"
