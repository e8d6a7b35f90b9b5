"""The few ASGI moves the gateway makes itself: read a bounded body, send JSON, notice that a client left.

Model calls do not go through Quart's dispatch. A lease must be held by one ``async with`` that spans peeking at the
first event, choosing the status and sending the last byte; a framework that takes a response object back from a handler
cuts that block in two, and what lies between the halves leaks when a client leaves just then.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import trio

from .. import __version__
from ..errors import InvalidRequestError, KVStreamError
from .decoding import BodyDecoder, codings_of, too_large

Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

DISCARD_S_MAX = 5.0
RETRY_S_DEFAULT = 5.0

_VERSION = (b"x-kvstream-version", __version__.encode())


class ClientGoneError(Exception):
    """The client left while its request was being read. Never leaves this package."""


async def read_body(scope: Scope, receive: Receive, *, bytes_max: int, gap_s: float) -> bytes:
    """The whole request body, decoded. ``gap_s`` bounds the wait for each further piece, ``bytes_max`` the body both as
    it was sent and decoded.

    *Errors*: ``BodyTooLargeError`` (as soon as it is known), ``MediaTypeError`` for an unknown ``Content-Encoding``,
    ``InvalidRequestError`` when the client stopped sending or the body cannot be decoded, ``ClientGoneError``.
    """
    codings = codings_of([value for name, value in scope["headers"] if name == b"content-encoding"])
    for name, value in scope["headers"]:
        if name == b"content-length" and int(value) > bytes_max:
            raise too_large(int(value), bytes_max)
    decoder = BodyDecoder(codings, bytes_max) if codings else None
    parts: list[bytes] = []
    size = 0
    while True:
        with trio.move_on_after(gap_s) as waited:
            message = await receive()
        if waited.cancelled_caught:
            raise InvalidRequestError(f"the request body stopped coming for {gap_s:g} s", status=408)
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        if size > bytes_max:
            raise too_large(size, bytes_max)
        if decoder is None:
            parts.append(part)
        else:
            for piece in decoder.feed(part):
                if piece:
                    parts.append(piece)
                await trio.lowlevel.checkpoint()  # a body takes long to decode, and others are here too
        if not message.get("more_body", False):
            if decoder is not None:
                decoder.finish()
            return b"".join(parts) if len(parts) != 1 else parts[0]


async def read_pieces(scope: Scope, receive: Receive, *, bytes_max: int, gap_s: float) -> AsyncIterator[bytes]:
    """The request body piece by piece, as it was sent. *Errors*: as :func:`read_body`."""
    for name, value in scope["headers"]:
        if name == b"content-length" and int(value) > bytes_max:
            raise too_large(int(value), bytes_max)
    size, more = 0, True
    while more:
        with trio.move_on_after(gap_s) as waited:
            message = await receive()
        if waited.cancelled_caught:
            raise InvalidRequestError(f"the request body stopped coming for {gap_s:g} s", status=408)
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        size += len(message.get("body", b""))
        if size > bytes_max:
            raise too_large(size, bytes_max)
        if message.get("body"):
            yield message["body"]
        more = message.get("more_body", False)


class BodyReceiver:
    """``receive``, and whether the body was read to its end (or the client left)."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._ahead: deque[Message] = deque()
        self.ended = False

    async def wait_gone(self, bytes_max: int) -> None:
        """Returns when the client left while its body waits to be read. Keeps up to ``bytes_max`` of the body; behind
        those nothing is taken, and then it is for the connection to notice. *Cancellation*: safe, nothing is lost."""
        held = 0
        while held <= bytes_max:
            message = await self._receive()
            self._ahead.append(message)
            if message["type"] == "http.disconnect":
                return
            held += len(message.get("body", b""))
        await trio.sleep_forever()

    async def __call__(self) -> Message:
        message = self._ahead.popleft() if self._ahead else await self._receive()
        self.ended = message["type"] == "http.disconnect" or not message.get("more_body", False)
        return message


async def wait_disconnect(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(send: Send, status: int, value: Any, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """A whole JSON answer; ``value`` may be ready-made bytes."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    await send({"type": "http.response.start", "status": status, "headers": [*_json_headers(body), *headers]})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: KVStreamError, headers: Iterable[tuple[bytes, bytes]],
                     envelope: dict[str, Any]) -> None:
    """An error in the form that the client of its path reads, with ``Retry-After`` in whole seconds where there is
    one."""
    await send_json(send, error.status, envelope, [*retry_header(error), *headers])


async def send_empty(send: Send, status: int, headers: Headers) -> None:
    """An answer without a body."""
    await send({"type": "http.response.start", "status": status, "headers": [_VERSION, *headers]})
    await send({"type": "http.response.body", "body": b""})


def retry_header(error: KVStreamError) -> Headers:
    """``Retry-After``, on every 429 and 503. Rounded up: a client that comes back too early is refused again."""
    wait_s = error.retry_after_s
    if wait_s is None:
        if error.status not in (429, 503):
            return []
        wait_s = RETRY_S_DEFAULT
    return [(b"retry-after", str(max(1, -int(-wait_s // 1))).encode())]


async def send_refusal(send: Send, receive: BodyReceiver, error: KVStreamError, headers: Headers,
                       envelope: dict[str, Any]) -> None:
    """An error before the body was read. The connection is closed afterwards, but not before the client sent its body,
    for a bounded time: a client that sends all before it reads would find a reset instead of our answer."""
    status, body = error.status, json.dumps(envelope).encode()
    await send({"type": "http.response.start", "status": status, "headers": [
        *_json_headers(body), *retry_header(error), *headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    with trio.move_on_after(DISCARD_S_MAX):
        while not receive.ended:
            await receive()
    await send({"type": "http.response.body", "body": b""})


def _json_headers(body: bytes) -> Headers:
    return [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), _VERSION]


async def start_stream(send: Send, media_type: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """Commit a 200 stream that no proxy in front of us may buffer."""
    await send({"type": "http.response.start", "status": 200, "headers": [
        (b"content-type", media_type), (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"), _VERSION, *headers]})
