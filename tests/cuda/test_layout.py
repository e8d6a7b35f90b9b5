"""Layouts: nothing overlaps, everything is aligned and inside its budget, and what does not fit is refused with the
numbers that would."""

from __future__ import annotations

import itertools
import random
import re

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from kvstream.cuda.layout import (
    ALIGNMENT,
    STAGED,
    Geometry,
    Layout,
    cells_min,
    plan_layout,
    tile_slots,
    tiles_max,
    workspace_sizes,
)
from kvstream.cuda.types import KVType
from kvstream.errors import ConfigError
from tests.cuda.strategies import geometries

QWEN = Geometry(layers=16, kv_heads=4, q_heads=24, head_size=256, k_type=KVType.Q8_0, v_type=KVType.Q4_0)
MIB = 1 << 20


# --- geometry ---------------------------------------------------------------------------------------------------------


def test_sizes_of_the_reference_model() -> None:
    """The published figures of Qwen3.8-27B with Q8_0 keys and Q4_0 values."""
    assert (QWEN.k_row_bytes, QWEN.v_row_bytes) == (1088, 576)
    assert (QWEN.k_page_bytes, QWEN.v_page_bytes, QWEN.page_bytes) == (278_528, 147_456, 425_984)
    assert QWEN.layers * QWEN.page_bytes // QWEN.page_tokens == 26_624
    assert QWEN.group == 6
    assert QWEN.pages(0) == 0 and QWEN.pages(1) == 1 and QWEN.pages(256) == 1 and QWEN.pages(257) == 2
    assert QWEN.pages(256 << 10) * QWEN.page_bytes * QWEN.layers == 6656 * MIB


def test_every_pair_of_types_has_a_geometry() -> None:
    for k_type, v_type in itertools.product(KVType, KVType):
        geometry = Geometry(2, 2, 4, 80, k_type, v_type, page_tokens=32)
        assert geometry.k_page_bytes % ALIGNMENT == 0 and geometry.v_page_bytes % ALIGNMENT == 0
        assert 0 <= geometry.k_page_bytes - 32 * k_type.row_bytes(160) < ALIGNMENT
        assert 0 <= geometry.v_page_bytes - 32 * v_type.row_bytes(160) < ALIGNMENT


def test_a_block_may_straddle_two_heads_but_no_row() -> None:
    assert Geometry(1, 2, 2, 80, KVType.Q8_0, KVType.F32).k_row_bytes == 5 * 34
    with pytest.raises(ConfigError, match="a V row has 3 \\* 80 = 240 values, and q4_0 stores multiples of 32"):
        Geometry(1, 3, 3, 80, KVType.F16, KVType.Q4_0)


@pytest.mark.parametrize(("changes", "expected"), [
    ({"layers": 0}, "layers is 0"),
    ({"kv_heads": 0}, "kv_heads is 0"),
    ({"q_heads": 68}, "17 query heads share a KV head; the kernels take up to 16"),
    ({"q_heads": 6}, "6 query heads cannot share 4 KV heads"),
    ({"head_size": 72}, "no kernel for head size 72; there are 64, 80, 96, 128, 256"),
    ({"page_tokens": 48}, "pages of 48 tokens: it must be a multiple of 32 up to 512"),
    ({"page_tokens": 0}, "pages of 0 tokens"),
    ({"page_tokens": 2048}, "pages of 2048 tokens"),
])
def test_refused_geometries(changes: dict[str, int], expected: str) -> None:
    fields = {"layers": 2, "kv_heads": 4, "q_heads": 8, "head_size": 64} | changes
    with pytest.raises(ConfigError, match=expected):
        Geometry(**fields, k_type=KVType.F16, v_type=KVType.F16)  # type: ignore[arg-type]


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        Geometry(0, 3, 3, 40, KVType.Q8_0, KVType.Q8_0, page_tokens=7)
    assert len(refused.value.problems) == 5


