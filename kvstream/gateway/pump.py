"""The pump: performs one granted request and feeds its stream.

The pump owns everything that is scarce: the seat, the pages, the upstream connection. The task that talks to the client
owns only the reading end of a bounded buffer. So a client that stops reading, whose ``send`` cannot be cancelled, holds
no seat: the pump waits ``stall_s`` for room in the buffer, then gives up and the lease returns.

::

    encode -> send -> refused by status? -> may it pass (loading, busy, stream_options)? -> again, else raise
                   -> bytes -> decoder -> events -> books kept -> buffer          until the end, or an error
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import trio
from attrs import frozen

from ..adapters.base import (
    Adapter,
    Delta,
    Done,
    Failed,
    Finished,
    HttpReply,
    Ping,
    Progress,
    UpstreamEvent,
    Usage,
)
from ..adapters.decode import usage_of_whole
from ..adapters.failure import unserved
from ..adapters.routes import route_of
from ..core.types import RequestId
from ..errors import (
    BackendLoadingError,
    BackendProtocolError,
    BackendTimeoutError,
    InvalidRequestError,
    KVStreamError,
    OverloadError,
    ReaderStalledError,
    StreamTruncatedError,
    TotalTimeoutError,
)
from .failures import error_of
from .leg import Leg
from .stream import Stream, StreamTimes

if TYPE_CHECKING:
    from .ports import Upstream, UpstreamResponse

ERROR_BODY_BYTES_MAX = 1024 * 1024
EVENT_OVERHEAD_BYTES = 256  # what an event costs in memory beside its raw bytes
BATCHES_PER_TURN = 8
FIRST_WRITE_S_MAX = 0.01
REUSE_GRACE_S = 0.25  # how long a finished answer may take to end its body, so that its connection is kept


@frozen
class PumpHooks:
    """What a pump tells and asks the engine. ``produced(rid, tokens)``; ``progress()`` on every data event;
    ``loading()`` waits until a backend that said "loading" is up, or raises, ``busy(refusal, retry_after_s)`` the same
    for one that is busy; ``usage_refused()`` remembers that this backend does not know ``stream_options``;
    ``started()``: the headers came; ``bound()``: it cannot be preempted any more."""

    produced: Callable[[RequestId, int], None]
    progress: Callable[[], None]
    loading: Callable[[], Awaitable[None]]
    busy: Callable[[OverloadError, float | None], Awaitable[None]]
    usage_refused: Callable[[], None]
    bound: Callable[[], None]
    started: Callable[[], None]


class Pump:
    """Performs one leg of a granted request."""

    def __init__(self, stream: Stream, leg: Leg, adapter: Adapter, upstream: Upstream, times: StreamTimes,
                 hooks: PumpHooks, *, page_tokens: int, include_usage: bool, passthrough: bool, watched: bool) -> None:
        """``watched``: the answer has no limit and grows in a pool that must not overflow. Every token is reported at
        once then, and a reader that falls a whole buffer behind is not waited for."""
        self._stream = stream
        self._leg = leg
        self._adapter = adapter
        self._upstream = upstream
        self._times = times
        self._hooks = hooks
        self._include_usage = include_usage
        route = stream.request.route
        # What was translated on its way there has to be translated back.
        self._passthrough = route not in adapter.capabilities.translated and (
            not route_of(route).streams or (passthrough and not stream.request.stream))
        self._watched = watched
        self._page_tokens = 1 if watched else page_tokens
        self._unposted = 0
        self._first_sent = False

    async def run(self) -> None:
        """Send the call and move its events into the buffer until the answer is complete.

        *Errors*: ``KVStreamError`` for every expected failure, after the runtime's own error frame was passed on.
        *Cancellation*: closes the upstream connection, which frees the runtime.
        *Resource handling*: the connection is closed, or returned to its pool after a complete answer.
        """
        total = trio.CancelScope(deadline=self._total_deadline())
        gap = trio.CancelScope(deadline=_deadline(self._times.first_event_s))
        with total, gap:
            while True:
                failed = await self._attempt(gap)
                if failed is None:
                    return
                await self._recover(failed, gap)
        if total.cancelled_caught:
            raise TotalTimeoutError(f"the answer took longer than upstream.total_s = {self._times.total_s:g} s")
        if self._stream.leg_token is None:
            raise BackendTimeoutError(
                f"the backend gave no token within upstream.first_event_s = {self._times.first_event_s:g} s")
        raise BackendTimeoutError(
            f"the backend sent no data for upstream.stall_s = {self._times.gap_s:g} s in mid-answer")

    def _total_deadline(self) -> float:
        """From the grant on: what was done in the slots first counts too."""
        began = self._stream.granted
        return (trio.current_time() if began is None else began) + (self._times.total_s or float("inf"))

    async def _attempt(self, gap: trio.CancelScope) -> Failed | None:
        """One call. A refusal by status is returned, since it may be one that passes; None when all is done."""
        stream = self._stream
        try:
            call = self._leg.call(stream=not self._passthrough, include_usage=self._include_usage)
        except RecursionError as error:  # what could just be parsed can be too deep to be written
            raise InvalidRequestError("the body is nested too deeply") from error
        stream.sent, stream.sent_at = True, trio.current_time()
        async with self._upstream.open(call) as response:
            if not 200 <= response.status < 300:
                stream.sent = False  # the runtime turned it away: no slot is at work on it
                return self._refusal(await _read_error(response))
            stream.answered = True
            self._hooks.started()
            if response.headers.get("content-type", "").lower().startswith("text/html"):
                raise BackendProtocolError("the backend answered 200 with a page of HTML; is backend.base_url right?")
            if self._passthrough:
                await self._pass(response, gap)
                return None
            await self._move(response, gap)
            if stream.completed:
                await _end_body(response)
            return None

    def _refusal(self, reply: HttpReply) -> Failed:
        return unserved(self._adapter.error(reply), self._adapter.kind, self._stream.request.route)

    async def _recover(self, failed: Failed, gap: trio.CancelScope) -> None:
        """Get ready for another attempt after a refusal that may pass, or raise. Nothing was sent to the client yet,
        and the runtime has not begun, so nothing is run twice."""
        if self._include_usage and failed.status == 400 and "stream_options" in failed.message:
            self._include_usage = False
            self._hooks.usage_refused()
            return
        error = error_of(failed)
        if isinstance(error, BackendLoadingError):
            wait = self._hooks.loading()
        elif isinstance(error, OverloadError) and failed.status == 503:  # a 429 is about this client, and goes to it
            wait = self._hooks.busy(error, failed.retry_after_s)
        else:
            raise error
        gap.deadline = _deadline(0)
        await wait
        gap.deadline = _deadline(self._times.first_event_s)

    async def _move(self, response: UpstreamResponse, gap: trio.CancelScope) -> None:
        content_type = response.headers.get("content-type", "")
        decoder = self._leg.decoder(content_type)
        batches = 0
        while True:
            try:
                data = await response.receive()
            except StreamTruncatedError:
                data = b""  # whether that was too early is for the decoder to say: it knows what was still to come
            kept, size, failed = self._take(decoder.feed(data) if data else decoder.finish())
            if kept:
                if not all(isinstance(event, Ping) for event in kept):
                    self._restart(gap)
                    self._hooks.progress()
                await self._put(kept, size, gap)
                batches += 1
                await self._take_turns(batches)
            if failed is not None:
                raise error_of(failed)
            if self._stream.completed or not data:
                self._flush()
                return

    async def _take_turns(self, batches: int) -> None:
        """A fast runtime's chunks come many to a read, and then taking the next one waits for nothing. Let the client's
        task send the first token before we go on, undisturbed (this saves 1 ms of its 6), and later ones a few to a
        write. A client that does not read is not waited for."""
        if self._stream.first_token is not None and not self._first_sent:
            self._first_sent = True
            with trio.move_on_after(FIRST_WRITE_S_MAX):
                await self._stream.buffer.wait_asked()
        elif batches % BATCHES_PER_TURN == 0:
            await trio.lowlevel.checkpoint()

    def end(self, events: Sequence[UpstreamEvent]) -> None:
        """Let the answer end with these events, without a call."""
        kept, size, _ = self._take(events)
        self._stream.buffer.force(kept, size)

    def _take(self, events: Sequence[UpstreamEvent]) -> tuple[list[UpstreamEvent], int, Failed | None]:
        """(what the client's task gets, its size, the failure that ended the answer). Keeps the books of each event;
        what comes after the end is not looked at."""
        kept: list[UpstreamEvent] = []
        size = 0
        for event in events:
            if isinstance(event, Ping):
                if event.raw:
                    kept.append(event)
                    size += EVENT_OVERHEAD_BYTES + len(event.raw)
                continue
            if isinstance(event, Failed):
                return [*kept, event] if event.raw else kept, size + EVENT_OVERHEAD_BYTES + len(event.raw), event
            kept.append(event)
            size += EVENT_OVERHEAD_BYTES + self._note(event)
            if self._stream.completed:
                break
        return kept, size, None

    async def _pass(self, response: UpstreamResponse, gap: trio.CancelScope) -> None:
        """``upstream.non_stream = "pass"``: the runtime's own JSON answer, whole and untouched."""
        body = bytearray()
        while chunk := await response.receive():
            body += chunk
            if len(body) > self._times.answer_bytes_max:
                raise BackendProtocolError(
                    f"the answer is larger than upstream.answer_bytes_max = {self._times.answer_bytes_max} bytes")
        gap.deadline = _deadline(0)
        reply = HttpReply(response.status, response.headers, bytes(body))
        answer = reply.json()
        if isinstance(answer, dict) and answer.get("error"):  # LM Studio and others say it with a 200
            raise error_of(self._refusal(reply))
        if not isinstance(answer, (dict, list) if route_of(self._stream.request.route).lists else dict):
            raise BackendProtocolError("the backend answered 200 with a body that is no JSON object")
        if route_of(self._stream.request.route).generates:
            self._count(1)
        self._stream.usage = usage_of_whole(answer)
        self._flush()
        self._stream.completed = True
        raw = self._leg.answer(bytes(body), answer)
        self._stream.last_data = answer
        await self._stream.buffer.put([Delta(raw=raw, data=answer)], len(raw))

    def _note(self, event: UpstreamEvent) -> int:
        """Keep the books of one event; its size in bytes."""
        stream = self._stream
        if stream.said is not None and not stream.said.note(event):
            self._hooks.bound()
        if isinstance(event, Delta):
            if event.data is not None:
                stream.last_data = event.data
            if event.tokens:
                self._count(event.tokens)
            return len(event.raw)
        if isinstance(event, Usage):
            stream.usage = event.numbers
            if event.data is not None:
                stream.usage_data = event.data
            return len(event.raw)
        if isinstance(event, Finished):
            stream.finish_reason = event.reason
        elif isinstance(event, Done):
            stream.completed, stream.unfinished = True, event.unfinished
        elif isinstance(event, Progress):
            return len(event.raw)
        return 0

    def _count(self, tokens: int) -> None:
        stream = self._stream
        now = trio.current_time()
        first = stream.leg_token is None
        if first:
            stream.leg_token = now
            stream.first_token = stream.first_token or now
        stream.last_token = now
        stream.tokens += tokens
        # The table grows by pages: telling the scheduler once a page is as true as once a token, and cheaper.
        self._unposted += tokens
        if self._unposted >= self._page_tokens or first:
            self._flush()

    def _flush(self) -> None:
        if self._unposted:
            self._hooks.produced(self._stream.rid, self._unposted)
            self._unposted = 0

    async def _put(self, events: Sequence[UpstreamEvent], size: int, gap: trio.CancelScope) -> None:
        if self._stream.buffer.try_put(events, size):
            return
        if self._watched:
            raise ReaderStalledError(
                "the client reads slower than the runtime answers; in a unified KV pool that is only possible with a "
                "limit: set max_tokens")
        gap.deadline = _deadline(0)  # the wait is the reader's fault, not the runtime's
        self._stream.blocked = True
        try:
            with trio.move_on_after(self._times.stall_s or float("inf")):
                await self._stream.buffer.put(events, size)
                self._stream.blocked = False
                self._restart(gap)
                return
        except trio.Cancelled:
            if self._stream.preempting is not None:
                self._stream.buffer.force(events, size)  # its answer goes on after this
            raise
        raise ReaderStalledError(
            f"the client did not read for server.stall_s = {self._times.stall_s:g} s; its stream was closed")

    def _restart(self, gap: trio.CancelScope) -> None:
        """Data came. Before the first token the runtime may still be at the prompt, and may be silent for long."""
        prefill = self._stream.leg_token is None
        gap.deadline = _deadline(self._times.first_event_s if prefill else self._times.gap_s)


async def _read_error(response: UpstreamResponse) -> HttpReply:
    body = bytearray()
    with trio.move_on_after(5):
        while len(body) < ERROR_BODY_BYTES_MAX and (chunk := await response.receive()):
            body += chunk
    return HttpReply(response.status, response.headers, bytes(body))


async def _end_body(response: UpstreamResponse) -> None:
    """Read on to the end of the body after ``[DONE]``, so that the connection can be used again."""
    with trio.move_on_after(REUSE_GRACE_S):
        try:
            while await response.receive():
                pass
        except KVStreamError:
            pass  # the answer was complete; how its connection ends concerns nobody


def _deadline(seconds: float) -> float:
    return trio.current_time() + seconds if seconds else float("inf")
