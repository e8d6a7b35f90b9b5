"""Playbooks of preemption (case 40): who gives way to whom and when, where it waits, and that it always comes back."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from kvstream.core import messages as m
from kvstream.core.types import EndReason, PoolMode, RequestId, SlotRules
from tests.play import PAGE, Play, ended, idle, limits, produced, submit

RULES = SlotRules(slots=1, identity="ab", token_bytes=10.0)
FILE = "sabx1.kv"


def low(rid: int, tokens: int = 32, most: int | None = 64, **more: Any) -> m.Submitted:
    return submit(rid, tokens, most, **{
        "priority": "low", "preemptible": True, "pinnable": True, "exact": True, **more})


def high(rid: int, tokens: int = 32, **more: Any) -> m.Submitted:
    return submit(rid, tokens, priority="high", pinnable=True, exact=True, **more)


def gave_way(rid: int, tokens: int = 0, *, draining: bool = True) -> m.Ended:
    return m.Ended(RequestId(rid), EndReason.PREEMPTED, tokens, draining=draining)


def saved(rid: int, slot: int = 0, *, ok: bool = True) -> m.SlotSaved:
    return m.SlotSaved(slot, f"sabx{rid}.kv", ok, tokens=640 if ok else 0, bytes=6400, seconds=0.01, rid=RequestId(rid))


def restored(rid: int, *, ok: bool = True) -> m.Restored:
    return m.Restored(RequestId(rid), f"sabx{rid}.kv", ok, 6400, 0.01)


def lane(*, seats: int = 1, rules: SlotRules | None = RULES, host_pages: int = 64, **settings: Any) -> Play:
    """A lane whose slots are known, and may be saved if there are host pages."""
    play = Play(backend=limits(seats=seats, pages=64 * seats, mode=PoolMode.SPLIT, request_tokens_max=64 * PAGE,
                               host_pages=host_pages), **settings)
    play.step(m.SlotsKnown(evolve(rules, slots=seats) if rules is not None else None))
    return play


def test_case_40_a_high_one_takes_the_place_of_a_low_one_which_then_goes_on() -> None:
    play = lane()
    play.step(low(1), expect=["admit 1"])
    play.step(produced(1, 9))
    play.at(1).step(high(2), expect=["preempt 1 swap"])
    assert play.why == {2: "seat"}
    play.at(2).step(gave_way(1, 10))
    play.at(3).step(idle(1), expect=["save 0 why=swap pages=2 rid=1"])
    assert play.running == [1] and play.see().draining == 1  # its seat is nobody's until the file is there
    play.at(4).step(saved(1), expect=["admit 2"])
    assert play.waiting == [1] and play.why == {1: "seat"}  # its evictor was admitted: it waits for a seat like others
    play.at(5).step(ended(2), expect=["admit 1 resumes pages=3 reserved=3"])
    assert play.see().running[0].tokens == 42  # prompt and what was answered
    play.step(produced(1, 3))
    play.step(ended(1), expect=["forget sabx1.kv"])
    counters = play.see().counters
    assert (counters.admitted, counters.preempted, counters.resumed, counters.ended) == (2, 1, 1, 2)


def test_the_victim_waits_for_its_evictor_first_of_all() -> None:
    """The evictor still waits when its victim is out; the victim must not take the place back."""
    play = lane(seats=2)
    play.step(low(1), low(2), expect=["admit 1", "admit 2"])
    play.step(produced(1), produced(2, 40))
    play.at(1).step(high(3), expect=["preempt 1 swap"])  # fewer tokens, though it came first
    play.step(gave_way(1, 1))
    play.step(m.Narrowed(0), idle(1), expect=["save 0 why=swap rid=1"])
    play.step(saved(1))
    assert play.why == {1: "preempted", 3: "narrowed"}
    play.step(m.Narrowed(None), expect=["admit 3"])
    assert play.why == {1: "seat"} and play.see().counters.held == {"preempted": 1}


@pytest.mark.parametrize("how", ["leaves", "expires"])
def test_an_evictor_that_leaves_opens_the_gate(how: str) -> None:
    play = lane()
    play.step(low(1), produced(1), expect=["admit 1"])
    play.at(1).step(high(2, deadline=10), expect=["preempt 1"])
    play.step(m.Narrowed(0), gave_way(1, 1), idle(1), expect=["save 0 why=swap rid=1"])
    play.step(saved(1))
    assert play.why[1] == "preempted"
    if how == "leaves":
        play.step(ended(2, EndReason.CANCELLED))
    else:
        play.at(10).step(expect=["refuse 2 timeout"])
    assert play.why == {1: "narrowed"}
    play.step(m.Narrowed(None), expect=["admit 1 resumes slot=0 promised=32", "forget sabx1.kv"])  # it is still there


@pytest.mark.parametrize(("settings", "rules", "said"), [
    ({"preemption": "recompute"}, RULES, "preempt 1 recompute"),
    ({}, SlotRules(4, pinned=False), "preempt 1 recompute"),
    ({"preemption": "off"}, RULES, ""), ({"preemptions_max": 0}, RULES, ""), ({}, None, ""),
])
def test_what_the_policy_and_the_mode_allow(settings: dict[str, Any], rules: SlotRules | None, said: str) -> None:
    play = lane(rules=rules, **settings)
    play.step(low(1), produced(1), expect=["admit 1"])
    play.step(high(2), expect=[said] if said else [])
    if said:
        play.step(gave_way(1, 1), idle(1), expect=["admit 2"])  # nothing is saved
        assert play.waiting == [1]


def test_only_those_who_can_go_on_and_are_of_a_lower_class_give_way() -> None:
    play = lane(seats=3)
    play.step(submit(1, 32, 64, priority="low"), submit(2, 32, 64, preemptible=True, priority="high"),
              submit(3, 32, 64, preemptible=True), expect=["admit 2", "admit 3", "admit 1"])
    play.step(high(4), expect=["preempt 3"])
    play.step(m.Bound(RequestId(3)))  # tool calls: it cannot
    assert play.running == [2, 3, 1]
    play.step(high(5))
    play.step(ended(3), expect=["admit 4"])


def test_a_class_that_was_reached_by_waiting_evicts_nobody() -> None:
    play = lane(ageing_s=10.0)
    play.step(low(1), produced(1), expect=["admit 1"])
    play.step(submit(2, 32, priority="low"))
    play.at(100).step(produced(1))  # it stands among the high ones by now
    assert play.waiting == [2]


def test_the_lowest_class_first_then_the_fewest_tokens_then_the_last() -> None:
    play = lane(seats=4)
    play.step(submit(1, 16, 64, preemptible=True), low(2, 48), low(3), expect=None)
    play.at(1).step(low(4), expect=["admit 4"])
    play.step(high(5), expect=["preempt 4"])


def test_a_seat_that_is_about_to_be_free_is_waited_for() -> None:
    play = lane(seats=2)
    play.step(low(1), low(2), produced(1), produced(2), expect=["admit 1", "admit 2"])
    play.step(ended(2, EndReason.CANCELLED, draining=True))
    play.step(high(3))
    play.step(idle(2), expect=["admit 3"])


def test_one_that_is_nearly_done_is_left_alone() -> None:
    play = lane()
    play.step(low(1, most=10), expect=["admit 1"])
    play.step(produced(1, 6))
    play.step(high(2))
    play.step(ended(1), expect=["admit 2"])


def test_a_victim_that_ends_by_itself_is_over() -> None:
    play = lane()
    play.step(low(1), produced(1), expect=["admit 1"])
    play.step(high(2), expect=["preempt 1"])
    play.step(ended(1), expect=["admit 2"])
    assert not play.waiting and play.see().counters.preempted == 0


@pytest.mark.parametrize("stage", ["stopping", "draining", "saving", "waiting", "resumed"])
def test_case_40_a_client_that_leaves_holds_nothing(stage: str) -> None:
    play = lane()
    leave = ended(1, EndReason.CANCELLED, draining=stage in ("stopping", "resumed"))
    play.step(low(1), produced(1), expect=["admit 1"])
    play.step(high(2), expect=["preempt 1"])
    if stage == "stopping":
        play.step(leave)
        play.step(idle(1), expect=["admit 2"])
    elif stage == "draining":
        play.step(gave_way(1, 1))
        play.step(leave)
        assert play.running == [1]  # the runtime may still be at work
        play.step(idle(1), expect=["admit 2"])
    elif stage == "saving":
        play.step(gave_way(1, 1), idle(1), expect=["save 0 why=swap rid=1"])
        play.step(leave)
        assert play.running == [1]
        play.step(saved(1), expect=["forget sabx1.kv", "admit 2"])
    else:
        play.step(gave_way(1, 1), idle(1), expect=["save 0 why=swap rid=1"])
        play.step(saved(1), expect=["admit 2"])
        if stage == "resumed":
            play.step(ended(2), expect=["admit 1 resumes restore"])
            play.step(leave)
            play.step(idle(1), expect=["forget sabx1.kv"])
        else:
            play.step(leave, expect=["forget sabx1.kv"])
            play.step(ended(2))
    if stage not in ("waiting", "resumed"):
        play.step(ended(2))
    assert not play.waiting and not play.running and play.free + play.cached == 64


@pytest.mark.parametrize("how", ["not saved", "capped", "no token"])
def test_case_40_without_a_file_it_goes_on_all_the_same(how: str) -> None:
    play = lane()
    play.step(low(1), *([] if how == "no token" else [produced(1)]), expect=["admit 1"])
    play.step(high(2), expect=["preempt 1"])
    play.step(gave_way(1, 0 if how == "no token" else 1))
    if how == "not saved":
        play.step(idle(1), expect=["save 0 why=swap rid=1"])
        play.step(saved(1, ok=False), expect=["admit 2"])
    else:
        play.step(m.SeatIdle(RequestId(1), capped=how == "capped"), expect=["admit 2"])
    play.step(ended(2), expect=["admit 1 resumes"])


def test_case_40_ping_pong_is_bounded_and_never_twice_in_a_row_by_the_same() -> None:
    play = lane()
    play.step(low(1, most=None), expect=["admit 1"])
    for rid in (2, 3, 4):
        play.step(produced(1, 2))
        play.at(play.now + 1).step(high(rid), expect=["preempt 1"])
        play.step(gave_way(1, 2), idle(1), expect=["save 0 why=swap rid=1"])
        play.step(saved(1), expect=[f"admit {rid}"])
        play.step(ended(rid), expect=["admit 1 resumes restore"])
        play.step(restored(1), expect=["forget sabx1.kv"])
    play.step(produced(1, 2), high(5))  # three times is enough
    assert play.running == [1] and play.see().running[0].tokens == 32 + 8


def test_an_evictor_that_was_parked_itself_does_not_evict_the_same_one_again() -> None:
    play = lane()
    play.step(low(1), produced(1), expect=["admit 1"])
    play.step(low(2, priority="normal"), expect=["preempt 1"])
    play.step(gave_way(1, 1), idle(1), expect=["save 0 why=swap rid=1"])
    play.step(saved(1), expect=["admit 2"])
    play.step(produced(2), gave_way(2, 1, draining=False), expect=["admit 2 resumes"])  # by the shell: no eviction
    play.step(ended(2), expect=["admit 1 resumes restore"])


def test_an_evictor_that_waits_again_beside_its_victim_leaves_it_alone() -> None:
    play = lane(seats=2)
    play.step(low(1), high(9), expect=["admit 9", "admit 1"])
    play.step(produced(1), low(2, priority="normal"), expect=["preempt 1"])
    play.step(gave_way(1, 1), idle(1), expect=["save 1 why=swap rid=1"])
    play.step(saved(1, 1), expect=["admit 2"])
    play.step(produced(2), ended(9), expect=["admit 1 resumes"])
    play.step(restored(1), produced(1), expect=["forget sabx1.kv"])
    play.step(high(3), gave_way(2, 1, draining=False), expect=["admit 3"])
    assert play.why == {2: "seat"}
    play.step(ended(3), expect=["admit 2 resumes"])


def test_while_one_is_being_stopped_nobody_else_is() -> None:
    play = lane(seats=2)
    play.step(low(1), low(2), expect=["admit 1", "admit 2"])
    play.step(produced(1), produced(2), high(3), expect=["preempt 2"])
    play.step(high(4))
    play.step(gave_way(2, 1), idle(2), expect=["save 1 why=swap rid=2"])
    play.step(saved(2, 1), expect=["admit 3", "preempt 1"])


def test_two_victims_for_one_that_needs_the_pages_of_both() -> None:
    play = Play(seats=4, pages=16)
    play.step(m.SlotsKnown(SlotRules(4)))
    play.step(low(1, 48, 48), low(2, 48, 48), produced(1), produced(2), expect=["admit 1", "admit 2"])
    play.step(high(3, 160), expect=["preempt 2 recompute"])
    play.step(gave_way(2, 1), idle(2), expect=["preempt 1 recompute"])
    assert play.why == {2: "preempted", 3: "pages"}
    play.step(gave_way(1, 1), idle(1), expect=["admit 3"])
    play.step(ended(3), expect=["admit 1 resumes", "admit 2 resumes"])


def test_nobody_gives_way_where_that_would_not_be_enough() -> None:
    play = Play(seats=4, pages=16)
    play.step(m.SlotsKnown(SlotRules(4)))
    play.step(low(1, 48, 48), submit(2, 80, 16), produced(1), produced(2), expect=["admit 2", "admit 1"])
    play.step(high(3, 200))
    play.step(high(4, 16, seats=2))


def test_a_head_that_a_gate_holds_gets_nobody_out() -> None:
    play = lane(seats=2, client_seats_max=1)
    play.step(low(1, client="a"), submit(2, 32, 64, client="b"), expect=["admit 2", "admit 1"])
    play.step(high(3, client="b"))
    play.step(high(4, client="c"), expect=["preempt 1"])


def test_it_comes_before_newcomers_of_its_class_and_its_turn_is_not_counted_twice() -> None:
    play = lane()
    play.step(low(1, client="a"), produced(1), expect=["admit 1"])
    play.at(1).step(high(2), expect=["preempt 1"])
    play.step(gave_way(1, 1), idle(1), expect=["save 0 why=swap rid=1"])
    play.step(saved(1), expect=["admit 2"])
    play.at(2).step(low(3, client="b"), low(4, client="c"))
    assert play.waiting == [1, 3, 4]
    play.step(ended(2), expect=["admit 1 resumes"])


def test_no_deadline_of_the_queue_kills_a_started_stream_but_the_bound_of_the_answer_does() -> None:
    play = lane(wait_s_max=5.0, prefix_enabled=False)
    play.step(low(1, deadline=5), produced(1), expect=["admit 1"])
    play.at(1).step(high(2), expect=["preempt 1"])
    play.step(gave_way(1, 1), idle(1), expect=["save 0 why=swap rid=1"])
    play.step(saved(1), expect=["admit 2"])
    assert play.scheduler.next_deadline() is None
    play.at(1000).step()
    assert play.waiting == [1]
    bounded = lane(answer_s_max=60.0, prefix_enabled=False)
    bounded.at(1).step(low(1), produced(1), expect=["admit 1"])
    bounded.at(2).step(high(2), expect=["preempt 1"])
    bounded.step(gave_way(1, 1), idle(1), expect=["save 0 why=swap rid=1"])
    bounded.step(saved(1), expect=["admit 2"])
    assert bounded.scheduler.next_deadline() == 61
    bounded.at(61).step(expect=["forget sabx1.kv", "refuse 1 timeout"])


def test_a_drain_finishes_what_has_begun() -> None:
    play = lane()
    play.step(low(1), produced(1), expect=["admit 1"])
    play.step(high(2), expect=["preempt 1"])
    play.step(gave_way(1, 1), idle(1), expect=["save 0 why=swap rid=1"])
    play.step(saved(1), low(3), expect=["admit 2"])
    play.step(m.Closing(), expect=["refuse 3 closing"])
    play.step(ended(2), expect=["admit 1 resumes restore"])


def test_a_backend_that_is_gone_for_good_ends_it_and_one_that_returns_goes_on() -> None:
    for refuse in (False, True):
        play = lane()
        play.step(low(1), produced(1), expect=["admit 1"])
        play.step(high(2), expect=["preempt 1"])
        play.step(gave_way(1, 1), idle(1), expect=["save 0 why=swap rid=1"])
        play.step(saved(1), expect=["admit 2"])
        play.step(ended(2, EndReason.FAILED), m.BackendDown(refuse),
                  expect=["forget sabx1.kv", "refuse 1 backend_down"] if refuse else [])
        if not refuse:
            play.step(m.BackendUp(play.backend, fresh=True), expect=["admit 1 resumes restore"])


def test_a_new_count_of_the_prompt_does_not_forget_the_answer() -> None:
    play = lane()
    play.step(low(1), produced(1, 9), expect=["admit 1"])
    play.step(high(2), expect=["preempt 1"])
    play.step(gave_way(1, 9), idle(1), expect=["save 0 why=swap rid=1"])
    play.step(saved(1), expect=["admit 2"])
    play.step(m.Recounted(RequestId(1), (), 32))
    assert play.see().waiting[0].tokens == 41


def test_the_shell_parks_one_by_itself_when_what_it_relied_on_is_gone() -> None:
    play = lane()
    play.step(low(1), produced(1, 9), expect=["admit 1"])
    play.step(gave_way(1, 9, draining=False), expect=["admit 1 resumes"])
    assert play.see().counters.preempted == 0 and play.see().running[0].tokens == 41
