"""Programs for the simulated driver, run in a child: a small streaming workload whose every event can be left out, and
one short scene for each thing that a program can do wrong. They use PyCUDA exactly as a program on a GPU would.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tests.cuda.driver.control import Sim

PAGES, CELLS, STEPS, VALUES = 4, 2, 2, 24
EVENTS = ("ready", "used", "written", "saved")  # what orders the streams of `stream_pages`
NON_BLOCKING = 1


@contextmanager
def context() -> Iterator[Any]:
    import pycuda.driver as cuda

    made = cuda.Device(0).make_context()
    try:
        yield cuda
    finally:
        made.pop()
        made.detach()


def kernel(module: Any, name: str, arguments: str) -> Any:
    function = module.get_function(name)
    function.prepare(arguments)

    def launch(stream: Any, *values: Any) -> None:
        function.prepared_async_call((1, 1), (1, 1, 1), stream, *values)

    return launch


def expected_state() -> float:
    state = 0.0
    for step in range(STEPS):
        for page in [*(number + 1 for number in range(PAGES)), step + 7]:
            state = float(np.fmod(np.float32(state * 3 + VALUES * page), np.float32(1000)))
    return state


def stream_pages(sim: Sim, without: str = "", checker: bool = True) -> tuple[float, list[str]]:
    """Pages from pinned memory through a ring of two cells to a kernel that folds them in order; a tail page that a
    kernel writes, that is saved to pinned memory and streamed with the others. ``without`` names the event that is left
    out, or "wait", the host's wait before it reads. Returns the result and the reports."""
    sim.set("checker", checker)
    with context() as cuda:
        module = cuda.module_from_buffer(sim.kernels)
        fill, fold = kernel(module, "toy_fill", "Pif"), kernel(module, "toy_fold", "PPi")
        slab = cuda.pagelocked_empty((PAGES + 1, VALUES), np.float32)
        result = cuda.pagelocked_empty(1, np.float32)
        slab[:PAGES] = np.arange(1, PAGES + 1, dtype=np.float32)[:, None]
        ring, tail, state = cuda.mem_alloc(CELLS * VALUES * 4), cuda.mem_alloc(VALUES * 4), cuda.mem_alloc(4)
        copy, compute, save = (cuda.Stream(NON_BLOCKING) for _ in range(3))
        for stream, name in ((copy, "copy"), (compute, "compute"), (save, "save")):
            sim.label_stream(stream.handle, name)
        written, saved = cuda.Event(), cuda.Event()
        ready, used = [[cuda.Event() for _ in range(CELLS)] for _ in range(2)]

        def wait(stream: Any, event: Any, name: str) -> None:
            if name != without:
                stream.wait_for_event(event)

        fill(compute, state, 1, 0.0)
        for step in range(STEPS):
            fill(compute, tail, VALUES, step + 7.0)
            written.record(compute)
            wait(save, written, "written")
            cuda.memcpy_dtoh_async(slab[PAGES], tail, save)
            saved.record(save)
            for page in range(PAGES + 1):
                cell = page % CELLS
                at = int(ring) + cell * VALUES * 4
                wait(copy, used[cell], "used")
                if page == PAGES:
                    wait(copy, saved, "saved")
                cuda.memcpy_htod_async(at, slab[page], copy)
                ready[cell].record(copy)
                wait(compute, ready[cell], "ready")
                fold(compute, state, at, VALUES)
                used[cell].record(compute)
        cuda.memcpy_dtoh_async(result, state, compute)
        if without != "wait":
            compute.synchronize()
        sim.host_reads(result.ctypes.data, 4)
        value = float(result[0])
        cuda.Context.synchronize()
        return value, sim.take_reports()


def replay(sim: Sim) -> list[str]:
    sim.set("trace", 1)
    stream_pages(sim)
    return sim.trace()


def addresses(sim: Sim) -> list[int]:
    with context() as cuda:
        kept = [cuda.mem_alloc(size) for size in (1, 5000, 4096)]
        return [int(address) for address in kept]


# --- one fault each: the scene returns the kinds of the reports -------------------------------------------------------


def _buffers(cuda: Any, values: int = 256) -> tuple[Any, Any, Any]:
    host = cuda.pagelocked_empty(values, np.float32)
    host[:] = 1
    return host, cuda.mem_alloc(values * 4), cuda.Stream(NON_BLOCKING)


