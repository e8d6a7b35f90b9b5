"""The fake device's virtual time, and the tables of a step that is sent in several loads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstream.cuda import executor
from kvstream.cuda.fake_device import POISON_FREED, POISON_HOST, POISON_NEW, FakeDevice, Launch, Speeds
from kvstream.cuda.fake_kernels import KERNELS
from kvstream.cuda.launches import Draft
from kvstream.cuda.tables import Loads, Steady
from kvstream.errors import DeviceError
from tests.cuda.streaming import opening_of, play
from tests.cuda.test_streaming import ONE, SMALL, feed, fewest, on_fake

GB = 1e9


def timed(**more: Any) -> FakeDevice:
    return FakeDevice(speeds=Speeds(1 * GB, 2 * GB, copy_s=0.0, launch_s=0.0, call_s=0.0, **more))


def test_streams_run_beside_each_other_and_engines_do_not() -> None:
    device = timed(kernel_s=lambda launch: float(launch.args[0]))
    compute, one, other = (device.stream(name) for name in ("compute", "one", "other"))
    address, host = device.alloc(4 << 20), device.pinned(4 << 20)
    device.copy_in(one, address, host[:1_000_000])  # 1 ms
    device.launch(compute, "k", (1,), (1,), (0.005,))
    assert device.device_s == pytest.approx(0.005)
    device.copy_in(other, address, host[:3_000_000])  # behind the first one, on the same engine
    device.copy_out(one, host[:1_000_000], address)  # its own engine, after the first copy
    assert [stream.handle.ready_s for stream in (one, other)] == pytest.approx([0.0015, 0.004])
    device.wait(compute, device.record(other))
    device.launch(compute, "k", (1,), (1,), (0.001,))
    assert device.device_s == pytest.approx(0.006)
    device.wait(one, device.record(compute))
    device.copy_in(one, address, host[:1_000_000])
    assert device.device_s == pytest.approx(0.007) and device.host_s == 0.0
    device.synchronize(other)
    assert device.host_s == pytest.approx(0.004)


def test_nothing_starts_before_it_is_enqueued() -> None:
    device = FakeDevice(speeds=Speeds(call_s=0.5, copy_s=0.25, launch_s=0.25))
    stream = device.stream("compute")  # half a second
    device.launch(stream, "k", (1,), (1,), ())
    event = device.record(stream)
    assert device.device_s == pytest.approx(1.5)  # recorded when the host came to it
    assert device.query(event) and device.host_s == 2.0


def test_without_kernels_nothing_is_stored() -> None:
    device = FakeDevice(memory_bytes=1 << 40, pinned_bytes=1 << 40)
    address = device.alloc(1 << 39)
    stream, host = device.stream("copy"), device.pinned(1 << 30)
    device.copy_in(stream, address + (1 << 38), host)
    device.launch(stream, "whatever", (1,), (1,), ())
    device.synchronize()
    with pytest.raises(DeviceError, match="stores nothing"):
        device.device_memory.view(address, 1)
    with pytest.raises(DeviceError, match="not inside"):
        device.copy_in(stream, address + (1 << 39) - 5, host[:6])


def test_memory_is_poisoned() -> None:
    device = FakeDevice(KERNELS, seed=1)
    stream, address, host = device.stream("copy"), device.alloc(64), device.pinned(64)
    view = device.device_memory.view(address, 64)
    assert (view == POISON_NEW).all()
    device.copy_out(stream, host[:32], address)
    assert (host[:32] == POISON_HOST).all() and not host[32:].any()
    device.copy_in(stream, address, host[32:])
    device.copy_out(stream, host[32:], address)  # a copy that waits still reads there
    assert not host[32:].any()
    device.free(address)
    assert (view == POISON_FREED).all() and (host[:32] == POISON_NEW).all()


def test_streams_that_wait_for_one_another_are_an_error() -> None:
    device = FakeDevice(KERNELS, seed=0)
    one, other = device.stream("one"), device.stream("other")
    event = device.record(one)
    one.handle.works[0].after = (device.record(other).handle.work,)
    other.handle.works[0].after = (event.handle.work,)
    with pytest.raises(DeviceError, match="wait for one another"):
        device.synchronize()


def test_copies_hide_behind_computation_and_the_counters_say_so() -> None:
    """A computation that takes longer than the copies: none is late. One that takes no time: all are."""
    geometry = SMALL.geometry()
    opening = opening_of(geometry, fewest(SMALL, 1) + 1, sequences_max=1, sample_every=1)
    script = (*[feed(a=32)] * 4, *[feed(a=1)] * 12)
    found = []
    for attend_s in (1e-2, 0.0):
        def kernel_s(launch: Launch, attend_s: float = attend_s) -> float:
            return attend_s if launch.kernel.startswith("kv_attend") else 0.0

        device = FakeDevice(speeds=Speeds(1e6, 1e9, kernel_s=kernel_s))
        found.append(play(device, geometry, opening, script, lazily=True).stats)
    hidden, exposed = found
    assert hidden.counters["samples"] == exposed.counters["samples"] > 10
    assert hidden.counters["misses"] < exposed.counters["misses"] > 10
    assert hidden.overlap is not None and exposed.overlap is not None
    assert hidden.overlap > 0.7 > 0.3 > exposed.overlap


def test_a_step_with_more_tables_than_fit_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every load is as small as it can be; the bits are the same, and the host waits only for the copy before last."""
    resident = on_fake(SMALL, None, ONE, sequences_max=1)

    class Narrow(Loads):
        def __init__(self, device: Any, stream: Any, region: int, stagings: Any, on_load: Any) -> None:
            super().__init__(device, stream, region, tuple(staging[:720] for staging in stagings), on_load)

    monkeypatch.setattr(executor, "Loads", Narrow)
    for seed in (None, *range(6)):
        played = on_fake(SMALL, fewest(SMALL, 1), ONE, seed, sequences_max=1)
        assert played.outputs == resident.outputs
    assert played.stats.counters["table_calls"] > played.stats.counters["steps"] + 8
    assert resident.stats.counters["table_calls"] == resident.stats.counters["steps"]


