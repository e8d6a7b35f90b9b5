"""Runs the pump of each granted request, and judges how it ended.

Theory of operation. :meth:`Runner.run` is the task body of one *leg*: from a grant to the end of the call that it let
go out. What comes after the pump is one synchronous act: the guard is told, the watcher is told, and then the request
is one of

* over (``settle``);
* back at its place in the queue, when nobody listened at the backend's address and so nobody has seen it, or when what
  its grant relied on is gone from the runtime. Back in the queue and not waiting with its seat: when the backend
  returns, all that wait are let in by the scheduler, one first and then more, and not all at once by themselves;
* parked (``park``), when it was preempted: its client stays, and another grant begins its next leg.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import trio
from attrs import evolve

from ..adapters.base import Adapter, Health
from ..core.messages import Ended, Event, Produced, Recounted
from ..core.types import CountSource, EndReason, PoolMode, RequestId
from ..errors import BackendRefusedError, BackendUnavailableError, KVStreamError, ShuttingDownError
from .guard import Guard
from .health import BackendWatcher
from .inject import Inject
from .lane_settings import EngineSettings
from .leg import FirstLeg, Leg
from .parking import NextLeg, Parking
from .patience import Patience
from .ports import Upstream
from .pump import Pump, PumpHooks
from .slotwork import UNPLANNED, Opening
from .stream import Stream

log = logging.getLogger("kvstream.engine")

REQUEUES_MAX = 5

Settle = Callable[[Stream, "KVStreamError | None"], None]
Park = Callable[[Stream], None]


class _PlanGone(Exception):
    """The backend was loading: a plan that was made before relies on slots that are gone."""


class Runner:
    """See the module. ``settle(stream, error)`` ends a request, ``park(stream)`` its leg alone, ``post`` hands an
    event to the scheduler."""

    def __init__(self, adapter: Adapter, upstream: Upstream, settings: EngineSettings, *, watcher: BackendWatcher,
                 guard: Guard, inject: Inject, parking: Parking, patience: Patience, post: Callable[[Event], None],
                 settle: Settle, park: Park) -> None:
        self._adapter = adapter
        self._upstream = upstream
        self._settings = settings
        self._watcher = watcher
        self._guard = guard
        self._inject = inject
        self._parking = parking
        self._patience = patience
        self._post = post
        self._settle = settle
        self._park = park
        self._usage_refused = False

    def reconfigure(self, settings: EngineSettings) -> None:
        """For requests that are granted from now on."""
        self._settings = settings

    async def run(self, stream: Stream) -> None:
        """Task body: perform one leg of a granted request.

        *Cancellation*: by the stream's own scope it is an end like another; from outside it is the gateway's stop.
        """
        assert stream.scope is not None
        opening: Opening | None = UNPLANNED
        error: KVStreamError | None = ShuttingDownError("the gateway was stopped", retry_after_s=5)
        try:
            with stream.scope:
                goes_on = await self._parking.next_leg(stream)
                opening = await self._inject.open(stream)
                if opening is not None:
                    await self._perform(stream, opening, goes_on)
            error = None
        except _PlanGone:
            opening, error = None, None
        except KVStreamError as caught:
            error = caught
        except Exception as bug:
            log.exception("bug in the pump of request %d", stream.rid)
            error = KVStreamError("internal error in the gateway; its log has the details")
            if self._settings.raise_bugs:
                raise bug
        finally:
            self._inject.over(stream)
            self._ended(stream, error, planned=opening is not None)

    async def _perform(self, stream: Stream, opening: Opening, goes_on: NextLeg | None) -> None:
        read = opening.read if stream.said is None else stream.said.with_first(opening.read)
        leg: Leg = FirstLeg(stream, opening.slot, read) if goes_on is None else evolve(
            goes_on, slot=opening.slot)
        pump = self._pump(stream, leg)
        if goes_on is not None and goes_on.is_over:
            pump.end(goes_on.open_decoder().at_limit())
        else:
            await pump.run()

    def _pump(self, stream: Stream, leg: Leg) -> Pump:
        settings, capacity = self._settings, self._watcher.backend.capacity
        pool_can_overflow = capacity is not None and capacity.limits.mode is PoolMode.UNIFIED
        hooks = PumpHooks(
            produced=self._on_produced, progress=partial(self._guard.progress, stream),
            loading=partial(self._loading, stream), busy=partial(self._patience.busy, stream),
            usage_refused=self._on_usage_refused,
            started=partial(self._inject.started, stream), bound=partial(self._parking.bind, stream))
        return Pump(
            stream, leg, self._adapter, self._upstream, settings.times, hooks, page_tokens=settings.query.page_tokens,
            include_usage=not self._usage_refused and (settings.include_usage or stream.request.include_usage),
            passthrough=settings.passthrough,
            watched=stream.tokens_max is None and pool_can_overflow)

    async def _loading(self, stream: Stream) -> None:
        """What loads now had other slots, or none: what was planned for those is planned again once it is up."""
        await self._patience.loading(stream)
        lease = stream.lease
        if lease is not None and lease.plan is not None and not lease.resumes and self._may_queue_again(
                stream, away=False):
            raise _PlanGone

    def _on_produced(self, rid: RequestId, tokens: int) -> None:
        self._post(Produced(rid, tokens))

    def _on_usage_refused(self) -> None:
        log.info("the backend does not know stream_options; usage is estimated from now on")
        self._usage_refused = True

    # --- afterwards ---------------------------------------------------------------------------------------------------

    def _ended(self, stream: Stream, error: KVStreamError | None, *, planned: bool) -> None:
        """Synchronous, so it happens whole, also in a cancelled task. Not ``planned``: what its grant relied on was
        gone, and nothing was sent."""
        self._guard.ended(stream, error, known_down=self._watcher.backend.state not in (Health.UP, Health.SLEEPING))
        if not planned and error is None:
            if self._may_queue_again(stream, away=False):
                self._queue_again(stream)
                return
            error = BackendUnavailableError("the backend is restarted again and again", retry_after_s=2)
        if isinstance(error, BackendRefusedError):
            self._watcher.suspect(Health.DOWN, error.message)
            if self._may_queue_again(stream):
                self._queue_again(stream)
                return
        elif isinstance(error, BackendUnavailableError):
            self._watcher.look_now()  # one request that makes it hang up is no reason to close for all
        if stream.preempting is not None and error is None and self._parking.may_park(stream):
            self._park(stream)  # else it came to its end by itself just then, or nobody is there to go on for
            return
        self._settle(stream, error)

    def _may_queue_again(self, stream: Stream, *, away: bool = True) -> bool:
        """``away``: since nobody is there, which not every request waits out, nor for ever."""
        if away and not (stream.hold and self._watcher.may_return(self._settings.down_grace_s)):
            return False
        return (stream.outcome is None and not stream.left and stream.cut is None and stream.requeued < REQUEUES_MAX
                and (trio.current_time() < stream.arrived + self._settings.wait_s_max
                     or (stream.said is not None and stream.said.legs > 0)))

    def _queue_again(self, stream: Stream) -> None:
        assert stream.asked is not None
        stream.requeued += 1
        if stream.said is not None and stream.said.legs:
            self._park(stream)  # not from its beginning
            return
        stream.give_back()
        self._post(Ended(stream.rid, EndReason.CANCELLED))
        self._post(evolve(stream.asked, again=True))  # its place is that of its arrival
        if stream.prompt is not None and stream.count_source is CountSource.EXACT:
            self._post(Recounted(stream.rid, stream.prompt.keys, stream.tokens_prompt))
