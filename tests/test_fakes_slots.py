"""The fake keeps llama.cpp's contract of slots, dangers included, and the real server keeps the same one.

A test with a ``stand`` runs twice: against the fake over TCP and against the real server.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any

import pytest
import trio
from attrs import define, field

from kvstream.adapters.base import HttpCall
from tests.fakes import FakeRuntime, FakeUpstream, open_runtime
from tests.fakes.client import fetch, open_request, send_request
from tests.fakes.real import AVAILABLE, RealLlama, real_llama
from tests.fakes.server import open_server
from tests.fakes.slotfiles import NO_RESTORE

COMPLETION = "/completion"


@define
class Heard:
    """A streamed answer while it grows. ``slot`` comes with its end; times are Trio's."""

    ids: list[int] = field(factory=list)
    sent: bool = False
    slot: int | None = None
    timings: dict[str, Any] = field(factory=dict)
    began: float | None = None
    ended: float | None = None


@define
class Stand:
    """A server on ``port``, real or not. ``runtime`` is the fake's inside."""

    port: int
    runtime: FakeRuntime | None = None
    server: RealLlama | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """It computes nothing for the length of the block, so that an answer is under way until then."""
        with self.server.held() if self.server is not None else _wedged(self.runtime):
            yield

    async def act(self, slot: int | str, action: str, name: str = "a.kv") -> tuple[int, Any]:
        status, data = await fetch(self.port, "POST", f"/slots/{slot}?action={action}", {"filename": name})
        return status, json.loads(data)

    async def read(self, ids: list[int], slot: int = -1, answer: int = 0, **more: Any) -> dict[str, Any]:
        """A whole native answer."""
        body = {"prompt": ids, "n_predict": answer, "id_slot": slot, "temperature": 0, "ignore_eos": True, **more}
        status, data = await fetch(self.port, "POST", COMPLETION, body)
        assert status == 200, data
        value: dict[str, Any] = json.loads(data)
        return value

    async def cached(self, ids: list[int], slot: int = -1) -> int:
        return int((await self.read(ids, slot))["timings"]["cache_n"])

    async def listen(self, heard: Heard, ids: list[int], answer: int, slot: int = -1) -> None:
        """A streamed native answer, read to its end."""
        body = {"prompt": ids, "n_predict": answer, "id_slot": slot, "temperature": 0, "ignore_eos": True,
                "stream": True}
        response = await send_request(self.port, "POST", COMPLETION, body)
        heard.sent = True
        await response.read_head()
        heard.began = trio.current_time()
        while event := await response.read_event():
            value = json.loads(event.removeprefix(b"data: "))
            heard.ids += value["tokens"]
            if value["stop"]:
                heard.slot, heard.timings, heard.ended = value["id_slot"], value["timings"], trio.current_time()
                break
        await response.close()

    async def slots(self) -> list[dict[str, Any]]:
        value: list[dict[str, Any]] = json.loads((await fetch(self.port, "GET", "/slots"))[1])
        return value


@contextmanager
def _wedged(runtime: FakeRuntime | None) -> Iterator[None]:
    assert runtime is not None
    runtime.wedge()
    yield
    runtime.wedge(False)


def prompt(first: int, tokens: int = 40) -> list[int]:
    """Ids that both vocabularies have; prompts of another ``first`` share none of their beginning."""
    return [1000 * first + i for i in range(tokens)]


Open = Callable[..., AbstractAsyncContextManager[Stand]]


@asynccontextmanager
async def _fake(**knobs: Any) -> AsyncIterator[Stand]:
    async with open_runtime(**{"decode_rate": 200, "prefill_rate": 20000, **knobs}) as runtime:
        async with open_server(runtime) as server:
            yield Stand(server.port, runtime)


@asynccontextmanager
async def _real(*, slots: int = 4, n_ctx: int = 2048, unified: bool = False, cache_ram: bool = False,
                **more: Any) -> AsyncIterator[Stand]:
    async with real_llama(n_parallel=slots, n_ctx=n_ctx, kv_unified=unified, cache_ram_mib=256 * cache_ram,
                          **more) as server:
        yield Stand(server.port, server=server)


real = [pytest.mark.real, pytest.mark.skipif(not AVAILABLE, reason="the demo extra is not installed")]


