"""Which page is in which cell, and what the three streams know of each other: a state machine over the pool's cells.

Theory of operation. A cell is *free*, or it *holds* one page of one layer. A held page is *in transit* while its upload
may still be running, and it is *there* once the compute stream has waited for it. A planner takes a free cell with
``hold``, lets ``upload`` or ``write`` fill it, ``attend`` reads it, and ``drop`` frees it. Freeing is only forgetting:
kernels that read the cell may still be running then. What makes that safe is order, and order is kept here.

**Order.** Every operation has a *position*, a count on its own stream. For each cell the last positions that touched it
are remembered (``used`` by compute, ``loaded`` by copy, ``taken`` by save), and for each page of each layer the last
upload that read it from host memory (``read``) and the last save that wrote it there (``written``). Each stream *knows*
how far the others have come: what it has waited for, and what those had waited for. An operation that needs a position
its stream does not know yet is preceded by a wait, and only then. So no wait is missing and none is superfluous: with
any event taken out, something is no longer ordered (the tests take out each).

**Events.** Whoever has to wait for compute or save gets a record made on the spot (``Used``, ``Saved``), which covers
all that was enqueued there so far. Only uploads are waited for long after they were enqueued; they have a ``Ready`` per
batch.

**Between steps** a ``Residency`` is a frozen value. Positions are counted anew in each step; what older ones still mean
is in their order, so three ranks are left: known to everybody, known to some, known to nobody. That makes two steps
that do the same end in states that are equal, which is how a planner sees that it may use a plan again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
from attrs import evolve, field, frozen
from numpy.typing import NDArray

from ..core.types import AccountingBug
from .ops import (
    PAGES_PER_COPY_MAX,
    AfterSaved,
    AfterUse,
    AfterWritten,
    Attend,
    Await,
    AwaitSaved,
    Entry,
    Folding,
    Op,
    Ready,
    Save,
    Saved,
    Upload,
    Used,
    Write,
    Written,
)

COMPUTE, COPY, SAVE = 0, 1, 2
NEVER: Final = -(1 << 40)  # a position that every stream knows
FREE: Final = -1

Vector: TypeAlias = tuple[int, int, int]
Positions: TypeAlias = NDArray[np.int64]
Ids: TypeAlias = NDArray[np.int64]
"""Pages or cells."""
Spans: TypeAlias = tuple[tuple[int, int], ...]
"""Rows [from, to) of a page, ascending and apart."""


@frozen(eq=False)
class Held:
    """Cells, and positions as they are between two steps. Arrays are never changed.

    ``cell_of``[layer, host page] and ``holder``[cell] (layer * host pages + page) are each other's inverse.
    """

    cell_of: Ids
    holder: Ids
    used: Positions
    loaded: Positions
    taken: Positions
    read: Positions
    written: Positions
    known: tuple[Vector, Vector, Vector]
    ready: tuple[tuple[int, Vector], ...]

    def same(self, other: Held) -> bool:
        return (self.known == other.known and self.ready == other.ready
                and all(np.array_equal(getattr(self, name), getattr(other, name))
                        for name in ("holder", "cell_of", "used", "loaded", "taken", "read", "written")))


@frozen(eq=False)
class Residency:
    """What a step finds and what it leaves.

    ``unsettled``: rows of host pages whose save compute has not waited for; to write them again needs a wait.
    ``memos`` belong to the planner.
    """

    held: Held
    unsettled: Mapping[int, Spans] = field(factory=lambda: MappingProxyType({}))
    memos: tuple[Any, ...] = field(default=(), repr=False)

    @classmethod
    def empty(cls, layers: int, host_pages: int, cells: int) -> Residency:
        of_cell = np.full(cells, NEVER, np.int64)
        of_page = np.full((layers, host_pages), NEVER, np.int64)
        none = (NEVER, NEVER)
        known = ((0, *none), (NEVER, 0, NEVER), (*none, 0))
        return cls(Held(np.full((layers, host_pages), FREE, np.int64), np.full(cells, FREE, np.int64),
                        of_cell, of_cell, of_cell, of_page, of_page, known, ()))

    @property
    def cells(self) -> int:
        return len(self.held.holder)

    def cell(self, layer: int, page: int) -> int | None:
        """Where a page is, or will be once its upload is done."""
        cell = int(self.held.cell_of[layer, page])
        return None if cell == FREE else cell

    def pages_held(self, layer: int) -> int:
        return int(np.count_nonzero(self.held.cell_of[layer] != FREE))

    def without(self, pages: Iterable[int]) -> Residency:
        """After host pages were given back, or changed by somebody else: their copies on the device mean nothing.

        It says nothing of transfers that are under way: whoever writes the page from the host has to synchronise first.
        """
        gone = [page for page in pages if page in self.unsettled or (self.held.cell_of[:, page] != FREE).any()]
        if not gone:
            return self
        cell_of, holder = self.held.cell_of.copy(), self.held.holder.copy()
        cells = cell_of[:, gone].ravel()
        holder[cells[cells != FREE]] = FREE
        cell_of[:, gone] = FREE
        unsettled = {page: spans for page, spans in self.unsettled.items() if page not in gone}
        return Residency(evolve(self.held, cell_of=cell_of, holder=holder), MappingProxyType(unsettled))

    def synchronized(self) -> Residency:
        """After the host has waited for all three streams: nothing is under way, nothing has to be waited for."""
        layers, host_pages = self.held.cell_of.shape
        fresh = Residency.empty(layers, host_pages, self.cells).held
        return Residency(evolve(fresh, cell_of=self.held.cell_of, holder=self.held.holder))


class Clocks:
    """``known[x][y]``: the position of stream y that x is sure to come after; ``known[x][x]`` is where x itself is."""

    __slots__ = ("_last", "_names", "known", "open", "ready")

    def __init__(self, known: Sequence[Vector], ready: Iterable[tuple[int, Vector]]) -> None:
        self.known = [list(vector) for vector in known]
        self.ready: dict[int, Vector] = dict(ready)  # in the order of the copy stream; only what compute may wait for
        self.open: set[int] = set()  # batches that have a name and no record yet
        self._last: dict[int, tuple[int, Vector]] = {}
        self._names = [0, 0, 0]

    def did(self, stream: int) -> int:
        """The position of the operation that is enqueued now."""
        self.known[stream][stream] += 1
        return self.known[stream][stream]

    def vector(self, stream: int) -> Vector:
        compute, copy, save = self.known[stream]
        return compute, copy, save

    def join(self, stream: int, vector: Vector) -> None:
        mine = self.known[stream]
        for of in range(3):
            if vector[of] > mine[of]:
                mine[of] = vector[of]

    def note(self, stream: int) -> tuple[int, bool]:
        """The name of a record of all that is enqueued on a stream; whether it has yet to be made."""
        vector = self.vector(stream)
        name, last = self._last.get(stream, (FREE, None))
        if last == vector:
            return name, False
        name = self._names[stream]
        self._names[stream] += 1
        self._last[stream] = name, vector
        return name, True

    def noted(self, stream: int) -> int:
        """Names used up so far."""
        return self._names[stream]

    def batch(self, ahead: bool) -> int:
        """The smallest name that no batch on its way has. Batches for the next step have odd ones, so that they have
        the same in every step, whatever is still on its way in this one."""
        name = int(ahead)
        while name in self.ready or name in self.open:
            name += 2
        self.open.add(name)
        return name


class Cells:
    """A working copy of what is held. Operations go to ``out``, each after the waits that it needs.

    Errors: ``AccountingBug`` for a transition that does not exist.
    """

    def __init__(self, held: Held) -> None:
        self.out: list[Op] = []
        self.pages = held.cell_of.shape[1]
        self.cell_of = held.cell_of.copy()
        self.holder = held.holder.copy()
        self.used, self.loaded, self.taken = held.used.copy(), held.loaded.copy(), held.taken.copy()
        self.read, self.written = held.read.copy(), held.written.copy()
        self.clocks = Clocks(held.known, held.ready)

    # --- who holds what -----------------------------------------------------------------------------------------------

    def hold(self, layer: int, pages: Ids, cells: Ids) -> None:
        if (self.holder[cells] != FREE).any() or (self.cell_of[layer, pages] != FREE).any():
            raise AccountingBug(f"cells {cells} for pages {pages} of layer {layer}: some of them are taken")
        self.holder[cells] = layer * self.pages + pages
        self.cell_of[layer, pages] = cells

    def drop(self, layer: int, pages: Ids) -> Ids:
        """Returns the cells that were theirs."""
        cells: Ids = self.cell_of[layer, pages]
        if (cells == FREE).any():
            raise AccountingBug(f"pages {pages} of layer {layer}: some have no cell to give back")
        self.holder[cells] = FREE
        self.cell_of[layer, pages] = FREE
        return cells

    def coming(self, cells: Ids) -> NDArray[np.bool_]:
        """Which of these (cells of pages, FREE for none) are not there as far as compute knows."""
        there: NDArray[np.bool_] = (cells == FREE) | (self.loaded[cells] > self.clocks.known[COMPUTE][COPY])
        return there

    # --- operations ---------------------------------------------------------------------------------------------------

    def upload(self, layer: int, pages: Ids, cells: Ids, batch: int) -> int:
        """Pages into the cells that hold them, in as few copies as neighbours allow. Returns the number of copies."""
        used, saved = self.used[cells], np.maximum(self.taken[cells], self.written[layer, pages])
        known = self.clocks.known[COPY]
        unknown = (used > known[COMPUTE]) | (saved > known[SAVE])
        waits = bool(unknown.any())
        breaks = (((pages[1:] - pages[:-1] != 1) | (cells[1:] - cells[:-1] != 1)).nonzero()[0] + 1).tolist()
        copies = 0
        for start, end in zip([0, *breaks], [*breaks, len(pages)], strict=True):
            for at in range(start, end, PAGES_PER_COPY_MAX):
                count = min(end - at, PAGES_PER_COPY_MAX)
                if waits:
                    self._copy_after(int(used[at : at + count].max()), int(saved[at : at + count].max()))
                self.out.append(Upload(layer, int(pages[at]), int(cells[at]), count, batch))
                position = self.clocks.did(COPY)
                copies += 1
        self.loaded[cells] = position  # of all of them: they have one record
        self.read[layer, pages] = position
        return copies

    def ready(self, batch: int) -> None:
        self.clocks.open.remove(batch)
        self.clocks.ready[batch] = self.clocks.vector(COPY)
        self.out.append(Ready(batch))

    def write(self, layer: int, rows: Sequence[tuple[int, int, int, int]], fresh: Iterable[int],
              again: Iterable[int]) -> bool:
        """New rows, (first row of the step, count, page, first row in the page), into the cells of their pages and on
        to the host. ``fresh``: pages whose cell held something else before; ``again``: those of which rows are written
        that may be on their way to the host. Returns whether compute had to wait for these."""
        cells = [int(self.cell_of[layer, page]) for _, _, page, _ in rows]
        pages = [page for _, _, page, _ in rows]
        # A page of the host that is written must not be read any more by an upload that nobody waited for.
        loaded = max(int(self.loaded[cells].max()), int(self.read[layer, pages].max()))
        self.compute_after(loaded, NEVER)
        waited = self.compute_after(NEVER, self._taken(layer, again))
        self.compute_after(NEVER, self._taken(layer, fresh))
        self.out.append(Write(layer, tuple(
            (row, count, cell, first) for (row, count, _, first), cell in zip(rows, cells, strict=True))))
        self.used[cells] = self.clocks.did(COMPUTE)
        self.clocks.join(SAVE, self.clocks.vector(COMPUTE))
        self.out += (Written(layer), AfterWritten(layer))
        for (_, count, page, first), cell in zip(rows, cells, strict=True):
            self.out.append(Save(layer, cell, first, count, page))
            self.taken[cell] = self.written[layer, page] = self.clocks.did(SAVE)
        return waited

    def _taken(self, layer: int, pages: Iterable[int]) -> int:
        return max((int(self.taken[self.cell_of[layer, page]]) for page in pages), default=NEVER)

    def attend(self, layer: int, wave: int, entries: tuple[Entry, ...], cells: Ids, fold: Folding, last: bool) -> None:
        """``cells``: those of the entries."""
        self.compute_after(int(self.loaded[cells].max()), NEVER)
        self.out.append(Attend(layer, wave, entries, fold, last))
        self.used[cells] = self.clocks.did(COMPUTE)

    # --- waits --------------------------------------------------------------------------------------------------------

    def _copy_after(self, used: int, saved: int) -> None:
        clocks = self.clocks
        mine = clocks.known[COPY]
        use, save = mine[COMPUTE] < used, mine[SAVE] < saved
        if use and save:  # one of the two may know of the other
            use = clocks.known[SAVE][COMPUTE] < used
            save = not use or clocks.known[COMPUTE][SAVE] < saved
        if use:
            name, fresh = clocks.note(COMPUTE)
            self.out += (Used(name), AfterUse(name)) if fresh else (AfterUse(name),)
            clocks.join(COPY, clocks.vector(COMPUTE))
        if save:
            name, fresh = clocks.note(SAVE)
            self.out += (Saved(name), AfterSaved(name)) if fresh else (AfterSaved(name),)
            clocks.join(COPY, clocks.vector(SAVE))

    def compute_after(self, loaded: int, saved: int) -> bool:
        """Whether it had to wait for a save."""
        clocks = self.clocks
        if clocks.known[COMPUTE][COPY] < loaded:
            name = next((name for name, vector in clocks.ready.items() if vector[COPY] >= loaded), None)
            if name is None:
                raise AccountingBug(f"an upload that is waited for has no record: {loaded} of {clocks.known[COPY]}")
            self.out.append(Await(name))
            clocks.join(COMPUTE, clocks.ready[name])
            at = clocks.known[COMPUTE][COPY]
            clocks.ready = {name: vector for name, vector in clocks.ready.items() if vector[COPY] > at}
        if clocks.known[COMPUTE][SAVE] >= saved:
            return False
        name, fresh = clocks.note(SAVE)
        self.out += (Saved(name), AwaitSaved(name)) if fresh else (AwaitSaved(name),)
        clocks.join(COMPUTE, clocks.vector(SAVE))
        return True

    # --- the end of a step --------------------------------------------------------------------------------------------

    def settled(self) -> Held:
        """What is left, with positions counted from now on: see the theory above.

        A position that somebody may have to wait for is rounded up to the next one that makes a difference, what a
        stream knows is rounded down. Of compute's positions, only copy asks; it may hear of them through save. Of
        save's, copy and compute ask, and may hear of them through each other. Of copy's, compute asks.
        """
        known, now = self.clocks.known, [self.clocks.known[stream][stream] for stream in range(3)]
        used_low, used_high = known[COPY][COMPUTE], known[SAVE][COMPUTE]
        saved_low, saved_high = sorted((known[COPY][SAVE], known[COMPUTE][SAVE]))

        def asked(positions: Positions, low: int, high: int) -> Positions:
            return np.where(positions <= low, NEVER, np.where(positions <= high, -1, 0))

        def heard(position: int, low: int, high: int, own: int) -> int:
            return 0 if position >= own else -1 if position >= high > low else NEVER

        def vector(of: Sequence[int]) -> Vector:
            return (heard(of[COMPUTE], used_low, used_high, now[COMPUTE]), of[COPY] - now[COPY],
                    heard(of[SAVE], saved_low, saved_high, now[SAVE]))

        def uploads(positions: Positions) -> Positions:
            return np.where(positions <= known[COMPUTE][COPY], NEVER, positions - now[COPY])

        loaded, read = uploads(self.loaded), uploads(self.read)
        # Of the records of uploads that compute has not waited for, those that somebody may still ask for.
        positions = frozenset((*loaded[loaded != NEVER].tolist(), *read[read != NEVER].tolist()))
        ready = [(name, vector(of)) for name, of in self.clocks.ready.items()]
        covers = {next(name for name, of in ready if of[COPY] >= position) for position in positions}
        copy_heard = heard(known[COPY][SAVE], saved_low, saved_high, now[SAVE] + 1)
        compute_heard = heard(known[COMPUTE][SAVE], saved_low, saved_high, now[SAVE] + 1)
        save_heard = heard(used_high, used_low, used_high, now[COMPUTE] + 1)
        return Held(
            self.cell_of, self.holder, asked(self.used, used_low, used_high), loaded,
            asked(self.taken, saved_low, saved_high), read, asked(self.written, saved_low, saved_high),
            ((0, NEVER, compute_heard), (NEVER, 0, copy_heard), (save_heard, NEVER, 0)),
            tuple((name, of) for name, of in ready if name in covers))