# --- layouts ----------------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    geometry = draw(geometries())
    rows_max, sequences_max = draw(st.integers(1, 70)), draw(st.integers(1, 4))
    context_max = draw(st.integers(1, 600))
    slots = draw(st.integers(1, 9))
    bare = Layout(geometry, 0, 0, rows_max, sequences_max, context_max, slots)
    cells = cells_min(geometry, rows_max, sequences_max) + draw(st.integers(0, 5))
    host_pages = max(geometry.pages(context_max), sequences_max) + draw(st.integers(0, 3))
    return plan_layout(
        geometry, bare.pool_bytes + cells * geometry.page_bytes + draw(st.integers(255, 5000)),
        bare.host_bytes + host_pages * geometry.layers * geometry.page_bytes + draw(st.integers(0, 5000)),
        rows_max, sequences_max, context_max, slots)


def assert_apart(pieces: list[tuple[int, int]], end: int) -> None:
    """(offset, size) each: none overlaps another, all lie in 0..end."""
    last = 0
    for offset, size in sorted(pieces):
        assert offset >= last and size > 0
        last = offset + size
    assert last <= end


@given(layout=layouts())
def test_nothing_in_the_pool_overlaps(layout: Layout) -> None:
    geometry = layout.geometry
    pieces = [(workspace.offset, workspace.size) for workspace in layout.workspaces]
    for cell in range(layout.cells):
        pieces += [(layout.k_cell(cell), geometry.k_page_bytes), (layout.v_cell(cell), geometry.v_page_bytes)]
    assert_apart(pieces, layout.pool_bytes)
    assert all(offset % ALIGNMENT == 0 for offset, _ in pieces)
    for cell in range(layout.cells - 1):  # a run of cells is one piece of K and one of V
        assert layout.k_cell(cell + 1) == layout.k_cell(cell) + geometry.k_page_bytes
        assert layout.v_cell(cell + 1) == layout.v_cell(cell) + geometry.v_page_bytes


@given(layout=layouts())
def test_nothing_on_the_host_overlaps(layout: Layout) -> None:
    geometry = layout.geometry
    pieces = [(layout.staging(which), layout.staging_bytes) for which in (0, 1)]
    for layer, page in itertools.product(range(geometry.layers), range(layout.host_pages)):
        pieces += [(layout.k_host(layer, page), geometry.k_page_bytes),
                   (layout.v_host(layer, page), geometry.v_page_bytes)]
        if page:
            assert layout.k_host(layer, page) == layout.k_host(layer, page - 1) + geometry.k_page_bytes
            assert layout.v_host(layer, page) == layout.v_host(layer, page - 1) + geometry.v_page_bytes
    assert_apart(pieces, layout.host_bytes)
    assert all(offset % ALIGNMENT == 0 for offset, _ in pieces)


@given(layout=layouts())
def test_the_staged_workspaces_are_one_piece(layout: Layout) -> None:
    staged = [workspace for workspace in layout.workspaces if workspace.name in STAGED]
    assert [workspace.name for workspace in staged] == list(STAGED)
    assert layout.workspaces[: len(STAGED)] == tuple(staged)
    last = staged[-1]
    assert last.offset + last.size <= staged[0].offset + layout.staging_bytes <= layout.workspace("q").offset


@given(layout=layouts(), less=st.integers(1, 300))
def test_a_layout_fits_exactly_what_it_asks_for(layout: Layout, less: int) -> None:
    """Planned again with its own sizes it is the same; with less it is another one or refused."""
    limits = (layout.rows_max, layout.sequences_max, layout.context_max, layout.table_slots)
    assert plan_layout(layout.geometry, layout.pool_bytes, layout.host_bytes, *limits) == layout

    def narrower(pool_bytes: int, host_bytes: int) -> Layout | None:
        try:
            found = plan_layout(layout.geometry, pool_bytes, host_bytes, *limits)
        except ConfigError:
            return None
        assert found.pool_bytes <= pool_bytes and found.host_bytes <= host_bytes
        return found

    small_pool = narrower(layout.pool_bytes - less * 256, layout.host_bytes)
    assert small_pool is None or small_pool.cells < layout.cells
    small_host = narrower(layout.pool_bytes, layout.host_bytes - less)
    assert small_host is None or small_host.host_pages < layout.host_pages


