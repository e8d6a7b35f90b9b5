"""Pictures and pages without matplotlib: what is drawn lies where a reader's eye takes it to lie, whatever is drawn.

Coordinates are read from the SVG as a reader reads them: a value lies between two ticks as the words beside the ticks
say. Nothing here knows how wide a panel is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy
import pytest
import trio
import trio.testing
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st

from kvstream.bench import kvplot, plots, raster
from kvstream.bench.chart import (
    BLUE,
    DASHES,
    RADII,
    RED,
    WIDTHS,
    Axis,
    Band,
    Bound,
    Diamonds,
    Line,
    Panel,
    Picture,
    Row,
    duration,
    linear,
    logarithmic,
    share,
)
from kvstream.bench.kvmodel import MODELS, PROFILES
from kvstream.bench.kvpoint import Setup
from kvstream.bench.kvsim import simulate
from kvstream.bench.page import Page, html_of
from kvstream.bench.result import Result
from kvstream.bench.sheet import Cell, Sheet
from kvstream.bench.svg import panel_svg, picture_svg
from tests.bench.test_show import page, rich_result

NAN, INF = math.nan, math.inf
SVG = "{http://www.w3.org/2000/svg}"
ABOUT = {"version": "1.2.3", "when": "2026-01-02T03:04:05+0000",
         "machine": {"cpus": 7, "python": "3.99", "system": "Slackware"}}
EVIL = ("<script>alert(1)</script>", "\"'><img src=x onerror=alert(1)>", "&lt;&#60;]]>--><!--", "\x00\x1b[2J\x07\r\n",
        "\u202egnp.exe\u2066", "\ud800\ufffe", r"$\frac$ $x^$", "_hidden", "{x}{0}%s", "長い名前" * 40, "a" * 5000, "")


@frozen
class Seen:
    """A panel as it is seen: ticks as (words, place), shapes by kind, words."""

    across: tuple[tuple[str, float], ...]
    up: tuple[tuple[str, float], ...]
    root: ElementTree.Element

    def x_of(self, left: str, right: str, share_: float) -> float:
        """The place that lies so far between the ticks with these words."""
        at = dict(self.across)
        return at[left] + share_ * (at[right] - at[left])

    def y_of(self, low: str, high: str, share_: float) -> float:
        at = dict(self.up)
        return at[low] + share_ * (at[high] - at[low])

    def all(self, name: str) -> list[ElementTree.Element]:
        return list(self.root.iter(SVG + name))

    @property
    def words(self) -> str:
        return "\n".join(self.root.itertext())


def seen(panel: Panel) -> Seen:
    """The words of ticks, and the grid lines that they stand at."""
    root = ElementTree.fromstring(panel_svg(panel))
    lines = [element for element in root.iter(SVG + "line") if element.get("class") == "k-faint"]
    xs = {float(line.get("x1", "")) for line in lines if line.get("x1") == line.get("x2")}
    ys = {float(line.get("y1", "")) for line in lines if line.get("y1") == line.get("y2")}
    texts = [(element.text or "", float(element.get("x", "")), float(element.get("y", "")), element.get("text-anchor"))
             for element in root.iter(SVG + "text")]
    bottom = max(float(line.get("y2", "")) for line in lines) if lines else 0.0
    across = tuple((text, x) for text, x, y, anchor in texts if anchor == "middle" and x in xs and 0 < y - bottom < 25)
    up = tuple((text, y - 4) for text, _, y, anchor in texts
               if anchor == "end" and any(abs(y - 4 - line) < 0.2 for line in ys))
    return Seen(across, up, root)


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"-?\d+(?:\.\d+)?", text)]


def corners(path: str) -> list[tuple[float, float]]:
    """Of a path of M, L, H and V."""
    x = y = 0.0
    found = []
    for letter, rest in re.findall(r"([MLHV])([^MLHVZ]*)", path):
        values = numbers(rest)
        x, y = (values[0], y) if letter == "H" else (x, values[0]) if letter == "V" else (values[0], values[1])
        found.append((x, y))
    return found


def plain(*marks: Line | Diamonds | Band | Bound, x: Axis | None = None, y: Axis | None = None) -> Panel:
    return Panel("panel", x or linear("x", [10.0]), y or linear("y", [100.0]), marks)


# --- axes -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(), max_size=6), st.sampled_from([linear, logarithmic]))
def test_any_axis_can_be_read(values: list[float], make: type[Axis]) -> None:
    axis = make("a", values, text=duration) if all(value >= 0 for value in values) else make("a", values)  # type: ignore[call-arg, arg-type]
    places = [axis.place(at) for at, _ in axis.ticks]
    assert axis.low < axis.high and math.isfinite(axis.high - axis.low)
    assert None not in places and places == sorted(places) and 1 <= len(places) <= 13
    assert len({words for _, words in axis.ticks}) == len(places)
    for value in values:
        place = axis.place(value)
        assert place is None or 0 <= place <= 1
        if math.isfinite(value) and abs(value) < 1e249 and (value > 1e-249 or make is linear):
            assert place is not None, "what the axis was made for lies on it"


@pytest.mark.parametrize(("values", "ticks"), [
    ([10.0], "0 2 4 6 8 10"), ([0.3], "0 0.05 0.1 0.15 0.2 0.25 0.3"), ([123456.0], "0 50,000 100,000"),
    ([-3.0, 7.0], "-2 0 2 4 6"), ([], "0 0.2 0.4 0.6 0.8 1")])
def test_linear_ticks(values: list[float], ticks: str) -> None:
    assert " ".join(words for _, words in linear("", values).ticks) == ticks


def test_ticks_of_tokens_are_powers_of_two() -> None:
    ticks = linear("", [191.75], binary=True).ticks
    assert [words for _, words in ticks] == ["0", "32", "64", "96", "128", "160", "192"]


@pytest.mark.parametrize(("values", "ticks"), [
    ([0.001, 30.0], "1 ms|10 ms|100 ms|1 s|10 s"), ([0.02, 2.0], "20 ms|50 ms|100 ms|200 ms|500 ms|1 s|2 s"),
    ([0.31, 0.72], "300 ms|400 ms|500 ms|600 ms|700 ms"), ([0.00002, 0.0001], "20 µs|40 µs|60 µs|80 µs|100 µs")])
def test_logarithmic_ticks(values: list[float], ticks: str) -> None:
    assert "|".join(words for _, words in logarithmic("", values, text=duration).ticks) == ticks


# --- where things lie -------------------------------------------------------------------------------------------------


def test_points_of_a_line() -> None:
    panel = seen(plain(Line("l", ((0, 0), (2.5, 25), (5, 100), (10, 50)), BLUE, dots=True)))
    path = corners(panel.all("path")[0].get("d", ""))
    circles = [(float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in panel.all("circle")]
    shares = ((0, 0), (0.25, 0.25), (0.5, 1), (1, 0.5))
    expected = [(panel.x_of("0", "10", x), panel.y_of("0", "100", y)) for x, y in shares]
    for found in (path, circles[-4:]):
        assert numpy.allclose(found, expected, atol=0.15)
    assert panel.y_of("0", "100", 1) < panel.y_of("0", "100", 0), "more is higher"
    assert "l: 2.5, 25" in panel.words


def test_a_logarithmic_axis() -> None:
    x = logarithmic("x", [0.001, 10.0], text=duration)
    panel = seen(plain(Line("l", ((0.001, 0), (0.1, 50), (10.0, 100)), BLUE, steps=True), Bound("b", 1.0), x=x))
    stairs = corners(panel.all("path")[0].get("d", ""))
    first, middle, last = (panel.x_of("1 ms", "10 s", place) for place in (0, 0.5, 1))
    low, half, high = (panel.y_of("0", "100", place) for place in (0, 0.5, 1))
    assert numpy.allclose(stairs, [(first, low), (middle, low), (middle, half), (last, half), (last, high)], atol=0.15)
    across = [line for line in panel.all("line") if line.get("class") == "k-inks" and line.get("x1") == line.get("x2")]
    assert float(across[-1].get("x1", "")) == pytest.approx(panel.x_of("1 ms", "10 s", 0.75), abs=0.15)


def test_a_band_goes_there_and_back() -> None:
    panel = seen(plain(Band("b", ((0, 10, 20), (10, 30, 90)), RED)))
    expected = [(panel.x_of("0", "10", x), panel.y_of("0", "100", y)) for x, y in ((0, .1), (1, .3), (1, .9), (0, .2))]
    assert numpy.allclose(corners(panel.all("path")[0].get("d", "")), expected, atol=0.15)


def test_a_row() -> None:
    panel = seen(Panel("p", linear("x", [10.0]), rows=(Row("a", 1, 4, 9, (2, 6), BLUE, "all of it"),)))
    (box,) = (element for element in panel.all("rect") if element.get("height") == "14")
    left, wide = float(box.get("x", "")), float(box.get("width", ""))
    assert numpy.allclose([left, left + wide], [panel.x_of("0", "10", .2), panel.x_of("0", "10", .6)], atol=0.15)
    lines = [(float(line.get("x1", "")), float(line.get("x2", ""))) for line in panel.all("line")
             if line.get("stroke-width") == "2"]
    expected = [panel.x_of("0", "10", place) for place in (.1, .9, .4)]
    assert numpy.allclose([lines[0][0], lines[0][1], lines[-1][0]], expected, atol=0.15)
    assert "a: all of it" in panel.words


def test_hundred_thousand_requests_make_a_small_file() -> None:
    values = [0.01 * 1.0001 ** number for number in range(100_000)]
    points = tuple((value, (number + 1) / 100_000) for number, value in enumerate(values))
    panel = plain(Line("l", points, steps=True), x=logarithmic("", values), y=share("share"))
    text = panel_svg(panel)
    assert len(text) < 100_000
    found = seen(panel)
    middle = corners(found.all("path")[0].get("d", ""))
    assert middle[-1][1] == pytest.approx(found.y_of("0%", "100%", 1), abs=0.15)


# --- what cannot be drawn ---------------------------------------------------------------------------------------------

ODD: list[tuple[tuple[float, float], ...]] = [
    (), ((1, 1),), ((NAN, 1), (1, NAN)), ((1, 1), (INF, INF), (-INF, 2)), ((1e308, 1e308), (-1e308, -1e308)),
    ((-1, -1), (0, 0), (1, 1)), ((5e-324, 5e-324), (1, 1)), tuple((float(n), 3.0) for n in range(3000))]


@pytest.mark.parametrize("points", ODD)
@pytest.mark.parametrize("make", [linear, logarithmic])
def test_any_values_make_a_picture(points: tuple[tuple[float, float], ...], make: type[Axis]) -> None:
    x = make("x", [at for at, _ in points])  # type: ignore[call-arg, arg-type]
    y = make("y", [at for _, at in points])  # type: ignore[call-arg, arg-type]
    marks = (Line("a", points, dots=True), Line("b", points, steps=True), Diamonds("c", points),
             Band("d", tuple((at, up, NAN) for at, up in points)))
    rows = tuple(Row("r", at, up, at, (at, up), None, "w") for at, up in points[:5])
    text = picture_svg(Picture("t", (Panel("p", x, y, marks), Panel("q", x, rows=rows), Panel("r", x))))
    root = ElementTree.fromstring(text.encode())
    for element in root.iter():
        for name in ("d", "x", "x1", "cx", "y", "y1", "cy", "width", "height", "points"):
            assert not re.search("nan|inf|e[+-]", element.get(name, "")), element.attrib
    assert "nothing to show" in text


def test_a_value_that_cannot_be_drawn_leaves_a_gap() -> None:
    panel = seen(plain(Line("l", ((0, 10), (1, 20), (2, NAN), (3, 40), (4, INF), (5, 60), (6, 70)))))
    assert [len(corners(path.get("d", ""))) for path in panel.all("path")] == [2, 2]
    assert len(panel.all("circle")) == 1, "a point between two gaps is seen as well"


# --- the bench's own --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result() -> Result:
    return trio.run(partial(rich_result, timeout_s=30.0), clock=trio.testing.MockClock(autojump_threshold=0))


def test_the_share_of_requests(result: Result) -> None:
    """What is not served never arrives: each line ends at the share that was."""
    panel = seen(plots.picture_of(result).panels[0])
    lines = [path for path in panel.all("path") if path.get("fill") == "none"]
    assert len(lines) == len(result.targets) == 2
    for path, one in zip(lines, result.targets, strict=True):
        served = one.whole.served / (one.whole.requests - one.whole.cancelled)
        assert served < 1
        ends = corners(path.get("d", ""))
        assert ends[0][1] == pytest.approx(panel.y_of("0%", "100%", 0), abs=0.15)
        assert ends[-1][1] == pytest.approx(panel.y_of("0%", "100%", served), abs=0.15)
        assert f"{one.target.label} ({one.whole.served} of 40 served)" in panel.words
    assert "SLO 2.00 s" in panel.words


def test_boxes_are_quartiles(result: Result) -> None:
    panel = plots.picture_of(result).panels[3]
    one = result.targets[0]
    values = [record.e2e for record in one.records if record.served and record.kind == "short"]
    (row,) = (row for row in panel.rows if row.label == f"short: direct (n={len(values)})")
    assert row.quartiles is not None
    assert [row.low, *row.quartiles, row.middle, row.high] == pytest.approx(
        numpy.percentile(numpy.array(values, float), [1, 25, 75, 50, 99]).tolist())


def test_more_rows_than_one_can_look_at(result: Result) -> None:
    records = [evolve(record, turn=number % 60) for number, record in enumerate(result.targets[0].records * 4)]
    many = evolve(result, load=evolve(result.load, turns=60), targets=(evolve(result.targets[0], records=records),))
    panel = plots.picture_of(many).panels[2]
    assert len(panel.rows) == plots.ROWS_MAX and "(the first 40 of " in panel.title


def test_a_comparison_is_a_panel_of_its_own(result: Result) -> None:
    panel = plots.picture_of(result).panels[4]
    ratios = result.comparisons[0].ratios
    assert panel.title == "kvstream / direct" and len(panel.rows) == len(ratios) > 4
    for row, ratio in zip(panel.rows, ratios, strict=True):
        assert (row.low, row.middle, row.high) == (ratio.low, ratio.median, ratio.high) and ratio.words in row.label
        assert (row.colour is not None) == ratio.clear


def test_the_page_says_what_the_terminal_says(result: Result) -> None:
    text = "\n".join(ElementTree.fromstring(body_of(html_of(plots.page_of(result, ABOUT)))).itertext())
    words = set(text.split())
    missing = {word for word in page(result, 200).split() if not re.fullmatch("[─!]+", word)} - words
    assert not missing
    assert "KVStream 1.2.3, 2026-01-02T03:04:05+0000, from a machine with 7 processors, Slackware, Python 3.99" in text


def test_the_same_result_makes_the_same_bytes(result: Result) -> None:
    assert picture_svg(plots.picture_of(result)) == picture_svg(plots.picture_of(evolve(result)))
    assert html_of(plots.page_of(result, ABOUT)) == html_of(plots.page_of(evolve(result), dict(ABOUT)))


def test_a_sweep_makes_a_page() -> None:
    setup = Setup(PROFILES["rtx-5070-ti"], MODELS["smollm2-135m"], decode_tokens=4, pool_mib=64)
    point = simulate(setup, 1024)
    points = [evolve(point, prompt_tokens=1024 * n, decode_tps=100.0 / n, baseline_decode_tps=None,
                     notes=f"{EVIL[0]} {n}") for n in (1, 2, 4)]
    text = html_of(kvplot.page_of(kvplot.picture_of(points, setup), points, setup))
    assert set(tags(text)) == TAGS and "25.00 tokens/s decoded" in text
    panel = seen(kvplot.picture_of(points, setup).panels[0])
    dots = [(float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in panel.all("circle")][-3:]
    expected = [(panel.x_of("0", "4", n / 4), panel.y_of("0", "100", 1 / n)) for n in (1, 2, 4)]
    assert numpy.allclose(dots, expected, atol=0.15)


def test_lines_that_lie_on_each_other_are_all_seen() -> None:
    """Each has stretches of some pixels, within a hundred, over which nothing is drawn; and dots that stick out."""
    def on(over: int, at: int) -> bool:
        lengths = DASHES[over]
        begins = [sum(lengths[:n]) for n in range(0, len(lengths), 2)]
        return not lengths or any(start <= at % sum(lengths) < start + lengths[2 * n]
                                  for n, start in enumerate(begins))

    for over in range(len(DASHES)):
        seen_at = [at for at in range(100) if on(over, at) and not any(on(n, at) for n in range(over + 1, len(DASHES)))]
        assert len(seen_at) >= 4, (over, seen_at)
    assert sorted(set(RADII), reverse=True) == list(RADII[:4]) and len(WIDTHS) == len(RADII) == len(DASHES)


def test_no_series_of_a_sweep_hides_another() -> None:
    setup = Setup(PROFILES["rtx-5070-ti"], MODELS["smollm2-135m"], decode_tokens=4, pool_mib=64)
    for panel in kvplot.picture_of([simulate(setup, 1024)], setup).panels:
        lines = [mark.over for mark in panel.marks if isinstance(mark, Line)]
        assert lines == list(range(len(lines))), panel.title


# --- names from outside -----------------------------------------------------------------------------------------------

SHAPES = {"svg", "rect", "line", "path", "circle", "text", "title"}
TAGS = SHAPES | {"html", "head", "meta", "style", "body", "h1", "h2", "p", "div", "table", "thead", "tbody", "tr", "th",
                 "td"}


class Tags(HTMLParser):
    """As a browser reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.other: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, attrs))

    def handle_comment(self, data: str) -> None:
        self.other.append(data)

    def unknown_decl(self, data: str) -> None:
        self.other.append(data)


