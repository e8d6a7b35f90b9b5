"""A sweep as a picture, with what was published beside it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..parts import to_add
from .kvfiles import replace
from .kvpoint import SIMULATED, Point, Setup
from .plots import COLOURS, HINT

PICTURES = ("kv-stream-sweep.png", "kv-stream-sweep.svg")
BLUE, RED, GREEN, PINK, ORANGE, SKY = COLOURS
K = 1024


def lacking() -> str | None:
    """What to tell when no pictures can be drawn; None: they can."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return f"no pictures without matplotlib: {to_add('matplotlib', HINT)}"
    return None


def write_pictures(folder: Path, points: Sequence[Point], setup: Setup) -> None:
    """*Errors*: ImportError without matplotlib: see ``lacking``."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "kvstream"}):
        figure = Figure(figsize=(12, 11), layout="constrained")
        axes: Any = figure.subplots(3, 2)
        contexts = [point.prompt_tokens / K for point in points]
        _decode(axes[0][0], contexts, points)
        _prefill(axes[0][1], contexts, points)
        _times(axes[1][0], contexts, points)
        _entries(axes[1][1], contexts, points)
        _pool(axes[2][0], contexts, points)
        _split(axes[2][1], contexts, points)
        for one in axes.flat:
            one.set(xlabel="prompt (1,024 tokens)", xlim=(0, max(contexts) * 1.03))
            one.set_ylim(bottom=0)
            one.grid(alpha=0.3)
            one.legend(fontsize=8)
        figure.suptitle(title(setup, points[0].device, points[0].source), fontsize=11, wrap=True)
        for name in PICTURES:
            out = io.BytesIO()
            kind = name.rpartition(".")[2]
            figure.savefig(out, format=kind, dpi=180, metadata={"Date": None} if kind == "svg" else None)
            replace(folder / name, out.getvalue())


def title(setup: Setup, device: str, source: str) -> str:
    """``device``: what was measured on; nothing for a simulation."""
    model = f"{setup.model.name}, K {setup.k_type}, V {setup.v_type}, micro-batches of {setup.ubatch_tokens}"
    if setup.profile is not None:
        return f"KV streaming, SIMULATED: {setup.profile.name} ({setup.profile.basis}), {model}"
    alone = f", {setup.other_ms:g} ms of other work per token" if setup.other_ms > 0 else ", KV ALONE without a model"
    return f"KV streaming, {source.upper()} on {device}: {model}{alone}"


def _line(axes: Any, contexts: Sequence[float], points: Sequence[Point], name: str, words: str, **style: Any) -> None:
    """Points that have no such figure are left out, and a line without points too."""
    known = [(context, value) for context, point in zip(contexts, points, strict=True)
             if (value := getattr(point, name)) is not None]
    if known:
        axes.plot(*zip(*known, strict=True), **{"marker": ".", "label": words, **style})


def _dots(axes: Any, points: Sequence[Point], name: str) -> None:
    known = [(point.prompt_tokens / K, value) for point in points if (value := getattr(point, name)) is not None]
    if known:
        axes.plot(*zip(*known, strict=True), "D", color=RED, markersize=5, label="published, of the original")


def _decode(axes: Any, contexts: Sequence[float], points: Sequence[Point]) -> None:
    _line(axes, contexts, points, "baseline_decode_tps", "if everything were resident", color="grey", linestyle="--",
          marker="")
    for name, words, colour in (
            ("all_resident_decode_tps", "all resident", GREEN), ("host_only_decode_tps", "no page resident", ORANGE),
            ("managed_decode_tps", "managed memory", PINK)):
        _line(axes, contexts, points, name, words, color=colour, linewidth=1)
    _line(axes, contexts, points, "decode_tps", points[0].source, color=BLUE)
    _dots(axes, points, "published_decode_tps")
    axes.set(ylabel="decode (tokens/s)")


def _prefill(axes: Any, contexts: Sequence[float], points: Sequence[Point]) -> None:
    _line(axes, contexts, points, "prefill_tps", points[0].source, color=BLUE)
    _dots(axes, points, "published_prefill_tps")
    axes.set(ylabel="prefill (tokens/s)")


def _times(axes: Any, contexts: Sequence[float], points: Sequence[Point]) -> None:
    _line(axes, contexts, points, "compute_ms", "computation", color=GREEN)
    _line(axes, contexts, points, "copy_ms", "copies", color=ORANGE)
    token = [point.predicted_ms / point.decode_tokens for point in points]
    axes.plot(contexts, token, color=BLUE, label="token")
    axes.fill_between(contexts, [point.compute_ms for point in points], token, color=RED, alpha=0.3,
                      label="exposed copies" if points[0].source == SIMULATED else "beyond it: copies, host")
    axes.set(ylabel="decode (ms per token)")


def _entries(axes: Any, contexts: Sequence[float], points: Sequence[Point]) -> None:
    token = [point.predicted_ms / point.decode_tokens for point in points]
    axes.plot(contexts, token, color=BLUE, label="average token")
    _line(axes, contexts, points, "page_entry_ms", "token that enters a new page", color=GREEN, linestyle="--")
    _line(axes, contexts, points, "page_entry_reload_ms", "the same if a new split reloaded the pool", color=RED)
    axes.set(ylabel="decode (ms per token)")


def _pool(axes: Any, contexts: Sequence[float], points: Sequence[Point]) -> None:
    _line(axes, contexts, points, "pool_mib", "pool", color=BLUE)
    _line(axes, contexts, points, "h2d_mib_per_token", "copied to the device per token", color=ORANGE)
    axes.set(ylabel="MiB")


def _split(axes: Any, contexts: Sequence[float], points: Sequence[Point]) -> None:
    _line(axes, contexts, points, "stream_max_active_pages", "pages per layer", color="grey", linestyle="--", marker="")
    _line(axes, contexts, points, "stream_min_resident_pages", "resident per layer", color=BLUE)
    _line(axes, contexts, points, "stream_max_ring_slots", "cells of the ring", color=ORANGE)
    axes.set(ylabel="pages")
