"""Playbooks of hard inject: who gets which slot, when, and what for."""

from __future__ import annotations

from typing import Any

import pytest

from kvstream.core import messages as m
from kvstream.core.slots import LEFT_MAX
from kvstream.core.types import EndReason, Limits, PoolMode, RequestId, SlotPlan, SlotRules
from tests.play import Play, ended, idle, keys_of, limits, produced, submit

IDENTITY = "0123456789abcdef"


def rules(slots: int = 4, **more: Any) -> SlotRules:
    return SlotRules(slots, **{"identity": IDENTITY, "token_bytes": 1000.0, **more})


def split(seats: int = 4, **more: Any) -> Limits:
    return limits(seats=seats, pages=seats * 256, mode=PoolMode.SPLIT, request_tokens_max=4096, **more)


def slotted(slots: int = 4, *, host_pages: int = 0, known: SlotRules | None = None, **settings: Any) -> Play:
    """A lane whose slots are pinned; without host pages nothing is saved."""
    play = Play(backend=split(slots, host_pages=host_pages), **settings)
    play.step(m.SlotsKnown(known or rules(slots)))
    return play


def ask(rid: int, tokens: int, most: int | None = 16, **more: Any) -> m.Submitted:
    return submit(rid, tokens, most, **{"pinnable": True, "exact": True, **more})


def seen(rid: int, cached: int = 0, prompt: int = 1000, seconds: float = 1.0) -> m.CacheSeen:
    return m.CacheSeen(RequestId(rid), cached, prompt, seconds)


def started(*rids: int) -> list[m.Event]:
    return [m.SlotStarted(RequestId(rid)) for rid in rids]


def plans(actions: list[m.Action]) -> dict[int, SlotPlan | None]:
    return {action.rid: action.plan for action in actions if isinstance(action, m.Admit)}


def served(play: Play, rid: int, tokens: int, prompt: str, **more: Any) -> None:
    """A request that came, was answered with one token and left."""
    play.step(ask(rid, tokens, prompt=prompt, **more), expect=None)
    play.step(*started(rid), produced(rid), ended(rid), expect=None)


# --- slots are owned ---


def test_a_pinned_request_owns_its_slot_until_it_ends() -> None:
    play = slotted(2)
    play.step(ask(1, 64), ask(2, 64), ask(3, 64), expect=["admit 1 slot=0", "admit 2 slot=1"])
    play.step(*started(1, 2), produced(1))
    play.step(ended(2), expect=["admit 3 slot=1"])
    assert [view.owner for view in play.see().slots] == [1, 3]


def test_nothing_is_pinned_before_the_slots_are_known_and_after_they_are_not() -> None:
    play = Play(backend=split())
    assert plans(play.step(ask(1, 64), expect=["admit 1"])) == {1: None}
    play.step(m.SlotsKnown(rules()))
    play.step(*started(1), produced(1), ended(1))
    play.step(ask(2, 64), expect=["admit 2 slot=0"])
    play.step(m.SlotsKnown(None), ended(2))
    assert plans(play.step(ask(3, 64), expect=["admit 3"])) == {3: None}
    assert play.see().slots == ()


def test_a_slot_is_not_given_away_while_it_drains() -> None:
    play = slotted(2)
    play.step(ask(1, 64), expect=["admit 1 slot=0"])
    play.step(ended(1, EndReason.CANCELLED, draining=True))
    play.step(ask(2, 64), ask(3, 64), expect=["admit 2 slot=1"])
    play.step(idle(1), expect=["admit 3 slot=0"])


def test_a_slot_that_nobody_saw_idle_is_not_pinned_until_somebody_looks() -> None:
    play = slotted(2)
    play.step(ask(1, 64), expect=["admit 1 slot=0"])
    play.step(ended(1, EndReason.CANCELLED, draining=True))
    play.step(m.SeatIdle(RequestId(1), capped=True))
    play.step(ask(2, 64), expect=["admit 2 slot=1"])
    play.step(ask(3, 64))  # no slot is known to be idle, and the runtime might put it where 2 is going
    assert play.why == {3: "slot"}
    play.step(*started(2), expect=["admit 3 slot=any"])
    play.step(*started(3), ended(3), ended(2))
    assert play.scheduler.wants_look
    play.step(m.SlotsLook((None, 65), frozenset({0})))
    play.step(ask(4, 64), expect=["admit 4 slot=1"])
    play.step(m.SlotsLook((64, 65), frozenset()))
    play.step(ask(5, 64), expect=["admit 5 slot=0"])


# --- what a slot holds is used again ---


