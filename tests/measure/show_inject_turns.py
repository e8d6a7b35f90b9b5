"""Twelve conversations of four turns on four slots: how much is computed again, and how long is the wait?

    python tests/measure/show_inject_turns.py [--rounds 1] [--talks 12] [--turns 4] [--words 450] [--json FILE]

Three arms, one after another in each round, with the same conversations: direct with `--cache-ram 0`, direct with the
8 GiB RAM prompt cache, KVStream before `--cache-ram 0 --slot-save-path`. All have `-np 4` and the same context. Four
clients talk; each carries on its conversations in turn, a turn of one and then a turn of the next, so a slot's last
guest is never the one that comes. What was computed is the server's own counter; the ideal is what would have been if
every conversation had kept a slot, by the tokens of its own prompts and answers.
"""

from __future__ import annotations

import contextlib
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
    chat,
    counted,
    kvstream_arm,
    llama_bare,
    llama_hard,
    median,
    parser,
    plot,
    quiet,
    seeds,
    tell,
    words,
    workplace,
)
from inject_sums import Turn, ratio, talk_computed, talk_ideal

SLOTS, CONTEXT = 4, 2048
ARMS = ("direct, no cache", "direct, RAM cache", "kvstream")


@define
class Talk:
    """One conversation."""

    messages: list[dict[str, str]]
    turns: list[Turn] = field(factory=list)
    ttft_s: list[float] = field(factory=list)
    failed: int = 0


@define
class Run:
    """One arm in one round."""

    arm: str
    seed: int
    talks: list[Talk]
    counted: Counted = field(factory=lambda: Counted(0, 0, 0))
    took_s: float = 0.0

    @property
    def ideal(self) -> int:
        return sum(talk_ideal(talk.turns) for talk in self.talks)

    @property
    def excess(self) -> float:
        """Computed tokens over the ideal."""
        return self.counted.computed / self.ideal

    @property
    def later_s(self) -> list[float]:
        """Time to first token of every turn but the first."""
        return [s for talk in self.talks for s in talk.ttft_s[1:]]

    @property
    def failed(self) -> int:
        return sum(talk.failed for talk in self.talks)

    def data(self) -> dict[str, Any]:
        return {"arm": self.arm, "seed": self.seed, "computed": self.counted.computed, "cached": self.counted.cached,
                "told": sum(talk_computed(talk.turns) for talk in self.talks), "ideal": self.ideal,
                "took_s": self.took_s, "ttft_s": [talk.ttft_s for talk in self.talks], "failed": self.failed}


@contextlib.contextmanager
def arms(folder: Path, args: Namespace) -> Iterator[list[Arm]]:
    size = ["-np", str(SLOTS), "-c", str(SLOTS * CONTEXT)]
    with llama_bare(folder / "none", *size, "--cache-ram", "0", threads=args.threads) as none, \
            llama_bare(folder / "ram", *size, threads=args.threads) as ram, \
            llama_hard(folder / "hard", SLOTS, CONTEXT, threads=args.threads) as hard, \
            kvstream_arm(folder / "gateway", hard, ARMS[2]) as ours:
        yield [Arm(ARMS[0], none), Arm(ARMS[1], ram), ours]


async def one_client(arm: Arm, talks: list[Talk], seed: int, args: Namespace) -> None:
    rng = random.Random(seed)
    for turn in range(args.turns):
        for talk in talks:
            talk.messages.append({"role": "user", "content": f"Turn {turn}: {words(rng, 24)}?"})
            heard = await chat(arm.url, talk.messages, args.answer)
            talk.messages.append({"role": "assistant", "content": heard.text})
            talk.turns.append(heard.turn)
            talk.ttft_s.append(heard.ttft_s)
            talk.failed += not heard.served


