"""The report of ``kvstream doctor`` and the table of ``kvstream models`` for a person. Plain when it goes into a pipe.

Texts from servers are shown as plain characters, as in ``statusview``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..adapters.advice import Advice
from .doctor import MODELS_SHOWN_MAX, Report, ServerReport
from .inventory import ModelGroup
from .statusview import _plain as plain

STYLES = (("ok", "green"), ("note", "cyan"), ("warning", "yellow"), ("problem", "bold red"))
ROLES = (("backend", "the configured backend"), ("serves", "behind KVStream"), ("given", "as given"), ("found", ""))
INDENT = 11  # "  warning  "
PLAIN_WIDTH = 10_000  # a pipe has no width: one finding, one line, for grep


def show(report: Report, console: Console) -> None:
    """Print a report."""
    console.print(Text.assemble(("KVStream ", "bold"), report.version, "  ", report.system), soft_wrap=True)
    console.print(Text(f"configuration: {plain(report.configuration)}"), soft_wrap=True)
    if report.unpacked_in:
        console.print(Text(f"unpacked in: {plain(report.unpacked_in)}"), soft_wrap=True)
    console.print()
    console.print(Text("What runs here", style="bold"))
    for server in report.servers:
        _line(console, _server_line(server))
    if not report.servers:
        _line(console, Text("  nothing that KVStream knows of"))
    _findings(console, "This machine", report.findings)
    for server in report.servers:
        _findings(console, f"{server.title} at {server.url}", server.findings)
    console.print()
    _line(console, _verdict(report))


def _server_line(server: ServerReport) -> Text:
    line = Text(f"  {server.url}  ")
    line.append(f"{server.title} {plain(server.version)}".strip(), style="bold")
    line.append(f", {server.state}", style="" if server.state == "up" else "yellow")
    names = [plain(row.name) + (f" ({row.state})" if row.state not in ("", "loaded") else "") for row in server.models]
    if names:
        more = f" and {len(names) - MODELS_SHOWN_MAX} more" if len(names) > MODELS_SHOWN_MAX else ""
        line.append(f": {', '.join(names[:MODELS_SHOWN_MAX])}{more}")
    role = dict(ROLES)[server.role]
    return line.append(f"  <- {role}", style="dim") if role else line


def _findings(console: Console, title: str, findings: Sequence[Advice]) -> None:
    if not findings:
        return
    console.print()
    console.print(Text(plain(title), style="bold"), soft_wrap=True)
    width = console.width if console.is_terminal else PLAIN_WIDTH
    order = [name for name, _ in reversed(STYLES)]
    for found in sorted(findings, key=lambda one: order.index(one.severity)):
        line = Text(f"  {found.severity:<{INDENT - 2}}", style=dict(STYLES)[found.severity])
        line.append(_wrapped(plain(found.text), width, ""), style="default")
        if found.remedy:
            line.append(f"\n{' ' * INDENT}" + _wrapped(plain(found.remedy), width, "-> "), style="bold default")
        console.print(line, soft_wrap=True)


def _wrapped(text: str, width: int, mark: str) -> str:
    """The text, its further lines below its first."""
    return textwrap.fill(mark + text, max(20, width - INDENT - 1), subsequent_indent=" " * len(mark),
                         break_on_hyphens=False, break_long_words=False).replace("\n", f"\n{' ' * INDENT}")


def _line(console: Console, line: Text) -> None:
    console.print(line, soft_wrap=not console.is_terminal)


def _verdict(report: Report) -> Text:
    counts = [(report.count(name), name, style) for name, style in reversed(STYLES[1:])]
    line = Text()
    for count, name, style in counts:
        if count:
            line.append(f"{', ' if line else ''}{count} {name}{'' if count == 1 else 's'}", style=style)
    return line.append(".") if line else Text("Nothing to complain about.", style="green")


def show_models(groups: Sequence[ModelGroup], console: Console) -> None:
    """Print models, a table per server and backend."""
    for group in groups:
        served = f", served by {plain(group.backend)}" if group.title != group.backend else ""
        _line(console, Text.assemble((plain(f"{group.title} at {group.url}"), "bold"), served))
        if not group.models:
            _line(console, Text("  it lists no model"))
            continue
        table = Table(box=None, pad_edge=True)
        for title in ("model", "context", "state", "aliases"):
            table.add_column(title, justify="right" if title == "context" else "left", overflow="fold")
        for row in group.models:
            table.add_row(Text(plain(row.name)), _context(row.context), Text(plain(row.state or "-")),
                          Text(plain(", ".join(row.aliases) or "-")))
        console.print(table, width=None if console.is_terminal else PLAIN_WIDTH)


def _context(tokens: int | None) -> str:
    return "-" if tokens is None else f"{tokens:,}"
