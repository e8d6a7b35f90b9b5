"""Forty clients at once on four slots: the runtime's own queue stays empty, everyone is served, in the order promised.

    python tests/measure/show_queue.py [--clients 40] [--repeats 2] [--json FILE]

The real llama.cpp server with 4 slots of a context each. ``llamacpp:requests_deferred`` is read every 50 ms: it counts
the requests that the runtime took and has no slot for, which nobody can take back. The order promised is arrival: the
positions that ``/status`` showed while everyone waited. Requests become comparable to it by the id in ``/status`` and
in the ``X-Request-Id`` of their answer. The same forty without KVStream are the contrast.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trio
from attrs import define, field
from client import Answer, chat, get_json, metric
from figures import Page, progress, summary
from processes import Child, kvstream, llama, workplace
from rich.progress import Progress

SLOTS, CONTEXT = 4, 2048
SAMPLE_S = 0.05
PATIENT = {"KVSTREAM_SCHEDULER__MAX_WAIT_S": "3600"}
TOKENS_MIN, TOKENS_STEP = 8, 4  # answers of different lengths, so that slots do not come free in step


@define
class Run:
    """What one run of all clients showed. ``promised`` are request ids by their place, first in front."""

    way: str
    answers: list[Answer] = field(factory=list)
    deferred: list[float] = field(factory=list)
    positions: list[list[str]] = field(factory=list)
    took_s: float = 0.0

    @property
    def promised(self) -> list[str]:
        """The last of the fullest looks: until then somebody whose prompt was still being counted, and who came before,
        may have taken the place kept for him."""
        return max(reversed(self.positions), key=len, default=[])

    @property
    def overtaken(self) -> int:
        """Pairs that changed places from one look to the next."""
        pairs = 0
        for before, after in zip(self.positions, self.positions[1:], strict=False):
            place = {name: number for number, name in enumerate(before)}
            pairs += inversions([place[name] for name in after if name in place])
        return pairs

    def order(self) -> list[tuple[str, int]]:
        """(request id, place by the moment of sending), in the order of first tokens. Forty tasks that start at once
        start in any order: the moment of sending counts, not the number of the client."""
        by_sending = sorted(self.answers, key=lambda a: a.sent)
        order = sorted((a.first, n) for n, a in enumerate(by_sending) if a.first is not None)
        return [(by_sending[n].headers.get("x-request-id", ""), n) for _, n in order]


def inversions(order: Sequence[int], apart: int = 1) -> int:
    """Pairs that came in the other order than their numbers, which lie at least ``apart`` apart."""
    return sum(1 for place, number in enumerate(order) for later in order[place + 1:] if number - later >= apart)


def body(number: int, repeat: int) -> dict[str, Any]:
    ask = f"Client {number} of round {repeat}: tell me something about the number {number * 37 + repeat}."
    return {"messages": [{"role": "user", "content": ask}], "ignore_eos": True, "temperature": 0,
            "max_tokens": TOKENS_MIN + TOKENS_STEP * (number % 5)}


async def everyone(run: Run, child: Child, runtime: Child, clients: int, repeat: int, show: Progress) -> None:
    """All clients at once; samplers look on until the last is done."""
    task = show.add_task(f"{run.way}, round {repeat + 1}", total=clients)
    run.answers = [Answer(0.0) for _ in range(clients)]

    async def one(number: int) -> None:
        await chat(child.port, body(number, repeat), run.answers[number])
        show.advance(task)

    began = trio.current_time()
    async with trio.open_nursery() as samplers:
        samplers.start_soon(sample_deferred, runtime.port, run.deferred)
        if child is not runtime:
            samplers.start_soon(sample_positions, child.port, run.positions)
        async with trio.open_nursery() as nursery:
            for number in range(clients):
                nursery.start_soon(one, number)
        run.took_s = trio.current_time() - began
        samplers.cancel_scope.cancel()
    show.remove_task(task)


async def sample_deferred(port: int, values: list[float]) -> None:
    while True:
        values.append(await metric(port, "llamacpp:requests_deferred"))
        await trio.sleep(SAMPLE_S)


async def sample_positions(port: int, seen: list[list[str]]) -> None:
    while True:
        queue = (await get_json(port, "/status"))["queue"]["requests"]
        seen.append([request["id"] for request in sorted(queue, key=lambda r: r["position"])])
        await trio.sleep(SAMPLE_S)


async def both(runtime: Child, gateway: Child, clients: int, repeats: int, show: Progress) -> list[Run]:
    runs = []
    for repeat in range(repeats):
        for way, child in (("kvstream", gateway), ("direct", runtime)):
            run = Run(way)
            await everyone(run, child, runtime, clients, repeat, show)
            runs.append(run)
    return runs


def kept_promise(run: Run, apart: int = 1) -> tuple[int, int]:
    """(inversions of first tokens against the positions shown, how many positions were shown).

    Neighbours are in the runtime at the same time, and which of them has its first token first is the runtime's affair.
    A position was not kept if somebody was overtaken by one who stood a whole set of seats behind.
    """
    place = {name: number for number, name in enumerate(run.promised)}
    order = [place[name] for name, _ in run.order() if name in place]
    return inversions(order, apart), len(order)


def print_runs(page: Page, runs: Sequence[Run]) -> None:
    rows = []
    for run in runs:
        waits = summary([a.first - a.sent for a in run.answers if a.first is not None])
        broken, shown = kept_promise(run)
        rows.append((run.way, f"{sum(a.served for a in run.answers)} of {len(run.answers)}", f"{max(run.deferred):g}",
                     len(run.deferred), f"{broken} in {shown}" if run.promised else "none shown",
                     inversions([n for _, n in run.order()]), f"{waits.median:.2f}", f"{waits.high:.2f}",
                     f"{run.took_s:.1f}"))
    page.table("Rounds, in turn", ("way", "served", "deferred max", "samples", "inversions: positions",
                                   "inversions: sending", "first token s", "last s", "all s"), rows)


def print_order(page: Page, run: Run) -> None:
    """The positions promised to each request, in the order in which first tokens came."""
    place = {name: number + 1 for number, name in enumerate(run.promised)}
    page.say("positions in the queue, in the order of first tokens (-: admitted before the queue was looked at): "
             + " ".join(str(place.get(name, "-")) for name, _ in run.order()))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Many clients on four slots.")
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    page = Page("queue")
    with workplace() as folder, llama(folder, "-np", str(SLOTS), "-c", str(SLOTS * CONTEXT), "-b", "512") as runtime:
        # On a slow machine the last of forty waits longer than the default lets it, and that is not the question here.
        with kvstream(folder, runtime, "llamacpp", env=PATIENT) as gateway, progress() as show:
            runs = trio.run(both, runtime, gateway, args.clients, args.repeats, show)
    page.data["runs"] = [{"way": r.way, "took_s": r.took_s, "deferred": r.deferred, "promised": r.promised,
                          "order": r.order(), "outcomes": [a.outcome for a in r.answers]} for r in runs]
    print_runs(page, runs)
    ours = [r for r in runs if r.way == "kvstream"]
    for run in ours:
        print_order(page, run)
    deferred = max(max(r.deferred) for r in ours)
    page.bar("through KVStream requests_deferred stays 0", f"{deferred:g}", deferred == 0)
    served, all_of_them = sum(a.served for r in ours for a in r.answers), sum(len(r.answers) for r in ours)
    page.bar("every client is served", f"{served} of {all_of_them}", served == all_of_them)
    broken = sum(kept_promise(r, SLOTS)[0] for r in ours)
    close = sum(kept_promise(r)[0] for r in ours)
    page.bar(f"no first token before that of one {SLOTS} or more positions ahead",
             f"{broken} ({close} among those seated together)", broken == 0)
    overtaken = sum(r.overtaken for r in ours)
    page.bar("nobody is overtaken from one look to the next", f"{overtaken} pairs", overtaken == 0)
    return page.close(args.json)


if __name__ == "__main__":
    sys.exit(main())
