"""Calls that need no seat: passed on beside the queue, a few at a time, and counted."""

from __future__ import annotations

import json

import pytest
import trio

from kvstream.errors import QueueFullError, QueueTimeoutError
from kvstream.gateway.passage import Turnstile
from tests.fakes.script import Script
from tests.gateway.conftest import chat, metric, open_lane


async def test_tokenizing_is_passed_on_while_every_seat_is_taken(autojump_clock: object) -> None:
    async with open_lane(knobs={"slots": 1, "answer_tokens": None, "decode_rate": 1.0}) as lane:
        running, waiting = lane.start(chat("a")), lane.start(chat("b"))
        await trio.sleep(1)
        began = trio.current_time()
        call = await lane.post({"content": "hello world"}, "/tokenize")
        assert call.status == 200 and isinstance(json.loads(call.body)["tokens"], list)
        assert trio.current_time() - began < 1 and call.headers["x-request-id"].startswith("kvs-")
        assert metric(lane.metrics, "kvstream_requests_total", route="/tokenize", outcome="served") == 1
        assert lane.engine.scheduler.snapshot(trio.current_time()).waiting_total == 1
        for each in (running, waiting):
            each.leave()


async def test_a_runtime_that_refuses_says_so_in_the_dialect_of_the_path(autojump_clock: object) -> None:
    async with open_lane() as lane:
        body = json.dumps({"error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}}).encode()
        lane.runtime.script(Script(script=[(0, body)], status=404, headers=(("content-type", "application/json"),)),
                            path="/v1/messages/count_tokens")
        call = await lane.post({"messages": []}, "/v1/messages/count_tokens")
        value = json.loads(call.body)
        assert call.status == 404 and value["type"] == "error" and value["error"]["type"] == "not_found_error"
        assert "llamacpp" in value["error"]["message"] and "/v1/messages/count_tokens" in value["error"]["message"]
        assert metric(lane.metrics, "kvstream_requests_total", route="/v1/messages/count_tokens",
                      outcome="client_error") == 1
        call = await lane.post(b"[1]", "/tokenize")
        assert call.status == 400 and json.loads(call.body)["error"]["code"] == 400


async def test_a_turnstile_bounds_places_waiters_and_time(autojump_clock: object) -> None:
    gate = Turnstile(1, waiting_max=1, wait_s_max=5, what="calls")
    async with gate.pass_through(), trio.open_nursery() as nursery:
        async def late() -> None:
            with pytest.raises(QueueTimeoutError):
                async with gate.pass_through():
                    raise AssertionError

        nursery.start_soon(late)
        await trio.sleep(1)
        with pytest.raises(QueueFullError):
            async with gate.pass_through():
                raise AssertionError
        await trio.sleep(5)
    async with gate.pass_through():
        with trio.move_on_after(1) as left:
            async with gate.pass_through():
                raise AssertionError
        assert left.cancelled_caught and gate.limiter.borrowed_tokens == 1
    assert gate.limiter.borrowed_tokens == 0
