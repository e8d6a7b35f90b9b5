"""What the health watcher makes of a backend's answers."""

from __future__ import annotations

import json

import attrs
import trio
from attrs import define

from kvstream.adapters.base import HttpCall, HttpReply
from kvstream.core.types import PoolMode
from kvstream.gateway.ports import Upstream
from tests.gateway.lane import open_lane, settings


@define
class BusyAtFirst:
    """An upstream whose ``/slots`` shows every slot at work until ``until``: somebody else uses the server."""

    inner: Upstream
    until: float

    async def request(self, call: HttpCall, *, timeout_s: float) -> HttpReply:
        reply = await self.inner.request(call, timeout_s=timeout_s)
        if call.method == "GET" and call.path.startswith("/slots") and trio.current_time() < self.until:
            rows = [row | {"is_processing": True} for row in json.loads(reply.body)]
            return attrs.evolve(reply, body=json.dumps(rows).encode())
        return reply

    def open(self, call: HttpCall):  # type: ignore[no-untyped-def]
        return self.inner.open(call)


async def test_a_layout_that_could_not_be_seen_is_asked_for_again(autojump_clock: trio.abc.Clock) -> None:
    """Counting a split pool once is safe, and a quarter of what there is: not for longer than needed."""
    until = trio.current_time() + 60
    async with open_lane(
        settings(health_interval_s=2.0), wrap=lambda inner: BusyAtFirst(inner, until), slots=4, n_ctx=8192
    ) as lane:
        def limits() -> tuple[PoolMode, int]:
            capacity = lane.engine.watcher.backend.capacity
            assert capacity is not None
            return capacity.limits.mode, capacity.limits.pages

        await trio.sleep(1)
        assert limits() == (PoolMode.UNIFIED, 128)
        await trio.sleep(58)
        assert limits() == (PoolMode.UNIFIED, 128)
        await trio.sleep(15)
        assert limits() == (PoolMode.SPLIT, 512)
        assert lane.engine.scheduler.snapshot(trio.current_time()).limits.pages == 512  # type: ignore[union-attr]
        lane.check()
