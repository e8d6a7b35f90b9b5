"""Does this device compute what numpy computes? Asked once, whenever a cache is opened.

An image that is wrong for a GPU need not fail: it has been seen to give garbage at normal speed. So before anything is
promised, a problem of 37 tokens with a known answer goes through the kernels that the cache will use, for its own
types and head size: rows are encoded into two pages, tables come from pinned memory by ``kv_tables``, the last tokens
attend the pages by the table and its fold, and by the running form in two waves. Encoded rows must be numpy's to the
last bit. Attention must be float64's up to rounding, and both forms must give the same bits.

Attention on tensor cores is asked about all the tokens at once, so that each place of its fragments matters. Nobody
needs it: where it is wrong the cache does without.

Where an answer is to be, rubbish is put first: fresh device memory may hold the answer of the process before.

Nothing is allocated: the pages are the first two cells, tables and results lie in the workspaces, and everything passes
through the slab, which is zero again afterwards. However small the opening is, this fits; what does not fit at once is
sent in pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import DeviceError
from .kernels import (
    TABLES_THREADS,
    TABLES_WORD_BYTES,
    TILE_BEGIN,
    TILE_END,
    VECTORS,
    WIDE_THREADS,
    WIDE_VECTORS,
    WINDOW_NONE,
    WRITE_THREADS,
    attend_shared_bytes,
    attend_threads,
    fold_grid,
    running_grid,
    table_grid,
    tables_grid,
    tiles,
    wide_shared_bytes,
    write_grid,
)
from .layout import STAGED, Layout
from .reference import attention
from .types import KVType, decode, encode

if TYPE_CHECKING:
    from .device import Bytes, Device, Stream

PAGES: Final = (32, 5)
"""Tokens of the two pages. Every page has room for 32."""
ROWS: Final = 2
TOLERANCE: Final = 1e-5  # of the largest value; rounding makes 1e-6
WIDE_TOLERANCE: Final = 5e-3  # rounding to f16 makes 1e-3
SEED: Final = 37
RUBBISH: Final = 0xFF
ADVICE: Final = (
    "The kernels' image does not fit this GPU or its driver, or the GPU is broken. Build the image on this machine "
    "with `just kernels` and open again; if that does not help, try a newer driver or another GPU, and report this")

Floats = NDArray[np.float32]


def check_numerics(device: Device, layout: Layout, pool: int, slab: Bytes, stream: Stream, wide: bool = False,
                   ) -> str | None:
    """``pool``: its address. Nobody else uses pool, slab or stream meanwhile. ``wide``: ask about attention on tensor
    cores too. Returned: what is wrong with that, if anything.

    *Errors*: ``DeviceError``, which says what is wrong, on which GPU, and what to do.
    """
    problem = _Problem(device, layout, pool, _Mover(device, stream, slab))
    try:
        wrong = [*problem.encoded(), *problem.attended()]
        wide_wrong = problem.attended_widely() if wide and not wrong else None
        problem.mover.tidy()
    except DeviceError as error:
        raise DeviceError(f"{device.name} fails at a problem of {problem.tokens} tokens: {error.message}. {ADVICE}"
                          ) from error
    if wrong:
        raise DeviceError(f"{device.name} does not compute what it should: {'; '.join(wrong)}. {ADVICE}")
    return wide_wrong


class _Mover:
    """Arrays to the device and back, through a window of pinned memory."""

    def __init__(self, device: Device, stream: Stream, window: Bytes) -> None:
        self.device, self.stream, self._window = device, stream, window
        self._used = self._touched = 0

    def send(self, address: int, values: NDArray[Any]) -> None:
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        while len(data):
            piece = self._piece(len(data))
            piece[:] = data[: len(piece)]
            self.device.copy_in(self.stream, address, piece)
            address, data = address + len(piece), data[len(piece) :]

    def read_by_kernel(self, address: int, data: Bytes) -> None:
        """Whole words, that ``kv_tables`` reads from the window itself."""
        while len(data):
            self.device.synchronize(self.stream)
            self._used = 0  # words lie at multiples of their size
            piece = self._piece(min(len(data), len(self._window) // TABLES_WORD_BYTES * TABLES_WORD_BYTES))
            piece[:] = data[: len(piece)]
            words = len(piece) // TABLES_WORD_BYTES
            self.device.launch(self.stream, "kv_tables", tables_grid(words), (TABLES_THREADS, 1, 1),
                               (self.device.mapped(piece), address, words, 0))
            address, data = address + len(piece), data[len(piece) :]

    def fetch(self, address: int, size: int) -> Bytes:
        fetched = np.empty(size, np.uint8)
        at = 0
        while at < size:
            piece = self._piece(size - at)
            self.device.copy_out(self.stream, piece, address + at)
            self.device.synchronize(self.stream)
            fetched[at : at + len(piece)] = piece
            at += len(piece)
        return fetched

    def tidy(self) -> None:
        self.device.synchronize(self.stream)
        self._window[: self._touched] = 0

    def _piece(self, size: int) -> Bytes:
        if self._used == len(self._window):
            self.device.synchronize(self.stream)
            self._used = 0
        piece = self._window[self._used : self._used + size]
        self._used += len(piece)
        self._touched = max(self._touched, self._used)
        return piece


class _Problem:
    def __init__(self, device: Device, layout: Layout, pool: int, mover: _Mover) -> None:
        self._device, self._layout, self._geometry, self._pool, self.mover = (
            device, layout, layout.geometry, pool, mover)
        geometry = self._geometry
        # A table with one place is all that some openings have.
        self._pages = PAGES if layout.table_slots > 1 else PAGES[:1]
        fits = layout.rows_max >= ROWS and layout.table_slots >= ROWS * len(self._pages)
        self._rows = ROWS if fits else 1
        self.tokens = sum(self._pages)
        dice = np.random.Generator(np.random.PCG64(SEED))
        self._k, self._v = dice.standard_normal((2, self.tokens, geometry.row_values), np.float32)
        every = dice.standard_normal((min(self.tokens, layout.rows_max), geometry.q_heads, geometry.head_size),
                                     np.float32)
        self._q, self._q_wide = every[: self._rows], every
        self._k_raw, self._v_raw = encode(geometry.k_type, self._k), encode(geometry.v_type, self._v)

    def _at(self, workspace: str) -> int:
        return self._pool + self._layout.workspace(workspace).offset

    # --- rows ---------------------------------------------------------------------------------------------------------

    def encoded(self) -> list[str]:
        """What is wrong with the rows that ``kv_write`` makes; they lie in the first cells afterwards."""
        geometry, layout, staged = self._geometry, self._layout, self._staged()
        places = {"K": self._places(layout.k_cell, geometry.k_row_bytes),
                  "V": self._places(layout.v_cell, geometry.v_row_bytes)}
        for addresses, raw in zip(places.values(), (self._k_raw, self._v_raw), strict=True):
            for first, tokens in self._runs():
                self.mover.send(addresses[first], np.full(tokens * raw.shape[1], RUBBISH, np.uint8))
        for start in range(0, self.tokens, layout.rows_max):
            some = slice(start, start + layout.rows_max)
            targets = np.array([places["K"][some], places["V"][some]], np.uint64)
            rows = targets.shape[1]
            for name, values in (("k", self._k), ("v", self._v)):
                self.mover.send(self._at(name), values[some])
            self.mover.send(staged, targets)
            self._launch("kv_write", write_grid(rows, geometry.row_values), WRITE_THREADS, 0,
                         self._at("k"), self._at("v"), staged, staged + 8 * rows, rows, geometry.row_values,
                         geometry.k_type.code, geometry.v_type.code)
        return [*self._same("K", geometry.k_type, places["K"], self._k_raw),
                *self._same("V", geometry.v_type, places["V"], self._v_raw)]

    def _places(self, cell: Any, row_bytes: int) -> list[int]:
        return [self._pool + cell(page) + token * row_bytes
                for page, tokens in enumerate(self._pages) for token in range(tokens)]

    def _runs(self) -> list[tuple[int, int]]:
        """Of each page: its first token, and how many it has."""
        return [(sum(self._pages[:page]), tokens) for page, tokens in enumerate(self._pages)]

    def _same(self, name: str, kind: KVType, places: list[int], raw: Bytes) -> list[str]:
        row_bytes = raw.shape[1]
        got = np.concatenate([self.mover.fetch(places[first], tokens * row_bytes).reshape(tokens, row_bytes)
                              for first, tokens in self._runs()])
        differ = int((got != raw).any(axis=1).sum())
        return [f"kv_write stores {differ} of {self.tokens} rows of {name} as other bytes than {kind} has"
                ] if differ else []

    # --- attention ----------------------------------------------------------------------------------------------------

    def attended(self) -> list[str]:
        pages, rows, page_tokens = len(self._pages), self._rows, self._geometry.page_tokens
        expected = self._expected(self._q)
        last = (pages - 1) * page_tokens + self._pages[-1]
        at = self._send_all(*self._pages_told(rows), np.arange(last - rows, last, dtype=np.int32),
                            np.array([(row, rows, pages, row) for row in range(rows)], np.int32),
                            *(self._tiles(page, rows, VECTORS) for page in range(pages)))
        self.mover.send(self._at("q"), self._q)

        folded = self._table(at)
        running = self._running("kv_attend", at[:3], at[4:], self._q)
        wrong = [*self._off("the table and its fold", folded, expected, TOLERANCE),
                 *self._off("the running form", running, expected, TOLERANCE)]
        if not wrong and folded.tobytes() != running.tobytes():
            wrong.append("the two forms of attention do not give the same bits")
        return wrong

    def attended_widely(self) -> str | None:
        rows = len(self._q_wide)
        positions = [page * self._geometry.page_tokens + token
                     for page, tokens in enumerate(self._pages) for token in range(tokens)]
        at = self._send_all(*self._pages_told(rows), np.array(positions[-rows:], np.int32),
                            *(self._tiles(page, rows, WIDE_VECTORS) for page in range(len(self._pages))))
        self.mover.send(self._at("q"), self._q_wide)
        got = self._running("kv_wide", at[:3], at[3:], self._q_wide)
        wrong = self._off("tensor cores", got, self._expected(self._q_wide), WIDE_TOLERANCE)
        return wrong[0] if wrong else None

    @property
    def _scale(self) -> float:
        return float(np.float32(self._geometry.head_size**-0.5))

    def _expected(self, q: Floats) -> NDArray[np.float64]:
        """Of the last tokens, as many as there are queries."""
        geometry = self._geometry
        shape = self.tokens, geometry.kv_heads, geometry.head_size
        k, v = (decode(kind, raw, geometry.row_values).reshape(shape) for kind, raw in (
            (geometry.k_type, self._k_raw), (geometry.v_type, self._v_raw)))
        return attention(q, k, v, range(self.tokens - len(q), self.tokens), self._scale)

    def _off(self, name: str, got: Floats, expected: NDArray[np.float64], tolerance: float) -> list[str]:
        geometry = self._geometry
        error = float(np.abs(got - expected).max() / np.abs(expected).max())
        if error <= tolerance:  # NaN is not
            return []
        return [f"attention by {name} is off by {error:.2g} of its largest value "
                f"(K {geometry.k_type}, V {geometry.v_type}, head size {geometry.head_size})"]

    def _pages_told(self, rows: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Where the pages are, and the entries for so many rows."""
        geometry = self._geometry
        cells = np.arange(len(self._pages), dtype=np.uint64)
        pointers = np.array([np.uint64(self._pool + start) + cells * np.uint64(size) for start, size in (
            (self._layout.k_cell(0), geometry.k_page_bytes), (self._layout.v_cell(0), geometry.v_page_bytes))])
        return pointers, np.array([(page, page * geometry.page_tokens, tokens, 0, rows, page * rows, 0, 0)
                                   for page, tokens in enumerate(self._pages)], np.int32)

    def _staged(self) -> int:
        return min(self._at(name) for name in STAGED)

    def _send_all(self, *tables: NDArray[Any]) -> list[int]:
        """Their addresses, one after the other where a step's tables lie."""
        staged, addresses = self._staged(), list[int]()
        parts: list[Bytes] = []
        for table in tables:
            addresses.append(staged + sum(len(part) for part in parts))
            parts.append(np.ascontiguousarray(table).reshape(-1).view(np.uint8))
            parts.append(np.zeros(-table.nbytes % TABLES_WORD_BYTES, np.uint8))
        told = np.concatenate(parts)
        if len(told) > self._layout.staging_bytes:
            raise DeviceError(f"{self._layout.staging_bytes} bytes of workspace have no room for a few tables")
        self.mover.read_by_kernel(staged, told)
        return addresses

    def _tiles(self, page: int, rows: int, vectors: int) -> NDArray[np.int32]:
        """Of the wave that has this page and no other."""
        told = np.zeros((tiles(rows, self._geometry.group, vectors), 8), np.int32)
        told[:, :4] = page, 1, 0, rows
        told[:, 4] = np.arange(len(told)) * vectors
        told[:, 5] = (TILE_BEGIN if page == 0 else 0) | (TILE_END if page == len(self._pages) - 1 else 0)
        return told

    def _table(self, at: list[int]) -> Floats:
        geometry = self._geometry
        self.mover.send(self._at("out"), np.full_like(self._q, np.nan))
        places = len(self._pages) * self._rows * geometry.q_heads
        for name, values in (("table", places * geometry.head_size), ("table_ml", places * 2)):
            self.mover.send(self._at(name), np.full(values, np.nan, np.float32))
        self._attend("kv_attend", at[:3],
                     table_grid(len(self._pages), geometry.kv_heads, self._rows, geometry.group), 0)
        self._launch(f"kv_fold_{geometry.head_size}", fold_grid(self._rows, geometry.q_heads), geometry.head_size, 0,
                     self._at("table"), self._at("table_ml"), at[3], self._at("out"), geometry.q_heads)
        return self._result(self._q)

    def _running(self, kernel: str, at: list[int], told: list[int], q: Floats) -> Floats:
        geometry = self._geometry
        count = tiles(len(q), geometry.group, WIDE_VECTORS if kernel == "kv_wide" else VECTORS)
        self.mover.send(self._at("out"), np.full_like(q, np.nan))
        for address in told:
            self._attend(kernel, at, running_grid(count, geometry.kv_heads), address)
        return self._result(q)

    def _attend(self, kernel: str, at: list[int], grid: tuple[int, int, int], told: int) -> None:
        geometry, running = self._geometry, told != 0
        workspace = "state" if running else "table"
        threads = attend_threads(geometry.head_size)
        shared_bytes = attend_shared_bytes(geometry.head_size, geometry.page_tokens, running)
        if kernel == "kv_wide":
            threads, shared_bytes = WIDE_THREADS, wide_shared_bytes(geometry.head_size)
        self._launch(f"{kernel}_{geometry.head_size}", grid, threads, shared_bytes,
                     self._at("q"), at[0], at[0] + 8 * len(self._pages), at[1], at[2], told, self._at(workspace),
                     self._at(f"{workspace}_ml"), self._at("out"), self._scale, geometry.kv_heads, geometry.group,
                     geometry.page_tokens, geometry.k_type.code, geometry.v_type.code, WINDOW_NONE)

    def _result(self, q: Floats) -> Floats:
        return self.mover.fetch(self._at("out"), q.nbytes).view(np.float32).reshape(q.shape)

    def _launch(self, kernel: str, grid: tuple[int, int, int], threads: int, shared_bytes: int,
                *args: int | float) -> None:
        self._device.launch(self.mover.stream, kernel, grid, (threads, 1, 1), args, shared_bytes)
