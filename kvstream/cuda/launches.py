"""From the compute ops of a plan to kernel launches: argument lists, grids, and the tables that the kernels read.

Theory of operation. A plan is frozen before anything runs, so everything the kernels are told about a step is known at
its beginning: where each page and each new row lies, which rows look at which page. These *tables* are made here;
``tables`` puts them on the device, into the staged workspaces of ``layout``, taken as one piece.

A wave of a wide step may be two launches: sequences with ``WIDE_ROWS_MIN`` new rows or more attend on tensor cores, the
others as ever. Which it is depends on nothing but the sequence's own rows in the step, so that the bits of a sequence
depend neither on its company nor on where its pages are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from attrs import define, evolve, frozen
from numpy.typing import NDArray

from ..errors import StepError
from .kernels import (
    TILE_BEGIN,
    TILE_END,
    VECTORS,
    WIDE_ROWS_MIN,
    WIDE_THREADS,
    WIDE_VECTORS,
    WINDOW_NONE,
    WRITE_THREADS,
    attend_shared_bytes,
    attend_threads,
    fold_grid,
    running_grid,
    table_grid,
    tiles,
    wide_shared_bytes,
    write_grid,
)
from .layout import Layout
from .ops import Attend, Fold, Write
from .types import KVType

Table = NDArray[Any]


@frozen
class Part:
    """The rows of one sequence in a step: ``rows`` from ``first_row`` on, at positions from ``before`` on. Its partial
    results are at ``place`` + page index * rows of the table."""

    sequence: int
    first_row: int
    rows: int
    before: int
    place: int

    @property
    def after(self) -> int:
        """Tokens of the sequence at the end of the step."""
        return self.before + self.rows


@define
class Io:
    """Device addresses of a layer's input and output; known when the layer is called."""

    q: int = 0
    k: int = 0
    v: int = 0
    out: int = 0


