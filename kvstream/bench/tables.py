"""A result as tables and lines of words: the terminal and the page show the same."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import MappingProxyType

from .figures import MEASURES, Group
from .plan import Load
from .result import Result, TargetResult
from .sheet import Cell, Sheet
from .statistics import Summary
from .verdict import seconds

NAMES = (("queue", "queue wait"), ("ttfb", "first byte"), ("ttft", "first token"), ("ttfa", "first answer text"),
         ("tpot", "per token"), ("itl", "between tokens"), ("gap", "between chunks"), ("e2e", "whole answer"))
# A row that would only repeat another is left out: one token per chunk, no reasoning, nothing before the first token.
TWINS = MappingProxyType({"gap": "itl", "ttfa": "ttft", "ttfb": "ttft"})
TWINS_APART = 0.02  # of each other
EXAMPLE_MAX = 120


def headline(result: Result) -> list[str]:
    """What was run, in two or three lines."""
    load = result.load
    lines = [describe_load(load) + (f"; SLO: {result.slo}" if result.slo.bounds else "")]
    for one in result.targets:
        target = one.target
        lines.append(f"{target.label}: {target.url} ({target.kind}), model {target.model or 'as served'}, prompt "
                     f"length {target.lengths.source}")
    if result.run.rounds > 1:
        lines.append(f"{result.run.rounds} rounds; in each the targets took turns, never two at once.")
    return lines


def describe_load(load: Load) -> str:
    kinds = ", ".join((f"{kind.name} " if len(load.kinds) > 1 else "") + f"{kind.prompt_tokens}+{kind.output_tokens}"
                      + (f" ({kind.weight:g})" if len(load.kinds) > 1 else "") for kind in load.kinds)
    if load.rate is not None:
        cap = f", at most {load.concurrency} at once" if load.concurrency else ""
        how = f"open loop, {load.rate:g}/s {load.arrivals}{cap}"
    else:
        how = f"{load.concurrency} clients at once"
    much = [f"{load.requests} requests"] if load.requests is not None else []
    much += [f"{load.duration_s:g} s"] if load.duration_s is not None else []
    more = f", {load.shared_prefix:.0%} of each prompt shared" if load.shared_prefix else ""
    more += f", {load.turns} turns" if load.turns > 1 else ""
    return f"{how}; {' or '.join(much)}; tokens {kinds}{more}; seed {load.seed}"


def tables_of(result: Result, *, narrow: bool = False) -> Iterator[Sheet]:
    """``narrow``: of several targets, without means."""
    yield _counts(result)
    yield _latencies(result, narrow)
    if any(one.classes for one in result.targets):
        yield _classes(result)
    if any(one.whole.by_kind for one in result.targets):
        yield _failures(result)
    yield from _ratios(result)


def _counts(result: Result) -> Sheet:
    table = Sheet("Requests", ("", *(one.target.label for one in result.targets)))
    groups = [one.whole for one in result.targets]
    rows = [("sent", [f"{g.requests - g.cancelled}" for g in groups]), ("served", [f"{g.served}" for g in groups])]
    rows += [(f"  {name}", [f"{getattr(g, field)}" for g in groups])
             for name, field in (("of these short", "short"), ("refused, come later", "refused"),
                                 ("timed out", "timeouts"), ("errors", "errors"), ("cut by our stop", "cancelled"))
             if any(getattr(g, field) for g in groups)]
    rows.append(("wall clock", [seconds(g.wall_s) for g in groups]))
    rows.append(("served/s", [f"{g.served_per_s:.3g}" for g in groups]))
    rows.append(("output tokens/s", [("~" if g.output_estimated else "") + f"{g.output_tokens_per_s:.4g}"
                                     for g in groups]))
    rows.append(("prompt tokens/s", [f"{g.prompt_tokens_per_s:.4g}" if g.prompt_known else "-" for g in groups]))
    if result.slo.bounds:
        rows.append(("within the SLO", [f"{g.goodput.met} ({g.goodput.share:.0%})" for g in groups]))
        rows.append(("goodput/s", [f"{g.goodput.per_s:.3g}" for g in groups]))
    rows.append(("cached prompt tokens", [f"{g.cached.share:.1%}" if g.cached else "not told" for g in groups]))
    if result.load.is_open:
        rows.append(("offered/s, 2nd half", [_offered(one, "offered_per_s") for one in result.targets]))
        rows.append(("served/s, 2nd half", [_offered(one, "served_per_s") for one in result.targets]))
    for name, values in rows:
        table.add(name, *values)
    return table


def _offered(one: TargetResult, name: str) -> str:
    found = one.saturation
    return "-" if found is None or found.saturated is None else f"{getattr(found, name):.3g}"


def _latencies(result: Result, narrow: bool) -> Sheet:
    several = len(result.targets) > 1
    means = not (several and narrow)
    table = Sheet("Latency", ("", *(["target"] if several else []), "n", *(["mean"] if means else []), "p50", "p90",
                              "p99", "max"), left=2 if several else 1)
    names = dict(NAMES)
    for measure in MEASURES:
        first = True
        twin = TWINS.get(measure, "")
        if all(_alike(one.whole.latencies.get(measure), one.whole.latencies.get(twin)) for one in result.targets):
            continue
        for one in result.targets:
            found = one.whole.latencies.get(measure)
            if found is None:
                continue
            table.add(names[measure] if first else "", *([one.target.label] if several else []), f"{found.n}",
                      *points(found)[not means:])
            first = False
    return table


def _alike(one: Summary | None, other: Summary | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.n == other.n and all(
        math.isclose(getattr(one, name), getattr(other, name), rel_tol=TWINS_APART) for name in ("p50", "p99", "max"))


def points(found: Summary) -> list[str]:
    mark = "~" if found.estimated else ""
    return [mark + seconds(value) for value in (found.mean, found.p50, found.p90, found.p99, found.max)]


def _classes(result: Result) -> Sheet:
    table = Sheet("By class", ("class", "target", "sent", "served", "good" if result.slo.bounds else "out tok/s",
                               "first tok p50", "p99", "whole p50", "p99"), left=2)
    for name in sorted({name for one in result.targets for name in one.classes}):
        for place, one in enumerate(result.targets):
            group = one.classes.get(name)
            if group is not None:
                good = f"{group.goodput.share:.0%}" if result.slo.bounds else f"{group.output_tokens_per_s:.3g}"
                table.add(name if place == 0 else "", one.target.label, f"{group.requests - group.cancelled}",
                          f"{group.served}", good, *_two(group, "ttft"), *_two(group, "e2e"))
    return table


def _two(group: Group, measure: str) -> tuple[str, str]:
    found = group.latencies.get(measure)
    return ("-", "-") if found is None else (seconds(found.p50), seconds(found.p99))


def _failures(result: Result) -> Sheet:
    table = Sheet("Not served", ("target", "kind", "count", "for example"), left=2, words_last=True)
    for one in result.targets:
        for kind, count in one.whole.by_kind.items():
            example = next((record.message or "" for record in one.records if record.error == kind), "")
            table.add(one.target.label, kind, f"{count}", example[:EXAMPLE_MAX])
    return table


def _ratios(result: Result) -> Iterator[Sheet]:
    for comparison in result.comparisons:
        table = Sheet(f"{comparison.other} / {comparison.base}", ("", "better", "overall", "median", "low", "high",
                                                                  "rounds"), left=2)
        for ratio in comparison.ratios:
            table.add(ratio.words, ratio.better,
                      Cell(f"{ratio.overall:.2f}", "" if not ratio.clear else "good" if ratio.good else "bad"),
                      f"{ratio.median:.2f}", f"{ratio.low:.2f}", f"{ratio.high:.2f}", f"{ratio.rounds}")
        yield table
