"""The keys of hard inject."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from .config_keys import key


@frozen
class InjectConfig:
    """KV state of llama.cpp's slots: kept, saved to files, forked into other slots and restored (hard inject)."""

    mode: Literal["auto", "off"] = key(
        "auto", "Use the runtime's slots where a self-check shows that saving and restoring works, or never.")
