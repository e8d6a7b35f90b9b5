"""Exact counting: which calls, and how their answers are read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstream.adapters import LlamaCppBackend, OpenAIBackend
from kvstream.adapters.base import HttpCall, HttpReply, ProxyRequest
from tests.adapters.transcripts import load_all

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
REPLIES = {case.case: case.reply for case in load_all() if case.meta["kind"] == "reply"}


def request(route: str, **view: Any) -> ProxyRequest:
    return ProxyRequest(route, json.dumps(view).encode(), view, model=view.get("model", ""))


def test_chat_is_rendered_then_tokenized() -> None:
    backend = LlamaCppBackend("http://h")
    asked = request(CHAT, messages=[{"role": "user", "content": "Hi"}], tools=[{}], chat_template_kwargs={"a": 1})
    call = backend.count_calls(asked)
    assert isinstance(call, HttpCall)
    assert (call.path, call.body) == ("/apply-template", asked.body)  # whatever shapes the prompt is in there
    call = backend.read_count(asked, REPLIES["reply_apply_template"])
    assert isinstance(call, HttpCall) and call.path == "/tokenize"
    body = json.loads(call.body)
    assert body["add_special"] is True and body["parse_special"] is True
    assert body["content"].endswith("<|im_start|>assistant\n")
    assert backend.read_count(asked, REPLIES["reply_tokenize"]) == (1, 4093, 198, 26843)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Once", "Once"),
        (["Once"], "Once"),
        ("", ""),
        ("lone \ud83d", "lone \ud83d"),
        ([1, 2, 3], (1, 2, 3)),
        ([[1, 2]], (1, 2)),
        (["a", "b"], None),
        ([[1], [2]], None),
        ([1, "x"], None),
        ([True, 1], None),
        ([], None),
        (None, None),
    ],
)
def test_prompts_of_completions(prompt: Any, expected: Any) -> None:
    call = LlamaCppBackend("http://h").count_calls(request(COMPLETIONS, prompt=prompt))
    if isinstance(expected, str):
        assert isinstance(call, HttpCall)
        assert json.loads(call.body) == {"content": expected, "add_special": True, "parse_special": True}
    else:
        assert call == expected


def test_what_cannot_be_counted_exactly_is_estimated() -> None:
    backend = LlamaCppBackend("http://h")
    image = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    assert backend.count_calls(request(CHAT, messages=[{"role": "user", "content": image}])) is None
    text = [{"type": "text", "text": "what?"}]
    assert backend.count_calls(request(CHAT, messages=[{"role": "user", "content": text}])) is not None
    asked = request(CHAT, messages=[])
    for answer in (HttpReply(400, {}, b"{}"), HttpReply(200, {}, b"[]"), HttpReply(200, {}, b'{"tokens":["a"]}')):
        assert backend.read_count(asked, answer) is None
    assert OpenAIBackend("http://h").count_calls(asked) is None


def test_a_router_needs_the_model_in_every_body() -> None:
    backend = LlamaCppBackend("http://h", model="m", api_key="k")
    named = request(CHAT, model="x", messages=[])
    call = backend.count_calls(named)
    assert isinstance(call, HttpCall) and call.body == named.body
    assert ("authorization", "Bearer k") in call.headers
    for asked, model in ((request(CHAT, messages=[]), "m"), (named, "x")):
        call = backend.count_calls(asked)
        assert isinstance(call, HttpCall) and json.loads(call.body)["model"] == model
        call = backend.read_count(asked, HttpReply(200, {}, b'{"prompt":"p"}'))
        assert isinstance(call, HttpCall) and json.loads(call.body)["model"] == model


@pytest.mark.parametrize(("route", "path", "view"), [
    ("/v1/messages", "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("/v1/responses", "/v1/responses/input_tokens", {"input": "Hi"}),
    ("/responses", "/v1/responses/input_tokens", {"input": [{"role": "user", "content": [
        {"type": "input_text", "text": "Hi"}]}]}),
])
def test_messages_and_responses_are_counted_by_the_server(route: str, path: str, view: dict[str, Any]) -> None:
    backend = LlamaCppBackend("http://h")
    asked = request(route, **view)
    call = backend.count_calls(asked)
    assert isinstance(call, HttpCall) and (call.path, call.body) == (path, asked.body)
    reply = REPLIES["reply_count_messages" if "messages" in path else "reply_count_responses"]
    assert backend.read_count(asked, reply) == 36


def test_images_and_results_of_tools_on_the_other_routes() -> None:
    backend = LlamaCppBackend("http://h")
    image = {"type": "image", "source": {"type": "base64", "data": "iVBOR"}}
    tool = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "sunny"}]}
    for content, counted in (([image], False), ([tool], True), ([{**tool, "content": [image]}], False)):
        call = backend.count_calls(request("/v1/messages", messages=[{"role": "user", "content": content}]))
        assert (call is not None) is counted
    item = {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}
    assert backend.count_calls(request("/v1/responses", input=[item])) is None


@pytest.mark.parametrize(("given", "expected"), [
    ("a", "a"), (["a", "ccc", "bb"], "ccc"), ([1, 2], (1, 2)), ([[1], [2, 3]], (2, 3)), ([], None), (["a", 1], None)])
def test_of_the_documents_of_an_embeddings_call_the_longest_is_counted(given: Any, expected: Any) -> None:
    for route, name in (("/v1/embeddings", "input"), ("/embedding", "content")):
        call = LlamaCppBackend("http://h").count_calls(request(route, **{name: given}))
        if isinstance(call, HttpCall):
            assert call.path == "/tokenize" and json.loads(call.body)["content"] == expected
        else:
            assert call == expected
    assert LlamaCppBackend("http://h").count_calls(request("/v1/rerank", query="a", documents=["b"])) is None
