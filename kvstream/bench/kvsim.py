"""A context of a given length on a simulated card, and its figures.

A prefill is a hundred steps that grow little by little, a decode is hundreds that are all alike: of both, some are
simulated (``PREFILL_AT`` places, ``DECODED`` tokens) and stand for the others. What is simulated is all that happens in
those steps, see ``kvcard``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import evolve, frozen

from ..cuda.layout import Layout, plan_layout
from ..cuda.policy import Policy
from ..cuda.types import KVType
from ..errors import ConfigError
from .kvcard import Card, Step
from .kvmodel import ACTIVATIONS_MIB, Model, Profile

MIB = 1 << 20
POOL_STEP_MIB = 32
POOL_SPARE_CELLS = 32
"""Above what a context needs: what the policy gives a ring even where nothing streams."""
PUBLISHED = "published"

PREFILL_AT, WARM_UP = 4, 2
DECODED, DECODED_ALIKE = 40, 16
ENTRY_SETTLE, ENTRY_SEEN = 14, 3

Told = Callable[[int, int], None]
"""Called with (done, of how much) while a context is simulated."""


@frozen
class Setup:
    """What is simulated. ``pool_mib``: a size, None for the largest that is left and of use, or PUBLISHED."""

    profile: Profile
    model: Model
    k_type: KVType = KVType.Q8_0
    v_type: KVType = KVType.Q4_0
    page_tokens: int = 256
    decode_tokens: int = 256
    ubatch_tokens: int = 512
    pool_mib: int | str | None = None
    margin_mib: float = 64.0


@frozen
class Point:
    """A row of the results; DESIGN.md says what each figure is. None: there is none."""

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
    baseline_decode_tps: float
    predicted_decode_tps: float
    page_entry_ms: float
    page_entry_reload_ms: float
    published_decode_tps: float | None
    published_prefill_tps: float | None


def layout_of(setup: Setup, capacity: int) -> Layout:
    """The layout of the largest practical pool for a context. *Errors*: ConfigError when there is none."""
    layout = _layout(setup, capacity, pool_of(setup, capacity) * MIB)
    if setup.pool_mib == PUBLISHED:  # theirs held pages and nothing else
        layout = _layout(setup, capacity, pool_of(setup, capacity) * MIB + layout.workspace_bytes)
    return layout


def pool_of(setup: Setup, capacity: int) -> int:
    """MiB. *Errors*: ConfigError."""
    if isinstance(setup.pool_mib, int):
        return setup.pool_mib
    if setup.pool_mib == PUBLISHED:
        found = setup.profile.published_pool_at(capacity - setup.decode_tokens)
        if found is None:
            raise ConfigError(f"there are no published figures of {setup.profile.name}")
        return found
    free = setup.profile.pool_free_mib(setup.model, setup.margin_mib)
    if free < POOL_STEP_MIB:
        raise ConfigError(f"{setup.model.name} leaves {free:.0f} MiB of a {setup.profile.name} for KV")
    needed = -(-_pool_needed(setup, capacity) // (POOL_STEP_MIB * MIB))
    return int(min(free // POOL_STEP_MIB, needed)) * POOL_STEP_MIB


def _pool_needed(setup: Setup, capacity: int) -> int:
    """Bytes of a pool in which everything is resident."""
    vast = _layout(setup, capacity, 1 << 40)
    cells = vast.geometry.layers * (vast.geometry.pages(capacity) + 1)
    return vast.workspace_bytes + (cells + POOL_SPARE_CELLS) * vast.geometry.page_bytes


def _layout(setup: Setup, capacity: int, pool_bytes: int) -> Layout:
    """One sequence, and a host that holds it and little more."""
    geometry = setup.model.geometry(setup.k_type, setup.v_type, setup.page_tokens)
    context = capacity + setup.page_tokens  # to enter one page more
    layout = plan_layout(geometry, pool_bytes, 1 << 50, rows_max=setup.ubatch_tokens, sequences_max=1,
                         context_max=context)
    return evolve(layout, host_pages=geometry.pages(context) + 1)


def simulate(setup: Setup, prompt_tokens: int, told: Told = lambda done, total: None) -> Point:
    """A prompt, then ``decode_tokens`` one by one. *Errors*: ConfigError when the pool is too small."""
    layout = layout_of(setup, prompt_tokens + setup.decode_tokens)
    parts = PREFILL_AT + 3
    with Card(setup.profile, setup.model, layout) as card:
        prompt_ms = 0.0
        for place in range(PREFILL_AT):
            prompt_ms += prompt_tokens / PREFILL_AT * _prefill_ms(card, setup, prompt_tokens, place)
            told(place + 1, parts)
        steps = decoded(card, setup, prompt_tokens)
        resident, ring, changes = card.split()
        told(parts - 2, parts)
    entries = []
    for reload in (False, True):
        entries.append(page_entry_ms(setup, layout, prompt_tokens, reload))
        told(parts - 1 + reload, parts)
    return _point(setup, layout, prompt_tokens, prompt_ms, steps, (resident, ring, changes), (entries[0], entries[1]))


def _prefill_ms(card: Card, setup: Setup, prompt_tokens: int, place: int) -> float:
    """Of a token of the prompt in one of its parts."""
    ubatch = min(setup.ubatch_tokens, prompt_tokens)
    middle = int(prompt_tokens * (place + 0.5) / PREFILL_AT)
    card.open_at(max(0, min(middle, prompt_tokens - ubatch) - WARM_UP * ubatch))
    room = (prompt_tokens - card.tokens) // ubatch
    return card.prefill(ubatch, min(room, WARM_UP + 1))[-1].ms / ubatch


def decoded(card: Card, setup: Setup, prompt_tokens: int) -> list[Step]:
    """The first tokens after a prompt, whose last micro-batches have brought in what is resident then."""
    last = min(setup.ubatch_tokens, prompt_tokens)
    batches = min(prompt_tokens // last, WARM_UP + 1)
    card.open_at(prompt_tokens - batches * last)
    card.prefill(last, batches)
    return card.decode(min(setup.decode_tokens, DECODED))


def page_entry_ms(setup: Setup, layout: Layout, context: int, reload: bool = False) -> float:
    """The slowest token from the one on with which a decode enters a new page, the first page from ``context`` on.
    ``reload``: with what happens where addresses follow from the split, as in the original: everything that is resident
    is dropped then and comes back."""
    entry = -(-context // setup.page_tokens) * setup.page_tokens
    settle = min(ENTRY_SETTLE, entry)
    with Card(setup.profile, setup.model, layout) as card:
        card.open_at(entry - settle)
        streams = setup.profile.h2d_gib_s > 0 and first_streamed(setup, layout) <= entry
        steps = card.decode(settle + ENTRY_SEEN, forget_at=settle if reload and streams else None)
    return max(step.ms for step in steps[settle:])


def first_streamed(setup: Setup, layout: Layout) -> int:
    """Tokens of context from which on a decode copies pages to the device; beyond any context if never."""
    layers = layout.geometry.layers
    policy = Policy.opened(max(1, layout.cells - layers), layers)
    for pages in range(1, layout.geometry.pages(layout.context_max) + 1):
        if any(policy.step(pages, 1)[1].streamed(pages)):
            return pages * setup.page_tokens
    return 1 << 60


def _point(setup: Setup, layout: Layout, prompt_tokens: int, prompt_ms: float, steps: Sequence[Step],
           split: tuple[int, int, int], entries: tuple[float, float]) -> Point:
    profile, model, geometry = setup.profile, setup.model, layout.geometry
    capacity = prompt_tokens + setup.decode_tokens
    pool_mib = pool_of(setup, capacity)
    before = model.weights_mib + model.state_mib + ACTIVATIONS_MIB
    usual = steps[-DECODED_ALIKE:]

    def mean(figure: str) -> float:
        return float(sum(getattr(step, figure) for step in usual) / len(usual))

    predicted_ms = sum(step.ms for step in steps) + (setup.decode_tokens - len(steps)) * mean("ms")
    compute_ms = profile.decode_ms(model) + profile.attention_ms(model, prompt_tokens + setup.decode_tokens / 2)
    link_ms = profile.copy_ms(round(mean("bytes")))
    copy_ms = link_ms + mean("calls") * profile.call_ms
    exposed_ms = max(0.0, predicted_ms / setup.decode_tokens - compute_ms)
    first = first_streamed(setup, layout)
    published = profile.published_at(prompt_tokens)
    return Point(
        context_capacity=capacity, prompt_tokens=prompt_tokens, decode_tokens=setup.decode_tokens, pool_mib=pool_mib,
        prefill_tps=prompt_tokens / prompt_ms * 1e3, decode_tps=setup.decode_tokens / predicted_ms * 1e3,
        prompt_ms=prompt_ms, predicted_ms=predicted_ms, wall_seconds=(prompt_ms + predicted_ms) / 1e3,
        vram_before_mib=before, vram_after_mib=before + pool_mib,
        vram_free_after_mib=profile.usable_mib - before - pool_mib,
        streaming_active=first <= capacity, stream_first_active_tokens=first if first <= capacity else None,
        stream_trace_samples=len(steps), stream_max_active_pages=geometry.pages(capacity),
        stream_min_resident_pages=split[0], stream_max_ring_slots=split[1], stream_repartitions=split[2],
        h2d_mib_per_token=mean("bytes") / MIB, h2d_calls_per_token=mean("calls"),
        overlap_pct=100 * max(0.0, 1 - exposed_ms / copy_ms) if copy_ms > 0 else 100.0,
        compute_ms=compute_ms, copy_ms=copy_ms, exposed_ms=exposed_ms,
        miss_rate=sum(step.late for step in steps) / max(1, sum(step.batches for step in steps)),
        cross_layer_prefetches=mean("ahead"), baseline_decode_tps=1e3 / compute_ms,
        predicted_decode_tps=1e3 / max(compute_ms, link_ms),
        page_entry_ms=entries[0], page_entry_reload_ms=entries[1],
        published_decode_tps=published.decode_tps if published else None,
        published_prefill_tps=published.prefill_tps if published else None)
