"""Figures of a measurement: medians and spreads, the bars they are held against, the printed page and the JSON file."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, define, field, frozen
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

# Wide enough for every table here also when the output goes to a file.
console = Console(width=None if sys.stdout.isatty() else 118)


@frozen
class Summary:
    """Of one list of numbers; ``low`` and ``high`` are its ends."""

    n: int
    median: float
    p99: float
    low: float
    high: float

    def show(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f}"

    def spread(self, digits: int = 2) -> str:
        return f"{self.low:.{digits}f} to {self.high:.{digits}f}"


def summary(values: Sequence[float]) -> Summary:
    ordered = sorted(values)
    p99 = ordered[max(0, math.ceil(len(ordered) * 0.99) - 1)]
    return Summary(len(ordered), statistics.median(ordered), p99, ordered[0], ordered[-1])


@frozen
class Bar:
    """Something that must hold. ``met`` is None when it could not be judged."""

    text: str
    value: str
    met: bool | None

    @property
    def word(self) -> str:
        return "not judged" if self.met is None else "met" if self.met else "MISSED"


@define
class Page:
    """What one measurement has to say: tables as they come, bars, and everything once more as data."""

    title: str
    data: dict[str, Any] = field(factory=dict)
    bars: list[Bar] = field(factory=list)
    _load_before: tuple[float, float, float] = field(factory=os.getloadavg)
    _began: float = field(factory=time.monotonic)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        table = Table(title=title, title_justify="left", title_style="bold")
        for place, column in enumerate(columns):
            table.add_column(column, justify="left" if place == 0 else "right")
        for row in rows:
            table.add_row(*map(str, row))
        console.print(table)

    def say(self, text: str) -> None:
        console.print(text, highlight=False, markup=False)

    def bar(self, text: str, value: str, met: bool | None) -> None:
        self.bars.append(Bar(text, value, met))

    def close(self, file: Path | None) -> int:
        """Print the bars and the machine, write ``file``; the exit code: 1 when a bar was missed."""
        if self.bars:
            self.table("Held against", ("bar", "measured", ""), [(b.text, b.value, b.word) for b in self.bars])
        machine = {
            "cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.platform(),
            "load_before": self._load_before, "load_after": os.getloadavg(),
            "seconds": round(time.monotonic() - self._began, 1), "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        self.say(f"{self.title}: {machine['seconds']} s on {machine['cpus']} CPUs, load average "
                 f"{self._load_before[0]:.2f} before, {machine['load_after'][0]:.2f} after; Python {machine['python']}")
        if file is not None:
            whole = {"title": self.title, "machine": machine, "bars": [asdict(b) for b in self.bars]} | self.data
            file.write_text(json.dumps(whole, indent=1, default=_plain) + "\n", "utf-8")
        return int(any(bar.met is False for bar in self.bars))


def _plain(value: Any) -> Any:
    return asdict(value)


def progress() -> Progress:
    """On stderr, so that the printed page stays a page; nothing when nobody looks."""
    err = Console(stderr=True)
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                    console=err, disable=not err.is_terminal, transient=True)
