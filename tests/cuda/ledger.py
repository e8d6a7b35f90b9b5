"""What a run of the tests has really shown: how much was compared bit for bit, and which planted fault was caught by
what.

Tests write here while they run: ``compared`` and ``ran`` count, ``fault`` notes a fault that is planted and, once it
was noticed, by what. After each test its notes go into the test's report (``conftest.py``), which crosses the processes
of pytest-xdist too, and ``Sum`` adds the reports up: one line at the end of a run. A run of all tests of this folder
that shows less than ``LEAST`` fails, so that neither a test that is gone nor a path that silently is not used goes
unnoticed. ``show_faults.py`` prints the faults as a table.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
from attrs import define, field

PROPERTY = "cuda ledger"
HERE = Path(__file__).resolve().parent

LEAST = {
    "rows": 130_000, "streamed_rows": 120_000, "pages": 9_000, "fast_runs": 1_600, "checked_runs": 500,
    "schedules": 250, "policies": 6, "pairs": 81, "shapes": 60, "pools": 100, "faults": 110,
}
"""What all tests together show at least."""

WORDS = (
    "{rows} rows compared bit for bit, {streamed_rows} of them with {pages} pages streamed; {fast_runs} runs on the "
    "simulated driver, {checked_runs} more with every access checked, under {schedules} schedules of {policies} "
    "policies; {pairs} pairs of types, {shapes} shapes, {pools} pools; {caught} of {faults} planted faults caught")


@define
class Notes:
    """Of one test, or of several. Counts add up, sets are united."""

    counts: dict[str, int] = field(factory=dict)
    sets: dict[str, set[str]] = field(factory=dict)
    faults: list[dict[str, Any]] = field(factory=list)

    def add(self, name: str, number: int) -> None:
        self.counts[name] = self.counts.get(name, 0) + number

    def see(self, name: str, what: object) -> None:
        self.sets.setdefault(name, set()).add(str(what))

    def plain(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "sets": {name: sorted(seen) for name, seen in self.sets.items()},
                "faults": list(self.faults)}

    def take_in(self, plain: dict[str, Any]) -> None:
        for name, number in plain["counts"].items():
            self.add(name, number)
        for name, seen in plain["sets"].items():
            self.sets.setdefault(name, set()).update(seen)
        self.faults.extend(plain["faults"])

    def totals(self) -> dict[str, int]:
        found = dict.fromkeys(LEAST, 0) | self.counts | {name: len(seen) for name, seen in self.sets.items()}
        faults = merged(self.faults)
        found["faults"], found["caught"] = len(faults), sum(fault["caught"] for fault in faults)
        return found


NOW = Notes()  # of the test that runs
LOCK = Lock()  # scenes are called by several threads


def take() -> Notes:
    """The notes since the last time."""
    with LOCK:
        taken = Notes(NOW.counts, NOW.sets, NOW.faults)
        NOW.counts, NOW.sets, NOW.faults = {}, {}, []
    return taken


def compared(rows: int, pair: str, shape: str, pages: int = 0, pool: str = "") -> None:
    """``rows`` results of one token and layer were equal to those of another run, to the last bit; in one of the two
    ``pages`` pages came in over the link."""
    assert rows > 0, "nothing was compared"
    with LOCK:
        NOW.add("rows", rows)
        NOW.add("streamed_rows", rows if pages else 0)
        NOW.add("pages", pages)
        NOW.see("pairs", pair)
        NOW.see("shapes", shape)
        if pool:
            NOW.see("pools", f"{shape} {pool}")


def ran(seed: int, policy: str, checked: bool) -> None:
    """A scene ran on the simulated driver."""
    with LOCK:
        NOW.add("checked_runs" if checked else "fast_runs", 1)
        NOW.see("schedules", f"{policy} {seed}")
        NOW.see("policies", policy)


@define
class Fault:
    """A fault that is planted right now."""

    name: str
    stands_for: str
    notices: list[dict[str, Any]] = field(factory=list)

    def caught_by(self, what: str, build: str, times: int = 1, of: int = 1) -> None:
        """``what`` noticed it (a kind of report, "wrong bits", an error), ``times`` of so many attempts. 0 is noted,
        but does not count."""
        self.notices.append({"by": what, "build": build, "times": times, "of": of})

    @property
    def caught(self) -> bool:
        return any(one["times"] for one in self.notices)


@contextmanager
def fault(name: str, stands_for: str) -> Iterator[Fault]:
    """A fault is planted in this block, which says ``caught_by`` when it was noticed. It is noted in any case."""
    planted, start = Fault(name, stands_for), time.perf_counter()
    noted: dict[str, Any] = {"name": name, "stands_for": stands_for, "caught": False, "notices": [], "seconds": 0.0}
    with LOCK:
        NOW.faults.append(noted)
    try:
        yield planted
        noted["caught"], noted["notices"] = planted.caught, planted.notices
    finally:
        noted["seconds"] = round(time.perf_counter() - start, 3)
    assert planted.caught, f"{name}: nothing has noticed it"


def merged(faults: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per name, in order. Caught only if it was caught each time that it was planted."""
    found: dict[str, dict[str, Any]] = {}
    for one in faults:
        entry = found.setdefault(one["name"], {**one, "notices": [], "seconds": 0.0, "missed": 0})
        entry["seconds"] += one["seconds"]
        entry["missed"] += not one["caught"]
        entry["caught"] = not entry["missed"]
        for new in one["notices"]:
            known = next((old for old in entry["notices"]
                          if (old["by"], old["build"]) == (new["by"], new["build"])), None)
            if known is None:
                entry["notices"].append(dict(new))
            else:
                known["times"] += new["times"]
                known["of"] += new["of"]
    return list(found.values())


class Sum:
    """A plugin for the process that prints: adds up what the tests' reports carry."""

    def __init__(self) -> None:
        self.notes = Notes()
        self.files: set[str] = set()
        self.skipped = 0
        self.failed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = HERE.parents[1] / report.nodeid.split("::")[0]
        if file.parent != HERE:
            return
        self.files.add(file.name)
        self.skipped += report.skipped
        self.failed += report.failed
        if report.when == "teardown":
            for name, value in report.user_properties:
                if name == PROPERTY:
                    self.notes.take_in(value)

    def missing(self) -> list[str]:
        totals = self.notes.totals()
        return [f"{name}: {totals[name]}, at least {least} are expected" for name, least in LEAST.items()
                if totals[name] < least]

    def whole(self, config: pytest.Config) -> bool:
        """Whether all tests of this folder ran to their end. ``-k`` and the like leave files but not tests."""
        option = config.option
        chosen = (option.keyword or option.markexpr or getattr(option, "lf", False)
                  or any("::" in arg for arg in config.args))
        return not chosen and not self.skipped and not self.failed and self.files == {
            file.name for file in HERE.glob("test_*.py")}

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.whole(session.config) and self.missing() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        if not self.notes.counts and not self.notes.faults:
            return
        totals = self.notes.totals()
        terminalreporter.section("shown of kvstream.cuda")
        terminalreporter.write_line(WORDS.format(**{name: f"{number:,}" for name, number in totals.items()}))
        if self.whole(config):
            for line in self.missing():
                terminalreporter.write_line(f"NOT SHOWN ENOUGH: {line}", red=True)
