"""Hard inject under any sequence of events: the scheduler beside a naive runtime that holds real tokens.

The machine plays the shell: it carries out the plan of an admitted request step by step, tells the scheduler what came
of each, and between any two of these steps everything may happen: clients leave, a step fails, others use the slots,
the server or KVStream dies. What must hold after *every* step:

* a promise is kept: what a request is said to find is in its slot when it gets there, unless a step of its plan failed;
* what the scheduler believes of a slot that it would give away is there; nobody is sent to a slot at work, nobody
  saves, restores or erases one (``NaiveRuntime`` asserts it), and nobody waits in the runtime's own queue;
* what is offered of the store is on disk and begins with the pages it is said to; what was said to be saved is offered
  until it was said to be forgotten;
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
from kvstream.core.types import EndReason, Limits, PoolMode, RequestId, SavedPrefix, SaveSpec, SlotPlan, SlotRules
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
    request is in the runtime, ``hollow``: a step failed, so what it was promised may not be there."""

    rid: RequestId
    ids: list[int]
    asked: m.Submitted
    where: str = "waiting"  # running, draining, gone
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

    def again(self) -> m.Submitted:
        """Back to its place: nobody has seen that it had been granted."""
        return evolve(self.asked, again=True)


@define
class Saving:
    """A save without a request."""

    slot: int
    spec: SaveSpec
    life: int
    event: m.SlotSaved | None = None


