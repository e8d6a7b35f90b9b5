"""Five minutes of everything at once: does what KVStream counts agree with what the server counted itself?

    python tests/measure/show_inject_mixed.py [--seconds 300] [--json FILE] [--plot FILE.png]

One real llama.cpp server with four slots, a relay that writes down the server's answers to slot calls, KVStream. Ten
conversations think and talk, every 20 s six chats come at once that share a new prefix, single short chats come, and
some clients leave in the middle of an answer. At the end all is quiet, and the two sides are compared: prompt tokens
computed and cached (``kvstream_runtime_prompt_tokens_total`` with ``llamacpp:prompt_tokens_total`` and
``..._cached_total``), slots saved and restored with bytes and seconds, and the files that are really there.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trio
from attrs import define, field
from figures import Page
from inject_rig import (
    Arm,
    Counted,
    Heard,
    chat,
    counted,
    get,
    kvstream_arm,
    llama_hard,
    parser,
    plot,
    quiet,
    seeds,
    system_and_user,
    tell,
    words,
    workplace,
)
from inject_sums import apart, samples, total
from processes import HERE, Child, environment, running

from kvstream.gateway.embedded_find import free_port

Compared = dict[str, tuple[float, float]]
"""What KVStream told and what the server said, by name."""

SLOTS, CONTEXT = 4, 2048
TOLERANCE = 0.01  # answers that were broken off are counted by what was expected of the cache


@define
class Traffic:
    """What clients saw. ``left``: those that went in the middle of an answer."""

    heard: list[Heard] = field(factory=list)
    left: int = 0
    points: list[tuple[float, float, float, float, float]] = field(factory=list)


@contextlib.contextmanager
def rig(folder: Path, args: Namespace) -> Iterator[tuple[Arm, Child, Path]]:
    """The arm (its runtime is the relay), the server itself, and the relay's notes."""
    notes, port = folder / "slots.jsonl", free_port()
    notes.touch()
    with llama_hard(folder / "server", SLOTS, CONTEXT, "-b", "512", threads=args.threads) as server:
        argv = [sys.executable, str(HERE / "slot_relay.py"), str(port), str(server.port), str(notes)]
        with running("relay", argv, port, "/health", folder, env=environment()) as relay:
            place = f"{folder / 'server' / 'slots'}{os.sep}"
            with kvstream_arm(folder / "gateway", relay, KVSTREAM_INJECT__DIR=place) as arm:
                yield arm, server, notes


async def talker(arm: Arm, rng: random.Random, traffic: Traffic, until: float) -> None:
    while trio.current_time() < until:
        messages = [{"role": "system", "content": words(rng, rng.randrange(150, 450))}]
        for turn in range(rng.randrange(2, 7)):
            await trio.sleep(rng.expovariate(1 / 4))
            if trio.current_time() > until:
                return
            messages.append({"role": "user", "content": f"{turn}: {words(rng, 15)}?"})
            heard = await chat(arm.url, messages, rng.randrange(4, 40))
            messages.append({"role": "assistant", "content": heard.text})
            traffic.heard.append(heard)


async def fans(arm: Arm, rng: random.Random, traffic: Traffic, until: float) -> None:
    while trio.current_time() < until - 10:
        prefix, heard = words(rng, 600), [Heard() for _ in range(6)]
        async with trio.open_nursery() as nursery:
            for i, one in enumerate(heard):
                nursery.start_soon(chat, arm.url, system_and_user(prefix, f"Question {i}?"), 12, one)
        traffic.heard += heard
        await trio.sleep(20)


async def singles(arm: Arm, rng: random.Random, traffic: Traffic, until: float) -> None:
    while trio.current_time() < until:
        await trio.sleep(rng.expovariate(1 / 3))
        leaves = rng.random() < 0.25
        with trio.move_on_after(rng.uniform(0.3, 2.5) if leaves else 999) as scope:
            traffic.heard.append(await chat(arm.url, system_and_user(words(rng, 20), words(rng, 20)), 60))
        traffic.left += scope.cancelled_caught


async def watch(arm: Arm, server: Child, traffic: Traffic, until: float, began: float) -> None:
    while trio.current_time() < until:
        ours, theirs = samples((await get(arm.url, "/metrics")).text), await counted(server)
        now = trio.current_time() - began
        traffic.points.append((now, *tokens_told(ours), theirs.computed, theirs.cached))
        tell(f"  {now:4.0f} s: computed {traffic.points[-1][1]:.0f} told, {theirs.computed:.0f} by the server; cached "
             f"{traffic.points[-1][2]:.0f} told, {theirs.cached:.0f}; {len(traffic.heard)} answers")
        await trio.sleep(10)


def tokens_told(page: Any) -> tuple[float, float]:
    name = "kvstream_runtime_prompt_tokens_total"
    return total(page, name, part="computed"), total(page, name, part="cached")


