"""The state machine over cells by itself: transitions that do not exist, what is forgotten, and what waits for what."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstream.core.types import AccountingBug
from kvstream.cuda import ops
from kvstream.cuda.ring import FREE, NEVER, Cells, Residency


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def opened(layers: int = 2, host_pages: int = 8, cells: int = 6) -> Cells:
    return Cells(Residency.empty(layers, host_pages, cells).held)


def fetched(cells: Cells, layer: int, pages: np.ndarray, into: np.ndarray) -> None:
    batch = cells.clocks.batch(False)
    cells.hold(layer, pages, into)
    cells.upload(layer, pages, into, batch)
    cells.ready(batch)


def kinds(cells: Cells) -> list[str]:
    found = [type(op).__name__ for op in cells.out]
    cells.out = []
    return found


def test_a_cell_holds_one_page_and_a_page_has_one_cell() -> None:
    cells = opened()
    cells.hold(0, ids(3), ids(5))
    for layer, page, cell in ((1, 2, 5), (0, 3, 1)):
        with pytest.raises(AccountingBug):
            cells.hold(layer, ids(page), ids(cell))
    cells.hold(1, ids(3), ids(1))
    assert cells.drop(0, ids(3)).tolist() == [5]
    with pytest.raises(AccountingBug):
        cells.drop(0, ids(3))


def test_a_page_is_coming_until_compute_has_waited_for_it() -> None:
    cells = opened()
    fetched(cells, 0, ids(0, 1, 2), ids(0, 1, 2))
    assert cells.coming(ids(0, 1, 2, FREE)).tolist() == [True] * 4
    cells.attend(0, 0, ((1, 1, 1),), ids(1), "table", True)
    assert cells.coming(ids(0, 1, 2, FREE)).tolist() == [False] * 3 + [True]
    assert kinds(cells) == ["Upload", "Ready", "Await", "Attend"]


def test_copies_are_cut_where_neighbours_end_and_at_96_pages() -> None:
    cells = opened(1, 128, 128)
    into = ids(*range(10, 110), 120, 121)
    pages = ids(*range(100), 100, 110)
    fetched(cells, 0, pages, into)
    assert [(op.page, op.cell, op.count) for op in cells.out if isinstance(op, ops.Upload)] == [
        (0, 10, 96), (96, 106, 4), (100, 120, 1), (110, 121, 1)]


def test_waits_are_made_where_they_are_needed_and_nowhere_else() -> None:
    cells = opened()
    cells.hold(0, ids(0), ids(0))
    cells.write(0, ((0, 4, 0, 0),), fresh=[0], again=[])
    assert kinds(cells) == ["Write", "Written", "AfterWritten", "Save"]
    cells.attend(0, 0, ((1, 0, 0),), ids(0), "table", True)
    cells.drop(0, ids(0))
    kinds(cells)
    fetched(cells, 0, ids(0), ids(0))  # the same page into its old cell: after the kernel, and after the rows are saved
    assert kinds(cells) == ["Used", "AfterUse", "Saved", "AfterSaved", "Upload", "Ready"]
    fetched(cells, 0, ids(1), ids(1))
    assert kinds(cells) == ["Upload", "Ready"]
    cells.drop(0, ids(0))
    cells.hold(1, ids(4), ids(0))  # compute has heard of the save through the copy that it waits for here
    cells.write(1, ((0, 1, 4, 0),), fresh=[4], again=[])
    assert kinds(cells) == ["Await", "Write", "Written", "AfterWritten", "Save"]


def test_a_wait_for_a_save_may_cover_the_wait_for_a_kernel() -> None:
    cells = opened()
    cells.hold(0, ids(0), ids(0))
    cells.attend(0, 0, ((1, 0, 0),), ids(0), "table", True)
    cells.drop(0, ids(0))
    cells.hold(1, ids(1), ids(1))
    cells.write(1, ((0, 4, 1, 0),), fresh=[1], again=[])
    cells.drop(1, ids(1))
    kinds(cells)
    fetched(cells, 1, ids(1), ids(0))  # the save came after the write, which came after the kernel
    assert kinds(cells) == ["Saved", "AfterSaved", "Upload", "Ready"]


def test_forgetting_a_page_frees_its_cells_in_all_layers_and_leaves_others_alone() -> None:
    cells = opened()
    for layer in (0, 1):
        fetched(cells, layer, ids(2, 3), ids(2 * layer, 2 * layer + 1))
    residency = Residency(cells.settled())
    assert residency.without([7]) is residency
    left = residency.without([2, 7])
    assert [left.cell(layer, 2) for layer in (0, 1)] == [None, None]
    assert [left.cell(layer, 3) for layer in (0, 1)] == [1, 3]
    assert [left.pages_held(layer) for layer in (0, 1)] == [1, 1]
    assert residency.cell(0, 2) == 0


def test_a_cell_that_was_forgotten_while_its_upload_runs_is_not_written_before_that_is_done() -> None:
    cells = opened()
    fetched(cells, 0, ids(2), ids(0))
    later = Cells(Residency(cells.settled()).without([2]).held)
    later.hold(0, ids(5), ids(0))
    later.write(0, ((0, 1, 5, 0),), fresh=[5], again=[])
    assert kinds(later) == ["Await", "Write", "Written", "AfterWritten", "Save"]


def test_nothing_is_waited_for_after_the_host_has_synchronized() -> None:
    cells = opened()
    fetched(cells, 0, ids(2), ids(0))
    cells.hold(0, ids(3), ids(1))
    cells.write(0, ((0, 1, 3, 0),), fresh=[3], again=[])
    residency = Residency(cells.settled()).synchronized()
    assert (residency.cell(0, 2), residency.cell(0, 3)) == (0, 1)
    later = Cells(residency.held)
    assert later.coming(ids(0, 1)).tolist() == [False, False]
    later.drop(0, ids(3))
    fetched(later, 0, ids(3), ids(1))
    assert kinds(later) == ["Upload", "Ready"]


def test_names_of_batches_are_the_smallest_that_are_not_in_use() -> None:
    cells = opened()
    names = []
    for ahead in (False, True, False, True):
        names.append(cells.clocks.batch(ahead))
        cells.ready(names[-1])
    assert names == [0, 1, 2, 3]
    fetched(cells, 0, ids(0), ids(0))
    cells.attend(0, 0, ((1, 0, 0),), ids(0), "table", True)
    assert cells.clocks.batch(False) == 0 and cells.clocks.batch(True) == 1


def test_records_of_uploads_that_nobody_can_ask_for_are_forgotten() -> None:
    residency = Residency.empty(1, 4, 3)
    for _ in range(5):
        cells = Cells(residency.held)
        fetched(cells, 0, ids(0), ids(0))
        cells.drop(0, ids(0))
        residency = Residency(cells.settled())
    assert len(residency.held.ready) == 1


@given(st.lists(st.tuples(st.sampled_from(("write", "attend", "fetch", "drop")), st.integers(0, 2)), max_size=20))
def test_doing_the_same_again_leaves_the_same(history: list[tuple[str, int]]) -> None:
    """States do not depend on how many steps there were: three ranks are left of all positions."""

    def again(residency: Residency) -> Residency:
        cells = Cells(residency.held)
        for what, number in history:
            held = cells.cell_of[0, number] != FREE
            if what == "fetch" and not held:
                fetched(cells, 0, ids(number), ids(number))
            elif what == "write":
                if not held:
                    cells.hold(0, ids(number), ids(number))
                cells.write(0, ((0, 1, number, 0),), fresh=[number], again=[])
            elif what == "attend" and held:
                cells.attend(0, 0, ((1, number, number),), ids(number), "table", True)
            elif what == "drop" and held and not cells.coming(ids(number)).any():
                cells.drop(0, ids(number))
        return Residency(cells.settled())

    residency = Residency.empty(1, 4, 3)
    states = []
    for _ in range(16):
        residency = again(residency)
        states.append(residency.held)
        for positions in (states[-1].used, states[-1].taken, states[-1].written):
            assert set(positions.ravel().tolist()) <= {NEVER, -1, 0}
    assert any(states[-1].same(state) for state in states[-9:-1])  # what is done may depend on what is held
