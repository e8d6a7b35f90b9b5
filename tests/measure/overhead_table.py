"""What a gateway adds to a request: KVStream beside the least that the same libraries can do, and beside LiteLLM's.

    python tests/measure/overhead_table.py [--litellm PATH/bin/litellm] [--repeats 3] [--rounds 200] [--json FILE]

One canned backend (64 chunks per stream), and in front of it, each in a process of its own: the bare quart-trio + httpx
pass-through, KVStream with its defaults, and LiteLLM. Direct and gateways take turns request by request, so that what
else happens on the machine happens to all of them. *Added* is a median minus the direct median of the same repeat; a
ratio is formed within a repeat, and the median over the repeats is held against the bars.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen
from client import RawChat, Times
from figures import Page, Summary, progress, summary
from processes import Child, bare_proxy, canned_backend, kvstream, litellm, workplace
from rich.progress import Progress

BODY = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
TTFT_BARE_MAX, TOTAL_BARE_MAX, TOTAL_LITELLM_MIN = 1.5, 1.2, 6.0


@frozen
class Repeat:
    """One repeat: per target the summaries, and what it added to the direct medians."""

    ttft: dict[str, Summary]
    total: dict[str, Summary]

    def added(self, figure: str, name: str) -> float:
        values = self.ttft if figure == "ttft" else self.total
        return values[name].median - values["direct"].median

    def ratio(self, figure: str, name: str, to: str) -> float:
        return self.added(figure, name) / self.added(figure, to)


def measure(targets: Sequence[tuple[str, Child]], rounds: int, warm: int, show: Progress) -> Repeat:
    """One repeat. Whoever begins changes from round to round: the place behind a slow neighbour is passed around."""
    times: dict[str, list[Times]] = {name: [] for name, _ in targets}
    task = show.add_task("rounds", total=rounds + warm)
    with contextlib.ExitStack() as stack:
        chats = [(name, stack.enter_context(RawChat(name, child.port, BODY))) for name, child in targets]
        for number in range(rounds + warm):
            place = number % len(chats)
            for name, chat in chats[place:] + chats[:place]:
                taken = chat.stream()
                if number >= warm:
                    times[name].append(taken)
            show.advance(task)
    show.remove_task(task)
    return Repeat({name: summary([t.ttft_ms for t in taken]) for name, taken in times.items()},
                  {name: summary([t.total_ms for t in taken]) for name, taken in times.items()})


def run(args: argparse.Namespace) -> list[Repeat]:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(workplace())
        backend = stack.enter_context(canned_backend(folder, args.chunks))
        targets = [("direct", backend), ("bare", stack.enter_context(bare_proxy(folder, backend))),
                   ("kvstream", stack.enter_context(kvstream(folder, backend, "openai")))]
        if args.litellm:
            targets.append(("litellm", stack.enter_context(litellm(folder, backend, args.litellm))))
        show = stack.enter_context(progress())
        return [measure(targets, args.rounds, args.warm, show) for _ in range(args.repeats)]


def print_figure(page: Page, figure: str, title: str, repeats: Sequence[Repeat]) -> None:
    rows = []
    for name in getattr(repeats[0], figure):
        of = [getattr(r, figure)[name] for r in repeats]
        added = summary([r.added(figure, name) for r in repeats])
        rows.append((name, f"{summary([s.median for s in of]).show()}", f"{summary([s.p99 for s in of]).show()}",
                     "" if name == "direct" else f"+{added.show()}", "" if name == "direct" else added.spread()))
    page.table(title, ("", "median ms", "p99 ms", "added ms", "added, over the repeats"), rows)


def hold(page: Page, repeats: Sequence[Repeat], with_litellm: bool) -> None:
    ttft = summary([r.ratio("ttft", "kvstream", "bare") for r in repeats])
    total = summary([r.ratio("total", "kvstream", "bare") for r in repeats])
    page.data |= {"ratio_ttft_bare": ttft, "ratio_total_bare": total}
    page.bar(f"added TTFT, kvstream / bare <= {TTFT_BARE_MAX}", f"{ttft.show()} ({ttft.spread()})",
             ttft.median <= TTFT_BARE_MAX)
    page.bar(f"added total, kvstream / bare <= {TOTAL_BARE_MAX}", f"{total.show()} ({total.spread()})",
             total.median <= TOTAL_BARE_MAX)
    text = f"added total, litellm / kvstream >= {TOTAL_LITELLM_MIN:g}"
    if not with_litellm:
        page.bar(text, "no --litellm", None)
        return
    over = summary([r.ratio("total", "litellm", "kvstream") for r in repeats])
    page.data["ratio_total_litellm"] = over
    page.bar(text, f"{over.show()} ({over.spread()})", over.median >= TOTAL_LITELLM_MIN)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What a gateway adds to a request.")
    parser.add_argument("--litellm", metavar="PATH", help="the litellm executable of an environment of its own")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=200, help="requests per target and repeat")
    parser.add_argument("--warm", type=int, default=20, help="rounds before each repeat that do not count")
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    page = Page("overhead")
    if not args.litellm or not Path(args.litellm).is_file():
        where = f"{args.litellm} is not there" if args.litellm else "no --litellm PATH given"
        page.say(f"LiteLLM's row is left out: {where} (pip install 'litellm[proxy]' in an environment of its own)")
        args.litellm = None
    repeats = run(args)
    page.data |= {"rounds": args.rounds, "chunks": args.chunks, "repeats": list(repeats)}
    print_figure(page, "ttft", "Time to the first token", repeats)
    print_figure(page, "total", f"Whole stream of {args.chunks} chunks", repeats)
    hold(page, repeats, bool(args.litellm))
    page.say(f"{args.repeats} repeats of {args.rounds} requests per target, one at a time, taking turns")
    return page.close(args.json)


if __name__ == "__main__":
    sys.exit(main())
