"""Identical deterministic requests share one call, and if wanted the answer is kept for later ones.

Stands between the proxy and the router, and is an ``OpenAnswer`` itself. A request with an :func:`answer_key` boards
the flight that is under way for it, or starts one: a task of the coalescer's own nursery, not of any client, reads the
answer from the router. So the client that came first may leave, and the others do not notice; when the last one leaves,
the call is cancelled in the same instant.

::

    proxy ─ open_answer ─ Subscription ┐
    proxy ─ open_answer ─ Subscription ┴ Flight ─ the reading task ─ router.open_answer ─ engine

What ends the call ends it for all: an error before the first byte is everybody's HTTP error, later everybody's error
frame. A request whose key is None passes through untouched.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from attrs import field, frozen

from ..adapters.base import Done
from ..errors import KVStreamError, ReaderStalledError, ShuttingDownError
from .answer_cache import AnswerCache, CacheBounds
from .answer_key import answer_key
from .flight import Flight, FlightBounds, Replay, Subscription
from .logs import log_shared
from .metrics import Metrics
from .ports import Answer, OpenAnswer
from .request import Incoming

log = logging.getLogger("kvstream.coalesce")

_LEADER = ((b"x-kvstream-coalesced", b"leader"),)
_FOLLOWER = ((b"x-kvstream-coalesced", b"follower"),)
_HIT = ((b"x-kvstream-cache", b"hit"),)
_MISS = ((b"x-kvstream-cache", b"miss"),)


@frozen
class CoalesceSettings:
    """``enabled``: share calls. ``twins``: a stream and a whole answer may share one."""

    enabled: bool = True
    twins: bool = True
    bounds: FlightBounds = field(factory=FlightBounds)
    cache: CacheBounds = field(factory=CacheBounds)


class Coalescer:
    """See the module. Start :meth:`run` in a nursery that ends before the engines do; until then everything passes
    through."""

    def __init__(self, open_answer: OpenAnswer, metrics: Metrics, settings: CoalesceSettings) -> None:
        self._open = open_answer
        self._metrics = metrics
        self._settings = settings
        self._cache = AnswerCache(settings.cache)
        self._flights: dict[bytes, Flight] = {}  # those that may still be boarded
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Task body: own the calls until cancelled. *Cancellation*: calls under way end with ``ShuttingDownError``."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None

    def replace(self, settings: CoalesceSettings) -> None:
        """Other settings from now on. What was kept is forgotten, and what is under way is neither kept nor joined any
        more: another backend may answer otherwise."""
        self._settings = settings
        self._cache = AnswerCache(settings.cache)
        self._flights.clear()
        self._metrics.cache_bytes.set(0)

    @asynccontextmanager
    async def open_answer(self, incoming: Incoming, name: str) -> AsyncIterator[Answer]:
        """See :data:`ports.OpenAnswer`. *Cancellation*: safe; it ends nobody else's answer."""
        settings, nursery = self._settings, self._nursery
        key = None
        if nursery is not None and (settings.enabled or self._cache.enabled):
            key = answer_key(incoming, twins=settings.twins)
        if key is None or nursery is None:
            async with self._open(incoming, name) as answer:
                yield answer
            return
        kept = self._cache.find(key, incoming.proxy, trio.current_time())
        if kept is not None:
            async with self._replayed(kept, name):
                yield kept
            return
        flight = self._flights.get(key)
        if flight is None or not flight.whole:
            flight = Flight(name, key, settings.bounds)
            if settings.enabled:
                self._flights[key] = flight
            nursery.start_soon(self._fly, flight, incoming)
        reader = self._board(flight, incoming)
        try:
            await flight.opened.wait()
            if flight.source is None:
                raise flight.failure()
            yield reader
        finally:
            self._leave(flight, reader, name)

    def _board(self, flight: Flight, incoming: Incoming) -> Subscription:
        reader = flight.join(incoming.proxy)
        if self._settings.enabled:
            reader.headers = _LEADER if flight.joined == 1 else _FOLLOWER
            self._metrics.coalesced.inc(flight.joined > 1)
        if self._cache.enabled:
            self._metrics.cached.labels("miss").inc()
            reader.headers += _MISS
        return reader

    def _leave(self, flight: Flight, reader: Subscription, name: str) -> None:
        """The engine books one request per call. It stands for the reader that leaves last; all others are booked
        here. Its log line, the one with figures, is the leader's; each follower has one here."""
        flight.drop(reader)
        flight.left += 1
        if not flight.readers:
            self._close_boarding(flight)  # at once: its task ends only in its next turn
        if flight.source is None:
            return  # not held: the proxy books that itself
        outcome = outcome_of_reader(reader)
        if flight.left < flight.joined:
            self._metrics.shared(reader.request.route, outcome)
        if name != flight.name:
            log_shared(name, reader.request.route, outcome, source=flight.name)

    @asynccontextmanager
    async def _replayed(self, kept: Replay, name: str) -> AsyncIterator[None]:
        self._metrics.cached.labels("hit").inc()
        kept.headers = _HIT
        try:
            yield
        finally:
            outcome = outcome_of_reader(kept)
            self._metrics.shared(kept.request.route, outcome)
            log_shared(name, kept.request.route, outcome, source="cache")

    # --- the task that reads ------------------------------------------------------------------------------------------

    async def _fly(self, flight: Flight, incoming: Incoming) -> None:
        error: KVStreamError | None = ShuttingDownError("the gateway was stopped", retry_after_s=5)
        cache = self._cache
        try:
            with flight.scope:
                async with self._open(incoming, flight.name) as source:
                    flight.open(source)
                    while events := await source.get():
                        await flight.put(events)
                        if not flight.whole:
                            self._close_boarding(flight)
                    if cache is self._cache:
                        self._keep(flight, source)
                    error = None
                    flight.close(None)  # before the source's own end, which may take a moment
        except KVStreamError as caught:
            error = caught
        except Exception:
            log.exception("bug while reading the answer of %s for several clients", flight.name)
            error = KVStreamError("internal error in the gateway; its log has the details")
        finally:
            self._close_boarding(flight)
            flight.close(error)

    def _keep(self, flight: Flight, source: Answer) -> None:
        """Keep the answer if it is whole and ended as it should."""
        if not self._cache.enabled or not flight.whole or source.truncated:
            return
        events = flight.events()
        if not any(isinstance(event, Done) and event.unfinished for event in events):
            self._cache.keep(flight.key, events, source, trio.current_time())
            self._metrics.cache_bytes.set(self._cache.size)

    def _close_boarding(self, flight: Flight) -> None:
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]


def outcome_of_reader(reader: Subscription | Replay) -> str:
    """How it ended for this client, in the words of ``stream.outcome_of``."""
    if reader.finished:
        return "served"
    if reader.failed is None:
        return "cancelled"
    if isinstance(reader.failed, ReaderStalledError):
        return "stalled"
    return "client_error" if reader.failed.status < 500 else "upstream_error"
