"""The KV cache for Trio: one thread for the device, and async calls that are carried out on it.

Theory of operation. Everything that touches the device is a plain method of ``KVCache``, and runs on one thread that
``open_streamer`` starts and ends: a CUDA context belongs to its thread, and so do PyCUDA's objects in it. A call
is put into that thread's queue and answered by its value or its error. Calls are done one after the other in the
order in which they were made; nothing else is needed to keep two tasks apart, but a step belongs to one task at a time.

A call costs two changes of thread, which is nothing beside a step and something beside a layer. Whoever has many calls
to make at once, as a model that goes through its layers has, hands over a function: ``on_device``.

*Cancellation*: a call that has been queued is carried out, and its caller waits for it however he is cancelled; the
cancellation shows at his next checkpoint. So there is never a call under way that nobody knows of, and memory that was
passed to it may be used again.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import trio
from attrs import define, field

from ..errors import DeviceError
from .cache import KVCache
from .records import Opening, Saved, Stats

if TYPE_CHECKING:
    from .device import Device
    from .layout import Geometry

T = TypeVar("T")


@define(eq=False)
class _Call(Generic[T]):
    function: Callable[[], T]
    token: trio.lowlevel.TrioToken
    done: trio.Event = field(factory=trio.Event)
    value: T | None = None
    error: BaseException | None = None

    def carry_out(self) -> None:
        """Whatever happens, the caller is told: he waits for that and for nothing else."""
        try:
            try:
                self.value = self.function()
            except BaseException as error:
                self.error = error
                _clear_frames(error)
        finally:
            try:
                self.token.run_sync_soon(self.done.set)
            except trio.RunFinishedError:  # nobody is left to be told
                pass


def _clear_frames(error: BaseException) -> None:
    """What a failed call had in its variables is let go here, on the device's thread, where it can be freed."""
    seen: dict[int, BaseException] = {}  # errors may have each other, or themselves, as their cause
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen[id(one)] = one
        traceback.clear_frames(one.__traceback__)
        left += (one.__cause__, one.__context__)
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions


class DeviceThread:
    """A thread that carries out calls in order. ``close`` ends it after the calls that were made before."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvstream-device", daemon=True)
        self._thread.start()

    async def call(self, function: Callable[[], T]) -> T:
        """*Errors*: whatever ``function`` raises. *Cancellation*: see the top of this file."""
        if self._closed:
            raise DeviceError("the KV streamer is closed")
        await trio.lowlevel.checkpoint_if_cancelled()
        call = _Call(function, trio.lowlevel.current_trio_token())
        self._calls.put(call)
        with trio.CancelScope(shield=True):
            await call.done.wait()
        try:
            if call.error is not None:
                raise call.error
            return call.value  # type: ignore[return-value]
        finally:
            del call  # which the error's traceback would hold, and it the error

    async def close(self) -> None:
        self._closed = True
        self._calls.put(None)
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._thread.join)

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            if call is None:
                return
            call.carry_out()
            del call  # or its function and value would live until the next call comes


class Streamer:
    """Made by ``open_streamer``. Rows are f32, in the order of the batch; sequences are small integers.

    *Errors*: ``StepError`` for a call that makes no sense now, ``DeviceMemoryError`` when there is no room: after both
    everything is as before. ``DeviceError`` when the device failed: then it can only be closed.
    """

    def __init__(self, thread: DeviceThread, cache: KVCache) -> None:
        self._thread = thread
        self._cache = cache

    async def on_device(self, function: Callable[[KVCache], T]) -> T:
        """Call ``function`` with the cache, on the device's thread. It must not keep the cache."""
        return await self._thread.call(lambda: function(self._cache))

    # sequences

    async def create(self) -> int:
        """A new, empty sequence."""
        return await self._thread.call(self._cache.create)

    async def fork(self, sequence: int) -> int:
        """A second sequence with the same tokens. Full pages are shared, the rest is copied."""
        return await self._thread.call(lambda: self._cache.fork(sequence))

    async def truncate(self, sequence: int, tokens: int) -> None:
        """Forget all but the first ``tokens``."""
        await self._thread.call(lambda: self._cache.truncate(sequence, tokens))

    async def drop(self, sequence: int) -> None:
        """Forget the sequence."""
        await self._thread.call(lambda: self._cache.drop(sequence))

    async def tokens(self, sequence: int) -> int:
        """How many tokens the sequence has, without those of a step that has not ended."""
        return await self._thread.call(lambda: self._cache.tokens(sequence))

    # steps

    async def begin_step(self, batch: Sequence[tuple[int, int]]) -> None:
        """Start a step: (sequence, new tokens) of each sequence in it. Plans it and starts the first transfers.

        Then, for each layer in order, ``append`` and ``attend``, and at the end ``end_step``.
        """
        await self._thread.call(lambda: self._cache.begin_step(batch))

    async def append(self, layer: int, k: Any, v: Any) -> None:
        """K and V of the new tokens, [rows][kv_heads][head_size]: numpy arrays, or addresses on the device, whose
        contents must be ready on the ``compute`` stream."""
        await self._thread.call(lambda: self._cache.append(layer, k, v))

    async def attend(self, layer: int, q: Any, out: int = 0) -> Any:
        """Attention of the new tokens' queries [rows][q_heads][head_size] over their sequences.

        ``q`` is numpy: the result comes back as numpy. ``q`` is an address: the result is at ``out``, or at the address
        that is returned, once the ``compute`` stream is there.
        """
        return await self._thread.call(lambda: self._cache.attend(layer, q, out))

    async def end_step(self) -> None:
        """The new tokens belong to their sequences now."""
        await self._thread.call(self._cache.end_step)

    async def abandon_step(self) -> None:
        """As if the step had not begun. Costs the transfers: nothing is on the device afterwards."""
        await self._thread.call(self._cache.abandon_step)

    # pages

    async def save(self, sequence: int) -> Saved:
        """A copy of all that is known of the sequence's tokens, in ordinary memory."""
        return await self._thread.call(lambda: self._cache.save(sequence))

    async def load(self, saved: Saved) -> int:
        """A new sequence from what ``save`` gave, also that of another streamer with the same geometry."""
        return await self._thread.call(lambda: self._cache.load(saved))

    async def stats(self) -> Stats:
        return await self._thread.call(self._cache.stats)


@asynccontextmanager
async def open_streamer(open_device: Callable[[], Device], geometry: Geometry, opening: Opening,
                        ) -> AsyncIterator[Streamer]:
    """A KV cache of ``geometry`` on the device that ``open_device`` makes.

    *Errors*: ``ConfigError`` when the memory that ``opening`` gives is too small, with the numbers;
    ``DeviceMemoryError`` when the device or the host has less than that; ``DeviceError``.
    *Resource handling*: on leaving, the device's work is waited for, everything is freed and the thread ends.
    *Cancellation*: leaving is not cancelled; it takes as long as what runs on the device.
    """
    thread = DeviceThread()
    try:
        cache = await thread.call(lambda: _opened(open_device, geometry, opening))
        try:
            yield Streamer(thread, cache)
        finally:
            with trio.CancelScope(shield=True):
                await thread.call(cache.close)
    finally:
        await thread.close()


def _opened(open_device: Callable[[], Device], geometry: Geometry, opening: Opening) -> KVCache:
    device = open_device()
    try:
        return KVCache(device, geometry, opening)
    except BaseException:
        device.close()
        raise
