"""Who is told at once that it would wait in vain.

Theory of operation. A request that would wait past its deadline is better told now, with the time when it would fit,
than after two minutes. For that the lane's speed must be known, and how fast it *can* serve shows only while somebody
waits for seats or pages: ends per second of a lane with nothing to do measure its clients. So ``SheddingRate`` has a
clock of its own that runs only in such times, and counts only ends in them.

Every doubt speaks for letting a request in: too few such ends within the window, a lane that is narrowed, a place in
the queue that is only bounded from above. Every ``probe_every``-th that would be shed is let in all the same. And the
estimate cannot keep itself alive: ends leave the window as time passes, whether anybody is let in or not.

*Retry-After* is the time until the queue is short enough for the wait to end by the deadline. Many are shed at once,
and if all came back at once all but the first would be early; so they are given times one service apart.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final

ENDS_MIN: Final = 8  # fewer say nothing
ENDS_KEPT: Final = 256
CAUTION: Final = 1.05  # an estimate wavers: who comes back must not be early by a hair


class Shedder:
    """``window_s`` is how long an end counts. Times in seconds on the caller's clock."""

    __slots__ = ("_busy_s", "_ends", "_is_busy", "_now", "_probe_every", "_promised", "_seen", "_window_s")

    def __init__(self, *, probe_every: int, window_s: float) -> None:
        self._probe_every = probe_every
        self._window_s = window_s
        self._ends: deque[tuple[float, float]] = deque(maxlen=ENDS_KEPT)  # when, and then on the lane's busy clock
        self._busy_s = 0.0
        self._is_busy = False
        self._now = -inf
        self._seen = 0  # requests that would have been shed
        self._promised = -inf  # the last time given out

    def advance(self, now: float) -> None:
        """Time has passed since the last step, in the state that the last step left."""
        if self._is_busy:
            self._busy_s += now - self._now
        self._now = now

    def note_end(self) -> None:
        """A request has ended."""
        if self._is_busy:
            self._ends.append((self._now, self._busy_s))

    def settle(self, is_busy: bool) -> None:
        """The step is over: somebody waits for a seat or pages, or nobody does."""
        self._is_busy = is_busy

    def per_s(self) -> float | None:
        """Ends per second of a busy lane; None when nothing certain is known."""
        while self._ends and self._ends[0][0] < self._now - self._window_s:
            self._ends.popleft()
        if len(self._ends) < ENDS_MIN or self._busy_s <= self._ends[0][1]:
            return None
        return (len(self._ends) - 1) / (self._busy_s - self._ends[0][1])

    def is_late(self, ahead: int, patience_s: float) -> bool:
        """Whether a request behind ``ahead`` others would wait for longer than ``patience_s``."""
        rate = self.per_s()
        return rate is not None and (ahead + 1) / rate > patience_s

    def retry_after_s(self, ahead: int, patience_s: float) -> float | None:
        """For a request that is late: after which time it would not be; None when it is a probe and may stay."""
        self._seen += 1
        rate = self.per_s()
        if rate is None or self._seen % self._probe_every == 0:
            return None
        fits = self._now + (ahead + 1) / rate * CAUTION - patience_s
        self._promised = min(max(fits, self._promised + 1 / rate), fits + self._window_s)
        return self._promised - self._now
