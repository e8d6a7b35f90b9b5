"""kv_attend and kv_fold: values against the float64 oracle, and the same bits however the work is cut.

Both forms, all pairs of types, the head sizes, groups and widths that do not divide, several sequences in one launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from numpy.typing import NDArray

from kvstream.cuda import kernels
from kvstream.cuda.types import KVType
from tests.cuda.alone import HERE, Alone, open_machine
from tests.cuda.cases import Case, Desk, Rows, geometry_of, worst

KINDS = tuple(kind.label for kind in KVType)
TOLERANCE = 1.5e-6  # of the largest output; f32 sums of up to a few hundred terms


@pytest.fixture(scope="module")
def machine(request: pytest.FixtureRequest) -> Iterator[Alone]:
    opened = open_machine(request.config, checked=False)
    yield opened
    opened.clear()


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.tobytes() == b.tobytes()


def computed(machine: Alone, case: Case, seed: int = 0) -> NDArray[Any]:
    """In both forms and several cuts, which must agree to the bit, and with the oracle."""
    machine.clear()
    desk = Desk(machine, case, seed)
    out = desk.table(case.all_at_once())
    assert same_bits(out, desk.table(case.in_waves(seed))), "table, in waves"
    assert same_bits(out, desk.running(case.all_at_once())), "running, one wave"
    assert same_bits(out, desk.running(case.in_waves(seed + 1))), "running, in waves"
    assert worst(out, case.expected()) < TOLERANCE
    assert machine.reports() == []
    return out


@pytest.mark.parametrize("v_type", KINDS)
@pytest.mark.parametrize("k_type", KINDS)
def test_every_pair_of_types(machine: Alone, k_type: str, v_type: str) -> None:
    geometry = geometry_of(k_type, v_type, 64, kv_heads=2, group=3)
    computed(machine, Case.random(geometry, [(75, 2), (32, 1)], seed=KINDS.index(k_type) * 9 + KINDS.index(v_type)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("head_size", "kv_heads"), [(64, 2), (80, 2), (96, 1), (256, 1)])
def test_values_are_read_to_the_bit(machine: Alone, kind: str, head_size: int, kv_heads: int) -> None:
    """Of one token the output is its V; and a q that is 1 in one dim and 0 elsewhere has K's value as its score."""
    geometry = geometry_of(kind, kind, head_size, kv_heads, group=1)
    machine.clear()
    dice = np.random.default_rng(head_size)
    sequence = Rows.random(geometry, 1, head_size, dice)
    q = np.repeat(np.eye(head_size, dtype=np.float32)[:, None], kv_heads, axis=1)
    desk = Desk(machine, Case(geometry, (sequence,), q, plain_scores=True), positions=np.zeros(head_size, np.int32))
    out = desk.table([[1]])
    k, v = sequence.k[0].astype(np.float32), sequence.v[0].astype(np.float32)
    assert np.array_equal(out, np.repeat(v[None], head_size, axis=0))  # a sum makes 0 of -0
    assert np.array_equal(machine.read(desk.tops_and_sums)[:, :, 0], k.T)


@pytest.mark.parametrize("group", [1, 2, 4, 5, 6, 8, 12, 16])
@pytest.mark.parametrize("head_size", kernels.HEAD_SIZES)
def test_every_head_size_and_group(machine: Alone, head_size: int, group: int) -> None:
    geometry = geometry_of("q8_0", "q4_0", head_size, kv_heads=2, group=group)
    computed(machine, Case.random(geometry, [(70, 3)], seed=group))


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8])
@pytest.mark.parametrize("head_size", [80, 96, 256])
def test_every_type_where_blocks_straddle_heads(machine: Alone, head_size: int, kv_heads: int) -> None:
    for number, kind in enumerate(KINDS):
        if head_size * kv_heads % 32 and number > 2:
            continue
        v_type = KINDS[-1 - number] if head_size * kv_heads % 32 == 0 else "f16"
        geometry = geometry_of(kind, v_type, head_size, kv_heads)
        computed(machine, Case.random(geometry, [(41, 1)], seed=number))


