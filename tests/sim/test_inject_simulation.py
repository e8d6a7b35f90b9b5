"""The simulated afternoon of ``test_simulation`` with hard inject: slots pinned, prefixes saved, forked and restored.

Beside what must hold there: nothing on the wire names a slot at work, no live stream is corrupted, and in the end no
file is on disk that the scheduler does not know.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import trio

from kvstream.core.messages import Event, Preempt
from kvstream.core.types import RequestId
from tests.gateway.hardlane import actions, check_wire, hard, open_hard
from tests.gateway.lane import Lane
from tests.sim.test_simulation import CLIENTS, RUNS, WAIT_S_MAX, World, assert_well_kept


def watch_steps(lane: Lane) -> None:
    """Check the books after every step. Who gave way has its answer begun, and no deadline of the queue any more."""
    scheduler, gave_way = lane.engine.scheduler, set[RequestId]()
    step = scheduler.step

    def checked(now: float, events: list[Event]) -> Any:
        actions = step(now, events)
        gave_way.update(action.rid for action in actions if isinstance(action, Preempt))
        scheduler.check_invariants()
        view = scheduler.snapshot(now)
        assert all(w.age_s <= WAIT_S_MAX + 0.001 for w in view.waiting if w.rid not in gave_way), "past the deadline"
        assert view.seats.used <= view.seats.total
        return actions

    scheduler.step = checked  # type: ignore[method-assign, assignment]


async def simulate(seed: int, tmp_path: Path, **knobs: Any) -> tuple[Lane, World]:
    rng = random.Random(seed)
    told = hard(
        tmp_path, wait_s_max=WAIT_S_MAX, buffer_bytes=4096, times={"stall_s": 3.0}, slot_idle_s_max=60.0,
        inject={"disk_bytes_max": (size := rng.choice((60_000, 10_000_000)))},
        scheduler={"order": rng.choice(("fcfs", "sjf")), "queue_max": rng.choice((5, 50)), "wait_s_max": WAIT_S_MAX,
                   "ageing_s": 5.0, "answer_tokens_default": rng.choice((16, 64)), "long_prefill_tokens": 100,
                   "leader_tokens": 32, "save_tokens_min": 32, "read_first_s": rng.choice((0.0, 0.05)),
                   "shed_probe_every": 4, "client_seats_max": rng.choice((0, 0, 2)), "saved_bytes_max": size})
    knobs = {"slots": rng.choice((1, 2, 4)), "decode_rate": 50.0, "prefill_rate": 500.0, "n_batch": 128,
             "answer_tokens": rng.choice((10, 80, None)), "busy_after_close": rng.choice((0.0, 0.0, 1.0)),
             "deaf": "none", "n_ctx": 8192} | knobs
    async with open_hard(tmp_path, told, **knobs) as lane:
        world = World(rng, lane)
        watch_steps(lane)
        async with trio.open_nursery() as nursery:
            for index in range(CLIENTS):
                nursery.start_soon(world.client, index)
        await lane.until_empty(within_s=10)
        while lane.engine.inject.jobs:
            await trio.sleep(0.1)
        await trio.sleep(1)
        view = lane.engine.scheduler.snapshot(trio.current_time())
        assert view.store is None or view.store.bytes <= size, "more on disk than may be"
        return lane, world


@pytest.mark.parametrize("seed", range(max(1, RUNS // 2)))
async def test_pinned(seed: int, tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    lane, world = await simulate(4000 + seed, tmp_path, cache_ram=False)
    assert_well_kept(lane, world)
    check_wire(lane.runtime)


async def test_it_is_hard_inject_that_was_simulated(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    lane, _ = await simulate(4000, tmp_path, slots=2, cache_ram=False)
    assert actions(lane.runtime, "save") and actions(lane.runtime, "restore")
