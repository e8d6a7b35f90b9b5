"""One step as a frozen list of operations: what is copied when, what waits for what, which pages are attended together.

Theory of operation. A step runs all layers for some new tokens of some sequences, and each layer looks at every page of
each of them, from the first to the tail. The pages of the step are put in an order that does not change (sequences by
creation, then by place, shared pages once). Of each layer the split names how many of the first ones are *kept*; tails,
the pages that grow, are kept always. What is kept and not there yet is fetched. All other pages *pass*: in every step
they are uploaded into the ring, attended and dropped.

**The stream of uploads** is the layers in order, and in each layer its pages in order, cut into chunks. A chunk has one
``Ready``, is attended by one *wave* and frees its cells together. Uploads are enqueued as early as cells allow: at the
beginning of the step as much as the ring takes, then again after each wave. So while a layer computes, copies are in
later layers already, and after the last layer in the first layers of the next step, whatever the width of the step is.
Where the ring is smaller than what a layer streams, the layer simply takes several turns.

**The ring** goes round a whole number of times per step: of its cells only so many are used that the last lap is (all
but) full. Then a page has the same cell in every step, the operations of two steps are equal but for the rows that are
written, and the second is made of the first (``memo``).

**New rows** usually fit in the tail. A wide step fills pages: those that are not kept live in a few cells of their own,
the *zone*, for the time of one layer. The next layer writes there once the rows are saved.

**A new split** frees and fetches the difference. Pages that were kept and now pass are not dropped at once: they are in
the ring already, so this step need not upload them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Final, Protocol

import numpy as np
from attrs import define, evolve

from ..core.types import AccountingBug
from .demand import Demand, Part, Shares, demand_of, kept_of, parts_of
from .ops import PAGES_PER_COPY_MAX, Await, Entry, Fold, Folding, Op
from .placing import place
from .ring import FREE, SAVE, Cells, Ids, Residency
from .steady import MEMOS_MAX, Counts, Memo, Plan, Rows, rewritten, rows_of, unsettled_after

__all__ = ["Counts", "Plan", "Shape", "plan_step"]

WAVE_PAGES_MAX: Final = PAGES_PER_COPY_MAX
WAVES_PER_RING: Final = 4  # while one is attended, three are on their way
TABLE_ROWS_MAX: Final = 32  # of one sequence; more are a prefill, where the running form reads each page once for all


class Shape(Protocol):
    """What is needed of a ``layout.Geometry``."""

    @property
    def layers(self) -> int: ...

    @property
    def page_tokens(self) -> int: ...


def plan_step(
    residency: Residency, split: Shares, batch: Sequence[tuple[int, int, int]], tables: Mapping[int, tuple[int, ...]],
    geometry: Shape, *, table_slots: int | None = None, ahead: bool = True,
) -> Plan:
    """The plan of one step.

    *batch*: (sequence, tokens before, new tokens), rows in this order; ids ascend with creation. *tables*: of each
    sequence its host pages, at least those for all its tokens; pages that are written belong to nobody else.
    *table_slots*: partial results (a row over a page) that fit in the table; steps with more use the running form.
    *ahead*: copy for the next step already, as if it had the same sequences. Pure: the residency passed in stays valid.

    Errors: ``AccountingBug`` for a batch that cannot be, or a pool with fewer than ``layout.cells_min`` cells.
    """
    if not len(split.layer_pages) == geometry.layers == len(residency.held.cell_of):
        raise AccountingBug(f"a split of {len(split.layer_pages)} layers and a model of {geometry.layers}")
    parts = parts_of(batch, tables, geometry.page_tokens)
    fold = _folding(parts, table_slots)
    memos: tuple[Memo, ...] = residency.memos
    rows = rows_of(parts, geometry.page_tokens)
    again = rewritten(residency.unsettled, rows)
    for memo in memos:
        if memo.fits(residency, split, parts, fold, ahead, bool(again)):
            return memo.repeated(residency, rows, again)
    return _Step(residency, split, demand_of(parts), rows, again, geometry, fold, ahead).plan()


def _folding(parts: tuple[Part, ...], table_slots: int | None) -> Folding:
    narrow = max(part.new for part in parts) <= TABLE_ROWS_MAX
    slots = sum(part.new * len(part.pages) for part in parts)
    return "table" if narrow and (table_slots is None or slots <= table_slots) else "running"


@define(eq=False)
class _Chunk:
    """Pages of one layer that are uploaded, awaited and attended together. ``order``: its place in the stream of
    uploads. ``turn``: the place of its first page among all pages that pass, or -1 when the pages are kept."""

    order: int
    layer: int
    pages: Ids
    turn: int
    batch: int = -1

    @property
    def passing(self) -> bool:
        return self.turn >= 0


class _Step:
    """Builds the plan of one step."""

    def __init__(self, residency: Residency, split: Shares, demand: Demand, rows: Rows, again: tuple[int, ...],
                 geometry: Shape, fold: Folding, ahead: bool) -> None:
        self.start, self.split, self.demand, self.fold, self.ahead = residency, split, demand, fold, ahead
        self.page_tokens = geometry.page_tokens
        self.rows, self.again = rows, again
        self.cells = Cells(residency.held)
        self.kept = kept_of(split.layer_pages, demand, residency.cells)
        self.places = place(self.cells, demand, self.kept, split.ring)
        self.keepers_used = 0
        self.ring = self.places.ring
        self.free = np.zeros(residency.cells, np.bool_)  # cells of the ring without a page
        self.free[self.ring] = self.cells.holder[self.ring] == FREE
        self.left = np.full(residency.cells, FREE, np.int64)  # what was last in a cell of the ring, as in `holder`
        self.found = list(self.places.found)
        self.zone = list(self.places.zone)
        self.waited: list[int] = []  # layers in which rows that are written again were waited for
        self.fresh: list[int] = []  # pages that are new in their cells
        self.settled = True  # whether all pages that are written had a cell already
        self.count = {"found": len(self.found), "moved": self.places.moved, "freed": self.places.freed}
        self.layer = 0  # whose turn it is
        self.written = -1  # the last layer whose new rows are written
        self.stream: list[_Chunk] = []
        self.at = 0  # the first chunk that is not uploaded yet
        self.firsts: list[_Chunk | None] = []  # of each layer, pages that must be there before rows are written
        self.waves: list[list[_Chunk]] = []  # of each layer, what is attended chunk by chunk
        self.next: list[_Chunk] = []  # how the stream of the next step begins
        self.next_at = 0
        self._cut()

    def plan(self) -> Plan:
        residency = self.start
        self._fill()
        begin = self._enqueued()
        before, append, attend = [], [], []
        for layer in range(len(self.waves)):
            self.layer = layer
            before.append(self._prepared())
            append.append((*before[-1], *self._appended()))
            attend.append(self._attended())
        counts = Counts(**self.count)
        after, memos = self.cells.settled(), residency.memos
        after = next((held for held in (residency.held, *(memo.held for memo in memos)) if after.same(held)), after)
        unsettled = unsettled_after(residency.unsettled, self.rows, self.again, bool(self.waited))
        plan = Plan(begin, tuple(append), tuple(attend), (), Residency(after, unsettled, memos), counts)
        return evolve(plan, residency=evolve(plan.residency, memos=self._memos(plan, tuple(before))))

    def _memos(self, plan: Plan, before: tuple[tuple[Op, ...], ...]) -> tuple[Memo, ...]:
        """With one of this plan if it can be repeated: pages that are written were in their cells, nothing was waited
        for before the rows, or only, at once, that those which are written again are saved."""
        found, left, parts = self.start.held, plan.residency.held, self.demand.parts
        wide = any(part.first < len(part.pages) - 1 for part in parts)
        late = any(isinstance(op, Await) for ops in plan.append for op in ops)
        if wide or late or not self.settled or self.waited != [0] * bool(self.again):
            return plan.residency.memos
        cells = tuple(tuple(int(left.cell_of[layer, part.pages[-1]]) for part in parts)
                      for layer in range(len(before)))
        memo = Memo(found, left, tuple(self.split.layer_pages), self.split.ring, parts, self.fold, self.ahead,
                    bool(self.again), plan.begin, before, cells, plan.attend, plan.end,
                    self.cells.clocks.noted(SAVE), plan.counts)
        return memo, *self.start.memos[: MEMOS_MAX - 1]

    def _enqueued(self) -> tuple[Op, ...]:
        ops = tuple(self.cells.out)
        self.cells.out = []
        return ops

    def _add(self, name: str, number: int) -> None:
        self.count[name] = self.count.get(name, 0) + number

    # --- the stream of uploads ----------------------------------------------------------------------------------------

    def _cut(self) -> None:
        """Cut what each layer needs into chunks."""
        circle = len(self.places.ring) if self.kept.passing else 0
        size = WAVE_PAGES_MAX if circle == 0 else max(1, circle // WAVES_PER_RING)
        size = min(WAVE_PAGES_MAX, size)
        pages = np.array(self.demand.pages, np.int64)
        plain = np.ones(len(pages), np.bool_)
        plain[list(self.demand.filled)] = False
        turn = next_turn = 0
        for layer, kept in enumerate(self.kept.layer_pages):
            held = self.cells.cell_of[layer]
            growing = [part.pages[part.first] for part in self.demand.parts if part.before % self.page_tokens]
            keep = frozenset((*self.demand.pages[:kept], *self.demand.tails))
            missing = np.array([page for page in growing if page in keep and held[page] == FREE], np.int64)
            self.firsts.append(self._chunk(self.stream, layer, missing, -1) if len(missing) else None)
            coming = self.cells.coming(held[pages[:kept]]) & plain[:kept]
            fetched, passing = pages[:kept][coming], pages[kept:][plain[kept:]]
            chunks = [self._chunk(self.stream, layer, fetched[at : at + size], -1)
                      for at in range(0, len(fetched), size)]
            chunks += [self._chunk(self.stream, layer, passing[at : at + size], turn + at)
                       for at in range(0, len(passing), size)]
            self.waves.append(chunks)
            turn += len(passing)
            then = pages[kept:]
            for at in range(0, len(then), size):
                self._chunk(self.next, layer, then[at : at + size], next_turn + at)
            next_turn += len(then)

    @staticmethod
    def _chunk(stream: list[_Chunk], layer: int, pages: Ids, turn: int) -> _Chunk:
        chunk = _Chunk(len(stream), layer, pages, turn)
        stream.append(chunk)
        return chunk

    def _fill(self, must: _Chunk | None = None) -> None:
        """Enqueue uploads as far as there are cells; up to ``must`` in any case."""
        while self.at < len(self.stream):
            chunk = self.stream[self.at]
            if not self._upload(chunk, must is not None and chunk.order <= must.order):
                return
            self.at += 1
        if self.ahead:
            self._fill_ahead()

    def _upload(self, chunk: _Chunk, must: bool) -> bool:
        """As much of a chunk as there are cells for; whether that was all."""
        missing = (self.cells.cell_of[chunk.layer, chunk.pages] == FREE).nonzero()[0]
        into = self._cells_for(chunk, missing, must) if len(missing) else missing
        if len(into):
            pages = chunk.pages[missing[: len(into)]]
            self.cells.hold(chunk.layer, pages, into)
            self._copied(chunk, pages, into)
        if len(into) < len(missing):
            return False
        if chunk.batch >= 0:
            self.cells.ready(chunk.batch)
        return True

    def _copied(self, chunk: _Chunk, pages: Ids, into: Ids, ahead: bool = False) -> None:
        if chunk.batch < 0:
            chunk.batch = self.cells.clocks.batch(ahead)
        self._add("copies", self.cells.upload(chunk.layer, pages, into, chunk.batch))
        self._add("uploads", len(pages))
        if not chunk.passing:
            self._add("fetched", len(pages))
        if ahead:
            self._add("ahead", len(pages))
        elif chunk.layer > self.layer:
            self._add("early", len(pages))

    def _cells_for(self, chunk: _Chunk, missing: Ids, must: bool) -> Ids:
        """Cells for the pages of a chunk at these places, or for the first few of them."""
        if not chunk.passing:
            self.keepers_used += len(missing)
            return self.places.keepers[self.keepers_used - len(missing) : self.keepers_used]
        homes = self.ring[(chunk.turn + missing) % len(self.ring)]
        free = self.free[homes]
        cells = homes if free.all() else homes[: free.argmin()]
        self.free[cells] = False
        if len(cells) == len(homes):
            return cells
        # The ring is full, or not in step yet: any cell will do.
        others = self.free.nonzero()[0][: len(homes) - len(cells)]
        self.free[others] = False
        cells = np.concatenate((cells, others))
        while must and len(cells) < len(homes):
            cells = np.append(cells, self._taken_back())
        return cells

    def _taken_back(self) -> Ids:
        """The cell of the last page that was found in the ring; it will have to come again."""
        while True:
            layer, page = self.found.pop()
            if self.cells.cell_of[layer, page] != FREE:
                self._add("freed", 1)
                self._add("found", -1)
                return self.cells.drop(layer, np.array([page]))

    def _fill_ahead(self) -> None:
        """Whole chunks of the next step, each page in the cell that it will have in every step."""
        while self.next_at < len(self.next):
            chunk = self.next[self.next_at]
            homes = self.ring[chunk.turn : chunk.turn + len(chunk.pages)]
            if (chunk.layer > self.written or len(homes) < len(chunk.pages) or not self.free[homes].all()
                    or (self.cells.cell_of[chunk.layer, chunk.pages] != FREE).any()):
                return
            self.free[homes] = False
            self.cells.hold(chunk.layer, chunk.pages, homes)
            gone = self.left[homes] != self.cells.holder[homes]
            if gone.any():
                self._copied(chunk, chunk.pages[gone], homes[gone], ahead=True)
                self.cells.ready(chunk.batch)
            self.next_at += 1

    # --- one layer ----------------------------------------------------------------------------------------------------

    def _prepared(self) -> tuple[Op, ...]:
        """A cell for each page in which rows are written, with the rows it had before."""
        layer, cells = self.layer, self.cells
        first = self.firsts[layer]
        if first is not None:
            self._fill(first)
        kept = frozenset((*self.demand.pages[: self.kept.layer_pages[layer]], *self.demand.tails))
        self.fresh = []
        for part in self.demand.parts:
            for index in range(part.first, len(part.pages)):
                page = part.pages[index]
                if cells.cell_of[layer, page] != FREE:
                    if page not in kept:  # its cell becomes one of the zone, and the ring gets another for it
                        self.found.remove((layer, page))
                        self.free[self.zone.pop()] = True
                    continue
                self.settled = False
                chunk = _Chunk(-1, layer, np.array([page]), -1)
                cell = self._cells_for(chunk, np.array([0]), True) if page in kept else np.array([self.zone.pop()])
                cells.hold(layer, chunk.pages, cell)
                if index == part.first and part.before % self.page_tokens:  # rows that are only on the host
                    self._copied(chunk, chunk.pages, cell)
                    cells.ready(chunk.batch)
                else:
                    self.fresh.append(page)
        return self._enqueued()

    def _appended(self) -> tuple[Op, ...]:
        if self.cells.write(self.layer, self.rows, self.fresh, self.again):
            self.waited.append(self.layer)
        self.written = self.layer
        return self._enqueued()

    def _attended(self) -> tuple[Op, ...]:
        """Wave 0 is of what is there; then one wave for each chunk. In the running form, pages wait for those before
        them."""
        layer, cells, chunks = self.layer, self.cells, self.waves[self.layer]
        wave_of = np.zeros(cells.pages, np.int32)
        for wave, chunk in enumerate(chunks, 1):
            wave_of[chunk.pages] = wave
        tables = [(part.sequence, np.array(part.pages, np.int64)) for part in self.demand.parts]
        waves = [wave_of[pages] for _, pages in tables]
        if self.fold == "running":
            waves = [np.maximum.accumulate(wave) for wave in waves]
        orders = [wave.argsort(kind="stable") for wave in waves]
        starts = [wave[order].searchsorted(range(len(chunks) + 2)).tolist()
                  for wave, order in zip(waves, orders, strict=True)]
        number = 0
        for wave in range(len(chunks) + 1):
            if wave:
                self._fill(chunks[wave - 1])
            entries: list[Entry] = []
            into = []
            for (sequence, pages), order, start in zip(tables, orders, starts, strict=True):
                index = order[start[wave] : start[wave + 1]]
                into.append(cells.cell_of[layer, pages[index]])
                entries += zip(repeat(sequence), index.tolist(), into[-1].tolist())
            if entries:
                cells.attend(layer, number, tuple(entries), np.concatenate(into), self.fold, last=wave == len(chunks))
                number += 1
            if wave:
                self._release(chunks[wave - 1])
        written = frozenset(page for _, _, page, _ in self.rows)
        passed = [page for page in self.demand.pages[self.kept.layer_pages[layer] :] if page in written]
        self.zone += cells.drop(layer, np.array(passed, np.int64)).tolist()
        self._add("waves", number)
        if self.fold == "table":
            cells.out.append(Fold(layer))
        return self._enqueued()

    def _release(self, chunk: _Chunk) -> None:
        if chunk.passing:
            cells = self.cells.drop(chunk.layer, chunk.pages)
            self.free[cells] = True
            self.left[cells] = chunk.layer * self.cells.pages + chunk.pages
        self._fill()
