"""What those who watch a runtime's slots see of their engine: who is there, what is being done, what is wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import trio

from ..adapters.base import CapacityReport
from ..core.messages import Event
from ..core.scheduler import Scheduler
from ..core.types import PoolMode, RequestId
from .draining import DrainingSeats
from .drift import Drifts
from .inject import Inject
from .slotwatch import AtWork
from .stream import Stream

QUIET_S_MAX = 5.0
QUIET_POLL_S = 0.05
CALM_S_MAX = 30.0  # while all slots are at work closed doors cost nobody anything


class SlotSight:
    """It is a ``slotwatch.SlotsEngine`` and a ``health.WatchedSlots``. ``calls`` changes whenever a call goes to the
    runtime, or is over. ``askable``: looking at slots keeps nobody's leaving from being noticed."""

    def __init__(self, live: Mapping[RequestId, Stream], draining: DrainingSeats, inject: Inject, scheduler: Scheduler,
                 drifts: Drifts, post: Callable[[Event], None], *, askable: bool) -> None:
        self._live = live
        self._draining = draining
        self._inject = inject
        self._scheduler = scheduler
        self._drifts = drifts
        self._askable = askable
        self.post = post
        self.calls = 0

    async def arrived(self) -> None:
        """A request came after a silence, before its prompt is counted: is what we believe of the slots still so, and
        is somebody else at work there? A look tells, while nothing of ours is; a pin to his slot would meet his answer.

        *Errors*: none. *Cancellation*: safe.
        """
        silent = self._inject.silent
        await self._inject.check_process()
        if not (silent and self._askable and self._is_quiet):
            return
        moves, look = self.moves, await self._inject.look()
        if look is not None and self._is_quiet and self.moves == moves:
            self.post(look)
            self.slots_seen(len(look.busy))

    @property
    def _is_quiet(self) -> bool:
        return not (self._seats_used() or self._inject.jobs or self._draining)

    # --- for those who look at slots ----------------------------------------------------------------------------------

    def slot_view(self) -> AtWork:
        """See :class:`slotwatch.AtWork`."""
        return self._draining.view()

    def seat_idle(self, rid: RequestId, *, capped: bool) -> None:
        """A draining request's slot is idle, or has been given up waiting for (``capped``)."""
        self._draining.idle(rid, capped=capped)

    def slots_seen(self, working: int) -> None:
        """So many slots of the runtime work now."""
        ours = self._seats_used()
        self._drifts.slots_seen(ours, working)
        self._inject.slots_seen(ours, working)

    def _seats_used(self) -> int:
        return self._scheduler.snapshot(trio.current_time()).seats.used

    @property
    def moves(self) -> int:
        """See :class:`slotwatch.SlotsEngine`."""
        return self.calls + self._inject.begun

    @property
    def wants_look(self) -> bool:
        """Whether the scheduler wants to know what the slots hold, and nothing is being done with any."""
        return self._scheduler.wants_look and not self._inject.jobs

    # --- for the watcher of the backend -------------------------------------------------------------------------------

    async def check(self, report: CapacityReport, *, sleeping: bool) -> Sequence[Event]:
        """See :meth:`SlotLane.learn`. Who was granted and turned away waits for what this returns.

        Under load an unsettled check is not made again before the load is over. So what was at work in the process
        before gets a moment to find out that it is no more: in this one there is nothing of ours.
        """
        if self._inject.is_new(report):
            with trio.move_on_after(QUIET_S_MAX):
                while not self._is_free_of_ours:
                    await trio.sleep(QUIET_POLL_S)
        beside = report.limits.mode is PoolMode.SPLIT and self._is_placed  # they are in slots, and take nothing of ours
        return await self._inject.learn(report, sleeping=sleeping, quiet=self._is_free_of_ours or beside)

    async def calm_down(self, report: CapacityReport) -> bool:
        """Nobody is let in: wait until nothing of ours is there, or what is there leaves a slot idle, where slots share
        no pool. False: not in time. *Errors*: none. *Cancellation*: safe."""
        shared = report.settled and report.limits.mode is PoolMode.UNIFIED
        with trio.move_on_after(QUIET_S_MAX if shared else CALM_S_MAX):
            while not self._is_free_of_ours:
                if not shared and self._is_placed and await self._inject.sees_idle() and self._is_placed:
                    return True
                await trio.sleep(QUIET_POLL_S * 4)
            return True
        return False

    async def let_start(self) -> None:
        """Nobody is let in: wait until nobody is on his way any more, for a slot that looks idle may be his, and until
        what was written is kept, or a list of the files would lack it. Bounded. *Errors*: none. *Cancellation*: safe.
        """
        with trio.move_on_after(QUIET_S_MAX):
            while not self._has_started or self._inject.asides:
                await trio.sleep(QUIET_POLL_S)

    @property
    def _is_placed(self) -> bool:
        """Whether the runtime has given each of our requests its slot, and none has left one that is still at work."""
        return not self._draining and self._has_started

    @property
    def _has_started(self) -> bool:
        """Whether whoever was let in has his slot, or goes to none."""
        return not self._inject.jobs and all(
            stream.scope is None or stream.answered or (stream.loading_since is not None and not stream.sent)
            for stream in self._live.values())

    @property
    def _is_free_of_ours(self) -> bool:
        return not self._draining and not self._inject.jobs and all(
            stream.scope is None or (stream.loading_since is not None and not stream.sent)
            for stream in self._live.values())

    async def beat(self) -> None:
        """The watcher's heartbeat, while the backend is up. A cancelled prompt is left in peace."""
        waiting = any(not seat.flowing for seat in self._draining.view().draining)
        await self._inject.beat(self._seats_used if self._askable and not waiting else None)

    @property
    def unsettled(self) -> bool:
        """Whether something about the slots could not be found out, and is to be asked again now."""
        return self._inject.should_ask_again

    def slept(self) -> None:
        """The runtime has gone to sleep."""
        self._inject.slept()
