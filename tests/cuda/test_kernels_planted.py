"""The kernels with faults planted in them: a barrier left out, one buffer where there are two, a wrong bound.

Each is compiled (one head size) in the checked build and must be reported on every seed tried; what the values of the
fast build say is only counted, in the table of ``show_faults``: there a missing barrier may well go unseen.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cuda.alone import KERNELS, Alone, LaunchError, build, build_alone, cache_of, open_machine
from tests.cuda.cases import Case, Desk, geometry_of, worst
from tests.cuda.ledger import fault

ATTEND = (KERNELS / "attend.cuh").read_text("utf-8")
BARRIERS = ATTEND.count("block_sync();")
SEEDS = range(3)

# What each deliberate change makes of attend.cuh: (name, old text, new text).
CHANGES = (
    ("one 'seen' for all pages", "desk.seen + 16 * (n & 1)", "desk.seen"),
    ("one buffer of parts", "turn ^= 1;", ""),
    ("a token too many", "token < end; token += Shape", "token <= end; token += Shape"),
    ("the gap in q forgotten", "scores = q + 10 * D;", "scores = q + 9 * D;"),
    ("every wave begins anew", "const bool begin = (flags & TILE_BEGIN) != 0;", "const bool begin = true;"),
    ("two kv heads in one place", "int(blockIdx.y) * a.group};", "0};"),
)


def test_the_barriers_are_the_known_ones() -> None:
    assert BARRIERS == 5  # a new one is planted too; this only says that the count below is not empty
    found = {file.name: file.read_text("utf-8").count("block_sync();") for file in KERNELS.glob("*.cu*")}
    assert {name for name, number in found.items() if number} == {"attend.cuh", "wide.cuh"}  # test_kernels_wide's


def source(folder: Path, old: str, new: str, nth: int = 0) -> Path:
    """kv.cu for one head size with the nth occurrence of ``old`` in attend.cuh replaced."""
    places = [match.start() for match in re.finditer(re.escape(old), ATTEND)]
    assert len(places) > nth, f"attend.cuh does not contain {old!r} any more"
    at = places[nth]
    folder.mkdir(exist_ok=True)
    (folder / "attend.cuh").write_text(ATTEND[:at] + new + ATTEND[at + len(old) :], "utf-8")
    (folder / "port.cuh").write_text((KERNELS / "port.cuh").read_text("utf-8"), "utf-8")
    kinds, count = re.subn(r"(#define FOR_EACH_KIND\(DO\)) (?:.*\\\n)+.*\n", r"\1 DO(KIND_Q8_0) DO(KIND_Q4_0)\n",
                           (KERNELS / "kinds.cuh").read_text("utf-8"))
    assert count == 1
    (folder / "kinds.cuh").write_text(kinds, "utf-8")  # two types only: an eighth of the time to compile
    kernels = re.sub(r"^HEAD_SIZE\((?!64\)).*\n", "", (KERNELS / "kv.cu").read_text("utf-8"), flags=re.MULTILINE)
    # Without wide.cuh, which has faults of its own (test_kernels_wide) and would find the attend.cuh beside it.
    wide = r' *extern "C" __global__ void __launch_bounds__\(WIDE_(?:.*\\\n)+? *SIM_KERNEL\(kv_wide.*\n'
    kernels, count = re.subn(wide, "", kernels)
    assert count == 1 and kernels.count('#include "wide.cuh"') == 1
    (folder / "kv.cu").write_text(kernels.replace("wide.cuh", "attend.cuh"), "utf-8")
    return folder / "kv.cu"


def symptoms(machine: Alone, seed: int) -> set[str]:
    """Everything that tells: reports, a launch that ends, values that are wrong."""
    machine.clear()
    machine.seed = seed
    case = Case.random(geometry_of("q8_0", "q4_0", 64, kv_heads=2, group=1), [(90, 88), (33, 1)], seed=seed)
    desk = Desk(machine, case, seed)
    found = set()
    for form, waves in ((desk.table, case.in_waves(seed)), (desk.running, case.in_waves(seed)),
                        (desk.running, case.all_at_once())):
        try:
            out = form(waves)
            if not worst(out, case.expected()) < 1e-5:
                found.add("values")
        except LaunchError as error:
            found.add("address" if "bytes" in str(error) else "launch")
    return found | {line.split(":")[0] for line in machine.reports()}


def tried(request: pytest.FixtureRequest, folder: Path, where: Path) -> tuple[list[set[str]], int]:
    """What the checked build says on each seed, and on how many the fast one has wrong values."""
    cache = cache_of(request.config)
    library = build_alone(cache)
    checked = Alone(library, build(cache, [where], True))
    said = [symptoms(checked, seed) for seed in SEEDS]
    fast = Alone(library, build(cache, [where], False))
    return said, sum("values" in symptoms(fast, seed) for seed in SEEDS)


def test_without_a_fault_nothing_is_said(request: pytest.FixtureRequest) -> None:
    for checked in (True, False):
        machine = open_machine(request.config, checked)
        assert [symptoms(machine, seed) for seed in SEEDS] == [set()] * len(SEEDS)


@pytest.mark.parametrize("nth", range(BARRIERS))
def test_a_missing_barrier_is_reported_on_every_seed(request: pytest.FixtureRequest, tmp_path: Path, nth: int) -> None:
    with fault(f"kernels: barrier {nth + 1} of {BARRIERS} left out", "threads that do not wait for others") as planted:
        said, wrong = tried(request, tmp_path, source(tmp_path, "block_sync();", "", nth))
        assert all("race-shared" in kinds or "uninit-shared" in kinds for kinds in said)
        planted.caught_by("race-shared or uninit-shared", "kernels, checked", len(said), len(said))
        planted.caught_by("oracle", "kernels, fast", wrong, len(SEEDS))


@pytest.mark.parametrize(("name", "old", "new"), CHANGES, ids=[name for name, _, _ in CHANGES])
def test_other_faults_are_seen(request: pytest.FixtureRequest, tmp_path: Path, name: str, old: str, new: str) -> None:
    with fault(f"kernels: {name}", "a mistake in the kernels' arithmetic or addresses") as planted:
        said, wrong = tried(request, tmp_path, source(tmp_path, old, new))
        assert all(said)
        for kind in sorted(set().union(*said)):
            planted.caught_by("oracle" if kind == "values" else kind, "kernels, checked",
                              sum(kind in kinds for kinds in said), len(said))
        planted.caught_by("oracle", "kernels, fast", wrong, len(SEEDS))
