"""Seats whose request ended at our side while the runtime may still be at work on it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial

import trio

from ..core.messages import Event, SeatIdle
from ..core.types import RequestId
from .metrics import Metrics
from .slotjobs import Job
from .slotwatch import AtWork, DrainingSeat
from .stream import Stream

log = logging.getLogger("kvstream.engine")


class DrainingSeats:
    """The draining seats of one engine. ``live`` are its streams, read only; ``jobs`` what is being done with slots.

    A seat drains in one of two ways. Its call was sent: the runtime is looked at until it is idle (``slotwatch``). Or
    a job goes on in its slot: the job's end is the seat's.
    """

    def __init__(self, live: Mapping[RequestId, Stream], jobs: Mapping[int, Job], metrics: Metrics,
                 post: Callable[[Event], None]) -> None:
        self._live = live
        self._jobs = jobs
        self._metrics = metrics
        self._post = post
        self._seats: dict[RequestId, DrainingSeat] = {}
        self._held: dict[RequestId, float] = {}  # by a job

    def job_of(self, stream: Stream) -> Job | None:
        """What is being done with its slot now."""
        plan = stream.lease.plan if stream.lease is not None else None
        return self._jobs.get(plan.slot) if plan is not None and plan.slot is not None else None

    def add(self, stream: Stream) -> None:
        """It ended; the seat is free when :meth:`idle` says so."""
        now, job = trio.current_time(), self.job_of(stream)
        if job is not None and not stream.sent:
            self._held[stream.rid] = now
            job.ended.append(partial(self._job_ended, stream.rid))
            return
        self._seats[stream.rid] = DrainingSeat(
            stream.rid, stream.answered, stream.first_token is not None, now, stream.slot)

    def __bool__(self) -> bool:
        return bool(self._seats or self._held)

    def __contains__(self, rid: RequestId) -> bool:
        return rid in self._seats or rid in self._held

    def view(self) -> AtWork:
        """See :class:`slotwatch.AtWork`."""
        started = {rid: s.slot for rid, s in self._live.items() if s.answered and not s.completed and not s.blocked}
        seats = tuple(self._seats.values())
        return AtWork(started, seats, self.owned())

    def owned(self) -> frozenset[int]:
        """Slots that somebody was pinned to and may be at work in."""
        slots = [s.slot for s in self._live.values()] + [seat.slot for seat in self._seats.values()]
        return frozenset(slot for slot in slots if slot is not None)

    def idle(self, rid: RequestId, *, capped: bool) -> None:
        """A draining request's slot is idle, or has been given up waiting for (``capped``)."""
        seat = self._seats.pop(rid, None)
        if seat is None:
            return
        if capped:
            log.warning("request %d: its slot did not become idle within upstream.slot_idle_s_max", rid)
        self._free(rid, seat.since, capped)

    def _job_ended(self, rid: RequestId, lost: bool) -> None:
        if lost:
            log.warning("request %d: nobody knows what became of the call that was about its slot", rid)
        self._free(rid, self._held.pop(rid), lost)

    def _free(self, rid: RequestId, since: float, capped: bool) -> None:
        self._metrics.drained(trio.current_time() - since, capped=capped)
        self._post(SeatIdle(rid, capped=capped))
