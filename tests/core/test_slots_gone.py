"""Playbooks of what nobody saw: a slot whose request left early, what is told of before a restart or of another model,
a leader that drains. Each was found by ``test_inject_machine``, or in making it."""

from __future__ import annotations

import pytest
from attrs import evolve

from kvstream.core import messages as m
from kvstream.core.types import EndReason, RequestId
from tests.core.test_fork import lane, read, restored, saved, spec_of, stored
from tests.core.test_preempt import gave_way, high, low
from tests.core.test_slots import ask, plans, rules, served, split
from tests.play import Play, ended, idle, keys_of, limits, produced

FILE = "x" * 20 + "y" * 20


def with_file(slots: int = 1) -> Play:
    play = lane(slots)
    play.step(m.StoreLoaded((stored(play, "f.kv", FILE, 640),)))
    return play


def restore_and_leave(play: Play, tokens: int, prompt: str) -> None:
    """A request is restored for, sent, and gone before anybody saw that a slot has it."""
    name = plans(play.step(ask(1, tokens, prompt=prompt), expect=["admit 1 slot=0 restore"]))[1].restore  # type: ignore[union-attr]
    play.step(restored(1, name))
    play.step(ended(1, EndReason.CANCELLED, draining=True))
    play.step(idle(1))


def test_what_was_restored_for_a_request_that_left_may_be_cut_already() -> None:
    play = with_file()
    restore_and_leave(play, 480, "x" * 20 + "z" * 20)
    assert play.see().slots[0].tokens == 320
    play.step(ask(2, 656, prompt=FILE), expect=["admit 2 slot=0 restore promised=640"])


def test_the_last_token_of_its_prompt_is_certainly_not_there() -> None:
    play = with_file()
    restore_and_leave(play, 640, FILE)
    assert play.see().slots[0].tokens == 624


def test_a_save_told_after_a_restart_says_nothing_of_the_new_slots() -> None:
    play = lane()
    served(play, 1, 640, "a")
    served(play, 2, 672, "a")
    play.at(9)
    spec = spec_of(play.step(expect=["save 0 why=hot pages=42"]))
    play.step(m.BackendUp(split(host_pages=4096), fresh=True))
    play.step(evolve(saved(spec, 0, tokens=688), keys=keys_of("a", 688)))
    assert [view.tokens for view in play.see().slots] == [0] * 4
    play.step(ask(3, 704, prompt="a"), expect=["admit 3 restore promised=688"])


def test_cells_that_an_answer_took_from_idle_slots_are_not_promised() -> None:
    """A runtime with one pool empties idle slots for those at work, and does not say so."""
    play = Play(backend=limits(seats=2, pages=20))
    play.step(m.SlotsKnown(rules(2)))
    served(play, 1, 160, "a")
    play.step(ask(2, 120, 60, prompt="b"), expect=["admit 2 slot=1"])
    play.step(m.SlotStarted(RequestId(2)), produced(2, 40))
    play.step(produced(2, 15), ended(2))
    assert play.scheduler.wants_look
    play.step(ask(3, 176, prompt="a"), expect=["admit 3 slot=0 promised=0 erase=1"])
    play.step(ended(3, EndReason.CANCELLED), m.SlotsLook((160, 0), frozenset()))
    play.step(ask(4, 176, prompt="a"), expect=["admit 4 slot=0 promised=160"])


def test_nobody_waits_for_a_leader_that_drains() -> None:
    play = lane()
    play.step(ask(1, 640, prompt="s" * 39 + "a"), expect=["admit 1 slot=0 read_first"])
    play.at(0.5).step(ended(1, EndReason.CANCELLED, draining=True))
    play.step(ask(2, 640, prompt="s" * 39 + "b"), expect=["admit 2 slot=1 read_first"])


def test_a_prompt_that_was_read_when_its_leader_had_left_is_not_waited_for() -> None:
    play = lane()
    play.step(ask(1, 640, prompt="s" * 39 + "a"), expect=["admit 1 slot=0 read_first"])
    play.at(0.5).step(ended(1, EndReason.CANCELLED, draining=True), read(1, 640))
    play.step(ask(2, 640, prompt="s" * 39 + "b"), expect=["admit 2 slot=1 read_first"])


