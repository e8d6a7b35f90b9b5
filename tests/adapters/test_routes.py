"""The routes beside chat: the table, streams in any state of repair, and the answer in one piece."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstream.adapters import ADAPTERS, LlamaCppBackend, OpenAIBackend
from kvstream.adapters.base import Delta, Done, Failed, Finished, HttpReply, Ping, UpstreamEvent, Usage, UsageNumbers
from kvstream.adapters.decode import READINGS, usage_of_whole
from kvstream.adapters.routes import LIGHT, MEDIA, ROUTES, SEAT, route_of
from tests.adapters.transcripts import load, load_all, request_of, streams, texts

MESSAGES, RESPONSES, NATIVE = "/v1/messages", "/v1/responses", "/completion"
CASES = {case.case: case for case in load_all() if case.backend == "llamacpp"}


def decode(route: str, body: bytes, *, content_type: str = "text/event-stream", **view: Any) -> list[UpstreamEvent]:
    decoder = LlamaCppBackend("http://h").decoder(request_of({"route": route, "body": view}), content_type=content_type)
    return decoder.feed(body) + decoder.finish()


def sse(*events: dict[str, Any]) -> bytes:
    return b"".join(
        b"event: " + str(event["type"]).encode() + b"\ndata: " + json.dumps(event).encode() + b"\n\n"
        for event in events)


def without_ids(value: Any) -> Any:
    """An answer without what differs from run to run."""
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if not isinstance(value, dict):
        return value
    dropped = {"id", "call_id", "created_at", "completed_at", "id_slot"}
    return {
        key: {k: v for k, v in item.items() if k.endswith("_n")} if key == "timings" else without_ids(item)
        for key, item in steady(value).items() if key not in dropped}


def steady(value: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp reads no ``cache_prompt`` on ``/v1/messages``: what was cached the second time differs, the sum not."""
    if "cache_read_input_tokens" not in value:
        return value
    return value | {"input_tokens": value["input_tokens"] + value["cache_read_input_tokens"],
                    "cache_read_input_tokens": 0}


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROUTES.values(), ids=ROUTES)
def test_a_row_says_all_that_is_asked_of_it(row: Any) -> None:
    assert row.access in (SEAT, LIGHT, MEDIA)
    if row.streams:
        assert row.end and row.usage and row.limits and row.access == SEAT
        assert row.form.startswith("ollama") or row.form in READINGS
    else:
        assert not row.generates and not row.end


@pytest.mark.parametrize("kind", ADAPTERS.values(), ids=ADAPTERS)
def test_every_route_of_every_adapter_can_be_encoded_and_goes_to_its_own_path(kind: Any) -> None:
    backend = kind("http://h", model="m")
    for path in backend.capabilities.routes:
        row = route_of(path)
        if row.access == MEDIA or row.form.startswith("ollama") or backend.kind == "ollama":
            continue
        call = backend.encode(request_of({"route": path, "body": {"x": 1}}), stream=True)
        body = json.loads(call.body)
        assert call.path == path and call.method == "POST" and body["model"] == "m" and body["x"] == 1
        assert body.get("stream", False) is row.streams
        assert ("stream_options" in body) is row.usage_on_request, path
        assert dict(call.headers)["accept"] == ("text/event-stream" if row.streams else "application/json")


def test_a_slot_is_named_only_where_something_is_generated() -> None:
    backend = LlamaCppBackend("http://h")
    for path, named in (("/v1/embeddings", False), ("/tokenize", False), (MESSAGES, True), (NATIVE, True)):
        call = backend.encode(request_of({"route": path, "body": {"x": 1}}), slot=2)
        assert ("id_slot" in json.loads(call.body)) is named


# --- against the real server ------------------------------------------------------------------------------------------


def test_the_assembled_answer_of_the_real_server_is_the_one_it_gives_in_one_piece() -> None:
    compared = set()
    for case in streams("llamacpp"):
        direct = case.folder / "direct.json"
        assert case.request is not None
        form = route_of(case.request.route).form
        if not direct.exists() or form in ("chat", "completions"):
            continue
        assembler = LlamaCppBackend("http://h").assembler(case.request)
        for event in load(case.folder).decode([case.response]):
            assembler.feed(event)
        real = json.loads(direct.read_text(encoding="utf-8"))
        assert without_ids(assembler.result()) == without_ids(real), case.case
        ours = [event for event in case.decode([case.response]) if isinstance(event, Usage)][-1].numbers
        theirs = usage_of_whole(real)
        assert theirs is not None and (ours.prompt, ours.completion) == (theirs.prompt, theirs.completion), case.case
        compared.add(case.case)
    assert len(compared) >= 15
    assert {form.partition("_")[0] for form in compared} == {"messages", "responses", "native", "infill"}


