"""A server on which a restore says that it worked and has no effect: what does it cost before KVStream sees it?

    python tests/measure/show_inject_noop.py [--rounds 3] [--talks 10] [--turns 4] [--model FILE.gguf] [--json FILE]

Twice the fake runtime: one where no restore has an effect, as with a model of recurrent layers, which the self-check
sees; and one where only short ones have, as with a sliding window, which shows in the answers alone. Or, with
``--model``, a real llama.cpp server with that model. Two KVStreams before two of them, one with hard inject as it is
shipped, one with it off, serve the same conversations; in each turn the first goes first, then the other. Then: was it
switched off, after how many restores, and what are the first tokens' waits from then on?
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
    chat,
    counted,
    get,
    kvstream_arm,
    llama_hard,
    median,
    mode_of,
    parser,
    plot,
    quiet,
    seeds,
    tell,
    words,
    workplace,
)
from inject_sums import ratio, samples, total
from processes import HERE, Child, environment, running

from kvstream.gateway.embedded_find import free_port

SLOTS, CONTEXT, ANSWER = 4, 2048, 8
ARMS = ("hard inject on", "hard inject off")
KNOBS = {"restore_mode": "noop_200", "slots": SLOTS, "n_ctx": SLOTS * CONTEXT, "prefill_rate": 1500.0,
         "decode_rate": 100.0, "save_s": 0.01, "restore_s": 0.005}


KINDS: dict[str, dict[str, int]] = {"no restore has an effect": {}, "only short ones have": {"window": 64}}


@define
class Seen:
    """One arm. ``ttft_s`` by turn in the order of sending; ``modes`` what it said before each."""

    name: str
    ttft_s: list[float] = field(factory=list)
    modes: list[str] = field(factory=list)
    texts: list[str] = field(factory=list)
    failed: int = 0
    computed: float = 0.0
    ineffective: float = 0.0
    restores: float = 0.0


def fake(folder: Path, kind: str) -> contextlib.AbstractContextManager[Child]:
    files = folder / "slots"
    files.mkdir(parents=True)
    port = free_port()
    argv = [sys.executable, str(HERE / "inject_fake.py"), str(port), str(files), json.dumps(KNOBS | KINDS[kind])]
    return running("fake", argv, port, "/health", folder, env=environment())


@contextlib.contextmanager
def arms(folder: Path, kind: str, args: Namespace) -> Iterator[list[Arm]]:
    with contextlib.ExitStack() as stack:
        made = []
        for name, mode in zip(ARMS, ("auto", "off"), strict=True):
            place = folder / mode
            server = stack.enter_context(fake(place, kind) if args.model is None else llama_hard(
                place, SLOTS, CONTEXT, model=Path(args.model).resolve(), threads=args.threads))
            env = {"KVSTREAM_INJECT__MODE": mode, "KVSTREAM_INJECT__DIR": f"{place / 'slots'}{os.sep}"}
            made.append(stack.enter_context(
                kvstream_arm(place / "gateway", server, name, await_hard=mode == "auto", **env)))
        yield made


async def measure(both: list[Arm], args: Namespace) -> list[Seen]:
    seen = [Seen(arm.name) for arm in both]
    start = [await counted(arm.runtime) for arm in both]
    for seed in seeds(args):
        rng = random.Random(seed)
        talks = [[[{"role": "system", "content": words(rng, args.words)}]] * 2 for _ in range(args.talks)]
        for turn in range(args.turns):
            for talk in talks:
                question = {"role": "user", "content": f"Turn {turn}: {words(rng, 12)}?"}
                for i, arm in enumerate(both):
                    await one(arm, seen[i], talk, i, question)
            tell(f"  turn {turn}: " + "; ".join(f"{s.name}: {s.modes[-1]}, {median(s.ttft_s):.3f} s" for s in seen))
    for i, arm in enumerate(both):
        await quiet(arm)
        page = samples((await get(arm.url, "/metrics")).text)
        seen[i].computed = (await counted(arm.runtime)).since(start[i]).computed
        seen[i].ineffective = total(page, "kvstream_restore_ineffective_total")
        seen[i].restores = total(page, "kvstream_inject_restores_total")
    return seen


async def one(arm: Arm, seen: Seen, talk: list[list[dict[str, str]]], i: int, question: dict[str, str]) -> None:
    seen.modes.append(mode_of((await get(arm.url, "/status")).json()))
    messages = [*talk[i], question]
    heard = await chat(arm.url, messages, ANSWER)
    talk[i] = [*messages, {"role": "assistant", "content": heard.text}]
    seen.ttft_s.append(heard.ttft_s)
    seen.texts.append(heard.text)
    seen.failed += not heard.served


def show(page: Page, kind: str, seen: list[Seen], real: bool) -> int:
    on, off = seen
    switched = next((i for i, mode in enumerate(on.modes) if mode == "soft"), len(on.modes))
    after = [s.ttft_s[switched:] for s in seen]
    rows = [(s.name, s.modes[-1], f"{s.restores:.0f}", f"{s.ineffective:.0f}", f"{s.computed:.0f}",
             f"{median(s.ttft_s):.3f}", f"{median(part):.3f}", s.failed) for s, part in zip(seen, after, strict=True)]
    page.table(kind, ["arm", "mode at the end", "restores", "without effect",
               "computed", "median first token s", "since it was off", "failed"], rows)
    page.bar(f"{kind}: hard inject switches itself off",
             f"{on.modes[-1]!r} after {switched} of {len(on.modes)} requests and "
             f"{on.ineffective:.0f} restores without effect", on.modes[-1] == "soft")
    if after[0]:
        slower = ratio(after[0], after[1])
        page.bar(f"{kind}: first token from then on, on over off, medians, <= 1.05",
                 f"{slower:.3f} ({median(after[0]):.3f} s over {median(after[1]):.3f} s)", slower <= 1.05)
    page.bar(f"{kind}: over the whole run, for comparison", f"{ratio(on.ttft_s, off.ttft_s):.3f}", None)
    differ = sum(a != b for a, b in zip(on.texts, off.texts, strict=True))
    page.bar(f"{kind}: no request fails, and every text is the same",
             f"{on.failed} failed, {differ} of {len(on.texts)} differ",
             not on.failed and (real or not differ))
    return switched


def draw(seen: list[Seen], switched: int) -> Any:
    def on(axes: Any) -> None:
        for s, colour in zip(seen, ("tab:blue", "tab:gray"), strict=True):
            axes.plot(range(len(s.ttft_s)), s.ttft_s, ".", color=colour, label=s.name)
        axes.axvline(switched, color="tab:red", linewidth=1, label="switched off")
        axes.set_xlabel("request")
        axes.set_ylabel("time to first token, s")
        axes.legend()
    return on


def main() -> int:
    options = parser("Restores without effect.", rounds=1)
    options.add_argument("--talks", type=int, default=10)
    options.add_argument("--turns", type=int, default=4)
    options.add_argument("--words", type=int, default=500)
    options.add_argument("--model", metavar="FILE.gguf", help="a real server with this model instead of the fake")
    args = options.parse_args()
    if args.quick:
        args.talks, args.turns = 6, 3
    page = Page("restores without effect")
    for number, kind in enumerate(KINDS if args.model is None else [args.model]):
        tell(kind)
        with workplace() as folder, arms(folder, kind, args) as both:
            seen = trio.run(measure, both, args)
        page.data[kind] = [{"name": s.name, "ttft_s": s.ttft_s, "modes": s.modes, "computed": s.computed,
                            "restores": s.restores, "ineffective": s.ineffective, "failed": s.failed} for s in seen]
        switched = show(page, kind, seen, args.model is not None)
        file = args.plot and args.plot.with_stem(args.plot.stem + (f"-{number + 1}" if number else ""))
        plot(file, f"Restores without effect: {kind}", draw(seen, switched))
    return page.close(args.json)


if __name__ == "__main__":
    sys.exit(main())
