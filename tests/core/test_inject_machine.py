"""Hard inject under any sequence of events: the scheduler beside a naive runtime that holds real tokens.

The machine plays the shell: it carries out the plan of an admitted request step by step, tells the scheduler what came
of each, and between any two of these steps everything may happen: clients leave, a step fails, others use the slots,
the server or KVStream dies. What must hold after *every* step:

* a promise is kept: what a request is said to find is in its slot when it gets there, unless a step of its plan failed;
* what the scheduler believes of a slot that it would give away is there; nobody is sent to a slot at work, nobody
  saves, restores or erases one (``NaiveRuntime`` asserts it), and nobody waits in the runtime's own queue;
* what is offered of the store is on disk and begins with the pages it is said to; what was said to be saved is offered
  until it was said to be forgotten;
* nobody gives way too often, to the same again, or to his own kind; what is restored is of the present model;
* a unified pool is never overdrawn: then every stream would be killed;
* the books balance, an idle lane serves, and in the end every request has ended.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from attrs import define, evolve, field
from hypothesis import note
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstream.core import messages as m
from kvstream.core.scheduler import Scheduler, SchedulerSettings
from kvstream.core.types import (
    CountSource,
    EndReason,
    Limits,
    PageKey,
    PoolMode,
    Priority,
    RequestId,
    SavedPrefix,
    SaveSpec,
    SlotPlan,
    SlotRules,
)
from tests.core.naive_slots import Disk, NaiveRuntime, ids_of, keys_for
from tests.play import PAGE
from tests.strategies import prompts

EACH = 10  # bytes of a token
FLOAT_TOKENS = 320  # the least of a float's prompt: no other is as long, so a look can tell
ANSWER = 999  # an answer's token

Step = tuple[str, Any]


@define
class Call:
    """A request as the shell sees it. ``event`` is what has happened and was not told yet, ``sent`` once the real
    request is in the runtime, ``hollow``: a step failed, so what it was promised may not be there. ``most`` is what it
    may still answer, ``legs`` how often it was stopped, and for whom each time."""

    rid: RequestId
    ids: list[int]
    asked: m.Submitted
    where: str = "waiting"  # running, draining, gone; giving way: parking (the runtime is not done with it), saving
    plan: SlotPlan | None = None
    steps: deque[Step] = field(factory=deque)
    event: m.Event | None = None
    slot: int | None = None
    sent: bool = False
    asking: bool = False  # told what it read, and has no answer yet
    hollow: bool = False
    cached: int = 0  # of its prompt, when it came
    found: int = 0  # by the real request, after its prompt may have been read
    produced: int = 0
    life: int = 0
    most: int | None = None
    stopping: bool = False
    legs: int = 0
    gave_way_to: list[RequestId] = field(factory=list)
    left: bool = False  # by its client, while it gives way

    def again(self) -> m.Submitted:
        """Back to its place: nobody has seen that it had been granted."""
        return evolve(self.asked, again=True)


@define
class Saving:
    """A save that is no step of a plan; ``rid`` gives way."""

    slot: int
    spec: SaveSpec
    life: int
    rid: RequestId | None = None
    event: m.SlotSaved | None = None


def shortly(message: m.Event | m.Action) -> str:
    """For the story of a failure."""
    match message:
        case m.Submitted(rid=rid):
            size = f"{len(message.keys)} pages, {message.tokens}+{message.tokens_max}"
            more = f"{message.priority.name}{' preemptible' * message.preemptible}"
            return f"Submitted({rid}, {size}, pin={message.pinnable}, {more})"
        case m.Admit(rid=rid):
            return f"Admit({rid}, {message.plan}{', resumes' * message.resumes})"
        case m.SlotSaved() if message.keys:
            return shortly(evolve(message, keys=())) + f" {len(message.keys)} pages"
        case m.StoreLoaded(entries):
            return f"StoreLoaded({[entry.name for entry in entries]})"
    return str(message)


class InjectMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.next_rid = 0
        self.calls: dict[RequestId, Call] = {}
        self.savings: list[Saving] = []
        self.looked_at: list[m.SlotSaved] = []  # what requests displaced: written, and not yet told
        self.disk = Disk()
        self.said: set[str] = set()  # saved, as the scheduler was told, and not forgotten since
        self.alive = self.up = False
        self.life = self.known = 0  # of the server: which one it is, and which one KVStream believes it to be
        self.zombies: set[int] = set()  # at work for nobody that KVStream knows
        self.starting: RequestId | None = None  # has the start lock
        self.ready = False
        # So many of each, or nothing else is done.
        self.troubles = {"kvstream": 2, "server": 2, "others": 2, "look": 3, "identity": 2, "closing": 1}

    def trouble(self, what: str) -> bool:
        """Whether it may happen, now that something goes on."""
        return self.troubles[what] > 0 and any(call.where in ("running", "draining") for call in self.calls.values())

    @initialize(slots=st.integers(1, 3), pinned=st.sampled_from([True, True, True, False]), unified=st.booleans(),
                preemption=st.sampled_from(["swap", "swap", "recompute", "off"]), cells=st.sampled_from([20, 34, 60]),
               read_first=st.sampled_from([0.0, 0.0, 0.5]), under_way=st.sampled_from([0, 0, 0, 40, 90, 170]),
               size=st.sampled_from([10_000, 2500, 10_000, 0]),
                host=st.sampled_from([20, 200]), prefix=st.sampled_from([True, True, True, False]))
    def begin(self, slots: int, pinned: bool, unified: bool, read_first: float, size: int, host: int,
              prefix: bool, preemption: str, under_way: int, cells: int) -> None:
        mode = PoolMode.UNIFIED if unified or not pinned else PoolMode.SPLIT
        pages = slots * 40 if mode is PoolMode.SPLIT else cells
        self.runtime = NaiveRuntime.of(
            slots, emptying=not pinned, cells=pages * PAGE if mode is PoolMode.UNIFIED else None)
        self.limits = Limits(mode, slots, pages=pages, page_tokens=PAGE, request_tokens_max=40 * PAGE,
                             host_pages=host, source="test")
        self.slot_rules = SlotRules(slots, pinned, "ab", token_bytes=EACH)
        self.settings = SchedulerSettings(
            seats_max=4, queue_max=20, wait_s_max=1000.0, watermark=0.0, answer_tokens_default=16, shed=False,
            leader_tokens=2 * PAGE, read_first_s=read_first, save_tokens_min=PAGE, saved_bytes_max=size,
            prefix_enabled=prefix, preemption=preemption, preemptions_max=2, long_prefills_max=2,
            long_prefill_tokens=5 * PAGE)
        self.kvstream_starts()
        for i in range(slots if under_way else 0):  # answers that have to give way to whoever comes next
            self.submit("abc"[i], under_way + i, 50, "pin", 1, Priority.LOW)
            self.all_go_on("well", 7)

    # --- the shell --------------------------------------------------------------------------------------------------

    def kvstream_starts(self) -> None:
        self.scheduler = Scheduler(self.settings)
        self.alive, self.ready = True, True
        self.server_is_up(fresh=False)

    def server_is_up(self, *, fresh: bool) -> None:
        """What ``SlotLane.learn`` posts, in the step that lets the first request in."""
        self.up, self.known = True, self.life
        self.all_looked_at()
        untold = {saving.spec.name for saving in self.savings} | {
            call.event.name for call in self.calls.values() if isinstance(call.event, m.SlotSaved)}
        self.said = (self.said - self.disk.listed.keys()) | (self.mine().keys() - untold)
        self.step(m.BackendUp(self.limits, fresh=fresh), m.SlotsKnown(self.slot_rules), self.loaded(), self.seen())

    def mine(self) -> dict[str, tuple[PageKey, ...]]:
        """The files of the present identity that are there for everybody."""
        return {n: keys for n, keys in self.disk.listed.items() if n.startswith(self.slot_rules.identity)}

    def loaded(self) -> m.StoreLoaded:
        return m.StoreLoaded(tuple(
            SavedPrefix(name, keys, len(self.disk.files[name] or ()), EACH * len(self.disk.files[name] or ()))
            for name, keys in self.mine().items()))

    def seen(self) -> m.SlotsLook:
        return m.SlotsLook(tuple(None if self.is_alike(i) else len(slot.tokens) for i, slot in enumerate(
            self.runtime.slots)), frozenset(i for i, slot in enumerate(self.runtime.slots) if slot.busy is not None))

    def is_alike(self, index: int) -> bool:
        """Something else of the same length is there, which a look at numbers of tokens cannot tell. Left out here: it
        costs a promise, which the verifier notices."""
        slots = self.scheduler._admission.inject.slots
        if slots is None or index >= len(slots.slots):
            return False
        believed, real = slots.slots[index], self.runtime.slots[index].tokens
        return keys_for(real)[: len(believed.keys)] != believed.keys and abs(len(real) - believed.tokens) <= 1

    def step(self, *events: m.Event) -> None:
        note(f"at {self.now:g}: " + "; ".join(map(shortly, events)))
        for action in self.scheduler.step(self.now, events):
            note(f"    -> {shortly(action)}")
            match action:
                case m.Forget(name):
                    self.disk.forget(name)
                    self.said.discard(name)
                case m.Admit():
                    self.admitted(action)
                case m.Refuse(rid):
                    assert self.calls[rid].where == "waiting"
                    self.calls[rid].where = "gone"
                case m.Truncate(rid):
                    self.finish_now(self.calls[rid])
                case m.Proceed(rid, spec):
                    call = self.calls[rid]
                    assert call.asking, "an answer that nobody waits for"
                    call.asking = False
                    if spec is not None:
                        call.steps.appendleft(("save", spec))
                case m.SaveSlot(slot, spec, owner):
                    assert self.runtime.slots[slot].busy is None, "a save of a slot at work"
                    self.savings.append(Saving(slot, spec, self.known, owner))
                    if owner is not None:
                        assert self.calls[owner].where == "waiting", "it does not give way"
                        self.calls[owner].where = "saving"
                case m.Preempt(rid, _, _):
                    self.preempted(self.calls[rid])
                case _:
                    raise AssertionError(f"what is {action}?")

    def admitted(self, action: m.Admit) -> None:
        call, plan = self.calls[action.rid], action.plan
        assert call.where == "waiting" and self.up
        assert action.tokens_cached < max(1, len(call.ids)) and plan is not None
        assert action.resumes == (call.legs > 0)
        assert plan.restore is None or self.slot_rules.identity in plan.restore[:3], "a file of another model"
        assert plan.tokens_cached <= max(0, len(call.ids) - 1)
        call.where, call.plan, call.life = "running", plan, self.known
        call.sent = call.hollow = call.asking = False
        call.slot, call.produced, call.cached = plan.slot, 0, 0
        if plan.slot is not None and self.alive:
            busy = self.runtime.slots[plan.slot].busy
            assert busy is None or self.excused(call), f"pinned to a slot where {busy} is at work"
        call.steps = deque([("check", None)])
        if plan.save is not None:
            call.steps.append(("save", plan.save))
        call.steps += [("erase", slot) for slot in plan.erase]
        if plan.restore is not None:
            call.steps.append(("restore", plan.restore))
        if plan.read_first:
            call.steps.append(("read", None))
        call.steps.append(("send", None))

    def preempted(self, call: Call) -> None:
        """Issue section 3: only of a lower class, never for the same request again, one at a time, and not for ever."""
        evictor = self.scheduler._preemption._victims[call.rid].evictor
        assert call.where == "running" and call.asked.preemptible and not call.stopping
        assert not any(other.stopping for other in self.calls.values()), "two at a time"
        assert evictor is not None and self.calls[evictor].where == "waiting"
        assert self.calls[evictor].asked.priority.value < call.asked.priority.value, "it gives way to its own kind"
        assert call.gave_way_to[-1:] != [evictor], "the same pair again"
        assert len(call.gave_way_to) < self.settings.preemptions_max, "too often"
        call.gave_way_to.append(evictor)
        call.stopping = True

    def excused(self, call: Call) -> bool:
        """It belongs to a server that is gone, whether anybody has seen that or not."""
        return call.life != self.life or not self.alive

    # --- a request goes on --------------------------------------------------------------------------------------------

    def advance(self, call: Call, how: str) -> None:
        """The next thing that happens to a running request: a step of its plan, or the news of the last one."""
        if call.event is not None:
            event, call.event = call.event, None
            if isinstance(event, m.PromptRead):
                call.asking = True
            if isinstance(event, m.SlotStarted):
                self.starting = None
            self.tell(event)
            return
        if call.sent:
            self.makes(call, 3)
        if call.asking or not call.steps:
            return
        if not self.slot_rules.pinned and self.starting not in (None, call.rid):
            return  # somebody else has the start lock
        if not self.slot_rules.pinned:
            self.starting = call.rid
        if self.excused(call) and call.steps[0][0] != "check":
            self.breaks_off(call)
            return
        what, with_what = call.steps.popleft()
        getattr(self, f"do_{what}")(call, with_what, how)

    def tell(self, event: m.Event) -> None:
        if isinstance(event, m.SlotSaved) and event.ok:
            self.said.add(event.name)
        self.step(event)

    def breaks_off(self, call: Call) -> None:
        """The connection is gone."""
        self.over(call)
        self.step(m.Ended(call.rid, EndReason.FAILED))

    def over(self, call: Call) -> None:
        call.where, call.event, call.asking, call.stopping = "gone", None, False, False
        call.steps.clear()
        if self.starting == call.rid:
            self.starting = None

    def do_check(self, call: Call, _: None, how: str) -> None:
        """Before a request relies on anything: is it still the same process?"""
        plan = call.plan
        assert plan is not None
        if not self.excused(call):
            return
        if not self.alive or not (plan.tokens_cached or plan.restore):
            self.breaks_off(call)
            return
        self.over(call)
        call.where, self.known = "waiting", self.life
        if call.legs:
            self.step(m.SlotsLost(), m.Ended(call.rid, EndReason.PREEMPTED, 0))
        else:
            self.step(m.SlotsLost(), m.Ended(call.rid, EndReason.FAILED), call.again())

    def do_save(self, call: Call, spec: SaveSpec, how: str) -> None:
        assert call.slot is not None
        event = self.saved(call.slot, spec, how, call.rid)
        if event.ok and spec.why == "evict" and self.next_rid % 3:  # else that is told at once
            self.looked_at.append(evolve(event, rid=None))
            self.step(m.SlotWritten(call.rid, spec.name))
        else:
            call.event = event

    def all_looked_at(self) -> None:
        while self.looked_at:
            self.tell(self.looked_at.pop())

    def saved(self, slot: int, spec: SaveSpec, how: str, rid: RequestId | None) -> m.SlotSaved:
        """The server writes a temporary file; if it is right, it gets its name and its manifest."""
        if how == "fails" or not self.alive:
            return m.SlotSaved(slot, spec.name, False, rid=rid)
        assert self.runtime.slots[slot].busy is None, "a save of a slot at work"
        tokens = list(self.runtime.slots[slot].tokens)
        if len(tokens) < spec.tokens and self.runtime.cells is not None:  # an answer took its cells: it is thrown away
            return m.SlotSaved(slot, spec.name, False, rid=rid)
        assert len(tokens) >= spec.tokens, "less is there than was to be saved"
        keys = keys_for(tokens) if how == "more" else spec.keys
        self.disk.files[spec.name] = tokens
        store = self.scheduler._admission.inject.store
        if store is not None and spec.name in store._places:  # else it was planned for another model, and goes at once
            assert keys_for(tokens)[: len(spec.keys)] == spec.keys, "a file that would not hold what it is said to"
            if spec.why != "swap":
                self.disk.listed[spec.name] = keys
        return m.SlotSaved(slot, spec.name, True, len(tokens), EACH * len(tokens), 0.001, keys, rid)

    def do_erase(self, call: Call, slot: int, how: str) -> None:
        if self.slot_rules.pinned:
            owned = {other.slot for other in self.calls.values() if other.where in ("running", "draining")}
            if slot not in owned:
                self.runtime.erase(slot)
        elif self.runtime.slots[slot].busy is None:
            self.runtime.erase(slot)

    def do_restore(self, call: Call, name: str, how: str) -> None:
        slot = call.slot
        if slot is None:
            idle = [i for i, real in enumerate(self.runtime.slots) if real.busy is None]
            if not idle:
                call.hollow = True
                return
            slot = min(idle, key=lambda i: len(self.runtime.slots[i].tokens))
        if how == "fails" or self.slot_rules.identity not in name[:3]:
            self.disk.files[name] = None  # truncated, bits of it rotten, or another model's
        done = self.runtime.restore(slot, self.disk, name)
        call.hollow = call.hollow or done is None
        if done is None:
            self.disk.forget(name)
            self.said.discard(name)
        call.event = m.Restored(call.rid, name, done is not None, EACH * (done or 0), 0.001)

    def do_read(self, call: Call, _: None, how: str) -> None:
        """Read the prompt and answer nothing."""
        if self.has_to_wait(call):
            call.steps.appendleft(("read", None))
            return
        slot, cached = self.starts(call)
        self.runtime.slots[slot].tokens = list(call.ids)
        self.runtime.stop(call.rid)
        call.cached = cached
        call.slot = slot
        computed = len(call.ids) - cached
        call.event = m.PromptRead(call.rid, cached, computed, computed / 100)

    def do_send(self, call: Call, _: None, how: str) -> None:
        if self.has_to_wait(call):
            call.steps.appendleft(("send", None))
            return
        read = call.plan is not None and call.plan.read_first
        slot, cached = self.starts(call)
        call.cached = call.cached if read else cached
        call.slot, call.sent, call.found = slot, True, cached
        call.event = m.SlotStarted(call.rid)

    def stops(self, call: Call, part: int) -> None:
        """Its upstream is closed; its client stays."""
        slot = next((s for s in self.runtime.slots if s.busy == call.rid), None)
        if isinstance(call.event, m.SlotStarted | m.PromptRead):
            call.event = None
        draining = slot is not None or call.event is not None
        if slot is not None and not call.produced:  # it stops where it was
            slot.tokens = call.ids[: max(call.found, len(call.ids) * part // 100)]
        elif slot is not None:  # the last token of an answer is not there, or it is, and one more
            slot.tokens = call.ids + [ANSWER + call.rid] * (call.produced - 1 + part % 3)
        produced = call.produced
        event = call.event
        self.over(call)
        call.event, call.legs = event, call.legs + 1
        call.ids = call.ids + [ANSWER + call.rid] * produced
        call.most = None if call.most is None else call.most - produced
        call.where = "parking" if draining else "waiting"
        self.step(m.Ended(call.rid, EndReason.PREEMPTED, produced, draining=draining))

    def has_to_wait(self, call: Call) -> bool:
        """The runtime lets it wait: there are those that KVStream knows nothing of, and it may run in any slot."""
        pinned = call.plan is not None and call.plan.slot is not None
        return bool(self.zombies) and not pinned and all(slot.busy is not None for slot in self.runtime.slots)

    def starts(self, call: Call) -> tuple[int, int]:
        plan = call.plan
        assert plan is not None
        pin = plan.slot if plan.slot is not None else None
        if pin is not None and self.runtime.slots[pin].busy in self.zombies:
            raise AssertionError("pinned to a slot where somebody unknown is at work")
        slot, cached = self.runtime.start(call.rid, call.ids, pin)
        self.runtime.slots[slot].tokens = list(call.ids)
        assert self.runtime.make_cells() or self.zombies, "a unified pool is overdrawn: every stream is killed"
        self.runtime.slots[slot].tokens = call.ids[:cached]
        assert call.hollow or cached >= plan.tokens_cached, (
            f"{plan.tokens_cached} tokens were promised to {call.rid}, {cached} were there")
        return slot, cached

    def finish_now(self, call: Call) -> None:
        slot = next((s for s in self.runtime.slots if s.busy == call.rid), None)
        if slot is not None:
            slot.tokens = (call.ids + [ANSWER + call.rid] * max(0, call.produced - 1))[: 40 * PAGE]
        self.runtime.stop(call.rid)
        self.over(call)
        computed = len(call.ids) - call.cached
        self.step(m.CacheSeen(call.rid, call.cached, len(call.ids), computed / 100),
                  m.Ended(call.rid, EndReason.FINISHED, call.produced))

    # --- rules --------------------------------------------------------------------------------------------------------

    def some(self, data: st.DataObject, calls: list[Call]) -> Call:
        return calls[data.draw(st.integers(0, len(calls) - 1))]

    def running(self) -> list[Call]:
        return [call for call in self.calls.values() if call.where == "running"]

    @rule(prompt=prompts, tokens=st.integers(1, 200) | st.integers(100, 200), most=st.none() | st.integers(1, 60),
          kind=st.sampled_from(["pin"] * 9 + ["guess", "float", "two"]), again=st.integers(1, 3),
          priority=st.sampled_from([Priority.LOW, Priority.LOW, Priority.NORMAL, Priority.HIGH]))
    def submit(self, prompt: str, tokens: int, most: int | None, kind: str, again: int, priority: Priority) -> None:
        pinnable = kind in ("pin", "guess")
        tokens = tokens if pinnable else FLOAT_TOKENS + tokens
        for _ in range(again if pinnable else 1):
            if len([c for c in self.calls.values() if c.where == "waiting"]) >= 12:
                return
            self.next_rid += 1
            rid, ids = RequestId(self.next_rid), ids_of(prompt, tokens)
            asked = m.Submitted(
                rid, keys_for(ids), tokens, most, 1e9, seats=2 if kind == "two" else 1, pinnable=pinnable,
                exact=kind == "pin", bytes=1, count_source=CountSource.EXACT, priority=priority,
                preemptible=pinnable and tokens % 4 > 0)
            self.calls[rid] = Call(rid, ids, asked, most=most)
            self.step(asked)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), how=st.sampled_from(["well", "well", "well", "more", "fails"]), times=st.integers(1, 4))
    def go_on(self, data: st.DataObject, how: str, times: int) -> None:
        call = self.some(data, self.running())
        for _ in range(times):
            if call.where == "running":
                self.advance(call, how)

    @precondition(lambda self: self.running())
    @rule(how=st.sampled_from(["well", "well", "well", "more", "fails"]), times=st.integers(1, 4))
    def all_go_on(self, how: str, times: int) -> None:
        for _ in range(times):
            for call in self.running():
                if call.where == "running":
                    self.advance(call, how)

    @precondition(lambda self: self.running())
    @rule(seconds=st.sampled_from([0.0, 6.0]))
    def all_end(self, seconds: float) -> None:
        """A quiet while: everything that was begun comes to its end, and the last slot is idle for a time."""
        self.to_the_end()
        self.now += seconds
        self.step()

    @precondition(lambda self: any(c.sent and c.event is None for c in self.running()))
    @rule(tokens=st.integers(1, 20))
    def produce(self, tokens: int) -> None:
        for call in [c for c in self.running() if c.sent and c.event is None]:
            if call.where == "running":
                self.makes(call, tokens)

    def makes(self, call: Call, tokens: int) -> None:
        most = 40 * PAGE - len(call.ids) if call.most is None else call.most
        tokens = min(tokens, most - call.produced, 20 if self.runtime.cells is None else 4)
        if tokens > 0 and not self.excused(call):
            call.produced += tokens
            slot = next(s for s in self.runtime.slots if s.busy == call.rid)
            slot.tokens = call.ids + [ANSWER + call.rid] * call.produced
            assert self.runtime.make_cells() or self.zombies, "a unified pool is overdrawn: every stream is killed"
            self.step(m.Produced(call.rid, tokens))

    @precondition(lambda self: any(c.sent and c.event is None for c in self.running()))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        call = self.some(data, [c for c in self.running() if c.sent and c.event is None])
        if self.excused(call):
            self.breaks_off(call)
        else:
            self.finish_now(call)

    @precondition(lambda self: any(c.stopping for c in self.running()))
    @rule(part=st.integers(0, 100), bound=st.sampled_from([False, False, False, True]))
    def give_way(self, part: int, bound: bool) -> None:
        call = next(c for c in self.running() if c.stopping)
        if bound:
            call.stopping, call.asked = False, evolve(call.asked, preemptible=False)
            self.step(m.Bound(call.rid))
        else:
            self.stops(call, part)

    @precondition(lambda self: any(c.where in ("parking", "saving") and not c.left for c in self.calls.values()))
    @rule(data=st.data())
    def leave_giving_way(self, data: st.DataObject) -> None:
        call = self.some(data, [c for c in self.calls.values() if c.where in ("parking", "saving") and not c.left])
        call.left = True
        self.step(m.Ended(call.rid, EndReason.CANCELLED, draining=True))

    @precondition(lambda self: any(c.where in ("waiting", "running") for c in self.calls.values()))
    @rule(data=st.data(), part=st.integers(0, 100))
    def leave(self, data: st.DataObject, part: int) -> None:
        """A client goes. A slot job that was begun ends and is told; what is in the runtime drains."""
        call = self.some(data, [c for c in self.calls.values() if c.where in ("waiting", "running")])
        busy = any(slot.busy == call.rid for slot in self.runtime.slots)
        if call.where == "running" and (busy or call.event is not None):
            call.where, call.asking, call.stopping = "draining", False, False
            call.steps.clear()
            if isinstance(call.event, m.SlotStarted | m.PromptRead):
                call.event = None
            if self.starting == call.rid:
                self.starting = None
            slot = next((s for s in self.runtime.slots if s.busy == call.rid), None)
            if slot is not None and not call.produced:  # it stops where it was
                slot.tokens = call.ids[: max(call.found, len(call.ids) * part // 100)]
            self.step(m.Ended(call.rid, EndReason.CANCELLED, draining=True))
        else:
            self.over(call)
            self.step(m.Ended(call.rid, EndReason.CANCELLED))

    @precondition(lambda self: any(c.where in ("draining", "parking") for c in self.calls.values()))
    @rule(data=st.data(), capped=st.sampled_from([False, False, True]))
    def drained(self, data: st.DataObject, capped: bool) -> None:
        self.drain(self.some(data, [c for c in self.calls.values() if c.where in ("draining", "parking")]), capped)

    def drain(self, call: Call, capped: bool) -> None:
        if call.event is not None:
            event, call.event = call.event, None
            self.tell(event)
            return
        capped = capped and any(slot.busy == call.rid for slot in self.runtime.slots)
        if capped:
            self.zombies.add(call.rid)
        else:
            self.runtime.stop(call.rid)
        waits = call.where == "parking" and not call.left
        self.over(call)
        call.where = "waiting" if waits else "gone"
        self.step(m.SeatIdle(call.rid, capped))

    @precondition(lambda self: self.savings)
    @rule(data=st.data(), how=st.sampled_from(["well", "well", "more", "fails"]))
    def save_goes_on(self, data: st.DataObject, how: str) -> None:
        self.save_on(self.savings[data.draw(st.integers(0, len(self.savings) - 1))], how)

    def save_on(self, saving: Saving, how: str) -> None:
        if saving.event is None:
            # Another server has other tokens in that slot, which the shell sees by their number.
            how = how if saving.life == self.life else "fails"
            saving.event = self.saved(saving.slot, saving.spec, how, saving.rid)
        else:
            self.savings.remove(saving)
            if saving.rid is not None and self.calls[saving.rid].where == "saving":
                call = self.calls[saving.rid]
                call.where = "gone" if call.left else "waiting"
            self.tell(saving.event)

    @precondition(lambda self: self.looked_at)
    @rule(data=st.data())
    def a_file_was_looked_at(self, data: st.DataObject) -> None:
        self.tell(self.looked_at.pop(data.draw(st.integers(0, len(self.looked_at) - 1))))

    @precondition(lambda self: self.up and self.alive and self.is_quiet() and (
        self.scheduler.wants_look or self.trouble("look")))
    @rule()
    def look(self) -> None:
        self.troubles["look"] -= 1
        self.step(self.seen())

    def is_quiet(self) -> bool:
        """No call of ours is on its way to any slot."""
        return not self.savings and all(call.event is None for call in self.calls.values())

    @precondition(lambda self: self.zombies)
    @rule()
    def zombie_ends(self) -> None:
        for slot in self.runtime.slots:
            if slot.busy in self.zombies:
                slot.busy = None
        self.zombies.clear()

    @rule(seconds=st.sampled_from([0.1, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.step()

    @precondition(lambda self: self.alive and self.up and self.troubles["others"])
    @rule(prompt=prompts, tokens=st.integers(1, 100))
    def others_use_it(self, prompt: str, tokens: int) -> None:
        """Somebody else, and KVStream sees it before it does anything more."""
        self.troubles["others"] -= 1
        idle = [slot for slot in self.runtime.slots if slot.busy is None]
        claimed = any(c.where == "running" and not c.sent for c in self.calls.values()) or self.savings
        if idle and not claimed:
            idle[0].tokens = ids_of(prompt, tokens)
            self.step(m.SlotsLost())

    @precondition(lambda self: self.alive and self.trouble("server"))
    @rule(quick=st.booleans())
    def server_dies(self, quick: bool) -> None:
        """``quick``: another one is there before anybody has seen it."""
        self.troubles["server"] -= 1
        self.runtime.restart()
        self.zombies.clear()
        self.life += 1
        self.alive = quick
        for saving in self.savings:
            if saving.event is None:
                saving.event = m.SlotSaved(saving.slot, saving.spec.name, False, rid=saving.rid)

    @precondition(lambda self: self.alive and self.up and self.known == self.life and self.trouble("identity"))
    @rule()
    def it_is_another_model(self) -> None:
        """Found out while requests run. Whatever was computed before is of no use, however long it is."""
        self.troubles["identity"] -= 1
        for slot in self.runtime.slots:
            slot.tokens = [0] * len(slot.tokens)
        for call in self.running():
            call.hollow = True
        self.slot_rules = evolve(self.slot_rules, identity="cd" if self.slot_rules.identity == "ab" else "ab")
        self.said = set(self.mine())
        self.step(m.SlotsKnown(self.slot_rules), self.loaded())

    @precondition(lambda self: self.up and self.troubles["closing"] and self.next_rid > 5)
    @rule(refuse=st.booleans())
    def kvstream_drains(self, refuse: bool) -> None:
        self.troubles["closing"] -= 1
        self.step(m.Closing(refuse))

    @precondition(lambda self: not self.alive or self.known != self.life)
    @rule(at_once=st.booleans())
    def server_is_missed(self, at_once: bool = True) -> None:
        """The watcher sees that it is gone, or another one: every connection to it is."""
        stale = [call for call in self.calls.values() if call.where in ("running", "draining") and self.excused(call)]
        if not self.alive:
            self.up = False
            self.step(m.BackendDown())
        for call in stale:
            if call.where != "gone":
                self.breaks_off(call)
        for call in self.calls.values():
            while at_once and call.where == "parking":
                self.drain(call, False)
        self.alive = True
        self.server_is_up(fresh=True)

    @precondition(lambda self: self.trouble("kvstream"))
    @rule()
    def kvstream_dies(self) -> None:
        self.troubles["kvstream"] -= 1
        for slot in self.runtime.slots:
            if slot.busy is not None:
                self.zombies.add(slot.busy)
        for call in self.calls.values():
            self.over(call)
        for name in self.disk.files.keys() - self.disk.listed.keys():
            self.disk.forget(name)
        self.said.clear()
        self.savings, self.looked_at, self.starting = [], [], None
        self.kvstream_starts()

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def the_books_are_right(self) -> None:
        if not self.ready:
            return
        self.scheduler.check_invariants()
        view = self.scheduler.snapshot(self.now)
        for where, rids in (("waiting", {w.rid for w in view.waiting}),
                            ("running", {r.rid for r in view.running if not r.draining}),
                            ("draining parking saving", {r.rid for r in view.running if r.draining})):
            assert rids == {rid for rid, call in self.calls.items() if call.where in where.split()}, where

    @invariant()
    def what_is_believed_of_slots_is_true(self) -> None:
        slots = self.scheduler._admission.inject.slots if self.ready else None
        if slots is None or not self.alive or self.known != self.life:
            return
        for slot in slots.free():
            real = self.runtime.slots[slot.index]
            assert real.busy is None, "a slot at work would be given away"
            if slot.exact and not slot.doubtful:
                assert keys_for(real.tokens)[: len(slot.keys)] == slot.keys, "a slot does not hold what is believed"

    @invariant()
    def what_is_offered_is_on_disk(self) -> None:
        store = self.scheduler._admission.inject.store if self.ready else None
        if store is None:
            return
        for entry in store.entries():
            real = self.disk.files.get(entry.name)
            if real is None:
                continue  # it went bad, or is about to be told: the restore fails
            assert keys_for(real)[: len(entry.keys)] == entry.keys, "a wrong prefix is offered"
        assert self.said <= {entry.name for entry in store.entries()}, "something saved was lost"
        assert store.bytes <= self.settings.saved_bytes_max or store._holds or any(
            entry.name.startswith("s") for entry in store.entries())

    @invariant()
    def an_idle_lane_serves(self) -> None:
        places = [call.where for call in self.calls.values()]
        if self.ready and self.up and set(places) <= {"waiting", "gone"} and not self.savings and not self.looked_at:
            assert "waiting" not in places, "somebody waits for an idle lane"

    def to_the_end(self) -> None:
        """Everything that was begun comes to its end."""
        if not self.alive or self.known != self.life:
            self.server_is_missed()
        for _ in range(2000):
            live = [call for call in self.calls.values() if call.where not in ("waiting", "gone")]
            waiting = any(call.where == "waiting" for call in self.calls.values())
            if not live and not waiting and not self.savings and not self.looked_at:
                return
            self.all_looked_at()
            self.zombie_ends()
            for call in live:
                if call.where in ("draining", "parking"):
                    self.drain(call, False)
                elif call.where == "running" and call.stopping:
                    self.stops(call, 50)
                elif call.where == "running" and call.sent and call.event is None:
                    self.finish_now(call)
                elif call.where == "running":
                    self.advance(call, "well")
            for saving in list(self.savings):
                self.save_on(saving, "well")
            if self.scheduler.wants_look and self.is_quiet():
                self.step(self.seen())
            self.step()
        raise AssertionError("requests that never end")

    def teardown(self) -> None:
        if self.ready:
            self.to_the_end()
            self.the_books_are_right()
            self.what_is_believed_of_slots_is_true()
            self.what_is_offered_is_on_disk()


TestInjectMachine = InjectMachine.TestCase
TestInjectMachine.settings = hypothesis_settings(
    max_examples=max(60, hypothesis_settings.default.max_examples), stateful_step_count=50)
