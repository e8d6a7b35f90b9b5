"""Plays scripts on a ``KVCache``: the same conversation at any pool size, width or company must give the same bits.

A script is a tuple of lines: ``("feed", (("a", 40), ("b", 1)))`` is a step with so many new tokens of each sequence,
created when first named; ``("fork", "a", "b")``, ``("cut", "a", 50)``, ``("drop", "a")``, ``("swap", "a")`` (save, drop
and load) and ``("abandon", (("a", 7),))``, a step that is begun and given up.

Every number that goes in depends only on (name, position, layer, how often this position was written), so that a
sequence gets the same inputs alone and in company, at once and token by token. What comes out is kept under
(name, position, layer); written again, the last counts.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from kvstream.cuda.cache import KVCache, Opening, Stats
from kvstream.cuda.device import Device
from kvstream.cuda.layout import Geometry, plan_layout
from kvstream.cuda.reference import attention
from kvstream.cuda.types import KVType, decode, encode

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


@frozen
class Played:
    outputs: dict[tuple[str, int, int], bytes]
    stats: Stats


def values(name: str, position: int, layer: int, version: int, what: str, number: int) -> NDArray[np.float32]:
    seed = zlib.crc32(f"{name} {position} {layer} {version} {what}".encode())
    return np.random.Generator(np.random.PCG64(seed)).standard_normal(number, np.float32) * np.float32(1.5)


def opening_of(geometry: Geometry, cells: int | None, *, rows_max: int = 64, sequences_max: int = 4,
               context_max: int = 512, **more: Any) -> Opening:
    """``cells`` None: everything that the host holds fits on the device as well."""
    opening = Opening(1 << 40, HOST_BYTES, rows_max, sequences_max, context_max, **more)
    layout = plan_layout(geometry, 1 << 40, HOST_BYTES, rows_max, sequences_max, context_max, opening.table_slots)
    if cells is None:
        return evolve(opening, pool_bytes=layout.pool_bytes)
    one_less = evolve(layout, cells=cells)
    return evolve(opening, pool_bytes=one_less.pool_bytes)


def play(device: Device, geometry: Geometry, opening: Opening, script: Script,
         oracle: Callable[[NDArray[np.float32], NDArray[np.float64]], None] | None = None) -> Played:
    cache = KVCache(device, geometry, opening)
    try:
        player = _Player(cache, oracle)
        for line in script:
            getattr(player, line[0])(*line[1:])
        return Played(player.outputs, cache.stats())
    finally:
        cache.close()


class _Player:
    def __init__(self, cache: KVCache, oracle: Any) -> None:
        self.cache, self.geometry, self.oracle = cache, cache.geometry, oracle
        self.ids: dict[str, int] = {}
        self.kv: dict[str, list[tuple[list[Any], list[Any]]]] = {}  # of each name and layer, as written
        self.versions: dict[tuple[str, int], int] = {}
        self.outputs: dict[tuple[str, int, int], bytes] = {}

    def feed(self, batch: Sequence[tuple[str, int]]) -> None:
        self._step(batch)
        self.cache.end_step()

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
        for layer in range(geometry.layers if layers is None else layers):
            k, v, q = (np.stack([values(*place, layer, self.versions[place], what, number) for place in places])
                       for what, number in (("k", geometry.row_values), ("v", geometry.row_values),
                                            ("q", geometry.q_heads * geometry.head_size)))
            self.cache.append(layer, k, v)
            out = self.cache.attend(layer, q.reshape(len(places), geometry.q_heads, geometry.head_size))
            for row, (name, position) in enumerate(places):
                self.kv[name][layer][0].append(k[row])
                self.kv[name][layer][1].append(v[row])
                self.outputs[name, position, layer] = out[row].tobytes()
            if self.oracle is not None:
                self._compare(layer, places, q, out)

    def _compare(self, layer: int, places: Sequence[tuple[str, int]], q: NDArray[np.float32], out: Any) -> None:
        geometry = self.geometry
        for row, (name, position) in enumerate(places):
            k, v = (decode(kind, encode(kind, np.stack(rows)), geometry.row_values).reshape(
                        len(rows), geometry.kv_heads, geometry.head_size)
                    for kind, rows in zip((geometry.k_type, geometry.v_type), self.kv[name][layer], strict=True))
            mine = q[row].reshape(1, geometry.q_heads, geometry.head_size)
            self.oracle(out[row], attention(mine, k, v, [position])[0])
