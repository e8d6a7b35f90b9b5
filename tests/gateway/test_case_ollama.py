"""Ollama behind KVStream, in memory: cases 22, 28, 29 and 35, and clients of its own API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from kvstream.gateway.answer_key import answer_key
from kvstream.gateway.request import parse_request
from tests.fakes import Script
from tests.fakes.ollama import BUSY
from tests.gateway.conftest import CHAT, COMPLETIONS, Lane, chat, data_of, error_of, metric, open_lane, text_of
from tests.gateway.several import open_several

KNOBS: dict[str, Any] = {"dialect": "ollama", "slots": 1, "n_ctx": 4096, "decode_rate": 100, "answer_tokens": 4}
NATIVE = ("/api/chat", "/api/generate")


@asynccontextmanager
async def open_ollama(*, knobs: dict[str, Any] | None = None, backend: dict[str, Any] | None = None,
                      **sections: Any) -> AsyncIterator[Lane]:
    async with open_lane(knobs=KNOBS | (knobs or {}), backend={"type": "ollama", **(backend or {})},
                         **sections) as lane:
        yield lane


def native(path: str, text: str = "hello", **more: Any) -> dict[str, Any]:
    said = {"messages": [{"role": "user", "content": text}]} if path == "/api/chat" else {"prompt": text}
    return {"model": "fake-model", **said, **more}


def asked(path: str, text: str = "hello", **more: Any) -> dict[str, Any]:
    """A request of any route."""
    if path in NATIVE:
        return native(path, text, **more)
    return chat(text, model="fake-model", **more) if path == CHAT else {
        "model": "fake-model", "prompt": text, "stream": True, **more}


def lines(body: bytes) -> list[Any]:
    return [json.loads(line) for line in body.splitlines()]


# --- both APIs --------------------------------------------------------------------------------------------------------


async def test_a_native_stream_is_the_default_and_travels_line_by_line(autojump_clock: Any) -> None:
    async with open_ollama() as lane:
        call = await lane.post(native("/api/chat"), "/api/chat")
        assert call.status == 200 and call.headers["content-type"] == "application/x-ndjson"
        said = lines(call.body)
        assert [line["done"] for line in said] == [False] * 4 + [True] and said[-1]["eval_count"] == 4
        whole = await lane.post(native("/api/chat", stream=False), "/api/chat")
        assert whole.headers["content-type"] == "application/json"
        answer = json.loads(whole.body)
        assert answer["message"]["content"] == "".join(line["message"]["content"] for line in said)
        assert answer["done"] is True and answer["prompt_eval_count"] == said[-1]["prompt_eval_count"]
        # what is asked of Ollama is always a stream: only there does hanging up free it
        assert [json.loads(c.request.body).get("stream", True) for c in lane.runtime.journal.calls] == [True, True]
        assert lane.idle()


async def test_a_client_of_v1_gets_openai_s_chunks_for_ollama_s_lines(autojump_clock: Any) -> None:
    async with open_ollama() as lane:
        streamed = await lane.post(chat(model="fake-model", stream_options={"include_usage": True}))
        chunks = data_of(streamed.body)
        assert chunks[-1] == "[DONE]" and chunks[-2]["usage"]["completion_tokens"] == 4 and chunks[-2]["choices"] == []
        plain = await lane.post(chat(model="fake-model"))
        assert text_of(plain.body) == text_of(streamed.body) and b"usage" not in plain.body
        whole = json.loads((await lane.post(chat(model="fake-model", stream=False))).body)
        assert whole["choices"][0]["message"]["content"] == text_of(plain.body)
        assert whole["usage"]["completion_tokens"] == 4 and whole["object"] == "chat.completion"
        told = await lane.post({"model": "fake-model", "prompt": "once", "stream": False}, COMPLETIONS)
        assert json.loads(told.body)["choices"][0]["finish_reason"] == "stop"
        assert [entry.request.path for entry in lane.runtime.journal.calls] == ["/api/chat"] * 3 + ["/api/generate"]


@pytest.mark.parametrize("mode", ["assemble", "pass"])
async def test_passing_answers_on_never_hands_a_client_another_dialect(autojump_clock: Any, mode: str) -> None:
    async with open_ollama(upstream={"non_stream": mode}) as lane:
        whole = json.loads((await lane.post(chat(model="fake-model", stream=False))).body)
        assert whole["choices"][0]["message"]["content"]
        own = json.loads((await lane.post(native("/api/generate", stream=False), "/api/generate")).body)
        assert own["response"] and own["done"] is True


async def test_embeddings_of_both_apis(autojump_clock: Any) -> None:
    async with open_ollama() as lane:
        for path in ("/api/embed", "/v1/embeddings"):
            call = await lane.post({"model": "fake-model", "input": ["one", "two"]}, path)
            answer = json.loads(call.body)
            vectors = answer["embeddings"] if path == "/api/embed" else [row["embedding"] for row in answer["data"]]
            assert call.status == 200 and len(vectors) == 2 and len(vectors[0]) == 3
            assert "x-kvstream-usage" not in call.headers  # Ollama counted it
        old = json.loads((await lane.post({"model": "fake-model", "prompt": "one"}, "/api/embeddings")).body)
        assert len(old["embedding"]) == 3
        assert lane.idle()


async def test_what_ollama_cannot_do_is_refused_before_it_queues(autojump_clock: Any) -> None:
    async with open_ollama() as lane:
        call = await lane.post(chat(model="fake-model", n=2))
        assert call.status == 400 and error_of(call.body)["code"] == "invalid_request"
        assert not lane.runtime.journal.calls


async def test_errors_have_the_form_of_the_path(autojump_clock: Any) -> None:
    async with open_ollama() as lane:
        call = await lane.post(native("/api/chat") | {"model": "nope"}, "/api/chat")
        assert call.status == 404 and "'nope'" in json.loads(call.body)["error"]
        call = await lane.post(chat(model="nope"))
        assert call.status == 404 and error_of(call.body)["code"] == "model_not_found"
        call = await lane.post(b"{", "/api/generate")
        assert call.status == 400 and isinstance(json.loads(call.body)["error"], str)
        assert (await lane.request("GET", "/api/chat")).status == 405


async def test_an_empty_prompt_loads_the_model_and_its_answer_is_passed_on(autojump_clock: Any) -> None:
    async with open_ollama() as lane:
        for stream in (True, False):
            call = await lane.post({"model": "fake-model", "messages": [], "stream": stream}, "/api/chat")
            assert call.status == 200 and lines(call.body)[0]["done_reason"] == "load"
        assert lane.runtime.loads == 1


# --- cases ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, *NATIVE])
async def test_case_22_an_error_in_mid_stream_reaches_the_client(autojump_clock: Any, path: str) -> None:
    async with open_ollama() as lane:
        lane.runtime.script(Script(end="error_event", tokens=3))
        call = await lane.post(asked(path), path)
        assert call.status == 200 and b"[DONE]" not in call.body
        last = lines(call.body)[-1] if path in NATIVE else data_of(call.body)[-1]
        assert "CUDA error" in (last["error"] if path in NATIVE else last["error"]["message"])
        assert metric(lane.metrics, "kvstream_requests_total", route=path, outcome="upstream_error") == 1
        assert lane.idle()


@pytest.mark.parametrize("path", [CHAT, *NATIVE])
async def test_case_22_a_stream_that_just_ends_is_an_error(autojump_clock: Any, path: str) -> None:
    async with open_ollama() as lane:
        lane.runtime.script(Script(end="eof_no_finish", tokens=3))
        call = await lane.post(asked(path), path)
        last = lines(call.body)[-1] if path in NATIVE else data_of(call.body)[-1]
        assert "without its last line" in json.dumps(last["error"]) and b"[DONE]" not in call.body
        lane.runtime.script(Script(end="eof_no_finish", tokens=3))
        whole = await lane.post(asked(path, stream=False), path)
        assert whole.status == 502


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_case_22_on_routes_that_go_to_ollama_as_they_are(autojump_clock: Any, path: str) -> None:
    """There the error itself is lost; that the stream ended too soon is not."""
    said: dict[str, Any] = {"max_tokens": 9, "messages": chat()["messages"]} if path == "/v1/messages" else {
        "input": "hello"}
    async with open_ollama() as lane:
        good = await lane.post({"model": "fake-model", "stream": True, **said}, path)
        assert good.status == 200 and (b"message_stop" in good.body or b"response.completed" in good.body)
        whole = json.loads((await lane.post({"model": "fake-model", **said}, path)).body)
        assert (whole.get("content") or whole["output"][0]["content"])[0]["text"]
        lane.runtime.script(Script(end="error_event", tokens=3), times=2)
        lost = await lane.post({"model": "fake-model", "stream": True, **said}, path)
        assert lost.status == 200 and b"ended before it was finished" in lost.body
        assert (await lane.post({"model": "fake-model", **said}, path)).status == 502
        assert [entry.request.path for entry in lane.runtime.journal.calls] == [path] * 4
        assert lane.idle()


async def test_case_28_ollama_s_busy_is_waited_out_in_both_dialects(autojump_clock: Any) -> None:
    busy = {"error": BUSY}
    wrapped = {"error": {"message": BUSY, "type": "api_error", "param": None, "code": None}}
    async with open_ollama() as lane:
        for path in (CHAT, "/api/chat", "/v1/messages"):
            for body in (busy, wrapped):
                lane.runtime.script(Script(status=503, script=[(0, json.dumps(body).encode())]))
            call = await lane.post(asked(path) | {"max_tokens": 9} if path != "/v1/messages" else {
                "model": "fake-model", "max_tokens": 9, "messages": chat()["messages"]}, path)
            assert call.status == 200 and len(lane.runtime.journal.calls) % 3 == 0
        lane.runtime.script(Script(status=503, script=[(0, json.dumps(busy).encode())]), times=None)
        call = await lane.post(native("/api/chat"), "/api/chat")
        assert call.status == 503 and "retry-after" in call.headers
        assert "maximum pending requests exceeded" in json.loads(call.body)["error"]


async def test_case_29_the_queue_before_ollama_has_bounds(autojump_clock: Any) -> None:
    async with open_ollama(scheduler={"max_queue": 20, "max_wait_s": 5.0}) as lane:
        began = trio.current_time()
        calls = [lane.start(native("/api/chat", f"text {i}"), "/api/chat") for i in range(1000)]
        with trio.fail_after(60):
            for call in calls:
                await call.ended.wait()
        counts = {status: sum(call.status == status for call in calls) for status in (200, 429, 503)}
        assert sum(counts.values()) == 1000 and counts[429] >= 900 and counts[200] >= 20
        assert lane.runtime.in_flight_max == 1  # Ollama's own queue stays empty
        for call in calls:
            if call.status != 200:
                assert "retry-after" in call.headers and isinstance(json.loads(call.body)["error"], str)
        assert all(call.ended_at == began for call in calls if call.status == 429)  # at once, by the virtual clock
        assert lane.idle()


async def test_a_waiting_native_client_is_refused_with_a_status_and_hears_no_ping(autojump_clock: Any) -> None:
    """NDJSON has no comments: nothing is written before Ollama's first line, so the status is still open."""
    async with open_ollama(server={"keepalive_s": 0.5}, scheduler={"max_wait_s": 5.0}) as lane:
        lane.runtime.script(Script(hang_at_token=1))
        first = lane.start(native("/api/chat", "one"), "/api/chat")
        await trio.sleep(0.5)
        second = await lane.post(native("/api/chat", "two"), "/api/chat")
        assert second.status == 503 and len(second.writes) == 1
        first.leave()
        await first.ended.wait()
        assert len(lines(first.body)) == 1


