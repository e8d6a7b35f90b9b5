"""A client that leaves frees the real runtime, in each of the four phases.

The bound is one second, or one prefill batch where llama.cpp looks at its sockets only between batches.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from tests.e2e.process import GatewayProcess, patience
from tests.e2e.requests import busy, chat, finish, ids, post, read_all, stream, whole
from tests.fakes.client import RawResponse
from tests.fakes.real import RealLlama

SEATS = 4
FIRST = iter(range(100, 10_000))  # no two prompts of this file share a cached prefix


@asynccontextmanager
async def idle(gateway: GatewayProcess, llama: RealLlama) -> AsyncIterator[None]:
    """Before: nothing runs. After: nothing is left anywhere, and seats and pages are back."""
    await busy(llama, 0)
    before = await gateway.settled()
    yield
    after = await gateway.settled(15)
    await busy(llama, 0, 15)
    pages = after["pages"]["device"]
    assert after["running"] == [] and after["queue"]["requests"] == [] and after["queue"]["bytes"] == 0
    assert after["seats"] == {"total": SEATS, "used": 0, "draining": 0}
    assert pages["held"] == pages["cached"] and pages["promised"] == pages["overdrawn"] == 0
    assert pages["total"] == before["pages"]["device"]["total"]


async def fill(gateway: GatewayProcess, llama: RealLlama, tokens: int = 1500) -> list[RawResponse]:
    """Every seat taken by a stream that goes on for long."""
    streams = [await stream(gateway.port, ids(4, tokens, first=next(FIRST))) for _ in range(SEATS)]
    await busy(llama, SEATS)
    return streams


async def leave(response: RawResponse, how: str) -> None:
    if how == "rst":
        response.reset()
    else:
        await response.close()


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_while_queued(gateway: GatewayProcess, llama: RealLlama, how: str) -> None:
    """Case 4: the runtime never hears of it, and the others keep their order."""
    async with idle(gateway, llama):
        admitted = (await gateway.status())["counters"]["admitted"]
        streams = await fill(gateway, llama)
        waiting = []
        for _ in range(3):
            waiting.append(await post(gateway.port, chat(f"queued {next(FIRST)}", 2)))
            await gateway.queued(len(waiting))
        order = [entry["id"] for entry in (await gateway.status())["queue"]["requests"]]
        await leave(waiting[1], how)
        await gateway.queued(2, within_s=1)
        assert [entry["id"] for entry in (await gateway.status())["queue"]["requests"]] == [order[0], order[2]]
        assert await llama.metric("requests_deferred") == 0
        await leave(streams[0], how)
        await waiting[0].read_head()  # the next in the queue is served
        assert waiting[0].headers["x-request-id"] == order[0]
        for response in (*streams[1:], waiting[0], waiting[2]):
            await response.close()
        settled = await gateway.settled(15)
    assert settled["counters"]["admitted"] - admitted <= SEATS + 2


async def test_during_prefill(gateway: GatewayProcess, llama: RealLlama) -> None:
    """Case 3. A prompt of twelve batches: the runtime must stop after the one it is in, not after the last."""
    async with idle(gateway, llama):
        for more_tries in (True, True, False):  # when we are kept waiting between two lines, it reads on meanwhile
            response = await post(gateway.port, ids(1536, 8, first=next(FIRST)))
            await busy(llama, 1)
            slot = next((slot["id"] for slot in await llama.slots() if slot["is_processing"]), None)
            await response.close()
            await trio.sleep(1.3)
            await busy(llama, 0, within_s=10, every_s=1.3)
            read = max(s["n_prompt_tokens"] for s in await llama.slots() if slot in (None, s["id"]))
            await gateway.settled(3)
            if read <= 3 * 128:
                break
            assert more_tries, "it read on after its client had left"
        assert finish(await whole(gateway.port, chat("and the next one", 2))) == "length"  # the seat serves again
    text = (await gateway.get("/metrics")).text
    assert 'kvstream_cancelled_total{phase="prefill"}' in text


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_while_streaming(gateway: GatewayProcess, llama: RealLlama, how: str) -> None:
    """Case 2. All seats busy and one waiting: it starts because the other left."""
    async with idle(gateway, llama):
        streams = await fill(gateway, llama)
        waiting = await post(gateway.port, chat(f"next {next(FIRST)}", 2))
        await gateway.queued(1)
        for _ in range(3):
            await streams[2].read_event()
        await leave(streams[2], how)
        with trio.fail_after(patience(2)):
            await waiting.read_head()
        assert finish(await read_all(waiting)) == "length"
        for response in (streams[0], streams[1], streams[3], waiting):
            await response.close()
        await busy(llama, 0, within_s=1)


async def test_a_non_streaming_client(gateway: GatewayProcess, llama: RealLlama) -> None:
    """Case 1. Direct, llama.cpp computes such an answer to its end; asked with a stream, it stops."""
    async with idle(gateway, llama):
        response = await post(gateway.port, chat("tell me everything", 1500, stream=False))
        await busy(llama, 1)
        await gateway.until(lambda status: status["running"] and status["running"][0]["produced"])
        await response.close()
        await busy(llama, 0, within_s=1)
        await gateway.settled(1)


async def test_half_close_is_no_cancel_and_a_reset_after_it_is_one(gateway: GatewayProcess, llama: RealLlama) -> None:
    """Double cancel: first the client says it sends no more, then it is gone; both ends of one connection."""
    async with idle(gateway, llama):
        first = await stream(gateway.port, ids(4, 1500, first=next(FIRST)))
        await first.half_close()
        for _ in range(5):
            assert await first.read_event()
        first.reset()
        await busy(llama, 0, within_s=1)
        short = await stream(gateway.port, chat("half-closed from the start", 3))
        await short.half_close()
        assert finish(await read_all(short)) == "length"
        await short.close()


async def test_cancelled_twice_at_the_same_moment(gateway: GatewayProcess, llama: RealLlama) -> None:
    """Several clients leave within one step of the scheduler, and new ones leave as soon as they were admitted."""
    async with idle(gateway, llama):
        for _ in range(2):
            streams = await fill(gateway, llama)
            waiting = [await post(gateway.port, chat(f"also {next(FIRST)}", 2)) for _ in range(SEATS)]
            await gateway.queued(SEATS)
            for response in (*streams, *waiting):
                response.reset()
            await gateway.settled(3)


async def test_a_hundred_aborts_leave_nothing(gateway: GatewayProcess, llama: RealLlama) -> None:
    """Any phase, four at a time. Descriptors, seats, pages, slots and queue are what they were."""
    dice = random.Random(4)
    async with idle(gateway, llama):
        await whole(gateway.port, chat("warm the pools", 2))
        await trio.sleep(0.5)
        baseline = gateway.descriptors()

        async def clients() -> None:
            for _ in range(25):
                response = await post(gateway.port, chat(f"abort {next(FIRST)}", 400, stream=dice.random() < 0.7))
                await trio.sleep(dice.choice((0, 0.01, 0.05, 0.3)))
                await leave(response, dice.choice(("fin", "rst")))

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(clients)
        await gateway.settled(10)
        await busy(llama, 0, within_s=2)
        with trio.fail_after(patience(10)):
            while gateway.descriptors() > baseline:
                await trio.sleep(0.1)
        assert finish(await whole(gateway.port, chat("still there?", 2))) == "length"
    assert "bug in the pump" not in gateway.text() and "Traceback" not in gateway.text()
