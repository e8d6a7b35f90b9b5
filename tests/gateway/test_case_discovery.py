"""Case 57 and what else discovery must do on real sockets: find, tell apart, wake nothing, hang nowhere."""

from __future__ import annotations

import socket

import pytest
import trio

from kvstream.gateway.discovery import LIKELY_PORTS, Found, Silent, discover, likely_urls, look_at
from tests.fakes import open_runtime
from tests.fakes.server import open_server
from tests.gateway.conftest import HANG_S, open_rig

pytestmark = pytest.mark.usefixtures("patient")


async def test_case_57_both_servers_are_found_and_kvstream_is_no_backend() -> None:
    """llama.cpp on the old port and on the new one, and KVStream before one of them."""
    async with open_rig() as rig, open_runtime(dialect="openai") as other, open_server(other) as vllm:
        began = len(rig.runtime.journal.entries)
        found = await discover(likely_urls((rig.fake.port, vllm.port, rig.port)))
        assert [(f.port, f.identity.kind) for f in found if isinstance(f, Found)] == [
            (rig.fake.port, "llamacpp"), (vllm.port, "vllm"), (rig.port, "kvstream")]
        assert [f.identity.is_backend for f in found if isinstance(f, Found)] == [True, True, False]
        calls = [*rig.runtime.journal.entries[began:], *other.journal.entries]
        assert {entry.request.method for entry in calls} == {"GET"}
        assert not [entry for entry in calls if entry.request.path == "/slots"]
    assert {8080, 9931} <= set(LIKELY_PORTS)


async def test_kvstream_whose_backend_is_away_is_still_kvstream() -> None:
    async with open_rig(wait=False, knobs={"refuse": True}) as rig:
        await rig.until(lambda: rig.engine.watcher.backend.state == "down")
        found = await look_at(rig.gateway.url)
        assert isinstance(found, Found) and (found.identity.kind, found.identity.state) == ("kvstream", "down")


async def test_who_does_not_answer_costs_seconds_not_a_hang() -> None:
    with socket.socket() as mute, socket.socket() as closed:
        for sock in (mute, closed):
            sock.bind(("127.0.0.1", 0))
        mute.listen()
        ports = (mute.getsockname()[1], closed.getsockname()[1])
        with trio.fail_after(HANG_S):
            found = await discover(likely_urls(ports), timeout_s=0.2)
        assert [type(f) for f in found] == [Silent] and found[0].url.endswith(str(ports[0]))


@pytest.mark.parametrize("noise", [b"", b"220 ready\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\nx",
                                   b"HTTP/1.1 200 OK\r\n\r\n[" + b"[" * 100_000])
async def test_who_speaks_otherwise_is_no_error(noise: bytes) -> None:
    async def serve(stream: trio.SocketStream) -> None:
        await stream.send_all(noise)
        await stream.receive_some(1000)

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, serve, 0)
        port = listeners[0].socket.getsockname()[1]
        with trio.fail_after(HANG_S):
            found = await look_at(f"http://127.0.0.1:{port}", timeout_s=0.2)
        assert found is None or isinstance(found, Silent) or not found.identity.is_backend
        nursery.cancel_scope.cancel()


async def test_a_loading_server_is_told_from_a_dead_one() -> None:
    async with open_runtime(load_s=3600) as runtime, open_server(runtime) as server:
        found = await look_at(server.base_url)
        assert isinstance(found, Found) and (found.identity.kind, found.identity.state) == ("llamacpp", "loading")
        await server.pause()
        assert await look_at(server.base_url) is None


async def test_the_key_is_sent_where_it_belongs() -> None:
    async with open_runtime(api_key="sesame") as runtime, open_server(runtime) as server:
        locked, open_ = await look_at(server.base_url), await look_at(server.base_url + "/v1/", "sesame")
        assert isinstance(locked, Found) and isinstance(open_, Found)
        assert (locked.identity.state, open_.identity.state) == ("locked", "up")
        (found,) = await discover([server.base_url], {"http://elsewhere": "sesame"})
        assert isinstance(found, Found) and found.identity.state == "locked"