@pytest.mark.parametrize("path", NATIVE)
async def test_who_wants_proof_of_life_gets_lines_that_say_nothing(autojump_clock: Any, path: str) -> None:
    async with open_ollama(server={"keepalive_s": 4.0}, compat={"keepalive_mode": "empty-delta"}) as lane:
        lane.runtime.script(Script(first_byte_after=10, itl=10, tokens=3))
        call = await lane.post(native(path), path)
        said = lines(call.body)
        assert call.writes[0][0] >= 10  # nothing before Ollama's own first line, whose model and time they have
        texts = [line["message"]["content"] if path == "/api/chat" else line["response"] for line in said]
        assert len(said) == 4 + 2 * 2 and texts.count("") == 5 and {line["model"] for line in said} == {"fake-model"}
        assert [line["done"] for line in said] == [False] * 7 + [True]


@pytest.mark.parametrize("path", NATIVE)
async def test_leaving_frees_ollama(autojump_clock: Any, path: str) -> None:
    async with open_ollama(knobs={"answer_tokens": None}) as lane:
        for stream in (True, False):
            call = lane.start(native(path, stream=stream), path)
            await trio.sleep(1)
            call.leave()
            await trio.sleep(0.1)
            assert lane.runtime.ollama.in_flight == 0 and lane.idle()


