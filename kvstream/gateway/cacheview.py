"""The table of ``kvstream cache ls`` for a person. Plain when it goes into a pipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .prune import Folder, Listing, Row
from .statusview import _plain as plain
from .strangers import Strangers

COLUMNS = ("name", "model", "tokens", "MiB", "age", "last use", "hits", "model file")
MIB = 2**20
PLAIN_WIDTH = 10_000  # a pipe has no width


def show(listing: Listing, folders: Sequence[Folder], others: Sequence[Strangers], bytes_max: int, now: float,
         console: Console | None = None) -> None:
    """Print what is kept, and what is wrong with it."""
    if console is None:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = PLAIN_WIDTH
    if listing.rows:
        table = Table(box=None, pad_edge=False)
        for number, column in enumerate(COLUMNS):
            side: Literal["right", "left"] = "right" if 2 <= number <= 6 else "left"
            table.add_column(column, justify=side, no_wrap=number != 1, overflow="fold")
        for row in listing.rows:
            table.add_row(*_cells(row, now))
        console.print(table)
    where = ", ".join(plain(str(folder.path)) for folder in folders) or "no folder of saved KV yet"
    files = counted(len(listing.rows), "file")
    console.print(Text(f"{files}, {listing.bytes / MIB:,.1f} of {bytes_max / MIB:,.0f} MiB in {where}"),
                  soft_wrap=True)
    for line in strangers_said(others):
        console.print(Text(line, style="yellow"), soft_wrap=True)
    for line in listing.damaged:
        console.print(Text(f"damaged: {plain(line)}", style="yellow"), soft_wrap=True)


def _cells(row: Row, now: float) -> list[Text]:
    kept = row.manifest
    fault = row.model_state if row.state in ("whole", "elsewhere") else row.state
    size = f"{kept.size / MIB:,.1f}" + (" there" if row.state == "elsewhere" else "")
    return [Text(row.shown), Text(plain(row.model)), Text(f"{kept.tokens:,}"), Text(size),
            Text(span(now - kept.created)), Text(span(now - kept.used)), Text(str(kept.hits)),
            Text(fault, style="" if fault in ("ok", "?") else "yellow")]


def span(seconds: float) -> str:
    """A time that passed, in the largest unit that fits."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def strangers_said(others: Sequence[Strangers]) -> list[str]:
    """Lines about files that are not listed."""
    return [f"not listed: {counted(each.files, '.kv file')} ({each.bytes / MIB:,.1f} MiB) without a manifest in"
            f" {plain(str(each.folder.path))}, {each.whose}" for each in others]


def removed_said(rows: Sequence[Row], freed: int) -> list[str]:
    """Lines about what was done with ``rows``: of those whose files lie elsewhere only the entries are gone."""
    forgotten = [row for row in rows if row.folder.remote]
    lines = []
    if len(forgotten) < len(rows) or freed or not forgotten:
        lines.append(f"deleted {counted(len(rows) - len(forgotten), 'file')}, {freed / MIB:,.1f} MiB")
    if forgotten:
        names = ", ".join(sorted({row.manifest.file for row in forgotten}))
        entries = "1 entry" if len(forgotten) == 1 else f"{len(forgotten)} entries"
        size = sum(row.manifest.size for row in forgotten)
        lines.append(f"forgot {entries}, {size / MIB:,.1f} MiB; their files lie on the server's disk"
                     f" (its --slot-save-path) and were not deleted, delete them there: {names}")
    return lines


def counted(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number:,} {what}s"
