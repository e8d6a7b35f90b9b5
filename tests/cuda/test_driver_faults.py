"""Faults planted in small programs, and what the simulated driver says of each. The checker has to see every missing
event on every schedule; values have to go wrong on some, or the schedules would be too tame.
"""

from __future__ import annotations

import pytest

from tests.cuda.driver import scenes
from tests.cuda.driver.control import POLICIES
from tests.cuda.driver.pool import Simulated, only
from tests.cuda.ledger import fault

SEEDS = 48  # eight of each policy
STANDS_FOR = {"ready": "a kernel reads a page before it was copied", "used": "a cell is filled while it is read",
              "written": "rows are saved before they were computed", "saved": "a tail is uploaded before its producer"}
FAST, CHECKED = "toy program, fast", "toy program, checked"


def left_out(event: str) -> str:
    return f"toy program: the wait for '{event}' left out"


@pytest.mark.parametrize("event", scenes.EVENTS)
def test_a_missing_event_is_reported_on_every_schedule(simulated: Simulated, event: str) -> None:
    with fault(left_out(event), STANDS_FOR[event]) as planted:
        results = simulated.seeds(scenes.stream_pages, SEEDS, without=event, kernels="toy", checked=True)
        assert all(any(line.startswith("race: ") for line in lines) for _, lines in results)
        planted.caught_by("race", CHECKED, len(results), len(results))


@pytest.mark.parametrize("event", scenes.EVENTS)
def test_a_missing_event_gives_wrong_values_on_some_schedules(simulated: Simulated, event: str) -> None:
    with fault(left_out(event), STANDS_FOR[event]) as planted:
        results = simulated.seeds(scenes.stream_pages, SEEDS, without=event, kernels="toy", checker=False)
        wrong = sum(value != scenes.expected_state() for value, _ in results)
        assert wrong >= len(results) // 12, f"{wrong} of {len(results)}"
        assert not any(lines for _, lines in results)
        planted.caught_by("wrong bits", FAST, wrong, len(results))


def test_the_host_that_does_not_wait_is_seen_by_value_and_by_what_it_says_it_reads(simulated: Simulated) -> None:
    with fault(left_out("wait"), "the host reads a result before it waited for its copy") as planted:
        results = simulated.seeds(scenes.stream_pages, SEEDS, without="wait", kernels="toy")
        assert all(any(line.startswith("host-access: ") for line in lines) for _, lines in results)
        wrong = sum(value != scenes.expected_state() for value, _ in results)
        assert wrong >= len(results) // 2
        planted.caught_by("host-access", FAST, len(results), len(results))
        planted.caught_by("wrong bits", FAST, wrong, len(results))


@pytest.mark.parametrize("scene", [scenes.free_pinned_too_early, scenes.free_device_too_early])
def test_memory_freed_under_a_copy_is_reported_on_every_schedule(simulated: Simulated, scene) -> None:
    with fault(f"toy program: {scene.__name__.replace('_', ' ')}", "memory goes while a copy may use it") as planted:
        found = simulated.seeds(scene, SEEDS)
        assert all(kinds <= {"free-pending", "free-unsynchronised"} and len(kinds) == 1 for kinds in found)
        assert {"free-pending"} in found and {"free-unsynchronised"} in found
        planted.caught_by("free-pending or free-unsynchronised", FAST, len(found), len(found))


def test_a_source_that_the_host_changes_is_reported_on_every_schedule(simulated: Simulated) -> None:
    with fault("toy program: a source changed by the host", "the host writes a page that is being copied") as planted:
        found = simulated.seeds(scenes.change_source, SEEDS)
        assert only(found) == {"source-changed"}
        planted.caught_by("source-changed", FAST, len(found), len(found))


def test_a_result_read_too_early_is_neither_old_nor_new(simulated: Simulated) -> None:
    with fault("toy program: pinned memory read too early", "a host page is read before its copy is done") as planted:
        results = simulated.seeds(scenes.read_too_early, SEEDS)
        assert all(kinds == {"host-access"} for _, kinds in results)
        values = {value for value, _ in results}
        assert 5.0 not in values and len(values) == 2  # what will be there, or poison
        planted.caught_by("host-access", FAST, len(results), len(results))


def test_arguments_of_the_wrong_size_are_refused(simulated: Simulated) -> None:
    with fault("arguments packed wrongly", "`prepare` with other letters than the kernel's") as planted:
        error, kinds = simulated.call(scenes.wrong_packing, kernels="toy")
        assert (error, kinds) == ("LogicError", {"bad-launch"})
        planted.caught_by("driver error", FAST)


def test_impossible_launches_are_refused(simulated: Simulated) -> None:
    with fault("launches of impossible shapes", "grids, blocks, shared memory that no GPU has") as planted:
        assert simulated.call(scenes.bad_shapes, kernels="toy") == ["LogicError"] * 4
        planted.caught_by("driver error", FAST, 4, 4)


def test_copies_out_of_bounds_are_refused(simulated: Simulated) -> None:
    with fault("a copy beyond an allocation", "a cell or page computed wrongly") as planted:
        errors, kinds = simulated.call(scenes.copy_out_of_bounds)
        assert errors == ["LogicError"] * 4 and kinds == {"out-of-bounds"}
        planted.caught_by("driver error", FAST, 4, 4)


