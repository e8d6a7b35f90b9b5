"""The folder of a sweep: ``results.jsonl`` (what was asked, then every point), ``results.csv``, the pictures.

Everything is written anew after each point, to the side and then renamed, so that whoever looks, or whoever comes back
after a crash, finds whole files.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attrs import asdict, fields

from ..errors import ConfigError
from .kvpoint import Point

FORMAT = 2
RESULTS, TABLE = "results.jsonl", "results.csv"
COLUMNS = tuple(attribute.name for attribute in fields(Point))

Settings = Mapping[str, Any]
"""What the figures of a point depend on, as JSON values. Points of other settings are not continued."""


def read_points(folder: Path, settings: Settings) -> list[Point]:
    """The finished points of an earlier run with these settings; none when the folder has no results.

    *Errors*: ConfigError when they were made with other settings, or cannot be read.
    """
    file = folder / RESULTS
    try:
        lines = file.read_text("utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    try:
        records = [json.loads(line) for line in lines]
        about, *measured = records
        if about["kind"] != "metadata" or about["format"] != FORMAT:
            raise ValueError("not of this version")
        earlier = about["settings"]
        points = [Point(**record["point"]) for record in measured if record["kind"] == "measurement"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is no result of this version ({error}); choose another --output") from error
    differing = sorted(name for name in {*settings, *earlier} if settings.get(name) != earlier.get(name))
    if differing:
        raise ConfigError(f"{folder} has results of other settings, choose another --output: " + "; ".join(
            f"{name} was {earlier.get(name)!r} and is {settings.get(name)!r}" for name in differing))
    return points


def write_points(folder: Path, settings: Settings, points: Sequence[Point],
                 failures: Mapping[int, str] = MappingProxyType({})) -> None:
    """``failures``: prompts for which there is no point, and why. They are tried again when the sweep is continued."""
    records: list[dict[str, Any]] = [{"kind": "metadata", "format": FORMAT, "settings": dict(settings)}]
    records += [{"kind": "measurement", "point": asdict(point)} for point in points]
    records += [{"kind": "point_failure", "prompt_tokens": prompt, "why": why} for prompt, why in failures.items()]
    lines = [json.dumps(record, allow_nan=False) + "\n" for record in records]
    replace(folder / RESULTS, "".join(lines).encode())
    replace(folder / TABLE, csv_of(points).encode())


def csv_of(points: Sequence[Point]) -> str:
    """A row per point; empty where there is no figure."""
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, COLUMNS)
    writer.writeheader()
    for point in points:
        writer.writerow({name: f"{value:.6g}" if isinstance(value, float) else value
                         for name, value in asdict(point).items()})
    return out.getvalue()


def replace(file: Path, content: bytes) -> None:
    """Write a file so that it is either the old one or the new one."""
    draft = file.with_name(file.name + ".new")
    draft.write_bytes(content)
    draft.replace(file)
