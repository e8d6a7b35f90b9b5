"""Whether slots are saved at all: off for a while after the disk was full, read-only, too slow or at fault."""

from __future__ import annotations

import errno
import logging
from typing import Final, Literal, Protocol

from attrs import frozen

from ..errors import StoreError

log = logging.getLogger("kvstream.store")

OffKind = Literal["full", "read_only", "slow", "faults"]
Gone = Literal["quota", "bad", "replaced", "identity", "done"]
"""Why a file is deleted: for room (or unused for too long), damaged, for a longer one, as another model's, or since the
request whose state it was needs it no more."""
OFF_KINDS: Final[tuple[OffKind, ...]] = ("full", "read_only", "slow", "faults")
OFF_S_FIRST: Final = 60.0
OFF_S_MAX: Final = 3600.0
FAULTS_MAX: Final = 3
_FULL: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
_READ_ONLY: Final = frozenset((errno.EROFS, errno.EACCES, errno.EPERM))


class StoreMeter(Protocol):
    """Who counts what happens to the files; ``metrics_inject.InjectMeter`` does."""

    def store(self, *, files: int, bytes: int) -> None: ...
    def evicted(self, why: Gone) -> None: ...
    def saving(self, off: OffKind | None) -> None: ...


class SavingSwitch:
    """Saving goes off with one warning, is tried again after a pause that doubles, and comes back with one line. Times
    are the scheduler's. ``offs`` counts by kind."""

    def __init__(self, meter: StoreMeter | None = None) -> None:
        self._meter = meter
        if meter is not None:
            meter.saving(None)
        self.offs: dict[OffKind, int] = dict.fromkeys(OFF_KINDS, 0)
        self.why = ""
        self._until = 0.0
        self._in_a_row = 0
        self._faults = 0

    def is_on(self, now: float) -> bool:
        return now >= self._until

    def require(self, now: float) -> None:
        """*Errors*: ``StoreError`` while it is off."""
        if now < self._until:
            raise StoreError(f"saving KV is off for another {self._until - now:.0f} s: {self.why}")

    def turn_off(self, kind: OffKind, why: str, now: float) -> None:
        pause = min(OFF_S_FIRST * 2**min(self._in_a_row, 16), OFF_S_MAX)
        (log.debug if self._in_a_row else log.warning)(
            "saving KV is off, requests go on without it: %s; it is tried again in %.0f s", why, pause)
        self.offs[kind] += 1
        if self._meter is not None:
            self._meter.saving(kind)
        self.why, self._until, self._in_a_row = why, now + pause, self._in_a_row + 1

    def fault(self, why: str, now: float) -> None:
        """Something went wrong that says nothing about the disk: the third in a row is once too often."""
        self._faults += 1
        if self._faults >= FAULTS_MAX:
            self._faults = 0
            self.turn_off("faults", f"{FAULTS_MAX} saves in a row failed, the last one: {why}", now)

    def failed(self, error: OSError, what: str, now: float) -> StoreError:
        """An operation of ours failed: what to raise for it."""
        words = f"{what}: {error.strerror or error}"
        if error.errno in _FULL:
            words += "; free some space, or lower inject.disk_bytes_max (kvstream cache gc prunes now)"
            self.turn_off("full", words, now)
        elif error.errno in _READ_ONLY:
            words += "; let KVStream write there, or set inject.dir"
            self.turn_off("read_only", words, now)
        else:
            self.fault(words, now)
        return StoreError(words)

    def worked(self) -> None:
        if self._in_a_row:
            log.info("saving KV works again")
            if self._meter is not None:
                self._meter.saving(None)
        self._in_a_row = self._faults = 0
        self.why = ""


@frozen
class StoreView:
    """For ``/status`` and metrics. ``files`` and ``bytes`` can be offered; ``other_bytes`` belong to other models, and
    go first when space is needed. ``off`` says why nothing is saved now, empty while it is. ``dropped`` counts files
    that turned out bad, ``offs`` how often saving went off, by kind."""

    files: int
    bytes: int
    other_bytes: int
    off: str
    where: str
    saved: int
    dropped: int
    offs: dict[OffKind, int]
