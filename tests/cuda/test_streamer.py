"""The Trio shell and what it refuses: one thread, cancellation, memory that runs out with nothing lost, state."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from attrs import evolve

from kvstream.cuda import cache
from kvstream.cuda.cache import KVCache
from kvstream.cuda.device import Device, PyCudaDevice
from kvstream.cuda.fake_device import FakeDevice
from kvstream.cuda.fake_kernels import KERNELS
from kvstream.cuda.records import Opening
from kvstream.cuda.streamer import Streamer, open_streamer
from kvstream.errors import ConfigError, DeviceError, DeviceMemoryError, StepError
from tests.cuda.driver.pool import Simulated
from tests.cuda.streaming import opening_of, values
from tests.cuda.test_streaming import SMALL, TINY, fewest

GEOMETRY = SMALL.geometry()


def opening(cells: int | None = None, sequences: int = 2, **more: Any) -> Opening:
    return opening_of(GEOMETRY, fewest(SMALL, sequences) if cells is None else cells, sequences_max=sequences, **more)


async def step(streamer: Streamer, name: str, sequence: int, position: int, new: int) -> list[np.ndarray]:
    """One step of one sequence; the outputs of its layers."""
    await streamer.begin_step([(sequence, new)])
    outputs = []
    for layer in range(GEOMETRY.layers):
        k, v, q = (np.stack([values(name, at, layer, 0, what, number) for at in range(position, position + new)])
                   for what, number in (("k", GEOMETRY.row_values), ("v", GEOMETRY.row_values),
                                        ("q", GEOMETRY.q_heads * GEOMETRY.head_size)))
        await streamer.append(layer, k, v)
        outputs.append(await streamer.attend(layer, q.reshape(new, GEOMETRY.q_heads, GEOMETRY.head_size)))
    await streamer.end_step()
    return outputs


async def conversation(open_device: Callable[[], Device], given: Opening) -> list[np.ndarray]:
    """Two sequences by turns, a fork, a cut, and one that leaves and comes back."""
    async with open_streamer(open_device, GEOMETRY, given) as streamer:
        one, other = await streamer.create(), await streamer.create()
        found = await step(streamer, "a", one, 0, 60) + await step(streamer, "b", other, 0, 40)
        found += await step(streamer, "a", one, 60, 20)
        third = await streamer.fork(one)
        await streamer.truncate(one, 50)
        found += await step(streamer, "a", one, 50, 3) + await step(streamer, "c", third, 80, 1)
        saved = await streamer.save(third)
        await streamer.drop(third)
        found += await step(streamer, "b", other, 40, 1)
        again = await streamer.load(saved)
        assert await streamer.tokens(again) == 81 and saved.nbytes == 2 * 81 * (68 + 36)
        found += await step(streamer, "c", again, 81, 2)
        stats = await streamer.stats()
        if given.pool_bytes < stats.pool_bytes * 2 and stats.cells < 20:
            assert stats.counters["in_pages"] > 0
        return found


def same(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return len(first) == len(second) and all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


async def test_streamed_equals_resident_through_the_shell() -> None:
    resident = await conversation(lambda: FakeDevice(KERNELS), opening_of(GEOMETRY, None, sequences_max=2))
    for seed in (None, 1, 2):
        assert same(await conversation(lambda seed=seed: FakeDevice(KERNELS, seed=seed), opening()), resident)


def converse(sim: Any, resident: bool) -> list[np.ndarray]:
    given = opening_of(GEOMETRY, None, sequences_max=2) if resident else opening()
    return trio.run(conversation, lambda: PyCudaDevice(sim.kernels), given)


def test_streamed_equals_resident_through_the_shell_with_pycuda(simulated: Simulated) -> None:
    """The thread of the device is not the one of the test: contexts, frees and all are where they belong."""
    resident = simulated.call(converse, True, kernels="kv")
    for checked in (False, True):
        for found in simulated.seeds(converse, 3, resident=False, kernels="kv", checked=checked):
            assert same(found, resident)


async def test_all_calls_are_on_one_thread_that_ends() -> None:
    threads = set()

    class Watched(FakeDevice):
        def _call(self) -> None:
            threads.add(threading.current_thread())
            super()._call()

    await conversation(lambda: Watched(KERNELS), opening())
    assert len(threads) == 1 and threading.current_thread() not in threads
    assert not threads.pop().is_alive()


async def test_a_cancelled_call_is_carried_out_and_waited_for() -> None:
    started, go_on = threading.Event(), threading.Event()
    async with open_streamer(lambda: FakeDevice(KERNELS), GEOMETRY, opening()) as streamer:

        def slow(cache: KVCache) -> int:
            started.set()
            go_on.wait(10)
            return cache.create()

        left = trio.Event()

        async def caller() -> None:
            try:
                await streamer.on_device(slow)
            finally:
                left.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(caller)
            await trio.to_thread.run_sync(started.wait)
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked()
                assert not left.is_set()
                go_on.set()
                await left.wait()
        assert (await streamer.stats()).sequences == 1
        with trio.move_on_after(0):  # already cancelled: it is not even begun
            await streamer.create()
        assert (await streamer.stats()).sequences == 1


async def test_errors_come_back_and_the_device_is_closed_whatever_happens() -> None:
    devices = []

    def open_device() -> Device:
        devices.append(FakeDevice(KERNELS))
        return devices[-1]

    with pytest.raises(ZeroDivisionError):
        async with open_streamer(open_device, GEOMETRY, opening()) as streamer:
            with pytest.raises(StepError, match="no sequence 7"):
                await streamer.drop(7)
            raise ZeroDivisionError
    with pytest.raises(ConfigError, match=r"a pool of .* is too small"):
        async with open_streamer(open_device, GEOMETRY, evolve(opening(), pool_bytes=1000)):
            pass
    with pytest.raises(DeviceMemoryError, match="device memory"):
        async with open_streamer(lambda: FakeDevice(KERNELS, memory_bytes=1000), GEOMETRY, opening()):
            pass
    with pytest.raises(DeviceMemoryError, match="pinned host memory"):
        async with open_streamer(lambda: FakeDevice(KERNELS, pinned_bytes=1000), GEOMETRY, opening()):
            pass
    for device in devices:
        assert device._closed
    with pytest.raises(DeviceError, match="closed"):
        await streamer.create()


async def test_memory_that_runs_out_loses_nothing() -> None:
    """The host has 8 pages: what does not fit is refused as a whole, and goes on once there is room."""
    pages = 8
    full = opening(sequences=2)
    host = KVCache(FakeDevice(KERNELS), GEOMETRY, full).layout
    small = evolve(full, context_max=128, host_bytes=full.host_bytes - (host.host_pages - pages) * 2
                   * GEOMETRY.page_bytes)
    async with open_streamer(lambda: FakeDevice(KERNELS), GEOMETRY, evolve(full, context_max=512)) as streamer:
        sequence = await streamer.create()
        expected = [await step(streamer, "a", sequence, 0, 60), await step(streamer, "a", sequence, 60, 40)]
    async with open_streamer(lambda: FakeDevice(KERNELS), GEOMETRY, small) as streamer:
        free = (await streamer.stats()).host_pages_free
        one = await streamer.create()
        first = await step(streamer, "a", one, 0, 60)
        others = [await streamer.create() for _ in range(free // 2)]
        for other in others:
            try:
                await step(streamer, "b", other, 0, 60)
            except DeviceMemoryError as error:
                assert "host pages" in error.message
        before = await streamer.stats()
        with pytest.raises(DeviceMemoryError, match=r"2 more host pages of 32 tokens are needed, \d of"):
            await streamer.begin_step([(one, 40)])
        after = await streamer.stats()
        assert after == before and await streamer.tokens(one) == 60
        with pytest.raises(StepError, match="no step"):
            await streamer.end_step()
        for other in others:
            await streamer.drop(other)
        assert same(first + await step(streamer, "a", one, 60, 40), expected[0] + expected[1])


async def test_steps_that_make_no_sense_are_refused() -> None:
    async with open_streamer(lambda: FakeDevice(KERNELS), GEOMETRY, opening()) as streamer:
        one, other, third = [await streamer.create() for _ in range(3)]
        for batch, why in (([], "at least one"), ([(one, 0)], "at least one"), ([(one, 1), (one, 1)], "twice"),
                           ([(one, 65)], "opened for 2 and 64"), ([(one, 1), (other, 1), (third, 1)], "opened for 2"),
                           ([(9, 1)], "no sequence 9")):
            with pytest.raises(StepError, match=why):
                await streamer.begin_step(batch)
        with pytest.raises(StepError, match="no step"):
            await streamer.append(0, np.zeros(64), np.zeros(64))
        await streamer.begin_step([(one, 1)])
        row, query = np.zeros((1, GEOMETRY.row_values)), np.zeros((1, 2, 64))
        for call, why in ((lambda: streamer.append(1, row, row), "Next is append of layer 0"),
                          (lambda: streamer.append(0, row, np.zeros(3)), "v has 3 values"),
                          (lambda: streamer.attend(0, query), "Next is append"),
                          (lambda: streamer.begin_step([(other, 1)]), "under way"),
                          (lambda: streamer.drop(one), "under way"), (lambda: streamer.save(one), "under way"),
                          (streamer.end_step, "Next is append")):
            with pytest.raises(StepError, match=why):
                await call()
        await streamer.abandon_step()
        with pytest.raises(StepError, match="no step"):
            await streamer.abandon_step()
        assert await streamer.tokens(one) == 0 and (await streamer.stats()).cells_held == 0
        saved = await streamer.save(one)
        for wrong, why in ((evolve(saved, geometry=TINY.geometry()), "this cache has"),
                           (evolve(saved, tokens=9), "not 9"), (evolve(saved, tokens=600), "opened for 512")):
            with pytest.raises(StepError, match=why):
                await streamer.load(wrong)
        with pytest.raises(StepError, match="cannot be cut to 1"):
            await streamer.truncate(one, 1)


async def test_a_step_that_cannot_be_planned_or_is_given_up_gives_its_pages_back(
        monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_streamer(lambda: FakeDevice(KERNELS), GEOMETRY, opening()) as streamer:
        one = await streamer.create()
        first = await step(streamer, "a", one, 0, 30)
        before = await streamer.stats()
        await streamer.begin_step([(one, 60)])
        await streamer.abandon_step()
        assert (await streamer.stats()).host_pages_free == before.host_pages_free
        with monkeypatch.context() as patch:
            patch.setattr(cache, "plan_step", lambda *args, **kwargs: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                await streamer.begin_step([(one, 60)])
        assert (await streamer.stats()).host_pages_free == before.host_pages_free
        second = await step(streamer, "a", one, 30, 1)
    async with open_streamer(lambda: FakeDevice(KERNELS), GEOMETRY, opening()) as streamer:
        one = await streamer.create()
        assert same(first + second, await step(streamer, "a", one, 0, 30) + await step(streamer, "a", one, 30, 1))


async def test_pages_that_were_given_back_are_forgotten() -> None:
    """The host has so few pages that a sequence comes back into those of another, which are still on the device."""
    given = opening_of(GEOMETRY, None, sequences_max=2, context_max=96)
    spare = KVCache(FakeDevice(KERNELS), GEOMETRY, given).layout.host_pages - 6
    few = evolve(given, host_bytes=given.host_bytes - spare * 2 * GEOMETRY.page_bytes)
    async with open_streamer(lambda: FakeDevice(KERNELS), GEOMETRY, few) as streamer:
        one, other = await streamer.create(), await streamer.create()
        await step(streamer, "a", one, 0, 60)
        await step(streamer, "b", other, 0, 64)
        saved = await streamer.save(one)
        await streamer.drop(one)
        await step(streamer, "b", other, 64, 20)
        await streamer.drop(other)
        third = await streamer.create()
        await step(streamer, "c", third, 0, 50)  # takes two pages
        found = [await step(streamer, "a", await streamer.load(saved), 60, 1) for _ in range(2)]
    async with open_streamer(lambda: FakeDevice(KERNELS), GEOMETRY, given) as streamer:
        one = await streamer.create()
        await step(streamer, "a", one, 0, 60)
        expected = await step(streamer, "a", one, 60, 1)
    assert all(same(outputs, expected) for outputs in found)


def test_rows_from_arrays_and_queries_on_the_device() -> None:
    """Nothing waits for a result, so a layer's rows may still be on their way when the next one brings its own."""
    assert len({rows_from_arrays(FakeDevice(KERNELS, seed=seed)) for seed in (None, *range(6))}) == 1


