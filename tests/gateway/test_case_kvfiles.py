"""Cases 50 to 52 through a whole lane: what happens to the files of saved KV never reaches a client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from kvstream.gateway.kvfiles import DATA, MANIFEST
from tests.gateway.conftest import CHAT, Call, Lane, chat, metric, open_lane, text_of
from tests.gateway.hardlane import no_threads

LONG = "the same long beginning of everything that anybody asks here " * 60
KNOBS: dict[str, Any] = {"slots": 4, "n_ctx": 16384, "prefill_rate": 400.0, "cell_bytes": 256, "save_s": 0.02}


@asynccontextmanager
async def open_hard(folder: Path, *, knobs: Any = None, **inject: Any) -> AsyncIterator[Lane]:
    """A lane before a runtime whose files lie in ``folder``; both are new, the files are not."""
    folder.mkdir(exist_ok=True)
    told = {**KNOBS, "slots_dir": str(folder), **(knobs or {})}
    with no_threads():
        async with open_lane(knobs=told, inject={"mode": "auto", "dir": str(folder), **inject}) as lane:
            with trio.fail_after(60):
                while not lane.engine.inject.active:
                    await trio.sleep(0.01)
            yield lane


def cached(call: Call) -> int:
    """Prompt tokens that the runtime had, as the client is told."""
    assert call.status == 200, call.body
    usage = [json.loads(line[5:]) for line in call.body.split(b"\n") if line.startswith(b"data: {")][-1]
    return int(usage["timings"]["cache_n"])


async def fan_out(lane: Lane, text: str = LONG, count: int = 3, **more: Any) -> list[Call]:
    """Several at once with one beginning: what the first reads is saved for the others."""
    calls = [lane.start(chat(f"{text} {n}", max_tokens=4, **more), CHAT) for n in range(count)]
    with trio.fail_after(600):
        for call in calls:
            await call.ended.wait()
    assert all(call.status == 200 and text_of(call.body) for call in calls)
    return calls


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if DATA.fullmatch(path.name))


async def filled(folder: Path) -> None:
    async with open_hard(folder) as lane:
        await fan_out(lane)
    assert files(folder) and len(files(folder)) == len(list(folder.glob("*.json")))


async def test_case_51_a_prefix_outlives_both(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    await filled(tmp_path / "kv")
    async with open_hard(tmp_path / "kv") as lane:
        call = await lane.post(chat(f"{LONG} again", max_tokens=4))
        assert cached(call) > 300
    assert not list((tmp_path / "kv").glob("*.lock")) and not list((tmp_path / "kv").glob("kvt*"))


@pytest.mark.parametrize("tenth", range(10))
async def test_case_51_a_truncated_file_costs_a_cold_prompt(
        tmp_path: Path, autojump_clock: trio.abc.Clock, tenth: int) -> None:
    await filled(tmp_path / "kv")
    async with open_hard(tmp_path / "kv") as lane:
        spoilt = files(tmp_path / "kv")
        for file in spoilt:  # after it was offered: before, it would not even be
            data = file.read_bytes()
            file.write_bytes(data[:len(data) * tenth // 10])
        call = await lane.post(chat(f"{LONG} again", max_tokens=4))
        assert cached(call) == 0 and text_of(call.body)
        assert not [file for file in spoilt if file.exists()]


async def test_case_51_flipped_bits_are_never_restored(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    await filled(tmp_path / "kv")
    for file in files(tmp_path / "kv"):
        data = bytearray(file.read_bytes())
        data[-100] ^= 4
        file.write_bytes(data)
    async with open_hard(tmp_path / "kv") as lane:
        call = await lane.post(chat(f"{LONG} again", max_tokens=4))
        assert cached(call) == 0
        restored = [e for e in lane.runtime.journal.entries if "action=restore" in e.request.query
                    and b"kvstreamcheck" not in e.request.body]
        assert not restored, "a runtime would not have noticed"


async def test_case_51_another_kv_type_that_was_not_noticed_costs_a_cold_prompt(
        tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    await filled(tmp_path / "kv")
    spoilt = files(tmp_path / "kv")
    async with open_hard(tmp_path / "kv", knobs={"cell_bytes": 512}) as lane:  # with the same process mark
        assert cached(await lane.post(chat(f"{LONG} again", max_tokens=4))) == 0
        assert not [file for file in spoilt if file.exists()]


@pytest.mark.parametrize("other", [{"model": "another"}, {"n_ctx": 8192}, {"build": "b1"}],
                         ids=lambda other: next(iter(other)))
async def test_case_51_another_model_context_kv_type_or_build(
        tmp_path: Path, autojump_clock: trio.abc.Clock, other: dict[str, Any]) -> None:
    await filled(tmp_path / "kv")
    before = files(tmp_path / "kv")
    async with open_hard(tmp_path / "kv", knobs=other) as lane:
        assert cached(await lane.post(chat(f"{LONG} again", max_tokens=4))) == 0
    async with open_hard(tmp_path / "kv") as lane:
        assert cached(await lane.post(chat(f"{LONG} again", max_tokens=4))) > 300
    assert set(before) & set(files(tmp_path / "kv")), "it was left alone meanwhile"


async def test_case_50_what_clients_call_things_is_in_no_name(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    names = ["../../x/y:latest", "a\0b", "n" * 300, "日本語"]
    async with open_hard(tmp_path / "kv", knobs={"model": "../../x/y:latest"}) as lane:
        for name in names:
            await fan_out(lane, f"{name} {LONG}", model=name, user=name)
    found = {path.name for path in (tmp_path / "kv").iterdir()} - {"kvstream-probe.bin"}
    assert found and all(DATA.fullmatch(name) or MANIFEST.fullmatch(name) for name in found)
    assert {path.name for path in tmp_path.iterdir()} == {"kv"}


async def test_case_52_a_slow_save_holds_up_nobody_and_is_the_last_for_a_while(
        tmp_path: Path, autojump_clock: trio.abc.Clock, caplog: pytest.LogCaptureFixture) -> None:
    async with open_hard(tmp_path / "kv", knobs={"save_s": 5.0}) as lane:
        await fan_out(lane)
        assert len([r for r in caplog.records if "saving KV is off" in r.getMessage()]) == 1
        saves = [e for e in lane.runtime.journal.entries if "action=save" in e.request.query]
        await fan_out(lane, "another " + LONG)
        await fan_out(lane, "and another " + LONG)
        assert len([e for e in lane.runtime.journal.entries if "action=save" in e.request.query]) == len(saves)
        assert len([r for r in caplog.records if "saving KV is off" in r.getMessage()]) == 1


async def test_case_52_a_full_disk_costs_no_request(
        tmp_path: Path, autojump_clock: trio.abc.Clock, caplog: pytest.LogCaptureFixture) -> None:
    async with open_hard(tmp_path / "kv") as lane:
        lane.runtime.config.disk_bytes = 20_000
        for n in range(6):
            await fan_out(lane, f"{n} {LONG}")
        assert len([r for r in caplog.records if "saving KV is off" in r.getMessage()]) == 1
        assert not files(tmp_path / "kv") and not list((tmp_path / "kv").glob("kvt*"))
        (note,) = (await lane.status())["inject"]["notes"]
        assert note.startswith("nothing is saved now: ") and "Unable to save slot" in note
        assert metric(lane.metrics, "kvstream_inject_saving", backend=lane.engine.name) == 0
        assert metric(lane.metrics, "kvstream_inject_saving_off_total", backend=lane.engine.name, why="faults") == 1


async def test_case_52_files_go_before_others_are_written(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    limit = 2**20
    sizes = []
    async with open_hard(tmp_path / "kv", disk_bytes_max=limit) as lane:
        async def watch() -> None:
            while True:
                sizes.append(sum(path.stat().st_size for path in (tmp_path / "kv").glob("kv*.kv")))
                await trio.sleep(0.005)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            for n in range(8):
                await fan_out(lane, f"{n} {LONG}")
            nursery.cancel_scope.cancel()
    assert limit // 2 < max(sizes) <= limit


async def test_out_of_sight_a_bounded_set_of_names_is_used(
        tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    (tmp_path / "elsewhere").mkdir()
    async with open_hard(tmp_path / "kv", files_max=3, knobs={"slots_dir": str(tmp_path / "elsewhere")}) as lane:
        for n in range(6):
            await fan_out(lane, f"{n} {LONG}")
        assert 1 < len(list((tmp_path / "elsewhere").glob("kvr*.kv"))) <= 3
        assert not files(tmp_path / "elsewhere") and not files(tmp_path / "kv")
