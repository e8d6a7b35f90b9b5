"""What the streamer needs from a GPU, as a protocol of a dozen methods, and the only module that talks to PyCUDA.

Theory of operation. A device is opened, used and closed on **one thread**: a CUDA context belongs to a thread, and
PyCUDA frees an object only where its context is current. Every method checks the thread, so a mistake is an error with
a name instead of a leak with a warning. Nothing is ever put on the default stream, which would order all others.

Device memory is plain integers: an address is a number that may be added to. Host memory is numpy: ``pinned`` gives a
page-locked array of bytes, and only slices of such arrays may be copied, since the driver would quietly copy others
synchronously. Copies and launches are enqueued and return at once; what orders two streams is ``record`` and ``wait``.
Events carry no time unless they are asked to (``timed``), because fences are many and samples are few.

The copies keep no reference to the host array (the driver only knows its address). All pinned arrays therefore belong
to the device and live until ``close``.

``PyCudaDevice`` loads a kernel image (a fatbin that ``just kernels`` builds and the wheel carries, or the image of the
simulated driver in the tests) and looks up every kernel at once: a kernel that is loaded lazily, at its first launch,
may synchronise the whole device.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from attrs import define

from ..errors import DeviceError, DeviceMemoryError
from ..parts import problem_of
from .kernels import kernel_formats
from .memlock import limit_bytes, too_low

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes: TypeAlias = NDArray[np.uint8]

log = logging.getLogger("kvstream.cuda")

STREAM_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING: no order with the default stream of other libraries
SHARED_BYTES_FREE: Final = 48 * 1024  # dynamic shared memory that needs no opt-in
SHARED_BYTES_MAX: Final = 64 * 1024  # of a block, on the smallest of the GPUs that the kernels are built for
IMAGE: Final = "kv.fatbin"


@define(eq=False)
class Stream:
    """A queue of the device. ``handle`` is the implementation's own."""

    name: str
    handle: Any


@define(eq=False)
class Event:
    """A point in a stream. ``handle`` is the implementation's own."""

    handle: Any
    timed: bool = False


class Device(Protocol):
    """One GPU, or something that behaves like one. Sizes in bytes, times in seconds, addresses are integers.

    *Errors*: ``DeviceMemoryError`` from ``alloc`` and ``pinned``, ``DeviceError`` from everything. An error of a kernel
    shows up in any later call and stays: such a device can only be closed.
    *Resource handling*: ``close`` waits for the device, then frees everything; it may be called twice.
    """

    @property
    def name(self) -> str:
        """Model and architecture, for people."""
        ...

    @property
    def computes(self) -> bool:
        """False: time passes here, and nothing is stored or computed."""
        ...

    def alloc(self, size: int) -> int:
        """The address of ``size`` bytes of device memory; at least 256-byte aligned. Contents are undefined."""
        ...

    def free(self, address: int) -> None: ...

    def pinned(self, size: int) -> Bytes:
        """A zeroed, page-locked array of bytes. It lives until ``close``."""
        ...

    def mapped(self, array: Bytes) -> int:
        """The address at which kernels find a part of a pinned array. What they read is what is there when they run."""
        ...

    def stream(self, name: str) -> Stream: ...

    def copy_in(self, stream: Stream, address: int, array: Bytes) -> None:
        """Enqueue a copy of a pinned array to the device. The array is read when the copy runs."""
        ...

    def copy_out(self, stream: Stream, array: Bytes, address: int) -> None:
        """Enqueue a copy from the device to a pinned array. The array is written when the copy runs."""
        ...

    def record(self, stream: Stream, timed: bool = False) -> Event: ...

    def wait(self, stream: Stream, event: Event) -> None:
        """What is enqueued on ``stream`` from now on runs after ``event``. The host does not wait."""
        ...

    def launch(self, stream: Stream, kernel: str, grid: tuple[int, ...], block: tuple[int, ...],
               args: Sequence[int | float], shared_bytes: int = 0) -> None: ...

    def query(self, event: Event) -> bool:
        """Has the event happened? Never waits."""
        ...

    def elapsed_s(self, start: Event, end: Event) -> float:
        """Seconds between two timed events that have both happened; negative when ``end`` came first."""
        ...

    def synchronize(self, stream: Stream | None = None) -> None:
        """Wait for a stream, or for all of the device."""
        ...

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the device."""
        ...

    def close(self) -> None: ...


def packaged_image() -> bytes:
    """The kernels that the wheel carries. *Errors*: ``DeviceError`` when it carries none."""
    source = resources.files("kvstream.cuda") / "kernels" / IMAGE
    try:
        return source.read_bytes()
    except OSError as error:
        raise DeviceError(f"no CUDA kernels are installed ({source}): `just kernels` builds them") from error


class PinnedRanges:
    """Which host addresses are page-locked, and what the device calls them. A few ranges, looked up for every copy."""

    __slots__ = ("_ends", "_mapped", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._mapped: list[int] = []

    def add(self, array: Bytes, mapped: int) -> None:
        start = address_of(array)
        at = bisect_right(self._starts, start)
        self._starts.insert(at, start)
        self._ends.insert(at, start + array.nbytes)
        self._mapped.insert(at, mapped)

    def check(self, array: Bytes) -> int:
        """The address that kernels know the array by. *Errors*: ``DeviceError`` for an array that is not a contiguous
        part of pinned memory."""
        start = address_of(array)
        at = bisect_right(self._starts, start) - 1
        if at < 0 or start + array.nbytes > self._ends[at] or not array.flags.c_contiguous:
            raise DeviceError(f"{array.nbytes} bytes of host memory that is not pinned, or not contiguous")
        return self._mapped[at] + start - self._starts[at]


def address_of(array: Bytes) -> int:
    address: int = array.__array_interface__["data"][0]  # `ctypes.data` makes two objects on the way
    return address


@contextmanager
def _translated(driver: Any, doing: str) -> Iterator[None]:
    """The border where PyCUDA's exceptions become ours."""
    try:
        yield
    except (driver.MemoryError, MemoryError) as error:
        raise DeviceMemoryError(f"{doing}: {error}") from error
    except driver.Error as error:
        raise DeviceError(f"{doing}: {error}") from error


