"""Decides which request reaches the runtime, and when.

Theory of operation. The scheduler is told what happened (events) and answers what to do (actions); it owns the queue,
the seats and, through the ledger, the pages. One ``step`` applies the events in their order, then refuses what has
waited too long, then admits. A request is in exactly one place: waiting, running (which includes *draining*: its answer
is over but the runtime may still be busy with it, so seat and pages stay taken), or forgotten.

``admission`` gives seats to the next in line, as gates and pages allow. Bounds are enforced last, on this step's
newcomers in their order, so that a burst that finds idle seats is not refused for a short queue: the queue's length and
bytes, and the wait that is to be expected (``shedding``). ``retry_after_s`` of the other refusals is what a request
that came back now, behind all that wait, would have to wait.

Nothing is admitted before the first ``BackendUp`` (capacity is unknown, so nothing can be called too long either) nor
while the backend is down. Events about requests that are already forgotten are ignored: the shell and the runtime
race, and the scheduler is where the race ends. What cannot be is an ``AccountingBug``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import inf

from attrs import evolve

from . import messages as m
from .admission import Admission
from .inject_check import check_inject
from .ledger import Ledger
from .policy import handicap_s, predicted_work
from .preempt import Preemption
from .queue import WaitingQueue
from .rate import ServiceRate
from .saving import background, next_save
from .settings import SchedulerSettings
from .shedding import Shedder
from .slot_events import SlotEvents
from .snapshot import Counters, RunningView, Seats, Snapshot, StoreView, TierPages, WaitingView, slot_views
from .state import Running, Tally, Waiting
from .types import AccountingBug, EndReason, PageKey, RefuseReason, RequestId, Why

__all__ = ["Scheduler", "SchedulerSettings"]


class Scheduler:
    """One lane's scheduler. Not thread safe: one task owns it. Times are seconds on one monotonic clock."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self._queue = WaitingQueue(settings.ageing_s)
        self._running: dict[RequestId, Running] = {}
        self._ledger: Ledger | None = None
        self._rate = ServiceRate(settings.service_window_s)
        self._up = False
        self._refusing = False  # the backend is down for good, as far as anybody knows
        self._closing = self._emptying = False  # nobody new comes in; those that wait neither
        self._now = -inf
        self._seq = 0
        self._newcomers: list[Waiting] = []
        self._actions: list[m.Action] = []
        self._tally = Tally()
        self._admission = Admission(settings, self._queue, self._running, self._tally)
        self._slot_events = SlotEvents(settings, self._admission.inject, self._queue, self._running)
        self._preemption = Preemption(settings, self._queue, self._running, self._tally, self._admission, self._free)
        self._shedder = Shedder(
            probe_every=settings.shed_probe_every, window_s=max(settings.service_window_s, settings.wait_s_max))

    # --- the contract -----------------------------------------------------------------------------------------------

    def step(self, now: float, events: Sequence[m.Event]) -> list[m.Action]:
        """Apply ``events`` in order, expire, admit; returns what the shell has to do, in order.

        Errors: ``AccountingBug`` only. A clock that runs backwards is taken as standing still.
        """
        now = self._now = max(self._now, now)
        self._actions, self._newcomers = [], []
        self._shedder.advance(now)
        for event in events:
            self._apply(event, now)
        self._admission.changes += any(type(event) is not m.Produced for event in events)
        for waiting in self._queue.expired(now):
            self._turn_away(waiting, RefuseReason.TIMEOUT, self._rate.wait_s(now, len(self._queue) - 1))
        if self._ledger is not None:
            self._ledger.expire(now)
            self._actions += self._slot_events.expire(now)
            self._admission.inject.tell(self._ledger)
            if self._up:
                self._actions += self._admission.run(self._ledger, now)
                self._actions += self._preemption.settle(self._actions, self._ledger, now)
                self._actions += background(self._admission.inject, self._queue, self._ledger, now, self._closing)
                self._admission.inject.tell(self._ledger)
        self._shedder.settle(self._is_busy(now))
        self._bound_newcomers(now)
        return self._actions

    def next_deadline(self) -> float | None:
        """When ``step`` has something to do even if no event arrives; None: never."""
        times = [self._queue.next_deadline(), self._ledger.tree.next_expiry() if self._ledger else None,
                 next_save(self._admission.inject, self._queue) if self._up else None]
        return min((time for time in times if time is not None), default=None)

    @property
    def wants_look(self) -> bool:
        """Whether a ``SlotsLook`` taken now would tell something that is not known: the shell takes one at leisure."""
        slots = self._admission.inject.slots
        return slots is not None and slots.wants_look

    def reconfigure(self, settings: SchedulerSettings) -> None:
        """Take new bounds of the queue for those that come from now on; the rest is built in."""
        self.settings = evolve(self.settings, queue_max=settings.queue_max, wait_s_max=settings.wait_s_max,
                               queue_bytes_max=settings.queue_bytes_max)

    def prefix_tokens(self, keys: Sequence[PageKey], now: float) -> int:
        """How many tokens of a prompt with these pages are cached now. Changes nothing."""
        if self._ledger is None:
            return 0
        if self._admission.inject.is_on:
            return self._admission.inject.prefix_pages(keys) * self._ledger.limits.page_tokens
        return len(self._ledger.tree.match(keys, len(keys), now)) * self._ledger.limits.page_tokens

    def check_invariants(self) -> None:
        """Raise AssertionError if the books are wrong. Costs time in proportion to everything that is held."""
        self._queue.check()
        assert not any(rid in self._queue for rid in self._running), "waiting and running"
        self._admission.check()
        check_inject(self._admission.inject, self._queue, self._running, self._ledger)
        self._preemption.check()
        if self._ledger is None:
            assert not self._running
        else:
            self._ledger.check(list(self._running.values()))

    def snapshot(self, now: float) -> Snapshot:
        """A frozen copy for people and metrics. Changes nothing."""
        now = max(now, self._now)
        shown = islice(self._queue.upcoming(now, held=True), self.settings.waiting_shown_max)
        ledger = self._ledger
        return Snapshot(
            now=now,
            waiting=tuple(WaitingView.of(waiting, place, now, self._why(waiting))
                          for place, waiting in enumerate(shown, 1)),
            waiting_total=len(self._queue),
            waiting_bytes=self._queue.bytes,
            running=tuple(RunningView.of(run, now) for run in self._running.values()),
            up=self._up,
            closing=self._closing,
            held=self._queue.held_by_why() if self._blocked != "backend" else {},
            limit=self._admission.throttle.limit,
            seats=Seats(
                self._admission.seats(ledger), self._admission.seats_used,
                sum(r.seats for r in self._running.values() if r.draining)),
            pages=(TierPages.of(ledger.pool, ledger.tree.evictable), TierPages.of(ledger.host)) if ledger else (),
            prefix_nodes=ledger.tree.size if ledger else 0,
            prefix_tokens=ledger.tree.size * ledger.limits.page_tokens if ledger else 0,
            limits=ledger.limits if ledger else None,
            overdrawn=ledger.pool.overdrawn if ledger else 0,
            ends_per_s=self._rate.per_s(now),
            counters=Counters.of(self._tally, ledger),
            slots=slot_views(self._admission.inject.slots),
            store=StoreView.of(self._admission.inject.store) if self._admission.inject.can_save else None,
        )

    # --- events -----------------------------------------------------------------------------------------------------

    def _apply(self, event: m.Event, now: float) -> None:
        match event:
            case m.Produced():
                self._produced(event, now)
            case m.Submitted():
                self._submitted(event, now)
            case m.Ended():
                self._ended_event(event, now)
            case m.SeatIdle(rid, capped):
                run = self._running.get(rid)
                if run is not None and run.draining and self._ledger is not None:
                    if self._preemption.holds(run):
                        self._actions += self._preemption.idle(run, self._ledger, now, capped=capped)
                    else:
                        self._close(run, now, idle=not capped)
            case m.Bound(rid):
                self._preemption.bound(rid)
            case m.Recounted():
                self._recounted(event)
            case m.BackendUp():
                self._backend_up(event, now)
            case m.BackendDown(refuse):
                self._up, self._refusing = False, refuse
                if refuse:
                    self._turn_all_away(RefuseReason.BACKEND_DOWN)
            case m.Narrowed(seats):
                self._admission.throttle.narrow(seats)
            case m.Warmed(group):
                self._admission.gates.groups.warm(group, now)
            case m.SlotsKnown() | m.StoreLoaded() | m.SlotsLost() | m.SlotsLook() | m.SlotStarted() | m.Restored() | (
                    m.PromptRead() | m.SlotWritten() | m.SlotSaved() | m.CacheSeen()):
                self._slot_event(event, now)
            case m.Closing(refuse_waiting):
                self._closing, self._emptying = True, self._emptying or refuse_waiting
                if refuse_waiting:
                    self._turn_all_away(RefuseReason.CLOSING)

    def _slot_event(self, event: m.Event, now: float) -> None:
        self._actions += self._slot_events.apply(event, self._ledger, now)
        if isinstance(event, m.SlotSaved | m.Restored) and event.rid is not None and self._ledger is not None:
            self._actions += self._preemption.slot_event(event, event.rid, self._ledger, now)
        if isinstance(event, m.PromptRead):
            run = self._running.get(event.rid)
            if run is not None and not run.draining:
                self._admission.gates.was_read(run)

    def _submitted(self, event: m.Submitted, now: float) -> None:
        if event.rid in self._queue or event.rid in self._running:
            raise AccountingBug(f"request {event.rid} was submitted twice")
        arrived = now if event.arrived is None else min(event.arrived, now)
        waiting = Waiting.of(event, arrived, min(event.deadline, now + self.settings.wait_s_max), self._seq)
        self._seq += 1
        if self._closing and (self._emptying or not event.again):
            self._refuse(waiting, RefuseReason.CLOSING)
        elif self._refusing:
            self._refuse(waiting, RefuseReason.BACKEND_DOWN)
        elif self._ledger is not None and not self._ledger.can_fit(waiting):
            self._refuse(waiting, RefuseReason.TOO_LONG)
        else:
            waiting.handicap_s = self._handicap_s(waiting)
            if self._ledger is not None:
                waiting.pages = self._ledger.entitlement(waiting.tokens, waiting.tokens_max)
            self._queue.add(waiting)
            if not event.again:
                self._newcomers.append(waiting)

    def _recounted(self, event: m.Recounted) -> None:
        waiting = self._queue.get(event.rid)
        if waiting is None or waiting.resumes:
            return  # or it is counted with its answer, which the runtime itself made
        waiting.keys, waiting.tokens, waiting.count_source = event.keys, event.tokens, event.count_source
        if not self._turned_away_too_long(waiting):
            self._queue.reorder(waiting, self._handicap_s(waiting))

    def _produced(self, event: m.Produced, now: float) -> None:
        run = self._running.get(event.rid)
        if run is None or self._ledger is None:
            return
        run.produced += event.tokens
        if run.filling and run.produced and not run.draining:
            run.first_at = now
            if self._admission.inject.keeps(run.rid):
                self._ledger.share_prompt(run, now)
            self._admission.alive(run, self._ledger, now)
        if self._ledger.grow(run, event.tokens) and not run.truncated:
            run.truncated = True
            self._tally.truncated += 1
            self._actions.append(m.Truncate(run.rid))

    def _ended_event(self, event: m.Ended, now: float) -> None:
        if event.rid in self._queue:
            self._queue.remove(event.rid)
            self._actions += self._preemption.over(event.rid)
            return
        run = self._running.get(event.rid)
        if run is None:
            return
        if self._preemption.holds(run):
            self._preemption.left(run)
            return
        if not run.draining:  # the first report says why; a second one only says that the runtime is done
            run.produced = max(run.produced, event.tokens or 0)
            run.computed = event.reason is EndReason.FINISHED or run.produced > 0
        gave_way = event.reason is EndReason.PREEMPTED and not run.draining
        if gave_way:
            self._preemption.stopped(run)
        if event.draining:
            if not run.draining:
                run.draining = True
                self._admission.gates.over(run, now)
        elif gave_way:
            assert self._ledger is not None
            self._actions += self._preemption.park(run, self._ledger, now)
        else:
            self._close(run, now)

    def _free(self, run: Running, now: float, idle: bool) -> None:
        """Take back everything that a running request holds; ``idle`` if the runtime was seen to be done with it."""
        assert self._ledger is not None  # nothing runs before capacity is known
        self._ledger.close(run, now, register=run.computed and self._admission.inject.keeps(run.rid))
        del self._running[run.rid]
        self._admission.closed(run, self._ledger, now, served=run.computed, idle=idle)

    def _close(self, run: Running, now: float, *, idle: bool = True) -> None:
        self._free(run, now, idle)
        self._actions += self._preemption.over(run.rid)
        self._tally.ended += 1
        self._rate.note_end(now)
        self._shedder.note_end()

    def _backend_up(self, event: m.BackendUp, now: float) -> None:
        before = None if self._ledger is None else self._ledger.limits
        self._up, self._refusing = True, False
        if self._ledger is None:
            self._ledger = Ledger(self.settings, event.limits)
        else:
            self._ledger.set_limits(event.limits, event.fresh)
        self._actions += self._slot_events.backend_up(self._ledger, event.fresh)
        if event.fresh:
            self._admission.gates.groups.forget()
        if event.ramp:
            self._admission.throttle.ramp()
        self._admission.bound(self._ledger)
        if before == event.limits:
            return
        for waiting in self._queue:
            if before is not None and before.page_tokens != event.limits.page_tokens:
                waiting.keys = ()  # they name pages of another size
            self._turned_away_too_long(waiting)

    # --- refusing ---------------------------------------------------------------------------------------------------

    def _turned_away_too_long(self, waiting: Waiting) -> bool:
        if self._ledger is None:
            return False
        if self._ledger.can_fit(waiting):
            waiting.pages = self._ledger.entitlement(waiting.tokens, waiting.tokens_max)
            return False
        self._turn_away(waiting, RefuseReason.TOO_LONG)
        return True

    def _turn_all_away(self, why: RefuseReason) -> None:
        for waiting in self._queue:
            if why is not RefuseReason.CLOSING or not waiting.resumes:  # what has begun is finished
                self._turn_away(waiting, why)

    def _turn_away(self, waiting: Waiting, why: RefuseReason, retry_after_s: float | None = None) -> None:
        self._queue.remove(waiting.rid)
        self._actions += self._preemption.over(waiting.rid)
        self._admission.changes += 1
        self._refuse(waiting, why, retry_after_s)

    def _refuse(self, waiting: Waiting, why: RefuseReason, retry_after_s: float | None = None) -> None:
        limit = self._ledger.tokens_limit() if self._ledger is not None else 0
        self._tally.refused[why] = self._tally.refused.get(why, 0) + 1
        self._actions.append(m.Refuse(waiting.rid, why, retry_after_s, waiting.tokens, limit))

    def _bound_newcomers(self, now: float) -> None:
        """Refuse those of this step's newcomers that still wait and exceed the bounds, the later ones first."""
        left = [w for w in self._newcomers if self._queue.get(w.rid) is w]
        count, size = len(self._queue) - len(left), self._queue.bytes - sum(w.bytes for w in left)
        for waiting in left:
            if count >= self.settings.queue_max:
                self._turn_away(waiting, RefuseReason.QUEUE_FULL, self._rate.wait_s(now, count))
            elif size + waiting.bytes > self.settings.queue_bytes_max:
                self._turn_away(waiting, RefuseReason.QUEUE_BYTES, self._rate.wait_s(now, count))
            elif not self._shed(waiting, now):
                count, size = count + 1, size + waiting.bytes

    def _is_busy(self, now: float) -> bool:
        """Whether somebody waits for nothing but place. Others say nothing about how fast the lane can serve."""
        return self._up and self._blocked in ("seat", "pages") and self._queue.head(now) is not None

    @property
    def _blocked(self) -> Why:
        return self._admission.blocked if self._up and self._ledger is not None else "backend"

    def _why(self, waiting: Waiting) -> Why:
        """What a request waits for: a gate, but before all gates a backend that is not there."""
        return (self._queue.why(waiting) if self._blocked != "backend" else None) or self._blocked

    def _shed(self, waiting: Waiting, now: float) -> bool:
        """Refuse a newcomer that would wait past its deadline, unless it is to find out whether it would."""
        patience_s = waiting.deadline - now
        if not self.settings.shed or not self._is_busy(now) or not self._shedder.is_late(len(self._queue), patience_s):
            return False
        ahead = self._queue.ahead(waiting)
        if not self._shedder.is_late(ahead, patience_s):
            return False
        retry_after_s = self._shedder.retry_after_s(ahead, patience_s)
        if retry_after_s is not None:
            self._turn_away(waiting, RefuseReason.SHED, retry_after_s)
        return retry_after_s is not None

    # --- order ------------------------------------------------------------------------------------------------------

    def _handicap_s(self, waiting: Waiting) -> float:
        if self.settings.order == "fcfs":
            return 0.0
        cached = 0
        if self._ledger is not None:
            inject = self._admission.inject
            cached = inject.cached_tokens(waiting, self._ledger, self._now) if inject.is_on else (
                len(self._ledger.cached_run(waiting, self._now)) * self._ledger.limits.page_tokens)
        answer = self.settings.answer_tokens_default if waiting.tokens_max is None else waiting.tokens_max
        work = predicted_work(waiting.tokens - cached, answer, self.settings.prefill_weight)
        return handicap_s(work, self.settings.sjf_half_work, self.settings.ageing_s)