@pytest.mark.parametrize("name", [c.case for c in streams("llamacpp") if c.request is not None
                                  and route_of(c.request.route).form not in ("chat", "completions")])
def test_a_stream_that_is_cut_anywhere_before_its_end_is_called_truncated(name: str) -> None:
    case = CASES[name]
    last = case.response.rstrip(b"\n").rfind(b"\n\n")
    finish = case.response.rfind(b'"stop_reason":"')  # from there on only the end marker is missing
    for cut in {last // 3, last // 2, last, finish - 40 if finish > 0 else last}:
        events = case.decode([case.response[:cut]])
        if isinstance(events[-1], Done):
            assert finish > 0 and cut > finish and events[-1].synthesised
        else:
            assert isinstance(events[-1], Failed) and events[-1].kind == "upstream_stream_truncated", cut


# --- messages ---------------------------------------------------------------------------------------------------------

START = {"type": "message_start", "message": {"id": "m", "type": "message", "role": "assistant", "content": [],
         "usage": {"input_tokens": 5, "cache_read_input_tokens": 20, "cache_creation_input_tokens": 3}}}
STOP = ({"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None},
         "usage": {"output_tokens": 7}}, {"type": "message_stop"})


def block(kind: dict[str, Any], *deltas: dict[str, Any], index: int = 0) -> list[dict[str, Any]]:
    return [{"type": "content_block_start", "index": index, "content_block": kind},
            *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
            {"type": "content_block_stop", "index": index}]


def test_case_90_a_ping_is_forwarded_and_is_no_token() -> None:
    ping = {"type": "ping"}
    events = decode(MESSAGES, sse(START, ping, *block({"type": "text", "text": ""},
                                                      {"type": "text_delta", "text": "a"}), *STOP))
    pings = [event for event in events if isinstance(event, Ping)]
    assert [event.raw for event in pings] == [sse(ping)]
    assert sum(event.tokens for event in events if isinstance(event, Delta)) == 1


def test_reasoning_and_tools_are_output_and_signatures_are_none() -> None:
    body = sse(START, *block({"type": "thinking", "thinking": ""}, {"type": "thinking_delta", "thinking": "hm"},
                             {"type": "signature_delta", "signature": "s1"}),
               *block({"type": "tool_use", "id": "t", "name": "f", "input": {}},
                      {"type": "input_json_delta", "partial_json": ""},
                      {"type": "input_json_delta", "partial_json": '{"a":'},
                      {"type": "input_json_delta", "partial_json": " 1}"}, index=1), *STOP)
    events = decode(MESSAGES, body)
    assert [event.tokens for event in events if isinstance(event, Delta)] == [0, 0, 1, 0, 0, 1, 0, 1, 1, 0, 0]
    assert [event.numbers for event in events if isinstance(event, Usage)] == [UsageNumbers(28, 7, 20)]
    assembler = OpenAIBackend("http://h").assembler(request_of({"route": MESSAGES, "body": {}}))
    for event in events:
        assembler.feed(event)
    assert assembler.result()["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": "s1"},
        {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]
    assert assembler.result()["stop_reason"] == "end_turn" and assembler.result()["usage"]["output_tokens"] == 7


def test_an_error_without_its_name_is_not_forwarded_since_no_client_would_see_it() -> None:
    named = b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"busy"}}\n\n'
    assert decode(MESSAGES, sse(START) + named)[-1] == Failed("overloaded", "busy", 503, named)
    bare = b'data: {"error":{"code":500,"message":"Context size has been exceeded.","type":"server_error"}}\n\n'
    for route in (MESSAGES, RESPONSES):
        last = decode(route, bare)[-1]
        assert isinstance(last, Failed) and last.kind == "upstream_error" and last.raw == b""
    assert decode(NATIVE, bare)[-1] == Failed("upstream_error", "Context size has been exceeded.", 500, bare)


def test_a_message_whose_end_marker_is_missing_gets_one() -> None:
    events = decode(MESSAGES, sse(START, STOP[0]))
    assert events[-1] == Done(b'event: message_stop\ndata: {"type":"message_stop"}\n\n', synthesised=True)
    assert decode(MESSAGES, sse(START))[-1] == Failed(
        "upstream_stream_truncated", "the backend's stream ended before it was finished", 502)


