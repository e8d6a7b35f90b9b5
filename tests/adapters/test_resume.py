"""Continuing a stopped answer: what may be, what is asked for, and that the frames give nothing away (case 40)."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kvstream.adapters import LlamaCppBackend
from kvstream.adapters.base import Delta, Done, Failed, Finished, HttpReply, UpstreamEvent, Usage, UsageNumbers
from kvstream.adapters.slot_calls import Legs
from tests.adapters.transcripts import forwarded, request_of, texts

CHAT, COMPLETIONS, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
BACKEND = LlamaCppBackend("http://backend.example:1")
SLOTS = BACKEND.slots
assert SLOTS is not None
CASES = {path.stem: json.loads(path.read_text("utf-8"))
         for path in sorted((Path(__file__).parent / "resumed").glob("*.json"))}
MESSAGES = [{"role": "user", "content": "hello"}]
BEFORE = {"prompt_s": 1.5, "answer_s": 2.5}


def ask(route: str = CHAT, **fields: Any) -> Any:
    given = {"messages": MESSAGES} if route == CHAT else {"prompt": "hello"}
    return request_of({"route": route, "body": {"stream": True, **given, **fields}})


# --- who can be continued ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("route", "fields"), [
    (CHAT, {}), (COMPLETIONS, {}), (NATIVE, {}), (COMPLETIONS, {"prompt": [1, 2, 3]}), (NATIVE, {"prompt": [1, 2]}),
    ("/chat/completions", {"messages": MESSAGES}), ("/completions", {}),
    (CHAT, {"max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "stop": "x", "user": "me", "model": "m"}),
    (CHAT, {"logit_bias": {"15": -100}, "ignore_eos": True, "repeat_penalty": 1.1, "dry_multiplier": 0.8}),
    (CHAT, {"seed": None, "tools": [], "tool_choice": "none", "n": 1, "logprobs": False}),
    (CHAT, {"response_format": {"type": "text"}, "stream_options": {"include_usage": True}}),
    (NATIVE, {"n_predict": 5, "seed": -1, "grammar": "", "return_tokens": True, "stop": ["a"]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}),
])
def test_case_40_these_can_be_continued(route: str, fields: dict[str, Any]) -> None:
    assert SLOTS.can_resume(ask(route, **fields))


@pytest.mark.parametrize(("route", "fields"), [
    (CHAT, {"tools": [{"type": "function"}]}), (CHAT, {"functions": [{"name": "f"}]}),
    (CHAT, {"response_format": {"type": "json_object"}}), (CHAT, {"response_format": {"type": "json_schema"}}),
    (CHAT, {"response_format": "json"}), (CHAT, {"grammar": "root ::= 'a'"}), (CHAT, {"json_schema": {"type": "null"}}),
    (CHAT, {"seed": 7}), (CHAT, {"seed": 0}), (NATIVE, {"seed": 7}), (CHAT, {"mirostat": 2}),
    (CHAT, {"logprobs": True}), (CHAT, {"top_logprobs": 3}), (NATIVE, {"n_probs": 3}), (COMPLETIONS, {"logprobs": 2}),
    (CHAT, {"n": 2}), (COMPLETIONS, {"n": 2}), (COMPLETIONS, {"best_of": 2}),
    (COMPLETIONS, {"prompt": ["a", "b"]}), (COMPLETIONS, {"prompt": [[1], [2]]}), (COMPLETIONS, {"prompt": []}),
    (NATIVE, {"prompt": [1, "a"]}), (NATIVE, {"prompt": {"prompt_string": "a", "multimodal_data": ["b"]}}),
    (CHAT, {"lora": [{"id": 0, "scale": 1}]}), (COMPLETIONS, {"echo": True}), (COMPLETIONS, {"suffix": "x"}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
    (CHAT, {"return_progress": True}), (CHAT, {"timings_per_token": True}), (NATIVE, {"response_fields": ["content"]}),
    (CHAT, {"reasoning_format": "none"}), (CHAT, {"t_max_predict_ms": 100}), (CHAT, {"n_predict": 3}),
    (CHAT, {"a_field_of_next_year": 1}), (NATIVE, {"stop": "a string is not read there"}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}), ("/v1/responses", {"input": "hello"}),
    ("/infill", {"input_prefix": "a", "input_suffix": "b"}), ("/v1/embeddings", {"input": "a"}),
])
def test_case_40_these_cannot(route: str, fields: dict[str, Any]) -> None:
    assert not SLOTS.can_resume(ask(route, **fields))


# --- what is asked for ------------------------------------------------------------------------------------------------


def body_of(request: Any, **how: Any) -> dict[str, Any]:
    call = SLOTS.resume(request, **{"ids": (1, 2, 3), "slot": 2, "made": 1, **how})
    assert call is not None and (call.method, call.path) == ("POST", "/completion")
    value: dict[str, Any] = json.loads(call.body)
    return value


def test_the_sampling_goes_on_under_the_same_names_and_nothing_else_does() -> None:
    sampling = {"temperature": 0.25, "top_k": 7, "logit_bias": {"15": -100}, "ignore_eos": True,
                "dry_sequence_breakers": ["a"], "samplers": ["top_k"], "frequency_penalty": 0.5}
    request = ask(model="m", user="me", max_tokens=10, stop="END", cache_prompt=False, top_p=None,
                  stream_options={"include_usage": True}, **sampling)
    assert body_of(request) == {
        **sampling, "prompt": [1, 2, 3], "id_slot": 2, "n_predict": 9, "stop": ["END"], "model": "m",
        "stream": True, "return_tokens": True, "cache_prompt": True}
    assert body_of(ask(), slot=None) == {"prompt": [1, 2, 3], "stream": True, "return_tokens": True,
                                         "cache_prompt": True}


@pytest.mark.parametrize(("route", "fields", "made", "left"), [
    (CHAT, {"max_tokens": 5}, 0, 5), (CHAT, {"max_tokens": 5}, 4, 1), (CHAT, {"max_tokens": -1}, 4, None),
    (CHAT, {"max_tokens": 5, "max_completion_tokens": 9}, 4, 5), (CHAT, {}, 4, None), (NATIVE, {"n_predict": 9}, 2, 7),
    (CHAT, {"max_tokens": None, "max_completion_tokens": 9}, 4, 5), (COMPLETIONS, {"max_tokens": 16.0}, 6, 10),
])
def test_what_is_left_of_the_limit(route: str, fields: dict[str, Any], made: int, left: int | None) -> None:
    assert body_of(ask(route, **fields), made=made).get("n_predict") == left


@pytest.mark.parametrize("made", [5, 6])
def test_where_nothing_is_left_nothing_is_asked(made: int) -> None:
    assert SLOTS.resume(ask(max_tokens=5), (1, 2), slot=0, made=made) is None
    decoder = SLOTS.resume_decoder(ask(max_tokens=5), {"id": "x", "object": "chat.completion.chunk"}, Legs(7, made))
    end = decoder.at_limit()
    assert [type(e) for e in end] == [Delta, Finished, Usage, Done] and decoder.finish() == []
    assert end[1] == Finished("length") and isinstance(end[2], Usage) and end[2].numbers == UsageNumbers(7, made, None)


def test_the_text_of_tokens_and_back() -> None:
    assert json.loads(SLOTS.detokenize((1, 2)).body) == {"tokens": [1, 2]}
    assert SLOTS.read_text(HttpReply(200, {}, b'{"content":"a b"}')) == "a b"
    assert json.loads(SLOTS.tokenize("<|im_end|>").body)["parse_special"] is False
    assert SLOTS.read_ids(HttpReply(200, {}, b'{"tokens":[1,2]}')) == (1, 2)
    for reply in (HttpReply(500), HttpReply(200, {}, b"[]"), HttpReply(200, {}, b'{"content":1,"tokens":["a"]}')):
        assert SLOTS.read_text(reply) is None and SLOTS.read_ids(reply) is None


# --- what the client sees: recorded from the real server (tests/record_resume.py) -------------------------------------


def parts_of(case: dict[str, Any], stream: bool = True) -> tuple[list[UpstreamEvent], list[UpstreamEvent]]:
    """The events of the whole answer, and of its continuation."""
    request = request_of({"route": case["route"], "body": case["body"] | {"stream": stream}})
    decoder = BACKEND.decoder(request)
    whole = [*decoder.feed(case["whole"].encode()), *decoder.finish()]
    like = next(e.data for e in whole if isinstance(e, Delta))
    first = next(e.numbers for e in whole if isinstance(e, Usage))
    continued = SLOTS.resume_decoder(request, like, Legs(first.prompt, case["made"], first.cached, **BEFORE))
    return whole, [*continued.feed(case["resumed"].encode()), *continued.finish()]


def frames(events: list[UpstreamEvent]) -> list[Any]:
    lines = forwarded(events).decode().split("\n\n")
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines if line]


TIMES = ("prompt_ms", "prompt_per_token_ms", "prompt_per_second", "predicted_ms", "predicted_per_token_ms",
         "predicted_per_second")


@pytest.mark.parametrize("name", CASES)
def test_case_40_the_continuation_looks_as_if_nothing_had_happened(name: str) -> None:
    case = CASES[name]
    whole, rest = parts_of(case)
    assert case["text"] + texts(rest) == texts(whole)
    tail = frames(whole)[-len(frames(rest)):]
    for mine, real in zip(frames(rest), tail, strict=True):
        assert type(mine) is type(real)
        if isinstance(real, str):
            assert mine == real == "[DONE]"
            continue
        assert mine.keys() == real.keys()
        for key in real:
            if key == "timings":
                assert set(mine[key]) == set(real[key])
                assert {k: v for k, v in mine[key].items() if k not in TIMES} == {
                    k: v for k, v in real[key].items() if k not in TIMES}
                assert mine[key]["prompt_ms"] > 1500 and mine[key]["predicted_ms"] > 2500
            elif key not in ("tokens", "id_slot", "generation_settings", "created"):  # created: the second of the frame
                assert mine[key] == real[key], key
    assert [e for e in rest if isinstance(e, Finished)] == [e for e in whole if isinstance(e, Finished)]
    numbers = [e.numbers for e in whole if isinstance(e, Usage)]
    assert [e.numbers for e in rest if isinstance(e, Usage)] == numbers
    assert sum(isinstance(e, Done) for e in rest) == 1
    assert not any("role" in str(frame) for frame in frames(rest))


def test_the_settings_shown_by_the_native_route_are_those_of_the_whole() -> None:
    _, rest = parts_of(CASES["native"])
    last = frames(rest)[-1]
    assert last["generation_settings"]["n_predict"] == 12 and last["prompt"] == "Once upon a time"


@pytest.mark.parametrize("name", CASES)
def test_case_40_a_client_that_does_not_stream_gets_the_same_answer(name: str) -> None:
    case = CASES[name]
    request = request_of({"route": case["route"], "body": case["body"] | {"stream": False}})
    whole, rest = parts_of(case, stream=False)
    one, two = BACKEND.assembler(request), BACKEND.assembler(request)
    for event in whole:
        one.feed(event)
    said = 0
    for event in whole:  # the events before the cut, then the continuation
        if said >= len(case["text"]) and isinstance(event, Delta) and event.text:
            break
        said += len(event.text) if isinstance(event, Delta) else 0
        two.feed(event)
    for event in rest:
        two.feed(event)
    mine, real = two.result(), one.result()
    assert mine.get("choices") == real.get("choices") and mine.get("content") == real.get("content")
    if case["route"] == CHAT:
        total = case["prompt"] + sum(e.numbers.completion for e in rest if isinstance(e, Usage))
        assert mine["usage"]["total_tokens"] == total


@pytest.mark.parametrize("name", CASES)
def test_any_split_of_the_continuation_gives_the_same_events(name: str) -> None:
    case = CASES[name]
    request = request_of({"route": case["route"], "body": case["body"]})
    data = case["resumed"].encode()

    def decode(pieces: Any) -> list[UpstreamEvent]:
        decoder = SLOTS.resume_decoder(request, {"id": "a"}, Legs(4, 2))
        return [e for piece in pieces for e in decoder.feed(piece)] + decoder.finish()

    whole = decode([data])
    assert decode(bytes([byte]) for byte in data) == whole

    @hypothesis_settings(max_examples=10, deadline=None)
    @given(st.lists(st.integers(0, len(data)), max_size=20))
    def split(cuts: list[int]) -> None:
        edges = [0, *sorted(cuts), len(data)]
        assert decode(data[a:b] for a, b in itertools.pairwise(edges)) == whole

    split()


def test_a_continuation_that_breaks_off_or_fails_says_so() -> None:
    cut = SLOTS.resume_decoder(ask(), {}, Legs(1, 1))
    assert cut.feed(b'data: {"index":0,"content":"a","tokens":[1],"stop":false}\n\n')[0].text == "a"  # type: ignore
    assert isinstance(cut.finish()[-1], Failed)
    failed = SLOTS.resume_decoder(ask(), {}, Legs(1, 1))
    events = failed.feed(b'data: {"error":{"code":500,"message":"Context size has been exceeded.","type":"x"}}\n\n')
    assert isinstance(events[0], Failed) and events[0].raw


def test_a_token_that_is_no_whole_character_is_counted_and_not_shown() -> None:
    decoder = SLOTS.resume_decoder(ask(), {"id": "a"}, Legs(1, 1))
    assert decoder.feed(b'data: {"index":0,"content":"","tokens":[9],"stop":false}\n\n') == [Delta(b"", None, 1, "")]
