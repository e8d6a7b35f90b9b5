"""What llama.cpp writes is what the client reads, byte for byte, except what two runs never share."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.e2e.process import GatewayProcess
from tests.e2e.requests import chat, ids, stream
from tests.fakes.real import RealLlama

_FLEETING = (
    (re.compile(rb'"id":"[^"]*"'), b'"id":"*"'),
    (re.compile(rb'"created":\d+'), b'"created":0'),
    (re.compile(rb'("(?:time_ms|(?:prompt|predicted)_(?:ms|per_token_ms|per_second))":)[-+.\deE]+'), rb"\g<1>0"),
)


async def body_of(port: int, body: dict[str, Any]) -> bytes:
    """The whole body, keepalive comments and all."""
    response = await stream(port, body)
    assert response.status == 200
    data = await response.read_all()
    await response.close()
    assert not response.truncated
    for pattern, same in _FLEETING:
        data = pattern.sub(same, data)
    return data


@pytest.mark.parametrize("body", [
    chat("Say hello in Greek and add an emoji.", 12),
    chat("Say hello in Greek and add an emoji.", 12, stream_options={"include_usage": True}),
    chat("Count.", 6, logprobs=True, top_logprobs=3, timings_per_token=True, return_tokens=True),
    chat("Count.", 6, n=2, seed=3, temperature=0.5, return_progress=True),
    ids(24, 8, first=1),
], ids=["plain", "usage", "extras", "choices", "completion"])
async def test_a_stream_is_forwarded_byte_for_byte(
    unpinned: GatewayProcess, llama: RealLlama, body: dict[str, Any]
) -> None:
    await body_of(llama.port, body)  # warm: the cached count is a part of what is compared
    direct = await body_of(llama.port, body)
    through = await body_of(unpinned.port, body)
    if body.get("n"):  # two choices interleave as they come
        assert sorted(through.split(b"\n\n")) == sorted(direct.split(b"\n\n"))
    else:
        assert through == direct
    assert through.endswith(b"data: [DONE]\n\n")


async def test_headers_keep_proxies_from_buffering(gateway: GatewayProcess) -> None:
    """Case 9."""
    response = await stream(gateway.port, chat("Hi.", 2))
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in response.headers
    await response.read_all()
    await response.close()
