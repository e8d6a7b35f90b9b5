"""Playbooks of groups: one pioneer per cold group, one group at a time."""

from __future__ import annotations

from itertools import pairwise

from kvstream.core import messages as m
from kvstream.core.types import EndReason
from tests.play import Play, ended, idle, produced, submit

CANCELLED, FAILED = EndReason.CANCELLED, EndReason.FAILED


# --- cold groups (case 33) --------------------------------------------------------------------------------------------


def test_case_33_of_a_cold_group_one_goes_first() -> None:
    play = Play(seats=8, cold_groups=True)
    play.step(*(submit(i, 16, group="a") for i in range(4)), submit(9, 16, group="b"), expect=["admit 0", "admit 9"])
    assert play.why == {1: "cold", 2: "cold", 3: "cold"}
    play.step(produced(9))
    play.step(produced(0), expect=["admit 1", "admit 2", "admit 3"])
    play.step(submit(4, 16, group="a"), expect=["admit 4"])


def test_if_the_pioneer_fails_the_next_is_the_one() -> None:
    play = Play(seats=8, cold_groups=True)
    play.step(*(submit(i, 16, group="a") for i in range(4)), expect=["admit 0"])
    play.step(ended(0, FAILED), expect=["admit 1"])
    play.step(ended(1, CANCELLED, draining=True), expect=["admit 2"])
    play.step(idle(1), produced(2), expect=["admit 3"])


def test_a_group_gets_cold_again() -> None:
    play = Play(seats=8, cold_groups=True, cold_after_s=100)
    play.step(submit(1, 16, group="a"), expect=["admit 1"])
    play.at(10).step(produced(1))
    play.at(500).step(submit(2, 16, group="a"), expect=["admit 2"])  # it runs, so it is loaded
    play.step(ended(1), ended(2))
    play.at(599).step(submit(3, 16, group="a"), submit(4, 16, group="a"), expect=["admit 3", "admit 4"])
    play.step(produced(3), ended(3), ended(4))
    play.at(700).step(submit(5, 16, group="a"), submit(6, 16, group="a"), expect=["admit 5"])
    play.step(produced(5), expect=["admit 6"])
    play.step(m.BackendUp(play.backend, fresh=True), submit(7, 16, group="a"), submit(8, 16, group="a"),
              expect=["admit 7"])


def test_the_shell_may_know_that_it_is_loaded() -> None:
    play = Play(seats=8, cold_groups=True)
    play.step(m.Warmed("b"), submit(1, 16, group="b"), submit(2, 16, group="b"), expect=["admit 1", "admit 2"])
    play.step(submit(3, 16, group="a"), submit(4, 16, group="a"), expect=["admit 3"])
    play.step(m.Warmed("a"), expect=["admit 4"])


def test_clients_name_groups_without_end() -> None:
    play = Play(seats=8, cold_groups=True)
    for i in range(1000):
        play.step(submit(i, 16, group=str(i)), expect=[f"admit {i}"])
        play.step(produced(i), ended(i))
    assert len(play.scheduler._admission.gates.groups._warm) <= 256


# --- one group at a time (cases 27, 34, 35) ---------------------------------------------------------------------------


def exclusive(**more: float) -> Play:
    return Play(**{"seats": 4, "exclusive_groups": True, "switch_wait_s": 10, **more})  # type: ignore[arg-type]


def test_case_34_a_second_group_waits_until_the_first_has_drained() -> None:
    play = exclusive()
    play.at(0).step(submit(1, 16, group="a"), expect=["admit 1"])
    play.at(1).step(submit(2, 16, group="b"))
    assert play.why == {2: "model"}
    play.at(2).step(submit(3, 16, group="a"), expect=["admit 3"])
    play.at(5).step(ended(1))
    play.at(7).step(ended(3, CANCELLED, draining=True))
    play.at(8).step(idle(3), expect=["admit 2"])


def test_the_other_group_is_not_passed_for_ever() -> None:
    play = exclusive()
    play.at(0).step(submit(0, 16, group="a"), expect=["admit 0"])
    play.at(1).step(submit(100, 16, group="b"))
    for now in range(2, 11):
        play.at(now).step(ended(now - 2 if now > 2 else 0), submit(now, 16, group="a"), expect=[f"admit {now}"])
    play.at(11).step(submit(11, 16, group="a"))
    assert play.why == {100: "model", 11: "model"}
    play.step(ended(10), ended(9), expect=["admit 100"])
    play.at(12).step(submit(12, 16, group="b"), expect=["admit 12"])  # now b passes a, for as long
    play.at(20.9).step(submit(13, 16, group="b"), expect=["admit 13"])
    play.at(21).step(submit(14, 16, group="b"))
    play.step(ended(100), ended(12), ended(13), expect=["admit 11"])


def test_who_left_is_not_switched_to() -> None:
    play = exclusive()
    play.at(0).step(submit(1, 16, group="a"), submit(2, 16, group="b"), expect=["admit 1"])
    play.at(20).step(submit(3, 16, group="a"))
    assert play.why == {2: "model", 3: "model"}
    play.step(ended(2, CANCELLED), expect=["admit 3"])
    play.step(submit(4, 16, group="a"), expect=["admit 4"])


def test_case_35_alternating_groups_are_sorted() -> None:
    for seats in (1, 2, 4):
        play = exclusive(seats=seats)
        served: list[str] = []
        play.step(*(submit(i, 16, group="ab"[i % 2]) for i in range(20)), expect=None)
        for second in range(1, 40):
            running = play.running
            served += ["ab"[rid % 2] for rid in running]
            play.at(second / 4).step(*(ended(rid) for rid in running), expect=None)
        assert len(served) == 20
        assert sum(a != b for a, b in pairwise(served)) == 1


def test_a_backlog_of_two_groups_does_not_swap_at_every_request() -> None:
    play = exclusive(seats=1)
    play.step(*(submit(i, 16, group="ab"[i % 2]) for i in range(100)), expect=None)
    served: list[str] = []
    for second in range(1, 101):
        (rid,) = play.running
        served.append("ab"[rid % 2])
        play.at(second).step(ended(rid), expect=None)
    assert sum(a != b for a, b in pairwise(served)) <= 10


def test_a_pushed_out_group_is_cold() -> None:
    play = exclusive(cold_groups=True)
    play.step(submit(1, 16, group="a"), submit(2, 16, group="a"), submit(3, 16, group="b"), expect=["admit 1"])
    play.step(produced(1), expect=["admit 2"])
    play.step(ended(1), ended(2), submit(4, 16, group="b"), expect=["admit 3"])
    play.step(produced(3), expect=["admit 4"])
    play.step(ended(3), ended(4), submit(5, 16, group="a"), submit(6, 16, group="a"), expect=["admit 5"])
    assert play.why == {6: "cold"}
