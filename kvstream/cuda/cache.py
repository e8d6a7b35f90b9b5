"""The KV cache itself: sequences, steps and pages, as plain calls that must all be made on one thread.

Theory of operation. Host memory has the truth. What is on the device is a frozen ``Residency``, and a step is: ask the
policy how much of each layer is to stay, let the planner say which ops that takes, and hand them to the executor as the
caller comes to each layer. ``begin_step`` does everything that can be refused before it changes anything: pages for the
new tokens are taken, the plan is made, and only then is something enqueued. So when memory runs out nothing is lost.
``end_step`` makes the new tokens part of their sequences and the plan's residency the current one.

Between steps sequences are forked, cut, dropped, saved and loaded. Whatever reads or writes host pages by the
processor waits for the device first (``quiet``); these calls are rare, and nothing else makes the host wait. Pages that
are given back are taken out of the residency before they can be given out again.

A step that was begun and cannot be ended is abandoned: its new pages are given back and the whole residency is
forgotten, because the plan's copies have overwritten cells in an order that only the finished plan describes. The host
still has every token of the steps that ended.

When the device fails it is lost, with all sequences: only ``close`` works then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import asdict, evolve, frozen
from numpy.typing import NDArray

from ..errors import DeviceError, DeviceMemoryError, StepError
from .executor import Executor
from .launches import Part, parts_of
from .layout import Geometry, Layout, plan_layout
from .plan import Plan, Residency, plan_step
from .policy import Feedback, Policy, Split
from .sequences import Change, Sequences

if TYPE_CHECKING:
    from .device import Bytes, Device

log = logging.getLogger("kvstream.cuda")

MIB = 1 << 20


@frozen
class Opening:
    """What a cache is given. ``rows_max``: new tokens of one step; ``sequences_max``: sequences of one step;
    ``context_max``: tokens of one sequence. ``arrays``: callers may pass numpy arrays, which takes pinned memory of its
    own (within ``host_bytes``). ``split`` fixes what stays on the device, for tests and measurements."""

    pool_bytes: int
    host_bytes: int
    rows_max: int = 512
    sequences_max: int = 4
    context_max: int = 262144
    scale: float | None = None
    table_slots: int | None = None
    arrays: bool = True
    sample_every: int = 8
    split: Callable[[int], Split] | None = None


@frozen(eq=False)
class Saved:
    """The pages of one sequence, in ordinary memory: ``data[layer]`` is K rows, then V rows of all its tokens."""

    geometry: Geometry
    tokens: int
    data: tuple[Bytes, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.data)


@frozen
class Stats:
    """Counters since opening (see ``executor.Counters``) and what there is now."""

    counters: dict[str, float]
    cells: int
    cells_held: int
    ring: int
    layer_pages: tuple[int, ...]
    repartitions: int
    host_pages: int
    host_pages_free: int
    sequences: int
    pool_bytes: int
    host_bytes: int

    @property
    def overlap(self) -> float | None:
        """Share of the sampled copy time that was hidden behind computation. None: nothing was copied."""
        copied = self.counters["copy_s"]
        return None if copied <= 0 else max(0.0, 1 - self.counters["exposed_s"] / copied)


@frozen(eq=False)
class _Step:
    batch: tuple[tuple[int, int], ...]
    parts: tuple[Part, ...]
    plan: Plan
    split: Split
    rows: int


class _Arrays:
    """Pinned buffers for callers that have numpy arrays, and where they go in the pool."""

    def __init__(self, device: Device, layout: Layout) -> None:
        self.q, self.k, self.v, self.out = (
            device.pinned(layout.workspace(name).size) for name in ("q", "k", "v", "out"))


def array_bytes(geometry: Geometry, rows_max: int) -> int:
    return rows_max * 4 * 2 * (geometry.q_heads * geometry.head_size + geometry.row_values)
