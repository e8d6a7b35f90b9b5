"""``kvstream cache``: what is kept of saved KV on this machine, and deleting it.

As in ``cli``, everything heavy is imported inside the functions.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from .config import Config
    from .gateway.prune import Folder, Row

F = TypeVar("F", bound=Callable[..., Any])

UNITS = MappingProxyType({"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40})
SPANS = MappingProxyType({"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0})


def _where(command: F) -> F:
    """The options that say which store, and for whom the answer is."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="For programs."),
        click.option("--config", metavar="PATH", help="TOML file instead of ./kvstream.toml."),
        click.option("--dir", "folder", metavar="PATH", help="This folder only, not those of the configuration."),
    ):
        command = option(command)
    return command


def size_of(text: str) -> int:
    """500M, 2G, 1048576. *Errors*: ``click.BadParameter``."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?) ?([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise click.BadParameter(f"{text!r} is no size; write it like 500M or 2G", param_hint="--size")
    return int(float(found[1]) * UNITS[found[2].upper()])


def span_of(text: str) -> float:
    """12h, 7d, in seconds. *Errors*: ``click.BadParameter``."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?) ?([smhdw])", text.strip())
    if found is None:
        raise click.BadParameter(f"{text!r} is no age; write it like 12h or 7d", param_hint="--age")
    return float(found[1]) * SPANS[found[2]]


def _folders(folder: str | None, config: str | None) -> tuple[list[Folder], Config]:
    from .config import load_config
    from .errors import StoreError
    from .gateway.prune import Folder, folders_of

    ours = load_config(config, os.environ, together=False).config
    if folder is None:
        return [each for each in folders_of(ours) if each.path.is_dir()], ours
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise StoreError(f"{path} is not a folder; --dir takes the server's --slot-save-path")
    return [Folder(path)], ours


@click.group(short_help="Show and prune the KV that is saved on disk.")
def cache() -> None:
    """Show and prune the KV that is saved on disk.

    A KVStream that runs meanwhile computes what it cannot restore any more.
    """


@cache.command("ls", short_help="List what is saved.")
@_where
def list_(folder: str | None, config: str | None, as_json: bool) -> None:
    """List what is saved, the latest used first.

    "model file" says whether the model that it belongs to is on this machine as it was: ok, changed, gone, or ? where
    that cannot be seen. Files of a changed model are never used.
    """
    from .gateway.prune import look

    folders, ours = _folders(folder, config)
    listing = look(folders)
    if as_json:
        click.echo(json.dumps({
            "folders": [str(each.path) for each in folders], "bytes": listing.bytes,
            "bytes_max": ours.inject.disk_bytes_max, "files": [_json(row) for row in listing.rows],
            "damaged": list(listing.damaged)}, indent=2))
        return
    from .gateway.cacheview import show

    show(listing, folders, ours.inject.disk_bytes_max, time.time())


def _json(row: Row) -> dict[str, Any]:
    kept = row.manifest
    return {
        "name": row.name, "folder": str(row.folder.path), "file": kept.file, "state": row.state, "model": row.model,
        "model_file": row.model_state, "identity": kept.identity, "facts": dict(kept.facts), "tokens": kept.tokens,
        "bytes": kept.size, "created": kept.created, "used": kept.used, "hits": kept.hits, "why": kept.why}


@cache.command("rm", short_help="Delete saved KV by name.")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--all", "everything", is_flag=True, help="Delete everything.")
@_where
def remove_(names: tuple[str, ...], everything: bool, folder: str | None, config: str | None, as_json: bool) -> None:
    """Delete saved KV by name, or the beginning or end of one."""
    from .gateway.prune import look, named, remove

    if bool(names) == everything:
        raise click.UsageError("either names (see kvstream cache ls) or --all")
    listing = look(_folders(folder, config)[0])
    rows = list(listing.rows) if everything else named(listing, names)
    _say(rows, remove(rows), as_json)


@cache.command(short_help="Delete what is old, too much, or of no use.")
@click.option("--size", metavar="SIZE", help="Keep at most so much, like 500M or 2G [inject.disk_bytes_max].")
@click.option("--age", metavar="AGE", help="Also delete what was not used for so long, like 12h or 7d.")
@_where
def gc(size: str | None, age: str | None, folder: str | None, config: str | None, as_json: bool) -> None:
    """Delete what is old, too much, or of no use: files that do not match what was saved, and what KVStreams that died
    left half done."""
    from .gateway.prune import excess, look, remove, tidy

    folders, ours = _folders(folder, config)
    bytes_max = ours.inject.disk_bytes_max if size is None else size_of(size)
    age_s = None if age is None else span_of(age)
    rows = excess(look(folders), bytes_max=bytes_max, age_s_max=age_s, now=time.time())
    freed = remove(rows)
    _say(rows, freed + tidy(folders), as_json)


def _say(rows: list[Row], freed: int, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"deleted": [row.name for row in rows], "bytes": freed}, indent=2))
    else:
        files = "1 file" if len(rows) == 1 else f"{len(rows)} files"
        click.echo(f"deleted {files}, {freed / 10**6:,.1f} MB")