def free_pinned_too_early(sim: Sim, wait: bool = False) -> set[str]:
    with context() as cuda:
        host, device, stream = _buffers(cuda)
        cuda.memcpy_htod_async(device, host, stream)
        if wait:
            stream.synchronize()
        del host
        cuda.Context.synchronize()
        kinds = {line.split(":")[0] for line in sim.take_reports()}
        device.free()
        return kinds


def free_device_too_early(sim: Sim, wait: bool = False) -> set[str]:
    """Another stream that waits is no wait of the host."""
    with context() as cuda:
        host, device, stream = _buffers(cuda)
        other, event = cuda.Stream(NON_BLOCKING), cuda.Event()
        cuda.memcpy_htod_async(device, host, stream)
        event.record(stream)
        other.wait_for_event(event)
        if wait:
            other.synchronize()
        device.free()
        cuda.Context.synchronize()
        return {line.split(":")[0] for line in sim.take_reports()}


def change_source(sim: Sim, wait: bool = False) -> set[str]:
    with context() as cuda:
        host, device, stream = _buffers(cuda)
        cuda.memcpy_htod_async(device, host, stream)
        if wait:
            stream.synchronize()
        host[7] = 2
        cuda.Context.synchronize()
        return {line.split(":")[0] for line in sim.take_reports()}


def reuse_source_for_download(sim: Sim) -> float:
    """Up from a buffer, then down into it, then up again, on one stream: the device changes the source, in order."""
    with context() as cuda:
        host, device, stream = _buffers(cuda)
        other = cuda.mem_alloc(host.nbytes)
        cuda.memset_d32_async(other, 0x40400000, host.size, stream)  # 3.0
        cuda.memcpy_htod_async(device, host, stream)
        cuda.memcpy_dtoh_async(host, other, stream)
        cuda.memcpy_htod_async(device, host, stream)
        result = cuda.pagelocked_empty(host.size, np.float32)
        cuda.memcpy_dtoh_async(result, device, stream)
        stream.synchronize()
        cuda.Context.synchronize()
        return float(result[5])


def read_too_early(sim: Sim) -> tuple[float, set[str]]:
    with context() as cuda:
        host, device, stream = _buffers(cuda)
        cuda.memcpy_htod_async(device, host, stream)
        host_out = cuda.pagelocked_empty(256, np.float32)
        host_out[:] = 5
        cuda.memcpy_dtoh_async(host_out, device, stream)
        sim.host_reads(host_out.ctypes.data, host_out.nbytes)
        value = float(host_out[0])
        cuda.Context.synchronize()
        return value, {line.split(":")[0] for line in sim.take_reports()}


def attempt(action: Any, *arguments: Any) -> str:
    """The name of the exception that ``action`` raises, or nothing."""
    try:
        action(*arguments)
    except Exception as error:
        return type(error).__name__
    return ""


def wrong_packing(sim: Sim) -> tuple[str, set[str]]:
    with context() as cuda:
        device = cuda.mem_alloc(64)
        fill = kernel(cuda.module_from_buffer(sim.kernels), "toy_fill", "Pi")  # the value is missing
        error = attempt(fill, None, device, 4)
        return error, {line.split(":")[0] for line in sim.take_reports()}


def bad_shapes(sim: Sim) -> list[str]:
    with context() as cuda:
        function = cuda.module_from_buffer(sim.kernels).get_function("toy_fault")
        function.prepare("")
        errors = [attempt(lambda grid=grid, block=block, shared=shared: function.prepared_call(
            grid, block, shared_size=shared)) for grid, block, shared in (
                ((1, 1), (1025, 1, 1), 0), ((0, 1), (1, 1, 1), 0), ((1, 70000), (1, 1, 1), 0),
                ((1, 1), (1, 1, 1), 49 * 1024))]
        sim.take_reports()
        return errors


def copy_out_of_bounds(sim: Sim) -> tuple[list[str], set[str]]:
    with context() as cuda:
        host, device, stream = _buffers(cuda)
        errors = [attempt(cuda.memcpy_htod_async, int(device) + 4, host, stream),
                  attempt(cuda.memcpy_htod_async, int(device) - 4, host, stream),
                  attempt(cuda.memcpy_dtoh, np.zeros(300, np.float32), device),
                  attempt(cuda.memset_d8, int(device) + 1000, 0, 25)]
        return errors, {line.split(":")[0] for line in sim.take_reports()}


