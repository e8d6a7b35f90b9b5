"""One answer on its way to several clients.

A :class:`Flight` is read from its source by one task and by nobody else. What came is kept in a log; every client has a
:class:`Subscription` with a place in that log, and takes what lies ahead of it at its own pace. So a client that joins
late begins at the beginning, and one that leaves or hangs moves nobody else's place.

Bounds. While newcomers may still join, the log keeps everything, up to ``history_bytes``; beyond that nobody joins any
more, and what all have read is dropped. A lone client that reads slowly is waited for, as without all this (the pump
sees a reader that does not read, and ends the call). Of several, whoever falls further behind than the log may be long
is let go with an error.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from itertools import islice

import attrs
import trio
from attrs import define, field, frozen

from ..adapters.base import Adapter, Delta, Done, ProxyRequest, UpstreamEvent, UsageNumbers
from ..adapters.routes import route_of
from ..adapters.whole import DONE_FRAME, frame_of, stream_chunks
from ..core.types import CountSource
from ..errors import KVStreamError, ReaderStalledError
from .borrowed import Borrowed
from .ports import Answer

EVENT_BYTES = 1500  # what an event costs beside its raw bytes: mostly the parsed frame (measured: 1,480)


@frozen
class FlightBounds:
    """Bytes. ``buffer_bytes``: how far a lone client may be behind before it is waited for. ``history_bytes``: how
    long the log may be for newcomers, and how far one of several may be behind."""

    buffer_bytes: int = 2**20
    history_bytes: int = 8 * 2**20

    def lag_max(self, readers: int) -> int:
        return self.buffer_bytes if readers == 1 else max(self.buffer_bytes, self.history_bytes)


@frozen
class _Batch:
    events: Sequence[UpstreamEvent]
    end: int  # bytes of the answer up to here


class Flight:
    """See the module. Made for one request; ``scope`` is around the task that reads the source."""

    def __init__(self, name: str, key: bytes, bounds: FlightBounds) -> None:
        self.name = name  # of the request it began with
        self.key = key  # what makes a request the same
        self.scope = trio.CancelScope()
        self.source: Answer | None = None
        self.opened = trio.Event()  # the source is there, or an error
        self.whole = True  # the log has the answer from its start
        self.ended = False
        self.error: KVStreamError | None = None
        self.readers: set[Subscription] = set()
        self.joined = self.left = 0  # how many came, how many of them went
        self._bounds = bounds
        self._log: deque[_Batch] = deque()
        self._first = 0  # the number of the log's first batch
        self._size = 0
        self._news = trio.Event()
        self._room = trio.Event()

    # --- the task that reads the source -------------------------------------------------------------------------------

    def open(self, source: Answer) -> None:
        self.source = source
        self.opened.set()

    async def put(self, events: Sequence[UpstreamEvent]) -> None:
        """Add what came, and wait while a lone reader is too far behind. *Cancellation*: safe, the events are in."""
        self._size += event_bytes(events)
        self._log.append(_Batch(events, self._size))
        if self.whole and self._size > self._bounds.history_bytes:
            self.whole = False
        self._trim()
        self._tell()
        while behind := self._behind():
            if len(self.readers) == 1:
                self._room = trio.Event()
                await self._room.wait()
                continue
            last = min(behind, key=lambda reader: reader.read)
            last.let_go(ReaderStalledError(
                "this client reads so much slower than others with the same request that it was let go"))
            self.drop(last)

    def close(self, error: KVStreamError | None) -> None:
        """The source is at its end. The first close counts."""
        if not self.ended:
            self.ended, self.error = True, error
            self.opened.set()
            self._tell()

    def events(self) -> list[UpstreamEvent]:
        """The whole answer; only when ``whole``."""
        return [event for batch in self._log for event in batch.events]

    # --- readers ------------------------------------------------------------------------------------------------------

    def join(self, request: ProxyRequest) -> Subscription:
        """A reader that begins at the beginning; only while ``whole``."""
        reader = Subscription(request, self)
        self.readers.add(reader)
        self.joined += 1
        self._room.set()
        return reader

    def drop(self, reader: Subscription) -> None:
        """It reads no more. Synchronous and idempotent; the last one to go ends the call."""
        self.readers.discard(reader)
        self._room.set()
        if not self.readers and not self.ended:
            self.scope.cancel()
        self._trim()

    def taken(self) -> None:
        self._room.set()
        self._trim()

    def after(self, place: int) -> list[_Batch]:
        """The batches from number ``place`` on."""
        count = self._first + len(self._log) - place
        return list(islice(reversed(self._log), count))[::-1]  # from the near end: the log is long, the news are few

    async def wait_news(self) -> None:
        await self._news.wait()

    def failure(self) -> KVStreamError:
        """The error for one reader: an exception of its own, since each is raised in a task of its own."""
        assert self.error is not None
        return copy.copy(self.error)

    def _behind(self) -> list[Subscription]:
        limit = self._bounds.lag_max(len(self.readers))
        return [reader for reader in self.readers if self._size - reader.read > limit]

    def _trim(self) -> None:
        if self.whole:
            return
        place = min((reader.place for reader in self.readers), default=self._first + len(self._log))
        while self._log and self._first < place:
            self._log.popleft()
            self._first += 1

    def _tell(self) -> None:
        self._news.set()
        self._news = trio.Event()


@define(eq=False)
class Subscription(Borrowed):
    """A :class:`ports.Answer` for one client of a flight. ``outcome`` says how it ended for this client."""

    request: ProxyRequest
    _flight: Flight
    headers: tuple[tuple[bytes, bytes], ...] = ()
    error_forwarded: bool = False
    place: int = 0  # the number of the next batch
    read: int = 0  # bytes of the answer that it has taken
    finished: bool = False
    failed: KVStreamError | None = None
    _let_go: KVStreamError | None = None

    async def get(self) -> list[UpstreamEvent]:
        """See :class:`ports.Answer`."""
        while True:
            if self._let_go is not None:
                self.failed = self._let_go
                raise self._let_go
            batches = self._flight.after(self.place)
            if batches:
                self.place += len(batches)
                self.read = batches[-1].end
                self._flight.taken()
                return shaped([event for batch in batches for event in batch.events], self.request)
            if self._flight.ended:
                if self._flight.error is not None:
                    self.failed = self._flight.failure()
                    raise self.failed
                self.finished = True
                return []
            await self._flight.wait_news()

    def let_go(self, error: KVStreamError) -> None:
        """End it for this client."""
        self._let_go = error
        self._flight._tell()

    @property
    def source(self) -> Answer:
        assert self._flight.source is not None
        return self._flight.source


@define(eq=False)
class Replay:
    """A :class:`ports.Answer` that is all there: one that was kept."""

    request: ProxyRequest
    adapter: Adapter
    count_source: CountSource
    tokens_prompt: int
    tokens: int
    usage: UsageNumbers | None
    last_data: object
    headers: tuple[tuple[bytes, bytes], ...] = ()
    truncated: bool = False
    granted: float | None = None
    error_forwarded: bool = False
    finished: bool = False
    failed: KVStreamError | None = None
    _events: Sequence[UpstreamEvent] = field(factory=list)

    async def get(self) -> list[UpstreamEvent]:
        """See :class:`ports.Answer`."""
        await trio.lowlevel.checkpoint()
        events, self._events = self._events, []
        self.finished = not events
        return shaped(list(events), self.request)


def shaped(events: list[UpstreamEvent], request: ProxyRequest) -> list[UpstreamEvent]:
    """The events as this client's own call would have brought them. A runtime that ignored ``stream: true`` was read
    for a client without a stream; for one with a stream its object is cut into chunks here, as the decoder does it."""
    if not request.stream or route_of(request.route).end != "[DONE]":
        return events  # no other form shares one call between both kinds of client
    if all(getattr(event, "raw", b"x") for event in events):
        return events
    out: list[UpstreamEvent] = []
    for event in events:
        if isinstance(event, Delta) and not event.raw and isinstance(event.data, dict) and event.data.get("choices"):
            event = attrs.evolve(event, raw=frame_of(*stream_chunks(event.data)))
        elif isinstance(event, Done) and not event.raw:
            event = attrs.evolve(event, raw=DONE_FRAME)
        out.append(event)
    return out


def event_bytes(events: Sequence[UpstreamEvent]) -> int:
    """What events cost to keep, in bytes."""
    return sum(EVENT_BYTES + len(getattr(event, "raw", b"")) for event in events)
