"""What plans do: each test is a little history, watched by the checker, and a statement about the operations."""

from __future__ import annotations

import pytest

from kvstream.core.types import AccountingBug
from kvstream.cuda import layout, ops, placing
from kvstream.cuda.plan import plan_step
from kvstream.cuda.ring import Residency
from kvstream.cuda.steady import Plan
from kvstream.cuda.types import KVType
from tests.cuda.world import Shape, Split, World, cells_min, evenly


def uploaded(plan: Plan) -> list[tuple[int, int]]:
    return [(op.layer, page) for op in plan.ops() if isinstance(op, ops.Upload)
            for page in range(op.page, op.page + op.count)]


def kinds(section: tuple[ops.Op, ...]) -> list[str]:
    return [type(op).__name__ for op in section]


def decoding(world: World, tokens: int, split: Split, steps: int = 4, **options: bool) -> Plan:
    """One sequence of so many tokens, some steps of one token each; the plan of the last one."""
    sequence = world.create(tokens)
    for _ in range(steps):
        plan = world.step([(sequence, 1)], split, **options)
    assert world.checker.faults == []
    return plan


# --- decode -----------------------------------------------------------------------------------------------------------


def test_with_everything_resident_a_step_copies_nothing_and_waits_for_nothing_but_its_rows() -> None:
    plan = decoding(World(layers=3, page_tokens=8, cells=16), 26, evenly(3, 9))
    assert plan.reused and plan.counts.uploads == 0 and plan.begin == plan.end == ()
    for layer in range(3):
        assert kinds(plan.append[layer]) == ["Write", "Written", "AfterWritten", "Save"]
        assert kinds(plan.attend[layer]) == ["Attend", "Fold"]


def test_the_first_step_fetches_what_is_kept() -> None:
    world = World(layers=3, page_tokens=8, cells=16)
    sequence = world.create(26)
    plan = world.step([(sequence, 1)], evenly(3, 9))
    assert sorted(uploaded(plan)) == [(layer, page) for layer in range(3) for page in range(4)]
    assert plan.counts.fetched == plan.counts.uploads == 12
    assert plan.counts.copies <= 12
    assert world.checker.faults == []


