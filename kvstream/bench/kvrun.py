"""One sequence in a cache, and its steps one after the other, on whatever device there is.

What a step's time is read from, and what the device does between two attentions in the place of a model, is said by
those who derive from ``Run``: ``kvcard`` in virtual time, ``kvgpu`` on a real device. What is done is the same code.

The host begins a step before it waits for the one before, as an engine can: which token comes next decides nothing
about KV.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from attrs import frozen

from ..cuda.cache import KVCache
from ..cuda.device import Device
from ..cuda.layout import Layout
from ..cuda.policy import Split
from ..cuda.records import Opening, Stats
from .kvpoint import PREFILL_AT, WARM_UP, Setup, Told

SAMPLE_EVERY = 4
COUNTED = ("in_bytes", "in_calls", "samples", "misses", "cross_layer_prefetches", "steps_sampled", "step_s",
           "exposed_s")


@frozen
class Step:
    """What one step was like. ``late`` of ``batches``: of those that were looked at, which is not every step's.
    ``ahead``: batches that were sent before their layer began. ``compute_ms``: what it computed, if that was known
    beforehand. ``sampled``: earlier steps whose times were read in this one, ``sampled_s`` all they took and
    ``waited_s`` the part of it in which a page was waited for."""

    ms: float
    compute_ms: float
    bytes: int
    calls: int
    batches: int
    late: int
    ahead: int
    sampled: int
    sampled_s: float
    waited_s: float


@frozen
class Inputs:
    """Addresses of what the rows of one layer are; ``out`` 0: the result stays in the pool."""

    q: int
    k: int
    v: int
    out: int = 0


class Run:
    """A cache with at most one sequence. ``open_at`` makes it one of so many tokens, none of them on the device. It
    closes its device. ``split``: as in ``Opening``."""

    def __init__(self, device: Device, layout: Layout, inputs: Inputs,
                 split: Callable[[int], Split] | None = None) -> None:
        self.layout = layout
        geometry = layout.geometry
        self._layers, self._page_tokens = geometry.layers, geometry.page_tokens
        self._inputs = inputs
        try:
            self._cache = KVCache(device, geometry, Opening(
                layout.pool_bytes, layout.host_bytes, rows_max=layout.rows_max, sequences_max=1,
                context_max=layout.context_max, table_slots=layout.table_slots, arrays=False,
                sample_every=SAMPLE_EVERY, split=split))
        except BaseException:
            device.close()
            raise
        self._device = device
        self._sequence: int | None = None
        self.tokens = 0
        self.enqueue_s = 0.0
        """Of all steps: what the host took, by the clock of decode."""

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self._cache.close()

    def stats(self) -> Stats:
        return self._cache.stats()

    def split(self) -> tuple[int, int, int]:
        """Residents per layer, cells of the ring, changes of the split so far."""
        stats = self._cache.stats()
        return sum(stats.layer_pages) // self._layers, stats.ring, stats.repartitions

    def open_at(self, tokens: int) -> None:
        if self._sequence is not None:
            self._cache.drop(self._sequence)
        self._sequence, self.tokens = self._cache.create(tokens), tokens

    def prefill(self, tokens: int, steps: int) -> list[Step]:
        """Micro-batches one after the other, without waiting in between."""
        seen: list[tuple[Any, float, tuple[Any, ...]]] = [(self._mark(), 0.0, self._counted())]
        for _ in range(steps):
            self._begin(tokens)
            compute_ms = self._run(tokens)
            seen.append((self._mark(), compute_ms, self._counted()))
        self._device.synchronize()
        return [self._step(self._between(begun, ended), compute_ms, before, after)
                for (begun, _, before), (ended, compute_ms, after) in pairwise(seen)]

    def decode(self, tokens: int, forget_at: int | None = None, for_s: float = math.inf) -> list[Step]:
        """Token by token; each waits for the one before. ``forget_at``: before that one (from 0) everything that is on
        the device is dropped. ``for_s``: no token begins later than that."""
        done = []
        self._device.synchronize()
        last, before = self._now(), self._counted()
        until = last + for_s
        self._begin(1)
        for number in range(tokens):
            if number == forget_at:
                self._cache.abandon_step()
                self._begin(1)
            compute_ms = self._run(1)
            goes_on = number + 1 < tokens and self._now() < until
            if goes_on:
                self._begin(1)
            enqueued = self._now()
            self._device.synchronize(self._cache.compute)
            now, after = self._now(), self._counted()
            self.enqueue_s += enqueued - last
            done.append(self._step((now - last) * 1e3, compute_ms, before, after))
            last, before = now, after
            if not goes_on:
                break
        return done

    # --- what those below say ----------------------------------------------------------------------------------------

    def _now(self) -> float:
        """Seconds, on a clock of the host."""
        raise NotImplementedError

    def _mark(self) -> Any:
        """Of the moment when the device has done what is enqueued."""
        raise NotImplementedError

    def _between(self, begun: Any, ended: Any) -> float:
        """Milliseconds; both have happened."""
        raise NotImplementedError

    def _enter(self, tokens: int) -> float:
        """A step of so many tokens begins to compute. What it will take, in ms, where that is known."""
        return 0.0

    def _work(self, tokens: int) -> None:
        """What comes before each layer's attention."""

    # --- steps -------------------------------------------------------------------------------------------------------

    def _begin(self, tokens: int) -> None:
        assert self._sequence is not None
        self._cache.begin_step([(self._sequence, tokens)])

    def _run(self, tokens: int) -> float:
        cache, inputs = self._cache, self._inputs
        compute_ms = self._enter(tokens)
        for layer in range(self._layers):
            self._work(tokens)
            cache.append(layer, inputs.k, inputs.v)
            cache.attend(layer, inputs.q, inputs.out)
        cache.end_step()
        self.tokens += tokens
        return compute_ms

    def _counted(self) -> tuple[Any, ...]:
        counters = self._cache.stats().counters
        return tuple(counters[name] for name in COUNTED)

    @staticmethod
    def _step(took_ms: float, compute_ms: float, before: Sequence[Any], after: Sequence[Any]) -> Step:
        return Step(took_ms, compute_ms, *(now - then for now, then in zip(after, before, strict=True)))


