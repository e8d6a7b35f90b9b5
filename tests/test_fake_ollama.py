"""The fake Ollama: what its documentation promises of the real one, which nobody has seen here."""

from __future__ import annotations

import json
from typing import Any

import trio

from kvstream.adapters.base import HttpCall, HttpReply
from tests.fakes import FakeUpstream, Script, open_runtime
from tests.fakes.ollama import BUSY

HELLO = [{"role": "user", "content": "hello there"}]
QUICK: dict[str, Any] = {"dialect": "ollama", "slots": 1, "n_ctx": 4096, "decode_rate": 100, "prefill_rate": 1e6,
                         "answer_tokens": 3, "cold_load_s": 2.0}  # fmt: skip


async def post(up: FakeUpstream, body: Any, path: str = "/api/chat") -> HttpReply:
    return await up.request(HttpCall("POST", path, (), json.dumps(body).encode()), timeout_s=100)


def lines(reply: HttpReply) -> list[Any]:
    return [json.loads(line) for line in reply.body.splitlines()]


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "fake-model", "messages": HELLO, **more}


async def test_a_model_is_loaded_by_the_first_request_and_again_when_its_options_change(autojump_clock: Any) -> None:
    async with open_runtime(**QUICK) as rt:
        up = FakeUpstream(rt)
        began = trio.current_time()
        first = await post(up, chat())
        assert trio.current_time() - began >= 2 and rt.loads == 1
        assert [line["done"] for line in lines(first)] == [False, False, False, True]
        assert first.headers["content-type"] == "application/x-ndjson"
        await post(up, chat(options={"temperature": 0}))
        assert rt.loads == 1
        for size in (2048, 2048, 4096, 2048):
            await post(up, chat(options={"num_ctx": size}))
        await post(up, chat(shift=False))
        assert [options for _, options in rt.ollama.loads] == [
            {}, {"num_ctx": 2048}, {"num_ctx": 4096}, {"num_ctx": 2048}, {"shift": False}]


async def test_what_is_loaded_is_told_and_thrown_out_on_request(autojump_clock: Any) -> None:
    async with open_runtime(**QUICK) as rt:
        up = FakeUpstream(rt)
        load = await post(up, {"model": "fake-model", "messages": [], "options": {"num_ctx": 512}})
        assert lines(load)[0]["done_reason"] == "load"
        ps = (await up.request(HttpCall("GET", "/api/ps"), timeout_s=5)).json()
        assert [(row["name"], row["context_length"]) for row in ps["models"]] == [("fake-model:latest", 512)]
        await post(up, {"model": "fake-model", "messages": [], "options": {"num_ctx": 512}, "keep_alive": 0})
        assert (await up.request(HttpCall("GET", "/api/ps"), timeout_s=5)).json() == {"models": []}


async def test_only_requests_that_need_a_load_are_ever_turned_away(autojump_clock: Any) -> None:
    async with open_runtime(**{**QUICK, "load_queue_max": 2}) as rt, trio.open_nursery() as nursery:
        up, replies = FakeUpstream(rt), list[HttpReply]()

        async def one(path: str = "/api/chat") -> None:
            replies.append(await post(up, chat(), path))

        for path in ("/api/chat", "/api/chat", "/api/chat", "/v1/chat/completions"):
            nursery.start_soon(one, path)
            await trio.sleep(0.01)
        assert [reply.status for reply in replies] == [503, 503]
        assert replies[0].json() == {"error": BUSY} and replies[1].json()["error"]["message"] == BUSY
        await trio.sleep(10)
        assert [reply.status for reply in replies[2:]] == [200, 200]
        for _ in range(20):  # it is loaded now: the queue has no end
            nursery.start_soon(one)
        await trio.sleep(10)
        assert [reply.status for reply in replies[4:]] == [200] * 20 and rt.deferred_max == 19 and rt.loads == 1


async def test_a_client_that_leaves_is_noticed_queued_and_running(autojump_clock: Any) -> None:
    async with open_runtime(**{**QUICK, "answer_tokens": None, "cold_load_s": 0}) as rt, trio.open_nursery() as nursery:
        up = FakeUpstream(rt)
        nursery.start_soon(post, up, chat())
        await trio.sleep(0.5)
        nursery.start_soon(post, up, chat(stream=False))
        await trio.sleep(0.5)
        assert len(rt.journal.open_now) == 2 and rt.ollama.in_flight == 2
        nursery.cancel_scope.cancel()
    assert rt.ollama.in_flight == 0


async def test_v1_loses_an_error_in_mid_stream_and_the_native_route_says_it(autojump_clock: Any) -> None:
    async with open_runtime(**QUICK) as rt:
        up = FakeUpstream(rt)
        rt.script(Script(end="error_event", tokens=2), times=2)
        native = lines(await post(up, chat()))
        assert set(native[-1]) == {"error"} and len(native) == 3
        lost = (await post(up, chat(stream=True), "/v1/chat/completions")).body
        assert b"[DONE]" not in lost and b"error" not in lost and b'"finish_reason":"' not in lost
        assert lost.count(b"data: ") == 3


async def test_tools_formats_and_thoughts(autojump_clock: Any) -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"properties": {"city": {}}}}}
    async with open_runtime(**QUICK) as rt:
        up = FakeUpstream(rt)
        asked = [{"role": "user", "content": "call get_weather please"}]
        called = (await post(up, chat(messages=asked, tools=[tool], stream=False))).json()["message"]
        assert called["tool_calls"] == [{"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}]
        shaped = (await post(up, chat(format="json", stream=False))).json()["message"]
        assert set(json.loads(shaped["content"])) == {"answer"}
        assert (await post(up, chat(think=True, stream=False))).json()["message"]["thinking"]


async def test_a_long_prompt_is_cut_without_a_word_unless_asked_not_to(autojump_clock: Any) -> None:
    async with open_runtime(**{**QUICK, "n_ctx": 64}) as rt:
        up = FakeUpstream(rt)
        long = [{"role": "user", "content": "word " * 100}]
        assert lines(await post(up, chat(messages=long)))[-1]["prompt_eval_count"] == 32
        assert (await post(up, chat(messages=long, truncate=False))).status == 400
