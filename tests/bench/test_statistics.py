"""The statistics agree with numpy, and say nothing about no values."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstream.bench.statistics import median, percentile, summary

numbers = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=200)


@given(numbers, st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], q: float) -> None:
    assert percentile(sorted(values), q) == pytest.approx(float(numpy.percentile(values, q)), rel=1e-9, abs=1e-6)


@given(numbers)
def test_summaries_are_those_of_numpy(values: list[float]) -> None:
    found = summary(values)
    assert found is not None and found.n == len(values)
    expected = [numpy.mean(values), *numpy.percentile(values, [50, 90, 99]), numpy.max(values)]
    assert [found.mean, found.p50, found.p90, found.p99, found.max] == pytest.approx(expected, rel=1e-9, abs=1e-6)
    assert median(values) == pytest.approx(float(numpy.median(values)), rel=1e-9, abs=1e-6)


def test_nothing_has_no_summary() -> None:
    assert summary([]) is None
    one = summary([3.0], estimated=True)
    assert one is not None and (one.p50, one.p99, one.max, one.estimated) == (3.0, 3.0, 3.0, True)
