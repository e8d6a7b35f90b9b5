"""A pool that holds one long answer, and four clients that want one each: alone with the runtime all die, behind
KVStream all finish.

    python tests/measure/show_pool.py [--repeats 2] [--json FILE]

The real llama.cpp server with 4 slots in one unified pool of 1024 tokens. Each client asks about 60 tokens and wants
500 (``ignore_eos``: the small model must not end early by chance). 4 x 560 tokens do not fit; the runtime takes all
four anyway, and when the pool is full it ends every one of them. KVStream admits what fits and lets the rest wait.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trio
from attrs import frozen
from client import Answer, chat, get_json
from figures import Page, progress
from processes import Child, kvstream, llama, workplace
from rich.progress import Progress

CONTEXT, SLOTS, ANSWER_TOKENS = 1024, 4, 500
TOPICS = ("the sea", "a mountain", "an old city", "a forest")
ASK = ("You are a storyteller who never hurries. Tell me a long and detailed story about {}, with many people in it, "
       "what they say to each other, what they eat, and how the weather changes from day to day.")


@frozen
class Row:
    """One client of one repeat. ``wait_s`` is the time to its first token, ``took_s`` to the end."""

    way: str
    repeat: int
    client: int
    outcome: str
    served: bool
    tokens: int
    wait_s: float | None
    took_s: float


def body(client: int, repeat: int) -> dict[str, Any]:
    ask = f"({repeat}) " + ASK.format(TOPICS[client])
    return {"messages": [{"role": "user", "content": ask}], "max_tokens": ANSWER_TOKENS, "ignore_eos": True,
            "temperature": 0, "stream_options": {"include_usage": True}}


async def four(port: int, way: str, repeat: int) -> list[Row]:
    """Four clients at once."""
    answers: dict[int, Answer] = {}

    async def one(client: int) -> None:
        answers[client] = await chat(port, body(client, repeat))

    async with trio.open_nursery() as nursery:
        for client in range(SLOTS):
            nursery.start_soon(one, client)
    return [row(way, repeat, client, answers[client]) for client in sorted(answers)]


def row(way: str, repeat: int, client: int, answer: Answer) -> Row:
    assert answer.ended is not None
    wait = None if answer.first is None else answer.first - answer.sent
    return Row(way, repeat, client, answer.outcome, answer.served, answer.tokens, wait, answer.ended - answer.sent)


async def run(runtime: Child, gateway: Child, repeats: int, show: Progress) -> list[Row]:
    task = show.add_task("direct, then through KVStream", total=2 * repeats)
    rows: list[Row] = []
    for repeat in range(repeats):
        for way, child in (("direct", runtime), ("kvstream", gateway)):
            rows += await four(child.port, way, repeat)
            await idle(runtime.port)
            show.advance(task)
    return rows


async def idle(port: int) -> None:
    while any(slot["is_processing"] for slot in await get_json(port, "/slots")):
        await trio.sleep(0.1)


def print_rows(page: Page, rows: Sequence[Row]) -> None:
    page.table(
        f"{SLOTS} clients, about 60 + {ANSWER_TOKENS} tokens each, one pool of {CONTEXT} tokens",
        ("way", "repeat", "client", "outcome", "tokens", "first token s", "end s"),
        [(r.way, r.repeat + 1, r.client + 1, r.outcome, r.tokens, "" if r.wait_s is None else f"{r.wait_s:.2f}",
          f"{r.took_s:.2f}") for r in rows])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Four clients on a pool that holds one.")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    page = Page("pool")
    with workplace() as folder, llama(folder, "-np", str(SLOTS), "-c", str(CONTEXT), "--kv-unified") as runtime:
        with kvstream(folder, runtime, "llamacpp") as gateway, progress() as show:
            rows = trio.run(run, runtime, gateway, args.repeats, show)
            capacity = gateway.json("/status")["capacity"]
    page.data |= {"rows": rows, "capacity": capacity}
    print_rows(page, rows)
    page.say(f"capacity that KVStream found: {capacity['mode']}, {capacity['seats']} seats, {capacity['pages']} pages "
             f"of {capacity['page_tokens']} tokens ({capacity['source']})")
    for way, wanted in (("direct", False), ("kvstream", True)):
        of = [r for r in rows if r.way == way]
        served = sum(r.served for r in of)
        page.bar(f"{way}: {'all finish' if wanted else 'all die'}", f"{served} of {len(of)} finished",
                 served == (len(of) if wanted else 0))
    return page.close(args.json)


if __name__ == "__main__":
    sys.exit(main())
