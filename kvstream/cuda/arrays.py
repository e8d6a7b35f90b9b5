"""Callers that have numpy arrays instead of device memory: pinned buffers, and the way in and out of the pool.

For tests, tools and models that compute elsewhere. It makes the host wait for every layer's result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import StepError
from .layout import Geometry, Layout

if TYPE_CHECKING:
    from .device import Bytes, Device, Event, Stream

NAMES = ("q", "k", "v", "out")


def array_bytes(geometry: Geometry, rows_max: int) -> int:
    """Pinned memory that the buffers take."""
    return rows_max * 4 * 2 * (geometry.q_heads * geometry.head_size + geometry.row_values)


class Arrays:
    """``pool``: address of the pool. Without ``buffers`` only addresses are taken."""

    def __init__(self, device: Device, layout: Layout, stream: Stream, pool: int, buffers: bool) -> None:
        self._device, self._layout, self._stream, self._pool = device, layout, stream, pool
        self._buffers: dict[str, Bytes] = {
            name: device.pinned(layout.workspace(name).size) for name in NAMES} if buffers else {}
        self._sent: Event | None = None

    def address(self, name: str) -> int:
        """Of a workspace."""
        return self._pool + self._layout.workspace(name).offset

    def rows_in(self, k: Any, v: Any, rows: int) -> tuple[int, int]:
        """Addresses of a layer's new rows."""
        geometry = self._layout.geometry
        shape = rows, geometry.kv_heads, geometry.head_size
        given = self._checked("k", k, shape), self._checked("v", v, shape)
        if self._sent is not None and not self._device.query(self._sent):
            self._device.synchronize(self._stream)  # the rows of the layer before have not been read yet
        self._sent = None
        found = self._in("k", given[0]), self._in("v", given[1])
        if not (isinstance(k, int) and isinstance(v, int)):
            self._sent = self._device.record(self._stream)
        return found

    def queries_in(self, q: Any, rows: int) -> int:
        """No wait: whoever passes an array here has waited for the result of the one before."""
        geometry = self._layout.geometry
        return self._in("q", self._checked("q", q, (rows, geometry.q_heads, geometry.head_size)))

    def result(self, address: int, values: int) -> NDArray[np.float32]:
        buffer = self._buffer("out")[: 4 * values]
        self._device.copy_out(self._stream, buffer, address)
        self._device.synchronize(self._stream)
        return buffer.view(np.float32).copy()

    def forget(self) -> None:
        self._buffers.clear()
        self._sent = None

    def _checked(self, name: str, given: Any, shape: tuple[int, int, int]) -> int | NDArray[np.float32]:
        """``shape``: rows, heads, head size; the heads of a row, or everything, may also come as one. Of what is on the
        device already only the address can be looked at. *Errors*: ``StepError``, before anything is done."""
        if isinstance(given, int):
            if given <= 0:
                raise StepError(f"{name} is at {given}, which is no address")
            return given
        try:
            array = np.asarray(given)
        except ValueError as error:
            raise StepError(f"{name} is no array: {error}") from error
        if array.dtype.kind not in "fiu":
            raise StepError(f"{name} is of {array.dtype}: rows are f32 numbers, or the address of such")
        rows, heads, size = shape
        if array.size != rows * heads * size:
            raise StepError(f"{name} has {array.size} values, the step has {rows * heads * size}: {rows} rows of "
                            f"{heads} heads of {size}")
        if array.shape not in (shape, (rows, heads * size), (rows * heads * size,)):
            raise StepError(f"{name} has the shape {array.shape}, the step has {rows} rows of {heads} heads of {size}")
        with np.errstate(over="ignore"):
            array = np.ascontiguousarray(array, np.float32).reshape(-1)
        wrong = array.size - int(np.isfinite(array).sum())
        if wrong:
            raise StepError(f"{wrong} values of {name} are not finite f32 numbers")
        self._buffer(name)
        return array

    def _in(self, name: str, given: int | NDArray[np.float32]) -> int:
        if isinstance(given, int):
            return given
        buffer = self._buffer(name)[: given.nbytes]
        buffer[:] = given.view(np.uint8)
        self._device.copy_in(self._stream, self.address(name), buffer)
        return self.address(name)

    def _buffer(self, name: str) -> Bytes:
        buffer = self._buffers.get(name)
        if buffer is None:
            raise StepError("this cache was opened for addresses, not for arrays")
        return buffer
