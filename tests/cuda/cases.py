"""Paged attention to be computed: sequences, rows at their ends, encoded pages, and both ways to launch it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from kvstream.cuda import kernels
from kvstream.cuda.layout import Geometry
from kvstream.cuda.reference import attention, decode_page
from kvstream.cuda.types import KVType, encode

Waves = Sequence[Sequence[int]]  # page indices of every sequence, wave by wave


def geometry_of(k_type: str, v_type: str, head_size: int, kv_heads: int = 2, group: int = 2,
                page_tokens: int = 32) -> Geometry:
    return Geometry(layers=1, kv_heads=kv_heads, q_heads=kv_heads * group, head_size=head_size,
                    k_type=KVType.of(k_type), v_type=KVType.of(v_type), page_tokens=page_tokens)


@frozen(eq=False)
class Rows:
    """One sequence: ``tokens`` in all, the last ``rows`` of which are this step's. Pages hold encoded rows; what lies
    behind the last token is poison (0xFF: NaN in most types), because on a device it may be anything."""

    tokens: int
    rows: int
    k: NDArray[Any]  # decoded, [tokens, kv_heads, D]
    v: NDArray[Any]
    k_pages: NDArray[Any]
    v_pages: NDArray[Any]

    @classmethod
    def random(cls, geometry: Geometry, tokens: int, rows: int, dice: np.random.Generator,
               size: float = 1.0) -> Rows:
        shape = tokens, geometry.row_values
        pages = []
        for kind, page_bytes in ((geometry.k_type, geometry.k_page_bytes), (geometry.v_type, geometry.v_page_bytes)):
            rows_ = encode(kind, dice.standard_normal(shape).astype(np.float32) * np.float32(size))
            row_bytes = rows_.shape[1]
            plane = np.full((geometry.pages(tokens), page_bytes), 0xFF, np.uint8)
            for page in range(len(plane)):
                part = rows_[page * geometry.page_tokens : (page + 1) * geometry.page_tokens]
                plane[page, : len(part) * row_bytes] = part.reshape(-1)
            pages.append(plane)
        decoded = [decode_page(geometry, k, v) for k, v in zip(*pages, strict=True)]
        k, v = (np.concatenate([page[which] for page in decoded])[:tokens] for which in (0, 1))
        return cls(tokens, rows, k, v, *pages)


@frozen(eq=False)
class Case:
    geometry: Geometry
    sequences: tuple[Rows, ...]
    q: NDArray[Any]  # [rows of all sequences, q_heads, D]
    window: int = kernels.WINDOW_NONE
    plain_scores: bool = False  # scale 1

    @classmethod
    def random(cls, geometry: Geometry, lengths: Sequence[tuple[int, int]], seed: int = 0, size: float = 1.0,
               window: int = kernels.WINDOW_NONE) -> Case:
        """``lengths``: (tokens, rows) of each sequence."""
        dice = np.random.default_rng(seed)
        sequences = tuple(Rows.random(geometry, tokens, rows, dice, size) for tokens, rows in lengths)
        rows = sum(rows for _, rows in lengths)
        q = dice.standard_normal((rows, geometry.q_heads, geometry.head_size)).astype(np.float32) * np.float32(size)
        return cls(geometry, sequences, q, window)

    @property
    def positions(self) -> NDArray[Any]:
        return np.concatenate([np.arange(s.tokens - s.rows, s.tokens, dtype=np.int32) for s in self.sequences])

    @property
    def first_rows(self) -> list[int]:
        return [sum(s.rows for s in self.sequences[:n]) for n in range(len(self.sequences))]

    @property
    def scale(self) -> float:
        return 1.0 if self.plain_scores else float(np.float32(self.geometry.head_size**-0.5))

    def expected(self) -> NDArray[Any]:
        """In float64, from the decoded rows."""
        out = []
        for first, sequence in zip(self.first_rows, self.sequences, strict=True):
            for row in range(sequence.rows):
                position = sequence.tokens - sequence.rows + row
                oldest = max(0, position - self.window + 1)
                out.append(attention(self.q[first + row : first + row + 1], sequence.k[oldest:], sequence.v[oldest:],
                                     [position - oldest], self.scale))
        return np.concatenate(out)

    def all_at_once(self) -> Waves:
        """One wave with every page."""
        return [[self.geometry.pages(s.tokens) for s in self.sequences]]

    def in_waves(self, seed: int) -> Waves:
        """Cuts at random: for each wave, up to which page of each sequence it goes."""
        dice = np.random.default_rng(seed)
        last = [self.geometry.pages(s.tokens) for s in self.sequences]
        cuts = [sorted(dice.integers(0, pages + 1, 2)) for pages in last]
        return [[cut[0] for cut in cuts], [cut[1] for cut in cuts], last]


class Machine(Protocol):
    """Runs kernels one after the other. What ``array`` and ``empty`` give may be passed to ``launch``."""

    def array(self, values: NDArray[Any]) -> Any: ...
    def empty(self, *shape: int, dtype: type = ...) -> Any: ...
    def address(self, array: Any) -> int: ...
    def read(self, array: Any) -> NDArray[Any]: ...
    def launch(self, kernel: str, grid: tuple[int, int, int], block: int, shared_bytes: int, *args: Any) -> None: ...


class Desk:
    """A case on a machine: its pages in cells in any order, with rubbish between them."""

    def __init__(self, machine: Machine, case: Case, seed: int = 0, positions: NDArray[Any] | None = None) -> None:
        geometry = case.geometry
        self.machine, self.case, self.geometry = machine, case, geometry
        dice = np.random.default_rng(seed)
        total = sum(len(s.k_pages) for s in case.sequences)
        cells = dice.permutation(total + 3)[:total]
        k_pool = np.full((total + 3, geometry.k_page_bytes), 0xFF, np.uint8)
        v_pool = np.full((total + 3, geometry.v_page_bytes), 0xFF, np.uint8)
        self.slot_of: dict[tuple[int, int], int] = {}
        for number, sequence in enumerate(case.sequences):
            for page in range(len(sequence.k_pages)):
                slot = len(self.slot_of)
                self.slot_of[number, page] = slot
                k_pool[cells[slot]], v_pool[cells[slot]] = sequence.k_pages[page], sequence.v_pages[page]
        self.k_pages, self.v_pages = (
            machine.array((machine.address(machine.array(pool)) + cells * pool.shape[1]).astype(np.uint64))
            for pool in (k_pool, v_pool))
        self.q = machine.array(case.q)
        self.positions = machine.array(case.positions if positions is None else positions)

    def _entries(self, begin: Sequence[int], end: Sequence[int],
                 places: Sequence[int]) -> tuple[list[list[int]], list[int]]:
        """The entries of the pages begin .. end - 1 of each sequence, and where those of each sequence begin."""
        entries: list[list[int]] = []
        starts = []
        for number, sequence in enumerate(self.case.sequences):
            starts.append(len(entries))
            for page in range(begin[number], end[number]):
                position = page * self.geometry.page_tokens
                entries.append([self.slot_of[number, page], position,
                                min(self.geometry.page_tokens, sequence.tokens - position),
                                self.case.first_rows[number], sequence.rows,
                                places[number] + page * sequence.rows, 0, 0])
        return entries, starts

    def _attend(self, grid: tuple[int, int, int], entries: NDArray[Any], tiles: Any, acc: Any, ml: Any,
                out: Any, wide: bool = False) -> None:
        g = self.geometry
        running = tiles is not None
        threads = kernels.WIDE_THREADS if wide else kernels.attend_threads(g.head_size)
        shared = (kernels.wide_shared_bytes(g.head_size) if wide
                  else kernels.attend_shared_bytes(g.head_size, g.page_tokens, running))
        self.machine.launch(
            f"{'kv_wide' if wide else 'kv_attend'}_{g.head_size}", grid, threads, shared, self.q, self.k_pages,
            self.v_pages, entries, self.positions, tiles if running else 0, acc, ml, out, self.case.scale, g.kv_heads,
            g.group, g.page_tokens, g.k_type.code, g.v_type.code, self.case.window)

    def table(self, waves: Waves) -> NDArray[Any]:
        """Partials into a table, wave by wave, then the fold."""
        g, case = self.geometry, self.case
        places, total = [], 0
        for sequence in case.sequences:
            places.append(total)
            total += g.pages(sequence.tokens) * sequence.rows
        acc = self.machine.empty(total, g.q_heads, g.head_size)
        ml = self.tops_and_sums = self.machine.empty(total, g.q_heads, 2)
        out = self.machine.empty(len(case.q), g.q_heads, g.head_size)
        begin = [0] * len(case.sequences)
        rows_max = max(s.rows for s in case.sequences)
        for end in waves:
            entries, _ = self._entries(begin, end, places)
            if entries:
                packed = self.machine.array(np.array(entries, np.int32))
                self._attend(kernels.table_grid(len(entries), g.kv_heads, rows_max, g.group), packed, None, acc, ml, 0)
            begin = list(end)
        rows = [[places[number] + row, sequence.rows, g.pages(sequence.tokens), case.first_rows[number] + row]
                for number, sequence in enumerate(case.sequences) for row in range(sequence.rows)]
        self.machine.launch(f"kv_fold_{g.head_size}", kernels.fold_grid(len(rows), g.q_heads), g.head_size, 0, acc, ml,
                            self.machine.array(np.array(rows, np.int32)), out, g.q_heads)
        return self.machine.read(out)

    def wide(self, waves: Waves) -> NDArray[Any]:
        """Wave by wave on tensor cores."""
        return self.running(waves, wide=True)

    def running(self, waves: Waves, wide: bool = False) -> NDArray[Any]:
        """Wave by wave into a running state."""
        vectors = kernels.WIDE_VECTORS if wide else kernels.VECTORS
        g, case = self.geometry, self.case
        acc = self.machine.empty(len(case.q), g.q_heads, g.head_size)
        ml = self.machine.empty(len(case.q), g.q_heads, 2)
        out = self.machine.empty(len(case.q), g.q_heads, g.head_size)
        begin = [0] * len(case.sequences)
        for wave, end in enumerate(waves):
            entries, starts = self._entries(begin, end, [0] * len(begin))
            flags = (kernels.TILE_BEGIN if wave == 0 else 0) | (kernels.TILE_END if wave == len(waves) - 1 else 0)
            tiles = [[starts[number], end[number] - begin[number], case.first_rows[number], sequence.rows,
                      vectors * tile, flags, 0, 0] for number, sequence in enumerate(case.sequences)
                     for tile in range(kernels.tiles(sequence.rows, g.group, vectors))]
            packed = self.machine.array(np.array(entries or [[0] * 8], np.int32))
            self._attend(kernels.running_grid(len(tiles), g.kv_heads), packed,
                         self.machine.array(np.array(tiles, np.int32)), acc, ml, out, wide)
            begin = list(end)
        return self.machine.read(out)


def worst(got: NDArray[Any], expected: NDArray[Any]) -> float:
    """The largest difference, in units of the largest expected magnitude."""
    return float(np.abs(got - expected).max() / np.abs(expected).max())
