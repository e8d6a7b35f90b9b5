"""A picture as SVG: text, drawn by any browser, the same bytes for the same picture. Pure.

Colours are attributes, for light paper; a style sheet of a few rules changes them where the reader wants it dark. No
font is measured: widths of words are guessed on the large side, and what is too long is cut, with all of it in a
tooltip. Words come from outside (models, servers, command lines), so every one of them goes through ``escaped``.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby

from .chart import COLOURS, DASHES, RADII, WIDTHS, Axis, Band, Bound, Diamonds, Line, Mark, Panel, Picture, Row
from .sheet import printable

WIDTH, PLOT_HEIGHT, ROW_HEIGHT, GAP, MARGIN = 570.0, 230.0, 24.0, 24.0, 16.0
SIZE, LINE = 12.0, 17.0  # of words, and from one line of them to the next
LABELS_SHARE = 0.5  # of a panel's width, at most, for the names of its rows
INK, FAINT, PAPER, GREY = "#222222", "#dddddd", "#ffffff", "#777777"
DARK = ("#4aa8e8", "#f08040", "#2fc49a", "#dd92bd", "#f0b030", "#8fd0f5")  # COLOURS where the paper is dark
STYLE = ("@media(prefers-color-scheme:dark){.k-ink{fill:#dddddd}.k-inks{stroke:#dddddd}.k-faint{stroke:#444444}"
         ".k-paper{fill:#14171c}.k-f{fill:#aaaaaa}.k-s{stroke:#aaaaaa}"
         + "".join(f".k-f{n}{{fill:{colour}}}.k-s{n}{{stroke:{colour}}}" for n, colour in enumerate(DARK)) + "}")
FONT = 'font-family="system-ui, -apple-system, \'Segoe UI\', \'DejaVu Sans\', sans-serif"'
NARROW, BROAD = frozenset("iIjlrtf.,:;'|!()[] "), frozenset("mwMW@%")
NARROWEST = 0.36  # of the width of letters to their height
BOUND = "6 4"
DOTS_MAX = 500


def picture_svg(picture: Picture) -> str:
    """A file of its own."""
    columns = max(1, min(picture.columns, len(picture.panels)))
    wide = columns * WIDTH + (columns - 1) * GAP + 2 * MARGIN
    title = _wrapped(picture.title, wide - 2 * MARGIN, SIZE + 2, lines=3)
    parts = [_text(wide / 2, 24 + line * (LINE + 2), words, anchor="middle", size=SIZE + 2, bold=True)
             for line, words in enumerate(title)]
    y = 24 + len(title) * (LINE + 2)
    for first in range(0, len(picture.panels), columns):
        beside = picture.panels[first : first + columns]
        high = max(height_of(panel) for panel in beside)
        for column, panel in enumerate(beside):
            at = f"{_at(MARGIN + column * (WIDTH + GAP))} {_at(y)}"
            parts += [f'<g transform="translate({at})">', *_panel(panel, high), "</g>"]
        y += high + GAP
    paper = f'<rect width="{_at(wide)}" height="{_at(y)}" fill="{PAPER}" class="k-paper"/>'
    head = f"<title>{escaped(picture.title)}</title><style>{STYLE}</style>{paper}"
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + "\n".join([_open(wide, y, picture.title), head, *parts,
                                                                   "</svg>"]) + "\n"


def panel_svg(panel: Panel) -> str:
    """A part of a page that has ``STYLE`` itself."""
    high = height_of(panel)
    return "\n".join([_open(WIDTH, high, panel.title), *_panel(panel, high), "</svg>"])


def _open(wide: float, high: float, title: str) -> str:
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{_at(wide)}" height="{_at(high)}" '
            f'viewBox="0 0 {_at(wide)} {_at(high)}" style="max-width:100%;height:auto" role="img" '
            f'aria-label="{escaped(title)}" {FONT} font-size="{_at(SIZE)}">')


# --- one panel --------------------------------------------------------------------------------------------------------


def height_of(panel: Panel) -> float:
    return _head(panel) + max(PLOT_HEIGHT if not panel.rows else 0.0, len(panel.rows) * ROW_HEIGHT) + 3 * LINE


def _head(panel: Panel) -> float:
    """Height of what stands above the plot: the title, the key, and what the y axis is."""
    return LINE * (2 + len(_key_lines(panel)) + (panel.y is not None))


def _panel(panel: Panel, high: float) -> Iterator[str]:
    top, bottom = _head(panel), high - 3 * LINE
    names = [tick for _, tick in panel.y.ticks] if panel.y is not None else [row.label for row in panel.rows]
    left = min(max([24.0, *(10 + width_of(name) for name in names)]), WIDTH * LABELS_SHARE)
    plot = _Plot(panel.x, panel.y, left, top, WIDTH - 16, bottom)
    yield _text(0, LINE, _cut(panel.title, WIDTH, SIZE + 1), size=SIZE + 1, bold=True, whole=panel.title)
    for line, entries in enumerate(_key_lines(panel)):
        yield from _key(entries, LINE * (2.2 + line))
    if panel.y is not None:
        yield _text(0, top - LINE * 0.6, _cut(panel.y.label, WIDTH), whole=panel.y.label)
    yield from _axes(plot)
    for place, row in enumerate(panel.rows):
        yield from _row(plot, row, top + (place + 0.5) * (bottom - top) / len(panel.rows))
    for mark in panel.marks:
        yield from _mark(plot, mark)
    if panel.empty:
        yield _text((left + WIDTH - 16) / 2, (top + bottom) / 2, "nothing to show", anchor="middle")


class _Plot:
    """Where values lie."""

    def __init__(self, x: Axis, y: Axis | None, left: float, top: float, right: float, bottom: float) -> None:
        self.x, self.y = x, y
        self.left, self.top, self.right, self.bottom = left, top, right, bottom

    def across(self, value: float) -> float | None:
        place = self.x.place(value)
        return None if place is None else self.left + place * (self.right - self.left)

    def up(self, value: float) -> float | None:
        place = None if self.y is None else self.y.place(value)
        return None if place is None else self.bottom - place * (self.bottom - self.top)

    def places(self, points: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float] | None]:
        for x, y in points:
            across, up = self.across(x), self.up(y)
            yield None if across is None or up is None else (across, up)


def _axes(plot: _Plot) -> Iterator[str]:
    for value, tick in plot.y.ticks if plot.y is not None else ():
        y = plot.up(value)
        if y is not None:
            yield _straight(plot.left, y, plot.right, y, f'stroke="{FAINT}" class="k-faint"')
            yield _text(plot.left - 6, y + 4, tick, anchor="end")
    end = 0.0
    for value, tick in plot.x.ticks:
        x, half = plot.across(value), width_of(tick) / 2
        if x is not None:
            yield _straight(x, plot.top, x, plot.bottom, f'stroke="{FAINT}" class="k-faint"')
            if x - half > end:  # words do not run into each other
                yield _text(x, plot.bottom + LINE, tick, anchor="middle")
                end = x + half
    yield _straight(plot.left, plot.bottom, plot.right, plot.bottom, f'stroke="{INK}" class="k-inks"')
    words, y = plot.x.label, plot.bottom + 2.2 * LINE
    if width_of(words) <= plot.right - plot.left:
        yield _text((plot.left + plot.right) / 2, y, words, anchor="middle")
    else:
        yield _text(plot.right, y, _cut(words, plot.right), anchor="end", whole=words)


def _mark(plot: _Plot, mark: Mark) -> Iterator[str]:
    if isinstance(mark, Bound):
        x = plot.across(mark.x)
        if x is not None:
            yield _straight(x, plot.top, x, plot.bottom, _stroke(mark))
    elif isinstance(mark, Band):
        lower, upper = ((at, low) for at, low, _ in mark.points), ((at, high) for at, _, high in mark.points)
        both = zip(plot.places(lower), plot.places(upper), strict=True)
        for whole, run in groupby(both, key=lambda pair: pair[0] is not None and pair[1] is not None):
            if whole:
                there, back = zip(*run, strict=True)
                outline = [at for at in (*there, *reversed(back)) if at is not None]
                yield f'<path d="{_path(outline)}Z" {_fill(mark.colour)} fill-opacity="0.3"/>'
    else:
        if isinstance(mark, Line):
            yield from _run_lines(plot, mark)
        if isinstance(mark, Diamonds) or (mark.dots and len(mark.points) <= DOTS_MAX):
            for (x, y), at in zip(mark.points, plot.places(mark.points), strict=True):
                if at is not None:
                    yield _dot(mark, *at, f"{mark.label}: {x:.6g}, {y:.4g}")


def _run_lines(plot: _Plot, line: Line) -> Iterator[str]:
    for whole, run in groupby(plot.places(line.points), key=lambda at: at is not None):
        known = [at for at in run if at is not None]
        if whole and len(known) == 1:  # a path from here to here shows nothing
            yield _dot(line, *known[0], line.label)
        elif whole:
            yield f'<path d="{_stairs(known) if line.steps else _path(known)}" fill="none" {_stroke(line)}/>'


def _row(plot: _Plot, row: Row, y: float) -> Iterator[str]:
    yield _text(plot.left - 6, y + 4, _cut(row.label, plot.left - 10), anchor="end", whole=row.label)
    low, middle, high = (plot.across(value) for value in (row.low, row.middle, row.high))
    if low is None or middle is None or high is None:
        return
    yield f"<g><title>{escaped(f'{row.label}: {row.words}')}</title>"
    stroke = f'{_stroke_colour(row.colour)} stroke-width="2"'
    yield _straight(low, y, high, y, stroke)
    for end in (low, high):
        yield _straight(end, y - 4, end, y + 4, stroke)
    ends = [plot.across(value) for value in row.quartiles or ()]
    if len(ends) == 2 and ends[0] is not None and ends[1] is not None:
        yield (f'<rect x="{_at(ends[0])}" y="{_at(y - 7)}" width="{_at(ends[1] - ends[0])}" height="14" '
               f'{_fill(row.colour)} fill-opacity="0.6"/>')
        yield _straight(middle, y - 7, middle, y + 7, f'stroke="{INK}" class="k-inks" stroke-width="2"')
    else:
        yield f'<circle cx="{_at(middle)}" cy="{_at(y)}" r="4.5" {_fill(row.colour)}/>'
    yield "</g>"


# --- the key ----------------------------------------------------------------------------------------------------------

Entry = tuple[str, Mark | int | None]


def _key_lines(panel: Panel) -> list[list[tuple[Entry, float]]]:
    """Entries, each with its place from the left, in as many lines as they need."""
    shown: list[Entry] = [(mark.label, mark) for mark in panel.marks
                          if mark.label and (isinstance(mark, Bound) or mark.points)]
    lines: list[list[tuple[Entry, float]]] = []
    at = WIDTH
    for entry in [*shown, *panel.key]:
        wide = 30 + width_of(_cut(entry[0], WIDTH - 30)) + 14
        if at + wide > WIDTH + 14:
            lines.append([])
            at = 0.0
        lines[-1].append((entry, at))
        at += wide
    return lines


def _key(entries: Sequence[tuple[Entry, float]], y: float) -> Iterator[str]:
    for (label, mark), x in entries:
        if isinstance(mark, Line | Bound):
            yield _straight(x, y - 4, x + 24, y - 4, _stroke(mark))
        if isinstance(mark, Diamonds) or (isinstance(mark, Line) and mark.dots):
            yield _dot(mark, x + 12, y - 4, label)
        if mark is None or isinstance(mark, int | Band):
            colour = mark.colour if isinstance(mark, Band) else mark
            yield (f'<rect x="{_at(x)}" y="{_at(y - 9)}" width="24" height="10" {_fill(colour)} '
                   f'fill-opacity="{0.3 if isinstance(mark, Band) else 0.8}"/>')
        yield _text(x + 30, y, _cut(label, WIDTH - 30), whole=label)


# --- shapes -----------------------------------------------------------------------------------------------------------


def _at(value: float) -> str:
    """A tenth of a pixel is enough."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def _straight(x: float, y: float, to_x: float, to_y: float, style: str) -> str:
    return f'<line x1="{_at(x)}" y1="{_at(y)}" x2="{_at(to_x)}" y2="{_at(to_y)}" {style}/>'


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(at for at, _ in groupby(f"{_at(x)} {_at(y)}" for x, y in points))


