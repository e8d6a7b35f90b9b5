"""Repairs on request through the whole gateway: keepalives (case 12) and tool calls (case 19), read by the client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletionChunk

from tests.fakes.script import Script
from tests.gateway.conftest import COMPLETIONS, chat, data_of, open_lane, text_of


async def test_case_12_an_empty_delta_is_a_chunk_of_the_same_answer_and_changes_nothing(autojump_clock: object) -> None:
    asked = chat(max_tokens=3, stream_options={"include_usage": True})
    answers = {}
    for mode in ("comment", "empty-delta", "off"):
        async with open_lane(server={"keepalive_s": 4.0}, compat={"keepalive_mode": mode}) as lane:
            lane.runtime.script(Script(itl=10, first_byte_after=10))
            answers[mode] = (await lane.post(asked)).body
    assert b": ping" in answers["comment"] and b": ping" not in answers["off"]
    values = [value for value in data_of(answers["empty-delta"]) if isinstance(value, dict)]
    chunks = [ChatCompletionChunk.model_validate(value) for value in values]
    empty = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason is None
             and not chunk.choices[0].delta.model_dump(exclude_none=True)]
    assert len(empty) >= 4 and len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in empty)
    texts = {mode: text_of(body) for mode, body in answers.items()}
    assert len(set(texts.values())) == 1 and texts["off"]
    usages = {mode: [v["usage"] for v in data_of(body) if isinstance(v, dict) and v.get("usage")]
              for mode, body in answers.items()}
    assert usages["comment"] == usages["empty-delta"] == usages["off"] and len(usages["off"]) == 1


@pytest.mark.parametrize(("path", "body", "sent"), [
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}, b'event: ping\ndata: {"type": "ping"}\n\n'),
    ("/v1/responses", {"input": "x"}, b": ping\n\n"),
    ("/completion", {"prompt": "x"}, b'"content": ""'),
    (COMPLETIONS, {"prompt": "x"}, b'"text": ""'),
])
async def test_case_12_what_keeps_the_other_streams_alive(
        path: str, body: dict[str, Any], sent: bytes, autojump_clock: object) -> None:
    async with open_lane(server={"keepalive_s": 4.0}, compat={"keepalive_mode": "empty-delta"}) as lane:
        lane.runtime.script(Script(itl=10, tokens=3), path=path)
        call = await lane.post({**body, "stream": True, "max_tokens": 3}, path)
        assert call.status == 200 and sent in call.body and b"error" not in call.body


def frames(*choices: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(
        {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [{"index": 0, **choice}]}
    ).encode() + b"\n\n" for choice in choices) + b"data: [DONE]\n\n"


ODD = frames(
    {"delta": {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\\u00'}}]},
     "finish_reason": None},
    {"delta": {"tool_calls": [{"function": {"arguments": 'e9"}'}}]}, "finish_reason": None},
    {"delta": {"tool_calls": [{"function": {"name": "g", "arguments": "{}"}}]}, "finish_reason": None},
    {"delta": {}, "finish_reason": "stop"})


async def test_case_19_by_default_tool_calls_travel_byte_for_byte(autojump_clock: object) -> None:
    async with open_lane() as lane:
        lane.runtime.script(Script(script=[(0.0, ODD[:150]), (0.1, ODD[150:])]))
        assert (await lane.post(chat())).body == ODD


async def test_case_19_normalised_calls_streamed_and_whole(autojump_clock: object) -> None:
    async with open_lane(compat={"normalize_tool_calls": True}) as lane:
        lane.runtime.script(Script(script=[(0, ODD)]))
        values = data_of((await lane.post(chat())).body)
        chunks = [ChatCompletionChunk.model_validate(value) for value in values if value != "[DONE]"]
        pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
        assert [(piece.index, bool(piece.id)) for piece in pieces] == [(0, True), (0, False), (1, True)]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        lane.runtime.script(Script(script=[(0, ODD)]))
        [choice] = json.loads((await lane.post(chat(stream=False))).body)["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["f", "g"]
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": "é"}
        assert [call["id"] for call in choice["message"]["tool_calls"]] == [pieces[0].id, pieces[2].id]
