"""Complete answers, kept for requests that come again. Least recently used go first; nothing is kept for longer than
its time. It has no clock: ``now`` is an argument."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from ..adapters.base import ProxyRequest, UpstreamEvent
from .flight import Replay, event_bytes
from .ports import Answer

FACTS = ("adapter", "count_source", "tokens_prompt", "tokens", "usage", "last_data")  # of ports.Answer


@frozen
class CacheBounds:
    """``entries`` 0 keeps nothing. ``ttl_s`` in seconds."""

    entries: int = 0
    bytes: int = 64 * 2**20
    ttl_s: float = 300.0


@frozen
class _Kept:
    """The answer without its request, whose body may be large."""

    events: tuple[UpstreamEvent, ...]
    facts: Mapping[str, Any]
    size: int
    until: float


class AnswerCache:
    """See the module."""

    def __init__(self, bounds: CacheBounds) -> None:
        self._bounds = bounds
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self.size = 0  # bytes

    @property
    def enabled(self) -> bool:
        return self._bounds.entries > 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: bytes, request: ProxyRequest, now: float) -> Replay | None:
        """The answer kept for ``key``, for one client to read; None when there is none (any more)."""
        kept = self._kept.get(key)
        if kept is None:
            return None
        if now >= kept.until:
            self._forget(key)
            return None
        self._kept.move_to_end(key)
        return Replay(request, events=kept.events, **kept.facts)

    def keep(self, key: bytes, events: Sequence[UpstreamEvent], source: Answer, now: float) -> None:
        """Keep a complete answer, at the cost of older ones. One that is larger than all room is not kept."""
        size = event_bytes(events)
        if not self.enabled or size > self._bounds.bytes:
            return
        self._forget(key)
        facts = {name: getattr(source, name) for name in FACTS}
        self._kept[key] = _Kept(tuple(events), facts, size, now + self._bounds.ttl_s)
        self.size += size
        while len(self._kept) > self._bounds.entries or self.size > self._bounds.bytes:
            self._forget(next(iter(self._kept)))

    def clear(self) -> None:
        """Forget all: the configuration changed."""
        self._kept.clear()
        self.size = 0

    def _forget(self, key: bytes) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.size -= kept.size
