"""What the tests note of themselves: a fault that nobody noticed is told, and so is a run that shows too little."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import define, field

from tests.cuda import ledger, show_faults
from tests.cuda.ledger import Notes, Sum, fault, merged


@pytest.fixture(autouse=True)
def only_here(shown: None) -> Any:
    """Nothing that is written here is this run's."""
    yield
    ledger.take()


def test_a_fault_that_nobody_noticed_fails_its_test_and_is_noted() -> None:
    with pytest.raises(AssertionError, match="nothing has noticed it"), fault("one", "something"):
        pass
    with pytest.raises(AssertionError, match="nothing has noticed it"), fault("two", "something") as planted:
        planted.caught_by("race", "checked", 0, 3)
    with pytest.raises(ZeroDivisionError), fault("three", "something") as planted:
        planted.caught_by("race", "checked", 3, 3)
        raise ZeroDivisionError  # its test failed afterwards
    with fault("four", "something") as planted:
        planted.caught_by("race", "checked")
    assert [(one["name"], one["caught"]) for one in ledger.take().faults] == [
        ("one", False), ("two", False), ("three", False), ("four", True)]


def test_a_fault_is_caught_when_it_was_each_time() -> None:
    def once(*notices: dict[str, Any]) -> dict[str, Any]:
        return {"name": "x", "stands_for": "y", "caught": bool(notices), "notices": list(notices), "seconds": 0.5}

    race = {"by": "race", "build": "checked", "times": 2, "of": 3}
    both, = merged([once(race), once(race, {**race, "build": "fast"})])
    assert both["caught"] and both["seconds"] == 1
    assert both["notices"] == [{**race, "times": 4, "of": 6}, {**race, "build": "fast"}]
    missed, = merged([once(race), once()])
    assert not missed["caught"]
    assert show_faults.cells(missed) == ("x", "y", "NOT CAUGHT\nrace (2 of 3)", "\nchecked", "1.00")


def test_faults_that_have_to_be_there_are_asked_for() -> None:
    names = [name for beginnings in show_faults.NEEDED.values() for name in beginnings]
    assert show_faults.absent([{"name": f"{name}3"} for name in names]) == []
    assert show_faults.absent([{"name": name} for name in names[1:]]) == [f"an event left out: {names[0]}"]


@define
class _Report:
    nodeid: str
    when: str = "teardown"
    skipped: bool = False
    failed: bool = False
    user_properties: list[Any] = field(factory=list)


@define
class _Config:
    args: list[str]
    option: Any


@define
class _Option:
    keyword: str = ""
    markexpr: str = ""
    lf: bool = False


def summed(notes: Notes, **more: Any) -> Sum:
    """A run of one test in each file, of which one has these notes."""
    total = Sum()
    files = sorted(ledger.HERE.glob("test_*.py"))
    for file in files:
        carried = [(ledger.PROPERTY, notes.plain())] if file == files[0] else []
        total.pytest_runtest_logreport(_Report(f"tests/cuda/{file.name}::test", user_properties=carried, **more))
    total.pytest_runtest_logreport(_Report("tests/core/test_pages.py::test", failed=True))
    return total


def test_a_whole_run_that_shows_too_little_is_told() -> None:
    enough = Notes(dict(ledger.LEAST), {name: set(map(str, range(least))) for name, least in ledger.LEAST.items()})
    enough.faults = [{"name": str(n), "stands_for": "", "caught": True, "notices": [], "seconds": 0}
                     for n in range(ledger.LEAST["faults"])]
    everything = _Config(["tests"], _Option())
    assert summed(enough).missing() == [] and summed(enough).whole(everything)
    enough.sets["pairs"].discard("7")
    assert summed(enough).missing() == ["pairs: 80, at least 81 are expected"]
    for config in (_Config(["tests/cuda/test_faults.py::one"], _Option()), _Config(["tests"], _Option(keyword="x")),
                   _Config(["tests"], _Option(markexpr="not real"))):
        assert not summed(enough).whole(config)
    assert not summed(enough, skipped=True).whole(everything) and not summed(enough, failed=True).whole(everything)
    assert not Sum().whole(everything)


def test_notes_cross_processes_as_plain_values() -> None:
    ledger.take()
    ledger.compared(5, "q8_0/q4_0", "a shape", 3, "4 cells")
    ledger.compared(2, "f16/f16", "a shape")
    ledger.ran(1, "eager", checked=True)
    plain = ledger.take().plain()
    again = Notes()
    again.take_in(plain)
    again.take_in(plain)
    totals = again.totals()
    assert (totals["rows"], totals["streamed_rows"], totals["pages"], totals["pairs"]) == (14, 10, 6, 2)
    assert (totals["checked_runs"], totals["schedules"], totals["pools"]) == (2, 1, 1)
    with pytest.raises(AssertionError, match="nothing was compared"):
        ledger.compared(0, "", "")
