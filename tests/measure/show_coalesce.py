"""Sixteen identical requests at temperature 0: how many calls does the runtime see?

    python tests/measure/show_coalesce.py [--requests 16] [--json FILE]

The real llama.cpp server. Its own counter of generated tokens tells the calls: every answer has the same fixed length.
Streams, answers in one piece, and both mixed; directly, and through KVStream. A request that is different (another
seed of the prompt) runs beside them each time, to show that only identical ones are joined.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import trio
from attrs import define, field
from client import CHAT, connect, metric
from figures import Page, progress
from processes import Child, kvstream, llama, workplace
from rich.progress import Progress

SLOTS, CONTEXT, TOKENS = 4, 1024, 48
COUNTER = "llamacpp:tokens_predicted_total"
FORMS = ("streams", "in one piece", "mixed")
WAYS = ("direct", "kvstream")


@define
class Reply:
    status: int = 0
    role: str = ""
    text: str = ""


@define
class Run:
    """``calls``: generated tokens by the tokens of one answer. ``other_text`` is of the request that is different."""

    way: str
    form: str
    replies: list[Reply] = field(factory=list)
    other: Reply = field(factory=Reply)
    calls: float = 0.0
    took_s: float = 0.0


def body(run: Run, stream: bool, word: str) -> bytes:
    ask = f"({run.way}, {run.form}, {word}) Tell me about the sea."
    return json.dumps({"messages": [{"role": "user", "content": ask}], "max_tokens": TOKENS, "temperature": 0,
                       "ignore_eos": True, "stream": stream}).encode()


async def ask(child: Child, content: bytes, reply: Reply) -> None:
    async with connect(child.port) as connection:
        await connection.send("POST", CHAT, content)
        status, headers, answer = await connection.whole()
    reply.status, reply.role = status, headers.get("x-kvstream-coalesced", "")
    reply.text = text_of(answer)


def text_of(answer: bytes) -> str:
    """The text of a whole answer, in either form."""
    if answer.startswith(b"{"):
        return str(json.loads(answer)["choices"][0]["message"]["content"])
    events = [json.loads(line[6:]) for line in answer.split(b"\n") if line.startswith(b"data: {")]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event.get("choices") or ())


async def one(run: Run, child: Child, runtime: Child, requests: int) -> None:
    run.replies = [Reply() for _ in range(requests)]
    before, began = await metric(runtime.port, COUNTER), trio.current_time()
    async with trio.open_nursery() as nursery:
        for number, reply in enumerate(run.replies):
            stream = run.form == "streams" or (run.form == "mixed" and number % 2 == 0)
            nursery.start_soon(ask, child, body(run, stream, "same"), reply)
        nursery.start_soon(ask, child, body(run, True, "other"), run.other)
    run.took_s = trio.current_time() - began
    run.calls = (await metric(runtime.port, COUNTER) - before) / TOKENS


def print_rows(page: Page, runs: Sequence[Run]) -> None:
    page.table("Identical requests, and one other", ("way", "form", "served", "different answers", "leaders",
                                                     "calls to the runtime", "all s"),
               [(run.way, run.form, f"{sum(r.status == 200 for r in run.replies)} of {len(run.replies)}",
                 len({r.text for r in run.replies}), sum(r.role == "leader" for r in run.replies),
                 f"{run.calls:.2f}", f"{run.took_s:.1f}") for run in runs])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Identical requests at once.")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def measure(runtime: Child, gateway: Child, requests: int, show: Progress) -> list[Run]:
    task = show.add_task("identical requests", total=len(FORMS) * len(WAYS))
    runs = []
    for form in FORMS:
        for way, child in zip(WAYS, (runtime, gateway), strict=True):
            run = Run(way, form)
            trio.run(one, run, child, runtime, requests)
            runs.append(run)
            show.advance(task)
    return runs


def main() -> int:
    args = arguments()
    page = Page("coalesce")
    with workplace() as folder, llama(folder, "-np", str(SLOTS), "-c", str(SLOTS * CONTEXT), "-b", "512") as runtime:
        with kvstream(folder, runtime, "llamacpp") as gateway, progress() as show:
            runs = measure(runtime, gateway, args.requests, show)
    page.data["runs"] = runs
    print_rows(page, runs)
    for run in runs:
        if run.way == "kvstream":
            served = sum(reply.status == 200 for reply in run.replies)
            once = round(run.calls, 1) == 2 and served == args.requests
            page.bar(f"{args.requests} identical {run.form}: one call, besides that of the other request",
                     f"{run.calls - 1:.2f} calls, {served} served", once)
            texts = {reply.text for reply in run.replies}
            page.bar(f"{run.form}: all have the same text, the other another", f"{len(texts)} text(s)",
                     len(texts) == 1 and run.other.text not in texts)
    return page.close(args.json)


if __name__ == "__main__":
    sys.exit(main())
