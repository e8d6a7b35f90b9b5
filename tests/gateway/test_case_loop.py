"""Case 57, the guard: a KVStream whose backend is itself says so, and does not call itself until something breaks."""

from __future__ import annotations

import logging
import socket

import pytest
import trio

from kvstream.config import Loaded
from kvstream.gateway.request import HOP_HEADER
from kvstream.gateway.serve import open_gateway
from tests.fakes.client import open_request
from tests.gateway.conftest import CHAT, HANG_S, chat, config_of, data_of, error_of, open_rig


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@pytest.mark.parametrize("kind", ["llamacpp", "openai", "ollama"])
async def test_case_57_itself_as_a_backend_is_noticed(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    (port,) = free_ports(1)
    config = config_of(server={"port": port}, backend={"type": kind, "base_url": f"http://127.0.0.1:{port}"})
    async with open_gateway(Loaded.of(config)) as gateway:
        with trio.fail_after(HANG_S):
            while "come back to this KVStream" not in gateway.engine.watcher.backend.detail:
                await trio.sleep(0.01)
        assert gateway.engine.state == "down"
        response = await open_request(port, "POST", CHAT, chat())
        error = error_of(await response.read_all())
        assert response.status == 503 and "backend.base_url" in error["message"]
        ready = await open_request(port, "GET", "/ready")
        assert ready.status == 503
        await response.close()
        await ready.close()
    told = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert told and all("a request came back to us" in r.getMessage() for r in told)
    caplog.clear()


async def test_case_57_two_that_call_each_other(caplog: pytest.LogCaptureFixture) -> None:
    one, two = free_ports(2)
    configs = [config_of(server={"port": own}, backend={"type": "openai", "base_url": f"http://127.0.0.1:{other}"})
               for own, other in ((one, two), (two, one))]
    async with open_gateway(Loaded.of(configs[0])) as first, open_gateway(Loaded.of(configs[1])) as second:
        with trio.fail_after(HANG_S):
            while not all(gw.engine.watcher.backend.state == "down" for gw in (first, second)):
                await trio.sleep(0.01)
        response = await open_request(one, "POST", CHAT, chat())
        assert response.status == 503
        await response.close()
    caplog.clear()


async def test_case_57_one_before_another_is_no_circle() -> None:
    async with open_rig() as inner:
        config = config_of(backend={"type": "openai", "base_url": f"http://127.0.0.1:{inner.port}"})
        async with open_gateway(Loaded.of(config)) as outer:
            with trio.fail_after(HANG_S):
                while not outer.engine.ready:
                    await trio.sleep(0.01)
            response = await open_request(outer.server.ports[0], "POST", CHAT, chat())
            assert response.status == 200 and data_of(await response.read_all())[-1] == "[DONE]"
            await response.close()
        hops = inner.runtime.journal.calls[0].request.headers[HOP_HEADER].split(", ")
        assert len(hops) == 2 and len(set(hops)) == 2


async def test_an_id_that_is_not_ours_is_nobodys_business() -> None:
    async with open_rig() as rig:
        response = await rig.post(chat(), headers=[("X-KVStream-Hop", "0123456789abcdef, " + "x" * 100)])
        assert response.status == 200
        await response.close()
