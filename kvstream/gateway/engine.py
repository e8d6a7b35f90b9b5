"""One backend with its scheduler: the *lane*.

Theory of operation. One task, the tick, owns the scheduler; everybody else posts events to its inbox. The tick wakes
when an event arrives or a deadline passes, hands all that has gathered to ``Scheduler.step`` and carries out the
actions. An admitted request becomes a pump in the streams nursery, with a cancel scope made in that same step. Whatever
happens to a request afterwards ends in :meth:`Engine._settle`, which is plain ``def``: it cannot be cancelled half-way,
and it posts the one ``Ended`` that returns seat and pages.

::

    engine.run
    └─ nursery: tick · health watcher · slot watcher · streams nursery (one pump per admitted request)

Failure domains: a ``KVStreamError`` ends its stream; any other exception in a pump is a bug, is logged with its
traceback, ends that stream with a 500, and is raised on when ``raise_bugs`` is set (tests): see ``runner``. An
exception in the tick means that the accounting is wrong: it leaves ``run`` and takes the process down.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import trio
from attrs import evolve

from ..adapters.base import Adapter, Health, ProxyRequest
from ..core.messages import (
    Action,
    Admit,
    Closing,
    Ended,
    Event,
    Forget,
    Preempt,
    Refuse,
    SaveSlot,
    SlotSaved,
    Submitted,
    Truncate,
)
from ..core.scheduler import Scheduler
from ..core.types import EndReason, Priority, RequestId
from ..errors import BackendUnavailableError, KVStreamError, PoolExhaustedError, ShuttingDownError
from .buffer import EventBuffer
from .count import PromptCount, PromptCounter
from .door import Door
from .draining import DrainingSeats
from .drift import Drifts
from .failures import error_of, error_of_refusal
from .guard import Guard
from .health import BackendWatcher
from .hygiene import PrefixHygiene
from .inject import Inject
from .lane_settings import EngineSettings
from .liveness import Liveness
from .load_options import LoadOptionsWatch
from .logs import log_request
from .metrics import Metrics
from .parking import Parking
from .patience import Patience
from .ports import Upstream
from .pulse import Pulse
from .recount import recount
from .request import answer_tokens, seats_wanted
from .runner import Runner
from .slotsight import SlotSight
from .slotwatch import AtWork, SlotWatch
from .stream import Stream, end_reason

__all__ = ["Engine", "EngineSettings"]

log = logging.getLogger("kvstream.engine")


class Engine:
    """See the module. Create, start :meth:`run` in a nursery, then :meth:`open_stream`."""

    def __init__(self, adapter: Adapter, upstream: Upstream, settings: EngineSettings, metrics: Metrics, *,
                 name: str = "default", rng: random.Random | None = None) -> None:
        self.name = name  # of the lane
        self.adapter = adapter
        self.upstream = upstream
        self.settings = settings
        self.metrics = metrics
        self.scheduler = Scheduler(evolve(
            settings.scheduler, cold_groups=adapter.capabilities.loads_on_demand,
            exclusive_groups=settings.scheduler.exclusive_groups or adapter.capabilities.groups_exclude))
        self.hygiene = PrefixHygiene(settings.hygiene)
        self.load_options = LoadOptionsWatch()
        self.counter = PromptCounter(
            adapter, upstream, page_tokens=settings.query.page_tokens, tokens_keyed_max=settings.tokens_keyed_max,
            timeout_s=settings.count_timeout_s, canonical=self.hygiene.canonical,
            keeps_ids=settings.inject is not None and adapter.slots is not None)
        self.watcher = BackendWatcher(
            adapter, upstream, self, settings.query, interval_s=settings.health_interval_s,
            load_timeout_s=settings.load_timeout_s, name=name)
        self.closing = False
        self._inbox: list[Event] = []
        self._wake = trio.Event()
        self.pulse = Pulse(lambda: self._wake.set())
        self._streams: trio.Nursery | None = None
        self._live: dict[RequestId, Stream] = {}
        self._ended: deque[tuple[RequestId, str]] = deque(maxlen=256)  # their seats may still drain
        self.guard = Guard(settings, self._post_of_guard, name)
        self._door = Door(self.watcher, self.guard)
        self.inject = Inject(
            adapter, upstream, settings, metrics, name=name, post=self._post_of_slots,
            other_process=self.watcher.other_process, progress=self.guard.progress,
            owned=lambda: self.slot_view().owned, is_away=self.watcher.is_away)
        self._parking = Parking(adapter, upstream, settings, self.post, self.inject.meter, self._live)
        self._draining = DrainingSeats(self._live, self.inject.jobs, metrics, self.post)
        self.drifts = Drifts(adapter, name)
        self.sight = SlotSight(self._live, self._draining, self.inject, self.scheduler, self.drifts, self.post,
                               askable=not settings.passthrough)
        self._slot_watch = SlotWatch(adapter, upstream, self.sight, idle_poll_s=settings.slot_idle_poll_s,
                                     idle_s_max=settings.slot_idle_s_max)
        self._liveness = Liveness(adapter, upstream, settings, metrics, self.guard, self._live)
        self._runner = Runner(
            adapter, upstream, settings, watcher=self.watcher, guard=self.guard, inject=self.inject,
            parking=self._parking, post=self.post, settle=self._settle, park=self._park,
            patience=Patience(self.watcher, settings, metrics, (rng or random.Random()).random))
        self._next_rid = 0
        self._idle = trio.Event()
        self._idle.set()

    # --- tasks --------------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Task body: serve until cancelled.

        *Cancellation*: every stream still open ends with ``ShuttingDownError``.
        """
        async with trio.open_nursery() as nursery, trio.open_nursery() as streams:
            self._streams = streams
            nursery.start_soon(self._tick)
            nursery.start_soon(self.watcher.run_health)
            nursery.start_soon(self._slot_watch.run)
            nursery.start_soon(self.inject.run)
            nursery.start_soon(self.guard.run, self.watcher.answers)
            nursery.start_soon(self._liveness.run)
            task_status.started()
            await trio.sleep_forever()

    async def _tick(self) -> None:
        while True:
            events, self._inbox = self._inbox, []
            for action in self.scheduler.step(trio.current_time(), events):
                self._act(action)
            self.pulse.beat()
            if self.sight.wants_look:
                self._slot_watch.wanted.set()
            self._wake = trio.Event()
            if self._inbox:
                await trio.lowlevel.checkpoint()
                continue
            deadline = self.scheduler.next_deadline()
            with trio.move_on_at(float("inf") if deadline is None else deadline):
                await self._wake.wait()

    def post(self, event: Event) -> None:
        """Hand an event to the tick. Never blocks, never fails."""
        self._inbox.append(event)
        self._wake.set()

    def _post_of_slots(self, event: Event) -> None:
        self.post(event)
        if isinstance(event, SlotSaved) and event.rid in self._live:
            self._parking.saved(self._live[event.rid], event)

    def _post_of_guard(self, event: Event) -> None:
        self.post(event)
        self.watcher.announce()  # whoever waits here may be better off elsewhere

    def _act(self, action: Action) -> None:
        if self.inject.act(action) or isinstance(action, SaveSlot | Forget):
            return
        stream = self._live.get(action.rid)
        if stream is None:
            return  # it left in this very step; its Ended is in the inbox
        if isinstance(action, Admit):
            assert self._streams is not None
            stream.lease, stream.granted = action, stream.granted or trio.current_time()
            stream.scope = trio.CancelScope()
            self.sight.calls += 1
            self.guard.admitted(stream)
            self._liveness.admitted()
            if not action.resumes:
                self.metrics.admitted(stream)
            self._streams.start_soon(self._runner.run, stream)
        elif isinstance(action, Preempt):
            self._parking.preempt(stream, action)
        elif isinstance(action, Refuse):
            error = self._parking.refusal(stream, action) or error_of_refusal(
                action, wait_s_max=self.settings.wait_s_max)
            self._settle(stream, error, refused=action.why.value)
        elif isinstance(action, Truncate):
            log.warning("request %d outgrew the pages left in the pool; ended with finish_reason length", stream.rid)
            stream.cut_short(None)

    def _settle(self, stream: Stream, error: KVStreamError | None, *, refused: str | None = None) -> None:
        """The end of a request, whatever it was. Synchronous, so it happens whole, also in a cancelled task."""
        if stream.outcome is not None:
            return
        stream.ended = trio.current_time()
        error = stream.cut or error
        reason = end_reason(stream, error)
        stream.outcome = refused or reason.value
        if reason is EndReason.TRUNCATED:
            error = None
        elif error is None and reason is EndReason.FAILED:
            error = PoolExhaustedError("the stream was ended by the gateway")
        stream.buffer.close(error)
        del self._live[stream.rid]
        self._ended.append((stream.rid, stream.name))
        if not self._live:
            self._idle.set()
        self.sight.calls += 1
        draining = self._drains(stream, error)
        if refused is None:
            tokens = stream.usage.completion if stream.usage else None
            self.post(Ended(stream.rid, reason, tokens, draining=draining))
        if stream.usage and stream.prompt is not None:
            self.counter.learn(stream.request, stream.prompt, stream.usage.prompt)
        self._liveness.ended(stream)
        self.drifts.ended(stream)
        self.metrics.ended(stream, error)
        log_request(stream, error, self.name)

    def _drains(self, stream: Stream, error: KVStreamError | None) -> bool:
        """Whether the runtime may still be at work on a request that is over here; if so it is watched from now on."""
        if stream.rid in self._draining:
            return True  # its leg ended before
        sent = (stream.sent and not stream.completed and self.adapter.capabilities.slots_visible
                and not isinstance(error, BackendUnavailableError))  # then no slot ever heard of it
        if not sent and self._draining.job_of(stream) is None:
            return False
        self._draining.add(stream)
        self._slot_watch.wanted.set()
        return True

    def _park(self, stream: Stream) -> None:
        """The end of a leg whose stream was preempted: the stream itself goes on later. Synchronous."""
        self.sight.calls += 1
        self._parking.leg_over(stream, draining=self._drains(stream, None))

    # --- requests -----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def open_stream(self, request: ProxyRequest, *, client: str = "",
                          priority: Priority = Priority.NORMAL, weight: float = 1.0,
                          name: str = "", hold: bool = True,
                          count: PromptCount | None = None) -> AsyncIterator[Stream]:
        """Queue a request and hand out its stream; read it with ``await stream.get()``. Without ``hold`` a backend
        that is not there ends it at once, with ``BackendRefusedError`` if it had been granted: somebody else may serve
        it then, since nobody has seen it. ``count`` is that of :meth:`count_prompt`, if that was asked already.

        *Resource handling*: leaving the block, however, leaves the queue or stops the runtime.
        *Errors*: ``ShuttingDownError``, ``BackendUnavailableError`` at once; every later one from ``get``.
        *Cancellation*: safe at any point.
        """
        self._next_rid += 1
        rid = RequestId(self._next_rid)
        arrived = trio.current_time()
        refused = self.adapter.refusal(request)
        if refused is not None:
            raise error_of(refused)
        if self.closing:
            raise ShuttingDownError("the gateway is shutting down", retry_after_s=5)
        await self._door.check_open(self.settings, hold=hold)
        await self.sight.arrived()
        request = self.hygiene.normalized(request)
        count = count or await self._count(request, client)
        if self.closing:
            raise ShuttingDownError("the gateway is shutting down", retry_after_s=5)
        self.hygiene.look(request, client, count.tokens)
        group = self.adapter.load_key(request)
        self.load_options.look(group, self.adapter.load_options(request))
        stream = Stream(
            rid=rid, name=name, request=request, adapter=self.adapter, client=client, priority=priority,
            arrived=arrived, buffer=EventBuffer(self.settings.buffer_bytes), tokens_prompt=count.tokens,
            tokens_max=answer_tokens(request), count_source=count.source, prompt=count,
            said=self._parking.open(request, count), hold=hold)
        self._live[rid] = stream
        self._idle = trio.Event() if self._idle.is_set() else self._idle
        stream.asked = Submitted(
            rid=rid, keys=count.keys, tokens=count.tokens, tokens_max=stream.tokens_max,
            deadline=arrived + self.settings.wait_s_max, priority=priority, bytes=len(request.body),
            client=client, count_source=count.source, arrived=arrived, seats=seats_wanted(request), weight=weight,
            group=group, pinnable=self.inject.is_pinnable(request), exact=self.inject.is_exact(request, count),
            preemptible=stream.said is not None)
        self.post(stream.asked)
        try:
            yield stream
        finally:
            self.leave(stream)

    async def count_prompt(self, request: ProxyRequest, client: str) -> PromptCount:
        """Length and page keys of a prompt. *Errors*: none. *Cancellation*: safe."""
        return await self._count(self.hygiene.normalized(request), client)

    async def _count(self, request: ProxyRequest, client: str) -> PromptCount:
        count = None
        if self.counter.can_be_exact and self.watcher.backend.state == Health.UP:
            count = await self.counter.exact(request, client)
        return count or self.counter.estimate(request, client)

    async def recount_waiting(self) -> None:
        """See :func:`recount.recount`."""
        await recount(self._live.values(), self.counter, self.post)

    def leave(self, stream: Stream) -> None:
        """The client is gone, or has all it wanted. Synchronous and idempotent."""
        if stream.outcome is not None:
            return
        stream.left = True
        if stream.scope is not None:
            stream.scope.cancel()
        else:
            self._settle(stream, None)

    # --- draining seats and drain of the whole ------------------------------------------------------------------------

    def slot_view(self) -> AtWork:
        """See :class:`slotwatch.AtWork`."""
        return self._draining.view()

    def backend_returned(self) -> None:
        """The backend was away and is back."""
        self.guard.backend_returned()

    @property
    def busy(self) -> bool:
        return bool(self._live)

    @property
    def at_work(self) -> bool:
        """Whether the runtime has requests, and nothing proves yet that it does nothing for them."""
        return bool(self._liveness.running)

    @property
    def last_progress(self) -> float:
        """When data of any answer last came."""
        return self.guard.last_progress

    @property
    def state(self) -> str:
        """The backend's state as requests meet it: the watcher's, or ``breaker_open``, ``wedged`` and ``half_open``
        while the breaker stands before a backend that is up."""
        return self._door.state

    @property
    def backend_state(self) -> str:
        """What is known of the backend itself: the watcher's state, or ``wedged``."""
        return self._door.backend_state

    @property
    def ready(self) -> bool:
        """Whether a request would be taken and has a chance. From what is known: nothing is asked for it. A half open
        breaker counts as ready, or whoever sends only to those who are would never send the trial."""
        return not self.closing and self.state in (Health.UP, Health.SLEEPING, "half_open")

    @property
    def streams(self) -> Mapping[RequestId, Stream]:
        """The requests in hand, waiting and running. Read only."""
        return self._live

    def name_of(self, rid: RequestId) -> str:
        """What the request is called, also when it ended a while ago; its number when nobody knows."""
        return (self._live[rid].name if rid in self._live else dict(self._ended).get(rid)) or str(rid)

    def reconfigure(self, settings: EngineSettings) -> None:
        """Let new requests go by ``settings``. What its parts were built with stays; see ``reload.LIVE``."""
        self.settings = evolve(settings, raise_bugs=self.settings.raise_bugs)
        self._runner.reconfigure(self.settings)
        self.scheduler.reconfigure(settings.scheduler)

    def close(self, *, refuse_waiting: bool) -> None:
        """Take no more requests; those running go on, those waiting too unless ``refuse_waiting``."""
        self.closing = True
        self.post(Closing(refuse_waiting))

    def abort(self, error: KVStreamError) -> None:
        """End every request now, each with ``error``."""
        for stream in list(self._live.values()):
            if stream.scope is not None:
                stream.cut_short(error)
            else:
                stream.cut = error
                self._settle(stream, error)

    async def wait_idle(self) -> None:
        """Wait until no request is in hand."""
        await self._idle.wait()

