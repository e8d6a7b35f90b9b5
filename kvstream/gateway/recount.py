"""Counting again, exactly, what queued while the runtime could not count."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import trio

from ..core.messages import Event, Recounted
from ..core.types import CountSource
from .count import PromptCounter
from .stream import Stream

RECOUNTS_AT_ONCE = 4


async def recount(streams: Iterable[Stream], counter: PromptCounter, post: Callable[[Event], None]) -> None:
    """The backend came up: waiting requests that were estimated are counted by it, before the doors open.

    *Errors*: none. *Cancellation*: safe.
    """
    limit = trio.CapacityLimiter(RECOUNTS_AT_ONCE)

    async def one(stream: Stream) -> None:
        async with limit:
            count = await counter.exact(stream.request, stream.client)
        if count is not None and stream.outcome is None:
            stream.prompt, stream.tokens_prompt, stream.count_source = count, count.tokens, count.source
            post(Recounted(stream.rid, count.keys, count.tokens))

    async with trio.open_nursery() as nursery:
        for stream in streams:
            if counter.can_be_exact and stream.lease is None and stream.count_source is CountSource.ESTIMATED:
                nursery.start_soon(one, stream)
