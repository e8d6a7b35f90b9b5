"""A result as files: JSON after ``schema.json`` beside this module, and CSV with a row per request."""

from __future__ import annotations

import csv
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import asdict, fields

from .. import __version__
from .record import Record
from .result import Result, TargetResult
from .target import Target

SCHEMA = "kvstream-bench/1"
SCHEMA_FILE = Path(__file__).with_name("schema.json")
DERIVED = ("tokens", "estimated", "ttfb", "ttft", "ttfa", "tpot", "e2e")
COLUMNS = (*(about.name for about in fields(Record) if about.name != "gaps"), *DERIVED)


def conditions() -> dict[str, Any]:
    """What was run, when and on what machine."""
    return {
        "version": __version__,
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()},
    }


def as_json(result: Result, about: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Times in seconds. Keys of targets are not in it. ``about``: ``conditions``."""
    return {
        "schema": SCHEMA,
        **(about or conditions()),
        "partial": result.run.partial,
        "exit_code": result.exit_code,
        "load": asdict(result.load),
        "slo": dict(result.slo.bounds),
        "rounds": result.run.rounds,
        "targets": [_target(one) for one in result.targets],
        "comparisons": [asdict(comparison) for comparison in result.comparisons],
        "remarks": list(result.remarks),
        "sentences": list(result.sentences),
        "requests": [row | {"gaps": list(record.gaps)} for record, row in _rows(result)],
    }


def _target(one: TargetResult) -> dict[str, Any]:
    return {
        **_about(one.target),
        "whole": asdict(one.whole),
        "classes": {name: asdict(group) for name, group in one.classes.items()},
        "short": None if one.short is None else asdict(one.short),
        "rounds": [asdict(group) for group in one.rounds],
        "saturation": None if one.saturation is None else asdict(one.saturation),
    }


def _about(target: Target) -> dict[str, Any]:
    return {"label": target.label, "url": target.url, "kind": target.kind, "model": target.model,
            "prompt_length": target.lengths.source}


def _rows(result: Result) -> Iterator[tuple[Record, dict[str, Any]]]:
    for block in result.run.blocks:
        for record in block.records:
            yield record, {name: getattr(record, name) for name in COLUMNS}


def write_json(result: Result, file: Path, about: Mapping[str, Any] | None = None) -> None:
    file.write_text(json.dumps(as_json(result, about), indent=1, allow_nan=False) + "\n", "utf-8")


def write_csv(result: Result, file: Path) -> None:
    """One row per request, also for those that were not served; empty where something is not known."""
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS)
        writer.writeheader()
        writer.writerows(row for _, row in _rows(result))