class PyCudaDevice:
    """A CUDA device through PyCUDA. Make it, use it and close it on one thread.

    ``image`` is a module the driver can load, the packaged one unless given; ``formats`` the kernels in it, with the
    letters of their arguments. ``allow_managed`` permits ``managed``, which nothing else uses: KV
    is never managed memory, because the driver would move it when it likes, except where just that is measured.
    *Errors*: ``DeviceError`` when PyCUDA, a GPU, the image or a kernel in it is missing.
    """

    def __init__(self, image: bytes | None = None, *, formats: Mapping[str, str] | None = None, ordinal: int = 0,
                 allow_managed: bool = False) -> None:
        self._thread = threading.get_ident()
        self._managed_allowed = allow_managed
        self._allocations: dict[int, Any] = {}
        self._arrays: list[Any] = []
        self._warned = False
        self._streams: list[Stream] = []
        self._pinned = PinnedRanges()
        self._functions: dict[str, Any] = {}
        self._shared_bytes: dict[str, int] = {}
        self._closed = False
        try:
            import pycuda.driver as driver
        except ImportError as error:
            raise DeviceError(problem_of(error, "pycuda.driver")) from error
        self._driver = driver
        with _translated(driver, f"open CUDA device {ordinal}"):
            driver.init()
            gpu = driver.Device(ordinal)
            self._name = f"{gpu.name()} (sm_{''.join(map(str, gpu.compute_capability()))})"
            # It becomes this thread's current one. MAP_HOST: kernels may read pinned memory, where a driver still asks.
            self._context = gpu.make_context(driver.ctx_flags.SCHED_AUTO | driver.ctx_flags.MAP_HOST)
        try:
            knows = f"{driver.get_driver_version() // 1000}.{driver.get_driver_version() % 1000 // 10}"
            with _translated(driver, f"load the CUDA kernels into {self._name}, whose driver knows CUDA {knows}"):
                self._module = driver.module_from_buffer(packaged_image() if image is None else image)
                for kernel, letters in (kernel_formats() if formats is None else formats).items():
                    function = self._module.get_function(kernel)
                    # Drivers may put off loading a function; asked for its size they have to.
                    function.get_attribute(driver.function_attribute.NUM_REGS)
                    self._functions[kernel] = function.prepare([letters])
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        return self._name

    @property
    def computes(self) -> bool:
        return True

    def _here(self) -> None:
        if self._closed:
            raise DeviceError("the CUDA device is closed")
        if threading.get_ident() != self._thread:
            raise DeviceError("a CUDA device is used on the thread that opened it, and on no other")

    def alloc(self, size: int) -> int:
        self._here()
        with _translated(self._driver, f"allocate {size} bytes of device memory"):
            allocation = self._driver.mem_alloc(size)
        address = int(allocation)
        self._allocations[address] = allocation
        return address

    def free(self, address: int) -> None:
        self._here()
        allocation = self._allocations.pop(address, None)
        if allocation is None:
            raise DeviceError(f"free of {address:#x}, which was not allocated here")
        with _translated(self._driver, "free device memory"):
            allocation.free()

    def pinned(self, size: int) -> Bytes:
        self._here()
        warning = too_low(size + sum(len(array) for array in self._arrays), limit_bytes())
        if warning and not self._warned:
            self._warned = True
            log.warning("%s", warning)
        with _translated(self._driver, f"allocate {size} bytes of pinned host memory"):
            array: Bytes = self._driver.pagelocked_empty((size,), "u1",
                                                         mem_flags=self._driver.host_alloc_flags.DEVICEMAP)
            base: Any = array.base
            mapped = int(base.get_device_pointer())
        array[:] = 0
        self._arrays.append(array)
        self._pinned.add(array, mapped)
        return array

    def mapped(self, array: Bytes) -> int:
        self._here()
        return self._pinned.check(array)

    def managed(self, size: int) -> Bytes:
        """Managed memory: what CUDA moves between host and device by itself, of which there may be more than the device
        has. Only when it was asked for. On the device its address is the array's own, and ``free`` takes that back; the
        host must not touch it while anything runs."""
        self._here()
        if not self._managed_allowed:
            raise DeviceError("managed memory was not asked for when the device was opened")
        driver = self._driver
        with _translated(driver, f"allocate {size} bytes of managed memory"):
            array: Bytes = driver.managed_empty((size,), "u1", mem_flags=driver.mem_attach_flags.GLOBAL)
        self._allocations[address_of(array)] = array.base
        return array

    def stream(self, name: str) -> Stream:
        self._here()
        with _translated(self._driver, f"create the {name} stream"):
            stream = Stream(name, self._driver.Stream(STREAM_NON_BLOCKING))
        self._streams.append(stream)
        return stream

    def copy_in(self, stream: Stream, address: int, array: Bytes) -> None:
        self._here()
        self._pinned.check(array)
        with _translated(self._driver, f"copy {array.nbytes} bytes to the device"):
            self._driver.memcpy_htod_async(address, array, stream.handle)

    def copy_out(self, stream: Stream, array: Bytes, address: int) -> None:
        self._here()
        self._pinned.check(array)
        with _translated(self._driver, f"copy {array.nbytes} bytes to the host"):
            self._driver.memcpy_dtoh_async(array, address, stream.handle)

    def record(self, stream: Stream, timed: bool = False) -> Event:
        self._here()
        driver = self._driver
        with _translated(driver, "record an event"):
            handle = driver.Event() if timed else driver.Event(driver.event_flags.DISABLE_TIMING)
            handle.record(stream.handle)
        return Event(handle, timed)

    def wait(self, stream: Stream, event: Event) -> None:
        self._here()
        with _translated(self._driver, "wait for an event"):
            stream.handle.wait_for_event(event.handle)

    def launch(self, stream: Stream, kernel: str, grid: tuple[int, ...], block: tuple[int, ...],
               args: Sequence[int | float], shared_bytes: int = 0) -> None:
        self._here()
        function = self._functions.get(kernel)
        if function is None:
            raise DeviceError(f"there is no kernel {kernel}")
        with _translated(self._driver, f"launch {kernel}"):
            if shared_bytes > self._shared_bytes.get(kernel, SHARED_BYTES_FREE):
                limit = self._driver.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
                function.set_attribute(limit, shared_bytes)
                self._shared_bytes[kernel] = shared_bytes
            function.prepared_async_call(grid, block, stream.handle, *args, shared_size=shared_bytes)

    def query(self, event: Event) -> bool:
        self._here()
        with _translated(self._driver, "query an event"):
            return bool(event.handle.query())

    def elapsed_s(self, start: Event, end: Event) -> float:
        self._here()
        if not (start.timed and end.timed):
            raise DeviceError("the time between events that carry none")
        with _translated(self._driver, "read the time between two events"):
            return float(end.handle.time_since(start.handle)) * 1e-3  # PyCUDA gives milliseconds

    def synchronize(self, stream: Stream | None = None) -> None:
        self._here()
        wait: Callable[[], None] = self._context.synchronize if stream is None else stream.handle.synchronize
        with _translated(self._driver, "wait for the device"):
            wait()

    def memory(self) -> tuple[int, int]:
        self._here()
        with _translated(self._driver, "ask for free device memory"):
            free, total = self._driver.mem_get_info()
        return int(free), int(total)

    def close(self) -> None:
        """A context that is still current when the process ends aborts it, so it goes whatever else fails."""
        if self._closed:
            return
        self._here()
        self._closed = True
        driver = self._driver
        try:
            self._context.synchronize()
            for allocation in self._allocations.values():
                allocation.free()
            for array in self._arrays:  # the context takes this memory with it in any case: who still reads it errs
                array.base.free()
        except driver.Error:  # the device failed before, which its caller was told; all memory goes with the context
            pass
        finally:
            self._allocations.clear()
            self._arrays.clear()
            self._functions.clear()
            for stream in self._streams:  # PyCUDA destroys an object where its context is current: here, and only now
                stream.handle = None
            self._module = None
            self._context.pop()
            self._context.detach()
