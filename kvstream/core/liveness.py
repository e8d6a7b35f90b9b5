"""Is a backend wedged, or only busy? Judged by progress, never by its health route.

Theory. A health route is answered by another thread than the one that computes: it says "ok" when the compute thread
hangs, and may say nothing at all while that thread reads a long prompt. So the only sign of life is progress: a token,
or a prompt that is read on. None for ``wedged_s`` seconds while requests run means wedged, *unless* a prompt is being
read: that takes as long as the prompt is long, and everybody else's tokens may have to wait for it. Prompts that are
being read have a budget together: their uncached tokens, at the rate that was observed, times a safety factor. Before
anything was observed the slowest machine is assumed on which anybody would wait. Where nobody can say how long a start
takes, the time-out of the first event is all there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from attrs import frozen

SAFETY: Final = 4.0
TOKENS_MIN: Final = 64  # a shorter prompt tells how long a request takes to start, not how fast prompts are read
WEIGHT: Final = 0.3
SLOWEST_PER_S: Final = 20.0


class PrefillRate:
    """Prompt tokens per second of a lane, as its requests felt it: shared with whatever ran beside them."""

    def __init__(self) -> None:
        self.per_s: float | None = None

    def learn(self, tokens: int, seconds: float) -> None:
        """``tokens`` uncached prompt tokens were read within ``seconds``. Slower is believed at once, faster slowly."""
        if tokens < TOKENS_MIN or seconds <= 0:
            return
        seen = tokens / seconds
        if self.per_s is None or seen < self.per_s:
            self.per_s = seen
        else:
            self.per_s += WEIGHT * (seen - self.per_s)

    def budget_s(self, tokens: int) -> float:
        """How long reading ``tokens`` may take before it is suspicious."""
        return SAFETY * tokens / (self.per_s or SLOWEST_PER_S)


@frozen
class Work:
    """One request that the runtime has, since time ``started``. ``prefill``: the uncached prompt tokens it still reads,
    0 once it gave a token; None when nobody can say how long its start takes (images, a model to be loaded)."""

    started: float
    prefill: int | None


def wedged_at(works: Sequence[Work], last_progress: float, rate: PrefillRate, *, wedged_s: float,
              start_s_max: float) -> float:
    """When these requests, should nothing move on, prove that the runtime hangs; infinity when nothing runs.

    ``start_s_max`` is how long a start may take of which nothing is known (0: no bound).
    """
    if not works or not wedged_s:
        return inf
    quiet_since = max(last_progress, min(work.started for work in works))
    allowed = wedged_s
    for work in works:
        budget = None if work.prefill is None else rate.budget_s(work.prefill)
        allowed += (start_s_max or inf) if budget is None else min(budget, start_s_max or inf)
    return quiet_since + allowed
