"""A circuit breaker: when to stop sending requests to a backend that fails, and when to try again.

A pure state machine. Somebody else decides what is a fault of the backend, tells it with the time, and carries out
:attr:`Breaker.seats`.

::

    closed --N faults in a row, or trip()--> open --its pause is over--> half open --the trial succeeds--> closed
                                              ^                             |
                                              +------ the trial fails ------+       the pause doubles each time

In ``half open`` one request, the *trial*, is admitted. Only the trial decides: what was running before may still end in
any way, and says nothing about now. A trial that ends without a verdict (its client left) makes room for another.
"""

from __future__ import annotations

from enum import Enum
from math import inf

from .types import RequestId


class Circuit(Enum):
    """States of a :class:`Breaker`."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """``faults_max`` faults in a row open it (0: only :meth:`trip` does); it stays open for ``open_s`` seconds at
    first, at most ``open_s_max``. Every method that may change the state returns whether it did."""

    def __init__(self, faults_max: int, open_s: float, open_s_max: float) -> None:
        self._faults_max = faults_max
        self._open_s = open_s
        self._open_s_max = max(open_s, open_s_max)
        self._pause_s = open_s
        self.state = Circuit.CLOSED
        self.faults = 0  # in a row
        self.why = ""  # of the last opening
        self.until = inf  # open until then
        self.opened = 0  # how often
        self.trial: RequestId | None = None

    @property
    def seats(self) -> int | None:
        """How many requests may be admitted from here on; None: no bound."""
        return {Circuit.CLOSED: None, Circuit.OPEN: 0, Circuit.HALF_OPEN: 1}[self.state]

    def admitted(self, rid: RequestId) -> None:
        """A request goes to the backend. While half open it is the trial."""
        if self.state is Circuit.HALF_OPEN and self.trial is None:
            self.trial = rid

    def fault(self, rid: RequestId, now: float, why: str) -> bool:
        """A request failed, and it was the backend's fault."""
        if self.state is Circuit.HALF_OPEN and rid == self.trial:
            self._pause_s = min(2 * self._pause_s, self._open_s_max)
            return self._open(now, why)
        if self.state is not Circuit.CLOSED or not self._faults_max:
            return False
        self.faults += 1
        return self.faults >= self._faults_max and self._open(now, why)

    def success(self, rid: RequestId) -> bool:
        """The backend served a request, or does so as well as anybody can ask."""
        if self.state is Circuit.CLOSED:
            self.faults = 0
        if self.state is not Circuit.HALF_OPEN or rid != self.trial:
            return False
        self.state, self.trial, self.faults, self.until = Circuit.CLOSED, None, 0, inf
        self._pause_s = self._open_s
        return True

    def undecided(self, rid: RequestId) -> None:
        """A request ended in a way that says nothing about the backend."""
        if rid == self.trial:
            self.trial = None

    def trip(self, now: float, why: str) -> bool:
        """Open it, whatever was counted."""
        if self.state is Circuit.OPEN:
            return False
        if self.state is Circuit.HALF_OPEN:
            self._pause_s = min(2 * self._pause_s, self._open_s_max)
        return self._open(now, why)

    def tick(self, now: float) -> bool:
        """Let time pass: an open breaker whose pause is over becomes half open."""
        return now >= self.until and self.allow_trial()

    def allow_trial(self) -> bool:
        """Become half open now: something happened that makes the rest of the pause pointless."""
        if self.state is not Circuit.OPEN:
            return False
        self.state, self.until, self.trial = Circuit.HALF_OPEN, inf, None
        return True

    def _open(self, now: float, why: str) -> bool:
        self.state, self.why, self.trial, self.faults = Circuit.OPEN, why, None, 0
        self.until = now + self._pause_s
        self.opened += 1
        return True
