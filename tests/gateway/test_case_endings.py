"""Cases 20, 21, 41: how an answer ends, and that nothing is run twice."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from tests.fakes import Script
from tests.gateway.conftest import (
    CHAT,
    COMPLETIONS,
    chat,
    data_of,
    error_of,
    metric,
    open_lane,
    open_rig,
    text_of,
)
from tests.gateway.test_case_streams import DONE, STOP, chunk

THREE = chunk("a") + chunk("b") + chunk("c")
ERRORS = {
    "error object": b'data: {"error":{"message":"boom","type":"server_error","code":500}}\n\n',
    "error event": b'event: error\ndata: {"message":"boom"}\n\n',
    "error beside empty choices": b'data: {"choices":[],"error":{"message":"boom"}}\n\n',
    "error string": b'data: {"error":"boom"}\n\n',
}


def outcome(of: Any, route: str = CHAT) -> dict[str, float]:
    counted = of.engine.metrics.requests.collect()[0].samples
    return {s.labels["outcome"]: s.value for s in counted if s.name.endswith("_total") and s.labels["route"] == route}


# --- 20 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("after", [b"", DONE, STOP + DONE], ids=["eof", "done", "finish"])
async def test_case_20_error_inside_a_stream(autojump_clock: Any, kind: str, after: bytes) -> None:
    async with open_lane() as lane:
        lane.runtime.script(Script(script=[(0, THREE), (0.1, ERRORS[kind]), (0.1, after)]))
        call = await lane.post(chat())
        assert call.status == 200
        assert call.body == THREE + ERRORS[kind]  # the runtime's frame, and nothing after it
        assert outcome(lane) == {"upstream_error": 1}
        assert metric(lane.metrics, "kvstream_request_seconds_count", route=CHAT) == 0
        assert metric(lane.metrics, "kvstream_backend_errors_total", kind="upstream_error") == 1
        await trio.sleep(1)
        assert lane.idle()


@pytest.mark.parametrize("kind", ERRORS)
async def test_case_20_error_while_assembling(autojump_clock: Any, kind: str) -> None:
    async with open_lane() as lane:
        lane.runtime.script(Script(script=[(0, THREE), (0.1, ERRORS[kind])]))
        call = await lane.post(chat(stream=False))
        assert 500 <= call.status < 600
        assert error_of(call.body)["message"] == "boom"
        assert outcome(lane) == {"upstream_error": 1}


# --- 21 ---------------------------------------------------------------------------------------------------------------

MATRIX: dict[str, tuple[bytes, bytes, str]] = {  # what comes after the text, what the client gets then, outcome
    "finish and done": (STOP + DONE, STOP + DONE, "served"),
    "finish, no done": (STOP, STOP + DONE, "served"),
    "no finish, done": (DONE, DONE, "served"),
    "neither": (b"", b"", "upstream_error"),
    "half a frame": (STOP[:-5], b"", "upstream_error"),
}


@pytest.mark.parametrize("end", ["done", "cut", "rst"])
@pytest.mark.parametrize("name", MATRIX)
async def test_case_21_truncated_stream(autojump_clock: Any, name: str, end: Any) -> None:
    tail, expected, result = MATRIX[name]
    async with open_lane() as lane:
        lane.runtime.script(Script(script=[(0, THREE + tail)], end=end))
        call = await lane.post(chat())
        assert call.status == 200
        assert outcome(lane) == {result: 1}
        if result == "served":
            assert call.body == THREE + expected
            assert metric(lane.metrics, "kvstream_unfinished_streams_total") == (name == "no finish, done")
        else:
            assert call.body.startswith(THREE)
            last = data_of(call.body)[-1]
            assert last["error"]["code"] == "upstream_stream_truncated"
            assert b"[DONE]" not in call.body
        await trio.sleep(1)
        assert lane.idle()


@pytest.mark.parametrize("end", ["done", "cut", "rst"])
@pytest.mark.parametrize("name", MATRIX)
async def test_case_21_truncated_while_assembling(autojump_clock: Any, name: str, end: Any) -> None:
    tail, _, result = MATRIX[name]
    async with open_lane() as lane:
        lane.runtime.script(Script(script=[(0, THREE + tail)], end=end))
        call = await lane.post(chat(stream=False))
        if result == "served":
            assert call.status == 200
            assert json.loads(call.body)["choices"][0]["message"]["content"] == "abc"
        else:
            assert call.status == 502
            assert error_of(call.body)["code"] == "upstream_stream_truncated"
        assert outcome(lane) == {result: 1}


@pytest.mark.parametrize("mode", ["assemble", "pass"])
@pytest.mark.parametrize("end", ["cut", "rst", "truncated_length"])
async def test_case_21_a_json_body_shorter_than_its_length(mode: str, end: Any) -> None:
    body = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"abc"},"finish_reason":"stop"}]'
    headers = (("Content-Type", "application/json"),)
    async with open_rig(upstream={"non_stream": mode}) as rig:
        rig.runtime.script(Script(script=[(0, body)], headers=headers, end=end))
        response = await rig.post(chat(stream=False))
        assert response.status == 502
        error = error_of(await response.read_all())
        assert error["code"] in ("upstream_stream_truncated", "backend_protocol")
        assert outcome(rig) == {"upstream_error": 1}
        await response.close()


async def test_case_21_pass_mode_with_an_error_in_a_200(autojump_clock: Any) -> None:
    async with open_lane(upstream={"non_stream": "pass"}) as lane:
        headers = (("Content-Type", "application/json"),)
        lane.runtime.script(Script(script=[(0, b'{"error":{"message":"boom"}}')], headers=headers))
        call = await lane.post(chat(stream=False))
        assert call.status == 502 and error_of(call.body)["message"] == "boom"
        assert outcome(lane) == {"upstream_error": 1}


async def test_case_21_an_empty_stream_is_an_error(autojump_clock: Any) -> None:
    async with open_lane() as lane:
        for stream in (True, False):
            lane.runtime.script(Script(script=[]))
            call = await lane.post(chat(stream=stream))
            assert call.status == 502
            assert error_of(call.body)["code"] == "upstream_stream_truncated"


async def test_case_21_text_completions_as_well(autojump_clock: Any) -> None:
    frame = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
    async with open_lane() as lane:
        lane.runtime.script(Script(script=[(0, frame)]))
        call = await lane.post({"prompt": "x", "stream": True}, COMPLETIONS)
        assert data_of(call.body)[-1]["error"]["code"] == "upstream_stream_truncated"
        assert text_of(call.body) == "a" and b"[DONE]" not in call.body


# --- 41 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["cut", "rst", "done"])
@pytest.mark.parametrize("stream", [True, False])
async def test_case_41_no_retry_after_the_first_byte(end: Any, stream: bool) -> None:
    async with open_rig() as rig:
        rig.runtime.script(Script(script=[(0, chunk("a"))], end=end))
        response = await rig.post(chat(stream=stream))
        body = await response.read_all()
        if stream:
            assert response.status == 200 and not response.truncated
            assert data_of(body)[-1]["error"]["code"] == "upstream_stream_truncated"
        else:
            assert response.status == 502
        await trio.sleep(0.2)
        assert len(rig.runtime.journal.calls) == 1
        await response.close()


async def test_case_41_connection_refused_is_said_at_once(autojump_clock: Any) -> None:
    """Where nobody is to be waited for; how one that was there a moment ago is, see case 83."""
    async with open_lane(upstream={"down_grace_s": 0.0}) as lane:
        lane.runtime.config.refuse = True
        began = trio.current_time()
        for stream in (True, False):
            call = await lane.post(chat(stream=stream))
            assert call.status == 503
            assert error_of(call.body)["code"] == "backend_unavailable"
            assert int(call.headers["retry-after"]) >= 1
        assert trio.current_time() - began < 0.5
        assert lane.runtime.journal.calls == []
        await trio.sleep(3)
        lane.runtime.config.refuse = False
        await trio.sleep(3)
        assert (await lane.post(chat())).status == 200


async def test_case_41_a_client_that_gives_up_is_no_backend_error(autojump_clock: Any) -> None:
    async with open_lane() as lane:
        lane.runtime.script(Script(first_byte_after=30), times=3)
        for _ in range(3):
            call = lane.start(chat())
            await trio.sleep(1)
            call.leave()
            await call.ended.wait()
        await trio.sleep(1)
        assert outcome(lane) == {"cancelled": 3}
        assert not [s for s in lane.metrics.backend_errors.collect()[0].samples if s.value]
        assert (await lane.status())["backend"]["state"] == "up"
