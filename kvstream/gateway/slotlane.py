"""What is known of the slots of one lane's runtime: how they may be used, of which process, where their files are.

Theory of operation. When a backend came up, before anybody is let in, ``learn`` finds out how its slots may be used
(``selfcheck``) and opens the store of that identity; the events that tell the scheduler go into the step that lets the
first request in. From then on the answers of *this process* are relied on. A small model restarts between two looks of
the watcher, and another one may answer then; so before anything is done that relies on what slots hold, and the runtime
was not heard for a second, it is asked whether it is still the same (``same_process``, one millisecond).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Literal

import trio

from ..adapters.base import Adapter, CapacityReport, Health
from ..adapters.slot_calls import Identity, PromptWork, SlotCalls
from ..core.messages import Event, Restored, SlotSaved, SlotsKnown, SlotsLook, SlotsLost, StoreLoaded
from ..core.types import SaveSpec, SlotRules
from ..errors import KVStreamError
from .inject_settings import InjectSettings
from .metrics_inject import How, InjectMeter
from .ports import Upstream
from .selfcheck import check_slots
from .slot_ports import SlotsFound, SlotStore
from .stream import Stream
from .verify import SlotVerify, Verdict

log = logging.getLogger("kvstream.slots")

SILENCE_S = 1.0  # the runtime was heard so lately that it is the one we know
ASK_TIMEOUT_S = 3.0
AGAIN_S = (3.0, 10.0, 30.0, 90.0, 300.0)  # after a check that was not settled; the last from then on
FORK_S = 60.0  # so long after a fork was saved, restoring it is what others waited for
FORKS_KEPT = 32
REREAD_S = 60.0
BUSY = SlotsFound("soft", None, "it had requests of ours when it was to be asked", settled=False)

OpenStore = Callable[[SlotsFound], SlotStore]


class SlotLane:
    """See the module. ``post`` hands an event to the scheduler, ``other_process()`` tells the watcher that the runtime
    is another one now, ``open_store(found)`` opens the files of an identity."""

    def __init__(self, adapter: Adapter, calls: SlotCalls, upstream: Upstream, settings: InjectSettings,
                 verify: SlotVerify, meter: InjectMeter, *, open_store: OpenStore,
                 post: Callable[[Event], None], other_process: Callable[[], None]) -> None:
        self._adapter = adapter
        self._calls = calls
        self._upstream = upstream
        self._open_store = open_store
        self._meter = meter
        self._post = post
        self._other_process = other_process
        self.verify = verify
        self.store: SlotStore | None = None
        self._identity: Identity | None = None  # of the store's files
        self._settings = settings
        self._tries = 0
        self._again_at = float("inf")
        self._process = ""
        self._forked: deque[tuple[str, float]] = deque(maxlen=FORKS_KEPT)  # files that others wait for, and since when
        self._heard_at = float("-inf")
        self._reread_at = 0.0

    @property
    def rules(self) -> SlotRules | None:
        """How slots may be used; None: not at all."""
        return self.verify.found.rules

    # --- finding out --------------------------------------------------------------------------------------------------

    @property
    def should_ask_again(self) -> bool:
        """What could not be found out may be known now. Asked ever more seldom, since it costs the runtime some work.
        """
        return not self.verify.found.settled and trio.current_time() >= self._again_at

    def is_new(self, report: CapacityReport) -> bool:
        """Whether this is another process than the one that was asked before."""
        return not report.process or report.process != self._process

    async def learn(self, report: CapacityReport, *, sleeping: bool, quiet: bool) -> list[Event]:
        """The backend came up. What the scheduler has to know, to be posted after ``BackendUp``. ``quiet``: nothing of
        ours runs there, and nothing will before this returns; else it is not asked.

        *Errors*: none. *Cancellation*: safe.
        """
        same = not self.is_new(report)
        if same and (self.verify.found.settled or not quiet):
            return []  # what is believed still holds
        self._process = report.process
        self._tries = self._tries if same else 0
        found = BUSY
        if quiet:
            found = await check_slots(self._adapter, self._upstream, self._settings, report, sleeping=sleeping,
                                      tries=self._tries)
        self._tries = 0 if found.settled else self._tries + 1
        self._again_at = trio.current_time() + AGAIN_S[min(self._tries, len(AGAIN_S)) - 1]
        if found.settled:
            self.heard()
        return await self._enter(self.verify.enter(found, fresh=not same))

    async def _enter(self, found: SlotsFound) -> list[Event]:
        if found.rules is None:
            return [SlotsKnown(None)]
        if self.store is None or self._identity != found.identity:
            self._close_store()
            self.store, self._identity = self._open_store(found), found.identity
        events: list[Event] = [SlotsKnown(found.rules), StoreLoaded(tuple(await self.store.load()))]
        look = await self.look()
        return events if look is None else [*events, look]

    async def beat(self, ours: Callable[[], int] | None) -> None:
        """The watcher's heartbeat while the backend is up; see :meth:`SlotVerify.beat`. *Cancellation*: safe."""
        await self._reread()
        if self.verify.found.settled:
            await self._heed(await self.verify.beat(ours))

    async def _reread(self) -> None:
        """Once in a while, and after a file that could not be used: are those that we offer still there?"""
        now = trio.current_time()
        if self.store is None or self.rules is None or now < self._reread_at:
            return
        self._reread_at = now + REREAD_S
        store = self.store
        entries = await store.reread()
        if entries is not None and store is self.store:
            log.info("somebody deleted files of saved KV; %d are left", len(entries))
            self._post(StoreLoaded(tuple(entries)))

    def slots_seen(self, ours: int, working: int) -> None:
        """Somebody looked; see :meth:`SlotVerify.slots_seen`."""
        verdict = self.verify.slots_seen(ours, working)
        if verdict is not None:
            self._post(verdict)

    async def _heed(self, verdict: Verdict) -> None:
        if isinstance(verdict, SlotsKnown) and verdict.rules is not None:  # a pause is over
            for event in await self._enter(self.verify.found):
                self._post(event)
        elif verdict is not None:
            self._post(verdict)

    def _close_store(self) -> None:
        if self.store is not None:
            self.store.close()
            self.store = None

    def close(self) -> None:
        """The lane ends."""
        self._close_store()

    # --- is it still the same? ----------------------------------------------------------------------------------------

    def heard(self) -> None:
        """The runtime whose answers we know has answered."""
        self._heard_at = trio.current_time()

    @property
    def silent(self) -> bool:
        """It was not heard for so long that it may be another one by now."""
        return trio.current_time() - self._heard_at >= SILENCE_S

    @property
    def process(self) -> str:
        """Which process our beliefs are of; empty where that cannot be known."""
        return self._process

    async def same_process(self, since: str | None = None) -> bool:
        """Whether what we believe of its slots is of this process, awake. If not, everybody has been told. With
        ``since`` it is asked even if it was heard just now, and must still be that one.

        *Errors*: none; a runtime that does not answer is taken to be the same, the call itself will show.
        *Cancellation*: safe.
        """
        if since is not None and self._process != since:
            return False
        call = self._adapter.process()
        if call is None or self.rules is None or not (self.silent or since is not None):
            return True
        try:
            reply = await self._upstream.request(call, timeout_s=ASK_TIMEOUT_S)
        except KVStreamError:
            return True
        process = self._adapter.read_process(reply)
        if process and self._process and process != self._process:
            log.info("the runtime is another process than before; nothing is relied on that its slots held")
            self._lost("restart")
            self._other_process()
            return False
        if self._adapter.read_health(reply) == Health.SLEEPING:
            self.slept()
            return False
        self.heard()
        return True

    def slept(self) -> None:
        """The runtime sleeps, or slept: its slots are empty."""
        self._heard_at = trio.current_time()  # it is asked once: whoever comes now wakes it
        self._lost("sleep")

    def _lost(self, why: Literal["restart", "sleep"]) -> None:
        self._meter.slots_lost(why)
        self._post(SlotsLost())

    async def look(self) -> SlotsLook | None:
        """What the slots hold now. *Errors*: none; None where it cannot be seen. *Cancellation*: safe."""
        try:
            rows = self._calls.read_look(await self._upstream.request(self._calls.look(), timeout_s=ASK_TIMEOUT_S))
        except KVStreamError:
            return None
        if rows is None:
            return None
        return SlotsLook(tuple(row.tokens for row in rows), frozenset(row.slot for row in rows if row.busy))

    # --- what the worker tells ----------------------------------------------------------------------------------------

    def bytes_of(self, tokens: int) -> int:
        """About how large a file of so many tokens gets; 0 where nobody knows."""
        rules = self.rules
        return 0 if rules is None else rules.fixed_bytes + round(rules.token_bytes * tokens)

    def saved(self, spec: SaveSpec, event: SlotSaved) -> None:
        """A save ended."""
        if spec.why == "fork" and event.ok:
            self._forked.append((spec.name, trio.current_time()))
        self._meter.saved(spec.why, ok=event.ok, bytes=event.bytes, seconds=event.seconds)

    def restored(self, event: Restored) -> None:
        """A restore ended."""
        if not event.ok:
            self._reread_at = 0.0
        self._meter.restored(ok=event.ok, bytes=event.bytes, seconds=event.seconds)

    def admitted(self, stream: Stream) -> None:
        """What a request's plan said was done: it is sent now."""
        how = self._how(stream)
        self._meter.admitted(how)
        if not stream.preempted:
            stream.how = how

    def _how(self, stream: Stream) -> How:
        plan = stream.lease.plan if stream.lease is not None else None
        if plan is not None and stream.restored:
            since = trio.current_time() - FORK_S
            return "forked" if any(name == plan.restore and at >= since for name, at in self._forked) else "restored"
        if plan is None or plan.slot is None:
            return "unpinned"
        return "reused" if plan.tokens_cached and plan.restore is None else "cold"

    def prompt_read(self, work: PromptWork) -> None:
        """A call's prompt was read to its end, and the runtime told what it found in its cache."""
        self._meter.prompt_read(cached=work.cached, computed=work.computed)

    def prompt_expected(self, stream: Stream) -> None:
        """The same for an answer that was broken off, whose prompt had been read."""
        cached = stream.lease.tokens_cached if stream.lease is not None else 0
        self._meter.prompt_read(cached=cached, computed=stream.tokens_prompt - cached, source="expected")

    def promise_seen(self, stream: Stream, work: PromptWork) -> None:
        """The first call of a request told how much of what it was promised was there."""
        plan = stream.lease.plan if stream.lease is not None else None
        if plan is None or (plan.restore is not None and not stream.restored):
            return
        exact = stream.asked is not None and stream.asked.exact
        verdict = self.verify.seen("restored" if stream.restored else "reused", promised=plan.tokens_cached,
                                   cached=work.cached, exact=exact)
        if verdict is not None:
            self._post(verdict)
