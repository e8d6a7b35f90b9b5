"""How fast a lane serves, from what it has really done."""

from __future__ import annotations

from collections import deque
from typing import Final

ENDS_KEPT: Final = 256


class ServiceRate:
    """Ends of admitted requests over a sliding window of ``window_s`` seconds."""

    __slots__ = ("_ends", "_window_s")

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._ends: deque[float] = deque(maxlen=ENDS_KEPT)

    def note_end(self, now: float) -> None:
        self._ends.append(now)

    def per_s(self, now: float) -> float | None:
        """Ends per second; None when fewer than two ends are in the window, or no time has passed between them.

        The oldest end only starts the clock; the time since the newest one counts, so a lane that has stopped
        serving is seen to slow down.
        """
        while self._ends and self._ends[0] < now - self._window_s:
            self._ends.popleft()
        if len(self._ends) < 2 or now <= self._ends[0]:
            return None
        return (len(self._ends) - 1) / (now - self._ends[0])

    def wait_s(self, now: float, ahead: int) -> float | None:
        """Predicted wait behind ``ahead`` requests; None when nothing is known."""
        rate = self.per_s(now)
        return None if rate is None else (ahead + 1) / rate
