"""Ollama: what is translated on the way there and back, and what travels as it is."""

from __future__ import annotations

import base64
import itertools
import json
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstream.adapters import OllamaBackend
from kvstream.adapters.base import CapacityQuery, Delta, Done, Failed, Finished, HttpReply, Ping, ProxyRequest, Usage
from kvstream.adapters.base import UsageNumbers as Numbers
from kvstream.adapters.ndjson import NdjsonSplitter
from kvstream.adapters.ollama_request import translated
from kvstream.adapters.ollama_stream import seconds_of

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
OLLAMA = OllamaBackend("http://h")
HELLO = [{"role": "user", "content": "hi"}]


def request(route: str, view: dict[str, Any], *, stream: bool = True, usage: bool = False) -> ProxyRequest:
    body = json.dumps(view, ensure_ascii=False).encode()
    return ProxyRequest(route, body, view, view.get("model", ""), stream, usage)


def sent(route: str, view: dict[str, Any], **more: Any) -> dict[str, Any]:
    return dict(json.loads(OLLAMA.encode(request(route, view), **more).body))


def lines(*values: Any) -> bytes:
    return b"".join(json.dumps(value, ensure_ascii=False).encode() + b"\n" for value in values)


def say(content: str = "", *, done: bool = False, **more: Any) -> dict[str, Any]:
    rest = {"done_reason": "stop", "prompt_eval_count": 5, "eval_count": 2} if done else {}
    message = {"role": "assistant", "content": content, **more.pop("message", {})}
    head = {"model": "m:latest", "created_at": "2026-11-29T18:00:00.25Z"}
    return {**head, "message": message, "done": done, **rest, **more}


def decode(route: str, body: bytes, view: dict[str, Any] | None = None) -> list[Any]:
    decoder = OLLAMA.decoder(request(route, view or {"model": "m", "messages": HELLO}))
    return decoder.feed(body) + decoder.finish()


def whole(route: str, events: list[Any], view: dict[str, Any] | None = None) -> dict[str, Any]:
    assembler = OLLAMA.assembler(request(route, view or {}))
    for event in events:
        assembler.feed(event)
    return assembler.result()


# --- requests ---------------------------------------------------------------------------------------------------------


def test_a_chat_is_translated_and_nothing_is_added() -> None:
    view = {
        "model": "m", "messages": HELLO, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 7,
        "temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": "END", "frequency_penalty": 0.1, "presence_penalty": 0.2,
        "user": "u", "store": False, "metadata": {"a": "b"}, "n": 1, "logprobs": False, "tool_choice": "auto",
    }  # fmt: skip
    assert sent(CHAT, view) == {
        "model": "m", "messages": HELLO, "stream": True,
        "options": {"temperature": 0.5, "top_p": 0.9, "seed": 3, "frequency_penalty": 0.1, "presence_penalty": 0.2,
                    "num_predict": 7, "stop": ["END"]},
    }  # fmt: skip
    assert OLLAMA.encode(request(CHAT, view)).path == "/api/chat"
    assert sent(CHAT, {"model": "m", "messages": HELLO}) == {"model": "m", "messages": HELLO, "stream": True}
    assert sent(CHAT, {"model": "m", "messages": HELLO}, stream=False)["stream"] is False
    assert sent(CHAT, {"messages": HELLO, "max_tokens": 9, "max_completion_tokens": 4})["options"] == {"num_predict": 4}


def test_parts_become_one_text_and_images_a_list() -> None:
    parts = [
        {"type": "text", "text": "what"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}},
        {"type": "text", "text": "is it"},
    ]
    made = sent(CHAT, {"messages": [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]})
    assert made["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "what\nis it", "images": ["QUJD"]},
    ]


def test_tools_calls_and_their_results() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
    made = sent(CHAT, {"messages": messages, "tools": tools})
    assert made["tools"] == tools and made["messages"][1:] == [
        {"role": "assistant", "content": "", "thinking": "hm",
         "tool_calls": [{"id": "c1", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}]},
        {"role": "tool", "content": "rain", "tool_name": "get_weather", "tool_call_id": "c1"},
    ]  # fmt: skip
    assert "tools" not in sent(CHAT, {"messages": HELLO, "tools": tools, "tool_choice": "none"})


