"""A backend whose answers to some paths are bytes that a test wrote; everything else is answered by the TCP fake."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio
from attrs import define, field

from kvstream.config import Loaded
from kvstream.gateway.serve import open_gateway
from tests.fakes import open_runtime
from tests.fakes.server import open_server, reset_stream
from tests.gateway.conftest import Rig, config_of, is_up


@define
class Raw:
    """``pieces`` are written with ``gap_s`` between them, then ``end``: ``fin``, ``rst``, ``stay`` (until the peer
    leaves) or ``next`` (another request on this connection). ``early``: before the request's body was read."""

    pieces: Sequence[bytes]
    end: str = "fin"
    gap_s: float = 0.0
    early: bool = False


@define(eq=False)
class RawBackend:
    """``answers`` by path. ``open`` counts the connections that are open now, ``asked`` the scripted requests."""

    fake_port: int
    answers: dict[str, Raw | Callable[[bytes], Raw]] = field(factory=dict)
    open: int = 0
    asked: int = 0
    bodies: list[bytes] = field(factory=list)

    async def serve(self, *, task_status: trio.TaskStatus[int]) -> None:
        async with trio.open_nursery() as nursery:
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            task_status.started(listeners[0].socket.getsockname()[1])
            await trio.serve_listeners(self._connection, listeners, handler_nursery=nursery)

    async def _connection(self, stream: trio.SocketStream) -> None:
        self.open += 1
        try:
            while await self._exchange(stream):
                pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self.open -= 1
            await trio.aclose_forcefully(stream)

    async def _exchange(self, stream: trio.SocketStream) -> bool:
        data = b""
        while b"\r\n\r\n" not in data:
            if not (more := await stream.receive_some(65536)):
                return False
            data += more
        head, _, body = data.partition(b"\r\n\r\n")
        path = head.split()[1].decode()
        headers = {n.strip().lower(): v.strip() for n, _, v in
                   (line.partition(b":") for line in head.split(b"\r\n")[1:])}
        raw = self.answers.get(path)
        if raw is not None and not isinstance(raw, Raw):
            raw = raw(head)
        if raw is None or not raw.early:
            length = int(headers.get(b"content-length", b"0"))
            chunked = b"chunked" in headers.get(b"transfer-encoding", b"")
            while len(body) < length or (chunked and not body.endswith(b"0\r\n\r\n")):
                if not (more := await stream.receive_some(65536)):
                    return False
                body += more
        self.bodies.append(body)
        if raw is None:
            await self._forward(stream, head, body)
            return False
        self.asked += 1
        for piece in raw.pieces:
            await stream.send_all(piece)
            if raw.gap_s:
                await trio.sleep(raw.gap_s)
        if raw.end == "rst":
            reset_stream(stream)
        elif raw.end == "stay":
            while await stream.receive_some(65536):
                pass
        return raw.end == "next"

    async def _forward(self, stream: trio.SocketStream, head: bytes, body: bytes) -> None:
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
        try:
            onward = await trio.open_tcp_stream("127.0.0.1", self.fake_port)
        except OSError:
            return
        async with onward:
            await onward.send_all(b"\r\n".join([*lines, b"Connection: close", b"", b""]) + body)
            while data := await onward.receive_some(65536):
                await stream.send_all(data)


@attrs.define(eq=False)
class RawRig(Rig):
    raw: RawBackend = field(kw_only=True)


@asynccontextmanager
async def open_raw(*, kind: str = "llamacpp", knobs: Any = None,
                   **sections: Mapping[str, Any]) -> AsyncIterator[RawRig]:
    """A running gateway before a :class:`RawBackend`."""
    async with open_runtime(**{"dialect": kind} | (knobs or {})) as runtime, open_server(runtime) as fake:
        raw = RawBackend(fake.port)
        async with trio.open_nursery() as nursery:
            port = await nursery.start(raw.serve)
            backend = {"base_url": f"http://127.0.0.1:{port}", "type": kind, **sections.pop("backend", {})}
            async with open_gateway(Loaded.of(config_of(backend=backend, **sections))) as gateway:
                rig = RawRig(gateway, runtime, fake, raw=raw)
                await rig.until(lambda: is_up(gateway.engine))
                yield rig
            nursery.cancel_scope.cancel()
