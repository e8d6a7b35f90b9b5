"""What a KV cache is given when it is opened, what it tells, and what leaves it: values without behaviour."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from attrs import frozen

from .layout import Geometry
from .policy import Split

if TYPE_CHECKING:
    from .device import Bytes


@frozen
class Opening:
    """What a cache is given. ``rows_max``: new tokens of one step; ``sequences_max``: sequences of one step;
    ``context_max``: tokens of one sequence. ``arrays``: callers may pass numpy arrays, which takes pinned memory of its
    own (within ``host_bytes``). ``wide``: how a sequence with more than 32 new tokens in a step attends: on tensor
    cores, which is faster and rounds more, or exactly as token by token (kernels/README.md). ``split`` fixes what stays
    on the device, for tests and measurements."""

    pool_bytes: int
    host_bytes: int
    rows_max: int = 512
    sequences_max: int = 4
    context_max: int = 262144
    scale: float | None = None
    table_slots: int | None = None
    arrays: bool = True
    sample_every: int = 8
    wide: Literal["tensor", "exact"] = "tensor"
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
