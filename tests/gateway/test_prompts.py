"""What each form of body says: its text, its limit, its seats."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstream.adapters import LlamaCppBackend
from kvstream.adapters.base import ProxyRequest
from kvstream.adapters.routes import MEDIA, ROUTES
from kvstream.core.tokens import TokenEstimator
from kvstream.errors import InvalidRequestError
from kvstream.gateway.count import keys_of_text
from kvstream.gateway.request import answer_tokens, parse_request, prompt_text, seats_wanted


def asked(route: str, **view: Any) -> ProxyRequest:
    return parse_request(route, (), json.dumps(view).encode()).proxy


TURN = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(("route", "view", "words", "absent"), [
    ("/v1/messages", {"system": [{"type": "text", "text": "SYS"}], "tools": [{"name": "TOOL"}], "messages": [
        {"role": "user", "content": [{"type": "text", "text": "ONE"}, {"type": "image", "source": {"data": "iVBOR"}}]},
        {"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {"k": "ARG"}}]},
        {"role": "user", "content": [{"type": "tool_result", "content": [
            {"type": "text", "text": "RESULT"}, {"type": "image", "source": {"data": "iVBOR"}}]}]}]},
     ("TOOL", "SYS", "ONE", "ARG", "RESULT"), "iVBOR"),
    ("/v1/responses", {"instructions": "SYS", "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "ONE"},
                                     {"type": "input_image", "image_url": "data:iVBOR"}]},
        {"type": "function_call", "name": "TOOL", "arguments": "ARG"},
        {"type": "function_call_output", "output": "RESULT"}]}, ("SYS", "ONE", "TOOL", "ARG", "RESULT"), "iVBOR"),
    ("/v1/responses", {"input": "ONE"}, ("ONE",), "iVBOR"),
    ("/completion", {"prompt": {"prompt_string": "ONE", "multimodal_data": ["iVBOR"]}}, ("ONE",), "iVBOR"),
    ("/infill", {"input_extra": [{"filename": "f", "text": "EXTRA"}], "input_prefix": "PRE", "prompt": "MID",
                 "input_suffix": "SUF"}, ("EXTRA", "PRE", "MID", "SUF"), "iVBOR"),
    ("/v1/embeddings", {"input": ["short", "the longest of all", "x"]}, ("the longest of all",), "short"),
    ("/v1/rerank", {"query": "Q", "documents": ["short", {"text": "the longest"}]}, ("Q", "the longest"), "short"),
])
def test_the_text_of_a_prompt_in_its_order_and_nothing_of_images(
        route: str, view: dict[str, Any], words: tuple[str, ...], absent: str) -> None:
    text = prompt_text(route, asked(route, **view).view)
    places = [text.find(word) for word in words]
    assert -1 not in places and places == sorted(places) and absent not in text


@pytest.mark.parametrize(("route", "view", "limit"), [
    ("/v1/messages", {"messages": TURN, "max_tokens": 7}, 7), ("/v1/messages", {"messages": TURN}, None),
    ("/v1/responses", {"input": "x", "max_output_tokens": 8, "max_tokens": 3}, 8),
    ("/completion", {"prompt": "x", "max_tokens": 9, "n_predict": 4}, 4),
    ("/completion", {"prompt": "x", "n_predict": -1}, None),
    ("/completion", {"prompt": ["x", "y"], "n_predict": 4}, 8),
    ("/chat/completions", {"messages": TURN, "max_tokens": 9, "max_completion_tokens": 5, "n": 2}, 10),
    ("/v1/embeddings", {"input": "x"}, 0), ("/tokenize", {"content": "x"}, 0),
])
def test_what_limits_an_answer(route: str, view: dict[str, Any], limit: int | None) -> None:
    assert answer_tokens(asked(route, **view)) == limit


def test_documents_beside_the_longest_take_room_and_seats() -> None:
    many = asked("/v1/embeddings", input=["a" * 300, "b" * 30, [1, 2, 3]])
    assert seats_wanted(many) == 3 and answer_tokens(many) == 30 // 3 + 1 + 12 // 3 + 1
    assert seats_wanted(asked("/v1/rerank", query="q", documents=["a", "b"])) == 2
    assert seats_wanted(asked("/v1/embeddings", input=[1, 2, 3])) == 1
    assert seats_wanted(asked("/completion", prompt=["a", "b"])) == 2
    assert seats_wanted(asked("/completion", prompt=[1, "b"])) == 1


def test_a_route_that_cannot_stream_does_not_and_native_routes_do_on_request() -> None:
    assert asked("/v1/embeddings", input="x", stream=True).stream is False
    assert asked("/completion", prompt="x", stream=True).stream is True
    assert asked("/completion", prompt="x").stream is False


FIELDS = ["messages", "prompt", "input", "content", "system", "instructions", "tools", "documents", "texts", "query",
          "n", "input_prefix", "input_suffix", "input_extra", "max_tokens", "n_predict", "max_output_tokens", "stream",
          "options", "role", "text", "type", "tool_calls", "prompt_string", "stream_options"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
    max_leaves=16)


@given(st.sampled_from(sorted(path for path, row in ROUTES.items() if row.access != MEDIA)),
       st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6))
@settings(max_examples=600, deadline=None)
def test_no_body_is_worse_than_a_400(route: str, view: dict[str, Any]) -> None:
    try:
        request = asked(route, **view)
    except InvalidRequestError:
        return
    assert isinstance(prompt_text(route, request.view), str)
    assert seats_wanted(request) >= 1
    limit = answer_tokens(request)
    assert limit is None or limit >= 0
    keys_of_text(request, TokenEstimator(), page_tokens=16, tokens_keyed_max=64, client="c")
    LlamaCppBackend("http://h").count_calls(request)
    LlamaCppBackend("http://h").assembler(request)
    LlamaCppBackend("http://h").encode(request)
