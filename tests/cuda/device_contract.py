"""What every ``Device`` must do, as scenes: functions of a device, which the fake one is given directly and PyCUDA's on
the simulated driver in a child process. ``just gpu`` runs the same on a real one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstream.cuda.device import Device
from kvstream.cuda.types import KVType, decode
from kvstream.errors import DeviceError, DeviceMemoryError

MIB = 1 << 20


def memory_is_given_and_taken_back(device: Device) -> None:
    """In whole blocks: of what is smaller than 2 MiB a driver keeps the rest, and tells other figures."""
    free, total = device.memory()
    assert 0 < free <= total
    one, other = device.alloc(2 * MIB), device.alloc(6 * MIB)
    assert one % 256 == other % 256 == 0
    assert other >= one + 2 * MIB or one >= other + 6 * MIB
    assert free - device.memory()[0] >= 8 * MIB
    device.free(one)
    device.free(other)
    assert device.memory()[0] == free
    with pytest.raises(DeviceError, match="not allocated"):
        device.free(one)


def too_much_memory_is_an_error_and_no_loss(device: Device) -> None:
    kept = device.alloc(MIB)
    free, total = device.memory()
    with pytest.raises(DeviceMemoryError, match=str(total)):
        device.alloc(total)
    assert device.memory()[0] == free
    device.free(kept)


def bytes_come_back(device: Device) -> None:
    stream = device.stream("copy")
    address, host = device.alloc(8192), device.pinned(16384)
    assert host.dtype == np.uint8 and host.shape == (16384,) and not host.any()
    host[:4096] = np.arange(4096) % 251
    device.copy_in(stream, address + 100, host[:4096])
    device.copy_out(stream, host[8192:8292], address + 200)
    device.copy_out(stream, host[12288:12289], address + 100)
    device.synchronize(stream)
    assert (host[8192:8292] == host[100:200]).all()
    assert host[12288] == host[0] and not host[12289:].any()


def memory_that_is_not_pinned_is_refused(device: Device) -> None:
    stream, address, host = device.stream("copy"), device.alloc(1024), device.pinned(1024)
    for wrong in (np.zeros(64, np.uint8), host[::2], np.concatenate([host, host])):
        with pytest.raises(DeviceError, match="pinned"):
            device.copy_in(stream, address, wrong)
        with pytest.raises(DeviceError, match="pinned"):
            device.copy_out(stream, wrong, address)
    device.copy_in(stream, address, host[1000:])
    device.synchronize()


def events_order_streams(device: Device) -> None:
    """A chain over three streams, back and forth, that comes out right only in the order of its events."""
    first, second, third = (device.stream(name) for name in ("first", "second", "third"))
    address, host = device.alloc(4096), device.pinned(8 * 4096)
    sources = [host[index * 4096 : (index + 1) * 4096] for index in range(4)]
    results = [host[index * 4096 : (index + 1) * 4096] for index in range(4, 8)]
    for index, source in enumerate(sources):
        source[:] = index + 1
    previous = None
    for index in range(4):
        into, out_of = (first, second) if index % 2 else (third, first)
        if previous is not None:
            device.wait(into, previous)
        device.copy_in(into, address, sources[index])
        device.wait(out_of, device.record(into))
        device.copy_out(out_of, results[index], address)
        previous = device.record(out_of)
    device.synchronize()
    assert [set(result.tolist()) for result in results] == [{1}, {2}, {3}, {4}]


def a_wait_is_for_what_was_recorded_before_it(device: Device) -> None:
    """Recorded, waited for, and only then does the stream go on: the wait is not for that."""
    one, other = device.stream("one"), device.stream("other")
    address, host = device.alloc(512), device.pinned(512)
    event = device.record(one)
    device.wait(other, event)
    device.copy_in(one, address, host)
    device.synchronize(other)
    assert device.query(event)
    device.synchronize()


def an_event_happens_while_it_is_asked_for(device: Device) -> None:
    stream, address, host = device.stream("copy"), device.alloc(MIB), device.pinned(MIB)
    device.copy_in(stream, address, host)
    event = device.record(stream)
    for _ in range(10_000_000):
        if device.query(event):
            break
    else:
        raise AssertionError("never")
    device.synchronize()
    assert device.query(event) and device.query(device.record(stream)) in (True, False)


def timed_events_have_times(device: Device) -> None:
    stream, address, host = device.stream("copy"), device.alloc(MIB), device.pinned(MIB)
    start = device.record(stream, timed=True)
    device.copy_in(stream, address, host)
    end = device.record(stream, timed=True)
    untimed = device.record(stream)
    device.synchronize()
    took = device.elapsed_s(start, end)
    assert 0 < took < 10
    assert device.elapsed_s(end, start) == pytest.approx(-took)
    with pytest.raises(DeviceError, match="carry none"):
        device.elapsed_s(start, untimed)


def kernels_run(device: Device) -> None:
    """``kv_write``: rows of f32 to addresses, K and V each in its type."""
    stream, other = device.stream("compute"), device.stream("save")
    rows, values = 3, 64
    host = device.pinned(64 * 1024)
    source = host[: rows * values * 4].view(np.float32)
    source[:] = np.linspace(-3, 5, rows * values, dtype=np.float32)
    base = device.alloc(64 * 1024)
    k_bytes, v_bytes = KVType.F32.row_bytes(values), KVType.Q8_0.row_bytes(values)
    k_at, v_at, tables = base + 16384, base + 32768, base + 49152
    targets = host[4096 : 4096 + 2 * rows * 8].view(np.uint64)
    targets[:rows] = [k_at + 1024 * row for row in (2, 0, 1)]
    targets[rows:] = [v_at + v_bytes * row for row in range(rows)]
    device.copy_in(stream, base, host[: rows * values * 4])
    device.copy_in(stream, tables, host[4096 : 4096 + 2 * rows * 8])
    device.launch(stream, "kv_write", (1, 2, 1), (128, 1, 1),
                  (base, base, tables, tables + 8 * rows, rows, values, KVType.F32.code, KVType.Q8_0.code))
    device.wait(other, device.record(stream))
    device.copy_out(other, host[8192 : 8192 + k_bytes], k_at + 2048)
    device.copy_out(other, host[12288 : 12288 + rows * v_bytes], v_at)
    device.synchronize(other)
    assert (host[8192 : 8192 + k_bytes].view(np.float32) == source[:values]).all()
    decoded = decode(KVType.Q8_0, host[12288 : 12288 + rows * v_bytes].reshape(rows, v_bytes), values)
    assert np.abs(decoded.reshape(-1) - source).max() < 0.03
    with pytest.raises(DeviceError, match="no kernel kv_nothing"):
        device.launch(stream, "kv_nothing", (1, 1, 1), (32, 1, 1), ())


def kernels_read_pinned_memory(device: Device) -> None:
    """``kv_tables``: what is there when it runs, word by word to where it belongs, and nothing beside it."""
    stream = device.stream("compute")
    host, base = device.pinned(64 * 1024), device.alloc(32 * 1024)
    words = 600
    host[:] = np.arange(len(host)) * 7 % 253
    source = host[256 : 256 + 16 * words]
    device.copy_in(stream, base, host[32768:])
    device.launch(stream, "kv_tables", (2, 1, 1), (256, 1, 1), (device.mapped(source), base + 1024, words, 0))
    device.copy_out(stream, host[32768:49152], base)
    before = host[32768:49152].copy()
    device.synchronize(stream)
    assert (host[33792 : 33792 + 16 * words] == source).all()
    rest = [*range(1024), *range(1024 + 16 * words, 16384)]
    assert (host[32768:49152][rest] == np.arange(len(host))[32768:49152][rest] * 7 % 253).all() and before.any()
    places = source[16 * 5 : 16 * 5 + 20].view(np.int32)  # five words, and behind them where they go
    places[:] = [3, 1000, 0, 17, 2]
    device.launch(stream, "kv_tables", (1, 1, 1), (256, 1, 1), (device.mapped(source), base, 5, 1))
    device.copy_out(stream, host[49152:], base)
    device.synchronize(stream)
    moved = host[49152:].reshape(-1, 16)
    assert (moved[places] == source[:80].reshape(5, 16)).all()
    untouched = np.setdiff1d(np.arange(1024), places)
    assert (moved[untouched] == host[32768:49152].reshape(-1, 16)[untouched]).all()
    with pytest.raises(DeviceError, match="pinned"):
        device.mapped(np.zeros(16, np.uint8))


def a_kernel_may_take_more_shared_memory_than_is_free(device: Device) -> None:
    """Beyond 48 KiB it has to be asked for, and every GPU that is supported has 64; nothing has 4 MiB."""
    stream, values = device.stream("compute"), 64
    host, at = device.pinned(4096), device.alloc(4096)
    host[: 4 * values].view(np.float32)[:] = np.arange(values)
    host[512:520].view(np.uint64)[0] = at + 1024
    device.copy_in(stream, at, host[:1024])
    args = (at, at, at + 512, at + 512, 1, values, KVType.F32.code, KVType.F32.code)
    for shared_bytes in (48 * 1024 + 16, 62 * 1024, 0):
        with pytest.raises(DeviceError, match="kv_write"):
            device.launch(stream, "kv_write", (1, 1, 1), (128, 1, 1), args, 4 << 20)
        device.launch(stream, "kv_write", (1, 1, 1), (128, 1, 1), args, shared_bytes)
        device.copy_out(stream, host[2048 : 2048 + 4 * values], at + 1024)
        device.synchronize(stream)
        assert (host[2048 : 2048 + 4 * values].view(np.float32) == np.arange(values)).all()
        host[2048:] = 0


def it_stays_on_its_thread(device: Device) -> None:
    stream, errors = device.stream("copy"), []
    calls: list[Callable[[], Any]] = [
        lambda: device.alloc(16), lambda: device.pinned(16), lambda: device.record(stream), device.synchronize,
        device.memory, device.close]

    def elsewhere() -> None:
        for call in calls:
            try:
                call()
            except DeviceError as error:
                errors.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(errors) == len(calls) and all("thread" in error for error in errors)
    device.synchronize()


def it_is_closed_once_and_for_all(device: Device) -> None:
    stream = device.stream("copy")
    address, host = device.alloc(4096), device.pinned(4096)
    device.copy_in(stream, address, host)
    device.close()  # with work that has not run
    device.close()
    for call in (lambda: device.alloc(16), device.memory, lambda: device.record(stream)):
        with pytest.raises(DeviceError, match="closed"):
            call()


SCENES: tuple[Callable[[Device], None], ...] = (
    memory_is_given_and_taken_back, too_much_memory_is_an_error_and_no_loss, bytes_come_back,
    memory_that_is_not_pinned_is_refused, events_order_streams, a_wait_is_for_what_was_recorded_before_it,
    an_event_happens_while_it_is_asked_for, timed_events_have_times, kernels_run,
    a_kernel_may_take_more_shared_memory_than_is_free, kernels_read_pinned_memory, it_stays_on_its_thread,
    it_is_closed_once_and_for_all)
