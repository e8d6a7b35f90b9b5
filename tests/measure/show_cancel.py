"""Close a client in each of the four phases: milliseconds until the runtime's slot and KVStream's seat are free.

    python tests/measure/show_cancel.py [--repeats 10] [--phase NAME ...] [--json FILE]

The real llama.cpp server, 4 slots, ``-b 512``. A client's socket is closed, and from then on ``/slots`` of the runtime
and ``/status`` of KVStream are read every 10 ms:

queued      four other streams hold the slots. There is no slot to wait for: until the request is gone from ``/status``;
            the runtime's prompt counters show that it never saw it.
prefill     at the prompt, about 1300 tokens of noise, always new. The runtime ends its batch first, then looks.
            ``/slots`` is read less than once a second: every answer of the runtime to anybody restarts the second
            after which it looks whether a client without an answer is still there.
streaming   after some tokens.
non_stream  the same for a client that wants its answer in one piece.

``direct`` is the same call without KVStream, in turn. For ``non_stream`` it is the known trap: while another slot
streams, the runtime never notices and computes to the end. There too ``/slots`` is read less than once a second.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from attrs import define, field, frozen
from client import CHAT, Answer, Connection, chatting, connect, get_json, metric
from figures import Page, progress, summary
from processes import Child, kvstream, llama, workplace
from rich.progress import Progress

SLOTS, CONTEXT = 4, 4096
PHASES = ("queued", "prefill", "streaming", "non_stream")
PREFILL_WORDS, PREFILL_HEAD_START_S = 1250, 0.3
NON_STREAM_TOKENS, DIRECT_REPEATS_MAX, SLOW_POLL_S = 200, 3, 1.2
IDLE_S_MAX = 120.0
POLL_S = 0.01  # short beside what is measured, and long beside what an answer costs the one who is measured
BAR_MS = 1000.0
PROMPT_COUNTERS = ("llamacpp:prompt_tokens_total", "llamacpp:prompt_tokens_cached_total")
WORDS = ("river", "stone", "lamp", "cloud", "garden", "window", "copper", "meadow", "harbour", "pepper", "marble")


@frozen
class Closed:
    """One close: milliseconds until the runtime's slots are idle, until KVStream's seat is free or its queue empty."""

    way: str
    phase: str
    slot_ms: float | None = None
    seat_ms: float | None = None
    decoded: int | None = None


@define
class Bench:
    """The two servers and what was seen so far."""

    runtime: Child
    gateway: Child
    closed: list[Closed] = field(factory=list)
    random: random.Random = field(factory=lambda: random.Random(1))
    never_seen: float | None = None  # prompt tokens that the runtime counted while queued requests came and went

    def ask(self, words: int = 8) -> list[dict[str, str]]:
        """A prompt that no cache has seen."""
        return [{"role": "user", "content": " ".join(self.random.choices(WORDS, k=words)) + f" {self.random.random()}"}]

    def body(self, tokens: int, words: int = 8, **more: Any) -> dict[str, Any]:
        return {"messages": self.ask(words), "max_tokens": tokens, "ignore_eos": True, "temperature": 0} | more


# --- what to wait for -------------------------------------------------------------------------------------------------


async def working(bench: Bench) -> int:
    return sum(slot["is_processing"] for slot in await get_json(bench.runtime.port, "/slots"))


async def prompt_tokens(bench: Bench) -> float:
    return sum([await metric(bench.runtime.port, name) for name in PROMPT_COUNTERS])


async def since(start: float, done: Callable[[], Awaitable[bool]], pause_s: float = POLL_S) -> float:
    """Milliseconds until ``done``; infinite when it takes longer than anybody should wait."""
    with trio.move_on_after(IDLE_S_MAX):
        while not await done():
            await trio.sleep(pause_s)
        return (trio.current_time() - start) * 1e3
    return math.inf


async def until(done: Callable[[], Awaitable[bool]], pause_s: float = POLL_S) -> None:
    if math.isinf(await since(0.0, done, pause_s)):
        raise RuntimeError(f"{getattr(done, '__name__', done)} did not come true within {IDLE_S_MAX:g} s")


async def running(bench: Bench) -> list[str]:
    """Phases of the requests that KVStream has admitted."""
    return [request["phase"] for request in (await get_json(bench.gateway.port, "/status"))["running"]]


async def queued(bench: Bench) -> int:
    return int((await get_json(bench.gateway.port, "/status"))["queue"]["length"])


async def seats(bench: Bench) -> int:
    used: dict[str, int] = (await get_json(bench.gateway.port, "/status"))["seats"]
    return used["used"] + used["draining"]


async def note_close(bench: Bench, way: str, phase: str, connection: Connection, slots_s: float = POLL_S) -> None:
    """Close, and measure both sides at once. ``slots_s`` is the time between two looks at the slots."""
    found: dict[str, float] = {}

    async def slot_idle() -> bool:
        return await working(bench) == 0

    async def seat_free() -> bool:
        return await seats(bench) == 0

    async def measure(name: str, done: Callable[[], Awaitable[bool]], pause_s: float) -> None:
        await trio.sleep(pause_s)
        found[name] = await since(start, done, pause_s)

    connection.close()
    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(measure, "slot", slot_idle, slots_s)
        if way == "kvstream":
            nursery.start_soon(measure, "seat", seat_free, POLL_S)
    bench.closed.append(Closed(way, phase, found["slot"], found.get("seat")))


# --- the four phases --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def fillers(bench: Bench, child: Child, count: int, tokens: int = CONTEXT - 200) -> AsyncIterator[None]:
    """Streams that hold ``count`` slots for the length of the block."""
    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(fill, bench, child, tokens)

        async def all_at_work() -> bool:
            return await working(bench) == count

        await until(all_at_work)
        try:
            yield
        finally:
            nursery.cancel_scope.cancel()
    await settle(bench)


async def fill(bench: Bench, child: Child, tokens: int) -> None:
    """Stream after stream, so that a block may be longer than one answer."""
    while True:
        async with connect(child.port) as connection:
            async for _ in chatting(connection, bench.body(tokens), Answer(0.0)):
                pass


async def settle(bench: Bench) -> None:
    """Until nothing is at work any more, on either side."""
    async def quiet() -> bool:
        return await working(bench) == 0 and await seats(bench) == 0

    await until(quiet)


async def close_queued(bench: Bench, repeats: int, step: Callable[[], None]) -> None:
    async with fillers(bench, bench.gateway, SLOTS):
        async def started() -> bool:
            return (await running(bench)).count("streaming") == SLOTS

        async def one_waits() -> bool:
            return await queued(bench) == 1

        async def none_waits() -> bool:
            return await queued(bench) == 0

        await until(started)
        before = await prompt_tokens(bench)
        for _ in range(repeats):
            async with connect(bench.gateway.port) as connection:
                await connection.send("POST", CHAT, json.dumps(bench.body(50, words=100, stream=True)).encode())
                await until(one_waits)
                connection.close()
                gone = await since(trio.current_time(), none_waits)
            bench.closed.append(Closed("kvstream", "queued", seat_ms=gone))
            step()
        bench.never_seen = await prompt_tokens(bench) - before


async def close_prefill(bench: Bench, repeats: int, step: Callable[[], None]) -> None:
    async def at_work() -> bool:
        return await working(bench) == 1

    for _ in range(repeats):
        for way, child in (("kvstream", bench.gateway), ("direct", bench.runtime)):
            async with connect(child.port) as connection:
                body = bench.body(50, words=PREFILL_WORDS, stream=True)
                await connection.send("POST", CHAT, json.dumps(body).encode())
                await until(at_work)
                await trio.sleep(PREFILL_HEAD_START_S)
                await note_close(bench, way, "prefill", connection, SLOW_POLL_S)
            await settle(bench)
        step()


async def close_streaming(bench: Bench, repeats: int, step: Callable[[], None]) -> None:
    for _ in range(repeats):
        for way, child in (("kvstream", bench.gateway), ("direct", bench.runtime)):
            async with connect(child.port) as connection:
                async for answer in chatting(connection, bench.body(2000), Answer(0.0)):
                    if answer.tokens >= 5:
                        break
                await note_close(bench, way, "streaming", connection)
            await settle(bench)
        step()


async def close_non_stream(bench: Bench, repeats: int, step: Callable[[], None]) -> None:
    async def answering() -> bool:
        return "non_stream" in await running(bench)

    for number in range(repeats):
        async with connect(bench.gateway.port) as connection:
            await connection.send("POST", CHAT, json.dumps(bench.body(2000)).encode())
            await until(answering)
            await note_close(bench, "kvstream", "non_stream", connection)
        await settle(bench)
        if number < DIRECT_REPEATS_MAX:
            await close_direct_non_stream(bench)
        step()


async def close_direct_non_stream(bench: Bench) -> None:
    """Without KVStream, while another slot streams: how long, and how many tokens it computed for nobody."""
    decoded = 0  # the most that was seen: the slot forgets it when it is done

    async def one_left() -> bool:
        nonlocal decoded
        slots = await get_json(bench.runtime.port, "/slots")
        others = [s for s in slots if s["is_processing"] and s["id"] not in busy]
        decoded = max([decoded, *(s["next_token"][0]["n_decoded"] for s in others)])
        return not others

    async def answering() -> bool:
        """A close before the first token the runtime may still notice."""
        return not await one_left() and decoded > 0

    async with fillers(bench, bench.runtime, 1):
        busy = {s["id"] for s in await get_json(bench.runtime.port, "/slots") if s["is_processing"]}
        async with connect(bench.runtime.port) as connection:
            await connection.send("POST", CHAT, json.dumps(bench.body(NON_STREAM_TOKENS)).encode())
            await until(answering, SLOW_POLL_S)
            connection.close()
            start = trio.current_time()
            await trio.sleep(SLOW_POLL_S)
            took = await since(start, one_left, SLOW_POLL_S)
        bench.closed.append(Closed("direct", "non_stream", took, decoded=decoded))


STEPS = {"queued": close_queued, "prefill": close_prefill, "streaming": close_streaming,
         "non_stream": close_non_stream}


async def run(bench: Bench, phases: list[str], repeats: int, show: Progress) -> None:
    for phase in phases:
        task = show.add_task(phase, total=repeats)
        await STEPS[phase](bench, repeats, lambda task=task: show.advance(task))  # type: ignore[misc]


# --- the page ---------------------------------------------------------------------------------------------------------


def print_closed(page: Page, bench: Bench, phases: list[str]) -> None:
    rows = []
    for phase in phases:
        for way in ("kvstream", "direct"):
            of = [c for c in bench.closed if c.phase == phase and c.way == way]
            if not of:
                continue
            decoded = [c.decoded for c in of if c.decoded is not None]
            note = f"seen at {min(decoded)} to {max(decoded)} of {NON_STREAM_TOKENS} tokens" if decoded else ""
            rows.append((phase, way, len(of), *cells([c.slot_ms for c in of]), *cells([c.seat_ms for c in of]), note))
    page.table("Milliseconds after the client closed", ("phase", "way", "n", "slot idle", "max", "seat or place free",
                                                        "max", ""), rows)


def cells(values: list[float | None]) -> tuple[str, str]:
    known = [v for v in values if v is not None]
    return (f"{summary(known).median:.0f}", f"{summary(known).high:.0f}") if known else ("", "")


def hold(page: Page, bench: Bench, phases: list[str]) -> None:
    for phase in phases:
        of = [c for c in bench.closed if c.phase == phase and c.way == "kvstream"]
        worst = max(v for c in of for v in (c.slot_ms, c.seat_ms) if v is not None)
        if phase == "prefill":  # one batch may take longer than a second, whoever asks: held against direct
            direct = max(c.slot_ms or 0.0 for c in bench.closed if c.phase == phase and c.way == "direct")
            limit = max(BAR_MS, direct * 1.5)
            page.bar(f"{phase}: all within 1 s or one batch (1.5 x the slowest direct)",
                     f"{worst:.0f} ms of {limit:.0f}", worst <= limit)
        else:
            page.bar(f"{phase}: all within 1 s", f"{worst:.0f} ms", worst <= BAR_MS)
    if bench.never_seen is not None:
        page.bar("queued: the runtime computed no prompt token meanwhile", f"{bench.never_seen:g}",
                 bench.never_seen == 0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Close a client in each phase.")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--phase", action="append", choices=PHASES, help="only this one (may be repeated)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    phases = args.phase or list(PHASES)
    page = Page("cancel")
    with workplace() as folder, llama(folder, "-np", str(SLOTS), "-c", str(SLOTS * CONTEXT), "-b", "512") as runtime:
        with kvstream(folder, runtime, "llamacpp") as gateway, progress() as show:
            bench = Bench(runtime, gateway)
            trio.run(run, bench, phases, args.repeats, show)
    page.data |= {"closed": bench.closed, "queued_prompt_tokens": bench.never_seen}
    print_closed(page, bench, phases)
    hold(page, bench, phases)
    return page.close(args.json)


if __name__ == "__main__":
    sys.exit(main())
