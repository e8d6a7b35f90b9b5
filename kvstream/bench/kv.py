"""``kvstream bench kv``: a sweep over contexts, continued where it stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import asdict, frozen
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..errors import ConfigError
from . import kvplot
from .kvfiles import read_points, write_points
from .kvmodel import MODELS, PROFILES, Model, Profile, model_from, profile_from
from .kvsim import Point, Setup, Told, simulate
from .result import EXIT_SERVED, EXIT_STOPPED


@frozen
class Sweep:
    """Prompts of ``step`` tokens, twice that, and so on, from ``context_min``, such that prompt and answer fit into
    ``context_max``; the last fills it. Where the card has published figures, their prompts too."""

    setup: Setup
    context_max: int
    context_min: int = 8192
    step: int = 8192
    output: Path | None = None

    def prompts(self) -> list[int]:
        last = self.context_max - self.setup.decode_tokens
        regular = range(-(-self.context_min // self.step) * self.step, last, self.step)
        published = (point.context for point in self.setup.profile.published)
        return sorted({*regular, last, *(context for context in published if self.context_min <= context <= last)})

    def settings(self) -> dict[str, Any]:
        """What a point's figures depend on, and nothing else: more points may be added to a folder."""
        setup = self.setup
        settings: dict[str, Any] = json.loads(json.dumps({  # as it will be read again: tuples are lists there
            "simulated": asdict(setup.profile), "model": asdict(setup.model), "k_type": str(setup.k_type),
            "v_type": str(setup.v_type), "page_tokens": setup.page_tokens, "decode_tokens": setup.decode_tokens,
            "ubatch_tokens": setup.ubatch_tokens, "pool_mib": setup.pool_mib, "margin_mib": setup.margin_mib}))
        return settings


def run_sweep(sweep: Sweep) -> int:
    """Simulate what is missing, write the files after each point, show the table. The exit code: 0, or 130 when it was
    stopped by Ctrl-C.

    *Errors*: ConfigError, also for a pool in which a context has no room; the points before it are written.
    """
    if sweep.context_max - sweep.setup.decode_tokens < max(1, sweep.context_min):
        raise ConfigError(f"a context of {sweep.context_max} tokens has no room for a prompt of {sweep.context_min} "
                          f"and {sweep.setup.decode_tokens} more")
    folder = sweep.output or Path(time.strftime("kv-bench-%Y%m%d-%H%M%S"))
    settings = sweep.settings()
    done = {point.prompt_tokens: point for point in read_points(folder, settings)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}") from error
    missing = [prompt for prompt in sweep.prompts() if prompt not in done]
    code = EXIT_SERVED
    try:
        with _progress(len(missing)) as (say, told):
            if done:
                say(f"{folder} has {len(done)} points already")
            for number, prompt in enumerate(missing):
                point = simulate(sweep.setup, prompt, told(prompt, number))
                done[prompt] = point
                points = [done[prompt] for prompt in sorted(done)]
                write_points(folder, settings, points)
                kvplot.write_pictures(folder, points, sweep.setup)
                say(line_of(point))
    except KeyboardInterrupt:
        code = EXIT_STOPPED
    show(sweep, [done[prompt] for prompt in sorted(done)], folder, partial=code == EXIT_STOPPED)
    return code


@contextmanager
def _progress(points: int) -> Iterator[tuple[Any, Any]]:
    """(say, told): print a line; a callback for the tokens of one point. A bar on a terminal, lines elsewhere."""
    console = Console(stderr=True)
    bar = Progress(TextColumn("{task.description}", markup=False), BarColumn(bar_width=30), TimeElapsedColumn(),
                   console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("simulating", total=max(1, points))

    def say(text: str) -> None:
        bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def told(prompt: int, number: int) -> Told:
        def advance(done: int, total: int) -> None:
            bar.update(task, description=f"{prompt:,} tokens", completed=number + done / total)
        return advance

    with bar:
        yield say, told


def line_of(point: Point) -> str:
    return (f"{point.prompt_tokens:>9,} tokens: decode {point.decode_tps:.2f}/s, prefill {point.prefill_tps:,.0f}/s, "
            f"pool {point.pool_mib:,} MiB, {point.h2d_mib_per_token:,.1f} MiB copied per token")


def show(sweep: Sweep, points: list[Point], folder: Path, partial: bool) -> None:
    console = Console(width=None if Console().is_terminal else 120)
    console.print(("PARTIAL: " if partial else "") + kvplot.title(sweep.setup), markup=False, highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    names = ("prompt", "pool MiB", "resident", "ring", "MiB/token", "compute ms", "copy ms", "exposed", "overlap",
             "prefill/s", "decode/s", "published", "ratio")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for point in points:
        published = point.published_decode_tps
        table.add_row(
            f"{point.prompt_tokens:,}", f"{point.pool_mib:,}", str(point.stream_min_resident_pages),
            str(point.stream_max_ring_slots), f"{point.h2d_mib_per_token:,.1f}", f"{point.compute_ms:.2f}",
            f"{point.copy_ms:.2f}", f"{point.exposed_ms:.2f}", f"{point.overlap_pct:.0f}%", f"{point.prefill_tps:,.0f}",
            f"{point.decode_tps:.2f}", "" if published is None else f"{published:.2f}",
            "" if published is None else f"{point.decode_tps / published:.3f}")
    console.print(table)
    console.print(f"written to {folder}", markup=False, highlight=False)


# --- what to simulate -------------------------------------------------------------------------------------------------


def profile_of(name: str) -> Profile:
    """A card by name or from a JSON file. *Errors*: ConfigError."""
    return PROFILES[name] if name in PROFILES else profile_from(*_from_file(name, "card", PROFILES))


def model_of(name: str) -> Model:
    """A model's shape by name or from a JSON file. *Errors*: ConfigError."""
    return MODELS[name] if name in MODELS else model_from(*_from_file(name, "model", MODELS))


def _from_file(name: str, what: str, known: Any) -> tuple[Any, str]:
    try:
        return json.loads(Path(name).read_text("utf-8")), name
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {what} {name!r} and no such file; there are {', '.join(known)}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} cannot be read as JSON: {error}") from error
