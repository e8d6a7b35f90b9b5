"""A table as data, for a terminal and for a page. Pure."""

from __future__ import annotations

from typing import Literal

from attrs import define, field, frozen

Mood = Literal["", "good", "bad"]


@frozen
class Cell:
    text: str
    mood: Mood = ""


@define
class Sheet:
    """``left``: so many columns hold words and begin at the left, as does the last one with ``words_last``; the others
    hold numbers. What is in a row may come from outside: whoever shows it makes it harmless."""

    title: str
    columns: tuple[str, ...]
    left: int = 1
    words_last: bool = False
    rows: list[tuple[Cell, ...]] = field(factory=list)

    def add(self, *cells: str | Cell) -> None:
        self.rows.append(tuple(Cell(cell) if isinstance(cell, str) else cell for cell in cells))

    def is_words(self, column: int) -> bool:
        return column < self.left or (self.words_last and column == len(self.columns) - 1)


def printable(text: str) -> str:
    """Words from outside without control characters: they must not steer a terminal, are not allowed in XML, and those
    that turn the direction of writing could make a name read as another."""
    return "".join(char if char.isprintable() else " " for char in text)
