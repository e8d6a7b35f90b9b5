"""What a step of the scheduler and a token of a page table cost. Run it: ``python tests/core/bench_core.py``.

A *realistic step*: 10,000 requests wait and 256 run; four running ones produce a token, one ends, one new request is
submitted, and the freed seat is given away, so the state is the same before every step. *Blocked head*: seats are
free, but the head lacks pages, so every step also looks for requests that may pass it.

The budget (median step <= 200 us; a token at 262,144 tokens at most 3 x one at 1,024) is checked: exit code 1.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns

sys.path.insert(0, str(Path(__file__).parents[2]))

from attrs import evolve
from rich.console import Console
from rich.table import Table

from kvstream.core import messages as m
from kvstream.core.pool import PagePool
from kvstream.core.scheduler import Scheduler, SchedulerSettings
from kvstream.core.table import PageTable
from kvstream.core.tokens import page_keys, salt
from kvstream.core.types import EndReason, Limits, PoolMode, Priority, RequestId

WAITING, RUNNING, STEPS = 10_000, 256, 3_000
PAGE = 16
STEP_BUDGET_US, RATIO_BUDGET = 200.0, 3.0


class Load:
    """Submissions of one kind of traffic: 64 shared system prompts, own endings, 40 clients, all classes."""

    def __init__(self, seed: int, tokens_max_of: Callable[[random.Random], int | None]) -> None:
        self.random = random.Random(seed)
        self.tokens_max_of = tokens_max_of
        self.rid = 0
        start = salt("bench")
        self.prompts = [page_keys([p] * 512, PAGE, start) for p in range(64)]

    def submit(self, now: float, tokens: int | None = None, tokens_max: int | None = None) -> m.Submitted:
        self.rid += 1
        return m.Submitted(
            RequestId(self.rid),
            self.random.choice(self.prompts),
            tokens or self.random.randint(520, 1500),
            tokens_max or self.tokens_max_of(self.random),
            deadline=now + 1e4,
            priority=self.random.choice(list(Priority)),
            client=f"client-{self.random.randrange(40)}",
        )


def filled(order: str, blocked: bool) -> tuple[Scheduler, Load, list[RequestId]]:
    """A scheduler with ``WAITING`` requests in its queue and ``RUNNING`` running."""
    seats = RUNNING + (8 if blocked else 0)
    settings = SchedulerSettings(
        order="sjf" if order == "sjf" else "fcfs", seats_max=seats, queue_max=2 * WAITING, wait_s_max=1e6, ageing_s=30.0
    )
    scheduler = Scheduler(settings)
    load = Load(1, lambda r: 1024 if blocked else r.choice([64, 256, 1024]))
    # Blocked: the head wants nearly everything, every candidate fits and none may pass: the dearest step there is.
    pages = RUNNING * 66 + 700 if blocked else RUNNING * 200
    limits = Limits(PoolMode.UNIFIED, seats=seats, pages=pages, page_tokens=PAGE, source="bench")
    running = []
    for action in scheduler.step(0.0, [m.BackendUp(limits), *(load.submit(0.0, 512, 496) for _ in range(RUNNING))]):
        if isinstance(action, m.Admit):
            running.append(action.rid)
    head = [evolve(load.submit(0.0, pages * PAGE - 1024), priority=Priority.HIGH, client="head")] if blocked else []
    scheduler.step(0.0, head)
    scheduler.step(100.0, [load.submit(100.0) for _ in range(WAITING)])  # after ``ageing_s``: the head stays the head
    return scheduler, load, running


def time_steps(order: str, blocked: bool) -> list[float]:
    """Microseconds of each realistic step."""
    scheduler, load, running = filled(order, blocked)
    took, now = [], 101.0
    for i in range(STEPS):
        now += 0.001
        events: list[m.Event] = [m.Produced(running[(i * 4 + k) % len(running)], 1) for k in range(4)]
        if blocked:
            # The one that ends waits: the head stays blocked and the queue as long as it is.
            events += [m.Ended(RequestId(load.rid), EndReason.CANCELLED), load.submit(now)]
        else:
            events += [m.Ended(running.pop(i % len(running)), EndReason.FINISHED), load.submit(now)]
        start = perf_counter_ns()
        actions = scheduler.step(now, events)
        took.append((perf_counter_ns() - start) / 1e3)
        running += [action.rid for action in actions if isinstance(action, m.Admit)]
    view = scheduler.snapshot(now)
    assert not blocked or view.waiting[0].client == "head"
    assert abs(view.waiting_total - WAITING) < 64, view.waiting_total
    assert len(view.running) >= RUNNING - 8, len(view.running)
    scheduler.check_invariants()
    return took


def time_append(length: int) -> float:
    """Nanoseconds per token, over the 1,024 tokens after ``length``."""
    best = float("inf")
    for _ in range(30):
        pool = PagePool(40_000)
        pages = pool.try_take(length // PAGE)
        assert pages is not None
        table = PageTable.of(pages, length, PAGE)
        start = perf_counter_ns()
        for _ in range(1024):
            appended = table.append(1, pool)
            assert appended is not None
            table = appended.table
        best = min(best, (perf_counter_ns() - start) / 1024)
    return best


def main() -> int:
    gc.freeze()
    console = Console()
    table = Table(title=f"Scheduler.step, {WAITING:,} waiting, {RUNNING} running")
    for column in ("case", "best us", "median us", "p99 us", "budget us"):
        table.add_column(column, justify="left" if column == "case" else "right")
    ok = True
    for order in ("fcfs", "sjf"):
        for blocked in (False, True):
            took = time_steps(order, blocked)
            median, p99 = statistics.median(took), statistics.quantiles(took, n=100)[98]
            ok &= median <= STEP_BUDGET_US
            case = f"{order}, {'blocked head, backfill considered' if blocked else 'one admitted'}"
            table.add_row(case, f"{min(took):.0f}", f"{median:.0f}", f"{p99:.0f}", f"{STEP_BUDGET_US:.0f}")
    console.print(table)
    table = Table(title="PageTable.append, one token")
    for column in ("tokens so far", "ns per token", "ratio"):
        table.add_column(column, justify="right")
    short, long = time_append(1024), time_append(262_144)
    table.add_row("1,024", f"{short:.0f}", "1.00")
    table.add_row("262,144", f"{long:.0f}", f"{long / short:.2f}")
    console.print(table)
    ok &= long / short <= RATIO_BUDGET
    console.print("within budget" if ok else "[bold]OVER BUDGET[/bold]")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
