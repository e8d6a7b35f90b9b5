"""The sections about what is used again: shared calls, kept answers, prefixes. Part of the tree in ``config``."""

from __future__ import annotations

from attrs import frozen

from .config_keys import key, volatile_names


@frozen
class CoalesceConfig:
    """Identical deterministic requests of one client (temperature 0, embeddings) that come while the first runs."""

    enabled: bool = key(True, "Let them share one call to the runtime.")
    history_bytes_max: int = key(8 * 2**20, "How much of a shared answer is kept for those that join late, and how far "
                                            "one that reads slowly may be behind the others.", unit="bytes", low=1024)


@frozen
class ResponseCacheConfig:
    """Complete answers to deterministic requests, kept for the same client's same request. Off by default."""

    enabled: bool = key(False, "Answer from the cache (x-kvstream-cache: hit).")
    entries_max: int = key(1000, "Most answers kept.", unit="answers", low=1, high=1_000_000)
    bytes_max: int = key(64 * 2**20, "Most bytes kept; the least recently used go first.", unit="bytes", low=1024)
    ttl_s: float = key(300.0, "Keep an answer for this long.", unit="seconds", low=0.001)


@frozen
class PrefixCacheConfig:
    """Shared prompt prefixes."""

    enabled: bool = key(True, "Keep the pages of finished prompts for reuse.")
    max_prefix_length: int = key(2048, "Longest prefix to keep.", unit="tokens")
    ttl_seconds: float = key(3600.0, "Forget a prefix not used for this long.", unit="seconds")


@frozen
class PrefixConfig:
    """Values in prompts that change with every request, and so cost every cached prefix behind them."""

    volatile: tuple[str, ...] = key(
        ("anthropic_cch",), "Kinds of values that page keys ignore: anthropic_cch (Claude Code's nonce), dates, times, "
                            "total_tokens. What is sent to the runtime stays as it is.", check=volatile_names)
    normalize: tuple[str, ...] = key(
        (), "Of the same kinds, those sent to the runtime as a constant; nothing else of a request is changed.",
        check=volatile_names)
    diagnose: bool = key(True, "Compare each prompt with recent ones (8 MiB of them are kept in memory) and show in "
                               "/status what keeps their prefixes apart.")
