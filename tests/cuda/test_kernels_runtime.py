"""The runtime that kernels are tested on, tested itself: what is clean is not reported, what is planted is.

A harness that finds nothing proves nothing, and one that cries wolf is switched off. Races are asked for in the checked
build on every seed; in the fast build only what it can see.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from tests.cuda.alone import HERE, Alone, LaunchError, open_machine
from tests.cuda.ledger import Fault, fault

PLANTED = HERE / "planted.cu"
NAMES = [line.split("(")[1].split(")")[0] for line in PLANTED.read_text("utf-8").splitlines()
         if line.startswith("KERNEL(")]
SEEDS = range(8)
BLOCKS, THREADS = 3, 128


def planted_kernel(kernel: str, stands_for: str) -> AbstractContextManager[Fault]:
    return fault(f"kernel {kernel}", stands_for)


def opened(request: pytest.FixtureRequest, checked: bool) -> Alone:
    return open_machine(request.config, checked, [Path(PLANTED)])


@pytest.fixture(params=[False, True], ids=["fast", "checked"])
def machine(request: pytest.FixtureRequest) -> Iterator[Alone]:
    yield opened(request, request.param)


@pytest.fixture
def checked(request: pytest.FixtureRequest) -> Iterator[Alone]:
    yield opened(request, True)


def run(machine: Alone, kernel: str, seed: int, n: int = 512, threads: int = THREADS,
        shared: int = 4 * THREADS) -> np.ndarray:
    machine.clear()
    machine.seed = seed
    source = machine.array(np.arange(512, dtype=np.int32))
    # Where blocks race, one may read what the other has not written yet: that is another report, and ends the launch.
    size = BLOCKS * threads
    races = kernel.startswith("race_global")
    out = machine.array(np.zeros(size, np.int32)) if races else machine.empty(size, dtype=np.int32)
    machine.launch(kernel, (BLOCKS, 1, 1), threads, shared, source, out, n, formats="PPi")
    return np.array(out).reshape(BLOCKS, threads)


def test_there_are_kernels_of_every_kind() -> None:
    assert {name.split("_")[0] for name in NAMES} == {"clean", "race", "fault"}


def test_clean_programs_compute_what_they_should_and_are_not_reported(machine: Alone) -> None:
    t = np.arange(THREADS)
    tiles = np.arange(512).reshape(4, THREADS)
    expected = {
        "clean_tiles": (tiles[:, ::-1] + np.roll(tiles, -1, axis=1)).sum(axis=0),
        "clean_warp": (t ^ 1) + 6,
        "clean_static": t[::-1] + 2 * np.roll(t, -1),
        "clean_many_readers": np.full(THREADS, 8),
        "clean_stack": [sum((thread + (i * 7 + thread) % 32) % 7 for i in range(32)) for thread in range(THREADS)],
        "clean_one_after_the_other": t[::-1],
    }
    for seed in SEEDS:
        for kernel, values in expected.items():
            got = run(machine, kernel, seed, n=512 if kernel == "clean_tiles" else 7)
            assert np.array_equal(got, np.tile(values, (3, 1)))
            assert machine.reports() == [], kernel
        machine.clear()
        halves = machine.empty(3 * THREADS, dtype=np.int16)
        machine.launch("clean_neighbours", (3, 1, 1), THREADS, 2 * THREADS, machine.array(t.astype(np.int32)), halves,
                       0, formats="PPi")
        assert np.array_equal(halves.reshape(3, -1), np.tile(t ^ 1, (3, 1)))
        assert machine.reports() == []


def test_what_one_launch_leaves_is_no_race_of_the_next(checked: Alone) -> None:
    out = checked.empty(BLOCKS * THREADS, dtype=np.int32)
    source = checked.array(np.arange(512, dtype=np.int32))
    for _ in range(3):
        checked.launch("clean_stack", (BLOCKS, 1, 1), THREADS, 0, source, out, 7, formats="PPi")
        checked.launch("clean_tiles", (BLOCKS, 1, 1), THREADS, 4 * THREADS, source, out, THREADS, formats="PPi")
    assert checked.reports() == []


def test_reductions_are_the_butterfly_of_the_device(machine: Alone) -> None:
    machine.clear()
    x = np.random.default_rng(3).standard_normal(3 * THREADS).astype(np.float32)
    out = machine.empty(3 * THREADS, 3)
    machine.launch("clean_reductions", (3, 1, 1), THREADS, 0, machine.array(x), out, 0, formats="PPi")
    lanes = x.reshape(-1, 32)
    tree, quads = lanes.copy(), [lanes * np.float32(n) for n in range(1, 9)]
    for apart in (16, 8, 4, 2, 1):
        tree = tree + tree[:, np.arange(32) ^ apart]
    for apart in (1, 2):
        quads = [sums + sums[:, np.arange(32) ^ apart] for sums in quads]
    assert np.array_equal(out[:, 0], tree.reshape(-1))
    assert np.array_equal(out[:, 1], np.repeat(lanes.max(axis=1), 32))
    assert np.array_equal(out[:, 2], (quads[7] - quads[6] + quads[0]).reshape(-1))


def test_packed_arguments(machine: Alone) -> None:
    machine.clear()
    source, out = machine.array(np.array([1], np.int32)), machine.empty(1, dtype=np.int32)
    machine.launch("clean_arguments", (1, 1, 1), 32, 0, -2, 30.0, 400, source, 5000.0, out, 60000, formats="bdhPfPl")
    assert out[0] == 1 - 2 + 30 + 400 + 5000 + 60000
    with pytest.raises(LaunchError, match="takes 56 bytes of arguments"):
        machine.launch("clean_arguments", (1, 1, 1), 32, 0, source, out, formats="PP")
    with pytest.raises(LaunchError, match="no such kernel"):
        machine.launch("clean_nothing", (1, 1, 1), 32, 0, formats="")


@pytest.mark.parametrize("kernel", [name for name in NAMES if name.startswith("race_")])
def test_a_race_is_reported_on_every_seed(checked: Alone, kernel: str) -> None:
    where = "race-global" if "global" in kernel else "race-shared"
    with planted_kernel(kernel, "a barrier that is not there, or not enough") as planted:
        for seed in SEEDS:
            run(checked, kernel, seed)
            kinds = {line.split(":")[0] for line in checked.reports()}
            assert where in kinds, f"seed {seed}: {checked.reports()}"
        planted.caught_by(where, "one kernel, checked", len(SEEDS), len(SEEDS))


FAULTS = {
    "fault_shared_read_beyond": "reads 4 bytes at byte 512 of shared memory, which has 512",
    "fault_shared_write_beyond": "writes 4 bytes at byte 512 of shared memory, which has 512",
    "fault_global_beyond": "writes 4 bytes outside of every array",
    "fault_uninitialised_global": "reads byte .* of array 1, which nobody has written",
    "fault_wild": "reads 4 bytes at the wild address 0x200",
}
STUCK = {
    "fault_barrier_not_for_all": r"nobody can go on: 5 threads \(0 1 2 3 \.\.\.\) wait at a barrier in line \d+, 123 t",
    "fault_two_barriers": "a divergent barrier: thread",
    "fault_divergent_warp": "a divergent warp operation: thread",
    "fault_lane_left": r"nobody can go on: 31 threads .* wait at a warp operation in line \d+, \d+ threads .* have",
}


@pytest.mark.parametrize("kernel", FAULTS)
def test_a_wrong_address_ends_the_launch(checked: Alone, kernel: str) -> None:
    with planted_kernel(kernel, "a wrong index, or memory that nobody wrote") as planted:
        for seed in SEEDS:
            with pytest.raises(LaunchError, match=FAULTS[kernel]):
                run(checked, kernel, seed)
        planted.caught_by("the launch ends", "one kernel, checked", len(SEEDS), len(SEEDS))
    run(checked, "clean_tiles", 1)
    assert checked.reports() == []


def test_a_read_of_shared_memory_that_nobody_wrote_is_reported(checked: Alone) -> None:
    with planted_kernel("fault_uninitialised_shared", "shared memory that nobody wrote") as planted:
        for seed in SEEDS:
            run(checked, "fault_uninitialised_shared", seed)
            assert [line.split(":")[0] for line in checked.reports()] == ["uninit-shared"]
        planted.caught_by("uninit-shared", "one kernel, checked", len(SEEDS), len(SEEDS))


@pytest.mark.parametrize("kernel", STUCK)
def test_threads_that_never_meet_end_the_launch(machine: Alone, kernel: str) -> None:
    with planted_kernel(kernel, "threads that wait for those who never come") as planted:
        for seed in SEEDS:
            with pytest.raises(LaunchError, match=STUCK[kernel]):
                run(machine, kernel, seed, n=5)
        planted.caught_by("the launch ends", "one kernel, both builds", len(SEEDS), len(SEEDS))
    assert run(machine, "clean_tiles", 1).any()


def test_a_warp_operation_needs_a_whole_warp(machine: Alone) -> None:
    with planted_kernel("fault_half_a_warp", "a warp operation of less than a warp") as planted:
        with pytest.raises(LaunchError, match="in a warp of less than 32"):
            run(machine, "fault_half_a_warp", 1, threads=20)
        planted.caught_by("the launch ends", "one kernel, both builds")


def test_a_write_beyond_shared_memory_is_seen_in_the_fast_build_too(request: pytest.FixtureRequest) -> None:
    with planted_kernel("fault_shared_write_beyond", "a wrong index, or memory that nobody wrote") as planted:
        with pytest.raises(LaunchError, match="writes beyond its 512 bytes of shared memory"):
            run(opened(request, False), "fault_shared_write_beyond", 1)
        planted.caught_by("guard zone", "one kernel, fast")


def test_launches_that_cannot_be(machine: Alone) -> None:
    with pytest.raises(LaunchError, match="a block of 2000 threads"):
        run(machine, "clean_stack", 1, threads=2000)
    with pytest.raises(LaunchError, match="999999 bytes of shared memory"):
        run(machine, "clean_tiles", 1, shared=999_999)


def test_every_planted_kernel_is_used() -> None:
    text = Path(__file__).read_text("utf-8")
    assert [name for name in NAMES if not name.startswith("race_") and f'"{name}"' not in text] == []