@pytest.fixture(params=["fake", pytest.param("real", marks=real)])
def stand(request: pytest.FixtureRequest) -> Open:
    return _fake if request.param == "fake" else _real


async def until(true: Callable[[], object], within_s: float = 120.0) -> None:
    with trio.fail_after(within_s):
        while not true():
            await trio.sleep(0.005)


# --- beside the real server -------------------------------------------------------------------------------------------


async def test_slot_numbers_wrap_around(stand: Open) -> None:
    async with stand(slots=4) as server:
        assert (await server.read(prompt(1), slot=99))["id_slot"] == 3
        assert (await server.read(prompt(2), slot=-5))["id_slot"] == 3
        assert (await server.act(-1, "erase"))[1] == {"id_slot": -1, "n_erased": 40}
        assert (await server.act("1x", "erase"))[1]["id_slot"] == 1
        status, reply = await server.act("abc", "save")
        assert (status, reply["error"]["message"]) == (400, "Invalid slot ID")
        assert (await server.act(0, "steal"))[1]["error"]["message"] == "Invalid action"


@pytest.mark.parametrize(("name", "good"), [
    ("a/b", False), ("..x", False), ("a..b", False), ("a:b", False), ("a*b", False), (" a", False), ("a ", False),
    ("a.", False), ("", False), ("a\\b", False), ("a\x01", False), ("a" * 256, False), (".hid", True), ("x y", True),
    ("ü", True), ("a" * 255, True)])
async def test_names(name: str, good: bool) -> None:
    async with open_runtime() as runtime:
        call = HttpCall("POST", "/slots/0?action=save", (), json.dumps({"filename": name}).encode())
        assert (await FakeUpstream(runtime).request(call, timeout_s=9)).status == (200 if good else 400)


@pytest.mark.real
@pytest.mark.skipif(not AVAILABLE, reason="the demo extra is not installed")
async def test_names_are_judged_as_the_real_server_does() -> None:
    names = ["a/b", "..x", "a..b", "a:b", "a*b", " a", "a ", "a.", "", "a\\b", "a\x01", "a" * 256, ".hid", "x y", "ü"]
    seen = []
    for opened in (_fake(), _real()):
        async with opened as server:
            seen.append([(await server.act(0, "save", name))[0] for name in names])
    assert seen[0] == seen[1]


async def test_a_prompt_that_is_only_read_is_all_that_the_slot_holds(stand: Open) -> None:
    async with stand(slots=2) as server:
        reply = await server.read(prompt(1), slot=1, return_tokens=True)
        assert reply["tokens_predicted"] == 1 and len(reply["tokens"]) == 1
        status, saved = await server.act(1, "save")
        assert (status, saved["n_saved"]) == (200, 40)
        assert saved["n_written"] == 32 + 4 * 2 + 16 + 24 * 30 + 40 * 23056
        assert (await server.act(0, "restore"))[1]["n_restored"] == 40
        assert await server.cached([*prompt(1), 7], slot=0) == 40
        assert await server.cached([*prompt(1)[:20], 7, 8], slot=0) == 20
        assert (await server.act(0, "save"))[1]["n_saved"] == 22
        assert (await server.act(1, "erase"))[1]["n_erased"] == 40
        assert (await server.act(1, "save", "empty.kv"))[1]["n_written"] == 32 + 4 * 2
        assert (await server.act(0, "restore", "empty.kv"))[1]["n_restored"] == 0


async def test_a_failed_restore_wipes_the_slot(stand: Open) -> None:
    async with stand(slots=2) as server:
        await server.read(prompt(1), slot=0)
        status, reply = await server.act(0, "restore", "missing.kv")
        assert (status, reply["error"]["message"]) == (400, NO_RESTORE)
        assert await server.cached(prompt(1), slot=0) == 0


async def test_a_resumed_answer_goes_on_with_the_same_tokens(stand: Open) -> None:
    async with stand(slots=1) as server:
        whole = await server.read(prompt(1), answer=12, return_tokens=True)
        assert len(whole["tokens"]) == 12
        cut = await server.read([*prompt(1), *whole["tokens"][:5]], answer=7, return_tokens=True)
        assert cut["tokens"] == whole["tokens"][5:]
        assert cut["timings"]["cache_n"] >= 40 + 4


