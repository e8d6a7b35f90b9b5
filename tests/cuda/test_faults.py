"""Every deliberate bug of ``faults`` is noticed: by wrong bits on the fake device under some order of the streams, and
by the simulated driver's happens-before checker under PyCUDA, whatever the order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from kvstream.cuda.device import PyCudaDevice
from kvstream.cuda.fake_device import FakeDevice
from kvstream.cuda.fake_kernels import KERNELS
from kvstream.errors import KVStreamError
from tests.cuda import faults
from tests.cuda.driver.pool import Simulated, only
from tests.cuda.ledger import Fault, fault
from tests.cuda.streaming import Script, opening_of, play
from tests.cuda.test_streamer import rows_from_arrays
from tests.cuda.test_streaming import TINY, feed, fewest, on_fake

# Rows written again before they are saved, pages that fill up, two sequences, and the host among the pages.
BUSY: Script = (feed(a=40), feed(a=37), feed(a=1), feed(a=7), ("cut", "a", 80), feed(a=7), ("cut", "a", 83), feed(a=14),
                feed(a=1), ("swap", "a"), feed(a=1), ("fork", "a", "b"), feed(b=1), feed(a=1, b=3))

CARELESS = "tables are written while they are read"
HIDDEN = "saves are recorded before the last one"
"""Nearly always something else waits for the last one as well. The checker sees it every time."""
FAKE, CHECKED = "fake device", "PyCUDA, checked"


def noted(name: str) -> AbstractContextManager[Fault]:
    return fault(name, faults.STANDS_FOR[name])


def noticed(planted: Fault, name: str, run: Callable[[int], Any], right: Any) -> None:
    """Under the first order of the streams that shows it."""
    for seed in range(60):
        with faults.planted(name):
            try:
                if run(seed) != right:
                    planted.caught_by("wrong bits", FAKE, 1, seed + 1)
            except KVStreamError as error:
                planted.caught_by(type(error).__name__, FAKE, 1, seed + 1)
        if planted.caught:
            break


@pytest.mark.parametrize("name", [name for name in faults.NAMES if name != HIDDEN])
def test_a_fault_gives_wrong_bits(name: str) -> None:
    right = on_fake(TINY, None, BUSY, sequences_max=2).outputs
    with noted(name) as planted:
        noticed(planted, name, lambda seed: on_fake(TINY, fewest(TINY, 2), BUSY, seed, sequences_max=2).outputs, right)


@pytest.mark.parametrize("name", faults.ARRAYS)
def test_a_fault_with_arrays_gives_wrong_bits(name: str) -> None:
    def run(seed: int | None) -> tuple[Any, bytes]:
        return (on_fake(TINY, fewest(TINY, 2), BUSY, seed, False, sequences_max=2).outputs,
                rows_from_arrays(FakeDevice(KERNELS, seed=seed)))

    right = run(None)
    with noted(name) as planted:
        noticed(planted, name, run, right)


def faulty(sim: Any, name: str, only: int | None = None) -> tuple[set[str], int, int]:
    """A scene: (kinds of reports, waits forgotten, waits that could have been)."""
    geometry = TINY.geometry()
    opening = opening_of(geometry, fewest(TINY, 2), sequences_max=2)
    with faults.planted(name, only) as kind:
        try:
            play(PyCudaDevice(sim.kernels), geometry, opening, BUSY, lazily=True)
        except KVStreamError:
            pass
    kinds = sim.kinds()
    sim.take_reports()
    return kinds, getattr(kind, "forgotten", 0), getattr(kind, "seen", 0)


@pytest.mark.parametrize("name", faults.WAITS)
def test_every_wait_that_is_left_out_is_reported(simulated: Simulated, name: str) -> None:
    """One at a time, under a schedule that hides it (eager) and others that do not: no event is for nothing."""
    with noted(name) as planted:
        _, forgotten, waits = simulated.call(faulty, name, kernels="kv", checked=True, policy="eager")
        assert forgotten == waits > 0
        policies = ("eager", "uniform", "newest", "starve")
        found = simulated.each(faulty, [{"only": nth, "policy": policies[nth % 4], "seed": nth}
                                        for nth in range(waits)], name=name, kernels="kv", checked=True)
        assert [nth for nth, (kinds, count, _) in enumerate(found) if "race" not in kinds or count != 1] == []
        planted.caught_by("race", CHECKED, len(found), waits)


@pytest.mark.parametrize("name", [*faults.RECORDS, *faults.STALE, *faults.OTHERS])
def test_a_fault_is_reported(simulated: Simulated, name: str) -> None:
    schedules = [{"policy": policy, "seed": 1} for policy in ("eager", "uniform", "newest", "starve")]
    with noted(name) as planted:
        found = [kinds for kinds, _, _ in simulated.each(faulty, schedules, name=name, kernels="kv", checked=True)]
        if name == CARELESS:  # a device that has read everything at once has nothing that could be overwritten
            planted.caught_by("source-changed", CHECKED, sum("source-changed" in kinds for kinds in found), len(found))
        else:
            assert all("race" in kinds for kinds in found)
            planted.caught_by("race", CHECKED, len(found), len(found))


def test_without_a_fault_there_is_no_report(simulated: Simulated) -> None:
    assert only(simulated.seeds(faulty, 12, name="none", kernels="kv", checked=True)) == (set(), 0, 0)
