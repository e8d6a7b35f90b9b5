"""Case 41, second part: a refused connection moves a request to another backend that serves its model, once, and never
after the answer began; and which of several lanes is chosen in the first place."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from tests.fakes import FakeUpstream, Script
from tests.gateway.conftest import chat, data_of, error_of, is_idle, metric, text_of
from tests.gateway.several import Several, open_rigs, open_several

A: dict[str, Any] = {"name": "a", "knobs": {"model": "m"}}
B: dict[str, Any] = {"name": "b", "knobs": {"model": "m"}}


def served(several: Several) -> list[int]:
    return [len(runtime.journal.calls) for runtime in several.runtimes]


def refuse_calls(several: Several, *lanes: int) -> None:
    """Model calls find a closed port; health and counting go on, so nobody knows yet."""
    for lane in lanes:
        upstream = several.engines[lane].upstream
        assert isinstance(upstream, FakeUpstream)
        upstream.refuses = lambda call: call.path.startswith("/v1/chat")


# --- moving -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_case_41_a_refused_connection_moves_once(autojump_clock: Any, stream: bool) -> None:
    async with open_several(A, B) as several:
        refuse_calls(several, 0)
        call = await several.post(chat(stream=stream, model="m"))
        assert call.status == 200
        assert data_of(call.body)[-1] == "[DONE]" if stream else json.loads(call.body)["choices"]
        assert served(several) == [0, 1] and metric(several.metrics, "kvstream_failovers_total") == 1
        await trio.sleep(1)
        assert all(is_idle(engine) for engine in several.engines)


async def test_case_41_not_twice(autojump_clock: Any) -> None:
    rows = (A, B, {**B, "name": "c"})
    async with open_several(*rows, upstream={"down_grace_s": 0.0}) as several:
        refuse_calls(several, 0, 1)
        call = await several.post(chat(model="m"))
        assert call.status == 503 and error_of(call.body)["code"] == "backend_unavailable"
        assert served(several) == [0, 0, 0]


async def test_case_41_nobody_else_serves_that_model(autojump_clock: Any) -> None:
    async with open_several(A, {"knobs": {"model": "other"}}, upstream={"down_grace_s": 0.0}) as several:
        refuse_calls(several, 0)
        assert (await several.post(chat(model="m"))).status == 503
        assert served(several) == [0, 0]


@pytest.mark.parametrize("end", ["cut", "rst"])
async def test_case_41_never_after_the_answer_began(autojump_clock: Any, end: Any) -> None:
    async with open_several(A, B) as several:
        several.runtimes[0].script(Script(tokens=1, end=end))
        call = await several.post(chat(model="m"))
        assert call.status == 200 and text_of(call.body)
        assert data_of(call.body)[-1]["error"]["code"] == "upstream_stream_truncated"
        assert served(several) == [1, 0]


async def test_case_41_a_reset_is_no_refusal(autojump_clock: Any) -> None:
    """It may have been read, and then running it elsewhere would run it twice."""
    async with open_several(A, B) as several:
        several.runtimes[0].script(Script(refuse=True))
        assert (await several.post(chat(model="m"))).status == 503
        assert served(several) == [1, 0]


async def test_case_41_pings_before_the_answer_do_not_disturb_the_move(autojump_clock: Any) -> None:
    """Every wait of the client's task is cut by a ping; neither the first events nor the refusal may get lost then."""
    async with open_several(A, B, server={"keepalive_s": 0.01}) as several:
        refuse_calls(several, 0)
        several.runtimes[1].script(Script(first_byte_after=1.0))
        call = await several.post(chat(model="m"))
        assert call.status == 200 and data_of(call.body)[-1] == "[DONE]" and b": " in call.body
        assert len(text_of(call.body)) > 0 and served(several) == [0, 1]


@pytest.mark.parametrize("keepalive_s", [0.0, 0.01])
async def test_nothing_of_an_answer_is_lost_on_the_way_through_the_router(
        autojump_clock: Any, keepalive_s: float) -> None:
    async with open_several(A, B, server={"keepalive_s": keepalive_s}) as several:
        several.runtimes[0].script(Script(headers_after=0.05, first_byte_after=0.035, itl=0.02, tokens=9))
        call = await several.post(chat(model="m"))
        entry = several.runtimes[0].journal.calls[0]
        frames = [f for f in call.body.split(b"\n\n") if f and not f.startswith(b":")]
        assert data_of(frames[0])[0]["choices"][0]["delta"].get("role") == "assistant"
        assert len([f for f in frames if b'"content":"' in f]) == 9 and entry.tokens_out == 9


