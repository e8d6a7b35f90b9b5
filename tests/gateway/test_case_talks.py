"""Case 61: more conversations than slots."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from kvstream.adapters.base import HttpCall
from tests.fakes import FakeUpstream, open_runtime
from tests.fakes.tokens import WORDS
from tests.gateway.conftest import CHAT, Lane, chat, open_lane
from tests.gateway.hardlane import no_threads

TALKS, SLOTS, TURNS = 12, 4, 72


@asynccontextmanager
async def open_quiet(knobs: dict[str, Any], folder: Path) -> AsyncIterator[Lane]:
    """A lane with hard inject whose work on files takes no time: the virtual clock would run on meanwhile."""
    with no_threads():
        async with open_lane(knobs=knobs, inject={"mode": "auto", "dir": str(folder)}) as lane:
            yield lane


RUNTIME: dict[str, Any] = {"slots": SLOTS, "n_ctx": SLOTS * 4096, "prefill_rate": 500.0, "decode_rate": 50.0,
                           "cell_bytes": 64}


def zipf(rng: random.Random) -> int:
    """Which conversation goes on: the first as often as the next two together."""
    return rng.choices(range(TALKS), [1 / (i + 1) for i in range(TALKS)])[0]


class Talks:
    """Twelve conversations that go on in a given order, four turns at a time, never two of one conversation."""

    def __init__(self) -> None:
        rng = random.Random(61)
        self.talks = [[{"role": "system", "content": " ".join(rng.choices(WORDS, k=300))}] for _ in range(TALKS)]
        self.order = [zipf(rng) for _ in range(TURNS)]
        self.locks = [trio.Lock() for _ in range(TALKS)]
        self.prompt = self.cached = 0

    async def run(self, ask: Any) -> float:
        """The share of all prompt tokens that was found in a cache."""
        async with trio.open_nursery() as nursery:
            for client in range(SLOTS):
                nursery.start_soon(self._client, ask, self.order[client::SLOTS])
        return self.cached / self.prompt

    async def _client(self, ask: Any, order: list[int]) -> None:
        for turn, talk in enumerate(order):
            async with self.locks[talk]:
                messages = self.talks[talk]
                messages.append({"role": "user", "content": f"turn {turn}: go on"})
                answer = await ask({"messages": messages, "max_tokens": 16, "stream": False})
                messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
                self.prompt += answer["usage"]["prompt_tokens"]
                self.cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def round_robin() -> float:
    """What a proxy gets that sends the n-th request to slot n modulo four."""
    async with open_runtime(**RUNTIME) as runtime:
        upstream, sent = FakeUpstream(runtime), 0

        async def ask(body: dict[str, Any]) -> Any:
            nonlocal sent
            sent += 1
            content = json.dumps({**body, "id_slot": sent % SLOTS}).encode()
            return (await upstream.request(HttpCall("POST", CHAT, (), content), timeout_s=999)).json()

        return await Talks().run(ask)


async def test_case_61_twelve_conversations_on_four_slots(autojump_clock: Any, tmp_path: Path) -> None:
    plain = await round_robin()
    knobs = {**RUNTIME, "slots_dir": str(tmp_path)}
    async with open_quiet(knobs, tmp_path) as lane:
        await trio.sleep(2)

        async def ask(body: dict[str, Any]) -> Any:
            call = await lane.post(body)
            assert call.status == 200, call.body
            return json.loads(call.body)

        ours = await Talks().run(ask)
        assert not lane.runtime.busy_pins and not lane.runtime.journal.corrupted and not lane.runtime.deferred_max
    assert ours >= 1.5 * plain, (ours, plain)
    print(f"{ours:.3f} of the prompt tokens from a cache, round-robin {plain:.3f}")
    assert ours > 0.7


@pytest.mark.parametrize("rest", [2000, 10])
async def test_case_61_a_busy_favourite_is_given_up_if_waiting_costs_more(
    autojump_clock: Any, tmp_path: Path, rest: int
) -> None:
    """The slot with the prefix works for 40 s more, or for 0.2; computing the prefix takes about a second."""
    knobs = {**RUNTIME, "slots_dir": str(tmp_path), "answer_tokens": None}
    prefix = {"role": "system", "content": " ".join(random.Random(1).choices(WORDS, k=500))}

    def ask(text: str, tokens: int) -> dict[str, Any]:
        return chat(text, max_tokens=tokens, messages=[prefix, {"role": "user", "content": text}])

    async with open_quiet(knobs, tmp_path) as lane:
        await trio.sleep(2)
        for i in range(3):  # also to let the rates be learned
            await lane.post(ask(f"first {i}", 64))
        await trio.sleep(1)
        lane.start(ask("holds the slot", rest + 4))
        while not lane.runtime.journal.calls[-1].bytes_out:
            await trio.sleep(0.01)
        began = trio.current_time()
        call = lane.start(ask("second", 4))
        with trio.fail_after(20):
            while not call.writes:
                await trio.sleep(0.01)
        assert call.writes[0][0] - began < 2.5
        await call.ended.wait()
        assert not lane.runtime.busy_pins
