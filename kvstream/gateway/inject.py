"""Hard inject of one engine: its parts put together, and nothing at all where the runtime has no slots.

``slotlane`` knows how the slots may be used, ``slotwork`` does what the scheduler plans with them, ``slotjobs`` makes
the calls. The engine talks to all of them here, so that a lane without slots has one object that does nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import trio

from ..adapters.base import Adapter, CapacityReport, ProxyRequest, UsageNumbers
from ..adapters.slot_calls import PromptWork
from ..core.messages import Action, CacheSeen, Event, Forget, Proceed, SaveSlot, SlotsLook
from .count import PromptCount
from .kvplace import open_store
from .lane_settings import EngineSettings
from .metrics import Metrics
from .metrics_inject import InjectMeter
from .ports import Upstream
from .readprompt import PromptReader
from .slot_ports import SlotMode, SlotsFound, SlotStore
from .slotjobs import Job
from .slotlane import SlotLane
from .slotwork import UNPLANNED, Opening, SlotWork
from .stream import Stream
from .verify import SlotVerify

log = logging.getLogger("kvstream.slots")

TICK_S = 0.01
NO_JOBS: Mapping[int, Job] = MappingProxyType({})


class Inject:
    """See the module. ``post`` hands an event to the scheduler; ``other_process``, ``progress``, ``owned`` and
    ``is_away`` are the engine's: see ``SlotLane``, ``PromptReader`` and ``SlotWork``."""

    def __init__(self, adapter: Adapter, upstream: Upstream, settings: EngineSettings, metrics: Metrics, *, name: str,
                 post: Callable[[Event], None], other_process: Callable[[], None],
                 progress: Callable[[Stream], None], owned: Callable[[], frozenset[int]],
                 is_away: Callable[[], bool] = lambda: False) -> None:
        self._post = post
        self._is_away = is_away
        self._adapter = adapter
        self._drain_save_s = settings.inject.drain_save_s if settings.inject is not None else 0.0
        self.lane: SlotLane | None = None
        self.work: SlotWork | None = None
        self.meter: InjectMeter | None = None
        calls, inject = adapter.slots, settings.inject
        if calls is None or inject is None:
            return
        meter = self.meter = metrics.inject.lane(name)
        self.lane = SlotLane(
            adapter, calls, upstream, inject, SlotVerify(adapter, upstream, inject, meter, name), meter,
            open_store=partial(_open_store, settings, adapter.base_url, meter), post=post,
            other_process=other_process)
        reader = PromptReader(upstream, calls, progress=progress, silence_s=settings.times.first_event_s,
                              idle_s_max=settings.slot_idle_s_max)
        self.work = SlotWork(calls, upstream, inject, self.lane, reader=reader, post=post, owned=owned,
                             raise_bugs=settings.raise_bugs)

    async def run(self) -> None:
        """Task body: for ever."""
        if self.work is None or self.lane is None:
            return
        try:
            await self.work.jobs.run()
        finally:
            self.lane.close()

    @property
    def active(self) -> bool:
        """Whether slots are used."""
        return self.lane is not None and self.lane.rules is not None

    @property
    def jobs(self) -> Mapping[int, Job]:
        """What is being done with slots now."""
        return self.work.jobs.running if self.work is not None else NO_JOBS

    @property
    def asides(self) -> int:
        """How many files are looked at beside the requests that displaced what is in them."""
        return self.work.jobs.asides if self.work is not None else 0

    @property
    def begun(self) -> int:
        """How many jobs were begun so far."""
        return self.work.jobs.begun if self.work is not None else 0

    def status(self, now: float) -> tuple[Mapping[str, Any] | None, str]:
        """(what ``SlotVerify.status`` tells, or None, and then why slots are never asked about)."""
        if self.lane is not None:
            told, store = self.lane.verify.status(now), self.lane.store
            off = store.why_off if store is not None else ""
            if self.lane.verify.is_unchecked and self._is_away():
                told = {**told, "why": "unknown: the server is away"}
            return {**told, "notes": [*told["notes"], *([f"nothing is saved now: {off}"] if off else [])]}, ""
        return None, "this kind of backend has no slots" if self._adapter.slots is None else "inject.mode is off"

    def totals(self, streams: Iterable[Stream]) -> dict[str, Any] | None:
        """What saved KV achieved since the start, and how many of ``streams`` stand swapped out now; None without
        slots."""
        if self.meter is None:
            return None
        return {**self.meter.totals(), "swapped_out": sum(stream.swapped_out for stream in streams)}

    @property
    def mode(self) -> SlotMode:
        """How slots are used now."""
        return "soft" if self.lane is None else self.lane.verify.found.mode

    # --- the backend --------------------------------------------------------------------------------------------------

    @property
    def should_ask_again(self) -> bool:
        """Whether what could not be found out may be known now."""
        return self.lane is not None and self.lane.should_ask_again

    async def beat(self, ours: Callable[[], int] | None) -> None:
        """See :class:`SlotLane`."""
        if self.lane is not None:
            await self.lane.beat(ours)

    def is_new(self, report: CapacityReport) -> bool:
        """Whether this is another process than the one whose slots are known."""
        return self.lane is not None and self.lane.is_new(report)

    async def learn(self, report: CapacityReport, *, sleeping: bool, quiet: bool) -> list[Event]:
        """See :class:`SlotLane`."""
        return [] if self.lane is None else await self.lane.learn(report, sleeping=sleeping, quiet=quiet)

    def slept(self) -> None:
        """The runtime has gone to sleep."""
        if self.active and self.lane is not None:
            self.lane.slept()

    async def check_process(self) -> None:
        """A request came: before its prompt is counted, which wakes a sleeping runtime, see whether what we believe of
        the slots still holds. *Errors*: none."""
        if self.lane is not None:
            await self.lane.same_process()

    @property
    def silent(self) -> bool:
        """Whether slots are used, and the runtime was not heard for so long that it may be another by now."""
        return self.active and self.lane is not None and self.lane.silent

    async def look(self) -> SlotsLook | None:
        """See :meth:`SlotLane.look`."""
        return await self.lane.look() if self.active and self.lane is not None else None

    async def sees_idle(self) -> bool:
        """Whether a slot is idle, as far as can be seen. *Errors*: none."""
        look = None if self.lane is None else await self.lane.look()
        return look is not None and len(look.busy) < len(look.tokens)

    def slots_seen(self, ours: int, working: int) -> None:
        """So many slots work, and so many seats are taken."""
        if self.lane is not None:
            self.lane.slots_seen(ours, working)

    # --- requests -----------------------------------------------------------------------------------------------------

    def is_pinnable(self, request: ProxyRequest) -> bool:
        """Whether it may be told its slot."""
        calls = self._adapter.slots
        if calls is None or self.lane is None:
            return False
        identity = self.lane.verify.found.identity
        return calls.pinnable(request, router=identity is not None and identity.router)

    def is_exact(self, request: ProxyRequest, count: PromptCount) -> bool:
        """Whether a promise about its pages can be kept."""
        return self._adapter.slots is not None and count.exact and self._adapter.slots.reuses(request)

    async def open(self, stream: Stream) -> Opening | None:
        """See :class:`SlotWork`."""
        if self.work is None or self.lane is None:
            return UNPLANNED
        opening = await self.work.open(stream)
        if opening is not None and self.active:
            self.lane.admitted(stream)
        return opening

    def started(self, stream: Stream) -> None:
        """Its headers came."""
        if self.work is not None:
            self.work.started(stream)

    def over(self, stream: Stream) -> None:
        """Its leg is over. Synchronous; before anything else is told about it."""
        if self.work is None or self.lane is None:
            return
        self.work.over(stream)
        if stream.completed:
            self.lane.heard()
            self._cache_seen(stream)
        elif stream.first_token is not None and stream.lease is not None:
            self.lane.prompt_expected(stream)

    def _cache_seen(self, stream: Stream) -> None:
        """What the runtime told of its cache, at the end of an answer."""
        calls, lane = self._adapter.slots, self.lane
        if calls is None or lane is None or stream.lease is None:
            return
        if stream.read is not None:  # what is told now is of both passes, and the first one has told
            lane.prompt_read(PromptWork(stream.read.cached + stream.read.computed - 1, 1, None))
            return
        if stream.said is not None and stream.said.decoder is not None:  # the numbers are those of all legs
            work = calls.prompt_work(stream.said.decoder.own)
            if work is not None:
                lane.prompt_read(work)
                self._post(CacheSeen(stream.rid, work.cached, work.cached + work.computed, work.seconds))
            return
        if stream.said is not None and stream.said.first is not None:  # of all legs, too
            lane.prompt_expected(stream)
            return
        work = calls.prompt_work(stream.usage_data) or calls.prompt_work(stream.last_data)
        if work is None:
            work = _work_of(stream.usage)
        if work is None:
            return
        lane.prompt_read(work)
        if lane.rules is not None:
            self._post(CacheSeen(stream.rid, work.cached, work.cached + work.computed, work.seconds))
            lane.promise_seen(stream, work)

    # --- actions ------------------------------------------------------------------------------------------------------

    def act(self, action: Action) -> bool:
        """Carry out an action that is about slots; False for any other."""
        if not isinstance(action, SaveSlot | Forget | Proceed):
            return False
        if self.work is not None:
            if isinstance(action, SaveSlot):
                self.work.save(action)
            elif isinstance(action, Forget):
                self.work.forget(action.name)
            else:
                self.work.proceed(action)
        return True

    async def wait_saved(self) -> None:
        """The lane is closing: wait until what its slots hold is saved as far as that is worth it, ``drain_save_s`` at
        most; say what came of it. *Cancellation*: safe; a save that is under way is not offered later."""
        if self.lane is None or self.meter is None:
            return
        before, began = self.meter.totals(), trio.current_time()
        bound = trio.CancelScope(deadline=began + self._drain_save_s)
        try:
            with bound:
                await self._wait_jobs()
        finally:
            why = self._why_unsaved(is_over=bound.cancelled_caught)
            log.info("%s", drain_words(before, self.meter.totals(), trio.current_time() - began, why))

    def _why_unsaved(self, *, is_over: bool) -> str:
        """Why there is nothing to save, or nothing can be. Where the time ``is_over`` it is that: a job may not even
        have begun."""
        if self._is_away() or (self.work is not None and self.work.refused):
            return "the server is away"
        if self.lane is None or self.lane.rules is None:
            told, why = self.status(trio.current_time())
            return str(told["why"]) if told is not None else why
        if is_over or self.jobs:
            return f"inject.drain_save_s = {self._drain_save_s:g} s are over"
        off = self.lane.store.why_off if self.lane.store is not None else ""
        return off or "its slots hold nothing that is worth it and not saved already"

    async def _wait_jobs(self) -> None:
        while True:
            await trio.sleep(TICK_S)  # the scheduler takes in what the last one told, and begins the next
            jobs = list(self.jobs.values())
            if jobs:
                await jobs[0].done.wait()
            elif not self.asides:
                return


def drain_words(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float, why: str) -> str:
    """What was saved between two ``InjectMeter.totals``; ``why`` nothing more was."""
    slots, size = (after[name].get("drain", 0) - before[name].get("drain", 0) for name in ("saves", "saved_bytes"))
    failed = after["saves_failed"] - before["saves_failed"]
    lost = f", {failed} could not be" if failed else ""
    if slots:
        what = "1 slot was" if slots == 1 else f"{slots} slots were"
        return f"{what} saved, {size / 2**20:,.1f} MiB in {seconds:.1f} s{lost}"
    return f"what the slots hold is not saved: {why}{lost}"


def _work_of(usage: UsageNumbers | None) -> PromptWork | None:
    if usage is None or usage.cached is None:
        return None
    return PromptWork(usage.cached, max(0, usage.prompt - usage.cached), None)


def _open_store(settings: EngineSettings, base_url: str, meter: InjectMeter, found: SlotsFound) -> SlotStore:
    assert settings.inject is not None
    return open_store(found, settings.inject, base_url, page_tokens=settings.query.page_tokens, meter=meter)