def tags(text: str) -> Iterator[str]:
    """Every tag; attributes are looked at on the way."""
    parser = Tags()
    parser.feed(text)
    parser.close()
    assert not parser.other
    for tag, attributes in parser.found:
        for name, value in attributes:
            assert not name.startswith("on") and name not in ("href", "src", "xlink:href", "srcdoc"), (tag, name)
            assert name == "xmlns" or "://" not in (value or "") or name == "aria-label", (tag, name, value)
        yield tag


def body_of(text: str) -> str:
    """It is XML but for its head."""
    return text[text.index("<body>"): text.index("</html>")]


def evil_page() -> Page:
    sheet = Sheet("t" + EVIL[0], EVIL[:4])
    for word in EVIL:
        sheet.add(word, Cell(word, "bad"), word, word)
    marks = (*(Line(word, ((1, 1), (2, 2)), dots=True) for word in EVIL), Diamonds(EVIL[0], ((1, 1),)),
             Bound(EVIL[1], 1))
    rows = tuple(Row(word, 1, 2, 3, (1.5, 2.5), BLUE, word) for word in EVIL)
    x, y = linear(EVIL[0], [3.0]), linear(EVIL[1], [2.0])
    panels = (Panel(EVIL[2], x, y, marks), Panel(EVIL[3], x, rows=rows, key=((EVIL[0], None), (EVIL[10], RED))))
    return Page(EVIL[0], EVIL, EVIL, Picture(" ".join(EVIL), panels), (sheet,), EVIL, EVIL)


