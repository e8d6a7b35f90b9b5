"""Model calls: from the client's bytes to the last byte of the answer.

The client's task only reads a bounded buffer and writes to a socket. It holds the stream open with one ``async with``;
whichever way that block is left, the queue place or the seat returns.
"""

from __future__ import annotations

import uuid

import trio

from ..adapters.base import Delta
from ..adapters.routes import LIGHT, MEDIA, route_of
from ..errors import BackendProtocolError, KVStreamError
from .access import identified
from .asgi import (
    BodyReceiver,
    ClientGoneError,
    Headers,
    Receive,
    Scope,
    Send,
    read_body,
    send_error,
    send_json,
    send_refusal,
    wait_disconnect,
)
from .dialects import Dialect, dialect_of
from .logs import log_turned_away
from .media import Media
from .metrics import Metrics
from .passage import Passage
from .ports import Answer, OpenAnswer, PickBackend
from .request import Incoming, parse_request, unread_request
from .streamed import ProxySettings, StreamedAnswer, queue_header


class Proxy:
    """ASGI handler of the model routes."""

    def __init__(self, open_answer: OpenAnswer, metrics: Metrics, settings: ProxySettings, *,
                 pick: PickBackend) -> None:
        self._open_answer = open_answer
        self._passage = Passage(pick, metrics)
        self._media = Media(pick, metrics, settings.media)
        self._metrics = metrics
        self._settings = settings

    def reconfigure(self, settings: ProxySettings) -> None:
        """For requests that come from now on."""
        self._settings = settings
        self._media.reconfigure(settings.media)

    async def __call__(self, route: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call of ``route``.

        *Cancellation*: by the server, when the connection ends. *Errors*: none leave; a client that is gone is not one.
        """
        request_id = f"kvs-{uuid.uuid4().hex[:12]}"
        headers: Headers = [(b"x-request-id", request_id.encode())]
        if route_of(route).dialect == "anthropic":
            headers.append((b"request-id", request_id.encode()))  # where their client looks for it
        body = BodyReceiver(receive)
        try:
            if route_of(route).access == MEDIA:
                unread = unread_request(
                    route, scope["headers"], forward_authorization=self._settings.forward_authorization)
                await self._media.run(identified(unread, scope), scope, body, send, headers, request_id)
                return
            content = await read_body(scope, body, bytes_max=self._settings.body_bytes_max,
                                      gap_s=self._settings.body_gap_s)
            incoming = identified(parse_request(
                route, scope["headers"], content, forward_authorization=self._settings.forward_authorization), scope)
            del content
        except ClientGoneError:
            return
        except KVStreamError as error:
            self._turned_away(request_id, route, error)
            if body.ended:
                await send_error(send, error, headers, dialect_of(route).envelope(error, request_id))
            else:
                await send_refusal(send, body, error, headers, dialect_of(route).envelope(error, request_id))
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_on_disconnect, receive, nursery.cancel_scope)
            if route_of(route).access == LIGHT:
                await self._pass_on(incoming, send, headers, request_id)
            else:
                await self._serve(incoming, send, headers, request_id)
            nursery.cancel_scope.cancel()

    async def _pass_on(self, incoming: Incoming, send: Send, headers: Headers, request_id: str) -> None:
        try:
            await self._passage.run(incoming, send, headers, request_id)
        except KVStreamError as error:
            await send_error(send, error, headers, dialect_of(incoming.proxy.route).envelope(error, request_id))

    async def _serve(self, incoming: Incoming, send: Send, headers: Headers, request_id: str) -> None:
        request = incoming.proxy
        dialect = dialect_of(request.route)
        held = False
        arrived = trio.current_time()
        try:
            async with self._open_answer(incoming, request_id) as answer:
                held = True
                headers.append((b"x-kvstream-count", answer.count_source.value.encode()))
                headers.extend(answer.headers)
                if request.stream:
                    await StreamedAnswer(answer, dialect, send, headers, self._settings, arrived).run()
                else:
                    await self._answer_whole(answer, dialect, send, headers, arrived)
        except KVStreamError as error:  # nothing was sent yet: see StreamedAnswer
            if not held:
                self._turned_away(request_id, request.route, error)
            await send_error(send, error, headers, dialect.envelope(error, request_id))

    def _turned_away(self, request_id: str, route: str, error: KVStreamError) -> None:
        """Every request has its line and its count, also one that the engine never held."""
        log_turned_away(request_id, route, error)
        self._metrics.turned_away(route, error)

    async def _answer_whole(self, answer: Answer, dialect: Dialect, send: Send, headers: Headers,
                            arrived: float) -> None:
        """Assemble a streamed answer for a client that wants it in one piece."""
        rewriter = self._settings.compat.rewriter(answer.request.route)
        events = await answer.get()
        headers.extend(queue_header(answer, arrived))
        assembler = answer.adapter.assembler(answer.request)  # which lane serves it is known by now
        size = 0
        whole: bytes | None = None
        deltas = 0
        while events:
            for event in rewriter.feed(events) if rewriter else events:
                if isinstance(event, Delta):
                    size += len(event.raw)
                    deltas += 1
                    # One value alone is the answer as it came; several are the lines of one (Ollama).
                    whole = event.raw if deltas == 1 and event.raw.lstrip(b" \t\r\n")[:1] in (b"{", b"[") else None
                assembler.feed(event)
            if size > self._settings.answer_bytes_max:
                raise BackendProtocolError(
                    f"the answer is larger than upstream.answer_bytes_max = {self._settings.answer_bytes_max} bytes")
            events = await answer.get()
        if answer.usage is None:
            headers.append((b"x-kvstream-usage", b"estimated"))
        if whole is None:
            await send_json(send, 200, dialect.completed(assembler.result(), answer), headers)
        else:
            await send_json(send, 200, whole, headers)


async def _cancel_on_disconnect(receive: Receive, scope: trio.CancelScope) -> None:
    await wait_disconnect(receive)
    scope.cancel()
