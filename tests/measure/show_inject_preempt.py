"""One slot, a long answer of low priority in it, and a chat of high priority comes: how long does it wait, and what
does the long answer look like afterwards?

    python tests/measure/show_inject_preempt.py [--rounds 3] [--tokens 400] [--after 60] [--json FILE] [--plot FILE.png]

Three arms, each before `-np 1 --cache-ram 0`: direct, KVStream that preempts nobody, KVStream that swaps. The text of
the preempted answer is compared with an answer nobody interrupted. How far that can be equal is measured too, on the
direct server: the same greedy answer twice from a cold slot; once more after the prompt was in the cache; and by hand
what a preemption does, stopped at the same place and continued from its own tokens.
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
    Heard,
    chat,
    get,
    kvstream_arm,
    llama_hard,
    median,
    parser,
    plot,
    post,
    prompt_ids,
    quiet,
    seeds,
    system_and_user,
    tell,
    words,
    workplace,
)
from inject_sums import first_difference, ratio, samples, total

CONTEXT = 2048
ARMS = ("direct", "kvstream, off", "kvstream, swap")
POLICY = "KVSTREAM_SCHEDULER__PREEMPTION_POLICY"


@define
class Run:
    """One arm in one round. ``equal_for`` characters the low answer equals an uninterrupted one, of ``length``."""

    arm: str
    seed: int
    high_ttft_s: float
    low_took_s: float
    pieces_before: int
    length: int
    equal_for: int
    whole: bool
    preempted: int
    failed: int


@contextlib.contextmanager
def arms(folder: Path, args: Namespace) -> Iterator[list[Arm]]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(llama_hard(folder / f"server{i}", 1, CONTEXT, threads=args.threads))
                   for i in range(3)]
        made = [Arm(ARMS[0], servers[0])]
        for name, server, policy in zip(ARMS[1:], servers[1:], ("off", "swap"), strict=True):
            made.append(stack.enter_context(kvstream_arm(folder / policy, server, name, **{POLICY: policy})))
        yield made


def low_chat(seed: int) -> list[dict[str, str]]:
    return system_and_user(f"You tell long stories. {words(random.Random(seed), 60)}", "Tell me a very long story.")


async def erased(arm: Arm) -> None:
    """A cold slot, on a server of which we know everything."""
    await post(arm.runtime.url, "/slots/0?action=erase", {})


async def one(arm: Arm, seed: int, args: Namespace, reference: str) -> Run:
    await quiet(arm)
    before = await preemptions(arm)
    low, high = Heard(), Heard()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: chat(arm.url, low_chat(seed), args.tokens, low, priority="low"))
        while len(low.pieces) < args.after and low.ended is None:
            await trio.sleep(0.005)
        seen = len(low.pieces)
        await chat(arm.url, system_and_user("Answer briefly.", f"What is {seed} plus one?"), 8, high, priority="high")
    same = first_difference(low.text, reference)
    run = Run(arm.name, seed, high.ttft_s, (low.ended or 0.0) - low.sent, seen, len(reference),
              len(reference) if same is None else same, same is None, await preemptions(arm) - before,
              int(not low.served) + int(not high.served))
    tell(f"  {arm.name}: high waited {run.high_ttft_s:.3f} s; low equal for {run.equal_for} of {run.length} "
         f"characters, preempted {run.preempted} times{', ' + str(low.error or high.error) if run.failed else ''}")
    return run


async def preemptions(arm: Arm) -> int:
    if arm.gateway is None:
        return 0
    return int(total(samples((await get(arm.gateway.url, "/metrics")).text), "kvstream_preemptions_total"))


async def repeatable(arm: Arm, seed: int, args: Namespace, reference: list[int], ids: list[int]) -> dict[str, int]:
    """For how many tokens the runtime repeats its own greedy answer."""
    async def answer(prompt: list[int], tokens: int) -> list[int]:
        value = await post(arm.runtime.url, "/completion", {
            "prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "return_tokens": True})
        return [int(token) for token in value["tokens"]]

    def equal(found: list[int]) -> int:
        at = first_difference(found, reference)
        return len(reference) if at is None else at

    await erased(arm)
    cold = equal(await answer(ids, args.tokens))
    warm = equal(await answer(ids, args.tokens))
    await erased(arm)
    first = await answer(ids, args.after)
    name = {"filename": "byhand.kv"}
    await post(arm.runtime.url, "/slots/0?action=save", name)
    await post(arm.runtime.url, "/slots/0?action=erase", {})
    await post(arm.runtime.url, "/slots/0?action=restore", name)
    resumed = equal(first + await answer(ids + first, args.tokens - len(first)))
    return {"seed": seed, "tokens": len(reference), "cold": cold, "prompt in cache": warm, "resumed by hand": resumed}


async def measure(all_arms: list[Arm], args: Namespace) -> tuple[list[Run], list[dict[str, int]]]:
    runs, own = [], []
    direct = all_arms[0]
    for number, seed in enumerate(seeds(args)):
        tell(f"round {number + 1} of {args.rounds}, seed {seed}")
        await erased(direct)
        whole = await chat(direct.url, low_chat(seed), args.tokens)
        ids = await prompt_ids(direct.runtime, low_chat(seed))
        await erased(direct)
        tokens = (await post(direct.runtime.url, "/completion", {
            "prompt": ids, "n_predict": args.tokens, "temperature": 0, "ignore_eos": True, "return_tokens": True,
        }))["tokens"]
        own.append(await repeatable(direct, seed, args, tokens, ids))
        tell(f"  the runtime repeats itself: {own[-1]}")
        await erased(direct)
        runs += [await one(arm, seed, args, whole.text) for arm in all_arms]
    return runs, own


def show(page: Page, runs: list[Run], own: list[dict[str, int]]) -> None:
    page.table("One slot", ["arm", "seed", "high first token s", "low took s", "preempted", "equal characters", "of",
                            "failed"],
               [(r.arm, r.seed, f"{r.high_ttft_s:.3f}", f"{r.low_took_s:.2f}", r.preempted, r.equal_for, r.length,
                 r.failed) for r in runs])
    page.table("Tokens for which the runtime repeats its own greedy answer", list(own[0]),
               [list(row.values()) for row in own])
    direct, off, swap = ([r for r in runs if r.arm == name] for name in ARMS)
    wait, served = ([r.high_ttft_s for r in part] for part in (off, swap))
    alone = median([r.high_ttft_s for r in direct])
    page.bar("high priority's first token: waiting over preempting, medians", f"{ratio(wait, served):.1f} "
             f"({median(wait):.2f} s, direct {alone:.2f} s, over {median(served):.2f} s)", ratio(wait, served) > 1)
    page.bar("every low one was preempted", str([r.preempted for r in swap]), all(r.preempted >= 1 for r in swap))
    page.bar("the preempted text is the uninterrupted one, or as long equal as the runtime repeats itself when it is "
             "resumed by hand", f"whole {sum(r.whole for r in swap)} of {len(swap)}; equal for "
             f"{[r.equal_for for r in swap]} of {[r.length for r in swap]} characters; by hand "
             f"{[row['resumed by hand'] for row in own]} of {[row['tokens'] for row in own]} tokens",
             all(r.whole or row["resumed by hand"] < row["tokens"] for r, row in zip(swap, own, strict=True)))
    page.bar("no request fails", str(sum(r.failed for r in swap)), not any(r.failed for r in swap))


def draw(runs: list[Run]) -> Any:
    def on(axes: Any) -> None:
        values = [median([r.high_ttft_s for r in runs if r.arm == name]) for name in ARMS]
        bars = axes.bar(ARMS, values, color=["tab:gray", "tab:cyan", "tab:blue"])
        axes.bar_label(bars, [f"{v:.2f} s" for v in values])
        axes.set_ylabel("time to first token of the high one, s (median)")
    return on


def main() -> int:
    options = parser("Preemption on one slot.", rounds=3)
    options.add_argument("--tokens", type=int, default=400)
    options.add_argument("--after", type=int, default=60, help="pieces of the low answer that have come by then")
    args = options.parse_args()
    if args.quick:
        args.rounds, args.tokens, args.after = 1, 80, 15
    page = Page("preemption")
    with workplace() as folder, arms(folder, args) as all_arms:
        runs, own = trio.run(measure, all_arms, args)
    page.data |= {"runs": [attrs.asdict(r) for r in runs], "runtime_repeats": own}
    show(page, runs, own)
    plot(args.plot, "A chat of high priority meets a long answer of low priority on the only slot", draw(runs))
    return page.close(args.json)


if __name__ == "__main__":
    sys.exit(main())
