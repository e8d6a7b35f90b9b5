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

COLUMNS = ("name", "model", "tokens", "MiB", "age", "used", "hits", "model file")
MIB = 2**20
MODEL = COLUMNS.index("model")
MODEL_CHARS_MIN = 10
EMPTY_SHOWN_MAX = 3
PLAIN_WIDTH = 10_000  # a pipe has no width


def show(listing: Listing, folders: Sequence[Folder], others: Sequence[Strangers], bytes_max: int, now: float,
         unseen: Sequence[str] = (), console: Console | None = None) -> None:
    """Print what is kept, and what is wrong with it. ``bytes_max`` is this configuration's, ``unseen`` the servers
    whose folders are not known."""
    if console is None:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = PLAIN_WIDTH
    if listing.rows:
        table = Table(box=None, pad_edge=False, collapse_padding=True)
        for number, column in enumerate(COLUMNS):
            side: Literal["right", "left"] = "right" if 2 <= number <= 6 else "left"
            table.add_column(column, justify=side, no_wrap=True, overflow="fold")
        rows = [_cells(row, now) for row in listing.rows]
        others_chars = sum(max(len(column), *(len(row[number]) for row in rows)) + 1
                           for number, column in enumerate(COLUMNS) if number != MODEL)
        for row in rows:
            row[MODEL] = Text(shortened(row[MODEL].plain, max(MODEL_CHARS_MIN, console.width - others_chars)))
            table.add_row(*row)
        console.print(table)
    for line in _where(listing, folders, bytes_max):
        console.print(Text(line), soft_wrap=True)
    for url in unseen:
        console.print(Text(f"the server at {plain(url)} is not seen here now; --dir FOLDER shows its --slot-save-path"),
                      soft_wrap=True)
    for line in strangers_said(others):
        console.print(Text(line, style="yellow"), soft_wrap=True)
    for line in listing.damaged:
        console.print(Text(f"damaged: {plain(line)}", style="yellow"), soft_wrap=True)


def _where(listing: Listing, folders: Sequence[Folder], bytes_max: int) -> list[str]:
    """A line for each folder that has files; without any, for those where files could be seen."""
    if not folders:
        return ["0 files, no folder of saved KV yet"]
    sizes: dict[Folder, list[int]] = {}
    for row in listing.rows:
        sizes.setdefault(row.folder, []).append(row.manifest.size)
    told = list(sizes) or [folder for folder in folders if not folder.remote][:EMPTY_SHOWN_MAX]
    lines = []
    for folder in folders:
        if folder not in told:
            continue
        files, size, path = len(sizes.get(folder, ())), sum(sizes.get(folder, ())) / MIB, plain(str(folder.path))
        limit = f"{(folder.bytes_max or bytes_max) / MIB:,.0f} MiB"
        whose = "" if folder.bytes_max else " (limit of this configuration)"
        if folder.remote:
            server = f"the server at {plain(folder.url)}" if folder.url else "a server"
            lines.append(f"{counted(files, 'file')}, {size:,.1f} of {limit}{whose} there: on the disk of {server}, not"
                         f" seen from here; entries in {path}")
        else:
            lines.append(f"{counted(files, 'file')}, {size:,.1f} of {limit} in {path}{whose}")
    empty = len(folders) - len(lines)
    if not lines:
        return [f"0 files in {counted(empty, 'folder')}"]
    return [*lines, *([f"and {counted(empty, 'empty folder')}"] if empty else [])]


def shortened(text: str, chars: int) -> str:
    """Without its middle where it is too long: both ends tell models apart."""
    if len(text) <= chars:
        return text
    return f"{text[:chars // 2]}…{text[len(text) - (chars - chars // 2 - 1):]}"


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
