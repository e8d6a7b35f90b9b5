"""The breaker: what opens it, the one trial, the pauses."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from kvstream.core.backoff import FIRST_S, LONGEST_S, pause_s
from kvstream.core.breaker import Breaker, Circuit
from kvstream.core.types import RequestId

A, B, C = RequestId(1), RequestId(2), RequestId(3)


def opened(pause_s: float = 5.0) -> Breaker:
    breaker = Breaker(2, pause_s, 60.0)
    assert not breaker.fault(A, 0.0, "x")
    assert breaker.fault(B, 0.0, "upstream_error")
    return breaker


def test_faults_in_a_row_open_it() -> None:
    breaker = opened()
    assert breaker.state is Circuit.OPEN and breaker.seats == 0 and breaker.until == 5.0
    assert breaker.why == "upstream_error" and breaker.opened == 1


def test_a_success_between_starts_the_count_anew() -> None:
    breaker = Breaker(2, 5.0, 60.0)
    breaker.fault(A, 0.0, "x")
    breaker.success(B)
    assert not breaker.fault(C, 0.0, "x") and breaker.seats is None


def test_what_decides_nothing_does_not_start_the_count_anew() -> None:
    breaker = Breaker(2, 5.0, 60.0)
    breaker.fault(A, 0.0, "x")
    breaker.undecided(B)
    assert breaker.fault(C, 0.0, "x")


def test_with_0_faults_never() -> None:
    breaker = Breaker(0, 5.0, 60.0)
    assert not any(breaker.fault(A, 0.0, "x") for _ in range(100)) and breaker.seats is None
    assert breaker.trip(0.0, "wedged") and breaker.seats == 0


def test_the_trial_decides_and_only_the_trial() -> None:
    breaker = opened()
    assert not breaker.tick(4.9) and breaker.tick(5.0)
    assert breaker.state is Circuit.HALF_OPEN and breaker.seats == 1 and breaker.until == inf
    breaker.admitted(C)
    assert not breaker.fault(A, 5.0, "late") and not breaker.success(A), "an older request says nothing about now"
    assert breaker.success(C) and breaker.seats is None and breaker.faults == 0


def test_a_failed_trial_opens_for_twice_as_long_up_to_the_bound() -> None:
    breaker, now, pauses = opened(), 5.0, []
    for _ in range(6):
        assert breaker.tick(now)
        breaker.admitted(C)
        assert breaker.fault(C, now, "again")
        pauses.append(breaker.until - now)
        now = breaker.until
    assert pauses == [10, 20, 40, 60, 60, 60]
    breaker.tick(now)
    breaker.admitted(C)
    breaker.success(C)
    breaker.fault(A, now, "x")
    assert breaker.fault(B, now, "x") and breaker.until - now == 5, "a success forgets the long pauses"


def test_a_trial_that_was_cancelled_makes_room_for_another() -> None:
    breaker = opened()
    breaker.tick(5.0)
    breaker.admitted(B)
    breaker.undecided(B)
    assert breaker.state is Circuit.HALF_OPEN and breaker.trial is None
    breaker.admitted(C)
    assert breaker.trial == C and not breaker.fault(B, 6.0, "x") and breaker.success(C)


def test_it_can_be_opened_and_given_its_trial_from_outside() -> None:
    breaker = Breaker(5, 5.0, 60.0)
    assert breaker.trip(1.0, "wedged") and not breaker.trip(2.0, "wedged") and breaker.until == 6.0
    assert breaker.allow_trial() and not breaker.allow_trial()
    assert breaker.trip(3.0, "wedged") and breaker.until == 13.0


@given(st.lists(st.tuples(st.sampled_from(["fault", "success", "undecided", "admitted", "tick", "trip", "trial"]),
                          st.integers(1, 4), st.floats(0, 20))), st.integers(0, 3))
def test_any_history(moves: list[tuple[str, int, float]], faults_max: int) -> None:
    breaker, now = Breaker(faults_max, 5.0, 60.0), 0.0
    for name, number, later in moves:
        rid, now, before = RequestId(number), now + later, breaker.state
        changed = {
            "fault": lambda r=rid, n=now: breaker.fault(r, n, "x"), "success": lambda r=rid: breaker.success(r),
            "undecided": lambda r=rid: breaker.undecided(r), "admitted": lambda r=rid: breaker.admitted(r),
            "tick": lambda n=now: breaker.tick(n), "trip": lambda n=now: breaker.trip(n, "w"),
            "trial": breaker.allow_trial}[name]()
        if name != "trip" or before is not Circuit.HALF_OPEN:
            assert bool(changed) == (breaker.state is not before)
        assert (breaker.until < inf) == (breaker.state is Circuit.OPEN)
        assert breaker.trial is None or breaker.state is Circuit.HALF_OPEN
        assert breaker.seats == {"closed": None, "open": 0, "half_open": 1}[breaker.state.value]
        if before is Circuit.OPEN and breaker.state is not Circuit.OPEN:
            assert breaker.state is Circuit.HALF_OPEN, "never from open to closed without a trial"


@given(st.integers(0, 1000), st.floats(0, 1, exclude_max=True), st.none() | st.floats(0, 100))
def test_pauses_grow_are_random_and_are_never_shorter_than_asked(
    attempt: int, chance: float, asked: float | None
) -> None:
    pause = pause_s(attempt, chance, retry_after_s=asked)
    assert (asked or 0) <= pause <= (asked or 0) + min(LONGEST_S, FIRST_S * 2.0 ** min(attempt, 30))
    assert pause_s(attempt, 0.0) == 0.0 and pause_s(attempt + 1, 0.5) >= pause_s(attempt, 0.5)
