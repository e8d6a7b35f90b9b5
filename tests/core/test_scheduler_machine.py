"""The scheduler under any sequence of events, beside a naive model that only remembers who is where.

What must hold after *every* step, not only at the end: nobody waits past the deadline; who left holds nothing and gets
no more actions; an idle lane with a waiting request does not exist (no livelock); seats are never exceeded; a unified
pool is never promised twice; pages are never shared by two running requests where the runtime cannot. And of the gates:
never more long prompts being read than may be, one group at a time, one pioneer per cold group, no more of a client or
of a narrowed lane than allowed, nobody shed who could wait; and whoever is held back has somebody running to wait for.
"""

from __future__ import annotations

from typing import Any

from attrs import define
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstream.core import messages as m
from kvstream.core.scheduler import Scheduler, SchedulerSettings
from kvstream.core.types import HOLDS, EndReason, Limits, PoolMode, RefuseReason, RequestId
from tests.play import keys_of
from tests.strategies import PAGE, backends, groups, prompts, reasons, rids, submissions

WAIT_S, QUEUE, QUEUE_BYTES = 50.0, 6, 200
LONG = 100  # tokens of a long prompt


@define
class Known:
    """A request as the model sees it."""

    tokens: int
    tokens_max: int | None
    deadline: float
    size: int
    where: str  # waiting, running, draining, gone
    table: m.PageTable | None = None
    produced: int = 0
    truncated: bool = False
    client: str = ""
    group: str = ""
    seats: int = 1
    long: bool = False  # admitted with a long uncached prompt
    filling: bool = False  # and no token yet
    narrowed: bool = False  # admitted since the lane was narrowed


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.scheduler: Scheduler | None = None
        self.now = 0.0
        self.next_rid = 0
        self.known: dict[int, Known] = {}
        self.limits: Limits | None = None
        self.up = self.refusing = self.closing = False
        self.disturbed = False  # limits changed under running requests: their sum need not fit any more
        self.narrow: int | None = None
        self.ramping = False

    def started(self, order: str, watermark: float, backfill: bool, prefix: bool, **gates: Any) -> Scheduler:
        return Scheduler(SchedulerSettings(
            order="sjf" if order == "sjf" else "fcfs", seats_max=4, queue_max=QUEUE, queue_bytes_max=QUEUE_BYTES,
            wait_s_max=WAIT_S, ageing_s=10.0, answer_tokens_default=20, backfill=backfill, watermark=watermark,
            prefix_enabled=prefix, prefix_tokens_max=64, prefix_ttl_s=30.0, expiries_per_step_max=3,
            long_prefill_tokens=LONG, cold_after_s=15.0, switch_wait_s=5.0, shed_probe_every=3, **gates,
        ))

    @precondition(lambda self: self.scheduler is None)
    @rule(order=st.sampled_from(["fcfs", "sjf"]), watermark=st.sampled_from([0.0, 0.1]), backfill=st.booleans(),
          prefix=st.booleans(), longs=st.integers(0, 2), leader=st.sampled_from([0, PAGE, 2 * PAGE]),
          cold=st.booleans(), exclusive=st.booleans(), each=st.integers(0, 2))
    def start(self, order: str, watermark: float, backfill: bool, prefix: bool, longs: int, leader: int, cold: bool,
              exclusive: bool, each: int) -> None:
        self.scheduler = self.started(
            order, watermark, backfill, prefix, long_prefills_max=longs, leader_tokens=leader, cold_groups=cold,
            exclusive_groups=exclusive, client_seats_max=each)

    # --- events -----------------------------------------------------------------------------------------------------

    def step(self, *events: m.Event) -> None:
        if self.scheduler is None:
            self.scheduler = self.started("fcfs", 0.0, True, True)
        for action in self.scheduler.step(self.now, events):
            known = self.known[action.rid]
            match action:
                case m.Admit(_, table, cached, reserved):
                    assert known.where == "waiting" and self.up and known.deadline > self.now
                    self.check_admission(known, table, cached, reserved)
                    known.where, known.table = "running", table
                    known.filling, known.long = True, known.tokens - cached > LONG
                    known.narrowed = self.narrow is not None
                case m.Refuse(_, why):
                    assert known.where == "waiting"
                    self.check_refusal(known, why)
                    known.where = "gone"
                case m.Truncate():
                    assert known.where == "running" and not known.truncated
                    assert self.limits is not None and self.limits.mode is PoolMode.UNIFIED
                    known.truncated = True

    def check_admission(self, known: Known, table: m.PageTable, cached: int, reserved: int) -> None:
        assert self.limits is not None and self.scheduler is not None
        assert table.length == known.tokens and table.pages_held == -(-known.tokens // PAGE)
        assert cached % PAGE == 0 and cached <= max(0, known.tokens - 1)
        assert reserved >= 0
        answer = 20 if known.tokens_max is None else max(1, known.tokens_max)
        end = min(known.tokens + answer, self.limits.request_tokens_max or 10**9, self.pages * PAGE)
        assert table.pages_held + reserved >= -(-end // PAGE), "not enough set aside for the answer"

    def check_refusal(self, known: Known, why: RefuseReason) -> None:
        match why:
            case RefuseReason.TIMEOUT:
                assert known.deadline <= self.now
            case RefuseReason.CLOSING:
                assert self.closing
            case RefuseReason.BACKEND_DOWN:
                assert self.refusing
            case RefuseReason.TOO_LONG:
                assert self.limits is not None
                assert known.tokens + 1 > min(self.limits.request_tokens_max or 10**9, self.pages * PAGE)
            case RefuseReason.QUEUE_FULL:
                assert sum(k.where == "waiting" for k in self.known.values()) > QUEUE
            case RefuseReason.SHED:
                assert self.up and known.deadline > self.now and self.narrow is None
            case RefuseReason.QUEUE_BYTES:
                assert sum(k.size for k in self.known.values() if k.where == "waiting") > QUEUE_BYTES

    @property
    def pages(self) -> int:
        limits = self.limits
        assert limits is not None
        if limits.mode is PoolMode.SPLIT and limits.request_tokens_max:
            return max(limits.pages, limits.seats * -(-limits.request_tokens_max // PAGE))
        return limits.pages

    def submission(self, data: st.DataObject) -> m.Submitted:
        self.next_rid += 1
        event = data.draw(submissions(self.next_rid, self.now))
        self.known[event.rid] = Known(
            event.tokens, event.tokens_max, min(event.deadline, self.now + WAIT_S), event.bytes, "waiting",
            client=event.client, group=event.group, seats=event.seats,
        )
        return event

    @rule(data=st.data(), n=st.integers(1, 4))
    def submit(self, data: st.DataObject, n: int) -> None:
        self.step(*(self.submission(data) for _ in range(n)))

    @rule(limits=backends(), fresh=st.booleans(), ramp=st.booleans())
    def backend_up(self, limits: Limits, fresh: bool, ramp: bool) -> None:
        if self.limits not in (None, limits):
            self.disturbed = any(k.where in ("running", "draining") for k in self.known.values())
        self.limits, self.up, self.refusing = limits, True, False
        self.step(m.BackendUp(limits, fresh, ramp))

    @rule(seats=st.none() | st.integers(0, 3))
    def narrowed(self, seats: int | None) -> None:
        self.narrow = seats
        for known in self.known.values():
            known.narrowed = False
        self.step(m.Narrowed(seats))

    @rule(group=groups)
    def warmed(self, group: str) -> None:
        self.step(m.Warmed(group))

    @rule(refuse=st.booleans())
    def backend_down(self, refuse: bool) -> None:
        self.up, self.refusing = False, refuse
        self.step(m.BackendDown(refuse))

    @precondition(lambda self: self.limits is not None)
    @rule()
    def back_again(self) -> None:
        assert self.limits is not None
        self.up, self.refusing = True, False
        self.step(m.BackendUp(self.limits))

    @rule(rid=rids, tokens=st.integers(1, 30))
    def produce(self, rid: RequestId, tokens: int) -> None:
        known = self.known.get(rid)
        if known and known.tokens_max is not None and self.limits and self.limits.mode is PoolMode.UNIFIED:
            tokens = min(tokens, known.tokens_max - known.produced)  # a runtime keeps its limits
        if known and known.where == "running" and not known.truncated and tokens > 0:
            tokens = min(tokens, PAGE // 2)  # and reports at least every half page
            known.produced += tokens
            known.filling = False
            self.step(m.Produced(rid, tokens))

    @rule(rid=rids)
    def produce_for_a_stranger(self, rid: RequestId) -> None:
        if rid not in self.known or self.known[rid].where in ("waiting", "gone"):
            self.step(m.Produced(rid, 5))

    @rule(rid=rids, reason=reasons, draining=st.booleans())
    def end(self, rid: RequestId, reason: EndReason, draining: bool) -> None:
        known = self.known.get(rid)
        if known is not None:
            stays = draining and known.where in ("running", "draining")
            known.where = "draining" if stays else "gone"
        self.step(m.Ended(rid, reason, draining=draining))

    @rule(rid=rids)
    def idle(self, rid: RequestId) -> None:
        if rid in self.known and self.known[rid].where == "draining":
            self.known[rid].where = "gone"
        self.step(m.SeatIdle(rid))

    @rule(rid=rids, tokens=st.integers(0, 200), prompt=prompts)
    def recount(self, rid: RequestId, tokens: int, prompt: str) -> None:
        if rid in self.known and self.known[rid].where == "waiting":
            self.known[rid].tokens = tokens
        self.step(m.Recounted(rid, keys_of(prompt, tokens), tokens))

    @rule(seconds=st.sampled_from([0.1, 3.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.step()

    @rule(refuse_waiting=st.booleans())
    def close(self, refuse_waiting: bool) -> None:
        if self.next_rid < 12:  # late, or most runs would be spent closed
            return
        self.closing = True
        self.step(m.Closing(refuse_waiting))

    # --- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def the_books_are_right(self) -> None:
        if self.scheduler is None:
            return
        self.scheduler.check_invariants()
        view = self.scheduler.snapshot(self.now)
        by_place = {where: {r for r, k in self.known.items() if k.where == where}
                    for where in ("waiting", "running", "draining")}
        assert {w.rid for w in view.waiting} == by_place["waiting"]
        assert {r.rid for r in view.running if r.draining} == by_place["draining"]
        assert {r.rid for r in view.running if not r.draining} == by_place["running"]
        assert len(view.waiting) <= QUEUE and view.waiting_bytes <= QUEUE_BYTES

    @invariant()
    def nobody_waits_past_the_deadline(self) -> None:
        waiting = [k.deadline for k in self.known.values() if k.where == "waiting"]
        assert all(deadline > self.now for deadline in waiting)
        wake = self.scheduler.next_deadline() if self.scheduler else None
        assert not waiting or (wake is not None and wake <= min(waiting))

    @invariant()
    def an_idle_lane_serves(self) -> None:
        places = [k.where for k in self.known.values()]
        if self.up and "running" not in places and "draining" not in places and self.narrow != 0:
            assert "waiting" not in places, "somebody waits for an idle lane"

    @invariant()
    def gates_keep_their_bounds(self) -> None:
        if self.scheduler is None:
            return
        settings = self.scheduler.settings
        inside = [k for k in self.known.values() if k.where in ("running", "draining")]
        if settings.long_prefills_max:
            assert sum(k.long and k.filling for k in inside) <= settings.long_prefills_max
        if settings.exclusive_groups:
            assert len({k.group for k in inside}) <= 1
        if self.narrow is not None:
            assert sum(k.narrowed for k in inside) <= self.narrow
        cap = settings.client_seats_max
        for client in {k.client for k in inside} if cap else ():
            theirs = [min(k.seats, 4) for k in inside if k.client == client]
            assert sum(theirs) <= cap or len(theirs) == 1, "a client with more seats than it may have"

    @invariant()
    def whoever_waits_is_told_why(self) -> None:
        if self.scheduler is None:
            return
        view = self.scheduler.snapshot(self.now)
        inside = [k for k in self.known.values() if k.where in ("running", "draining")]
        held = 0
        for waiting in view.waiting:
            mine = self.known[waiting.rid]
            held += waiting.why in HOLDS
            match waiting.why:
                case "backend":
                    assert not self.up
                case "narrowed":
                    assert view.limit is not None
                case "cold":
                    assert any(k.group == mine.group and k.filling for k in inside)
                case "model" if self.up and self.narrow != 0:
                    assert inside
                case "client":
                    assert any(k.client == mine.client for k in inside)
                case "long_prefill":
                    assert any(k.long and k.filling for k in inside)
                case "leader":
                    assert any(k.filling and k.where == "running" for k in inside)
                case "retry":
                    assert any(k.where == "draining" for k in inside)
        assert held == sum(view.held.values())

    @invariant()
    def capacity_is_respected(self) -> None:
        if self.scheduler is None or self.limits is None or self.disturbed:
            return
        view = self.scheduler.snapshot(self.now)
        device = view.pages[0]
        assert view.seats.used <= min(4, self.limits.seats)
        if self.limits.mode is not PoolMode.UNKNOWN:
            assert device.overdrawn == 0
            assert device.promised <= device.free + device.cached
        if not self.limits.shares_prefix:
            tables = sum(run.pages for run in view.running)
            assert device.held == tables + device.cached, "two running requests share a page"

    def teardown(self) -> None:
        """After drain nothing is left."""
        if self.scheduler is None:
            return
        self.closing = True
        self.step(m.Closing())
        for rid, known in self.known.items():
            known.where = "gone"
            self.step(m.Ended(RequestId(rid), EndReason.CANCELLED))
        self.the_books_are_right()
        view = self.scheduler.snapshot(self.now)
        assert not view.running and not view.waiting and view.waiting_bytes == 0
        assert all(tier.held == tier.cached and tier.promised == 0 for tier in view.pages)
        self.now += 1000
        for _ in range(40):
            self.step()
        assert all(tier.free == tier.total for tier in self.scheduler.snapshot(self.now).pages)
        assert self.scheduler.next_deadline() is None


TestSchedulerMachine = SchedulerMachine.TestCase
