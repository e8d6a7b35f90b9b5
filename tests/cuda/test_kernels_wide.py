"""kv_wide: attention on tensor cores. Values against the float64 oracle, and the same bits however the work is cut.

The tensor core here is the simulated driver's: it multiplies by the fragments that the PTX ISA defines, and so does the
first test, which has them in another notation. No GPU has confirmed either; a cache asks its own when it is opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from numpy.typing import NDArray

from kvstream.cuda import kernels
from kvstream.cuda.types import KVType
from tests.cuda.alone import HERE, KERNELS, Alone, LaunchError, build, build_alone, cache_of, open_machine
from tests.cuda.cases import Case, Desk, Rows, geometry_of, worst
from tests.cuda.ledger import Fault, fault

KINDS = tuple(kind.label for kind in KVType)
TOLERANCE = 1.5e-3  # of the largest output: q, p, and what f16 does not hold of K and V are rounded to 11 bits
EXACT_KV = 6e-4  # K and V are f16


@pytest.fixture(scope="module")
def machine(request: pytest.FixtureRequest) -> Iterator[Alone]:
    opened = open_machine(request.config, checked=False)
    yield opened
    opened.clear()


def computed(machine: Alone, case: Case, seed: int = 0, tolerance: float = TOLERANCE) -> NDArray[Any]:
    """In several cuts, which must agree to the bit, and with the oracle."""
    machine.clear()
    desk = Desk(machine, case, seed)
    out = desk.wide(case.all_at_once())
    assert out.tobytes() == desk.wide(case.in_waves(seed)).tobytes(), "in waves"
    assert out.tobytes() == desk.wide(case.in_waves(seed + 1)).tobytes(), "in other waves"
    assert worst(out, case.expected()) < tolerance
    assert machine.reports() == []
    return out


# --- pieces -----------------------------------------------------------------------------------------------------------

# Registers to places as strides: lane = 4 g + t, the halves of a register, the registers. Each is (steps of t, of g, of
# the half, of the first and the second bit of the register's number), in row + 16 k, column + 8 k and row + 16 column.
A_STRIDES, B_STRIDES, C_STRIDES = (32, 1, 16, 8, 128), (16, 1, 8, 64, 0), (32, 1, 16, 8, 0)


def places(strides: tuple[int, ...], registers: int) -> NDArray[np.int64]:
    """[lane][value], two values to a register; C has one to a register, of which two stand for one here."""
    lane, value = np.arange(32)[:, None], np.arange(2 * registers)[None]
    return (lane % 4 * strides[0] + lane // 4 * strides[1] + value % 2 * strides[2]
            + value // 2 % 2 * strides[3] + value // 4 * strides[4])


def test_a_warp_multiplies_matrices(request: pytest.FixtureRequest) -> None:
    machine = open_machine(request.config, checked=False, sources=[HERE / "pieces.cu"])
    dice = np.random.default_rng(5)
    for size, tolerance in ((0, 0.0), (1, 3e-6)):  # whole numbers are exact
        a, b, c = (dice.standard_normal(n) if size else dice.integers(-9, 10, n) for n in (256, 128, 128))
        a, b, c = a.astype(np.float16), b.astype(np.float16), c.astype(np.float32)
        registers = np.concatenate([
            c[places(C_STRIDES, 2)].view(np.uint32), a[places(A_STRIDES, 4)].view(np.uint32),
            b[places(B_STRIDES, 2)].view(np.uint32)], axis=1)
        out = machine.empty(32, 4)
        machine.launch("piece_mma", (1, 1, 1), 32, 0, machine.array(registers), out, 0, formats="PPi")
        got = np.zeros(128, np.float32)
        got[places(C_STRIDES, 2)] = out
        expected = a.reshape(16, 16).T.astype(np.float64) @ b.reshape(16, 8) + c.reshape(8, 16).T
        assert np.abs(got.reshape(8, 16).T - expected).max() <= tolerance


def test_powers_of_two(request: pytest.FixtureRequest) -> None:
    machine = open_machine(request.config, checked=False, sources=[HERE / "pieces.cu"])
    x = np.linspace(-100, 0, 100_001, dtype=np.float32)
    special = np.array([0, -0.0, -1, -100.5, -3e38, -np.inf, np.nan], np.float32)
    given = np.concatenate([x, special])
    out = machine.empty(len(given))
    machine.launch("piece_power", (-(-len(given) // 256), 1, 1), 256, 0, machine.array(given), out, len(given),
                   formats="PPi")
    assert np.abs(out[: len(x)] / np.exp2(x.astype(np.float64) + 15) - 1).max() < 4e-6
    assert np.array_equal(out[len(x) :], [32768, 32768, 16384, 0, 0, 0, np.nan], equal_nan=True)


# --- values and cuts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k_type", KINDS)
def test_types(machine: Alone, k_type: str) -> None:
    for number, v_type in enumerate(KINDS):
        geometry = geometry_of(k_type, v_type, 64, kv_heads=2, group=3)
        case = Case.random(geometry, [(75, 33), (34, 34)], seed=KINDS.index(k_type) * 9 + number)
        computed(machine, case, tolerance=EXACT_KV if k_type == v_type == "f16" else TOLERANCE)


@pytest.mark.parametrize("group", [1, 5, 6, 16])
@pytest.mark.parametrize("head_size", kernels.HEAD_SIZES)
def test_head_sizes_and_groups(machine: Alone, head_size: int, group: int) -> None:
    """Rows times group are never whole tiles, nor tokens whole strips."""
    geometry = geometry_of("q8_0", "q4_0", head_size, kv_heads=2, group=group)
    computed(machine, Case.random(geometry, [(85, 35)], seed=group))


@pytest.mark.parametrize("page_tokens", [32, 96, 256])
@pytest.mark.parametrize(("tokens", "rows"), [(100, 100), (300, 37), (257, 33), (513, 64)])
def test_pages_and_widths(machine: Alone, page_tokens: int, tokens: int, rows: int) -> None:
    geometry = geometry_of("f16", "q8_0", 64, kv_heads=1, group=2, page_tokens=page_tokens)
    computed(machine, Case.random(geometry, [(tokens, rows)], seed=tokens))


@pytest.mark.parametrize("window", [1, 31, 40, 64, 1000])
def test_a_window(machine: Alone, window: int) -> None:
    geometry = geometry_of("q4_1", "f16", 96, kv_heads=1, group=2)
    computed(machine, Case.random(geometry, [(150, 70), (33, 33)], seed=3, window=window))


def test_several_sequences_are_each_as_if_alone(machine: Alone) -> None:
    geometry = geometry_of("q8_0", "q5_1", 128, kv_heads=2, group=6, page_tokens=64)
    together = Case.random(geometry, [(200, 33), (64, 64), (45, 40), (129, 3)], seed=5)
    out = computed(machine, together)
    for first, sequence in zip(together.first_rows, together.sequences, strict=True):
        rows = slice(first, first + sequence.rows)
        alone = Case(geometry, (sequence,), together.q[rows])
        assert out[rows].tobytes() == computed(machine, alone, seed=9).tobytes()


def test_the_order_of_blocks_and_threads_does_not_matter(machine: Alone) -> None:
    geometry = geometry_of("q8_0", "q4_0", 256, kv_heads=2, group=6, page_tokens=64)
    case = Case.random(geometry, [(130, 33)], seed=1)
    outs = set()
    for seed in range(6):
        machine.seed = seed
        outs.add(computed(machine, case, seed).tobytes())
    assert len(outs) == 1


@pytest.mark.parametrize(("kind", "size"), [("bf16", 1e9), ("bf16", 1e30), ("q8_0", 5e5), ("f32", 1e9)])
def test_what_f16_cannot_hold(machine: Alone, kind: str, size: float) -> None:
    """K and V far beyond 65,504 in one strip of each page, and queries so small that scores are of ordinary size."""
    case = Case.random(geometry_of(kind, kind, 64, kv_heads=2, group=2, page_tokens=64), [(140, 70)], seed=2, size=size)
    case = evolve(case, q=(case.q / np.float32(size) / np.float32(size)).astype(np.float32))
    out = computed(machine, case)
    assert np.abs(out).max() > 0.3 * size


def test_queries_of_any_size(machine: Alone) -> None:
    geometry = geometry_of("f16", "f16", 64, kv_heads=1, group=1)
    case = Case.random(geometry, [(64, 40)], seed=6)
    sizes = np.exp2(np.arange(40, dtype=np.float32) * 4 - 120)[:, None, None]
    q = np.where(np.arange(40)[:, None, None] % 2, case.q * sizes, np.float32(0)).astype(np.float32)
    computed(machine, evolve(case, q=q), tolerance=EXACT_KV)


def test_small_probabilities_count(machine: Alone) -> None:
    """One token that everybody looks at, and thousands whose p is 2^-16 of its: together they weigh as much."""
    geometry = geometry_of("f16", "f16", 64, kv_heads=1, group=1, page_tokens=512)
    case = Case.random(geometry, [(4096, 33)], seed=8)
    sequence: Rows = case.sequences[0]
    k, v = np.zeros((4096, 64), np.float16), np.ones((4096, 64), np.float16)
    k[0, 0], v[0] = 11.09, -1.0  # e^11.09 is 2^16
    raw = [array.view(np.uint8).reshape(8, -1) for array in (k, v)]
    q = np.zeros_like(case.q)
    q[:, :, 0] = 8.0  # times scale, 1 / 8
    given = Rows(4096, 33, k.reshape(4096, 1, 64).astype(np.float32), v.reshape(4096, 1, 64).astype(np.float32), *raw)
    assert sequence.k_pages.shape == given.k_pages.shape
    out = computed(machine, evolve(case, sequences=(given,), q=q), tolerance=3e-4)
    assert -0.9 < out.max() < -0.85


def test_what_is_no_number_is_handed_on(machine: Alone) -> None:
    geometry = geometry_of("f16", "f16", 64, kv_heads=1, group=1)
    for where in ("k_pages", "v_pages"):
        case = Case.random(geometry, [(140, 128)], seed=8)
        getattr(case.sequences[0], where)[3, : geometry.k_row_bytes] = 0xFF  # token 96, of row 84: the second tile
        machine.clear()
        out = Desk(machine, case).wide(case.all_at_once())
        assert np.isnan(out[84:]).all() and np.isfinite(out[:64]).all()


@pytest.mark.parametrize("head_size", [64, 256])
def test_the_checked_build_has_nothing_to_say(request: pytest.FixtureRequest, head_size: int) -> None:
    machine = open_machine(request.config, checked=True)
    for number, kind in enumerate(KINDS):
        machine.seed = number
        geometry = geometry_of(kind, KINDS[(number + 4) % len(KINDS)], head_size, kv_heads=2, group=1 + number % 3)
        computed(machine, Case.random(geometry, [(40, 33)], seed=number), seed=number)


# --- planted faults ---------------------------------------------------------------------------------------------------

WIDE = (KERNELS / "wide.cuh").read_text("utf-8")
BARRIERS = WIDE.count("block_sync();")
CHANGES = (
    ("K one register off", "8 * n + 2 * t);\n            mma", "8 * n + 2 * (t ^ 1));\n            mma"),
    ("tokens in another order than p", "2 * (quad & 3);", "4 * (quad & 3);"),
    ("rows g and g + 8 swapped in p", "pack_halves(low.at[0], low.at[1]), pack_halves(low.at[2], low.at[3])",
     "pack_halves(low.at[2], low.at[3]), pack_halves(low.at[0], low.at[1])"),
    ("the mask forgotten", "if (!whole && ", "if (false && "),
    ("a maximum of one lane", "quad_max(top)", "top"),
    ("the old sum not scaled", "fmaf(lane.sum[h], factor[h], sum)", "lane.sum[h] + sum"),
    ("each lane loads the sum", "t == 0 ? ml[1] : 0.0f", "ml[1]"),
    ("one strip too many words", "values = keys + TOKENS * KEY_WORDS;", "values = keys + (TOKENS - 1) * KEY_WORDS;"),
    ("too much said of what is whole", "all_to = first < tokens", "all_to = last < tokens"),
    ("zeros forgotten", "if (token + at < end) v[c] =", "v[c] ="),
)


def planted(folder: Path, old: str, new: str, nth: int = 0) -> Path:
    """kv_wide_64 of two types, with the nth occurrence of ``old`` in wide.cuh replaced."""
    starts = [match.start() for match in re.finditer(re.escape(old), WIDE)]
    assert len(starts) > nth, f"wide.cuh does not contain {old!r} any more"
    folder.mkdir(exist_ok=True)
    (folder / "wide.cuh").write_text(WIDE[: starts[nth]] + new + WIDE[starts[nth] + len(old) :], "utf-8")
    for name in ("attend.cuh", "port.cuh"):
        (folder / name).write_text((KERNELS / name).read_text("utf-8"), "utf-8")
    kinds, count = re.subn(r"(#define FOR_EACH_KIND\(DO\)) (?:.*\\\n)+.*\n", r"\1 DO(KIND_F16) DO(KIND_Q4_0)\n",
                           (KERNELS / "kinds.cuh").read_text("utf-8"))
    whole = (KERNELS / "kv.cu").read_text("utf-8")
    kernel = re.search(r'    extern "C" __global__ void __launch_bounds__\(WIDE_(?:.*\\\n)+?    SIM_KERNEL.*\\\n',
                       whole)
    assert count == 1 and kernel is not None
    (folder / "kinds.cuh").write_text(kinds, "utf-8")
    (folder / "kv.cu").write_text('#include "wide.cuh"\n#define HEAD_SIZE(D) \\\n' + kernel[0] + "\nHEAD_SIZE(64)\n",
                                  "utf-8")
    return folder / "kv.cu"


def symptoms(machine: Alone, seed: int) -> set[str]:
    machine.clear()
    machine.seed = seed
    case = Case.random(geometry_of("f16", "q4_0", 64, kv_heads=2, group=3), [(90, 50), (40, 33)], seed=seed)
    desk = Desk(machine, case, seed)
    found = set()
    for waves in ([[1, 2], [1, 2], [3, 2]], case.in_waves(seed)):  # one without pages
        try:
            if not worst(desk.wide(waves), case.expected()) < TOLERANCE:
                found.add("values")
        except LaunchError as error:
            found.add("address" if "bytes" in str(error) else "launch")
    return found | {line.split(":")[0] for line in machine.reports()}


def said(request: pytest.FixtureRequest, source: Path) -> list[set[str]]:
    """By the checked build, on a few seeds."""
    cache = cache_of(request.config)
    machine = Alone(build_alone(cache), build(cache, [source], True))
    return [symptoms(machine, seed) for seed in range(3)]


def noticed(noted: Fault, found: list[set[str]]) -> None:
    for kind in sorted(set().union(*found)):
        times = sum(kind in kinds for kinds in found)
        noted.caught_by("oracle" if kind == "values" else kind, "kernels, checked", times, len(found))


def test_without_a_fault_nothing_is_said(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    assert said(request, planted(tmp_path, "// Attention", "//  Attention")) == [set()] * 3


@pytest.mark.parametrize("nth", range(BARRIERS))
def test_a_missing_barrier_is_reported_on_every_seed(request: pytest.FixtureRequest, tmp_path: Path, nth: int) -> None:
    assert BARRIERS == 3
    with fault(f"wide kernels: barrier {nth + 1} of {BARRIERS} left out", "threads that do not wait") as noted:
        found = said(request, planted(tmp_path, "block_sync();", "", nth))
        assert all(kinds & {"race-shared", "race-global", "uninit-shared"} for kinds in found)
        noticed(noted, found)


@pytest.mark.parametrize(("name", "old", "new"), CHANGES, ids=[name for name, _, _ in CHANGES])
def test_other_faults_are_seen(request: pytest.FixtureRequest, tmp_path: Path, name: str, old: str, new: str) -> None:
    with fault(f"wide kernels: {name}", "a mistake in the kernels' arithmetic or addresses") as noted:
        found = said(request, planted(tmp_path, old, new))
        assert all(found)
        noticed(noted, found)
