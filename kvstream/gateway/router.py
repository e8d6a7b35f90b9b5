"""Which lane serves a request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from .engine import Engine
from .ports import Answer
from .request import Incoming


class Router:
    """The lanes of one gateway. ``lanes`` are in the order of the configuration; there is at least one."""

    def __init__(self, lanes: Sequence[Engine]) -> None:
        self.lanes = tuple(lanes)

    @property
    def routes(self) -> frozenset[str]:
        """What at least one lane serves."""
        return frozenset().union(*(lane.adapter.capabilities.routes for lane in self.lanes))

    @asynccontextmanager
    async def open_answer(self, incoming: Incoming, name: str) -> AsyncIterator[Answer]:
        """See :data:`ports.OpenAnswer`."""
        lane = self.lanes[0]
        async with lane.open_stream(
            incoming.proxy, client=incoming.client, priority=incoming.priority, weight=incoming.weight, name=name
        ) as stream:
            yield stream
