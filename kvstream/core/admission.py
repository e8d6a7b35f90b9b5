"""Giving seats away: who is next, whether a gate holds it, whether it fits, and who may pass it if it does not.

Theory of operation. One at a time, the next in line is looked at. Behind a closed gate it is put aside (``gates``) and
the next one is looked at. If it lacks seats or pages it *blocks*: a bounded number of requests behind it may pass, if
its own predicted start does not move (``policy``). Every look either admits somebody, puts somebody aside whom only an
event will bring back, or is the last.
"""

from __future__ import annotations

from itertools import islice
from math import inf

from . import messages as m
from .gates import Gates
from .inject import Inject
from .ledger import Ledger
from .policy import Horizon, plan_horizon
from .prefix import PrefixNode
from .queue import WaitingQueue
from .settings import SchedulerSettings
from .state import Running, Tally, Waiting
from .throttle import Throttle
from .types import RequestId, Why


class Admission:
    """The seats of one lane, and who gets them. ``queue``, ``running`` and ``tally`` are the scheduler's own.

    ``seats_used`` counts those of running requests, draining ones included; ``seats_bound`` is the most that may be
    running: the seats, or what a shrunk backend still runs. ``blocked`` says why those that no gate holds still wait.
    """

    __slots__ = ("_looked", "_queue", "_running", "_settings", "_tally", "blocked", "changes", "gates", "inject",
                 "seats_bound", "seats_used", "throttle")

    def __init__(
        self, settings: SchedulerSettings, queue: WaitingQueue, running: dict[RequestId, Running], tally: Tally
    ) -> None:
        self._settings = settings
        self._queue = queue
        self._running = running
        self._tally = tally
        self.inject = Inject(settings, queue, running)
        self.gates = Gates(settings, queue, running, self.inject)
        self.throttle = Throttle()
        self.blocked: Why = "backend"
        self.seats_used = 0
        self.seats_bound = 0
        self.changes = 0  # of anything but the length of answers
        self._looked: tuple[int, int] | None = None  # when nobody could pass the head: changes so far, pages available

    def seats(self, ledger: Ledger | None) -> int:
        return 0 if ledger is None else min(self._settings.seats_max, ledger.limits.seats)

    def run(self, ledger: Ledger, now: float) -> list[m.Action]:
        """Admit whoever can be."""
        admitted: list[m.Action] = []
        while True:
            if self.throttle.is_full:
                self.blocked = "narrowed"
                break
            if self.seats_used >= self.seats(ledger):
                self.blocked = "seat"
                break
            head = self._queue.head(now)
            if head is None:
                if self.gates.groups.settle(now):
                    continue
                break
            if self._put_aside(head, ledger, now):
                continue
            self.blocked = "seat"
            if not self._has_seats(head, ledger):
                break  # it takes several at once, and they become free one by one
            available = ledger.available(len(self._running))
            if ledger.charge_least(head) <= available:
                run = ledger.cached_run(head, now)
                if ledger.charge(head, run) <= available:
                    self._admit(admitted, ledger, head, run, now)
                    continue
            self.blocked = "pages"
            if self._settings.backfill:
                self._backfill(ledger, head, now, admitted)
            break
        return admitted

    def started(self, run: Running, ledger: Ledger, now: float) -> None:
        run.seats = min(run.seats, self.seats(ledger))
        self.seats_used += run.seats
        self.gates.started(run, now)
        self.throttle.started(run.rid)

    def alive(self, run: Running, ledger: Ledger, now: float) -> None:
        """A running request's first token."""
        self.throttle.alive(run.rid, self.seats(ledger))
        self.inject.start(run.rid)
        self.changes += self.gates.alive(run, now)

    def closed(self, run: Running, ledger: Ledger, now: float, *, served: bool, idle: bool = True) -> None:
        """A running request holds nothing any more; ``served`` if it was answered, ``idle`` if its slot was seen to
        be."""
        if served:
            self.throttle.alive(run.rid, self.seats(ledger))
        self.throttle.closed(run.rid)
        self.gates.closed(run, now)
        self.inject.closed(run, ledger, now, idle=idle)
        self.seats_used -= run.seats
        self.bound(ledger)

    def bound(self, ledger: Ledger) -> None:
        """The seats that there are, or that are used, have changed."""
        self.seats_bound = max(self.seats(ledger), self.seats_used)

    def _put_aside(self, waiting: Waiting, ledger: Ledger, now: float) -> bool:
        gate = self.gates.gate(waiting, ledger, now)
        if gate is None:
            return False
        why = gate[0]
        if self._queue.hold(waiting, gate) and why is not None:
            self._tally.held[why] = self._tally.held.get(why, 0) + 1
        return True

    def _has_seats(self, waiting: Waiting, ledger: Ledger) -> bool:
        """Whether its seats are free. One that wants more than there are gets all: the runtime has the last word."""
        seats = self.seats(ledger)
        return self.seats_used + min(waiting.seats, seats) <= seats

    def _admit(self, admitted: list[m.Action], ledger: Ledger, waiting: Waiting, run: list[PrefixNode], now: float,
               passed: RequestId | None = None) -> None:
        # Backfill is no turn of its client: it uses what nobody else can, and must not set the client's own head back.
        # Nor is going on after giving way: it had its turn.
        self._queue.remove(waiting.rid, granted=now if passed is None and not waiting.resumes else None)
        plan, cached = None, None
        if self.inject.is_on:
            plan, cached, gone = self.inject.grant(waiting, ledger, now)
            admitted += gone
        started = self._running[waiting.rid] = ledger.open(waiting, run, now, cached)
        started.passed = passed
        if plan is not None:
            self.inject.started(started, plan)
        self.started(started, ledger, now)
        self._tally.admitted += not waiting.resumes
        self._tally.resumed += waiting.resumes
        self._tally.backfilled += passed is not None
        admitted.append(
            m.Admit(waiting.rid, started.table, started.tokens_cached, started.promised, plan, waiting.resumes))

    def _backfill(self, ledger: Ledger, head: Waiting, now: float, admitted: list[m.Action]) -> None:
        """Let requests behind a head that lacks pages pass, as far as its start is not delayed.

        Candidates are measured without their cached prefix: cheaper, and never too small.
        """
        available, horizon = ledger.available(len(self._running)), None
        looked = (self.changes, available)
        if available <= 0 or looked == self._looked:
            return  # tokens that were produced only bring the head's start nearer: who could not pass still cannot
        self._looked = looked
        for candidate in list(islice(self._queue.upcoming(now), 1, 1 + self._settings.backfill_candidates_max)):
            if candidate.pages > available or not self._has_seats(candidate, ledger):
                continue
            if horizon is None:
                horizon = self._plan(ledger, head, now)
            steps = inf if candidate.tokens_max is None else candidate.tokens_max
            if not horizon.lets_pass(steps, candidate.pages) or self._put_aside(candidate, ledger, now):
                continue
            self._admit(admitted, ledger, candidate, ledger.cached_run(candidate, now), now, passed=head.rid)
            if self.seats_used >= self.seats(ledger) or self.throttle.is_full:
                return
            available, horizon = ledger.available(len(self._running)), None

    def _plan(self, ledger: Ledger, head: Waiting, now: float) -> Horizon:
        run = ledger.cached_run(head, now)
        target = ledger.charge(head, run) + ledger.watermark
        return plan_horizon(ledger.forecasts(self._running.values(), head, run), ledger.room, target)

    def check(self) -> None:
        """Raise AssertionError if seats or gates are miscounted."""
        assert self.seats_used == sum(run.seats for run in self._running.values()), "seats miscounted"
        assert self.seats_used <= self.seats_bound, "more running than seats"
        self.gates.check()
        self.throttle.check(dict(self._running))
