"""A picture as data: what is drawn and where, but not how. Pure.

``plots`` and ``kvplot`` make pictures, ``svg`` and ``raster`` write them. Everything that two writers could decide
differently is decided here: where an axis ends, its ticks and their words, what a number that cannot be drawn means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from attrs import frozen

GREY = None
BLUE, RED, GREEN, PINK, ORANGE, SKY = range(6)
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""By number, as Okabe and Ito chose them: told apart also by the colour-blind."""

DRAWN_MAX = 1e250  # so that there is room for sums, differences and axes that go beyond
TICKS_APART = 0.07  # of a logarithmic axis, or their words run into each other
ROOM = 0.04  # beyond the last value


@frozen
class Axis:
    """From ``low`` to ``high``; ``ticks`` are values and what stands beside them."""

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def place(self, value: float) -> float | None:
        """From 0 (low) to 1 (high). None: it cannot be drawn here."""
        if self.log and value <= 0:
            return None
        low, high, at = (math.log10(one) for one in (self.low, self.high, value)) if self.log else (
            self.low, self.high, value)
        share = (at - low) / (high - low)
        return min(1.0, max(0.0, share)) if -1e-9 <= share <= 1 + 1e-9 else None  # NaN is between nothing


# By ``Line.over``. Periods of 18, 14, 8 and 21 pixels: gaps of one are not for long those of another.
DASHES: tuple[tuple[float, ...], ...] = ((), (12, 6), (5, 9), (2, 6), (9, 5, 2, 5))
WIDTHS = (3.2, 2.0, 2.0, 2.0, 2.0)
RADII = (4.0, 3.0, 2.2, 1.6, 1.6)


@frozen
class Line:
    """Points in order; one that cannot be drawn leaves a gap. ``steps``: a value holds until the next one. ``dots``:
    each point is marked, and says what it is when it is pointed at. ``over``: how many lines before it may lie where it
    does; it is dashed, and its dots are smaller, so that all of them are seen."""

    label: str
    points: tuple[tuple[float, float], ...]
    colour: int | None = GREY
    over: int = 0
    steps: bool = False
    dots: bool = False


@frozen
class Diamonds:
    """Points that no line connects."""

    label: str
    points: tuple[tuple[float, float], ...]
    colour: int | None = GREY


@frozen
class Band:
    """Between two values at each place: (x, y, other y)."""

    label: str
    points: tuple[tuple[float, float, float], ...]
    colour: int | None = GREY


@frozen
class Bound:
    """A line across at ``x``."""

    label: str
    x: float


Mark = Line | Diamonds | Band | Bound


@frozen
class Row:
    """A line of its own in a panel of rows: from ``low`` to ``high``, a box between ``quartiles`` if there are any, and
    ``middle`` marked. ``words``: all of it as a text."""

    label: str
    low: float
    middle: float
    high: float
    quartiles: tuple[float, float] | None
    colour: int | None
    words: str


@frozen
class Panel:
    """Marks on two axes, or rows under one. ``key``: words for colours that no mark has words for. Nothing to draw is
    no mistake; a panel says so."""

    title: str
    x: Axis
    y: Axis | None = None
    marks: tuple[Mark, ...] = ()
    rows: tuple[Row, ...] = ()
    key: tuple[tuple[str, int | None], ...] = ()

    @property
    def empty(self) -> bool:
        return not self.rows and not any(isinstance(mark, Bound) or mark.points for mark in self.marks)


@frozen
class Picture:
    """``columns``: of panels, side by side."""

    title: str
    panels: tuple[Panel, ...]
    columns: int = 2


# --- axes -------------------------------------------------------------------------------------------------------------


def drawable(value: float, log: bool = False) -> bool:
    """Whether an axis can be made for it."""
    return math.isfinite(value) and abs(value) <= DRAWN_MAX and (not log or value >= 1 / DRAWN_MAX)


def number(value: float) -> str:
    """Of a tick: no more digits than it needs."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 and value == round(value) else f"{value:.10g}"


def duration(seconds: float) -> str:
    """Of a tick: a time with its unit."""
    for unit, in_s in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= in_s * 0.9999999:
            return f"{number(seconds / in_s)} {unit}"
    return f"{seconds * 1e6:.10g} µs" if seconds else "0"


def linear(label: str, values: Iterable[float], *, text: Callable[[float], str] = number, binary: bool = False) -> Axis:
    """From 0, or what is below it, to the largest. ``binary``: ticks at multiples of powers of two."""
    known = [0.0, *(value for value in values if drawable(value))]
    low, high = min(known), max(known)
    if high - low < 1 / DRAWN_MAX:
        high = 1.0
    step, room = _step((high - low) / 6, binary), (high - low) * ROOM
    low, high = low - room if low < 0 else 0.0, high + room if high > 0 else 0.0
    return Axis(label, low, high, tuple((at, text(at)) for at in _multiples(low, high, step)))


def logarithmic(label: str, values: Iterable[float], *, text: Callable[[float], str] = number) -> Axis:
    """Of what is above 0. A linear one when nothing is."""
    known = [value for value in values if drawable(value, log=True)]
    if not known:
        return linear(label, (), text=text)
    low, high = math.log10(min(known)), math.log10(max(known))
    room = max(0.02, (high - low) * ROOM)
    ends = (10 ** (low - room), 10 ** (high + room))
    return Axis(label, *ends, tuple((at, text(at)) for at in _log_ticks(*ends)), log=True)


def share(label: str) -> Axis:
    """From nothing to all."""
    return Axis(label, 0.0, 1.03, tuple((part / 4, f"{part * 25}%") for part in range(5)))


def _step(least: float, binary: bool = False) -> float:
    """The next number at or above it that people count in."""
    if binary:
        return float(2.0 ** math.ceil(math.log2(least)))
    power = 10.0 ** math.floor(math.log10(least))
    return next(nice * power for nice in (1, 2, 5, 10) if nice * power >= least * 0.999999)


def _multiples(low: float, high: float, step: float) -> list[float]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{place * step:.12g}") for place in range(first, last + 1)]  # 0.3, not 0.30000000000000004


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten if there are enough, some between them if not; within about a decade, multiples."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for nices in ((1,), (1, 3), (1, 2, 5)):
        every = 1 + (last - first) // 10 if nices == (1,) else 1
        found = [float(f"{nice}e{power}") for power in range(first, last + 1) if power % every == 0 for nice in nices]
        found = [at for at in found if low <= at <= high]
        if len(found) >= (5 if len(nices) < 3 else 4):
            return found
    apart = TICKS_APART * math.log10(high / low)
    kept: list[float] = []
    for at in _multiples(low, high, _step((high - low) / 6)):
        if at > 0 and (not kept or math.log10(at / kept[-1]) >= apart):
            kept.append(at)
    return kept
