"""Puts what the kernels are told on the device: a step's tables, or what has changed in them since the step before.

Theory of operation. On the host the tables are written into one of two pinned stagings in turn, so the host may prepare
the next while the last is still being read. A kernel on the compute stream (``kv_tables``) reads them from there into a
region of the pool. A copy would do the same, but would stand in the queue of the copy engine behind all pages that are
sent ahead, and the computation behind it.

A step that has more to tell than the region holds, which takes very many waves of very many rows, sends it in several
loads, each before the first launch that reads it, hence after all launches that read the load before.

**Repetition.** As long as a plan repeats (``steady``), each step's tables are those of the step before, but for the
positions, the addresses of the new rows, and how many rows there are in the page that grows. So these words alone are
sent, and nothing else is computed anew: some hundred bytes instead of half a megabyte at 160,000 tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ..errors import StepError
from .kernels import ENTRY_INTS, TABLES_THREADS, TABLES_WORD_BYTES, tables_bytes, tables_grid
from .launches import Draft, Part
from .layout import Geometry

if TYPE_CHECKING:
    from .device import Bytes, Device, Event, Stream

WORD: Final = TABLES_WORD_BYTES
TOKENS_COLUMN: Final = 2  # of an entry

Words = NDArray[np.uint8]
"""u8[words][16]"""
Offsets = NDArray[np.int64]


@frozen(eq=False)
class Placed:
    """A launch and where its tables are."""

    draft: Draft
    addresses: tuple[int, ...]


class Loads:
    """``region`` and the stagings are as large as each other and begin at multiples of 16."""

    def __init__(self, device: Device, stream: Stream, region: int, stagings: tuple[Bytes, Bytes],
                 on_load: Callable[[int, bool], None]) -> None:
        self._device, self._stream, self._region, self._stagings = device, stream, region, stagings
        self._mapped = tuple(device.mapped(staging) for staging in stagings)
        self._on_load = on_load  # told (bytes, whether the host had to wait)
        self._sent: list[Event | None] = [None, None]
        self._turn = 0
        self._waited = False
        self._drafts: Iterator[Draft] = iter(())
        self._next: Draft | None = None
        self._placed: deque[Placed] = deque()
        self._all: tuple[Placed, ...] = ()  # of the step, if one load was enough

    def begin(self, drafts: Iterator[Draft]) -> None:
        """The launches of a step, in the order in which ``take`` will be called."""
        self._drafts = drafts
        self._next = next(drafts, None)
        self._placed.clear()
        self._load()
        self._all = tuple(self._placed) if self._next is None else ()

    def again(self, words: Words, places: NDArray[np.int32]) -> None:
        """The launches of the step before once more, and of their tables only these words are others. Only after a
        step that was told ``at_once``."""
        turn = self._free_staging()
        staging, number = self._stagings[turn], len(words)
        staging[: WORD * number].reshape(-1, WORD)[:] = words
        staging[WORD * number : tables_bytes(number, True)].view(np.int32)[:] = places
        self._placed = deque(self._all)
        self._send(turn, number, scattered=True)

    def at_once(self) -> tuple[tuple[Placed, ...], Bytes]:
        """All launches of the step that has begun, and the tables as they were sent; no launches if it took several
        loads."""
        return self._all, self._stagings[1 - self._turn]

    def take(self, *kernels: str) -> Placed:
        """The next launch, of one of these kernels. Its tables are on the device as far as the compute stream is
        concerned."""
        if not self._placed:
            self._load()
        if not self._placed or not self._placed[0].draft.kernel.startswith(kernels):
            raise StepError(f"the step has no launch of {' or '.join(kernels)} now")
        return self._placed.popleft()

    def clear(self) -> None:
        self._drafts, self._next = iter(()), None
        self._placed.clear()
        self._all = ()
        self._sent = [None, None]

    def _free_staging(self) -> int:
        turn, self._turn = self._turn, 1 - self._turn
        sent = self._sent[turn]
        self._waited = sent is not None and not self._device.query(sent)
        if self._waited:
            self._device.synchronize(self._stream)
        return turn

    def _send(self, turn: int, words: int, scattered: bool) -> None:
        self._device.launch(self._stream, "kv_tables", tables_grid(words), (TABLES_THREADS, 1, 1),
                            (self._mapped[turn], self._region, words, int(scattered)))
        self._sent[turn] = self._device.record(self._stream)
        self._on_load(tables_bytes(words, scattered), self._waited)

    def _load(self) -> None:
        if self._next is None:
            return
        turn = self._free_staging()
        staging = self._stagings[turn]
        known: dict[int, int] = {}
        used = 0
        while self._next is not None:
            fresh = [table for table in self._next.tables if id(table) not in known]
            needed = sum(_padded(table.nbytes) for table in fresh)
            if used + needed > len(staging):
                if not used:
                    raise StepError(f"a launch of {self._next.kernel} needs {needed} bytes of tables, there are "
                                    f"{len(staging)}")
                break
            for table in fresh:
                if id(table) not in known:
                    staging[used : used + table.nbytes] = table.reshape(-1).view(np.uint8)
                    known[id(table)] = used
                    used += _padded(table.nbytes)
            addresses = tuple(self._region + known[id(table)] for table in self._next.tables)
            self._placed.append(Placed(self._next, addresses))
            self._next = next(self._drafts, None)
        self._send(turn, used // WORD, scattered=False)


def _padded(size: int) -> int:
    return -(-size // WORD) * WORD


class Steady:
    """What one step has told, to tell the next one the difference. ``of`` makes one if the next step may repeat it."""

    def __init__(self, waves: object, parts: tuple[Part, ...], geometry: Geometry, placed: Sequence[Placed],
                 tables: Bytes, region: int) -> None:
        self._waves, self._shape, self._page_tokens = waves, _shape(parts, geometry), geometry.page_tokens
        self._row_bytes = np.array([[geometry.k_row_bytes], [geometry.v_row_bytes]], np.int64)
        positions, targets, growing, ends = self._places(parts, geometry, placed, region)
        touched = np.concatenate([positions, targets.reshape(-1), growing])
        words = np.unique(touched // WORD)
        self.places = words.astype(np.int32)
        self._words: Words = tables[: len(tables) // WORD * WORD].reshape(-1, WORD)[words]
        at = np.searchsorted(words, touched // WORD) * WORD + touched % WORD
        rows = len(positions)
        self._positions_at, self._growing_at = at[:rows] // 4, at[rows + targets.size :] // 4
        self._targets_at = (at[rows : rows + targets.size] // 8).reshape(targets.shape)
        self._ends = ends
        tokens = _positions(parts) % self._page_tokens
        self._rows_at = self._words.view(np.int64).reshape(-1)[self._targets_at] - tokens * self._row_bytes

    @classmethod
    def of(cls, waves: object, parts: tuple[Part, ...], geometry: Geometry, loads: Loads, region: int) -> Steady | None:
        """``waves``: an object that is the same in steps whose plans are equal but for the rows."""
        placed, tables = loads.at_once()
        size = geometry.page_tokens
        if not placed or any(part.before // size != (part.after - 1) // size for part in parts):
            return None
        made = cls(waves, parts, geometry, placed, tables, region)
        return made if tables_bytes(len(made.places), True) <= len(tables) else None

    def fits(self, waves: object, parts: tuple[Part, ...], geometry: Geometry) -> bool:
        return waves is self._waves and _shape(parts, geometry) == self._shape

    def words(self, parts: tuple[Part, ...]) -> Words:
        """What is at ``places`` in a step that fits."""
        positions = _positions(parts)
        tokens = positions % self._page_tokens
        ints = self._words.view(np.int32).reshape(-1)
        ints[self._positions_at] = positions
        ints[self._growing_at] = np.array([part.after for part in parts])[self._ends[0]] - self._ends[1]
        self._words.view(np.int64).reshape(-1)[self._targets_at] = self._rows_at + tokens * self._row_bytes
        return self._words

    @staticmethod
    def _places(parts: tuple[Part, ...], geometry: Geometry, placed: Sequence[Placed],
                region: int) -> tuple[Offsets, Offsets, Offsets, tuple[Offsets, Offsets]]:
        """Offsets in the region of what changes: the positions[rows], the targets[layers][2][rows], for each growing
        page of each layer how much it holds, and of these (which part, position of the page)."""
        rows = sum(part.rows for part in parts)
        first_rows = {part.first_row: number for number, part in enumerate(parts)}
        tails = np.array([(geometry.pages(part.after) - 1) * geometry.page_tokens for part in parts])
        positions = np.zeros(0, np.int64)
        targets, growing, owners = [], [], []
        for launch in placed:
            at = [address - region for address in launch.addresses]
            if launch.draft.kernel == "kv_write":
                targets.append(at[0] + 8 * np.arange(2 * rows).reshape(2, rows))
            elif launch.draft.kernel.startswith(("kv_attend", "kv_wide")):
                entries = launch.draft.tables[1]
                last = np.flatnonzero(entries[:, 1] >= tails.min())
                of = np.array([first_rows[row] for row in entries[last, 3].tolist()], np.int64)
                last, of = last[entries[last, 1] == tails[of]], of[entries[last, 1] == tails[of]]
                growing.append(at[1] + 4 * (ENTRY_INTS * last + TOKENS_COLUMN))
                owners.append(of)
                positions = at[2] + 4 * np.arange(rows)
        of = np.concatenate(owners)
        return positions, np.array(targets), np.concatenate(growing), (of, tails[of])


def _shape(parts: tuple[Part, ...], geometry: Geometry) -> tuple[tuple[int, ...], ...]:
    return tuple((part.sequence, part.first_row, part.rows, part.place, geometry.pages(part.after)) for part in parts)


def _positions(parts: tuple[Part, ...]) -> Offsets:
    return np.concatenate([np.arange(part.before, part.after) for part in parts])
