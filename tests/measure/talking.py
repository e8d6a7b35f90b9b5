"""One chat at a time with a target of the bench: prompts of exact length that no cache knows; times of all tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import trio
from attrs import define, field

from kvstream.bench.answer import AnswerReader, milliseconds
from kvstream.bench.plan import Load, Talk
from kvstream.bench.prompts import message, request_body
from kvstream.bench.target import Target, describe, learn_lengths
from kvstream.gateway.upstream import HttpUpstream


@define
class Heard:
    """A request: its answer, when it was sent and over (Trio's clock), and the wait in the queue if a KVStream told it.
    """

    sent: float = 0.0
    reader: AnswerReader = field(factory=AnswerReader)
    ended: float | None = None
    status: int = 0
    queue_s: float | None = None

    @property
    def served(self) -> bool:
        return self.reader.complete

    @property
    def ttft_s(self) -> float | None:
        return None if self.reader.first_token is None else self.reader.first_token - self.sent

    @property
    def took_s(self) -> float | None:
        return None if self.ended is None else self.ended - self.sent


@asynccontextmanager
async def talking_to(label: str, url: str, load: Load, key: str = "") -> AsyncIterator[Target]:
    """The target, with what there is to know about it."""
    async with HttpUpstream(url) as upstream:
        headers = (("authorization", f"Bearer {key}"),) if key else ()
        target = Target(label, url, upstream, headers)
        _, models = await describe(target)
        target = attrs.evolve(target, model=models[0])
        yield attrs.evolve(target, lengths=await learn_lengths(target, load))


async def talk(target: Target, load: Load, one: Talk, heard: Heard) -> Heard:
    """Send the message of ``one`` and listen to the end; ``heard`` fills while it goes on."""
    content = [{"role": "user", "content": message(load, target.lengths, target.label, one, 0)}]
    body = request_body(load, target.model, content, one.kind.output_tokens)
    heard.sent = trio.current_time()
    async with target.upstream.open(target.call(load.route, body)) as response:
        heard.status, heard.queue_s = response.status, milliseconds(response.headers.get("x-kvstream-queue-ms", ""))
        while data := await response.receive():
            heard.reader.feed(data, trio.current_time())
    heard.ended = trio.current_time()
    heard.queue_s = heard.reader.queue_s if heard.queue_s is None else heard.queue_s
    return heard
