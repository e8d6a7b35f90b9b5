"""Cases 9, 10, 13, 16-18: what a stream carries, unchanged and in time."""

from __future__ import annotations

import json
import socket
from itertools import pairwise
from typing import Any

import pytest
import trio

from tests.fakes import Script, bytewise
from tests.gateway.conftest import CHAT, HANG_S, chat, data_of, metric, open_lane, open_rig, text_of

STOP = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def chunk(text: str, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return b"data: " + json.dumps({"choices": [choice], **more}, ensure_ascii=False).encode() + b"\n\n"


# --- 9 ----------------------------------------------------------------------------------------------------------------


async def test_case_09_no_proxy_in_front_buffers() -> None:
    """Each token is seen while the runtime writes nothing more."""
    async with open_rig(knobs={"answer_tokens": 6}, server={"keepalive_s": 60.0}) as rig:
        for tokens in (1, 2, 5):
            rig.runtime.script(Script(itl=0.01, hang_at_token=tokens, goes_on=(goes_on := trio.Event())))
            response = await rig.post(chat())
            seen = b""
            with trio.fail_after(HANG_S):
                while seen.count(b'"content":"') < tokens:
                    event = await response.read_event()
                    assert event is not None, seen
                    seen += event
            goes_on.set()
            assert data_of(await response.read_all())[-1] == "[DONE]"
            await response.close()
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["cache-control"] == "no-cache"
        assert "content-length" not in response.headers
        assert response.headers["content-type"].startswith("text/event-stream")


async def test_case_09_nodelay_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstream.gateway import connections

    seen = []
    make = connections.ClientStream.__init__

    def spy(self: Any, inner: trio.SocketStream, **more: Any) -> None:
        seen.append(inner.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        make(self, inner, **more)

    monkeypatch.setattr(connections.ClientStream, "__init__", spy)
    async with open_rig() as rig:
        await rig.get("/health")
    assert seen and all(seen)


# --- 10 ---------------------------------------------------------------------------------------------------------------


async def test_case_10_pings_during_prefill(autojump_clock: Any) -> None:
    async with open_lane(server={"keepalive_s": 10.0}) as lane:
        lane.runtime.script(Script(first_byte_after=40.5))
        began = trio.current_time()
        call = await lane.post(chat())
        pings = [when - began for when, data in call.writes if data == b": ping\n\n"]
        assert pings == pytest.approx([10, 20, 30, 40], abs=0.1)
        assert call.status == 200 and call.headers["content-type"].startswith("text/event-stream")
        assert call.started_at == pytest.approx(began + 10, abs=0.1)
        assert data_of(call.body)[-1] == "[DONE]" and text_of(call.body)


async def test_case_10_pings_while_queued(autojump_clock: Any) -> None:
    async with open_lane(server={"keepalive_s": 10.0}, knobs={"slots": 1}) as lane:
        lane.runtime.script(Script(first_byte_after=45))
        lane.start(chat("busy"))
        await trio.sleep(0.1)
        began = trio.current_time()
        call = await lane.post(chat("queued"))
        pings = [when - began for when, data in call.writes if data == b": ping\n\n"]
        assert pings[:4] == pytest.approx([10, 20, 30, 40], abs=0.1)
        assert data_of(call.body)[-1] == "[DONE]"


async def test_case_10_pings_follow_the_wall_clock_between_tokens(autojump_clock: Any) -> None:
    """A ping comes ``keepalive_s`` after the last byte, not after the last event that was dropped."""
    noise = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\n'
    writes = [(0.0, chunk("a")), *[(4.0, noise)] * 6, (4.0, chunk("b") + STOP + DONE)]
    async with open_lane(server={"keepalive_s": 10.0}) as lane:
        lane.runtime.script(Script(script=writes))
        call = await lane.post(chat())
        times = [when for when, _ in call.writes]
        assert max(b - a for a, b in pairwise(times)) <= 10.1
        assert text_of(call.body) == "ab"


async def test_case_10_zero_turns_pings_off(autojump_clock: Any) -> None:
    async with open_lane(server={"keepalive_s": 0.0}, upstream={"wedged_s": 0.0}) as lane:  # 400 s are a hang else
        lane.runtime.script(Script(first_byte_after=400))
        call = await lane.post(chat())
        assert b": ping" not in call.body and data_of(call.body)[-1] == "[DONE]"


async def test_case_10_after_a_ping_a_failure_is_a_frame(autojump_clock: Any) -> None:
    async with open_lane(server={"keepalive_s": 10.0}) as lane:
        error = json.dumps({"error": {"message": "boom", "type": "server_error", "code": 500}}).encode()
        lane.runtime.script(Script(status=500, headers_after=25, script=[(0, error)]))
        call = await lane.post(chat())
        assert call.status == 200
        last = data_of(call.body)[-1]
        assert last["error"]["message"] == "boom" and b"[DONE]" not in call.body


async def test_case_10_a_non_stream_answer_gets_no_pings(autojump_clock: Any) -> None:
    async with open_lane(server={"keepalive_s": 1.0}) as lane:
        lane.runtime.script(Script(first_byte_after=40))
        call = await lane.post(chat(stream=False))
        assert call.status == 200 and json.loads(call.body)["choices"]


# --- 13, 16, 18 -------------------------------------------------------------------------------------------------------


async def answer_of(raw: bytes, *, split: Any = None, parts: int = 1, **more: Any) -> bytes:
    """What a client gets for a scripted body."""
    step = -(-len(raw) // parts)
    async with open_lane(split=split, **more) as lane:
        lane.runtime.script(Script(script=[(0.001, raw[i : i + step]) for i in range(0, len(raw), step)]))
        call = await lane.post(chat())
        assert call.status == 200
        assert lane.idle()
        return call.body


async def test_case_13_upstream_pings_do_not_reach_the_client(autojump_clock: Any) -> None:
    clean = [chunk("a"), chunk("b"), STOP, DONE]
    named = b"event: ping\ndata: {}\n\n"
    for noise in (b":\n\n", b": ping\n\n", b": keep-alive\n\n", b"data:\n\n", b"data: \n\n", named):
        body = await answer_of(noise + noise.join(clean), split=bytewise)
        assert body == b"".join(clean), noise


async def test_case_13_upstream_pings_do_not_stop_the_stall_clock(autojump_clock: Any) -> None:
    async with open_lane(upstream={"stall_s": 20.0}, server={"keepalive_s": 0.0}) as lane:
        lane.runtime.script(Script(script=[(0, chunk("a")), *[(0.25, b": keep-alive\n\n")] * 400]))
        began = trio.current_time()
        call = await lane.post(chat())
        assert trio.current_time() - began == pytest.approx(20, abs=0.5)
        assert "stall_s" in data_of(call.body)[-1]["error"]["message"]


async def test_case_16_every_field_passes_byte_for_byte(autojump_clock: Any) -> None:
    frames = [
        b'data: {"choices":[{"delta":{"role":"assistant","content":null}}]}\n\n',
        b'data: {"choices":[{"delta":{"reasoning":"hm\\u00e9 \\u2028"}}], "x_unknown":{"a":[1.0,2e3]}}\n\n',
        b'data:  {"choices":[ {"delta":{"reasoning_content":"x"},"reasoning_items":[{"id":"r"}]} ]}\n\n',
        "data: {\"choices\":[{\"delta\":{\"content\":\"\u2028 \u0085 日本\"}}],\"timings\":{\"x\":1}}\n\n".encode(),
        b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"timings":{"cache_n":0}}\n\n',
        b'event: whatever\nid: 7\ndata: {"x":1}\n\n',
        DONE,
    ]
    raw = b"".join(frames)
    assert await answer_of(raw) == raw
    assert await answer_of(raw, split=bytewise) == raw


async def test_case_17_utf8_cut_at_every_byte(autojump_clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    raw = b"".join([chunk("日本語"), chunk("🦊é"), chunk("a\u2028b"), STOP, DONE])
    async with open_lane() as lane:
        for offset in range(1, len(raw)):
            lane.runtime.script(Script(script=[(0, raw[:offset]), (0.01, raw[offset:])]))
            call = await lane.post(chat())
            assert call.body == raw, offset
            assert metric(lane.metrics, "kvstream_answer_tokens_total") == 3 * offset
    assert "\ufffd" not in caplog.text


async def test_case_17_a_non_stream_answer_cut_at_every_byte(autojump_clock: Any) -> None:
    raw = b"".join([chunk("日本語"), chunk("🦊é"), STOP, DONE])
    async with open_lane() as lane:
        for offset in range(1, len(raw), 3):
            lane.runtime.script(Script(script=[(0, raw[:offset]), (0.01, raw[offset:])]))
            call = await lane.post(chat(stream=False))
            assert json.loads(call.body)["choices"][0]["message"]["content"] == "日本語🦊é"


BIG = chunk("x" * 2_000_000)
FRAMINGS = {
    "split over reads": (chunk("a") + STOP + DONE, 7),
    "fifty in one read": (chunk("a") * 50 + STOP + DONE, 1),
    "CRLF": ((chunk("a") + STOP + DONE).replace(b"\n", b"\r\n"), 5),
    "lone CR": ((chunk("a") + STOP + DONE).replace(b"\n", b"\r"), 5),
    "no space": ((chunk("a") + STOP + DONE).replace(b"data: ", b"data:"), 3),
    "many data lines": (b'data: {"choices":\ndata: [{"index":0,"delta":{"content":"a"}}]}\n\n' + STOP + DONE, 4),
    "BOM": (b"\xef\xbb\xbf" + chunk("a") + STOP + DONE, 3),
    "2 MB event": (BIG + STOP + DONE, 40),
    "id and retry": (b"id: 1\nretry: 100\n" + chunk("a") + STOP + DONE, 3),
}


@pytest.mark.parametrize("name", FRAMINGS)
async def test_case_18_framing(autojump_clock: Any, name: str) -> None:
    raw, parts = FRAMINGS[name]
    assert await answer_of(raw, parts=parts) == raw


async def test_case_18_an_event_above_the_cap_is_a_clear_error(autojump_clock: Any) -> None:
    async with open_lane(upstream={"event_bytes_max": 10_000}) as lane:
        for first, stream in ((b"", True), (chunk("a"), True), (b"", False), (chunk("a"), False)):
            raw = first + chunk("x" * 20_000) + STOP + DONE
            lane.runtime.script(Script(script=[(0, raw[i : i + 3000]) for i in range(0, len(raw), 3000)]))
            call = await lane.post(chat(stream=stream))
            if first and stream:
                assert call.status == 200
                error = data_of(call.body)[-1]["error"]
            else:
                assert call.status == 502
                error = json.loads(call.body)["error"]
            assert error["code"] == "backend_protocol" and "10000 bytes" in error["message"]
            assert b"[DONE]" not in call.body


async def test_case_18_text_completions_pass_too(autojump_clock: Any) -> None:
    async with open_lane() as lane:
        call = await lane.post({"prompt": "hello", "stream": True}, "/v1/completions")
        assert data_of(call.body)[-1] == "[DONE]" and text_of(call.body)
        assert lane.runtime.journal.calls[0].request.path == "/v1/completions" != CHAT
