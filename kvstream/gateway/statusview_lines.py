"""A line of ``kvstream status``: a label, and a text that goes on below itself where the terminal is too narrow."""

from __future__ import annotations

from attrs import frozen
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

LABEL_CELLS = 10
TEXT_CELLS_MIN = 20


@frozen
class Labelled:
    """``text`` may have several lines; each is wrapped under the first."""

    label: str
    text: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        first = Text(self.label.ljust(LABEL_CELLS))
        for line in self.text.wrap(console, max(TEXT_CELLS_MIN, options.max_width - LABEL_CELLS)):
            first.append_text(line)
            yield first
            first = Text(" " * LABEL_CELLS)


def labelled(label: str, text: str, style: str = "") -> Labelled:
    return Labelled(label, Text(text, style=style))
