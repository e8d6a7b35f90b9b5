"""One contract for every adapter and every golden transcript: the cut of the bytes does not matter."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstream.adapters import ADAPTERS
from kvstream.adapters.base import CapacityQuery, Delta, Done, Failed, HttpCall, HttpReply, Ping, ProxyRequest
from kvstream.adapters.routes import ROUTES
from tests.adapters.transcripts import Transcript, forwarded, load_all, observed, streams

CASES = load_all()
STREAMS = streams()
SSE = [case for case in STREAMS if "json" not in case.meta["headers"]["content-type"]]
# The biggest is fed whole and at random only: byte by byte it takes longer than all the others together.
STREAMED = frozenset(path for path, row in ROUTES.items() if row.streams)
SMALL = [case for case in STREAMS if len(case.response) < 16_000]


def name_of(case: Transcript) -> str:
    return f"{case.backend}-{case.case}"


@pytest.mark.parametrize("case", [c for c in CASES if (c.folder / "expected.json").exists()], ids=name_of)
def test_the_events_are_the_expected_ones(case: Transcript) -> None:
    assert observed(case) == case.expected


def test_every_transcript_says_where_it_comes_from_and_every_stream_has_expectations() -> None:
    for case in CASES:
        assert isinstance(case.meta["recorded"], bool) and case.meta["runtime"]
        assert case.meta["recorded"] or case.meta["note"] == "written from documentation"
        assert not case.is_stream or (case.folder / "expected.json").exists()
    assert len(STREAMS) > 30


@pytest.mark.parametrize("case", SMALL, ids=name_of)
def test_byte_by_byte(case: Transcript) -> None:
    assert case.decode(bytes([byte]) for byte in case.response) == case.decode([case.response])


@pytest.mark.parametrize("case", STREAMS, ids=name_of)
def test_any_split(case: Transcript) -> None:
    whole = case.decode([case.response])

    @settings(max_examples=12, deadline=None)
    @given(st.lists(st.integers(0, len(case.response)), max_size=20))
    def split(cuts: list[int]) -> None:
        edges = [0, *sorted(cuts), len(case.response)]
        assert case.decode(case.response[a:b] for a, b in itertools.pairwise(edges)) == whole

    split()


@pytest.mark.parametrize("case", SSE, ids=name_of)
def test_what_is_forwarded_is_what_came_less_pings_and_hidden_frames(case: Transcript) -> None:
    """Every frame is forwarded byte for byte or not at all, in its place."""
    events = case.decode([case.response])
    position = 0
    for event in events:
        raw = getattr(event, "raw", b"")
        if not raw or (isinstance(event, Done) and event.synthesised):
            continue
        found = case.response.find(raw.removesuffix(b"\n\n"), position)
        assert found >= 0
        position = found + len(raw)
    if not any(isinstance(event, (Ping, Failed)) for event in events) and case.case not in ("chat_n2", "crlf"):
        assert forwarded(events).startswith(case.response)


@pytest.mark.parametrize("case", SSE, ids=name_of)
def test_trailing_junk_changes_nothing_after_the_end(case: Transcript) -> None:
    events = case.decode([case.response])
    last = events[-1]
    ended = isinstance(last, (Done, Failed)) and last.raw and not (isinstance(last, Done) and last.synthesised)
    if ended and case.response.endswith(b"\n\n"):
        assert case.decode([case.response + b'data: {"choices":[]}\n\ngarbage']) == events


@given(st.lists(st.binary(max_size=60), max_size=10))
@settings(max_examples=150, deadline=None)
def test_no_bytes_make_a_decoder_raise_and_it_always_ends(pieces: list[bytes]) -> None:
    for kind in ADAPTERS.values():
        for content_type in ("", "application/json"):
            for route in STREAMED & kind("http://h").capabilities.routes:
                request = ProxyRequest(route, b"{}", {}, stream=True)
                decoder = kind("http://h").decoder(request, content_type=content_type)
                events = [event for piece in pieces for event in decoder.feed(piece)] + decoder.finish()
                assert isinstance(events[-1], (Done, Failed))
                assert sum(isinstance(event, (Done, Failed)) for event in events) == 1
                assert decoder.feed(b"data: [DONE]\n\n") == [] and decoder.finish() == []


KEYS = [
    "choices",
    "delta",
    "message",
    "text",
    "index",
    "usage",
    "prompt_tokens",
    "timings",
    "prompt_n",
    "cache_n",
    "error",
    "content",
    "tool_calls",
    "finish_reason",
    "logprobs",
    "function",
    "prompt_progress",
    "total",
    "type",
    "output",
    "content_block",
    "response",
    "item",
    "stop",
    "tokens",
]
TYPES = ["message_start", "message_delta", "message_stop", "content_block_start", "content_block_delta", "message",
         "response.created", "response.output_item.added", "response.output_text.delta", "response.completed",
         "response.failed", "error", "ping", "text", "tool_use", "function_call"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=4) | st.sampled_from(TYPES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(JSON, max_size=4))
@settings(max_examples=150, deadline=None)
def test_no_json_makes_decoder_or_assembler_raise(objects: list[Any]) -> None:
    body = b"".join(b"data: " + json.dumps(value).encode() + b"\n\n" for value in objects)
    for kind in ADAPTERS.values():
        for content_type, text in (("", body), ("application/json", json.dumps(objects[0] if objects else 0).encode())):
            backend = kind("http://h")
            for route in STREAMED & backend.capabilities.routes:
                request = ProxyRequest(route, b"{}", {}, stream=True)
                decoder, assembler = backend.decoder(request, content_type=content_type), backend.assembler(request)
                for event in decoder.feed(text) + decoder.finish():
                    assembler.feed(event)
                json.dumps(assembler.result())


@given(st.integers(100, 600), JSON, st.binary(max_size=40))
@settings(max_examples=120, deadline=None)
def test_no_reply_makes_an_adapter_raise(status: int, data: Any, junk: bytes) -> None:
    for body in (json.dumps(data).encode(), junk):
        reply = HttpReply(status, {}, body)
        for kind in ADAPTERS.values():
            backend = kind("http://h", model="m")
            failed = backend.error(reply)
            assert 400 <= failed.status <= 599 and failed.message and failed.kind
            assert backend.read_health(reply) in ("up", "loading", "sleeping", "down")
            backend.read_busy(reply)
            backend.read_count(ProxyRequest("/v1/chat/completions", b"{}", {}), reply)
            replies: dict[str, HttpReply | None] = {}
            for _ in range(5):
                calls = backend.capacity_calls(replies)
                replies |= {name: reply for name, _call in calls}
            assert not backend.capacity_calls(replies)
            limits = backend.read_capacity(replies, CapacityQuery(page_tokens=16)).limits
            assert limits.seats > 0 and limits.pages > 0


@pytest.mark.parametrize("kind", ADAPTERS.values(), ids=ADAPTERS)
def test_every_adapter_is_a_value(kind: Any) -> None:
    backend = kind("http://h:1/v1/", api_key="secret-key")
    assert backend == kind("http://h:1", api_key="secret-key") and hash(backend)
    assert (
        backend.base_url == "http://h:1" and kind("http://h:1/catalogs/local").base_url == "http://h:1/catalogs/local"
    )
    assert "secret-key" not in repr(backend)
    assert ADAPTERS[backend.kind] is kind
    assert {"/v1/chat/completions", "/v1/completions"} <= backend.capabilities.routes
    assert isinstance(backend.health(), HttpCall) and backend.health().method == "GET"
    listed = "/api/tags" if kind.kind == "ollama" else "/v1/models"
    assert backend.models() == HttpCall("GET", listed, (("authorization", "Bearer secret-key"),))


def test_deltas_keep_the_parsed_object_for_the_assembler() -> None:
    for case in streams("llamacpp"):
        for event in case.decode([case.response]):
            assert not isinstance(event, Delta) or isinstance(event.data, dict)
