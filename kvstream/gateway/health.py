"""Watching one backend: is it there, is it loading, what does it hold.

One task body, :meth:`BackendWatcher.run_health`, walks the states below and posts ``BackendUp`` and ``BackendDown``.
Which slots of the runtime still work is watched elsewhere (``slotwatch``).

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
from collections.abc import Callable, Sequence
from typing import Protocol

import trio
from attrs import evolve, frozen

from ..adapters.base import Adapter, CapacityQuery, CapacityReport, Health
from ..core.messages import BackendDown, BackendUp, Event
from ..errors import BackendTimeoutError, KVStreamError
from .logs import backend_logger
from .ports import Upstream
from .rounds import ask_rounds

LOADING_POLL_S = 0.25
SILENT = "silent"  # what a probe found: no answer in time
PROBE_TIMEOUT_S = 3.0
CAPACITY_TIMEOUT_S = 5.0
IDLE_FACTOR = 5
RECOUNT_S_MAX = 10.0
LEFTOVERS_S_MAX = 3.0  # what a dead client left in the runtime ends at its next batch
HOLD_AFTER_S, HOLD_GAP_S = 10.0, 60.0  # doors are closed under load to find out what could not be: when, how often


@frozen
class BackendState:
    """What is known of the backend now. ``since`` is a Trio time."""

    state: str = "starting"  # starting, up, loading, sleeping, down, failed
    since: float = 0.0
    detail: str = ""
    capacity: CapacityReport | None = None


class WatchedSlots(Protocol):
    """What the watcher needs of those who use the runtime's slots."""

    async def check(self, report: CapacityReport, *, sleeping: bool) -> Sequence[Event]: ...
    async def beat(self) -> None: ...
    def slept(self) -> None: ...
    async def calm_down(self, report: CapacityReport) -> bool: ...
    async def let_start(self) -> None: ...
    @property
    def unsettled(self) -> bool: ...


class WatchedEngine(Protocol):
    """What the watcher needs of the engine."""

    def post(self, event: Event) -> None: ...
    def backend_returned(self) -> None: ...
    async def recount_waiting(self) -> None: ...
    @property
    def sight(self) -> WatchedSlots: ...
    @property
    def busy(self) -> bool: ...
    @property
    def at_work(self) -> bool: ...
    @property
    def last_progress(self) -> float: ...


