"""A device without a GPU: virtual time always, values when it is given kernels.

Theory of operation. *Time* is decided when an operation is enqueued: it starts when the operation before it on its
stream has ended, when every event its stream was told to wait for has happened, when its copy engine (one for each
direction, as on every card) is free, and not before the host enqueued it. The host's own clock moves with every call
and jumps when it synchronises. So a run takes no real time, and gives the same figures every time; the constants come
from a ``Speeds``.

*Values*: with ``kernels`` (functions that do with numpy what the CUDA ones do) memory is real and operations do work.
Without, nothing is stored and a pool may be larger than this machine. With ``seed`` None an operation is done the
moment it is enqueued, like a GPU that is infinitely fast. With a seed operations wait in their streams until the host
looks (``synchronize``, a ``query`` that is true), and are then done in a random order that respects streams and events
and nothing else: what was ordered by luck comes out wrong. Four habits are drawn by the seed, since each is blind to
some faults: any stream, one stream that nobody likes, the newest operation first, one stream as far as it goes.

Fresh and freed device memory is poisoned, and so is the target of a copy to the host from the moment it is enqueued
(unless a copy that still waits reads there), because whoever looks early must not find what he expects.
"""

from __future__ import annotations

import random
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from ..errors import DeviceError, DeviceMemoryError
from .device import SHARED_BYTES_MAX, Event, PinnedRanges, Stream, address_of
from .kernels import tables_bytes

if TYPE_CHECKING:
    from .device import Bytes

ALIGNMENT: Final = 256
GUARD: Final = 4096  # bytes between allocations that belong to nobody
FIRST_ADDRESS: Final = 0x7F00_0000_0000
FIRST_MAPPED: Final = 0x5F00_0000_0000  # where kernels find pinned memory
POISON_NEW, POISON_FREED, POISON_HOST = 0xCB, 0xFD, 0xDB
GIB: Final = 1 << 30


