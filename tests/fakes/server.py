"""The fake runtime behind a real TCP socket: HTTP/1.1 on raw Trio streams, with the sharp edges of llama.cpp's server.

Like the real one it closes an idle connection after ``keepalive_close_s``, after ``close_after_requests`` requests,
after an error (``Connection: close``) and, without saying so, after a streamed answer. Unlike it, it can reset, cut
and stall on request.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio
from attrs import define, field

from .front import ClientGone, Headers
from .journal import FakeRequest
from .runtime import FakeRuntime, parse_request

PHRASES = {200: "OK", 400: "Bad Request", 404: "Not Found", 500: "Internal Server Error", 503: "Service Unavailable"}
HEAD_MAX = 1 << 20


def reset_stream(stream: trio.SocketStream) -> None:
    """Close with an RST instead of a FIN."""
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()


class _Reader:
    """Buffered reading from one stream; ``closed`` once the peer sent FIN or RST."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream, self.buffer, self.closed, self.reset = stream, bytearray(), False, False

    async def more(self) -> bool:
        """Read something into the buffer; False when the peer is gone."""
        try:
            data = await self.stream.receive_some(65536)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.reset, data = True, b""
        self.closed = self.closed or not data
        self.buffer += data
        return bool(data)

    async def until(self, mark: bytes) -> bytes | None:
        start = 0
        while (end := self.buffer.find(mark, start)) < 0:
            start = max(0, len(self.buffer) - len(mark))
            if len(self.buffer) > HEAD_MAX or not await self.more():
                return None
        return self.take(end + len(mark))

    async def exactly(self, count: int) -> bytes | None:
        while len(self.buffer) < count:
            if not await self.more():
                return None
        return self.take(count)

    def take(self, count: int) -> bytes:
        out = bytes(self.buffer[:count])
        del self.buffer[:count]
        return out


async def _read_body(reader: _Reader, headers: dict[str, str]) -> bytes | None:
    if headers.get("expect", "").lower() == "100-continue":
        await reader.stream.send_all(b"HTTP/1.1 100 Continue\r\n\r\n")
    if "chunked" not in headers.get("transfer-encoding", "").lower():
        return await reader.exactly(int(headers.get("content-length", "0")))
    out = bytearray()
    while (line := await reader.until(b"\r\n")) is not None:
        size = int(line.split(b";")[0], 16)
        part = await reader.exactly(size + 2)
        if part is None:
            return None
        if size == 0:
            return bytes(out)
        out += part[:-2]
    return None


async def _read_request(reader: _Reader) -> FakeRequest | None:
    """The next request, or None when the connection is over."""
    head = await reader.until(b"\r\n\r\n")
    if head is None:
        return None
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    method, target, _ = first.split(" ", 2)
    pairs = tuple((n.strip(), v.strip()) for n, _, v in (line.partition(":") for line in lines))
    body = await _read_body(reader, {name.lower(): value for name, value in pairs})
    return None if body is None else parse_request(method, target, pairs, body)


@define(eq=False)
class _TcpWire:
    """The fake's end of one exchange on a connection."""

    stream: trio.SocketStream
    head_only: bool
    keepalive: str
    gone: trio.Event = field(factory=trio.Event)
    reset: bool = False
    on_gone: Callable[[], None] = field(default=lambda: None)
    close: bool = False
    chunked: bool = False
    finished: bool = False

    async def _send(self, data: bytes) -> None:
        try:
            await self.stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as exc:
            raise ClientGone from exc

    async def head(self, status: int, headers: Headers, length: int | None) -> None:
        self.chunked = length is None
        self.close = self.close or status >= 400
        lines = [f"HTTP/1.1 {status} {PHRASES.get(status, 'Status')}"]
        lines += [f"{name}: {value}" for name, value in headers]
        lines.append("Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}")
        lines.append("Connection: close" if self.close else f"Keep-Alive: {self.keepalive}")
        await self._send("\r\n".join([*lines, "", ""]).encode("latin-1"))

    async def write(self, data: bytes) -> None:
        if data and not self.head_only:
            await self._send(b"%x\r\n%s\r\n" % (len(data), data) if self.chunked else data)

    async def end(self) -> None:
        if self.chunked:
            await self._send(b"0\r\n\r\n")
        self.finished = True

    async def abort(self, reset: bool) -> None:
        await trio.lowlevel.checkpoint()
        self.close = self.finished = True
        if reset:
            reset_stream(self.stream)
        else:
            await self.stream.aclose()


