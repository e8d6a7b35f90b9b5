"""Counts, ids and figures from outside that nobody would believe: they may be wrong, but the gateway lives on."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import trio

from tests.fakes import Script
from tests.gateway.conftest import CHAT, COMPLETIONS, chat, open_lane

JSON = (("Content-Type", "application/json"),)
ANSWER = {"id": "x", "object": "chat.completion", "choices": [
    {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}
ODD: dict[str, dict[str, Any]] = {
    "text": {"prompt_tokens": "3", "completion_tokens": "12"},
    "negative": {"prompt_tokens": 3, "completion_tokens": -5},
    "list": {"prompt_tokens": 3, "completion_tokens": [1]},
    "nan": {"prompt_tokens": 1.5, "completion_tokens": float("nan")},
    "huge": {"prompt_tokens": 3, "completion_tokens": 10**400},
    "negative cached": {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": -1}},
}


@pytest.mark.parametrize("kind", ["llamacpp", "openai"])
@pytest.mark.parametrize("mode", ["pass", "assemble"])
@pytest.mark.parametrize("name", ODD)
async def test_odd_usage_ends_nothing(autojump_clock: Any, name: str, mode: str, kind: Any) -> None:
    async with open_lane(upstream={"non_stream": mode}, backend={"type": kind}, knobs={"dialect": kind}) as lane:
        lane.runtime.script(Script(script=[(0, json.dumps(ANSWER | {"usage": ODD[name]}).encode())], headers=JSON))
        began = time.process_time()
        assert (await lane.post(chat(stream=False))).status == 200
        assert time.process_time() - began < 5  # no page was made for each of a billion tokens
        assert (await lane.post(chat(stream=False))).status == 200
        await trio.sleep(5)
        assert lane.idle() and (await lane.get("/metrics")).status == 200


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"<html>hi</html>", b"\x1f\x8b\x08zip", b"data: {}\n\n"])
async def test_passed_garbage_is_no_answer(autojump_clock: Any, body: bytes) -> None:
    async with open_lane(upstream={"non_stream": "pass"}) as lane:
        lane.runtime.script(Script(script=[(0, body)], headers=JSON))
        assert (await lane.post(chat(stream=False))).status == 502


async def test_passed_answer_keeps_its_bytes(autojump_clock: Any) -> None:
    async with open_lane(upstream={"non_stream": "pass"}) as lane:
        body = b' \n{"choices":[{"index":0,"message":{"content":"a"},"x":1e5}]}'
        lane.runtime.script(Script(script=[(0, body)], headers=JSON))
        assert (await lane.post(chat(stream=False))).body == body


@pytest.mark.parametrize("loading", [False, True])
@pytest.mark.parametrize("token", [-1, 2**40])
async def test_impossible_token_ids(autojump_clock: Any, token: int, loading: bool) -> None:
    async with open_lane(wait=not loading, knobs={"load_s": 3.0 if loading else 0.0}) as lane:
        lane.runtime.script(Script(status=400, slot=False, headers=JSON, script=[(0, b'{"error":"bad token"}')]),
                            when=lambda r: r.path == COMPLETIONS, times=None)
        if loading:
            await trio.sleep(1)
        call = lane.start({"prompt": [token], "stream": True}, COMPLETIONS)
        await trio.sleep(10)
        assert call.status == 400
        assert (await lane.post(chat())).status == 200


async def test_sjf_with_a_limit_beyond_floats(autojump_clock: Any) -> None:
    async with open_lane(scheduler={"priority": "sjf"}) as lane:
        assert (await lane.post(chat(max_tokens=10**310))).status == 200


async def test_slots_with_odd_token_counts(autojump_clock: Any) -> None:
    rows = [{"id": i, "is_processing": False, "n_prompt_tokens": n} for i, n in enumerate(("x", 3))]
    async with open_lane(wait=False) as lane:
        lane.runtime.script(Script(script=[(0, json.dumps(rows).encode())], slot=False), path="/slots", times=None)
        await trio.sleep(1)
        assert (await lane.post(chat())).status == 200


@pytest.mark.parametrize("waiting", [b"NaN", b"+Inf"])
async def test_metrics_without_numbers(autojump_clock: Any, waiting: bytes) -> None:
    scrape = (b'vllm:num_requests_waiting ' + waiting
              + b'\nvllm:cache_config_info{num_gpu_blocks="10",block_size="16"} 1\n')
    async with open_lane(wait=False, backend={"type": "openai"}, knobs={"dialect": "openai"}) as lane:
        lane.runtime.script(Script(script=[(0, scrape)], slot=False), path="/metrics", times=None)
        await trio.sleep(1)
        assert (await lane.post(chat())).status == 200


@pytest.mark.parametrize(("message", "calls_max"), [("Loading model", 30), ("error loading model: out of memory", 1)])
async def test_a_model_that_never_loads(autojump_clock: Any, message: str, calls_max: int) -> None:
    body = json.dumps({"error": {"message": message, "type": "api_error"}}).encode()
    async with open_lane(upstream={"load_timeout_s": 5.0}) as lane:
        lane.runtime.script(Script(script=[(0, body)], status=500, headers=JSON), when=lambda r: r.path == CHAT,
                            times=None)
        with trio.fail_after(8):
            call = await lane.post(chat(stream=False))
        assert call.status in (500, 502, 503)
        assert len([e for e in lane.runtime.journal.entries if e.request.path == CHAT]) <= calls_max
