"""KVStream: a proxy in front of a local model runtime that hands out its KV memory page by page.

The public names are imported when they are first used (PEP 562), so that ``kvstream --version`` and ``kvstream status``
do not pay for the server's imports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0.dev0"

__all__ = ["KVStreamEngine", "Token", "Config", "load_config", "__version__"]

if TYPE_CHECKING:
    from .config import Config, load_config
    from .gateway.library import KVStreamEngine, Token


def __getattr__(name: str) -> Any:
    if name in ("KVStreamEngine", "Token"):
        from .gateway import library

        return getattr(library, name)
    if name in ("Config", "load_config"):
        from . import config

        return getattr(config, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
