"""How a run shows that it goes on: a bar on a terminal, plain lines elsewhere; always on stderr."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from .plan import Block
from .record import Record

LINE_EVERY_S = 5.0


class BarWatch:
    """One bar for the block that runs."""

    def __init__(self, console: Console) -> None:
        self._bars = Progress(TextColumn("{task.description}", markup=False), BarColumn(bar_width=20),
                              MofNCompleteColumn(), TimeElapsedColumn(),
                              TextColumn("{task.fields[failed]}", style="red"), console=console, transient=True)
        self._task: TaskID | None = None
        self._failed = 0

    def __enter__(self) -> BarWatch:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._bars.console.print(text, style="dim", markup=False, highlight=False)

    def block_began(self, target: str, block: Block, rounds: int) -> None:
        total = None if block.talks is None else block.talks * block.load.turns
        self._failed = 0
        self._task = self._bars.add_task(_title(target, block, rounds), total=total, failed="")

    def request_ended(self, record: Record) -> None:
        self._failed += not record.served
        if self._task is not None:
            failed = f"{self._failed} failed" if self._failed else ""
            self._bars.update(self._task, advance=1, failed=failed)

    def block_ended(self) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)


class LineWatch:
    """A line when a block begins and ends, and every five seconds while requests end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._title, self._ended, self._failed, self._last = "", 0, 0, 0.0

    def __enter__(self) -> LineWatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        pass

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def block_began(self, target: str, block: Block, rounds: int) -> None:
        self._title, self._ended, self._failed = _title(target, block, rounds), 0, 0
        self._last = time.monotonic()
        self.say(self._title)

    def request_ended(self, record: Record) -> None:
        self._ended += 1
        self._failed += not record.served
        if time.monotonic() - self._last >= LINE_EVERY_S:
            self._last = time.monotonic()
            self._line()

    def block_ended(self) -> None:
        self._line()

    def _line(self) -> None:
        self.say(f"{self._title}: {self._ended} requests ended, {self._failed} failed")


def open_watch() -> BarWatch | LineWatch:
    """The one that fits where stderr goes."""
    console = Console(stderr=True)
    return BarWatch(console) if console.is_terminal else LineWatch(console)


def _title(target: str, block: Block, rounds: int) -> str:
    return f"{target}, round {block.round + 1} of {rounds}" if rounds > 1 else f"{target}, measuring"
