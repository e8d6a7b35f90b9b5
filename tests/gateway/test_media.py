"""Transcriptions pass through beside the queue, behind a limiter of their own."""

from __future__ import annotations

import json

import pytest
import trio

from tests.fakes.script import Script
from tests.gateway.conftest import chat, metric, open_lane, open_rig

PATH = "/v1/audio/transcriptions"
KIND = ("content-type", "multipart/form-data; boundary=b")
JSON = (("content-type", "application/json"),)
TEXT = json.dumps({"text": "hello there"}).encode()
SOUND = (b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nwhisper\r\n'
         b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF' + bytes(range(256)) * 40
         + b"\r\n--b--\r\n")


def answers(after: float = 0.0) -> Script:
    return Script(script=[(after, TEXT)], headers=JSON)


async def test_a_sound_goes_up_byte_for_byte_and_its_text_comes_down(autojump_clock: object) -> None:
    async with open_lane() as lane:
        lane.runtime.script(answers(), path=PATH)
        call = await lane.request("POST", PATH, SOUND, [KIND, ("authorization", "Bearer k"), ("cookie", "c")], parts=7)
        assert (call.status, call.body, call.headers["content-type"]) == (200, TEXT, "application/json")
        [entry] = [e for e in lane.runtime.journal.entries if e.request.path == PATH]
        assert entry.request.body == SOUND and entry.request.headers["content-type"] == KIND[1]
        assert entry.request.headers["authorization"] == "Bearer k" and "cookie" not in entry.request.headers
        assert metric(lane.metrics, "kvstream_requests_total", route=PATH, outcome="served") == 1
        assert metric(lane.metrics, "kvstream_prompt_tokens_total") == 0 and lane.idle()


async def test_it_needs_no_seat_and_has_a_limiter_of_its_own(autojump_clock: object) -> None:
    async with open_lane(knobs={"slots": 1, "answer_tokens": None, "decode_rate": 1.0},
                         server={"audio_max": 1}, scheduler={"max_wait_s": 20.0}) as lane:
        running = lane.start(chat("a"))
        for after in (10.0, 1.0, 60.0):
            lane.runtime.script(answers(after), path=PATH)
        first, second = (lane.start(SOUND, PATH, [KIND]) for _ in range(2))
        await first.ended.wait()
        await second.ended.wait()
        first, second = sorted((first, second), key=lambda call: call.ended_at or 0.0)
        assert first.ended_at is not None and second.started_at is not None
        assert second.started_at >= first.ended_at and first.status == second.status == 200
        third = lane.start(SOUND, PATH, [KIND])
        await trio.sleep(1)
        late = await lane.request("POST", PATH, SOUND, [KIND])
        assert late.status == 503 and "retry-after" in late.headers
        assert json.loads(late.body)["error"]["type"] == "overloaded_error"
        assert running.ended_at is None
        for call in (running, third):
            call.leave()


async def test_a_client_that_leaves_ends_the_call_upstream(autojump_clock: object) -> None:
    async with open_lane() as lane:
        lane.runtime.script(answers(60.0), path=PATH)
        call = lane.start(SOUND, PATH, [KIND])
        await trio.sleep(5)
        call.leave()
        await call.ended.wait()
        [entry] = [e for e in lane.runtime.journal.entries if e.request.path == PATH]
        assert entry.closed_at is not None and lane.upstream.opened == 0
        assert metric(lane.metrics, "kvstream_requests_total", route=PATH, outcome="cancelled") == 1


@pytest.mark.parametrize(("headers", "status", "words"), [
    ([("content-type", "application/json")], 415, "multipart/form-data"), ([], 415, "multipart/form-data"),
    ([KIND, ("content-encoding", "gzip")], 415, "Content-Encoding")])
async def test_what_is_no_sound_is_refused(
        headers: list[tuple[str, str]], status: int, words: str, autojump_clock: object) -> None:
    async with open_lane() as lane:
        call = await lane.request("POST", PATH, SOUND, headers)
        assert call.status == status and words in json.loads(call.body)["error"]["message"]
        assert not lane.runtime.journal.entries[-1:] or lane.runtime.journal.entries[-1].request.path != PATH


async def test_the_body_has_its_limit_also_when_it_does_not_tell_its_length(autojump_clock: object) -> None:
    async with open_lane(server={"body_bytes_max": 4096}) as lane:
        for headers in ([KIND], [KIND, ("content-length", str(len(SOUND)))]):
            call = await lane.request("POST", PATH, SOUND, headers, parts=9)
            assert call.status == 413 and json.loads(call.body)["error"]["code"] == "body_too_large"
        assert lane.upstream.opened == 0


async def test_a_runtime_without_it_says_so(autojump_clock: object) -> None:
    async with open_lane() as lane:
        body = json.dumps({"error": {"code": 501, "message": "The current model does not support audio input.",
                                     "type": "not_supported_error"}}).encode()
        lane.runtime.script(Script(script=[(0, body)], status=501, headers=JSON), path=PATH)
        call = await lane.request("POST", PATH, SOUND, [KIND])
        error = json.loads(call.body)["error"]
        assert call.status == 404 and error["code"] == "route_not_supported" and "audio input" in error["message"]
        assert (await lane.request("POST", "/v1/audio/translations", SOUND, [KIND])).status == 404  # llama.cpp has none


async def test_a_streamed_transcription_is_passed_as_it_comes(autojump_clock: object) -> None:
    async with open_lane() as lane:
        pieces = [(1.0, b'data: {"type":"transcript.text.delta","delta":"a"}\n\n'), (5.0, b"data: [DONE]\n\n")]
        lane.runtime.script(Script(script=pieces, headers=(("content-type", "text/event-stream"),)), path=PATH)
        call = await lane.request("POST", PATH, SOUND, [KIND])
        assert call.body == b"".join(data for _, data in pieces) and call.headers["content-type"] == "text/event-stream"
        assert call.writes[1][0] - call.writes[0][0] >= 5


async def test_over_tcp_chunked_and_with_a_length() -> None:
    async with open_rig() as rig:
        for body, headers in ((SOUND, [KIND]), (
                b"%x\r\n" % len(SOUND) + SOUND + b"\r\n0\r\n\r\n", [KIND, ("Transfer-Encoding", "chunked")])):
            rig.runtime.script(answers(), path=PATH)
            response = await rig.post(body, PATH, headers)
            assert (response.status, await response.read_all()) == (200, TEXT)
            [entry] = [e for e in rig.runtime.journal.entries if e.request.path == PATH][-1:]
            assert entry.request.body == SOUND
            await response.close()
