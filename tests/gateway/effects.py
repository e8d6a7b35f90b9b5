"""The table of ``test_config_effects``: which test shows the effect of which key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from kvstream.config import Config

EFFECTS: dict[str, str] = {}
Test = Callable[..., Any]


def effect(path: str) -> Callable[[Test], Test]:
    """Enter a test into the table. It is collected under its own name, which says what the effect is."""

    def enter(test: Test) -> Test:
        assert path not in EFFECTS and test.__name__.startswith("test_")
        EFFECTS[path] = test.__name__
        return test

    return enter


def inject_config(**keys: Any) -> Config:
    """The defaults, and these keys of [inject]."""
    return attrs.evolve(Config(), inject=attrs.evolve(Config().inject, **keys))