def test_names_from_outside_stay_words() -> None:
    text = html_of(evil_page())
    assert set(tags(text)) == TAGS | {"g", "span"}
    whole = "\n".join(ElementTree.fromstring(body_of(text)).itertext())
    assert EVIL[0] in whole and EVIL[1] in whole and EVIL[2] in whole, "and can be read"
    svg = picture_svg(evil_page().picture)
    assert {element.tag for element in ElementTree.fromstring(svg.encode()).iter()} == {
        SVG + name for name in {*SHAPES, "g", "style"}}
    for char in "\x00\x1b\x07\r\u202e\u2066\ufffe":
        assert char not in text + svg
    assert "default-src 'none'" in text


def test_long_words_end_where_there_is_room() -> None:
    for text in (panel_svg(evil_page().picture.panels[0]), panel_svg(evil_page().picture.panels[1])):
        shown = [element.text or (element[0].tail if len(element) else "") or ""
                 for element in ElementTree.fromstring(text).iter(SVG + "text")]
        assert max(map(len, shown)) < 150 and any(re.fullmatch("a+…a+", words) for words in shown)


def test_a_megabyte_of_name_takes_no_minutes() -> None:
    """A server says what its model is called; this took longer than anybody waited."""
    for name in ("x" * 1_000_000, "x " * 500_000):
        picture = Picture(name, (Panel(name, linear(name, [1.0]), linear("y", [1.0])),))
        shown = [element.text or "" for element in ElementTree.fromstring(picture_svg(picture)).iter(SVG + "text")]
        assert max(map(len, shown)) < 250


def test_matplotlib_takes_them_too() -> None:
    """No formula, no hidden line; which characters its font has is its own business."""
    words = [word for word in EVIL if len(word) < 50]
    marks = tuple(Line(word, ((1, 1), (2, 2))) for word in words)
    panel = Panel("$\\frac$", linear("$_$", [2.0]), linear("^$", [2.0]), marks, key=((r"$\frac$", RED),))
    assert raster.raster(Picture(r"$\frac$ $x^$", (panel,)), ".pdf").startswith(b"%PDF")


async def test_a_model_s_name_does_not_steer_the_terminal(autojump_clock: trio.abc.Clock) -> None:
    result = await rich_result(targets=1)
    target = evolve(result.targets[0].target, model="\x1b[2J[red]\u202eevil", label="[bold]\x1b]0;x")
    text = page(evolve(result, targets=(evolve(result.targets[0], target=target),)), 120)
    assert not re.search("[\x1b\u202e]", text) and "[red]" in text and "[bold]" in text
