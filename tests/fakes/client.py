"""A raw HTTP/1.1 client for tests: full control over how the request is sent, read and broken off."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

import trio

from .server import reset_stream

Pairs = Sequence[tuple[str, str]]


class RawResponse:
    """An answer being read. ``headers`` has lower-case names, ``header_list`` is as it came.

    ``sent_events`` holds the SSE events read so far, each as its raw bytes without the blank line.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.status = 0
        self.header_list: list[tuple[str, str]] = []
        self.ended = False
        self.truncated = False
        self.reset_by_peer = False
        self._buffer = b""
        self._body = b""
        self._chunked = False
        self._left: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {name.lower(): value for name, value in self.header_list}

    async def _more(self) -> bool:
        try:
            data = await self.stream.receive_some(65536)
        except trio.BrokenResourceError:
            self.reset_by_peer, data = True, b""
        self._buffer += data
        return bool(data)

    async def _line(self) -> bytes | None:
        while b"\r\n" not in self._buffer:
            if not await self._more():
                return None
        line, _, self._buffer = self._buffer.partition(b"\r\n")
        return line

    async def read_head(self) -> RawResponse:
        """Wait for the status line and headers (1xx answers are skipped)."""
        while True:
            first = await self._line()
            if first is None:
                raise EOFError("the server closed the connection without an answer")
            self.status = int(first.split()[1])
            self.header_list = []
            while line := await self._line():
                name, _, value = line.decode("latin-1").partition(":")
                self.header_list.append((name.strip(), value.strip()))
            if self.status >= 200:
                break
        self._chunked = "chunked" in self.headers.get("transfer-encoding", "")
        if not self._chunked and "content-length" in self.headers:
            self._left = int(self.headers["content-length"])
        if self.status in (204, 304):
            self._left = 0
        self.ended = self._left == 0
        return self

    async def read_some(self) -> bytes:
        """The next body bytes, de-chunked; ``b""`` at the end, and then ``truncated`` tells whether it was proper."""
        if self.ended:
            return b""
        return await (self._read_chunk() if self._chunked else self._read_plain())

    async def _read_plain(self) -> bytes:
        if not self._buffer and not await self._more():
            self.ended = True
            self.truncated = bool(self._left) or self.reset_by_peer
            return b""
        take = len(self._buffer) if self._left is None else min(self._left, len(self._buffer))
        data, self._buffer = self._buffer[:take], self._buffer[take:]
        if self._left is not None:
            self._left -= take
            self.ended = self._left == 0
        return data

    async def _read_chunk(self) -> bytes:
        line = await self._line()
        size = -1 if line is None else int(line.split(b";")[0], 16)
        while size >= 0 and len(self._buffer) < size + 2:
            if not await self._more():
                size = -1
        if size <= 0:
            self.ended, self.truncated = True, size < 0
            self._buffer = self._buffer[2:]
            return b""
        data, self._buffer = self._buffer[:size], self._buffer[size + 2 :]
        return data

    async def read_all(self) -> bytes:
        """The rest of the body."""
        out, self._body = self._body, b""
        while data := await self.read_some():
            out += data
        return out

    async def read_json(self) -> Any:
        return json.loads(await self.read_all())

    async def read_event(self) -> bytes | None:
        """The next SSE event or comment, raw, without its blank line; None at the end of the body."""
        while b"\n\n" not in self._body:
            data = await self.read_some()
            if not data:
                rest, self._body = self._body, b""
                return rest or None
            self._body += data
        event, _, self._body = self._body.partition(b"\n\n")
        return event

    async def read_events(self) -> list[bytes]:
        """All remaining SSE events."""
        out = []
        while (event := await self.read_event()) is not None:
            out.append(event)
        return out

    async def close(self) -> None:
        """Close fully (FIN; the kernel sends RST for what still arrives)."""
        await self.stream.aclose()

    async def half_close(self) -> None:
        """Say that nothing more will be sent, and go on reading."""
        await self.stream.send_eof()

    def reset(self) -> None:
        """Close with an RST."""
        reset_stream(self.stream)

    async def again(
        self, method: str, path: str, body: bytes | Any = b"", headers: Pairs = (), *, host: str | None = "127.0.0.1"
    ) -> RawResponse:
        """Another request on the same connection, once this answer was read to its end."""
        await self.stream.send_all(encode_request(method, path, body, headers, host=host))
        follow = RawResponse(self.stream)
        follow._buffer = self._buffer
        return await follow.read_head()


def encode_request(
    method: str, path: str, body: bytes | Any = b"", headers: Pairs = (), *, host: str | None = "127.0.0.1"
) -> bytes:
    """The bytes of a request. A body that is not bytes is sent as JSON; ``host`` None leaves the header out."""
    lines = [f"{method} {path} HTTP/1.1"]
    if host is not None:
        lines.append(f"Host: {host}")
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
        lines.append("Content-Type: application/json")
    names = {name.lower() for name, _ in headers}
    if (body or method not in ("GET", "HEAD")) and not names & {"content-length", "transfer-encoding"}:
        lines.append(f"Content-Length: {len(body)}")
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


async def connect(port: int, *, receive_buffer: int | None = None, host: str = "127.0.0.1") -> trio.SocketStream:
    """A TCP connection; a small ``receive_buffer`` (bytes) makes a slow reader felt soon."""
    sock = trio.socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    try:
        await sock.connect((host, port))
    except BaseException:
        sock.close()
        raise
    return trio.SocketStream(sock)


async def send_request(
    port: int, method: str, path: str, body: bytes | Any = b"", headers: Pairs = (), *,
    host: str | None = "127.0.0.1", receive_buffer: int | None = None,
) -> RawResponse:  # fmt: skip
    """Send, and do not wait for the answer: call ``read_head`` on the result for that."""
    stream = await connect(port, receive_buffer=receive_buffer)
    await stream.send_all(encode_request(method, path, body, headers, host=host))
    return RawResponse(stream)


async def open_request(
    port: int, method: str, path: str, body: bytes | Any = b"", headers: Pairs = (), *,
    host: str | None = "127.0.0.1", receive_buffer: int | None = None,
) -> RawResponse:  # fmt: skip
    """Send and wait for the head of the answer."""
    response = await send_request(port, method, path, body, headers, host=host, receive_buffer=receive_buffer)
    return await response.read_head()


async def send_raw(port: int, data: bytes) -> RawResponse:
    """Send any bytes at all and read what comes back as an HTTP answer."""
    stream = await connect(port)
    await stream.send_all(data)
    return await RawResponse(stream).read_head()


async def fetch(port: int, method: str, path: str, body: bytes | Any = b"", headers: Pairs = ()) -> tuple[int, bytes]:
    """Status and whole body, connection closed."""
    response = await open_request(port, method, path, body, [*headers, ("Connection", "close")])
    try:
        return response.status, await response.read_all()
    finally:
        await response.close()
