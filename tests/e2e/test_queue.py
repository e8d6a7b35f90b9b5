"""More clients than slots: the queue is ours, its order is the promised one, and llama.cpp's own stays empty."""

from __future__ import annotations

from typing import Any

import trio

from tests.e2e.conftest import Start
from tests.e2e.process import GatewayProcess
from tests.e2e.requests import busy, chat, finish, ids, post, read_all, whole
from tests.fakes.client import RawResponse
from tests.fakes.real import RealLlama

SEATS = 4


class Watch:
    """Samples llama.cpp's hidden queue and the order in which requests came to hold a seat. ``gap_s``: the longest time
    between two looks at the seats."""

    def __init__(self, gateway: GatewayProcess, llama: RealLlama) -> None:
        self.gateway, self.llama = gateway, llama
        self.deferred: list[float] = []
        self.seats: list[int] = []
        self.order: list[str] = []
        self.gap_s = 0.0

    async def run(self) -> None:
        looked_at = trio.current_time()
        while True:
            self.deferred.append(await self.llama.metric("requests_deferred"))
            status = await self.gateway.status()
            self.gap_s, looked_at = max(self.gap_s, trio.current_time() - looked_at), trio.current_time()
            self.seats.append(status["seats"]["used"])
            for entry in status["running"]:
                if entry["id"] not in self.order:
                    self.order.append(entry["id"])
            await trio.sleep(0.01)


async def read(response: RawResponse, done: dict[str, Any]) -> None:
    await response.read_head()
    events = await read_all(response)
    done[response.headers["x-request-id"]] = finish(events)
    await response.close()


async def twelve(gateway: GatewayProcess, llama: RealLlama, first: int) -> tuple[Watch, list[str], dict[str, Any]]:
    """What was seen, who came in which order, how each ended."""
    watch, names, done = Watch(gateway, llama), list[str](), dict[str, Any]()

    async def come(i: int, tokens: int) -> None:
        response = await post(gateway.port, ids(8, tokens, first=first + i))
        await gateway.until(lambda status: len(_all(status)) == i + 1)
        names.append((_all(await gateway.status()) - set(names)).pop())
        clients.start_soon(read, response, done)

    async with trio.open_nursery() as watching:
        async with trio.open_nursery() as clients:
            # One runs: a runtime that does nothing and does not answer counts as away after three seconds, and who
            # comes ten seconds later is refused.
            await come(0, 200)
            await gateway.running(1)
            with llama.held():  # until all are there
                for i in range(1, 12):
                    await come(i, 60)
            watching.start_soon(watch.run)
        watching.cancel_scope.cancel()
    return watch, names, done


async def test_twelve_clients_on_four_slots(gateway: GatewayProcess, llama: RealLlama) -> None:
    for first in (500, 520, 540):
        await gateway.settled()
        watch, names, done = await twelve(gateway, llama, first)
        assert set(done.values()) == {"length"} and len(done) == 12
        assert max(watch.seats) == SEATS
        assert len(watch.deferred) > 10 and set(watch.deferred) == {0.0}
        if watch.order == names:
            break
        # Or some came and went between two looks.
        assert watch.gap_s > 0.3, "admitted in another order than they came"
    else:
        raise AssertionError("kept waiting three times")


def _all(status: dict[str, Any]) -> set[str]:
    return {e["id"] for e in (*status["running"], *status["queue"]["requests"])}


async def test_sjf_lets_short_requests_before_long_ones(llama: RealLlama, start: Start) -> None:
    with start(llama.base_url, scheduler__priority="sjf") as gateway:
        holders = [await post(gateway.port, ids(4, 1500, first=600 + i)) for i in range(SEATS)]
        await busy(llama, SEATS)
        long = await post(gateway.port, chat("a long story", 900))
        await gateway.queued(1)
        short = await post(gateway.port, chat("a short one", 2))
        await gateway.queued(2)
        queue = (await gateway.status())["queue"]["requests"]
        await holders[0].close()
        await short.read_head()
        assert short.headers["x-request-id"] == queue[0]["id"]
        assert (await read_all(short))[-1] is None
        for response in (*holders, long, short):
            await response.close()
        await gateway.settled(15)
    await busy(llama, 0)


async def test_a_full_queue_answers_at_once_with_retry_after(llama: RealLlama, start: Start) -> None:
    with start(llama.base_url, scheduler__max_queue="1", scheduler__max_batch_size="1") as gateway:
        holder = await post(gateway.port, chat("hold the seat", 1500))
        await gateway.running(1)
        waiting = await post(gateway.port, chat("wait", 2))
        await gateway.queued(1)
        refused = await (await post(gateway.port, chat("too many", 2))).read_head()
        error = (await refused.read_json())["error"]
        assert (refused.status, error["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        await holder.close()
        assert (await waiting.read_head()).status == 200
        await waiting.read_all()
        assert finish(await whole(gateway.port, chat("room again", 2))) == "length"
        for response in (waiting, refused):
            await response.close()
    await busy(llama, 0)