def test_what_kernels_read_on_the_host_waits_for_no_copy() -> None:
    device = timed(kernel_s=lambda launch: 0.0)
    copy, compute = device.stream("copy"), device.stream("compute")
    address, host = device.alloc(4 << 20), device.pinned(4 << 20)
    device.copy_in(copy, address, host[:2_000_000])  # 2 ms
    device.launch(compute, "kv_tables", (1, 1, 1), (256, 1, 1), (device.mapped(host), address, 10_000, 0))
    assert compute.handle.ready_s == pytest.approx(2e-6 + 2 * 0.00016)  # half of the link each
    device.copy_in(copy, address, host[:1_000_000])
    assert copy.handle.ready_s == pytest.approx(0.00316)


def test_a_step_that_repeats_tells_only_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences, in one order and the other, and widths: the same bits, in a small part of the bytes."""
    script = (feed(a=40), feed(b=62), feed(b=10), *[feed(a=1, b=1)] * 9, *[feed(b=1, a=1)] * 5, *[feed(a=3, b=1)] * 7,
              *[feed(a=1, b=1)] * 9)
    told, played = [], []
    for _ in range(2):
        for seed in (None, 1, 2):
            played.append(on_fake(SMALL, fewest(SMALL, 2) + 2, script, seed, sequences_max=2))
        told.append(played[-1].stats.counters["table_bytes"])
        monkeypatch.setattr(Steady, "fits", lambda *args: False)
    assert all(one.outputs == played[0].outputs for one in played)
    assert told[0] < 0.7 * told[1]


def test_an_array_is_sent_once_per_load() -> None:
    device = FakeDevice(KERNELS)
    sizes = []
    staging = device.pinned(2048)
    region = device.alloc(1024)
    loads = Loads(device, device.stream("compute"), region, (staging[:1024], staging[1024:]),
                  lambda size, waited: sizes.append(size))
    shared, own = np.arange(60, dtype=np.int32), np.arange(4, dtype=np.int32)
    drafts = [Draft("k", (1, 1, 1), (1, 1, 1), 0, (shared, own), lambda at, io: tuple(at)) for _ in range(3)]
    loads.begin(iter(drafts))
    taken = [loads.take("k").addresses for _ in range(3)]
    assert sizes == [240 + 16] and len(set(taken)) == 1
    assert (device.device_memory.ints(taken[0][0], 60) == shared).all()
    with pytest.raises(DeviceError, match="no launch of k"):
        loads.take("k")
