"""What one client sends or does must not end the others, nor be answered with our own traceback."""

from __future__ import annotations

import socket
import struct

import pytest
import trio

from tests.fakes.client import connect
from tests.gateway.conftest import chat, open_rig


async def test_reset_while_all_connections_are_taken() -> None:
    async with open_rig(server={"connections_max": 2}) as rig:
        held = [await connect(rig.port) for _ in range(2)]
        count = rig.engine.metrics.open_connections._value
        await rig.until(lambda: count.get() == 2)
        for _ in range(10):
            with socket.create_connection(("127.0.0.1", rig.port)) as one:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                await trio.sleep(0.01)
        for stream in held:
            await stream.aclose()
        await rig.until(lambda: count.get() == 0)
        assert (await rig.get("/health"))[0] == 200


@pytest.mark.parametrize("name", ["User-Agent", "Authorization", "Accept-Language", "X-Request-Id"])
async def test_header_beyond_ascii(name: str) -> None:
    async with open_rig() as rig:
        response = await rig.post(chat(stream=False), headers=[(name, "caf\xe9")])
        assert response.status == 200
        await response.close()
