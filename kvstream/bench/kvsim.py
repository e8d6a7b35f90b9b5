"""A context of a given length on a simulated card, and its figures.

A prefill is a hundred steps that grow little by little, a decode is hundreds that are all alike: of both, some are
simulated (``PREFILL_AT`` places, ``DECODED`` tokens) and stand for the others. What is simulated is all that happens in
those steps, see ``kvcard``.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from ..cuda.layout import Layout
from ..errors import ConfigError
from .kvcard import Card
from .kvmodel import ACTIVATIONS_MIB
from .kvpoint import (
    ALL_RESIDENT,
    DECODED_ALIKE,
    ENTRY_SEEN,
    ENTRY_SETTLE,
    HOST_ONLY,
    MANAGED,
    MIB,
    POOL_STEP_MIB,
    PREFILL_AT,
    PUBLISHED,
    SIMULATED,
    Point,
    Setup,
    Told,
    first_streamed,
    layout_in,
    pool_needed,
)
from .kvrun import Step, decoded, host_only, prefill_ms, tps_of

DECODED, DECODED_BASELINE = 40, 12

NO_MANAGED = "managed: not simulated, what a page fault costs is not among a card's constants"


def layout_of(setup: Setup, capacity: int) -> Layout:
    """The layout of the largest practical pool for a context. *Errors*: ConfigError when there is none."""
    layout = layout_in(setup, capacity, pool_of(setup, capacity) * MIB)
    if setup.pool_mib == PUBLISHED:  # theirs held pages and nothing else
        layout = layout_in(setup, capacity, pool_of(setup, capacity) * MIB + layout.workspace_bytes)
    return layout


def pool_of(setup: Setup, capacity: int) -> int:
    """MiB. *Errors*: ConfigError."""
    if isinstance(setup.pool_mib, int):
        return setup.pool_mib
    if setup.pool_mib == PUBLISHED:
        found = setup.card.published_pool_at(capacity - setup.decode_tokens)
        if found is None:
            raise ConfigError(f"there are no published figures of {setup.card.name}")
        return found
    free = setup.card.pool_free_mib(setup.model, setup.margin_mib)
    if free < POOL_STEP_MIB:
        raise ConfigError(f"{setup.model.name} leaves {free:.0f} MiB of a {setup.card.name} for KV")
    needed = -(-pool_needed(setup, capacity) // (POOL_STEP_MIB * MIB))
    return int(min(free // POOL_STEP_MIB, needed)) * POOL_STEP_MIB


def simulate(setup: Setup, prompt_tokens: int, told: Told = lambda done, total: None) -> Point:
    """A prompt, then ``decode_tokens`` one by one. *Errors*: ConfigError when the pool is too small."""
    layout = layout_of(setup, prompt_tokens + setup.decode_tokens)
    parts = PREFILL_AT + 3 + len(setup.baselines)
    with Card(setup.card, setup.model, layout) as card:
        prompt_ms, _ = prefill_ms(card, setup, prompt_tokens, told, parts)
        steps = decoded(card, setup, prompt_tokens, min(setup.decode_tokens, DECODED))
        split = card.split()
        told(PREFILL_AT + 1, parts)
    entries = []
    for reload in (False, True):
        entries.append(page_entry_ms(setup, layout, prompt_tokens, reload))
        told(PREFILL_AT + 2 + reload, parts)
    arms = []
    for number, name in enumerate(setup.baselines):
        arms.append(_baseline(setup, layout, prompt_tokens, name))
        told(PREFILL_AT + 4 + number, parts)
    seen = _Seen(prompt_ms, steps, split, (entries[0], entries[1]), dict(zip(setup.baselines, arms, strict=True)))
    return _point(setup, layout, prompt_tokens, seen)


def page_entry_ms(setup: Setup, layout: Layout, context: int, reload: bool = False) -> float:
    """The slowest token from the one on with which a decode enters a new page, the first page from ``context`` on.
    ``reload``: with what happens where addresses follow from the split, as in the original: everything that is resident
    is dropped then and comes back."""
    entry = -(-context // setup.page_tokens) * setup.page_tokens
    settle = min(ENTRY_SETTLE, entry)
    with Card(setup.card, setup.model, layout) as card:
        card.open_at(entry - settle)
        streams = setup.card.h2d_gib_s > 0 and first_streamed(setup, layout) <= entry
        steps = card.decode(settle + ENTRY_SEEN, forget_at=settle if reload and streams else None)
    return max(step.ms for step in steps[settle:])


def _baseline(setup: Setup, layout: Layout, prompt_tokens: int, name: str) -> float | str:
    """Tokens per second, or why there are none."""
    if name == MANAGED:
        return NO_MANAGED
    split = None
    if name == ALL_RESIDENT:
        capacity = prompt_tokens + setup.decode_tokens
        needed, free = pool_needed(setup, capacity) / MIB, setup.card.pool_free_mib(setup.model, setup.margin_mib)
        if needed > free:
            return f"all-resident: takes {needed:,.0f} MiB, {free:,.0f} are free"
        layout = layout_in(setup, capacity, round(needed * MIB))
    elif name == HOST_ONLY:
        split = host_only(layout)
    with Card(setup.card, setup.model, layout, split) as card:
        return tps_of(decoded(card, setup, prompt_tokens, min(setup.decode_tokens, DECODED_BASELINE)))


@frozen
class _Seen:
    """What was simulated of a point."""

    prompt_ms: float
    steps: Sequence[Step]
    split: tuple[int, int, int]
    entries: tuple[float, float]
    arms: dict[str, float | str]


def _point(setup: Setup, layout: Layout, prompt_tokens: int, seen: _Seen) -> Point:
    card, model, geometry, steps = setup.card, setup.model, layout.geometry, seen.steps
    capacity = prompt_tokens + setup.decode_tokens
    pool_mib = pool_of(setup, capacity)
    before = model.weights_mib + model.state_mib + ACTIVATIONS_MIB
    usual = steps[-DECODED_ALIKE:]

    def mean(figure: str) -> float:
        return float(sum(getattr(step, figure) for step in usual) / len(usual))

    def arm(name: str) -> float | None:
        found = seen.arms.get(name)
        return found if isinstance(found, float) else None

    predicted_ms = sum(step.ms for step in steps) + (setup.decode_tokens - len(steps)) * mean("ms")
    compute_ms = card.decode_ms(model) + card.attention_ms(model, prompt_tokens + setup.decode_tokens / 2)
    link_ms = card.copy_ms(round(mean("bytes")))
    copy_ms = link_ms + mean("calls") * card.call_ms
    exposed_ms = max(0.0, predicted_ms / setup.decode_tokens - compute_ms)
    first = first_streamed(setup, layout)
    published = card.published_at(prompt_tokens)
    return Point(
        source=SIMULATED, device=card.name,
        context_capacity=capacity, prompt_tokens=prompt_tokens, decode_tokens=setup.decode_tokens, pool_mib=pool_mib,
        prefill_tps=prompt_tokens / seen.prompt_ms * 1e3, decode_tps=setup.decode_tokens / predicted_ms * 1e3,
        prompt_ms=seen.prompt_ms, predicted_ms=predicted_ms, wall_seconds=(seen.prompt_ms + predicted_ms) / 1e3,
        vram_before_mib=before, vram_after_mib=before + pool_mib,
        vram_free_after_mib=card.usable_mib - before - pool_mib,
        streaming_active=first <= capacity, stream_first_active_tokens=first if first <= capacity else None,
        stream_trace_samples=len(steps), stream_max_active_pages=geometry.pages(capacity),
        stream_min_resident_pages=seen.split[0], stream_max_ring_slots=seen.split[1],
        stream_repartitions=seen.split[2],
        h2d_mib_per_token=mean("bytes") / MIB, h2d_calls_per_token=mean("calls"),
        overlap_pct=100 * max(0.0, 1 - exposed_ms / copy_ms) if copy_ms > 0 else 100.0,
        compute_ms=compute_ms, copy_ms=copy_ms, exposed_ms=exposed_ms,
        miss_rate=sum(step.late for step in steps) / max(1, sum(step.batches for step in steps)),
        cross_layer_prefetches=mean("ahead"), baseline_decode_tps=1e3 / compute_ms,
        predicted_decode_tps=1e3 / max(compute_ms, link_ms),
        page_entry_ms=seen.entries[0], page_entry_reload_ms=seen.entries[1],
        published_decode_tps=published.decode_tps if published else None,
        published_prefill_tps=published.prefill_tps if published else None,
        link_gib_s=card.h2d_gib_s, other_ms=card.decode_ms(model), host_ms=None, prefill_steps=PREFILL_AT,
        all_resident_decode_tps=arm(ALL_RESIDENT), host_only_decode_tps=arm(HOST_ONLY), managed_decode_tps=arm(MANAGED),
        pool_tries=0, notes="; ".join(why for why in seen.arms.values() if isinstance(why, str)))
