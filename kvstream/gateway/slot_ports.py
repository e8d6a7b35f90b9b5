"""What the parts of hard inject need of each other in one lane, as protocols: who does the calls, who keeps the files,
who finds out how the slots may be used.

``slotwork`` does every slot call. Around a save it asks the store first (``begin``: under which name is the runtime to
write) and tells it afterwards what was written (``commit``) or that nothing was (``abandon``); before a restore it asks
``ready``. So the store needs no HTTP, and the worker knows nothing of files.
"""

from __future__ import annotations

from typing import Literal, Protocol

from attrs import frozen

from ..adapters.base import CapacityReport
from ..adapters.slot_calls import Identity, SlotDone
from ..core.types import PageKey, SavedPrefix, SaveSpec, SlotRules

SlotMode = Literal["hard", "hard-unpinned", "soft"]


@frozen
class Kept:
    """A save that is in the store now. ``keys`` are those of the spec, or more where the file told them."""

    tokens: int
    bytes: int
    keys: tuple[PageKey, ...]


class SlotStore(Protocol):
    """The files of one lane. No method raises for anything a disk can do; a failed file is simply not there.

    *Cancellation*: safe everywhere; what was begun and not committed is never offered.
    """

    async def load(self, identity: str, now: float) -> tuple[SavedPrefix, ...]:
        """The files of this identity, which ``begin`` serves from now on. ``used_at`` is on the clock of ``now``."""
        ...

    async def begin(self, spec: SaveSpec) -> str | None:
        """The name that the runtime is to write under; None: nothing is saved (off, full, broken)."""
        ...

    async def commit(self, spec: SaveSpec, written: SlotDone) -> Kept | None:
        """The runtime says it wrote that. Verified, renamed, entered; None: it was not good and is gone."""
        ...

    def abandon(self, spec: SaveSpec) -> None:
        """The save that was begun came to nothing, or nobody knows. Synchronous."""
        ...

    async def ready(self, name: str) -> str | None:
        """The name under which the runtime finds this file; None: it is not as it was written, and is gone."""
        ...

    def used(self, name: str) -> None:
        """It was restored. Synchronous."""
        ...

    def forget(self, name: str) -> None:
        """Delete it: evicted, or the runtime could not read it. Synchronous and idempotent."""
        ...


@frozen
class SlotsFound:
    """How the slots of a runtime may be used. ``rules`` None: not at all, and ``mode`` is soft. ``why`` in words.

    ``identity`` of what is saved, ``missing`` the flags of the server that would make it better, ``notes`` what else is
    worth knowing. ``slots_dir_hint``: its folder of files as seen from here, if a file was seen in it. ``ram_cache``:
    whether it keeps prompts in RAM. Not ``settled``: it could not be found out now, and should be asked again when the
    runtime has nothing to do. ``cached`` and ``computed`` are the prompt tokens that asking cost."""

    mode: SlotMode
    rules: SlotRules | None
    why: str = ""
    identity: Identity | None = None
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    slots_dir_hint: str = ""
    ram_cache: bool | None = None
    settled: bool = True
    cached: int = 0
    computed: int = 0


class SlotCheck(Protocol):
    """Finds that out when a backend came up, and watches that restores keep their promise."""

    async def check(self, report: CapacityReport, *, sleeping: bool) -> SlotsFound:
        """Ask the runtime; nothing is computed. ``sleeping``: it must not be woken, so what can be known is what was
        found before. *Errors*: none. *Cancellation*: safe."""
        ...

    def restored(self, *, promised: int, cached: int) -> bool:
        """A request behind a restore reported ``cached`` tokens of the ``promised``. False: restoring has no effect
        here, use the slots no more."""
        ...
