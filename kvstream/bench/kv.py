"""``kvstream bench kv``: a sweep over contexts, continued where it stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import asdict, frozen
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..errors import ConfigError, DeviceError, StepError
from . import kvplot
from .kvfiles import read_points, write_points
from .kvgpu import About, Machine, about
from .kvmeasure import measure
from .kvmodel import MODELS, PROFILES, Model, Profile, model_from, profile_from
from .kvpoint import BASELINES, SIMULATED, Point, Setup, Told
from .kvsim import simulate
from .result import EXIT_NOTHING, EXIT_SERVED, EXIT_STOPPED


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
        profile = self.setup.profile
        published = [point.context for point in profile.published] if profile is not None else []
        return sorted({*regular, last, *(context for context in published if self.context_min <= context <= last)})

    def settings(self, known: About | None) -> dict[str, Any]:
        """What a point's figures depend on, and nothing else: more points may be added to a folder. ``known``: the
        device, where there is one."""
        setup = asdict(self.setup, value_serializer=lambda _, field, value: (
            str(value) if field is not None and field.name in ("k_type", "v_type") else value))
        profile = setup.pop("profile")
        measured = {name: setup.pop(name) for name in (
            "pool_step_mib", "reserve_mib", "other_ms", "other_prefill_ms", "full_prefill")}
        if known is None:
            setup |= {"source": SIMULATED, "card": profile}
        else:
            setup |= {"source": known.source, "device": asdict(known)} | measured
        settings: dict[str, Any] = json.loads(json.dumps(setup))  # as it will be read again: tuples are lists there
        return settings


def run_sweep(sweep: Sweep, machine: Machine | None = None) -> int:
    """Simulate or measure what is missing, write the files after each point, show the table. The exit code: 0, 1 when
    there was a context that could not be measured, 130 when it was stopped by Ctrl-C.

    *Errors*: ConfigError, also without a GPU where one is needed, and for a simulated pool in which a context has no
    room; the points before it are written.
    """
    setup = sweep.setup
    if sweep.context_max - setup.decode_tokens < max(1, sweep.context_min):
        raise ConfigError(f"a context of {sweep.context_max} tokens has no room for a prompt of {sweep.context_min} "
                          f"and {setup.decode_tokens} more")
    machine = machine or Machine()
    known = about(machine, setup) if setup.profile is None else None
    folder = sweep.output or Path(time.strftime("kv-bench-%Y%m%d-%H%M%S"))
    done = {point.prompt_tokens: point for point in read_points(folder, sweep.settings(known))}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}") from error
    failures: dict[int, str] = {}
    code = EXIT_SERVED
    try:
        _run_missing(sweep, machine, known, folder, done, failures)
    except KeyboardInterrupt:
        code = EXIT_STOPPED
    show(sweep, known, [done[prompt] for prompt in sorted(done)], folder, partial=code == EXIT_STOPPED)
    return code or (EXIT_NOTHING if failures else EXIT_SERVED)


def _run_missing(sweep: Sweep, machine: Machine, known: About | None, folder: Path, done: dict[int, Point],
                 failures: dict[int, str]) -> None:
    """Adds to ``done`` and ``failures``."""
    missing = [prompt for prompt in sweep.prompts() if prompt not in done]
    settings = sweep.settings(known)
    with _progress(len(missing), "simulating" if known is None else "measuring") as (say, told):
        if done:
            say(f"{folder} has {len(done)} points already")
        if done and not missing:  # an older KVStream, or one without matplotlib, may have measured them
            kvplot.write_pictures(folder, [done[prompt] for prompt in sorted(done)], sweep.setup, finished=True)
        for number, prompt in enumerate(missing):
            try:
                point = _point_of(sweep.setup, machine, known, prompt, told(prompt, number), say)
            except StepError:
                raise  # a mistake of ours
            except DeviceError as error:
                failures[prompt] = error.message
                say(f"{prompt:>9,} tokens: not measured: {error.message}")
            else:
                done[prompt] = point
                say(line_of(point))
            points = [done[prompt] for prompt in sorted(done)]
            write_points(folder, settings, points, failures)
            if points:
                kvplot.write_pictures(folder, points, sweep.setup, finished=number == len(missing) - 1)


def _point_of(setup: Setup, machine: Machine, known: About | None, prompt: int, told: Told,
              say: Callable[[str], None]) -> Point:
    if known is None:
        return simulate(setup, prompt, told)
    return measure(machine, known, setup, prompt, told, say)


@contextmanager
def _progress(points: int, doing: str) -> Iterator[tuple[Any, Any]]:
    """(say, told): print a line; a callback for the tokens of one point. A bar on a terminal, lines elsewhere."""
    console = Console(stderr=True)
    bar = Progress(TextColumn("{task.description}", markup=False), BarColumn(bar_width=30), TimeElapsedColumn(),
                   console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task(doing, total=max(1, points))

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


def show(sweep: Sweep, known: About | None, points: list[Point], folder: Path, partial: bool) -> None:
    console = Console(width=None if Console().is_terminal else 120 + 13 * len(sweep.setup.baselines))
    title = kvplot.title(sweep.setup, known.name if known else "", known.source if known else SIMULATED)
    console.print(("PARTIAL: " if partial else "") + title, markup=False, highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    sheet = kvplot.sheet_of(points, sweep.setup)
    for name in sheet.columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in sheet.rows:
        table.add_row(*(cell.text for cell in row))
    console.print(table)
    if points and points[-1].notes:  # the column has those of all
        console.print(f"last point: {points[-1].notes}", markup=False, highlight=False)
    console.print(f"written to {folder}", markup=False, highlight=False)


# --- what is asked ----------------------------------------------------------------------------------------------------


def profile_of(name: str) -> Profile:
    """A card by name or from a JSON file. *Errors*: ConfigError."""
    return PROFILES[name] if name in PROFILES else profile_from(*_from_file(name, "card", PROFILES))


def model_of(name: str) -> Model:
    """A model's shape by name or from a JSON file. *Errors*: ConfigError."""
    return MODELS[name] if name in MODELS else model_from(*_from_file(name, "model", MODELS))


def baselines_of(text: str) -> tuple[str, ...]:
    """Names with commas between them, in the order of ``BASELINES``. *Errors*: ConfigError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in BASELINES:
            raise ConfigError(f"there is no baseline {name!r}; there are {', '.join(BASELINES)}")
    return tuple(name for name in BASELINES if name in names)


def other_ms_of(text: str, model: Model, ubatch_tokens: int) -> tuple[float, float]:
    """Per token and per micro-batch, both without attention: numbers, or what a card's profile says.
    *Errors*: ConfigError."""
    if text in PROFILES:
        profile = PROFILES[text]
        return profile.decode_ms(model), profile.prefill_step_ms(model, ubatch_tokens, 0)[0]
    try:
        per_token, *more = (float(part) for part in text.split(","))
        if len(more) > 1 or not all(0 <= value < 60_000 for value in (per_token, *more)):
            raise ValueError
    except ValueError:
        raise ConfigError(f"--other-ms is one or two numbers of ms, or a card ({', '.join(PROFILES)}), "
                          f"not {text!r}") from None
    return per_token, more[0] if more else 0.0


def _from_file(name: str, what: str, known: Any) -> tuple[Any, str]:
    try:
        return json.loads(Path(name).read_text("utf-8")), name
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {what} {name!r} and no such file; there are {', '.join(known)}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} cannot be read as JSON: {error}") from error
