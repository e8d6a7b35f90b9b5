"""A simulated afternoon: a runtime with seats and a shared step, and clients that leave, stall, retry and hurry.

One seed decides everything, so a failure is replayed by its number. What must hold is checked all along, not only at
the end: a test that looked only at the end missed most deliberate bugs.

* The runtime's own queue stays empty, and it never runs more requests than it has slots.
* A unified pool never overflows ("Context size has been exceeded" kills everybody).
* After every step the books balance. Nobody waits past the deadline. A client that left holds nothing soon after.
* Every request ends in exactly one of the ways there are; a complete answer is complete.
* Every gate that is closed has somebody running to open it; one model runs at a time where they exclude each other.

The number of runs is ``SIM_RUNS`` (``just sim`` sets it high).
"""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import pytest
import trio
from attrs import define, field

from kvstream.adapters.base import CapacityQuery, Done
from kvstream.core.messages import Event
from kvstream.core.types import Priority
from kvstream.errors import KVStreamError, QueueFullError, QueueTimeoutError
from tests.gateway.lane import Lane, open_lane, request, settings

RUNS = int(os.environ.get("SIM_RUNS", "8"))
CLIENTS = 40
WAIT_S_MAX = 20.0


@define
class World:
    """What one seed decides."""

    rng: random.Random
    lane: Lane
    models: tuple[str, ...] = ("m",)
    outcomes: Counter[str] = field(factory=Counter)
    waits: list[float] = field(factory=list)

    async def client(self, index: int) -> None:
        """Come at some time; ask; stay, leave, or read slowly; come back when turned away for now."""
        rng = self.rng
        await trio.sleep(rng.expovariate(1 / 10))
        for _ in range(3):
            outcome = await self.visit(index)
            self.outcomes[outcome] += 1
            if outcome not in ("queue_full", "queue_timeout", "predicted_wait"):
                return
            await trio.sleep(rng.uniform(1, 5))

    async def visit(self, index: int) -> str:
        rng = self.rng
        words = rng.choice((3, 20, 60, 150))
        shared = "all clients share this beginning of some length, as agents do. " * rng.choice((0, 0, 3))
        content = shared + " ".join(f"w{rng.randrange(1000)}" for _ in range(words))
        fields: dict[str, Any] = {"stream": rng.random() < 0.7, "model": rng.choice(self.models)}
        if rng.random() < 0.7:
            fields["max_tokens"] = rng.choice((1, 8, 40, 120))
        patience = rng.choice((float("inf"), float("inf"), rng.expovariate(1 / 5), 0.0))
        pause = rng.choice((0.0, 0.0, 0.0, rng.uniform(0, 8)))
        try:
            with trio.move_on_after(patience):
                async with self.lane.engine.open_stream(
                    request(content, **fields), priority=rng.choice(tuple(Priority)), client=str(index % 3),
                    weight=1.0 + index % 3
                ) as stream:
                    done = False
                    while events := await stream.get():
                        done = done or any(isinstance(event, Done) for event in events)
                        await trio.sleep(pause)
                    assert done or stream.truncated, "an answer ended without an error and without its end"
                    return "truncated" if stream.truncated else "served"
            return "left"
        except KVStreamError as error:
            assert not isinstance(error, QueueFullError | QueueTimeoutError) or error.retry_after_s
            return error.code


def watch_steps(lane: Lane) -> None:
    """Check the books after every step, and that nobody waits longer than allowed."""
    scheduler = lane.engine.scheduler
    step = scheduler.step

    def checked(now: float, events: list[Event]) -> Any:
        actions = step(now, events)
        scheduler.check_invariants()
        snapshot = scheduler.snapshot(now)
        assert all(w.age_s <= WAIT_S_MAX + 0.001 for w in snapshot.waiting), "waiting past the deadline"
        assert snapshot.seats.used <= snapshot.seats.total
        return actions

    scheduler.step = checked  # type: ignore[method-assign, assignment]


async def simulate(seed: int, **knobs: Any) -> tuple[Lane, World]:
    rng = random.Random(seed)
    scheduler = {"order": rng.choice(("fcfs", "sjf")), "queue_max": rng.choice((5, 50)), "wait_s_max": WAIT_S_MAX,
                 "ageing_s": 5.0, "answer_tokens_default": rng.choice((16, 64)), "long_prefill_tokens": 100,
                 "leader_tokens": rng.choice((0, 32)), "shed_probe_every": 4, "client_seats_max": rng.choice((0, 0, 2)),
                 "exclusive_groups": "models" in knobs, "switch_wait_s": 3.0}
    engine_settings = settings(
        scheduler=scheduler, wait_s_max=WAIT_S_MAX, buffer_bytes=4096, times={"stall_s": 3.0}, slot_idle_s_max=60.0,
        query=CapacityQuery(page_tokens=16, seats=knobs.get("slots")))
    knobs = {"slots": rng.choice((1, 2, 4)), "decode_rate": 50.0, "prefill_rate": 2000.0, "n_batch": 128,
             "answer_tokens": rng.choice((10, 80, None)), "busy_after_close": rng.choice((0.0, 0.0, 1.0)),
             "deaf": "none"} | knobs
    async with open_lane(engine_settings, **knobs) as lane:
        world = World(rng, lane, knobs.get("models", ("m",)))
        watch_steps(lane)
        async with trio.open_nursery() as nursery:
            for index in range(CLIENTS):
                nursery.start_soon(world.client, index)
        await lane.until_empty(within_s=10)
        return lane, world


@pytest.mark.parametrize("seed", range(RUNS))
async def test_split(seed: int, autojump_clock: trio.abc.Clock) -> None:
    lane, world = await simulate(seed, n_ctx=8192)
    assert_well_kept(lane, world)


@pytest.mark.parametrize("seed", range(RUNS))
async def test_unified(seed: int, autojump_clock: trio.abc.Clock) -> None:
    lane, world = await simulate(1000 + seed, n_ctx=1024, unified=True)
    assert_well_kept(lane, world)
    assert lane.runtime.kills == 0, "the pool overflowed"


@pytest.mark.parametrize("seed", range(max(1, RUNS // 2)))
async def test_unknown_capacity(seed: int, autojump_clock: trio.abc.Clock) -> None:
    lane, world = await simulate(2000 + seed, dialect="openai", slots=4, gpu_blocks=200, n_ctx=16384)
    assert world.outcomes["served"] > 0
    assert not set(world.outcomes) - EXPECTED, world.outcomes
    lane.check()


@pytest.mark.parametrize("seed", range(max(1, RUNS // 2)))
async def test_two_models_in_turn(seed: int, autojump_clock: trio.abc.Clock) -> None:
    lane, world = await simulate(
        3000 + seed, dialect="openai", slots=4, gpu_blocks=400, n_ctx=16384, one_model=True,
        models=("one", "two"))
    assert world.outcomes["served"] > 0
    assert not set(world.outcomes) - EXPECTED, world.outcomes
    assert lane.runtime.evicted == 0, "a running model was pushed out"
    lane.check()


EXPECTED = {"served", "truncated", "left", "queue_full", "queue_timeout", "predicted_wait",
            "reader_stalled", "context_length_exceeded"}


def assert_well_kept(lane: Lane, world: World) -> None:
    lane.check()
    assert lane.runtime.deferred_max == 0, "a request waited in the runtime's own queue"
    assert lane.runtime.in_flight_max <= lane.runtime.config.slots
    assert world.outcomes["served"] > 0
    assert not set(world.outcomes) - EXPECTED, world.outcomes