async def test_the_context_of_a_loaded_model_becomes_known(autojump_clock: Any) -> None:
    async with open_ollama() as lane:
        before = await lane.status()
        assert "no model is loaded" in before["capacity"]["source"]
        await lane.post(native("/api/chat", options={"num_ctx": 2048}), "/api/chat")
        await trio.sleep(3)
        after = (await lane.status())["capacity"]
        assert after["request_tokens_max"] == 2048 and "fake-model:latest with 2048 tokens" in after["source"]
        assert any("23040 bytes of KV per token" in note for note in after["notes"])
        # a request may bring a larger context of its own: a long prompt is no reason to refuse it
        long = native("/api/chat", "word " * 9000, options={"num_ctx": 16384})
        assert (await lane.post(long, "/api/chat")).status == 200
        await trio.sleep(3)  # another load is noticed by what /api/ps tells
        assert (await lane.status())["capacity"]["request_tokens_max"] == 16384


async def test_an_idle_ollama_without_a_model_is_asked_again_without_a_word(autojump_clock: Any, caplog: Any) -> None:
    async with open_ollama() as lane:
        await trio.sleep(100)
        assert len(lane.runtime.journal.paths("/api/ps")) > 50
        assert sum("backend up" in record.getMessage() for record in caplog.records) == 1