def kernel_out_of_bounds(sim: Sim, offset: int, freed: bool = False) -> tuple[bool, str, list[str]]:
    """A kernel writes 4 bytes at ``offset`` of an allocation of 1024. (does the context's error stick, what the next
    call raises, reports)"""
    with context() as cuda:
        device = cuda.mem_alloc(1024)
        base = int(device)
        if freed:
            device.free()
        wild = kernel(cuda.module_from_buffer(sim.kernels), "toy_wild", "Pq")
        wild(None, base, offset)
        sim.drain()
        sticks, later = bool(sim.get("sticky")), attempt(cuda.mem_alloc, 16)
        sim.clear_sticky()
        return sticks, later, sim.take_reports()


def bad_kernel(sim: Sim, name: str) -> tuple[list[str], list[str]]:
    """(what three later calls raise, reports)"""
    with context() as cuda:
        launch = kernel(cuda.module_from_buffer(sim.kernels), name, "")  # keeps its module
        launch(None)
        later = [attempt(cuda.Context.synchronize), attempt(cuda.mem_alloc, 16), attempt(cuda.mem_get_info)]
        sim.clear_sticky()
        return later, sim.take_reports()


def read_uninitialised(sim: Sim, written: int) -> list[str]:
    with context() as cuda:
        module = cuda.module_from_buffer(sim.kernels)
        fill, fold = kernel(module, "toy_fill", "Pif"), kernel(module, "toy_fold", "PPi")
        state, values, moved = cuda.mem_alloc(4), cuda.mem_alloc(64), cuda.mem_alloc(64)
        fill(None, state, 1, 0.0)
        fill(None, values, written, 1.0)
        cuda.memcpy_dtod(moved, values, 64)
        fold(None, state, moved, 16)
        cuda.Context.synchronize()
        return sim.take_reports()


def neighbours(sim: Sim, overlap: int) -> set[str]:
    """Two streams write neighbouring odd-sized rows without an order; ``overlap`` bytes are shared."""
    with context() as cuda:
        device = cuda.mem_alloc(1024)
        one, other = cuda.Stream(NON_BLOCKING), cuda.Stream(NON_BLOCKING)
        for row in range(8):
            stream = one if row % 2 else other
            cuda.memset_d8_async(int(device) + 37 * row, row, 37 + (overlap if row < 7 else 0), stream)
        cuda.Context.synchronize()
        return {line.split(":")[0] for line in sim.take_reports()}


def through_the_host(sim: Sim, how: str) -> set[str]:
    """One stream writes, another reads, and the order comes from the host's wait between the two."""
    with context() as cuda:
        host, device, one = _buffers(cuda)
        other, event, target = cuda.Stream(NON_BLOCKING), cuda.Event(), cuda.pagelocked_empty(host.shape, np.float32)
        cuda.memcpy_htod_async(device, host, one)
        event.record(one)
        if how == "stream":
            one.synchronize()
        elif how == "event":
            event.synchronize()
        elif how == "query":
            while not event.query():
                pass
        elif how == "done":
            while not one.is_done():
                pass
        elif how == "context":
            cuda.Context.synchronize()
        cuda.memcpy_dtoh_async(target, device, other)
        cuda.Context.synchronize()
        return {line.split(":")[0] for line in sim.take_reports()}


def third_reader(sim: Sim, waits: bool) -> list[str]:
    """One writes, a second one that waits for it reads, a third one reads: the second's read hides nothing."""
    with context() as cuda:
        device, copies = cuda.mem_alloc(64), cuda.mem_alloc(128)
        first, second, third = (cuda.Stream(NON_BLOCKING) for _ in range(3))
        event = cuda.Event()
        cuda.memset_d8_async(device, 1, 64, first)
        event.record(first)
        second.wait_for_event(event)
        if waits:
            third.wait_for_event(event)
        cuda.memcpy_dtod_async(copies, device, 64, second)
        cuda.memcpy_dtod_async(int(copies) + 64, device, 64, third)
        cuda.Context.synchronize()
        return sim.take_reports()


