"""Memory and descriptors of the gateway: idle, and after ten thousand short streams.

    python tests/measure/show_rss.py [--streams 10000] [--aborted 1000] [--concurrency 16] [--json FILE]

KVStream with its defaults before the canned backend. Streams have 8 chunks; a client keeps its connection for ten of
them and then opens another. Aborted ones are spread evenly among the rest: their answer is slow, and the client closes
after the first token. Resident memory, descriptors and sockets are seen from outside (psutil), Trio tasks are told by
the gateway (see watched_gateway.py). Baseline is the gateway after the first stream: that loads what is loaded late.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import trio
from attrs import asdict, frozen
from client import Answer, chatting, connect
from figures import Page, progress
from processes import Child, canned_backend, kvstream, workplace
from rich.progress import Progress

SAMPLES = 20
STREAMS_PER_CONNECTION = 10
CHUNKS = 8
SLOW = {"chunks": 64, "gap_ms": 20}
QUIET_S_MAX = 15.0  # upstream connections expire after 3 s, once something looks at them
RSS_GROWTH_MAX = 1.25
BLOCKS = "▁▂▃▄▅▆▇█"


@frozen
class Look:
    """The gateway at one moment."""

    streams: int
    seconds: float
    rss_mib: float
    descriptors: int
    sockets: int
    tasks: int
    objects: int


class Watch:
    """Looks at a gateway process."""

    def __init__(self, gateway: Child) -> None:
        self._process = psutil.Process(gateway.process.pid)
        self._pipes = gateway.process
        self._began = time.monotonic()
        self.looks: list[Look] = []

    def look(self, streams: int) -> Look:
        told = self._ask()
        look = Look(streams, time.monotonic() - self._began, self._process.memory_info().rss / 2**20,
                    self._process.num_fds(), len(self._process.net_connections()), told["tasks"], told["objects"])
        self.looks.append(look)
        return look

    def _ask(self) -> dict[str, int]:
        assert self._pipes.stdin is not None and self._pipes.stdout is not None
        self._pipes.stdin.write(b"\n")
        self._pipes.stdin.flush()
        told: dict[str, int] = json.loads(self._pipes.stdout.readline())
        return told


def body(**canned: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hello"}], "canned": canned}


class Load:
    """Workers that share one count of streams."""

    def __init__(self, gateway: Child, watch: Watch, args: argparse.Namespace, show: Progress) -> None:
        self._gateway = gateway
        self._watch = watch
        self._total = args.streams
        self._abort_every = args.streams // args.aborted if args.aborted else 0
        self._show = show
        self._task = show.add_task("streams", total=args.streams)
        self._begun = 0
        self.served = self.aborted = self.failed = 0

    async def run(self, workers: int) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(workers):
                nursery.start_soon(self._work)

    async def _work(self) -> None:
        while self._begun < self._total:
            async with connect(self._gateway.port) as connection:
                for _ in range(STREAMS_PER_CONNECTION):
                    if self._begun >= self._total or not await self._stream(connection):
                        break

    async def _stream(self, connection: Any) -> bool:
        """One stream, served or aborted; whether the connection can be used again."""
        self._begun += 1
        if self._begun % max(1, self._total // SAMPLES) == 0:
            self._watch.look(self._begun)
        self._show.advance(self._task)
        abort = bool(self._abort_every) and self._begun % self._abort_every == 0
        answer = Answer(0.0)
        async for _ in chatting(connection, body(**(SLOW if abort else {"chunks": CHUNKS})), answer):
            if abort and answer.tokens:
                self.aborted += 1
                return False
        self.served += answer.served
        self.failed += not answer.served
        return answer.served


async def until_quiet(watch: Watch, baseline: Look, streams: int) -> Look:
    """Look until descriptors and tasks are back, for a bounded time."""
    with trio.move_on_after(QUIET_S_MAX):
        while (look := watch.look(streams)).descriptors > baseline.descriptors or look.tasks > baseline.tasks:
            watch.looks.pop()
            await trio.sleep(0.25)
    return watch.look(streams)


async def run(gateway: Child, args: argparse.Namespace, show: Progress) -> tuple[Watch, Look, Look, Load]:
    watch = Watch(gateway)
    watch.look(0)
    async with connect(gateway.port) as connection:
        async for _ in chatting(connection, body(chunks=CHUNKS), Answer(0.0)):
            pass
    await trio.sleep(4.0)  # let the pooled connection expire
    baseline = watch.look(1)
    load = Load(gateway, watch, args, show)
    await load.run(args.concurrency)
    return watch, baseline, await until_quiet(watch, baseline, args.streams), load


def sparkline(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return "".join(BLOCKS[round((v - low) / ((high - low) or 1) * (len(BLOCKS) - 1))] for v in values)


def print_looks(page: Page, looks: Sequence[Look]) -> None:
    page.table("The gateway, along the way",
               ("streams", "s", "RSS MiB", "descriptors", "sockets", "trio tasks", "objects"),
               [(k.streams, f"{k.seconds:.1f}", f"{k.rss_mib:.1f}", k.descriptors, k.sockets, k.tasks, k.objects)
                for k in looks])
    page.say(f"RSS  {sparkline([k.rss_mib for k in looks])}  {looks[0].rss_mib:.1f} to {looks[-1].rss_mib:.1f} MiB")


def hold(page: Page, baseline: Look, end: Look, load: Load, args: argparse.Namespace) -> None:
    page.bar("all streams served or aborted as asked",
             f"{load.served} served, {load.aborted} aborted, {load.failed} failed",
             load.failed == 0 and load.served + load.aborted == args.streams)
    for name in ("descriptors", "sockets", "tasks"):
        before, after = getattr(baseline, name), getattr(end, name)
        page.bar(f"{name} back to baseline", f"{before} before, {after} after", after <= before)
    growth = end.rss_mib / baseline.rss_mib
    page.bar(f"RSS after / baseline <= {RSS_GROWTH_MAX}",
             f"{growth:.2f} ({baseline.rss_mib:.1f} to {end.rss_mib:.1f} MiB)", growth <= RSS_GROWTH_MAX)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Memory and descriptors of the gateway.")
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--aborted", type=int, default=1000, help="of them, closed by the client in mid-answer")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    page = Page("rss")
    with workplace() as folder, canned_backend(folder, CHUNKS) as backend, progress() as show:
        with kvstream(folder, backend, "openai", watched=True) as gateway:
            watch, baseline, end, load = trio.run(run, gateway, args, show)
            status = gateway.json("/status")
    page.data |= {"looks": [asdict(k) for k in watch.looks], "baseline": baseline, "end": end,
                  "counters": status["counters"], "seats": status["seats"], "queue": status["queue"]["length"]}
    print_looks(page, watch.looks)
    hold(page, baseline, end, load, args)
    page.bar("no seat taken, nobody queued", f"{status['seats']['used']} seats, {status['queue']['length']} queued",
             status["seats"]["used"] == status["queue"]["length"] == 0)
    return page.close(args.json)


if __name__ == "__main__":
    sys.exit(main())
