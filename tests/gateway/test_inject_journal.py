"""T0 on the wire: whatever happens, no call names a slot of the runtime that is at work.

With its RAM cache on, llama.cpp exchanges the KV of a slot that a request names before it finds that slot busy: the
answer that runs there goes on with somebody else's text, and nobody is told. The fake does the same (``corruptions``)
and counts what must not be. Random conversations run before it, with clients that leave at any moment, readers that
stall, broken answers, requests for two slots at once, and restarts.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import trio

from kvstream.errors import KVStreamError
from tests.fakes.script import Script
from tests.gateway.hardlane import actions, check_wire, hard, open_hard, pinned
from tests.gateway.lane import Lane, request

MODES: dict[str, dict[str, Any]] = {
    "split": {},
    "split-ram": {"cache_ram": True},
    "unified": {"unified": True},
    "unified-ram": {"unified": True, "cache_ram": True},  # empties idle slots: nothing is pinned there
}
FAULTS: tuple[dict[str, Any], ...] = (
    {"end": "cut", "tokens": 4}, {"end": "rst", "tokens": 2}, {"status": 500, "script": [(0, b"{}")]},
    {"end": "error_event", "tokens": 3}, {"hang_at_token": 2}, {"busy_after_close": 1.0}, {"refuse": True})
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


class Crowd:
    """Conversations that share a few beginnings, from one seed."""

    def __init__(self, lane: Lane, seed: int) -> None:
        self.lane = lane
        self.rng = random.Random(seed)
        self.served = self.left = self.failed = 0

    def words(self, count: int) -> str:
        return " ".join(self.rng.choice(WORDS) for _ in range(count))

    async def conversation(self, beginnings: list[str], turns: int) -> None:
        rng = self.rng
        text = rng.choice(beginnings) + self.words(rng.randrange(5, 80))
        for _ in range(turns):
            await trio.sleep(rng.expovariate(1.0))
            more: dict[str, Any] = {"max_tokens": rng.choice([4, 16, 60]), "stream": rng.random() < 0.8}
            if rng.random() < 0.08:
                more["n"] = 2
            if rng.random() < 0.1:
                self.lane.runtime.script(Script(**rng.choice(FAULTS)))
            await self.call(text, **more)
            text += self.words(rng.randrange(5, 60))

    async def call(self, text: str, **more: Any) -> None:
        patience = self.rng.choice([0.01, 0.1, 0.5, 2.0]) if self.rng.random() < 0.3 else 1000.0
        stalls = self.rng.random() < 0.05
        with trio.move_on_after(patience) as scope:
            try:
                async with self.lane.engine.open_stream(request(text, **more)) as stream:
                    while await stream.get():
                        if stalls:
                            await trio.sleep(8)
                self.served += 1
            except KVStreamError:
                self.failed += 1
        self.left += scope.cancelled_caught

    async def restarts(self, times: int) -> None:
        for _ in range(times):
            await trio.sleep(self.rng.uniform(3, 12))
            self.lane.runtime.restart(load_s=self.rng.choice([0.0, 0.5]))

    async def checks(self) -> None:
        while True:
            await trio.sleep(0.37)
            self.lane.check()
            check_wire(self.lane.runtime)


async def run_crowd(tmp_path: Path, mode: str, seed: int, *, restarts: int) -> tuple[Lane, Crowd]:
    told = hard(tmp_path, inject={"call_s_max": 20.0}, buffer_bytes=4000, slot_idle_s_max=10,
                times={"first_event_s": 20.0, "gap_s": 10.0, "stall_s": 2.0}, down_grace_s=5.0)
    async with open_hard(tmp_path, told, slots=3, n_ctx=6000, prefill_rate=800.0, decode_rate=60.0, save_s=0.05,
                         restore_s=0.02, **MODES[mode]) as lane:
        crowd = Crowd(lane, seed)
        beginnings = ["", crowd.words(150), crowd.words(300), crowd.words(90)]
        async with trio.open_nursery() as outer:
            outer.start_soon(crowd.checks)
            async with trio.open_nursery() as nursery:
                for _ in range(9):
                    nursery.start_soon(crowd.conversation, beginnings, 5)
                nursery.start_soon(crowd.restarts, restarts)
            await lane.until_empty(within_s=60)
            outer.cancel_scope.cancel()
        lane.check()
        check_wire(lane.runtime)
        return lane, crowd


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(4))
async def test_no_call_names_a_slot_at_work(mode: str, seed: int, tmp_path: Path,
                                            autojump_clock: trio.abc.Clock) -> None:
    lane, crowd = await run_crowd(tmp_path, mode, seed, restarts=0)
    assert crowd.served > 10 and crowd.left
    ours = [entry for entry in pinned(lane.runtime) if entry.request.path != "/completion"]
    if mode == "unified-ram":
        assert not ours
    else:
        assert len(ours) > 5 and actions(lane.runtime, "restore"), "and it was not for nothing"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(2))
async def test_nor_when_the_runtime_is_restarted(mode: str, seed: int, tmp_path: Path,
                                                 autojump_clock: trio.abc.Clock) -> None:
    _, crowd = await run_crowd(tmp_path, mode, 100 + seed, restarts=3)
    assert crowd.served > 8
