"""Every fault that is planted in the CUDA part, and what noticed it: one table, of what ran just now.

    python tests/cuda/show_faults.py [--json FILE] [--csv FILE] [arguments of pytest]

It runs the tests that plant faults and prints what they note in the ledger (``ledger.py``). A fault that nothing has
noticed is NOT CAUGHT. Exit status 1 then, and when a test failed or was skipped, or when a fault that has to be there
is not.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402 - this file is run by its path
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from tests.cuda import ledger  # noqa: E402

FILES = ("test_driver_faults.py", "test_kernels_runtime.py", "test_kernels_planted.py", "test_kernels_wide.py",
         "test_plan_faults.py", "test_faults.py")
NOT_CAUGHT = "NOT CAUGHT"

NEEDED = {
    "an event left out": (
        *(f"plans: {kind} left out" for kind in ("Ready", "Await", "Used", "AfterUse", "Written", "AfterWritten",
                                                 "Saved", "AfterSaved", "AwaitSaved")),
        "compute does not wait for uploads", "copy does not wait for the last use of a cell",
        "copy does not wait for rows to be saved", "save does not wait for new rows",
        "compute overwrites rows that are being saved", "uploads are not recorded", "uses are not recorded",
        "new rows are not recorded", "saves are not recorded"),
    "a wait of the host left out": (
        "the host does not wait before it touches pages", "tables are written while they are read",
        "a result is read before its copy is done", "rows are overwritten before they are sent"),
    "a barrier left out": ("kernels: barrier 1 of ", "wide kernels: barrier 1 of "),
    "a cell used again one step early": ("plans: a cell reused one step early",),
    "the tail uploaded before its producer": ("plans: a tail uploaded before its rows are saved",),
    "a host page read before its copy is done": ("the host does not wait before it touches pages",),
    "two layers swapped": ("plans: two layers swapped", "two layers are swapped"),
}
"""What there has to be at least: beginnings of names."""


class Notes:
    """A plugin that collects what the tests note."""

    def __init__(self) -> None:
        self.faults: list[dict[str, Any]] = []
        self.not_run: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.skipped:
            self.not_run.append(f"{report.nodeid}: {report.outcome}")
        if report.when == "teardown":
            for name, value in report.user_properties:
                if name == ledger.PROPERTY:
                    self.faults.extend(value["faults"])


def absent(faults: Iterable[dict[str, Any]]) -> list[str]:
    """Of ``NEEDED``, what is not among the faults."""
    names = [fault["name"] for fault in faults]
    return [f"{what}: {beginning}" for what, beginnings in NEEDED.items() for beginning in beginnings
            if not any(name.startswith(beginning) for name in names)]


def cells(fault: dict[str, Any]) -> tuple[str, str, str, str, str]:
    """Name, what it stands for, what caught it, in which build, seconds."""
    by = [f"{one['by']} ({one['times']} of {one['of']})" for one in fault["notices"]]
    builds = [one["build"] for one in fault["notices"]]
    if not fault["caught"]:
        by, builds = [NOT_CAUGHT, *by], ["", *builds]
    return fault["name"], fault["stands_for"], "\n".join(by), "\n".join(builds), f"{fault['seconds']:.2f}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--csv", type=Path)
    options, more = parser.parse_known_args(arguments)
    notes = Notes()
    here = Path(__file__).resolve().parent
    status = pytest.main([*(str(here / name) for name in FILES), "-q", "--no-header", "-p", "no:cacheprovider",
                          f"--rootdir={ROOT}", *more], plugins=[notes])
    faults = ledger.merged(notes.faults)
    table = Table("fault", "stands for", "caught by (times of attempts)", "build", "s", title="Planted faults")
    for fault in faults:
        table.add_row(*cells(fault), style="" if fault["caught"] else "bold red")
    console = Console(width=None if sys.stdout.isatty() else 170)
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps(faults, indent=1), "utf-8")
    if options.csv:
        with options.csv.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("fault", "stands for", "caught by", "build", "seconds"))
            writer.writerows([cell.replace("\n", "; ") for cell in cells(fault)] for fault in faults)
    missed = [fault["name"] for fault in faults if not fault["caught"]]
    wrong = [*notes.not_run, *absent(faults)]
    for line in wrong:
        console.print(f"not run, or not there: {line}", highlight=False, markup=False)
    console.print(f"{len(faults)} faults, {len(faults) - len(missed)} caught, {len(missed)} {NOT_CAUGHT}",
                  highlight=False)
    return 1 if missed or wrong or status != pytest.ExitCode.OK else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
