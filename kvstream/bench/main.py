"""``kvstream bench``: options in, exit code out. All wiring of the bench is here."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import attrs
import trio
from attrs import field, frozen

from ..errors import BackendUnavailableError, ConfigError
from ..gateway.ports import Upstream
from ..gateway.statusview import check_url
from ..gateway.upstream import HttpUpstream
from . import files, plots, report
from .plan import Load, rounds_of
from .prompts import Lengths
from .record import Run
from .result import Result, result_of
from .runner import Watch, run_load, warm_up
from .sheet import printable
from .slo import Slo
from .target import Target, describe, learn_lengths


@frozen
class Options:
    """``urls``: the target, then those it is compared with. ``labels`` are as many as were given, in that order; the
    others name themselves."""

    urls: tuple[str, ...]
    load: Load
    slo: Slo = field(factory=Slo)
    labels: tuple[str | None, ...] = ()
    model: str = ""
    api_key: str = field(default="", repr=False)
    json: Path | None = None
    csv: Path | None = None
    plot: Path | None = None
    report: Path | None = None


class TalkingWatch(Watch, Protocol):
    """A watch that can also say something between blocks."""

    def say(self, text: str) -> None: ...


def run_bench(options: Options) -> int:
    """Run, show, write the files. *Errors*: ConfigError, BackendUnavailableError when a target is not there."""
    from .progress import open_watch

    for url in options.urls:
        check_url(url)
    for file in (options.json, options.csv, options.plot, options.report):
        if file is not None and not file.resolve().parent.is_dir():
            raise ConfigError(f"there is no folder {file.resolve().parent} to write {file.name} to")
    with open_watch() as watch:
        result = trio.run(_measure, options, watch)
    report.show(result)
    about = files.conditions()
    if options.json is not None:
        files.write_json(result, options.json, about)
    if options.csv is not None:
        files.write_csv(result, options.csv)
    if options.plot is not None:
        plots.write_plot(result, options.plot)
    if options.report is not None:
        plots.write_report(result, about, options.report)
    return result.exit_code


async def _measure(options: Options, watch: TalkingWatch) -> Result:
    async with open_targets(options) as targets:
        return await measure(targets, options, watch)


@asynccontextmanager
async def open_targets(options: Options) -> AsyncIterator[list[Target]]:
    """The targets as they are named, each with its connections."""
    async with AsyncExitStack() as stack:
        headers = (("authorization", f"Bearer {options.api_key}"),) if options.api_key else ()
        targets = []
        for place, url in enumerate(options.urls):
            base = url.rstrip("/").removesuffix("/v1")
            upstream: Upstream = await stack.enter_async_context(HttpUpstream(base))
            label = (options.labels[place] if place < len(options.labels) else None) or ""
            targets.append(Target(label, base, upstream, headers))
        yield targets


async def measure(targets: Sequence[Target], options: Options, watch: TalkingWatch) -> Result:
    """The whole measurement. Ctrl-C ends the load and leaves what there is; a second one ends the process.

    *Errors*: BackendUnavailableError when a target is not there, or serves none of its warm-ups.
    """
    load = options.load
    run = Run(rounds_of(load, len(targets)))
    known = list(targets)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_stop_on_interrupt, nursery.cancel_scope)
        known = await prepare(targets, options, watch)
        await run_load(known, load, watch, run)
        nursery.cancel_scope.cancel()
    return result_of(load, options.slo, known, run)


async def _stop_on_interrupt(scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGINT) as signals:
        async for _ in signals:
            scope.cancel()
            return


async def prepare(targets: Sequence[Target], options: Options, watch: TalkingWatch) -> list[Target]:
    """Find out what the targets are, learn the lengths of words, warm up."""
    known: list[Target] = []
    for target in targets:
        kind, models = await describe(target)
        model = options.model or (models[0] if models else "")
        known.append(attrs.evolve(target, kind=kind, model=model,
                                  label=target.label or _name(kind, target.url)))
    known = _told_apart(known)
    for place, target in enumerate(known):
        known[place] = attrs.evolve(target, lengths=await learn_lengths(target, options.load))
    known = _share_lengths(known)
    for target in known:
        await _warm_up(target, options.load, watch)
    return known


async def _warm_up(target: Target, load: Load, watch: TalkingWatch) -> None:
    shortest = min(kind.prompt_tokens for kind in load.kinds)
    if shortest < target.lengths.tokens_min:
        watch.say(f"{target.label}: the shortest prompt has about {target.lengths.tokens_min} tokens, not {shortest}")
    if not load.warmup:
        return
    watch.say(f"{target.label}: {target.kind} at {target.url}, warming up")
    records = await warm_up(target, load)
    if any(record.served for record in records):
        return
    last = records[-1]
    hint = " (a server that knows no ignore_eos? try --no-ignore-eos)" if last.status == 400 and load.ignore_eos else ""
    if "context" in (last.message or "").lower():  # the prompt is too long: ignore_eos is not to blame
        hint = ""
    raise BackendUnavailableError(f"{target.url} served no warm-up request: {last.error}, "
                                  f"{printable(last.message or '')}{hint}")


def _share_lengths(targets: list[Target]) -> list[Target]:
    """What one target knows exactly about a model is true for the others with the same model: a gateway need not have a
    tokenizer to be measured with exact prompts."""
    exact: dict[str, Lengths] = {}
    for target in targets:
        if target.lengths.source == "exact":
            exact.setdefault(target.model, target.lengths)
    return [attrs.evolve(target, lengths=exact.get(target.model, target.lengths)) for target in targets]


def _name(kind: str, url: str) -> str:
    return "kvstream" if kind.startswith("KVStream") else urlsplit(url).netloc


def _told_apart(targets: list[Target]) -> list[Target]:
    """No two labels alike."""
    seen: dict[str, int] = {}
    named = []
    for target in targets:
        seen[target.label] = seen.get(target.label, 0) + 1
        number = seen[target.label]
        named.append(target if number == 1 else attrs.evolve(target, label=f"{target.label}-{number}"))
    return named