def rows_from_arrays(device: Device) -> bytes:
    geometry, rows = GEOMETRY, 5
    k, v, q = (np.stack([values("a", layer, 0, 0, what, rows * number) for layer in range(geometry.layers)])
               for what, number in (("k", geometry.row_values), ("v", geometry.row_values),
                                    ("q", geometry.q_heads * geometry.head_size)))
    one = KVCache(device, geometry, opening())
    host, address = device.pinned(2 * q.nbytes), device.alloc(2 * q.nbytes)
    host[: q.nbytes] = q.reshape(-1).view(np.uint8)
    device.copy_in(one.compute, address, host[: q.nbytes])
    one.begin_step([(one.create(), rows)])
    for layer in range(geometry.layers):
        one.append(layer, k[layer], v[layer])
        at = address + layer * q[0].nbytes
        assert one.attend(layer, at, at + q.nbytes) == at + q.nbytes
    one.end_step()
    device.copy_out(one.compute, host[q.nbytes :], address + q.nbytes)
    device.synchronize()
    found = host[q.nbytes :].tobytes()
    one.close()
    return found


async def test_a_context_may_not_grow_beyond_what_was_planned() -> None:
    async with open_streamer(lambda: FakeDevice(KERNELS), GEOMETRY, opening(context_max=64)) as streamer:
        one = await streamer.create()
        await step(streamer, "a", one, 0, 64)
        with pytest.raises(StepError, match="would have 65 tokens"):
            await streamer.begin_step([(one, 1)])


