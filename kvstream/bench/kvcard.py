"""The streamer's own cache on a card that is not there: ``FakeDevice`` in virtual time, with a profile's constants.

Nothing is stored and no value is computed: what runs is the policy, the planner and the executor of ``kvstream/cuda``,
as they run on a GPU, and every copy, launch and wait takes the time that the profile says. What an engine computes
between two attentions is one launch of the right length on the stream on which the cache reads its inputs.

The host takes time as well: every call to the driver costs it ``CALL_S``. It begins a step before it waits for the one
before, as an engine can: which token comes next decides nothing about KV.
"""

from __future__ import annotations

from attrs import frozen

from ..cuda.cache import KVCache
from ..cuda.fake_device import FakeDevice, Launch, Speeds
from ..cuda.layout import Layout
from ..cuda.records import Opening
from .kvmodel import GIB, Model, Profile

CALL_S = 5e-6  # a call through PyCUDA
WAVE_S = 2e-6
"""A wave of attention beside its pages. What other launches cost is in the constants, which are of whole tokens."""
SAMPLE_EVERY = 4
SOMEWHERE = 1 << 40  # inputs lie on the device, as an engine's do
LAYER = "model_layer"


@frozen
class Step:
    """What one step was like. ``late`` of ``batches``: of those that were looked at, which is not every step's.
    ``ahead``: batches that were sent before their layer began."""

    ms: float
    compute_ms: float
    bytes: int
    calls: int
    batches: int
    late: int
    ahead: int


class Card:
    """A cache with at most one sequence. ``open_at`` makes it one of so many tokens, none of them on the device."""

    def __init__(self, profile: Profile, model: Model, layout: Layout) -> None:
        self.profile, self.model, self.layout = profile, model, layout
        geometry = layout.geometry
        self._layers, self._page_tokens = geometry.layers, geometry.page_tokens
        self._page_s = 0.0  # what the attention of one page costs in the step at hand
        speeds = Speeds(
            in_bytes_per_s=profile.h2d_gib_s * GIB, out_bytes_per_s=profile.h2d_gib_s * GIB,
            copy_s=profile.call_ms / 1e3, launch_s=0.0, call_s=CALL_S, kernel_s=self._kernel_s)
        self._device = FakeDevice(None, speeds=speeds, memory_bytes=1 << 50, pinned_bytes=1 << 50)
        self._cache = KVCache(self._device, geometry, Opening(
            layout.pool_bytes, layout.host_bytes, rows_max=layout.rows_max, sequences_max=1,
            context_max=layout.context_max, table_slots=layout.table_slots, arrays=False, sample_every=SAMPLE_EVERY))
        self._sequence: int | None = None
        self.tokens = 0

    def __enter__(self) -> Card:
        return self

    def __exit__(self, *error: object) -> None:
        self._cache.close()

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
        done = []
        for _ in range(steps):
            before, begun = self._counted(), self._device.device_s
            self._begin(tokens)
            compute_ms = self._run(tokens, *self.profile.prefill_step_ms(
                self.model, tokens, self.tokens + tokens / 2))
            done.append(self._step((self._device.device_s - begun) * 1e3, compute_ms, before))
        self._device.synchronize()
        return done

    def decode(self, tokens: int, forget_at: int | None = None) -> list[Step]:
        """Token by token; each waits for the one before. ``forget_at``: before that one (from 0) everything that is on
        the device is dropped."""
        done = []
        self._device.synchronize()
        last, before = self._device.host_s, self._counted()
        self._begin(1)
        for number in range(tokens):
            if number == forget_at:
                self._cache.abandon_step()
                self._begin(1)
            compute_ms = self._run(1, self.profile.decode_ms(self.model),
                                   self.profile.attention_ms(self.model, self.tokens + 1))
            if number + 1 < tokens:
                self._begin(1)
            self._device.synchronize(self._cache.compute)
            done.append(self._step((self._device.host_s - last) * 1e3, compute_ms, before))
            last, before = self._device.host_s, self._counted()
        return done

    def _begin(self, tokens: int) -> None:
        assert self._sequence is not None
        self._cache.begin_step([(self._sequence, tokens)])

    def _run(self, tokens: int, other_ms: float, attention_ms: float) -> float:
        cache = self._cache
        pages = -(-(self.tokens + tokens) // self._page_tokens)
        self._page_s = attention_ms / 1e3 / self._layers / pages
        layer_s = other_ms / 1e3 / self._layers
        for layer in range(self._layers):
            self._device.launch(cache.compute, LAYER, (1,), (1,), (layer_s,))
            cache.append(layer, SOMEWHERE, SOMEWHERE)
            cache.attend(layer, SOMEWHERE, SOMEWHERE)
        cache.end_step()
        self.tokens += tokens
        return other_ms + attention_ms

    def _kernel_s(self, launch: Launch) -> float:
        if launch.kernel == LAYER:
            return float(launch.args[0])
        if launch.kernel.startswith("kv_attend"):
            k_pages, v_pages = launch.args[1:3]  # one list of addresses after the other
            return WAVE_S + self._page_s * (v_pages - k_pages) / 8
        return 0.0

    def _counted(self) -> tuple[int, ...]:
        counters = self._cache.stats().counters
        return tuple(round(counters[name]) for name in (
            "in_bytes", "in_calls", "samples", "misses", "cross_layer_prefetches"))

    def _step(self, took_ms: float, compute_ms: float, before: tuple[int, ...]) -> Step:
        return Step(took_ms, compute_ms, *(now - then for now, then in zip(self._counted(), before, strict=True)))
