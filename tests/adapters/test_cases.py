"""The adapter side of the numbered cases: what hurt people, as bytes in and events out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstream.adapters import LlamaCppBackend, OpenAIBackend
from kvstream.adapters.base import Delta, Done, Failed, Finished, Ping, Progress, ProxyRequest, Usage, UsageNumbers
from tests.adapters.transcripts import load_all, request_of, texts

CASES = {f"{case.backend}/{case.case}": case for case in load_all()}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def chunk(text: str | None = None, finish: str | None = None, **more: Any) -> bytes:
    delta = {} if text is None else {"content": text}
    return frame({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more})


def frame(data: Any) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


def decode(*pieces: bytes, backend: Any = OpenAIBackend, content_type: str = "", **view: Any) -> list[Any]:
    request = request_of({"route": view.pop("route", CHAT), "body": {"messages": [], "stream": True, **view}})
    decoder = backend("http://h").decoder(request, content_type=content_type)
    return [event for piece in pieces for event in decoder.feed(piece)] + decoder.finish()


def test_case_13_pings_leave_the_answer_as_it_is() -> None:
    clean = [chunk("a"), chunk("b"), chunk(None, "stop"), DONE]
    pings = [
        b":\n\n",
        b": ping\n\n",
        b"data:\n\n",
        b"event: ping\ndata: {}\n\n",
        b"data: \r\n\r\n",
        b"\n",
        b"id: 4\n\n",
    ]
    mixed = decode(*(part for at, piece in enumerate(clean) for part in (*pings[at:], piece)), *pings)
    assert [event for event in mixed if not isinstance(event, Ping)] == decode(*clean)
    assert texts(mixed) == "ab"
    assert not any(getattr(event, "raw", b"") in pings for event in mixed)


def encoded(backend: Any, view: dict[str, Any], **options: Any) -> dict[str, Any]:
    request = request_of({"route": options.pop("route", CHAT), "body": view})
    return dict(json.loads(backend("http://h").encode(request, **options).body))


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("client", [None, False, True])
def test_case_14_what_is_asked_of_the_runtime(route: str, client: bool | None) -> None:
    view: dict[str, Any] = {"stream": True}
    if client is not None:
        view["stream_options"] = {"include_usage": client, "x": 1}
    asked = encoded(OpenAIBackend, view, route=route)
    assert asked["stream_options"]["include_usage"] is True
    assert client is None or asked["stream_options"]["x"] == 1
    # llama.cpp tells the numbers anyway: the stream of a client that did not ask stays what it is without us.
    assert encoded(LlamaCppBackend, view, route=route) == view
    for backend in (OpenAIBackend, LlamaCppBackend):
        assert encoded(backend, view, route=route, include_usage=False) == {"stream": True}
        whole = encoded(backend, {"messages": []}, route=route)
        assert whole == {"messages": [], "stream": True, "stream_options": {"include_usage": True}}
        assert encoded(backend, view, route=route, stream=False) == {"stream": False}


@pytest.mark.parametrize("asked", [False, True])
def test_case_14_what_comes_back(asked: bool) -> None:
    view = {"stream_options": {"include_usage": asked}}
    numbers = UsageNumbers(5, 2)
    only = frame({"choices": [], "usage": USAGE})
    events = decode(chunk("a"), chunk(None, "stop"), only, DONE, **view)
    assert events[3:] == [Usage(only, numbers, json.loads(only[6:]), standalone=True), Done(DONE)]
    events = decode(chunk("a", usage=None), chunk(None, "stop", usage=USAGE), DONE, **view)
    assert [event for event in events if isinstance(event, Usage)] == [Usage(b"", numbers)]
    assert not any(isinstance(event, Usage) for event in decode(chunk("a"), chunk(None, "stop"), DONE, **view))


def test_case_14_a_refusal_of_stream_options_names_them() -> None:
    from kvstream.adapters.base import HttpReply

    reply = HttpReply(400, {}, b'{"error":{"message":"Unknown parameter: stream_options","code":null}}')
    failed = OpenAIBackend("http://h").error(reply)
    assert failed.status == 400 and "stream_options" in failed.message


def test_case_14_two_choices_of_llama_cpp_give_one_usage_frame_with_the_sum() -> None:
    case = CASES["llamacpp/chat_n2"]
    usages = [event for event in case.decode([case.response]) if isinstance(event, Usage)]
    assert [bool(usage.raw) for usage in usages] == [False, True]
    assert [usage.numbers.completion for usage in usages] == [4, 8]
    assert {usage.numbers.prompt for usage in usages} == {36}


def test_case_14_two_choices_with_timings_only_are_summed_too() -> None:
    def end(index: int) -> bytes:
        timings = {"cache_n": 2, "prompt_n": 3, "predicted_n": 4}
        return frame({"choices": [{"index": index, "delta": {}, "finish_reason": "stop"}], "timings": timings})

    events = decode(end(1), end(0), DONE, backend=LlamaCppBackend)
    assert [e.numbers for e in events if isinstance(e, Usage)] == [UsageNumbers(5, 4, 2), UsageNumbers(5, 8, 2)]


def test_case_14_llama_cpp_reports_usage_without_being_asked() -> None:
    case = CASES["llamacpp/chat_stream"]
    events = case.decode([case.response])
    assert [event for event in events if isinstance(event, Usage)] == [Usage(b"", UsageNumbers(36, 8, 0))]
    assert b"".join(getattr(event, "raw", b"") for event in events) == case.response


def test_case_16_fields_we_do_not_know_travel_byte_for_byte_and_count_as_output() -> None:
    case = CASES["openai/reasoning_fields"]
    events = case.decode([case.response])
    assert b"".join(getattr(event, "raw", b"") for event in events) == case.response
    assert sum(event.tokens for event in events if isinstance(event, Delta)) == 5
    odd = b'data:  {"choices" : [ {"delta":{"content":"\\u00e9"},"index":0, "x":1e2}]}\n\n'
    assert decode(odd)[0].raw == odd and decode(odd)[0].text == "é"


@pytest.mark.parametrize("name", ["llamacpp/chat_unicode", "openai/mixed_framing"])
def test_case_17_characters_cut_at_every_byte(name: str) -> None:
    case = CASES[name]
    whole = case.decode([case.response])
    assert any(ord(char) > 0xFFFF or "\u4e00" <= char <= "\u9fff" for char in texts(whole))
    for cut in range(len(case.response) + 1):
        assert case.decode([case.response[:cut], case.response[cut:]]) == whole
    assert "\ufffd" not in texts(whole)


def test_case_17_every_cut_of_cjk_and_emoji() -> None:
    body = chunk("日本語🎉🚀") + chunk("é", "stop") + DONE
    whole = decode(body)
    for cut in range(len(body)):
        for later in range(cut, min(cut + 6, len(body))):
            assert decode(body[:cut], body[cut:later], body[later:]) == whole
    assert b"".join(getattr(event, "raw", b"") for event in whole) == body and texts(whole) == "日本語🎉🚀é"


def test_case_18_multi_line_data_and_a_two_megabyte_event() -> None:
    lines = b'data: {"choices":\ndata: [{"index":0,\ndata:"delta":{"content":"x"}}]}\n\n'
    assert decode(lines)[0] == Delta(lines, {"choices": [{"index": 0, "delta": {"content": "x"}}]}, 1, "x")
    big = chunk("z" * 2_000_000)
    events = decode(*(big[at : at + 65536] for at in range(0, len(big), 65536)), chunk(None, "stop"), DONE)
    assert events[0].raw == big and len(events[0].text) == 2_000_000 and isinstance(events[-1], Done)


def test_case_18_an_event_above_the_cap_ends_the_stream_with_a_clear_error() -> None:
    request = ProxyRequest(CHAT, b"{}", {}, stream=True)
    for content_type in ("text/event-stream", "application/json"):
        decoder = OpenAIBackend("http://h", event_bytes_max=1000).decoder(request, content_type=content_type)
        events = decoder.feed(b'data: {"' + b"x" * 2000)
        assert [event.kind for event in events if isinstance(event, Failed)] == ["backend_protocol"]
        assert "1000 bytes" in events[0].message  # type: ignore[union-attr]
        assert decoder.feed(DONE) == [] and decoder.finish() == []


ERRORS = {
    "object": (frame({"error": {"message": "boom", "type": "server_error", "code": 500}}), "boom", 500),
    "text": (frame({"error": "boom"}), "boom", 502),
    "event": (b'event: error\ndata: {"message":"boom"}\n\n', "boom", 502),
    "event with text": (b"event: error\ndata: boom\n\n", "boom", 502),
    "nested": (b'event: error\ndata: {"error":{"message":"boom"}}\n\n', "boom", 502),
    "with choices": (frame({"choices": [], "error": {"message": "boom", "code": 500}}), "boom", 500),
    "with a choice": (
        frame(
            {
                "choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "error"}],
                "error": {"message": "boom"},
            }
        ),
        "boom",
        502,
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_case_20_an_error_inside_a_200_stream(name: str) -> None:
    error, message, status = ERRORS[name]
    before = [chunk("a"), chunk("b"), chunk("c")]
    events = decode(*before, error, DONE)
    assert events[3:] == [Failed("upstream_error", message, status, error)]
    assert decode(error) == [Failed("upstream_error", message, status, error)]  # nothing before it: no 200 needed


@pytest.mark.parametrize("harmless", [None, False, {}, "", []])
def test_case_20_an_empty_error_field_is_none(harmless: Any) -> None:
    events = decode(chunk("a", error=harmless), chunk(None, "stop"), DONE)
    assert isinstance(events[-1], Done)


END = {
    (True, True): [Done(DONE)],
    (True, False): [Done(DONE, synthesised=True)],
    (False, True): [Done(DONE, unfinished=True)],
}


@pytest.mark.parametrize("finish", [True, False])
@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("backend", [OpenAIBackend, LlamaCppBackend])
def test_case_21_how_a_stream_ended(finish: bool, done: bool, backend: Any) -> None:
    body = chunk("a") + (chunk(None, "stop") if finish else b"") + (DONE if done else b"")
    events = decode(body, backend=backend)
    if (finish, done) in END:
        assert events[-1:] == END[finish, done]
    else:
        assert isinstance(events[-1], Failed) and events[-1].kind == "upstream_stream_truncated"
        assert events[-1].status == 502 and events[-1].raw == b""
    assert [event.reason for event in events if isinstance(event, Finished)] == (["stop"] if finish else [])


def test_case_21_one_finished_choice_of_two_is_not_the_end() -> None:
    other = frame({"choices": [{"index": 1, "delta": {"content": "x"}}]})
    assert isinstance(decode(chunk("a"), other, chunk(None, "stop"))[-1], Failed)


def test_case_21_the_last_frame_without_its_blank_line_counts_but_half_a_frame_does_not() -> None:
    ending = chunk(None, "stop")
    for cut in (1, 2):
        events = decode(chunk("a"), ending[:-cut])
        assert [type(event) for event in events[1:]] == [Delta, Finished, Done]
        assert events[1].raw == ending  # completed, or a client would not see it
    for cut in range(3, len(ending)):
        assert decode(chunk("a"), ending[:-cut]) == decode(chunk("a"))
    for cut in (1, 2):
        assert decode(chunk("a"), ending, DONE[:-cut])[-1] == Done(DONE)
    assert decode(chunk("a"), ending, DONE[:-3])[-1] == Done(DONE, synthesised=True)


def test_case_22_ollama_hides_an_error_behind_an_empty_delta() -> None:
    case = CASES["openai/ollama_hidden_error"]
    last = case.decode([case.response])[-1]
    assert isinstance(last, Failed) and last.kind == "upstream_stream_truncated"


def test_progress_is_forwarded_only_to_a_client_that_asked() -> None:
    body = frame({"choices": [], "prompt_progress": {"total": 9, "cache": 2, "processed": 5, "time_ms": 1}})
    assert decode(body, backend=LlamaCppBackend)[0] == Progress(b"", 9, 2, 5)
    assert decode(body, backend=LlamaCppBackend, return_progress=True)[0] == Progress(body, 9, 2, 5)


def test_what_is_not_json_or_no_object_travels_on() -> None:
    for body in (b"data: hello\n\n", b"data: {broken\n\n", b"data: [1]\n\n", b"data: 7\n\n"):
        assert decode(body)[0].raw == body and decode(body)[0].tokens == 0