async def test_one_line_says_what_is_active(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvstream.cuda")
    async with open_streamer(lambda: FakeDevice(KERNELS), GEOMETRY, opening()) as streamer:
        stats = await streamer.stats()
    line, = caplog.messages
    assert line.startswith("KV streaming is active on fake device: pool ") and f"({stats.cells} cells" in line
    for part in ("a ring of", "pinned host memory", "K q8_0, V q4_0", "head size 64"):
        assert part in line


async def test_a_device_that_fails_is_told_once_and_can_be_closed() -> None:
    class Failing(FakeDevice):
        fails = False

        def launch(self, *args: Any, **kwargs: Any) -> None:
            if self.fails:
                raise DeviceError("a launch failed")
            super().launch(*args, **kwargs)

    device = []

    def open_device() -> Device:
        device.append(Failing(KERNELS))
        return device[0]

    async with open_streamer(open_device, GEOMETRY, opening()) as streamer:
        one = await streamer.create()
        await step(streamer, "a", one, 0, 10)
        device[0].fails = True
        with pytest.raises(DeviceError, match="a launch failed"):
            await step(streamer, "a", one, 10, 1)
        for call in (streamer.abandon_step, streamer.create, lambda: streamer.save(one)):
            with pytest.raises(DeviceError, match="failed before: a launch failed"):
                await call()
    assert device[0]._closed
