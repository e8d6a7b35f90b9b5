"""Faults planted in small programs, and what the simulated driver says of each. The checker has to see every missing
event on every schedule; values have to go wrong on some, or the schedules would be too tame.
"""

from __future__ import annotations

import pytest

from tests.cuda.driver import scenes
from tests.cuda.driver.control import POLICIES
from tests.cuda.driver.pool import Simulated, only

SEEDS = 48  # eight of each policy


@pytest.mark.parametrize("event", scenes.EVENTS)
def test_a_missing_event_is_reported_on_every_schedule(simulated: Simulated, event: str) -> None:
    results = simulated.seeds(scenes.stream_pages, SEEDS, without=event, kernels="toy", checked=True)
    assert all(any(line.startswith("race: ") for line in lines) for _, lines in results)


@pytest.mark.parametrize("event", scenes.EVENTS)
def test_a_missing_event_gives_wrong_values_on_some_schedules(simulated: Simulated, event: str) -> None:
    results = simulated.seeds(scenes.stream_pages, SEEDS, without=event, kernels="toy", checker=False)
    wrong = sum(value != scenes.expected_state() for value, _ in results)
    assert wrong >= len(results) // 12, f"{wrong} of {len(results)}"
    assert not any(lines for _, lines in results)


def test_the_host_that_does_not_wait_is_seen_by_value_and_by_what_it_says_it_reads(simulated: Simulated) -> None:
    results = simulated.seeds(scenes.stream_pages, SEEDS, without="wait", kernels="toy")
    assert all(any(line.startswith("host-access: ") for line in lines) for _, lines in results)
    assert sum(value != scenes.expected_state() for value, _ in results) >= len(results) // 2


@pytest.mark.parametrize("scene", [scenes.free_pinned_too_early, scenes.free_device_too_early])
def test_memory_freed_under_a_copy_is_reported_on_every_schedule(simulated: Simulated, scene) -> None:
    found = simulated.seeds(scene, SEEDS)
    assert all(kinds <= {"free-pending", "free-unsynchronised"} and len(kinds) == 1 for kinds in found)
    assert {"free-pending"} in found and {"free-unsynchronised"} in found


def test_a_source_that_the_host_changes_is_reported_on_every_schedule(simulated: Simulated) -> None:
    assert only(simulated.seeds(scenes.change_source, SEEDS)) == {"source-changed"}


def test_a_result_read_too_early_is_neither_old_nor_new(simulated: Simulated) -> None:
    results = simulated.seeds(scenes.read_too_early, SEEDS)
    assert all(kinds == {"host-access"} for _, kinds in results)
    values = {value for value, _ in results}
    assert 5.0 not in values and len(values) == 2  # what will be there, or poison


def test_arguments_of_the_wrong_size_are_refused(simulated: Simulated) -> None:
    error, kinds = simulated.call(scenes.wrong_packing, kernels="toy")
    assert (error, kinds) == ("LogicError", {"bad-launch"})


def test_impossible_launches_are_refused(simulated: Simulated) -> None:
    assert simulated.call(scenes.bad_shapes, kernels="toy") == ["LogicError"] * 4


def test_copies_out_of_bounds_are_refused(simulated: Simulated) -> None:
    errors, kinds = simulated.call(scenes.copy_out_of_bounds)
    assert errors == ["LogicError"] * 4 and kinds == {"out-of-bounds"}


@pytest.mark.parametrize(("checked", "offset"), [(True, 1024), (True, -4), (True, 1022), (True, 1 << 20),
                                                 (False, 1 << 20), (False, -(1 << 40))])
def test_a_kernel_out_of_bounds_leaves_an_error_that_sticks(simulated: Simulated, checked: bool, offset: int) -> None:
    sticks, later, reports = simulated.call(scenes.kernel_out_of_bounds, offset, kernels="toy", checked=checked)
    assert sticks and later == "LogicError"
    assert [line for line in reports if line.startswith("fault: toy_wild")]


@pytest.mark.parametrize("offset", [1024, -4, 1030])
def test_the_fast_build_finds_a_write_beside_an_allocation_in_its_guards(simulated: Simulated, offset: int) -> None:
    sticks, later, reports = simulated.call(scenes.kernel_out_of_bounds, offset, kernels="toy")
    assert not sticks and later == ""
    assert [line.split(":")[0] for line in reports] == ["guard"] and "seen after toy_wild" in reports[0]


@pytest.mark.parametrize("checked", [False, True])
def test_a_kernel_on_freed_memory_faults(simulated: Simulated, checked: bool) -> None:
    sticks, _, reports = simulated.call(scenes.kernel_out_of_bounds, 0, freed=True, kernels="toy", checked=checked)
    assert sticks and "(freed)" in reports[0]


@pytest.mark.parametrize(("name", "said"), [("toy_fault", "planted fault"), ("toy_abandon", "planted deadlock")])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_the_runtime_of_the_kernels_finds_sticks(simulated: Simulated, name: str, said: str, policy: str) -> None:
    later, reports = simulated.call(scenes.bad_kernel, name, kernels="toy", policy=policy)
    assert all(later) and said in reports[0]


def test_what_the_runtime_only_reports_does_not_stick(simulated: Simulated) -> None:
    later, reports = simulated.call(scenes.bad_kernel, "toy_report", kernels="toy")
    assert later == ["", "", ""] and reports == ["race-shared: toy_report(s0 #0): planted race"]


def test_memory_that_nobody_wrote_is_reported_when_a_kernel_reads_it(simulated: Simulated) -> None:
    assert simulated.call(scenes.read_uninitialised, 16, kernels="toy", checked=True) == []
    (line,) = simulated.call(scenes.read_uninitialised, 15, kernels="toy", checked=True)
    assert line.startswith("uninitialised: toy_fold") and "+0x3c" in line  # through the copy, to the value


def test_no_wait_of_the_host_is_no_order(simulated: Simulated) -> None:
    assert only(simulated.seeds(scenes.through_the_host, 12, how="")) == {"race"}


def test_a_read_that_is_ordered_hides_no_write_from_one_that_is_not(simulated: Simulated) -> None:
    for lines in simulated.seeds(scenes.third_reader, 24, waits=False):
        (line,) = lines
        assert line.startswith("race: ") and "memset(s1" in line and "d2d(s3" in line


def test_a_writer_that_misses_most_of_many_readers_is_reported(simulated: Simulated) -> None:
    results = simulated.seeds(scenes.many_readers, 12, left_out=5)
    assert all(kinds == {"race"} for _, kinds in results)


def test_one_shared_byte_is_a_race(simulated: Simulated) -> None:
    assert only(simulated.seeds(scenes.neighbours, 12, overlap=1)) == {"race"}


def test_an_atomic_update_and_a_plain_write_are_a_race(simulated: Simulated) -> None:
    results = simulated.seeds(scenes.atomics, 12, plain=True, kernels="toy", checked=True)
    assert all(kinds == {"race"} for _, kinds in results)
