"""The same few clients under many orders of running the tasks.

Trio runs ready tasks in a random order, and pytest-trio lets Hypothesis own that randomness. So each example
is one interleaving of tick, pumps, watchers and clients, and a failing one is kept and replayed.
"""

from __future__ import annotations

from collections import Counter

import trio
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from trio.testing import MockClock

from kvstream.adapters.base import Delta, Done, Finished
from kvstream.errors import KVStreamError
from tests.gateway.lane import Lane, open_lane, read, request, settings
from tests.sim.test_simulation import watch_steps

TICK_S = 0.05

# (arrives at, leaves after; None: stays), in ticks: small numbers, so that things happen in the same instant
visits = st.lists(st.tuples(st.integers(0, 6), st.none() | st.integers(0, 8)), min_size=1, max_size=6)


async def visit(lane: Lane, arrives: int, leaves: int | None, outcomes: Counter[str]) -> None:
    await trio.sleep(arrives * TICK_S)
    with trio.move_on_after(float("inf") if leaves is None else leaves * TICK_S) as patience:
        try:
            async with lane.engine.open_stream(request(f"from {arrives}", max_tokens=6)) as stream:
                events = await read(stream)
            assert isinstance(events[-1], Done)
            assert sum(isinstance(e, Finished) for e in events) == 1
            assert sum(e.tokens for e in events if isinstance(e, Delta)) == 6
            outcomes["served"] += 1
        except KVStreamError as error:
            outcomes[error.code] += 1
    if patience.cancelled_caught:
        outcomes["left"] += 1


async def scene(visitors: list[tuple[int, int | None]], slots: int, restart_at: int | None) -> None:
    outcomes: Counter[str] = Counter()
    async with open_lane(settings(), slots=slots, decode_rate=1 / TICK_S, answer_tokens=None, deaf="none") as lane:
        watch_steps(lane)
        async with trio.open_nursery() as nursery:
            for arrives, leaves in visitors:
                nursery.start_soon(visit, lane, arrives, leaves, outcomes)
            if restart_at is not None:
                await trio.sleep(restart_at * TICK_S)
                lane.runtime.restart()
        await lane.until_empty(within_s=3)
        lane.check()
        assert sum(outcomes.values()) == len(visitors), "everyone ended in exactly one way"
        assert lane.runtime.deferred_max == 0
        if restart_at is None:
            stayed = sum(leaves is None for _, leaves in visitors)
            assert outcomes["served"] >= stayed
            assert set(outcomes) <= {"served", "left"}


@hypothesis_settings(max_examples=60)
@given(st.random_module(), visits, st.integers(1, 3), st.none() | st.integers(0, 8))
def test_any_order_of_tasks(
    _order: object, visitors: list[tuple[int, int | None]], slots: int, restart_at: int | None
) -> None:
    trio.run(scene, visitors, slots, restart_at, clock=MockClock(autojump_threshold=0))