def many_readers(sim: Sim, left_out: int) -> tuple[int, set[str]]:
    """Ten streams read what one then overwrites, having waited for all of them but ``left_out`` of them."""
    with context() as cuda:
        device, copies = cuda.mem_alloc(64), cuda.mem_alloc(640)
        writer, readers = cuda.Stream(NON_BLOCKING), [cuda.Stream(NON_BLOCKING) for _ in range(10)]
        cuda.memset_d8(device, 1, 64)
        cuda.Context.synchronize()
        for number, reader in enumerate(readers):
            cuda.memcpy_dtod_async(int(copies) + 64 * number, device, 64, reader)
            event = cuda.Event()
            event.record(reader)
            if number >= left_out:
                writer.wait_for_event(event)
        cuda.memset_d8_async(device, 2, 64, writer)
        cuda.Context.synchronize()
        return sim.get("checker_evictions"), {line.split(":")[0] for line in sim.take_reports()}


def atomics(sim: Sim, plain: bool) -> tuple[int, set[str]]:
    with context() as cuda:
        bump = kernel(cuda.module_from_buffer(sim.kernels), "toy_bump", "P")
        device = cuda.mem_alloc(4)
        cuda.memset_d32(device, 0, 1)
        cuda.Context.synchronize()
        streams = [cuda.Stream(NON_BLOCKING) for _ in range(3)]
        for stream in streams:
            bump(stream, device)
        if plain:
            cuda.memset_d32_async(device, 0, 1, cuda.Stream(NON_BLOCKING))
        cuda.Context.synchronize()
        result = np.zeros(1, np.uint32)
        cuda.memcpy_dtoh(result, device)
        return int(result[0]), {line.split(":")[0] for line in sim.take_reports()}


def default_stream(sim: Sim, flags: int) -> tuple[int, list[str]]:
    """A memset on a stream, a later one on the default stream, and one on the stream again: the last one counts."""
    with context() as cuda:
        device, stream = cuda.mem_alloc(4096), cuda.Stream(flags)
        cuda.memset_d8_async(device, 1, 4096, stream)
        cuda.memset_d8(device, 2, 4096)
        cuda.memset_d8_async(device, 3, 4096, stream)
        cuda.memset_d8(device, 4, 4096)
        result = np.zeros(4096, np.uint8)
        cuda.Context.synchronize()
        cuda.memcpy_dtoh(result, device)
        return int(result[9]), sim.take_reports()


def events(sim: Sim) -> tuple[int, int, bool]:
    """A wait takes the record as it was when it was asked for; one that was never recorded is no wait at all."""
    with context() as cuda:
        one, other, device = cuda.Stream(NON_BLOCKING), cuda.Stream(NON_BLOCKING), cuda.mem_alloc(16)
        never, event = cuda.Event(), cuda.Event()
        other.wait_for_event(never)
        event.record(one)
        other.wait_for_event(event)
        cuda.memset_d8_async(device, 1, 16, one)
        event.record(one)  # not what `other` waits for
        other.synchronize()
        pending = sim.get("pending")
        polls = 0
        while not event.query():
            polls += 1
            if polls > 1000:
                return pending, polls, False
        cuda.Context.synchronize()
        return pending, polls, True


def left_over(sim: Sim) -> list[int]:
    """How much is pending after each of six enqueued operations."""
    with context() as cuda:
        device, stream = cuda.mem_alloc(64), cuda.Stream(NON_BLOCKING)
        found = []
        for _ in range(6):
            cuda.memset_d8_async(device, 1, 64, stream)
            found.append(sim.get("pending"))
        cuda.Context.synchronize()
        return [*found, sim.get("pending")]


def pageable(sim: Sim) -> tuple[float, int]:
    with context() as cuda:
        device, stream = cuda.mem_alloc(1024), cuda.Stream(NON_BLOCKING)
        source, target = np.full(256, 4, np.float32), np.zeros(256, np.float32)
        cuda.memcpy_htod_async(device, source, stream)
        source[:] = 9  # harmless: the driver has staged it
        cuda.memcpy_dtoh_async(target, device, stream)
        return float(target[3]), sim.get("pageable_copies")


def memory_limits(sim: Sim) -> tuple[list[str], tuple[int, int], int, int]:
    sim.set("device_bytes", 1 << 20)
    sim.set("host_bytes", 1 << 20)
    with context() as cuda:
        kept = cuda.mem_alloc(600_000)
        info = cuda.mem_get_info()
        errors = [attempt(cuda.mem_alloc, 600_000), attempt(cuda.pagelocked_empty, 2 << 20, np.uint8)]
        sim.set("fail_alloc_after", 1)
        second = cuda.mem_alloc(16)
        errors.append(attempt(cuda.mem_alloc, 16))
        sim.set("fail_alloc_after", -1)
        second.free()
        kept.free()
        return errors, info, sim.get("device_bytes_used"), sim.get("peak_device_bytes")


