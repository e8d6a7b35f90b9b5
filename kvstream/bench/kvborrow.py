"""A device that is lent to one cache after another, and what keeps it busy in the place of a model.

A cache owns its device and closes it. A measurement opens many caches, and a CUDA context with gigabytes of pinned
memory costs seconds each time. So a cache gets a ``Borrowed`` device: closing that gives back what was taken through
it, and the real one goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..cuda.device import address_of
from ..errors import DeviceError, DeviceMemoryError

if TYPE_CHECKING:
    from ..cuda.device import Bytes, Device, Stream
    from ..cuda.layout import Geometry


class Borrowed:
    """A ``Device``. ``arena`` is the pinned memory that it gives out, with whatever the borrower before has left there;
    ``streams`` those that exist already, by name. ``managed``: device memory is CUDA's managed memory, of which there
    may be more than the device has."""

    # As they are: a step makes hundreds of these calls, and its time is what is measured.
    copy_in: Any
    copy_out: Any
    mapped: Any
    record: Any
    wait: Any
    launch: Any
    query: Any
    elapsed_s: Any
    synchronize: Any
    memory: Any

    def __init__(self, device: Device, arena: Bytes, streams: dict[str, Stream], managed: bool = False) -> None:
        for name in ("copy_in", "copy_out", "mapped", "record", "wait", "launch", "query", "elapsed_s", "synchronize",
                     "memory"):
            setattr(self, name, getattr(device, name))
        self._device, self._arena, self._streams, self._managed = device, arena, streams, managed
        self._used = 0
        self._taken: list[int] = []
        self._closed = False

    @property
    def name(self) -> str:
        return self._device.name

    @property
    def computes(self) -> bool:
        return self._device.computes

    def alloc(self, size: int) -> int:
        if self._managed:
            managed: Callable[[int], Bytes] | None = getattr(self._device, "managed", None)
            if managed is None:
                raise DeviceError(f"{self.name} has no managed memory")
            address = address_of(managed(size))
        else:
            address = self._device.alloc(size)
        self._taken.append(address)
        return address

    def free(self, address: int) -> None:
        self._taken.remove(address)
        self._device.free(address)

    def pinned(self, size: int) -> Bytes:
        if self._used + size > len(self._arena):
            raise DeviceMemoryError(f"{size} bytes of pinned memory: {len(self._arena) - self._used} are left")
        start, self._used = self._used, self._used + size
        return self._arena[start : self._used]

    def stream(self, name: str) -> Stream:
        if name not in self._streams:
            self._streams[name] = self._device.stream(name)
        return self._streams[name]

    def close(self) -> None:
        """A device that has failed stays with whoever lent it."""
        if self._closed:
            return
        self._closed = True
        try:
            self._device.synchronize()
            for address in self._taken:
                self._device.free(address)
        except DeviceError:
            return
        finally:
            self._taken.clear()


class Busy:
    """Occupies a stream for given times, without touching memory to speak of: ``kv_fold`` over one and the same page,
    again and again. Its time is proportional to how often, and that is found by trying.

    ``wanted_s``: one launch each. *Errors*: DeviceError when the device's time does not grow with its work.
    """

    MOST = 1 << 16
    ENOUGH_S = 1e-3

    def __init__(self, device: Device, geometry: Geometry, stream: Stream, wanted_s: Sequence[float]) -> None:
        self._device, self._stream = device, stream
        self._kernel, self._grid = f"kv_fold_{geometry.head_size}", (geometry.q_heads, 1, 1)
        self._block = (geometry.head_size, 1, 1)
        acc_bytes, ml_bytes = geometry.q_heads * geometry.head_size * 4, geometry.q_heads * 8
        fixed = 2 * acc_bytes + ml_bytes
        self._address = device.alloc(fixed + 16 * (len(wanted_s) + 1))
        self._host = device.pinned(fixed + 16)
        device.copy_in(stream, self._address, self._host[:fixed])
        self._ml, self._out, self._rows = (
            self._address + acc_bytes, self._address + acc_bytes + ml_bytes, self._address + fixed)
        self._q_heads, self._told = geometry.q_heads, self._host[fixed : fixed + 16].view(np.int32)
        self._spare = len(wanted_s)  # a row to try things with
        self._known = {number for number, wanted in enumerate(wanted_s) if wanted > 0}
        per_s = self._rate() if self._known else 0.0
        for number in self._known:
            self._tell(number, max(1, round(wanted_s[number] * per_s)))

    def launch(self, number: int) -> None:
        if number in self._known:
            self._run(number)

    def _run(self, number: int) -> None:
        self._device.launch(self._stream, self._kernel, self._grid, self._block, (
            self._address, self._ml, self._rows + 16 * number, self._out, self._q_heads))

    def _tell(self, number: int, times: int) -> None:
        self._told[:] = 0, 0, times, 0  # first place, stride, pages, row
        self._device.copy_in(self._stream, self._rows + 16 * number, self._host[-16:])
        self._device.synchronize(self._stream)

    def _took_s(self, times: int) -> float:
        self._tell(self._spare, times)
        self._run(self._spare)  # once for the caches and the clock
        start = self._device.record(self._stream, timed=True)
        self._run(self._spare)
        end = self._device.record(self._stream, timed=True)
        self._device.synchronize(self._stream)
        return self._device.elapsed_s(start, end)

    def _rate(self) -> float:
        """How often in a second."""
        times = 256
        took = self._took_s(times)
        while took < self.ENOUGH_S and times < self.MOST:
            times *= 2
            took = self._took_s(times)
        half = self._took_s(times // 2)
        if took < 1.5 * half:
            raise DeviceError(f"{self._device.name} cannot be kept busy for a given time: twice the work takes "
                              f"{took * 1e3:.3f} ms instead of {half * 1e3:.3f}")
        return times / 2 / (took - half)
