"""Plays scripts on a ``KVCache``: the same conversation at any pool size, width or company must give the same bits.

A script is a tuple of lines: ``("feed", (("a", 40), ("b", 1)))`` is a step with so many new tokens of each sequence,
created when first named; ``("fork", "a", "b")``, ``("cut", "a", 50)``, ``("drop", "a")``, ``("swap", "a")`` (save, drop
and load) and ``("abandon", (("a", 7),))``, a step that is begun and given up.

Every number that goes in depends only on (name, position, layer, how often this position was written), so that a
sequence gets the same inputs alone and in company, at once and token by token. What comes out is kept under
(name, position, layer); written again, the last counts.

``lazily``: inputs and outputs stay on the device until the script is over, so that the host waits for nothing but what
the cache waits for. That leaves the streams the most freedom to run in a wrong order.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from kvstream.cuda.arrays import array_bytes
from kvstream.cuda.cache import KVCache
from kvstream.cuda.device import Device
from kvstream.cuda.layout import Geometry, plan_layout
from kvstream.cuda.records import Opening, Stats
from kvstream.cuda.reference import attention
from kvstream.cuda.types import KVType, decode, encode
from tests.cuda import ledger

Line = tuple[Any, ...]
Script = tuple[Line, ...]
HOST_BYTES = 64 << 20


@frozen
class Shape:
    """A geometry that pickles, with names for types."""

    layers: int = 3
    kv_heads: int = 2
    q_heads: int = 4
    head_size: int = 64
    k_type: str = "q8_0"
    v_type: str = "q4_0"
    page_tokens: int = 32

    def geometry(self) -> Geometry:
        return Geometry(self.layers, self.kv_heads, self.q_heads, self.head_size, KVType.of(self.k_type),
                        KVType.of(self.v_type), self.page_tokens)

    def __str__(self) -> str:
        return (f"{self.layers} layers, {self.q_heads}/{self.kv_heads} heads of {self.head_size}, pages of "
                f"{self.page_tokens}")


@frozen
class Digest:
    """Of a played script, for when its outputs would be too much to send from process to process."""

    text: str
    rows: int
    fed: int
    stats: Stats


@frozen
class Played:
    """``fed``: rows of all steps that ended."""

    outputs: dict[tuple[str, int, int], bytes]
    stats: Stats
    fed: int

    def digest(self) -> Digest:
        text = b"".join(self.outputs[key] for key in sorted(self.outputs))
        return Digest(hashlib.sha256(text).hexdigest(), len(self.outputs), self.fed, self.stats)


def same(shape: Shape, found: Played | Digest, expected: Played | Digest, streamed: bool) -> None:
    """The same bits; and the counters say that what was to be streamed was streamed, and every new row saved. This is
    the only way in which these tests compare, so that none of them can pass while nothing was streamed or compared."""
    if isinstance(found, Played) and isinstance(expected, Played):
        assert found.outputs.keys() == expected.outputs.keys()
        wrong = [key for key, value in found.outputs.items() if value != expected.outputs[key]]
        assert not wrong, f"{len(wrong)} of {len(found.outputs)} rows have other bits: {wrong[:5]} ..."
    one, other = (each.digest() if isinstance(each, Played) else each for each in (found, expected))
    assert (one.text, one.rows) == (other.text, other.rows)
    geometry, counters = shape.geometry(), one.stats.counters
    if streamed:
        assert counters["in_pages"] > 0 and counters["batches"] > 0 and counters["waits"] > 0
        assert counters["steps_streamed"] > 0 or counters["rows"] > one.fed  # those that streamed were given up
    else:
        assert counters["in_pages"] == counters["in_calls"] == 0
    assert counters["in_bytes"] == counters["in_pages"] * geometry.page_bytes
    rows_saved = counters["out_bytes"] / (geometry.layers * (geometry.k_row_bytes + geometry.v_row_bytes))
    assert rows_saved == one.fed if counters["rows"] == one.fed else rows_saved > one.fed  # some were given up
    assert counters["launches"] > 0
    ledger.compared(one.rows, f"{shape.k_type}/{shape.v_type}", str(shape), int(counters["in_pages"]),
                    f"{one.stats.cells} cells")


def values(name: str, position: int, layer: int, version: int, what: str, number: int) -> NDArray[np.float32]:
    seed = zlib.crc32(f"{name} {position} {layer} {version} {what}".encode())
    return np.random.Generator(np.random.PCG64(seed)).standard_normal(number, np.float32) * np.float32(1.5)


def opening_of(geometry: Geometry, cells: int | None, *, rows_max: int = 64, sequences_max: int = 4,
               context_max: int = 512, table_slots: int = 256, wide: Any = "exact", **more: Any) -> Opening:
    """``cells`` None: everything that the host holds fits on the device as well. The size of the table is given, since
    it would follow that of the pool otherwise. ``wide``: on tensor cores the width of a step shows in its bits, which
    most of what is tested here is about."""
    own = array_bytes(geometry, rows_max)
    opening = Opening(1 << 40, HOST_BYTES + own, rows_max, sequences_max, context_max, table_slots=table_slots,
                      wide=wide, **more)
    layout = plan_layout(geometry, 1 << 40, HOST_BYTES, rows_max, sequences_max, context_max, table_slots)
    return evolve(opening, pool_bytes=(layout if cells is None else evolve(layout, cells=cells)).pool_bytes)


Oracle = Callable[[NDArray[np.float32], NDArray[np.float64]], None]


def play(device: Device, geometry: Geometry, opening: Opening, script: Script, *, lazily: bool = False,
         oracle: Oracle | None = None) -> Played:
    cache = KVCache(device, geometry, opening)
    try:
        assert opening.pool_bytes == cache.layout.pool_bytes, "not the pool that was asked for"
        player = (_LazyPlayer if lazily else _Player)(cache, oracle)
        for line in script:
            getattr(player, line[0])(*line[1:])
        device.synchronize()
        player.finish()
        return Played(player.outputs, cache.stats(), player.fed)
    finally:
        cache.close()


class _Player:
    def __init__(self, cache: KVCache, oracle: Oracle | None) -> None:
        self.cache, self.geometry, self.oracle = cache, cache.geometry, oracle
        self.ids: dict[str, int] = {}
        self.kv: dict[str, list[tuple[list[Any], list[Any]]]] = {}  # of each name and layer, as written
        self.versions: dict[tuple[str, int], int] = {}
        self.outputs: dict[tuple[str, int, int], bytes] = {}
        self.fed = 0

    def feed(self, batch: Sequence[tuple[str, int]]) -> None:
        self._step(batch)
        self.cache.end_step()
        self.fed += sum(new for _, new in batch)

    def abandon(self, batch: Sequence[tuple[str, int]], layers: int = 1) -> None:
        outputs, versions = dict(self.outputs), dict(self.versions)
        kv = {name: [(list(k), list(v)) for k, v in both] for name, both in self.kv.items()}
        self._step(batch, layers)
        self.cache.abandon_step()
        self.outputs, self.versions, self.kv = outputs, versions, kv

    def fork(self, name: str, to: str) -> None:
        self.ids[to] = self.cache.fork(self.ids[name])
        self.kv[to] = [(list(k), list(v)) for k, v in self.kv[name]]

    def cut(self, name: str, tokens: int) -> None:
        self.cache.truncate(self.ids[name], tokens)
        for k, v in self.kv[name]:
            del k[tokens:], v[tokens:]

    def drop(self, name: str) -> None:
        self.cache.drop(self.ids.pop(name))
        del self.kv[name]

    def swap(self, name: str) -> None:
        saved = self.cache.save(self.ids[name])
        self.cache.drop(self.ids[name])
        self.ids[name] = self.cache.load(saved)

    def _step(self, batch: Sequence[tuple[str, int]], layers: int | None = None) -> None:
        geometry = self.geometry
        for name, _ in batch:
            if name not in self.ids:
                self.ids[name] = self.cache.create()
                self.kv[name] = [([], []) for _ in range(geometry.layers)]
        places = [(name, position) for name, new in batch
                  for position in range(len(self.kv[name][0][0]), len(self.kv[name][0][0]) + new)]
        for place in places:
            self.versions[place] = self.versions.get(place, -1) + 1
        self.cache.begin_step([(self.ids[name], new) for name, new in batch])
        inputs = [tuple(np.stack([values(*place, layer, self.versions[place], what, number) for place in places])
                        for what, number in (("k", geometry.row_values), ("v", geometry.row_values),
                                             ("q", geometry.q_heads * geometry.head_size)))
                  for layer in range(geometry.layers if layers is None else layers)]
        for layer, (k, v, _) in enumerate(inputs):
            for row, (name, _) in enumerate(places):
                self.kv[name][layer][0].append(k[row])
                self.kv[name][layer][1].append(v[row])
        self._layers(places, inputs)

    def _layers(self, places: Sequence[tuple[str, int]], inputs: Sequence[Any]) -> None:
        for layer, (k, v, q) in enumerate(inputs):
            self.cache.append(layer, k, v)
            out = self.cache.attend(layer, q.reshape(len(places), self.geometry.q_heads, self.geometry.head_size))
            self._keep(places, layer, out)
            if self.oracle is not None:
                self._compare(layer, places, q, out)

    def _keep(self, places: Sequence[tuple[str, int]], layer: int, out: Any) -> None:
        for row, (name, position) in enumerate(places):
            self.outputs[name, position, layer] = out[row].tobytes()

    def finish(self) -> None:
        """The device has done everything."""

    def _compare(self, layer: int, places: Sequence[tuple[str, int]], q: NDArray[np.float32], out: Any) -> None:
        geometry = self.geometry
        for row, (name, position) in enumerate(places):
            k, v = (decode(kind, encode(kind, np.stack(rows)), geometry.row_values).reshape(
                        -1, geometry.kv_heads, geometry.head_size)
                    for kind, rows in zip((geometry.k_type, geometry.v_type), self.kv[name][layer], strict=True))
            mine = q[row].reshape(1, geometry.q_heads, geometry.head_size)
            assert self.oracle is not None
            self.oracle(out[row], attention(mine, k, v, [position])[0])


class _LazyPlayer(_Player):
    """Everything on the device; the results are read when the script is over."""

    def __init__(self, cache: KVCache, oracle: Oracle | None) -> None:
        super().__init__(cache, oracle)
        self._pending: list[tuple[Sequence[tuple[str, int]], int, NDArray[np.float32]]] = []

    def _layers(self, places: Sequence[tuple[str, int]], inputs: Sequence[Any]) -> None:
        device, cache = self.cache.device, self.cache
        flat = [array.reshape(-1) for layer in inputs for array in layer]
        size = 4 * sum(array.size for array in flat)
        out_size = 4 * len(places) * self.geometry.q_heads * self.geometry.head_size
        host, address = device.pinned(size + out_size * len(inputs)), device.alloc(size + out_size * len(inputs))
        host[:size] = np.concatenate(flat).view(np.uint8)
        device.copy_in(cache.compute, address, host[:size])
        at, out = address, address + size
        for layer, (k, v, q) in enumerate(inputs):
            cache.append(layer, at, at + k.nbytes)
            cache.attend(layer, at + k.nbytes + v.nbytes, out)
            at += k.nbytes + v.nbytes + q.nbytes
            result = host[out - address : out - address + out_size]
            device.copy_out(cache.compute, result, out)
            self._pending.append((places, layer, result.view(np.float32).reshape(len(places), -1)))
            out += out_size

    def abandon(self, batch: Sequence[tuple[str, int]], layers: int = 1) -> None:
        pending = list(self._pending)
        super().abandon(batch, layers)
        self._pending = pending

    def finish(self) -> None:
        for places, layer, out in self._pending:
            self._keep(places, layer, out)
        self._pending.clear()
