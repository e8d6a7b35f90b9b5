"""One point of a sweep on a GPU: the real run, what streaming is held against, and the figures of both."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from attrs import field, frozen

from ..cuda.layout import Layout
from ..cuda.policy import Split
from ..cuda.records import Stats
from ..errors import DeviceError, DeviceMemoryError, StepError
from .kvgpu import About, Gpu, Machine, Say, find_pool
from .kvpoint import (
    ALL_RESIDENT,
    DECODED_ALIKE,
    ENTRY_SEEN,
    ENTRY_SETTLE,
    HOST_ONLY,
    MANAGED,
    MIB,
    PREFILL_AT,
    Point,
    Setup,
    Told,
    first_streamed,
    layout_in,
    pool_needed,
)
from .kvrun import Run, Step, decoded, host_only, prefill_ms, tps_of

BACK_OFF_STEPS, TRIES_MAX = 2, 8
BASELINE_TOKENS, BASELINE_S = 24, 20.0
"""Tokens of a baseline, and seconds after which no more are begun: memory that thrashes takes its time."""
KV_ALONE = "KV alone: no model between the attentions (--other-ms 0)"


@frozen
class _Seen:
    """What was measured of a point. ``stats``: at the end of the real run. ``vram_mib``: of the device, what was in use
    before the pool, with it, and free then. ``arms``: tokens per second, or why there are none."""

    pool_mib: int
    tries: int
    layout: Layout
    prompt_ms: float
    prefill_steps: int
    steps: Sequence[Step]
    host_ms: float
    page_entry_ms: float | None
    split: tuple[int, int, int]
    stats: Stats
    vram_mib: tuple[float, float, float]
    arms: dict[str, float | str] = field(factory=dict)


def measure(machine: Machine, known: About, setup: Setup, prompt_tokens: int, told: Told, say: Say) -> Point:
    """A prompt, then ``decode_tokens`` one by one. *Errors*: DeviceMemoryError when there is no room for it;
    DeviceError when the device fails. It is closed in any case."""
    capacity = prompt_tokens + setup.decode_tokens
    parts = PREFILL_AT + 2 + len(setup.baselines)
    with Gpu(machine, setup, layout_in(setup, capacity, 1 << 40)) as gpu:
        pool_mib, tries = (setup.pool_mib, 0) if isinstance(setup.pool_mib, int) else find_pool(
            gpu, capacity, lambda mib: told(0, parts))
        told(1, parts)
        seen = _real_run(gpu, prompt_tokens, pool_mib, tries, lambda done, total: told(done + 1, parts), say)
        for number, name in enumerate(setup.baselines):
            seen.arms[name] = _baseline(gpu, seen, prompt_tokens, name)
            told(parts - len(setup.baselines) + number + 1, parts)
        return _point(known, gpu, prompt_tokens, seen)


def _real_run(gpu: Gpu, prompt_tokens: int, pool_mib: int, tries: int, told: Told, say: Say) -> _Seen:
    """With a pool that was looked for, again with a smaller one where memory does not suffice after all."""
    for _ in range(TRIES_MAX):
        try:
            return _run_once(gpu, prompt_tokens, pool_mib, tries, told)
        except DeviceMemoryError as error:
            smaller = pool_mib - BACK_OFF_STEPS * gpu.setup.pool_step_mib
            if gpu.setup.pool_mib is not None or smaller < gpu.setup.pool_step_mib:
                raise
            say(f"{prompt_tokens:>9,} tokens: a pool of {pool_mib:,} MiB is too large after all ({error.message}); "
                f"{smaller:,} MiB are tried")
            pool_mib, tries = smaller, tries + 1
    raise DeviceMemoryError(f"no pool works; the last one tried was larger than {pool_mib:,} MiB")


def _run_once(gpu: Gpu, prompt_tokens: int, pool_mib: int, tries: int, told: Told) -> _Seen:
    setup = gpu.setup
    layout = layout_in(setup, prompt_tokens + setup.decode_tokens, pool_mib * MIB)
    free_before, total = gpu.device.memory()
    with gpu.run(layout) as run:
        free = gpu.free_bytes()
        if setup.full_prefill:
            prompt_ms, prefilled = _whole_prompt_ms(run, setup, prompt_tokens, told)
            steps = run.decode(setup.decode_tokens)
        else:
            prompt_ms, prefilled = prefill_ms(run, setup, prompt_tokens, told, PREFILL_AT)
            steps = decoded(run, setup, prompt_tokens, setup.decode_tokens)
        host_ms = run.enqueue_s * 1e3 / len(steps)
        vram_mib = (total - free_before) / MIB, (total - free) / MIB, free / MIB
        return _Seen(pool_mib, tries, layout, prompt_ms, prefilled, steps, host_ms,
                     _page_entry_ms(run, setup, prompt_tokens, steps), run.split(), run.stats(), vram_mib)


def _whole_prompt_ms(run: Run, setup: Setup, prompt_tokens: int, told: Told) -> tuple[float, int]:
    """In as many parts as there are places elsewhere, so that it shows how far it is."""
    run.open_at(0)
    whole, rest = divmod(prompt_tokens, setup.ubatch_tokens)
    total_ms = 0.0
    for part in range(PREFILL_AT):
        batches = whole * (part + 1) // PREFILL_AT - whole * part // PREFILL_AT
        total_ms += sum(step.ms for step in run.prefill(setup.ubatch_tokens, batches))
        told(part + 1, PREFILL_AT)
    if rest:
        total_ms += run.prefill(rest, 1)[0].ms
    return total_ms, whole + (rest > 0)


def _page_entry_ms(run: Run, setup: Setup, prompt_tokens: int, steps: Sequence[Step]) -> float | None:
    """The slowest of the tokens that begin a page and the few after each, but for the first of the answer, which has
    its own reasons to be slow. Where the next page begins right behind the answer, a few tokens more are run. None:
    no page began."""
    entry = -prompt_tokens % setup.page_tokens or setup.page_tokens
    lacking = entry + ENTRY_SEEN - len(steps)
    if 0 < lacking <= ENTRY_SETTLE:
        steps = [*steps, *run.decode(lacking)]
    return max((step.ms for first in range(entry, len(steps), setup.page_tokens)
                for step in steps[first : first + ENTRY_SEEN]), default=None)


# --- baselines --------------------------------------------------------------------------------------------------------


def _baseline(gpu: Gpu, seen: _Seen, prompt_tokens: int, name: str) -> float | str:
    """Tokens per second, or why there are none."""
    setup = gpu.setup
    capacity = prompt_tokens + setup.decode_tokens
    layout, split, managed = seen.layout, None, name == MANAGED
    if name == HOST_ONLY:
        split = host_only(layout)
    elif pool_needed(setup, capacity) > layout.pool_bytes:
        layout = layout_in(setup, capacity, pool_needed(setup, capacity))
        free = gpu.free_bytes() - round(setup.margin_mib * MIB)
        if name == ALL_RESIDENT and layout.pool_bytes > free:
            return f"{name}: takes {layout.pool_bytes / MIB:,.0f} MiB, {max(0, free) / MIB:,.0f} are free"
    elif name == ALL_RESIDENT:
        return tps_of(seen.steps)
    try:
        return _decode_tps(gpu, layout, split, managed, prompt_tokens)
    except StepError:
        raise  # of ours, not of the device
    except DeviceMemoryError as error:
        return f"{name}: {error.message}"
    except DeviceError as error:
        gpu.reopen()
        return f"{name}: {error.message}"


def _decode_tps(gpu: Gpu, layout: Layout, split: Callable[[int], Split] | None, managed: bool,
                prompt_tokens: int) -> float:
    setup = gpu.setup
    tokens = min(setup.decode_tokens, BASELINE_TOKENS)
    with gpu.run(layout, split, managed) as run:
        return tps_of(decoded(run, setup, prompt_tokens, tokens, BASELINE_S))


# --- figures ----------------------------------------------------------------------------------------------------------


def _point(known: About, gpu: Gpu, prompt_tokens: int, seen: _Seen) -> Point:
    setup, layout, steps = gpu.setup, seen.layout, seen.steps
    capacity = prompt_tokens + setup.decode_tokens
    usual = steps[-DECODED_ALIKE:]

    def mean(figure: str) -> float:
        return statistics.fmean(getattr(step, figure) for step in usual)

    def arm(name: str) -> float | None:
        found = seen.arms.get(name)
        return found if isinstance(found, float) else None

    predicted_ms = sum(step.ms for step in steps)
    token_ms = predicted_ms / len(steps)
    sampled = [step for step in (usual if any(step.sampled for step in usual) else steps) if step.sampled]
    compute_ms = min(token_ms, 1e3 * sum(step.sampled_s - step.waited_s for step in sampled) / sum(
        step.sampled for step in sampled)) if sampled else token_ms  # where the host is late, samples make it later
    copy_ms = mean("bytes") / (gpu.link_gib_s * 1024 * MIB) * 1e3 if gpu.link_gib_s > 0 else 0.0
    exposed_ms = max(0.0, token_ms - compute_ms)
    first = first_streamed(setup, layout)
    notes = [] if setup.other_ms > 0 else [KV_ALONE]
    notes += [why for why in seen.arms.values() if isinstance(why, str)]
    return Point(
        source=known.source, device=known.name,
        context_capacity=capacity, prompt_tokens=prompt_tokens, decode_tokens=setup.decode_tokens,
        pool_mib=seen.pool_mib, prefill_tps=prompt_tokens / seen.prompt_ms * 1e3, decode_tps=1e3 / token_ms,
        prompt_ms=seen.prompt_ms, predicted_ms=predicted_ms, wall_seconds=(seen.prompt_ms + predicted_ms) / 1e3,
        vram_before_mib=seen.vram_mib[0], vram_after_mib=seen.vram_mib[1], vram_free_after_mib=seen.vram_mib[2],
        streaming_active=any(step.bytes for step in usual), stream_first_active_tokens=first
        if first <= capacity else None, stream_trace_samples=round(seen.stats.counters["steps_sampled"]),
        stream_max_active_pages=layout.geometry.pages(capacity), stream_min_resident_pages=seen.split[0],
        stream_max_ring_slots=seen.split[1], stream_repartitions=seen.split[2],
        h2d_mib_per_token=mean("bytes") / MIB, h2d_calls_per_token=mean("calls"),
        overlap_pct=100 * max(0.0, 1 - exposed_ms / copy_ms) if copy_ms > 0 else 100.0,
        compute_ms=compute_ms, copy_ms=copy_ms, exposed_ms=exposed_ms,
        miss_rate=sum(step.late for step in steps) / max(1, sum(step.batches for step in steps)),
        cross_layer_prefetches=mean("ahead"), baseline_decode_tps=arm(ALL_RESIDENT),
        predicted_decode_tps=1e3 / max(compute_ms, copy_ms), page_entry_ms=seen.page_entry_ms,
        page_entry_reload_ms=None, published_decode_tps=None, published_prefill_tps=None, link_gib_s=gpu.link_gib_s,
        other_ms=setup.other_ms, host_ms=seen.host_ms, prefill_steps=seen.prefill_steps,
        all_resident_decode_tps=arm(ALL_RESIDENT), host_only_decode_tps=arm(HOST_ONLY), managed_decode_tps=arm(MANAGED),
        pool_tries=seen.tries, notes="; ".join(notes))