def shortly(message: m.Event | m.Action) -> str:
    """For the story of a failure."""
    match message:
        case m.Submitted(rid=rid):
            size = f"{len(message.keys)} pages, {message.tokens}+{message.tokens_max}"
            return f"Submitted({rid}, {size}, pin={message.pinnable})"
        case m.Admit(rid=rid):
            return f"Admit({rid}, {message.plan})"
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
        self.disk = Disk()
        self.said: set[str] = set()  # saved, as the scheduler was told, and not forgotten since
        self.alive = self.up = False
        self.life = self.known = 0  # of the server: which one it is, and which one KVStream believes it to be
        self.zombies: set[int] = set()  # at work for nobody that KVStream knows
        self.starting: RequestId | None = None  # has the start lock
        self.ready = False
        self.troubles = {"kvstream": 2, "server": 2, "others": 2, "look": 3}  # so many of each, or nothing else is done

    def trouble(self, what: str) -> bool:
        """Whether it may happen, now that something goes on."""
        return self.troubles[what] > 0 and any(call.where in ("running", "draining") for call in self.calls.values())

    @initialize(slots=st.integers(1, 3), pinned=st.sampled_from([True, True, True, False]), unified=st.booleans(),
                read_first=st.sampled_from([0.0, 0.0, 0.5]), size=st.sampled_from([10_000, 2500, 10_000, 0]),
                host=st.sampled_from([20, 200]), prefix=st.sampled_from([True, True, True, False]))
    def begin(self, slots: int, pinned: bool, unified: bool, read_first: float, size: int, host: int,
              prefix: bool) -> None:
        self.runtime = NaiveRuntime.of(slots, emptying=not pinned)
        mode = PoolMode.UNIFIED if unified or not pinned else PoolMode.SPLIT
        self.limits = Limits(mode, slots, pages=slots * 40, page_tokens=PAGE, request_tokens_max=40 * PAGE,
                             host_pages=host, source="test")
        self.slot_rules = SlotRules(slots, pinned, "ab", token_bytes=EACH)
        self.settings = SchedulerSettings(
            seats_max=4, queue_max=20, wait_s_max=1000.0, watermark=0.0, answer_tokens_default=16, shed=False,
            leader_tokens=2 * PAGE, read_first_s=read_first, save_tokens_min=PAGE, saved_bytes_max=size,
            prefix_enabled=prefix, long_prefills_max=2, long_prefill_tokens=5 * PAGE)
        self.kvstream_starts()

    # --- the shell --------------------------------------------------------------------------------------------------

    def kvstream_starts(self) -> None:
        self.scheduler = Scheduler(self.settings)
        self.alive, self.ready = True, True
        self.server_is_up(fresh=False)

    def server_is_up(self, *, fresh: bool) -> None:
        """What ``SlotLane.learn`` posts, in the step that lets the first request in."""
        self.up, self.known = True, self.life
        untold = {saving.spec.name for saving in self.savings} | {
            call.event.name for call in self.calls.values() if isinstance(call.event, m.SlotSaved)}
        self.said = self.disk.listed.keys() - untold
        entries = [SavedPrefix(name, keys, len(self.disk.files[name] or ()), EACH * len(self.disk.files[name] or ()))
                   for name, keys in self.disk.listed.items()]
        self.step(m.BackendUp(self.limits, fresh=fresh), m.SlotsKnown(self.slot_rules), m.StoreLoaded(tuple(entries)),
                  self.seen())

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
                case m.SaveSlot(slot, spec, _):
                    assert self.runtime.slots[slot].busy is None, "a save of a slot at work"
                    self.savings.append(Saving(slot, spec, self.known))
                case _:
                    raise AssertionError(f"what is {action}?")

    def admitted(self, action: m.Admit) -> None:
        call, plan = self.calls[action.rid], action.plan
        assert call.where == "waiting" and self.up
        assert action.tokens_cached < max(1, len(call.ids)) and plan is not None
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
        call.where, call.event, call.asking = "gone", None, False
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
        self.step(m.SlotsLost(), m.Ended(call.rid, EndReason.FAILED), call.again())

    def do_save(self, call: Call, spec: SaveSpec, how: str) -> None:
        assert call.slot is not None
        call.event = self.saved(call.slot, spec, how, call.rid)

    def saved(self, slot: int, spec: SaveSpec, how: str, rid: RequestId | None) -> m.SlotSaved:
        """The server writes a temporary file; if it is right, it gets its name and its manifest."""
        if how == "fails" or not self.alive:
            return m.SlotSaved(slot, spec.name, False, rid=rid)
        assert self.runtime.slots[slot].busy is None, "a save of a slot at work"
        tokens = list(self.runtime.slots[slot].tokens)
        assert len(tokens) >= spec.tokens, "less is there than was to be saved"
        assert keys_for(tokens)[: len(spec.keys)] == spec.keys, "a file that would not hold what it is said to"
        keys = keys_for(tokens) if how == "more" else spec.keys
        self.disk.files[spec.name] = tokens
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
        if how == "fails":
            self.disk.files[name] = None  # truncated, or bits of it rotten
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

    @rule(prompt=prompts, tokens=st.integers(1, 200), most=st.none() | st.integers(1, 60),
          kind=st.sampled_from(["pin"] * 9 + ["guess", "float", "two"]), again=st.integers(1, 3))
    def submit(self, prompt: str, tokens: int, most: int | None, kind: str, again: int) -> None:
        pinnable = kind in ("pin", "guess")
        tokens = tokens if pinnable else FLOAT_TOKENS + tokens
        for _ in range(again if pinnable else 1):
            if len([c for c in self.calls.values() if c.where == "waiting"]) >= 12:
                return
            self.next_rid += 1
            rid, ids = RequestId(self.next_rid), ids_of(prompt, tokens)
            asked = m.Submitted(
                rid, keys_for(ids), tokens, most, 1e9, seats=2 if kind == "two" else 1, pinnable=pinnable,
                exact=kind == "pin", bytes=1)
            self.calls[rid] = Call(rid, ids, asked)
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
        most = call.asked.tokens_max
        tokens = tokens if most is None else min(tokens, most - call.produced)
        if tokens > 0 and not self.excused(call):
            call.produced += tokens
            slot = next(s for s in self.runtime.slots if s.busy == call.rid)
            slot.tokens = call.ids + [ANSWER + call.rid] * call.produced
            self.step(m.Produced(call.rid, tokens))

    @precondition(lambda self: any(c.sent and c.event is None for c in self.running()))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        call = self.some(data, [c for c in self.running() if c.sent and c.event is None])
        if self.excused(call):
            self.breaks_off(call)
        else:
            self.finish_now(call)

    @precondition(lambda self: any(c.where in ("waiting", "running") for c in self.calls.values()))
    @rule(data=st.data(), part=st.integers(0, 100))
    def leave(self, data: st.DataObject, part: int) -> None:
        """A client goes. A slot job that was begun ends and is told; what is in the runtime drains."""
        call = self.some(data, [c for c in self.calls.values() if c.where in ("waiting", "running")])
        busy = any(slot.busy == call.rid for slot in self.runtime.slots)
        if call.where == "running" and (busy or call.event is not None):
            call.where, call.asking = "draining", False
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

    @precondition(lambda self: any(c.where == "draining" for c in self.calls.values()))
    @rule(data=st.data(), capped=st.sampled_from([False, False, True]))
    def drained(self, data: st.DataObject, capped: bool) -> None:
        self.drain(self.some(data, [c for c in self.calls.values() if c.where == "draining"]), capped)

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
        self.over(call)
        self.step(m.SeatIdle(call.rid, capped))

    @precondition(lambda self: self.savings)
    @rule(data=st.data(), how=st.sampled_from(["well", "well", "more", "fails"]))
    def save_goes_on(self, data: st.DataObject, how: str) -> None:
        self.save_on(self.savings[data.draw(st.integers(0, len(self.savings) - 1))], how)

    def save_on(self, saving: Saving, how: str) -> None:
        if saving.event is None:
            # Another server has other tokens in that slot, which the shell sees by their number.
            saving.event = self.saved(saving.slot, saving.spec, how if saving.life == self.life else "fails", None)
        else:
            self.savings.remove(saving)
            self.tell(saving.event)

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
                saving.event = m.SlotSaved(saving.slot, saving.spec.name, False)

    @precondition(lambda self: not self.alive or self.known != self.life)
    @rule()
    def server_is_missed(self) -> None:
        """The watcher sees that it is gone, or another one: every connection to it is."""
        stale = [call for call in self.calls.values() if call.where in ("running", "draining") and self.excused(call)]
        if not self.alive:
            self.up = False
            self.step(m.BackendDown())
        for call in stale:
            if call.where != "gone":
                self.breaks_off(call)
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
        self.savings, self.starting = [], None
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
                            ("draining", {r.rid for r in view.running if r.draining})):
            assert rids == {rid for rid, call in self.calls.items() if call.where == where}, where

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
        assert store.bytes <= self.settings.saved_bytes_max or store._holds

    @invariant()
    def an_idle_lane_serves(self) -> None:
        places = [call.where for call in self.calls.values()]
        if self.ready and self.up and not {"running", "draining"} & set(places) and not self.savings:
            assert "waiting" not in places, "somebody waits for an idle lane"

    def to_the_end(self) -> None:
        """Everything that was begun comes to its end."""
        if not self.alive or self.known != self.life:
            self.server_is_missed()
        for _ in range(2000):
            live = [call for call in self.calls.values() if call.where in ("running", "draining")]
            waiting = any(call.where == "waiting" for call in self.calls.values())
            if not live and not waiting and not self.savings:
                return
            self.zombie_ends()
            for call in live:
                if call.where == "draining":
                    self.drain(call, False)
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
TestInjectMachine.settings = hypothesis_settings(max_examples=60, stateful_step_count=50)
