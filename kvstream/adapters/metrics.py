"""Reads the Prometheus text format, as far as adapters need it."""

from __future__ import annotations

import re
from math import isfinite

from attrs import frozen

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*$")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')


@frozen
class Sample:
    """One line of a scrape."""

    name: str
    labels: dict[str, str]
    value: float


def samples_of(body: bytes, prefixes: tuple[str, ...]) -> list[Sample]:
    """The samples whose name begins with one of ``prefixes``; lines that cannot be read are skipped."""
    found: list[Sample] = []
    for line in body.decode("utf-8", "replace").splitlines():
        if not line.startswith(prefixes):
            continue
        match = _LINE.match(line)
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if not isfinite(value):
            continue  # nothing we read can be NaN or infinite
        found.append(Sample(match[1], dict(_LABEL.findall(match[2] or "")), value))
    return found