async def test_case_33_one_request_loads_the_model_and_the_others_follow(autojump_clock: Any) -> None:
    async with open_ollama(knobs={"slots": 4, "cold_load_s": 3.0}, backend={"seats": 4}) as lane:
        calls = [lane.start(native("/api/chat", f"text {i}"), "/api/chat") for i in range(4)]
        await trio.sleep(2.9)
        assert len(lane.runtime.journal.calls) == 1
        for call in calls:
            await call.ended.wait()
        assert [call.status for call in calls] == [200] * 4 and lane.runtime.loads == 1
        assert lane.runtime.in_flight_max == 4  # once it was loaded they ran side by side


async def test_case_34_a_second_model_costs_one_load_and_no_generation(autojump_clock: Any) -> None:
    knobs = {"models": ("b",), "answer_tokens": 500, "model": "a"}
    async with open_ollama(knobs=knobs, scheduler={"exclusive_models": True}) as lane:
        calls = []
        for model in ("a", "b", "a"):  # the first takes 5 s
            calls.append(lane.start(native("/api/chat", f"for {model}") | {"model": model}, "/api/chat"))
            await trio.sleep(1)
        for call in calls:
            await call.ended.wait()
            assert lines(call.body)[-1]["eval_count"] == 500
        assert [model for model, _ in lane.runtime.ollama.loads] == ["a:latest", "b:latest"]


# --- options that reload (case 35) ------------------------------------------------------------------------------------


async def alternate(lane: Lane) -> list[Any]:
    """Twenty requests whose context sizes take turns, all at once; the bodies that reached Ollama."""
    calls = []
    for i in range(20):
        options = {"num_ctx": 4096 if i % 2 else 8192}
        calls.append(lane.start(native("/api/chat", f"text {i}", options=options), "/api/chat"))
        await trio.sleep(0.001)
    for call in calls:
        await call.ended.wait()
        assert call.status == 200
    return [json.loads(entry.request.body) for entry in lane.runtime.journal.calls]


