"""Case 28: a runtime that is busy for the moment is asked again, with pauses that do not fall together."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
import trio

from tests.fakes import Script
from tests.gateway.conftest import Lane, chat, error_of, metric, open_lane

NATIVE = b'{"error":"server busy, please try again.  maximum pending requests exceeded"}'
WRAPPED = (b'{"error":{"message":"server busy, please try again.  maximum pending requests exceeded",'
           b'"type":"api_error","param":null,"code":null}}')
VLLM = b'{"object":"error","message":"The server is overloaded","type":"ServiceUnavailable","code":503}'


def busy(body: bytes = NATIVE, **headers: str) -> Script:
    return Script(status=503, script=[(0, body)], headers=tuple((k.replace("_", "-"), v) for k, v in headers.items()))


def asked_at(lane: Lane) -> list[float]:
    return [entry.received_at for entry in lane.runtime.journal.calls]


@pytest.mark.parametrize("stream", [True, False])
async def test_case_28_both_of_ollamas_bodies_are_tried_again(autojump_clock: Any, stream: bool) -> None:
    async with open_lane() as lane:
        lane.runtime.script(busy(NATIVE))
        lane.runtime.script(busy(WRAPPED))
        lane.runtime.script(busy(VLLM))
        call = await lane.post(chat(stream=stream))
        assert call.status == 200 and len(lane.runtime.journal.calls) == 4
        assert len({entry.body_hash for entry in lane.runtime.journal.calls}) == 1
        assert metric(lane.metrics, "kvstream_busy_retries_total") == 3
        assert (await lane.status())["breaker"]["faults"] == 0, "busy is no fault"
        assert lane.idle()


async def test_case_28_on_expiry_503_with_retry_after(autojump_clock: Any) -> None:
    async with open_lane(upstream={"busy_retry_s_max": 10.0}) as lane:
        lane.runtime.script(busy(), times=None)
        began = trio.current_time()
        call = await lane.post(chat())
        assert call.status == 503 and trio.current_time() - began == pytest.approx(10, abs=0.5)
        assert int(call.headers["retry-after"]) >= 2
        error = error_of(call.body)
        assert error["code"] == "overloaded" and "maximum pending requests" in error["message"]
        assert 4 <= len(lane.runtime.journal.calls) <= 40
        assert lane.idle()


async def test_case_28_never_longer_than_the_request_may_wait_at_all(autojump_clock: Any) -> None:
    async with open_lane(upstream={"busy_retry_s_max": 100.0}, scheduler={"max_wait_s": 5.0}) as lane:
        lane.runtime.script(busy(), times=None)
        began = trio.current_time()
        assert (await lane.post(chat())).status == 503
        assert trio.current_time() - began == pytest.approx(5, abs=0.5)


async def test_case_28_what_the_runtime_asks_for_is_waited_in_full(autojump_clock: Any) -> None:
    async with open_lane() as lane:
        lane.runtime.script(busy(Retry_After="7"))
        assert (await lane.post(chat())).status == 200
        first, second = asked_at(lane)
        assert 7 <= second - first <= 7.5
        lane.runtime.script(busy(Retry_After="300"))
        began = trio.current_time()
        call = await lane.post(chat())
        assert call.status == 503 and call.headers["retry-after"] == "300"
        assert trio.current_time() - began < 0.1, "what cannot help is not waited for"


async def test_case_28_pauses_are_random_and_grow(autojump_clock: Any) -> None:
    """Eight who were turned away in one instant do not come back in one."""
    async with open_lane(knobs={"slots": 8}) as lane:
        lane.runtime.script(busy(), times=80)
        calls = [lane.start(chat(f"n {n}")) for n in range(8)]
        for call in calls:
            await call.ended.wait()
        times: dict[str, list[float]] = {}
        for entry in lane.runtime.journal.calls:
            times.setdefault(entry.prompt, []).append(entry.received_at)
        seconds = [round(asked[1], 3) for asked in times.values()]
        assert len(set(seconds)) >= 6
        pauses = [[b - a for a, b in pairwise(asked)] for asked in times.values()]
        assert max(p[0] for p in pauses) <= 0.25 + 0.01 and max(max(p) for p in pauses) > 1
        assert lane.runtime.in_flight_max <= 8


async def test_case_28_a_client_that_leaves_while_it_is_busy_takes_its_seat_with_it(autojump_clock: Any) -> None:
    async with open_lane(knobs={"slots": 1}) as lane:
        lane.runtime.script(busy(), times=None)
        call = lane.start(chat())
        await trio.sleep(3)
        assert (await lane.status())["seats"]["used"] == 1, "its seat is kept: the next would hear the same"
        call.leave()
        await trio.sleep(0.1)
        assert lane.idle()
        asked = len(lane.runtime.journal.calls)
        await trio.sleep(30)
        assert len(lane.runtime.journal.calls) == asked


async def test_case_28_too_many_requests_is_said_to_the_client(autojump_clock: Any) -> None:
    """A 429 is about a key and not about the runtime: whose it is can slow down, or has used its quota up."""
    async with open_lane() as lane:
        lane.runtime.script(Script(status=429, script=[(0, json.dumps({"error": {"message": "quota"}}).encode())]))
        call = await lane.post(chat())
        assert call.status in (429, 503) and len(lane.runtime.journal.calls) == 1
