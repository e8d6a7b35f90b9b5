"""Slots at work for a client that died when KVStream starts, and a runtime that is too slow for the first check."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from kvstream.adapters import LlamaCppBackend
from kvstream.adapters.base import HttpCall
from kvstream.gateway.engine import Engine
from kvstream.gateway.metrics import Metrics
from tests.fakes.runtime import FakeRuntime
from tests.fakes.script import RuntimeConfig
from tests.fakes.upstream import FakeUpstream
from tests.gateway.hardlane import HERE, check_wire, hard, knobs, no_threads
from tests.gateway.lane import Lane, chat


@asynccontextmanager
async def found_busy(tmp_path: Path, seconds: float, **more: Any) -> AsyncIterator[Lane]:
    """A lane that starts when every slot has ``seconds`` of somebody else's answer before it."""
    runtime = FakeRuntime(RuntimeConfig(**knobs(tmp_path, **{"decode_rate": 50.0, "answer_tokens": None, **more})))
    upstream, metrics = FakeUpstream(runtime), Metrics()

    async def former() -> None:
        with trio.move_on_after(seconds):
            call = HttpCall("POST", "/completion", body=b'{"prompt": "so", "n_predict": 5000, "stream": true}')
            async with upstream.open(call) as response:
                while await response.receive():
                    pass

    engine = Engine(LlamaCppBackend(base_url=HERE), upstream, hard(tmp_path), metrics)
    with no_threads():
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.run)
            for _ in range(runtime.config.slots):
                nursery.start_soon(former)
            await trio.sleep(0.1)
            await nursery.start(engine.run)
            await engine.watcher.wait_known()
            yield Lane(runtime, upstream, engine, metrics)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("slots", [1, 4])
async def test_leftovers_that_end_soon_are_waited_for(
        slots: int, tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    async with found_busy(tmp_path, 2.0, slots=slots) as lane:
        capacity = lane.engine.watcher.backend.capacity
        assert lane.engine.inject.mode == "hard" and trio.current_time() < 4
        assert capacity is not None and capacity.settled and capacity.limits.mode.value == "split"
        check_wire(lane.runtime)


@pytest.mark.parametrize("slots", [1, 4])
async def test_under_constant_load_it_becomes_hard_all_the_same(
        slots: int, tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """They end when the doors are open already, and from then on there is always somebody."""
    async with found_busy(tmp_path, 8.0, slots=slots, n_ctx=4096 * slots) as lane, trio.open_nursery() as nursery:
        assert lane.engine.inject.mode == "soft"
        served = 0

        async def client(number: int) -> None:
            nonlocal served
            while True:
                await chat(lane, f"hello {number}", max_tokens=40)
                served += 1

        for number in range(2 * slots):
            nursery.start_soon(client, number)
        with trio.fail_after(100):
            while lane.engine.inject.mode == "soft":
                await trio.sleep(0.1)
        assert lane.engine.inject.mode == "hard"
        before = served
        await trio.sleep(10)
        assert served > before
        lane.check()
        check_wire(lane.runtime)
        nursery.cancel_scope.cancel()


async def test_a_runtime_that_is_slow_is_given_more_time_soon_and_says_so(
        tmp_path: Path, autojump_clock: trio.abc.Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvstream")
    async with found_busy(tmp_path, 0.0, slots=1, prefill_rate=2.0) as lane:
        assert lane.engine.inject.mode == "soft"
        with trio.fail_after(45):
            while lane.engine.inject.mode == "soft":
                await trio.sleep(0.1)
        told = [record.message for record in caplog.records if "more time" in record.message]
        assert len(told) == 1, told
