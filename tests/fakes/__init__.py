"""Fakes for the tests: see ``tests/fakes/README.md``."""

from __future__ import annotations

from .engine import Engine, Job
from .journal import Entry, FakeRequest, Journal
from .runtime import FakeRuntime, open_runtime
from .script import RuntimeConfig, Script
from .upstream import FakeUpstream, at, bytewise

__all__ = [
    "Engine", "Entry", "FakeRequest", "FakeRuntime", "FakeUpstream", "Job", "Journal", "RuntimeConfig", "Script",
    "at", "bytewise", "open_runtime",
]  # fmt: skip