@frozen(eq=False)
class Draft:
    """A launch whose tables have no address yet. ``args`` gets their addresses, in order. ``more``: the next launch
    belongs to the same op."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    tables: tuple[Table, ...]
    args: Callable[[Sequence[int], Io], tuple[int | float, ...]]
    more: bool = False


def parts_of(batch: Iterable[tuple[int, int, int]], page_tokens: int) -> tuple[Part, ...]:
    """``batch``: (sequence, tokens before, new tokens), rows in that order."""
    parts, row, place = [], 0, 0
    for sequence, before, new in batch:
        parts.append(Part(sequence, row, new, before, place))
        row += new
        place += -(-(before + new) // page_tokens) * new
    return tuple(parts)


def tensor_possible(layout: Layout) -> bool:
    """Whoever stores f32 wants its bits, of which tensor cores would leave half. And steps must be wide enough."""
    return KVType.F32 not in (layout.geometry.k_type, layout.geometry.v_type) and layout.rows_max >= WIDE_ROWS_MIN


class Encodings:
    """A wave's entries as arrays, and where their pages are. Plans that repeat use the same entries, so what the step
    before needed is kept."""

    def __init__(self, layout: Layout, pool: int) -> None:
        self._layout, self._pool = layout, pool
        self._now: dict[int, tuple[object, Table, Table, tuple[int, ...]]] = {}
        self._before: dict[int, tuple[object, Table, Table, tuple[int, ...]]] = {}

    def next_step(self) -> None:
        self._before, self._now = self._now, {}

    def of(self, entries: tuple[tuple[int, int, int], ...]) -> tuple[Table, Table, tuple[int, ...]]:
        """i64[entries][3] as given; u64[2][entries]: addresses of K and V; the sequences."""
        known = self._now.get(id(entries)) or self._before.get(id(entries))
        if known is None:
            geometry = self._layout.geometry
            pages = np.array(entries, np.int64).reshape(-1, 3)
            cells = pages[:, 2].astype(np.uint64)
            pointers = np.empty((2, len(pages)), np.uint64)
            pointers[0] = np.uint64(self._pool + self._layout.k_cell(0)) + cells * np.uint64(geometry.k_page_bytes)
            pointers[1] = np.uint64(self._pool + self._layout.v_cell(0)) + cells * np.uint64(geometry.v_page_bytes)
            # The entries too, so that their id stays theirs.
            known = entries, pages, pointers, tuple(np.unique(pages[:, 0]).tolist())
        self._now[id(entries)] = known
        return known[1:]


class Drafts:
    """What the ops of one step mean for the kernels. ``pool`` is the pool's address. ``tensor``: wide parts attend on
    tensor cores."""

    def __init__(self, layout: Layout, pool: int, parts: tuple[Part, ...], scale: float, encoded: Encodings,
                 tensor: bool = False) -> None:
        self._layout, self._geometry, self._pool, self._scale = layout, layout.geometry, pool, scale
        self._encoded = encoded
        self._parts = {part.sequence: part for part in parts}
        self._wide = frozenset(part.sequence for part in parts if tensor and part.rows >= WIDE_ROWS_MIN)
        self._rows = sum(part.rows for part in parts)
        self._positions = np.concatenate(
            [np.arange(part.before, part.after, dtype=np.int32) for part in parts])
        self._folds = self._fold_rows(parts)
        self._places = sum(layout.geometry.pages(part.after) * part.rows for part in parts)

    def write(self, op: Write) -> Draft:
        """One launch for K and V of all new rows."""
        geometry, layout = self._geometry, self._layout
        targets = np.zeros((2, self._rows), np.uint64)
        for row, count, cell, first_token in op.rows:
            tokens = np.arange(first_token, first_token + count, dtype=np.uint64)
            targets[0, row : row + count] = (
                np.uint64(self._pool + layout.k_cell(cell)) + tokens * np.uint64(geometry.k_row_bytes))
            targets[1, row : row + count] = (
                np.uint64(self._pool + layout.v_cell(cell)) + tokens * np.uint64(geometry.v_row_bytes))
        rows, values = self._rows, geometry.row_values
        return Draft("kv_write", write_grid(rows, values), (WRITE_THREADS, 1, 1), 0, (targets,),
                     lambda at, io: (io.k, io.v, at[0], at[0] + 8 * rows, rows, values,
                                     geometry.k_type.code, geometry.v_type.code))

    def attend(self, op: Attend, first: frozenset[int], last: frozenset[int]) -> list[Draft]:
        """``first`` and ``last``: the sequences for which this is the layer's first wave, and its last."""
        geometry = self._geometry
        pages, pointers, _ = self._encoded.of(op.entries)
        entries, runs = self._entries(pages)
        tables: tuple[Table, ...] = (pointers, entries, self._positions)
        if op.fold == "table":
            if self._places > self._layout.table_slots:
                raise StepError(f"the step has {self._places} partial results, the table holds "
                                f"{self._layout.table_slots}")
            rows_max = max(self._parts[sequence].rows for sequence, _, _ in runs)
            grid = table_grid(len(pages), geometry.kv_heads, rows_max, geometry.group)
            return [self._attention("kv_attend", grid, tables)]
        drafts = []
        for kernel, vectors in (("kv_attend", VECTORS), ("kv_wide", WIDE_VECTORS)):
            mine = [run for run in runs if (run[0] in self._wide) == (kernel == "kv_wide")]
            if mine:
                told = self._tiles(mine, first, last, vectors)
                drafts.append(self._attention(kernel, running_grid(len(told), geometry.kv_heads), (*tables, told)))
        return [*(evolve(draft, more=True) for draft in drafts[:-1]), drafts[-1]]

    def _attention(self, kernel: str, grid: tuple[int, int, int], tables: tuple[Table, ...]) -> Draft:
        """In the running form if there is a fourth table, which tells of tiles."""
        geometry = self._geometry
        running = len(tables) == 4
        workspace = "state" if running else "table"
        acc = self._pool + self._layout.workspace(workspace).offset
        ml = self._pool + self._layout.workspace(f"{workspace}_ml").offset
        slots = tables[0].shape[1]

        def args(at: Sequence[int], io: Io) -> tuple[int | float, ...]:
            return (io.q, at[0], at[0] + 8 * slots, at[1], at[2], at[3] if running else 0, acc, ml, io.out,
                    self._scale, geometry.kv_heads, geometry.group, geometry.page_tokens, geometry.k_type.code,
                    geometry.v_type.code, WINDOW_NONE)

        if kernel == "kv_wide":
            threads, shared_bytes = WIDE_THREADS, wide_shared_bytes(geometry.head_size)
        else:
            threads = attend_threads(geometry.head_size)
            shared_bytes = attend_shared_bytes(geometry.head_size, geometry.page_tokens, running)
        return Draft(f"{kernel}_{geometry.head_size}", grid, (threads, 1, 1), shared_bytes, tables, args)

    def fold(self, op: Fold) -> Draft:
        geometry, layout = self._geometry, self._layout
        acc = self._pool + layout.workspace("table").offset
        ml = self._pool + layout.workspace("table_ml").offset
        return Draft(f"kv_fold_{geometry.head_size}", fold_grid(self._rows, geometry.q_heads),
                     (geometry.head_size, 1, 1), 0, (self._folds,),
                     lambda at, io: (acc, ml, at[0], io.out, geometry.q_heads))

    def layer(self, ops: Iterable[object]) -> Iterator[Draft]:
        """The launches of one layer's compute ops, in order."""
        listed = list(ops)
        waves = [op for op in listed if isinstance(op, Attend)]
        first: dict[int, Attend] = {}
        last: dict[int, Attend] = {}
        for wave in waves:
            for sequence in self._encoded.of(wave.entries)[2]:
                first.setdefault(sequence, wave)
                last[sequence] = wave
        for op in listed:
            if isinstance(op, Write):
                yield self.write(op)
            elif isinstance(op, Fold):
                yield self.fold(op)
            elif isinstance(op, Attend):
                yield from self.attend(op, frozenset(key for key, wave in first.items() if wave is op),
                                       frozenset(key for key, wave in last.items() if wave is op))

    def _entries(self, pages: Table) -> tuple[Table, list[tuple[int, int, int]]]:
        """i32[entries][8], and the runs of one sequence in it: (sequence, first entry, entries)."""
        page_tokens = self._geometry.page_tokens
        entries = np.zeros((len(pages), 8), np.int32)
        entries[:, 0] = np.arange(len(pages))
        entries[:, 1] = pages[:, 1] * page_tokens
        runs = []
        borders = [0, *(np.flatnonzero(np.diff(pages[:, 0])) + 1).tolist(), len(pages)]
        for start, end in pairwise(borders):
            part = self._parts[int(pages[start, 0])]
            run = entries[start:end]
            run[:, 2] = np.minimum(page_tokens, part.after - run[:, 1])
            run[:, 3], run[:, 4] = part.first_row, part.rows
            run[:, 5] = part.place + pages[start:end, 1] * part.rows
            runs.append((part.sequence, start, end - start))
        return entries, runs

    def _tiles(self, runs: Iterable[tuple[int, int, int]], first: frozenset[int], last: frozenset[int],
               vectors: int) -> Table:
        """i32[tiles][8]: these sequences, which have pages in this wave, cut into tiles of so many vectors."""
        made = []
        for sequence, start, entries in runs:
            part = self._parts[sequence]
            told = np.zeros((tiles(part.rows, self._geometry.group, vectors), 8), np.int32)
            told[:, :4] = start, entries, part.first_row, part.rows
            told[:, 4] = np.arange(len(told)) * vectors
            told[:, 5] = (TILE_BEGIN if sequence in first else 0) | (TILE_END if sequence in last else 0)
            made.append(told)
        return np.concatenate(made)

    def _fold_rows(self, parts: tuple[Part, ...]) -> Table:
        """i32[rows][4]: where each row's partials are: (first place, stride, pages, row)."""
        folds = np.zeros((self._rows, 4), np.int32)
        for part in parts:
            rows = np.arange(part.rows)
            mine = folds[part.first_row : part.first_row + part.rows]
            mine[:, 0] = part.place + rows
            mine[:, 1], mine[:, 2] = part.rows, self._geometry.pages(part.after)
            mine[:, 3] = part.first_row + rows
        return folds
