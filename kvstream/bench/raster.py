"""A picture as PNG or PDF, by matplotlib, which is optional and imported only here.

It shows what ``svg`` shows: where axes end and what stands beside them comes from ``chart``.
"""

from __future__ import annotations

import io
from typing import Any

from ..errors import ConfigError
from ..parts import to_add
from .chart import COLOURS, DASHES, RADII, WIDTHS, Band, Bound, Diamonds, Mark, Panel, Picture, Row
from .sheet import printable
from .svg import WIDTH, height_of

KINDS = (".png", ".pdf")
GREY = "#777777"
UNITS = 95.0  # of the SVG's size in an inch here


def available() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def check_available(file: str) -> None:
    """*Errors*: ConfigError that says what to do. Asked before a run, not after it."""
    if not available():
        raise ConfigError(f"{file} needs matplotlib: {to_add('matplotlib')}. A file that ends in .svg needs "
                          "nothing")


def raster(picture: Picture, kind: str) -> bytes:
    """``kind``: one of KINDS. *Errors*: ImportError without matplotlib."""
    from matplotlib.figure import Figure

    columns = max(1, min(picture.columns, len(picture.panels)))
    beside = [picture.panels[first : first + columns] for first in range(0, len(picture.panels), columns)]
    heights = [max(map(height_of, row)) for row in beside]
    size = (columns * WIDTH / UNITS, (sum(heights) + 40) / UNITS)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.add_gridspec(max(1, len(beside)), columns, height_ratios=heights or None)
    for place, panel in enumerate(picture.panels):
        _panel(figure.add_subplot(grid[place // columns, place % columns]), panel)
    figure.suptitle(_plain(picture.title), fontsize=10, wrap=True)
    out = io.BytesIO()
    figure.savefig(out, format=kind.removeprefix("."), dpi=150)
    return out.getvalue()


def _plain(text: str) -> str:
    """Words from outside are no formulas."""
    return printable(text).replace("$", r"\$")


def _panel(axes: Any, panel: Panel) -> None:
    axes.set_xscale("log" if panel.x.log else "linear")
    axes.set_xlim(panel.x.low, panel.x.high)
    axes.set_xticks([at for at, _ in panel.x.ticks], [tick for _, tick in panel.x.ticks], fontsize=8)
    axes.set_xticks([], minor=True)
    axes.set_xlabel(_plain(panel.x.label), fontsize=9)
    axes.set_yticks([])
    if panel.y is not None:
        axes.set_yscale("log" if panel.y.log else "linear")
        axes.set_ylim(panel.y.low, panel.y.high)
        axes.set_yticks([at for at, _ in panel.y.ticks], [tick for _, tick in panel.y.ticks], fontsize=8)
        axes.set_ylabel(_plain(panel.y.label), fontsize=9)
    elif panel.rows:
        axes.set_ylim(len(panel.rows) - 0.5, -0.5)
        axes.set_yticks(range(len(panel.rows)), [_plain(row.label) for row in panel.rows], fontsize=8)
    else:
        axes.text(0.5, 0.5, "nothing to show", transform=axes.transAxes, ha="center")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    handles = [handle for mark in panel.marks if (handle := _mark(axes, mark)) is not None]
    for place, row in enumerate(panel.rows):
        _row(axes, row, place)
    handles += [axes.barh(0, 0, color=_colour(colour)) for label, colour in panel.key]
    axes.set_title(_plain(panel.title), fontsize=10, loc="left", fontweight="bold")
    if handles:
        labels = [mark.label for mark in panel.marks if _shown(mark)] + [label for label, _ in panel.key]
        axes.legend(handles, [_plain(label) for label in labels], fontsize=7)


def _shown(mark: Mark) -> bool:
    return isinstance(mark, Bound) or bool(mark.points)


def _mark(axes: Any, mark: Mark) -> Any:
    """Its handle for the key; None: there is nothing to draw."""
    if not _shown(mark):
        return None
    if isinstance(mark, Bound):
        return axes.axvline(mark.x, color="black", linestyle="--", linewidth=1)
    if isinstance(mark, Band):
        x, low, high = zip(*mark.points, strict=True)
        return axes.fill_between(x, low, high, color=_colour(mark.colour), alpha=0.3, linewidth=0)
    x, y = zip(*mark.points, strict=True)
    if isinstance(mark, Diamonds):
        return axes.plot(x, y, "D", color=_colour(mark.colour), markersize=5)[0]
    width = WIDTHS[mark.over] * 0.75  # points
    dashes = (0.0, tuple(length * 0.75 / width for length in DASHES[mark.over])) if mark.over else "-"
    return axes.plot(x, y, color=_colour(mark.colour), linestyle=dashes, linewidth=width, marker="o" * mark.dots,
                     markersize=RADII[mark.over] * 1.5, markeredgewidth=0,
                     drawstyle="steps-post" if mark.steps else "default")[0]


def _row(axes: Any, row: Row, place: int) -> None:
    colour = _colour(row.colour)
    axes.plot((row.low, row.high), (place, place), "|-", color=colour, linewidth=1.7)
    if row.quartiles is None:
        axes.plot((row.middle,), (place,), "o", color=colour)
        return
    first, third = row.quartiles
    axes.barh(place, third - first, left=first, height=0.55, color=colour, alpha=0.6)
    axes.plot((row.middle, row.middle), (place - 0.28, place + 0.28), color="black", linewidth=1.7)


def _colour(colour: int | None) -> str:
    return GREY if colour is None else COLOURS[colour]
