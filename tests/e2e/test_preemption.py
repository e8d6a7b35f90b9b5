"""Preemption on a real server with one slot (case 40): a long stream gives way to an urgent chat, and goes on.

Greedy answers of this server are not bit-stable between a prompt that was computed and one that was restored, so the
text is compared as far as it agrees, and what must hold is told by counts: one role, one end, every token counted once.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Start
from tests.e2e.process import GatewayProcess
from tests.fakes.real import RealLlama, start_real

STORY = [{"role": "user", "content": "Write a long story about a lighthouse keeper and the sea."}]
TOKENS = 120


@pytest.fixture(scope="module")
def single() -> Iterator[RealLlama]:
    with start_real(n_parallel=1, n_ctx=2048, n_batch=128) as server:
        yield server


class Reader(threading.Thread):
    """Reads a stream in the background."""

    def __init__(self, url: str, body: dict[str, Any], priority: str = "low") -> None:
        super().__init__(daemon=True)
        self.url, self.body, self.priority = url, body, priority
        self.frames: list[Any] = []
        self.comments = 0
        self.start()

    def run(self) -> None:
        headers = {"x-kvstream-priority": self.priority}
        with httpx.stream("POST", self.url, json=self.body, headers=headers, timeout=360, trust_env=False) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    self.frames.append(line[6:] if line == "data: [DONE]" else json.loads(line[6:]))
                self.comments += line.startswith(":")

    @property
    def pieces(self) -> list[str]:
        choices = [c for f in list(self.frames) if isinstance(f, dict) for c in f.get("choices", ())]
        return [text for c in choices if (text := c.get("delta", {}).get("content") or c.get("text"))]

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def until(self, pieces: int) -> None:
        ends = time.monotonic() + 180
        while len(self.pieces) < pieces and self.is_alive() and time.monotonic() < ends:
            time.sleep(0.001)


def common(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def body_of(**more: Any) -> dict[str, Any]:
    return {"messages": STORY, "stream": True, "temperature": 0, "max_tokens": TOKENS, **more}


def resumed(gateway: GatewayProcess) -> float:
    metrics = httpx.get(f"{gateway.url}/metrics", trust_env=False).text
    lines = [line for line in metrics.splitlines() if line.startswith("kvstream_preempted_resumed_total")]
    return float(lines[0].split()[-1])


def options(server: RealLlama, tmp_path: Path) -> dict[str, Any]:
    return {"inject__dir": str(server.slots_dir), "inject__mode": "auto"}


def test_case_40_a_real_stream_gives_way_and_goes_on(single: RealLlama, start: Start, tmp_path: Path) -> None:
    with start(single.base_url, **options(single, tmp_path)) as gateway:
        url = f"{gateway.url}/v1/chat/completions"
        body = body_of(stream_options={"include_usage": True})
        plain = Reader(url, body)
        plain.join(360)
        again = Reader(url, body)
        again.join(360)
        agreed = []
        for count, at in enumerate((1, 20, 60, 100), 1):
            for more_tries in (True, True, False):  # when we are kept waiting, its last 20 tokens are written meanwhile
                stream = Reader(url, body)
                stream.until(at)
                began = time.monotonic()
                urgent = httpx.post(url, json={"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 4},
                                    headers={"x-kvstream-priority": "high"}, timeout=180, trust_env=False)
                waited = time.monotonic() - began
                assert urgent.status_code == 200
                before, went_on = len(stream.pieces), stream.is_alive()
                stream.join(360)
                assert not stream.is_alive()
                if went_on and resumed(gateway) == count:
                    break
                assert more_tries, "it did not give way"
            chunks = [frame for frame in stream.frames if isinstance(frame, dict)]
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            assert sum("role" in choice["delta"] for choice in choices) == 1
            assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
            assert stream.frames.count("[DONE]") == 1 and len({chunk["id"] for chunk in chunks}) == 1
            usage = [chunk["usage"] for chunk in chunks if "usage" in chunk]
            assert [u["completion_tokens"] for u in usage] == [TOKENS]
            told = next(chunk["usage"] for chunk in plain.frames if isinstance(chunk, dict) and "usage" in chunk)
            assert usage[0]["prompt_tokens"] == told["prompt_tokens"]
            agreed.append((at, before, common(stream.text, plain.text), len(plain.text), round(waited, 3)))
        print("unpreempted run against itself:", common(again.text, plain.text), "of", len(plain.text), "characters")
        print("(cut at, pieces then, characters that agree, of, seconds the urgent one took):", agreed)
        assert resumed(gateway) == 4
        assert all(common_ >= len("".join(plain.pieces[:at])) for at, _, common_, _, _ in agreed)


@pytest.mark.parametrize("at", [3, 5, 8, 11, 14])
def test_case_40_a_stop_string_across_the_cut_still_stops(single: RealLlama, start: Start, tmp_path: Path,
                                                          at: int) -> None:
    """The server holds back what may be the beginning of a stop string; so does the cut."""
    with start(single.base_url, **options(single, tmp_path)) as gateway:
        url = f"{gateway.url}/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": "Count from one to ten in words."}], "stream": True,
                "temperature": 0, "max_tokens": 80, "stop": ["4\n5. 5\n6"]}
        plain = Reader(url, body)
        plain.join(360)
        stream = Reader(url, body)
        stream.until(at)
        httpx.post(url, json={"messages": STORY, "max_tokens": 2}, headers={"x-kvstream-priority": "high"}, timeout=180,
                   trust_env=False)
        stream.join(360)
        assert stream.text == plain.text and not plain.text.endswith("5") and "6" not in stream.text
