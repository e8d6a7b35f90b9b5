"""Pinned slots under any sequence of events, beside a naive runtime that really has slots with something in them.

The rules play the shell: they carry out plans step by step, tell what happened, and may stop anywhere. What must hold:
nobody is sent to a slot that is at work, and nobody takes a slot that somebody is on his way to (a runtime puts a float
into any idle slot); what is promised is really there, whatever failed before; a restore into a unified pool finds its
cells; what is saved is what the spec says; and nobody waits on an idle lane.
"""

from __future__ import annotations

from attrs import define, evolve, field
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstream.core import messages as m
from kvstream.core.scheduler import Scheduler, SchedulerSettings
from kvstream.core.tokens import common_pages
from kvstream.core.types import EndReason, Limits, PageKey, PoolMode, RequestId, SaveSpec, SlotPlan, SlotRules
from tests.play import PAGE, keys_of
from tests.strategies import prompts

SLOTS, CELL_PAGES = 3, 24


@define
class Real:
    """A slot of the runtime: what it really holds, and who is at work in it."""

    keys: tuple[PageKey, ...] = ()
    tokens: int = 0
    busy: int | None = None


@define
class Job:
    """A request as the shell sees it. ``stage``: waiting, saving, restoring, reading, asking, forking, sending, busy,
    draining, gone."""

    ask: m.Submitted
    stage: str = "waiting"
    plan: SlotPlan | None = None
    fork: SaveSpec | None = None
    promised: int = 0  # pages that must be there when it is sent
    places: list[int] = field(factory=list)
    made: int = 0


class SlotMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.jobs: dict[int, Job] = {}
        self.real = [Real() for _ in range(SLOTS)]
        self.files: dict[str, tuple[tuple[PageKey, ...], int]] = {}
        self.saves: dict[int, SaveSpec] = {}
        self.looked_at: list[m.SlotSaved] = []  # written, and not yet told
        self.scheduler: Scheduler | None = None

    @rule(unified=st.booleans(), costly=st.booleans(), bytes_max=st.sampled_from([0, 3_000, 100_000]))
    @precondition(lambda self: self.scheduler is None)
    def start(self, unified: bool, costly: bool, bytes_max: int) -> None:
        self.begin(unified, costly, bytes_max)

    def begin(self, unified: bool, costly: bool, bytes_max: int) -> None:
        self.scheduler = Scheduler(SchedulerSettings(
            wait_s_max=1e6, watermark=0.0, leader_tokens=PAGE, save_tokens_min=PAGE, saved_bytes_max=bytes_max,
            read_first_s=0.1, long_prefill_tokens=64))
        mode = PoolMode.UNIFIED if unified else PoolMode.SPLIT
        self.limits = Limits(mode, SLOTS, CELL_PAGES if unified else 3 * CELL_PAGES, PAGE, CELL_PAGES * PAGE,
                             host_pages=100)
        self.rules = SlotRules(SLOTS, identity="ab", token_bytes=10.0)
        self.step(m.BackendUp(self.limits), m.SlotsKnown(self.rules),
                  m.CacheSeen(RequestId(999), 0, 1000, 100.0 if costly else 1e-3))

    def step(self, *events: m.Event) -> None:
        if self.scheduler is None:
            self.begin(False, True, 100_000)
        assert self.scheduler is not None
        for action in self.scheduler.step(self.now, events):
            match action:
                case m.Admit(rid, plan=plan):
                    self.admitted(self.jobs[rid], plan)
                case m.Proceed(rid, spec):
                    job = self.jobs[rid]
                    assert job.stage == "asking"
                    job.fork, job.stage = spec, "sending" if spec is None else "forking"
                case m.SaveSlot(slot, spec):
                    assert self.real[slot].busy is None and slot not in self.saves and not self.floats("sending")
                    self.saves[slot] = spec
                case m.Forget(name):
                    self.files.pop(name, None)
                case m.Refuse(rid):
                    self.jobs[rid].stage = "gone"

    def admitted(self, job: Job, plan: SlotPlan | None) -> None:
        assert job.stage == "waiting" and plan is not None
        job.plan, job.stage = plan, "saving"
        if plan.slot is None:
            assert not [j for j in self.jobs.values() if j.stage in STARTING and j.plan and j.plan.slot is not None]
            assert not self.saves and not plan.restore
        else:
            assert job.ask.pinnable and job.ask.seats == 1
            assert self.real[plan.slot].busy is None, "pinned to a slot at work"
            assert plan.slot not in self.saves
            assert [j.plan.slot for j in self.jobs.values() if j.stage in ALIVE and j.plan].count(plan.slot) == 1
        for slot in plan.erase:
            assert self.real[slot].busy is None and slot != plan.slot
            self.real[slot] = Real()
        if plan.restore is not None:
            assert plan.restore in self.files, "a restore of a file that is not there"
        job.promised = plan.tokens_cached // PAGE

    def floats(self, *stages: str) -> list[Job]:
        return [j for j in self.jobs.values() if j.stage in stages and j.plan is not None and j.plan.slot is None]

    # --- requests ---------------------------------------------------------------------------------------------------

    @rule(prompt=prompts, pages=st.integers(0, 8), more=st.integers(1, PAGE), most=st.none() | st.integers(1, 30),
          pinnable=st.sampled_from([True, True, True, False]), exact=st.sampled_from([True, True, False]),
          seats=st.sampled_from([1, 1, 1, 2]), n=st.integers(1, 3))
    def submit(self, prompt: str, pages: int, more: int, most: int | None, pinnable: bool, exact: bool, seats: int,
               n: int) -> None:
        for _ in range(n):
            rid, tokens = RequestId(len(self.jobs)), pages * PAGE + more
            keys = keys_of(prompt if exact else prompt.upper(), tokens)
            ask = m.Submitted(rid, keys, tokens, most, 1e9, seats=seats, pinnable=pinnable, exact=exact)
            self.jobs[rid] = Job(ask)
            self.step(ask)

    @rule(data=st.data(), ok=st.sampled_from([True, True, True, False]), n=st.integers(1, 8))
    def go_on(self, data: st.DataObject, ok: bool, n: int) -> None:
        """Requests do the next thing they have to do."""
        for _ in range(n):
            todo = [rid for rid, job in self.jobs.items() if job.stage in ALIVE and job.stage != "asking"]
            if todo:
                self.advance(RequestId(data.draw(st.sampled_from(todo))), data, ok)

    @rule(data=st.data(), visits=st.lists(st.tuples(
        st.sampled_from(["a", "ab", "abc", "b"]), st.integers(2, 8), st.booleans(), st.integers(1, 14)), max_size=6))
    def converse(self, data: st.DataObject, visits: list[tuple[str, int, bool, int]]) -> None:
        """Requests come one after the other. Each goes so many steps, if nobody is in its way: to its end, until its
        client leaves, or until nobody waits any longer for the runtime to be done with it."""
        for prompt, pages, floating, steps in visits:
            rid, tokens = RequestId(len(self.jobs)), pages * PAGE + 1
            self.jobs[rid] = job = Job(m.Submitted(
                rid, keys_of(prompt, tokens), tokens, 20, 1e9, pinnable=not floating, exact=True))
            self.step(job.ask)
            for _ in range(steps):
                if job.stage in ALIVE and job.stage != "asking" and job.made < 2:
                    self.advance(rid, data, True)
            if job.made == 2:
                self.vacate(job, whole=True)
                job.stage = "gone"
                self.step(m.Ended(rid, EndReason.FINISHED))
            elif job.stage == "busy" and steps % 2:
                job.stage = "capped"
                self.step(m.Ended(rid, EndReason.CANCELLED, draining=True), m.SeatIdle(rid, capped=True))
            elif job.stage in ALIVE or job.stage == "waiting":
                self.vacate(job, whole=False)
                job.stage = "gone"
                self.step(m.Ended(rid, EndReason.CANCELLED))

    def advance(self, rid: RequestId, data: st.DataObject, ok: bool) -> None:
        job = self.jobs[rid]
        plan, ask = job.plan, job.ask
        assert plan is not None
        match job.stage:
            case "saving":
                job.stage = "restoring"
                if plan.save is not None and plan.slot is not None:
                    saved = self.save(plan.slot, plan.save, ok, rid)
                    if plan.save.why == "evict" and data.draw(st.booleans()):
                        self.looked_at.append(evolve(saved, rid=None))
                        self.step(m.SlotWritten(rid, plan.save.name))
                    else:
                        self.step(saved)
            case "restoring":
                job.stage = "reading"
                if plan.restore is not None and plan.slot is not None:
                    self.restore(plan.slot, plan.restore, ok, rid)
            case "reading":
                job.stage = "sending"
                if plan.read_first and plan.slot is not None:
                    cached = self.occupy(job, plan.slot, rid)
                    self.real[plan.slot].busy = None
                    self.real[plan.slot].keys, self.real[plan.slot].tokens = full(ask), ask.tokens
                    job.stage = "asking"
                    self.step(m.PromptRead(rid, cached * PAGE, ask.tokens - cached * PAGE, 1.0))
            case "forking":
                job.stage = "sending"
                assert plan.slot is not None and job.fork is not None
                self.step(self.save(plan.slot, job.fork, ok, rid))
            case "sending":
                if plan.slot is not None:
                    job.promised = 0 if plan.read_first else job.promised
                    self.occupy(job, plan.slot, rid)
                else:
                    idle = [i for i, slot in enumerate(self.real) if slot.busy is None]
                    if len(idle) < ask.seats:
                        return  # it waits in the runtime
                    reserved = [j.plan.slot for j in self.jobs.values() if j.stage in STARTING and j.plan]
                    for _ in range(min(ask.seats, SLOTS)):
                        at = data.draw(st.sampled_from(idle))
                        assert at not in reserved and at not in self.saves, "a float in a slot kept for somebody"
                        idle.remove(at)
                        self.real[at].busy = rid
                        self.real[at].keys, self.real[at].tokens = (), ask.tokens
                        job.places.append(at)
                job.stage = "busy"
                self.step(m.SlotStarted(rid))
            case "busy":
                job.made += 1
                self.step(m.Produced(rid, 1))
            case "draining":
                self.vacate(job, ok)
                job.stage = "gone"
                self.step(m.SeatIdle(rid))

    def occupy(self, job: Job, at: int, rid: int) -> int:
        slot = self.real[at]
        assert slot.busy is None, "sent to a slot at work"
        cached = common_pages(slot.keys, job.ask.keys)
        assert cached >= job.promised, "less is there than was promised"
        slot.busy, slot.keys, slot.tokens = rid, job.ask.keys[:cached], cached * PAGE
        job.places = [at]
        return cached

    def vacate(self, job: Job, whole: bool) -> None:
        for at in job.places:
            slot = self.real[at]
            slot.busy = None
            if whole or job.made:
                slot.keys, slot.tokens = full(job.ask), job.ask.tokens + max(0, job.made - 1)
        job.places = []

    def save(self, at: int, spec: SaveSpec, ok: bool, rid: RequestId | None = None) -> m.SlotSaved:
        slot = self.real[at]
        if ok:
            assert slot.keys[: len(spec.keys)] == spec.keys and slot.tokens >= spec.tokens, "not what was to be saved"
            self.files[spec.name] = (slot.keys, slot.tokens)
        return m.SlotSaved(at, spec.name, ok, slot.tokens, slot.tokens * 10, 0.001, spec.keys, rid)

    def restore(self, at: int, name: str, ok: bool, rid: RequestId) -> None:
        job, slot = self.jobs[rid], self.real[at]
        if ok and self.limits.mode is PoolMode.UNIFIED:
            used = sum(s.tokens + (self.jobs[s.busy].made if s.busy is not None else 0)
                       for i, s in enumerate(self.real) if i != at)
            assert used + self.files[name][1] <= CELL_PAGES * PAGE + 2 * SLOTS * PAGE, "no cells for what is restored"
        slot.keys, slot.tokens = self.files[name] if ok else ((), 0)
        job.promised = job.promised if ok else 0
        self.step(m.Restored(rid, name, ok, slot.tokens * 10, 0.001))

    @rule(data=st.data(), reason=st.sampled_from(EndReason), draining=st.booleans(), capped=st.booleans())
    def end(self, data: st.DataObject, reason: EndReason, draining: bool, capped: bool) -> None:
        todo = [rid for rid, job in self.jobs.items() if job.stage in ALIVE or job.stage == "waiting"]
        if not todo:
            return
        rid = RequestId(data.draw(st.sampled_from(todo)))
        job = self.jobs[rid]
        if reason in (EndReason.FINISHED, EndReason.PREEMPTED) and not job.made:
            reason = EndReason.CANCELLED
        if reason is EndReason.PREEMPTED:
            reason = EndReason.FAILED
        if job.stage == "busy" and draining:
            job.stage = "draining"
            self.step(m.Ended(rid, reason, draining=True))
            if capped:
                job.stage = "capped"  # still at work for all we know
                self.step(m.SeatIdle(rid, capped=True))
            return
        if job.stage == "draining":
            return
        self.vacate(job, whole=False)
        job.stage = "gone"
        self.step(m.Ended(rid, reason))

    # --- the rest ---------------------------------------------------------------------------------------------------

    @rule(ok=st.booleans())
    def a_background_save_ends(self, ok: bool) -> None:
        if self.saves:
            at, spec = self.saves.popitem()
            self.step(self.save(at, spec, ok))

    @rule(data=st.data())
    def a_file_was_looked_at(self, data: st.DataObject) -> None:
        if self.looked_at:
            self.step(self.looked_at.pop(data.draw(st.integers(0, len(self.looked_at) - 1))))

    @rule()
    def what_was_given_up_ends_after_all(self) -> None:
        for job in self.jobs.values():
            if job.stage == "capped":
                self.vacate(job, whole=False)
                job.stage = "gone"

    @rule()
    def look(self) -> None:
        if self.scheduler is not None and self.scheduler.wants_look:
            busy = frozenset(i for i, slot in enumerate(self.real) if slot.busy is not None)
            self.step(m.SlotsLook(tuple(slot.tokens for slot in self.real), busy))

    @rule(seconds=st.sampled_from([0.01, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.step()

    @rule()
    def lost(self) -> None:
        self.step(m.SlotsLost())

    @rule()
    def restart(self) -> None:
        """Everything in the runtime is gone, and so are those who ran in it."""
        self.real = [Real() for _ in range(SLOTS)]
        events: list[m.Event] = [m.BackendUp(self.limits, fresh=True)] if self.scheduler is not None else []
        for rid, job in self.jobs.items():
            if job.stage in ALIVE or job.stage in ("draining", "capped"):
                job.stage, job.places = "gone", []
                events.append(m.Ended(RequestId(rid), EndReason.FAILED))
        for at, spec in self.saves.items():
            events.append(m.SlotSaved(at, spec.name, False))
        self.saves.clear()
        self.step(*events)

    @invariant()
    def the_books_are_right(self) -> None:
        if self.scheduler is None:
            return
        self.scheduler.check_invariants()
        inside = [j for j in self.jobs.values() if j.stage in ALIVE or j.stage == "draining"]
        waiting = [j for j in self.jobs.values() if j.stage == "waiting"]
        assert inside or self.saves or self.looked_at or not waiting, "somebody waits for an idle lane"
        view = self.scheduler.snapshot(self.now)
        assert view.store is None or view.store.bytes <= view.store.bytes_max


STARTING = ("saving", "restoring", "reading", "asking", "forking", "sending")
ALIVE = (*STARTING, "busy", "draining")


def full(ask: m.Submitted) -> tuple[PageKey, ...]:
    return ask.keys[: ask.tokens // PAGE]


TestSlotMachine = SlotMachine.TestCase
