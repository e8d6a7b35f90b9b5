"""Which folders ``kvstream cache`` knows, and how it shows them."""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path

import pytest
from rich.console import Console

from kvstream.adapters.slot_calls import Identity
from kvstream.gateway import kvfolders
from kvstream.gateway.cacheview import shortened, show
from kvstream.gateway.inject_settings import InjectSettings
from kvstream.gateway.kvfolders import Known, recall, remember
from kvstream.gateway.kvplace import open_store
from kvstream.gateway.prune import Folder, drop_unused, look
from kvstream.gateway.slot_ports import SlotsFound
from tests.gateway.test_kvstore import IDENTITY
from tests.test_cli_cache import NAMES, fill, fill_remote, folder, run, said, somewhere

__all__ = ["folder", "somewhere"]


def known(path: Path, used: float = 0.0, url: str = "http://127.0.0.1:9000") -> Known:
    return Known(path, url, 2**30, False, used)


async def test_the_folder_of_a_server_that_was_stopped_is_still_listed(folder: Path, tmp_path: Path) -> None:
    await fill(folder, 1)
    assert "the server at http://127.0.0.1:8081 is not seen" in run("ls")
    (tmp_path / "kvstream.toml").write_text('[backend]\nbase_url = "http://127.0.0.1:9000"\n', "utf-8")
    assert "the server at http://127.0.0.1:9000 is not seen" in run("ls") and said("ls")["files"] == []
    found = SlotsFound("hard", None, "", identity=IDENTITY, slots_dir_hint=str(folder))
    store = open_store(found, InjectSettings(disk_bytes_max=3 * 2**30), "http://u:pw@127.0.0.1:9000", page_tokens=0)
    await store.load()
    store.close()
    assert [row["name"] for row in said("ls")["files"]] == [NAMES[1]]
    assert said("ls")["limits"] == {str(folder): 3 * 2**30}
    assert f"1 file, 0.0 of 3,072 MiB in {folder}\n" in run("ls") and f"of 3,072 MiB in {folder}" in run(
        "ls", "--dir", str(folder))
    assert recall(tmp_path / "state/kvstream")[0].url == "http://127.0.0.1:9000"
    assert "is not seen here now" not in run("ls")
    folder.rename(tmp_path / "gone")
    assert "no folder of saved KV yet" in run("ls")


async def test_a_folder_of_a_server_that_is_not_seen_tells_whose_it_is(tmp_path: Path) -> None:
    store = open_store(SlotsFound("hard", None, "", identity=IDENTITY), InjectSettings(), "http://far:1", page_tokens=0)
    await store.load()
    store.close()
    (remote,) = (tmp_path / "state/kvstream/remote").iterdir()
    await fill_remote(remote, 1, 2)
    assert "2 files, 0.0 of 8,192 MiB there: on the disk of the server at http://far:1, not seen" in run("ls")


def test_what_is_remembered_is_bounded_and_survives_nonsense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(70):
        remember(tmp_path, known(tmp_path / str(number), number))
    assert [each.path.name for each in recall(tmp_path)] == [str(number) for number in range(69, 5, -1)]
    remember(tmp_path, known(tmp_path / "6", 100_000))
    assert [each.path.name for each in recall(tmp_path)][:2] == ["6", "69"] and len(recall(tmp_path)) == 64
    before = (tmp_path / kvfolders.FILE).read_bytes()
    remember(tmp_path, known(tmp_path / "6", 100_200))
    assert (tmp_path / kvfolders.FILE).read_bytes() == before, "nothing new"
    monkeypatch.setattr(kvfolders.json, "dumps", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        remember(tmp_path, known(tmp_path / "x", 300))
    assert (tmp_path / kvfolders.FILE).read_bytes() == before and len(list(tmp_path.iterdir())) == 2
    for text in (b"", b"[]", b'{"folders": 1}', b'{"folders": [1, {"path": "x"}, null]}', b"\xff", b"[" * 100000):
        (tmp_path / kvfolders.FILE).write_bytes(text)
        assert recall(tmp_path) == []


async def test_one_line_for_each_folder_with_files(folder: Path, tmp_path: Path) -> None:
    state = tmp_path / "state/kvstream/remote"
    for number in range(38):
        await fill_remote(state / f"{number:02}")
    await fill_remote(state / "07", 1)
    out = run("ls")
    assert "and 37 empty folders" in out and len(out.splitlines()) == 5
    assert "of 8,192 MiB (limit of this configuration) there: on the disk of a server, not seen from here" in out
    run("gc")
    assert "empty" not in run("ls") and len(said("ls")["files"]) == 1
    assert [path.parent.parent.name for path in state.glob("*/remote-0/*.json")] == ["07"]


async def test_an_empty_remote_folder_whose_names_were_used_stays(tmp_path: Path) -> None:
    await fill_remote(tmp_path / "state/kvstream/remote/aa", 1)
    here = tmp_path / "state/kvstream/remote/aa/remote-0"
    os.utime(here / "id", (1, 1))
    for path in here.glob("*.json"):
        path.unlink()
    drop_unused(here)
    assert (here / "id").exists()
    drop_unused(here, lambda: time.time() + 40 * 86400)
    assert not here.exists()


async def test_it_fits_80_columns(folder: Path) -> None:
    facts = {"model_path": "/m/Some-Quite-Long-Family-Name-30B-A3B-Instruct-2507-UD-Q4_K_XL.gguf"}
    await fill(folder, 1, identity=Identity(IDENTITY.digest, facts))
    out = io.StringIO()
    folders = [Folder(folder)]
    show(look(folders), folders, [], 2**30, time.time(),
         console=Console(file=out, width=80, force_terminal=True, color_system=None))
    table = out.getvalue().splitlines()[:2]
    assert max(map(len, table)) <= 80 and "Some-Qu" in table[1] and "XL.gguf" in table[1], table
    assert facts["model_path"].rpartition("/")[2] in run("ls", "--dir", str(folder)), "a pipe has room"
    assert shortened("abcdefgh", 5) == "ab…gh" and shortened("abcde", 5) == "abcde"


def test_json_of_what_is_remembered(tmp_path: Path) -> None:
    remember(tmp_path, known(tmp_path, 5.0))
    assert json.loads((tmp_path / kvfolders.FILE).read_text())["folders"][0]["path"] == str(tmp_path)
    assert (tmp_path / kvfolders.FILE).stat().st_mode & 0o077 == 0