def managed(sim: Sim) -> tuple[float, float]:
    with context() as cuda:
        shared = cuda.managed_empty(16, np.float32, mem_flags=cuda.mem_attach_flags.GLOBAL)
        first = float(shared[0])
        shared[:] = 2
        fold = kernel(cuda.module_from_buffer(sim.kernels), "toy_fold", "PPi")
        fill = kernel(cuda.module_from_buffer(sim.kernels), "toy_fill", "Pif")
        address = shared.ctypes.data
        sim.set("uninitialised", 0)  # what the host wrote is not seen
        fill(None, address, 1, 1.0)
        fold(None, address, address + 4, 15)
        cuda.Context.synchronize()
        return first, float(shared[0])


def elapsed(sim: Sim) -> float:
    with context() as cuda:
        host, device, stream = _buffers(cuda)
        begin, end = cuda.Event(), cuda.Event()
        begin.record(stream)
        for _ in range(5):
            cuda.memcpy_htod_async(device, host, stream)
        end.record(stream)
        end.synchronize()
        cuda.Context.synchronize()
        return float(end.time_since(begin))


def threads(sim: Sim) -> list[str]:
    """Contexts belong to threads."""
    from threading import Thread

    errors: list[str] = []
    with context() as cuda:
        thread = Thread(target=lambda: errors.append(attempt(cuda.mem_alloc, 16)))
        thread.start()
        thread.join()
        errors.append(attempt(cuda.mem_alloc, 16))
    return errors


def bad_modules(sim: Sim) -> list[str]:
    with context() as cuda:
        module = cuda.module_from_buffer(sim.kernels)
        errors = [attempt(cuda.module_from_buffer, b"\x7fELF" + bytes(60)), attempt(module.get_function, "nothing"),
                  attempt(cuda.module_from_buffer, b"KVSIMSO1" + (8).to_bytes(8, "little") + bytes(8))]
        sim.take_reports()
        return errors


def seeds_of_launches(sim: Sim) -> list[int]:
    with context() as cuda:
        order = kernel(cuda.module_from_buffer(sim.kernels), "toy_order", "P")
        device = cuda.mem_alloc(8)
        found = []
        for _ in range(3):
            order(None, device)
            result = np.zeros(1, np.uint64)
            cuda.memcpy_dtoh(result, device)
            found.append(int(result[0]))
        return found


def unsupported(sim: Sim) -> tuple[str, int]:
    with context() as cuda:
        error = attempt(cuda.memset_d2d8, cuda.mem_alloc(64), 8, 0, 8, 8)
        return error, sim.get("unsupported")


def use_dead_handles(sim: Sim) -> None:
    """After a reset nothing that was made before it is valid. Raises what happened: PyCUDA still believes in its
    context, so this child is of no more use."""
    import pycuda.driver as cuda

    made = cuda.Device(0).make_context()
    stream, device = cuda.Stream(), cuda.mem_alloc(16)
    before = attempt(stream.synchronize)
    sim.reset(0, "uniform")
    raise RuntimeError([before, attempt(stream.synchronize), attempt(device.free), attempt(made.pop)])


# --- scenes that go wrong as a whole ----------------------------------------------------------------------------------


def raise_error(sim: Sim) -> None:
    raise ValueError("planted")


def leave_reports(sim: Sim) -> None:
    with context() as cuda:
        attempt(cuda.memcpy_htod, cuda.mem_alloc(4), np.zeros(8, np.float32))


def leave_context(sim: Sim) -> None:
    import pycuda.driver as cuda

    cuda.Device(0).make_context()


def hang(sim: Sim) -> None:
    import time

    time.sleep(60)


def crash(sim: Sim) -> None:
    """After a launch, when the driver's own handler is in place."""
    import ctypes

    with context() as cuda:
        launch = kernel(cuda.module_from_buffer(sim.kernels), "toy_report", "")
        launch(None)
        cuda.Context.synchronize()
    ctypes.string_at(8)


def add(sim: Sim, left: int, right: int = 0) -> int:
    return left + right


def where(sim: Sim) -> tuple[int, str, str]:
    return sim.seed, sim.policy, "checked" if sim.checked else "fast"
