"""Repairs that are asked for: tool calls (case 19) and the name of the reasoning text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstream.adapters import OpenAIBackend
from kvstream.adapters.base import Delta, Finished, UpstreamEvent
from kvstream.adapters.compat import Compat
from tests.adapters.transcripts import forwarded, request_of, streams

CHAT = "/v1/chat/completions"
TOOLS = Compat(tool_calls=True)


def chunk(delta: dict[str, Any], reason: str | None = None, index: int = 0) -> dict[str, Any]:
    return {"id": "c", "object": "chat.completion.chunk",
            "choices": [{"index": index, "delta": delta, "finish_reason": reason}]}


def call(arguments: str, name: str | None = None, **fields: Any) -> dict[str, Any]:
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {**fields, "function": function}


def play(compat: Compat, *chunks: dict[str, Any], stream: bool = True) -> list[UpstreamEvent]:
    body = b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in chunks) + b"data: [DONE]\n\n"
    return rewritten(compat, body, stream=stream)


def rewritten(compat: Compat, body: bytes, content_type: str = "", stream: bool = True) -> list[UpstreamEvent]:
    decoder = OpenAIBackend("http://h").decoder(request_of({"route": CHAT, "body": {"stream": stream}}),
                                                content_type=content_type)
    rewriter = compat.rewriter(CHAT)
    assert rewriter is not None
    return rewriter.feed(decoder.feed(body)) + rewriter.feed(decoder.finish())


def calls_of(events: list[UpstreamEvent]) -> list[dict[str, Any]]:
    """The pieces as a client gets them: read again from the bytes."""
    found = []
    for line in forwarded(events).decode().splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                found += choice["delta"].get("tool_calls") or []
    return found


def test_nothing_is_asked_for_by_default_and_nothing_but_chat_is_changed() -> None:
    assert Compat().rewriter(CHAT) is None
    assert TOOLS.rewriter("/v1/messages") is None and TOOLS.rewriter("/v1/completions") is None
    assert TOOLS.rewriter("/chat/completions") is not None


def test_case_19_two_calls_without_index_and_id() -> None:
    events = play(
        TOOLS, chunk({"role": "assistant"}), chunk({"tool_calls": [call('{"a":', "f")]}),
        chunk({"tool_calls": [call("1}")]}), chunk({"tool_calls": [call("{}", "g")]}), chunk({}, "stop"))
    pieces = calls_of(events)
    assert [piece["index"] for piece in pieces] == [0, 0, 1]
    ids = [piece.get("id") for piece in pieces]
    assert ids[0] and ids[2] and ids[0] != ids[2] and ids[1] is None
    assert pieces[0]["type"] == "function" and pieces[1]["function"] == {"arguments": "1}"}
    assert [event.reason for event in events if isinstance(event, Finished)] == ["tool_calls"]
    assert b'"finish_reason":"tool_calls"' in forwarded(events)
    assert events == play(  # the ids are those of the calls, not of the moment
        TOOLS, chunk({"role": "assistant"}), chunk({"tool_calls": [call('{"a":', "f")]}),
        chunk({"tool_calls": [call("1}")]}), chunk({"tool_calls": [call("{}", "g")]}), chunk({}, "stop"))


def test_case_19_two_calls_without_index_and_id_in_one_chunk_each_whole() -> None:
    events = play(TOOLS, chunk({"tool_calls": [call("{}", "f"), call("{}", "f")]}), chunk({}, "stop"))
    pieces = calls_of(events)
    assert [piece["index"] for piece in pieces] == [0, 1] and pieces[0]["id"] != pieces[1]["id"]


def test_case_19_indexes_that_start_at_one_and_ids_that_are_repeated() -> None:
    events = play(
        TOOLS, chunk({"tool_calls": [call("{", "f", index=1, id="a", type="function")]}),
        chunk({"tool_calls": [call("}", index=1, id="a", type="function")]}),
        chunk({"tool_calls": [call("{}", "g", index=2, id="b", type="function")]}), chunk({}, "tool_calls"))
    pieces = calls_of(events)
    assert [(piece["index"], piece.get("id")) for piece in pieces] == [(0, "a"), (0, None), (1, "b")]


def test_case_19_one_index_for_all_calls() -> None:
    events = play(TOOLS, chunk({"tool_calls": [call("{}", "f", index=0, id="a", type="function")]}),
                  chunk({"tool_calls": [call("{}", "g", index=0, id="b", type="function")]}),
                  chunk({"tool_calls": [call(" ", index=0)]}), chunk({}, "stop"))
    assert [(piece["index"], piece.get("id")) for piece in calls_of(events)] == [(0, "a"), (1, "b"), (1, None)]


def test_case_19_the_reason_is_left_where_nothing_was_called_and_where_the_limit_came() -> None:
    for delta, reason in (({"content": "x"}, "stop"), ({"tool_calls": [call("{", "f")]}, "length")):
        events = play(TOOLS, chunk(delta), chunk({}, reason))
        assert [event.reason for event in events if isinstance(event, Finished)] == [reason]


def test_case_19_choices_have_calls_of_their_own() -> None:
    events = play(TOOLS, chunk({"tool_calls": [call("{}", "f")]}), chunk({"tool_calls": [call("{}", "f")]}, index=1),
                  chunk({}, "stop"), chunk({}, "stop", index=1))
    assert [piece["index"] for piece in calls_of(events)] == [0, 0]
    assert [event.reason for event in events if isinstance(event, Finished)] == ["tool_calls"] * 2


CONFORMING = [case for case in streams() if case.request is not None and case.request.route == CHAT
              and "json" not in case.meta["headers"]["content-type"]]


@pytest.mark.parametrize("case", CONFORMING, ids=lambda case: f"{case.backend}-{case.case}")
def test_case_19_conforming_streams_are_not_touched(case: Any) -> None:
    plain = case.decode([case.response])
    rewriter = TOOLS.rewriter(CHAT)
    assert rewriter is not None
    assert forwarded(rewriter.feed(plain)) == forwarded(plain)


def test_case_19_a_whole_answer_for_both_kinds_of_client() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call("{}", "f"), call("{}", "g", id="b")]}
    answer = {"id": "c", "object": "chat.completion", "choices": [
        {"index": 0, "message": message, "finish_reason": "stop"}]}
    body = json.dumps(answer).encode()
    whole = rewritten(TOOLS, body, "application/json", stream=False)
    assert isinstance(whole[0], Delta) and whole[0].raw == b""
    choice = whole[0].data["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["tool_calls"][1]["id"] == "b"
    assert choice["message"]["tool_calls"][0]["id"].startswith("call_")
    assert "index" not in choice["message"]["tool_calls"][0]
    pieces = calls_of(rewritten(TOOLS, body, "application/json"))
    assert [piece["index"] for piece in pieces] == [0, 1]
    assert pieces[0]["id"] == choice["message"]["tool_calls"][0]["id"]


@pytest.mark.parametrize(("target", "other"), [("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")])
def test_the_reasoning_text_gets_the_name_that_is_asked_for(target: str, other: str) -> None:
    events = play(Compat(reasoning=target), chunk({"role": "assistant", other: "hm"}), chunk({target: "m"}),
                  chunk({"content": "x"}), chunk({}, "stop"))
    deltas = [event.data["choices"][0]["delta"] for event in events if isinstance(event, Delta)]
    assert deltas == [{"role": "assistant", target: "hm"}, {target: "m"}, {"content": "x"}, {}]
    assert b'"%b":"hm"' % target.encode() in forwarded(events) and b'"%b"' % other.encode() not in forwarded(events)
    both = {target: "a", other: "b"}
    [event] = [e for e in play(Compat(reasoning=target), chunk(both)) if isinstance(e, Delta)]
    assert event.data["choices"][0]["delta"] == both  # nothing is overwritten


def test_nonsense_is_left_alone() -> None:
    for choices in (None, 3, [3, None], [{"delta": 3}], [{"delta": {"tool_calls": 3}}],
                    [{"delta": {"tool_calls": [3, {"index": "x", "function": 3, "id": 4}]}}]):
        assert TOOLS.rewriter(CHAT).feed([Delta(b"x", {"choices": choices})])  # type: ignore[union-attr]