async def test_case_35_no_option_is_added_or_changed(autojump_clock: Any) -> None:
    async with open_ollama() as lane:
        bodies = await alternate(lane)
        assert all(set(body) == {"model", "messages", "options"} for body in bodies)
        assert sorted(body["options"]["num_ctx"] for body in bodies) == [4096] * 10 + [8192] * 10
        assert all(set(body["options"]) == {"num_ctx"} for body in bodies)
        assert lane.runtime.loads == 20  # that is what it costs


# --- Ollama's small routes --------------------------------------------------------------------------------------------


async def test_ollama_s_small_routes_are_handed_through_without_a_seat(autojump_clock: Any) -> None:
    async with open_ollama(knobs={"models": ("other:7b",)}) as lane:
        lane.runtime.script(Script(hang_at_token=1))
        stuck = lane.start(native("/api/chat"), "/api/chat")
        await trio.sleep(0.5)  # the only seat is taken
        home = await lane.get("/")
        assert home.status == 200 and home.body == b"Ollama is running"
        assert (await lane.request("HEAD", "/")).status == 200
        assert json.loads((await lane.get("/api/version")).body) == {"version": "0.33.0"}
        tags = json.loads((await lane.get("/api/tags")).body)["models"]
        assert [row["name"] for row in tags] == ["fake-model:latest", "other:7b"]
        loaded = json.loads((await lane.get("/api/ps")).body)["models"]
        assert [row["context_length"] for row in loaded] == [4096]
        shown = await lane.post({"model": "other:7b"}, "/api/show")
        assert json.loads(shown.body)["model_info"]["llama.block_count"] == 30
        assert (await lane.post({"model": "nope"}, "/api/show")).status == 404
        assert (await lane.post(b"[]", "/api/show")).status == 400
        listing = json.loads((await lane.get("/v1/models")).body)["data"]
        assert [row["id"] for row in listing] == ["fake-model:latest", "other:7b"]
        assert json.loads((await lane.get("/v1/models/fake-model")).body)["id"] == "fake-model:latest"
        stuck.leave()
        await stuck.ended.wait()


async def test_what_would_change_ollama_s_models_is_refused_in_its_own_words(autojump_clock: Any) -> None:
    async with open_ollama() as lane:
        for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete"), ("POST", "/api/create"),
                             ("POST", "/api/blobs/sha256:00")):
            call = await lane.request(method, path, {"model": "x"})
            assert call.status == 404 and "ask Ollama itself" in json.loads(call.body)["error"]
        assert (await lane.request("POST", "/api/tags", {})).status == 405
        assert isinstance(json.loads((await lane.get("/api/nothing")).body)["error"], str)
        assert not [entry for entry in lane.runtime.journal.entries if entry.request.method != "GET"]


async def test_without_an_ollama_its_routes_are_not_there(autojump_clock: Any) -> None:
    async with open_lane() as lane:
        for path in ("/", "/api/tags", "/api/version", "/api/pull"):
            assert (await lane.get(path)).status == 404
        assert (await lane.post({"model": "m"}, "/api/chat")).status == 404


async def test_case_35_grouped_by_load_key_twenty_requests_cost_two_loads(autojump_clock: Any) -> None:
    async with open_ollama(backend={"group_by_load_key": True}) as lane:
        bodies = await alternate(lane)
        assert lane.runtime.loads == 2
        assert len(bodies) == 20 and all(set(body) == {"model", "messages", "options"} for body in bodies)
        assert lane.idle()