class BackendWatcher:
    """See the module. ``query`` is what the operator configured about capacity."""

    def __init__(self, adapter: Adapter, upstream: Upstream, engine: WatchedEngine, query: CapacityQuery, *,
                 interval_s: float, load_timeout_s: float, name: str = "") -> None:
        self._log = backend_logger(name)
        self._adapter = adapter
        self._upstream = upstream
        self._engine = engine
        self._query = query
        self._interval_s = interval_s
        self._load_timeout_s = load_timeout_s
        self._nudge = trio.Event()
        self._changed = trio.Event()
        self._changed_process = False
        self._hold_at = float("inf")
        self.backend = BackendState()
        self.expect_restart: Callable[[], bool] = lambda: False

    # --- states -------------------------------------------------------------------------------------------------------

    async def run_health(self) -> None:
        """Task body: probe, note, post, sleep; for ever."""
        self.backend = evolve(self.backend, since=trio.current_time())
        nudged = True
        while True:
            if nudged or self._changed_process or not self._tokens_flow or self._may_hold:
                await self._enter(*await self._probe())
            if self.backend.state == Health.UP:
                await self._engine.sight.beat()
            pause = LOADING_POLL_S
            if self.backend.state in (Health.UP, Health.SLEEPING):
                pause = self._interval_s * (1 if self._engine.busy or self._is_unsettled else IDLE_FACTOR)
            elif self.backend.state in (Health.DOWN, "failed"):
                pause = min(1.0, self._interval_s)
            self._nudge = trio.Event()
            with trio.move_on_after(pause):
                await self._nudge.wait()
            nudged = self._nudge.is_set()

    def is_away(self) -> bool:
        """Whether the last that is known is that nobody serves there."""
        return self.backend.state in (Health.DOWN, "failed")

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
        state, detail = self._adapter.read_health(reply), f"health answered {reply.status}"
        if state == Health.DOWN and reply.status < 500 and reply.status not in (401, 403):
            detail += (". Something answers there that does not look like such a runtime; what it is says `kvstream "
                       f"doctor --url {self._adapter.base_url}`")
        return state, detail

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
                if state == Health.SLEEPING:
                    self._engine.sight.slept()
            elif self._is_unsettled and (not self._engine.busy or await self._has_calmed_down()):
                await self._learn(state)
            elif self._changed_process or await self._was_restarted():
                self._log.info("the backend was restarted between two looks, or loaded another model")
                await self._learn(state)
            return
        if state != before.state:
            self._set(state, detail)
            self._engine.post(BackendDown())

    @property
    def _is_unsettled(self) -> bool:
        """Whether something could not be found out when the backend came up."""
        capacity = self.backend.capacity
        return capacity is not None and (not capacity.settled or self._engine.sight.unsettled)

    @property
    def _may_hold(self) -> bool:
        return trio.current_time() >= self._hold_at and self._is_unsettled

    async def _has_calmed_down(self) -> bool:
        """Under load a moment without requests may never come by itself: now and then one is made. Nobody is let in
        until what runs has ended, or there is room beside it; after a bounded time all goes on as before."""
        capacity = self.backend.capacity
        if capacity is None or self._adapter.slots is None or not self._may_hold:
            return False
        self._hold_at = trio.current_time() + HOLD_GAP_S
        self._log.info("requests wait for a moment, so that the runtime can be asked what it could not tell before")
        self._engine.post(BackendDown())
        await trio.lowlevel.checkpoint()
        if await self._engine.sight.calm_down(capacity):
            return True
        self._engine.post(BackendUp(capacity.limits))
        return False

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
        self._changed_process = False
        now, before = trio.current_time(), self.backend.capacity
        self._hold_at = now + HOLD_AFTER_S if before is None else max(now + HOLD_AFTER_S, self._hold_at)
        if before is not None and self._adapter.slots is not None:  # nobody is let in while slots may be touched
            self._engine.post(BackendDown())
            await trio.lowlevel.checkpoint()
            await self._engine.sight.let_start()
        away = before is not None and self.backend.state not in (Health.UP, Health.SLEEPING)
        try:
            report = await self._capacity()
            if self._adapter.slots is not None and (before is None or report.process != before.process):
                with trio.move_on_after(LEFTOVERS_S_MAX):
                    while not report.settled:
                        await trio.sleep(LOADING_POLL_S)
                        report = await self._capacity()
        except KVStreamError as error:
            self._set(Health.DOWN, error.message)
            return
        if report == before and self.backend.state == state and not report.settled:
            self._engine.post(BackendUp(report.limits))
            return  # asked again, and it still cannot tell more
        fresh = before is not None and (
            before.instance != report.instance or not report.instance or before.process != report.process)
        for note in report.notes:
            self._log.info("capacity: %s", note)
        limits = report.limits
        self._log.info("backend up: %s, %d seats, %d pages of %d tokens (%s)", limits.mode.value, limits.seats,
                       limits.pages, limits.page_tokens, limits.source)
        events = await self._engine.sight.check(report, sleeping=state == Health.SLEEPING)
        self.backend = BackendState(state, trio.current_time(), "", report)
        self.announce()
        with trio.move_on_after(RECOUNT_S_MAX):
            await self._engine.recount_waiting()
        if away:
            self._engine.backend_returned()
        for event in (BackendUp(limits, fresh=fresh, ramp=away), *events):
            self._engine.post(event)  # in one step: the first request that is let in knows the slots already

    async def _capacity(self) -> CapacityReport:
        replies = await ask_rounds(self._upstream, self._adapter.capacity_calls, timeout_s=CAPACITY_TIMEOUT_S)
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

    def other_process(self) -> None:
        """The runtime was seen to be another process than the one whose answers we know: nobody is let in before it is
        known what this one holds."""
        if self.backend.state in (Health.UP, Health.SLEEPING) and not self._changed_process:
            self._changed_process = True
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
