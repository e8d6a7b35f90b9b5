"""``FakeUpstream``: the fake runtime behind ``kvstream.gateway.ports.Upstream``, in memory, on any Trio clock.

Bytes travel through a bounded channel, so back-pressure reaches the fake's writer as it would over a socket. Leaving
``open`` before the body ended is the client closing the connection.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from itertools import pairwise

import trio
from attrs import evolve

from kvstream.adapters.base import HttpCall, HttpReply
from kvstream.errors import (
    BackendRefusedError,
    BackendTimeoutError,
    BackendUnavailableError,
    StreamTruncatedError,
)

from .front import ClientGone, Headers
from .runtime import FakeRuntime, parse_request

Split = Callable[[bytes], Iterable[bytes]]


def bytewise(data: bytes) -> Iterable[bytes]:
    """A ``split`` that delivers every byte by itself."""
    return (data[i : i + 1] for i in range(len(data)))


def at(*offsets: int) -> Split:
    """A ``split`` that cuts each write at these offsets."""

    def cut(data: bytes) -> Iterable[bytes]:
        edges = [0, *sorted(o for o in offsets if 0 < o < len(data)), len(data)]
        return (data[a:b] for a, b in pairwise(edges))

    return cut


class _MemoryWire:
    """The fake's end of one exchange."""

    def __init__(self, writes_max: int, split: Split | None) -> None:
        self.gone = trio.Event()
        self.reset = False
        self.on_gone: Callable[[], None] = lambda: None
        self.answered = trio.Event()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.expected: int | None = None
        self.ended = False
        self.broken = False
        self._split = split
        self.send, self.body = trio.open_memory_channel[bytes](writes_max)

    async def head(self, status: int, headers: Headers, length: int | None) -> None:
        await trio.lowlevel.checkpoint()
        self.status, self.expected = status, length
        self.headers = {name.lower(): value for name, value in headers}
        if length is not None:
            self.headers["content-length"] = str(length)
        self.answered.set()

    async def write(self, data: bytes) -> None:
        try:
            for part in self._split(data) if self._split else (data,):
                if part:
                    await self.send.send(part)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as exc:
            raise ClientGone from exc

    async def end(self) -> None:
        await trio.lowlevel.checkpoint()
        self.ended = True
        self.send.close()

    async def abort(self, reset: bool) -> None:
        await trio.lowlevel.checkpoint()
        self.broken = True
        self.send.close()
        self.answered.set()


class FakeResponse:
    """The client's end: an ``UpstreamResponse``."""

    def __init__(self, wire: _MemoryWire) -> None:
        self._wire = wire
        self.status = wire.status
        self.headers: Mapping[str, str] = wire.headers
        self.finished = False

    async def receive(self) -> bytes:
        try:
            return await self._wire.body.receive()
        except trio.EndOfChannel:
            self.finished = True
            if self._wire.broken:
                raise StreamTruncatedError("the runtime closed the connection in the middle of its answer") from None
            return b""


class FakeUpstream:
    """One backend. ``split`` cuts what the runtime writes into reads; ``writes_max`` bounds the bytes in flight.

    ``connect_s`` is the time a connection takes. ``opened`` counts the exchanges that are open now.
    """

    def __init__(
        self, runtime: FakeRuntime, *, split: Split | None = None, writes_max: int = 16, connect_s: float = 0.0
    ) -> None:
        self.runtime, self.split, self.writes_max, self.connect_s = runtime, split, writes_max, connect_s
        self.opened = 0
        self.refuses: Callable[[HttpCall], bool] | None = None  # which calls find a closed port

    async def request(self, call: HttpCall, *, timeout_s: float) -> HttpReply:
        """See ``ports.Upstream.request``."""
        with trio.move_on_after(timeout_s):
            async with self.open(call) as response:
                body = b""
                try:
                    while part := await response.receive():
                        body += part
                except StreamTruncatedError as exc:
                    raise BackendUnavailableError("the runtime broke off its answer") from exc
                return HttpReply(response.status, response.headers, body)
        raise BackendTimeoutError(f"no answer to {call.method} {call.path} within {timeout_s:g} s")

    @asynccontextmanager
    async def open(self, call: HttpCall, content: AsyncIterable[bytes] | None = None) -> AsyncIterator[FakeResponse]:
        """See ``ports.Upstream.open``. Of a body in pieces the fake sees the whole, once it is there."""
        await trio.sleep(self.connect_s)
        if self.runtime.config.refuse or (self.refuses is not None and self.refuses(call)):
            raise BackendRefusedError("connection refused")
        if content is not None:
            call = evolve(call, body=b"".join([piece async for piece in content]))
        wire = _MemoryWire(self.writes_max, self.split)
        journal = self.runtime.journal
        connection = journal.connected()
        self.runtime.spawn(parse_request(call.method, call.path, call.headers, call.body), wire, connection)
        self.opened += 1
        try:
            await wire.answered.wait()
            if not wire.status:
                raise BackendUnavailableError("connection reset before the answer")
            yield FakeResponse(wire)
        finally:
            self.opened -= 1
            if not (wire.ended or wire.broken):
                wire.gone.set()
                wire.on_gone()
            wire.body.close()
            journal.disconnected(connection, "end" if wire.ended or wire.broken else "close")