@given(layout=layouts(), pool_more=st.integers(0, 20_000), host_more=st.integers(0, 200_000))
def test_no_budget_is_exceeded(layout: Layout, pool_more: int, host_more: int) -> None:
    geometry = layout.geometry
    pool_bytes, host_bytes = layout.pool_bytes + pool_more, layout.host_bytes + host_more
    found = plan_layout(geometry, pool_bytes, host_bytes, layout.rows_max, layout.sequences_max, layout.context_max,
                        layout.table_slots)
    assert found.pool_bytes <= pool_bytes and found.host_bytes <= host_bytes
    assert found.cells >= layout.cells and found.host_pages >= layout.host_pages
    assert found.host_bytes + geometry.layers * geometry.page_bytes > host_bytes  # one page more would not fit


def test_workspaces_begin_aligned_within_the_budget() -> None:
    """Cells of an odd number of units leave a gap before the workspaces, and the gap is paid for."""
    geometry = Geometry(1, 1, 1, 64, KVType.Q5_1, KVType.Q4_0, page_tokens=32)
    assert geometry.page_bytes % 256 == 128
    bare = Layout(geometry, 0, 0, 4, 1, 64, 1)
    for cells in (5, 6):
        exact = bare.pool_bytes + cells * geometry.page_bytes
        for pool_bytes in range(exact - 256, exact + 512, 32):
            assert plan_layout(geometry, pool_bytes, MIB, 4, 1, 64, 1).pool_bytes <= pool_bytes, (cells, pool_bytes)


def test_every_sequence_has_a_page_on_the_host() -> None:
    """Four sequences of one page each need four pages, although the longest context is one."""
    geometry = Geometry(1, 1, 1, 64, KVType.F16, KVType.F16, page_tokens=32)
    bare = Layout(geometry, 0, 0, 4, 4, 32, 1)
    host_bytes = bare.host_bytes + 4 * geometry.page_bytes
    assert plan_layout(geometry, MIB, host_bytes, 4, 4, 32, 1).host_pages == 4
    with pytest.raises(ConfigError, match="4 sequences of 32 tokens and less are 4 pages"):
        plan_layout(geometry, MIB, host_bytes - 1, 4, 4, 32, 1)


def test_more_cells_than_pages_are_not_asked_for() -> None:
    geometry = Geometry(2, 1, 1, 64, KVType.F16, KVType.F16, page_tokens=32)
    layout = plan_layout(geometry, 512 * MIB, MIB, rows_max=40, sequences_max=2, context_max=100)
    assert layout.cells == 2 * layout.host_pages + cells_min(geometry, 40, 2) - 2 * 2
    assert layout.pool_bytes < 4 * MIB


