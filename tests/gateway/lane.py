"""A lane for tests: an engine in front of the in-memory fake runtime, on Trio's virtual clock."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from kvstream.adapters import LlamaCppBackend, OpenAIBackend
from kvstream.adapters.base import CapacityQuery, UpstreamEvent
from kvstream.core.scheduler import SchedulerSettings
from kvstream.core.types import Priority
from kvstream.gateway.engine import Engine, EngineSettings
from kvstream.gateway.metrics import Metrics
from kvstream.gateway.ports import Upstream
from kvstream.gateway.request import CHAT, parse_request
from kvstream.gateway.stream import Stream, StreamTimes
from tests.fakes.runtime import FakeRuntime
from tests.fakes.script import RuntimeConfig
from tests.fakes.upstream import FakeUpstream


def settings(*, times: dict[str, Any] | None = None, scheduler: dict[str, Any] | None = None,
             **changes: Any) -> EngineSettings:
    """Engine settings with every bound short enough for a test and every bug raised."""
    base = EngineSettings(
        scheduler=SchedulerSettings(**(scheduler or {})),
        query=CapacityQuery(page_tokens=16),
        times=StreamTimes(**({"first_event_s": 60.0, "gap_s": 30.0, "stall_s": 5.0} | (times or {}))),
        wait_s_max=120.0, health_interval_s=2.0, slot_idle_poll_s=0.05, slot_idle_s_max=30.0, raise_bugs=True)
    return attrs.evolve(base, **changes)


@attrs.define
class Lane:
    runtime: FakeRuntime
    upstream: Upstream
    engine: Engine
    metrics: Metrics

    def check(self) -> None:
        self.engine.scheduler.check_invariants()

    @property
    def held(self) -> dict[str, int]:
        """What the accounts say is in use right now; all zero when nothing is left."""
        snapshot = self.engine.scheduler.snapshot(trio.current_time())
        device = snapshot.pages[0]
        return {
            "streams": len(self.engine.streams), "waiting": snapshot.waiting_total, "seats": snapshot.seats.used,
            "pages": device.held - device.cached, "promised": device.promised, "overdrawn": device.overdrawn}

    async def until_empty(self, within_s: float) -> None:
        """Wait until nothing is held; fail if that takes longer than ``within_s``."""
        with trio.move_on_after(within_s):
            while any(self.held.values()):
                await trio.sleep(0.05)
            return
        raise AssertionError(f"still held after {within_s:g} s: {self.held}")


def request(content: str = "hello world", *, stream: bool = True, **fields: Any) -> Any:
    body = {"model": "m", "stream": stream, "messages": [{"role": "user", "content": content}], **fields}
    return parse_request(CHAT, (), json.dumps(body).encode()).proxy


@asynccontextmanager
async def open_lane(engine_settings: EngineSettings | None = None, *,
                    wrap: Callable[[Upstream], Upstream] | None = None, base_url: str = "http://fake",
                    **knobs: Any) -> AsyncIterator[Lane]:
    """A running lane. ``knobs`` are the runtime's (``RuntimeConfig``); ``wrap`` puts something before its upstream."""
    runtime = FakeRuntime(RuntimeConfig(**knobs))
    upstream: Upstream = FakeUpstream(runtime)
    if wrap is not None:
        upstream = wrap(upstream)
    kind = OpenAIBackend if knobs.get("dialect") == "openai" else LlamaCppBackend
    metrics = Metrics()
    engine = Engine(kind(base_url=base_url), upstream, engine_settings or settings(), metrics)
    async with trio.open_nursery() as outer:
        await outer.start(runtime.run)
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            await engine.watcher.wait_known()
            yield Lane(runtime, upstream, engine, metrics)
            nursery.cancel_scope.cancel()  # what the engine still cleans up, the runtime still answers
        outer.cancel_scope.cancel()


async def read(stream: Stream) -> list[UpstreamEvent]:
    """Everything a stream gives."""
    events: list[UpstreamEvent] = []
    while batch := await stream.get():
        events += batch
    return events


async def chat(lane: Lane, content: str = "hello world", *, priority: Priority = Priority.NORMAL,
               **fields: Any) -> list[UpstreamEvent]:
    """One whole chat."""
    async with lane.engine.open_stream(request(content, **fields), priority=priority) as stream:
        return await read(stream)
