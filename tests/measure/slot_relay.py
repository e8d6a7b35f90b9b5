"""A relay before a llama.cpp server that writes down what the server says about each slot that it saved or restored.

    python slot_relay.py PORT TARGET_PORT FILE

One JSON object per line: what ("saved" or "restored"), tokens, bytes, seconds. Everything is passed on byte for byte.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path

import trio

ACTION = re.compile(rb'"n_(saved|restored)":(\d+),"n_(?:written|read)":(\d+),"timings":\{"\w+_ms":([\d.e+-]+)')
TAIL_BYTES = 400  # an answer may come in two pieces


async def relay(client: trio.SocketStream, *, target: int, file: Path) -> None:
    try:
        async with client, await trio.open_tcp_stream("127.0.0.1", target) as server:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pump, client, server)
                await note(server, client, file)
                nursery.cancel_scope.cancel()
    except* (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
        pass  # one of the two left: so does the other


async def pump(source: trio.SocketStream, sink: trio.SocketStream) -> None:
    while data := await source.receive_some(65536):
        await sink.send_all(data)
    await sink.send_eof()


async def note(server: trio.SocketStream, client: trio.SocketStream, file: Path) -> None:
    seen = b""
    while data := await server.receive_some(65536):
        await client.send_all(data)
        seen = seen[-TAIL_BYTES:] + data
        end = 0
        for found in ACTION.finditer(seen):
            line = {"what": found[1].decode(), "tokens": int(found[2]), "bytes": int(found[3]),
                    "seconds": float(found[4]) / 1000}
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")
            end = found.end()
        seen = seen[end:]


if __name__ == "__main__":
    port, target, path = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    trio.run(functools.partial(
        trio.serve_tcp, functools.partial(relay, target=target, file=path), port, host="127.0.0.1"))
