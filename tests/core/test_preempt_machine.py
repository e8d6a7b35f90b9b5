"""Preemption under any order of events: a naive shell answers what the scheduler asks, sometimes late, sometimes badly.
Nobody is lost, nobody is twice, nothing stays behind."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstream.core import messages as m
from kvstream.core.scheduler import Scheduler, SchedulerSettings
from kvstream.core.types import EndReason, Limits, PoolMode, RequestId, SlotRules
from tests.play import PAGE, submit

SEATS = 2
LIMITS = Limits(PoolMode.SPLIT, seats=SEATS, pages=64 * SEATS, page_tokens=PAGE, request_tokens_max=64 * PAGE,
                host_pages=12, source="test")
MOST = 2


class PreemptMachine(RuleBasedStateMachine):
    """``alive`` are requests with a client, ``running`` those whose leg goes on; ``stopping``, ``draining``, ``saving``
    and ``restoring`` what the scheduler waits to hear of. ``files`` are those on disk."""

    @initialize()
    def start(self) -> None:
        self.now, self.next = 0.0, 0
        self.scheduler = Scheduler(SchedulerSettings(
            wait_s_max=1e6, watermark=0.0, preemptions_max=MOST, prefix_ttl_s=1e9, save_tokens_min=1_000))
        self.alive: set[RequestId] = set()
        self.running: dict[RequestId, m.Admit] = {}
        self.stopping: list[RequestId] = []
        self.draining: list[RequestId] = []
        self.saving: list[m.SaveSlot] = []
        self.restoring: list[tuple[RequestId, str]] = []
        self.files: set[str] = set()
        self.times: dict[RequestId, int] = {}
        self.step(m.BackendUp(LIMITS), m.SlotsKnown(SlotRules(SEATS, identity="ab", token_bytes=1.0)))
        for priority in ("low", "low", "high"):  # from the first moment somebody has to give way
            self.come(priority, 40, 200, True)
            for rid in self.running:
                self.step(m.SlotStarted(rid), m.Produced(rid, 3))

    def step(self, *events: m.Event) -> None:
        self.now += 1
        for action in self.scheduler.step(self.now, events):
            self.act(action)

    def act(self, action: m.Action) -> None:
        if isinstance(action, m.Admit):
            assert action.rid in self.alive and action.rid not in self.running
            assert action.resumes == (action.rid in self.times)
            self.running[action.rid] = action
            if action.plan is not None and action.plan.restore is not None:
                assert action.plan.restore in self.files, "a file that is not there"
                self.restoring.append((action.rid, action.plan.restore))
        elif isinstance(action, m.Preempt):
            assert action.rid in self.running, "a victim that does not run"
            assert not self.draining and not self.saving and not self.stopping, "two at a time"
            self.stopping.append(action.rid)
        elif isinstance(action, m.SaveSlot):
            assert action.rid is not None
            self.saving.append(action)
        elif isinstance(action, m.Forget):
            self.files.discard(action.name)
        elif isinstance(action, m.Refuse):
            raise AssertionError(f"refused: {action}")

    @rule(priority=st.sampled_from(["low", "normal", "high"]), tokens=st.integers(1, 100), most=st.integers(5, 200),
          preemptible=st.booleans())
    def come(self, priority: str, tokens: int, most: int, preemptible: bool) -> None:
        self.next += 1
        rid = RequestId(self.next)
        self.alive.add(rid)
        self.step(submit(rid, tokens, most, priority=priority, preemptible=preemptible, pinnable=True, exact=True))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(1, 20))
    def answer(self, data: Any, tokens: int) -> None:
        rid = data.draw(st.sampled_from(sorted(self.running)))
        self.step(m.SlotStarted(rid), m.Produced(rid, tokens))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        rid = data.draw(st.sampled_from(sorted(self.running)))
        self.gone(rid)
        self.step(m.Ended(rid, EndReason.FINISHED))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        rid = data.draw(st.sampled_from(sorted(self.alive)))
        runs = rid in self.running
        self.gone(rid)
        if runs:
            self.draining.append(rid)
        self.step(m.Ended(rid, EndReason.CANCELLED, draining=runs or rid in self.draining))

    def gone(self, rid: RequestId) -> None:
        self.alive.discard(rid)
        self.running.pop(rid, None)
        self.stopping = [other for other in self.stopping if other != rid]
        self.restoring = [pair for pair in self.restoring if pair[0] != rid]

    @precondition(lambda self: self.stopping)
    @rule(tokens=st.integers(0, 10), bound=st.sampled_from([False, False, False, True]))
    def give_way(self, tokens: int, bound: bool) -> None:
        rid = self.stopping.pop()
        if bound:
            self.step(m.Bound(rid))
            return
        del self.running[rid]
        self.restoring = [pair for pair in self.restoring if pair[0] != rid]
        self.times[rid] = self.times.get(rid, 0) + 1
        assert self.times[rid] <= MOST
        self.draining.append(rid)
        self.step(m.Ended(rid, EndReason.PREEMPTED, tokens, draining=True))

    @precondition(lambda self: self.draining)
    @rule(data=st.data(), capped=st.booleans())
    def drained(self, data: Any, capped: bool) -> None:
        rid = data.draw(st.sampled_from(self.draining))
        self.draining.remove(rid)
        self.step(m.SeatIdle(rid, capped=capped))

    @precondition(lambda self: self.saving)
    @rule(ok=st.booleans())
    def saved(self, ok: bool) -> None:
        action = self.saving.pop()
        if ok:
            self.files.add(action.spec.name)
        tokens = action.spec.tokens if ok else 0
        self.step(m.SlotSaved(action.slot, action.spec.name, ok, tokens, tokens, 0.01, action.spec.keys, action.rid))

    @precondition(lambda self: self.restoring)
    @rule(ok=st.booleans())
    def restored(self, ok: bool) -> None:
        rid, name = self.restoring.pop()
        if not ok:
            self.files.discard(name)
        self.step(m.Restored(rid, name, ok, 100, 0.01))

    @rule()
    def restart(self) -> None:
        self.step(m.BackendUp(LIMITS, fresh=True))

    @rule(tokens=st.integers(0, 50))
    def look(self, tokens: int) -> None:
        if not (self.running or self.draining or self.saving):
            self.step(m.SlotsLook((tokens,) * SEATS, frozenset()))

    @invariant()
    def the_books_are_right(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_invariants()
        view = self.scheduler.snapshot(self.now)
        waiting, running = {w.rid for w in view.waiting}, {r.rid for r in view.running}
        held = set(self.draining) | {a.rid for a in self.saving if a.rid is not None}
        assert waiting | running == self.alive | held, "somebody is lost"
        assert running == set(self.running) | held and not waiting & running
        assert not self.files or self.times, "a file of nobody"

    def teardown(self) -> None:
        """Everything comes to its end, and then nothing is left."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(500):
            if self.stopping:
                self.give_way(1, False)
            elif self.draining:
                self.step(m.SeatIdle(self.draining.pop()))
            elif self.saving:
                self.saved(True)
            elif self.restoring:
                self.restored(True)
            elif self.running:
                rid = next(iter(self.running))
                self.gone(rid)
                self.step(m.Ended(rid, EndReason.FINISHED))
            elif self.alive:
                self.step(m.SlotsLook((0,) * SEATS, frozenset()))
            else:
                break
        view = self.scheduler.snapshot(self.now)
        assert not self.alive and not view.running and not view.waiting, "somebody never came to his end"
        assert not self.files, "the file of a request that is over"
        assert view.pages[1].held == 0 and view.pages[0].held == view.pages[0].cached


TestPreemptMachine = PreemptMachine.TestCase
TestPreemptMachine.settings = settings(
    max_examples=max(60, settings.default.max_examples), stateful_step_count=30, deadline=None)
