"""What the health watcher makes of a backend's answers."""

from __future__ import annotations

import json

import attrs
import pytest
import trio
from attrs import define

from kvstream.adapters.base import HttpCall, HttpReply
from kvstream.core.types import PoolMode
from kvstream.errors import InvalidRequestError
from kvstream.gateway.ports import Upstream
from tests.gateway.lane import chat, open_lane, read, request, settings


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
        await trio.sleep(55)  # opening took three seconds: it was waited for
        assert limits() == (PoolMode.UNIFIED, 128)
        await trio.sleep(18)
        assert limits() == (PoolMode.SPLIT, 512)
        assert lane.engine.scheduler.snapshot(trio.current_time()).limits.pages == 512  # type: ignore[union-attr]
        lane.check()


@pytest.mark.parametrize("status", [404, 500])
async def test_what_has_no_health_route_does_not_look_like_a_runtime(
        autojump_clock: trio.abc.Clock, status: int) -> None:
    @define
    class Web:
        inner: Upstream

        async def request(self, call: HttpCall, *, timeout_s: float) -> HttpReply:
            return HttpReply(status, {}, b"<!doctype html>")

        def open(self, call: HttpCall):  # type: ignore[no-untyped-def]
            return self.inner.open(call)

    async with open_lane(settings(), wrap=Web) as lane:
        await trio.sleep(1)
        told = lane.engine.watcher.backend
        assert told.state == "down" and told.detail.startswith(f"health answered {status}")
        assert ("does not look like such a runtime; what it is says `kvstream doctor --url http://" in told.detail) == (
            status == 404)


async def test_a_restart_between_two_looks_is_noticed(autojump_clock: trio.abc.Clock) -> None:
    """The health route said "ok" before and after. What was known of the old process is forgotten: its prefixes, and
    its layout if the new one has another."""
    async with open_lane(settings(health_interval_s=2.0), slots=4, n_ctx=8192) as lane:
        await chat(lane, "a prompt that is long enough to fill more than one page of sixteen tokens " * 3)
        await trio.sleep(1)
        assert lane.engine.scheduler.snapshot(trio.current_time()).prefix_tokens > 0
        lane.runtime.restart()
        await trio.sleep(11)
        assert lane.engine.watcher.backend.state == "up"
        assert lane.engine.scheduler.snapshot(trio.current_time()).prefix_tokens == 0
        await chat(lane)
        looks = len(lane.runtime.journal.paths("/slots"))
        await trio.sleep(60)
        assert len(lane.runtime.journal.paths("/slots")) == looks, "without a restart nothing is asked anew"


@pytest.mark.parametrize("fields", [{"n": 2}, {"n": 3}, {"n": 4}])
async def test_several_choices_never_fill_the_runtimes_own_queue(
    fields: dict[str, int], autojump_clock: trio.abc.Clock
) -> None:
    async with open_lane(slots=4) as lane, trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(lambda: chat(lane, **fields))
        with trio.move_on_after(1000):
            while lane.engine.streams or not lane.runtime.journal.calls:
                await trio.sleep(0.1)
        assert lane.runtime.deferred_max == 0 and not lane.engine.streams
        nursery.cancel_scope.cancel()


async def test_a_body_that_can_be_parsed_but_not_written_is_the_clients_fault(autojump_clock: trio.abc.Clock) -> None:
    deep: object = "x"
    for _ in range(950):
        deep = [deep]
    proxied = request(stream=False)
    view = {**proxied.view, "stream": False, "metadata": deep}
    async with open_lane() as lane:
        async with lane.engine.open_stream(attrs.evolve(proxied, view=view)) as stream:
            try:
                await read(stream)
            except InvalidRequestError:
                pass  # where the limit lies depends on the depth of the stack; a bug would have ended the lane
        await lane.until_empty(within_s=3)
