"""How fast a runtime is, as far as it was seen: tokens read and answered, bytes saved and restored, per second.

Each rate is the quotient of two moving sums, of amounts and of seconds, in which every event weighs ``DECAY`` times the
one after it. An event of less than ``least``, which is all overhead, says nothing about a rate. Until something was
seen a rate is a guess that errs towards using the slots; ``is_known`` tells.
"""

from __future__ import annotations

from typing import Final

DECAY: Final = 0.8  # what an event leaves of the weight of those before it
PREFILL_GUESS: Final = 1000.0  # tokens per second
DECODE_GUESS: Final = 30.0  # tokens per second and request
SAVE_GUESS: Final = 500e6  # bytes per second
RESTORE_GUESS: Final = 1e9
PREFILL_LEAST: Final = 64  # tokens; behind a cached prompt one token is computed, and takes as long as ten
DECODE_LEAST: Final = 8
FILE_LEAST: Final = 256 * 1024  # bytes
CALL_S: Final = 0.002  # what any slot call costs beside its bytes


class Rate:
    """Amount per second, ``guess`` until something of ``least`` or more was seen."""

    __slots__ = ("_amount", "_guess", "_least", "_seconds")

    def __init__(self, guess: float, least: float) -> None:
        self._guess = guess
        self._least = least
        self._amount = self._seconds = 0.0

    @property
    def is_known(self) -> bool:
        return self._seconds > 0

    @property
    def per_s(self) -> float:
        return self._amount / self._seconds if self._seconds > 0 else self._guess

    def note(self, amount: float, seconds: float | None) -> None:
        """``amount`` took ``seconds``."""
        if seconds is not None and 0 < seconds < 1e6 and self._least <= amount < 1e15:
            self._amount = self._amount * DECAY + amount
            self._seconds = self._seconds * DECAY + seconds


class Costs:
    """What things cost on one runtime, in seconds. ``token_bytes`` and ``fixed_bytes`` are those of a saved slot."""

    __slots__ = ("decode", "fixed_bytes", "prefill", "restore", "save", "token_bytes")

    def __init__(self) -> None:
        self.prefill = Rate(PREFILL_GUESS, PREFILL_LEAST)
        self.decode = Rate(DECODE_GUESS, DECODE_LEAST)
        self.save = Rate(SAVE_GUESS, FILE_LEAST)
        self.restore = Rate(RESTORE_GUESS, FILE_LEAST)
        self.token_bytes = 0.0
        self.fixed_bytes = 0

    def read_s(self, tokens: int) -> float:
        """To compute so many tokens of a prompt."""
        return tokens / self.prefill.per_s

    def answer_s(self, tokens: int) -> float:
        """To answer so many tokens in one request."""
        return tokens / self.decode.per_s

    def save_s(self, tokens: int) -> float:
        """To save a slot of so many tokens."""
        return CALL_S + (tokens * self.token_bytes + self.fixed_bytes) / self.save.per_s

    def restore_s(self, size: int) -> float:
        """To restore a file of so many bytes."""
        return CALL_S + size / self.restore.per_s
