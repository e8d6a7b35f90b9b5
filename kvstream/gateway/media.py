"""Transcriptions: a sound goes up as it comes, its text comes down.

Nothing of the body is read: its size says nothing about what it costs, and inventing tokens for it would make the page
accounts lie. So these calls have a limiter of their own (``server.audio_max`` at once, the others wait as long as
anybody waits for a seat) and are otherwise passed through::

    client --pieces--> runtime (no more in memory than one piece)      client <--whole answer, or its stream-- runtime
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import trio
from attrs import evolve, frozen

from ..adapters.base import HttpCall, HttpReply
from ..adapters.failure import unserved
from ..errors import BackendProtocolError, BackendTimeoutError, KVStreamError, MediaTypeError
from .asgi import (
    BodyReceiver,
    ClientGoneError,
    Headers,
    Scope,
    Send,
    read_pieces,
    send_error,
    send_refusal,
    start_stream,
)
from .dialects import dialect_of
from .failures import error_of
from .logs import log_passed, log_turned_away
from .metrics import Metrics
from .passage import Turnstile
from .ports import Backend, PickBackend, UpstreamResponse
from .request import Incoming

WAITING_MAX = 256
ERROR_BYTES_MAX = 2**20
AHEAD_BYTES_MAX = 64 * 2**10  # of a body are read while its call waits for a place, to see whether its client left


@frozen
class MediaSettings:
    """``places`` at once; another waits ``wait_s_max``. ``answer_s_max`` bounds the whole of a call upstream."""

    places: int = 2
    wait_s_max: float = 120.0
    answer_s_max: float = 600.0
    body_bytes_max: int = 64 * 2**20
    body_gap_s: float = 30.0
    answer_bytes_max: int = 64 * 2**20


class Media:
    """Passes bodies of many parts on. ``pick`` says to which backend."""

    def __init__(self, pick: PickBackend, metrics: Metrics, settings: MediaSettings) -> None:
        self._pick = pick
        self._metrics = metrics
        self._settings = settings
        self._turnstile = Turnstile(
            settings.places, waiting_max=WAITING_MAX, wait_s_max=settings.wait_s_max, what="transcriptions")

    def reconfigure(self, settings: MediaSettings) -> None:
        """For calls that come from now on; those that hold a place keep it."""
        self._settings = settings
        self._turnstile.limiter.total_tokens = settings.places

    async def run(self, incoming: Incoming, scope: Scope, receive: BodyReceiver, send: Send, headers: Headers,
                  request_id: str) -> None:
        """Answer one call.

        *Errors*: none leave. *Cancellation*: closes the call upstream, and so does a client that leaves.
        """
        route, began = incoming.proxy.route, trio.current_time()
        answer = _Answer(send, headers)
        try:
            async with AsyncExitStack() as stack:
                await self._enter(stack, receive)
                await self._call(incoming, scope, receive, answer)
        except ClientGoneError:
            self._metrics.passed(route, "cancelled")
            log_passed(request_id, route, trio.current_time() - began, "cancelled")
        except KVStreamError as error:
            log_turned_away(request_id, route, error)
            self._metrics.turned_away(route, error)
            dialect = dialect_of(route)
            if answer.started:
                await answer.write(b"\n\n" + dialect.error_frame(error))  # it may have broken off in mid-frame
                await answer.end()
            elif receive.ended:
                await send_error(send, error, headers, dialect.envelope(error, request_id))
            else:
                await send_refusal(send, receive, error, headers, dialect.envelope(error, request_id))
        else:
            self._metrics.passed(route)
            log_passed(request_id, route, trio.current_time() - began)

    async def _enter(self, stack: AsyncExitStack, receive: BodyReceiver) -> None:
        """Take a place, which ``stack`` gives back. A client that leaves does not go on waiting for one."""
        entered, failed = False, None
        async with trio.open_nursery() as nursery:
            async def watch() -> None:
                await receive.wait_gone(AHEAD_BYTES_MAX)
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            try:
                await stack.enter_async_context(self._turnstile.pass_through())
                entered = True
            except KVStreamError as error:  # out of the nursery, which would wrap it
                failed = error
            nursery.cancel_scope.cancel()
        if failed is not None:
            raise failed
        if not entered:
            raise ClientGoneError

    async def _call(self, incoming: Incoming, scope: Scope, receive: BodyReceiver, answer: _Answer) -> None:
        backend, request = await self._pick(incoming)
        call = _call_of(backend.adapter.encode(request, stream=False), scope)
        body = read_pieces(scope, receive, bytes_max=self._settings.body_bytes_max, gap_s=self._settings.body_gap_s)
        gone = trio.Event()
        with trio.move_on_after(self._settings.answer_s_max) as limit:
            async with trio.open_nursery() as nursery:
                async def content() -> AsyncIterator[bytes]:
                    async for piece in body:
                        yield piece
                    nursery.start_soon(watch)

                async def watch() -> None:
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    gone.set()
                    nursery.cancel_scope.cancel()

                # An exception group would hide from the callers which error it was: there is only one.
                failed: Exception | None = None
                try:
                    async with backend.upstream.open(call, content()) as response:
                        await self._pass(backend, route=request.route, response=response, answer=answer)
                except (KVStreamError, ClientGoneError) as error:
                    failed = error
                nursery.cancel_scope.cancel()
        if gone.is_set():
            raise ClientGoneError
        if limit.cancelled_caught:
            raise BackendTimeoutError(
                f"the answer took longer than upstream.first_event_s = {self._settings.answer_s_max:g} s")
        if failed is not None:
            raise failed

    async def _pass(self, backend: Backend, *, route: str, response: UpstreamResponse, answer: _Answer) -> None:
        kind = response.headers.get("content-type", "application/json")
        if not 200 <= response.status < 300:
            reply = HttpReply(response.status, response.headers, await _read(response, ERROR_BYTES_MAX))
            raise error_of(unserved(backend.adapter.error(reply), backend.adapter.kind, route))
        if kind.lower().startswith("text/html"):
            raise BackendProtocolError("the backend answered 200 with a page of HTML; is backend.base_url right?")
        if not kind.startswith("text/event-stream"):
            whole = await _read(response, self._settings.answer_bytes_max)
            await answer.whole(kind, whole)
            return
        await answer.start(kind)
        while piece := await response.receive():
            await answer.write(piece)
        await answer.end()


class _Answer:
    """What goes to the client."""

    def __init__(self, send: Send, headers: Headers) -> None:
        self._send = send
        self._headers = headers
        self.started = False

    async def start(self, kind: str) -> None:
        self.started = True
        await start_stream(self._send, kind.encode("latin-1", "replace"), self._headers)

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, kind: str, body: bytes) -> None:
        self.started = True
        length = [(b"content-type", kind.encode("latin-1", "replace")), (b"content-length", str(len(body)).encode())]
        await self._send({"type": "http.response.start", "status": 200, "headers": [*length, *self._headers]})
        await self._send({"type": "http.response.body", "body": body})


async def _read(response: UpstreamResponse, bytes_max: int) -> bytes:
    body = bytearray()
    while piece := await response.receive():
        body += piece
        if len(body) > bytes_max:
            raise BackendProtocolError(f"the answer is larger than upstream.answer_bytes_max = {bytes_max} bytes")
    return bytes(body)


def _call_of(call: HttpCall, scope: Scope) -> HttpCall:
    """The call with the client's own type of body (it names the boundary of the parts) and length."""
    own: dict[str, str] = {}
    for name, value in scope["headers"]:
        if name in (b"content-type", b"content-length"):
            own[name.decode()] = value.decode("latin-1")
        elif name == b"content-encoding" and value.lower() not in (b"", b"identity"):
            raise MediaTypeError("a sound is not to be compressed on the way; send it without Content-Encoding")
    kind = own.get("content-type", "")
    if not kind.startswith("multipart/form-data"):
        raise MediaTypeError(f"{call.path} takes multipart/form-data, not {kind[:80] or 'a body without a type'}")
    headers = [(name, value) for name, value in call.headers if name not in ("content-type", "accept")]
    return evolve(call, headers=(*headers, ("accept", "*/*"), *own.items()), body=b"")