@pytest.mark.parametrize("grouped", [False, True])
async def test_case_35_status_warns_that_options_alternate(autojump_clock: Any, grouped: bool) -> None:
    async with open_ollama(backend={"group_by_load_key": grouped}) as lane:
        await lane.post(native("/api/chat", options={"num_ctx": 4096}), "/api/chat")
        await lane.post(native("/api/chat", options={"num_ctx": 8192}), "/api/chat")
        assert (await lane.status())["options_alternate"] == []  # one change is somebody's new setting
        await lane.post(native("/api/chat", options={"num_ctx": 4096}), "/api/chat")
        await lane.post(chat(model="fake-model"))  # a client of /v1 cannot name a context: another load again
        told, = (await lane.status())["options_alternate"]
        assert told["model"] == "fake-model:latest" and told["changes"] == 3 and told["requests"] == 4
        assert told["options"] == ["none", "num_ctx=4096"] and "options alternate" in told["warning"]
        assert ("group_by_load_key" in told["warning"]) is not grouped
        assert lane.runtime.loads == 4


def test_a_request_that_loads_or_unloads_is_never_answered_from_memory() -> None:
    def key(path: str, **view: Any) -> bytes | None:
        return answer_key(parse_request(path, (), json.dumps({"model": "m", **view}).encode()), twins=True)

    cold = {"options": {"temperature": 0}}
    assert key("/api/generate", prompt="x", **cold) and key("/api/embed", input="x")
    assert key("/api/generate", **cold) is None and key("/api/chat", messages=[], **cold) is None
    assert key("/api/generate", prompt="x", keep_alive=0, **cold) is None
    assert key("/api/embed", input="x", keep_alive="5m") is None


@pytest.mark.parametrize("again", [{}, {"options": {"num_ctx": 2048}}])
async def test_a_load_that_takes_minutes_is_no_hang(autojump_clock: Any, again: dict[str, Any]) -> None:
    """A model is loaded anew when it was not used for long, and when its options change: neither is a sign of death."""
    async with open_ollama(knobs={"cold_load_s": 250.0}, upstream={"health_interval_s": 10.0}) as lane:
        for more in ({}, again):
            assert (await lane.post(native("/api/chat", **more), "/api/chat")).status == 200
            await trio.sleep(10 if again else 400)
        assert lane.runtime.loads == 2


async def test_speech_goes_to_ollama_s_own_route(autojump_clock: Any) -> None:
    path = "/v1/audio/transcriptions"
    async with open_ollama() as lane:
        lane.runtime.script(Script(script=[(0, b'{"text":"hello"}')], headers=(("Content-Type", "application/json"),)),
                            path=path)
        call = await lane.request("POST", path, b"--b--", [("content-type", "multipart/form-data; boundary=b")])
        assert (call.status, call.body) == (200, b'{"text":"hello"}')


# --- several backends -------------------------------------------------------------------------------------------------


async def test_two_ollamas_are_one_to_their_clients(autojump_clock: Any) -> None:
    rows = [{"name": name, "type": "ollama", "aliases": (f"mine={model}",) if name == "b" else (),
             "knobs": KNOBS | {"model": model}} for name, model in (("a", "one"), ("b", "two:7b"))]
    async with open_several(*rows, {"name": "c", "type": "llamacpp"}) as lanes:
        tags = json.loads((await lanes.get("/api/tags")).body)["models"]
        assert [row["name"] for row in tags] == ["one:latest", "two:7b"]
        for model, index in (("one", 0), ("one:latest", 0), ("two:7b", 1), ("mine", 1)):
            before = [len(runtime.journal.calls) for runtime in lanes.runtimes]
            call = await lanes.post(native("/api/chat") | {"model": model}, "/api/chat")
            assert call.status == 200
            after = [len(runtime.journal.calls) for runtime in lanes.runtimes]
            assert [b - a for a, b in zip(before, after, strict=True)] == [int(i == index) for i in range(3)]
            assert {line["model"] for line in lines(call.body)} == {model}  # as the client called it
        loaded = json.loads((await lanes.get("/api/ps")).body)["models"]
        assert [row["name"] for row in loaded] == ["one:latest", "two:7b"]
        assert (await lanes.post({"model": "two:7b"}, "/api/show")).status == 200
        assert (await lanes.post({"model": "nope"}, "/api/show")).status == 404
        lanes.runtimes[0].config.refuse = True  # one of them goes away
        assert [row["name"] for row in json.loads((await lanes.get("/api/tags")).body)["models"]] == ["two:7b"]
        assert (await lanes.get("/")).body == b"Ollama is running"
