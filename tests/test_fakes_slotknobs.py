"""The fake's knobs of slots and their files that no real server here can show: full disks, other models, sleep, a
router, images, restores without effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from kvstream.adapters.base import HttpCall
from tests.fakes import FakeRuntime, FakeUpstream, open_runtime


class Client:
    """Calls to a fake in memory; every value is JSON."""

    def __init__(self, runtime: FakeRuntime) -> None:
        self.upstream = FakeUpstream(runtime)

    async def get(self, path: str) -> tuple[int, Any]:
        reply = await self.upstream.request(HttpCall("GET", path), timeout_s=99)
        return reply.status, reply.json()

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        reply = await self.upstream.request(HttpCall("POST", path, (), json.dumps(body).encode()), timeout_s=999)
        return reply.status, reply.json()

    async def act(self, slot: int, action: str, name: str = "a.kv", **more: Any) -> tuple[int, Any]:
        return await self.post(f"/slots/{slot}?action={action}", {"filename": name, **more})

    async def read(self, ids: list[int], slot: int = -1, answer: int = 0, **more: Any) -> dict[str, Any]:
        status, value = await self.post("/completion", {"prompt": ids, "id_slot": slot, "n_predict": answer, **more})
        assert status == 200, value
        return dict(value)

    async def cached(self, ids: list[int], slot: int = -1) -> int:
        return int((await self.read(ids, slot))["timings"]["cache_n"])


IDS = list(range(100, 140))


async def test_files_are_real_where_a_directory_is_given(autojump_clock: Any, tmp_path: Path) -> None:
    async with open_runtime(slots_dir=str(tmp_path), cell_bytes=64) as runtime:
        client = Client(runtime)
        await client.read(IDS, 0)
        saved = (await client.act(0, "save"))[1]
        data = (tmp_path / "a.kv").read_bytes()
        assert len(data) == saved["n_written"] and data.startswith(b"qsgg")
        assert (await client.act(2, "restore"))[1]["n_read"] == len(data)
        assert await client.cached([*IDS, 1], 2) == 40
        for cut in (0, 3, 20, 100, len(data) - 1):
            (tmp_path / "a.kv").write_bytes(data[:cut])
            assert (await client.act(2, "restore"))[0] == 400
        (tmp_path / "a.kv").write_bytes(data)
    for other in ({"slots": 2}, {"unified": True}, {"cell_bytes": 32}, {"n_ctx": 4 * 39}):
        async with open_runtime(**{"slots_dir": str(tmp_path), "cell_bytes": 64, **other}) as runtime:
            assert (await Client(runtime).act(0, "restore"))[0] == 400


@pytest.mark.parametrize("how", ["other model", "flipped bit", "same"])
async def test_wrong_kv_is_restored_without_a_word(autojump_clock: Any, tmp_path: Path, how: str) -> None:
    knobs: dict[str, Any] = {"slots_dir": str(tmp_path), "cell_bytes": 64}
    async with open_runtime(**knobs) as runtime:
        client = Client(runtime)
        await client.read(IDS, 0)
        await client.act(0, "save")
        right = (await client.read([*IDS, 1], 0, 5))["content"]
    if how == "flipped bit":
        data = bytearray((tmp_path / "a.kv").read_bytes())
        data[-5] ^= 1
        (tmp_path / "a.kv").write_bytes(data)
    async with open_runtime(model="other" if how == "other model" else "fake-model", **knobs) as runtime:
        client = Client(runtime)
        assert (await client.act(1, "restore"))[0] == 200
        reply = await client.read([*IDS, 1], 1, 5)
        assert reply["timings"]["cache_n"] == 40
        assert (reply["content"] == right) is (how == "same")
        assert len(runtime.journal.corrupted) == (how != "same")


@pytest.mark.parametrize("real_files", [True, False])
async def test_a_full_disk_leaves_half_a_file(autojump_clock: Any, tmp_path: Path, real_files: bool) -> None:
    folder = str(tmp_path) if real_files else ""
    async with open_runtime(slots_dir=folder, cell_bytes=1000, disk_bytes=50_000) as runtime:
        client = Client(runtime)
        await client.read(IDS, 0)
        assert (await client.act(0, "save", "a.kv"))[0] == 200
        status, reply = await client.act(0, "save", "b.kv")
        assert (status, reply["error"]["message"]) == (500, "Unable to save slot")
        assert (await client.act(1, "restore", "b.kv"))[0] == 400
        assert (await client.act(1, "restore", "a.kv"))[0] == 200
        if real_files:
            assert 0 < (tmp_path / "b.kv").stat().st_size < (tmp_path / "a.kv").stat().st_size
        runtime.config.disk_bytes = 1e9
        assert (await client.act(0, "save", "b.kv"))[0] == 200


async def test_a_file_is_half_written_while_a_save_goes_on_and_all_else_waits(
    autojump_clock: Any, tmp_path: Path
) -> None:
    async with open_runtime(slots_dir=str(tmp_path), cell_bytes=64, save_s=5) as runtime:
        client = Client(runtime)
        await client.read(IDS, 0)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.act, 0, "save")
            await trio.sleep(1)
            half = (tmp_path / "a.kv").stat().st_size
            await client.read(IDS[:3], 1)
            assert trio.current_time() - began >= 5
        assert 0 < half < (tmp_path / "a.kv").stat().st_size


async def test_a_restore_without_effect(autojump_clock: Any) -> None:
    async with open_runtime(restore_mode="noop_200") as runtime:
        client = Client(runtime)
        await client.read(IDS, 0)
        assert (await client.act(0, "save"))[1]["n_saved"] == 40
        assert (await client.act(1, "restore"))[1]["n_restored"] == 40
        assert await client.cached([*IDS, 1], 1) == 0
        assert await client.cached([*IDS, 1, 2], 1) == 41  # what the slot computed itself counts
        runtime.config.window = 40
        await client.act(2, "restore")
        assert await client.cached([*IDS, 1], 2) == 40


async def test_sleep_loses_all_and_looking_at_the_slots_wakes(autojump_clock: Any) -> None:
    async with open_runtime(sleep_idle_s=10, wake_s=2) as runtime:
        client = Client(runtime)
        await client.read(IDS, 0)
        await trio.sleep(9)
        assert not (await client.get("/props"))[1]["is_sleeping"]
        assert await client.cached([*IDS, 1], 0) == 40
        await trio.sleep(11)
        for path in ("/health", "/v1/models"):
            assert (await client.get(path))[0] == 200
        assert (await client.get("/props"))[1]["is_sleeping"]
        began = trio.current_time()
        await client.get("/slots")
        assert trio.current_time() == pytest.approx(began + 2)
        assert not (await client.get("/props"))[1]["is_sleeping"]
        assert await client.cached([*IDS, 1], 0) == 0
        assert runtime.sleeps == 1


async def test_a_router_has_slots_per_model_and_wants_to_be_told_which(autojump_clock: Any) -> None:
    async with open_runtime(router=True, model="a", models=("b",), models_max=2) as runtime:
        client = Client(runtime)
        assert (await client.get("/props"))[1]["role"] == "router"
        assert [card["status"]["value"] for card in (await client.get("/models"))[1]["data"]] == ["unloaded"] * 2
        assert (await client.get("/slots"))[0] == 400
        assert (await client.get("/slots?model=a&autoload=false"))[0] == 400
        assert (await client.act(0, "save"))[0] == 400
        assert (await client.post("/completion", {"prompt": "x", "model": "c"}))[1]["error"]["message"] == (
            "model 'c' not found")
        await client.read(IDS, 0, model="a")
        assert (await client.act(0, "save", "a.kv", model="a"))[1]["n_saved"] == 40
        assert (await client.act(0, "save", "b.kv", model="b"))[1]["n_saved"] == 0
        assert (await client.get("/props?model=b"))[1]["model_alias"] == "b"
        assert runtime.children.loads == 2 and len(runtime.journal.calls) == 2
        runtime.config.models_max = 1
        runtime.restart()
        await client.read(IDS, 0, model="a")
        await client.read(IDS, 0, model="b")
        assert (await client.read([*IDS, 1], 0, model="a"))["timings"]["cache_n"] == 0
        assert runtime.children.evicted == 2


async def test_saving_images_is_refused(autojump_clock: Any) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, picture]}], "id_slot": 1}
    async with open_runtime(mmproj="media") as runtime:
        client = Client(runtime)
        assert (await client.get("/props"))[1]["modalities"]["vision"]
        await client.post("/v1/chat/completions", body)
        await client.read(IDS, 0)
        assert (await client.act(0, "save"))[0] == 200
        status, reply = await client.act(1, "save")
        assert status == 501 and "multimodal" in reply["error"]["message"]
        runtime.config.mmproj = "all"
        assert (await client.act(0, "save"))[0] == 501


async def test_without_a_path_to_save_every_slot_action_is_refused(autojump_clock: Any) -> None:
    async with open_runtime(slot_save=False) as runtime:
        assert [(await Client(runtime).act(0, action))[0] for action in ("save", "restore", "erase")] == [501] * 3


async def test_an_answer_ends_where_it_would_have_ended_if_it_is_resumed(autojump_clock: Any) -> None:
    async with open_runtime(answer_tokens=None, ends_every=23) as runtime:
        client = Client(runtime)
        whole = await client.read(IDS, answer=500, return_tokens=True)
        assert whole["stop_type"] == "eos" and len(whole["tokens"]) > 3
        for k in range(1, len(whole["tokens"])):
            rest = await client.read([*IDS, *whole["tokens"][:k]], answer=500 - k, return_tokens=True)
            assert rest["tokens"] == whole["tokens"][k:] and rest["stop_type"] == "eos"
        text = await client.post("/detokenize", {"tokens": whole["tokens"]})
        assert text[1]["content"] == whole["content"]
        assert (await client.post("/tokenize", {"content": whole["content"]}))[1]["tokens"] == whole["tokens"]
