"""Eight streamed chats share one cold prefix and come all at once: how long until each has its first token?

    python tests/measure/show_inject_fanout.py [--rounds 5] [--requests 8] [--words 1100] [--json FILE] [--plot FILE]

Direct is a llama.cpp server with its default flags (four slots of a unified pool, 8 GiB of RAM prompt cache); KVStream
stands in front of one with `-np 4 --cache-ram 0 --slot-save-path`. They take turns, with a new prefix in each round,
the same for both. Computed tokens are those of each server's own counter; the least that could be computed is counted
with the server's tokeniser.
"""

from __future__ import annotations

import argparse
import random
import sys
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
    kvstream_arm,
    llama_bare,
    llama_hard,
    median,
    parser,
    plot,
    prompt_ids,
    quiet,
    seeds,
    system_and_user,
    tell,
    words,
    workplace,
)
from inject_sums import Fan, fan_of, ratio, talk_computed

SLOTS, CONTEXT, ANSWER = 4, 2048, 16


@define
class Round:
    """One arm in one round."""

    arm: str
    seed: int
    fan: Fan
    heard: list[Heard]
    counted: Counted
    all_first_s: float = 0.0
    first_s: list[float] = field(factory=list)
    computed_told: int = 0

    def __attrs_post_init__(self) -> None:
        self.first_s = sorted(one.ttft_s for one in self.heard)
        self.all_first_s = self.first_s[-1]
        self.computed_told = talk_computed([one.turn for one in self.heard])

    @property
    def failed(self) -> int:
        return sum(not one.served for one in self.heard)

    def data(self) -> dict[str, Any]:
        return {"arm": self.arm, "seed": self.seed, "all_first_s": self.all_first_s, "first_s": self.first_s,
                "computed": self.counted.computed, "cached": self.counted.cached, "computed_told": self.computed_told,
                "ideal": self.fan.ideal, "prefix": self.fan.prefix, "failed": self.failed}


async def fan_out(arm: Arm, seed: int, args: argparse.Namespace) -> Round:
    rng = random.Random(seed)
    prefix = words(rng, args.words)
    chats = [system_and_user(prefix, f"Question {i}: {rng.random()}") for i in range(args.requests)]
    fan = fan_of([await prompt_ids(arm.runtime, messages) for messages in chats])
    await quiet(arm)
    before, heard = await counted(arm.runtime), [Heard() for _ in chats]
    async with trio.open_nursery() as nursery:
        for messages, one in zip(chats, heard, strict=True):
            nursery.start_soon(chat, arm.url, messages, ANSWER, one)
    await quiet(arm)
    done = Round(arm.name, seed, fan, heard, (await counted(arm.runtime)).since(before))
    tell(f"  {arm.name}: all first tokens after {done.all_first_s:.2f} s, {done.counted.computed:.0f} tokens computed")
    return done


async def measure(arms: list[Arm], args: argparse.Namespace) -> list[Round]:
    rounds = []
    for number, seed in enumerate(seeds(args)):
        tell(f"round {number + 1} of {args.rounds}, seed {seed}")
        for arm in arms if number % 2 == 0 else arms[::-1]:
            rounds.append(await fan_out(arm, seed, args))
    return rounds


def show(page: Page, rounds: list[Round], slack: float) -> None:
    rows = [(r.arm, r.seed, f"{r.all_first_s:.2f}", f"{median(r.first_s):.2f}", f"{r.counted.computed:.0f}",
             f"{r.counted.cached:.0f}", r.fan.ideal, f"{r.counted.computed / r.fan.ideal:.2f}", r.failed)
            for r in rounds]
    page.table("One cold prefix, all at once", ["arm", "seed", "all first s", "median first s", "computed", "cached",
                                               "ideal", "computed/ideal", "failed"], rows)
    direct, ours = ([r for r in rounds if r.arm == name] for name in ("direct", "kvstream"))
    faster = ratio([r.all_first_s for r in direct], [r.all_first_s for r in ours])
    page.bar("time until all have their first token, direct over KVStream, medians, >= 2.4",
             f"{faster:.2f} ({median([r.all_first_s for r in direct]):.2f} s over "
             f"{median([r.all_first_s for r in ours]):.2f} s)", faster >= 2.4)
    worst = max(ours, key=lambda r: r.counted.computed / r.fan.bound(slack))
    page.bar(f"tokens computed <= {slack} x one prefix + the suffixes, in every round, by the server's counter",
             f"{worst.counted.computed:.0f} <= {worst.fan.bound(slack):.0f} at worst; direct "
             f"{median([r.counted.computed for r in direct]):.0f}",
             all(r.counted.computed <= r.fan.bound(slack) for r in ours))
    page.bar("no request fails", f"{sum(r.failed for r in ours)}, direct {sum(r.failed for r in direct)}",
             not any(r.failed for r in ours))


def draw(rounds: list[Round]) -> Any:
    def on(axes: Any) -> None:
        for name, colour in (("direct", "tab:gray"), ("kvstream", "tab:blue")):
            for i, r in enumerate([r for r in rounds if r.arm == name]):
                axes.step(r.first_s, range(1, len(r.first_s) + 1), where="post", color=colour, alpha=0.7,
                          label=name if i == 0 else None)
        axes.set_xlabel("seconds since all were sent")
        axes.set_ylabel("requests with a first token")
        axes.legend()
    return on


def main() -> int:
    options = parser("Fan-out of one cold prefix.", rounds=5)
    options.add_argument("--requests", type=int, default=8)
    options.add_argument("--words", type=int, default=1100)
    args = options.parse_args()
    if args.quick:
        args.rounds, args.words = 1, min(args.words, 560)  # shorter ones are below leader_tokens
    page = Page("fan-out")
    with workplace() as folder:
        with llama_bare(folder / "direct", threads=args.threads) as bare, \
                llama_hard(folder / "hard", SLOTS, CONTEXT, threads=args.threads) as hard, \
                kvstream_arm(Path(folder / "gateway"), hard) as ours:
            rounds = trio.run(measure, [Arm("direct", bare), ours], args)
    page.data["rounds"] = [r.data() for r in rounds]
    show(page, rounds, 1.3)
    plot(args.plot, f"{args.requests} chats share a cold prefix of {rounds[0].fan.prefix} tokens", draw(rounds))
    return page.close(args.json)


if __name__ == "__main__":
    sys.exit(main())
