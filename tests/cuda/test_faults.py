"""Every deliberate bug of ``faults`` is noticed: by wrong bits on the fake device under some order of the streams, and
by the simulated driver's happens-before checker under PyCUDA, whatever the order.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvstream.cuda.device import PyCudaDevice
from kvstream.errors import KVStreamError
from tests.cuda import faults
from tests.cuda.driver.pool import Simulated
from tests.cuda.streaming import Script, opening_of, play
from tests.cuda.test_streaming import TINY, feed, fewest, on_fake

# Rows written again before they are saved, pages that fill up, two sequences, and the host among the pages.
BUSY: Script = (feed(a=40), feed(a=37), feed(a=1), feed(a=7), ("cut", "a", 80), feed(a=7), ("cut", "a", 83), feed(a=14),
                feed(a=1), ("swap", "a"), feed(a=1), ("fork", "a", "b"), feed(b=1), feed(a=1, b=3))

CARELESS = "tables are written while they are read"
HIDDEN = "saves are recorded before the last one"
"""Nearly always something else waits for the last one as well. The checker sees it every time."""


@pytest.mark.parametrize("name", [name for name in faults.NAMES if name != HIDDEN])
def test_a_fault_gives_wrong_bits(name: str) -> None:
    right = on_fake(TINY, None, BUSY, sequences_max=2).outputs
    noticed = False
    for seed in range(60):
        with faults.planted(name):
            try:
                noticed = on_fake(TINY, fewest(TINY, 2), BUSY, seed, sequences_max=2).outputs != right
            except KVStreamError:
                noticed = True
        if noticed:
            break
    assert noticed


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


def test_every_wait_that_is_left_out_is_reported(simulated: Simulated) -> None:
    """One at a time, under a schedule that hides it (eager) and one that does not: no event is for nothing."""
    for name in faults.WAITS:
        _, forgotten, waits = simulated.call(faulty, name, kernels="kv", checked=True, policy="eager")
        assert forgotten == waits > 0
        policies = ("eager", "uniform", "newest", "starve")
        found = simulated.each(faulty, [{"only": only, "policy": policies[only % 4], "seed": only}
                                        for only in range(waits)], name=name, kernels="kv", checked=True)
        assert [only for only, (kinds, count, _) in enumerate(found) if "race" not in kinds or count != 1] == [], name


@pytest.mark.parametrize("name", [*faults.RECORDS, *faults.OTHERS])
def test_a_fault_is_reported(simulated: Simulated, name: str) -> None:
    schedules = [{"policy": policy, "seed": 1} for policy in ("eager", "uniform", "newest", "starve")]
    found = [kinds for kinds, _, _ in simulated.each(faulty, schedules, name=name, kernels="kv", checked=True)]
    if name == CARELESS:  # a device that has read everything at once has nothing that could be overwritten
        assert any("source-changed" in kinds for kinds in found)
    else:
        assert all("race" in kinds for kinds in found)


def test_without_a_fault_there_is_no_report(simulated: Simulated) -> None:
    found = simulated.seeds(faulty, 12, name="none", kernels="kv", checked=True)
    assert found == [(set(), 0, 0)] * 12
