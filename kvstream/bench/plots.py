"""A result as a picture. matplotlib is optional and imported only here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..parts import to_add
from .record import Record
from .report import describe_load
from .result import Result, TargetResult, class_of

MEASURES = (("ttft", "time to first token"), ("e2e", "whole answer"))
HINT = "pip install '.[plots]' (kvstream[plots])"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # told apart also by the colour-blind


def check_available() -> None:
    """*Errors*: ConfigError that says what to install. Asked before a run, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib: {to_add('matplotlib', HINT)}") from error


def write_plot(result: Result, file: Path) -> None:
    """Above the share of requests by latency (what is not served never arrives at 1), below boxes per class."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    axes: Any = figure.subplots(2, 2)
    for column, (measure, words) in enumerate(MEASURES):
        _distribution(axes[0][column], result, measure, words)
        _boxes(axes[1][column], result, measure, words)
    figure.suptitle(("PARTIAL: " if result.run.partial else "") + describe_load(result.load), fontsize=10, wrap=True)
    figure.savefig(file, dpi=120)


def _distribution(axes: Any, result: Result, measure: str, words: str) -> None:
    positive = False
    for place, one in enumerate(result.targets):
        values = sorted(_values(one.records, measure))
        sent = max(1, one.whole.requests - one.whole.cancelled)
        if values:
            positive = positive or values[0] > 0
            label = f"{one.target.label} ({one.whole.served} of {sent} served)"
            axes.step([values[0], *values], [0.0, *((n + 1) / sent for n in range(len(values)))], where="post",
                      color=COLOURS[place % len(COLOURS)], label=label)
    for name, bound_s in result.slo.bounds:
        if name == measure:
            axes.axvline(bound_s, color="black", linestyle="--", linewidth=1, label=f"SLO {bound_s:g} s")
    if positive:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("{x:g}" if values_span(result, measure) < 5 else "")
    axes.set(xlabel=f"{words} (s)", ylabel="share of all requests sent", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, loc="upper left")


def values_span(result: Result, measure: str) -> float:
    """Largest by smallest. A logarithmic axis of less than a decade has no labelled tick of its own."""
    values = [value for one in result.targets for value in _values(one.records, measure) if value > 0]
    return max(values) / min(values) if values else 1.0


def _boxes(axes: Any, result: Result, measure: str, words: str) -> None:
    rows = [row for one in result.targets for row in _classes(result, one, measure)]
    rows.sort(key=lambda row: row[0])
    if rows:
        boxes = axes.boxplot([values for *_, values in rows], orientation="horizontal", whis=(1, 99), showfliers=False,
                             patch_artist=True, medianprops={"color": "black"})
        for box, (_, place, _) in zip(boxes["boxes"], rows, strict=True):
            box.set(facecolor=COLOURS[place % len(COLOURS)], alpha=0.6)
        labels = [f"{name}: {result.targets[place].target.label} (n={len(values)})" for name, place, values in rows]
        axes.set_yticks(range(1, len(rows) + 1), labels, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(left=0)
    axes.set(xlabel=f"{words} (s); box: quartiles, whiskers: p1 and p99")
    axes.grid(alpha=0.3, axis="x")


def _classes(result: Result, one: TargetResult, measure: str) -> list[tuple[str, int, list[float]]]:
    place = result.targets.index(one)
    by_class: dict[str, list[Record]] = {}
    for record in one.records:
        by_class.setdefault(class_of(result.load, record), []).append(record)
    found = [(name, place, _values(records, measure)) for name, records in by_class.items()]
    return [row for row in found if row[2]]


def _values(records: Sequence[Record], measure: str) -> list[float]:
    return [value for record in records if record.served and (value := getattr(record, measure)) is not None]
