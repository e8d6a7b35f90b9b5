"""Our books against the runtime's: only what differs persistently is told, and not again and again."""

from __future__ import annotations

from kvstream.core.drift import RULES, TOLD_EVERY_S, Cause, DriftWatch


def fed(cause: Cause, ours: float, theirs: float, times: int, every_s: float = 3.0) -> DriftWatch:
    watch = DriftWatch()
    for n in range(times):
        watch.note(cause, ours, theirs, n * every_s)
    return watch


def test_what_agrees_is_not_told() -> None:
    for cause, ours, theirs in ((Cause.SEATS, 4, 4), (Cause.SEATS, 4, 1), (Cause.PREFIX, 100, 60),
                                (Cause.PREFIX, 100, 300), (Cause.COUNT, 1000, 1003), (Cause.ESTIMATE, 100, 140)):
        assert fed(cause, ours, theirs, 100).found == (), cause


def test_what_differs_every_time_is_told_with_both_numbers() -> None:
    for cause, ours, theirs in ((Cause.SEATS, 1, 3), (Cause.PREFIX, 100, 0), (Cause.COUNT, 1000, 1100),
                                (Cause.ESTIMATE, 100, 300)):
        (found,) = fed(cause, ours, theirs, 20).found
        assert found.cause is cause and found.ours == 20 * ours and found.theirs == 20 * theirs and found.pairs == 20


def test_an_odd_one_is_no_drift_and_a_drift_may_end() -> None:
    watch = fed(Cause.COUNT, 1000, 1000, 20)
    for n in range(3):
        watch.note(Cause.COUNT, 1000, 2000, 60.0 + n)
    assert watch.found == ()
    for n in range(32):
        watch.note(Cause.COUNT, 1000, 2000, 100.0 + n)
    assert watch.found[0].since > 100
    for n in range(32):
        watch.note(Cause.COUNT, 1000, 1000, 200.0 + n)
    assert watch.found == ()


def test_a_burst_of_looks_is_one_look() -> None:
    watch = fed(Cause.SEATS, 0, 2, 1000, every_s=0.009)
    assert watch.found == () and RULES[Cause.SEATS].span_s > 9


def test_it_is_said_once_in_ten_minutes_and_per_cause() -> None:
    watch, told = DriftWatch(), []
    for n in range(700):
        watch.note(Cause.SEATS, 0, 2, 2.0 * n)
        watch.note(Cause.COUNT, 1000, 3000, 2.0 * n)
        told += [(drift.cause, 2.0 * n) for drift in watch.untold(2.0 * n)]
    for cause in (Cause.SEATS, Cause.COUNT):
        times = [time for which, time in told if which is cause]
        assert len(times) == 3 and times[1] - times[0] >= TOLD_EVERY_S
