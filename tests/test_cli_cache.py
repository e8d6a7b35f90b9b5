"""``kvstream cache``: what it lists, what it deletes, and what it leaves alone."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvstream import cli
from kvstream.adapters.slot_calls import Identity, SlotDone
from kvstream.config import Config
from kvstream.gateway.prune import Folder, folders_of
from tests.gateway.test_kvstore import IDENTITY, ids_of, kv_file, save, spec_of, store_at

SIZE = len(kv_file(ids_of(1)))
NAMES = [spec_of(ids_of(n)).name.removesuffix(".kv") for n in range(10)]


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration and no state but that of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("kvstream.gateway.prune.llama_flags", lambda port: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "kv"
    path.mkdir()
    return path


async def fill(folder: Path, *seeds: int, wall: float | None = None, identity: Identity = IDENTITY) -> None:
    store = store_at(folder, identity=identity, wall=wall)
    await store.load()
    for seed in seeds:
        await save(store, folder, ids_of(seed))
    store.close()


def run(*argv: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli.main, ["cache", *argv])
    assert result.exit_code == code, result.output + result.stderr
    return result.output if code == 0 else result.stderr


def said(*argv: str) -> Any:
    return json.loads(run(*argv, "--json"))


def done(*argv: str) -> tuple[list[str], int]:
    told = said(*argv)
    assert told["forgotten"] == [] == told["not_listed"]
    return told["deleted"], told["bytes"]


async def fill_remote(state: Path, *seeds: int) -> list[str]:
    """The names of the files on the disk that is not seen."""
    store = store_at(None, state)
    await store.load()
    files = []
    for seed in seeds:
        files.append(store.temporary(spec_of(ids_of(seed)).name))
        await store.keep(spec_of(ids_of(seed)), SlotDone(0, 100, SIZE))
    store.close()
    return files


async def test_ls(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / f"{'very-' * 30}small.gguf"
    model.write_bytes(b"GGUF")
    at = model.stat()
    facts = {"model_path": str(model), "file model": f"{at.st_size} bytes of {at.st_mtime_ns}"}
    await fill(folder, 1, 2, identity=Identity(IDENTITY.digest, facts), wall=time.time() - 7200)
    store = store_at(folder)
    await store.load()
    store.used(f"{NAMES[1]}.kv")
    store.close()
    out = run("ls", "--dir", str(folder))
    lines = out.splitlines()
    assert NAMES[1][-16:] in lines[1] and NAMES[2][-16:] in lines[2], "the latest used first"
    assert model.name in lines[1] and "100" in lines[1] and "2 h" in lines[1] and "0 s" in lines[1]
    assert lines[1].rstrip().endswith("ok") and f"2 files, 0.0 of 8,192 MiB in {folder}" in out
    rows = said("ls", "--dir", str(folder))["files"]
    assert [(row["name"], row["hits"], row["bytes"]) for row in rows] == [(NAMES[1], 1, SIZE), (NAMES[2], 0, SIZE)]
    model.write_bytes(b"GGUF!")
    assert "changed" in run("ls", "--dir", str(folder))
    model.unlink()
    assert "gone" in run("ls", "--dir", str(folder))
    (folder / rows[0]["file"]).write_bytes(b"short")
    (folder / rows[1]["file"]).unlink()
    assert [row["state"] for row in said("ls", "--dir", str(folder))["files"]] == ["wrong size", "missing"]
    (folder / f"{NAMES[1]}.kv.json").write_bytes(b"{")
    assert "damaged: " in run("ls", "--dir", str(folder))


def test_nothing_there(tmp_path: Path) -> None:
    assert "0 files" in run("ls") and "no folder of saved KV yet" in run("ls")
    assert run("gc") == "deleted 0 files, 0.0 MiB\n" == run("rm", "--all")
    assert "is not a folder" in run("ls", "--dir", str(tmp_path / "none"), code=1)


async def test_rm(folder: Path) -> None:
    await fill(folder, 1, 2, 3, 4)
    at = ("--dir", str(folder))
    assert "is not in the store" in run("rm", "nothing", *at, code=1)
    assert "could be any of 4" in run("rm", IDENTITY.digest, *at, code=1)
    assert "either names" in run("rm", *at, code=2) and "either names" in run("rm", "x", "--all", *at, code=2)
    assert run("rm", f"{NAMES[1]}.kv", NAMES[2][:24], *at).startswith("deleted 2 files")
    assert {row["name"] for row in said("ls", *at)["files"]} == {NAMES[3], NAMES[4]}
    assert done("rm", NAMES[3][-16:], *at) == ([NAMES[3]], SIZE)
    (folder / "mine.kv").touch()
    run("rm", "--all", *at)
    assert [path.name for path in folder.iterdir()] == ["mine.kv"]


async def test_rm_while_a_kvstream_runs(folder: Path) -> None:
    from kvstream.errors import StoreError

    store = store_at(folder)
    await store.load()
    kept = await save(store, folder, ids_of(1))
    writing = store.temporary(spec_of(ids_of(2)).name)
    (folder / writing).write_bytes(kv_file(ids_of(2)))
    run("rm", "--all", "--dir", str(folder))
    run("gc", "--dir", str(folder))
    with pytest.raises(StoreError):
        await store.offer(kept.name)
    assert (folder / writing).exists()
    await store.keep(spec_of(ids_of(2)), SlotDone(0, 100, SIZE))
    assert len(said("ls", "--dir", str(folder))["files"]) == 1
    store.close()


async def test_gc(folder: Path) -> None:
    now = time.time()
    for seed, age_s in ((1, 9 * 86400), (2, 3 * 86400), (3, 3600), (4, 0)):
        await fill(folder, seed, wall=now - age_s)
    at = ("--dir", str(folder))
    assert said("gc", *at)["deleted"] == []
    assert said("gc", "--age", "7d", *at)["deleted"] == [NAMES[1]]
    assert done("gc", "--size", str(2 * SIZE), *at) == ([NAMES[2]], SIZE)
    dead = folder / "kvt01234567012345.kv"
    dead.write_bytes(bytes(1000))
    files = {row["name"]: row["file"] for row in said("ls", *at)["files"]}
    (folder / files[NAMES[3]]).write_bytes(b"short")
    assert set(said("gc", *at)["deleted"]) == {NAMES[3]} and not dead.exists()
    (folder / f"{NAMES[4]}.kv.json").write_bytes(b"{")
    assert done("gc", *at) == ([], SIZE)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("option", "text"), [
    ("--size", "much"), ("--size", "-1"), ("--size", "1P"), ("--age", "7"), ("--age", "soon"), ("--age", "7 y")])
def test_sizes_and_ages_that_are_none(option: str, text: str, folder: Path) -> None:
    assert f"write it like {'500M' if option == '--size' else '12h'}" in run(
        "gc", option, text, "--dir", str(folder), code=2)


async def test_where_it_looks(tmp_path: Path) -> None:
    state = tmp_path / "state" / "kvstream"
    for name in ("slots/0", "slots/1", "slots/x", "remote/aa/remote-0", "remote/bb/remote-1"):
        (state / name).mkdir(parents=True)
    there = [Folder(state / "slots" / "0"), Folder(state / "slots" / "1"), Folder(state / "remote/aa/remote-0", True),
             Folder(state / "remote/bb/remote-1", True)]
    assert folders_of(Config(), lambda port: "") == there
    assert folders_of(Config(), lambda port: "/kv" if port == 8081 else "") == [Folder(Path("/kv")), *there]
    (tmp_path / "kvstream.toml").write_text(f'[inject]\ndir = "{tmp_path}"\n', "utf-8")
    await fill(tmp_path, 1)
    await fill(state / "slots" / "1", 2)
    files = await fill_remote(state / "remote" / "aa", 3)
    rows = said("ls")["files"]
    assert {(row["name"], row["state"]) for row in rows} == {
        (NAMES[1], "whole"), (NAMES[2], "whole"), (NAMES[3], "elsewhere")}
    assert "there" in run("ls")
    assert files[0] in CliRunner().invoke(cli.main, ["cache", "rm", "--all"]).output
    assert said("ls")["files"] == [] and (tmp_path / "kvstream.toml").exists()


async def test_what_lies_on_a_disk_that_is_not_seen_is_forgotten_not_deleted(tmp_path: Path) -> None:
    files = await fill_remote(tmp_path / "state/kvstream/remote/aa", 1, 2, 3)
    result = CliRunner().invoke(cli.main, ["cache", "rm", NAMES[1]])
    assert result.exit_code == 3 and "deleted 1" not in result.output and result.output.startswith("forgot 1 entry")
    assert f"delete them there: {files[0]}\n" in result.output
    told = run("gc", "--size", "1")
    assert "deleted 0 files" in told and "2 of the entries lie on a server's disk and do not count" in told
    result = CliRunner().invoke(cli.main, ["cache", "gc", "--age", "0s", "--json"])
    assert result.exit_code == 3
    told = json.loads(result.output)
    assert told["deleted"] == [] and told["bytes"] == 0 and {row["file"] for row in told["forgotten"]} == {*files[1:]}


async def test_what_is_forgotten_is_not_offered_by_a_kvstream_that_runs(tmp_path: Path) -> None:
    from kvstream.errors import StoreError

    store = store_at(None, tmp_path / "state/kvstream/remote/aa")
    await store.load()
    store.temporary(spec_of(ids_of(1)).name)
    kept = await store.keep(spec_of(ids_of(1)), SlotDone(0, 100, SIZE))
    assert await store.offer(kept.name)
    CliRunner().invoke(cli.main, ["cache", "rm", "--all"])
    with pytest.raises(StoreError):
        await store.offer(kept.name)
    store.close()


async def test_files_without_a_manifest_are_shown_and_left(folder: Path) -> None:
    await fill(folder, 1)
    (folder / "mine.kv").write_bytes(bytes(2**20))
    for number in range(3):
        (folder / f"kvr01234567{number:06x}.kv").write_bytes(bytes(2**20))
    out = run("ls", "--dir", str(folder))
    assert f"not listed: 3 .kv files (3.0 MiB) without a manifest in {folder}, written by its server for" in out
    assert f"not listed: 1 .kv file (1.0 MiB) without a manifest in {folder}, of another program" in out
    out = run("rm", "--all", "--dir", str(folder))
    assert out.startswith("deleted 1 file,") and "not listed: 3 .kv files" in out
    assert len(list(folder.iterdir())) == 4
    assert [(row["files"], row["bytes"]) for row in said("ls", "--dir", str(folder))["not_listed"]] == [
        (3, 3 * 2**20), (1, 2**20)]


async def test_names_as_they_are_shown(folder: Path) -> None:
    at = ("--dir", str(folder))
    await fill(folder, 1, 2, 3, 4)
    shown = [name[-16:] for name in NAMES]
    assert run("rm", shown[1][:8], *at).startswith("deleted 1 file,")
    assert run("rm", shown[2][-8:], *at).startswith("deleted 1 file,")
    assert run("rm", shown[3], *at).startswith("deleted 1 file,")
    for short in ("", NAMES[4][-3:], "x"):
        assert "too short" in run("rm", short, *at, code=1)
    assert run("rm", NAMES[4], *at).startswith("deleted 1 file,")


@pytest.mark.skipif(os.name != "posix", reason="permissions")
def test_a_folder_that_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("kvstream.gateway.kvfiles.os.scandir", refuse)
    assert "cannot be read: Permission denied" in run("ls", "--dir", str(folder), code=1)
