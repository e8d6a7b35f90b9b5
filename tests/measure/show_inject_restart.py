"""A known prefix of 1,100 tokens after a restart of the server *and* of KVStream: what is the first token's wait?

    python tests/measure/show_inject_restart.py [--rounds 5] [--words 1050] [--json FILE] [--plot FILE.png]

Each round has a new prefix. It is asked about twice through KVStream (the first time it is cold), then KVStream is told
to end and so is the server, both start anew with the same slot files, and it is asked about a third time. Beside it a
direct server goes through the same with its own default flags. The tokens that the third request cost are read from
the new server's own counter, where they are all that it counted but for the self-check.
"""

from __future__ import annotations

import contextlib
import random
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import trio
from attrs import define
from figures import Page
from inject_rig import (
    Arm,
    chat,
    counted,
    get,
    kvstream_arm,
    llama_bare,
    llama_hard,
    median,
    parser,
    plot,
    quiet,
    seeds,
    system_and_user,
    tell,
    words,
    workplace,
)
from inject_sums import ratio, samples, total

SLOTS, CONTEXT, ANSWER = 4, 2048, 8


@define
class Asked:
    """TTFT in seconds: of the prefix when it is cold, when its slot still has it, and after the restart. Then the
    prompt's tokens, and those that the server computed for it after the restart."""

    arm: str
    seed: int
    cold_s: float = 0.0
    warm_s: float = 0.0
    restored_s: float = 0.0
    prompt: int = 0
    computed: float = 0.0
    failed: int = 0


@contextlib.contextmanager
def started(folder: Path, name: str, args: Namespace) -> Iterator[Arm]:
    if name == "direct":
        with llama_bare(folder / name, threads=args.threads) as runtime:
            yield Arm(name, runtime)
    else:
        with llama_hard(folder / name, SLOTS, CONTEXT, threads=args.threads) as runtime, \
                kvstream_arm(folder / "gateway", runtime) as arm:
            yield arm


async def before(arm: Arm, asked: Asked, prefix: str) -> None:
    await quiet(arm)
    for n, name in enumerate(("cold_s", "warm_s")):
        heard = await chat(arm.url, system_and_user(prefix, f"Question {n}?"), ANSWER)
        setattr(asked, name, heard.ttft_s)
        asked.failed += not heard.served
        await quiet(arm)
    if arm.gateway is not None:  # what was used again is saved when its slot has rested; at the latest when it ends
        with trio.move_on_after(8):
            while not total(samples((await get(arm.url, "/metrics")).text), "kvstream_inject_saves_total"):
                await trio.sleep(0.5)


async def after(arm: Arm, asked: Asked, prefix: str) -> None:
    await quiet(arm)
    at_first = await counted(arm.runtime)
    heard = await chat(arm.url, system_and_user(prefix, "Question 2, after the restart?"), ANSWER)
    await quiet(arm)
    asked.restored_s, asked.prompt = heard.ttft_s, heard.turn.prompt
    asked.computed = (await counted(arm.runtime)).since(at_first).computed
    asked.failed += not heard.served


def measure(folder: Path, args: Namespace) -> list[Asked]:
    found = []
    for number, seed in enumerate(seeds(args)):
        tell(f"round {number + 1} of {args.rounds}, seed {seed}")
        for name in ("direct", "kvstream"):
            asked, prefix = Asked(name, seed), words(random.Random(seed), args.words)
            with started(folder, name, args) as arm:
                trio.run(before, arm, asked, prefix)
            with started(folder, name, args) as arm:
                trio.run(after, arm, asked, prefix)
            tell(f"  {name}: cold {asked.cold_s:.3f} s, warm {asked.warm_s:.3f} s, after the restart "
                 f"{asked.restored_s:.3f} s with {asked.computed:.0f} of {asked.prompt} tokens computed")
            found.append(asked)
    return found


def show(page: Page, found: list[Asked]) -> None:
    page.table("First token of a known prefix, seconds", ["arm", "seed", "cold", "slot has it", "after restart",
                                                         "prompt", "computed then", "failed"],
               [(a.arm, a.seed, f"{a.cold_s:.3f}", f"{a.warm_s:.3f}", f"{a.restored_s:.3f}", a.prompt,
                 f"{a.computed:.0f}", a.failed) for a in found])
    direct, ours = ([a for a in found if a.arm == name] for name in ("direct", "kvstream"))
    times = ratio([a.cold_s for a in ours], [a.restored_s for a in ours])
    page.bar("time to first token, cold over restored, medians, >= 15",
             f"{times:.1f} ({median([a.cold_s for a in ours]):.3f} s over "
             f"{median([a.restored_s for a in ours]) * 1000:.0f} ms)", times >= 15)
    page.bar("direct after its restart over KVStream restored, for comparison",
             f"{ratio([a.restored_s for a in direct], [a.restored_s for a in ours]):.1f}", None)
    worst = max(a.computed / a.prompt for a in ours)
    page.bar("tokens computed after the restart, of the prompt, by the server's counter, <= 10 %", f"{worst:.1%}",
             worst <= 0.1)
    page.bar("no request fails", str(sum(a.failed for a in ours)), not any(a.failed for a in ours))


def draw(found: list[Asked]) -> Any:
    def on(axes: Any) -> None:
        names = [("direct", "cold_s"), ("direct", "restored_s"), ("kvstream", "cold_s"), ("kvstream", "warm_s"),
                 ("kvstream", "restored_s")]
        values = [median([getattr(a, part) for a in found if a.arm == arm]) for arm, part in names]
        labels = [f"{arm}\n{part.removesuffix('_s')}" for arm, part in names]
        bars = axes.bar(labels, values, color=["tab:gray"] * 2 + ["tab:blue"] * 3)
        axes.bar_label(bars, [f"{v:.3f} s" for v in values])
        axes.set_yscale("log")
        axes.set_ylabel("time to first token, s (median)")
    return on


def main() -> int:
    options = parser("A known prefix after a restart.", rounds=5)
    options.add_argument("--words", type=int, default=1050)
    args = options.parse_args()
    if args.quick:
        args.rounds, args.words = min(args.rounds, 1), min(args.words, 400)
    page = Page("restart")
    with workplace() as folder:
        found = measure(folder, args)
    page.data["rounds"] = [attrs.asdict(a) for a in found]
    show(page, found)
    plot(args.plot, f"A prefix of about {found[0].prompt} tokens before and after a restart", draw(found))
    return page.close(args.json)


if __name__ == "__main__":
    sys.exit(main())
