"""The HTTP surface under wrong input: no 500, no traceback, no hang, nothing left behind.

Two drivers. In memory on the virtual clock, Hypothesis makes methods, paths, headers and bodies that are nearly right:
a valid call of a route with some of its values replaced. On loopback it makes *bytes*: a valid request cut, split,
repeated and altered anywhere, on keep-alive connections. ``raise_bugs`` and the log stand behind both: an exception
that was answered politely still fails the test.
"""

from __future__ import annotations

import json
import logging
from copy import deepcopy
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from trio.testing import MockClock

from kvstream.adapters.routes import ROUTES
from tests.fakes.client import connect, encode_request
from tests.gateway.conftest import CHAT, Lane, chat, open_lane, open_rig

PATHS = (*sorted(ROUTES), "/v1/models", "/v1/models/m", "/health", "/ready", "/status", "/metrics", "/", "/v1",
         "/api/chat", "/slots/0?action=erase", "/v1/audio/transcriptions", "//v1/chat/completions",
         "/v1/chat/completions/", "/%2e%2e/x")
METHODS = ("POST", "POST", "POST", "POST", "GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH")
CALLS: dict[str, dict[str, Any]] = {
    "chat": chat("hello", max_tokens=3),
    "plain": {"prompt": "once upon", "max_tokens": 3, "stream": False},
    "messages": {"model": "m", "max_tokens": 3, "system": "s", "messages": [{"role": "user", "content": [
        {"type": "text", "text": "hi"}]}], "stream": True,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    "responses": {"model": "m", "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
                  "instructions": "be short", "max_output_tokens": 3, "stream": True},
    "embeddings": {"model": "m", "input": ["a", "b"]},
    "rerank": {"query": "q", "documents": ["a", "b"]},
    "infill": {"input_prefix": "def f(", "input_suffix": ")", "n_predict": 3},
    "ollama": {"model": "m", "messages": [{"role": "user", "content": "x"}], "options": {"num_ctx": 10}},
    "generate": {"model": "m", "prompt": "x", "suffix": "y", "raw": True, "stream": True, "keep_alive": "5m",
                 "options": {"num_predict": 3, "stop": ["\n"]}},
    "embed": {"model": "m", "input": ["a", "b"], "truncate": True, "options": {}},
    "tokens": {"content": "x", "tokens": [1, 2], "add_special": True},
}

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(
    [10**30, -1, 0, 1.5, "", "\ud800", "\x00", "x" * 5000, [], {}, [[]], [None],
     {"type": "image_url"}, {"a": {"b": []}}])
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    st.text(max_size=6), inner, max_size=3), max_leaves=6)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """A valid call of some route with up to three of its values replaced, or its bytes spoilt."""
    call = json.loads(json.dumps(CALLS[draw(st.sampled_from(sorted(CALLS)))]))
    for _ in range(draw(st.integers(0, 3))):
        where: Any = call
        while isinstance(where, (dict, list)) and where:
            keys = sorted(where) if isinstance(where, dict) else list(range(len(where)))
            key = draw(st.sampled_from(keys))
            if not isinstance(where[key], (dict, list)) or draw(st.booleans()):
                where[key] = deepcopy(draw(values))  # a later turn may write into it
                break
            where = where[key]
    if draw(st.booleans()):
        extra = st.sampled_from(["stream", "n", "max_tokens", "stream_options", "model", "tools", "temperature", "seed",
                                 "options", "input", "prompt", "messages", "documents", "id_slot", "return_progress"])
        call[draw(extra)] = draw(values)
    try:
        data = json.dumps(call).encode()
    except RecursionError:
        data = b"{}"
    if draw(st.integers(0, 5)) == 0:
        cut = draw(st.integers(0, len(data)))
        data = data[:cut] + draw(st.binary(max_size=8)) + data[cut + draw(st.integers(0, 3)):]
    return data


names = st.sampled_from([
    "content-type", "accept", "authorization", "x-api-key", "x-kvstream-priority", "content-encoding", "origin", "host",
    "access-control-request-method", "access-control-request-headers", "anthropic-version", "x-request-id",
    "user-agent", "x-kvstream-hop", "cookie", "accept-language"])
texts = st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=20) | st.sampled_from(
    ["Bearer x", "Basic eDp5", "Basic !!", "gzip", "zstd", "br", "gzip, zstd", "identity", "high", "*", "null",
     "http://evil.example", "multipart/form-data", "multipart/form-data; boundary=x", "application/json"])