@define(eq=False)
class FakeServer:
    """A running TCP front. ``connections`` counts those open now.

    ``pause`` closes the listener (new connections are refused) and ``resume`` opens it again on the same port.
    """

    runtime: FakeRuntime
    port: int = 0
    connections: int = 0
    _scope: trio.CancelScope | None = None
    _nursery: trio.Nursery | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def pause(self) -> None:
        if self._scope is not None:
            self._scope.cancel()
        await trio.sleep(0.01)

    async def resume(self) -> None:
        assert self._nursery is not None
        await self._nursery.start(self._listen)

    async def run(self, *, task_status: trio.TaskStatus[FakeServer] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await nursery.start(self._listen)
            task_status.started(self)
            await trio.sleep_forever()

    async def _listen(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        listeners = await trio.open_tcp_listeners(self.port, host="127.0.0.1")
        self.port = listeners[0].socket.getsockname()[1]
        task_status.started()
        with trio.CancelScope() as self._scope:
            await trio.serve_listeners(self._connection, listeners, handler_nursery=self._nursery)

    async def _connection(self, stream: trio.SocketStream) -> None:
        journal = self.runtime.journal
        number = journal.connected()
        self.connections += 1
        how = "cancelled"
        try:
            if self.runtime.config.refuse:
                how = "refused"
                reset_stream(stream)
                return
            how = await self._exchanges(stream, number)
        finally:
            self.connections -= 1
            journal.disconnected(number, how)
            await trio.aclose_forcefully(stream)

    async def _exchanges(self, stream: trio.SocketStream, number: int) -> str:
        """Requests of one connection, one after the other; tells how it ended."""
        reader, config = _Reader(stream), self.runtime.config
        for left in range(config.close_after_requests, 0, -1):
            request = None
            with trio.move_on_after(config.keepalive_close_s) as idle:
                # the limit is for an idle connection; a slow sender of a big body is not idle
                while not reader.buffer and await reader.more():
                    pass
            if not idle.cancelled_caught:
                request = await _read_request(reader)
            if request is None:
                return "idle" if idle.cancelled_caught else "reset" if reader.reset else "close"
            wire = _TcpWire(stream, request.method == "HEAD", f"timeout={config.keepalive_close_s:g}, max={left}")
            wire.close = left == 1 or request.headers.get("connection", "").lower() == "close"
            await self._exchange(request, wire, reader, number)
            if not wire.finished:
                return "reset" if wire.reset else "close"
            if wire.close or (wire.chunked and config.close_after_stream):
                return "end"
        return "end"

    async def _exchange(self, request: FakeRequest, wire: _TcpWire, reader: _Reader, number: int) -> None:
        async with trio.open_nursery() as nursery:
            if self.runtime.config.notice_close == "read":
                nursery.start_soon(self._watch, wire, reader)
            await self.runtime.handle(request, wire, number)
            nursery.cancel_scope.cancel()

    async def _watch(self, wire: _TcpWire, reader: _Reader) -> None:
        """Read on while the answer is made: the end of the stream means that the client left, a half-close as well."""
        while not reader.closed:
            await reader.more()
        if not wire.finished:
            wire.reset = reader.reset
            wire.gone.set()
            wire.on_gone()


async def serve_fake(runtime: FakeRuntime, *, task_status: trio.TaskStatus[FakeServer]) -> None:
    """Task body: ``server = await nursery.start(serve_fake, runtime)``. Needs ``runtime.run`` elsewhere."""
    await FakeServer(runtime).run(task_status=task_status)


@asynccontextmanager
async def open_server(runtime: FakeRuntime) -> AsyncIterator[FakeServer]:
    """A running TCP front for a running runtime."""
    async with trio.open_nursery() as nursery:
        server: FakeServer = await nursery.start(serve_fake, runtime)
        try:
            yield server
        finally:
            nursery.cancel_scope.cancel()
