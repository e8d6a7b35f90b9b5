"""Usage of an answer whose prompt was read in a pass before it: truthful, and every other byte as it came."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstream.adapters import LlamaCppBackend
from kvstream.adapters.amend import AmendedDecoder, Amendment
from kvstream.adapters.base import Delta, Progress, ProxyRequest, UpstreamEvent, Usage, UsageNumbers
from kvstream.adapters.framing import SseSplitter
from kvstream.adapters.slot_calls import PromptWork
from tests.adapters.test_contract import JSON, name_of
from tests.adapters.transcripts import Transcript, forwarded, streams

FIRST = PromptWork(cached=8, computed=92, seconds=2.0)
CHAT, COMPLETION, MESSAGES, RESPONSES = "/v1/chat/completions", "/completion", "/v1/messages", "/v1/responses"
HEAD = {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "é\u2028"}}]}
TIMINGS = {"cache_n": 99, "prompt_n": 1, "prompt_ms": 20.5, "prompt_per_token_ms": 20.5, "prompt_per_second": 48.7,
           "predicted_n": 2, "predicted_ms": 9.25}
TOLD = {"cache_n": 8, "prompt_n": 92, "prompt_ms": 2020.5, "prompt_per_token_ms": 2020.5 / 92,
        "prompt_per_second": 92 / 2020.5 * 1000, "predicted_n": 2, "predicted_ms": 9.25}


def frame(data: Any, name: bytes = b"", end: bytes = b"\n") -> bytes:
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode()
    return (b"event: " + name + end if name else b"") + b"data: " + text + end + end


def decoded(body: bytes, route: str, *, stream: bool = True, content_type: str = "",
            first: PromptWork = FIRST, **view: Any) -> list[UpstreamEvent]:
    request = ProxyRequest(route, b"{}", view, stream=stream, include_usage=True)
    decoder = AmendedDecoder(LlamaCppBackend("http://h").decoder(request, content_type=content_type), first)
    return decoder.feed(body) + decoder.finish()


def numbers(events: list[UpstreamEvent]) -> UsageNumbers:
    return [event.numbers for event in events if isinstance(event, Usage)][-1]


def test_a_usage_chunk_of_a_chat() -> None:
    plain, done = frame(HEAD), b"data: [DONE]\n\n"
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    usage = {"completion_tokens": 2, "prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 99, "x": 1}}
    chunk = {"id": "c", "choices": [], "usage": usage, "timings": TIMINGS}
    events = decoded(plain + frame(last) + frame(chunk) + done, CHAT)
    told = {"id": "c", "choices": [], "timings": TOLD,
            "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 8, "x": 1}}}
    out = forwarded(events)
    assert out.startswith(plain + frame(last)) and out.endswith(done)
    amended = out[len(plain + frame(last)):-len(done)]
    assert json.loads(amended.removeprefix(b"data: ")) == told and amended.endswith(b"}\n\n")
    assert list(json.loads(amended.removeprefix(b"data: "))) == list(chunk)  # the order of the fields
    assert numbers(events) == UsageNumbers(100, 2, 8) and numbers(events).prompt_s == pytest.approx(2.0205)
    assert next(event for event in events if isinstance(event, Usage) and event.standalone).data == told


def test_a_native_stream_with_its_progress() -> None:
    shown = {"total": 100, "cache": 99, "processed": 99, "time_ms": 0}
    progress = {"index": 0, "content": "", "prompt_progress": shown}
    last = {"index": 0, "content": "", "stop": True, "timings": TIMINGS, "tokens_cached": 101}
    piece = frame({"index": 0, "content": "a", "stop": False})
    events = decoded(frame(progress) + piece + frame(last), COMPLETION, return_progress=True)
    asked, kept, ended = (getattr(event, "raw", b"") for event in events[:3])
    assert json.loads(asked.removeprefix(b"data: "))["prompt_progress"]["cache"] == 8
    assert isinstance(events[0], Progress) and events[0].cached == 8
    assert kept == piece
    assert json.loads(ended.removeprefix(b"data: ")) == {**last, "timings": TOLD}


def test_messages_keep_their_sum() -> None:
    usage = {"cache_read_input_tokens": 99, "input_tokens": 1, "output_tokens": 0}
    start = {"type": "message_start", "message": {"id": "m", "usage": usage}}
    end = frame({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
                b"message_delta")
    stop = frame({"type": "message_stop"}, b"message_stop")
    events = decoded(frame(start, b"message_start") + end + stop, MESSAGES)
    out = forwarded(events)
    assert out.startswith(b"event: message_start\ndata: {") and out.endswith(end + stop)
    told = json.loads(out[: -len(end + stop)].split(b"data: ")[1])["message"]["usage"]
    assert told == {"cache_read_input_tokens": 8, "input_tokens": 92, "output_tokens": 0}
    assert numbers(events) == UsageNumbers(100, 2, 8)


def test_responses() -> None:
    usage = {"input_tokens": 100, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 99}}
    body = {"type": "response.completed", "response": {"status": "completed", "usage": usage}, "timings": TIMINGS}
    events = decoded(frame(body, b"response.completed"), RESPONSES)
    told = json.loads(forwarded(events).split(b"data: ")[1])
    assert told["response"]["usage"] == {**usage, "input_tokens_details": {"cached_tokens": 8}}
    assert told["timings"] == TOLD
    assert numbers(events) == UsageNumbers(100, 2, 8) and numbers(events).prompt_s == pytest.approx(2.0205)


@pytest.mark.parametrize("stream", [True, False])
def test_a_whole_answer_where_a_stream_was_asked_for(stream: bool) -> None:
    usage = {"prompt_tokens": 100, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 99}}
    whole = {"object": "chat.completion", "usage": usage, "timings": TIMINGS, "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}
    events = decoded(json.dumps(whole).encode(), CHAT, stream=stream, content_type="application/json")
    assert isinstance(events[0], Delta)
    assert events[0].data["usage"]["prompt_tokens_details"] == {"cached_tokens": 8} and numbers(events).cached == 8
    frames = SseSplitter().feed(forwarded(events))
    shown = [json.loads(one.data or b"") for one in frames if one.data and one.data != b"[DONE]"]
    assert bool(shown) is stream
    assert all(one.get("timings", TOLD) == TOLD for one in shown)
    assert all(one["usage"]["prompt_tokens_details"] == {"cached_tokens": 8} for one in shown if "usage" in one)


def test_whole_answers_that_pass() -> None:
    amend = Amendment(FIRST)
    odd = b'{ "usage": {"cache_read_input_tokens": 3, "input_tokens": 1}, "x": 1.0e2 }'
    assert amend.answer(odd, json.loads(odd)) == odd
    several = b'[ {"timings":{"cache_n":99,"prompt_n":1}}, {"timings":{"cache_n":2,"prompt_n":5}} ]'
    assert json.loads(amend.answer(several, json.loads(several))) == [
        {"timings": {"cache_n": 8, "prompt_n": 92}}, {"timings": {"cache_n": 2, "prompt_n": 5}}]


def test_rates_that_were_not_told_are_not_told() -> None:
    data = {"timings": {"cache_n": 9, "prompt_n": 91, "prompt_ms": 1.0}}
    assert Amendment(FIRST).data(data) == {"timings": {"cache_n": 8, "prompt_n": 92, "prompt_ms": 2001.0}}


def test_what_was_not_cached_or_not_told_stays() -> None:
    for data in ({"usage": {"prompt_tokens": 5}}, {"timings": {"cache_n": 8, "prompt_n": 92, "prompt_ms": 1}},
                 {"choices": [{"delta": {"content": '"usage" "timings"'}}]}, {"usage": None}, {"usage": []},
                 {"timings": {"cache_n": True}}, {"usage": {"prompt_tokens_details": {"cached_tokens": "99"}}}):
        raw = frame(data)
        assert Amendment(FIRST).raw(raw) is raw or Amendment(FIRST).raw(raw) == raw
        assert Amendment(FIRST).data(data) is data
    assert Amendment(FIRST).numbers(UsageNumbers(100, 2)) == UsageNumbers(100, 2)


def test_line_ends_comments_and_odd_text_are_kept() -> None:
    amend = Amendment(FIRST)
    for end in (b"\n", b"\r\n", b"\r"):
        raw = b": hi" + end + frame({"timings": {"cache_n": 99, "prompt_n": 1}, "t": "é"}, b"x", end)
        assert amend.raw(raw) == b": hi" + end + frame({"timings": {"cache_n": 8, "prompt_n": 92}, "t": "é"}, b"x", end)
    lines = b'data: {"timings":\ndata: {"cache_n":99,"prompt_n":1}}\n\n'
    assert amend.raw(lines) == b'data: {"timings":{"cache_n":8,"prompt_n":92}}\n\n'
    lone = b'data: {"timings":{"cache_n":99},"t":"\\ud83d"}\n\n'
    assert amend.raw(lone) == b'data: {"timings":{"cache_n":8,"prompt_n":91},"t":"\\ud83d"}\n\n'


CACHED = streams("llamacpp")


@pytest.mark.parametrize("case", CACHED, ids=name_of)
def test_recorded_answers(case: Transcript) -> None:
    """What was read before with nothing in the slot: no answer says cached any more, and only reports change."""
    assert case.request is not None
    plain = case.decode([case.response])
    decoder = AmendedDecoder(
        case.adapter.decoder(case.request, content_type=case.meta["headers"].get("content-type", "")),
        PromptWork(0, 1, 1.0))
    events = decoder.feed(case.response) + decoder.finish()
    assert [type(event) for event in events] == [type(event) for event in plain]
    for new, old in zip(events, plain, strict=True):
        if isinstance(new, Usage) and isinstance(old, Usage) and old.numbers.cached is not None:
            assert (new.numbers.cached, new.numbers.prompt) == (0, old.numbers.prompt)
        if getattr(new, "raw", b"") != getattr(old, "raw", b""):
            assert isinstance(old, (Delta, Usage, Progress)) and any(
                word in old.raw for word in (b"cache_n", b"cached_tokens", b"cache_read", b'"cache"'))
            assert new.raw.count(b"\n") == old.raw.count(b"\n")  # type: ignore[union-attr]


@given(st.lists(JSON, max_size=4), st.lists(st.integers(0, 200), max_size=5), st.integers(0, 9))
@settings(max_examples=150, deadline=None)
def test_any_cut_gives_the_same_and_nothing_raises(objects: list[Any], cuts: list[int], cached: int) -> None:
    body = b"".join(frame(value) for value in objects)
    first = PromptWork(cached, 5, None)
    for route in (CHAT, COMPLETION, MESSAGES, RESPONSES):
        whole = decoded(body, route, first=first)
        request = ProxyRequest(route, b"{}", {}, stream=True, include_usage=True)
        decoder = AmendedDecoder(LlamaCppBackend("http://h").decoder(request), first)
        edges = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
        events = [event for a, b in itertools.pairwise(edges) for event in decoder.feed(body[a:b])]
        assert events + decoder.finish() == whole


def test_depth_does_no_harm() -> None:
    deep: dict[str, Any] = {}
    for _ in range(3000):
        deep = {"message": deep, "response": deep}
    assert Amendment(FIRST).data(deep) is deep