heads = st.lists(st.tuples(names, texts), max_size=4)


async def one(lane: Lane, method: str, path: str, body: bytes, headers: list[tuple[str, str]]) -> None:
    with trio.fail_after(3600):  # of the virtual clock: nothing may wait for ever
        call = await lane.request(method, path, body, headers)
    assert call.status and call.status != 500, (call.status, call.body[:300])
    assert b"Traceback" not in call.body and b'File "' not in call.body
    if call.status >= 400 and method != "HEAD" and call.body:
        assert isinstance(json.loads(call.body), dict), call.body[:200]


@given(st.lists(st.tuples(st.sampled_from(METHODS), st.sampled_from(PATHS), bodies(), heads), min_size=1, max_size=6))
@example([("POST", CHAT, b'{"messages":[{"role":"user","content":"x"}]}', [("content-encoding", "gzip")])])
@hypothesis_settings(deadline=None, suppress_health_check=list(HealthCheck))
def test_nearly_right_requests_are_answered_and_leave_nothing(calls: list[Any]) -> None:
    async def main() -> None:
        async with open_lane(knobs={"tokenizer": False}, scheduler={"max_wait_s": 20.0}) as lane:
            for method, path, body, headers in calls:
                await one(lane, method, path, body, headers)
            with trio.fail_after(120):
                while not lane.idle():
                    await trio.sleep(0.1)
            lane.engine.scheduler.check_invariants()

    trio.run(main, clock=MockClock(autojump_threshold=0))


SPOILS = (b"", b"\r\n", b"\x00", b"\xff\xfe", b": ", b"Transfer-Encoding: chunked\r\n", b"Content-Length: 7\r\n",
          b" HTTP/1.1")


@st.composite
def wires(draw: st.DrawFn, paths: tuple[str, ...] = PATHS) -> list[bytes]:
    """Bytes for one connection, in the pieces in which they are sent."""
    data = b""
    for _ in range(draw(st.integers(1, 3))):
        head = [(n, v) for n, v in draw(heads) if n != "host"]
        data += encode_request(draw(st.sampled_from(METHODS)), draw(st.sampled_from(paths)), draw(bodies()), head)
    for _ in range(draw(st.integers(0, 2))):  # spoil it: anything at all, anywhere
        place = draw(st.integers(0, len(data)))
        data = data[:place] + draw(st.sampled_from(SPOILS)) + data[place + draw(st.integers(0, 4)):]
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=4)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


async def throw(port: int, pieces: list[bytes], end: str) -> None:
    """Send the pieces, read what comes, leave in one of three ways. Whatever is answered is HTTP, and not a 500."""
    stream = await connect(port)
    got = bytearray()

    async def read() -> None:
        try:
            while data := await stream.receive_some(65536):
                got.extend(data)
        except trio.BrokenResourceError:
            pass

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        try:
            for piece in pieces:
                await stream.send_all(piece)
                await trio.sleep(0.001)
            if end == "half-close":
                await stream.send_eof()
        except trio.BrokenResourceError:
            pass  # it was shown the door in mid-sentence
        with trio.move_on_after(0.05 if end == "leave" else 0.3):
            await trio.sleep_forever()
        nursery.cancel_scope.cancel()
    await stream.aclose()
    assert not got or got.startswith(b"HTTP/1."), got[:60]
    assert b"HTTP/1.1 500" not in got and b"Traceback" not in got


@given(st.lists(st.tuples(wires(), st.sampled_from(["leave", "stay", "half-close"])), min_size=2, max_size=8))
@hypothesis_settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))
def test_spoilt_bytes_never_break_the_server(caplog: pytest.LogCaptureFixture, connections: list[Any]) -> None:
    throw_all(caplog, connections)


def throw_all(caplog: pytest.LogCaptureFixture, connections: list[Any], **sections: Any) -> None:
    """All at once at a gateway of their own, which is whole and empty afterwards."""
    async def main() -> None:
        async with open_rig(**sections) as rig:
            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    for pieces, end in connections:
                        nursery.start_soon(throw, rig.port, pieces, end)
                assert (await rig.get("/health"))[0] == 200
                await rig.until(rig.idle)
                await rig.until(lambda: rig.engine.metrics.open_connections._value.get() == 0)

    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="kvstream"):
        trio.run(main)
    assert not [r.getMessage() + str(r.exc_text or "") for r in caplog.records if r.levelno >= logging.ERROR]
