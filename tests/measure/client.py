"""Clients made for measuring: they do little, so that what they measure is not themselves.

``RawChat`` is a blocking keep-alive socket for one stream at a time; ``chat`` and ``get`` are for many at once, on
Trio.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import h11
import trio
from attrs import define, field, frozen

CHAT = "/v1/chat/completions"
END_OF_BODY = b"0\r\n\r\n"
FIRST_TOKEN = b'" token"'
ANSWER_S_MAX = 30.0


@frozen
class Times:
    """Milliseconds from sending to the first token and to the last byte."""

    ttft_ms: float
    total_ms: float


class RawChat:
    """One keep-alive connection to a server whose answers come from the canned backend."""

    def __init__(self, name: str, port: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self._name = name
        self._request = (f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
                         f"content-length: {len(content)}\r\n\r\n").encode() + content
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S_MAX)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> RawChat:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._socket.close()

    def stream(self) -> Times:
        """Send the request and read its answer to the end."""
        seen, first = bytearray(), 0.0
        start = time.perf_counter()
        self._socket.sendall(self._request)
        while not seen.endswith(END_OF_BODY):
            data = self._socket.recv(65536)
            if not data:
                raise RuntimeError(f"{self._name} closed the connection after {bytes(seen[-300:])!r}")
            seen += data
            if not first and FIRST_TOKEN in seen:
                first = time.perf_counter()
        end = time.perf_counter()
        if not first or not seen.startswith(b"HTTP/1.1 200") or b"[DONE]" not in seen:
            raise RuntimeError(f"{self._name} gave a bad answer: {bytes(seen[:500])!r}")
        return Times((first - start) * 1e3, (end - start) * 1e3)


# --- many at once -----------------------------------------------------------------------------------------------------


class Connection:
    """A client connection that speaks HTTP/1.1."""

    def __init__(self, port: int, stream: trio.SocketStream) -> None:
        self.port = port
        self.stream = stream
        self._http = h11.Connection(h11.CLIENT)

    async def send(self, method: str, path: str, body: bytes = b"") -> None:
        """Send a request. The connection must be fresh or its last answer read to the end."""
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        headers = [("host", f"127.0.0.1:{self.port}"), ("content-type", "application/json"),
                   ("content-length", str(len(body)))]
        data = self._http.send(h11.Request(method=method, target=path, headers=headers)) or b""
        data += (self._http.send(h11.Data(data=body)) or b"") if body else b""
        await self.stream.send_all(data + (self._http.send(h11.EndOfMessage()) or b""))

    async def event(self) -> h11.Event | type[h11.PAUSED]:
        """The next event of the answer: ``h11.Response``, ``h11.Data``, ``h11.EndOfMessage``."""
        while (event := self._http.next_event()) is h11.NEED_DATA or isinstance(event, h11.InformationalResponse):
            if event is h11.NEED_DATA:
                self._http.receive_data(bytes(await self.stream.receive_some(65536)))
        return event

    async def whole(self) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body of an answer."""
        response = await self.event()
        if not isinstance(response, h11.Response):
            raise h11.RemoteProtocolError(f"no answer but {response!r}")
        body = bytearray()
        while isinstance(event := await self.event(), h11.Data):
            body += event.data
        return response.status_code, headers_of(response), bytes(body)

    def close(self) -> None:
        """At once, as the system closes the sockets of a process that ends."""
        self.stream.socket.close()


def headers_of(response: h11.Response) -> dict[str, str]:
    return {name.decode(): value.decode("latin-1") for name, value in response.headers}


@asynccontextmanager
async def connect(port: int) -> AsyncIterator[Connection]:
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    connection = Connection(port, stream)
    try:
        yield connection
    finally:
        connection.close()


async def get(port: int, path: str) -> bytes:
    """The body of a GET, on a connection of its own."""
    async with connect(port) as connection:
        await connection.send("GET", path)
        status, _, body = await connection.whole()
    if status != 200:
        raise RuntimeError(f"GET {path} on port {port} answered {status}: {body[:300]!r}")
    return body


async def get_json(port: int, path: str) -> Any:
    return json.loads(await get(port, path))


async def metric(port: int, name: str) -> float:
    """One value of a Prometheus page."""
    for line in (await get(port, "/metrics")).decode().splitlines():
        if line.startswith(name + " "):
            return float(line.split()[1])
    raise KeyError(name)


@define
class Answer:
    """What came back to a chat. Times are Trio's; ``first`` is that of the first token."""

    sent: float
    status: int = 0
    headers: dict[str, str] = field(factory=dict)
    first: float | None = None
    ended: float | None = None
    tokens: int = 0
    finish: str | None = None
    error: str | None = None
    usage: dict[str, Any] = field(factory=dict)

    @property
    def outcome(self) -> str:
        if self.error is not None:
            return f"error: {self.error}"
        return f"finished ({self.finish})" if self.finish else "ended without a finish"

    @property
    def served(self) -> bool:
        return self.error is None and self.finish is not None

    def take(self, line: bytes) -> None:
        """Note one line of an event stream."""
        if not line.startswith(b"data: {"):
            return
        event = json.loads(line[6:])
        if "error" in event:
            self.error = str(event["error"].get("message"))
            return
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            if choice.get("delta", {}).get("content"):
                self.tokens += 1
                self.first = trio.current_time() if self.first is None else self.first
            self.finish = choice.get("finish_reason") or self.finish


async def chat(port: int, body: dict[str, Any], answer: Answer | None = None) -> Answer:
    """One streamed chat to its end. With ``answer`` the caller can look on while it fills."""
    answer = answer or Answer(trio.current_time())
    async with connect(port) as connection:
        async for _ in chatting(connection, body, answer):
            pass
    return answer


async def chatting(connection: Connection, body: dict[str, Any], answer: Answer) -> AsyncIterator[Answer]:
    """Send a streamed chat; yields after each piece of the answer that came."""
    answer.sent = trio.current_time()
    await connection.send("POST", CHAT, json.dumps(body | {"stream": True}).encode())
    rest = b""
    try:
        while not isinstance(event := await connection.event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                answer.status, answer.headers = event.status_code, headers_of(event)
            elif isinstance(event, h11.Data):
                *lines, rest = (rest + bytes(event.data)).split(b"\n")
                for line in lines:
                    answer.take(line)
                yield answer
            else:
                break
    except (h11.RemoteProtocolError, trio.BrokenResourceError) as error:
        answer.error = answer.error or f"connection broken: {error}"
    if answer.status >= 400 and answer.error is None:
        answer.error = f"{answer.status} {_message(rest)}"
    answer.ended = trio.current_time()


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
