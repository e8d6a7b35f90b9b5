"""Cases 27, 33, 34, 36, 37: models that exclude each other, cold starts, long prompts, who goes first."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import trio
from attrs import define

from tests.fakes import Script
from tests.gateway.conftest import Call, Lane, chat, data_of, error_of, metric, open_lane

OPENAI = {"type": "openai", "base_url": "http://fake"}
TWO_MODELS = {"dialect": "openai", "one_model": True, "models": ("one", "two"), "decode_rate": 20.0,
              "answer_tokens": None}


async def all_ended(calls: list[Call]) -> None:
    for call in calls:
        await call.ended.wait()


def served(call: Call) -> bool:
    return call.status == 200 and data_of(call.body)[-1] == "[DONE]"


async def why(lane: Lane) -> list[str]:
    return [request["why"] for request in (await lane.status())["queue"]["requests"]]


# --- 27: one model fits into memory -----------------------------------------------------------------------------------


async def test_case_27_two_models_are_served_one_after_the_other(autojump_clock: Any) -> None:
    knobs = {**TWO_MODELS, "cold_load_s": 2.0, "max_model_len": 2048, "gpu_blocks": 128}
    async with open_lane(knobs=knobs, backend=OPENAI, scheduler={"exclusive_models": True}) as lane:
        calls = [lane.start(chat(f"n {i} " + "w " * 200, model=("one", "two")[i % 2], max_tokens=40)) for i in range(6)]
        await trio.sleep(1)
        assert set(await why(lane)) == {"cold", "model"}
        await all_ended(calls)
        assert all(served(call) for call in calls)
        assert lane.runtime.evicted == 0, "a running model was pushed out"
        assert (lane.runtime.loads, lane.runtime.swaps) == (2, 1)
        assert lane.idle()


async def test_case_27_without_it_they_push_each_other_out(autojump_clock: Any) -> None:
    """The fake is honest: it is the gate that saves them."""
    knobs = TWO_MODELS
    async with open_lane(knobs=knobs, backend=OPENAI) as lane:
        calls = [lane.start(chat(f"n {i}", model=("one", "two")[i % 2], max_tokens=40)) for i in range(2)]
        await all_ended(calls)
        assert lane.runtime.evicted == 1 and not all(served(call) for call in calls)


# --- 33: a cold start -------------------------------------------------------------------------------------------------


async def test_case_33_one_of_four_first_requests_loads_the_model(autojump_clock: Any) -> None:
    async with open_lane(knobs={"dialect": "openai", "cold_load_s": 8.0}, backend=OPENAI) as lane:
        calls = [lane.start(chat(f"n {i}", stream=bool(i % 2))) for i in range(4)]
        await trio.sleep(4)
        assert len(lane.runtime.journal.calls) == 1
        assert await why(lane) == ["cold"] * 3
        await all_ended(calls)
        assert all(call.status == 200 for call in calls) and lane.runtime.loads == 1
        first = lane.runtime.journal.calls[0].first_byte_at
        assert first is not None and first >= 8
        assert all(first <= entry.received_at <= first + 0.1 for entry in lane.runtime.journal.calls[1:])
        assert lane.runtime.in_flight_max >= 3, "the other three run together"
        assert metric(lane.metrics, "kvstream_held_total", backend=lane.engine.name, why="cold") == 3


@pytest.mark.parametrize("how", ["fails", "leaves"])
async def test_case_33_if_the_first_one_ends_the_next_one_loads(autojump_clock: Any, how: str) -> None:
    async with open_lane(knobs={"dialect": "openai"}, backend=OPENAI) as lane:
        lane.runtime.script(Script(status=500, script=[(0, b"{}")]) if how == "fails" else Script(first_byte_after=60))
        calls = [lane.start(chat(f"n {i}")) for i in range(4)]
        await trio.sleep(0.01)
        if how == "leaves":
            (entry,) = lane.runtime.journal.calls
            calls[int(lane.runtime.journal.prompts[0][2:])].leave()
            assert entry.first_byte_at is None
        await all_ended(calls)
        assert sorted(served(call) for call in calls) == [False, True, True, True]


# --- 34: a second model while the first one answers -------------------------------------------------------------------


async def test_case_34_a_second_model_waits_and_is_not_starved(autojump_clock: Any) -> None:
    knobs = TWO_MODELS
    async with open_lane(knobs=knobs, backend=OPENAI, scheduler={"exclusive_models": True}) as lane:
        a = lane.start(chat("a", model="one", max_tokens=100))  # 5 s
        await trio.sleep(1)
        b = lane.start(chat("b", model="two", max_tokens=20))
        await trio.sleep(1)
        a2 = lane.start(chat("a2", model="one", max_tokens=100))
        await trio.sleep(1)
        assert await why(lane) == ["model"]
        await all_ended([a, b, a2])
        assert served(a) and served(b) and served(a2)
        assert lane.runtime.journal.prompts == ["a", "a2", "b"]
        assert (lane.runtime.swaps, lane.runtime.evicted) == (1, 0)


async def test_case_34_endless_requests_for_the_first_do_not_starve_the_second(autojump_clock: Any) -> None:
    knobs = TWO_MODELS
    async with open_lane(knobs=knobs, backend=OPENAI, scheduler={"exclusive_models": True}) as lane:
        calls = [lane.start(chat("a0", model="one", max_tokens=60))]
        await trio.sleep(0.5)
        b = lane.start(chat("b", model="two", max_tokens=20))
        began = trio.current_time()
        while not b.ended.is_set():
            calls.append(lane.start(chat(f"a{len(calls)}", model="one", max_tokens=60)))
            await trio.sleep(1)
        assert served(b) and 10 <= trio.current_time() - began <= 10 + 3 + 2  # patience, what runs, its own answer
        await all_ended(calls)
        assert all(served(call) for call in calls)
        assert (lane.runtime.swaps, lane.runtime.evicted) == (2, 0)


# --- 36: long prompts beside running streams --------------------------------------------------------------------------


@define
class Seen:
    """``p99_s`` of the gaps between the tokens of three streams; how long a short request took; when each long prompt
    came to the runtime and had its first byte; how many were held back."""

    p99_s: float
    short_s: float
    longs: list[tuple[float, float]]
    held: float


async def beside_longs(longs: int, batch: int, **scheduler: Any) -> Seen:
    """Three streams decode, then long prompts come, then a short one."""
    knobs = {"slots": 8, "n_ctx": 8 * 40_000, "prefill_rate": 8000.0, "decode_rate": 50.0, "n_batch": batch,
             "answer_tokens": None, "tokenizer": False}
    async with open_lane(knobs=knobs, scheduler=scheduler, memory={"watermark": 0.0}) as lane:
        streams = [lane.start(chat(f"victim {i}", max_tokens=70)) for i in range(3)]
        await trio.sleep(0.5)
        calls = [lane.start(chat(f"{i} " + "word " * 32_000, max_tokens=8)) for i in range(longs)]
        await trio.sleep(0.1)
        came = trio.current_time()
        short = await lane.post(chat("short", max_tokens=4))
        short_s = trio.current_time() - came
        await all_ended([*streams, *calls])
        assert all(served(call) for call in [*streams, *calls, short]) and lane.idle()
        gaps = sorted(b - a for call in streams for (a, _), (b, _) in pairwise(call.writes))
        entries = [entry for entry in lane.runtime.journal.calls if len(entry.request.body) > 100_000]
        held = metric(lane.metrics, "kvstream_held_total", backend=lane.engine.name, why="long_prefill")
        return Seen(gaps[int(len(gaps) * 0.99)], short_s,
                    [(entry.received_at, entry.first_byte_at or 0.0) for entry in entries], held)


async def test_case_36_streams_stand_still_for_one_long_prompt_not_for_two(autojump_clock: Any) -> None:
    """A runtime that reads whole prompts in one batch: the gap is as long as all the prompts in it."""
    gated = await beside_longs(2, batch=100_000)
    free = await beside_longs(2, batch=100_000, long_prefills_max=0)
    assert free.p99_s > 7.5 and gated.p99_s < 0.6 * free.p99_s
    assert gated.held == 1 and free.held == 0


async def test_case_36_a_short_request_does_not_wait_for_all_the_long_ones(autojump_clock: Any) -> None:
    """A runtime that reads them in pieces of one budget, as llama.cpp: the gaps are as long with one prompt as with
    four, but they go on four times as long for everybody who comes later."""
    gated = await beside_longs(4, batch=2048)
    free = await beside_longs(4, batch=2048, long_prefills_max=0)
    assert gated.short_s < 0.4 * free.short_s
    assert gated.p99_s < 1.01 * free.p99_s
    for (_, first), (later, _) in pairwise(gated.longs):
        assert later >= first, "two long prompts at once"
    assert sum(first for _, first in gated.longs) < sum(first for _, first in free.longs)


# --- 37: priority and starvation --------------------------------------------------------------------------------------

HIGH, LOW = (("x-kvstream-priority", "high"),), (("x-kvstream-priority", "low"),)
ONE_SEAT = {"slots": 1, "answer_tokens": None, "decode_rate": 100.0, "n_ctx": 65536}


async def test_case_37_one_high_passes_a_hundred_low(autojump_clock: Any) -> None:
    async with open_lane(knobs=ONE_SEAT) as lane:
        low = [lane.start(chat(f"low {i}", max_tokens=20), headers=LOW) for i in range(100)]
        await trio.sleep(1)
        reached = len(lane.runtime.journal.calls)
        high = lane.start(chat("high", max_tokens=20), headers=HIGH)
        await high.ended.wait()
        assert lane.runtime.journal.prompts.index("high") <= reached
        await all_ended(low)
        assert served(high) and all(served(call) for call in low)


@pytest.mark.parametrize("order", ["fcfs", "sjf"])
async def test_case_37_endless_others_do_not_starve_the_last(autojump_clock: Any, order: str) -> None:
    """A low one under endless high ones; a long one under endless short ones: both within the bound of ageing."""
    scheduler = {"priority": order, "ageing_s": 5.0, "max_wait_s": 60.0, "shed": False, "max_queue": 10_000}
    async with open_lane(knobs=ONE_SEAT, scheduler=scheduler) as lane:
        lane.start(chat("holder", max_tokens=100))
        await trio.sleep(0.1)
        last = lane.start(chat("last", max_tokens=20 if order == "fcfs" else 2000),
                          headers=LOW if order == "fcfs" else ())
        began = trio.current_time()
        n = 0
        while "last" not in lane.runtime.journal.prompts:
            n += 1
            lane.start(chat(f"n {n}", max_tokens=20), headers=HIGH if order == "fcfs" else ())
            await trio.sleep(0.1)
            assert trio.current_time() - began < 60
        # two classes to age through, or the whole handicap, behind what came before that
        assert trio.current_time() - began <= 2 * 5 * 2 + 2
        lane.nursery.cancel_scope.cancel()
        assert not last.ended.is_set() or served(last)


async def test_case_37_a_flood_of_one_client_does_not_hold_up_another(autojump_clock: Any) -> None:
    async with open_lane(knobs=ONE_SEAT) as lane:
        flood = [lane.start(chat(f"flood {i}", max_tokens=100), headers=(("authorization", "Bearer a"),))
                 for i in range(100)]
        await trio.sleep(2.5)
        for i in range(5):
            began = trio.current_time()
            call = await lane.post(chat(f"polite {i}", max_tokens=100), headers=(("authorization", "Bearer b"),))
            assert served(call)
            assert trio.current_time() - began <= 2 * 1.1 + 1.1, "it waited for more than two services"
        for call in flood:
            call.leave()
        await all_ended(flood)


async def test_case_37_a_bad_priority_is_400(autojump_clock: Any) -> None:
    async with open_lane() as lane:
        call = await lane.post(chat(), headers=(("x-kvstream-priority", "urgent"),))
        error = error_of(call.body)
        assert call.status == 400 and "urgent" in error["message"] and error["param"] == "x-kvstream-priority"
        assert lane.runtime.journal.calls == []


# --- shedding, as HTTP has it -----------------------------------------------------------------------------------------


async def test_who_is_shed_gets_503_with_the_time_when_it_would_fit(autojump_clock: Any) -> None:
    async with open_lane(knobs=ONE_SEAT, scheduler={"max_wait_s": 10.0, "shed_probe_every": 1000}) as lane:
        calls = []
        for i in range(15):  # a second each
            calls.append(lane.start(chat(f"early {i}", max_tokens=100)))
            await trio.sleep(0.65)
        late = [lane.start(chat(f"late {i}", max_tokens=100, stream=bool(i % 2))) for i in range(12)]
        await trio.sleep(0.1)
        shed = [call for call in late if call.ended.is_set()]
        assert len(shed) >= 4
        for call in shed:
            assert call.status == 503 and error_of(call.body)["code"] == "predicted_wait"
            assert 1 <= int(call.headers["retry-after"]) <= 20
        assert metric(lane.metrics, "kvstream_refused_total", reason="predicted_wait") == len(shed)
        await trio.sleep(int(shed[0].headers["retry-after"]))
        again = await lane.post(chat("again", max_tokens=100))
        assert served(again)
        await all_ended([*calls, *late])


# --- retry storms -----------------------------------------------------------------------------------------------------


async def test_a_retry_goes_to_the_slot_that_still_holds_its_prompt(autojump_clock: Any) -> None:
    """Four slots are idle, but only one has the prompt, in a moment."""
    knobs = {"busy_after_close": 1.0, "prefill_rate": 500.0, "answer_tokens": None, "n_ctx": 65536}
    async with open_lane(knobs=knobs) as lane:
        prompt = "w " * 1500
        first = lane.start(chat(prompt, max_tokens=2000))
        await trio.sleep(4)
        assert first.writes
        first.leave()
        await trio.sleep(0.01)
        again = lane.start(chat(prompt, max_tokens=10))
        other = lane.start(chat("other", max_tokens=10))
        await trio.sleep(0.5)
        assert await why(lane) == ["retry"] and served(other)
        await again.ended.wait()
        entries = [entry for entry in lane.runtime.journal.calls if "other" not in str(entry.request.json)]
        assert served(again) and entries[0].slot == entries[1].slot
        assert trio.current_time() < 4 + 1 + 0.5 + 0.5, "its prompt was read again"
        assert lane.idle()


async def test_sixteen_agents_with_one_cold_system_prompt(autojump_clock: Any) -> None:
    """vLLM: one computes it, fifteen hit the cache."""
    knobs = {"dialect": "openai", "slots": 16, "prefill_rate": 1000.0, "max_model_len": 8192, "gpu_blocks": 10_000}
    async with open_lane(knobs=knobs, backend=OPENAI, scheduler={"long_prefills_max": 0}) as lane:
        await lane.post(chat("warm"))
        system = "you are one of sixteen agents. " * 150
        calls = [lane.start(chat(system + str(i))) for i in range(16)]
        await trio.sleep(0.1)
        assert await why(lane) == ["leader"] * 15
        await all_ended(calls)
        assert all(served(call) for call in calls)
        assert metric(lane.metrics, "kvstream_prefix_tokens_accounted_total") >= 15 * 1000
