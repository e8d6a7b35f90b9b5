"""Preemption: a request of a higher class takes the place of a running one, which goes on later where it stopped.

Theory of operation. When the next in line lacks a seat or pages, and requests of a lower class run that can be stopped
and continued, one of them is the *victim* (:meth:`Preemption.choose`). It goes through these states; seat, slot and
pages stay its own until the last of them is done with, so nobody is let in on a promise::

    running --Preempt--> stopping --Ended(PREEMPTED)--> draining --SeatIdle--> saving --SlotSaved--> waiting --> running
                             |                              |        (swap)       |
                             | Bound, or its own end        +---------------------+  client left: over when that is done
                             v
                     running on, or over

Waiting it is a request like others, of prompt and answer so far, with the answer's rest to come; its claim is that of
its arrival, so it comes before newcomers of its class, and its turn was taken already. It waits behind the gate
``preempted`` until the request that it gave way to was admitted or left. It has no deadline of the queue: its client
has half an answer. What bounds it is ``answer_s_max``, counted from its first admission.

Against thrashing: classes count as submitted, not as aged, so nobody evicts his own kind by waiting; one victim at a
time, and none while anybody's seat is about to be free anyway; ``preemptions_max`` times per request; and never twice
in a row by the same.

What is lost: with swap the time of a save and a restore, else the prompt and the answer so far are read again. So of
the lowest class the victim is the one with the fewest tokens, and of equal ones who came last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from itertools import islice
from math import inf
from typing import Final

from attrs import define, evolve

from . import messages as m
from .admission import Admission
from .ledger import Ledger
from .queue import WaitingQueue
from .settings import SchedulerSettings
from .state import OPEN, Running, Tally, Waiting
from .types import RequestId, Why

_PLACE: Final[tuple[Why, ...]] = ("seat", "pages", "slot")  # what a victim's leaving gives
LOOKED_AT_MAX: Final = 8  # of the next in line, how many may be held by gates
NEARLY_DONE: Final = 4  # an answer with so few tokens to come is sooner at its end than stopped

class Stage(Enum):
    """Where a request is that was preempted at least once."""

    STOPPING = "stopping"
    DRAINING = "draining"
    SAVING = "saving"
    WAITING = "waiting"
    RUNNING = "running"


@define(eq=False, slots=True)
class Victim:
    """``evictor`` is who it gave way to last, ``times`` how often it did, ``since`` when it was admitted first.
    ``gone``: its client left while the runtime was not done with it."""

    stage: Stage
    since: float
    evictor: RequestId | None = None
    times: int = 0
    gone: bool = False


class Preemption:
    """The victims of one lane. ``queue``, ``running``, ``tally`` and ``admission`` are the scheduler's own; ``free``
    takes everything back that a running request holds, and is told whether the runtime was seen to be done with it."""

    __slots__ = ("_admission", "_free", "_inject", "_queue", "_running", "_settings", "_tally", "_victims")

    def __init__(self, settings: SchedulerSettings, queue: WaitingQueue, running: dict[RequestId, Running],
                 tally: Tally, admission: Admission, free: Callable[[Running, float, bool], None]) -> None:
        self._settings = settings
        self._queue = queue
        self._running = running
        self._tally = tally
        self._admission = admission
        self._inject = admission.inject
        self._free = free
        self._victims: dict[RequestId, Victim] = {}

    @property
    def _swaps(self) -> bool:
        """Whether the state of a victim may be saved."""
        return self._settings.preemption == "swap" and self._inject.slots is not None and self._inject.can_save

    # --- when, and whom ---------------------------------------------------------------------------------------------

    def settle(self, actions: Sequence[m.Action], ledger: Ledger, now: float) -> list[m.Action]:
        """At the end of a step, when everybody was admitted who could be: note who goes on, and let a victim give way
        to the next in line, if place is what that lacks."""
        done: list[m.Action] = []
        for action in actions:
            if isinstance(action, m.Admit) and action.resumes:
                self._victims[action.rid].stage = Stage.RUNNING
                if action.plan is None or action.plan.restore is None:
                    done += self._forget(action.rid)  # it has what it needs, or cannot have it
        return done + self._choose(ledger, now)

    def _choose(self, ledger: Ledger, now: float) -> list[m.Action]:
        admission, settings = self._admission, self._settings
        if settings.preemption == "off" or not self._inject.is_on or admission.blocked not in _PLACE:
            return []
        head = None if self._is_freeing else self._next(ledger, now)
        if head is None or head.seats > 1:
            return []
        victims = [run for run in self._running.values() if self._may_evict(head, run, ledger)]
        if not victims:
            return []
        seats = 1 - (admission.seats(ledger) - admission.seats_used)
        pages = ledger.charge_least(head) - ledger.available(len(self._running))
        if (seats <= 0 and pages <= 0) or sum(run.pages for run in victims) < pages:
            return []
        run = min(victims, key=lambda r: (-r.asked.priority.value, r.table.length, -r.admitted, -r.rid))
        victim = self._victims.setdefault(run.rid, Victim(Stage.RUNNING, run.admitted))
        victim.stage, victim.evictor = Stage.STOPPING, head.rid
        return [m.Preempt(run.rid, self._swaps, head.rid)]

    def _next(self, ledger: Ledger, now: float) -> Waiting | None:
        """Who would be admitted if there were place: whether a gate holds a request is only seen when it is looked at,
        and on a full lane nobody is."""
        for waiting in islice(self._queue.upcoming(now), LOOKED_AT_MAX):
            gate = self._admission.gates.gate(waiting, ledger, now)
            if gate is None or gate[0] == "slot":
                return waiting
        return None

    @property
    def _is_freeing(self) -> bool:
        """Whether somebody's place is about to be free: who waits has that sooner than another's."""
        stopping = any(victim.stage is Stage.STOPPING for victim in self._victims.values())
        return stopping or any(run.draining for run in self._running.values())

    def _may_evict(self, head: Waiting, run: Running, ledger: Ledger) -> bool:
        asked, left = run.asked, run.tokens_left
        if not asked.preemptible or run.truncated or asked.priority.value <= head.priority.value:
            return False
        if (left is not None and left <= NEARLY_DONE) or run.table.length + NEARLY_DONE >= ledger.tokens_limit():
            return False
        victim = self._victims.get(run.rid)
        return self._settings.preemptions_max > 0 and (victim is None or (
            victim.times < self._settings.preemptions_max and victim.evictor != head.rid))

    # --- what happens to a victim -----------------------------------------------------------------------------------

    def bound(self, rid: RequestId) -> None:
        """It cannot be continued, now or any more: it runs on."""
        run, victim = self._running.get(rid), self._victims.get(rid)
        if run is not None:
            run.asked.preemptible = False
        if victim is not None and victim.stage is Stage.STOPPING:
            victim.stage = Stage.RUNNING

    def stopped(self, run: Running) -> None:
        """Its upstream is closed. Also where nobody asked for that: the shell may park a request by itself, when what
        it relied on is gone from the runtime."""
        victim = self._victims.setdefault(run.rid, Victim(Stage.RUNNING, run.admitted))
        if victim.stage is Stage.STOPPING:
            victim.times += 1
            self._tally.preempted += 1
        victim.stage = Stage.DRAINING

    def holds(self, run: Running) -> bool:
        """Whether it keeps its place until the runtime is done with what it gave up."""
        victim = self._victims.get(run.rid)
        return victim is not None and victim.stage in (Stage.DRAINING, Stage.SAVING)

    def left(self, run: Running) -> None:
        """The client of one that holds its place is gone."""
        self._victims[run.rid].gone = True

    def idle(self, run: Running, ledger: Ledger, now: float, *, capped: bool) -> list[m.Action]:
        """The runtime is done with it (``capped``: or nobody knows)."""
        victim = self._victims[run.rid]
        if victim.stage is Stage.SAVING:
            return []
        if run.produced and not capped and not victim.gone:
            saving = self._save(run, ledger, now)
            if saving:
                victim.stage = Stage.SAVING
                return saving
        return self.park(run, ledger, now, idle=not capped)

    def _save(self, run: Running, ledger: Ledger, now: float) -> list[m.Action]:
        """Its answer has begun, so its whole prompt is in the slot, and the answer but for the last token."""
        slots, store = self._inject.slots, self._inject.store
        slot = slots.slot_of(run.rid) if slots is not None else None
        if slot is None or store is None or not self._swaps or run.epoch != ledger.epoch:
            return []  # of another life of the runtime, or another model, nothing is there, or nothing that goes on
        keys = run.keys[: run.tokens // ledger.limits.page_tokens] if run.exact else ()
        planned = store.plan_save(keys, run.tokens + run.produced - 1, "swap", now, run.rid)
        if planned is None:
            return []
        spec, gone = planned
        return [*map(m.Forget, gone), m.SaveSlot(slot.index, spec, run.rid)]

    def slot_event(self, event: m.SlotSaved | m.Restored, rid: RequestId, ledger: Ledger, now: float) -> list[m.Action]:
        """A save or a restore of a request ended, and was entered in the books."""
        run, victim = self._running.get(rid), self._victims.get(rid)
        if run is None or victim is None:
            return []
        if isinstance(event, m.Restored):
            return self._forget(rid)
        return self.park(run, ledger, now, idle=event.ok) if victim.stage is Stage.SAVING else []

    def park(self, run: Running, ledger: Ledger, now: float, *, idle: bool = True) -> list[m.Action]:
        """Back into the queue, or over if nobody waits for it; ``idle`` if its slot was seen to be."""
        victim, slots = self._victims[run.rid], self._inject.slots
        slot = slots.slot_of(run.rid) if slots is not None else None
        self._free(run, now, idle)
        if victim.gone:
            self._tally.ended += 1
            return self.over(run.rid)
        answer_s, tokens, rest = self._settings.answer_s_max, run.tokens + run.produced, run.tokens_left
        # Another object, or its deadline of before would still be its own.
        waiting = evolve(
            run.asked, tokens=tokens, tokens_max=rest, pages=ledger.entitlement(tokens, rest), resumes=True, gate=OPEN,
            deadline=victim.since + answer_s if answer_s else inf,
            left=(slot.index, slot.turns) if slot is not None and idle and run.computed else None)
        if slot is not None and self._inject.store is not None and self._inject.store.owned(run.rid) is not None:
            self._inject.covers[slot.index] = slot.keys, len(slot.keys)  # it has a file: nobody need save it again
        victim.stage = Stage.WAITING
        self._queue.add(waiting)
        if victim.evictor is not None and victim.evictor in self._queue:
            self._queue.hold(waiting, ("preempted", victim.evictor))
            self._tally.held["preempted"] = self._tally.held.get("preempted", 0) + 1
        return []

    def over(self, rid: RequestId) -> list[m.Action]:
        """It is forgotten, and its file with it."""
        return self._forget(rid) if self._victims.pop(rid, None) is not None else []

    def _forget(self, rid: RequestId) -> list[m.Action]:
        store = self._inject.store
        return [*map(m.Forget, store.forget_owned(rid))] if store is not None else []

    def check(self) -> None:
        """Raise AssertionError unless every victim is where it is said to be."""
        for rid, victim in self._victims.items():
            run, waits = self._running.get(rid), victim.stage is Stage.WAITING
            assert waits == (rid in self._queue) and waits == (run is None), f"victim {rid}: {victim.stage}"
            assert run is None or not self.holds(run) or run.draining, f"victim {rid} holds its place and runs"
            assert victim.times <= self._settings.preemptions_max, f"victim {rid} was preempted too often"
            assert not (victim.gone and waits), f"victim {rid} waits, and its client is gone"
        for section in self._queue.held():
            why, what = section.gate
            assert why != "preempted" or RequestId(int(what)) in self._queue, "a victim held for nobody"
