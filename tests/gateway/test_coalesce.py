"""Identical deterministic requests: one call, and every client as if it were alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from trio.testing import MockClock

from kvstream.adapters.base import Done
from kvstream.gateway.coalesce import Coalescer, CoalesceSettings
from kvstream.gateway.request import CHAT, parse_request
from kvstream.gateway.router import Lane as RoutedLane
from kvstream.gateway.router import Router
from tests.fakes import Script
from tests.gateway.conftest import HANG_S, Call, Lane, chat, data_of, error_of, metric, open_lane, open_rig, text_of

COLD: dict[str, Any] = {"temperature": 0}


async def until(true: Any, within_s: float = 30.0) -> None:
    with trio.fail_after(within_s):
        while not true():
            await trio.sleep(0.01)


async def over(*calls: Call) -> None:
    """Wait until they ended; a hang is a failure."""
    with trio.fail_after(60):
        for call in calls:
            await call.ended.wait()


async def all_idle(lane: Lane, within_s: float = 5.0) -> None:
    await until(lane.idle, within_s)
    lane.engine.scheduler.check_invariants()


async def test_sixteen_identical_requests_are_one_call(autojump_clock: Any) -> None:
    async with open_lane() as lane:
        calls = [lane.start(chat(**COLD)) for _ in range(16)]
        await over(*calls)
        assert len(lane.runtime.journal.calls) == 1
        assert {call.status for call in calls} == {200} and len({call.body for call in calls}) == 1
        assert calls[0].body.endswith(b"data: [DONE]\n\n") and text_of(calls[0].body)
        roles = [call.headers["x-kvstream-coalesced"] for call in calls]
        assert sorted(roles) == ["follower"] * 15 + ["leader"]
        assert metric(lane.metrics, "kvstream_coalesced_total") == (await lane.status())["sharing"]["coalesced"] == 15
        assert metric(lane.metrics, "kvstream_requests_total", route=CHAT, outcome="served") == 16
        assert metric(lane.metrics, "kvstream_answer_tokens_total") == 16  # of one answer
        await all_idle(lane)
        after = await lane.post(chat(**COLD))
        assert after.status == 200 and len(lane.runtime.journal.calls) == 2  # nothing was kept


@pytest.mark.parametrize("leaves", [False, True])
async def test_each_has_one_log_line_and_the_leaders_has_the_figures(
        autojump_clock: Any, caplog: pytest.LogCaptureFixture, leaves: bool) -> None:
    caplog.set_level("INFO", logger="kvstream.request")
    async with open_lane(knobs={"answer_tokens": 100}) as lane:
        calls = [lane.start(chat(**COLD)) for _ in range(3)]
        await until(lambda: all(call.writes for call in calls))
        leader = next(call for call in calls if call.headers["x-kvstream-coalesced"] == "leader")
        if leaves:
            leader.leave()
        await over(*calls)
        await all_idle(lane)
    lines = [record.fields for record in caplog.records if record.name == "kvstream.request"]  # type: ignore[attr-defined]
    assert len({line["id"] for line in lines}) == len(lines) == 3
    (whole,) = [line for line in lines if "from" not in line]
    assert whole["answer_tokens"] == 100 and {line["from"] for line in lines if line is not whole} == {whole["id"]}


async def test_sixteen_over_the_wire_are_one_call() -> None:
    async with open_rig(knobs={"slots": 2}) as rig:
        rig.runtime.script(Script(hang_at_token=3, tokens=9, goes_on=(goes_on := trio.Event())))
        responses = [await rig.send(chat(**COLD)) for _ in range(16)]
        await rig.until(lambda: metric(rig.engine.metrics, "kvstream_coalesced_total") == 15)
        goes_on.set()
        with trio.fail_after(HANG_S):
            bodies = [await (await response.read_head()).read_all() for response in responses]
        assert len(rig.runtime.journal.calls) == 1 and len(set(bodies)) == 1 and bodies[0].endswith(b"[DONE]\n\n")
        for response in responses:
            await response.close()
        await rig.until(rig.idle)


async def test_a_follower_that_comes_late_reads_from_the_start(autojump_clock: Any) -> None:
    async with open_lane(knobs={"answer_tokens": 100}) as lane:
        first = lane.start(chat(**COLD))
        await until(lambda: len(first.writes) > 40)
        second = lane.start(chat(**COLD))
        await over(first)
        await over(second)
        assert second.body == first.body and len(lane.runtime.journal.calls) == 1


@pytest.mark.parametrize("other", [
    chat("hello"), chat("hello", temperature=0.1), chat("hello", temperature=None), chat("hello", temperature=False),
    chat("hello", temperature=0, seed=1), chat("hello", temperature=0, max_tokens=5), chat("hell", temperature=0),
    chat("hello", temperature=0, model="other"), chat("hello", temperature=0, dynatemp_range=0.5),
    chat("hello", temperature=0, tools=[{"type": "function", "function": {"name": "f"}}]),
])
async def test_what_is_not_the_same_is_not_shared(autojump_clock: Any, other: dict[str, Any]) -> None:
    async with open_lane() as lane:
        calls = [lane.start(body) for body in (chat(temperature=0), other, other)]
        await over(*calls)
        temperature = other.get("temperature")
        shared = temperature == 0 and temperature is not False and "dynatemp_range" not in other
        assert len(lane.runtime.journal.calls) == (2 if shared else 3)
        assert calls[0].body != b"" and {call.status for call in calls} == {200}


async def test_one_client_never_gets_the_answer_of_another(autojump_clock: Any) -> None:
    async with open_lane(auth={"keys": ("one", "two")}) as lane:
        calls = [lane.start(chat(**COLD), headers=[("x-api-key", key)]) for key in ("one", "two", "one")]
        await over(*calls)
        assert len(lane.runtime.journal.calls) == 2
    async with open_lane() as lane:
        calls = [lane.start(chat(**COLD), headers=headers)
                 for headers in ([("authorization", "Bearer a")], [("authorization", "Bearer b")], [])]
        await over(*calls)
        assert len(lane.runtime.journal.calls) == 3


async def test_another_priority_is_another_place_in_the_queue(autojump_clock: Any) -> None:
    async with open_lane() as lane:
        calls = [lane.start(chat(**COLD), headers=[("x-kvstream-priority", p)]) for p in ("low", "high")]
        await over(*calls)
        assert len(lane.runtime.journal.calls) == 2


async def test_the_order_of_a_tools_fields_is_part_of_the_prompt(autojump_clock: Any) -> None:
    def tool(*names: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "f", "parameters": {"properties": {n: {} for n in names}}}}

    async with open_lane() as lane:
        calls = [lane.start(chat(**COLD, tools=[tool(*names)])) for names in (("a", "b"), ("b", "a"))]
        await over(*calls)
        assert len(lane.runtime.journal.calls) == 2


# --- twins ------------------------------------------------------------------------------------------------------------

TWINS = {
    "stream": chat(**COLD), "whole": chat(**COLD, stream=False),
    "usage": chat(**COLD, stream_options={"include_usage": True}),
}


@pytest.mark.parametrize("json_only", [False, True])
@pytest.mark.parametrize("first", TWINS)
@pytest.mark.parametrize("dialect", ["llamacpp", "openai"])
async def test_twins_share_and_each_gets_its_own_form(
        autojump_clock: Any, first: str, dialect: str, json_only: bool) -> None:
    backend = {"type": dialect, "base_url": "http://fake", "seats": 4}
    whole = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "one two"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}}
    async with open_lane(backend=backend, knobs={"dialect": dialect, "answer_tokens": 30}) as lane:
        script = Script(script=[(0.5, json.dumps(whole).encode())], headers=(("content-type", "application/json"),))
        order = [first, *(name for name in TWINS if name != first)]
        alone: dict[str, Any] = {}
        for name in order:
            if json_only:
                lane.runtime.script(script)
            alone[name] = await lane.post(TWINS[name])
        before = len(lane.runtime.journal.calls)
        if json_only:
            lane.runtime.script(script)
        shared = {name: lane.start(TWINS[name]) for name in order}
        await over(*shared.values())
        assert len(lane.runtime.journal.calls) == before + 1
        for name in order:
            assert shared[name].status == 200
            assert shared[name].headers["content-type"] == alone[name].headers["content-type"]
        answer, expected = json.loads(shared["whole"].body), json.loads(alone["whole"].body)
        assert answer["choices"] == expected["choices"]
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [answer["usage"][n] for n in names] == [expected["usage"][n] for n in names]
        assert "estimated" not in answer["usage"]
        for name in ("stream", "usage"):
            data = data_of(shared[name].body)
            assert data[-1] == "[DONE]" and text_of(shared[name].body) == text_of(alone[name].body) != ""
            usage = [v["usage"] for v in data[:-1] if v.get("usage") and not v["choices"]]
            assert len(usage) == (name == "usage")
        assert [v["usage"]["total_tokens"] for v in data_of(shared["usage"].body)[:-1] if v.get("usage")][-1] == (
            answer["usage"]["total_tokens"])


async def test_no_twins_where_calls_are_passed_on(autojump_clock: Any) -> None:
    async with open_lane(upstream={"non_stream": "pass"}) as lane:
        calls = [lane.start(TWINS[name]) for name in ("stream", "whole", "whole", "stream")]
        await over(*calls)
        assert len(lane.runtime.journal.calls) == 2
        assert calls[1].body == calls[2].body and json.loads(calls[1].body)["choices"]


# --- leaving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0.05, 0.5])
async def test_the_leader_leaves_and_the_follower_goes_on(autojump_clock: Any, at: float) -> None:
    async with open_lane(knobs={"answer_tokens": 100}) as lane:
        leader = lane.start(chat(**COLD))
        await trio.sleep(0)
        follower = lane.start(chat(**COLD))
        await trio.sleep(at)
        leader.leave()
        await over(follower)
        assert follower.status == 200 and follower.body.endswith(b"data: [DONE]\n\n")
        assert len(lane.runtime.journal.calls) == 1
        assert metric(lane.metrics, "kvstream_requests_total", route=CHAT, outcome="served") == 1
        assert metric(lane.metrics, "kvstream_requests_total", route=CHAT, outcome="cancelled") == 1
        await all_idle(lane)


@pytest.mark.parametrize("at", [0.0, 0.05, 0.5])
async def test_when_the_last_one_leaves_the_call_ends(autojump_clock: Any, at: float) -> None:
    async with open_lane(knobs={"answer_tokens": 5000, "n_ctx": 65536}) as lane:
        calls = [lane.start(chat(**COLD)) for _ in range(3)]
        await trio.sleep(at)
        for call in calls[:2]:
            call.leave()
        await trio.sleep(1)
        assert len(lane.engine.streams) == 1
        calls[2].leave()
        await trio.sleep(0.05)
        assert not lane.engine.streams
        await all_idle(lane)
        fresh = lane.start(chat(**COLD, max_tokens=1))
        await over(fresh)
        assert fresh.status == 200


async def test_who_comes_as_the_last_one_leaves_gets_a_call_of_its_own(autojump_clock: Any) -> None:
    """In the very turn: the old call is as good as cancelled, its task has not noticed yet."""
    async with open_lane(knobs={"answer_tokens": 20}) as lane:
        coalescer = Coalescer(Router([RoutedLane(lane.engine)]).open_answer, lane.metrics, CoalesceSettings())
        await lane.nursery.start(coalescer.run)
        incoming = parse_request(CHAT, (), json.dumps(chat(**COLD)).encode())
        async with coalescer.open_answer(incoming, "first") as answer:
            await answer.get()
        async with coalescer.open_answer(incoming, "second") as answer:
            events = []
            while batch := await answer.get():
                events += batch
        assert isinstance(events[-1], Done)


async def test_queued_followers_wait_in_one_place(autojump_clock: Any) -> None:
    async with open_lane(scheduler={"max_batch_size": 1}, knobs={"answer_tokens": 100}) as lane:
        busy = lane.start(chat("other"))
        await trio.sleep(0.1)
        calls = [lane.start(chat(**COLD)) for _ in range(5)]
        await trio.sleep(0.1)
        assert len(lane.engine.streams) == 2
        for call in calls[:4]:
            call.leave()
        await over(calls[4])
        assert calls[4].status == 200
        await over(busy)
        await all_idle(lane)


# --- failing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["cut", "rst", "error_event", "eof_no_finish"])
async def test_when_the_answer_dies_everybody_gets_an_error_frame(autojump_clock: Any, end: Any) -> None:
    async with open_lane() as lane:
        lane.runtime.script(Script(itl=0.1, tokens=3, end=end))
        calls = [lane.start(chat(**COLD)) for _ in range(4)]
        await trio.sleep(0.15)
        late = lane.start(chat(**COLD))
        whole = lane.start(chat(**COLD, stream=False))
        await over(*calls, late, whole)
        assert len(lane.runtime.journal.calls) == 1
        for call in (*calls, late):
            assert call.status == 200
            data = data_of(call.body)
            assert "[DONE]" not in data and data[-1]["error"]
            assert sum("error" in value for value in data) == 1
        assert whole.status >= 500 and error_of(whole.body)
        await all_idle(lane)


async def test_an_error_before_the_first_byte_is_everybodys_http_error(autojump_clock: Any) -> None:
    async with open_lane() as lane:
        refusal = b'{"error": {"message": "no such sampler", "code": 400}}'
        lane.runtime.script(Script(status=400, script=[(0.3, refusal)]))
        calls = [lane.start(chat(**COLD)) for _ in range(4)]
        await over(*calls)
        assert {call.status for call in calls} == {400} and len({call.body for call in calls}) <= 4
        assert all("no such sampler" in error_of(call.body)["message"] for call in calls)
        assert len(lane.runtime.journal.calls) == 1
        assert metric(lane.metrics, "kvstream_requests_total", route=CHAT, outcome="client_error") == 4


async def test_a_gateway_that_closes_refuses_all(autojump_clock: Any) -> None:
    async with open_lane() as lane:
        lane.engine.close(refuse_waiting=True)
        calls = [lane.start(chat(**COLD)) for _ in range(3)]
        for call in calls:
            await over(call)
            assert call.status == 503 and "retry-after" in call.headers


# --- reading slowly ---------------------------------------------------------------------------------------------------

SMALL = {"server": {"stall_s": 4, "stream_buffer_bytes": 30_000}, "coalesce": {"history_bytes_max": 60_000}}


async def test_who_does_not_read_is_let_go_and_slows_nobody(autojump_clock: Any) -> None:
    async with open_lane(**SMALL, knobs={"answer_tokens": 400}) as lane:
        stuck = lane.start(chat(**COLD), stuck=True)
        good = lane.start(chat(**COLD))
        try:
            await over(good)
        finally:
            stuck.leave()  # else a failure hangs in a send that nothing can cancel
        assert good.ended_at is not None and good.ended_at < 6  # 400 tokens at 100 a second: nobody was waited for
        assert good.body.endswith(b"data: [DONE]\n\n") and len(lane.runtime.journal.calls) == 1
        await over(stuck)
        await all_idle(lane)


async def test_a_lone_reader_that_does_not_read_loses_its_seat_in_time(autojump_clock: Any) -> None:
    async with open_lane(**SMALL, knobs={"answer_tokens": 50_000, "n_ctx": 400_000}) as lane:
        stuck = lane.start(chat(**COLD), stuck=True)
        try:
            await until(lambda: lane.engine.streams)
            await until(lambda: not lane.engine.streams, within_s=8)
        finally:
            stuck.leave()
        assert metric(lane.metrics, "kvstream_requests_total", route=CHAT, outcome="stalled") == 1
        await over(stuck)
        await all_idle(lane)


async def test_beyond_the_history_a_newcomer_has_its_own_call(autojump_clock: Any) -> None:
    async with open_lane(**SMALL, knobs={"answer_tokens": 300}) as lane:
        first = lane.start(chat(**COLD))
        await until(lambda: len(first.writes) > 100)
        second = lane.start(chat(**COLD))
        third = lane.start(chat(**COLD))
        for call in (first, second, third):
            await over(call)
            assert call.body.endswith(b"data: [DONE]\n\n") and text_of(call.body) == text_of(first.body)
        assert len(lane.runtime.journal.calls) == 2
        roles = [call.headers["x-kvstream-coalesced"] for call in (second, third)]
        assert sorted(roles) == ["follower", "leader"]


# --- any order --------------------------------------------------------------------------------------------------------

# (what is asked, comes at, leaves after; None: stays, as a stream), in ticks of 50 ms
visits = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 6), st.none() | st.integers(0, 8), st.booleans()),
                  min_size=1, max_size=8)
ends = st.sampled_from(["done", "done", "cut", "error_event"])


async def scene(visitors: list[tuple[int, int, int | None, bool]], end: Any, slots: int) -> None:
    async with open_lane(knobs={"slots": slots, "decode_rate": 20, "answer_tokens": 6}, wait=True) as lane:
        lane.runtime.script(Script(itl=0.05, tokens=4, end=end))
        calls: list[tuple[Call, int | None]] = []

        async def visit(asked: int, comes: int, leaves: int | None, stream: bool) -> None:
            await trio.sleep(comes * 0.05)
            call = lane.start(chat(f"text {asked}", **COLD, stream=stream))
            calls.append((call, leaves))
            if leaves is not None:
                await trio.sleep(leaves * 0.05)
                call.leave()

        async with trio.open_nursery() as nursery:
            for visitor in visitors:
                nursery.start_soon(visit, *visitor)
        await over(*(call for call, _ in calls))
        for call, leaves in calls:
            if leaves is None:
                whole = call.body.endswith(b"data: [DONE]\n\n") or call.body.startswith(b'{"choices"')
                assert whole or b'"error"' in call.body
                assert not (whole and b'"error"' in call.body)
                assert end != "done" or whole
        await all_idle(lane)
        counted = sum(s.value for m in lane.metrics.registry.collect() for s in m.samples
                      if s.name == "kvstream_requests_total")
        assert counted <= len(visitors)
        if all(leaves is None for _, leaves in calls):
            assert counted == len(visitors), "everyone was booked once"


@hypothesis_settings(max_examples=25, deadline=None)
@given(st.random_module(), visits, ends, st.integers(1, 3))
def test_any_order_of_coming_and_leaving(
        _order: object, visitors: list[tuple[int, int, int | None, bool]], end: str, slots: int) -> None:
    trio.run(scene, visitors, end, slots, clock=MockClock(autojump_threshold=0))
