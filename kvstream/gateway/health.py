"""Watching one backend: is it there, is it loading, what does it hold, and which of its slots still work.

Two task bodies. :meth:`BackendWatcher.run_health` walks the states below and posts ``BackendUp`` and ``BackendDown``;
:meth:`BackendWatcher.run_slots` turns cancelled requests back into free seats.

::

    starting --answers--> up <--> loading        a loading backend is held, up to ``load_timeout_s``
        \\--refused--> down --answers--> up      a backend that is not there is refused at once

A backend from which tokens flow is up, whatever its health route says, and is not asked. One whose health route says
nothing while it has requests is busy: a runtime deep in a prefill may answer late. Whether it still does something for
them is judged by ``liveness``. It is asked every ``interval_s`` while requests are there, and five times less often
when idle.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import trio
from attrs import evolve, frozen

from ..adapters.base import Adapter, CapacityQuery, CapacityReport, Health, HttpReply
from ..core.messages import BackendDown, BackendUp, Event
from ..core.types import RequestId
from ..errors import BackendTimeoutError, KVStreamError
from .logs import backend_logger
from .ports import Upstream

LOADING_POLL_S = 0.25
SILENT = "silent"  # what a probe found: no answer in time
PROBE_TIMEOUT_S = 3.0
CAPACITY_TIMEOUT_S = 5.0
IDLE_FACTOR = 5
SAMPLE_SETTLE_S = 0.01
# llama.cpp looks for a departed client after a second without any result in its queue, and an answer of /slots is one.
# While a prompt is read there are no others, so looking more often keeps the cancelled prefill going to its end
# (measured: 1,276 of 1,300 tokens computed when asked every 50 ms, 512, one batch, when asked every 1.5 s).
PREFILL_POLL_S_MIN = 1.25
RECOUNT_S_MAX = 10.0


@frozen
class BackendState:
    """What is known of the backend now. ``since`` is a Trio time."""

    state: str = "starting"  # starting, up, loading, sleeping, down, failed
    since: float = 0.0
    detail: str = ""
    capacity: CapacityReport | None = None


@frozen
class DrainingSeat:
    """A request that ended at our side while the runtime may be at work on it, since Trio time ``since``.

    ``answered``: its headers had come. ``flowing``: so had its first token; until then the runtime is at the prompt.
    """

    rid: RequestId
    answered: bool
    flowing: bool
    since: float


@frozen
class SlotView:
    """Who is at work in the runtime: streams whose headers came and whose end would be seen at once (not those whose
    pump waits for a slow reader: their slot may have been idle for long), and ended ones still draining."""

    started: frozenset[RequestId]
    draining: tuple[DrainingSeat, ...]


class WatchedEngine(Protocol):
    """What the watcher needs of the engine."""

    def post(self, event: Event) -> None: ...
    def slot_view(self) -> SlotView: ...
    def seat_idle(self, rid: RequestId, *, capped: bool) -> None: ...
    def backend_returned(self) -> None: ...
    def slots_seen(self, working: int) -> None: ...
    async def recount_waiting(self) -> None: ...
    @property
    def busy(self) -> bool: ...
    @property
    def at_work(self) -> bool: ...
    @property
    def last_progress(self) -> float: ...


class BackendWatcher:
    """See the module. ``query`` is what the operator configured about capacity."""

    def __init__(self, adapter: Adapter, upstream: Upstream, engine: WatchedEngine, query: CapacityQuery, *,
                 interval_s: float, load_timeout_s: float, idle_poll_s: float, idle_s_max: float,
                 name: str = "") -> None:
        self._log = backend_logger(name)
        self._adapter = adapter
        self._upstream = upstream
        self._engine = engine
        self._query = query
        self._interval_s = interval_s
        self._load_timeout_s = load_timeout_s
        self._idle_poll_s = idle_poll_s
        self._idle_s_max = idle_s_max
        self._nudge = trio.Event()
        self._changed = trio.Event()
        self.slots_wanted = trio.Event()
        self.backend = BackendState()
        self.expect_restart: Callable[[], bool] = lambda: False

    # --- states -------------------------------------------------------------------------------------------------------

    async def run_health(self) -> None:
        """Task body: probe, note, post, sleep; for ever."""
        self.backend = evolve(self.backend, since=trio.current_time())
        nudged = True
        while True:
            if nudged or not self._tokens_flow:
                await self._enter(*await self._probe())
            pause = LOADING_POLL_S
            if self.backend.state in (Health.UP, Health.SLEEPING):
                pause = self._interval_s * (1 if self._engine.busy else IDLE_FACTOR)
            elif self.backend.state in (Health.DOWN, "failed"):
                pause = min(1.0, self._interval_s)
            self._nudge = trio.Event()
            with trio.move_on_after(pause):
                await self._nudge.wait()
            nudged = self._nudge.is_set()

    @property
    def _tokens_flow(self) -> bool:
        return (self.backend.state == Health.UP
                and trio.current_time() - self._engine.last_progress < self._interval_s)

    async def answers(self) -> bool:
        """Ask the health route now. *Errors*: none. *Cancellation*: safe."""
        return (await self._probe())[0] in (Health.UP, Health.SLEEPING)

    async def _probe(self) -> tuple[str, str]:
        try:
            reply = await self._upstream.request(self._adapter.health(), timeout_s=PROBE_TIMEOUT_S)
        except BackendTimeoutError as error:
            return SILENT, error.message
        except KVStreamError as error:
            return Health.DOWN, error.message
        return self._adapter.read_health(reply), f"health answered {reply.status}"

    async def _enter(self, state: str, detail: str) -> None:
        before = self.backend
        now = trio.current_time()
        if state == SILENT:
            if before.state == Health.UP and self._engine.at_work:
                return  # busy, as far as anybody can tell; whether it is wedged is judged by what it does
            state = Health.DOWN
        if state == Health.DOWN:
            if before.state == Health.UP and now - self._engine.last_progress < self._interval_s * 2:
                return  # tokens flow: busy, not gone
            if self.expect_restart():
                state, detail = Health.LOADING, "llama.cpp is being started"
        if state == Health.LOADING and before.state in (Health.LOADING, "failed"):
            if before.state == Health.LOADING and now - before.since > self._load_timeout_s:
                self._set("failed", f"still loading after upstream.load_timeout_s = {self._load_timeout_s:g} s")
                self._engine.post(BackendDown(refuse=True))
            return
        if state in (Health.UP, Health.SLEEPING):
            if before.state not in (Health.UP, Health.SLEEPING):
                await self._learn(state)
            elif before.state != state:
                self._set(state, detail)
            elif before.capacity is not None and not before.capacity.settled and not self._engine.busy:
                await self._learn(state)
            elif await self._was_restarted():
                self._log.info("the backend was restarted between two looks, or loaded another model")
                await self._learn(state)
            return
        if state != before.state:
            self._set(state, detail)
            self._engine.post(BackendDown())

    async def _was_restarted(self) -> bool:
        """A small model restarts faster than we look: the health route alone would not tell."""
        call, known = self._adapter.process(), self.backend.capacity
        if call is None or known is None:
            return False
        try:
            process = self._adapter.read_process(await self._upstream.request(call, timeout_s=PROBE_TIMEOUT_S))
        except KVStreamError:
            return False
        return bool(process and known.process and process != known.process)

    async def _learn(self, state: str) -> None:
        """The backend came up: ask what it holds, and open the doors."""
        before = self.backend.capacity
        away = before is not None and self.backend.state not in (Health.UP, Health.SLEEPING)
        try:
            report = await self._capacity()
        except KVStreamError as error:
            self._set(Health.DOWN, error.message)
            return
        if report == before and self.backend.state == state and not report.settled:
            return  # asked again, and it still cannot tell more
        fresh = before is not None and (
            before.instance != report.instance or not report.instance or before.process != report.process)
        for note in report.notes:
            self._log.info("capacity: %s", note)
        limits = report.limits
        self._log.info("backend up: %s, %d seats, %d pages of %d tokens (%s)", limits.mode.value, limits.seats,
                       limits.pages, limits.page_tokens, limits.source)
        self.backend = BackendState(state, trio.current_time(), "", report)
        self.announce()
        with trio.move_on_after(RECOUNT_S_MAX):
            await self._engine.recount_waiting()
        if away:
            self._engine.backend_returned()
        self._engine.post(BackendUp(limits, fresh=fresh, ramp=away))

    async def _capacity(self) -> CapacityReport:
        replies: dict[str, HttpReply | None] = {}
        while calls := [(n, c) for n, c in self._adapter.capacity_calls(replies) if n not in replies]:
            for name, call in calls:
                try:
                    replies[name] = await self._upstream.request(call, timeout_s=CAPACITY_TIMEOUT_S)
                except KVStreamError:
                    replies[name] = None
        return self._adapter.read_capacity(replies, self._query)

    def _set(self, state: str, detail: str) -> None:
        self._log.log(logging.INFO if state in (Health.LOADING, Health.SLEEPING) else logging.WARNING,
                      "backend %s: %s", state, detail)
        self.backend = evolve(self.backend, state=state, since=trio.current_time(), detail=detail)
        self.announce()

    def announce(self) -> None:
        """The backend, or what is thought of it, is another: wake those in :meth:`wait_change`."""
        self._changed.set()
        self._changed = trio.Event()

    def suspect(self, state: str, detail: str) -> None:
        """A request met a backend that refuses connections or says it is loading: look now, not at the next beat."""
        if self.backend.state in (Health.UP, Health.SLEEPING):
            self._set(state, detail)
            self._engine.post(BackendDown())
        self._nudge.set()

    def look_now(self) -> None:
        """Something went wrong that a look at the backend may explain."""
        self._nudge.set()

    def may_return(self, within_s: float) -> bool:
        """Whether a backend that is down was there less than ``within_s`` seconds ago: as likely as not it is being
        restarted. One that never was there is not waited for."""
        return self.backend.capacity is not None and trio.current_time() - self.backend.since < within_s

    async def wait_up(self) -> bool:
        """Wait until the backend is up (True) or known not to come (False). The caller bounds the wait."""
        while self.backend.state not in (Health.UP, Health.SLEEPING):
            if self.backend.state in (Health.DOWN, "failed"):
                return False
            await self._changed.wait()
        return True

    async def wait_change(self) -> None:
        """Wait until the backend enters another state."""
        await self._changed.wait()

    async def wait_known(self) -> None:
        """Wait until the first probe has answered."""
        while self.backend.state == "starting":
            await self._changed.wait()

    # --- slots that are draining --------------------------------------------------------------------------------------

    async def run_slots(self) -> None:
        """Task body: while ended requests may still keep a slot busy, ask the runtime until they do not."""
        once_idle: frozenset[RequestId] = frozenset()
        looked_at: frozenset[RequestId] = frozenset()
        while True:
            draining = self._engine.slot_view().draining
            if not draining:
                self.slots_wanted = trio.Event()
                await self.slots_wanted.wait()
                continue
            # One early look costs a cancelled prefill nothing; it is the second within a second that does.
            waiting = any(seat.rid in looked_at and not seat.flowing for seat in draining)
            await trio.sleep(max(self._idle_poll_s, PREFILL_POLL_S_MIN) if waiting else self._idle_poll_s)
            looked_at = frozenset(seat.rid for seat in self._engine.slot_view().draining)
            once_idle = await self._sample(once_idle)

    async def _sample(self, once_idle: frozenset[RequestId]) -> frozenset[RequestId]:
        """Ask once, free what is idle. Returns the requests that looked idle but must be seen so twice.

        The count proves it: a started stream occupies a slot, one still on its way may occupy one. So when no more
        slots work than there are started streams and *other* draining requests, one draining request must be idle.
        A stream that ended at the runtime while its last bytes are on their way to us would be counted as working;
        hence the short pause before the streams are counted. A request whose headers never came may not have reached
        its slot when we looked, hence the second look.
        """
        before = self._engine.slot_view().started
        call = self._adapter.busy()
        working: int | None = None
        if call is not None:
            try:
                tasks = self._adapter.read_busy(await self._upstream.request(call, timeout_s=PROBE_TIMEOUT_S))
                working = None if tasks is None else len(tasks)
            except KVStreamError:
                pass  # a runtime that does not answer is not idle; the cap below ends the wait
        await trio.sleep(SAMPLE_SETTLE_S)
        if working is not None:
            self._engine.slots_seen(working)
        view = self._engine.slot_view()
        started = len(before & view.started)
        now = trio.current_time()
        left = len(view.draining)
        seen: set[RequestId] = set()
        for seat in view.draining:
            if now - seat.since > self._idle_s_max:
                self._engine.seat_idle(seat.rid, capped=True)
                left -= 1
            elif working is not None and working <= started + left - 1:
                if seat.answered or seat.rid in once_idle:
                    self._engine.seat_idle(seat.rid, capped=False)
                else:
                    seen.add(seat.rid)
                left -= 1
        return frozenset(seen)


