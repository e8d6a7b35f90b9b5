"""Model calls: from the client's bytes to the last byte of the answer.

The client's task only reads a bounded buffer and writes to a socket. It holds the stream open with one ``async with``;
whichever way that block is left, the queue place or the seat returns.
"""

from __future__ import annotations

import uuid

import trio
from attrs import frozen

from ..adapters.base import Delta, Done, Failed, UpstreamEvent, Usage
from ..adapters.routes import LIGHT, route_of
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
    start_stream,
    wait_disconnect,
)
from .dialects import Dialect, dialect_of
from .logs import log_turned_away
from .metrics import Metrics
from .passage import Passage
from .ports import Answer, OpenAnswer, PickBackend
from .request import Incoming, parse_request


@frozen
class ProxySettings:
    """What the routes are told. 0 turns ``keepalive_s`` off."""

    keepalive_s: float = 15.0
    body_bytes_max: int = 64 * 2**20
    body_gap_s: float = 30.0
    answer_bytes_max: int = 64 * 2**20
    forward_authorization: bool = True


class Proxy:
    """ASGI handler of the model routes."""

    def __init__(self, open_answer: OpenAnswer, metrics: Metrics, settings: ProxySettings, *,
                 pick: PickBackend) -> None:
        self._open_answer = open_answer
        self._passage = Passage(pick, metrics)
        self._metrics = metrics
        self._settings = settings

    def reconfigure(self, settings: ProxySettings) -> None:
        """For requests that come from now on."""
        self._settings = settings

    async def __call__(self, route: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call of ``route``.

        *Cancellation*: by the server, when the connection ends. *Errors*: none leave; a client that is gone is not one.
        """
        request_id = f"kvs-{uuid.uuid4().hex[:12]}"
        headers: Headers = [(b"x-request-id", request_id.encode())]
        body = BodyReceiver(receive)
        try:
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
                    await _StreamedAnswer(answer, dialect, send, headers, self._settings.keepalive_s, arrived).run()
                else:
                    await self._answer_whole(answer, dialect, send, headers, arrived)
        except KVStreamError as error:  # nothing was sent yet: see _SseAnswer
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
        events = await answer.get()
        headers.extend(queue_header(answer, arrived))
        assembler = answer.adapter.assembler(answer.request)  # which lane serves it is known by now
        size = 0
        whole: bytes | None = None
        deltas = 0
        while events:
            for event in events:
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


def queue_header(answer: Answer, arrived: float) -> Headers:
    """How long a request waited for its seat, in milliseconds, once it has one."""
    if answer.granted is None:
        return []
    # One that joined another's call waited only from its own arrival on.
    return [(b"x-kvstream-queue-ms", b"%.1f" % (max(0.0, answer.granted - arrived) * 1000))]


async def _cancel_on_disconnect(receive: Receive, scope: trio.CancelScope) -> None:
    await wait_disconnect(receive)
    scope.cancel()


class _StreamedAnswer:
    """A streamed answer. The status is committed with the first frame or the first keepalive comment, whichever comes
    first; an error before that is a proper HTTP error, after it an error frame and no ``[DONE]``.

    The wait in the queue is a header; where a keepalive sent the headers before it was known, it is a comment.
    """

    def __init__(self, answer: Answer, dialect: Dialect, send: Send, headers: Headers, keepalive_s: float,
                 arrived: float) -> None:
        self._answer = answer
        self._dialect = dialect
        self._send = send
        self._headers = headers
        self._keepalive_s = (keepalive_s if dialect.ping else 0) or float("inf")
        self._ping_at = trio.current_time() + self._keepalive_s
        self._usage_due = answer.request.include_usage  # asked for, and not sent yet
        self._started = False
        self._arrived = arrived
        self._wait_told = not dialect.media_type.startswith(b"text/event-stream")  # or nothing to tell it with

    async def run(self) -> None:
        ended_well = False
        try:
            while events := await self._next():
                data = self._bytes(events)
                ended_well = ended_well or any(isinstance(e, Done) for e in events)
                if data:
                    await self._write(data)
            if self._answer.truncated and not ended_well:
                await self._write(self._dialect.length_frames(self._answer, None))
        except KVStreamError as error:
            if not self._started:
                raise
            if not self._answer.error_forwarded:
                await self._write(self._dialect.error_frame(error))
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self) -> list[UpstreamEvent]:
        """The next events. Pings go by what was *sent*: events that are not for the client do not put one off."""
        while True:
            with trio.move_on_at(self._ping_at):
                return await self._answer.get()
            await self._write(self._dialect.ping)

    def _bytes(self, events: list[UpstreamEvent]) -> bytes:
        frames: list[bytes] = []
        for event in events:
            if isinstance(event, Usage) and event.standalone:
                if not self._answer.request.include_usage:
                    continue
                self._usage_due = False
            if isinstance(event, Done) and self._usage_due:
                frames.append(self._dialect.usage_frame(self._answer))
            if isinstance(event, Failed) and event.raw:
                if not self._started and not frames:
                    continue  # first of all comes an error: the HTTP status will say it
                self._answer.error_forwarded = True
            raw = getattr(event, "raw", b"")
            if raw:
                frames.append(raw)
        if frames and self._started and not self._wait_told:
            frames[:0] = [b": queued-ms " + value + b"\n\n" for _, value in self._wait()]
        return b"".join(frames)

    def _wait(self) -> Headers:
        wait = queue_header(self._answer, self._arrived)
        self._wait_told = self._wait_told or bool(wait)
        return wait

    async def _write(self, data: bytes) -> None:
        if not self._started:
            self._started = True
            await start_stream(self._send, self._dialect.media_type, [*self._headers, *self._wait()])
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._ping_at = trio.current_time() + self._keepalive_s
