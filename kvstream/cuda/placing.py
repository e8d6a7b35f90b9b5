"""Which cells are for what in a step: what is forgotten, where new pages that are kept go, which cells are the ring.

Theory of operation. What is kept and held stays where it is. What other sequences left here stays as long as the ring
has what the split gives it. What passes and is still held (copied ahead, or kept until now) is in the ring already. The
rest is forgotten. Of the cells that are free then, kept pages take the shortest pieces and the ring gets the long ones,
since adjacent pages in adjacent cells are one copy. A large ring that is in many pieces all the same (growing sequences
leave holes of one page) is put together: kept pages are fetched again, out of its way.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from .demand import Demand, Kept
from .ring import FREE, Cells, Ids

RING_CELLS_MIN: Final = 64  # a smaller ring is not worth putting together
PIECE_CELLS_MIN: Final = 16  # nor one whose pieces are as long as this on average


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
    moved = _put_together(cells, keep, demand, found, ring) if kept.passing and ring >= RING_CELLS_MIN else 0

    missing = int(np.count_nonzero(cells.cell_of[keep] == FREE))
    keepers, free = _shortest_first(_free(cells), missing)
    zone = tuple(free[len(free) - kept.zone :])
    circle = sorted(free[: len(free) - kept.zone] + [int(cells.cell_of[layer, page]) for layer, page in found])
    if kept.passing:
        laps = -(-kept.passing // len(circle))
        circle = circle[: -(-kept.passing // laps)]
    assert layers * len(tails) + sum(kept.layer_pages) + ring <= len(cells.holder)
    return Places(np.array(keepers, np.int64), np.array(circle, np.int64), zone, found, len(gone), moved)


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


def _shortest_first(free: list[int], number: int) -> tuple[list[int], list[int]]:
    """So many cells out of the shortest pieces, and what is left, both ascending."""
    taken: list[int] = []
    for piece in sorted(_pieces(free), key=len):
        taken += piece[: number - len(taken)]
    gone = frozenset(taken)
    return sorted(taken), [cell for cell in free if cell not in gone]


def _put_together(cells: Cells, keep: NDArray[np.bool_], demand: Demand, found: list[tuple[int, int]],
                  ring: int) -> int:
    """Forget kept pages in the last cells of the pool, where the ring is to be, when it is in too many pieces. Tails
    stay: they are needed at once."""
    candidates = sorted(_free(cells) + [int(cells.cell_of[layer, page]) for layer, page in found])
    missing = int(np.count_nonzero(cells.cell_of[keep] == FREE))
    _, rest = _shortest_first(candidates, missing)
    if len(_pieces(rest)) <= 1 + ring // PIECE_CELLS_MIN:
        return 0
    movable = keep.copy()
    movable[:, list(demand.tails)] = False
    moved = 0
    for layer, page in np.argwhere(movable & (cells.cell_of >= len(cells.holder) - ring)).tolist():
        cells.drop(layer, np.array([page]))
        moved += 1
    return moved