def test_formats_and_thinking() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert sent(CHAT, {"messages": HELLO, "response_format": form})["format"] == schema
    assert sent(CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}})["format"] == "json"
    assert "format" not in sent(CHAT, {"messages": HELLO, "response_format": {"type": "text"}})
    assert sent(CHAT, {"messages": HELLO, "reasoning_effort": "none"})["think"] is False
    assert sent(CHAT, {"messages": HELLO, "reasoning_effort": "high"})["think"] == "high"


def test_completions_and_embeddings() -> None:
    call = OLLAMA.encode(request(COMPLETIONS, {"model": "m", "prompt": ["once"], "suffix": "end", "max_tokens": 3}))
    assert call.path == "/api/generate"
    assert json.loads(call.body) == {
        "model": "m", "prompt": "once", "suffix": "end", "options": {"num_predict": 3}, "stream": True,
    }  # fmt: skip
    call = OLLAMA.encode(request(EMBEDDINGS, {"model": "e", "input": ["a", "b"], "dimensions": 4, "user": "u"}))
    assert call.path == "/api/embed"
    assert json.loads(call.body) == {"model": "e", "input": ["a", "b"], "dimensions": 4}


@pytest.mark.parametrize(
    ("route", "view", "word"),
    [
        (CHAT, {"messages": HELLO, "n": 2}, "'n'"),
        (CHAT, {"messages": HELLO, "logprobs": True}, "log probabilities"),
        (CHAT, {"messages": HELLO, "logit_bias": {"5": 1}}, "logit bias"),
        (CHAT, {"messages": HELLO, "functions": [{}]}, "tools"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "grammar"}}, "response_format"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}, "schema"),
        (CHAT, {"messages": HELLO, "reasoning_effort": ["x"]}, "reasoning_effort"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
        (CHAT, {"messages": [{"content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]}]}, "data: URL"),
        (CHAT, {"messages": [{"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "arguments"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "one prompt"),
        (COMPLETIONS, {"prompt": [1, 2]}, "one prompt"),
        (COMPLETIONS, {"prompt": "a", "echo": True}, "echo"),
        (COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of"),
        (EMBEDDINGS, {"input": [1, 2]}, "token ids"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ],
)
def test_what_ollama_cannot_do_is_a_clear_400(route: str, view: dict[str, Any], word: str) -> None:
    failed = OLLAMA.refusal(request(route, view))
    assert failed is not None and failed.status == 400 and failed.kind == "invalid_request" and word in failed.message


WORDS = (  # as one text: quoted one by one they are hard to read
    "messages role content tool_calls function arguments type image_url url n stop response_format json_schema schema "
    "reasoning_effort prompt input tools logprobs options tool_call_id id name message response done thinking error "
    "embeddings"
)
KEYS = WORDS.split()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["text", "tool", "json_schema", "{}", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=14,
)


@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=6))
@settings(max_examples=300, deadline=None)
def test_no_request_is_anything_but_translated_or_refused(view: dict[str, Any]) -> None:
    for route in (CHAT, COMPLETIONS, EMBEDDINGS, "/api/chat", "/api/generate", "/api/embed"):
        asked = request(route, view)
        if OLLAMA.refusal(asked) is None:
            json.loads(OLLAMA.encode(asked, tokens_max=5).body)
        assert isinstance(OLLAMA.load_key(asked) + OLLAMA.load_options(asked), str)


@given(st.lists(JSON, max_size=4))
@settings(max_examples=200, deadline=None)
def test_no_lines_make_a_decoder_raise(values: list[Any]) -> None:
    for route in (CHAT, COMPLETIONS, EMBEDDINGS, "/api/chat", "/api/generate", "/api/embed"):
        events = decode(route, lines(*values), {})
        assert isinstance(events[-1], (Done, Failed))
        assert sum(isinstance(event, (Done, Failed)) for event in events) == 1
        json.dumps(whole(route, events))


@pytest.mark.parametrize("route", ["/api/chat", "/api/generate", "/api/embed", "/api/embeddings"])
def test_a_native_body_keeps_its_bytes(route: str) -> None:
    body = b' {"model":"m" ,"options":{"num_ctx":4.096e3,"num_ctx":2},"keep_alive":"5m","messages":[],"truncate":true}'
    view = json.loads(body)
    call = OLLAMA.encode(ProxyRequest(route, body, view, "m", True))
    assert (call.path, call.body) == (route, body)
    with_model = OllamaBackend("http://h", model="x").encode(ProxyRequest(route, b'{"input": "a"}', {"input": "a"}))
    assert with_model.body == b'{"model":"x","input": "a"}'


def test_a_native_client_without_a_stream_still_streams_from_ollama() -> None:
    assert sent("/api/chat", {"model": "m", "stream": False})["stream"] is True
    assert sent("/api/chat", {"model": "m", "stream": False}, stream=False)["stream"] is False
    assert sent("/api/chat", {"model": "m"}, stream=False)["stream"] is False
    assert sent("/api/chat", {"model": "m", "stream": None}) == {"model": "m", "stream": None}
    assert sent("/api/embed", {"model": "m", "input": "a"}, stream=True) == {"model": "m", "input": "a"}


def test_an_answer_s_limit_is_only_ever_lowered() -> None:
    for given_, out in ((None, 50), (10, 10), (900, 50), (-1, 50), (0, 0)):
        view = {"model": "m", "options": {"num_ctx": 8, **({} if given_ is None else {"num_predict": given_})}}
        assert sent("/api/chat", view, tokens_max=50)["options"] == {"num_ctx": 8, "num_predict": out}
    assert sent(CHAT, {"messages": HELLO, "max_tokens": 900}, tokens_max=50)["options"] == {"num_predict": 50}


# --- answers ----------------------------------------------------------------------------------------------------------


def objects(events: list[Any]) -> list[Any]:
    return [json.loads(event.raw[6:]) for event in events if getattr(event, "raw", b"").startswith(b"data: {")]


def test_lines_become_chunks() -> None:
    view = {"model": "m", "messages": HELLO}
    events = decode(CHAT, lines(say("a"), say("b"), say(done=True)), view)
    chunks = objects(events)
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}, {},
    ]  # fmt: skip
    assert chunks[3]["choices"][0]["finish_reason"] == "stop" and chunks[4]["choices"] == []
    assert len({chunk["id"] for chunk in chunks}) == 1 and chunks[0]["id"].startswith("chatcmpl-")
    assert {chunk["created"] for chunk in chunks} == {1795975200}
    assert events[-1] == Done(b"data: [DONE]\n\n") and Finished("stop") in events
    usage = next(event for event in events if isinstance(event, Usage))
    assert usage.numbers == Numbers(5, 2) and usage.standalone
    answer = whole(CHAT, events, view)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "ab"}
    assert answer["object"] == "chat.completion" and answer["usage"]["total_tokens"] == 7


def test_thinking_and_tool_calls_get_openai_s_shape() -> None:
    one = {"function": {"name": "f", "arguments": {"a": 1}}}
    two = {"id": "given", "function": {"name": "g", "arguments": {}}}
    said = [{"thinking": "hm"}, {"tool_calls": [one]}, {"tool_calls": [two]}]
    events = decode(CHAT, lines(*(say(message=message) for message in said), say(done=True)))
    message = whole(CHAT, events)["choices"][0]
    calls = message["message"]["tool_calls"]
    assert message["finish_reason"] == "tool_calls" and message["message"]["reasoning"] == "hm"
    assert calls[0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert calls[1]["function"] == {"name": "g", "arguments": "{}"}
    assert calls[0]["id"].startswith("call_") and calls[1]["id"] == "given"
    assert [d["choices"][0]["delta"]["tool_calls"][0]["index"] for d in objects(events)[2:4]] == [0, 1]


@pytest.mark.parametrize(
    ("reason", "shown"), [("stop", "stop"), ("length", "length"), ("load", "stop"), (None, "stop")]
)
def test_every_reason_to_stop_is_one_that_openai_knows(reason: str | None, shown: str) -> None:
    last = {"response": "", "done": True, "done_reason": reason}
    events = decode(COMPLETIONS, lines({"response": "x", "done": False}, last))
    assert Finished(shown) in events and whole(COMPLETIONS, events)["choices"][0]["finish_reason"] == shown


def test_case_22_an_error_in_mid_stream_is_seen_whatever_the_client_speaks() -> None:
    error = {"error": "an error was encountered while running the model: CUDA error"}
    for route in (CHAT, COMPLETIONS, "/api/chat", "/api/generate"):
        for status in ({}, {"done": False}):
            events = decode(route, lines(say("a"), say("b"), say("c"), {**error, **status}))
            failed = events[-1]
            assert isinstance(failed, Failed) and failed.kind == "upstream_error" and "CUDA" in failed.message
            # a native client gets Ollama's own line, any other the gateway's frame in its own dialect
            assert failed.raw == (lines({**error, **status}) if route.startswith("/api") else b"")


def test_case_22_an_end_without_the_last_line_is_a_truncation() -> None:
    """Also what Ollama does when a model repeats one token for ever: it just stops."""
    for route in (CHAT, COMPLETIONS, "/api/chat", "/api/generate"):
        events = decode(route, lines(*[say("a")] * 31))
        assert isinstance(events[-1], Failed) and events[-1].kind == "upstream_stream_truncated"
        assert not any(isinstance(event, (Done, Finished)) for event in events)
    assert isinstance(decode("/api/embed", b'{"embeddings":[[0.1')[-1], Failed)


def test_native_lines_travel_as_they_came() -> None:
    body = lines(say("é"), say("b", message={"thinking": "t"}), say(done=True))
    events = decode("/api/chat", body)
    assert b"".join(getattr(event, "raw", b"") for event in events) == body
    assert [event.text for event in events if isinstance(event, Delta)] == ["é", "b", ""]
    assert events[-3:] == [Finished("stop"), Usage(b"", Numbers(5, 2)), Done(b"")]
    answer = whole("/api/chat", events)
    assert answer == say("éb", done=True, message={"thinking": "t"})
    assert decode("/api/chat", body + b"junk\n") == events
    assert decode("/api/chat", body.removesuffix(b"\n")) == events  # the last line may lack its end
    assert isinstance(decode("/api/chat", b"\n" + body)[0], Ping)


def test_loading_a_model_is_a_proper_answer() -> None:
    message = {"role": "assistant", "content": ""}
    line = {"model": "m", "created_at": "x", "message": message, "done": True, "done_reason": "load"}
    events = decode("/api/chat", lines(line))
    assert [type(event) for event in events] == [Delta, Finished, Done] and events[1].reason == "load"
    assert whole("/api/chat", events) == line


def test_embeddings_come_back_as_openai_s() -> None:
    body = json.dumps({"model": "e:latest", "embeddings": [[0.5, -1.0], [2.0, 0.25]], "prompt_eval_count": 6}).encode()
    events = decode(EMBEDDINGS, body, {"model": "e", "input": ["a", "b"], "encoding_format": "base64"})
    answer = json.loads(events[0].raw)
    vectors = [struct.unpack("<2f", base64.b64decode(row["embedding"])) for row in answer["data"]]
    assert vectors == [(0.5, -1.0), (2.0, 0.25)] and [row["index"] for row in answer["data"]] == [0, 1]
    assert answer["usage"] == {"prompt_tokens": 6, "total_tokens": 6} and answer["model"] == "e:latest"
    assert json.loads(decode(EMBEDDINGS, body, {"input": "a"})[0].raw)["data"][0]["embedding"] == [0.5, -1.0]
    assert decode("/api/embed", body)[0].raw == body


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-01T00:00:00Z", 0), ("2000-02-29T12:00:00.5Z", 951825600), ("2024-12-31T23:59:59Z", 1735689599),
        ("2026-11-29T20:00:00.123+02:00", 1795975200), ("2026-11-29T13:30:00-04:30", 1795975200), ("soon", 0), (5, 0),
    ],
)  # fmt: skip
def test_times(text: Any, seconds: int) -> None:
    assert seconds_of(text) == seconds


@given(st.binary(max_size=200).map(lambda b: b.replace(b"x", b"\n")), st.lists(st.integers(0, 200), max_size=8))
def test_lines_do_not_depend_on_the_cut(body: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    splitter = NdjsonSplitter(100)
    got = [line for a, b in itertools.pairwise(edges) for line in splitter.feed(body[a:b])]
    rest = splitter.finish() or b""
    once = NdjsonSplitter(100)
    assert (got, rest, splitter.error) == (once.feed(body), once.finish() or b"", once.error)
    assert splitter.error or b"".join(got) + rest == body


def test_a_line_without_end_is_bounded() -> None:
    backend = OllamaBackend("http://h", event_bytes_max=1000)
    for route in (CHAT, "/api/chat", "/api/embed"):
        decoder = backend.decoder(request(route, {}))
        events = [event for _ in range(20) for event in decoder.feed(b"x" * 100)]
        assert [event.kind for event in events if isinstance(event, Failed)] == ["backend_protocol"]
        assert decoder.finish() == []


# --- complaints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "kind", "out"),
    [
        (503, {"error": "server busy, please try again.  maximum pending requests exceeded"}, "overloaded", 503),
        (503, {"error": {"message": "server busy, please try again.  maximum pending requests exceeded",
                         "type": "api_error", "param": None, "code": None}}, "overloaded", 503),
        (404, {"error": "model 'x' not found"}, "model_not_found", 404),
        (404, {"error": 'model "x" not found, try pulling it first'}, "model_not_found", 404),
        (499, {"error": "request canceled"}, "upstream_error", 502),
        (400, {"error": "model is required"}, "upstream_rejected", 400),
        (400, {"error": "the input length exceeds the context length"}, "context_length_exceeded", 400),
        (400, {"error": "registry.ollama.ai/library/x:latest does not support tools"}, "upstream_rejected", 400),
        (500, {"error": "llama runner process has terminated: exit status 2"}, "upstream_error", 500),
        (500, {"error": "model requires more system memory (9.0 GiB) than is available"}, "upstream_error", 500),
    ],
)  # fmt: skip
def test_complaints(status: int, body: Any, kind: str, out: int) -> None:
    failed = OLLAMA.error(HttpReply(status, {}, json.dumps(body).encode()))
    assert (failed.kind, failed.status) == (kind, out)


def test_busy_in_a_stream_is_overload_too() -> None:
    events = decode("/api/chat", lines({"error": "server busy, please try again.  maximum pending requests exceeded"}))
    assert events[0].kind == "overloaded" and events[0].status == 503


# --- load keys --------------------------------------------------------------------------------------------------------


def key(view: dict[str, Any], route: str = "/api/chat", grouped: bool = True) -> str:
    return OllamaBackend("http://h", model="dflt", group_by_load_key=grouped).load_key(request(route, view))


def test_case_35_a_load_key_names_what_a_change_of_would_reload() -> None:
    assert key({"model": "x"}) == key({"model": "x:latest"}) == "x:latest"
    assert key({"model": "reg:5000/ns/x"}) == "reg:5000/ns/x:latest" and key({}) == "dflt:latest"
    assert key({"model": "x", "options": {"num_ctx": 4096, "temperature": 1}}) == "x:latest num_ctx=4096"
    assert key({"model": "x", "options": {"num_gpu": 1, "num_ctx": 8}}) == key(
        {"model": "x", "options": {"num_ctx": 8, "seed": 2, "num_gpu": 1}})
    assert key({"model": "x", "shift": False}) == "x:latest shift=false"
    assert key({"model": "x", "shift": True, "options": {"num_ctx": None}}) == "x:latest"
    for option in ("num_ctx", "num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread", "draft_num_predict"):
        assert key({"model": "x", "options": {option: 1}}) != key({"model": "x"})
    # a request of /v1 cannot say any, also not by accident
    assert key({"model": "x", "options": {"num_ctx": 8}}, CHAT) == "x:latest"
    assert key({"model": "x", "options": {"num_ctx": 8}}, grouped=False) == "x:latest"


def test_case_35_no_option_is_added_or_changed_on_the_way() -> None:
    for options in ({"num_ctx": 4096}, {"num_ctx": 8192, "num_batch": 256}, {}):
        view = {"model": "m", "messages": HELLO, "options": options, "keep_alive": -1}
        assert OLLAMA.encode(request("/api/chat", view)).body == json.dumps(view).encode()
    made = translated(CHAT, {"model": "m", "messages": HELLO, "options": {"num_ctx": 5}, "truncate": False}, "")
    assert made == {"model": "m", "messages": HELLO}


# --- state ------------------------------------------------------------------------------------------------------------

GEMMA = {"general.architecture": "gemma3n", "gemma3n.block_count": 3, "gemma3n.attention.head_count": 8,
         "gemma3n.attention.key_length": 256, "gemma3n.attention.value_length": 256, "gemma3n.context_length": 32768,
         "gemma3n.attention.head_count_kv": [], "gemma3n.attention.sliding_window": 512}  # fmt: skip
LLAMA = {"general.architecture": "llama", "llama.block_count": 30, "llama.attention.head_count": 9,
         "llama.attention.head_count_kv": 3, "llama.embedding_length": 576, "llama.context_length": 8192}  # fmt: skip


def reply(value: Any, status: int = 200) -> HttpReply:
    return HttpReply(status, {"content-type": "application/json"}, json.dumps(value).encode())


def learn(*loaded: dict[str, Any], shows: dict[str, Any] | None = None, query: CapacityQuery | None = None) -> Any:
    """(report, the calls made) against an Ollama that has these models in memory."""
    replies: dict[str, HttpReply | None] = {}
    made = []
    while calls := [(name, call) for name, call in OLLAMA.capacity_calls(replies) if name not in replies]:
        for name, call in calls:
            made.append((call.path, call.body))
            if call.path == "/api/ps":
                replies[name] = reply({"models": list(loaded)})
            elif call.path == "/api/version":
                replies[name] = reply({"version": "0.33.0"})
            else:
                asked = json.loads(call.body)
                info = (shows or {}).get(asked["model"], {})
                if asked.get("verbose"):
                    info = {**info, "gemma3n.attention.head_count_kv": [2, 2, 1]}
                replies[name] = reply({"model_info": info})
    return OLLAMA.read_capacity(replies, query or CapacityQuery(page_tokens=16)), made


def test_nothing_loaded_is_not_settled_and_asks_no_more() -> None:
    report, made = learn()
    assert not report.settled and report.process == "" and report.instance == "ollama 0.33.0"
    assert report.limits.seats == 1 and report.limits.pages == 256 and report.limits.context_varies
    assert [path for path, _ in made] == ["/api/ps", "/api/version"]
    assert any("OLLAMA_NUM_PARALLEL" in note for note in report.notes)


def test_what_is_loaded_tells_the_context_and_its_geometry_is_a_note() -> None:
    row = {"name": "smollm:latest", "model": "smollm:latest", "context_length": 8192, "digest": "d" * 64}
    report, made = learn(row, shows={"smollm:latest": LLAMA}, query=CapacityQuery(page_tokens=16, seats=2))
    assert report.settled and report.limits.request_tokens_max == 8192 and report.limits.pages == 1024
    # 30 layers, 3 KV heads of 64, keys and values, 2 bytes: 23,040, as measured on the real model
    assert any("30 layers, 23040 bytes of KV per token" in note and "2 x 8192" in note for note in report.notes)
    assert len(made) == 3 and report.process == f"smollm:latest@8192@{'d' * 12}"
    assert OLLAMA.read_process(reply({"models": [row]})) == report.process
    assert OLLAMA.read_process(reply({"models": []})) == ""


def test_figures_per_layer_are_asked_for_verbosely_once() -> None:
    report, made = learn({"name": "g", "context_length": 4096}, shows={"g": GEMMA})
    assert [json.loads(body) for path, body in made if path == "/api/show"] == [
        {"model": "g"}, {"model": "g", "verbose": True}]
    # (2 + 2 + 1) heads of 256 + 256 in two bytes; a window makes it an upper bound
    assert any("3 layers, at most 5120 bytes" in note for note in report.notes)


def test_an_operator_s_context_is_a_limit_and_no_longer_a_guess() -> None:
    report, _ = learn({"name": "g", "context_length": 4096}, query=CapacityQuery(page_tokens=16, context_tokens=2048))
    assert report.limits.request_tokens_max == 2048 and not report.limits.context_varies


def test_health_and_models() -> None:
    assert OLLAMA.health().path == "/api/version" and OLLAMA.read_health(reply({"version": "0.33.0"})) == "up"
    assert OLLAMA.read_health(reply({"error": "Unexpected endpoint or method. (GET /api/version)"})) == "down"
    tags = {"models": [{"name": "x:latest", "details": {"family": "llama"}}, {"name": "y:7b"}, {"size": 1}]}
    listing = OLLAMA.read_models(reply(tags))
    assert listing is not None and [row["id"] for row in listing["data"]] == ["x:latest", "y:7b"]
    assert listing["data"][0]["aliases"] == ["x"] and "aliases" not in listing["data"][1]
    assert OLLAMA.read_models(reply({"error": "x"}, 500)) is None and OLLAMA.read_models(reply([])) is None
