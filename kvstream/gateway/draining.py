"""Seats whose request ended at our side while the runtime may still be at work on it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import trio

from ..core.messages import Event, SeatIdle
from ..core.types import RequestId
from .health import DrainingSeat, SlotView
from .metrics import Metrics
from .stream import Stream

log = logging.getLogger("kvstream.engine")


class DrainingSeats:
    """The draining seats of one engine. ``live`` are its streams, read only."""

    def __init__(self, live: Mapping[RequestId, Stream], metrics: Metrics, post: Callable[[Event], None]) -> None:
        self._live = live
        self._metrics = metrics
        self._post = post
        self._seats: dict[RequestId, DrainingSeat] = {}

    def add(self, stream: Stream, now: float) -> None:
        self._seats[stream.rid] = DrainingSeat(stream.rid, stream.answered, stream.first_token is not None, now)

    def view(self) -> SlotView:
        """See :class:`health.SlotView`."""
        return SlotView(
            frozenset(rid for rid, s in self._live.items() if s.answered and not s.completed and not s.blocked),
            tuple(self._seats.values()))

    def idle(self, rid: RequestId, *, capped: bool) -> None:
        """A draining request's slot is idle, or has been given up waiting for (``capped``)."""
        seat = self._seats.pop(rid, None)
        if seat is None:
            return
        if capped:
            log.warning("request %d: its slot did not become idle within upstream.slot_idle_s_max", rid)
        self._metrics.drained(trio.current_time() - seat.since, capped=capped)
        self._post(SeatIdle(rid))
