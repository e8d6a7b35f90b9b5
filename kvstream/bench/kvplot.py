"""A sweep as a picture, with what was published beside it, and as a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from . import raster
from .chart import BLUE, GREEN, GREY, ORANGE, PINK, RED, Axis, Band, Diamonds, Line, Mark, Panel, Picture, linear
from .kvfiles import replace
from .kvpoint import BASELINES, SIMULATED, Point, Setup
from .page import Page, html_of
from .sheet import Sheet
from .svg import picture_svg

PICTURE, PAGE, RASTER = "kv-stream-sweep.svg", "kv-stream-sweep.html", "kv-stream-sweep.png"
K = 1024
NOTES = (
    "Prompt and decode: tokens. Resident, ring: pages per layer that stay on the device, and cells through which the "
    "others come. MiB/token: copied to the device for each decoded token. Compute, copy: kernels and copies of an "
    "average decoded token; exposed: what the token takes beyond its kernels; overlap: the share of the copies that is "
    "hidden.",)


def write_pictures(folder: Path, points: Sequence[Point], setup: Setup, finished: bool) -> None:
    """There must be a point. The PNG only of a sweep that is finished, as it takes seconds, and where matplotlib is."""
    picture = picture_of(points, setup)
    replace(folder / PICTURE, picture_svg(picture).encode())
    replace(folder / PAGE, html_of(page_of(picture, points, setup)).encode())
    if finished and raster.available():
        replace(folder / RASTER, raster.raster(picture, ".png"))


def title(setup: Setup, device: str, source: str) -> str:
    """``device``: what was measured on; nothing for a simulation."""
    model = f"{setup.model.name}, K {setup.k_type}, V {setup.v_type}, micro-batches of {setup.ubatch_tokens}"
    if setup.profile is not None:
        return f"KV streaming, SIMULATED: {setup.profile.name} ({setup.profile.basis}), {model}"
    alone = f", {setup.other_ms:g} ms of other work per token" if setup.other_ms > 0 else ", KV ALONE without a model"
    return f"KV streaming, {source.upper()} on {device}: {model}{alone}"


def picture_of(points: Sequence[Point], setup: Setup) -> Picture:
    contexts = linear("prompt (1,024 tokens)", (point.prompt_tokens / K for point in points), binary=True)
    panels = (_decode, _prefill, _times, _entries, _pool, _split)
    return Picture(title(setup, points[0].device, points[0].source), tuple(panel(contexts, points) for panel in panels))


def _line(points: Sequence[Point], name: str, words: str, colour: int | None, over: int = 0, *,
          dots: bool = True) -> Line:
    """Points that have no such figure are left out."""
    return Line(words, _known(points, name), colour, over=over, dots=dots)


def _known(points: Sequence[Point], name: str) -> tuple[tuple[float, float], ...]:
    return tuple((point.prompt_tokens / K, value) for point in points if (value := getattr(point, name)) is not None)


def _panel(words: str, x: Axis, unit: str, *marks: Mark) -> Panel:
    values = [value for mark in marks if isinstance(mark, Line | Diamonds) for _, value in mark.points]
    return Panel(words, x, linear(unit, values), marks)


def _published(points: Sequence[Point], name: str) -> Diamonds:
    return Diamonds("published, of the original", _known(points, name), RED)


def _decode(x: Axis, points: Sequence[Point]) -> Panel:
    return _panel(
        "Decode", x, "tokens/s", _line(points, "decode_tps", points[0].source, BLUE),
        _line(points, "baseline_decode_tps", "if everything were resident", GREY, 1, dots=False),
        _line(points, "all_resident_decode_tps", "all resident", GREEN, 2),
        _line(points, "host_only_decode_tps", "no page resident", ORANGE, 3),
        _line(points, "managed_decode_tps", "managed memory", PINK, 4), _published(points, "published_decode_tps"))


def _prefill(x: Axis, points: Sequence[Point]) -> Panel:
    return _panel("Prefill", x, "tokens/s", _line(points, "prefill_tps", points[0].source, BLUE),
                  _published(points, "published_prefill_tps"))


def _times(x: Axis, points: Sequence[Point]) -> Panel:
    beyond = "exposed copies" if points[0].source == SIMULATED else "beyond it: copies, host"
    return _panel(
        "A decoded token", x, "ms per token",
        Band(beyond, tuple((point.prompt_tokens / K, point.compute_ms, point.token_ms) for point in points), RED),
        _line(points, "token_ms", "token", BLUE, dots=False), _line(points, "compute_ms", "computation", GREEN, 1),
        _line(points, "copy_ms", "copies", ORANGE, 2))


def _entries(x: Axis, points: Sequence[Point]) -> Panel:
    return _panel(
        "The token that enters a new page", x, "ms per token",
        _line(points, "token_ms", "average token", BLUE, dots=False),
        _line(points, "page_entry_ms", "token that enters a new page", GREEN, 1),
        _line(points, "page_entry_reload_ms", "the same if a new split reloaded the pool", RED, 2))


def _pool(x: Axis, points: Sequence[Point]) -> Panel:
    return _panel("Memory and copies", x, "MiB", _line(points, "pool_mib", "pool", BLUE),
                  _line(points, "h2d_mib_per_token", "copied to the device per token", ORANGE, 1))


def _split(x: Axis, points: Sequence[Point]) -> Panel:
    return _panel(
        "How the pool is divided", x, "pages",
        _line(points, "stream_min_resident_pages", "resident per layer", BLUE),
        _line(points, "stream_max_active_pages", "pages per layer", GREY, 1, dots=False),
        _line(points, "stream_max_ring_slots", "cells of the ring", ORANGE, 2))


# --- the table and the page -------------------------------------------------------------------------------------------


def sheet_of(points: Sequence[Point], setup: Setup) -> Sheet:
    """Columns of what there can be: baselines that were asked for, and what was published if there is any of it."""
    baselines = [name for name in BASELINES if name in setup.baselines]
    figures: list[tuple[str, Callable[[Point], str]]] = [
        ("prompt", lambda point: f"{point.prompt_tokens:,}"), ("pool MiB", lambda point: f"{point.pool_mib:,}"),
        ("resident", lambda point: str(point.stream_min_resident_pages)),
        ("ring", lambda point: str(point.stream_max_ring_slots)),
        ("MiB/token", lambda point: f"{point.h2d_mib_per_token:,.1f}"),
        ("compute ms", lambda point: f"{point.compute_ms:.2f}"), ("copy ms", lambda point: f"{point.copy_ms:.2f}"),
        ("exposed", lambda point: f"{point.exposed_ms:.2f}"), ("overlap", lambda point: f"{point.overlap_pct:.0f}%"),
        ("prefill/s", lambda point: f"{point.prefill_tps:,.0f}"),
        ("decode/s", lambda point: f"{point.decode_tps:.2f}"),
        *((name, _baseline(name)) for name in baselines)]
    if any(point.published_decode_tps is not None for point in points):
        figures += [("bound", lambda point: f"{point.predicted_decode_tps:.2f}"),
                    ("published", lambda point: _figure(point.published_decode_tps)), ("ratio", _ratio)]
    sheet = Sheet("Contexts", tuple(name for name, _ in figures), left=0)
    for point in points:
        sheet.add(*(words(point) for _, words in figures))
    return sheet


def _baseline(name: str) -> Callable[[Point], str]:
    return lambda point: _figure(getattr(point, name.replace("-", "_") + "_decode_tps"))


def _ratio(point: Point) -> str:
    theirs = point.published_decode_tps
    return "" if theirs is None else f"{point.decode_tps / theirs:.3f}"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def page_of(picture: Picture, points: Sequence[Point], setup: Setup) -> Page:
    said = dict.fromkeys(point.notes for point in points if point.notes)
    last = points[-1]
    return Page(
        title="kvstream bench kv",
        lead=(picture.title, f"At {last.prompt_tokens:,} tokens: {last.decode_tps:.2f} tokens/s decoded, "
              f"{last.prefill_tps:,.0f} tokens/s of the prompt, through a pool of {last.pool_mib:,} MiB."),
        warnings=(), picture=picture, sheets=(sheet_of(points, setup),), conditions=tuple(said), notes=NOTES)
