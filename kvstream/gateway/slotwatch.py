"""Which slots of the runtime still work: turns cancelled requests back into free seats.

Theory of operation. A request that was pinned to a slot is watched by that slot's own row: when the row says idle, the
runtime is done with it. Of all others nobody knows the slot, and counting proves it: a started stream occupies a slot,
one still on its way may occupy one. So when of the slots that belong to nobody no more work than there are such started
streams and *other* draining requests, one draining request must be idle. A stream that ended at the runtime while its
last bytes are on their way to us would be counted as working; hence the short pause before the streams are counted. A
request whose headers never came may not have reached its slot when we looked, hence the second look, and for one that
was pinned, whose slot somebody else would be pinned to, ``UNHEARD_S``. Nor does the runtime take anything up while it
computes a batch, which on a CPU may last longer; so one that is at work must be seen to have computed something since.

With hard inject there is a second reason to look: the scheduler wants to know what slots hold and which are idle, after
requests that the runtime placed by itself, and after a seat that was given up waiting for (``SlotsLook``).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Protocol

import trio
from attrs import field, frozen

from ..adapters.base import Adapter, HttpCall, HttpReply
from ..core.messages import Event, SlotsLook
from ..core.types import RequestId
from ..errors import KVStreamError
from .ports import Upstream

PROBE_TIMEOUT_S = 3.0
SAMPLE_SETTLE_S = 0.01
# llama.cpp looks for a departed client after a second without any result in its queue, and an answer of /slots is one.
# While a prompt is read there are no others, so looking more often keeps the cancelled prefill going to its end
# (measured: 1,276 of 1,300 tokens computed when asked every 50 ms, 512, one batch, when asked every 1.5 s).
PREFILL_POLL_S_MIN = 1.25
# A request that was sent and given up before its headers came lies in the socket of the runtime, which reads it when
# one of its threads gets to run: on a busy machine after more than two looks. Whoever was pinned to its slot meanwhile
# would wait behind it, and with a RAM cache lose its state to it (T0). Seen at load six: pinned requests deferred.
UNHEARD_S = 2.0


@frozen
class DrainingSeat:
    """A request that ended at our side while the runtime may be at work on it, since Trio time ``since``.

    ``answered``: its headers had come. ``flowing``: so had its first token; until then the runtime is at the prompt.
    ``slot``: the one it was pinned to.
    """

    rid: RequestId
    answered: bool
    flowing: bool
    since: float
    slot: int | None = None


@frozen
class AtWork:
    """Who is at work in the runtime: streams whose headers came and whose end would be seen at once (not those whose
    pump waits for a slow reader: their slot may have been idle for long), each with the slot it was pinned to; and
    ended ones still draining. ``owned``: every slot that somebody was pinned to and may be at work in."""

    started: Mapping[RequestId, int | None]
    draining: tuple[DrainingSeat, ...]
    owned: frozenset[int] = field(factory=frozenset)


class SlotsEngine(Protocol):
    """What is needed of the engine."""

    def post(self, event: Event) -> None: ...
    def slot_view(self) -> AtWork: ...
    def seat_idle(self, rid: RequestId, *, capped: bool) -> None: ...
    def slots_seen(self, working: int) -> None: ...
    @property
    def wants_look(self) -> bool: ...
    @property
    def moves(self) -> int:
        """Changes whenever a call goes to a slot, or is over."""
        ...


class SlotWatch:
    """See the module. ``wanted`` is to be set when there is something to watch."""

    def __init__(self, adapter: Adapter, upstream: Upstream, engine: SlotsEngine, *, idle_poll_s: float,
                 idle_s_max: float) -> None:
        self._adapter = adapter
        self._upstream = upstream
        self._engine = engine
        self._idle_poll_s = idle_poll_s
        self._idle_s_max = idle_s_max
        self._work_then: dict[RequestId, Hashable | None] = {}  # of the unheard: what was computed when first looked at
        self.wanted = trio.Event()

    async def run(self) -> None:
        """Task body: while ended requests may still keep a slot busy, or somebody wants to know what slots hold, ask
        the runtime."""
        once_idle: frozenset[RequestId] = frozenset()
        looked_at: frozenset[RequestId] = frozenset()
        looked = False
        while True:
            draining = self._engine.slot_view().draining
            if not draining and not self._engine.wants_look:
                self.wanted, looked = trio.Event(), False
                await self.wanted.wait()
                continue
            # One early look costs a cancelled prefill nothing; it is the second within a second that does.
            waiting = looked or any(seat.rid in looked_at and not seat.flowing for seat in draining)
            await trio.sleep(max(self._idle_poll_s, PREFILL_POLL_S_MIN) if waiting else self._idle_poll_s)
            looked_at = frozenset(seat.rid for seat in self._engine.slot_view().draining)
            if looked_at:
                once_idle = await self._sample(once_idle)
            if self._engine.wants_look:
                looked = await self._look()

    async def _ask(self, call: HttpCall | None) -> HttpReply | None:
        if call is None:
            return None
        try:
            return await self._upstream.request(call, timeout_s=PROBE_TIMEOUT_S)
        except KVStreamError:
            return None  # a runtime that does not answer is not idle; a cap ends the wait

    async def _sample(self, once_idle: frozenset[RequestId]) -> frozenset[RequestId]:
        """Ask once, free what is idle. Returns the requests that looked idle but must be seen so twice."""
        before = self._engine.slot_view()
        reply = await self._ask(self._adapter.busy())
        tasks = self._adapter.read_busy(reply) if reply is not None else None
        work = self._adapter.read_work(reply) if reply is not None else None
        await trio.sleep(SAMPLE_SETTLE_S)
        if tasks is not None:
            self._engine.slots_seen(len(tasks))
        view = self._engine.slot_view()
        busy = frozenset(slot for slot, _ in tasks) if tasks is not None else None
        working = None if busy is None else len(busy - before.owned - view.owned)
        started = sum(1 for rid, slot in view.started.items() if slot is None and rid in before.started)
        now = trio.current_time()
        left = sum(1 for seat in view.draining if seat.slot is None)
        self._work_then = {seat.rid: self._work_then.get(seat.rid, work) for seat in before.draining}
        seen: set[RequestId] = set()
        for seat in view.draining:
            capped = now - seat.since > self._idle_s_max
            if seat.slot is not None:
                is_idle = busy is not None and seat.slot not in busy and seat in before.draining
            else:
                is_idle = working is not None and working <= started + left - 1
                left -= is_idle or capped
            if capped:
                self._engine.seat_idle(seat.rid, capped=True)
            elif is_idle and (seat.answered or (seat.rid in once_idle and (seat.slot is None or (
                    now - seat.since >= UNHEARD_S and (not tasks or work != self._work_then.get(seat.rid)))))):
                self._engine.seat_idle(seat.rid, capped=False)
            elif is_idle:
                seen.add(seat.rid)
        return frozenset(seen)

    async def _look(self) -> bool:
        """Tell the scheduler what the slots hold, if nothing of ours went to one meanwhile. Whether that was told."""
        calls, moves = self._adapter.slots, self._engine.moves
        if calls is None:
            return False
        reply = await self._ask(calls.look())
        rows = calls.read_look(reply) if reply is not None else None
        if rows is None:
            return True  # as if it had been: it is not asked again at once
        if self._engine.moves != moves or not self._engine.wants_look:
            return False
        self._engine.post(SlotsLook(tuple(row.tokens for row in rows),
                                    frozenset(row.slot for row in rows if row.busy)))
        await trio.lowlevel.checkpoint()  # the tick takes it in before it is asked whether it wants another one
        return True