# --- the fewest cells -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_tokens", [32, 64])
@pytest.mark.parametrize("sequences", [1, 2, 3])
def test_the_fewest_cells_hold_any_step(page_tokens: int, sequences: int) -> None:
    """Tried out: however the rows are dealt to sequences, and wherever these stand in their pages, the new rows of one
    layer touch no more pages than there are tails and cells to fill; and some step does touch that many."""
    geometry = Geometry(1, 1, 1, 64, KVType.F16, KVType.F16, page_tokens=page_tokens)

    def touched(rows: int) -> int:  # by one sequence, at the worst place to begin
        return max(((before + rows - 1) // page_tokens) - (before // page_tokens) + 1
                   for before in range(page_tokens)) if rows else 1  # its tail stays where it is

    by_rows = [touched(rows) for rows in range(3 * page_tokens)]
    worst = by_rows
    for _ in range(sequences - 1):
        worst = [max(worst[mine] + by_rows[rows - mine] for mine in range(rows + 1)) for rows in range(3 * page_tokens)]
    for rows in range(1, 3 * page_tokens):
        assert cells_min(geometry, rows, sequences) == worst[rows] + 1, rows


# --- budgets ----------------------------------------------------------------------------------------------------------


def test_the_published_pool() -> None:
    """2048 MiB hold 5041 pages of the reference model; ours has its workspaces in the same 2048 MiB."""
    layout = plan_layout(QWEN, 2048 * MIB, 8 << 30, rows_max=512, sequences_max=1, context_max=256 << 10)
    assert 2048 * MIB // QWEN.page_bytes == 5041
    assert 2048 * MIB - QWEN.page_bytes - 256 <= layout.pool_bytes <= 2048 * MIB
    assert layout.workspace_bytes < 72 * MIB and layout.cells > 4860
    assert layout.workspace("table").size == 1024 * 24 * 256 * 4  # one row over all pages of the longest context
    assert layout.entries_max == 1024 and layout.staging_bytes < 6 * MIB
    assert layout.host_pages == ((8 << 30) - 2 * layout.staging_bytes) // (16 * QWEN.page_bytes)


def test_the_table_is_bounded() -> None:
    wide = plan_layout(QWEN, 2048 * MIB, 8 << 30, rows_max=64, sequences_max=4, context_max=256 << 10)
    assert 31 * MIB < wide.workspace("table").size + wide.workspace("table_ml").size <= 32 * MIB
    small = plan_layout(QWEN, 96 * MIB, 8 << 30, rows_max=64, sequences_max=1, context_max=256 << 10)
    assert 5 * MIB < small.workspace("table").size + small.workspace("table_ml").size <= 6 * MIB
    asked = plan_layout(QWEN, 2048 * MIB, 8 << 30, 64, 1, 256 << 10, table_slots=3000)
    assert asked.workspace("table").size + asked.workspace("table_ml").size == 3000 * QWEN.partial_bytes


@pytest.mark.parametrize("group", [1, 3, 8, 16])
@pytest.mark.parametrize("sequences", [1, 2, 3])
def test_the_most_tiles(group: int, sequences: int) -> None:
    """Tried out: however rows are dealt to sequences."""
    geometry = Geometry(2, 1, group, 64, KVType.F16, KVType.F16)
    for rows in range(1, 20):
        dealt = [deal for deal in itertools.product(range(rows + 1), repeat=sequences) if sum(deal) == rows]
        most = max(sum(-(-mine * group // 8) for mine in deal) for deal in dealt)
        assert most <= tiles_max(geometry, rows, sequences) <= most + sequences
        assert group > 1 or tiles_max(geometry, rows, sequences) == most


def test_tiles_are_bounded() -> None:
    wave = QWEN.layers * tiles_max(QWEN, 512, 1)
    assert wave == 16 * 384
    assert tile_slots(QWEN, 512, 1, 1000) == 4 * wave  # four pages, each a wave
    assert tile_slots(QWEN, 512, 1, 256 << 10) == (4 << 20) // 32
    assert tile_slots(QWEN, 65536, 1, 256 << 10) == 16 * 65536 * 6 // 8


def test_workspaces_have_the_documented_sizes() -> None:
    geometry = Geometry(3, 2, 6, 96, KVType.F16, KVType.Q8_0, page_tokens=64)
    assert dict(workspace_sizes(geometry, rows_max=5, sequences_max=2, context_max=200, table_slots=7)) == {
        "pointers": 3 * 2 * 8 * 8, "targets": 3 * 2 * 5 * 8, "entries": 3 * 8 * 32, "tiles": 3 * 3 * 8 * 32,
        "folds": 3 * 5 * 16, "positions": 5 * 4, "q": 5 * 6 * 96 * 4, "k": 5 * 2 * 96 * 4, "v": 5 * 2 * 96 * 4,
        "out": 5 * 6 * 96 * 4, "state": 5 * 6 * 96 * 4, "state_ml": 5 * 6 * 2 * 4, "table": 7 * 6 * 96 * 4,
        "table_ml": 7 * 6 * 2 * 4}


def test_refusals_name_what_is_needed() -> None:
    """The number in the message is enough, and one byte less is not."""
    def plan(pool_bytes: int, host_bytes: int) -> Layout:
        return plan_layout(QWEN, pool_bytes, host_bytes, 1, 1, 32768, table_slots=1)

    with pytest.raises(ConfigError) as refused:
        plan(MIB, MIB)
    host, pool = refused.value.problems
    assert "32768 tokens are 128 pages of 6.5 MiB (16 layers)" in host
    assert "a pool of 1,048,576 bytes is too small: 17 cells of 425,984 bytes are needed" in pool
    assert "(layers 16, sequences 1, rows 1)" in pool

    fits = plan_layout(QWEN, 64 * MIB, 4 << 30, 1, 1, 32768, table_slots=1)
    least_pool, least_host = (
        int(re.findall(r"([\d,]+) bytes", problem)[-1].replace(",", "")) for problem in (pool, host))
    assert plan(least_pool, least_host).cells == 17 and plan(least_pool, least_host).host_pages == 128
    for pool_bytes, host_bytes in ((least_pool - 1, least_host), (least_pool, least_host - 1)):
        with pytest.raises(ConfigError):
            plan(pool_bytes, host_bytes)
    assert fits.cells > 17


@pytest.mark.parametrize("name", ["rows_max", "sequences_max", "context_max", "table_slots"])
def test_limits_must_be_positive(name: str) -> None:
    for value in (-1, 0):
        limits = {"rows_max": 1, "sequences_max": 1, "context_max": 1} | {name: value}
        with pytest.raises(ConfigError, match=f"{name} is {value}"):
            plan_layout(QWEN, 64 * MIB, 4 << 30, **limits)


def test_what_a_refusal_asks_for_is_enough() -> None:
    """Also where the table of partials grows with the pool, and where the caller takes host memory for himself."""
    dice = random.Random(1)
    for _ in range(60):
        shape = QWEN if dice.random() < 0.5 else evolve(QWEN, layers=dice.choice((1, 200)), head_size=64)
        limits = (dice.choice((1, 7, 512)), dice.choice((1, 5, 64)), dice.choice((31, 10_000, 10_000_000)))
        taken = dice.choice((0, 12_345))
        with pytest.raises(ConfigError) as refused:
            plan_layout(shape, dice.choice((-1, 0, 1 << 16)), 0, *limits, host_taken=taken)
        host, pool = (int(re.findall(r"([\d,]+) bytes", problem.split(";")[0])[-1].replace(",", ""))
                      for problem in refused.value.problems)
        layout = plan_layout(shape, pool, host, *limits, host_taken=taken)
        assert layout.pool_bytes <= pool and layout.host_bytes + taken <= host
        with pytest.raises(ConfigError, match="bytes of host memory"):
            plan_layout(shape, pool, host - 1, *limits, host_taken=taken)


@pytest.mark.parametrize(("name", "value"), [("rows_max", 2_000_000), ("sequences_max", 2048), ("context_max", 1 << 31),
                                             ("table_slots", 1 << 31)])
def test_more_than_the_kernels_can_count_to_is_refused(name: str, value: int) -> None:
    asked = {"rows_max": 1, "sequences_max": 1, "context_max": 1, "table_slots": 1} | {name: value}
    with pytest.raises(ConfigError, match=f"{name} is {value}, the kernels can count to"):
        plan_layout(QWEN, 1 << 60, 1 << 60, **asked)
