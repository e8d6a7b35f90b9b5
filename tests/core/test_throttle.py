"""Playbooks of a lane that is held narrow, and of one that ramps up after an outage."""

from __future__ import annotations

from kvstream.core import messages as m
from kvstream.core.types import EndReason
from tests.play import Play, ended, produced, submit

FAILED = EndReason.FAILED


def test_narrowed_to_none_then_to_one_then_lifted() -> None:
    play = Play(seats=4)
    play.step(submit(0, 16), expect=["admit 0"])
    play.step(m.Narrowed(0), *(submit(i, 16) for i in range(1, 6)))
    assert set(play.why.values()) == {"narrowed"} and play.see().limit == 0
    play.step(m.Narrowed(1), expect=["admit 1"])  # what ran before is not counted
    play.step(produced(1), ended(0))
    play.step(ended(1, FAILED), expect=["admit 2"])
    play.step(m.Narrowed(None), expect=["admit 3", "admit 4", "admit 5"])
    assert play.see().limit is None


def test_narrowing_again_counts_anew() -> None:
    play = Play(seats=4)
    play.step(m.Narrowed(2), *(submit(i, 16) for i in range(5)), expect=["admit 0", "admit 1"])
    play.step(m.Narrowed(1), expect=["admit 2"])
    play.step(ended(0), ended(1))
    play.step(ended(2), expect=["admit 3"])


def test_narrowed_waiting_ends_at_the_deadline() -> None:
    play = Play(seats=4)
    play.step(m.Narrowed(0), submit(1, 16, deadline=5))
    play.at(5).step(expect=["refuse 1 timeout"])


def test_backfill_stays_within_it_too() -> None:
    play = Play(pages=20, seats=8)
    play.step(submit(0, 160, 16), expect=["admit 0"])
    play.step(m.Narrowed(1), submit(1, 160, 16), submit(2, 16, 16), submit(3, 16, 16), expect=["admit 2"])


def test_after_an_outage_every_sign_of_life_doubles_how_many_run() -> None:
    play = Play(seats=8)
    play.step(m.BackendDown(), *(submit(i, 16) for i in range(20)))
    play.step(m.BackendUp(play.backend, ramp=True), expect=["admit 0"])
    assert set(play.why.values()) == {"narrowed"}
    play.step(produced(0), expect=["admit 1"])
    play.step(produced(0), produced(0))  # only its first token is news
    play.step(ended(0), expect=["admit 2"])  # and so is its end
    play.step(ended(1), expect=["admit 3", "admit 4", "admit 5"])  # without a token, but complete: 4
    play.step(produced(3), expect=["admit 6", "admit 7", "admit 8", "admit 9"])
    assert play.see().limit is None
    play.step(ended(2), expect=["admit 10"])


def test_failures_do_not_widen_the_ramp() -> None:
    play = Play(seats=8)
    play.step(m.BackendDown(), *(submit(i, 16) for i in range(20)))
    play.step(m.BackendUp(play.backend, ramp=True), expect=["admit 0"])
    for i in range(5):
        play.step(ended(i, FAILED), expect=[f"admit {i + 1}"])


def test_requests_from_before_the_outage_prove_nothing_and_are_not_in_the_way() -> None:
    play = Play(seats=8)
    play.step(submit(0, 16), expect=["admit 0"])
    play.step(m.BackendDown(), submit(1, 16), submit(2, 16))
    play.step(m.BackendUp(play.backend, ramp=True), expect=["admit 1"])
    play.step(produced(0), ended(0))
    play.step(produced(1), expect=["admit 2"])


def test_a_ramp_of_one_seat_is_over_at_once() -> None:
    play = Play(seats=1)
    play.step(m.BackendUp(play.backend, ramp=True), submit(0, 16), submit(1, 16), expect=["admit 0"])
    play.step(produced(0))
    assert play.see().limit is None and play.why == {1: "seat"}