async def test_what_is_pinned_to_a_busy_slot_waits_and_harms_nobody_without_the_ram_cache(stand: Open) -> None:
    async with stand(slots=2) as server:
        alone, first, second = Heard(), Heard(), Heard()
        await server.listen(alone, prompt(1), 60, slot=0)
        await server.act(0, "erase")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.listen, first, prompt(1), 60, 0)
            await until(lambda: len(first.ids) > 5)
            with server.held():
                nursery.start_soon(server.listen, second, prompt(2), 5, 0)
                await until(lambda: second.sent)
        assert first.ids == alone.ids
        assert second.slot == 0 and (second.began or 0) >= (first.ended or 0) - 0.05
        if server.runtime is not None:
            assert [entry.pinned_busy for entry in server.runtime.journal.calls] == [False, False, True]
            assert server.runtime.busy_pins == 1 and not server.runtime.journal.corrupted


async def test_t0_with_the_ram_cache_a_busy_pin_exchanges_the_kv_under_a_running_answer(stand: Open) -> None:
    async with stand(slots=2, cache_ram=True) as server:
        alone, victim, thief = Heard(), Heard(), Heard()
        await server.listen(alone, prompt(1), 120, slot=0)
        await server.act(0, "erase")
        await server.read(prompt(2), slot=1)
        await server.read(prompt(3), slot=1)  # what 2 left in the slot is in RAM now
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.listen, victim, prompt(1), 120, 0)
            await until(lambda: len(victim.ids) > 10)
            with server.held():
                nursery.start_soon(server.listen, thief, [*prompt(2), 7], 2, 0)
                await until(lambda: thief.sent)
        assert len(victim.ids) == 120 and victim.ids[:10] == alone.ids[:10]
        assert victim.ids != alone.ids  # and nobody said so
        if server.runtime is not None:
            assert server.runtime.corruptions == 1
            assert [entry.corrupted for entry in server.runtime.journal.calls] == [False, False, False, True, False]


async def test_t1_a_freed_slot_stays_idle_when_the_first_in_line_waits_for_another(stand: Open) -> None:
    async with stand(slots=2) as server:
        long, short, pinned, free = Heard(), Heard(), Heard(), Heard()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.listen, long, prompt(1), 150, 0)
            nursery.start_soon(server.listen, short, prompt(2), 30, 1)
            await until(lambda: len(long.ids) and len(short.ids))
            with server.held():
                nursery.start_soon(server.listen, pinned, prompt(3), 2, 0)
                await until(lambda: pinned.sent)
                await trio.sleep(0.05)
                nursery.start_soon(server.listen, free, prompt(4), 2)
                await until(lambda: free.sent)
        assert (short.ended or 0) < (long.ended or 0)
        assert (free.began or 0) >= (long.ended or 0) - 0.05


async def test_slot_actions_wait_for_a_busy_slot_and_happen_although_their_client_left(stand: Open) -> None:
    async with stand(slots=2) as server:
        heard = Heard()
        replies: list[tuple[int, Any]] = []

        async def save(name: str) -> None:
            replies.append(await server.act(0, "save", name))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.listen, heard, prompt(1), 40, 0)
            await until(lambda: heard.ids)
            with server.held():
                with trio.move_on_after(0.05):
                    await save("left.kv")
                assert not replies and heard.ended is None
                nursery.start_soon(save, "stayed.kv")
                await trio.sleep(0.05)
            await until(lambda: heard.ended)
            # one deferred task is taken up for each slot that comes free: the second save needs another release
            await trio.sleep(0.1)
            assert not replies
            await server.read(prompt(2), slot=1)
            await until(lambda: replies)
        assert replies[0][1]["n_saved"] == 40 + 40 - 1
        assert (await server.act(1, "restore", "left.kv"))[1]["n_restored"] == 40 + 40 - 1


async def test_unpinned_requests_go_to_the_likest_slot_or_to_the_one_unused_longest(stand: Open) -> None:
    async with stand(slots=4) as server:
        first = [(await server.read(prompt(i)))["id_slot"] for i in (1, 2, 3, 4)]
        assert sorted(first) == [0, 1, 2, 3]
        assert (await server.read([*prompt(3), 7]))["id_slot"] == first[2]
        assert (await server.read([*prompt(2)[:5], *prompt(9)]))["id_slot"] == first[1]  # 5 of 45
        assert (await server.read([*prompt(4)[:4], *prompt(9)]))["id_slot"] == first[0]  # 4 of 44 are too few