def test_a_conversation_returns_to_its_slot() -> None:
    play = slotted()
    for rid, prompt in enumerate("abcd", 1):
        served(play, rid, 160, prompt)
    play.step(ask(5, 320, prompt="c"), expect=["admit 5 slot=2 cached=160 promised=160"])
    play.step(ask(6, 64, prompt="e"), expect=["admit 6 slot=0 cached=0 promised=0"])  # the least recently used goes


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    play = slotted()
    served(play, 1, 160, "a")
    play.step(ask(2, 160, prompt="a"), expect=["admit 2 slot=0 promised=144"])


def test_a_text_estimate_finds_its_slot_but_promises_nothing() -> None:
    play = slotted()
    served(play, 1, 160, "a", exact=False)
    served(play, 2, 160, "b", exact=False)
    play.step(ask(3, 320, prompt="b", exact=False), expect=["admit 3 slot=1 cached=160 promised=0"])


def test_an_empty_slot_goes_before_a_conversation_that_shares_only_the_start() -> None:
    play = slotted(2)
    served(play, 1, 640, "aabbbbbb")
    play.step(seen(1))
    play.step(ask(2, 640, prompt="aacccccc"), expect=["admit 2 slot=1 cached=0"])


def test_an_unread_prompt_leaves_nothing_to_rely_on() -> None:
    play = slotted(1)
    served(play, 1, 320, "a")
    play.step(ask(2, 320, prompt="abbbb"), expect=["admit 2 cached=16 promised=16"])
    play.step(ended(2, EndReason.CANCELLED))
    play.step(ask(3, 320, prompt="abbbb"), expect=["admit 3 cached=16"])


def test_slots_lost_and_a_restart_clear_what_is_known() -> None:
    for event in (m.SlotsLost(), m.BackendUp(split(), fresh=True)):
        play = slotted()
        served(play, 1, 160, "a")
        play.step(event)
        play.step(ask(2, 320, prompt="a"), expect=["admit 2 promised=0 cached=0"])


def test_a_request_from_before_a_restart_leaves_its_slot_empty() -> None:
    play = slotted()
    play.step(ask(1, 160, prompt="a"), expect=None)
    play.step(*started(1), produced(1))
    play.step(m.BackendUp(split(), fresh=True))
    play.step(ended(1, EndReason.FAILED))
    play.step(ask(2, 320, prompt="a"), expect=["admit 2 promised=0 cached=0"])


def test_the_router_and_sjf_ask_the_slots() -> None:
    play = slotted(order="sjf")
    served(play, 1, 160, "a")
    assert play.scheduler.prefix_tokens(keys_of("a", 320), 0.0) == 160
    play.step(m.Narrowed(0))
    play.step(ask(2, 160, prompt="b"), ask(3, 160, prompt="a"))
    play.step(m.Narrowed(1), expect=["admit 3 slot=0"])


# --- floats ---


def test_a_float_waits_until_every_slot_given_away_is_at_work() -> None:
    play = slotted()
    play.step(ask(1, 64), ask(2, 64, pinnable=False), ask(3, 64, seats=2), expect=["admit 1 slot=0"])
    assert play.why == {2: "slot", 3: "slot"}
    play.at(0.5).step(*started(1), ask(4, 64, pinnable=False), ask(5, 64), expect=None)
    assert play.running == [1, 2, 3]


def test_a_float_does_not_wait_for_ever_for_a_quiet_moment() -> None:
    play = slotted(8)
    play.step(ask(1, 64), expect=["admit 1 slot=0"])
    play.step(ask(2, 64, pinnable=False))
    play.at(0.9).step(ask(3, 64), expect=["admit 3 slot=1"])
    play.step(*started(1))
    play.at(1.0).step(ask(4, 64))  # no more, now
    assert play.why == {2: "slot", 4: "slot"}
    play.step(*started(3), expect=["admit 2 slot=any", "admit 4 slot=any"])


def test_a_retry_waits_for_the_slot_that_has_its_prompt() -> None:
    play = slotted()
    play.step(ask(1, 1040, prompt="a"), expect=["admit 1 slot=0"])
    play.step(*started(1), produced(1))
    play.at(3).step(ended(1, EndReason.CANCELLED, draining=True))
    play.step(ask(2, 1040, prompt="a"))
    assert play.why == {2: "retry"}
    play.step(idle(1), expect=["admit 2 slot=0 promised=1024"])


def test_whoever_waits_for_a_slot_goes_on_when_there_are_none_any_more() -> None:
    play = slotted()
    play.step(ask(1, 64), ask(2, 64, pinnable=False), expect=["admit 1"])
    play.step(m.SlotsKnown(None), expect=["admit 2"])


def test_nobody_is_pinned_while_a_float_is_adrift() -> None:
    play = slotted()
    play.step(ask(1, 64, pinnable=False), ask(2, 64), expect=["admit 1 slot=any", "admit 2 slot=any"])
    play.step(ended(1))
    play.step(ask(3, 64), expect=["admit 3 slot=any"])
    play.step(ended(2), ended(3))
    play.step(ask(4, 64), expect=["admit 4 slot=0"])


