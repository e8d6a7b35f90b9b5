"""What a client's bytes and ways of leaving must not leave behind: connections, tasks, places."""

from __future__ import annotations

import logging

import pytest
import trio

from tests.fakes.client import connect, encode_request
from tests.fakes.server import reset_stream
from tests.gateway.conftest import CHAT, HANG_S, Rig, chat, open_rig

HOST = b" HTTP/1.1\r\nHost: localhost\r\n"
UPGRADES = {
    "websocket that is none": b"GET /x" + HOST + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    "websocket": b"GET /health" + HOST + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
                 b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
    "h2c": b"GET /health" + HOST + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
           b"HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n",
    # A window of 0, so that no byte of an answer can ever be sent.
    "h2 prior": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x04\x00\x00\x00\x00"
                b"\x00\x00\x0c\x01\x05\x00\x00\x00\x01\x82\x86\x41\x04host\x44\x01/\x00"[:32],
    "half a head": b"GET /health HTTP/1.1\r\nHost: loc",
    "bad request": b"GET\r\n\r\n",
}


def connections(rig: Rig) -> float:
    return float(rig.engine.metrics.open_connections._value.get())


async def throw(port: int, data: bytes, end: str, wait_s: float = 0.2, until: bytes | None = None) -> bytes:
    """What came back by then."""
    stream = await connect(port)
    got = b""
    try:
        await stream.send_all(data)
        if end == "half-close":
            await stream.send_eof()
        with trio.move_on_after(wait_s):
            while more := await stream.receive_some(65536):
                got += more
                if until is not None and got.endswith(until):
                    break
    except trio.BrokenResourceError:
        pass
    if end == "reset":
        reset_stream(stream)
    await trio.aclose_forcefully(stream)
    return got


@pytest.mark.parametrize("end", ["half-close", "close", "reset"])
async def test_no_beginning_of_another_protocol_keeps_its_connection(end: str) -> None:
    """A bad WebSocket handshake was answered 400 and kept for ever, also after the client had left; so was a client of
    HTTP/2 that left early. ``server.connections_max`` of those, and nobody else came in."""
    async with open_rig() as rig:
        for data in UPGRADES.values():
            await throw(rig.port, data, end)
        await rig.until(lambda: connections(rig) == 0)


async def test_an_upgrade_that_is_not_ours_is_ignored() -> None:
    async with open_rig() as rig:
        for name in ("websocket", "h2c"):
            got = await throw(rig.port, UPGRADES[name], "close", HANG_S, until=b"}")
            assert got.startswith(b"HTTP/1.1 200") and got.endswith(b"}"), name


async def test_a_swarm_of_resets_in_every_phase(caplog: pytest.LogCaptureFixture) -> None:
    knobs = {"slots": 2, "decode_rate": 200.0, "answer_tokens": 50, "prefill_rate": 400.0}
    async with open_rig(knobs=knobs) as rig:
        request = encode_request("POST", CHAT, chat("x " * 60, max_tokens=20))
        async with trio.open_nursery() as nursery:
            for i in range(100):
                cut = len(request) if i % 3 else i * 7 % len(request)
                nursery.start_soon(throw, rig.port, request[:cut], "reset", i % 15 * 0.04)
        await rig.until(lambda: rig.idle() and connections(rig) == 0)
        assert rig.runtime.in_flight_max <= 2
        response = await rig.post(chat(max_tokens=2))
        assert response.status == 200
        await response.close()
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]
