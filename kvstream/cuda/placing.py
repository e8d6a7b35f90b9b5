"""Which cells are for what in a step: what is forgotten, where new pages that are kept go, which cells are the ring.

Theory of operation. What is kept and held stays where it is. What other sequences left here stays as long as the ring
has what the split gives it. What passes and is still held (copied ahead, or kept until now) is in the ring already. The
rest is forgotten. Of the cells that are free then, kept pages take the shortest pieces and the ring gets the long ones,
since adjacent pages in adjacent cells are one copy.

That alone does not keep the ring together: a tail that fills up and passes leaves a hole where it was. So a large ring
in too many pieces is put together at the end of the pool, around what cannot move: kept pages there are fetched again
into the holes. That is a few pages, once in a while; a piece more is one more copy for each of the ring's laps, in
every step.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from .demand import Demand, Kept
from .ring import FREE, Cells, Ids

RING_CELLS_MIN: Final = 64  # a smaller ring is not worth putting together
PIECES_MAX: Final = 4


@frozen
class Places:
    """``keepers``: as many cells as there are kept pages without one. ``ring``: cells in the order in which pages take
    them, some of them held by pages that pass (``found``, in order: layer and page). ``zone``: for filled pages."""

    keepers: Ids
    ring: Ids
    zone: tuple[int, ...]
    found: list[tuple[int, int]]
    freed: int
    moved: int


def place(cells: Cells, demand: Demand, kept: Kept, ring_wanted: int) -> Places:
    layers = len(kept.layer_pages)
    pages, tails = np.array(demand.pages, np.int64), np.array(demand.tails, np.int64)
    keep = np.zeros(cells.cell_of.shape, np.bool_)
    for layer, number in enumerate(kept.layer_pages):
        keep[layer, pages[:number]] = True
    keep[:, tails] = True
    room = len(cells.holder) - int(np.count_nonzero(keep))
    others = _others(cells, keep, demand)
    stay = max(0, room - max(kept.ring_min, min(ring_wanted, kept.passing + kept.zone)))
    found = _passing(cells, demand, kept)
    ring = room - min(stay, len(others))
    gone = others[stay:] + found[max(0, ring - kept.zone) :]
    del found[max(0, ring - kept.zone) :]
    for layer, page in gone:
        cells.drop(layer, np.array([page]))
    moved, border, freed = 0, len(cells.holder), len(gone)
    if kept.passing and ring >= RING_CELLS_MIN:
        passing = len(found)
        moved, border = _put_together(cells, keep, demand, found, ring)
        freed += passing - len(found)

    missing = int(np.count_nonzero(cells.cell_of[keep] == FREE))
    keepers, free = _shortest_first(_free(cells), missing, border)
    zone = tuple(free[len(free) - kept.zone :])
    circle = sorted(free[: len(free) - kept.zone] + [int(cells.cell_of[layer, page]) for layer, page in found])
    if kept.passing:
        laps = -(-kept.passing // len(circle))
        longest = sorted(_pieces(circle), key=len, reverse=True)
        circle = sorted([cell for piece in longest for cell in piece][: -(-kept.passing // laps)])
    assert layers * len(tails) + sum(kept.layer_pages) + ring <= len(cells.holder)
    return Places(np.array(keepers, np.int64), np.array(circle, np.int64), zone, found, freed, moved)


def _others(cells: Cells, keep: NDArray[np.bool_], demand: Demand) -> list[tuple[int, int]]:
    """Held pages that are not in this step, first layers first."""
    absent = np.ones(cells.cell_of.shape[1], np.bool_)
    absent[list(demand.pages + demand.tails)] = False
    layer, page = np.nonzero((cells.cell_of != FREE) & absent)
    return list(zip(layer.tolist(), page.tolist(), strict=True))


def _passing(cells: Cells, demand: Demand, kept: Kept) -> list[tuple[int, int]]:
    """Held pages of the step that are not kept, in the order in which they pass. Among them are tails that fill up in
    this step: they stay until their layer has been attended."""
    pages = np.array(demand.pages, np.int64)
    return [(layer, demand.pages[number + at]) for layer, number in enumerate(kept.layer_pages)
            for at in np.flatnonzero(cells.cell_of[layer, pages[number:]] != FREE).tolist()]


def _free(cells: Cells) -> list[int]:
    free: list[int] = np.flatnonzero(cells.holder == FREE).tolist()
    return free


def _pieces(cells: list[int]) -> list[list[int]]:
    """Ascending cells, cut where there is a gap."""
    at = (np.flatnonzero(np.diff(np.array(cells, np.int64)) != 1) + 1).tolist()
    return [cells[start:end] for start, end in zip([0, *at], [*at, len(cells)], strict=True) if start < end]


def _shortest_first(free: list[int], number: int, border: int) -> tuple[list[int], list[int]]:
    """So many cells out of the shortest pieces, those before the border first, and what is left, both ascending."""
    at = bisect_left(free, border)
    pieces = sorted(_pieces(free[:at]), key=len) + sorted(_pieces(free[at:]), key=len)
    taken = [cell for piece in pieces for cell in piece][:number]
    gone = frozenset(taken)
    return sorted(taken), [cell for cell in free if cell not in gone]


def _put_together(cells: Cells, keep: NDArray[np.bool_], demand: Demand, found: list[tuple[int, int]],
                  ring: int) -> tuple[int, int]:
    """Forget kept pages at the end of the pool, where the ring is to be, if it is in too many pieces. Returns how many,
    and where it begins. What stays: tails, which are needed at once, and pages in transit or of other sequences.

    Pages that pass and were found before that place are forgotten too, and taken off ``found``. They would hold the
    cells that the kept ones are to move to, and all would be moved back and forth in every step."""
    candidates = sorted(_free(cells) + [int(cells.cell_of[layer, page]) for layer, page in found])
    missing = int(np.count_nonzero(cells.cell_of[keep] == FREE))
    _, rest = _shortest_first(candidates, missing, len(cells.holder))
    if len(_pieces(rest)) <= PIECES_MAX:
        return 0, len(cells.holder)
    movable = keep & ~cells.coming(cells.cell_of)
    movable[:, list(demand.tails)] = False
    usable = np.zeros(len(cells.holder), np.bool_)
    usable[candidates] = usable[cells.cell_of[movable]] = True
    border = int(usable.nonzero()[0][-ring])
    moving = np.argwhere(movable & (cells.cell_of >= border)).tolist()
    for layer, page in moving:
        cells.drop(layer, np.array([page]))
    written = frozenset(demand.pages[at] for at in demand.filled)
    kept_found = []
    for layer, page in found:
        if page in written or cells.cell_of[layer, page] >= border:
            kept_found.append((layer, page))
        else:
            cells.drop(layer, np.array([page]))
    found[:] = kept_found
    return len(moving), border