def test_a_look_tells_where_a_float_is() -> None:
    play = slotted()
    play.step(ask(1, 64, pinnable=False), expect=["admit 1 slot=any"])
    assert not play.scheduler.wants_look
    play.step(*started(1))
    assert play.scheduler.wants_look
    play.step(m.SlotsLook((64, None, None, None), frozenset({0})))
    assert not play.scheduler.wants_look
    play.step(ask(2, 64), expect=["admit 2 slot=1"])
    play.step(ended(1), ended(2))
    assert play.scheduler.wants_look
    play.step(ask(3, 64), expect=["admit 3 slot=2"])


def test_after_a_float_a_slot_keeps_its_content_only_if_somebody_looked() -> None:
    play = slotted(2)
    served(play, 1, 160, "a")
    served(play, 2, 160, "b")
    play.step(ask(3, 64, pinnable=False), expect=None)
    play.step(ended(3))
    play.step(ask(4, 320, prompt="b"), expect=["admit 4 slot=1 cached=160 promised=0"])
    play.step(*started(4), ended(4, EndReason.CANCELLED))
    play.step(m.SlotsLook((64, 160), frozenset()))
    play.step(ask(5, 320, prompt="b"), ask(6, 320, prompt="a"),
              expect=["admit 5 slot=1 promised=160", "admit 6 slot=0 cached=0"])


@pytest.mark.parametrize("exact, tokens, made, seen_tokens, kept", [
    (True, 160, 1, 160, False), (True, 120, 60, 160, False), (True, 120, 10, 160, True), (True, 200, 1, 160, True),
    (False, 64, 1, 160, False), (False, 30, 1, 160, True), (False, 800, 1, 160, True), (False, 800, 0, 160, False),
    (True, 200, 0, 160, False)])  # the last one was broken off while its prompt was read
def test_a_slot_that_holds_as_much_as_a_float_may_have_left_may_be_its(
        exact: bool, tokens: int, made: int, seen_tokens: int, kept: bool) -> None:
    play = slotted(2)
    served(play, 1, 160, "a")
    play.step(ask(2, tokens, 100, prompt="b", pinnable=False, exact=exact), expect=None)
    play.step(*started(2), *([produced(2, made)] if made else []))
    play.step(ended(2, EndReason.FINISHED if made else EndReason.CANCELLED))
    play.step(m.SlotsLook((seen_tokens, 160), frozenset()))
    play.step(ask(3, 320, prompt="a"), expect=["admit 3 slot=0 promised=160" if kept else "admit 3 slot=1 cached=0"])


def test_floats_that_nobody_can_place_are_not_remembered_one_by_one() -> None:
    """A stranger works in a slot for ever, so no look tells where ours are, and there is always one of ours."""
    play = slotted(3)
    served(play, 1, 160, "a")
    for rid in range(2, 202):
        play.step(ask(rid, rid, prompt="b", pinnable=False), expect=None)
        play.step(*started(rid), produced(rid), *([ended(rid - 1)] if rid > 2 else []), expect=None)
        play.step(m.SlotsLook((160, 9, 9), frozenset({1, 2})))
    slots = play.scheduler._admission.inject.slots
    assert slots is not None and len(slots._left) <= LEFT_MAX


def test_what_is_doubtful_stays_so_until_it_is_computed() -> None:
    play = slotted(1)
    served(play, 1, 160, "a")
    served(play, 2, 64, "b", pinnable=False)
    for rid in (3, 4):
        play.step(ask(rid, 320, prompt="a"), expect=[f"admit {rid} slot=0 cached=160 promised=0"])
        play.step(ended(rid, EndReason.CANCELLED))
    served(play, 5, 160, "a")
    play.step(ask(6, 320, prompt="a"), expect=["admit 6 slot=0 promised=160"])


# --- a busy favourite ---


def test_a_busy_favourite_is_waited_for_only_while_that_is_shorter() -> None:
    for most, waits in ((20, True), (1000, False)):
        play = slotted(3)
        play.step(ask(1, 160, prompt="b"), expect=None)
        play.step(*started(1), produced(1))
        play.at(1).step(produced(1, 9), seen(1, prompt=1000, seconds=10.0), ended(1))  # 100 and 10 tokens per second
        play.step(ask(2, 1600, most, prompt="a"), expect=["admit 2 slot=1"])
        play.step(*started(2), produced(2))
        play.step(produced(2, 9), ask(3, 1760, prompt="a"), expect=[] if waits else ["admit 3 slot=2"])
        if waits:  # 1 s for the rest of that answer and 1.6 s for its own rest, against 17.6 s
            assert play.why == {3: "slot"}
            play.step(ended(2), expect=["admit 3 slot=1 promised=1600"])