async def run_arm(arm: Arm, seed: int, args: Namespace) -> Run:
    rng = random.Random(seed)
    talks = [Talk([{"role": "system", "content": words(rng, args.words)}]) for _ in range(args.talks)]
    run = Run(arm.name, seed, talks)
    await quiet(arm)
    before, began = await counted(arm.runtime), trio.current_time()
    async with trio.open_nursery() as nursery:
        for i in range(args.clients):
            nursery.start_soon(one_client, arm, talks[i :: args.clients], seed + i, args)
    run.took_s = trio.current_time() - began
    await quiet(arm)
    run.counted = (await counted(arm.runtime)).since(before)
    tell(f"  {arm.name}: {run.counted.computed:.0f} of {run.ideal} computed, later turns "
         f"{median(run.later_s):.3f} s, took {run.took_s:.0f} s")
    return run


async def measure(all_arms: list[Arm], args: Namespace) -> list[Run]:
    runs = []
    for number, seed in enumerate(seeds(args)):
        tell(f"round {number + 1} of {args.rounds}, seed {seed}")
        for arm in all_arms:
            runs.append(await run_arm(arm, seed, args))
    return runs


def show(page: Page, runs: list[Run]) -> None:
    columns = ["arm", "computed", "ideal", "computed/ideal", "first turns s", "later turns s", "took s", "failed"]
    page.table("Conversations", columns, [
        (r.arm, f"{r.counted.computed:.0f}", r.ideal, f"{r.excess:.2f}",
         f"{median([t.ttft_s[0] for t in r.talks]):.3f}", f"{median(r.later_s):.3f}", f"{r.took_s:.1f}", r.failed)
        for r in runs])
    none, ram, ours = ([r for r in runs if r.arm == name] for name in ARMS)
    later = [[s for r in part for s in r.later_s] for part in (none, ram, ours)]
    page.bar("prompt tokens computed <= 1.15 x the ideal, in every round, by the server's counter",
             f"{max(r.excess for r in ours):.3f}; direct {max(r.excess for r in none):.2f} without and "
             f"{max(r.excess for r in ram):.2f} with its RAM cache", all(r.excess <= 1.15 for r in ours))
    better = ratio(later[0], later[2])
    page.bar("later turns' time to first token, direct without a cache over KVStream, medians, >= 4",
             f"{better:.1f} ({median(later[0]):.3f} s over {median(later[2]):.3f} s)", better >= 4)
    worse = ratio(later[2], later[1])
    page.bar("KVStream over direct with the 8 GiB RAM cache, <= 1.3",
             f"{worse:.2f} ({median(later[2]):.3f} s over {median(later[1]):.3f} s)", worse <= 1.3)
    page.bar("no request fails", str(sum(r.failed for r in ours)), not any(r.failed for r in ours))


def draw(runs: list[Run]) -> Any:
    def on(axes: Any) -> None:
        for name, colour in zip(ARMS, ("tab:gray", "tab:orange", "tab:blue"), strict=True):
            later = sorted(s for r in runs if r.arm == name for s in r.later_s)
            axes.step(later, [(i + 1) / len(later) for i in range(len(later))], where="post", color=colour, label=name)
        axes.set_xscale("log")
        axes.set_xlabel("time to first token of later turns, s")
        axes.set_ylabel("share of turns")
        axes.legend()
    return on


def main() -> int:
    options = parser("More conversations than slots.", rounds=1)
    options.add_argument("--talks", type=int, default=12)
    options.add_argument("--turns", type=int, default=4)
    options.add_argument("--clients", type=int, default=4)
    options.add_argument("--words", type=int, default=450, help="of each conversation's own system message")
    options.add_argument("--answer", type=int, default=24, help="tokens")
    args = options.parse_args()
    if args.quick:
        args.talks, args.turns, args.words, args.answer = 6, 3, 280, 8  # less is not saved
    page = Page("conversations")
    with workplace() as folder, arms(folder, args) as all_arms:
        runs = trio.run(measure, all_arms, args)
    page.data["runs"] = [r.data() for r in runs]
    show(page, runs)
    plot(args.plot, f"{args.talks} conversations of {args.turns} turns on {SLOTS} slots", draw(runs))
    return page.close(args.json)


if __name__ == "__main__":
    sys.exit(main())
