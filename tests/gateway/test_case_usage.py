"""Case 14: token counts are asked for by us, and seen only by who asked for them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes import Script
from tests.gateway.conftest import CHAT, COMPLETIONS, Lane, chat, data_of, metric, open_lane, text_of

OPENAI = {"type": "openai", "base_url": "http://fake", "seats": 4}
VLLM = {"dialect": "openai"}
BACKENDS: dict[str, dict[str, Any]] = {
    "chunk": {"usage_style": "chunk"},
    "finish": {"usage_style": "finish"},
    "none": {"usage_style": "none"},
    "refuses": {"refuse_stream_options": True},
}
CLIENTS: dict[str, dict[str, Any]] = {
    "absent": {},
    "false": {"stream_options": {"include_usage": False}},
    "true": {"stream_options": {"include_usage": True}},
}


def body_of(route: str, **more: Any) -> dict[str, Any]:
    return chat(**more) if route == CHAT else {"prompt": "hello", "stream": True, **more}


def usage_chunks(body: bytes) -> list[Any]:
    return [d for d in data_of(body) if isinstance(d, dict) and d.get("usage") and not d.get("choices")]


def tokens_out(lane: Lane) -> float:
    return metric(lane.metrics, "kvstream_answer_tokens_total")


def check_shown(body: bytes, *, asked: bool, estimated: bool) -> None:
    """No usage-only chunk unless asked; then exactly one, right before the end marker, marked if it is a guess."""
    shown, data = usage_chunks(body), data_of(body)
    if not asked:
        assert not shown
        return
    assert len(shown) == 1 and shown[0]["choices"] == [] and data[-2] == shown[0]
    assert shown[0]["usage"]["completion_tokens"] == 16
    assert shown[0]["usage"].get("estimated", False) is estimated
    assert shown[0]["id"] == data[0]["id"] and shown[0]["model"] == data[0]["model"]


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("client", CLIENTS)
async def test_case_14_include_usage(autojump_clock: Any, client: str, backend: str, route: str) -> None:
    async with open_lane(knobs={**VLLM, **BACKENDS[backend]}, backend=OPENAI) as lane:
        call = await lane.post(body_of(route, **CLIENTS[client]), route)
        assert call.status == 200
        data = data_of(call.body)
        assert data[-1] == "[DONE]" and text_of(call.body)
        check_shown(call.body, asked=client == "true", estimated=backend in ("none", "refuses"))
        asked = [e.request.json.get("stream_options") for e in lane.runtime.journal.calls]
        if backend == "refuses":
            assert asked == [{"include_usage": True}, None]
        else:
            assert asked == [{"include_usage": True}]
        assert tokens_out(lane) == 16
        assert lane.idle()


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("style", ["chunk", "finish"])
@pytest.mark.parametrize("client", CLIENTS)
async def test_case_14_llamacpp_tells_without_being_asked(
        autojump_clock: Any, client: str, style: str, route: str) -> None:
    async with open_lane(knobs={"usage_style": style}) as lane:
        call = await lane.post(body_of(route, **CLIENTS[client]), route)
        check_shown(call.body, asked=client == "true", estimated=False)
        if client == "absent":
            assert "stream_options" not in lane.runtime.journal.calls[0].request.json
        assert tokens_out(lane) == 16


async def test_case_14_a_refusal_is_remembered(autojump_clock: Any) -> None:
    async with open_lane(knobs=VLLM | BACKENDS["refuses"], backend=OPENAI) as lane:
        for _ in range(3):
            assert (await lane.post(chat())).status == 200
        assert len(lane.runtime.journal.calls) == 4  # one retry in all


async def test_case_14_another_400_is_not_retried(autojump_clock: Any) -> None:
    async with open_lane() as lane:
        error = json.dumps({"error": {"message": "bad temperature", "code": 400}}).encode()
        lane.runtime.script(Script(status=400, script=[(0, error)]))
        call = await lane.post(chat())
        assert call.status == 400 and len(lane.runtime.journal.calls) == 1


async def test_case_14_other_stream_options_are_kept(autojump_clock: Any) -> None:
    async with open_lane(knobs=VLLM, backend=OPENAI) as lane:
        await lane.post(chat(stream_options={"include_usage": False, "x_mine": 1}))
        assert lane.runtime.journal.calls[0].request.json["stream_options"] == {"include_usage": True, "x_mine": 1}


async def test_case_14_not_injected_when_configured_so(autojump_clock: Any) -> None:
    async with open_lane(upstream={"include_usage": False}, knobs=VLLM, backend=OPENAI) as lane:
        call = await lane.post(chat())
        assert data_of(call.body)[-1] == "[DONE]"
        assert "stream_options" not in lane.runtime.journal.calls[0].request.json


async def test_case_14_include_usage_off_keeps_the_clients_own_wish(autojump_clock: Any) -> None:
    async with open_lane(upstream={"include_usage": False}, knobs=VLLM, backend=OPENAI) as lane:
        call = await lane.post(chat(stream_options={"include_usage": True}))
        assert len(usage_chunks(call.body)) == 1


@pytest.mark.parametrize("backend", BACKENDS)
async def test_case_14_a_non_stream_answer_has_usage_or_says_estimated(autojump_clock: Any, backend: str) -> None:
    async with open_lane(knobs={**VLLM, **BACKENDS[backend]}, backend=OPENAI) as lane:
        call = await lane.post(chat(stream=False))
        answer = json.loads(call.body)
        if backend in ("chunk", "finish"):
            assert answer["usage"]["completion_tokens"] == 16
            assert "x-kvstream-usage" not in call.headers
        else:
            assert call.headers["x-kvstream-usage"] == "estimated"
            assert answer["usage"]["completion_tokens"] == 16 and answer["usage"]["estimated"] is True