@pytest.mark.parametrize("spare", range(9))
def test_every_page_that_is_not_kept_passes_once_in_each_step(spare: int) -> None:
    """From one cell to pass through, to room for everything but a page or two."""
    world = World(layers=2, page_tokens=4, cells=cells_min(2, 4, 1, 1) + spare)
    plan = decoding(world, 21, evenly(2, spare // 2), steps=2, ahead=False)
    assert sorted(uploaded(plan)) == [(layer, page) for layer in range(2) for page in range(spare // 2, 5)]


@pytest.mark.parametrize("width", [1, 7, 40])
def test_copies_run_ahead_into_later_layers_whatever_the_width(width: int) -> None:
    """Decode, verify, prefill: while a layer is attended, pages of the next one are on their way."""
    world = World(layers=4, page_tokens=16, cells=40)
    sequence = world.create(16 * 20)
    split = evenly(4, 2)
    world.step([(sequence, width)], split, ahead=False)
    plan = world.step([(sequence, width)], split, ahead=False)
    assert world.checker.faults == []
    assert plan.counts.early > 0.5 * plan.counts.uploads
    for layer in range(3):
        later = [op for op in (*plan.begin, *(op for ops_ in plan.attend[: layer + 1] for op in ops_))
                 if isinstance(op, ops.Upload) and op.layer == layer + 1]
        assert later, f"nothing of layer {layer + 1} is copied before its turn"


def test_the_end_of_a_step_copies_for_the_next_one() -> None:
    world = World(layers=2, page_tokens=4, cells=12)
    plan = decoding(world, 61, Split(8, (1, 1)), steps=5)
    assert plan.counts.ahead > 0 and plan.counts.found == plan.counts.ahead
    assert plan.counts.uploads == 2 * 15  # no page twice for it
    last = [op for op in plan.attend[1] if isinstance(op, ops.Upload)]
    assert {op.layer for op in last} == {0, 1}


def test_what_passes_and_fits_in_the_ring_is_not_copied_again() -> None:
    world = World(layers=2, page_tokens=16, cells=16)
    plan = decoding(world, 90, Split(8, (2, 3)), steps=3)
    assert plan.counts.uploads == 0 and plan.counts.found == 5


def test_what_was_copied_ahead_is_not_used_when_the_next_step_is_another_one() -> None:
    world = World(layers=2, page_tokens=4, cells=16)
    one, two = world.create(60), world.create(40)
    split = Split(8, (1, 1))
    for sequence in (one, two, one, two):
        plan = world.step([(sequence, 1)], split)
        assert len(set(uploaded(plan))) >= plan.counts.uploads - plan.counts.ahead
    world.drop(one)
    world.step([(two, 1)], split)
    assert world.checker.faults == []


def test_adjacent_pages_are_one_copy_as_long_as_a_wave() -> None:
    world = World(layers=2, page_tokens=1, host_pages=300, cells=2 + 200)
    sequence = world.create(199)
    plan = world.step([(sequence, 1)], Split(200, (0, 0)), ahead=False)
    counts = [op.count for op in plan.ops() if isinstance(op, ops.Upload)]
    assert sum(counts) == 2 * 199 and max(counts) == 198 // 4  # of a ring a quarter at once
    assert len(counts) <= 2 * (199 // 49 + 1 + 4)  # a piece more per chunk
    assert world.checker.faults == []


def test_a_wave_is_a_part_of_the_ring_so_that_the_rest_can_be_filled_meanwhile() -> None:
    world = World(layers=1, page_tokens=1, host_pages=128, cells=1 + 40)
    plan = decoding(world, 100, Split(40, (0,)), steps=1, ahead=False)
    waves = [op for op in plan.attend[0] if isinstance(op, ops.Attend)]
    assert [wave.wave for wave in waves] == list(range(len(waves)))
    assert max(len(wave.entries) for wave in waves) <= 10
    order = kinds(plan.attend[0])
    assert order.index("Upload") < len(order) - 1 - order[::-1].index("Attend")  # between two waves


# --- repetition -------------------------------------------------------------------------------------------------------


def test_from_the_third_step_on_a_plan_is_made_of_the_one_before() -> None:
    """And equals the one that is built anew: ``World.step`` compares them."""
    world = World(layers=3, page_tokens=16, cells=20)
    sequence = world.create(5 * 16)
    split = Split(11, (3, 1, 3))
    plans = [world.step([(sequence, 1)], split) for _ in range(20)]
    assert [plan.reused for plan in plans] == [False] * 2 + [True] * 14 + [False] * 3 + [True]
    assert plans[4].attend[1] is plans[5].attend[1]
    assert world.checker.faults == []


def test_a_verify_step_of_changing_width_repeats_too() -> None:
    world = World(layers=2, page_tokens=32, cells=12)
    sequence = world.create(100)
    split = Split(8, (1, 1))
    reused = []
    for width, keep in ((3, 1), (3, 1), (3, 3), (4, 1), (3, 1), (1, 1), (4, 1), (2, 2), (3, 1), (5, 1), (2, 1)):
        plan = world.step([(sequence, width)], split)
        world.truncate(sequence, world.tokens[sequence] - width + keep)
        reused.append(plan.reused)
    assert reused[-5:] == [True] * 5
    assert world.checker.faults == []


def test_groups_that_take_turns_repeat_too() -> None:
    world = World(layers=2, page_tokens=32, cells=40)
    ids = [world.create(32 * 5 + 1) for _ in range(4)]
    plans = [world.step([(sequence, 1) for sequence in group], evenly(2, 4, 8))
             for _ in range(6) for group in (ids[:2], ids[2:])]
    assert [plan.reused for plan in plans[-6:]] == [True] * 6
    assert world.checker.faults == []


# --- a new split ------------------------------------------------------------------------------------------------------


def test_a_new_split_fetches_the_difference_and_leaves_the_rest_where_it_is() -> None:
    world = World(layers=3, page_tokens=4, cells=40)
    sequence = world.create(49)
    for _ in range(2):
        world.step([(sequence, 1)], Split(10, (12, 4, 11)), ahead=False)
    before = {(layer, page): world.residency.cell(layer, page) for layer in range(3) for page in range(12)}
    plan = world.step([(sequence, 1)], Split(10, (5, 10, 12)), ahead=False)
    fetched = {(1, page) for page in range(4, 10)} | {(2, 11)}
    assert set(uploaded(plan)) == fetched | {(1, page) for page in range(10, 12)}
    assert plan.counts.fetched == len(fetched)
    assert plan.counts.found == 7  # of layer 0, kept until now: they pass this once without a copy
    stayed = {(layer, page) for layer, kept in ((0, 5), (1, 4), (2, 11)) for page in range(kept)}
    assert all(world.residency.cell(*key) == before[key] for key in stayed)
    assert world.checker.faults == []


def test_a_ring_in_pieces_is_put_together_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def copies() -> tuple[list[int], list[int]]:
        world = World(layers=2, page_tokens=1, host_pages=400, cells=240)
        one, two = world.create(2), world.create(2)
        for _ in range(40):  # their pages take turns, and leave holes to each other
            world.step([(one, 1), (two, 1)], evenly(2, 100, 20))
        world.drop(one)
        three = world.create(200)
        plans = [world.step([(two, 1), (three, 1)], Split(80, (76, 76))) for _ in range(2)]
        assert world.checker.faults == []
        return [plan.counts.moved for plan in plans], [plan.counts.copies for plan in plans]

    moved, together = copies()
    monkeypatch.setattr(placing, "RING_CELLS_MIN", 1 << 30)
    unmoved, apart = copies()
    assert 0 < moved[0] < 20 and moved[1] == 0 and unmoved == [0, 0]
    assert together[1] < 0.7 * apart[1]


def test_a_growing_sequence_leaves_the_ring_in_long_pieces() -> None:
    """Each page that fills up and passes leaves a hole in every layer; the next tails go there."""
    world = World(layers=8, page_tokens=2, host_pages=128, cells=8 * 20 + 8 + 80)
    sequence = world.create(101)
    copies, moved = [], []
    for step in range(16):
        plan = world.step([(sequence, 1)], evenly(8, 20, 80))
        copies.append(plan.counts.copies)
        moved.append(plan.counts.moved)
        tail = world.tables[sequence][-1]
        assert not step or tail not in [page for _, page in uploaded(plan)], "a tail was moved"
    assert sum(copies[8:]) < 300  # 2,200 pages
    assert 0 < sum(moved) < 20 and sum(moved[8:]) == 0
    assert world.checker.faults == []


def test_a_ring_whose_pages_were_copied_ahead_is_put_together_once() -> None:
    """After a prefill with a small ring: what was copied ahead for this step lies where kept pages are to go."""
    world = World(layers=8, page_tokens=2, host_pages=300, cells=8 * 41 + 8)
    sequence = world.create(120)
    for _ in range(3):
        world.step([(sequence, 6)], evenly(8, 40, 8))
    moved = [world.step([(sequence, 1)], evenly(8, 31, 80)).counts.moved for _ in range(4)]
    assert moved[0] > 0 and moved[1:] == [0, 0, 0]
    assert world.checker.faults == []


def test_a_split_that_asks_for_too_much_is_cut_to_what_there_is() -> None:
    world = World(layers=3, page_tokens=4, cells=12)
    plan = decoding(world, 60, Split(0, (99, 99, 2)), ahead=False)
    assert sum(world.residency.pages_held(layer) for layer in range(3)) == 11  # one cell is left to pass through
    assert plan.counts.uploads == 3 * 15 - 8


@pytest.mark.parametrize("sequences", [1, 2, 3])
@pytest.mark.parametrize("rows", [3, 33, 70])
def test_the_smallest_pool_of_a_layout_is_enough_for_every_step(rows: int, sequences: int) -> None:
    geometry = layout.Geometry(2, 1, 1, 64, KVType.F16, KVType.F16, page_tokens=32)
    cells = layout.cells_min(geometry, rows, sequences)
    assert cells == cells_min(2, 32, rows, sequences)
    world = World(layers=2, page_tokens=32, cells=cells)
    ids = [world.create(31) for _ in range(sequences)]
    for other in (2 if rows >= 2 * sequences else 1, 1):
        widths = [rows - other * (sequences - 1)] + [other] * (sequences - 1)
        world.step(list(zip(ids, widths, strict=True)), evenly(2, 99))
    assert world.checker.faults == []


def test_a_pool_that_is_too_small_for_the_tails_is_refused() -> None:
    with pytest.raises(AccountingBug, match="3 cells are too few for 2 sequences in 2 layers"):
        plan_step(Residency.empty(2, 8, 3), evenly(2, 1), [(1, 0, 1), (2, 0, 1)], {1: (0,), 2: (1,)}, Shape(2, 4))


# --- sequences --------------------------------------------------------------------------------------------------------


def test_pages_of_a_sequence_that_sits_out_stay_as_long_as_there_is_room() -> None:
    world = World(layers=2, page_tokens=4, cells=32)
    one, two = world.create(20), world.create(20)
    split = evenly(2, 5, 4)
    for sequence in (one, two):
        world.step([(sequence, 1)], split)
    assert [world.step([(sequence, 1)], split).counts.uploads for sequence in (one, two)] == [0, 0]
    three = world.create(60)
    world.step([(three, 1)], evenly(2, 12, 4))
    held = sum(world.residency.cell(layer, page) is not None
               for layer in range(2) for sequence in (one, two) for page in world.tables[sequence])
    assert 0 < held < 24
    assert world.checker.faults == []


def test_a_larger_ring_takes_the_cells_of_a_sequence_that_sits_out() -> None:
    world = World(layers=2, page_tokens=16, cells=26)
    one, two = world.create(60), world.create(161)
    world.step([(one, 1)], evenly(2, 3, 4))
    plans = [world.step([(two, 1)], evenly(2, 3, ring), ahead=False) for ring in (4, 4, 4, 4, 16)]
    assert [(plan.reused, plan.counts.freed) for plan in plans[2:]] == [(True, 0), (True, 0), (False, 4)]
    assert world.checker.faults == []


def test_a_shared_page_is_copied_once_and_attended_by_both() -> None:
    world = World(layers=2, page_tokens=4, cells=10)
    one = world.create(21)
    two = world.fork(one)
    plan = world.step([(one, 1), (two, 1)], evenly(2, 0, 4), ahead=False)
    passing = [key for key in uploaded(plan) if key[1] < 5]
    assert sorted(passing) == [(layer, page) for layer in range(2) for page in range(5)]
    for layer in range(2):
        entries = [entry for op in plan.attend[layer] if isinstance(op, ops.Attend) for entry in op.entries]
        assert sorted(entry[:2] for entry in entries) == [(at, index) for at in (one, two) for index in range(6)]
    assert world.checker.faults == []


def test_the_sequences_of_a_batch_may_come_in_any_order() -> None:
    world = World(layers=2, page_tokens=4, cells=20)
    one, two = world.create(9), world.create(14)
    plan = world.step([(two, 3), (one, 2)], evenly(2, 2))
    writes = [op for op in plan.append[0] if isinstance(op, ops.Write)]
    assert sorted((row, count) for row, count, _, _ in writes[0].rows) == [(0, 2), (2, 1), (3, 2)]
    assert world.checker.faults == []


def test_a_batch_that_cannot_be_is_refused() -> None:
    empty, split, shape = Residency.empty(1, 8, 8), evenly(1, 1), Shape(1, 4)
    for batch, tables in (
        ([(1, 0, 0)], {1: (0,)}),  # nothing new
        ([(1, 4, 1)], {1: (0,)}),  # a page is missing
        ([(1, 0, 1), (1, 0, 1)], {1: (0,)}),  # twice
        ([(1, 4, 1), (2, 4, 1)], {1: (0, 1), 2: (2, 1)}),  # two write the same page
        ([(1, 8, 1), (2, 4, 1)], {1: (0, 1, 2), 2: (0, 1)}),  # one reads what the other writes
    ):
        with pytest.raises(AccountingBug):
            plan_step(empty, split, batch, tables, shape)


def test_a_split_for_another_model_is_refused() -> None:
    for layers in (1, 3):
        with pytest.raises(AccountingBug, match=f"a split of {layers} layers and a model of 2"):
            plan_step(Residency.empty(2, 8, 9), evenly(layers, 1), [(1, 0, 1)], {1: (0,)}, Shape(2, 4))


# --- rows -------------------------------------------------------------------------------------------------------------


def test_rows_that_are_written_again_wait_for_their_save_and_others_do_not() -> None:
    world = World(layers=2, page_tokens=16, cells=8)
    sequence = world.create()
    split = evenly(2, 4)
    waits = []
    for width, keep in ((5, 5), (5, 2), (5, 5), (1, 1), (3, 0), (1, 1)):
        plan = world.step([(sequence, width)], split)
        world.truncate(sequence, world.tokens[sequence] - width + keep)
        waits.append(kinds(plan.ops()).count("AwaitSaved"))
    assert waits == [0, 0, 1, 0, 0, 1]
    assert world.checker.faults == []


@pytest.mark.parametrize("cells", [cells_min(3, 4, 14, 1), cells_min(3, 4, 14, 1) + 9, 60])
def test_a_wide_step_fills_pages_in_a_pool_of_any_size(cells: int) -> None:
    world = World(layers=3, page_tokens=4, cells=cells)
    sequence = world.create(2)
    for _ in range(6):
        plan = world.step([(sequence, 14)], evenly(3, 4 if cells > 50 else 1), table_slots=0)
    assert world.checker.faults == []
    saved = [op for op in plan.ops() if isinstance(op, ops.Save)]
    assert sum(op.count for op in saved) == 3 * 14 and len(saved) >= 3 * 4
    assert plan.counts.early > 0


def test_a_tail_that_a_wide_step_fills_stays_in_its_cell_until_its_layer_is_done() -> None:
    world = World(layers=3, page_tokens=4, cells=16)
    sequence = world.create(8)
    world.step([(sequence, 2)], evenly(3, 0))
    tail = world.tables[sequence][-1]
    for width in (5, 3, 7):
        plan = world.step([(sequence, width)], evenly(3, 0))
        assert tail not in [page for _, page in uploaded(plan)][: -plan.counts.ahead or None]
        tail = world.tables[sequence][-1]
    assert world.checker.faults == []


def test_the_running_form_is_for_prefill_and_for_what_the_table_cannot_take() -> None:
    world = World(layers=1, page_tokens=8, cells=32)
    sequence = world.create(64)
    folds = [next(op.fold for op in world.step([(sequence, width)], evenly(1, 9), table_slots=slots).attend[0]
                  if isinstance(op, ops.Attend))
             for width, slots in ((1, None), (32, None), (33, None), (1, 17), (2, 17))]
    assert folds == ["table", "table", "running", "table", "running"]
    assert world.checker.faults == []


def test_a_plan_leaves_the_residency_it_was_given_as_it_was() -> None:
    world = World(layers=2, page_tokens=4, cells=9)
    sequence = world.create(30)
    world.step([(sequence, 1)], evenly(2, 2))
    before = world.residency
    copy = (before.held.holder.copy(), before.held.cell_of.copy(), before.held.used.copy(), dict(before.unsettled))
    world.step([(sequence, 7)], evenly(2, 1))
    assert (before.held.holder == copy[0]).all() and (before.held.cell_of == copy[1]).all()
    assert (before.held.used == copy[2]).all() and dict(before.unsettled) == copy[3]
