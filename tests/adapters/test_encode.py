"""What travels to the runtime: the client's own bytes, and as little else as possible."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstream.adapters import ADAPTERS, LlamaCppBackend, OpenAIBackend
from kvstream.adapters.base import ProxyRequest
from kvstream.adapters.bodies import ABSENT, edit

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def request(body: bytes | str, **more: Any) -> ProxyRequest:
    body = body.encode() if isinstance(body, str) else body
    view = json.loads(body)
    return ProxyRequest(more.pop("route", CHAT), body, view, stream=bool(view.get("stream")), **more)


def body_of(backend: Any, body: bytes | str, **options: Any) -> bytes:
    return bytes(backend.encode(request(body), **options).body)


SPEAK_OPENAI = [kind for kind in ADAPTERS.values() if CHAT not in kind("http://h").capabilities.translated]
"""The others make another body of it: test_ollama.py."""


@pytest.mark.parametrize("kind", SPEAK_OPENAI)
def test_a_body_that_needs_nothing_is_not_touched(kind: Any) -> None:
    body = b' {"stream" : true,"stream_options":{"include_usage":true}, "n":1e0, "x":"\xc3\xa9\\ud83d", "x":2}\n'
    assert body_of(kind("http://h"), body) == body


def test_absent_fields_are_spliced_in_and_everything_else_keeps_its_bytes() -> None:
    body = b'\r\n {"temperature":0.10,"messages":[{"content":"\\ud83d {","stream":true}], "a":1 , "a":2}'
    assert body_of(LlamaCppBackend("http://h"), body) == (
        b'\r\n {"stream":true,"stream_options":{"include_usage":true},' + body[4:]
    )
    assert body_of(OpenAIBackend("http://h"), b'{"stream":true}') == (
        b'{"stream_options":{"include_usage":true},"stream":true}'
    )
    assert json.loads(body_of(OpenAIBackend("http://h"), b"{ }"))["stream"] is True


def test_a_field_that_must_change_is_re_serialised_with_lone_surrogates_kept() -> None:
    body = body_of(LlamaCppBackend("http://h"), '{"stream":false,"messages":"\\ud83d é 日本"}')
    assert body.isascii()
    assert json.loads(body) == {
        "messages": "\ud83d é 日本",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize("body", [b'\xef\xbb\xbf{"a":1}', '{"a":1}'.encode("utf-16"), '{"a":1}'.encode("utf-16-be")])
def test_no_splice_into_a_byte_order_mark_or_another_encoding(body: bytes) -> None:
    assert json.loads(edit(body, {"a": 1}, {"b": 2})) == {"a": 1, "b": 2}


VALUES = st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers(), max_size=2)
OBJECTS = st.dictionaries(st.sampled_from("abcde") | st.text(max_size=3), VALUES, max_size=5)


@given(OBJECTS, st.dictionaries(st.sampled_from("abcxy"), VALUES | st.just(ABSENT), max_size=4), st.booleans())
@settings(max_examples=200, deadline=None)
def test_edit_means_what_it_says(view: dict[str, Any], changes: dict[str, Any], spaced: bool) -> None:
    body = json.dumps(view, indent=2 if spaced else None, ensure_ascii=spaced).encode("utf-8", "surrogatepass")
    expected = {key: value for key, value in {**view, **changes}.items() if value is not ABSENT}
    edited = edit(body, view, changes)
    assert json.loads(edited) == expected
    if not changes.keys() & view.keys():
        assert edited.endswith(body.lstrip()[1:])


def test_true_is_not_one() -> None:
    assert edit(b'{"stream":1}', {"stream": 1}, {"stream": True}) == b'{"stream":true}'


def test_stream_options_are_merged_or_left_for_the_runtime_to_refuse() -> None:
    backend = OpenAIBackend("http://h")
    merged = json.loads(body_of(backend, '{"stream":true,"stream_options":{"continuous_usage_stats":true}}'))
    assert merged["stream_options"] == {"continuous_usage_stats": True, "include_usage": True}
    assert json.loads(body_of(backend, '{"stream":true,"stream_options":null}'))["stream_options"]
    assert json.loads(body_of(backend, '{"stream":true,"stream_options":"x"}'))["stream_options"] == "x"


def test_case_77_the_configured_model_fills_a_gap_and_replaces_nothing() -> None:
    for kind in ADAPTERS.values():
        backend = kind("http://h", model="m")
        for body, model in (('{"a":1}', "m"), ('{"model":""}', "m"), ('{"model":null}', "m"), ('{"model":"x"}', "x")):
            assert json.loads(body_of(backend, body))["model"] == model
        assert "model" not in json.loads(body_of(kind("http://h"), '{"a":1}'))


@pytest.mark.parametrize(
    ("body", "route", "limit"),
    [
        ("{}", CHAT, {"max_tokens": 50}),
        ('{"max_tokens":null}', CHAT, {"max_tokens": 50}),
        ('{"max_tokens":10}', CHAT, {"max_tokens": 10}),
        ('{"max_tokens":-1}', CHAT, {"max_tokens": 50}),
        ('{"max_tokens":900}', COMPLETIONS, {"max_tokens": 50}),
        ('{"max_completion_tokens":900}', CHAT, {"max_completion_tokens": 50}),
        ('{"max_completion_tokens":10,"max_tokens":900}', CHAT, {"max_completion_tokens": 10, "max_tokens": 50}),
    ],
)
def test_a_limit_of_the_answer_is_only_ever_lowered(body: str, route: str, limit: dict[str, int]) -> None:
    asked = request(body, route=route)
    for kind in SPEAK_OPENAI:
        sent = json.loads(kind("http://h").encode(asked, tokens_max=50).body)
        assert {key: value for key, value in sent.items() if key.startswith("max")} == limit
        assert json.loads(kind("http://h").encode(asked).body).get("max_tokens") == json.loads(body).get("max_tokens")


def test_slots_are_pinned_by_us_alone() -> None:
    llama, other = LlamaCppBackend("http://h"), OpenAIBackend("http://h")
    assert json.loads(body_of(llama, "{}", slot=2))["id_slot"] == 2
    assert json.loads(body_of(llama, '{"id_slot":3}', slot=0))["id_slot"] == 0
    assert "id_slot" not in json.loads(body_of(llama, '{"id_slot":3}'))  # T0: it may be at work
    assert "id_slot" not in json.loads(body_of(other, "{}", slot=2))
    assert json.loads(body_of(other, '{"id_slot":3}'))["id_slot"] == 3  # not ours to understand


def headers_of(backend: Any, *headers: tuple[str, str], **options: Any) -> dict[str, str]:
    call = backend.encode(request("{}", headers=headers), **options)
    names = [name for name, _ in call.headers]
    assert len(names) == len(set(names)) and call.method == "POST"
    assert call.path == (CHAT if type(backend) in SPEAK_OPENAI else "/api/chat")
    return dict(call.headers)


def test_case_6_and_75_what_belongs_to_the_client_stays_with_us() -> None:
    forbidden = ("X-Conversation-Id", "Cookie", "Host", "Origin", "Referer", "Connection", "Transfer-Encoding")
    forbidden += ("Content-Length", "Accept-Encoding", "Expect", "TE", "Upgrade", "Proxy-Authorization", "Keep-Alive")
    for kind in ADAPTERS.values():
        sent = headers_of(kind("http://h"), *((name, "v") for name in forbidden), ("x-request-id", "r"))
        accept = "text/event-stream" if kind in SPEAK_OPENAI else "application/x-ndjson"
        assert sent == {"x-request-id": "r", "content-type": "application/json", "accept": accept}
    assert headers_of(OpenAIBackend("http://h"), stream=False)["accept"] == "application/json"


def test_our_key_replaces_the_client_s() -> None:
    for kind in ADAPTERS.values():
        client = (("authorization", "Bearer client"), ("x-api-key", "client"))
        assert headers_of(kind("http://h"), *client)["authorization"] == "Bearer client"
        sent = headers_of(kind("http://h", api_key="ours"), *client)
        assert sent["authorization"] == "Bearer ours" and "x-api-key" not in sent
        assert dict(kind("http://h", api_key="ours").health().headers) == {"authorization": "Bearer ours"}


def test_base_urls_with_and_without_v1_and_with_a_path() -> None:
    for url, root in (
        ("http://h:1", "http://h:1"),
        ("http://h:1/", "http://h:1"),
        ("http://h:1/v1", "http://h:1"),
        ("http://h:1/v1/", "http://h:1"),
        ("http://h/catalogs/local", "http://h/catalogs/local"),
        ("http://h/catalogs/local/v1", "http://h/catalogs/local"),
        ("http://h/openai-v1", "http://h/openai-v1"),
    ):
        backend = OpenAIBackend(url)
        assert backend.base_url == root and backend.encode(request("{}")).path == CHAT
