"""A lane before a server with one slot, and streams that give way there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from tests.gateway.conftest import CHAT, Call, Lane, chat, data_of, open_lane, text_of
from tests.gateway.hardlane import no_threads

NATIVE = "/completion"
LOW, HIGH = (("x-kvstream-priority", "low"),), (("x-kvstream-priority", "high"),)
TOKENS = 12


@asynccontextmanager
async def open_one(folder: Path, *, knobs: Any = None, **sections: Any) -> AsyncIterator[Lane]:
    """A lane before a server with one slot."""
    (folder / "slots").mkdir(exist_ok=True)
    told = {"slots": 1, "n_ctx": 2048, "slots_dir": str(folder / "slots"), "cell_bytes": 256, "answer_tokens": None,
            **(knobs or {})}
    inject = {"mode": "auto", "dir": str(folder / "slots"), **sections.pop("inject", {})}
    with no_threads():
        async with open_lane(knobs=told, inject=inject, **sections) as lane:
            while not lane.engine.inject.active:
                await trio.sleep(0.01)
            yield lane


def body_of(path: str, *, stream: bool = True, **more: Any) -> dict[str, Any]:
    if path == CHAT:
        return chat("tell me a long story of the sea, the wind and what lies between", stream=stream, **more)
    return {"prompt": "once upon a time there was a king who had a daughter and", "stream": stream, **more}


async def whole(folder: Path, path: str, body: dict[str, Any], **how: Any) -> Call:
    """The same request, with nobody to give way to."""
    async with open_one(folder, **how) as lane:
        return await lane.post(body, path, LOW)


async def until_tokens(lane: Lane, tokens: int) -> None:
    """Wait until a stream has so many and goes on, five seconds at most."""
    with trio.move_on_after(5):
        while not any(s.tokens >= tokens and s.sent for s in lane.engine.streams.values()):
            await trio.sleep(0.0005)


async def preempted(lane: Lane, path: str, body: dict[str, Any], at: int, *, times: int = 1) -> Call:
    """The request, which gives way when it has ``at`` tokens, ``times`` times in a row."""
    call = lane.start(body, path, LOW)
    for turn in range(times):
        await until_tokens(lane, at + turn)
        urgent = await lane.post(chat("now", max_tokens=2), headers=HIGH)
        assert urgent.status == 200
    with trio.fail_after(60):
        await call.ended.wait()
    return call


def shape(call: Call) -> dict[str, Any]:
    """What a client can tell of an answer. Its pieces may be cut otherwise, its id and times are its own."""
    frames = data_of(call.body)
    chunks = [frame for frame in frames if isinstance(frame, dict)]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    usage = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    return {
        "status": call.status, "text": text_of(call.body), "ids": len({chunk.get("id") for chunk in chunks}),
        "roles": sum("role" in choice.get("delta", {}) for choice in choices),
        "finish": [c["finish_reason"] for c in choices if c.get("finish_reason")],
        "done": sum(frame == "[DONE]" for frame in frames),
        "usage": [(u["prompt_tokens"], u["completion_tokens"], u["total_tokens"]) for u in usage],
        "timings": [(c["timings"]["prompt_n"] + c["timings"]["cache_n"], c["timings"]["predicted_n"])
                    for c in chunks if "timings" in c],
        "last": type(frames[-1]).__name__, "keys": sorted({key for chunk in chunks for key in chunk})}


def gave_way(lane: Lane) -> tuple[int, int]:
    """How often somebody gave way, and went on."""
    counters = lane.engine.scheduler.snapshot(trio.current_time()).counters
    return counters.preempted, counters.resumed


async def check(lane: Lane) -> None:
    """Nothing is left over, and nothing was done that could hurt a stream."""
    await trio.sleep(0.05)  # the last end is still in the scheduler's inbox
    lane.engine.scheduler.check_invariants()
    assert lane.idle()
    assert not lane.runtime.busy_pins and not lane.runtime.engine.actions_deferred and not lane.runtime.corruptions
    slots = [path.name for path in Path(lane.runtime.config.slots_dir).iterdir()]
    assert not [name for name in slots if name.startswith("s")], "the file of a request that is over"
