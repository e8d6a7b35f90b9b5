"""The self-check of slots on the fake: cases 44 to 47 as far as they are about finding out, sleep, and its costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from kvstream.adapters.base import CapacityQuery, CapacityReport, HttpReply
from kvstream.adapters.llamacpp import LlamaCppBackend
from kvstream.adapters.openai import OpenAIBackend
from kvstream.gateway.inject_settings import InjectSettings
from kvstream.gateway.selfcheck import check_slots, read_prompt
from kvstream.gateway.slot_ports import SlotsFound
from tests.fakes import FakeRuntime, FakeUpstream, open_runtime


async def report_of(runtime: FakeRuntime, model: str = "") -> CapacityReport:
    adapter, upstream = LlamaCppBackend("http://fake", model=model), FakeUpstream(runtime)
    replies: dict[str, HttpReply | None] = {}
    while calls := [(n, c) for n, c in adapter.capacity_calls(replies) if n not in replies]:
        for name, call in calls:
            replies[name] = await upstream.request(call, timeout_s=5)
    return adapter.read_capacity(replies, CapacityQuery(page_tokens=16))


async def check(runtime: FakeRuntime, *, model: str = "", report: CapacityReport | None = None, tries: int = 0,
                **settings: Any) -> SlotsFound:
    report = report or await report_of(runtime, model)
    adapter = LlamaCppBackend("http://fake", model=model)
    return await check_slots(adapter, FakeUpstream(runtime), InjectSettings(**settings), report, tries=tries)


async def read(runtime: FakeRuntime, ids: list[int], slot: int | None, model: str = "") -> None:
    calls = LlamaCppBackend("http://fake", model=model).slots
    assert calls is not None
    await read_prompt(FakeUpstream(runtime), calls, ids, slot)


def actions(runtime: FakeRuntime) -> list[str]:
    return [e.request.target for e in runtime.journal.entries if e.request.path.startswith("/slots/")]


@pytest.mark.parametrize(("knobs", "mode", "missing"), [
    ({}, "hard", ()),
    ({"cache_ram": True}, "hard", ("--cache-ram 0",)),
    ({"unified": True}, "hard", ()),
    ({"unified": True, "cache_ram": True}, "hard-unpinned", ("-np 4 -c 65536", "--cache-ram 0")),
    ({"unified": True, "cache_ram": True, "cache_idle_slots": False}, "hard", ("--cache-ram 0",)),
    ({"slots": 1}, "hard", ()), ({"slots": 1, "cache_ram": True}, "hard", ("--cache-ram 0",)),
])
async def test_each_way_of_keeping_kv(autojump_clock: object, knobs: dict[str, Any], mode: str,
                                      missing: tuple[str, ...]) -> None:
    async with open_runtime(**knobs) as runtime:
        found = await check(runtime)
        assert (found.mode, found.missing, found.settled, found.ram_cache) == (
            mode, missing, True, knobs.get("cache_ram", False)), found
        rules = found.rules
        assert rules is not None and (rules.slots, rules.pinned) == (knobs.get("slots", 4), mode == "hard")
        streams = 1 if knobs.get("unified") else knobs.get("slots", 4)
        assert (rules.token_bytes, rules.fixed_bytes) == (23_056, 48 + 4 * streams + 24 * 30)
        assert runtime.engine.busy_pins == 0 and runtime.engine.deferred_max == 0
        assert found.computed == runtime.engine.totals["prompt"] <= 27
        assert all(not slot.kv for slot in runtime.engine.slots)


async def test_case_44_a_restore_without_effect_is_found_out_beforehand(autojump_clock: object) -> None:
    async with open_runtime(restore_mode="noop_200") as runtime:
        found = await check(runtime)
        assert (found.mode, found.rules, found.settled) == ("soft", None, True) and "no effect" in found.why
        assert any("--swa-full" in flag for flag in found.missing)


@pytest.mark.parametrize("slots", [1, 4])
async def test_case_45_without_a_save_path_it_is_asked_once(autojump_clock: object, slots: int) -> None:
    async with open_runtime(restore_mode="501", slots=slots) as runtime:
        found = await check(runtime)
        assert (found.mode, found.missing, found.settled) == ("soft", ("--slot-save-path DIR",), True)
        assert len(actions(runtime)) == 1 and not runtime.journal.calls  # by whoever came first, and nothing computed


async def test_case_46_media_text_is_tried_once(autojump_clock: object) -> None:
    """Where only slots with images cannot be saved, text can; where none can, that is found out with one more save."""
    async with open_runtime(mmproj="media") as runtime:
        assert (await check(runtime)).mode == "hard"
    async with open_runtime(mmproj="all") as runtime:
        found = await check(runtime)
        assert (found.mode, found.missing, found.settled) == ("soft", ("no --mmproj",), True)
        assert "multimodal" in found.why
        saves = [target for target in actions(runtime) if "save" in target]
        assert len(saves) == 3 and len(runtime.journal.calls) == 1  # the probe, the empty slot, and with text in it


@pytest.mark.parametrize("loaded", ["one", ""])
async def test_case_47_a_router_is_asked_about_one_model_by_name(autojump_clock: object, loaded: str) -> None:
    async with open_runtime(router=True, model="one", models=("two",), models_max=2) as runtime:
        if loaded:
            await read(runtime, [1, 2], None, loaded)
        found = await check(runtime, model="one")
        if not loaded:  # looking loads nothing
            assert (found.mode, runtime.children.loads) == ("soft", 0)
            return
        assert found.mode == "hard" and found.identity is not None and found.identity.router, found
        assert runtime.children.loads == 1 and set(runtime.children.loaded) == {"one"}
        bodies = [e.request.json for e in runtime.journal.entries if e.request.path.startswith("/slots/")]
        assert bodies and all(body["model"] == "one" for body in bodies)
        other = await check(runtime, model="two")  # not loaded: nothing is asked that would load it
        assert (other.mode, runtime.children.loads) == ("soft", 1)


async def test_case_47_a_router_without_a_model_is_soft_and_says_what_is_missing(autojump_clock: object) -> None:
    async with open_runtime(router=True, model="one") as runtime:
        found = await check(runtime)
        assert found.mode == "soft" and "`model`" in found.why and not actions(runtime)


async def test_case_56_asleep_it_is_not_woken(autojump_clock: object) -> None:
    async with open_runtime(sleep_idle_s=5, wake_s=3) as runtime:
        report = await report_of(runtime)
        await trio.sleep(10)
        assert runtime.engine.asleep
        before = len(runtime.journal.entries)
        found = await check(runtime, report=report)
        assert (found.mode, found.settled, runtime.engine.asleep) == ("soft", False, True)
        assert [e.request.path for e in runtime.journal.entries[before:]] == ["/props"]
        assert not runtime.sleeps


async def test_the_slots_that_hold_the_least_are_used(autojump_clock: object) -> None:
    async with open_runtime(unified=True) as runtime:
        for slot, length in enumerate((30, 20, 50, 40)):
            await read(runtime, [7 + slot] * length, slot)
        found = await check(runtime)
        assert found.mode == "hard"
        assert [len(slot.kv) for slot in runtime.engine.slots] == [0, 0, 50, 40]


async def test_a_slow_one_is_given_up_in_time_and_given_longer_the_next_time(autojump_clock: object) -> None:
    async with open_runtime(prefill_rate=2, shared_step=False) as runtime:
        began = trio.current_time()
        found = await check(runtime, check_s_max=5)
        assert (found.mode, found.settled) == ("soft", False) and "5 s" in found.why
        assert trio.current_time() - began < 7
        await trio.sleep(60)
        assert (await check(runtime, check_s_max=5, tries=1)).mode == "hard"


async def test_files_are_looked_for_where_they_are_said_to_be(autojump_clock: object, tmp_path: Path) -> None:
    (tmp_path / "slots").mkdir()
    (tmp_path / "other").mkdir()
    async with open_runtime(slots_dir=str(tmp_path / "slots"), cell_bytes=64) as runtime:
        found = await check(runtime, dir=str(tmp_path / "slots"))
        assert found.slots_dir_hint == str(tmp_path / "slots")
        assert not [path for path in (tmp_path / "slots").iterdir() if "check" in path.name]
        lost = await check(runtime, dir=str(tmp_path / "other"))
        assert (lost.mode, lost.slots_dir_hint) == ("hard", "") and "other" in lost.notes[0]


async def test_every_call_may_fail_and_it_is_soft(autojump_clock: object) -> None:
    """Whichever call gets no good answer: no exception, nothing is pinned, and the reason is told."""
    async with open_runtime() as runtime:
        report = await report_of(runtime)
        count = 0
        while True:
            seen = 0

            def breaks(call: Any, at: int = count) -> bool:
                nonlocal seen
                seen += 1
                return seen == at + 1

            adapter, upstream = LlamaCppBackend("http://fake"), FakeUpstream(runtime)
            upstream.refuses = breaks
            found = await check_slots(adapter, upstream, InjectSettings(), report)
            if seen <= count:
                break
            assert found.mode == "hard" or (found.rules is None and found.why and not found.settled), (count, found)
            count += 1
        assert found.mode == "hard" and count > 12


async def test_other_kinds_of_backends_are_not_asked(autojump_clock: object) -> None:
    async with open_runtime(dialect="openai") as runtime:
        report = await report_of(runtime)
        before = len(runtime.journal.entries)
        found = await check_slots(OpenAIBackend("http://fake"), FakeUpstream(runtime), InjectSettings(), report)
        assert (found.mode, found.settled, len(runtime.journal.entries)) == ("soft", True, before)
