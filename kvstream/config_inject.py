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
    dir: str = key(
        "", "The runtime's --slot-save-path, as seen from here. Empty: find out; where its files cannot be seen from "
            "here, files_max names are used in turn.")
    disk_bytes_max: int = key(
        8 * 2**30, "Most bytes of saved KV on disk; the least recently used go first.", unit="bytes", low=2**20)
    files_max: int = key(
        32, "Most files on a runtime's disk that cannot be seen, and so not be cleaned up, from here.",
        unit="files", low=1, high=4096)
    read_first_s: float = key(
        0.5, "A prompt that takes longer than this to compute is read before its answer is begun, so that what was "
             "read can be handed on to those that share it.", unit="seconds", low=0, high=3600)
    save_tokens_min: int = key(
        256, "Fewer tokens are not worth a file.", unit="tokens", low=1, high=2**31 - 1)
    slow_save_s: float = key(
        3.0, "A save that takes longer stops saving for a while: all streams of the runtime stand still meanwhile.",
        unit="seconds", low=0.01)
    drain_save_s: float = key(
        5.0, "When KVStream stops, the most it spends on saving what the slots hold, after the last answer.",
        unit="seconds", low=0, high=3600)
    misses_max: int = key(
        3, "So many restores in a row after which the runtime computed the prompt all the same switch hard inject off, "
           "for that model and build.", unit="restores", low=1, high=1000)
