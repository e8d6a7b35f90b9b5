"""Calls without a seat, on the wire: clients that leave in each phase, and answers that are none."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kvstream.gateway.passage import Turnstile
from tests.fakes.client import connect, encode_request
from tests.fakes.server import reset_stream
from tests.gateway.conftest import Rig, metric, open_rig
from tests.gateway.rawback import Raw, open_raw
from tests.gateway.test_media import KIND, PATH, SOUND, answers


def turnstile(rig: Rig, name: str) -> Any:
    found = getattr(rig.gateway.app._proxy, name)._turnstile
    assert isinstance(found, Turnstile)
    return found.limiter.statistics


@pytest.mark.parametrize("end", ["close", "reset"])
@pytest.mark.parametrize("sound", [SOUND, SOUND * 40], ids=["small", "large"])
async def test_who_leaves_while_waiting_for_a_place_does_not_wait_on(end: str, sound: bytes) -> None:
    """They kept their places among those who wait, and their connections, for up to ``max_wait_s``: 256 of them, and
    everybody else was refused."""
    async with open_rig(server={"audio_max": 1}) as rig:
        now = turnstile(rig, "_media")
        rig.runtime.script(answers(30.0), path=PATH)
        first = await rig.send(SOUND, PATH, [KIND])
        await rig.until(lambda: now().borrowed_tokens == 1)
        waiting = [await rig.send(sound, PATH, [KIND]) for _ in range(4)]
        await rig.until(lambda: now().tasks_waiting == 4)
        for one in waiting:
            if end == "reset":
                one.reset()
            else:
                await one.close()
        await rig.until(lambda: now().tasks_waiting == 0)
        assert now().borrowed_tokens == 1
        first.reset()
        await rig.until(lambda: now().borrowed_tokens == 0 and rig.gateway.app.active == 0)
        if len(sound) == len(SOUND):
            count = metric(rig.engine.metrics, "kvstream_requests_total", route=PATH, outcome="cancelled")
            assert count == 5


async def test_a_body_that_waited_for_a_place_arrives_whole() -> None:
    async with open_rig(server={"audio_max": 1}) as rig:
        now = turnstile(rig, "_media")
        rig.runtime.script(answers(0.3), path=PATH, times=None)
        first = await rig.send(SOUND, PATH, [KIND])
        await rig.until(lambda: now().borrowed_tokens == 1)
        for size in (1, 20):
            response = await rig.post(SOUND * size, PATH, [KIND])
            assert response.status == 200
            await response.close()
            heard = [entry for entry in rig.runtime.journal.entries if entry.request.path == PATH]
            assert heard[-1].request.body == SOUND * size
        await first.close()


async def test_a_page_and_a_type_beyond_latin_1(caplog: pytest.LogCaptureFixture) -> None:
    """A type with a Euro sign was a 500 with a traceback; a page of HTML went through as a transcription."""
    async with open_raw() as rig:
        kinds = {"text/html": 502, "text/event-stream; name=\u20ac": 200, "text/plain; name=\u20ac": 200}
        for kind, status in kinds.items():
            head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: 2\r\n\r\nok"
            rig.raw.answers = {PATH: Raw([head.encode()])}
            response = await rig.post(SOUND, PATH, [KIND])
            assert response.status == status, kind
            await response.close()
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


@pytest.mark.parametrize("end", ["fin", "rst"])
async def test_a_stream_that_breaks_off_in_mid_frame_ends_with_a_frame_of_its_own(end: str) -> None:
    """The error was glued to the half frame before it, and no client could read it."""
    cut = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: {\"t\r\n"
    async with open_raw() as rig:
        rig.raw.answers = {PATH: Raw([cut], end=end, gap_s=0.1)}
        response = await rig.post(SOUND, PATH, [KIND])
        events = await response.read_events()
        assert any(e.strip().startswith(b'data: {"error"') for e in events), events
        await response.close()


async def test_an_answer_before_the_sound_was_sent_ends_with_the_client() -> None:
    stream = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n:hi\n\r\n"
    async with open_raw() as rig:
        now = turnstile(rig, "_media")
        rig.raw.answers = {PATH: Raw([stream], end="stay", early=True)}
        client = await connect(rig.port)
        await client.send_all(encode_request("POST", PATH, b"", [KIND, ("content-length", "100000")]) + b"x" * 1000)
        await rig.until(lambda: now().borrowed_tokens == 1 and rig.raw.asked == 1)
        reset_stream(client)
        await rig.until(lambda: now().borrowed_tokens == 0 and rig.gateway.app.active == 0)


async def test_light_calls_of_clients_that_left_are_counted() -> None:
    """They had neither a line nor a count."""
    async with open_raw() as rig:
        now = turnstile(rig, "_passage")
        rig.raw.answers = {"/tokenize": Raw([], end="stay")}
        calls = [await rig.send({"content": "x"}, "/tokenize") for _ in range(20)]
        await rig.until(lambda: (now().borrowed_tokens, now().tasks_waiting) == (16, 4))
        for call in calls:
            call.reset()
        await rig.until(lambda: (now().borrowed_tokens, now().tasks_waiting) == (0, 0))
        await rig.until(lambda: rig.gateway.app.active == 0)
        count = metric(rig.engine.metrics, "kvstream_requests_total", route="/tokenize", outcome="cancelled")
        assert count == 20
