"""Whether a loop still comes round: somebody asks, the loop answers at its next turn."""

from __future__ import annotations

from collections.abc import Callable

import trio


class Pulse:
    """``wake`` makes the loop take a turn. *Cost*: while nobody asks, a turn costs one comparison."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._asked: trio.Event | None = None

    def beat(self) -> None:
        """The loop came round."""
        if self._asked is not None:
            self._asked.set()
            self._asked = None

    async def felt(self) -> None:
        """Wait until the loop has come round once more. *Cancellation*: safe."""
        asked = self._asked = trio.Event() if self._asked is None else self._asked
        self._wake()
        await asked.wait()
