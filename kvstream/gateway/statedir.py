"""Where KVStream keeps files of its own."""

from __future__ import annotations

import os
from pathlib import Path


def default_state_dir() -> Path:
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base else Path.home() / ".local" / "state") / "kvstream"
