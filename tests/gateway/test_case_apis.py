"""Messages, responses and llama.cpp's own routes through the same scheduler as chat (cases 21, 30, 90)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from tests.fakes.apis import named
from tests.fakes.script import Script
from tests.gateway.conftest import CHAT, Call, Lane, metric, open_lane

MESSAGES, RESPONSES, NATIVE = "/v1/messages", "/v1/responses", "/completion"
ASK: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
    MESSAGES: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
    RESPONSES: {"input": "hello", "max_output_tokens": 4},
    NATIVE: {"prompt": "hello, one two three four five six", "n_predict": 4},
    "/infill": {"input_prefix": "def f(", "input_suffix": "return 1", "n_predict": 4},
}
ONE_SEAT = {"slots": 1, "answer_tokens": None, "decode_rate": 10.0}


def ask(path: str, *, stream: bool, **more: Any) -> dict[str, Any]:
    return {**ASK[path], "stream": stream, **more}


def unlimited(path: str, *, stream: bool = True) -> dict[str, Any]:
    limits = {"max_tokens", "max_output_tokens", "n_predict"}
    return {key: value for key, value in ASK[path].items() if key not in limits} | {"stream": stream}


def events_of(body: bytes) -> list[tuple[str, Any]]:
    """(name, data) of every named event."""
    found = []
    for frame in body.split(b"\n\n"):
        lines = dict(line.split(b": ", 1) for line in frame.split(b"\n") if b": " in line and not line.startswith(b":"))
        if b"data" in lines:
            found.append((lines.get(b"event", b"").decode(), json.loads(lines[b"data"])))
    return found


async def running(lane: Lane, count: int = 1) -> None:
    with trio.fail_after(60):
        while lane.engine.scheduler.snapshot(trio.current_time()).seats.used < count:
            await trio.sleep(0.01)


async def idle(lane: Lane) -> None:
    with trio.fail_after(120):
        while not lane.idle():
            await trio.sleep(0.05)


@pytest.mark.parametrize("path", ASK)
async def test_case_90_whole_and_streamed_answers_are_admitted_and_metered_like_chat(
        path: str, autojump_clock: object) -> None:
    async with open_lane(knobs={"answer_tokens": None}) as lane:
        whole = await lane.post(ask(path, stream=False), path)
        streamed = await lane.post(ask(path, stream=True), path)
        assert whole.status == streamed.status == 200
        assert whole.headers["content-type"] == "application/json"
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert (b"[DONE]" in streamed.body) is (path == CHAT)
        assert metric(lane.metrics, "kvstream_requests_total", route=path, outcome="served") == 2
        assert metric(lane.metrics, "kvstream_answer_tokens_total") >= 8
        calls = [call.request for call in lane.runtime.journal.calls if call.request.path == path]
        assert all(call.json["stream"] is True for call in calls)
        assert lane.idle()


async def test_case_90_events_of_messages_usage_and_pings(autojump_clock: object) -> None:
    ping = named("ping")
    async with open_lane(knobs={"answer_tokens": None}) as lane:
        lane.runtime.script(Script(noise=ping, itl=1.0))
        call = await lane.post(ask(MESSAGES, stream=True), MESSAGES)
        names = [name for name, _ in events_of(call.body)]
        assert names[0] == "message_start" and names[-1] == "message_stop" and names.count("ping") == 4
        assert names.count("content_block_delta") == 4
        direct = await lane.post(ask(MESSAGES, stream=False), MESSAGES)
        usage = json.loads(direct.body)["usage"]
        [entry] = [e for e in lane.runtime.journal.calls if e.request.path == MESSAGES][-1:]
        assert usage["output_tokens"] == 4 == entry.tokens_out
        assert usage["cache_read_input_tokens"] > 0  # of the first request, read off message_start


async def test_case_90_a_ping_is_no_first_token(autojump_clock: object) -> None:
    """Before any token the whole prefill may pass in pings: the wait for the first token goes on, and it ends."""
    pings = [(1.0, named("ping"))] * 30
    async with open_lane(upstream={"first_event_s": 10.0}) as lane:
        lane.runtime.script(Script(script=pings), path=MESSAGES)
        call = await lane.post(ask(MESSAGES, stream=True), MESSAGES)
        [*_, (name, error)] = events_of(call.body)
        assert name == "error" and error["error"]["type"] == "timeout_error"
        assert metric(lane.metrics, "kvstream_ttft_seconds_count", route=MESSAGES) == 0


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES, NATIVE, "/infill"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["queued", "prefill", "streaming"])
async def test_case_90_leaving_in_any_phase_frees_seat_and_runtime(
        path: str, stream: bool, phase: str, autojump_clock: object) -> None:
    knobs = ONE_SEAT | ({"prefill_rate": 1.0} if phase == "prefill" else {})
    async with open_lane(knobs=knobs) as lane:
        first = lane.start(unlimited(CHAT), CHAT) if phase == "queued" else None
        if first is not None:
            await running(lane)
        call = lane.start(unlimited(path, stream=stream), path)
        await trio.sleep(2)
        if phase == "streaming":
            assert next(iter(lane.engine.streams.values())).tokens > 3
        call.leave()
        await trio.sleep(0.01)
        if first is not None:
            assert len(lane.engine.streams) == 1 and not [
                e for e in lane.runtime.journal.calls if e.request.path == path]
            first.leave()
        else:
            [entry] = [e for e in lane.runtime.journal.calls if e.request.path == path]
            assert entry.closed_at is not None
        await idle(lane)
        name = "non_stream" if phase == "streaming" and not stream else phase
        assert metric(lane.metrics, "kvstream_cancelled_total", phase=name) >= 1
        lane.engine.scheduler.check_invariants()


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("stream", [True, False])
async def test_case_30_overload_is_told_before_the_headers_in_the_dialect_of_the_path(
        path: str, stream: bool, autojump_clock: object) -> None:
    async with open_lane(knobs=ONE_SEAT, scheduler={"max_queue": 1, "shed": False}) as lane:
        calls = [lane.start(unlimited(CHAT)), lane.start(unlimited(CHAT))]
        await running(lane)
        refused = await lane.post(ask(path, stream=stream), path)
        assert refused.status == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.headers["content-type"] == "application/json"
        value = json.loads(refused.body)
        if path == MESSAGES:
            assert value["type"] == "error" and value["error"]["type"] == "rate_limit_error"
            assert value["request_id"] == refused.headers["request-id"] == refused.headers["x-request-id"]
        else:
            assert value["error"]["type"] == "overloaded_error" and value["error"]["code"] == "queue_full"
        for page in ("/health", "/metrics"):
            began = trio.current_time()
            assert (await lane.get(page)).status == 200 and trio.current_time() == began
        for call in calls:
            call.leave()
        await idle(lane)


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_case_30_who_waits_too_long_is_told_so_in_the_dialect(path: str, autojump_clock: object) -> None:
    async with open_lane(knobs=ONE_SEAT, scheduler={"max_wait_s": 5.0, "shed": False}) as lane:
        first = lane.start(unlimited(CHAT))
        await running(lane)
        call = await lane.post(ask(path, stream=True), path)
        assert call.status == 503 and "retry-after" in call.headers
        assert json.loads(call.body)["error"]["type"] == "overloaded_error"
        first.leave()
        await idle(lane)


@pytest.mark.parametrize(("path", "name"), [(MESSAGES, "error"), (RESPONSES, "error"), (NATIVE, "")])
async def test_case_21_a_stream_that_breaks_off_ends_with_an_error_in_its_dialect(
        path: str, name: str, autojump_clock: object) -> None:
    async with open_lane(knobs={"answer_tokens": None}) as lane:
        lane.runtime.script(Script(tokens=3, end="eof_no_finish"), path=path)
        call = await lane.post(ask(path, stream=True), path)
        assert call.status == 200
        last_name, error = events_of(call.body)[-1]
        assert last_name == name and "before it was finished" in json.dumps(error)
        lane.runtime.script(Script(tokens=3, end="eof_no_finish"), path=path)
        whole = await lane.post(ask(path, stream=False), path)
        assert whole.status == 502 and "error" in json.loads(whole.body)
        assert metric(lane.metrics, "kvstream_requests_total", route=path, outcome="upstream_error") == 2


async def test_case_21_a_completed_response_needs_no_done(autojump_clock: object) -> None:
    async with open_lane() as lane:
        call = await lane.post(ask(RESPONSES, stream=True), RESPONSES)
        assert events_of(call.body)[-1][0] == "response.completed" and b"[DONE]" not in call.body
        assert metric(lane.metrics, "kvstream_requests_total", route=RESPONSES, outcome="served") == 1


# --- an answer that we cut, as if it had reached a limit --------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [MESSAGES, RESPONSES, NATIVE])
async def test_an_answer_that_outgrows_the_pool_ends_as_one_that_reached_its_limit(
        path: str, stream: bool, autojump_clock: object) -> None:
    knobs = {"slots": 2, "n_ctx": 512, "unified": True, "answer_tokens": None}
    async with open_lane(knobs=knobs, scheduler={"answer_tokens_default": 64}) as lane:
        one: Call = lane.start(unlimited(path, stream=stream), path)
        two: Call = lane.start(unlimited(path, stream=stream), path)
        with trio.fail_after(600):
            await one.ended.wait()
            await two.ended.wait()
        assert not lane.runtime.kills
        for call in (one, two):
            assert call.status == 200
            last = events_of(call.body)[-1][1] if stream else json.loads(call.body)
            if path == RESPONSES:
                last = last["response"] if stream else last
                assert last["status"] == "incomplete"
                assert last["incomplete_details"] == {"reason": "max_output_tokens"}
                assert last["output"][0]["content"][0]["text"] and last["usage"]["output_tokens"] > 10
            elif path == NATIVE:
                assert last["stop"] is True and last["stop_type"] == "limit"
            elif stream:
                assert last == {"type": "message_stop"}
                named_events = dict(events_of(call.body))
                assert named_events["message_delta"]["delta"]["stop_reason"] == "max_tokens"
                assert "content_block_stop" in named_events
            else:
                assert last["stop_reason"] == "max_tokens" and last["usage"]["output_tokens"] > 10


# --- reading only -----------------------------------------------------------------------------------------------------


async def test_embeddings_and_rankings_hold_seats_and_make_no_tokens(autojump_clock: object) -> None:
    async with open_lane(knobs={"embeddings": True, "slots": 2, "prefill_rate": 10.0}) as lane:
        call = lane.start({"input": ["one two three", "four"], "model": "m"}, "/v1/embeddings")
        await running(lane, 2)  # one each, side by side
        await call.ended.wait()
        value = json.loads(call.body)
        assert call.status == 200 and len(value["data"]) == 2 and value["usage"]["prompt_tokens"] > 3
        native = await lane.post({"content": "x"}, "/embedding")
        assert native.status == 200 and isinstance(json.loads(native.body), list)
        ranked = await lane.post({"query": "a", "documents": ["b", "c", "d"]}, "/v1/rerank")
        assert len(json.loads(ranked.body)["results"]) == 3
        assert metric(lane.metrics, "kvstream_answer_tokens_total") == 0
        assert metric(lane.metrics, "kvstream_ttft_seconds_count", route="/v1/embeddings") == 0
        await idle(lane)


async def test_many_documents_are_no_long_prompt(autojump_clock: object) -> None:
    async with open_lane(knobs={"embeddings": True, "slots": 2, "n_ctx": 512}) as lane:
        text = "word " * 100
        call = await lane.post({"input": [text] * 20}, "/v1/embeddings")
        assert call.status == 200 and len(json.loads(call.body)["data"]) == 20
        call = await lane.post({"input": ["x", "word " * 600]}, "/v1/embeddings")
        assert call.status == 400 and json.loads(call.body)["error"]["code"] == "context_length_exceeded"


async def test_a_missing_flag_is_named_and_held_against_nobody(autojump_clock: object) -> None:
    async with open_lane() as lane:
        for _ in range(8):
            call = await lane.post({"input": "x"}, "/v1/embeddings")
            error = json.loads(call.body)["error"]
            assert call.status == 404 and error["code"] == "route_not_supported"
            assert "--embeddings" in error["message"] and "llamacpp" in error["message"]
        assert (await lane.post(ask(CHAT, stream=False))).status == 200
        assert metric(lane.metrics, "kvstream_requests_total", route="/v1/embeddings", outcome="client_error") == 8
        await idle(lane)


@pytest.mark.parametrize(("path", "body", "param"), [
    (MESSAGES, {"messages": "x"}, "messages"), (MESSAGES, {"messages": []}, "messages"), (RESPONSES, {}, "input"),
    (RESPONSES, {"input": 3}, "input"), (NATIVE, {}, "prompt"), ("/infill", {"input_prefix": "a"}, "input_suffix"),
    ("/v1/embeddings", {}, "input"), ("/v1/rerank", {"query": "a"}, "texts"), (MESSAGES, {
        "messages": [{"role": "user", "content": "x"}], "max_tokens": "many"}, "max_tokens")])
async def test_what_is_missing_is_named(path: str, body: Any, param: str, autojump_clock: object) -> None:
    async with open_lane() as lane:
        call = await lane.post(body, path)
        assert call.status == 400 and param in call.body.decode()
        assert not lane.runtime.journal.calls


# --- together with what others built ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES, NATIVE, "/infill"])
@pytest.mark.parametrize("first", [True, False])
async def test_a_streamed_and_a_whole_answer_may_share_one_call(path: str, first: bool, autojump_clock: object) -> None:
    async with open_lane(knobs={"answer_tokens": None}) as lane:
        alone = [await lane.post(ask(path, stream=stream, seed=1), path) for stream in (True, False)]
        before = len(lane.runtime.journal.calls)
        one = lane.start(ask(path, stream=first, temperature=0), path)
        two = lane.start(ask(path, stream=not first, temperature=0), path)
        await one.ended.wait()
        await two.ended.wait()
        assert one.status == two.status == 200
        streamed, whole = (one, two) if first else (two, one)
        assert [name for name, _ in events_of(streamed.body)] == [name for name, _ in events_of(alone[0].body)]
        assert set(json.loads(whole.body)) == set(json.loads(alone[1].body))
        assert len(lane.runtime.journal.calls) - before <= 2


async def test_embeddings_of_one_text_are_asked_for_once(autojump_clock: object) -> None:
    async with open_lane(knobs={"embeddings": True, "prefill_rate": 1.0}) as lane:
        calls = [lane.start({"input": "one two three"}, "/v1/embeddings") for _ in range(4)]
        for call in calls:
            await call.ended.wait()
            assert call.status == 200 and json.loads(call.body)["data"]
        assert len({call.body for call in calls}) == 1
        assert len([e for e in lane.runtime.journal.calls if e.request.path == "/v1/embeddings"]) <= 4
