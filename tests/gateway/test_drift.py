"""Somebody uses the runtime past us, its cache is off, its counts are wrong: ``/status`` and one line say so."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
import trio
from attrs import define

from kvstream.adapters.base import HttpCall, HttpReply
from kvstream.gateway.ports import Upstream
from tests.fakes import FakeUpstream
from tests.gateway.conftest import Lane, chat, open_lane

PROMPT = "the same long beginning of a prompt that fills several pages of sixteen tokens each " * 6


async def causes(lane: Lane) -> dict[str, tuple[float, float]]:
    return {found["cause"]: (found["ours"], found["theirs"]) for found in (await lane.status())["drift"]}


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "our books differ" in r.getMessage()]


async def test_where_all_is_well_nothing_is_said(autojump_clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with open_lane() as lane:
        for n in range(40):
            await lane.post(chat(PROMPT + str(n)))
            await trio.sleep(1)
        assert await causes(lane) == {} and lines(caplog) == []


async def test_a_prompt_cache_that_is_off(autojump_clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with open_lane(knobs={"cache_model": False}) as lane:
        for n in range(40):
            await lane.post(chat(PROMPT + str(n)))
            await trio.sleep(10)
        ours, theirs = (await causes(lane))["prefix"]
        assert ours > 32 * 64 and theirs == 0
        assert len(lines(caplog)) == 1 and "prompt cache is off" in lines(caplog)[0]


@define
class OtherCounts:
    """An upstream whose tokenizer gives a third more tokens than the runtime reports afterwards."""

    inner: Upstream

    async def request(self, call: HttpCall, *, timeout_s: float) -> HttpReply:
        reply = await self.inner.request(call, timeout_s=timeout_s)
        if call.path == "/tokenize":
            tokens = json.loads(reply.body)["tokens"]
            return attrs.evolve(reply, body=json.dumps({"tokens": tokens + tokens[: len(tokens) // 3]}).encode())
        return reply

    def open(self, call: HttpCall) -> Any:
        return self.inner.open(call)


async def test_counts_that_are_wrong(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_lane() as lane:
        monkeypatch.setattr(lane.engine.counter, "_upstream", OtherCounts(lane.upstream))
        for n in range(10):
            await lane.post(chat(f"{n} " + PROMPT))
            await trio.sleep(10)
        ours, theirs = (await causes(lane))["count"]
        assert ours == pytest.approx(theirs * 4 / 3, rel=0.1)
        assert len(lines(caplog)) == 1


async def test_somebody_else_uses_the_runtime(autojump_clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with open_lane(knobs={"answer_tokens": None, "decode_rate": 20.0},
                         upstream={"slot_idle_s_max": 10.0, "slot_idle_poll_s": 0.5}) as lane, \
            trio.open_nursery() as nursery:

        async def past_us() -> None:
            body = json.dumps(chat("past us", max_tokens=3000)).encode()
            call = HttpCall("POST", "/v1/chat/completions", (("content-type", "application/json"),), body)
            async with FakeUpstream(lane.runtime).open(call) as response:
                while await response.receive():
                    pass

        for _ in range(3):
            nursery.start_soon(past_us)
        for n in range(4):
            call = lane.start(chat(f"ours {n}", max_tokens=1000))
            await trio.sleep(2)
            call.leave()
            await trio.sleep(10)
        ours, theirs = (await causes(lane))["seats"]
        assert theirs > ours and len(lines(caplog)) == 1
        assert "somebody else uses it" in lines(caplog)[0]
        nursery.cancel_scope.cancel()
