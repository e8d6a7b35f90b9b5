"""Slot calls that are carried out to their end, whoever still waits for them.

Theory of operation. A runtime carries out a slot call also when nobody waits for it any more. So a request that leaves
in the middle of a restore must not take its slot with it: until the call has ended the slot is at work. A job therefore
runs in a nursery of the lane. Who waits for it may leave; what comes of it is told all the same, and only then is the
slot anybody else's. A job that does not end within ``call_s_max`` is *lost*: nobody knows what its slot holds.

At most one job runs per slot, since a slot has one owner at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import trio
from attrs import define, field

from ..adapters.base import Failed, HttpCall
from ..adapters.slot_calls import SlotCalls, SlotDone
from ..errors import BackendRefusedError, KVStreamError
from .ports import Upstream

log = logging.getLogger("kvstream.slots")

T = TypeVar("T")


@define(eq=False)
class Job:
    """Something that is being done with a slot. ``ended`` is called when it is over, with whether it was lost."""

    slot: int
    lost: bool = False
    done: trio.Event = field(factory=trio.Event)
    ended: list[Callable[[bool], None]] = field(factory=list)


class SlotJobs:
    """See the module. ``call_s_max`` bounds one slot call, in seconds; ``raise_bugs`` as in the engine's settings."""

    def __init__(self, upstream: Upstream, calls: SlotCalls, *, call_s_max: float, raise_bugs: bool = False) -> None:
        self._upstream = upstream
        self._calls = calls
        self._call_s_max = call_s_max
        self._raise_bugs = raise_bugs
        self._nursery: trio.Nursery | None = None
        self._running: dict[int, Job] = {}
        self.begun = 0
        self.asides = 0  # under way

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Task body: a place for jobs, for ever."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    @property
    def running(self) -> Mapping[int, Job]:
        """By slot. Read only."""
        return self._running

    def start(self, slot: int, work: Callable[[Job], Awaitable[None]]) -> Job:
        """Begin a job; it is in :attr:`running` when this returns, and until it is over."""
        assert self._nursery is not None and slot not in self._running, f"slot {slot} has a job already"
        job = self._running[slot] = Job(slot)
        self.begun += 1
        self._nursery.start_soon(self._run, job, work)
        return job

    def aside(self, work: Callable[[], Awaitable[None]]) -> None:
        """Begin something that has to end as well, and that no slot has to wait for."""
        assert self._nursery is not None
        self.asides += 1
        self._nursery.start_soon(self._run_aside, work)

    async def _run_aside(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception:
            log.exception("bug in what was left to do for a slot")
            if self._raise_bugs:
                raise
        finally:
            self.asides -= 1

    async def do(self, slot: int, work: Callable[[Job], Awaitable[T]]) -> T | None:
        """Do it, after what somebody who left still has done there, and wait for it. None where it failed by a bug.
        *Cancellation*: the waiting ends, the job goes on."""
        results: list[T] = []

        async def keep(job: Job) -> None:
            results.append(await work(job))

        await self.wait(slot)
        job = self.start(slot, keep)
        await job.done.wait()
        return results[0] if results else None

    async def wait(self, slot: int) -> None:
        """Wait until nothing is being done with a slot."""
        while (job := self._running.get(slot)) is not None:
            await job.done.wait()

    async def _run(self, job: Job, work: Callable[[Job], Awaitable[None]]) -> None:
        try:
            await work(job)
        except Exception:
            log.exception("bug in a job of slot %d", job.slot)
            job.lost = True
            if self._raise_bugs:
                raise
        finally:
            del self._running[job.slot]
            job.done.set()
            for tell in job.ended:
                tell(job.lost)

    async def call(self, job: Job, call: HttpCall) -> SlotDone | Failed:
        """One slot call. *Errors*: none; a call that was sent and not answered makes the job lost."""
        try:
            done = self._calls.read_done(await self._upstream.request(call, timeout_s=self._call_s_max))
        except KVStreamError as error:
            job.lost = job.lost or not isinstance(error, BackendRefusedError)  # it may still be carried out
            return Failed(error.code, error.message, 0)
        if isinstance(done, SlotDone) and done.slot != job.slot:
            return Failed("backend_protocol", f"asked for slot {job.slot}, it took slot {done.slot}", 0)
        return done