async def measure(arm: Arm, server: Child, notes: Path, args: Namespace) -> tuple[Traffic, Compared]:
    traffic, (seed, *_) = Traffic(), seeds(args)
    began = trio.current_time()
    until = began + args.seconds
    async with trio.open_nursery() as nursery:
        for i in range(args.talks):
            nursery.start_soon(talker, arm, random.Random(seed + i), traffic, until)
        nursery.start_soon(fans, arm, random.Random(seed - 1), traffic, until)
        nursery.start_soon(singles, arm, random.Random(seed - 2), traffic, until)
        nursery.start_soon(watch, arm, server, traffic, until, began)
    await quiet(arm, calm_s=3)
    ours, theirs = samples((await get(arm.url, "/metrics")).text), await counted(server)
    rows = [json.loads(line) for line in notes.read_text("utf-8").splitlines()]
    files = [path.stat().st_size for path in (server.log.parent / "slots").glob("*.kv")]
    return traffic, compare(ours, theirs, rows, files)


def compare(ours: Any, theirs: Counted, rows: list[dict[str, Any]], files: list[int]) -> Compared:
    """The two sides. The self-check's own saves are in the notes as well; they
    are of empty or tiny slots and of no policy, so that ``kvstream_inject_saves_total`` need not have them."""
    computed, cached = tokens_told(ours)
    rates = [part / max(1.0, whole) for part, whole in (
        (cached, cached + computed), (theirs.cached, theirs.cached + theirs.computed))]
    out = {"prompt tokens computed": (computed, theirs.computed), "prompt tokens cached": (cached, theirs.cached),
           "hit rate": (rates[0], rates[1])}
    for what, name in (("saved", "save"), ("restored", "restore")):
        those = [row for row in rows if row["what"] == what and row["tokens"] >= 64]
        out[f"slots {what}"] = (total(ours, f"kvstream_inject_{name}s_total", outcome="ok"), len(those))
        out[f"bytes {what}"] = (total(ours, f"kvstream_inject_{name}_bytes_total"), sum(r["bytes"] for r in those))
        seconds = sum(r["seconds"] for r in those)
        out[f"seconds {what}"] = (total(ours, f"kvstream_inject_{name}_seconds_total"), seconds)
    out["files in the store"] = (total(ours, "kvstream_inject_store_files"), len(files))
    out["bytes in the store"] = (total(ours, "kvstream_inject_store_bytes"), sum(files))
    return out


def show(page: Page, traffic: Traffic, compared: Compared, seconds: float) -> None:
    page.table(f"After {seconds:.0f} s and {len(traffic.heard)} answers", ["", "KVStream", "the server", "apart"],
               [(name, f"{a:,.3f}".rstrip("0").rstrip("."), f"{b:,.3f}".rstrip("0").rstrip("."), f"{apart(a, b):.2%}")
                for name, (a, b) in compared.items()])
    for name, (a, b) in compared.items():
        page.bar(f"{name}: KVStream and the server agree within {TOLERANCE:.0%}", f"{apart(a, b):.2%}",
                 apart(a, b) <= TOLERANCE)
    failed = [heard.error or "no proper end" for heard in traffic.heard if not heard.served]
    page.bar("no request fails", "; ".join([f"{len(failed)} of {len(traffic.heard)}, {traffic.left} clients left",
                                            *sorted(set(failed))]), not failed)


def draw(points: list[tuple[float, float, float, float, float]]) -> Any:
    def on(axes: Any) -> None:
        times = [point[0] for point in points]
        for column, label, style in ((1, "computed, KVStream", "tab:blue"), (3, "computed, the server", "tab:red"),
                                     (2, "cached, KVStream", "tab:cyan"), (4, "cached, the server", "tab:orange")):
            axes.plot(times, [point[column] for point in points], color=style, label=label,
                      linestyle="--" if column > 2 else "-")
        axes.set_xlabel("s")
        axes.set_ylabel("prompt tokens")
        axes.legend()
    return on


def main() -> int:
    options = parser("Metrics against the server's own counters.", rounds=1)
    options.add_argument("--seconds", type=float, default=300.0)
    options.add_argument("--talks", type=int, default=10)
    args = options.parse_args()
    if args.quick:
        args.seconds, args.talks = min(args.seconds, 25.0), 3
    page = Page("metrics")
    with workplace() as folder, rig(folder, args) as (arm, server, notes):
        traffic, compared = trio.run(measure, arm, server, notes, args)
    page.data |= {"compared": compared, "points": traffic.points, "left": traffic.left,
                  "answers": len(traffic.heard)}
    show(page, traffic, compared, args.seconds)
    plot(args.plot, "Prompt tokens by KVStream's count and by the server's", draw(traffic.points))
    return page.close(args.json)


if __name__ == "__main__":
    sys.exit(main())
