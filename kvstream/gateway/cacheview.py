"""The table of ``kvstream cache ls`` for a person. Plain when it goes into a pipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .prune import Folder, Listing, Row
from .statusview import _plain as plain

COLUMNS = ("name", "model", "tokens", "MB", "age", "last use", "hits", "model file")
NAME_CHARS = 16  # of its end: the beginning is the same for all of a model
MB = 10**6
PLAIN_WIDTH = 10_000  # a pipe has no width


def show(listing: Listing, folders: Sequence[Folder], bytes_max: int, now: float,
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
    files = "1 file" if len(listing.rows) == 1 else f"{len(listing.rows)} files"
    console.print(Text(f"{files}, {listing.bytes / MB:,.1f} of {bytes_max / MB:,.0f} MB in {where}"),
                  soft_wrap=True)
    for line in listing.damaged:
        console.print(Text(f"damaged: {plain(line)}", style="yellow"), soft_wrap=True)


def _cells(row: Row, now: float) -> list[Text]:
    kept = row.manifest
    fault = row.model_state if row.state in ("whole", "elsewhere") else row.state
    size = f"{kept.size / MB:,.1f}" + (" there" if row.state == "elsewhere" else "")
    return [Text(row.name[-NAME_CHARS:]), Text(plain(row.model)), Text(f"{kept.tokens:,}"), Text(size),
            Text(span(now - kept.created)), Text(span(now - kept.used)), Text(str(kept.hits)),
            Text(fault, style="" if fault in ("ok", "?") else "yellow")]


def span(seconds: float) -> str:
    """A time that passed, in the largest unit that fits."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