def _stairs(points: Sequence[tuple[float, float]]) -> str:
    """Along, then up. Steps that nobody can see are left out, so that a hundred thousand requests make no megabytes."""
    (x, y), parts = points[0], [f"M{_at(points[0][0])} {_at(points[0][1])}"]
    for to_x, to_y in points[1:]:
        parts += [letter + _at(after) for letter, before, after in (("H", x, to_x), ("V", y, to_y))
                  if _at(before) != _at(after)]
        x, y = to_x, to_y
    return "".join(parts)


def _dot(mark: Line | Diamonds, x: float, y: float, words: str) -> str:
    tip = f"{_fill(mark.colour)}><title>{escaped(words)}</title>"
    if isinstance(mark, Line):
        return f'<circle cx="{_at(x)}" cy="{_at(y)}" r="{_at(RADII[mark.over])}" {tip}</circle>'
    return f'<path d="{_path([(x, y - 5), (x + 5, y), (x, y + 5), (x - 5, y)])}Z" {tip}</path>'


def _stroke(mark: Line | Bound) -> str:
    if isinstance(mark, Bound):
        return f'stroke="{INK}" class="k-inks" stroke-width="1.2" stroke-dasharray="{BOUND}"'
    dashes = f' stroke-dasharray="{" ".join(map(_at, DASHES[mark.over]))}"' if mark.over else ""
    return f'{_stroke_colour(mark.colour)} stroke-width="{_at(WIDTHS[mark.over])}" stroke-linejoin="round"{dashes}'


