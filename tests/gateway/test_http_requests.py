"""What a client may send wrong, and what it is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from tests.fakes import Script
from tests.fakes.client import connect, encode_request, send_raw
from tests.gateway.conftest import CHAT, COMPLETIONS, Rig, chat, data_of, error_of, open_lane, open_rig

GOOD = [{"role": "user", "content": "x"}]
BAD: dict[str, tuple[Any, str | None]] = {  # body, param
    "empty": (b"", None),
    "no json": (b"{", None),
    "half a string": (b'{"messages": "', None),
    "not utf-8": (b'{"model": "\xff"}', None),
    "a list": (b"[]", None),
    "a number": (b"1", None),
    "null": (b"null", None),
    "deep lists": (b'{"messages":' + b"[" * 200_000 + b"]" * 200_000 + b"}", None),
    "deep objects": (b'{"a":' * 200_000 + b"1" + b"}" * 200_000, None),
    "no messages": ({}, "messages"),
    "messages null": ({"messages": None}, "messages"),
    "messages text": ({"messages": "x"}, "messages"),
    "message text": ({"messages": ["x"]}, "messages[0]"),
    "stream text": ({"messages": GOOD, "stream": "yes"}, "stream"),
    "stream number": ({"messages": GOOD, "stream": 1}, "stream"),
    "model number": ({"messages": GOOD, "model": 7}, "model"),
    "options list": ({"messages": GOOD, "stream_options": []}, "stream_options"),
    "messages empty": ({"messages": []}, "messages"),
    "max_tokens text": ({"messages": GOOD, "max_tokens": "x"}, "max_tokens"),
    "max_tokens bool": ({"messages": GOOD, "max_tokens": True}, "max_tokens"),
    "max_tokens list": ({"messages": GOOD, "max_tokens": [1]}, "max_tokens"),
    "max_tokens NaN": (b'{"messages":[{"role":"user","content":"x"}],"max_tokens":NaN}', "max_tokens"),
    "max_tokens Infinity": (b'{"messages":[{"role":"user","content":"x"}],"max_tokens":Infinity}', "max_tokens"),
    "max_tokens 1e400": (b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1e400}', "max_tokens"),
    "max_tokens 1.5": ({"messages": GOOD, "max_tokens": 1.5}, "max_tokens"),
    "n text": ({"messages": GOOD, "n": "2"}, "n"),
    "digits without end": (b'{"messages":[],"max_tokens":' + b"9" * 10_000 + b"}", None),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_wrong_body_is_400_and_names_the_field(autojump_clock: Any, name: str) -> None:
    body, param = BAD[name]
    async with open_lane() as lane:
        call = await lane.post(body)
        assert call.status == 400, call.body[:200]
        error = error_of(call.body)
        assert error["type"] == "invalid_request_error" and error["param"] == param
        assert len(error["message"]) < 500
        assert lane.runtime.journal.calls == [] and lane.idle()


ODD: dict[str, dict[str, Any]] = {
    "max_tokens null": {"max_tokens": None}, "max_tokens -1": {"max_tokens": -1}, "max_tokens 0": {"max_tokens": 0},
    "max_tokens 5.0": {"max_tokens": 5.0}, "max_completion_tokens": {"max_completion_tokens": 5},
    "huge": {"max_tokens": 10**18}, "beyond int64": {"max_tokens": 10**30}, "n null": {"n": None}, "n 2": {"n": 2},
    "stream null": {"stream": None}, "model null": {"model": None}, "model empty": {"model": ""},
    "surrogate": {"messages": [{"role": "user", "content": "a\ud83d b"}]},
    "NUL": {"messages": [{"role": "user", "content": "a\x00b"}]},
    "no messages": {"messages": []}, "no content": {"messages": [{"role": "assistant", "tool_calls": []}]},
    "content null": {"messages": [{"role": "user", "content": None}]},
    "content number": {"messages": [{"role": "user", "content": 7}]},
    "role number": {"messages": [{"role": 3, "content": "x"}]},
    "tools odd": {"tools": "x"}, "tool_calls odd": {"messages": [{"role": "assistant", "tool_calls": "x"}]},
    "NaN elsewhere": {"temperature": float("nan")}, "n 0": {"n": 0}, "n -3": {"n": -3}, "n huge": {"n": 10**9},
}  # fmt: skip


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", ODD)
async def test_odd_but_legal_bodies_never_break_the_gateway(autojump_clock: Any, name: str, stream: bool) -> None:
    """Served, or refused by whoever knows better; never a 500 of ours. ``raise_bugs`` and the log watch."""
    body = json.dumps(chat(stream=stream) | ODD[name]).encode()
    plain = {"knobs": {"tokenizer": False}}  # the fake's own tokenizer takes well-formed messages only
    for more in (plain, {"backend": {"type": "openai", "base_url": "http://fake"}, "knobs": {"dialect": "openai"}}):
        async with open_lane(**more) as lane:
            lane.runtime.script(Script(script=[(0, b'data: {"choices":[{"index":0,"finish_reason":"stop"}]}\n\n')]))
            call = await lane.post(body)
            assert call.status in (200, 400), call.body[:300]
            if call.status == 400:
                error_of(call.body)
            await trio.sleep(1)
            assert lane.idle()


@pytest.mark.parametrize("prompt", ["", "x", ["a", "b"], [1, 2, 3], [[1, 2], [3]], [], None, [None], [{}], "a\ud83d"])
async def test_odd_prompts_of_text_completions(autojump_clock: Any, prompt: Any) -> None:
    async with open_lane() as lane:
        lane.runtime.script(Script(script=[(0, b'data: {"choices":[{"index":0,"finish_reason":"stop"}]}\n\n')]))
        call = await lane.post({"prompt": prompt, "stream": True}, COMPLETIONS)
        assert call.status in (200, 400), call.body[:300]
        assert lane.idle()


async def test_a_prompt_that_is_an_object_is_400(autojump_clock: Any) -> None:
    async with open_lane() as lane:
        for prompt in ({}, 7, True):
            call = await lane.post({"prompt": prompt}, COMPLETIONS)
            assert call.status == 400 and error_of(call.body)["param"] == "prompt"


async def test_an_unknown_priority_is_400(autojump_clock: Any) -> None:
    async with open_lane() as lane:
        for value in ("urgent", "", "7", "high,low"):
            call = await lane.post(chat(), headers=[("X-KVStream-Priority", value)])
            assert call.status == 400
            error = error_of(call.body)
            assert error["param"] == "x-kvstream-priority" and "high" in error["message"]
        for value in ("high", "HIGH", " low "):
            assert (await lane.post(chat(), headers=[("X-KVStream-Priority", value)])).status == 200


# --- routes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/nowhere", 404), ("POST", "/v1/nothing", 404), ("GET", "/", 404), ("GET", "/v1/models/none", 404),
    ("GET", CHAT, 405), ("PUT", CHAT, 405), ("DELETE", COMPLETIONS, 405), ("POST", "/health", 405),
    ("POST", "/status", 405), ("DELETE", "/v1/models", 405), ("GET", "/%00", 404), ("GET", "/a" * 3000, 404),
])  # fmt: skip
async def test_wrong_routes_and_methods_get_an_envelope(method: str, path: str, status: int) -> None:
    async with open_rig() as rig:
        response = await send_raw(rig.port, encode_request(method, path, b"{}" if method == "POST" else b""))
        assert response.status == status
        assert response.headers["content-type"] == "application/json"
        error_of(await response.read_all())
        await response.close()


# --- bytes that are no request ----------------------------------------------------------------------------------------

GARBAGE = {
    "noise": b"\x00\xff\x16\x03\x01" * 50,
    "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,
    "no version": b"GET /\r\n\r\n",
    "version 9": b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
    "bad length": b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
    "negative length": b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    "huge length": b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %s\r\n\r\n" % (b"9" * 25),
    "two lengths": b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
    "bad chunk": b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "bad header": b"GET / HTTP/1.1\r\nHost localhost\r\n\r\n",
    "NUL in header": b"GET / HTTP/1.1\r\nHost: local\x00host\r\n\r\n",
    "websocket": b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
                 b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
    "h2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00",
    "h2c upgrade": b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\n"
                   b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n",
    "CONNECT": b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    "long line": b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "long header": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    "non-ascii target": "GET /é HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(),
    "bad percent": b"GET /%zz%ff HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


async def alive(rig: Rig) -> None:
    response = await rig.post(chat())
    assert data_of(await response.read_all())[-1] == "[DONE]"
    await response.close()


async def test_garbage_never_hurts_others() -> None:
    async with open_rig() as rig:
        for name, data in GARBAGE.items():
            stream = await connect(rig.port)
            answer = b""
            with trio.move_on_after(0.5):
                try:
                    await stream.send_all(data)
                    while more := await stream.receive_some(65536):
                        answer += more
                except trio.BrokenResourceError:
                    pass
            assert not answer.startswith(b"HTTP/1.1 5"), (name, answer[:200])
            await trio.aclose_forcefully(stream)
        await alive(rig)
        await rig.until(lambda: rig.engine.metrics.open_connections._value.get() == 0)


async def test_a_head_that_is_too_large_gets_a_clear_4xx() -> None:
    async with open_rig(server={"header_bytes_max": 8192}) as rig:
        for size in (10_000, 60_000):  # far larger ones may meet a reset while they are still being sent
            raw = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * size + b"\r\n\r\n"
            response = await send_raw(rig.port, raw)
            assert response.status in (400, 413, 431), size
            await response.close()
        await alive(rig)


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with open_rig() as rig:
        health, missing = encode_request("GET", "/health"), encode_request("GET", "/nowhere")
        call = encode_request("POST", CHAT, chat(stream=False))
        response = await send_raw(rig.port, health + call + missing + health)
        seen = []
        for _ in range(4):
            seen.append(response.status)
            await response.read_all()
            follow = type(response)(response.stream)
            follow._buffer = response._buffer
            if len(seen) < 4:
                response = await follow.read_head()
        assert seen == [200, 200, 404, 200]
        await response.close()


async def test_a_400_keeps_the_connection_usable() -> None:
    async with open_rig() as rig:
        response = await rig.post(b"{")
        assert response.status == 400
        await response.read_all()
        again = await response.again("POST", CHAT, chat())
        assert data_of(await again.read_all())[-1] == "[DONE]"
        await again.close()


async def test_too_many_connections_get_503() -> None:
    async with open_rig(server={"connections_max": 3}) as rig:
        held = [await connect(rig.port) for _ in range(3)]
        await rig.until(lambda: rig.engine.metrics.open_connections._value.get() == 3)
        response = await rig.post(chat())
        assert response.status == 503 and int(response.headers["retry-after"]) >= 1
        error = error_of(await response.read_all())
        assert error["code"] == "too_many_connections" and "server.connections_max" in error["message"]
        await response.close()
        for stream in held:
            await stream.aclose()
        await rig.until(lambda: rig.engine.metrics.open_connections._value.get() == 0)
        await alive(rig)


async def test_a_client_that_closes_a_kept_connection_frees_it_at_once() -> None:
    async with open_rig() as rig:
        count = rig.engine.metrics.open_connections._value
        for path in (None, "/health", CHAT):
            stream = await connect(rig.port)
            if path == CHAT:
                await stream.send_all(encode_request("POST", CHAT, chat()))
            elif path is not None:
                await stream.send_all(encode_request("GET", path))
            await rig.until(lambda: count.get() == 1)
            await trio.sleep(0.5)
            await stream.aclose()
            await rig.until(lambda: count.get() == 0)  # the server itself would keep it for 75 s
