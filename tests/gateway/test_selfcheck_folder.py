"""What a self-check leaves on a disk, what it says of a wrong inject.dir, and where a relative model is."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import pytest

from kvstream.adapters.slot_calls import Identity
from kvstream.gateway import machine
from kvstream.gateway.manifest import Manifest, keys_of
from kvstream.gateway.prune import Folder, Row, tidy
from kvstream.gateway.slotplace import SlotPlace
from tests.fakes import open_runtime
from tests.gateway.test_case_doctor import process
from tests.gateway.test_selfcheck import check


@pytest.mark.parametrize("there", [True, False])
async def test_a_wrong_inject_dir_is_said_once_and_leaves_one_file(
        autojump_clock: object, tmp_path: Path, caplog: pytest.LogCaptureFixture, there: bool) -> None:
    slots, other = tmp_path / "slots", tmp_path / "other"
    slots.mkdir()
    if there:
        other.mkdir()
    async with open_runtime(slots_dir=str(slots), cell_bytes=64) as runtime:
        await check(runtime, dir=str(other))
        (said,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        text = said.getMessage()
        assert f"inject.dir = {str(other)!r} is not the server's --slot-save-path" in text
        assert ("has no kvstreamcheck.kv of" if there else "it is not there") in text
        for _ in range(3):
            await check(runtime, dir=str(other))
        assert sorted(path.name for path in slots.iterdir()) == ["kvstream-probe.bin", "kvstreamcheck.kv"]
        caplog.clear()
        await check(runtime, dir=str(slots))
        assert not caplog.records and [path.name for path in slots.iterdir()] == ["kvstreamcheck.kv"]


async def test_a_server_that_cannot_save_has_its_folder_and_the_room_there_named(
        autojump_clock: object, tmp_path: Path) -> None:
    """llama.cpp says no more than that it was unable to, on a full disk too."""
    async with open_runtime(slots_dir=str(tmp_path), disk_bytes=100) as runtime:
        found = await check(runtime, dir=str(tmp_path))
        assert found.mode == "soft" and not found.settled
        assert re.fullmatch(
            rf"a slot call failed: Unable to save slot \(in {tmp_path}, where [\d,]+ MiB are free\)", found.why)
        away = await check(runtime)
        assert away.why == "a slot call failed: Unable to save slot"
        assert (await check(runtime, dir=str(tmp_path / "gone"))).why == away.why


def test_gc_removes_what_checks_left(tmp_path: Path) -> None:
    for name in ("kvstreamcheck.kv", "kvstreamcheck0123abcd.kv", "kvstream-probe.bin", "kvstreamcheckers.kv"):
        (tmp_path / name).write_bytes(bytes(10))
    assert tidy([Folder(tmp_path)]) == 0, "a check may be at work"
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    assert tidy([Folder(tmp_path)]) == 30 and [path.name for path in tmp_path.iterdir()] == ["kvstreamcheckers.kv"]


async def test_a_relative_model_is_looked_for_where_its_server_runs(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "home/models/m.gguf"
    model.parent.mkdir(parents=True)
    model.write_bytes(b"GGUF")
    proc = tmp_path / "proc"
    process(proc, 1, "llama-server", "--port", "8081", "-m", "models/m.gguf")
    (proc / "1/cwd").symlink_to(tmp_path / "home")
    process(proc, 2, "llama-server", "--port", "8082")
    assert machine.llama_folder(8081, proc) == str(tmp_path / "home") and not machine.llama_folder(8082, proc)
    monkeypatch.setattr("kvstream.gateway.slotplace.llama_folder", lambda port: machine.llama_folder(port, proc))
    facts = await SlotPlace("", True, 8081).model_facts("models/m.gguf")
    assert facts["path"] == str(model) and facts["model"].startswith("4 bytes of ")
    assert await SlotPlace("", True, 8082).model_facts("models/m.gguf") == {}
    assert set(await SlotPlace("", True, 8082).model_facts(str(model))) == {"model"}
    identity = Identity("0" * 16, {"model_path": "models/m.gguf", **{f"file {k}": v for k, v in facts.items()}})
    keys = keys_of(bytes(64), bytes(range(16)), 64)
    row = Row(Folder(tmp_path), Manifest("a.kv", "b.kv", identity.digest, identity.facts, keys, 16, 1, "", 0.0, 0.0),
              "whole")
    assert row.model_state == "ok"
    model.write_bytes(b"GGUF!")
    assert row.model_state == "changed"
