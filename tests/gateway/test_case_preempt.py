"""Case 40: a stream that gives way goes on, and its client cannot tell. Forced at every token, against the fake, whose
model says the same after the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import trio

from kvstream.adapters.base import Delta
from kvstream.adapters.slot_calls import PromptWork, SlotDone
from kvstream.core.messages import Preempt
from kvstream.core.types import Priority, SavedPrefix, SaveSpec
from kvstream.gateway.kvstore import KvStore
from kvstream.gateway.request import parse_request
from kvstream.gateway.said import Said
from kvstream.gateway.stream import Stream
from tests.fakes.upstream import FakeResponse
from tests.gateway.conftest import CHAT, COMPLETIONS, Call, chat, data_of, metric, text_of
from tests.gateway.parklane import (
    HIGH,
    LOW,
    NATIVE,
    TOKENS,
    body_of,
    check,
    gave_way,
    open_one,
    preempted,
    shape,
    until_tokens,
    whole,
)

BODIES = [
    (CHAT, {}), (CHAT, {"stream_options": {"include_usage": True}}), (COMPLETIONS, {}),
]


@pytest.mark.parametrize("at", range(1, TOKENS))
@pytest.mark.parametrize(("path", "more"), BODIES)
async def test_case_40_at_every_token_the_text_is_that_of_the_unpreempted_run(
    autojump_clock: Any, tmp_path: Path, path: str, more: dict[str, Any], at: int
) -> None:
    body = body_of(path, max_tokens=TOKENS + 6, **more)
    expected = await whole(tmp_path, path, body)
    async with open_one(tmp_path) as lane:
        call = await preempted(lane, path, body, at)
        assert shape(call) == shape(expected)
        assert gave_way(lane) == (1, 1)
        await check(lane)


def answer_of(call: Call) -> dict[str, Any]:
    """An answer in one piece, without what differs from call to call."""
    value: dict[str, Any] = json.loads(call.body)
    usage = value.get("usage", {})
    choice = value["choices"][0] if "choices" in value else value
    return {"status": call.status, "text": choice.get("text", choice.get("content", choice.get("message"))),
            "reason": choice.get("finish_reason", choice.get("stop_type")),
            "usage": [usage.get(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")],
            "counts": [value.get(name) for name in ("tokens_predicted", "tokens_evaluated")], "keys": sorted(value)}


@pytest.mark.parametrize("at", [1, 2, 3, 7, TOKENS - 1])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, NATIVE])
async def test_case_40_a_client_that_does_not_stream_gets_the_same_answer(
    autojump_clock: Any, tmp_path: Path, path: str, at: int
) -> None:
    body = body_of(path, stream=False, max_tokens=TOKENS + 6)
    expected = await whole(tmp_path, path, body)
    async with open_one(tmp_path) as lane:
        call = await preempted(lane, path, body, at)
        assert answer_of(call) == answer_of(expected) and gave_way(lane) == (1, 1)
        await check(lane)


@pytest.mark.parametrize("at", range(1, TOKENS, 3))
async def test_case_40_llamacpps_own_stream(autojump_clock: Any, tmp_path: Path, at: int) -> None:
    body = body_of(NATIVE, n_predict=TOKENS + 6)
    expected = data_of((await whole(tmp_path, NATIVE, body)).body)
    async with open_one(tmp_path) as lane:
        frames = data_of((await preempted(lane, NATIVE, body, at)).body)
        assert gave_way(lane) == (1, 1)
        await check(lane)

    def told(frame: dict[str, Any]) -> list[Any]:
        timings = frame.get("timings", {})
        names = ("content", "stop", "stop_type", "tokens_predicted", "tokens_evaluated")
        return [*map(frame.get, names), *map(timings.get, ("cache_n", "prompt_n", "predicted_n"))]

    assert [told(frame) for frame in frames] == [told(frame) for frame in expected]


@pytest.mark.parametrize("times", [2, 3, 5])
async def test_case_40_it_gives_way_three_times_at_most(autojump_clock: Any, tmp_path: Path, times: int) -> None:
    body = body_of(CHAT, max_tokens=40, stream_options={"include_usage": True})
    expected = await whole(tmp_path, CHAT, body)
    async with open_one(tmp_path) as lane:
        call = await preempted(lane, CHAT, body, 3, times=times)
        assert shape(call) == shape(expected)
        assert gave_way(lane) == (min(times, 3),) * 2
        await check(lane)


@pytest.mark.parametrize("at", range(1, 9))
async def test_case_40_an_answer_that_the_model_ends(autojump_clock: Any, tmp_path: Path, at: int) -> None:
    """Whose next token after the cut may be its last."""
    knobs, body = {"ends_every": 11}, body_of(CHAT)
    expected = await whole(tmp_path, CHAT, body, knobs=knobs)
    assert shape(expected)["finish"] == ["stop"]
    length = len(text_of(expected.body).split())
    async with open_one(tmp_path, knobs=knobs) as lane:
        call = await preempted(lane, CHAT, body, min(at, length - 1))
        assert shape(call) == shape(expected)
        await check(lane)


async def test_case_40_what_it_displaced_is_kept_while_its_own_state_is_being_saved(
    autojump_clock: Any, tmp_path: Path
) -> None:
    """Its slot is its own until that is in a file, whatever else is kept meanwhile."""
    keep = KvStore.keep

    async def slowly(self: KvStore, spec: SaveSpec, done: SlotDone) -> SavedPrefix:
        if spec.why == "evict":
            await trio.sleep(3.0)
        return await keep(self, spec, done)

    body = body_of(CHAT, max_tokens=40)
    async with open_one(tmp_path, knobs={"prefill_rate": 200.0}, inject={
            "read_first_s": 3600.0, "save_tokens_min": 64, "slow_save_s": 60.0}) as lane:
        await lane.post(chat("word " * 600, max_tokens=2))
        with mock.patch.object(KvStore, "keep", slowly):
            call = lane.start(body, CHAT, LOW)
            await until_tokens(lane, 3)
            asides = lane.engine.inject.asides
            lane.runtime.config.save_s = 6.0
            urgent = lane.start(chat("now", max_tokens=2), CHAT, HIGH)
            await trio.sleep(5.0)
            assert (asides, lane.engine.inject.asides, len(lane.engine.inject.jobs)) == (1, 0, 1)
            assert lane.engine.scheduler.snapshot(trio.current_time()).draining == 1
            assert not any(stream.swapped_out for stream in lane.engine.streams.values())
        with trio.fail_after(60):
            await call.ended.wait()
            await urgent.ended.wait()
        assert gave_way(lane) == (1, 1)
        await check(lane)


async def test_case_40_before_its_first_token_it_is_sent_again(autojump_clock: Any, tmp_path: Path) -> None:
    """In the middle of reading its prompt: its client has nothing yet."""
    knobs = {"prefill_rate": 100.0, "n_batch": 16}
    body = {**body_of(CHAT, max_tokens=8), "messages": [{"role": "user", "content": "word " * 150}]}
    expected = await whole(tmp_path, CHAT, body, knobs=knobs)
    async with open_one(tmp_path, knobs=knobs, inject={"read_first_s": 3600.0}) as lane:
        call = lane.start(body, CHAT, LOW)
        while not any(stream.answered for stream in lane.engine.streams.values()):
            await trio.sleep(0.01)
        await trio.sleep(0.5)
        assert (await lane.post(chat("now", max_tokens=2), headers=HIGH)).status == 200
        await call.ended.wait()
        assert shape(call) == shape(expected) and gave_way(lane) == (1, 1)
        await check(lane)


async def test_case_40_what_it_read_before_its_first_token_is_never_called_cached(
    autojump_clock: Any, tmp_path: Path
) -> None:
    """It gives way when its prompt was read and it is about to be sent, and comes back to a slot that still has all of
    it. Its client waited for all of it to be computed."""
    knobs = {"prefill_rate": 400.0, "n_batch": 16, "n_ctx": 8192}
    body = {**body_of(CHAT, max_tokens=300), "messages": [{"role": "user", "content": "word " * 900}]}
    async with open_one(tmp_path, knobs=knobs, inject={"read_first_s": 0.1}) as lane:
        work = lane.engine.inject.work
        assert work is not None
        read_first = work._read_first

        async def preempted_then(stream: Stream, slot: int | None) -> PromptWork | None:
            stream.read = await read_first(stream, slot)
            work._read_first = read_first  # type: ignore[method-assign]
            lane.engine._act(Preempt(stream.rid, False))
            await trio.sleep_forever()

        work._read_first = preempted_then  # type: ignore[method-assign]
        call = await lane.post(body, CHAT, LOW)
        assert text_of(call.body)
        told = [frame["timings"] for frame in data_of(call.body) if isinstance(frame, dict) and "timings" in frame][-1]
        assert told["cache_n"] == 0 and told["prompt_n"] > 900 and told["prompt_ms"] > 2000
        lost = lane.metrics.registry.get_sample_value(
            "kvstream_slots_lost_total", {"backend": "default", "why": "missed"})
        assert not lost
        await check(lane)


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["no file", "no restore", "restart", "file gone", "junk"])
async def test_case_40_whatever_is_lost_the_answer_goes_on(autojump_clock: Any, tmp_path: Path, how: str) -> None:
    body = body_of(CHAT, max_tokens=TOKENS + 6, stream_options={"include_usage": True})
    expected = await whole(tmp_path, CHAT, body)
    async with open_one(tmp_path) as lane:
        call = lane.start(body, CHAT, LOW)
        await until_tokens(lane, 5)
        if how == "no file":
            lane.runtime.config.disk_bytes = 1
        urgent = lane.start(chat("now", max_tokens=30), headers=HIGH)
        await trio.sleep(0.15)
        assert len(lane.engine.streams) == 2 and gave_way(lane) == (1, 0)
        files = [path for path in (tmp_path / "slots").iterdir() if path.name.startswith("s")]
        assert bool(files) == (how != "no file")
        if how == "no restore":
            lane.runtime.config.restore_mode = "400_version"
        elif how == "restart":
            lane.runtime.restart()
        for path in files:
            if how == "file gone":
                path.unlink()
            elif how == "junk":
                path.write_bytes(b"junk")
        await urgent.ended.wait()
        await call.ended.wait()
        assert shape(call) == shape(expected)
        await check(lane)


@pytest.mark.parametrize("moment", ["stopping", "swapped", "resumed"])
async def test_case_40_a_client_that_leaves_leaves_nothing(autojump_clock: Any, tmp_path: Path, moment: str) -> None:
    async with open_one(tmp_path, knobs={"save_s": 0.05}) as lane:
        call = lane.start(body_of(CHAT, max_tokens=60), CHAT, LOW)
        await until_tokens(lane, 5)
        urgent = lane.start(chat("now", max_tokens=10), headers=HIGH)
        await trio.sleep(0.03 if moment == "stopping" else 0.12)
        if moment == "resumed":
            await urgent.ended.wait()
            await trio.sleep(0.05)
        call.leave()
        await urgent.ended.wait()
        await trio.sleep(1)
        assert urgent.status == 200 and text_of(urgent.body)
        await check(lane)


async def test_case_40_a_drain_waits_for_a_swapped_stream(autojump_clock: Any, tmp_path: Path) -> None:
    body = body_of(CHAT, max_tokens=TOKENS + 6)
    expected = await whole(tmp_path, CHAT, body)
    async with open_one(tmp_path) as lane:
        call = lane.start(body, CHAT, LOW)
        await until_tokens(lane, 5)
        lane.start(chat("now", max_tokens=10), headers=HIGH)
        await trio.sleep(0.1)
        assert gave_way(lane) == (1, 0)
        lane.engine.close(refuse_waiting=True)
        await lane.engine.wait_idle()
        assert shape(call) == shape(expected)


async def test_case_40_keepalives_go_on_while_it_is_out(autojump_clock: Any, tmp_path: Path) -> None:
    body = body_of(CHAT, max_tokens=TOKENS)
    async with open_one(tmp_path, server={"keepalive_s": 1.0}) as lane:
        call = lane.start(body, CHAT, LOW)
        await until_tokens(lane, 5)
        lane.start(chat("now", max_tokens=500), headers=HIGH)
        await call.ended.wait()
        assert call.body.count(b": ping") >= 4 or call.body.count(b":\n\n") >= 4
        assert shape(call)["finish"] == ["length"]


async def test_case_40_what_is_out_for_longer_than_its_bound_says_so(autojump_clock: Any, tmp_path: Path) -> None:
    async with open_one(tmp_path, upstream={"total_s": 3.0}) as lane:
        call = lane.start(body_of(CHAT, max_tokens=100), CHAT, LOW)
        await until_tokens(lane, 5)
        for _ in range(4):
            lane.start(chat("now", max_tokens=200), headers=HIGH)
        await call.ended.wait()
        assert b"upstream.total_s" in call.body and b"[DONE]" not in call.body
        assert call.ended_at is not None and call.ended_at < 5


@pytest.mark.parametrize("more", [
    {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"response_format": {"type": "json_object"}},
    {"grammar": "root ::= [a-z]+"}, {"seed": 7}, {"logprobs": True}, {"json_schema": {"type": "object"}},
])
async def test_case_40_these_are_never_preempted(autojump_clock: Any, tmp_path: Path, more: dict[str, Any]) -> None:
    async with open_one(tmp_path) as lane:
        call = lane.start(body_of(CHAT, max_tokens=30, **more), CHAT, LOW)
        await until_tokens(lane, 5)
        await lane.post(chat("now", max_tokens=2), headers=HIGH)
        await call.ended.wait()
        assert gave_way(lane) == (0, 0) and shape(call)["finish"] == ["length"]


async def test_case_40_two_victims_for_one_with_two_slots(autojump_clock: Any, tmp_path: Path) -> None:
    bodies = [body_of(CHAT, max_tokens=TOKENS + 6), body_of(COMPLETIONS, max_tokens=TOKENS + 6)]
    paths = [CHAT, COMPLETIONS]
    expected = [await whole(tmp_path, path, body) for path, body in zip(paths, bodies, strict=True)]
    async with open_one(tmp_path, knobs={"slots": 2, "n_ctx": 4096}) as lane:
        calls = [lane.start(body, path, LOW) for path, body in zip(paths, bodies, strict=True)]
        await until_tokens(lane, 4)
        urgent = [lane.start(chat(f"now {i}", max_tokens=8), headers=HIGH) for i in range(2)]
        for call in (*calls, *urgent):
            await call.ended.wait()
        assert [text_of(call.body) for call in calls] == [text_of(call.body) for call in expected]
        assert gave_way(lane) == (2, 2)
        await check(lane)


async def test_case_40_what_waits_for_its_reader_is_not_lost(autojump_clock: Any, tmp_path: Path) -> None:
    """A client that reads nothing for a while: what was decoded for it, and found no room, comes before the rest."""
    body = body_of(CHAT, max_tokens=60)
    expected = await whole(tmp_path, CHAT, body)
    request = parse_request(CHAT, (), json.dumps(body).encode()).proxy
    async with open_one(tmp_path, server={"stream_buffer_bytes": 4096}) as lane:
        async with lane.engine.open_stream(request, priority=Priority.LOW) as stream:
            while not stream.blocked:
                await trio.sleep(0.001)
            assert (await lane.post(chat("now", max_tokens=2), headers=HIGH)).status == 200
            assert gave_way(lane)[0] == 1
            raw = b""
            while events := await stream.get():
                raw += b"".join(getattr(event, "raw", b"") for event in events)
        assert text_of(raw) == text_of(expected.body) and raw.count(b"[DONE]") == 1
        await check(lane)


@pytest.mark.parametrize("delta", [
    {"reasoning_content": "hm"}, {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}])
def test_case_40_an_answer_with_more_than_text_is_bound(delta: dict[str, Any]) -> None:
    def chunk(delta: dict[str, Any]) -> Delta:
        return Delta(b"x", {"choices": [{"index": 0, "delta": delta}]}, 1, delta.get("content") or "")

    said = Said(10)
    assert said.note(chunk({"role": "assistant", "content": None})) and said.note(chunk({"content": "a"}))
    assert said.begun and said.text == "a"
    assert not said.note(chunk(delta))
    assert not Said(3).note(chunk({"content": "four"}))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_case_40_at_its_limit_there_is_nothing_left_to_ask_for(
    autojump_clock: Any, tmp_path: Path, path: str
) -> None:
    """Stopped between its last token and the frame that says so."""
    body = body_of(path, max_tokens=10, stream_options={"include_usage": True})
    expected = await whole(tmp_path, path, body)
    receive = FakeResponse.receive

    async def held(response: FakeResponse) -> bytes:
        data = await receive(response)
        if b'"finish_reason":"length"' in data and text_of(data) == "" and not seen:
            seen.append(data)
            await trio.sleep_forever()
        return data

    seen: list[bytes] = []
    async with open_one(tmp_path) as lane:
        with mock.patch.object(FakeResponse, "receive", held):
            call = lane.start(body, path, LOW)
            while not seen:
                await trio.sleep(0.001)
            stream = next(iter(lane.engine.streams.values()))
            lane.engine._act(Preempt(stream.rid, True))
            await call.ended.wait()
        mine, real = shape(call), shape(expected)
        assert {k: v for k, v in mine.items() if k != "keys"} == {k: v for k, v in real.items() if k != "keys"}
        asked = [json.loads(entry.request.body) for entry in lane.runtime.journal.calls]
        assert not [body for body in asked if len(body.get("prompt", ())) > 40 and isinstance(body["prompt"], list)]
        await check(lane)


async def test_case_40_what_it_made_in_all_its_legs_is_what_it_holds(autojump_clock: Any, tmp_path: Path) -> None:
    """And while it is out it is seen in the metrics."""
    async with open_one(tmp_path) as lane:
        call = lane.start(body_of(CHAT, max_tokens=40), CHAT, LOW)
        for at in (5, 12):
            await until_tokens(lane, at)
            urgent = lane.start(chat("now", max_tokens=20), headers=HIGH)
            await trio.sleep(0.1)
            waiting = lane.engine.scheduler.snapshot(trio.current_time()).waiting
            stream = next(s for s in lane.engine.streams.values() if s.priority is Priority.LOW)
            assert [view.tokens for view in waiting] == [stream.tokens_prompt + stream.tokens]
            assert metric(lane.metrics, "kvstream_swapped_out", backend="default") == 1
            await urgent.ended.wait()
        await call.ended.wait()
        assert metric(lane.metrics, "kvstream_swapped_out", backend="default") == 0
        assert metric(lane.metrics, "kvstream_preempted_resumed_total", backend="default") == 2
        assert metric(lane.metrics, "kvstream_preemptions_total", backend="default", how="swap") == 2
        await check(lane)
