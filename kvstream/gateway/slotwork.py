"""Carries out what the scheduler wants done in the runtime's slots.

Theory of operation. A granted request comes with a ``SlotPlan``. Its steps are done in order before its pump sends it,
by the request's own task; each slot call is a job that ends even if the request leaves (``slotjobs``), and reports its
event. A step that fails costs the request its time and nothing else: what it should have brought is computed.

::

    life -> save what the slot holds -> erase -> restore -> read the prompt, ask the scheduler -> send, pinned
     |                                                            (its answer may be: save first)
     another process answers: back to its place in the queue, what it relied on is gone

Where requests cannot be pinned (a runtime that empties idle slots when a request starts) starts are serialised: a
request restores, is sent at once, and the next one waits until its headers came. A prompt that is read first is such a
request: who comes while it is read need not wait for its end, only for what is done with its slot after that.

``read_first`` is a call of its own that reads the prompt and answers nothing. To the rest of the gateway it is this
request's prefill: it is watched as such, and when it is broken off the slot is watched until it is idle.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import trio
from attrs import frozen

from ..adapters.base import Failed
from ..adapters.slot_calls import PromptWork, SlotCalls, SlotDone
from ..core.messages import Event, Proceed, PromptRead, Restored, SaveSlot, SlotSaved, SlotStarted, SlotWritten
from ..core.types import RequestId, SaveSpec, SlotPlan
from ..errors import BackendUnavailableError, StoreError
from .inject_settings import InjectSettings
from .ports import Upstream
from .readprompt import PromptReader
from .slot_ports import SlotStore
from .slotjobs import Job, SlotJobs
from .slotlane import SlotLane
from .stream import Stream

log = logging.getLogger("kvstream.slots")

SAVES_AT_ONCE = 2


@frozen
class Opening:
    """Where a request is sent after its plan: pinned to ``slot``, None for any. ``read``: what reading its prompt
    beforehand cost."""

    slot: int | None = None
    read: PromptWork | None = None


UNPLANNED = Opening()


@frozen
class _Written:
    """A file that the runtime wrote for ``store``, and how long that took."""

    store: SlotStore
    done: SlotDone
    seconds: float


class SlotWork:
    """See the module. ``post`` hands an event to the scheduler; ``owned()`` are the slots that somebody was pinned to
    and may be at work in."""

    def __init__(self, calls: SlotCalls, upstream: Upstream, settings: InjectSettings, lane: SlotLane, *,
                 reader: PromptReader, post: Callable[[Event], None], owned: Callable[[], frozenset[int]],
                 raise_bugs: bool) -> None:
        self._calls = calls
        self._settings = settings
        self._lane = lane
        self._reader = reader
        self._post = post
        self._owned = owned
        self.jobs = SlotJobs(upstream, calls, call_s_max=settings.call_s_max, raise_bugs=raise_bugs)
        self._saves = trio.CapacityLimiter(SAVES_AT_ONCE)
        self._start = trio.Lock()
        self.refused = False  # the last save met nobody at the runtime's address
        self._answers: dict[RequestId, trio.MemorySendChannel[Proceed]] = {}
        self._read_into: dict[RequestId, int] = {}  # idle slots that the runtime chose, until their request has started

    # --- a request's plan ---------------------------------------------------------------------------------------------

    async def open(self, stream: Stream) -> Opening | None:
        """Carry out the plan of a granted request. None: what it relies on is gone, let it be planned again.

        *Errors*: ``KVStreamError`` of a runtime that broke off reading the prompt. *Cancellation*: safe; a job that
        was begun goes on, and is in ``jobs.running`` under the slot of ``stream.lease``.
        *Resource handling*: the start lock, if there is one, is given back by :meth:`started` or :meth:`over`.
        """
        lease, rules = stream.lease, self._lane.rules
        plan = lease.plan if lease is not None else None
        if rules is None:
            return UNPLANNED
        if not rules.pinned:
            await self._start.acquire()  # this task is its owner until the headers come, or its leg is over
        if plan is None:
            return UNPLANNED
        if (plan.tokens_cached or plan.restore) and not await self._lane.same_process():
            return None
        if plan.slot is None:
            return await self._open_unpinned(stream, plan)
        slot = stream.slot = plan.slot
        await self.jobs.wait(slot)  # it may still be being emptied for somebody else
        if plan.save is not None:
            spec = plan.save
            await self.jobs.do(slot, lambda job: self._save_first(job, spec, stream.rid))
        for other in plan.erase:
            if other not in self._owned() and other not in self.jobs.running:  # else it was given away meanwhile
                await self.jobs.do(other, self._erase)
        if plan.restore is not None:
            name = plan.restore
            stream.restored = bool(await self.jobs.do(slot, lambda job: self._restore(job, name, stream.rid)))
        if plan.read_first and not await self._has_read(stream, slot):
            return None
        return Opening(stream.slot, stream.read)

    async def _open_unpinned(self, stream: Stream, plan: SlotPlan) -> Opening | None:
        """The runtime will choose the slot: what is restored goes into one that is idle now, and what is erased is."""
        look = await self._lane.look() if plan.erase or plan.restore is not None else None
        idle = [] if look is None else [
            slot for slot in range(len(look.tokens)) if slot not in look.busy and slot not in self.jobs.running
            and slot not in self._read_into.values()]
        for other in plan.erase:
            if other in idle:
                await self.jobs.do(other, self._erase)
        if plan.restore is not None and look is not None and idle:
            name, slot = plan.restore, min(idle, key=lambda slot: look.tokens[slot] or 0)
            stream.restored = bool(await self.jobs.do(slot, lambda job: self._restore(job, name, stream.rid)))
        if plan.read_first and not await self._has_read(stream, None):
            return None
        return Opening(None, stream.read)

    async def _has_read(self, stream: Stream, slot: int | None) -> bool:
        """Read the prompt. False: that broke off since the runtime is another process now, which nobody is to be sent
        to before it is known."""
        process = self._lane.process
        stream.read = await self._read_first(stream, slot)
        return stream.read is not None or await self._lane.same_process(process)

    async def _read_first(self, stream: Stream, slot: int | None) -> PromptWork | None:
        ids = stream.prompt.ids if stream.prompt is not None else None
        if not ids:
            return None
        serialised = self._has_start
        work = await self._reader.read(stream, ids, stream.slot, started=self._release)
        if work is not None and work.slot is not None and serialised:
            self._read_into[stream.rid] = work.slot
        if serialised and not self._has_start:
            await self._start.acquire()
        if work is None:
            return None
        self._lane.heard()
        self._lane.prompt_read(work)
        self._lane.promise_seen(stream, work)
        at = work.slot if slot is None else slot
        send, receive = trio.open_memory_channel[Proceed](1)
        self._answers[stream.rid] = send
        try:
            self._post(PromptRead(stream.rid, work.cached, work.computed, work.seconds or 0.0))
            with trio.move_on_after(self._settings.call_s_max):
                spec = (await receive.receive()).save
                if spec is not None and at is not None:
                    await self.jobs.do(at, lambda job: self._save(job, spec, stream.rid))
                elif spec is not None:
                    self._post(SlotSaved(-1, spec.name, False, rid=stream.rid))
        finally:
            del self._answers[stream.rid]
        return work

    def proceed(self, action: Proceed) -> None:
        """The scheduler's answer to ``PromptRead``."""
        waiting = self._answers.get(action.rid)
        if waiting is not None:
            waiting.send_nowait(action)

    def started(self, stream: Stream) -> None:
        """Its headers came. Called in the task that called :meth:`open`."""
        self.over(stream)
        self._lane.heard()
        self._post(SlotStarted(stream.rid))

    def over(self, stream: Stream) -> None:
        """The leg that was opened is over, whatever it was. Called in the same task; synchronous."""
        self._read_into.pop(stream.rid, None)
        self._release()

    @property
    def _has_start(self) -> bool:
        return self._start.statistics().owner is trio.lowlevel.current_task()

    def _release(self) -> None:
        if self._has_start:
            self._start.release()

    # --- what is done with a slot, in a job ---------------------------------------------------------------------------

    async def _save(self, job: Job, spec: SaveSpec, rid: RequestId | None) -> None:
        written = await self._write(job, spec, rid)
        if written is not None:
            await self._keep(job.slot, spec, rid, written)

    async def _save_first(self, job: Job, spec: SaveSpec, rid: RequestId) -> None:
        """What a request displaces: it goes on when that is written, and the file is looked at meanwhile. A fork's file
        is what others wait for, and they would not any more if the request were seen to start before it is there."""
        if spec.why == "fork":
            await self._save(job, spec, rid)
            return
        written = await self._write(job, spec, rid)
        if written is not None:
            self._post(SlotWritten(rid, spec.name))  # before the job is over, and with it perhaps the request
            self.jobs.aside(partial(self._keep, job.slot, spec, None, written))  # it may give way before that is told

    async def _write(self, job: Job, spec: SaveSpec, rid: RequestId | None) -> _Written | None:
        """Let the runtime write what the slot holds. None: it did not, and that was told."""
        began, store, written = trio.current_time(), self._lane.store, None
        try:
            if store is None:
                return None
            file = store.temporary(spec.name, self._lane.bytes_of(spec.tokens))
            done = await self.jobs.call(job, self._calls.save(job.slot, file))
            if isinstance(done, Failed):
                self._save_failed(spec, job, done)
                return None
            self._lane.heard()
            self.refused = False
            seconds = trio.current_time() - began if done.seconds is None else done.seconds
            written = _Written(store, done, seconds)
        except StoreError as error:
            log.debug("slot %d is not saved: %s", job.slot, error.message)
        finally:
            if written is None:
                self._save_over(store, spec, SlotSaved(job.slot, spec.name, False, rid=rid))
        return written

    async def _keep(self, slot: int, spec: SaveSpec, rid: RequestId | None, written: _Written) -> None:
        """Look at what was written and keep it."""
        event = SlotSaved(slot, spec.name, False, rid=rid)
        try:
            kept = await written.store.keep(spec, written.done)
            event = SlotSaved(slot, spec.name, True, kept.tokens, kept.bytes, written.seconds, kept.keys, rid)
        except StoreError as error:
            log.debug("slot %d is not saved: %s", slot, error.message)
        finally:
            self._save_over(written.store, spec, event)

    def _save_over(self, store: SlotStore | None, spec: SaveSpec, event: SlotSaved) -> None:
        if store is not None:
            store.abandon(spec.name)  # nothing, once it is kept
        self._lane.saved(spec, event)
        self._post(event)

    def _save_failed(self, spec: SaveSpec, job: Job, failed: Failed) -> None:
        self.refused = failed.kind == BackendUnavailableError.code and not job.lost
        if self.refused:
            log.info("slot %d was not saved: the server is away", job.slot)
            return  # which says nothing about its disk
        log.info("slot %d was not saved: %s", job.slot, failed.message)
        if self._lane.store is not None and not job.lost:
            self._lane.store.failed(spec.name, failed.message)

    async def _erase(self, job: Job) -> None:
        done = await self.jobs.call(job, self._calls.erase(job.slot))
        if isinstance(done, Failed):
            log.info("slot %d was not erased: %s", job.slot, done.message)

    async def _restore(self, job: Job, name: str, rid: RequestId) -> bool:
        began, store = trio.current_time(), self._lane.store
        event, drop = Restored(rid, name, False), True
        try:
            if store is None:
                return False
            file = await store.offer(name)
            done = await self.jobs.call(job, self._calls.restore(job.slot, file))
            if isinstance(done, Failed):
                drop = bool(done.status) or job.lost  # else nobody was there to read it
                log.warning("the saved KV %s could not be restored%s: %s", name,
                            " and is dropped" if drop else "", done.message)
                return False
            self._lane.heard()
            seconds = trio.current_time() - began if done.seconds is None else done.seconds
            event = Restored(rid, name, store.restored(name, done), done.bytes, seconds)
        except StoreError as error:
            log.info("slot %d is not restored: %s", job.slot, error.message)
        finally:
            if store is not None and not event.ok and drop:
                store.forget(name, "bad")
            self._lane.restored(event)
            self._post(event)
        return event.ok

    # --- without a request --------------------------------------------------------------------------------------------

    def save(self, action: SaveSlot) -> None:
        """Save a slot in the background, a few at a time."""
        async def work(job: Job) -> None:
            async with self._saves:
                await self._save(job, action.spec, action.rid)

        if action.slot in self.jobs.running:
            self._post(SlotSaved(action.slot, action.spec.name, False, rid=action.rid))
        else:
            self.jobs.start(action.slot, work)

    def forget(self, name: str) -> None:
        """Delete a file. Synchronous, since what follows in the same step counts on its room."""
        if self._lane.store is not None:
            self._lane.store.forget(name)
