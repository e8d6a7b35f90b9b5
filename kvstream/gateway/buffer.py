"""The bounded buffer between a pump and the task that talks to its client.

One producer, one consumer. Its size is counted in bytes, because that is what a client that does not read costs. The
consumer takes everything there is at once: frames that arrived together leave together, in one write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import trio

from ..errors import KVStreamError

T = TypeVar("T")


class EventBuffer(Generic[T]):
    """``size_max`` bytes at most are held, except that one batch always fits into an empty buffer."""

    def __init__(self, size_max: int) -> None:
        self._size_max = size_max
        self._items: list[T] = []
        self._size = 0
        self._closed = False
        self._error: KVStreamError | None = None
        self._readable = trio.Event()
        self._writable = trio.Event()
        self._asked = trio.Event()  # set while the consumer waits for more

    def try_put(self, items: Sequence[T], size: int) -> bool:
        """Add a batch of ``size`` bytes; False when there is no room now. Dropped silently once closed."""
        if self._closed:
            return True
        if self._items and self._size + size > self._size_max:
            return False
        self._items.extend(items)
        self._size += size
        self._readable.set()
        if self._asked.is_set():
            self._asked = trio.Event()
        return True

    def force(self, items: Sequence[T], size: int) -> None:
        """Add a batch whatever its size: it counts as read already."""
        if not self._closed and not self.try_put(items, size):
            self._items.extend(items)
            self._size += size

    async def put(self, items: Sequence[T], size: int) -> None:
        """Wait for room, then add. The caller bounds the wait."""
        while not self.try_put(items, size):
            self._writable = trio.Event()
            await self._writable.wait()

    async def get(self) -> list[T]:
        """Everything there is, waiting for the first item. ``[]`` once closed and empty.

        *Errors*: the error the buffer was closed with, after all items before it were taken.
        *Cancellation*: nothing is lost; a later ``get`` returns what was not taken.
        """
        while not self._items:
            if self._error is not None:
                raise self._error
            if self._closed:
                return []
            self._readable = trio.Event()
            self._asked.set()
            await self._readable.wait()
        items, self._items, self._size = self._items, [], 0
        self._writable.set()
        return items

    async def wait_asked(self) -> None:
        """After a put: wait until the consumer took it, did with it what it does, and asks for more."""
        await self._asked.wait()

    def close(self, error: KVStreamError | None = None) -> None:
        """No more items. The first close wins."""
        if not self._closed:
            self._closed = True
            self._error = error
            self._readable.set()
            self._writable.set()
