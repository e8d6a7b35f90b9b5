"""A call that fails half-way: whichever call to the device it is, nothing is lost and the bits are the same after it.

The device refuses one call with an error after which it goes on as before (no memory for an event, say). A call of the
cache between steps, and ``begin_step``, can then be made again at once; a step that has begun can only be abandoned.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import trio
from attrs import evolve

from kvstream.cuda.cache import KVCache
from kvstream.cuda.fake_device import FakeDevice
from kvstream.cuda.fake_kernels import KERNELS
from kvstream.cuda.streamer import open_streamer
from kvstream.errors import ConfigError, DeviceMemoryError, StepError
from tests.cuda.streaming import opening_of, values
from tests.cuda.test_streaming import SMALL, fewest

GEOMETRY = SMALL.geometry()
CALLS = ("copy_in", "copy_out", "record", "wait", "launch", "query", "synchronize")


class Refusing(FakeDevice):
    """Refuses the call with this number, once."""

    at, calls = -1, 0


def _refusing(name: str) -> Callable[..., Any]:
    def call(self: Refusing, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls - 1 == self.at:
            raise DeviceMemoryError("planted")
        return getattr(FakeDevice, name)(self, *args, **kwargs)

    return call


for _name in CALLS:
    setattr(Refusing, _name, _refusing(_name))


class Conversation:
    """Plays the same calls whatever fails, and keeps what came out."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.outputs: list[bytes] = []
        self.failed = 0

    def state(self) -> Any:
        stats = self.cache.stats()
        return stats.host_pages_free, {one: self.cache.tokens(one) for one in self.cache._sequences.ids()}

    def between(self, call: Callable[..., Any], *args: Any) -> Any:
        before = self.state()
        try:
            return call(*args)
        except DeviceMemoryError:
            self.failed += 1
            assert self.state() == before
            return call(*args)

    def step(self, sequence: int, name: str, new: int) -> None:
        before = self.state()
        try:
            outputs = self._step(sequence, name, new)
        except DeviceMemoryError:
            self.failed += 1
            with pytest.raises(StepError, match=r"only be abandoned|Next is"):
                self.cache.end_step()
            self.cache.abandon_step()
            assert self.state() == before
            outputs = self._step(sequence, name, new)
        self.outputs += outputs

    def _step(self, sequence: int, name: str, new: int) -> list[bytes]:
        start = self.cache.tokens(sequence)
        self.between(self.cache.begin_step, [(sequence, new)])
        outputs = []
        for layer in range(GEOMETRY.layers):
            k, v, q = (np.stack([values(name, at, layer, 0, what, number) for at in range(start, start + new)])
                       for what, number in (("k", GEOMETRY.row_values), ("v", GEOMETRY.row_values),
                                            ("q", GEOMETRY.q_heads * GEOMETRY.head_size)))
            self.cache.append(layer, k, v)
            outputs.append(self.cache.attend(layer, q).tobytes())
        self.cache.end_step()
        return outputs

    def play(self) -> None:
        cache, between = self.cache, self.between
        one, other = cache.create(), cache.create()
        self.step(one, "a", 60)
        self.step(other, "b", 40)
        self.step(one, "a", 4)
        third = between(cache.fork, one)
        between(cache.truncate, one, 50)  # into a page that both have
        self.step(one, "c", 1)
        fourth = between(cache.fork, other)
        saved = between(cache.save, third)
        between(cache.drop, third)
        fifth = between(cache.load, saved)
        self.step(fifth, "a", 1)
        self.step(fourth, "d", 25)


def played(at: int, seed: int | None) -> tuple[list[bytes], int, int]:
    device = Refusing(KERNELS, seed=seed)
    cache = KVCache(device, GEOMETRY, opening_of(GEOMETRY, fewest(SMALL, 2), sequences_max=2, context_max=128,
                                                 sample_every=2))
    device.calls, device.at = 0, at
    conversation = Conversation(cache)
    try:
        conversation.play()
    finally:
        cache.close()
    return conversation.outputs, device.calls, conversation.failed


def test_whichever_call_to_the_device_fails() -> None:
    expected, calls, _ = played(-1, None)
    for at in range(0, calls, 11):
        outputs, _, failed = played(at, None if at % 2 else at)
        assert failed == 1, at
        assert outputs == expected, at


def test_what_cannot_be_is_refused_before_anything_is_done() -> None:
    given = opening_of(GEOMETRY, fewest(SMALL, 2), sequences_max=2, context_max=128)
    with pytest.raises(ConfigError, match="sample_every is 0"):
        KVCache(FakeDevice(KERNELS), GEOMETRY, evolve(given, sample_every=0))
    with pytest.raises(ConfigError) as refused:
        KVCache(FakeDevice(KERNELS), GEOMETRY, evolve(given, host_bytes=0))
    enough = int(re.findall(r"([\d,]+) bytes", str(refused.value))[-1].replace(",", ""))
    cache = KVCache(FakeDevice(KERNELS), GEOMETRY, evolve(given, host_bytes=enough))
    assert cache.stats().host_bytes <= enough
    one = cache.create()
    saved = cache.save(one)
    row, query = np.zeros((1, GEOMETRY.row_values), np.float32), np.zeros((1, 2, 64), np.float32)

    def refuse(call: Callable[..., Any], *args: Any, why: str) -> None:
        with pytest.raises(StepError, match=why):
            call(*args)

    refuse(cache.create, -1, why="a sequence of -1 tokens")
    refuse(cache.create, 129, why="opened for 128")
    refuse(cache.load, evolve(saved, data=(np.zeros(0, np.float32),) * 2), why="arrays of bytes")
    with pytest.raises(TypeError, match="float"):
        cache.begin_step([(one, 1.5)])  # type: ignore[list-item]
    cache.begin_step([(one, 1)])
    refuse(cache.append, 0, row, row[:, 1:], why="v has 63 values")
    refuse(cache.append, 0, 0, row, why="k is at 0")
    cache.append(0, row, row)
    refuse(cache.attend, 0, -8, why="q is at -8")
    refuse(cache.attend, 0, query, -8, why="the result is to be at -8")
    cache.attend(0, query)
    cache.close()


async def test_an_error_that_is_its_own_cause_comes_back() -> None:
    """Whoever is to be told of an error waits for nothing else: a device thread that died or hung would be forever."""
    def fail(cache: KVCache) -> None:
        error = ValueError("mine")
        raise ExceptionGroup("all", [error]) from error

    def fail_twice(cache: KVCache) -> None:
        error = ValueError("its own")
        raise error from error

    async with open_streamer(lambda: FakeDevice(KERNELS), GEOMETRY, opening_of(GEOMETRY, None)) as streamer:
        with trio.fail_after(30):
            with pytest.raises(ValueError, match="its own"):
                await streamer.on_device(fail_twice)
            with pytest.raises(ExceptionGroup, match="all"):
                await streamer.on_device(fail)
        assert (await streamer.stats()).sequences == 0
