"""Steps of ``just gpu`` that measure: the link, decode over pools of all sizes, streaming against none, prefill.

There is no model here, only its KV: a token is the append and the attention of all its layers, so on a large card the
link is what counts as soon as anything is streamed. Contexts are not computed but given: sequences begin with tokens
whose KV is a random page, many times over.

One piece of pinned memory and one pool serve all caches of a step, since pinning takes longer than measuring.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from attrs import evolve, frozen

from kvstream.bench.kvmodel import MODELS, Model
from kvstream.cuda.cache import KVCache
from kvstream.cuda.device import PyCudaDevice, Stream
from kvstream.cuda.layout import Geometry, Layout, cells_min, plan_layout
from kvstream.cuda.policy import Policy
from kvstream.cuda.records import Opening
from kvstream.cuda.types import KVType, encode
from tests.cuda.gpu.bench import Bench

MIB, GIB = 1 << 20, 1 << 30
SHARES = (1.0, 0.75, 0.5, 0.25, 0.1, 0.0)
"""Of the cells in which everything is resident; 0: one ring cell, the fewest with which a step can be done."""
WARM_UP, TOKENS, POINT_S = 4, 16, 3.0
PREFILL_WARM_UP = 10
TINY = Model("tiny", 2, 1, 2, 64, weights_mib=1)


def bandwidth(bench: Bench, tell: Any) -> None:
    """Copies from and to pinned memory, by size; and both ways at once."""
    large = 4 * MIB if bench.tiny else GIB
    sizes = [size for size in (128 << 10, 512 << 10, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, large) if size <= large]
    device = bench.open()
    try:
        there, back = device.pinned(large), device.pinned(large)
        target, source = device.alloc(large), device.alloc(large)
        into, out_of = device.stream("in"), device.stream("out")
        for name in ("h2d", "d2h"):
            rates = {}
            for size in sizes:
                number = max(2, min(64, large // size))
                places = [(n * size) % (large - size + 1) for n in range(number)]
                for measured in (False, True):  # the first is for warming up
                    start = device.record(into, timed=True)
                    begun = time.perf_counter()
                    for place in places:
                        if name == "h2d":
                            device.copy_in(into, target + place, there[place : place + size])
                        else:
                            device.copy_out(into, back[place : place + size], source + place)
                    host_s = time.perf_counter() - begun
                    end = device.record(into, timed=True)
                    device.synchronize()
                    if measured:
                        took = device.elapsed_s(start, end)
                        rates[str(size)] = {"copies": number, "bytes_per_s": bench.measured(number * size / took),
                                            "host_us_per_call": bench.measured(host_s / number * 1e6)}
            tell.part(name, rates)
        begun = time.perf_counter()
        device.copy_in(into, target, there)
        device.copy_out(out_of, back, source)
        device.synchronize()
        took = time.perf_counter() - begun
        tell.part("both", {"bytes": 2 * large, "bytes_per_s": bench.measured(2 * large / took)})
    finally:
        device.close()


def link_bytes_per_s(bench: Bench) -> float | None:
    """What the step before has measured for large copies."""
    rates = bench.earlier.get("bandwidth", {}).get("h2d", {})
    return max((rate["bytes_per_s"] or 0.0 for rate in rates.values()), default=0.0) or None


@frozen
class Subject:
    """A model's KV at a length. ``context``: tokens at which it is measured."""

    model: Model
    k_type: str
    v_type: str
    context: int
    page_tokens: int = 256

    @property
    def name(self) -> str:
        return f"{self.model.name} {self.k_type}/{self.v_type} at {self.context:,}"

    def geometry(self) -> Geometry:
        return self.model.geometry(KVType.of(self.k_type), KVType.of(self.v_type), self.page_tokens)

    def layout(self, share: float | None, rows_max: int) -> Layout:
        """``share`` None: the fewest cells with which decode is all-resident."""
        geometry = self.geometry()
        layout = plan_layout(geometry, 1 << 50, 1 << 50, rows_max, 1, self.context + self.page_tokens)
        pages, fewest = geometry.pages(layout.context_max), cells_min(geometry, rows_max, 1)
        all_of_them = _all_resident(geometry, pages)
        cells = all_of_them if share is None else max(fewest, round(share * all_of_them))
        # A cache takes no more cells than it could have pages for.
        return evolve(layout, cells=cells, host_pages=-(-max(cells, all_of_them) // geometry.layers))


def _all_resident(geometry: Geometry, pages: int) -> int:
    """The fewest cells with which the policy keeps so many pages of each layer."""
    cells = geometry.layers * pages
    while any(Policy.opened(cells - geometry.layers, geometry.layers).step(pages, 1)[1].streamed(pages)):
        cells += geometry.layers
    return cells


class Kept:
    """A device for one cache after the other, which keeps its memory between them. ``log``: launches, if it is one."""

    def __init__(self, device: PyCudaDevice, pool_bytes: int, slab_bytes: int) -> None:
        self._device, self.name, self.computes = device, device.name, device.computes
        self._pool_bytes, self._pool, self.slab = pool_bytes, device.alloc(pool_bytes), device.pinned(slab_bytes)
        self._streams: dict[str, Stream] = {}
        self.log: list[tuple[Any, ...]] | None = None
        for name in ("copy_in", "copy_out", "record", "wait", "query", "elapsed_s", "synchronize",
                     "memory", "mapped"):
            setattr(self, name, getattr(device, name))  # no detour on the way

    def alloc(self, size: int) -> int:
        assert size <= self._pool_bytes
        return self._pool

    def free(self, address: int) -> None:
        """It is kept."""

    def pinned(self, size: int) -> Any:
        return self.slab[:size]

    def stream(self, name: str) -> Stream:
        if name not in self._streams:
            self._streams[name] = self._device.stream(name)
        return self._streams[name]

    def launch(self, *args: Any) -> None:
        if self.log is not None:
            self.log.append(args)
        self._device.launch(*args)

    def close(self) -> None:
        self._device.synchronize()


class Table:
    """A device, memory for all ``layouts`` one after the other, and inputs for a step."""

    def __init__(self, bench: Bench, layouts: Sequence[Layout]) -> None:
        self.bench, self.device = bench, bench.open()
        try:
            self.kept = Kept(self.device, max(layout.pool_bytes for layout in layouts),
                             max(layout.host_bytes for layout in layouts))
            values = max(layout.rows_max * max(layout.geometry.q_heads * layout.geometry.head_size,
                                               layout.geometry.row_values) for layout in layouts)
            self.inputs = self.device.alloc(4 * values)
            host = self.device.pinned(4 * values)
            host.view(np.float32)[:] = np.random.default_rng(1).standard_normal(values, np.float32)
            stream = self.kept.stream("compute")
            self.device.copy_in(stream, self.inputs, host)
            self.device.synchronize(stream)
        except BaseException:
            self.device.close()
            raise

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *error: object) -> None:
        self.device.close()

    def fill(self, layout: Layout) -> None:
        """The planes of a slab with a random page, again and again; for all layouts with as many host pages."""
        geometry, dice = layout.geometry, np.random.default_rng(2)
        for kind, begin, page_bytes in ((geometry.k_type, layout.k_host, geometry.k_page_bytes),
                                        (geometry.v_type, layout.v_host, geometry.v_page_bytes)):
            page = np.zeros(page_bytes, np.uint8)
            rows = encode(kind, dice.standard_normal((geometry.page_tokens, geometry.row_values), np.float32))
            page[: rows.size] = rows.reshape(-1)
            for layer in range(geometry.layers):
                start = begin(layer, 0)
                self.kept.slab[start : start + layout.host_pages * page_bytes].reshape(-1, page_bytes)[:] = page

    def open(self, layout: Layout) -> KVCache:
        cache = KVCache(self.kept, layout.geometry, Opening(
            layout.pool_bytes, layout.host_bytes, layout.rows_max, 1, layout.context_max,
            table_slots=layout.table_slots, arrays=False, sample_every=2))
        assert cache.layout == layout, f"asked for {layout}, got {cache.layout}"
        return cache

    def layers(self, cache: KVCache) -> None:
        for layer in range(cache.geometry.layers):
            cache.append(layer, self.inputs, self.inputs)
            cache.attend(layer, self.inputs)
        cache.end_step()

    def decode(self, cache: KVCache, context: int) -> dict[str, Any]:
        """Token by token, each waiting for the one before. The next step is begun before that, as an engine can."""
        sequence = cache.create(context - WARM_UP - TOKENS - 1)  # the last one is only begun
        before = cache.stats().counters
        times: list[float] = []
        host: list[float] = []
        until = 0.0
        cache.begin_step([(sequence, 1)])
        begun = time.perf_counter()
        for number in range(WARM_UP + TOKENS):
            if number == WARM_UP:
                before, times, host = cache.stats().counters, [], []
                begun = time.perf_counter()
                until = begun + POINT_S
            self.layers(cache)
            cache.begin_step([(sequence, 1)])
            enqueued = time.perf_counter()
            self.device.synchronize(cache.compute)
            now = time.perf_counter()
            times.append(now - begun)
            host.append(enqueued - begun)
            begun = now
            if len(times) >= 3 and number > WARM_UP and now > until:
                break
        after, stats = cache.stats().counters, cache.stats()
        cache.abandon_step()
        cache.drop(sequence)
        done = {name: after[name] - before[name] for name in before}
        return self._point(done, times, host) | {
            "cells": cache.layout.cells, "pool_bytes": stats.pool_bytes, "ring": stats.ring,
            "resident_pages": sum(stats.layer_pages)}

    def _point(self, done: dict[str, float], times: list[float], host: list[float]) -> dict[str, Any]:
        tokens, token_s, step_s = len(times), float(np.median(times)), done["step_s"]
        measured, link = self.bench.measured, link_bytes_per_s(self.bench)
        bytes_per_token = done["in_bytes"] / tokens
        return {
            "tokens": tokens, "h2d_bytes_per_token": bytes_per_token, "h2d_calls_per_token": done["in_calls"] / tokens,
            "launches_per_token": done["launches"] / tokens, "host_waits": done["host_waits"],
            "ms_per_token": measured(token_s * 1e3), "tokens_per_s": measured(1 / token_s),
            "ms_all": [measured(one * 1e3) for one in times],
            "host_ms_per_step": measured(float(np.median(host)) * 1e3),
            "copy_busy_share": measured(done["copy_s"] / step_s) if step_s > 0 else None,
            "exposed_share": measured(done["exposed_s"] / step_s) if step_s > 0 else None,
            "link_share": measured(bytes_per_token / token_s / link) if link else None}


    def prefill(self, cache: KVCache, context: int, rows: int, settled: bool) -> dict[str, Any]:
        """Micro-batches at the end of a context, one after the other without waiting. A prompt that has grown to it has
        a split by then that suits it, and here the policy first has to find that; not if it is ``settled``."""
        steps, warm_max = 2, 1 if settled else PREFILL_WARM_UP
        sequence = cache.create(context - (warm_max + steps) * rows)
        warm = 0
        while warm < warm_max and (warm == 0 or cache.stats().repartitions == 0):
            self._rows(cache, sequence, rows)
            warm += 1
        self.device.synchronize()
        before, begun = cache.stats().counters, time.perf_counter()
        for _ in range(steps):
            self._rows(cache, sequence, rows)
        enqueued = time.perf_counter() - begun
        self.device.synchronize()
        took = time.perf_counter() - begun
        after, stats = cache.stats().counters, cache.stats()
        measured = self.bench.measured
        return {
            "rows": rows, "steps": steps, "warm_up": warm, "tokens_before": cache.tokens(sequence) - steps * rows,
            "ring": stats.ring, "h2d_bytes_per_step": (after["in_bytes"] - before["in_bytes"]) / steps,
            "launches_per_step": (after["launches"] - before["launches"]) / steps,
            "tokens_per_s": measured(rows * steps / took), "ms_per_step": measured(took / steps * 1e3),
            "host_ms_per_step": measured(enqueued / steps * 1e3)}

    def _rows(self, cache: KVCache, sequence: int, rows: int) -> None:
        cache.begin_step([(sequence, rows)])
        self.layers(cache)


def _subjects(bench: Bench) -> list[Subject]:
    if bench.tiny:
        return [Subject(TINY, "q8_0", "q4_0", 320, 32), Subject(TINY, "f16", "f16", 320, 32)]
    models = MODELS["qwen3.8-27b"], MODELS["llama-3.1-8b"]
    return [Subject(model, *types) for types in (("q8_0", "q4_0", 131072), ("f16", "f16", 65536)) for model in models]


def decode(bench: Bench, tell: Any) -> None:
    subjects = _subjects(bench)
    shares = (1.0, 0.5, 0.0) if bench.tiny else SHARES
    points = [(subject, share) for subject in subjects for share in shares]
    with Table(bench, [subject.layout(share, 1) for subject, share in points]) as table:
        for number, (subject, share) in enumerate(points):
            if bench.left_s <= 0:
                raise TimeoutError(f"{number} of {len(points)} pools were measured when the time was over")
            layout = subject.layout(share, 1)
            if share == shares[0]:
                table.fill(layout)
            cache = table.open(layout)
            point = {"share": share, "context": subject.context, **table.decode(cache, subject.context)}
            cache.close()
            assert (point["h2d_bytes_per_token"] == 0) == (share == 1.0), (subject.name, point)
            tell.part(f"{subject.name} / {share:g}", point)


def resident(bench: Bench, tell: Any) -> None:
    """Everything fits. ``enough``: by just so much; ``plenty``: twice as much; ``bare``: the same launches again
    without the cache around them, as a program without streaming makes them."""
    subject = _subjects(bench)[0] if bench.tiny else Subject(MODELS["qwen3.8-27b"], "q8_0", "q4_0", 32768)
    layouts = {"enough": subject.layout(None, 1), "plenty": subject.layout(2.0, 1)}
    with Table(bench, list(layouts.values())) as table:
        ms: dict[str, float] = {}
        for name, layout in layouts.items():
            table.fill(layout)
            cache = table.open(layout)
            point = table.decode(cache, subject.context)
            assert point["h2d_bytes_per_token"] == 0, point
            tell.part(name, {"context": subject.context, **point})
            ms[name] = point["ms_per_token"] or 0.0
            if name == "enough":
                bare_ms, launches = _bare(table, cache, subject)
                tell.part("bare", {"ms_per_token": bench.measured(bare_ms), "launches_per_token": launches})
            cache.close()
        tell.part("ratios", {"enough_to_plenty": bench.measured(ms["enough"] / ms["plenty"]) if ms["plenty"] else None,
                             "enough_to_bare": bench.measured(ms["enough"] / bare_ms)})


def _bare(table: Table, cache: KVCache, subject: Subject) -> tuple[float, int]:
    """ms per token, launches per token."""
    sequence = cache.create(subject.context - WARM_UP)
    log: list[tuple[Any, ...]] = []
    for _ in range(WARM_UP):  # the last one counts: everything is resident then
        table.kept.log = log = []
        cache.begin_step([(sequence, 1)])
        table.layers(cache)
    table.kept.log = None
    log = [args for args in log if args[1] != "kv_tables"]
    device = table.device
    device.synchronize()
    times = []
    for _ in range(3 if table.bench.tiny else TOKENS):
        begun = time.perf_counter()
        for args in log:
            device.launch(*args)
        device.synchronize(cache.compute)
        times.append(time.perf_counter() - begun)
    cache.drop(sequence)
    return float(np.median(times)) * 1e3, len(log)


def prefill(bench: Bench, tell: Any) -> None:
    rows = 32 if bench.tiny else 512
    points = list(_prefills(bench))
    with Table(bench, [subject.layout(share, rows) for subject, share in points]) as table:
        for number, (subject, share) in enumerate(points):
            if bench.left_s <= 0:
                raise TimeoutError(f"{number} of {len(points)} prefills were measured when the time was over")
            layout = subject.layout(share, rows)
            table.fill(layout)
            cache = table.open(layout)
            point = table.prefill(cache, subject.context, rows, settled=share == 1.0)
            cache.close()
            tell.part(f"{subject.name} / {share:g}", {"share": share, "context": subject.context, **point})


def _prefills(bench: Bench) -> Iterator[tuple[Subject, float]]:
    model = TINY if bench.tiny else MODELS["qwen3.8-27b"]
    for context in (512,) if bench.tiny else (8192, 32768, 131072):
        for share in (1.0, 0.25):
            yield Subject(model, "q8_0", "q4_0", context, 32 if bench.tiny else 256), share
