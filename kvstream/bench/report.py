"""A result on the terminal: tables that fit 80 columns, remarks, sentences."""

from __future__ import annotations

import os
from types import MappingProxyType

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .result import Result
from .sheet import Sheet, printable
from .tables import headline, tables_of

WIDE = 100  # columns from which a table of several targets has room for means
FILE_WIDTH = 100  # where stdout is no terminal
STYLES = MappingProxyType({"": "", "good": "green", "bad": "red"})


def show(result: Result, console: Console | None = None) -> None:
    """Print everything. ``console`` None: stdout."""
    console = console or _stdout()
    console.print()
    if result.run.partial:
        console.print(Text("PARTIAL: stopped before the end; this is what there is.", style="bold yellow"))
    for line in headline(result):
        console.print(printable(line), markup=False, highlight=False)
    for sheet in tables_of(result, narrow=console.width < WIDE):
        console.print()
        console.print(_table(sheet))
    console.print()
    for remark in result.remarks:
        style = "bold red" if remark.startswith("SATURATED") else "yellow"
        console.print(Text(f"! {printable(remark)}", style=style))
    if result.remarks:
        console.print()
    for sentence in result.sentences:
        console.print(printable(sentence), markup=False, highlight=False)


def _stdout() -> Console:
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=FILE_WIDTH)


def _table(sheet: Sheet) -> Table:
    table = Table(title=Text(printable(sheet.title)), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
                  padding=(0, 1), pad_edge=False, show_edge=False)
    for place, column in enumerate(sheet.columns):
        table.add_column(Text(printable(column)), justify="left" if sheet.is_words(place) else "right", overflow="fold")
    for row in sheet.rows:
        table.add_row(*(Text(printable(cell.text), style=STYLES[cell.mood]) for cell in row))
    return table
