"""What the parts of hard inject need of each other in one lane, as protocols: who does the calls, who keeps the files,
who finds out how the slots may be used.

``slotwork`` does every slot call. Around a save it asks the store first (``temporary``: under which name is the runtime
to write) and tells it afterwards what was written (``keep``), or that nothing was; before a restore it asks ``offer``.
So the store needs no HTTP, and the worker knows nothing of files.
"""

from __future__ import annotations

from typing import Literal, Protocol

from attrs import frozen

from ..adapters.slot_calls import Identity, SlotDone
from ..core.types import SavedPrefix, SaveSpec, SlotRules

SlotMode = Literal["hard", "hard-unpinned", "soft"]


class SlotStore(Protocol):
    """The files of one lane and one identity; see ``kvstore.KvStore``, which also says what can go wrong."""

    @property
    def why_off(self) -> str:
        """Why nothing is saved now; empty while it is."""
        ...

    async def load(self) -> list[SavedPrefix]:
        """What can be offered."""
        ...

    async def reread(self) -> list[SavedPrefix] | None:
        """What can be offered still, if somebody else deleted files; None: nobody did."""
        ...

    def temporary(self, name: str, bytes: int = 0) -> str:
        """The file name that the runtime is told to write for ``name``. *Errors*: ``StoreError``: nothing is saved."""
        ...

    async def keep(self, spec: SaveSpec, done: SlotDone) -> SavedPrefix:
        """The runtime says that it wrote that. *Errors*: ``StoreError``: it was not good, and is gone."""
        ...

    def failed(self, name: str, why: str) -> None:
        """The runtime could not save, in its own words."""
        ...

    def abandon(self, name: str) -> None:
        """Nobody waits for that save any more."""
        ...

    async def offer(self, name: str) -> str:
        """The file name to restore. *Errors*: ``StoreError``: it is not as it was written, and is gone."""
        ...

    def restored(self, name: str, done: SlotDone) -> bool:
        """The runtime says what it read: whether that is what was saved. If not it is gone."""
        ...

    def forget(self, name: str, why: Literal["quota", "bad"] = "quota") -> None:
        """Delete it: for room, or because the runtime could not read it. Quick, idempotent."""
        ...

    def close(self) -> None:
        """Write down what is only in memory. Quick, idempotent."""
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
