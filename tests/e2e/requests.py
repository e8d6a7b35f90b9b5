"""Request bodies and small observations that the end-to-end tests share."""

from __future__ import annotations

import json
from typing import Any

import trio

from tests.e2e.process import patience
from tests.fakes.client import RawResponse, open_request, send_request
from tests.fakes.real import RealLlama

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def chat(text: str, tokens: int, *, stream: bool = True, **more: Any) -> dict[str, Any]:
    """A chat that really runs to ``tokens`` answer tokens: the model's own end is ignored."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "stream": stream,
            "temperature": 0, "ignore_eos": True, **more}


def ids(tokens: int, answer: int, *, first: int, stream: bool = True, **more: Any) -> dict[str, Any]:
    """A completion whose prompt has exactly ``tokens`` tokens, and shares none with one of another ``first``."""
    return {"prompt": [1000 + (first * 7919 + 13 * i) % 40000 for i in range(tokens)], "max_tokens": answer,
            "stream": stream, "temperature": 0, "ignore_eos": True, **more}


async def post(port: int, body: dict[str, Any]) -> RawResponse:
    """Send, and do not wait for the answer."""
    return await send_request(port, "POST", CHAT if "messages" in body else COMPLETIONS, body)


async def stream(port: int, body: dict[str, Any]) -> RawResponse:
    """Send, and wait for status and headers."""
    return await open_request(port, "POST", CHAT if "messages" in body else COMPLETIONS, body)


async def whole(port: int, body: dict[str, Any]) -> list[Any]:
    """All events of a stream, parsed; ``[DONE]`` is None."""
    response = await stream(port, body)
    assert response.status == 200, await response.read_all()
    events = await read_all(response)
    await response.close()
    return events


async def read_all(response: RawResponse) -> list[Any]:
    """All events of a stream to its end, parsed; keepalive comments are left out."""
    return [parse(event) for event in await response.read_events() if event.startswith(b"data:")]


def parse(event: bytes) -> Any:
    data = event.removeprefix(b"data:").strip()
    return None if data == b"[DONE]" else json.loads(data)


def finish(events: list[Any]) -> str | None:
    """The finish_reason of a complete answer; None when the stream did not end properly."""
    reasons = [event["choices"][0]["finish_reason"] for event in events if event and event.get("choices")]
    return reasons[-1] if events[-1:] == [None] and reasons else None


async def busy(llama: RealLlama, count: int, within_s: float = 10.0, every_s: float = 0.01) -> None:
    """Wait until exactly ``count`` slots work. While a prompt is being read, ask less than once a second: each answer
    puts off llama.cpp's own look for clients that left by another second."""
    with trio.fail_after(patience(within_s)):
        while await llama.busy() != count:
            await trio.sleep(every_s)
