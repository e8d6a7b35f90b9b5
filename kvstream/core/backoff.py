"""How long to pause before the next attempt: exponential, with full jitter, never before the other side asked for."""

from __future__ import annotations

from typing import Final

FIRST_S: Final = 0.25
LONGEST_S: Final = 8.0


def pause_s(attempt: int, chance: float, *, retry_after_s: float | None = None) -> float:
    """Seconds before attempt number ``attempt`` is repeated (the first is 0). ``chance`` is a random number in [0, 1).

    The whole pause is random and not a part of it, so that many who were refused in one instant spread out. What the
    runtime asked for is waited in full, and the random part comes after it, for the same reason.
    """
    span = min(LONGEST_S, FIRST_S * 2.0 ** min(attempt, 30))
    return (retry_after_s or 0.0) + chance * span
