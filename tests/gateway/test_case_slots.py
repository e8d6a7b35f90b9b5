"""Cases 38, 49, 50, 51 and 52: slots that are pinned, saved and restored, before the fake that keeps llama.cpp's rules.

What a test asserts about time is in virtual seconds; what was computed is what the runtime says it computed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import trio

from kvstream.adapters.slot_calls import SlotDone
from kvstream.core.types import SavedPrefix, SaveSpec
from kvstream.gateway.kvstore import KvStore
from tests.fakes.journal import Entry
from tests.gateway.hardlane import PAGE, actions, check_wire, hard, open_hard, pinned, slot_of
from tests.gateway.lane import Lane, chat, open_lane, read, request, settings

NAME = re.compile(r"[a-z0-9]{1,80}\.kv")
LONG = " ".join(f"word{i % 7}" for i in range(400))


def text(name: str, words: int = 300) -> str:
    return " ".join(f"{name}{i % 11}" for i in range(words))


async def usage_of(lane: Lane, content: str, **fields: Any) -> tuple[int, int]:
    """(tokens of the prompt, tokens of it that were cached) of one whole chat, as its client is told."""
    async with lane.engine.open_stream(request(content, stream=True, max_tokens=4, **fields)) as stream:
        await read(stream)
        assert stream.usage is not None and stream.usage.cached is not None
        return stream.usage.prompt, stream.usage.cached


async def fill(lane: Lane, *names: str) -> None:
    """One chat after the other, each of a prompt of its own."""
    for name in names:
        await usage_of(lane, text(name))


def calls_of(lane: Lane, name: str) -> list[Entry]:
    return [entry for entry in lane.runtime.journal.calls if name in entry.prompt]


# --- 38 ---------------------------------------------------------------------------------------------------------------


async def test_case_38_a_unified_pool_does_not_overflow_by_what_is_restored(
    tmp_path: Path, autojump_clock: trio.abc.Clock
) -> None:
    """2,048 cells for four slots. Idle slots hold cells too, and a restore needs some that are free: they are emptied
    first, and two long requests still never run side by side."""
    async with open_hard(tmp_path, hard(tmp_path), unified=True, n_ctx=2048, prefill_rate=200.0) as lane:
        for _ in range(2):
            await fill(lane, "amber", "birch", "cedar", "delta", "ember", "fjord")
        assert len(actions(lane.runtime, "restore")) > 1, "some came back from files"
        assert len(actions(lane.runtime, "erase")) > 2, "and cells were made free for them"
        async with trio.open_nursery() as nursery:
            for name in ("amber", "birch"):
                nursery.start_soon(lambda name=name: chat(lane, text(name, 700), max_tokens=500))
        ends = [entry.outcome for entry in lane.runtime.journal.calls]
        assert lane.runtime.kills == 0 and set(ends) == {"done"}
        long = [entry for entry in lane.runtime.journal.calls if len(entry.prompt) > 4000]
        assert len(long) == 2 and long[0].ended_at is not None and long[0].ended_at <= long[1].received_at
        check_wire(lane.runtime)


# --- 49 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("several", [1, 2])
async def test_case_49_nobody_gets_between_a_restore_and_its_request(
    several: int, tmp_path: Path, autojump_clock: trio.abc.Clock
) -> None:
    """A restore takes a second, and meanwhile others come. They go elsewhere, or wait when the runtime would place them
    (``several`` choices); what was restored is used."""
    async with open_hard(tmp_path, hard(tmp_path), slots=2, prefill_rate=200.0) as lane:
        await fill(lane, "amber", "birch", "cedar", "delta")
        lane.runtime.config.restore_s = 1.0
        before = len(actions(lane.runtime, "restore"))
        async with trio.open_nursery() as nursery:
            told: list[tuple[int, int]] = []

            async def again() -> None:
                told.append(await usage_of(lane, text("amber")))

            nursery.start_soon(again)
            with trio.fail_after(30):
                while len(actions(lane.runtime, "restore")) == before:
                    await trio.sleep(0.01)
            for number in range(3):
                nursery.start_soon(lambda n=number: chat(lane, f"thief {n} " * 20, n=several, max_tokens=4))
        prompt, cached = told[0]
        assert cached >= 0.9 * prompt
        restored, came = actions(lane.runtime, "restore")[before], calls_of(lane, "amber")[-1]
        assert slot_of(came) == slot_of(restored)
        assert restored.ended_at is not None
        for thief in calls_of(lane, "thief"):
            between = restored.received_at < thief.received_at < came.received_at
            assert not between or (slot_of(thief) not in (None, slot_of(restored)))
        check_wire(lane.runtime)


async def test_case_49_where_nothing_is_pinned_starts_are_serialised(
    tmp_path: Path, autojump_clock: trio.abc.Clock
) -> None:
    """A runtime that empties idle slots whenever a request starts: between a restore and the start of its request
    nobody else starts."""
    async with open_hard(tmp_path, hard(tmp_path), slots=3, unified=True, cache_ram=True, prefill_rate=200.0,
                         restore_s=1.0) as lane:
        assert lane.engine.inject.lane is not None and not lane.engine.inject.lane.rules.pinned  # type: ignore[union-attr]
        async with trio.open_nursery() as nursery:  # the first is read and saved for those that wait for it
            for number in range(3):
                nursery.start_soon(lambda n=number: chat(lane, text("amber") + f" and {n}", max_tokens=4))
        lane.runtime.restart()
        checked = len(actions(lane.runtime, "restore"))
        with trio.fail_after(30):
            while len(actions(lane.runtime, "restore")) == checked:
                await trio.sleep(1)  # the watcher has noticed, and the slots are checked anew
        await trio.sleep(5)
        before = len(actions(lane.runtime, "restore"))
        async with trio.open_nursery() as nursery:
            told: list[tuple[int, int]] = []

            async def again() -> None:
                told.append(await usage_of(lane, text("amber") + " again"))

            nursery.start_soon(again)
            with trio.fail_after(30):
                while len(actions(lane.runtime, "restore")) == before:
                    await trio.sleep(0.01)
            for number in range(3):
                nursery.start_soon(lambda n=number: chat(lane, f"thief {n} " * 20, max_tokens=4))
        prompt, cached = told[0]
        assert cached >= 0.8 * prompt
        restored, came = actions(lane.runtime, "restore")[before], calls_of(lane, "amber")[-1]
        assert not any(restored.index < entry.index < came.index for entry in lane.runtime.journal.calls)
        assert lane.runtime.engine.deferred_max == 0
        check_wire(lane.runtime)


async def test_case_49_a_long_prompt_that_is_read_first_holds_up_nobody(
    tmp_path: Path, autojump_clock: trio.abc.Clock
) -> None:
    """Where starts are serialised, the reading of a prompt is a start, not all of it; and after it nobody restores into
    the slot that it was read into."""
    told = hard(tmp_path, scheduler={"read_first_s": 0.1, "long_prefills_max": 0})
    async with open_hard(tmp_path, told, slots=2, unified=True, n_ctx=8192, cache_ram=True, prefill_rate=200.0) as lane:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: usage_of(lane, text("amber", 3000)))
            while not any(stream.answered for stream in lane.engine.streams.values()):
                await trio.sleep(0.01)
            began = trio.current_time()
            await usage_of(lane, "short")
        short, long = calls_of(lane, "short")[0], calls_of(lane, "amber")[0]
        assert short.received_at < began + 1, "the runtime has it at once"
        assert long.received_at > began + 10 and long.ended_at is not None
        assert long.ended_at - long.received_at < 2, "what was read was found"
        work = lane.engine.inject.work
        assert work is not None and not work._read_into and not work._has_start and not work._start.locked()
        check_wire(lane.runtime)


# --- 50 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["../../x/y:latest", "a\x00b", "x" * 300, "naïve-模型"])
async def test_case_50_names_of_files_are_ours(model: str, tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """Whatever a model or a session is called, the runtime is told names of letters and digits, and nothing is written
    elsewhere."""
    async with open_hard(tmp_path, hard(tmp_path), slots=1, prefill_rate=200.0) as lane:
        for name in ("amber", "birch", "amber"):
            async with lane.engine.open_stream(request(text(name), model=model, user=model, max_tokens=4),
                                               client="s\x00../" + "é" * 300) as stream:
                await read(stream)
        told = [entry.request.json["filename"] for a in ("save", "restore") for entry in actions(lane.runtime, a)]
        assert len(told) > 4 and all(NAME.fullmatch(name) for name in told)
        assert {path.name for path in tmp_path.iterdir()} <= {"slots", "state", "model.gguf"}
        kept = [path for path in (tmp_path / "slots").iterdir() if path.suffix == ".kv"]
        assert kept and all(NAME.fullmatch(path.name) for path in kept)


# --- 51 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "400"])
async def test_case_51_a_bad_file_costs_its_request_nothing_but_time(
    damage: str, tmp_path: Path, autojump_clock: trio.abc.Clock
) -> None:
    async with open_hard(tmp_path, hard(tmp_path), slots=1, prefill_rate=200.0) as lane:
        await fill(lane, "amber", "birch")
        kept = [path for path in (tmp_path / "slots").iterdir() if path.suffix == ".kv"]
        assert len(kept) == 1, "amber's"
        data = kept[0].read_bytes()
        if damage == "cut":
            kept[0].write_bytes(data[: len(data) // 2])
        elif damage == "flipped":
            kept[0].write_bytes(data[:-9] + b"\xff" + data[-8:])
        elif damage == "gone":
            kept[0].unlink()
        else:
            lane.runtime.config.restore_mode = "400_version"
        prompt, cached = await usage_of(lane, text("amber"))
        assert cached < 0.1 * prompt, "computed, and the client is told so"
        assert not kept[0].exists() or (kept[0].read_bytes() == data and damage != "400")
        lane.runtime.config.restore_mode = "real"
        await fill(lane, "birch")
        before = len(actions(lane.runtime, "restore"))
        prompt, cached = await usage_of(lane, text("amber"))
        assert cached >= 0.9 * prompt and len(actions(lane.runtime, "restore")) == before + 1, "saved anew, and good"
        check_wire(lane.runtime)


async def test_case_51_a_slot_that_holds_less_than_was_thought_is_not_kept(
    tmp_path: Path, autojump_clock: trio.abc.Clock
) -> None:
    """Somebody emptied the slot behind our back: what is saved then is thrown away."""
    async with open_hard(tmp_path, hard(tmp_path), slots=1, prefill_rate=200.0) as lane:
        await fill(lane, "amber")
        for slot in lane.runtime.engine.slots:
            slot.hold([])
        await fill(lane, "birch")
        assert not [path for path in (tmp_path / "slots").iterdir() if path.suffix == ".kv"]
        restores = len(actions(lane.runtime, "restore"))
        prompt, cached = await usage_of(lane, text("amber"))
        assert cached < 0.1 * prompt and len(actions(lane.runtime, "restore")) == restores


async def test_case_51_another_models_file_is_never_offered(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    for model, offered in (("first", 0), ("second", 0), ("first", 1)):
        (path := tmp_path / model).write_bytes(model.encode())
        os.utime(path, (1e9, 1e9 + len(model)))
        async with open_hard(tmp_path, hard(tmp_path), slots=1, prefill_rate=200.0, model_path=str(path)) as lane:
            before = len(actions(lane.runtime, "restore"))
            prompt, cached = await usage_of(lane, text("amber"))
            assert len(actions(lane.runtime, "restore")) - before == offered
            assert (cached >= 0.9 * prompt) == bool(offered)
            await fill(lane, "birch")


# --- 52 ---------------------------------------------------------------------------------------------------------------


async def test_case_52_a_slow_save_delays_its_own_slot_only(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """Five seconds for a save. The runtime itself stands still meanwhile; we do not: whoever has another slot is sent
    at once, and nobody is sent to the one that is being saved."""
    told = hard(tmp_path, inject={"slow_save_s": 60.0})
    async with open_hard(tmp_path, told, slots=2, prefill_rate=20.0) as lane:
        await fill(lane, "amber", "birch")
        lane.runtime.config.save_s = 5.0
        before = len(actions(lane.runtime, "save"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: chat(lane, text("cedar"), max_tokens=4))
            with trio.fail_after(30):
                while len(actions(lane.runtime, "save")) == before:
                    await trio.sleep(0.01)
            save = actions(lane.runtime, "save")[before]
            began = trio.current_time()
            async with lane.engine.open_stream(request(text("birch") + " more", max_tokens=4)) as stream:
                while not stream.sent:
                    await trio.sleep(0.01)
                assert trio.current_time() - began < 0.2, "the other slot's request went out at once"
                assert stream.slot is not None and stream.slot != slot_of(save)
                await read(stream)
            assert save.ended_at is not None and save.ended_at - save.received_at == pytest.approx(5.0)
        check_wire(lane.runtime)


@pytest.mark.parametrize("closing", [False, True])
async def test_case_52_a_file_is_looked_at_beside_the_request_that_displaced_it(
        closing: bool, tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """A disk on which looking at a file takes three seconds. Whoever displaced what is in it does not wait for that,
    also not if it is over sooner; who wants the file does, and so does the end of the lane."""
    keep = KvStore.keep

    async def slowly(self: KvStore, spec: SaveSpec, done: SlotDone) -> SavedPrefix:
        await trio.sleep(3.0)
        return await keep(self, spec, done)

    async with open_hard(tmp_path, hard(tmp_path), slots=1, prefill_rate=200.0) as lane:
        await fill(lane, "amber", "birch")
        with mock.patch.object(KvStore, "keep", slowly):
            before, began = len(actions(lane.runtime, "save")), trio.current_time()
            prompt, cached = await usage_of(lane, text("amber"))
            assert cached >= prompt - PAGE and trio.current_time() - began < 1.0
            assert len(actions(lane.runtime, "save")) == before + 1
            if closing:
                await lane.engine.inject.wait_saved()
            else:
                prompt, cached = await usage_of(lane, text("birch"))
                assert cached >= prompt - PAGE
            assert trio.current_time() - began > 3.0
        check_wire(lane.runtime)


async def test_case_52_a_full_disk_costs_no_request(
    tmp_path: Path, autojump_clock: trio.abc.Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """The third file does not fit on the disk. Saving goes off with one warning, and everybody is served."""
    async with open_hard(tmp_path, hard(tmp_path), slots=1, prefill_rate=200.0) as lane:
        lane.runtime.config.disk_bytes = 200_000
        await fill(lane, *(f"name{i}" for i in range(8)))
        assert {entry.outcome for entry in lane.runtime.journal.calls} == {"done"}
        warned = [r for r in caplog.records if r.levelname == "WARNING" and r.name.startswith("kvstream.store")]
        assert len(warned) <= 1
        check_wire(lane.runtime)


async def test_case_52_what_is_over_the_quota_goes_before_the_write(
    tmp_path: Path, autojump_clock: trio.abc.Clock
) -> None:
    told = hard(tmp_path, inject={"disk_bytes_max": 250_000}, scheduler={"saved_bytes_max": 250_000})
    async with open_hard(tmp_path, told, slots=1, prefill_rate=200.0) as lane:
        biggest = 0
        for index in range(8):
            await fill(lane, f"name{index}")
            biggest = max(biggest, sum(path.stat().st_size for path in (tmp_path / "slots").iterdir()))
        assert len(actions(lane.runtime, "save")) > 6
        assert 80_000 < biggest <= 260_000, "never more, a few manifests aside"


# --- without a store --------------------------------------------------------------------------------------------------


async def test_a_runtime_without_files_is_used_as_before(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """No ``--slot-save-path``: asked once, nothing pinned, nothing saved."""
    async with open_lane(settings(inject=hard(tmp_path).inject), slot_save=False) as lane:
        await fill(lane, "amber", "birch")
        assert not pinned(lane.runtime) and len(actions(lane.runtime, "save")) <= 2
