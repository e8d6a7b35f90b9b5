"""Three streams decode while a long prompt joins, and then a second one: how long do the three stand still?

    python tests/measure/show_joining.py [--repeats 1] [--prompt 1900] [--json FILE]

The real llama.cpp server, three ways: as it comes (batches of 2048), with `-b 512`, and as `kvstream serve --model`
starts it, with KVStream in front. Each repeat starts each of them anew, in turn. The first long prompt is sent when
each of the three has some tokens, the second ``--apart`` seconds later. A gap is the time between two tokens of one of
the three; those count that end between the first long prompt's sending and the second one's first token. All three have
the same model, threads, slots and contexts.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import trio
from attrs import define, field
from figures import Page, progress, summary
from processes import Child, kvstream_serving, llama, workplace
from rich.progress import Progress
from talking import Heard, talk, talking_to

from kvstream.bench.plan import Kind, Load, Talk

STREAMS, JOINERS = 3, 2
SLOTS, CONTEXT = STREAMS + JOINERS, 2560
STREAM_PROMPT, STREAM_TOKENS, FLOWING = 48, 2000, 8
JOINER_TOKENS = 16
WAYS = ("direct", "direct -b 512", "kvstream serve")


@define
class Run:
    """One way in one repeat. Gaps in seconds."""

    way: str
    repeat: int
    streams: list[Heard] = field(factory=lambda: [Heard() for _ in range(STREAMS)])
    joiners: list[Heard] = field(factory=lambda: [Heard() for _ in range(JOINERS)])
    prompt_tokens: list[int] = field(factory=list)

    def gaps(self) -> list[float]:
        """Those that the joining prompts could lengthen."""
        begin, end = self.joiners[0].sent, self.joiners[-1].reader.first_token
        end = math.inf if end is None else end
        found = []
        for stream in self.streams:
            times = stream.reader.token_times
            found += [b - a for a, b in pairwise(times) if b > begin and a < end]
        return found

    def calm(self) -> list[float]:
        """The gaps before anybody joined."""
        times = [s.reader.token_times for s in self.streams]
        return [b - a for row in times for a, b in pairwise(row) if b <= self.joiners[0].sent]


@contextlib.contextmanager
def started(way: str, folder: Path) -> Iterator[Child]:
    slots = ("-np", str(SLOTS), "-c", str(SLOTS * CONTEXT))
    if way == "kvstream serve":
        env = {"KVSTREAM_EMBEDDED__SLOTS": str(SLOTS), "KVSTREAM_EMBEDDED__CONTEXT_TOKENS": str(CONTEXT)}
        with kvstream_serving(folder, env) as child:
            yield child
    else:
        with llama(folder, *slots, *(("-b", "512") if way.endswith("512") else ())) as child:
            yield child


async def scenario(child: Child, run: Run, prompt_tokens: int, apart_s: float) -> None:
    flowing, joining = Kind("stream", 1, STREAM_PROMPT, STREAM_TOKENS), Kind("joining", 1, prompt_tokens, JOINER_TOKENS)
    load = Load((flowing, joining), seed=run.repeat)
    async with talking_to(run.way, child.url, load) as target:
        await talk(target, load, Talk(-1, Kind("warm-up", 1, 128, 4), 1), Heard())
        async with trio.open_nursery() as streams:
            for number, heard in enumerate(run.streams):
                streams.start_soon(talk, target, load, Talk(number, flowing, 1), heard)
            while min(len(heard.reader.token_times) for heard in run.streams) < FLOWING:
                await trio.sleep(0.01)
            async with trio.open_nursery() as joiners:
                for number, heard in enumerate(run.joiners):
                    joiners.start_soon(talk, target, load, Talk(STREAMS + number, joining, 1), heard)
                    await trio.sleep(apart_s)
            streams.cancel_scope.cancel()  # they were long enough
    run.prompt_tokens = [heard.reader.usage.prompt for heard in run.joiners if heard.reader.usage is not None]


def measure(folder: Path, repeats: int, prompt_tokens: int, apart_s: float, show: Progress) -> list[Run]:
    task = show.add_task("three ways in turn", total=repeats * len(WAYS))
    runs = []
    for repeat in range(repeats):
        for way in WAYS:
            run = Run(way, repeat)
            place = folder / f"{repeat}-{WAYS.index(way)}"
            place.mkdir()
            with started(way, place) as child:
                trio.run(scenario, child, run, prompt_tokens, apart_s)
            runs.append(run)
            show.advance(task)
    return runs


def figures(run: Run) -> dict[str, Any]:
    gaps, calm = summary(run.gaps()), summary(run.calm())
    first, second = run.joiners
    return {
        "way": run.way, "repeat": run.repeat, "gaps": run.gaps(), "gap_p50_s": gaps.median, "gap_p99_s": gaps.p99,
        "gap_max_s": gaps.high, "gap_calm_p50_s": calm.median, "n": gaps.n,
        "ttft_s": [first.ttft_s, second.ttft_s], "finish_s": [first.took_s, second.took_s],
        "finished": sum(heard.served for heard in run.joiners), "prompt_tokens": run.prompt_tokens,
    }


def print_rows(page: Page, rows: Sequence[dict[str, Any]]) -> None:
    def s(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    page.table(
        "Gaps of the three streams while the long prompts join, and the long prompts themselves; seconds",
        ("way", "repeat", "calm p50", "gap p50", "gap p99", "gap max", "n", "1st: first token", "end",
         "2nd: first token", "end"),
        [(r["way"], r["repeat"] + 1, s(r["gap_calm_p50_s"]), s(r["gap_p50_s"]), s(r["gap_p99_s"]), s(r["gap_max_s"]),
          r["n"], s(r["ttft_s"][0]), s(r["finish_s"][0]), s(r["ttft_s"][1]), s(r["finish_s"][1])) for r in rows])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Long prompts that join running streams.")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=1900, help="tokens of each joining prompt")
    parser.add_argument("--apart", type=float, default=1.0, help="seconds between the two")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    page = Page("joining")
    with workplace() as folder, progress() as show:
        runs = measure(folder, args.repeats, args.prompt, args.apart, show)
    rows = [figures(run) for run in runs]
    page.data |= {"rows": rows, "prompt": args.prompt, "apart_s": args.apart, "slots": SLOTS, "context": CONTEXT}
    print_rows(page, rows)
    pooled = {way: summary([gap for row in rows if row["way"] == way for gap in row["gaps"]]) for way in WAYS}
    page.table("All repeats together; seconds", ("way", "gap p50", "gap p99", "gap max", "n"),
               [(way, f"{found.median:.3f}", f"{found.p99:.3f}", f"{found.high:.3f}", found.n)
                for way, found in pooled.items()])
    ours, others = pooled[WAYS[2]], [pooled[way] for way in WAYS[:2]]
    page.bar("p99 gap through kvstream serve is the smallest", f"{ours.p99:.3f} s against "
             + " and ".join(f"{other.p99:.3f} s" for other in others), all(ours.p99 < other.p99 for other in others))
    done = sum(row["finished"] for row in rows)
    page.bar("every joining prompt finishes", f"{done} of {JOINERS * len(rows)}", done == JOINERS * len(rows))
    lengths = [tokens for row in rows for tokens in row["prompt_tokens"]]
    page.bar(f"joining prompts have {args.prompt} tokens", f"{min(lengths, default=0)} to {max(lengths, default=0)}",
             bool(lengths) and all(abs(tokens - args.prompt) <= 5 for tokens in lengths))
    return page.close(args.json)


if __name__ == "__main__":
    sys.exit(main())
