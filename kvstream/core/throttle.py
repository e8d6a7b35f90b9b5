"""How many requests may run while the backend is not trusted: narrowed from outside, or ramping up after an outage.

*Narrowed*: somebody (a circuit breaker) lets only so many through. *Ramp*: a runtime that just came back meets a full
queue, and a herd might bring it down again. So one request goes first; each that shows life (its first token, or a
complete answer without one) doubles how many may run, until that is every seat. One that fails doubles nothing.

Both count only requests that were admitted after they began: what runs already proves nothing and is not in the way.
"""

from __future__ import annotations

from .types import RequestId


class Throttle:
    """See the module. Counts requests, not seats."""

    __slots__ = ("_narrow", "_narrowed", "_proven", "_ramp", "_ramped")

    def __init__(self) -> None:
        self._narrow: int | None = None
        self._narrowed: set[RequestId] = set()
        self._ramp: int | None = None
        self._ramped: set[RequestId] = set()
        self._proven: set[RequestId] = set()  # of those, who showed life

    @property
    def is_full(self) -> bool:
        """Whether nobody may be admitted now."""
        return (self._narrow is not None and len(self._narrowed) >= self._narrow) or (
            self._ramp is not None and len(self._ramped) >= self._ramp)

    @property
    def limit(self) -> int | None:
        """How many may run; None for no limit."""
        limits = [limit for limit in (self._narrow, self._ramp) if limit is not None]
        return min(limits, default=None)

    def narrow(self, seats: int | None) -> None:
        self._narrow, self._narrowed = seats, set()

    def ramp(self) -> None:
        self._ramp, self._ramped, self._proven = 1, set(), set()

    def started(self, rid: RequestId) -> None:
        if self._narrow is not None:
            self._narrowed.add(rid)
        if self._ramp is not None:
            self._ramped.add(rid)

    def alive(self, rid: RequestId, seats: int) -> None:
        """A sign of life of an admitted request; ``seats`` is what the lane has."""
        if self._ramp is None or rid not in self._ramped or rid in self._proven:
            return
        self._proven.add(rid)
        self._ramp *= 2
        if self._ramp >= seats:
            self._ramp, self._ramped, self._proven = None, set(), set()

    def closed(self, rid: RequestId) -> None:
        self._narrowed.discard(rid)
        self._ramped.discard(rid)
        self._proven.discard(rid)

    def check(self, running: dict[RequestId, object]) -> None:
        """Raise AssertionError unless only running requests are counted, and no more than allowed."""
        assert self._narrowed <= running.keys() and self._ramped <= running.keys() and self._proven <= self._ramped
        assert self._narrow is None or len(self._narrowed) <= self._narrow, "more running than narrowed to"
        assert self._ramp is None or len(self._ramped) <= self._ramp, "more running than the ramp allows"
