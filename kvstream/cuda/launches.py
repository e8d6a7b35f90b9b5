"""From the compute ops of a plan to kernel launches: argument lists, grids, and the tables that the kernels read.

Theory of operation. A plan is frozen before anything runs, so everything the kernels are told about a step is known at
its beginning: where each page and each new row lies, which rows look at which page. These *tables* are made here;
``tables`` puts them on the device, into the staged workspaces of ``layout``, taken as one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from attrs import define, frozen
from numpy.typing import NDArray

from ..errors import StepError
from .kernels import (
    TILE_BEGIN,
    TILE_END,
    VECTORS,
    WINDOW_NONE,
    WRITE_THREADS,
    attend_shared_bytes,
    attend_threads,
    fold_grid,
    running_grid,
    table_grid,
    tiles,
    write_grid,
)
from .layout import Layout
from .ops import Attend, Fold, Write

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
    """A launch whose tables have no address yet. ``args`` gets their addresses, in order."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    tables: tuple[Table, ...]
    args: Callable[[Sequence[int], Io], tuple[int | float, ...]]


def parts_of(batch: Iterable[tuple[int, int, int]], page_tokens: int) -> tuple[Part, ...]:
    """``batch``: (sequence, tokens before, new tokens), rows in that order."""
    parts, row, place = [], 0, 0
    for sequence, before, new in batch:
        parts.append(Part(sequence, row, new, before, place))
        row += new
        place += -(-(before + new) // page_tokens) * new
    return tuple(parts)


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
    """What the ops of one step mean for the kernels. ``pool`` is the pool's address."""

    def __init__(self, layout: Layout, pool: int, parts: tuple[Part, ...], scale: float, encoded: Encodings) -> None:
        self._layout, self._geometry, self._pool, self._scale = layout, layout.geometry, pool, scale
        self._encoded = encoded
        self._parts = {part.sequence: part for part in parts}
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

    def attend(self, op: Attend, first: frozenset[int], last: frozenset[int]) -> Draft:
        """``first`` and ``last``: the sequences for which this is the layer's first wave, and its last."""
        geometry = self._geometry
        running = op.fold == "running"
        pages, pointers, _ = self._encoded.of(op.entries)
        entries, runs = self._entries(pages)
        tables: tuple[Table, ...] = (pointers, entries, self._positions)
        if running:
            told = self._tiles(runs, first, last)
            tables, grid = (*tables, told), running_grid(len(told), geometry.kv_heads)
        elif self._places > self._layout.table_slots:
            raise StepError(f"the step has {self._places} partial results, the table holds {self._layout.table_slots}")
        else:
            rows_max = max(self._parts[sequence].rows for sequence, _, _ in runs)
            grid = table_grid(len(pages), geometry.kv_heads, rows_max, geometry.group)
        workspace = "state" if running else "table"
        acc = self._pool + self._layout.workspace(workspace).offset
        ml = self._pool + self._layout.workspace(f"{workspace}_ml").offset
        slots = len(pages)

        def args(at: Sequence[int], io: Io) -> tuple[int | float, ...]:
            return (io.q, at[0], at[0] + 8 * slots, at[1], at[2], at[3] if running else 0, acc, ml, io.out,
                    self._scale, geometry.kv_heads, geometry.group, geometry.page_tokens, geometry.k_type.code,
                    geometry.v_type.code, WINDOW_NONE)

        return Draft(f"kv_attend_{geometry.head_size}", grid, (attend_threads(geometry.head_size), 1, 1),
                     attend_shared_bytes(geometry.head_size, geometry.page_tokens, running), tables, args)

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
                yield self.attend(op, frozenset(key for key, wave in first.items() if wave is op),
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

    def _tiles(self, runs: Iterable[tuple[int, int, int]], first: frozenset[int], last: frozenset[int]) -> Table:
        """i32[tiles][8]: every sequence with pages in this wave, cut into tiles of 8 vectors."""
        made = []
        for sequence, start, entries in runs:
            part = self._parts[sequence]
            told = np.zeros((tiles(part.rows, self._geometry.group), 8), np.int32)
            told[:, :4] = start, entries, part.first_row, part.rows
            told[:, 4] = np.arange(len(told)) * VECTORS
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
