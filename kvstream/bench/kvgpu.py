"""A context measured on a GPU: what ``kvsim`` reckons, with a clock.

For each context the device is opened anew, and what is not the pool is allocated first: memory in the place of the
model's weights, inputs, the pinned slab. Then the largest practical pool is looked for, and then the real run is made.

A pool is *practical* when a cache can be opened in it, a micro-batch and a token be run at the full length of the
context, and the margin is still free afterwards; the workspaces are part of the pool. What lies in the context does
not matter for that and is zeros. The largest that memory and margin allow, and that is of use, is tried first, since
mostly nothing is in the way. If it fails, the smallest possible one is doubled until it fails, and the rest is
bisected, in steps of ``pool_step_mib``. A pool that turns out too large in the real run is made smaller, a few times.

No model is there. Between two attentions the device does nothing, and times are those of KV alone, unless it is kept
busy for as long as a model would (``other_ms``): a launch before each layer, of a length that was measured, which holds
the compute stream and reads no memory to speak of. A model that reads its weights also competes for memory; that is not
in the figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from attrs import frozen

from ..cuda.device import Device, Event, PyCudaDevice, Stream
from ..cuda.layout import Layout
from ..cuda.policy import Split
from ..errors import ConfigError, DeviceError, DeviceMemoryError, StepError
from .kvborrow import Borrowed, Busy
from .kvmodel import GIB
from .kvpoint import MANAGED, MEASURED, MIB, TRIED, Setup, layout_in, pool_fewest, pool_needed
from .kvrun import Inputs, Run

if TYPE_CHECKING:
    from ..cuda.device import Bytes

STAND_INS = ("fake device", "KVStream simulated device")
LINK_BYTES, LINK_TIMES = 256 * MIB, 4
DECODE, PREFILL = 0, 1

Say = Callable[[str], None]


def _open_gpu(setup: Setup) -> Device:
    return PyCudaDevice(allow_managed=MANAGED in setup.baselines)


def _clock(device: Device) -> float:
    return time.perf_counter()


def _available() -> int | None:
    """Bytes of memory that this machine can still give. None where it does not say."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


@frozen
class Machine:
    """What measuring needs of the outside: a device, a clock, how much memory there is."""

    open_device: Callable[[Setup], Device] = _open_gpu
    now: Callable[[Device], float] = _clock
    available: Callable[[], int | None] = _available


@frozen
class About:
    """A device, as it was found."""

    name: str
    total_mib: float

    @property
    def source(self) -> str:
        return TRIED if self.name.startswith(STAND_INS) else MEASURED


def about(machine: Machine, setup: Setup) -> About:
    """*Errors*: ConfigError, with what to do, when there is no device."""
    try:
        device = machine.open_device(setup)
    except DeviceError as error:
        raise ConfigError(
            f"without --simulate this measures on a GPU (--simulate rtx-5070-ti needs none): {error.message}"
        ) from error
    try:
        return About(device.name, device.memory()[1] / MIB)
    finally:
        device.close()


