"""For every place where a request can be waiting: hang there for 999 s, let the client leave, and look at the books.

The place is made to hang by a wrapper around the upstream, or by the fake runtime itself; the test then makes sure that
the request really is there, leaves, and that within a bounded time nothing is held by anybody.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from kvstream.adapters.base import HttpCall, HttpReply
from kvstream.errors import BackendTimeoutError, KVStreamError, ReaderStalledError, ShuttingDownError
from kvstream.gateway.ports import Upstream, UpstreamResponse
from kvstream.gateway.slotwatch import PREFILL_POLL_S_MIN
from tests.fakes.script import Script
from tests.gateway.lane import Lane, chat, open_lane, read, request, settings

HANG_S = 999.0


class HangingUpstream:
    """An upstream that hangs at one named place: ``count``, ``connect``, ``headers``, ``receive:N``, ``error_body``."""

    def __init__(self, inner: Upstream, place: str) -> None:
        self._inner = inner
        self.place = place
        self.reached = trio.Event()

    async def _hang(self, place: str) -> None:
        if self.place == place:
            self.reached.set()
            await trio.sleep(HANG_S)

    async def request(self, call: HttpCall, *, timeout_s: float) -> HttpReply:
        if call.path.startswith(("/tokenize", "/apply-template")):
            await self._hang("count")
        return await self._inner.request(call, timeout_s=timeout_s)

    @asynccontextmanager
    async def open(self, call: HttpCall) -> AsyncIterator[UpstreamResponse]:
        await self._hang("connect")
        async with self._inner.open(call) as response:
            await self._hang("headers")
            yield _HangingResponse(response, self)


class _HangingResponse:
    def __init__(self, inner: UpstreamResponse, upstream: HangingUpstream) -> None:
        self._inner, self._upstream, self._count = inner, upstream, 0
        self.status, self.headers = inner.status, inner.headers

    async def receive(self) -> bytes:
        self._count += 1
        await self._upstream._hang("error_body" if self.status >= 400 else f"receive:{self._count}")
        return await self._inner.receive()


async def leave_at(lane: Lane, reached: trio.Event, **fields: Any) -> None:
    """Open a stream, wait until it hangs where it should, leave."""
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            async def client() -> None:
                async with lane.engine.open_stream(request(**fields)) as stream:
                    await read(stream)

            nursery.start_soon(client)
            await reached.wait()
            await trio.sleep(0.2)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("place", ["count", "connect", "headers", "receive:1", "receive:2", "receive:5", "error_body"])
@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_while_upstream_hangs(place: str, stream: bool, autojump_clock: trio.abc.Clock) -> None:
    hanging: list[HangingUpstream] = []

    def wrap(inner: Upstream) -> Upstream:
        hanging.append(HangingUpstream(inner, place))
        return hanging[0]

    async with open_lane(settings(count_timeout_s=HANG_S), wrap=wrap) as lane:
        if place == "error_body":
            lane.runtime.script(Script(status=500, script=[(0, b"{}")]))
        await leave_at(lane, hanging[0].reached, stream=stream)
        hanging[0].place = "nowhere"
        # before the first token the runtime is looked at only every 1.25 s, and without headers twice
        await lane.until_empty(within_s=2 * PREFILL_POLL_S_MIN + 0.5)
        lane.check()
        assert await chat(lane), "the next request is served"


async def test_leaving_while_queued(autojump_clock: trio.abc.Clock) -> None:
    async with open_lane(slots=1, decode_rate=10, answer_tokens=100) as lane, trio.open_nursery() as nursery:
        nursery.start_soon(chat, lane)
        await trio.sleep(1)
        with trio.move_on_after(2):
            await chat(lane, "the one that leaves")
        await trio.testing.wait_all_tasks_blocked()
        assert lane.held["waiting"] == 0 and lane.held["streams"] == 1
        assert len(lane.runtime.journal.calls) == 1, "the runtime never saw it"
        nursery.cancel_scope.cancel()


async def test_leaving_while_the_model_loads(autojump_clock: trio.abc.Clock) -> None:
    async with open_lane(load_s=50) as lane:
        with trio.move_on_after(5):
            await chat(lane)
        assert not lane.engine.streams
        assert lane.engine.watcher.backend.state == "loading"


async def test_leaving_with_a_full_buffer(autojump_clock: trio.abc.Clock) -> None:
    """The pump waits for room; leaving ends that wait at once, not after stall_s."""
    async with open_lane(settings(buffer_bytes=600, times={"stall_s": HANG_S}), answer_tokens=200) as lane:
        async with lane.engine.open_stream(request()) as stream:
            await stream.get()
            await trio.sleep(10)
            assert lane.held["seats"] == 1
        await lane.until_empty(within_s=1.0)


async def test_a_blocked_pump_is_no_proof_that_its_slot_works(autojump_clock: trio.abc.Clock) -> None:
    async with open_lane(settings(buffer_bytes=600), answer_tokens=200) as lane:
        async with lane.engine.open_stream(request()) as stream:
            await stream.get()
            assert lane.engine.slot_view().started == {stream.rid: None}
            await trio.sleep(2)
            assert lane.engine.slot_view().started == {}


async def test_leaving_is_booked_by_phase(autojump_clock: trio.abc.Clock) -> None:
    async with open_lane(slots=1, decode_rate=10, answer_tokens=100, prefill_rate=10) as lane:
        async def leave_after(seconds: float, stream: bool) -> None:
            with trio.move_on_after(seconds):
                await chat(lane, "a prompt of six words, maybe", stream=stream)
            await trio.sleep(3)

        for seconds, stream in ((0.3, True), (10.0, True), (10.0, False)):
            await leave_after(seconds, stream)
        booked = {
            phase: lane.metrics.cancelled.labels(phase)._value.get()
            for phase in ("queued", "prefill", "streaming", "non_stream")}
        assert booked == {"queued": 0, "prefill": 1, "streaming": 1, "non_stream": 1}


async def test_a_reader_that_stalls_gives_its_seat_back(autojump_clock: trio.abc.Clock) -> None:
    async with open_lane(settings(buffer_bytes=600, times={"stall_s": 3}), answer_tokens=200) as lane:
        async with lane.engine.open_stream(request()) as stream:
            await stream.get()
            await trio.sleep(6)
            assert not any(lane.held.values()), "while the client is still there, and still does not read"
            with pytest.raises(ReaderStalledError):
                await read(stream)


async def test_leaving_after_done_while_the_body_stays_open(autojump_clock: trio.abc.Clock) -> None:
    async with open_lane() as lane:
        lane.runtime.script(Script(end="keep_open_after_done"))
        start = trio.current_time()
        assert await chat(lane)
        assert trio.current_time() - start < 2
        await lane.until_empty(within_s=1.0)


async def test_cancelled_twice(autojump_clock: trio.abc.Clock) -> None:
    async with open_lane() as lane:
        async with lane.engine.open_stream(request()) as stream:
            await stream.get()
            lane.engine.leave(stream)
            lane.engine.leave(stream)
            await trio.sleep(0.01)
            lane.engine.leave(stream)
        await lane.until_empty(within_s=1.0)
        lane.check()


@pytest.mark.parametrize("busy_s", [0.0, 2.0, 100.0])
async def test_a_cancelled_seat_drains(busy_s: float, autojump_clock: trio.abc.Clock) -> None:
    """The seat is free when the runtime says so, or after the cap; never before."""
    async with open_lane(settings(slot_idle_s_max=10, times={"first_event_s": 300}), slots=1,
                         busy_after_close=busy_s) as lane:
        async with lane.engine.open_stream(request()) as stream:
            while stream.first_token is None:
                await stream.get()
        left = trio.current_time()
        await chat(lane)
        assert lane.runtime.deferred_max == 0 or busy_s == 100, "never in the runtime's own queue"
        freed_after = lane.runtime.journal.calls[1].received_at - left
        assert min(busy_s, 10) <= freed_after <= min(busy_s, 10) + 0.5


async def test_slots_route_that_hangs_is_not_idle(autojump_clock: trio.abc.Clock) -> None:
    async with open_lane(settings(slot_idle_s_max=10), slots=1) as lane:
        async with lane.engine.open_stream(request()) as stream:
            await stream.get()
            lane.runtime.config.slots_hang = True
        await trio.sleep(5)
        assert lane.held["seats"] == 1
        await lane.until_empty(within_s=15)


async def test_the_whole_engine_cancelled_with_requests_in_every_phase(autojump_clock: trio.abc.Clock) -> None:
    errors: list[str] = []
    async with open_lane(slots=1, decode_rate=5, answer_tokens=100) as lane, trio.open_nursery() as nursery:
        async def client(**fields: Any) -> None:
            try:
                await chat(lane, **fields)
            except KVStreamError as error:
                errors.append(error.code)

        for stream in (True, False, True):
            nursery.start_soon(lambda s=stream: client(stream=s))
        await trio.sleep(3)
        lane.engine.abort(ShuttingDownError("stop", retry_after_s=1))
        await trio.sleep(1)
        assert errors == ["shutting_down"] * 3
        await lane.until_empty(within_s=5)
        lane.check()


async def test_total_limit(autojump_clock: trio.abc.Clock) -> None:
    async with open_lane(settings(times={"total_s": 2.0}), decode_rate=5, answer_tokens=100) as lane:
        with pytest.raises(BackendTimeoutError, match="total_s"):
            await chat(lane)
        await lane.until_empty(within_s=2.0)
