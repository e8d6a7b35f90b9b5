"""What ``serve --model`` means: a file to start, or a name to ask the runtime for.

A file is what ends in .gguf, what begins like a path, and what exists. A mistyped path must not become a name, which
would only be noticed when the first request is refused; `org/model` is a name that many runtimes use.
"""

from __future__ import annotations

import os
from pathlib import Path

from .errors import ConfigError

A_NAME = ("a name to ask the runtime for does not begin with ./, ../, / or ~ (or else set backend.model, or "
          "--backend-url as well)")


def model_key(model: str, *, elsewhere: bool) -> str:
    """The key that it sets. ``elsewhere``: a backend is named on the same line, and runtimes name models by file too,
    so that anything is a name. *Errors*: ConfigError."""
    if not model.strip():
        raise ConfigError("--model: is empty; give the path of a GGUF file, or the name of a model of the runtime")
    if elsewhere:
        return "backend.model"
    path = _path_of(model)
    full = path.absolute()
    if path.is_dir():
        raise ConfigError(f"--model: {full} is a folder; give the path of a GGUF file; {A_NAME}")
    if path.is_file() or model.endswith(".gguf"):  # whether that is one is said by who opens it
        return "embedded.model"
    if path.exists():
        raise ConfigError(f"--model: {full} is no file; give the path of a GGUF file; {A_NAME}")
    if looks_like_a_path(model):
        raise ConfigError(f"--model: {full} does not exist; {A_NAME}")
    return "backend.model"


def looks_like_a_path(model: str) -> bool:
    separators = tuple(filter(None, (os.sep, os.altsep)))
    begins = [f"{dots}{separator}" for dots in (".", "..", "") for separator in separators]
    return model.startswith(("~", *begins)) or bool(Path(model).drive)


def _path_of(model: str) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError:  # ~nobody
        return Path(model)
