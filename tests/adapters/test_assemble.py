"""Chunks put together: what grows, what is named once, what the last one decides."""

from __future__ import annotations

from typing import Any

import pytest

from kvstream.adapters import Assembler, LlamaCppBackend, OpenAIBackend
from kvstream.adapters.base import Delta, Done, Ping, Usage, UsageNumbers
from tests.adapters.transcripts import load_all, request_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CASES = {case.case: case for case in load_all()}


def assemble(*chunks: dict[str, Any], route: str = CHAT, prefix: str = "") -> dict[str, Any]:
    assembler = Assembler(route, prefix)
    for chunk in chunks:
        assembler.feed(Delta(b"", chunk))
    return assembler.result()


def delta(index: int = 0, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"object": "chat.completion.chunk", "choices": [{"index": index, "delta": fields, "finish_reason": finish}]}


def message(*chunks: dict[str, Any], **options: Any) -> dict[str, Any]:
    answer = assemble(*chunks, **options)
    return dict(answer["choices"][0]["message"])


def result_of(name: str) -> dict[str, Any]:
    case = CASES[name]
    assert case.request is not None
    assembler = case.adapter.assembler(case.request)
    for event in case.decode([case.response]):
        assembler.feed(event)
    return dict(assembler.result())


def test_text_grows_and_the_role_is_said_once() -> None:
    chunks = [delta(role="assistant", content=None), delta(role="assistant", content="He"), delta(content="llo")]
    assert message(*chunks) == {"role": "assistant", "content": "Hello"}


def test_reasoning_and_unknown_fields_survive() -> None:
    assert result_of("reasoning_fields")["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Hi",
        "reasoning_content": "Hm",
        "reasoning": "m.",
        "reasoning_items": [{"id": "rs_1", "type": "reasoning", "summary": []}],
        "x_unknown": "?",
    }
    assert result_of("reasoning_fields")["provider"] == "p"
    assert message(delta(n=1, ok=True), delta(n=2))["n"] == 2
    assert message(delta(a={"x": "1", "id": "i"}), delta(a={"x": "2", "id": "i"}))["a"] == {"x": "12", "id": "i"}


def test_two_tool_calls_in_pieces() -> None:
    choice = result_of("openai_two_tool_calls")["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert choice["message"]["tool_calls"] == [
        {"id": "call_a", "type": "function", "function": {"name": "say", "arguments": '{"text":"caf\\u00e9 \\""}'}},
        {"id": "call_b", "type": "function", "function": {"name": "wave", "arguments": "{}"}},
    ]


def test_a_call_repeated_with_its_names_in_every_piece() -> None:
    def piece(text: str) -> dict[str, Any]:
        return delta(
            tool_calls=[{"index": 1, "id": "c", "type": "function", "function": {"name": "f", "arguments": text}}]
        )

    assert message(piece("{"), piece("}"))["tool_calls"] == [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    ]
    later = delta(tool_calls=[{"index": 1, "id": "", "function": {"name": None, "arguments": "x"}}])
    assert message(piece(""), later)["tool_calls"][0] == {
        "id": "c",
        "type": "function",
        "function": {"name": "f", "arguments": "x"},
    }


def test_content_is_null_only_beside_tool_calls_or_a_refusal() -> None:
    assert message(delta(role="assistant"))["content"] == ""
    assert message(delta(tool_calls=[{"index": 0}]))["content"] is None
    refused = result_of("openai_refusal")["choices"][0]["message"]
    assert refused == {"role": "assistant", "content": None, "refusal": "I cannot."}
    assert message(delta(content="a", refusal=None))["refusal"] is None


def test_logprobs_are_put_end_to_end() -> None:
    chat = result_of("openai_logprobs")["choices"][0]["logprobs"]
    assert [entry["token"] for entry in chat["content"]] == ["a", "é"] and chat["refusal"] is None
    legacy = result_of("openai_completions_logprobs")["choices"][0]
    assert legacy["text"] == "Hello" and legacy["logprobs"] == {
        "tokens": ["He", "l", "lo"],
        "token_logprobs": [-0.1, -0.2, -0.3],
        "top_logprobs": [{"He": -0.1}, {"l": -0.2}, {"lo": -0.3}],
        "text_offset": [0, 2, 3],
    }


def test_choices_in_any_order() -> None:
    answer = result_of("vllm_n2")
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in answer["choices"]] == [
        (0, "ab", "stop"),
        (1, "xy", "length"),
    ]
    assert answer["usage"]["completion_tokens"] == 4 and answer["object"] == "chat.completion"


def test_top_level_fields_take_their_last_value_that_is_not_null() -> None:
    answer = assemble(
        {"id": "a", "usage": None, "system_fingerprint": "f", "service_tier": "x", "choices": []},
        {"id": "a", "usage": {"prompt_tokens": 1}, "system_fingerprint": None, "x": 1, "choices": []},
        {"id": "a", "usage": None, "service_tier": "y", "choices": []},
    )
    assert answer == {
        "id": "a",
        "object": "chat.completion",
        "usage": {"prompt_tokens": 1},
        "system_fingerprint": "f",
        "service_tier": "y",
        "x": 1,
        "choices": [],
    }


def test_legacy_completions_keep_their_object() -> None:
    chunk = {"object": "text_completion", "choices": [{"index": 0, "text": "a", "finish_reason": None}]}
    assert assemble(chunk, chunk, route=COMPLETIONS) == {
        "object": "text_completion",
        "choices": [{"index": 0, "text": "aa", "finish_reason": None, "logprobs": None}],
    }
    assert assemble(route=COMPLETIONS)["object"] == "text_completion"


def test_only_frames_with_data_count_and_results_are_fresh() -> None:
    assembler = Assembler(CHAT)
    usage = {"choices": [], "usage": {"prompt_tokens": 1}}
    for event in (Ping(), Done(b""), Delta(b"x"), Delta(b"x", [1]), Usage(b"", UsageNumbers(1, 1), usage)):
        assembler.feed(event)
    assembler.feed(Delta(b"", delta(content="a")))
    first = assembler.result()
    assembler.feed(Delta(b"", delta(content="b")))
    assert first["choices"][0]["message"]["content"] == "a" and first["usage"] == {"prompt_tokens": 1}
    assert assembler.result()["choices"][0]["message"]["content"] == "ab"


@pytest.mark.parametrize(
    ("content", "prefix"),
    [("Hello, ", "Hello, "), (None, ""), ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\n\nb")],
)
def test_llama_cpp_repeats_a_prefill_in_a_whole_answer_only(content: Any, prefix: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    asked = request_of({"route": CHAT, "body": {"messages": messages}})
    for backend, expected in ((LlamaCppBackend, prefix + "x"), (OpenAIBackend, "x")):
        assembler = backend("http://h").assembler(asked)
        assembler.feed(Delta(b"", delta(content="x")))
        assert assembler.result()["choices"][0]["message"]["content"] == expected
    whole = {"choices": [{"index": 0, "message": {"content": "Hello, x"}}]}
    assert message(whole, prefix="Hello, ")["content"] == "Hello, x"
