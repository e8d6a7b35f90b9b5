"""Percentiles and summaries. Pure; the tests hold them against numpy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from attrs import frozen

P99_SAMPLES_MIN = 100
"""With fewer values the 99th percentile is made of the largest one or two, and says little else."""


@frozen
class Summary:
    """Of ``n`` numbers. ``estimated``: at least one of them is no measurement but an estimate."""

    n: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    estimated: bool = False


def percentile(ordered: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100) of numbers in ascending order, linear between neighbours. There must be one."""
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Iterable[float]) -> float:
    return percentile(sorted(values), 50)


def summary(values: Iterable[float], *, estimated: bool = False) -> Summary | None:
    """None of no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    mean = math.fsum(ordered) / len(ordered)
    p50, p90, p99 = (percentile(ordered, q) for q in (50, 90, 99))
    return Summary(len(ordered), mean, p50, p90, p99, ordered[-1], estimated)