async def test_a_request_that_waits_leaves_a_lane_that_goes_down(autojump_clock: Any) -> None:
    rows = ({**A, "seats": 1}, {**B, "seats": 1})
    async with open_several(*rows, scheduler={"max_wait_s": 1000.0}) as several:
        for runtime in several.runtimes:
            runtime.script(Script(itl=1.0, tokens=20))
        running = [several.start(chat("one", model="m")), several.start(chat("two", model="m"))]
        await trio.sleep(1)
        waiting = several.start(chat("three", model="m"))
        await trio.sleep(1)
        lane = next(i for i, engine in enumerate(several.engines) if len(engine.streams) == 2)
        several.runtimes[lane].config.refuse = True
        several.runtimes[lane].restart()
        await waiting.ended.wait()
        assert waiting.status == 200 and data_of(waiting.body)[-1] == "[DONE]"
        assert "three" in several.runtimes[1 - lane].journal.prompts
        for call in running:
            await call.ended.wait()


async def test_case_41_over_tcp_one_of_two_dies() -> None:
    """Killed between two looks at its health: no client sees it."""
    async with open_rigs(A, B, upstream={"keepalive_expiry_s": 0.01, "health_interval_s": 60.0}) as rig:
        await rig.fakes[0].pause()
        await trio.sleep(0.05)
        for text in ("one", "two"):
            response = await rig.post(chat(text, model="m"))
            assert response.status == 200
            assert data_of(await response.read_all())[-1] == "[DONE]"
            await response.close()
        assert len(rig.runtimes[1].journal.calls) == 2
        status = await rig.status()
        assert [lane["state"] for lane in status["lanes"]] == ["down", "up"]


# --- choosing ---------------------------------------------------------------------------------------------------------


async def test_load_decides_between_equals(autojump_clock: Any) -> None:
    async with open_several(A, B) as several:
        for runtime in several.runtimes:
            runtime.script(Script(itl=1.0, tokens=20), times=None)
        for i in range(6):
            several.start(chat(f"text {i}", model="m"))
            await trio.sleep(0.1)
        assert served(several) == [3, 3]
        several.nursery.cancel_scope.cancel()


async def test_a_burst_is_spread(autojump_clock: Any) -> None:
    """All are counted at the same time; each must see those that were placed just before it."""
    async with open_several(A, B) as several:
        for runtime in several.runtimes:
            runtime.script(Script(itl=1.0, tokens=20), times=None)
            runtime.script(Script(slot=False, headers_after=0.05), path="/apply-template", times=None)
        for i in range(8):
            several.start(chat(f"text {i}", model="m"))
        await trio.sleep(1)
        assert served(several) == [4, 4]
        several.nursery.cancel_scope.cancel()


async def test_a_lane_with_more_seats_takes_more(autojump_clock: Any) -> None:
    rows = ({**A, "knobs": {"model": "m", "slots": 2}}, {**B, "knobs": {"model": "m", "slots": 6}})
    async with open_several(*rows) as s:
        for runtime in s.runtimes:
            runtime.script(Script(itl=1.0, tokens=20), times=None)
        for i in range(8):
            s.start(chat(f"text {i}", model="m"))
            await trio.sleep(0.1)
        assert served(s) == [2, 6]
        s.nursery.cancel_scope.cancel()


async def test_a_known_prefix_decides_until_the_load_outweighs_it(autojump_clock: Any) -> None:
    async with open_several(A, B) as several:
        long = "word " * 300
        several.runtimes[0].script(Script(itl=1.0, tokens=5))
        busy = several.start(chat("other", model="m"))  # so that the long one goes to b
        await trio.sleep(0.1)
        await several.post(chat(long, model="m"))
        await busy.ended.wait()
        await trio.sleep(1)
        assert served(several) == [1, 1]
        await several.post(chat(long + " and more", model="m"))  # both idle: a would be first
        assert served(several) == [1, 2]
        for _ in range(4):
            several.runtimes[1].script(Script(itl=1.0, tokens=30))
            several.start(chat(long + " and yet more", model="m"))
            await trio.sleep(0.1)
        assert served(several) == [1, 6]
        await several.post(chat(long + " again", model="m"))  # all seats of b are taken
        assert served(several) == [2, 6]
        several.nursery.cancel_scope.cancel()


async def test_without_a_model_vectors_are_not_taken_from_another_one(autojump_clock: Any) -> None:
    knobs = {"embeddings": True}
    async with open_several({**A, "knobs": {"model": "m", **knobs}}, {**B, "knobs": {"model": "n", **knobs}},
                            upstream={"down_grace_s": 0.0}) as several:
        assert (await several.post({"input": "x"}, "/v1/embeddings")).status == 200
        assert served(several) == [1, 0]
        several.runtimes[0].config.refuse = True
        await trio.sleep(20)
        assert not several.engines[0].ready
        assert (await several.post({"input": "x"}, "/v1/embeddings")).status == 503
        assert (await several.post({"input": "x", "model": "n"}, "/v1/embeddings")).status == 200
        assert (await several.post(chat())).status == 200
        assert served(several) == [1, 2]


async def test_a_closing_lane_gets_nothing_new(autojump_clock: Any) -> None:
    async with open_several(A, B) as several:
        several.engines[0].close(refuse_waiting=False)
        assert (await several.post(chat(model="m"))).status == 200
        assert (await several.post(chat())).status == 200
        assert served(several) == [0, 2]