class Gpu:
    """The device for one context. ``layout``: any of it; its pool does not matter. A context manager."""

    def __init__(self, machine: Machine, setup: Setup, layout: Layout) -> None:
        self.machine, self.setup = machine, setup
        self._layout = layout
        self._device: Device | None = None
        self._arena: Bytes | None = None
        self._streams: dict[str, Stream] = {}
        self.inputs = Inputs(0, 0, 0)
        self.busy: Busy | None = None
        self.link_gib_s = 0.0

    def __enter__(self) -> Gpu:
        self.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def device(self) -> Device:
        assert self._device is not None, "closed"
        return self._device

    def open(self) -> None:
        """*Errors*: DeviceMemoryError, DeviceError; the device is closed then."""
        available, needed = self.machine.available(), self._layout.host_bytes
        if available is not None and needed > available:
            raise DeviceMemoryError(f"it takes {needed / MIB:,.0f} MiB of pinned host memory, and this machine has "
                                    f"{available / MIB:,.0f} MiB available")
        self._device = self.machine.open_device(self.setup)
        try:
            self._fill(self._device)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        device, self._device, self._arena, self.busy = self._device, None, None, None
        self._streams.clear()
        if device is not None:
            device.close()

    def reopen(self) -> None:
        """After a failure of the device, which only a new context survives."""
        self.close()
        self.open()

    def _fill(self, device: Device) -> None:
        geometry, rows = self._layout.geometry, self._layout.rows_max
        reserve = self.reserve_bytes
        if reserve:
            try:
                device.alloc(reserve)
            except DeviceMemoryError as error:
                free = device.memory()[0] / MIB
                raise DeviceMemoryError(
                    f"{reserve / MIB:,.0f} MiB in the place of {self.setup.model.name} do not fit into the "
                    f"{free:,.0f} MiB that are free on {device.name}; --reserve-mib takes another size") from error
        size = 4 * rows * geometry.head_size * geometry.q_heads
        rows_in, host = device.alloc(size), device.pinned(size)
        host.view(np.float32)[:] = np.random.default_rng(0).standard_normal(size // 4, np.float32)
        compute = self._streams["compute"] = device.stream("compute")
        device.copy_in(compute, rows_in, host)
        self.inputs = Inputs(rows_in, rows_in, rows_in)
        layers = geometry.layers
        self.busy = Busy(device, geometry, compute, (
            self.setup.other_ms / 1e3 / layers, self.setup.other_prefill_ms / 1e3 / layers))
        self._arena = device.pinned(self._layout.host_bytes)
        self.link_gib_s = _link_gib_s(device, self._arena, compute)

    @property
    def reserve_bytes(self) -> int:
        model, reserve = self.setup.model, self.setup.reserve_mib
        return round((model.weights_mib + model.state_mib if reserve is None else reserve) * MIB)

    def free_bytes(self) -> int:
        return self.device.memory()[0]

    def run(self, layout: Layout, split: Callable[[int], Split] | None = None, managed: bool = False) -> Measured:
        assert self._arena is not None
        borrowed = Borrowed(self.device, self._arena, self._streams, managed)
        return Measured(self, cast(Device, borrowed), layout, split)


class Measured(Run):
    """A cache on a device that has a clock."""

    def __init__(self, gpu: Gpu, device: Device, layout: Layout, split: Callable[[int], Split] | None) -> None:
        self._gpu = gpu
        super().__init__(device, layout, gpu.inputs, split)

    def _now(self) -> float:
        return self._gpu.machine.now(self._gpu.device)

    def _mark(self) -> Event:
        return self._device.record(self._cache.compute, timed=True)

    def _between(self, begun: Any, ended: Any) -> float:
        return self._device.elapsed_s(begun, ended) * 1e3

    def _work(self, tokens: int) -> None:
        assert self._gpu.busy is not None
        self._gpu.busy.launch(DECODE if tokens == 1 else PREFILL)


def _link_gib_s(device: Device, arena: Bytes, stream: Stream) -> float:
    """What the link carries from pinned memory, the best of a few copies. 0 where a clock is too coarse to tell."""
    size = min(LINK_BYTES, len(arena), device.memory()[0] // 4)
    if size == 0:  # nor will there be a pool
        return 0.0
    address = device.alloc(size)
    took = []
    for _ in range(LINK_TIMES):
        begun = device.record(stream, timed=True)
        device.copy_in(stream, address, arena[:size])
        ended = device.record(stream, timed=True)
        device.synchronize(stream)
        took.append(device.elapsed_s(begun, ended))
    device.free(address)
    return size / GIB / min(took) if min(took) > 0 else 0.0


# --- the largest pool -------------------------------------------------------------------------------------------------


def largest(works: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest number from ``low`` to ``high`` that works, if all below one that works do too; None: ``low`` does
    not. ``high`` is tried first, then doubled from ``low``, then bisected."""
    if works(high):
        return high
    if low >= high or not works(low):
        return None
    good, bad = low, high
    while 2 * good < bad:
        if not works(2 * good):
            bad = 2 * good
            break
        good *= 2
    while bad - good > 1:
        middle = (good + bad) // 2
        if works(middle):
            good = middle
        else:
            bad = middle
    return good


def find_pool(gpu: Gpu, capacity: int, told: Callable[[int], None]) -> tuple[int, int]:
    """MiB, and how many were tried. *Errors*: DeviceMemoryError when none works."""
    setup = gpu.setup
    unit = setup.pool_step_mib * MIB
    low = -(-pool_fewest(setup, capacity) // unit)
    margin = round(setup.margin_mib * MIB)
    free = gpu.free_bytes() - margin
    high = min(free // unit, max(low, -(-pool_needed(setup, capacity) // unit)))
    tries = 0

    def works(units: int) -> bool:
        nonlocal tries
        tries += 1
        told(units * setup.pool_step_mib)
        return practical(gpu, capacity, units * unit, margin)

    found = largest(works, low, high) if low <= high else None
    if found is None:
        raise DeviceMemoryError(
            f"no pool works: {low * setup.pool_step_mib:,} MiB are the least for this context, and beside "
            f"{gpu.reserve_bytes / MIB:,.0f} MiB in the place of {setup.model.name} and a margin of "
            f"{setup.margin_mib:,.0f} MiB there are {max(0, free) / MIB:,.0f} MiB")
    return found * setup.pool_step_mib, tries


def practical(gpu: Gpu, capacity: int, pool_bytes: int, margin: int) -> bool:
    """A micro-batch and a token at the full length of the context, and a margin that stays free."""
    rows = min(gpu.setup.ubatch_tokens, capacity - 1)
    try:
        with gpu.run(layout_in(gpu.setup, capacity, pool_bytes)) as run:
            run.open_at(capacity - rows - 1)
            run.prefill(rows, 1)
            run.decode(1)
            return gpu.free_bytes() >= margin
    except StepError:
        raise  # of ours, not of the device
    except (DeviceMemoryError, ConfigError):
        return False
    except DeviceError:
        gpu.reopen()
        return False
