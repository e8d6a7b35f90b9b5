"""Compares our books with what the runtime reports, and says so when they drift apart (``core.drift``).

Only what is known anyway is compared: the usage of answers that ended, and the slots when somebody looked at them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import trio

from ..adapters.base import Adapter
from ..core.drift import Cause, Drift, DriftWatch
from ..core.types import CountSource
from .logs import backend_logger
from .stream import Stream

PREFIX_TOKENS_MIN = 64
WORDS: Mapping[Cause, str] = MappingProxyType({
    Cause.SEATS: "it works on more requests ({theirs:.0f} slots) than it got from here ({ours:.0f}), summed over "
                 "{pairs} looks: somebody else uses it, and its memory is not what is counted on",
    Cause.PREFIX: "of {ours:.0f} prompt tokens expected in its cache it found {theirs:.0f} (last {pairs} answers): its "
                  "prompt cache is off, or others displace it",
    Cause.COUNT: "it counted {ours:.0f} prompt tokens when asked, and reports {theirs:.0f} (last {pairs} answers): "
                 "requests take another room than is counted on",
    Cause.ESTIMATE: "{ours:.0f} prompt tokens were estimated, it reports {theirs:.0f} (last {pairs} answers): pages "
                    "are set aside wrongly",
})


class Drifts:
    """One lane's comparisons."""

    def __init__(self, adapter: Adapter, name: str) -> None:
        self._adapter = adapter
        self._log = backend_logger(name)
        self._watch = DriftWatch()

    def ended(self, stream: Stream) -> None:
        """A request is over; compare if the runtime told its usage."""
        usage, lease, now = stream.usage, stream.lease, trio.current_time()
        if usage is None or lease is None or not stream.completed or usage.prompt <= 0:
            return
        cause = Cause.COUNT if stream.count_source is CountSource.EXACT else Cause.ESTIMATE
        self._watch.note(cause, stream.tokens_prompt, usage.prompt, now)
        reported = usage.cached is not None and self._adapter.capabilities.cached_reported
        if reported and lease.tokens_cached >= PREFIX_TOKENS_MIN:
            self._watch.note(Cause.PREFIX, lease.tokens_cached, usage.cached or 0, now)
        self._tell(now)

    def slots_seen(self, ours: int, theirs: int) -> None:
        """So many slots worked when somebody looked, and so many seats were taken."""
        now = trio.current_time()
        self._watch.note(Cause.SEATS, ours, theirs, now)
        self._tell(now)

    def _tell(self, now: float) -> None:
        for drift in self._watch.untold(now):
            self._log.warning("the runtime and our books differ: %s", in_words(drift))

    def status(self, now: float) -> list[dict[str, Any]]:
        """For ``/status``: cause, both numbers summed over the pairs seen lately, and for how long (seconds)."""
        return [{"cause": d.cause.value, "ours": d.ours, "theirs": d.theirs, "pairs": d.pairs,
                 "since_s": round(now - d.since, 3), "means": in_words(d)} for d in self._watch.found]


def in_words(drift: Drift) -> str:
    """One sentence, with the numbers."""
    return WORDS[drift.cause].format(ours=drift.ours, theirs=drift.theirs, pairs=drift.pairs)