class Memory:
    """Device memory by address, and pinned memory as kernels see it. ``backed`` False: ranges only, nothing is
    stored."""

    def __init__(self, total: int, backed: bool) -> None:
        self.total = total
        self.used = 0
        self._backed = backed
        self._next = FIRST_ADDRESS
        self._starts: list[int] = []
        self._sizes: list[int] = []
        self._blocks: list[NDArray[np.uint8] | None] = []
        self._mapped: list[tuple[int, NDArray[np.uint8]]] = []

    def alloc(self, size: int) -> int:
        if size <= 0 or self.used + size > self.total:
            raise DeviceMemoryError(f"allocate {size} bytes of device memory: {self.total - self.used} are free")
        address = self._next
        self._next += -(-(size + GUARD) // ALIGNMENT) * ALIGNMENT
        self.used += size
        self._starts.append(address)
        self._sizes.append(size)
        self._blocks.append(np.full(size, POISON_NEW, np.uint8) if self._backed else None)
        return address

    def free(self, address: int) -> None:
        at = bisect_right(self._starts, address) - 1
        if at < 0 or self._starts[at] != address:
            raise DeviceError(f"free of {address:#x}, which was not allocated here")
        block = self._blocks[at]
        if block is not None:
            block[:] = POISON_FREED
        self.used -= self._sizes[at]
        del self._starts[at], self._sizes[at], self._blocks[at]

    def map(self, array: NDArray[np.uint8]) -> int:
        """An address for host memory, which kernels may use and copies may not."""
        last, before = self._mapped[-1] if self._mapped else (FIRST_MAPPED - GUARD, array[:0])
        address = last + -(-(before.nbytes + GUARD) // ALIGNMENT) * ALIGNMENT
        self._mapped.append((address, array))
        return address

    def check(self, address: int, size: int) -> int:
        at = bisect_right(self._starts, address) - 1
        if at < 0 or address + size > self._starts[at] + self._sizes[at]:
            raise DeviceError(f"{size} bytes at {address:#x} are not inside one allocation")
        return at

    def view(self, address: int, size: int) -> NDArray[np.uint8]:
        """The bytes themselves, to read and to write."""
        for start, array in self._mapped if address < FIRST_ADDRESS else ():
            if start <= address and address + size <= start + array.nbytes:
                return array[address - start : address - start + size]
        at = self.check(address, size)
        block = self._blocks[at]
        if block is None:
            raise DeviceError("this device stores nothing")
        start = address - self._starts[at]
        return block[start : start + size]

    def floats(self, address: int, count: int) -> NDArray[np.float32]:
        return self.view(address, 4 * count).view(np.float32)

    def ints(self, address: int, count: int) -> NDArray[np.int32]:
        return self.view(address, 4 * count).view(np.int32)

    def addresses(self, address: int, count: int) -> NDArray[np.uint64]:
        return self.view(address, 8 * count).view(np.uint64)


@frozen
class Launch:
    """One launch, as kernels and cost functions see it."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: tuple[int | float, ...]
    shared_bytes: int


Kernel: TypeAlias = Callable[[Memory, Launch], None]


def _no_time(launch: Launch) -> float:
    return 0.0


@frozen
class Speeds:
    """What the virtual hardware can do. ``kernel_s`` gives the running time of a launch, without ``launch_s``."""

    in_bytes_per_s: float = 24e9
    out_bytes_per_s: float = 24e9
    copy_s: float = 5e-6  # each copy costs that much before its first byte
    launch_s: float = 3e-6
    read_s: float = 2e-6  # a kernel that reads host memory waits that long for the first byte
    call_s: float = 2e-6  # host time of one call
    kernel_s: Callable[[Launch], float] = _no_time


@define(eq=False)
class _Work:
    """One operation in a stream. ``after`` are the events its stream waits for before it."""

    act: Callable[[], None] | None
    number: int
    after: tuple[_Work, ...] = ()
    reads: tuple[int, int] = (0, 0)  # host memory it will read: start, end
    done: bool = False


@define(eq=False)
class _Point:
    work: _Work
    time_s: float


@define(eq=False)
class _Queue:
    ready_s: float = 0.0
    waits: list[_Work] = field(factory=list)
    works: deque[_Work] = field(factory=deque)
    last: _Work | None = None


class FakeDevice:
    """See above. ``memory_bytes`` and ``pinned_bytes`` bound what can be allocated."""

    def __init__(self, kernels: Mapping[str, Kernel] | None = None, *, speeds: Speeds | None = None,
                 seed: int | None = None, memory_bytes: int = 16 * GIB, pinned_bytes: int = 64 * GIB) -> None:
        self._thread = threading.get_ident()
        self.speeds = speeds or Speeds()
        self.host_s = 0.0
        self.device_memory = Memory(memory_bytes, backed=kernels is not None)
        self.name, self.computes = "fake device", kernels is not None
        self._kernels = kernels
        self._dice = random.Random(seed) if seed is not None else None
        self._habit = self._dice.choice(("any", "starve", "newest", "run")) if self._dice else ""
        self._pinned = PinnedRanges()
        self._pinned_left = pinned_bytes
        self._arrays: list[Bytes] = []
        self._queues: list[_Queue] = []
        self._favourite = 0
        self._engines = {"in": 0.0, "out": 0.0}
        self._count = 0
        self._closed = False

    @property
    def device_s(self) -> float:
        """When everything enqueued so far will have ended."""
        return max((queue.ready_s for queue in self._queues), default=0.0)

    # --- memory -------------------------------------------------------------------------------------------------------

    def alloc(self, size: int) -> int:
        self._call()
        return self.device_memory.alloc(size)

    def free(self, address: int) -> None:
        self.synchronize()  # cuMemFree does
        self.device_memory.free(address)

    def pinned(self, size: int) -> Bytes:
        self._call()
        if size <= 0 or size > self._pinned_left:
            raise DeviceMemoryError(f"allocate {size} bytes of pinned host memory: {self._pinned_left} are left")
        self._pinned_left -= size
        array = np.zeros(size, np.uint8)  # pages that nobody touches cost nothing
        self._pinned.add(array, self.device_memory.map(array))
        self._arrays.append(array)
        return array

    def mapped(self, array: Bytes) -> int:
        self._call()
        return self._pinned.check(array)

    def memory(self) -> tuple[int, int]:
        self._call()
        return self.device_memory.total - self.device_memory.used, self.device_memory.total

    # --- streams ------------------------------------------------------------------------------------------------------

    def stream(self, name: str) -> Stream:
        self._call()
        queue = _Queue()
        self._queues.append(queue)
        if self._dice is not None:
            self._favourite = self._dice.randrange(len(self._queues))
        return Stream(name, queue)

    def copy_in(self, stream: Stream, address: int, array: Bytes) -> None:
        self._call()
        self._pinned.check(array)
        self.device_memory.check(address, array.nbytes)
        self._copy_time(stream.handle, "in", array.nbytes / self.speeds.in_bytes_per_s)
        start = address_of(array)
        self._enqueue(stream.handle, lambda: self._into(address, array), (start, start + array.nbytes))

    def copy_out(self, stream: Stream, array: Bytes, address: int) -> None:
        self._call()
        self._pinned.check(array)
        self.device_memory.check(address, array.nbytes)
        self._copy_time(stream.handle, "out", array.nbytes / self.speeds.out_bytes_per_s)
        if self._kernels is not None and not self._awaited(array):
            array[:] = POISON_HOST
        self._enqueue(stream.handle, lambda: self._out_of(array, address))

    def record(self, stream: Stream, timed: bool = False) -> Event:
        self._call()
        queue: _Queue = stream.handle
        work = self._enqueue(queue, None)
        queue.ready_s = max(queue.ready_s, self.host_s)
        return Event(_Point(work, queue.ready_s), timed)

    def wait(self, stream: Stream, event: Event) -> None:
        self._call()
        queue: _Queue = stream.handle
        point: _Point = event.handle
        queue.ready_s = max(queue.ready_s, point.time_s)
        queue.waits.append(point.work)

    def launch(self, stream: Stream, kernel: str, grid: tuple[int, ...], block: tuple[int, ...],
               args: Sequence[int | float], shared_bytes: int = 0) -> None:
        self._call()
        if shared_bytes > SHARED_BYTES_MAX:
            raise DeviceError(f"launch {kernel}: {shared_bytes} bytes of shared memory, there are {SHARED_BYTES_MAX}")
        launch = Launch(kernel, grid, block, tuple(args), shared_bytes)
        queue: _Queue = stream.handle
        queue.ready_s = max(queue.ready_s, self.host_s) + self.speeds.launch_s + self.speeds.kernel_s(launch)
        if kernel == "kv_tables":
            self._read_time(queue, tables_bytes(int(args[2]), bool(args[3])))
        if self._kernels is None:
            self._enqueue(queue, None)
            return
        function = self._kernels.get(kernel)
        if function is None:
            raise DeviceError(f"there is no kernel {kernel}")
        run = function  # one that cannot be None, for the type checker
        self._enqueue(queue, lambda: run(self.device_memory, launch))

    def query(self, event: Event) -> bool:
        self._call()
        point: _Point = event.handle
        if point.time_s > self.host_s:
            return False
        self._run(lambda: point.work.done)
        return True

    def elapsed_s(self, start: Event, end: Event) -> float:
        self._call()
        if not (start.timed and end.timed):
            raise DeviceError("the time between events that carry none")
        first, last = start.handle.time_s, end.handle.time_s
        if max(first, last) > self.host_s:
            raise DeviceError("the time of an event that has not happened")
        return float(last - first)

    def synchronize(self, stream: Stream | None = None) -> None:
        self._call()
        queues = self._queues if stream is None else [stream.handle]
        for queue in queues:
            self.host_s = max(self.host_s, queue.ready_s)
            last = queue.last
            if last is not None:
                self._run(lambda last=last: last.done)  # type: ignore[misc]

    def close(self) -> None:
        if self._closed:
            return
        self._call()
        try:
            self.synchronize()
        finally:
            self._arrays.clear()
            self._closed = True

    # --- time ---------------------------------------------------------------------------------------------------------

    def _call(self) -> None:
        if self._closed:
            raise DeviceError("the fake device is closed")
        if threading.get_ident() != self._thread:
            raise DeviceError("a device is used on the thread that opened it, and on no other")
        self.host_s += self.speeds.call_s

    def _copy_time(self, queue: _Queue, engine: str, bytes_s: float) -> None:
        start = max(queue.ready_s, self._engines[engine], self.host_s)
        queue.ready_s = self._engines[engine] = start + self.speeds.copy_s + bytes_s

    def _read_time(self, queue: _Queue, size: int) -> None:
        """A kernel reads host memory. It waits for no copy, but shares the link with one that runs: both are slower."""
        bytes_s = size / self.speeds.in_bytes_per_s
        shared = self._engines["in"] > queue.ready_s
        queue.ready_s += self.speeds.read_s + bytes_s * (2 if shared else 1)
        if shared:
            self._engines["in"] += bytes_s

    # --- values -------------------------------------------------------------------------------------------------------

    def _into(self, address: int, array: Bytes) -> None:
        self.device_memory.view(address, array.nbytes)[:] = array.reshape(-1)

    def _out_of(self, array: Bytes, address: int) -> None:
        array.reshape(-1)[:] = self.device_memory.view(address, array.nbytes)

    def _awaited(self, array: Bytes) -> bool:
        """Does a copy that still waits read this host memory?"""
        start = address_of(array)
        end = start + array.nbytes
        return any(work.reads[0] < end and start < work.reads[1] for queue in self._queues for work in queue.works)

    def _enqueue(self, queue: _Queue, act: Callable[[], None] | None, reads: tuple[int, int] = (0, 0)) -> _Work:
        self._count += 1
        stores = self._kernels is not None
        work = _Work(act if stores else None, self._count, tuple(queue.waits) if stores else (), reads)
        queue.waits.clear()
        queue.last = work
        if self._dice is None or not stores:
            if work.act is not None:
                work.act()
            work.done, work.act, work.after = True, None, ()
        else:
            queue.works.append(work)
        return work

    def _run(self, enough: Callable[[], bool]) -> None:
        while not enough():
            ready = [index for index, queue in enumerate(self._queues)
                     if queue.works and all(work.done for work in queue.works[0].after)]
            if not ready:
                raise DeviceError("no operation can run: the streams wait for one another")
            queue = self._queues[self._choose(ready)]
            work = queue.works.popleft()
            if work.act is not None:
                work.act()
            work.done, work.act, work.after = True, None, ()

    def _choose(self, ready: list[int]) -> int:
        dice = self._dice
        assert dice is not None
        if dice.random() < 0.1:
            return dice.choice(ready)
        if self._habit == "starve":
            others = [index for index in ready if index != self._favourite]
            return dice.choice(others or ready)
        if self._habit == "newest":
            return max(ready, key=lambda index: self._queues[index].works[0].number)
        if self._habit == "run":
            if self._favourite not in ready:
                self._favourite = dice.choice(ready)
            return self._favourite
        return dice.choice(ready)
