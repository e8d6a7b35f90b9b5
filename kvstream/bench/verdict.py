"""What the figures mean: ratios between targets with their spread, saturation, and plain sentences. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from attrs import frozen

from .figures import Group, group_of
from .plan import Load
from .record import BlockResult, Record, Run
from .slo import Slo
from .statistics import P99_SAMPLES_MIN, median, percentile

Better = Literal["higher", "lower"]
RATIOS: tuple[tuple[str, str, Better], ...] = (
    ("goodput_per_s", "requests/s within the SLO", "higher"),
    ("served_per_s", "requests/s served", "higher"),
    ("output_tokens_per_s", "output tokens/s", "higher"),
    ("ttft.p50", "time to first token, p50", "lower"),
    ("ttft.p99", "time to first token, p99", "lower"),
    ("tpot.p50", "time per output token, p50", "lower"),
    ("gap.p99", "gap between chunks, p99", "lower"),
    ("e2e.p50", "whole answer, p50", "lower"),
    ("e2e.p99", "whole answer, p99", "lower"),
)
CLEAR = 0.02  # rounds that all lie this far on one side of 1 show a difference
LAG_S_MAX = 0.05  # a generator that sends later than this measures itself


@frozen
class Ratio:
    """Of one measure, ``other / base``: over everything, and the median and ends over the rounds."""

    measure: str
    words: str
    better: Better
    base: float
    other: float
    overall: float
    median: float
    low: float
    high: float
    rounds: int

    @property
    def clear(self) -> bool:
        """All rounds say the same; one round alone says nothing about spread."""
        return self.rounds > 1 and (self.low > 1 + CLEAR or self.high < 1 - CLEAR)

    @property
    def good(self) -> bool:
        """The other is the better one, if there is a difference."""
        return (self.median > 1) == (self.better == "higher")


@frozen
class Comparison:
    base: str
    other: str
    ratios: tuple[Ratio, ...]


@frozen
class Saturation:
    """Of an open loop, in the second half of its arrivals: talks offered and served per second. ``saturated`` None:
    the run is too short against one answer to tell."""

    offered_per_s: float
    served_per_s: float
    saturated: bool | None
    send_lag_p99_s: float


def value_of(group: Group, measure: str) -> float | None:
    """A figure by its dotted name."""
    name, _, point = measure.partition(".")
    if point:
        found = group.latencies.get(name)
        return None if found is None else float(getattr(found, point))
    return group.goodput.per_s if measure == "goodput_per_s" else float(getattr(group, measure))


def compare(run: Run, base: str, other: str, slo: Slo) -> Comparison:
    groups = {label: group_of(run.records(label), run.wall_s(label), slo) for label in (base, other)}
    by_round = [_round_groups(run.blocks, number, base, other, slo) for number in range(run.rounds)]
    ratios: list[Ratio] = []
    for measure, words, better in RATIOS:
        if measure == "goodput_per_s" and not slo.bounds:
            continue
        left, right = value_of(groups[base], measure), value_of(groups[other], measure)
        pairs = [(value_of(a, measure), value_of(b, measure)) for a, b in filter(None, by_round)]
        parts = [b / a for a, b in pairs if a and b is not None]
        if left and right is not None and parts:
            ratios.append(Ratio(measure, words, better, left, right, right / left, median(parts), min(parts),
                                max(parts), len(parts)))
    return Comparison(base, other, tuple(ratios))


def _round_groups(blocks: Sequence[BlockResult], number: int, base: str, other: str,
                  slo: Slo) -> tuple[Group, Group] | None:
    """Both targets' figures of one round; None while it is not complete."""
    of = {block.target: group_of(block.records, block.wall_s, slo) for block in blocks if block.round == number}
    return (of[base], of[other]) if base in of and other in of else None


def saturation(blocks: Sequence[BlockResult]) -> Saturation | None:
    """Whether more was offered than served. None for a closed loop or no requests.

    Where everything offered is served, as many leave as come, once the first have had the time to be served. So only
    the second half of the arrivals is counted, and nothing before twice the fastest answer.
    """
    came, served, seconds, lags = 0, 0, 0.0, [0.0]
    for block in blocks:
        records = block.records
        lags += [record.started - record.intended for record in records]
        fastest = min((r.ended - r.started for r in records if r.served and r.ended is not None), default=0.0)
        last = max((record.intended for record in records), default=0.0)
        begin = max(last / 2, 2 * fastest)
        if begin > 0.8 * last:
            continue
        seconds += last - begin
        came += sum(begin < record.intended <= last for record in records)
        served += sum(record.served and begin < (record.ended or math.inf) <= last for record in records)
    lag = percentile(sorted(lags), 99)
    if seconds <= 0:
        return Saturation(0.0, 0.0, None, lag)
    behind = came - served
    saturated = served < 0.9 * came and behind > max(3.0, 2 * math.sqrt(came))
    return Saturation(came / seconds, served / seconds, saturated, lag)


# --- sentences --------------------------------------------------------------------------------------------------------


