"""Playbooks of saved prefixes: read first, forked, evicted to a file, restored, erased, saved at leisure."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from kvstream.core import messages as m
from kvstream.core.types import EndReason, PoolMode, RequestId, SavedPrefix, SaveSpec
from tests.core.test_slots import ask, plans, rules, seen, served, slotted, split, started
from tests.play import Play, ended, keys_of, limits, produced

SHARED = "s" * 40  # 640 tokens


def lane(slots: int = 4, **settings: Any) -> Play:
    """Slots that are saved, on a runtime that reads 100 tokens per second and has told so."""
    play = slotted(slots, host_pages=4096, **settings)
    play.step(seen(99, prompt=1000, seconds=10.0))
    return play


def read(rid: int, tokens: int) -> m.PromptRead:
    return m.PromptRead(RequestId(rid), 0, tokens, tokens / 100)


def saved(spec: SaveSpec, slot: int, rid: int | None = None, *, ok: bool = True, tokens: int | None = None
          ) -> m.SlotSaved:
    held = spec.tokens if tokens is None else tokens
    owner = None if rid is None else RequestId(rid)
    return m.SlotSaved(slot, spec.name, ok, held, held * 1000, 0.01, spec.keys, owner)


def restored(rid: int, name: str | None, *, ok: bool = True) -> m.Restored:
    assert name is not None
    return m.Restored(RequestId(rid), name, ok, 640_000, 0.005)


def stored(play: Play, name: str, prompt: str, tokens: int, used_at: float = 0.0) -> SavedPrefix:
    return SavedPrefix(name, keys_of(prompt, tokens), tokens, tokens * 1000, used_at)


def spec_of(actions: list[m.Action]) -> SaveSpec:
    specs = [action.save for action in actions if isinstance(action, m.Proceed)]
    specs += [action.spec for action in actions if isinstance(action, m.SaveSlot)]
    specs += [plan.save for plan in plans(actions).values() if plan is not None]
    found = [spec for spec in specs if spec is not None]
    assert len(found) == 1
    return found[0]


# --- read first, then fork ---


def test_a_cold_prefix_that_many_want_is_read_once_and_forked() -> None:
    play = lane()
    play.step(*(ask(rid, 656, prompt=SHARED + "abcd"[rid - 1]) for rid in (1, 2, 3, 4)),
              expect=["admit 1 slot=0 read_first"])
    assert play.why == {2: "leader", 3: "leader", 4: "leader"}
    spec = spec_of(play.step(read(1, 656), expect=["proceed 1 save=fork:41"]))
    actions = play.step(saved(spec, 0, 1), expect=[f"admit {rid} slot={rid - 1} restore cached=640 promised=640"
                                                   for rid in (2, 3, 4)])
    name = plans(actions)[2].restore  # type: ignore[union-attr]
    play.step(*(restored(rid, name) for rid in (2, 3, 4)), *started(1, 2, 3, 4))
    play.step(*(ended(rid) for rid in (1, 2, 3, 4)))
    store = play.see().store
    assert store is not None and store.files == 1
    assert [view.tokens for view in play.see().slots] == [656] * 4


def test_a_prompt_that_nobody_else_wants_is_not_saved() -> None:
    play = lane()
    play.step(ask(1, 640, prompt="a"), ask(2, 640, prompt="b"),
              expect=["admit 1 slot=0 read_first", "admit 2 slot=1 read_first"])
    play.step(read(1, 640), expect=["proceed 1 nothing-saved"])


def test_a_prompt_is_read_first_only_if_that_takes_long() -> None:
    play = lane()
    play.step(seen(99, prompt=10**7, seconds=10.0))
    play.step(ask(1, 640), ask(2, 640, exact=False), expect=["admit 1 slot=0", "admit 2 slot=1"])
    assert not any(plan is not None and plan.read_first for plan in (run.plan for run in running(play)))


def running(play: Play) -> list[Any]:
    return list(play.scheduler._running.values())


def test_nobody_waits_for_a_prompt_that_is_not_read_first() -> None:
    play = lane(read_first_s=60.0)
    play.step(ask(1, 656, prompt=SHARED + "a"), ask(2, 656, prompt=SHARED + "b"), expect=["admit 1", "admit 2"])


def test_a_leader_that_leaves_is_followed_by_the_next() -> None:
    play = lane()
    play.step(ask(1, 656, prompt=SHARED + "a"), ask(2, 656, prompt=SHARED + "b"), ask(3, 656, prompt=SHARED + "c"),
              expect=["admit 1"])
    play.step(ended(1, EndReason.CANCELLED), expect=["admit 2 read_first"])
    assert play.why == {3: "leader"}


def test_after_a_save_that_failed_nobody_waits_for_another_leader() -> None:
    play = lane()
    play.step(ask(1, 656, prompt=SHARED + "a"), ask(2, 656, prompt=SHARED + "b"), ask(3, 656, prompt=SHARED + "c"),
              expect=["admit 1"])
    spec = spec_of(play.step(read(1, 656), expect=["proceed 1 save=fork:41"]))
    play.step(saved(spec, 0, 1, ok=False), expect=["admit 2 slot=1", "admit 3 slot=2"])


def test_a_fork_whose_leader_ends_before_it_is_saved() -> None:
    play = lane()
    play.step(ask(1, 656, prompt=SHARED + "a"), ask(2, 656, prompt=SHARED + "b"), expect=["admit 1"])
    spec = spec_of(play.step(read(1, 656), expect=["proceed 1 save=fork:41"]))
    play.step(ended(1, EndReason.CANCELLED), expect=None)
    assert 2 in play.running
    play.step(saved(spec, 0, 1), expect=[f"forget {spec.name}"])  # the runtime did it all the same


def test_an_idle_slot_is_forked_when_the_next_in_line_want_it_too() -> None:
    play = lane()
    served(play, 1, 656, SHARED + "a")
    actions = play.step(ask(2, 656, prompt=SHARED + "b"), ask(3, 656, prompt=SHARED + "c"), expect=["admit 2 slot=0"])
    assert play.why == {3: "leader"}
    spec = spec_of(actions)
    assert spec.why == "fork" and len(spec.keys) == 41
    play.step(saved(spec, 0, 2), expect=["admit 3 slot=1 restore promised=640"])


# --- evict and restore ---


def test_what_is_overwritten_is_saved_first_and_comes_back() -> None:
    play = lane(1)
    served(play, 1, 640, "a")
    spec = spec_of(play.step(ask(2, 640, prompt="b"), expect=["admit 2 slot=0 save=evict:40 read_first"]))
    play.step(saved(spec, 0, 2))
    play.step(read(2, 640), expect=["proceed 2"])
    play.step(*started(2), produced(2), ended(2))
    actions = play.step(ask(3, 800, prompt="a"), expect=["admit 3 slot=0 save=evict:40 restore promised=640"])
    play.step(saved(spec_of(actions), 0, 3), restored(3, spec.name), *started(3), ended(3))
    store = play.see().store
    assert store is not None and store.files == 2


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("end", [None, EndReason.FINISHED, EndReason.CANCELLED])
def test_a_file_is_still_looked_at_when_who_displaced_it_runs_or_is_over(end: EndReason | None, ok: bool) -> None:
    play = lane(2)
    served(play, 1, 640, "a")
    served(play, 2, 640, "b")
    served(play, 3, 656, "b")
    spec = spec_of(play.step(ask(4, 64, prompt="c"), expect=["admit 4 slot=0 save=evict:40"]))
    play.step(m.SlotWritten(RequestId(4), spec.name))
    if end is not EndReason.CANCELLED:  # else it leaves before it was sent
        play.step(*started(4), produced(4))
    if end is not None:
        play.step(ended(4, end))
    play.step(ask(5, 800, prompt="a"))
    assert play.why == {5: "slot"}
    slot = "slot=0" if end is EndReason.CANCELLED else "slot=1 save=evict:41"
    play.step(saved(spec, 0, ok=ok), expect=[
        f"admit 5 {slot} {'restore promised=640' if ok else 'read_first cached=0'}"])


def test_nobody_waits_for_a_file_that_was_never_begun() -> None:
    """The lane lost its slots after a request had been told to save one first, so it went without doing that."""
    play = lane(2)
    served(play, 1, 640, "a")
    served(play, 2, 640, "b")
    served(play, 3, 656, "b")
    play.step(ask(4, 64, prompt="c"), expect=["admit 4 slot=0 save=evict:40"])
    play.step(m.SlotsKnown(None))
    play.step(*started(4), produced(4), ended(4))
    play.step(m.SlotsKnown(rules(2)), seen(99, prompt=1000, seconds=10.0))
    play.step(ask(5, 800, prompt="a"), expect=["admit 5 slot=0 read_first cached=0"])


def test_whoever_comes_while_his_prefix_is_saved_waits_for_the_file() -> None:
    play = lane(2)
    served(play, 1, 640, "a")
    served(play, 2, 640, "b")
    served(play, 3, 656, "b")
    spec = spec_of(play.step(ask(4, 64, prompt="c"), expect=["admit 4 slot=0 save=evict:40"]))
    play.step(ask(5, 800, prompt="a"))
    assert play.why == {5: "slot"}
    play.step(saved(spec, 0, 4), expect=["admit 5 slot=1 save=evict:41 restore promised=640"])


def test_a_file_that_comes_to_nothing_is_not_waited_for() -> None:
    for end in (lambda spec: saved(spec, 0, 4, ok=False), lambda spec: ended(4, EndReason.CANCELLED)):
        play = lane(2)
        served(play, 1, 640, "a")
        served(play, 2, 640, "b")
        served(play, 3, 656, "b")
        spec = spec_of(play.step(ask(4, 64, prompt="c"), expect=["admit 4 slot=0 save=evict:40"]))
        play.step(ask(5, 800, prompt="a"))
        play.step(end(spec), expect=["admit 5 cached=0"])


def test_a_conversation_that_goes_on_while_it_is_saved_waits_for_that() -> None:
    play = lane()
    served(play, 1, 640, "a")
    served(play, 2, 800, "a")
    spec = spec_of(play.at(5).step(expect=["save 0 why=hot"]))
    play.step(ask(3, 960, prompt="a"))
    assert play.why == {3: "slot"}
    play.step(saved(spec, 0), expect=["admit 3 slot=0 promised=800"])


def test_what_is_short_or_cheap_to_compute_is_not_saved() -> None:
    for tokens, rate in ((160, 100.0), (640, 1e6)):
        play = lane(1)
        play.step(seen(99, prompt=10**6, seconds=10**6 / rate))
        served(play, 1, tokens, "a")
        assert plans(play.step(ask(2, 64, prompt="b"), expect=["admit 2"]))[2].save is None  # type: ignore[union-attr]


def test_a_failed_restore_leaves_a_cold_slot_and_no_file() -> None:
    play = lane(2)
    play.step(m.StoreLoaded((stored(play, "x.kv", "a", 640),)))
    play.step(ask(1, 800, prompt="a"), expect=["admit 1 slot=0 restore promised=640"])
    play.step(restored(1, "x.kv", ok=False))
    assert play.see().running[0].tokens_cached == 0
    store = play.see().store
    assert store is not None and store.files == 0
    play.step(ended(1, EndReason.CANCELLED))
    play.step(ask(2, 800, prompt="a"), expect=["admit 2 cached=0"])


def test_a_slot_that_has_it_goes_before_a_file_that_has_it() -> None:
    play = lane()
    play.step(m.StoreLoaded((stored(play, "x.kv", "a", 640),)))
    served(play, 1, 640, "a")
    assert plans(play.step(ask(2, 800, prompt="a"), expect=["admit 2 slot=0 promised=640"]))[2].restore is None  # type: ignore[union-attr]


def test_files_of_another_identity_are_not_offered() -> None:
    play = lane()
    play.step(m.StoreLoaded((stored(play, "x.kv", "a", 640),)))
    assert play.scheduler.prefix_tokens(keys_of("a", 800), 0.0) == 640
    play.step(m.SlotsKnown(evolve(rules(), identity="ff" * 8)))
    play.step(ask(1, 800, prompt="a"), expect=["admit 1 cached=0"])


def test_files_outlive_a_restart_of_the_runtime() -> None:
    play = lane()
    play.step(m.StoreLoaded((stored(play, "x.kv", "a", 640),)))
    served(play, 1, 800, "a")
    play.step(m.BackendUp(split(4, host_pages=4096), fresh=True))
    play.step(ask(2, 800, prompt="a"), expect=["admit 2 restore promised=640"])


def test_a_saved_prefix_makes_a_long_prompt_short() -> None:
    play = lane(long_prefill_tokens=512)
    play.step(m.StoreLoaded((stored(play, "x.kv", "a", 1600),)))
    play.step(ask(1, 1600, prompt="b"), ask(2, 1600, prompt="c"), ask(3, 1616, prompt="a"),
              expect=["admit 1", "admit 3 restore"])
    assert play.why == {2: "long_prefill"}
    play.step(read(1, 1600), expect=["proceed 1", "admit 2"])  # its prompt is read before its first token


# --- a unified pool ---


def test_a_unified_pool_gives_up_idle_slots_for_what_is_restored() -> None:
    play = Play(backend=limits(seats=4, pages=100, mode=PoolMode.UNIFIED, host_pages=4096))
    play.step(m.SlotsKnown(rules()), seen(99, prompt=1000, seconds=10.0))
    play.step(m.StoreLoaded((stored(play, "x.kv", "x", 640),)))
    for rid, prompt in enumerate("abc", 1):
        served(play, rid, 480, prompt)
    play.step(ask(4, 656, prompt="x"), expect=["admit 4 slot=3 restore erase=0,1"])  # 672 of 1,600 cells
    play.step(ask(5, 496, prompt="a"), expect=["admit 5 slot=0 cached=0 erase=2"])


def test_where_idle_slots_are_emptied_the_runtime_places_what_was_restored() -> None:
    play = Play(backend=limits(seats=4, pages=400, mode=PoolMode.UNIFIED, host_pages=4096))
    play.step(m.SlotsKnown(rules(pinned=False)), seen(99, prompt=1000, seconds=10.0))
    play.step(*(ask(rid, 656, prompt=SHARED + "ab"[rid - 1]) for rid in (1, 2)), expect=["admit 1 slot=any read_first"])
    spec = spec_of(play.step(read(1, 656), expect=["proceed 1 save=fork:41"]))
    play.step(saved(spec, 2, 1), expect=["admit 2 slot=any restore promised=640"])
    assert play.see().slots == ()


# --- saved at leisure ---


def test_a_prefix_that_was_used_again_is_saved_when_all_is_quiet() -> None:
    play = lane()
    served(play, 1, 640, "a")
    served(play, 2, 800, "a")
    due = play.scheduler.next_deadline()
    assert due == 5.0
    spec = spec_of(play.at(due).step(expect=["save 0 why=hot pages=50 rid=None"]))
    play.step(ask(3, 64), ask(4, 64, pinnable=False), expect=["admit 3 slot=1"])  # not the one that is being saved
    play.step(*started(3))
    assert play.why == {4: "slot"}  # which the runtime might put where it is being saved
    play.step(saved(spec, 0, tokens=801), expect=["admit 4 slot=any"])
    assert play.scheduler.next_deadline() == 3600.0  # a cached page expires


def test_a_prefix_used_once_is_saved_only_before_the_end() -> None:
    play = lane()
    served(play, 1, 640, "a")
    served(play, 2, 640, "b")
    served(play, 3, 64, "c")
    play.at(60).step()
    spec = spec_of(play.step(m.Closing(), expect=["save 0 why=drain"]))
    spec = spec_of(play.step(saved(spec, 0), expect=["save 1 why=drain"]))
    play.step(saved(spec, 1))


def test_a_save_that_adds_nothing_is_not_tried_again_and_again() -> None:
    play = lane(saved_bytes_max=1000)
    served(play, 1, 640, "a")
    served(play, 2, 800, "a")
    play.at(5).step()
    assert play.scheduler.next_deadline() == 3600.0  # a cached page expires


def test_pages_of_a_shared_prefix_are_counted_once() -> None:
    play = lane()
    play.step(*(ask(rid, 656, prompt=SHARED + "abcd"[rid - 1]) for rid in (1, 2, 3, 4)), expect=None)
    spec = spec_of(play.step(read(1, 656), expect=None))
    play.step(saved(spec, 0, 1), expect=None)
    play.step(*started(1, 2, 3, 4), *(produced(rid) for rid in (1, 2, 3, 4)))
    play.step(*(ended(rid) for rid in (1, 2, 3, 4)))
    play.step(*(ask(rid, 656, prompt=SHARED + "abcd"[rid - 5]) for rid in (5, 6, 7, 8)), expect=None)
    assert play.see().pages[0].held == 40 + 4 + 4  # the last page of a prompt is its own, those before are cached
