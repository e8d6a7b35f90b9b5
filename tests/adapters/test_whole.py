"""A runtime that ignored ``stream: true`` and answered with one JSON object."""

from __future__ import annotations

import json
from typing import Any

from kvstream.adapters import LlamaCppBackend, OpenAIBackend
from kvstream.adapters.base import Delta, Done, Failed, Finished, Usage
from kvstream.adapters.routes import route_of
from tests.adapters.transcripts import load, request_of, streams

CHAT = "/v1/chat/completions"
ANSWER = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "logprobs": None, "finish_reason": "stop"},
        {
            "index": 1,
            "message": {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            "finish_reason": "tool_calls",
        },
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}


def decode(body: bytes, route: str = CHAT, **view: Any) -> list[Any]:
    request = request_of({"route": route, "body": view})
    decoder = OpenAIBackend("http://h").decoder(request, content_type="application/json; charset=utf-8")
    events = [event for at in range(0, len(body), 7) for event in decoder.feed(body[at : at + 7])]
    assert events == []
    return decoder.finish()


def test_for_a_client_that_does_not_stream_the_object_is_the_answer() -> None:
    events = decode(json.dumps(ANSWER).encode())
    assert [type(event) for event in events] == [Delta, Finished, Finished, Usage, Done]
    assert events[0].data == ANSWER and events[0].raw == b"" and events[0].tokens == 2
    assembler = OpenAIBackend("http://h").assembler(request_of({"route": CHAT, "body": {}}))
    for event in events:
        assembler.feed(event)
    assert assembler.result() == ANSWER


def test_for_a_client_that_streams_it_is_re_emitted_as_chunks_that_mean_the_same() -> None:
    asked = {"stream": True, "stream_options": {"include_usage": True}}
    events = decode(json.dumps(ANSWER).encode(), **asked)
    assert events[-1] == Done(b"data: [DONE]\n\n", synthesised=True)
    body = b"".join(getattr(event, "raw", b"") for event in events)
    request = request_of({"route": CHAT, "body": asked})
    decoder, assembler = OpenAIBackend("http://h").decoder(request), OpenAIBackend("http://h").assembler(request)
    again = decoder.feed(body) + decoder.finish()
    for event in again:
        assembler.feed(event)
    assert assembler.result() == ANSWER
    assert [event.index for event in again if isinstance(event, Finished)] == [0, 1]
    assert again[-1] == Done(b"data: [DONE]\n\n") and sum(isinstance(e, Usage) and e.standalone for e in again) == 1
    assert b'"tool_calls":[{"index":0,"id":"t"' in body  # chunks number their calls, whole answers do not
    assert b"chat.completion.chunk" in body and b'"object":"chat.completion"' not in body


def test_usage_is_not_re_emitted_to_a_client_that_did_not_ask() -> None:
    events = decode(json.dumps(ANSWER).encode(), stream=True)
    assert b"usage" not in b"".join(getattr(event, "raw", b"") for event in events)
    assert [event.numbers.completion for event in events if isinstance(event, Usage)] == [2]


def test_legacy_completions() -> None:
    answer = {"object": "text_completion", "choices": [{"index": 0, "text": "Hi", "finish_reason": "length"}]}
    events = decode(json.dumps(answer).encode(), route="/v1/completions", stream=True)
    frames = [json.loads(line[6:]) for line in events[0].raw.decode().split("\n\n") if line]
    assert [frame["choices"][0]["text"] for frame in frames] == ["Hi", ""]
    assert [frame["choices"][0]["finish_reason"] for frame in frames] == [None, "length"]


def test_an_error_an_empty_body_and_nonsense() -> None:
    assert decode(b'{"error":{"message":"Model not loaded: x","code":null}}')[0].kind == "model_not_found"
    assert decode(b'{"error":"Unexpected endpoint or method. (POST /x)"}')[0] == Failed(
        "route_not_supported", "Unexpected endpoint or method. (POST /x)", 404
    )
    for body in (b"", b"[]", b"nonsense", b"{}", b'{"choices":3}'):
        assert [event.kind for event in decode(body)] == ["backend_protocol"]


def test_the_assembled_answer_of_the_real_server_is_the_one_it_gives_in_one_piece() -> None:
    """Field by field, for every recorded case; ids and times differ, and usage is there only when it was asked for."""
    compared = 0
    for case in streams("llamacpp"):
        direct = case.folder / "direct.json"
        assert case.request is not None
        if not direct.exists() or route_of(case.request.route).form not in ("chat", "completions"):
            continue  # the other routes: test_routes.py
        assembler = LlamaCppBackend("http://h").assembler(case.request)
        for event in load(case.folder).decode([case.response]):
            assembler.feed(event)
        ours, real = steady(assembler.result()), steady(json.loads(direct.read_text(encoding="utf-8")))
        if "usage" not in ours:
            assert case.request.stream and not case.request.include_usage
            real.pop("usage")
        assert ours == real, case.case
        compared += 1
    assert compared >= 13


def steady(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs from run to run."""
    answer = {key: value for key, value in answer.items() if key not in ("id", "created")}
    answer["timings"] = {key: value for key, value in answer["timings"].items() if key.endswith("_n")}
    for choice in answer["choices"]:
        calls = choice.get("message", {}).get("tool_calls")
        for call in calls or ():
            assert call.pop("id")
        # The API's rule is null when there are only tool calls; llama.cpp says "" in one piece and null in its stream.
        if calls and choice["message"]["content"] == "":
            choice["message"]["content"] = None
    return answer