def seconds(value: float) -> str:
    """A time for a person: three digits and a unit."""
    number, unit = (value * 1000, "ms") if value < 0.9995 else (value, "s")
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f} {unit}"


def about(label: str, group: Group) -> str:
    """One target in a sentence."""
    sent = group.requests - group.cancelled
    if not group.served:
        return f"{label} served none of {sent} requests."
    text = f"{label} served {group.served} of {sent} requests, {group.output_tokens_per_s:.4g} output tokens/s"
    ttft = group.latencies.get("ttft")
    if ttft is not None:
        text += f"; half of the answers began within {seconds(ttft.p50)}"
        text += (f", 99 of 100 within {seconds(ttft.p99)}" if ttft.n >= P99_SAMPLES_MIN
                 else f", the last of {ttft.n} after {seconds(ttft.max)}")
    return text + "."


def compared(comparison: Comparison, groups: dict[str, Group], slo: Slo) -> list[str]:
    """Two targets in one to three sentences: what was asked for (goodput, else throughput), first tokens, failures."""
    base, other = comparison.base, comparison.other
    found = {ratio.measure: ratio for ratio in comparison.ratios}
    lines = []
    headline = "goodput_per_s" if slo.bounds else "output_tokens_per_s"
    if headline in found:
        lines.append(_sentence(base, other, found[headline]))
    elif slo.bounds and groups[other].goodput.met:
        lines.append(f"{other} served {groups[other].goodput.met} requests within the SLO, {base} none.")
    elif slo.bounds and not groups[base].goodput.met:
        lines.append(f"Neither {other} nor {base} served a request within the SLO.")
    if "ttft.p99" in found:
        lines.append(_sentence(base, other, found["ttft.p99"]))
    failed = {label: groups[label].failed for label in (base, other)}
    if any(failed.values()):
        lines.append(f"Requests that failed: {failed[base]} of {groups[base].requests} with {base}, "
                     f"{failed[other]} of {groups[other].requests} with {other}.")
    return lines


def _sentence(base: str, other: str, ratio: Ratio) -> str:
    claim = {
        "goodput_per_s": f"{other} served {ratio.median:.2f} times as many requests within the SLO as {base}",
        "output_tokens_per_s": f"{other} gave {ratio.median:.2f} times as many output tokens/s as {base}",
    }.get(ratio.measure, f"{other} had {ratio.median:.2f} times the {ratio.words} of {base}")
    spread = f"{ratio.low:.2f} to {ratio.high:.2f} over {ratio.rounds} rounds"
    if ratio.rounds == 1:
        return f"{claim} (one round, so the spread is not known)."
    return f"{claim} ({spread})." if ratio.clear else f"No clear difference: {claim} ({spread})."


def remarks(load: Load, groups: dict[str, Group], records: dict[str, Sequence[Record]],
            open_loop: dict[str, Saturation]) -> list[str]:
    """What a reader must know before believing the numbers."""
    lines: list[str] = []
    for label, group in groups.items():
        found = open_loop.get(label)
        if found is not None and found.saturated:
            lines.append(f"SATURATED: {label} was offered {found.offered_per_s:.3g} requests/s and served "
                         f"{found.served_per_s:.3g}; its latencies grow with the length of the run.")
        if found is not None and found.saturated is None:
            lines.append(f"The run is too short to tell whether {label} keeps up with this rate.")
        if found is not None and load.concurrency is None and found.send_lag_p99_s > LAG_S_MAX:
            lines.append(f"This machine sent late (p99 {seconds(found.send_lag_p99_s)}); that is in the latencies.")
        if group.short:
            lines.append(f"{label}: {group.short} answers ended before the asked length; they are not in the latencies."
                         if group.latencies_of == "full" else
                         f"{label}: all {group.short} answers ended before the asked length; the latencies are theirs.")
        if group.failed and group.served:
            lines.append(f"{label}: {group.failed} requests failed and are in no latency; the percentiles are those of "
                         f"the {group.served} others.")
        if group.output_estimated:
            lines.append(f"{label} did not tell its token counts: a chunk is taken for a token (marked ~).")
        off = _off_length(records[label])
        if off is not None:
            lines.append(f"{label}: prompts were to have {off[0]} tokens and had {off[1]} in the median.")
    ttft = [group.latencies["ttft"].n for group in groups.values() if "ttft" in group.latencies]
    if ttft and min(ttft) < P99_SAMPLES_MIN:
        lines.append(f"Few samples (n = {min(ttft)}): p99 of fewer than {P99_SAMPLES_MIN} is close to the maximum.")
    return lines


def _off_length(records: Sequence[Record]) -> tuple[int, int] | None:
    """(asked, median) of the first class whose first messages were more than 5 % longer or shorter than asked."""
    by_kind: dict[str, list[Record]] = {}
    for record in records:
        if record.turn == 0 and record.tokens_prompt is not None and record.served:
            by_kind.setdefault(record.kind, []).append(record)
    for same in by_kind.values():
        asked, had = same[0].prompt_asked, median([float(record.tokens_prompt or 0) for record in same])
        if abs(had - asked) > max(1.0, 0.05 * asked):
            return asked, round(had)
    return None