@pytest.mark.parametrize(("checked", "offset"), [(True, 1024), (True, -4), (True, 1022), (True, 1 << 20),
                                                 (False, 1 << 20), (False, -(1 << 40))])
def test_a_kernel_out_of_bounds_leaves_an_error_that_sticks(simulated: Simulated, checked: bool, offset: int) -> None:
    with fault("a kernel writes elsewhere", "a wrong address in a table") as planted:
        sticks, later, reports = simulated.call(scenes.kernel_out_of_bounds, offset, kernels="toy", checked=checked)
        assert sticks and later == "LogicError"
        assert [line for line in reports if line.startswith("fault: toy_wild")]
        planted.caught_by("driver error that sticks", CHECKED if checked else FAST)


@pytest.mark.parametrize("offset", [1024, -4, 1030])
def test_the_fast_build_finds_a_write_beside_an_allocation_in_its_guards(simulated: Simulated, offset: int) -> None:
    with fault("a kernel writes beside an allocation", "a row too many") as planted:
        sticks, later, reports = simulated.call(scenes.kernel_out_of_bounds, offset, kernels="toy")
        assert not sticks and later == ""
        assert [line.split(":")[0] for line in reports] == ["guard"] and "seen after toy_wild" in reports[0]
        planted.caught_by("guard zone", FAST)


@pytest.mark.parametrize("checked", [False, True])
def test_a_kernel_on_freed_memory_faults(simulated: Simulated, checked: bool) -> None:
    with fault("a kernel writes freed memory", "a pool that is gone") as planted:
        sticks, _, reports = simulated.call(scenes.kernel_out_of_bounds, 0, freed=True, kernels="toy", checked=checked)
        assert sticks and "(freed)" in reports[0]
        planted.caught_by("driver error that sticks", CHECKED if checked else FAST)


@pytest.mark.parametrize(("name", "said"), [("toy_fault", "planted fault"), ("toy_abandon", "planted deadlock")])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_the_runtime_of_the_kernels_finds_sticks(simulated: Simulated, name: str, said: str, policy: str) -> None:
    with fault(f"a kernel's runtime finds a {said}", "what the kernels' own runtime says reaches the program") as it:
        later, reports = simulated.call(scenes.bad_kernel, name, kernels="toy", policy=policy)
        assert all(later) and said in reports[0]
        it.caught_by("driver error that sticks", FAST)


def test_what_the_runtime_only_reports_does_not_stick(simulated: Simulated) -> None:
    later, reports = simulated.call(scenes.bad_kernel, "toy_report", kernels="toy")
    assert later == ["", "", ""] and reports == ["race-shared: toy_report(s0 #0): planted race"]


def test_memory_that_nobody_wrote_is_reported_when_a_kernel_reads_it(simulated: Simulated) -> None:
    assert simulated.call(scenes.read_uninitialised, 16, kernels="toy", checked=True) == []
    with fault("a kernel reads what nobody wrote", "a cell that was never filled") as planted:
        (line,) = simulated.call(scenes.read_uninitialised, 15, kernels="toy", checked=True)
        assert line.startswith("uninitialised: toy_fold") and "+0x3c" in line  # through the copy, to the value
        planted.caught_by("uninitialised", CHECKED)


def test_no_wait_of_the_host_is_no_order(simulated: Simulated) -> None:
    with fault("toy program: the host stands for an event", "order taken from a wait that was not made") as planted:
        found = simulated.seeds(scenes.through_the_host, 12, how="")
        assert only(found) == {"race"}
        planted.caught_by("race", FAST, len(found), len(found))


def test_a_read_that_is_ordered_hides_no_write_from_one_that_is_not(simulated: Simulated) -> None:
    with fault("toy program: one of three readers does not wait", "an event that covers most of its users") as planted:
        results = simulated.seeds(scenes.third_reader, 24, waits=False)
        for lines in results:
            (line,) = lines
            assert line.startswith("race: ") and "memset(s1" in line and "d2d(s3" in line
        planted.caught_by("race", FAST, len(results), len(results))


def test_a_writer_that_misses_most_of_many_readers_is_reported(simulated: Simulated) -> None:
    with fault("toy program: a writer misses a reader of many", "an event that covers most of its users") as planted:
        results = simulated.seeds(scenes.many_readers, 12, left_out=5)
        assert all(kinds == {"race"} for _, kinds in results)
        planted.caught_by("race", FAST, len(results), len(results))


def test_one_shared_byte_is_a_race(simulated: Simulated) -> None:
    with fault("toy program: two streams share one byte", "rows that overlap") as planted:
        found = simulated.seeds(scenes.neighbours, 12, overlap=1)
        assert only(found) == {"race"}
        planted.caught_by("race", FAST, len(found), len(found))


def test_an_atomic_update_and_a_plain_write_are_a_race(simulated: Simulated) -> None:
    with fault("toy program: an atomic update beside a plain write", "state shared between launches") as planted:
        results = simulated.seeds(scenes.atomics, 12, plain=True, kernels="toy", checked=True)
        assert all(kinds == {"race"} for _, kinds in results)
        planted.caught_by("race", CHECKED, len(results), len(results))
