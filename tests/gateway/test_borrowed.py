"""An answer that stands before another one tells what that one tells, at the moment it is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvstream.gateway.borrowed import Borrowed

FACTS = ("adapter", "count_source", "tokens_prompt", "tokens", "usage", "truncated", "last_data", "granted")


class Before(Borrowed):
    source: Any = None


def test_every_fact_is_that_of_the_source_now() -> None:
    before = Before()
    for turn in range(2):
        before.source = SimpleNamespace(**{name: (name, turn) for name in FACTS})
        assert all(getattr(before, name) == (name, turn) for name in FACTS)
