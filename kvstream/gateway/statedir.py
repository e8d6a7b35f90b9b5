"""Where KVStream keeps files of its own."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ConfigError


def default_state_dir() -> Path:
    """*Errors*: ``ConfigError``."""
    base = os.environ.get("XDG_STATE_HOME", "")
    try:
        return (Path(base) if base else Path.home() / ".local" / "state") / "kvstream"
    except RuntimeError as error:  # a user without a line in /etc/passwd, and no HOME
        raise ConfigError("this user has no home folder to keep files in: set HOME, or XDG_STATE_HOME") from error