async def test_the_ram_cache_gives_back_what_a_slot_lost(stand: Open) -> None:
    for cache_ram, again in ((True, 40), (False, 0)):
        async with stand(slots=2, cache_ram=cache_ram) as server:
            for i in (1, 2, 3):
                assert await server.cached(prompt(i)) == 0
            assert await server.cached([*prompt(1), 7]) == again


async def test_a_unified_pool_with_the_ram_cache_empties_idle_slots(stand: Open) -> None:
    async with stand(slots=4, unified=True, cache_ram=True) as server:
        await server.read(prompt(1), slot=0)
        await server.act(0, "save")
        await server.read(prompt(2), slot=1)
        assert (await server.act(0, "save", "b.kv"))[1]["n_saved"] == 0
        await server.act(0, "restore")
        await server.read(prompt(3), slot=1)
        assert await server.cached([*prompt(1), 7], slot=0) == 0  # pinned to the emptied slot: all is read again
    async with stand(slots=4, unified=True, cache_ram=True) as server:
        await server.read(prompt(1), slot=0)
        await server.act(0, "save")
        await server.read(prompt(2), slot=1)
        await server.act(0, "restore")
        await server.act(2, "restore")
        assert (await server.act(0, "save", "b.kv"))[1]["n_saved"] == 40  # a restore empties nothing
        assert await server.cached([*prompt(1), 7]) == 40  # unpinned and at once
    async with stand(slots=4, unified=True) as server:
        await server.read(prompt(1), slot=0)
        await server.read(prompt(2), slot=1)
        assert await server.cached([*prompt(1), 7], slot=0) == 40


async def test_a_unified_restore_needs_free_cells(stand: Open) -> None:
    async with stand(slots=2, n_ctx=256, unified=True) as server:
        await server.read(prompt(1, 100), slot=0)
        await server.act(0, "save")
        await server.act(0, "erase")
        await server.read(prompt(2, 200), slot=1)
        assert (await server.act(0, "restore"))[0] == 400  # although slot 1 is idle
        await server.act(1, "erase")
        assert (await server.act(0, "restore"))[0] == 200


async def test_a_cancelled_prefill_keeps_what_was_read(stand: Open) -> None:
    async with stand(slots=1, n_ctx=2048, prefill_rate=400, n_batch=64) if stand is _fake else stand(
            slots=1, n_ctx=2048, n_batch=64) as server:
        ids = prompt(1, 1500)
        body = {"prompt": ids, "n_predict": 1, "stream": True}
        for more_tries in (True, True, False):  # when we are kept waiting, it reads all there is
            response = await open_request(server.port, "POST", COMPLETION, body)
            await trio.sleep(0.8)
            await response.close()
            with trio.fail_after(120):
                while (await server.slots())[0]["is_processing"]:
                    await trio.sleep(1.2)  # each look puts off its own look for clients that left by a second
            if 0 < (await server.act(0, "save"))[1]["n_saved"] < 1500:
                break
            assert more_tries
            await server.act(0, "erase")


@pytest.mark.real
@pytest.mark.skipif(not AVAILABLE, reason="the demo extra is not installed")
async def test_files_begin_as_those_of_the_real_server(tmp_path: Any) -> None:
    from tests.fakes.script import RuntimeConfig
    from tests.fakes.slotfiles import file_bytes, file_head

    async with real_llama(n_parallel=2, n_ctx=1024) as server:
        await server.post("/completion", {"prompt": prompt(1), "n_predict": 0, "id_slot": 0})
        for slot, kv in ((0, prompt(1)), (1, [])):
            await server.post(f"/slots/{slot}?action=save", {"filename": "a.kv"})
            data = (server.slots_dir / "a.kv").read_bytes()
            head = file_head(RuntimeConfig(slots=2), kv)
            head = head[: 32 + 4 * len(kv)]  # what follows is ours
            assert data[: len(head)] == head
            assert len(data) == file_bytes(RuntimeConfig(slots=2), len(kv))
