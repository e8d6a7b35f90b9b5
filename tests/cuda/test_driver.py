"""The simulated driver, by itself: what a right program sees under every schedule, and that one seed is one run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cuda.driver import scenes
from tests.cuda.driver.build import Builder
from tests.cuda.driver.control import POLICIES
from tests.cuda.driver.pool import SceneFailed, Simulated, only

EVERY_POLICY = pytest.mark.parametrize("policy", POLICIES)


def test_a_right_program_is_right_under_200_schedules(simulated: Simulated) -> None:
    """Fast build: values. No report either, though the checker sees the copies only."""
    assert only(simulated.seeds(scenes.stream_pages, 200, kernels="toy")) == (scenes.expected_state(), [])


def test_the_checker_raises_no_false_alarm_over_200_schedules(simulated: Simulated) -> None:
    results = simulated.seeds(scenes.stream_pages, 200, kernels="toy", checked=True)
    assert only(results) == (scenes.expected_state(), [])


def test_one_seed_replays_exactly(simulated: Simulated) -> None:
    runs = [{"seed": seed, "policy": policy} for seed in (1, 2) for policy in POLICIES]
    first, second = (simulated.each(scenes.replay, runs, kernels="toy") for _ in range(2))
    assert first == second
    orders = {tuple(trace) for trace in first}
    assert len(orders) >= 6  # the three policies with dice differ by seed, the three without do not
    assert all(sorted(trace) == sorted(first[0]) for trace in first)


def test_the_addresses_are_the_same_in_every_run(simulated: Simulated) -> None:
    found = only([simulated.call(scenes.addresses) for _ in range(3)])
    assert len(set(found)) == 3 and all(address % 256 == 0 for address in found)


def test_the_policies_run_in_different_orders(simulated: Simulated) -> None:
    def orders(policy: str) -> list[tuple[int, ...]]:
        traces = simulated.seeds(scenes.replay, 12, policies=[policy], kernels="toy")
        return [tuple(int(line.split("#")[1].rstrip(")")) for line in trace) for trace in traces]

    found = {policy: orders(policy) for policy in POLICIES}
    in_order = tuple(sorted(found["oldest"][0]))
    assert set(found["oldest"]) == set(found["eager"]) == {in_order}
    assert len(set(found["newest"])) == 1 and found["newest"][0] != in_order
    for policy, least in (("uniform", 10), ("starve", 8), ("priorities", 6)):
        assert len(set(found[policy])) >= least, policy


def test_the_policies_differ_in_what_the_device_does_by_itself(simulated: Simulated) -> None:
    assert simulated.call(scenes.left_over, policy="eager") == [0] * 7
    for policy in ("newest", "oldest"):
        assert simulated.call(scenes.left_over, policy=policy) == [1, 2, 3, 4, 5, 6, 0]
    for policy in ("uniform", "starve", "priorities"):
        found = {tuple(left) for left in simulated.seeds(scenes.left_over, 16, policies=[policy])}
        assert len(found) >= 2 and (1, 2, 3, 4, 5, 6, 0) in found, policy


@EVERY_POLICY
def test_the_default_stream_orders_blocking_streams_only(simulated: Simulated, policy: str) -> None:
    runs = [{"seed": seed, "policy": policy} for seed in range(12)]
    assert simulated.each(scenes.default_stream, runs, flags=0) == [(4, [])] * 12
    unordered = simulated.each(scenes.default_stream, runs, flags=scenes.NON_BLOCKING)
    assert all(any(line.startswith("race: ") for line in lines) for _, lines in unordered)
    if policy in ("uniform", "newest"):
        assert any(value != 4 for value, _ in unordered)


@EVERY_POLICY
def test_a_wait_takes_the_record_of_its_moment_and_polling_ends(simulated: Simulated, policy: str) -> None:
    for seed in range(6):
        pending, polls, ended = simulated.call(scenes.events, seed=seed, policy=policy)
        assert ended and polls < 10
        if policy == "oldest":
            assert pending == 2  # the memset and the second record were not waited for


def test_queued_work_that_reuses_a_source_in_order_is_no_change_by_the_host(simulated: Simulated) -> None:
    assert only(simulated.seeds(scenes.reuse_source_for_download, 60)) == 3.0


def test_pageable_memory_is_staged_and_counted(simulated: Simulated) -> None:
    assert only(simulated.seeds(scenes.pageable, 12)) == (4.0, 2)


def test_neighbouring_rows_of_two_streams_do_not_conflict(simulated: Simulated) -> None:
    assert only(simulated.seeds(scenes.neighbours, 12, overlap=0)) == set()


@pytest.mark.parametrize("how", ["stream", "event", "query", "done", "context"])
def test_an_order_that_comes_from_the_host_is_an_order(simulated: Simulated, how: str) -> None:
    assert only(simulated.seeds(scenes.through_the_host, 12, how=how)) == set()


def test_many_readers_raise_no_false_alarm(simulated: Simulated) -> None:
    assert only(simulated.seeds(scenes.third_reader, 12, waits=True)) == []
    results = simulated.seeds(scenes.many_readers, 12, left_out=0)
    assert all(kinds == set() for _, kinds in results)
    assert any(evicted for evicted, _ in results)  # more than a granule remembers


def test_atomic_updates_do_not_conflict_with_each_other(simulated: Simulated) -> None:
    assert only(simulated.seeds(scenes.atomics, 12, plain=False, kernels="toy", checked=True)) == (3, set())


def test_waiting_makes_freeing_and_changing_harmless(simulated: Simulated) -> None:
    for scene in (scenes.free_pinned_too_early, scenes.free_device_too_early, scenes.change_source):
        assert only(simulated.seeds(scene, 12, wait=True)) == set()


def test_memory_has_limits_and_failures_can_be_planted(simulated: Simulated) -> None:
    errors, (free, total), used, peak = simulated.call(scenes.memory_limits)
    assert errors == ["MemoryError", "MemoryError", "MemoryError"]
    assert (total, free) == (1 << 20, (1 << 20) - 600_000)
    assert used == 0 and peak == 600_016


def test_managed_memory_is_seen_by_both_sides(simulated: Simulated) -> None:
    first, last = simulated.call(scenes.managed, kernels="toy", checked=True)
    assert first != 0.0  # poison
    assert last == 1 * 3 + 15 * 2


def test_virtual_time_does_not_depend_on_the_schedule(simulated: Simulated) -> None:
    times = set(simulated.seeds(scenes.elapsed, 24))
    assert len(times) == 1 and times.pop() > 0


def test_contexts_belong_to_threads(simulated: Simulated) -> None:
    assert simulated.call(scenes.threads) == ["LogicError", ""]


def test_the_order_of_blocks_depends_on_the_seed_alone(simulated: Simulated) -> None:
    orders = {policy: simulated.call(scenes.seeds_of_launches, kernels="toy", policy=policy) for policy in POLICIES}
    assert len({tuple(order) for order in orders.values()}) == 1
    assert len(set(orders["uniform"])) == 3
    assert simulated.call(scenes.seeds_of_launches, kernels="toy", seed=1) != orders["uniform"]


def test_bad_images_and_names_are_refused(simulated: Simulated) -> None:
    assert simulated.call(scenes.bad_modules, kernels="toy") == ["RuntimeError", "LogicError", "LogicError"]


def test_what_nobody_wrote_says_so(simulated: Simulated) -> None:
    error, counted = simulated.call(scenes.unsupported)
    assert error and counted == 1


def test_after_a_reset_old_handles_are_dead(simulated: Simulated) -> None:
    with pytest.raises(SceneFailed, match="RuntimeError: \\['', 'LogicError', '', 'LogicError'\\]"):
        simulated.call(scenes.use_dead_handles)


def test_every_symbol_that_pycuda_links_to_is_there(cuda_builder: Builder) -> None:
    wanted = cuda_builder.wanted_symbols()
    stubs = (cuda_builder.driver().parent / "stubs.txt").read_text("utf-8").split()
    assert len(wanted) == 143 and set(stubs) < set(wanted)
    assert not {"cuLaunchKernel", "cuMemcpyHtoDAsync_v2", "cuStreamWaitEvent", "cuEventQuery"} & set(stubs)


# --- the way to the driver --------------------------------------------------------------------------------------------


def test_this_process_never_loads_the_simulated_driver(simulated: Simulated) -> None:
    assert simulated.call(scenes.add, 1, right=2) == 3
    maps = Path("/proc/self/maps").read_text("utf-8")
    for never in ("libcuda", str(simulated.builder.driver().parent), str(simulated.builder.pycuda())):
        assert never not in maps  # kernels without a driver may be there (alone.py)
    assert "pycuda" not in sys.modules


def test_a_scene_runs_under_the_seed_it_was_given(simulated: Simulated) -> None:
    assert simulated.call(scenes.where, seed=4, policy="newest") == (4, "newest", "fast")
    found = simulated.seeds(scenes.where, 3, policies=["eager"], checked=True)
    assert found == [(seed, "eager", "checked") for seed in range(len(found))]


@pytest.mark.parametrize(("scene", "said"), [
    (scenes.raise_error, "ValueError: planted"),
    (scenes.leave_reports, "out-of-bounds"),
    (scenes.leave_context, "a context was left"),
    (scenes.crash, "in crash\n"),  # the line of Python that did it
    (scenes.hang, "in hang\n"),
])
def test_a_scene_that_goes_wrong_is_one_failed_call(simulated: Simulated, scene, said: str) -> None:
    with pytest.raises(SceneFailed) as failed:
        simulated.call(scene, seed=7, policy="newest", timeout_s=5 if scene is scenes.hang else 120,
                       kernels="toy")
    assert said in str(failed.value) and "seed=7, policy='newest'" in str(failed.value)
    assert simulated.call(scenes.add, 1) == 1  # the next one has a fresh child