# --- what is run of a prompt and an answer ---------------------------------------------------------------------------


def prefill_ms(run: Run, setup: Setup, prompt_tokens: int, told: Told, parts: int) -> tuple[float, int]:
    """A prompt, from ``PREFILL_AT`` places of it: what it takes, and of how many micro-batches that was read."""
    total_ms = 0.0
    for place in range(PREFILL_AT):
        total_ms += prompt_tokens / PREFILL_AT * _token_ms(run, setup, prompt_tokens, place)
        told(place + 1, parts)
    return total_ms, PREFILL_AT


def _token_ms(run: Run, setup: Setup, prompt_tokens: int, place: int) -> float:
    """Of a token of the prompt in one of its parts."""
    ubatch = min(setup.ubatch_tokens, prompt_tokens)
    middle = int(prompt_tokens * (place + 0.5) / PREFILL_AT)
    run.open_at(max(0, min(middle, prompt_tokens - ubatch) - WARM_UP * ubatch))
    room = (prompt_tokens - run.tokens) // ubatch
    return run.prefill(ubatch, min(room, WARM_UP + 1))[-1].ms / ubatch


def decoded(run: Run, setup: Setup, prompt_tokens: int, tokens: int, for_s: float = math.inf) -> list[Step]:
    """The first tokens after a prompt, whose last micro-batches have brought in what is resident then. ``for_s``: no
    token begins later than that."""
    last = min(setup.ubatch_tokens, prompt_tokens)
    batches = min(prompt_tokens // last, WARM_UP + 1)
    run.open_at(prompt_tokens - batches * last)
    run.prefill(last, batches)
    return run.decode(tokens, for_s=for_s)


def host_only(layout: Layout) -> Callable[[int], Split]:
    """No page stays on the device: each comes over the link in every step."""
    layers = layout.geometry.layers
    ring = layout.cells - layers * layout.sequences_max
    return lambda active_pages: Split(0, ring, (0,) * layers)


def tps_of(steps: Sequence[Step]) -> float:
    """Tokens per second of a decode once it runs as it will go on."""
    return 1e3 / statistics.fmean(step.ms for step in steps[-(-len(steps) // 2) :])
