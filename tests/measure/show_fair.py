"""Two clients with a key each, and one of them floods: how long does the other wait, in service times?

    python tests/measure/show_fair.py [--flood 12] [--asks 3] [--json FILE]

The real llama.cpp server with 4 slots. The flood is so many requests at any moment; the other client asks one thing
after the other. Three ways: directly, where the runtime's queue knows nobody; through KVStream with one key for both;
through KVStream with a key each. A service time is what a request takes when all slots are busy and nobody waits. The
wait in the queue is what KVStream says; the runtime says nothing, so the time to the first token (the wait and the
reading of the prompt) stands beside it for all three.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import trio
from attrs import define, field
from figures import Page, progress, summary
from processes import Child, kvstream, llama, workplace
from rich.progress import Progress
from talking import Heard, talk, talking_to

from kvstream.bench.plan import Kind, Load, Talk
from kvstream.bench.target import Target

SLOTS, CONTEXT = 4, 1024
KEYS = ("flooding-key", "asking-key")
WITH_KEYS = {"KVSTREAM_AUTH__KEYS": ",".join(KEYS), "KVSTREAM_SCHEDULER__MAX_WAIT_S": "3600"}
KIND = Kind("all", 1.0, 96, 32)
LOAD = Load((KIND,))
WAYS = ("direct", "kvstream, one key", "kvstream, two keys")


@define
class Run:
    """``busy`` are requests with all slots busy and no queue, ``asked`` the other client's beside the flood."""

    way: str
    busy: list[Heard] = field(factory=list)
    flood: list[Heard] = field(factory=list)
    asked: list[Heard] = field(factory=list)

    @property
    def service_s(self) -> float:
        return summary([heard.took_s for heard in self.busy if heard.took_s is not None]).median

    def firsts(self) -> list[float]:
        """Seconds to the first token, of those that were served."""
        return [heard.ttft_s for heard in self.asked if heard.served and heard.ttft_s is not None]

    def waits(self) -> list[float]:
        """Seconds in the queue, where they were told."""
        return [heard.queue_s for heard in self.asked if heard.queue_s is not None]


async def one_way(run: Run, child: Child, flood: int, asks: int, show: Progress) -> None:
    task = show.add_task(run.way, total=asks)
    mine, other = (KEYS[0], KEYS[run.way == WAYS[2]]) if run.way != WAYS[0] else ("", "")
    numbers = count()
    async with talking_to(run.way, child.url, LOAD, mine) as flooding, talking_to(
            f"{run.way} asks", child.url, LOAD, other) as asking:
        await together(flooding, run.busy, numbers, rounds=3)
        async with trio.open_nursery() as nursery:
            for _ in range(flood):
                nursery.start_soon(endless, flooding, run.flood, numbers)
            await trio.sleep(run.service_s)  # the queue stands
            for _ in range(asks):
                run.asked.append(await talk(asking, LOAD, Talk(next(numbers), KIND, 1), Heard()))
                show.advance(task)
            nursery.cancel_scope.cancel()
    show.remove_task(task)


async def together(target: Target, heard: list[Heard], numbers: count[int], rounds: int) -> None:
    """As many at once as there are slots, a few times."""
    for _ in range(rounds):
        async with trio.open_nursery() as nursery:
            for _ in range(SLOTS):
                one = Heard()
                heard.append(one)
                nursery.start_soon(talk, target, LOAD, Talk(next(numbers), KIND, 1), one)


async def endless(target: Target, heard: list[Heard], numbers: count[int]) -> None:
    """One of the flood: the next request as soon as the last was answered."""
    while True:
        heard.append(await talk(target, LOAD, Talk(next(numbers), KIND, 1), Heard()))
        if not heard[-1].served:
            await trio.sleep(1)


def row(run: Run) -> dict[str, Any]:
    first, wait = summary(run.firsts() or [float("nan")]), summary(run.waits() or [float("nan")])
    return {
        "way": run.way, "service_s": run.service_s, "ttft_s": run.firsts(), "queue_s": run.waits(),
        "ttft_services": first.median / run.service_s, "ttft_services_max": first.high / run.service_s,
        "queue_services": wait.median / run.service_s, "queue_services_max": wait.high / run.service_s,
        "served": sum(heard.served for heard in run.asked), "asked": len(run.asked),
        "flood_served": sum(heard.served for heard in run.flood),
    }


def print_rows(page: Page, rows: Sequence[dict[str, Any]]) -> None:
    page.table("One client asks while the other floods; all but the first column of numbers in service times", (
        "way", "service s", "queue, median", "longest", "first token, median", "longest", "served", "flood served"),
        [(r["way"], f"{r['service_s']:.2f}", *(_number(r[name]) for name in (
            "queue_services", "queue_services_max", "ttft_services", "ttft_services_max")),
          f"{r['served']} of {r['asked']}", r["flood_served"]) for r in rows])


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Two keys, one floods.")
    parser.add_argument("--flood", type=int, default=12, help="requests of the flooding client at any moment")
    parser.add_argument("--asks", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    page = Page("fair")
    runs = [Run(way) for way in WAYS]
    with workplace() as folder, llama(folder, "-np", str(SLOTS), "-c", str(SLOTS * CONTEXT), "-b", "512") as runtime:
        with kvstream(folder, runtime, "llamacpp", env=WITH_KEYS) as gateway, progress() as show:
            for run in runs:
                child = runtime if run.way == WAYS[0] else gateway
                trio.run(one_way, run, child, args.flood, args.asks, show)
    rows = [row(run) for run in runs]
    page.data |= {"rows": rows, "flood": args.flood, "slots": SLOTS}
    print_rows(page, rows)
    direct, _, fair = rows
    page.bar("with a key each nobody waits longer than two service times", f"{fair['queue_services']:.2f} "
             f"(longest {fair['queue_services_max']:.2f})", fair["queue_services_max"] <= 2)
    page.bar("the first token comes sooner than directly", f"{fair['ttft_services']:.2f} against "
             f"{direct['ttft_services']:.2f} service times", fair["ttft_services"] < direct["ttft_services"])
    page.bar("every question is answered", f"{fair['served']} of {fair['asked']}", fair["served"] == fair["asked"])
    page.bar("the flood goes on being served", f"{fair['flood_served']} requests", fair["flood_served"] > 0)
    return page.close(args.json)


if __name__ == "__main__":
    sys.exit(main())