def _stroke_colour(colour: int | None) -> str:
    return f'stroke="{GREY}" class="k-s"' if colour is None else f'stroke="{COLOURS[colour]}" class="k-s{colour}"'


def _fill(colour: int | None) -> str:
    return f'fill="{GREY}" class="k-f"' if colour is None else f'fill="{COLOURS[colour]}" class="k-f{colour}"'


# --- words ------------------------------------------------------------------------------------------------------------


def escaped(text: str) -> str:
    """For XML and HTML, between tags and in quotes."""
    return escape(printable(text))


def width_of(text: str, size: float = SIZE) -> float:
    """About, and rather more than less."""
    return size * sum(NARROWEST if char in NARROW else 0.95 if char in BROAD else
                      1.0 if unicodedata.east_asian_width(char) in "WF" else 0.74 if char.isupper() else 0.6
                      for char in text)


def _cut(text: str, wide: float, size: float = SIZE) -> str:
    if width_of(text, size) <= wide:
        return text
    kept = min(len(text), int(wide / (size * NARROWEST)))  # a name from outside may be a megabyte
    while kept > 0 and width_of(_without_middle(text, kept), size) > wide:
        kept -= 1 + kept // 50
    return _without_middle(text, max(0, kept))


def _without_middle(text: str, kept: int) -> str:
    """The end says as much as the beginning: a port, a number of requests."""
    return text[: kept - kept // 2] + "…" + text[len(text) - kept // 2 :]


def _wrapped(text: str, wide: float, size: float, lines: int) -> list[str]:
    """At spaces; the last line is cut."""
    found, words = [""], text.split()
    for place, word in enumerate(words):
        longer = f"{found[-1]} {word}".strip()
        if width_of(longer, size) <= wide or not found[-1]:
            found[-1] = longer
        elif len(found) < lines:
            found.append(word)
        else:
            found[-1] = " ".join([found[-1], *words[place:]])
            break
    return [_cut(line, wide, size) for line in found]


def _text(x: float, y: float, words: str, *, anchor: str = "", size: float = SIZE, bold: bool = False,
          whole: str = "") -> str:
    """``whole``: what ``words`` were cut from."""
    style = f' text-anchor="{anchor}"' if anchor else ""
    style += f' font-size="{_at(size)}"' if size != SIZE else ""
    style += ' font-weight="bold"' if bold else ""
    tip = f"<title>{escaped(whole)}</title>" if whole and whole != words else ""
    return f'<text x="{_at(x)}" y="{_at(y)}" fill="{INK}" class="k-ink"{style}>{tip}{escaped(words)}</text>'
