"""What the bench's tests stand on: loads against the in-memory fake, on the virtual clock, so that times are exact."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import attrs

from kvstream.bench.figures import Group
from kvstream.bench.plan import Block, Kind, Load
from kvstream.bench.prompts import Lengths
from kvstream.bench.record import Record, Run
from kvstream.bench.result import Result, result_of
from kvstream.bench.runner import run_load
from kvstream.bench.slo import Slo
from kvstream.bench.target import Target
from tests.fakes import FakeRuntime, FakeUpstream

ONE = Load((Kind("all", 1.0, 64, 4),), concurrency=1, requests=1, warmup=0)


class Quiet:
    """Looks on and keeps what it saw."""

    def __init__(self) -> None:
        self.blocks: list[tuple[str, int]] = []
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def block_began(self, target: str, block: Block, rounds: int) -> None:
        self.blocks.append((target, block.round))

    def request_ended(self, record: Record) -> None:
        pass

    def block_ended(self) -> None:
        pass


def load(**more: Any) -> Load:
    """One class of 64 + 4 tokens unless told otherwise."""
    kind = attrs.evolve(ONE.kinds[0], **{name: more.pop(name) for name in ("prompt_tokens", "output_tokens")
                                         if name in more})
    return attrs.evolve(ONE, **{"kinds": (kind,), **more})


def target_of(runtime: FakeRuntime, label: str = "fake", lengths: Lengths | None = None, **more: Any) -> Target:
    return Target(label, "http://fake", FakeUpstream(runtime, **more), lengths=lengths or Lengths("estimated"))


async def measured(runtime: FakeRuntime, wanted: Load, slo: Slo | None = None, **more: Any) -> Result:
    """A run against one fake."""
    target = target_of(runtime, **more)
    return result_of(wanted, slo or Slo(), [target], await run_load([target], wanted, Quiet()))


async def measured_group(runtime: FakeRuntime, wanted: Load, **more: Any) -> Group:
    return (await measured(runtime, wanted, **more)).targets[0].whole


async def only_record(runtime: FakeRuntime, wanted: Load = ONE, **more: Any) -> Record:
    result = await measured(runtime, wanted, **more)
    (record,) = result.targets[0].records
    return record


def records_of(run: Run) -> list[Record]:
    return [record for block in run.blocks for record in block.records]


# --- frames -----------------------------------------------------------------------------------------------------------


def frame(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def delta(finish: str | None = None, **fields: Any) -> bytes:
    return frame({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]})


def usage(prompt: int, completion: int, cached: int | None = None) -> bytes:
    numbers: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
    if cached is not None:
        numbers["prompt_tokens_details"] = {"cached_tokens": cached}
    return frame({"choices": [], "usage": numbers})


DONE = b"data: [DONE]\n\n"
ROLE = delta(role="assistant", content="")


def ending(finish: str = "length", tokens: int | None = 4) -> list[tuple[float, bytes]]:
    counted = [] if tokens is None else [(0.0, usage(64, tokens))]
    return [(0.0, delta(finish)), *counted, (0.0, DONE)]


def writes(*parts: Sequence[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    return [write for part in parts for write in part]
