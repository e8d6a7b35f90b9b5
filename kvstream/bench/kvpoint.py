"""What a sweep over contexts is asked for, and what a point of it says: the same of a simulated card and of a real one.

The sizes of pools are here as well, since they follow from what is asked: see ``layout_in`` and ``pool_needed``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from attrs import evolve, frozen

from ..cuda.layout import Layout, cells_min, plan_layout
from ..cuda.policy import Policy
from ..cuda.types import KVType
from .kvmodel import Model, Profile

MIB: Final = 1 << 20
POOL_STEP_MIB: Final = 32
POOL_SPARE_CELLS: Final = 32
"""Above what a context needs: what the policy gives a ring even where nothing streams."""
PUBLISHED: Final = "published"
SIMULATED, MEASURED, TRIED = "simulated", "measured", "no GPU"
"""Where the figures of a point come from. TRIED: from the code that measures, on something that only stands in for a
GPU, as in the tests; such times mean nothing."""

ALL_RESIDENT, HOST_ONLY, MANAGED = "all-resident", "host-only", "managed"
BASELINES: Final = (ALL_RESIDENT, HOST_ONLY, MANAGED)
"""What streaming is held against. A pool in which everything is resident; no page that stays, so that all of the
context comes over the link for every token; and everything resident in CUDA managed memory, of which the driver moves
what does not fit."""

PREFILL_AT, WARM_UP = 4, 2
"""Places of a prompt at which its prefill is timed, and micro-batches before each that are not."""
DECODED_ALIKE = 16
"""Tokens at the end of a decode that the figures per token are means of."""
ENTRY_SETTLE, ENTRY_SEEN = 14, 3

Told = Callable[[int, int], None]
"""Called with (done, of how much) while a context is simulated or measured."""


@frozen
class Setup:
    """What is asked. ``profile``: the card to simulate; None: measure on a GPU. ``pool_mib``: a size, None for the
    largest that is left and of use, or PUBLISHED. For a GPU only: ``pool_step_mib``, how finely the largest is
    looked for; ``reserve_mib``, memory that is taken beforehand in the place of a model's weights, None for as much as
    they and its state take; ``other_ms`` and ``other_prefill_ms``, what the device is kept busy with in the place of
    the rest of the model, per token and per micro-batch; ``full_prefill``, all of the prompt instead of a few places
    of it."""

    profile: Profile | None
    model: Model
    k_type: KVType = KVType.Q8_0
    v_type: KVType = KVType.Q4_0
    page_tokens: int = 256
    decode_tokens: int = 256
    ubatch_tokens: int = 512
    pool_mib: int | str | None = None
    margin_mib: float = 64.0
    baselines: tuple[str, ...] = ()
    pool_step_mib: int = POOL_STEP_MIB
    reserve_mib: float | None = None
    other_ms: float = 0.0
    other_prefill_ms: float = 0.0
    full_prefill: bool = False

    @property
    def card(self) -> Profile:
        """The card of a simulation."""
        assert self.profile is not None, "nothing is simulated here"
        return self.profile


@frozen
class Point:
    """A row of the results; DESIGN.md says what each figure is. None: there is none."""

    source: str
    device: str
    context_capacity: int
    prompt_tokens: int
    decode_tokens: int
    pool_mib: int
    prefill_tps: float
    decode_tps: float
    prompt_ms: float
    predicted_ms: float
    wall_seconds: float
    vram_before_mib: float
    vram_after_mib: float
    vram_free_after_mib: float
    streaming_active: bool
    stream_first_active_tokens: int | None
    stream_trace_samples: int
    stream_max_active_pages: int
    stream_min_resident_pages: int
    stream_max_ring_slots: int
    stream_repartitions: int
    h2d_mib_per_token: float
    h2d_calls_per_token: float
    overlap_pct: float
    compute_ms: float
    copy_ms: float
    exposed_ms: float
    miss_rate: float
    cross_layer_prefetches: float
    baseline_decode_tps: float | None
    predicted_decode_tps: float
    page_entry_ms: float | None
    page_entry_reload_ms: float | None
    published_decode_tps: float | None
    published_prefill_tps: float | None
    link_gib_s: float
    other_ms: float
    host_ms: float | None
    prefill_steps: int
    all_resident_decode_tps: float | None
    host_only_decode_tps: float | None
    managed_decode_tps: float | None
    pool_tries: int
    notes: str

    @property
    def token_ms(self) -> float:
        return self.predicted_ms / self.decode_tokens


# --- pools ------------------------------------------------------------------------------------------------------------


def layout_in(setup: Setup, capacity: int, pool_bytes: int) -> Layout:
    """One sequence, and a host that holds it and little more. *Errors*: ConfigError when the pool is too small."""
    geometry = setup.model.geometry(setup.k_type, setup.v_type, setup.page_tokens)
    context = capacity + setup.page_tokens  # to enter one page more
    layout = plan_layout(geometry, pool_bytes, 1 << 50, rows_max=setup.ubatch_tokens, sequences_max=1,
                         context_max=context)
    return evolve(layout, host_pages=geometry.pages(context) + 1)


def pool_needed(setup: Setup, capacity: int) -> int:
    """Bytes of a pool in which everything is resident."""
    vast = layout_in(setup, capacity, 1 << 40)
    cells = vast.geometry.layers * (vast.geometry.pages(capacity) + 1)
    return vast.workspace_bytes + (cells + POOL_SPARE_CELLS) * vast.geometry.page_bytes


def pool_fewest(setup: Setup, capacity: int) -> int:
    """Bytes of the smallest pool that a context can be streamed through."""
    vast = layout_in(setup, capacity, 1 << 40)
    fewest = cells_min(vast.geometry, setup.ubatch_tokens, 1)
    return evolve(vast, cells=fewest, table_slots=1).pool_bytes


def first_streamed(setup: Setup, layout: Layout) -> int:
    """Tokens of context from which on a decode copies pages to the device; beyond any context if never."""
    layers = layout.geometry.layers
    policy = Policy.opened(max(1, layout.cells - layers), layers)
    for pages in range(1, layout.geometry.pages(layout.context_max) + 1):
        if any(policy.step(pages, 1)[1].streamed(pages)):
            return pages * setup.page_tokens
    return 1 << 60
