"""A result as a picture: how long answers took, of all and by class, and what a comparison came to. And as a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from . import raster
from .chart import (
    COLOURS,
    GREEN,
    GREY,
    RED,
    Bound,
    Line,
    Mark,
    Panel,
    Picture,
    Row,
    drawable,
    duration,
    linear,
    logarithmic,
    share,
)
from .page import Page, html_of
from .record import Record
from .result import Result, TargetResult, class_of
from .statistics import percentile
from .svg import picture_svg
from .tables import describe_load, headline, tables_of
from .verdict import Comparison, seconds

MEASURES = (("ttft", "Time to first token"), ("e2e", "Time to the whole answer"))
KINDS = (".svg", *raster.KINDS)
PAGES = (".html", ".htm")
NOTES = (
    "All times count from the intended start of a request: when it was sent, or with a rate when it was due. First "
    "token: to the first chunk with text, reasoning or a tool call. Per token: (last chunk - first chunk) / (tokens - "
    "1). Only served requests are in percentiles. ~ marks an estimate.",)
ROWS_MAX = 40  # of a panel; the terminal and the JSON have all of them


def check_plot(file: Path) -> None:
    """*Errors*: ConfigError for a picture that cannot be written here. Asked before a run, not after it."""
    kind = file.suffix.lower()
    if kind not in KINDS:
        page = "; --report writes pages" if kind in PAGES else ""
        raise ConfigError(f"--plot writes {', '.join(KINDS[:-1])} or {KINDS[-1]}, not {file.name!r}{page}")
    if kind != ".svg":
        raster.check_available(f"--plot {file.name}")


def write_plot(result: Result, file: Path) -> None:
    """*Errors*: ImportError: see ``check_plot``."""
    kind, picture = file.suffix.lower(), picture_of(result)
    file.write_bytes(picture_svg(picture).encode() if kind == ".svg" else raster.raster(picture, kind))


def check_report(file: Path) -> None:
    """*Errors*: ConfigError."""
    if file.suffix.lower() not in PAGES:
        raise ConfigError(f"--report writes .html, not {file.name!r}")


def write_report(result: Result, about: Mapping[str, Any], file: Path) -> None:
    file.write_text(html_of(page_of(result, about)), "utf-8")


def page_of(result: Result, about: Mapping[str, Any]) -> Page:
    """``about``: when and where it was measured (``files.conditions``)."""
    machine = about["machine"]
    labels = [one.target.label for one in result.targets]
    stopped = ("PARTIAL: stopped before the end; this is what there is.",) if result.run.partial else ()
    return Page(
        title=f"kvstream bench: {', '.join(labels)}", lead=result.sentences, warnings=(*stopped, *result.remarks),
        picture=picture_of(result), sheets=tuple(tables_of(result)),
        conditions=(*headline(result), f"KVStream {about['version']}, {about['when']}, from a machine with "
                    f"{machine['cpus']} processors, {machine['system']}, Python {machine['python']}"),
        notes=NOTES)


def picture_of(result: Result) -> Picture:
    """Above the share of requests by latency (what is not served never arrives at all of them), below boxes per class,
    then each comparison."""
    panels = [_distribution(result, measure, words) for measure, words in MEASURES]
    panels += [_boxes(result, measure, words) for measure, words in MEASURES]
    panels += [_ratios(comparison) for comparison in result.comparisons]
    return Picture(("PARTIAL: " if result.run.partial else "") + describe_load(result.load), tuple(panels))


def _distribution(result: Result, measure: str, words: str) -> Panel:
    values = [sorted(_values(one.records, measure)) for one in result.targets]
    bounds = [bound_s for name, bound_s in result.slo.bounds if name == measure]
    everything = [value for some in values for value in some]
    axis = logarithmic if all(value > 0 for value in everything) else linear  # one of 0 is in no logarithm
    x = axis("from the intended start of the request", [*everything, *bounds], text=duration)
    marks: list[Mark] = []
    for place, (one, some) in enumerate(zip(result.targets, values, strict=True)):
        sent = max(1, one.whole.requests - one.whole.cancelled)
        steps = [(value, (number + 1) / sent) for number, value in enumerate(some)]
        if steps:
            points = ((x.low, 0.0), (some[0], 0.0), *steps, (x.high, steps[-1][1]))
            marks.append(Line(f"{one.target.label} ({one.whole.served} of {sent} served)", points, _colour(place),
                              over=place % 2, steps=True))
    marks += [Bound(f"SLO {seconds(bound_s)}", bound_s) for bound_s in bounds]
    return Panel(words, x, share("share of all requests sent that had it by then"), tuple(marks))


def _boxes(result: Result, measure: str, words: str) -> Panel:
    found = sorted((row for one in result.targets for row in _classes(result, one, measure)), key=lambda row: row[0])
    rows = tuple(_row(f"{name}: {result.targets[place].target.label} (n={len(values)})", sorted(values), place)
                 for name, place, values in found[:ROWS_MAX])
    left = f" (the first {ROWS_MAX} of {len(found)})" if len(found) > ROWS_MAX else ""
    x = linear("box: quartiles and median; ends: p1 and p99", [row.high for row in rows], text=duration)
    return Panel(f"{words}, by class{left}" if left or result.targets[0].classes else f"{words}, of the served", x,
                 rows=rows)


def _row(label: str, ordered: Sequence[float], place: int) -> Row:
    low, first, middle, third, high = (percentile(ordered, q) for q in (1, 25, 50, 75, 99))
    return Row(label, low, middle, high, (first, third), _colour(place),
               f"p1 {seconds(low)}, quartiles {seconds(first)} and {seconds(third)}, median {seconds(middle)}, "
               f"p99 {seconds(high)}")


def _classes(result: Result, one: TargetResult, measure: str) -> Iterator[tuple[str, int, list[float]]]:
    place = result.targets.index(one)
    by_class: dict[str, list[Record]] = {}
    for record in one.records:
        by_class.setdefault(class_of(result.load, record), []).append(record)
    for name, records in by_class.items():
        values = _values(records, measure)
        if values:
            yield name, place, values


def _ratios(comparison: Comparison) -> Panel:
    """What the verdict says, with its spread over the rounds."""
    rows = tuple(Row(f"{ratio.words} ({ratio.better} is better)", ratio.low, ratio.median, ratio.high, None,
                     GREY if not ratio.clear else GREEN if ratio.good else RED,
                     f"{ratio.low:.2f} to {ratio.high:.2f}, median {ratio.median:.2f}")
                 for ratio in comparison.ratios if drawable(ratio.low, log=True))
    ends = [1.0, *(end for row in rows for end in (row.low, row.high))]
    x = logarithmic("median, lowest and highest of the rounds", ends)
    return Panel(f"{comparison.other} / {comparison.base}", x, marks=(Bound("no difference", 1.0),), rows=rows,
                 key=(("clearly better", GREEN), ("clearly worse", RED), ("no clear difference", GREY)))


def _colour(place: int) -> int:
    return place % len(COLOURS)


def _values(records: Sequence[Record], measure: str) -> list[float]:
    return [value for record in records if record.served and (value := getattr(record, measure)) is not None]
