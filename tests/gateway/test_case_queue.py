"""Cases 29, 32, 38: bounds on waiting, a loading model is waited for, a pool is not overfilled."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from tests.fakes import Script
from tests.gateway.conftest import Call, Lane, chat, data_of, error_of, metric, open_lane


async def all_ended(calls: list[Call]) -> None:
    for call in calls:
        await call.ended.wait()


# --- 29 ---------------------------------------------------------------------------------------------------------------


async def test_case_29_a_flood_meets_our_own_bounds(autojump_clock: Any) -> None:
    async with open_lane(knobs={"slots": 2}, scheduler={"max_queue": 50, "max_wait_s": 30.0}) as lane:
        calls = [lane.start(chat(f"n {i}", stream=bool(i % 2))) for i in range(1000)]
        began = trio.current_time()
        refused: list[Call] = []
        with trio.move_on_after(1):
            await all_ended(calls)
        refused = [c for c in calls if c.ended.is_set() and c.status == 429]
        assert len(refused) >= 1000 - 50 - 40
        for call in refused:
            assert call.ended_at is not None and call.ended_at - began < 1
            assert int(call.headers["retry-after"]) >= 1
            assert error_of(call.body)["code"] == "queue_full"
        assert (await lane.get("/health")).status == 200  # never queues
        await all_ended(calls)
        assert {c.status for c in calls} == {200, 429}
        assert lane.runtime.in_flight_max == 2 and lane.runtime.deferred_max == 0
        assert metric(lane.metrics, "kvstream_refused_total", reason="queue_full") == len(refused)
        assert lane.idle()


async def test_case_29_the_queue_is_bounded_in_bytes(autojump_clock: Any) -> None:
    async with open_lane(knobs={"slots": 1}, scheduler={"max_queue_bytes": 50_000}) as lane:
        lane.runtime.script(Script(first_byte_after=20))
        lane.start(chat("busy"))
        await trio.sleep(0.1)
        calls = [lane.start(chat("x", note="y" * 20_000)) for _ in range(4)]
        await trio.sleep(0.5)
        assert sorted(c.status for c in calls) == [0, 0, 429, 429]
        assert all("max_queue_bytes" in error_of(c.body)["message"] for c in calls if c.status == 429)
        await all_ended(calls)
        assert sorted(c.status for c in calls) == [200, 200, 429, 429]


@pytest.mark.parametrize("stream", [True, False])
async def test_case_29_nobody_waits_longer_than_max_wait(autojump_clock: Any, stream: bool) -> None:
    async with open_lane(knobs={"slots": 1}, scheduler={"max_wait_s": 5.0}) as lane:
        lane.runtime.script(Script(first_byte_after=60))
        lane.start(chat("busy"))
        await trio.sleep(0.1)
        began = trio.current_time()
        call = await lane.post(chat("late", stream=stream))
        assert call.status == 503 and trio.current_time() - began == pytest.approx(5, abs=0.1)
        assert int(call.headers["retry-after"]) >= 1
        error = error_of(call.body)
        assert error["code"] == "queue_timeout" and "max_wait_s = 5 s" in error["message"]


async def test_case_29_a_refusal_after_a_ping_is_a_frame(autojump_clock: Any) -> None:
    async with open_lane(knobs={"slots": 1}, scheduler={"max_wait_s": 25.0}, server={"keepalive_s": 10.0}) as lane:
        lane.runtime.script(Script(first_byte_after=60))
        lane.start(chat("busy"))
        await trio.sleep(0.1)
        call = await lane.post(chat("late"))
        assert call.status == 200
        assert data_of(call.body)[-1]["error"]["code"] == "queue_timeout" and b"[DONE]" not in call.body


# --- 32 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_case_32_loading_is_waited_for(autojump_clock: Any, stream: bool) -> None:
    async with open_lane(knobs={"load_s": 3.0}, wait=False) as lane:
        call = await lane.post(chat(stream=stream))
        assert call.status == 200
        assert 3 <= trio.current_time() < 4
        assert len(lane.runtime.journal.calls) == 1
        assert lane.idle()


async def test_case_32_a_chat_that_meets_loading_is_held(autojump_clock: Any) -> None:
    """The health route said nothing yet, the chat route does: nothing of it reaches the client."""
    async with open_lane(upstream={"health_interval_s": 60.0}) as lane:
        lane.runtime.restart(load_s=3.0)
        began = trio.current_time()
        call = await lane.post(chat())
        assert call.status == 200 and data_of(call.body)[-1] == "[DONE]"
        assert 3 <= trio.current_time() - began < 4


@pytest.mark.parametrize("stream", [True, False])
async def test_case_32_past_load_timeout_it_is_503(autojump_clock: Any, stream: bool) -> None:
    async with open_lane(knobs={"load_s": 900.0}, wait=False, upstream={"load_timeout_s": 5.0},
                         scheduler={"max_wait_s": 60.0}) as lane:
        call = await lane.post(chat(stream=stream))
        assert call.status == 503
        assert trio.current_time() == pytest.approx(5, abs=1)
        assert int(call.headers["retry-after"]) >= 1
        began = trio.current_time()
        again = await lane.post(chat())
        assert again.status == 503 and trio.current_time() - began < 0.1
        assert error_of(again.body)["code"] == "model_loading"
        assert lane.runtime.journal.calls == []


async def test_case_32_ready_says_loading(autojump_clock: Any) -> None:
    async with open_lane(knobs={"load_s": 3.0}, wait=False) as lane:
        await trio.sleep(1)
        ready = await lane.get("/ready")
        assert (ready.status, json.loads(ready.body)["status"]) == (503, "loading")
        assert int(ready.headers["retry-after"]) >= 1
        assert (await lane.get("/health")).status == 200
        await trio.sleep(4)
        assert (await lane.get("/ready")).status == 200


# --- 38 ---------------------------------------------------------------------------------------------------------------


async def flood(lane: Lane, words: int, answer: int, count: int) -> list[Call]:
    calls = [lane.start(chat(f"{i} " + "w " * words, max_tokens=answer, ignore_eos=True)) for i in range(count)]
    await all_ended(calls)
    return calls


@pytest.mark.parametrize(("words", "answer", "at_once"), [(1050, 40, 1), (400, 450, 2), (30, 60, 4)])
async def test_case_38_one_context_does_not_kill_the_others(
        autojump_clock: Any, words: int, answer: int, at_once: int) -> None:
    async with open_lane(knobs={"unified": True, "n_ctx": 2048, "slots": 4}) as lane:
        calls = await flood(lane, words, answer, 4)
        assert [c.status for c in calls] == [200] * 4
        assert all(data_of(c.body)[-1] == "[DONE]" for c in calls)
        assert lane.runtime.kills == 0
        assert lane.runtime.in_flight_max == at_once
        assert lane.idle()


async def test_case_38_without_a_limit_nobody_is_killed(autojump_clock: Any) -> None:
    async with open_lane(knobs={"unified": True, "n_ctx": 2048, "slots": 4, "answer_tokens": None},
                         scheduler={"answer_tokens_default": 100}) as lane:
        calls = [lane.start(chat(f"{i} hello", stream=bool(i % 2))) for i in range(6)]
        await all_ended(calls)
        assert [c.status for c in calls] == [200] * 6
        assert lane.runtime.kills == 0
        await trio.sleep(1)  # those we cut drain
        assert lane.idle()


async def test_case_38_what_never_fits_is_refused_with_both_numbers(autojump_clock: Any) -> None:
    async with open_lane(knobs={"unified": True, "n_ctx": 2048, "slots": 4}) as lane:
        call = await lane.post(chat("w " * 3000))
        error = error_of(call.body)
        assert (call.status, error["code"]) == (400, "context_length_exceeded")
        assert "2048" in error["message"] and "3" in error["message"]
        assert lane.runtime.journal.calls == []