# --- responses --------------------------------------------------------------------------------------------------------


def test_case_21_a_completed_response_needs_no_done_and_without_its_end_it_is_truncated() -> None:
    body = CASES["responses_stream"].response
    assert b"[DONE]" not in body
    assert isinstance(decode(RESPONSES, body)[-1], Done)
    cut = body[: body.rindex(b"event: response.completed")]
    assert isinstance(decode(RESPONSES, cut)[-1], Failed)
    assert decode(RESPONSES, cut + b"data: [DONE]\n\n")[-1] == Done(b"data: [DONE]\n\n", unfinished=True)


def test_incomplete_is_an_end_and_failed_is_a_failure() -> None:
    usage = {"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}}
    over = {"id": "r", "object": "response", "status": "incomplete", "usage": usage,
            "incomplete_details": {"reason": "max_output_tokens"}, "output": []}
    events = decode(RESPONSES, sse({"type": "response.incomplete", "response": over}))
    assert Finished("max_output_tokens") in events and isinstance(events[-1], Done)
    assert [event.numbers for event in events if isinstance(event, Usage)] == [UsageNumbers(9, 2, 4)]
    failed = {"type": "response.failed", "response": {"error": {"code": "server_error", "message": "it broke"}}}
    assert decode(RESPONSES, sse(failed)) == [Failed("upstream_error", "it broke", 502, sse(failed))]


def test_what_came_of_a_response_that_was_cut() -> None:
    body = CASES["responses_stream"].response
    assembler = LlamaCppBackend("http://h").assembler(request_of({"route": RESPONSES, "body": {}}))
    for event in decode(RESPONSES, body[: body.index(b"event: response.output_text.done")]):
        assembler.feed(event)
    [item] = assembler.result()["output"]
    assert item["status"] == "incomplete" and item["content"][0]["text"] == "I'm glad you're enjoying the service"


# --- a runtime that does not stream -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["messages_whole", "messages_tool_use", "responses_whole", "native_whole"])
def test_a_whole_answer_is_told_as_a_stream_to_a_client_that_asked_for_one(name: str) -> None:
    case = CASES[name]
    assert case.request is not None
    route, whole = case.request.route, (case.folder / "direct.json").read_bytes()
    events = decode(route, whole, content_type="application/json", stream=True)
    told = b"".join(getattr(event, "raw", b"") for event in events)
    again = decode(route, told, stream=True)
    assert isinstance(again[-1], Done) and texts(again) == texts(events)
    assembler = OpenAIBackend("http://h").assembler(case.request)
    for event in again:
        assembler.feed(event)
    assert assembler.result() == json.loads(whole) | (
        {"generation_settings": assembler.result()["generation_settings"]} if route == NATIVE else {})
    quiet = decode(route, whole, content_type="application/json")
    assert all(not getattr(event, "raw", b"") for event in quiet)


@pytest.mark.parametrize("route", [MESSAGES, RESPONSES, NATIVE])
def test_a_body_that_is_no_answer_is_a_fault_of_the_backend(route: str) -> None:
    for body in (b"", b"[]", b"{}", b"3", b"nonsense"):
        [event] = decode(route, body, content_type="application/json")
        assert isinstance(event, Failed) and event.kind == "backend_protocol"


def test_the_counts_of_answers_in_one_piece() -> None:
    embeddings = {"object": "list", "data": [], "usage": {"prompt_tokens": 4, "total_tokens": 4}}
    assert usage_of_whole(embeddings) == UsageNumbers(4, 0, None)
    assert usage_of_whole([{"index": 0, "embedding": [[0.1]]}]) is None
    assert usage_of_whole([{"timings": {"cache_n": 1, "prompt_n": 2, "predicted_n": 3}}] * 2) == UsageNumbers(6, 6, 2)


def test_the_flag_that_is_missing_is_named() -> None:
    for name, words in (("reply_embeddings_off", "--embeddings"), ("reply_rerank_off", "--reranking"),
                        ("reply_audio_off", "audio"), ("error_infill_unknown", "prefix token")):
        case = CASES[name]
        failed = LlamaCppBackend("http://h").error(HttpReply(case.meta["status"], {}, case.response))
        assert failed.kind == "route_not_supported" and failed.status == 404 and words in failed.message
