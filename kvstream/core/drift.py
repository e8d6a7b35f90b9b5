"""Do our books agree with what the runtime says? Told only when they differ persistently.

Theory. Each comparison has a cause, a rule when one pair of numbers differs, and a window of pairs. A cause drifts when
enough pairs were seen over enough time and nearly all of them differ: one odd answer is no drift, and a wrong belief is
wrong every time. Pairs that come faster than ``gap_s`` are skipped, so that a burst of looks is one look.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from math import inf
from types import MappingProxyType
from typing import Final

from attrs import define, field, frozen

PAIRS_KEPT: Final = 32
SHARE: Final = 0.8  # of the pairs must differ
TOLD_EVERY_S: Final = 600.0


class Cause(Enum):
    """What is compared; ours first, the runtime's second."""

    SEATS = "seats"  # seats we count as taken : slots that work
    PREFIX = "prefix"  # prompt tokens expected in its cache : that it took from there
    COUNT = "count"  # prompt tokens it counted for us : that it reports afterwards
    ESTIMATE = "estimate"  # prompt tokens that we estimated : that it reports


@frozen
class Rule:
    differs: Callable[[float, float], bool]
    pairs_min: int
    span_s: float
    gap_s: float = 0.0


RULES: Mapping[Cause, Rule] = MappingProxyType({
    Cause.SEATS: Rule(lambda ours, theirs: theirs > ours, 4, 10.0, 2.0),
    Cause.PREFIX: Rule(lambda ours, theirs: theirs < ours / 2, 8, 5.0),
    Cause.COUNT: Rule(lambda ours, theirs: abs(ours - theirs) > max(4.0, 0.01 * theirs), 5, 5.0),
    Cause.ESTIMATE: Rule(lambda ours, theirs: not theirs / 1.5 <= ours <= theirs * 1.5, 16, 30.0),
})


@frozen
class Drift:
    """A cause whose numbers differ persistently, since ``since``; the sums over the pairs in the window."""

    cause: Cause
    ours: float
    theirs: float
    pairs: int
    since: float


@define
class _Window:
    pairs: deque[tuple[float, float, float]] = field(factory=lambda: deque(maxlen=PAIRS_KEPT))
    since: float | None = None
    told_at: float = -inf


class DriftWatch:
    """See the module. One per lane."""

    def __init__(self) -> None:
        self._windows = {cause: _Window() for cause in Cause}

    def note(self, cause: Cause, ours: float, theirs: float, now: float) -> None:
        """One pair of numbers that ought to agree."""
        window, rule = self._windows[cause], RULES[cause]
        if window.pairs and now - window.pairs[-1][0] < rule.gap_s:
            return
        window.pairs.append((now, ours, theirs))
        differing = sum(rule.differs(a, b) for _, a, b in window.pairs)
        enough = len(window.pairs) >= rule.pairs_min and now - window.pairs[0][0] >= rule.span_s
        if not (enough and differing >= SHARE * len(window.pairs)):
            window.since = None
        elif window.since is None:
            window.since = now

    @property
    def found(self) -> tuple[Drift, ...]:
        """What drifts now."""
        return tuple(
            Drift(cause, sum(a for _, a, _ in w.pairs), sum(b for _, _, b in w.pairs), len(w.pairs), w.since)
            for cause, w in self._windows.items() if w.since is not None)

    def untold(self, now: float) -> tuple[Drift, ...]:
        """What drifts and was not said for ten minutes; it counts as said now."""
        due = tuple(drift for drift in self.found if now - self._windows[drift.cause].told_at >= TOLD_EVERY_S)
        for drift in due:
            self._windows[drift.cause].told_at = now
        return due
