"""Case 53: wedged but healthy is caught, busy but alive is left alone."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
import trio

from tests.fakes import Script
from tests.gateway.conftest import Call, Lane, chat, data_of, error_of, metric, open_lane

QUICK = {"wedged_s": 30.0, "health_interval_s": 2.0}
LONG: dict[str, Any] = {"slots": 4, "answer_tokens": None, "decode_rate": 20.0}


def long_prompt(tokens: int) -> str:
    return " ".join(f"w{n}" for n in range(tokens))


async def ready(lane: Lane) -> tuple[int, str]:
    call = await lane.get("/ready")
    return call.status, json.loads(call.body)["status"]


async def all_ended(calls: list[Call]) -> None:
    for call in calls:
        await call.ended.wait()


# --- A: wedged but healthy -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots_hang", [True, False])
async def test_case_53_wedged_but_healthy(autojump_clock: Any, slots_hang: bool) -> None:
    async with open_lane(knobs=LONG, upstream=QUICK) as lane:
        running = [lane.start(chat(f"running {n}", max_tokens=200, stream=n != 1)) for n in range(3)]
        await trio.sleep(2)
        lane.runtime.config.slots_hang = slots_hang
        lane.runtime.wedge()
        wedged_at = trio.current_time()
        await trio.sleep(25)
        assert await ready(lane) == (200, "ready") and not any(call.ended.is_set() for call in running)
        waiting = [lane.start(chat(f"waiting {n}")) for n in range(2)]  # one more seat, and a queue of one
        await all_ended(running)
        assert 29 <= trio.current_time() - wedged_at <= 45
        for call in (running[0], running[2]):
            assert call.status == 200 and b"[DONE]" not in call.body
            assert data_of(call.body)[-1]["error"]["code"] == "backend_wedged"
        assert error_of(running[1].body)["code"] == "backend_wedged" and running[1].status == 504
        assert await ready(lane) == (503, "wedged")
        status = await lane.status()
        assert status["state"] == "wedged" and status["breaker"]["wedged"]
        assert metric(lane.metrics, "kvstream_wedged_total") == 1
        assert metric(lane.metrics, "kvstream_backend_state", backend="default", state="wedged") == 1
        sent = len(lane.runtime.journal.calls)
        await trio.sleep(4)
        assert len(lane.runtime.journal.calls) == sent, "nothing is admitted"
        late = lane.start(chat("late"))
        lane.runtime.wedge(False)
        lane.runtime.config.slots_hang = False
        with trio.fail_after(300):
            await late.ended.wait()
        assert late.status == 200 and (await ready(lane)) == (200, "ready")
        assert (await lane.status())["breaker"]["state"] == "closed"
        await all_ended(waiting)


async def test_case_53_it_stays_closed_while_the_health_route_is_silent_and_while_the_trial_is(
    autojump_clock: Any,
) -> None:
    async with open_lane(knobs=LONG, upstream=QUICK) as lane:
        lane.start(chat("running", max_tokens=200))
        await trio.sleep(2)
        lane.runtime.wedge()
        await trio.sleep(32)
        assert (await ready(lane))[1] == "wedged"
        lane.runtime.config.health_status = 500
        await trio.sleep(60)
        assert (await ready(lane))[0] == 503
        assert (await lane.status())["breaker"]["state"] == "open", "no trial before the health route answers"
        lane.runtime.config.health_status = 200
        first = lane.start(chat("first trial"))
        await first.ended.wait()
        assert b"backend_wedged" in first.body, "the health route lies again, and the trial hangs"
        assert metric(lane.metrics, "kvstream_wedged_total") == 2
        lane.runtime.wedge(False)
        second = lane.start(chat("second trial"))
        await second.ended.wait()
        assert second.status == 200 and b"[DONE]" in second.body


async def test_case_53_what_came_before_the_silence_is_no_sign_of_life_in_it(autojump_clock: Any) -> None:
    async with open_lane(knobs=LONG, upstream=QUICK) as lane:
        call = lane.start(chat("running", max_tokens=400))
        await trio.sleep(2)
        lane.runtime.wedge()
        await trio.sleep(10)  # the slots are looked at
        lane.runtime.wedge(False)
        await trio.sleep(2)
        lane.runtime.wedge()
        began = trio.current_time()
        await call.ended.wait()
        assert b"backend_wedged" in call.body and trio.current_time() - began == pytest.approx(30, abs=2)


async def test_case_53_wedged_while_a_short_prompt_is_read(autojump_clock: Any) -> None:
    """The rate is known from earlier requests, so a hundred tokens do not excuse ten minutes."""
    async with open_lane(knobs=LONG, upstream=QUICK) as lane:
        await lane.post(chat(long_prompt(200), max_tokens=4))
        lane.runtime.wedge()
        began = trio.current_time()
        call = await lane.post(chat("now " + long_prompt(150), max_tokens=4))
        assert b"backend_wedged" in call.body and 29 < trio.current_time() - began < 60


# --- B: busy but alive ------------------------------------------------------------------------------------------------


async def test_case_53_health_and_slots_are_silent_while_tokens_flow(autojump_clock: Any) -> None:
    async with open_lane(knobs=LONG, upstream=QUICK) as lane:
        calls = [lane.start(chat(f"n {n}", max_tokens=2000)) for n in range(2)]
        await trio.sleep(1)
        lane.runtime.config.health_hang = lane.runtime.config.slots_hang = True
        asked = len(lane.runtime.journal.paths("/health")) + len(lane.runtime.journal.paths("/slots"))
        for _ in range(90):
            await trio.sleep(1)
            assert await ready(lane) == (200, "ready")
        assert len(lane.runtime.journal.paths("/health")) + len(lane.runtime.journal.paths("/slots")) == asked, (
            "nobody asks a backend whose tokens flow")
        await all_ended(calls)
        assert [call.status for call in calls] == [200, 200] and all(b"[DONE]" in call.body for call in calls)


@pytest.mark.parametrize("rate_known", [True, False])
async def test_case_53_health_and_slots_are_silent_for_a_prompt_of_a_minute(
    autojump_clock: Any, rate_known: bool
) -> None:
    knobs = {**LONG, "n_ctx": 4 * 131072, "prefill_rate": 1700.0}
    async with open_lane(knobs=knobs, upstream={**QUICK, "count_timeout_s": 1.0}) as lane:
        if rate_known:
            await lane.post(chat(long_prompt(300), max_tokens=4))
        decoding = lane.start(chat("decoding", max_tokens=100))
        await trio.sleep(1)
        call = lane.start(chat(long_prompt(50_000), max_tokens=4))
        await trio.sleep(0.5)
        lane.runtime.config.health_hang = lane.runtime.config.slots_hang = True
        lane.runtime.wedge()  # as if all of it were one batch: not a token of anybody comes
        for _ in range(60):
            await trio.sleep(1)
            assert await ready(lane) == (200, "ready")
        lane.runtime.wedge(False)
        await all_ended([call, decoding])
        assert b"[DONE]" in call.body and b"[DONE]" in decoding.body
        assert metric(lane.metrics, "kvstream_wedged_total") == 0


async def test_case_53_slots_that_move_on_are_a_sign_of_life(autojump_clock: Any) -> None:
    """A prompt far slower than any before; only the slots show that it is read."""
    knobs = {**LONG, "n_ctx": 4 * 16384, "prefill_rate": 5000.0, "n_batch": 64}
    async with open_lane(knobs=knobs, upstream=QUICK) as lane:
        await lane.post(chat(long_prompt(300), max_tokens=4))
        lane.runtime.config.prefill_rate = 20.0
        call = await lane.post(chat("slow " + long_prompt(4000), max_tokens=4))
        assert call.status == 200 and b"[DONE]" in call.body
        looks = [entry.received_at for entry in lane.runtime.journal.paths("/slots")][-20:]
        assert min(b - a for a, b in pairwise(looks)) >= 2.0


async def test_case_53_a_slow_reader_is_no_wedge(autojump_clock: Any) -> None:
    async with open_lane(knobs=LONG, upstream=QUICK, server={"stall_s": 300.0, "stream_buffer_bytes": 1024}) as lane:
        call = lane.start(chat("stuck", max_tokens=500), stuck=True)
        await trio.sleep(120)
        assert await ready(lane) == (200, "ready")
        call.leave()
        await trio.sleep(1)


async def test_case_53_a_backend_without_requests_that_says_nothing_is_down(autojump_clock: Any) -> None:
    async with open_lane(upstream=QUICK) as lane:
        lane.runtime.config.health_hang = True
        await trio.sleep(20)
        assert await ready(lane) == (503, "down")
        lane.runtime.script(Script())
