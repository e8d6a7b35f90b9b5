"""``kvstream cache``: what is kept of saved KV on this machine, and deleting it.

As in ``cli``, everything heavy is imported inside the functions.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .cli_words import config_option, folders

if TYPE_CHECKING:
    from .config import Config
    from .gateway.prune import Folder, Row
    from .gateway.strangers import Strangers

F = TypeVar("F", bound=Callable[..., Any])

UNITS = MappingProxyType({"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40})
NOT_DELETED = 3  # the exit status where files lie on a disk that is not seen from here
SPANS = MappingProxyType({"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0})


def _where(command: F) -> F:
    """The options that say which store, and for whom the answer is."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="For programs."),
        config_option,
        click.option("--dir", "folder", metavar="PATH", shell_complete=folders,
                     help="This folder only, not those of the configuration."),
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
    return [next((each for each in folders_of(ours) if each.path == path.absolute()), Folder(path))], ours


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
    from .gateway.prune import look, unseen_servers
    from .gateway.strangers import strangers

    folders, ours = _folders(folder, config)
    listing, others = look(folders), strangers(folders)
    if as_json:
        click.echo(json.dumps({
            "folders": [str(each.path) for each in folders], "bytes": listing.bytes,
            "limits": {str(each.path): each.bytes_max for each in folders if each.bytes_max},
            "bytes_max": ours.inject.disk_bytes_max, "files": [_json(row) for row in listing.rows],
            "damaged": list(listing.damaged), "not_listed": _not_listed(others)}, indent=2))
        return
    from .gateway.cacheview import show

    show(listing, folders, others, ours.inject.disk_bytes_max, time.time(), [] if folder else unseen_servers(ours))


def _not_listed(others: list[Strangers]) -> list[dict[str, Any]]:
    return [{"folder": str(each.folder.path), "whose": each.whose, "files": each.files, "bytes": each.bytes}
            for each in others]


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
    """Delete saved KV by name, or the beginning or end of one.

    Files on the disk of a server that is not seen from here cannot be deleted: they are forgotten and named, and the
    exit status is 3. Files without a manifest are left alone.
    """
    from .gateway.prune import look, named, remove
    from .gateway.strangers import strangers

    if bool(names) == everything:
        raise click.UsageError("either names (see kvstream cache ls) or --all")
    folders = _folders(folder, config)[0]
    listing = look(folders)
    rows = list(listing.rows) if everything else named(listing, names)
    freed = remove(rows)
    _say(rows, freed, strangers(folders) if everything else [], as_json)


@cache.command(short_help="Delete what is old, too much, or of no use.")
@click.option("--size", metavar="SIZE", help="Keep at most so much in all, like 500M or 2G "
              "[in each folder what bounds it].")
@click.option("--age", metavar="AGE", help="Also delete what was not used for so long, like 12h or 7d.")
@_where
def gc(size: str | None, age: str | None, folder: str | None, config: str | None, as_json: bool) -> None:
    """Delete what is old, too much, or of no use: files that do not match what was saved, and what KVStreams that died
    left half done.

    Files on the disk of a server that is not seen from here do not count for --size. --age forgets them, names them,
    and the exit status is 3 then.
    """
    from .gateway.prune import excess, look, remove, tidy
    from .gateway.strangers import strangers

    folders, ours = _folders(folder, config)
    age_s = None if age is None else span_of(age)
    listing = look(folders)
    if size is not None:
        rows = excess(listing, bytes_max=size_of(size), age_s_max=age_s, now=time.time())
    else:
        rows = [row for each in folders for row in excess(
            listing.of(each), bytes_max=each.bytes_max or ours.inject.disk_bytes_max, age_s_max=age_s, now=time.time())]
    freed = remove(rows) + tidy(folders)
    unseen = [row for row in listing.rows if row.folder.remote and row not in rows]
    _say(rows, freed, strangers(folders), as_json, unseen)


def _say(rows: list[Row], freed: int, others: list[Strangers], as_json: bool, unseen: Sequence[Row] = ()) -> None:
    from .gateway.cacheview import MIB, removed_said, strangers_said

    forgotten = [row for row in rows if row.folder.remote]
    if as_json:
        click.echo(json.dumps({
            "deleted": [row.name for row in rows if not row.folder.remote], "bytes": freed,
            "forgotten": [{"name": row.name, "file": row.manifest.file} for row in forgotten],
            "not_listed": _not_listed(others)}, indent=2))
    else:
        for line in [*removed_said(rows, freed), *strangers_said(others)]:
            click.echo(line)
        if unseen:
            total = sum(row.manifest.size for row in unseen) / MIB
            click.echo(f"the size bound is for what is seen here: {total:,.1f} MiB in {len(unseen)} of the entries lie"
                       " on a server's disk and do not count; inject.files_max bounds their number")
    if forgotten:
        sys.exit(NOT_DELETED)