def test_one_that_gave_way_goes_on_in_its_slot_with_more_than_its_prompt() -> None:
    """Its answer has no page keys, so what is in its slot is longer than they are."""
    play = lane(1, preemption="recompute")
    play.step(low(1, 640, None), expect=["admit 1 slot=0"])
    play.step(m.SlotStarted(RequestId(1)), m.Produced(RequestId(1), 40))
    play.step(high(2), expect=["preempt 1 recompute"])
    play.step(ended(2, EndReason.CANCELLED), gave_way(1, 40))
    play.step(idle(1), expect=["admit 1 slot=0 resumes promised=672"])


OTHER_MODEL = m.SlotsKnown(evolve(rules(1), identity="other"))
RESTART = m.BackendUp(split(1, host_pages=4096), fresh=True)


def give_way(play: Play, policy: str) -> None:
    play.step(low(1, 640, None), expect=["admit 1 slot=0"])
    play.step(m.SlotStarted(RequestId(1)), m.Produced(RequestId(1), 40))
    play.step(high(2), expect=[f"preempt 1 {policy}"])
    play.step(gave_way(1, 40))


@pytest.mark.parametrize("event", [OTHER_MODEL, RESTART])
def test_the_state_of_one_that_gave_way_before_is_not_saved(event: m.Event) -> None:
    """It would be another model's, under the present one's name."""
    play = lane(1)
    give_way(play, "swap")
    play.step(event)
    play.step(idle(1), expect=["admit 2 slot=0"])
    play.step(ended(2), expect=["admit 1 resumes promised=0"])


@pytest.mark.parametrize("event", [OTHER_MODEL, RESTART])
def test_a_prompt_that_was_read_before_is_not_in_a_slot_now(event: m.Event) -> None:
    play = lane(1)
    play.step(ask(1, 640, prompt="s" * 39 + "a"), expect=["admit 1 slot=0 read_first"])
    play.step(ask(2, 640, prompt="s" * 39 + "b"))
    play.step(event)
    play.step(read(1, 640), expect=["proceed 1 nothing-saved"])
    assert play.see().slots[0].tokens == 0


def test_nor_is_it_another_models_file_where_nothing_is_pinned() -> None:
    play = lane(1)
    play.step(m.SlotsKnown(rules(1, pinned=False)))
    play.step(ask(1, 640, prompt="s" * 39 + "a"), expect=["admit 1 slot=any read_first"])
    play.step(ask(2, 640, prompt="s" * 39 + "b"))
    play.step(m.SlotsKnown(rules(1, pinned=False, identity="other")))
    play.step(read(1, 640), expect=["proceed 1 nothing-saved"])


@pytest.mark.parametrize("event", [m.SlotsLost(), OTHER_MODEL, RESTART])
def test_what_was_left_in_a_slot_and_lost_is_not_taken_for_what_is_as_long(event: m.Event) -> None:
    play = lane(1, preemption="recompute")
    give_way(play, "recompute")
    play.step(ended(2, EndReason.CANCELLED), m.Narrowed(0), idle(1))
    play.step(event, m.SlotsLook((679,), frozenset()))
    play.step(m.Narrowed(None), expect=["admit 1 slot=0 resumes promised=0"])


def test_pages_that_a_request_began_on_and_lost_are_forgotten_with_it() -> None:
    play = lane(2)
    served(play, 1, 160, "a")
    play.step(ask(2, 320, prompt="a"), expect=["admit 2 slot=0 promised=160"])
    play.step(m.SlotsLost())
    assert play.see().prefix_nodes == 10
    play.step(ended(2, EndReason.CANCELLED))
    assert play.see().prefix_nodes == 0


def test_a_float_that_nobody_saw_end_may_be_anywhere_until_somebody_looks() -> None:
    play = lane(2)
    play.step(ask(1, 64, pinnable=False), expect=["admit 1 slot=any"])
    play.step(m.SlotStarted(RequestId(1)), ended(1, EndReason.CANCELLED, draining=True))
    play.step(m.SeatIdle(RequestId(1), capped=True))
    play.step(ask(2, 64), expect=["admit 2 slot=any"])
    play.step(m.SlotStarted(RequestId(2)), ended(2))
    assert play.scheduler.wants_look
    play.step(m.SlotsLook((64, 0), frozenset({0})))
    play.step(ask(3, 64), expect=["admit 3 slot=1"])


def test_a_look_before_a_float_has_its_slot_does_not_say_where_it_is() -> None:
    play = lane(2)
    play.step(ask(1, 64, pinnable=False), expect=["admit 1 slot=any"])
    play.step(m.SlotsLook((64, 0), frozenset({0})))  # somebody else's
    play.step(ask(2, 64), expect=["admit 2 slot=any"])
