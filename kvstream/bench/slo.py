"""The bounds that make a served request a good one: ``ttft:2s,tpot:80ms``."""

from __future__ import annotations

import re

from attrs import frozen

from ..errors import ConfigError
from .record import Record

BOUNDED = ("ttfb", "ttft", "ttfa", "tpot", "e2e")
_BOUND = re.compile(r"\s*([a-z0-9]+)\s*:\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s)\s*")


@frozen
class Slo:
    """Bounds in seconds, by measure. Without any, every full answer is good."""

    bounds: tuple[tuple[str, float], ...] = ()

    def met(self, record: Record) -> bool:
        """Whether a request was served within all bounds.

        An answer of one token has no time per token and passes that bound; any other measure that is missing (no answer
        text where ``ttfa`` is bounded) fails.
        """
        if not record.served:
            return False
        for name, bound_s in self.bounds:
            value: float | None = getattr(record, name)
            if value is None and name != "tpot":
                return False
            if value is not None and value > bound_s:
                return False
        return True

    def __str__(self) -> str:
        return ", ".join(f"{name} <= {bound_s * 1000:g} ms" if bound_s < 1 else f"{name} <= {bound_s:g} s"
                         for name, bound_s in self.bounds)


def parse_slo(text: str) -> Slo:
    """*Errors*: ConfigError that says what can be bounded and how."""
    bounds: dict[str, float] = {}
    for part in text.split(","):
        found = _BOUND.fullmatch(part)
        if found is None or found[1] not in BOUNDED:
            raise ConfigError(f"--slo: {part.strip()!r} is not measure:time, as in ttft:2s,tpot:80ms; measures are "
                              f"{', '.join(BOUNDED)}, times are in s or ms")
        bounds[found[1]] = float(found[2]) / (1000 if found[3] == "ms" else 1)
    return Slo(tuple(bounds.items()))