@pytest.mark.parametrize("page_tokens", [32, 64, 256, 512])
@pytest.mark.parametrize("rows", [1, 2, 7, 31, 100])
def test_widths_that_do_not_divide(machine: Alone, rows: int, page_tokens: int) -> None:
    geometry = geometry_of("q5_0", "q8_0", 64, kv_heads=1, group=3, page_tokens=page_tokens)
    for tokens in sorted({rows, max(rows, page_tokens - 1), page_tokens + rows, 2 * page_tokens + rows // 2 + 1}):
        if tokens >= rows:
            computed(machine, Case.random(geometry, [(tokens, rows)], seed=tokens))


def test_several_sequences_in_one_launch_are_each_as_if_alone(machine: Alone) -> None:
    geometry = geometry_of("q8_0", "q5_1", 128, kv_heads=2, group=6, page_tokens=64)
    lengths = [(200, 1), (64, 3), (5, 5), (129, 17)]
    together = Case.random(geometry, lengths, seed=5)
    out = computed(machine, together)
    for first, sequence in zip(together.first_rows, together.sequences, strict=True):
        rows = slice(first, first + sequence.rows)
        alone = Case(geometry, (sequence,), together.q[rows])
        assert same_bits(out[rows], computed(machine, alone, seed=9))


@pytest.mark.parametrize("window", [kernels.WINDOW_NONE, 21], ids=["all", "window"])
@pytest.mark.parametrize("head_size", [64, 80, 256])
def test_a_wide_step_is_as_many_decodes(machine: Alone, head_size: int, window: int) -> None:
    """Row by row, the pages ending at the row: what comes after it (here rubbish that is no number) does not count."""
    geometry = geometry_of("f16", "f16", head_size, kv_heads=2, group=5)
    case = Case.random(geometry, [(71, 9)], seed=2, window=window)
    sequence = case.sequences[0]
    wide = computed(machine, case)
    for row in range(sequence.rows):
        tokens = sequence.tokens - sequence.rows + row + 1
        pages = geometry.pages(tokens)
        k, v = sequence.k_pages[:pages].copy(), sequence.v_pages[:pages].copy()
        left = tokens - (pages - 1) * geometry.page_tokens
        k[-1, left * geometry.k_row_bytes :] = v[-1, left * geometry.v_row_bytes :] = 0xFF
        one = type(sequence)(tokens, 1, sequence.k[:tokens], sequence.v[:tokens], k, v)
        alone = computed(machine, Case(geometry, (one,), case.q[row : row + 1], window))
        assert same_bits(wide[row : row + 1], alone)


def test_what_a_later_token_holds_does_not_reach_an_earlier_row(machine: Alone) -> None:
    geometry = geometry_of("f16", "bf16", 64, kv_heads=1, group=4)
    case = Case.random(geometry, [(40, 20)], seed=8)
    clean = computed(machine, case)
    sequence = case.sequences[0]
    for page, row in ((0, 29), (1, 3)):  # seen from row 9 on, which shares a block with row 8
        sequence.k_pages[page, row * geometry.k_row_bytes :][: geometry.k_row_bytes] = 0xFF
        sequence.v_pages[page, row * geometry.v_row_bytes :][: geometry.v_row_bytes] = 0xFF
    machine.clear()
    desk = Desk(machine, case)
    for out in (desk.table(case.all_at_once()), desk.running(case.all_at_once())):
        assert same_bits(out[:9], clean[:9])
        assert np.isnan(out[9:]).all()  # a NaN is handed on, never swallowed


def test_a_query_that_is_no_number_harms_no_other(machine: Alone) -> None:
    geometry = geometry_of("q8_0", "q4_0", 64, kv_heads=2, group=2)
    case = Case.random(geometry, [(70, 3), (33, 1)], seed=8)
    clean = computed(machine, case)
    q = case.q.copy()
    q[1, 2, 7] = np.nan
    machine.clear()
    desk = Desk(machine, evolve(case, q=q))
    for out in (desk.table(case.all_at_once()), desk.table(case.in_waves(3)), desk.running(case.in_waves(3))):
        assert np.isnan(out[1, 2]).all()
        out[1, 2] = clean[1, 2]
        assert same_bits(out, clean)


@pytest.mark.parametrize("window", [1, 5, 32, 33, 64, 1000])
def test_a_window(machine: Alone, window: int) -> None:
    geometry = geometry_of("q4_1", "q8_0", 96, kv_heads=1, group=2)
    computed(machine, Case.random(geometry, [(150, 40), (33, 1)], seed=3, window=window))


def test_scores_that_are_far_apart(machine: Alone) -> None:
    geometry = geometry_of("f32", "f32", 64, kv_heads=2, group=2)
    out = computed(machine, Case.random(geometry, [(100, 5)], seed=4, size=20.0))
    assert np.isfinite(out).all()


def test_the_order_of_blocks_and_threads_does_not_matter(machine: Alone) -> None:
    geometry = geometry_of("q8_0", "q4_0", 256, kv_heads=2, group=6, page_tokens=64)
    case = Case.random(geometry, [(200, 3)], seed=1)
    outs = set()
    for seed in range(12):
        machine.seed = seed
        outs.add(computed(machine, case, seed).tobytes())
    assert len(outs) == 1


@pytest.mark.parametrize("head_size", kernels.HEAD_SIZES)
def test_the_checked_build_has_nothing_to_say(request: pytest.FixtureRequest, head_size: int) -> None:
    """Every load and store of kernels without a fault, each type once as K and once as V, ragged pages, three cuts."""
    machine = open_machine(request.config, checked=True)
    for number, kind in enumerate(KINDS):
        machine.seed = number
        geometry = geometry_of(kind, KINDS[(number + 4) % len(KINDS)], head_size, kv_heads=2, group=1 + number % 3)
        computed(machine, Case.random(geometry, [(40, 2), (33, 1)], seed=number), seed=number)


def test_the_exponential(request: pytest.FixtureRequest) -> None:
    machine = open_machine(request.config, checked=False, sources=[HERE / "pieces.cu"])
    x = np.concatenate([np.linspace(-87, 0, 300_001), -np.exp2(np.arange(-140, 6.4, 0.01))]).astype(np.float32)
    special = np.array([0, -0.0, -87.001, -200, -3e38, -np.inf, np.nan], np.float32)
    given = np.concatenate([x, special])
    out = machine.empty(len(given))
    machine.launch("piece_exponential", (-(-len(given) // 256), 1, 1), 256, 0, machine.array(given), out, len(given),
                   formats="PPi")
    exact = np.exp(x.astype(np.float64))
    assert np.abs(out[: len(x)] / exact - 1).max() < 1.3e-7  # a unit in the last place is 1.2e-7 at most
    assert np.array_equal(out[len(x) :], [1, 1, 0, 0, 0, 0, np.nan], equal_nan=True)
