"""A runtime with slots that does what llama-server does, with real token lists, and nothing clever.

It is what the scheduler's beliefs are compared with. A slot is busy or idle and holds tokens; a request computes what
its slot lacks and grows it; a restore that fails empties its slot; an unpinned request goes to the idle slot with the
longest common beginning, else to the one used longest ago; a save writes a file, or half of one. Where the pool is
``emptying`` (unified, idle slots are cleared), every task that starts empties all the idle slots.
"""

from __future__ import annotations

from attrs import define, field

from kvstream.core.tokens import page_keys, salt
from kvstream.core.types import PageKey
from tests.play import PAGE

SALT = salt("test")


def ids_of(prompt: str, tokens: int) -> list[int]:
    """The token ids behind ``tests.play.keys_of``: prompts of one name share their beginning."""
    return [ord(prompt[min(i // PAGE, len(prompt) - 1)]) for i in range(tokens)]


def keys_for(ids: list[int]) -> tuple[PageKey, ...]:
    return page_keys(ids, PAGE, SALT)


def common(one: list[int], other: list[int]) -> int:
    return next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
                min(len(one), len(other)))


@define
class RealSlot:
    tokens: list[int] = field(factory=list)
    busy: int | None = None  # who runs in it
    used: int = 0


@define
class Disk:
    """Files by name: the tokens in them, None for one that cannot be restored. ``listed`` have a manifest."""

    files: dict[str, list[int] | None] = field(factory=dict)
    listed: dict[str, tuple[PageKey, ...]] = field(factory=dict)

    def forget(self, name: str) -> None:
        self.files.pop(name, None)
        self.listed.pop(name, None)


@define
class NaiveRuntime:
    """``collisions`` are things that must never happen to a real server."""

    slots: list[RealSlot]
    emptying: bool = False
    clock: int = 0
    cells: int | None = None  # of one pool for all slots

    @classmethod
    def of(cls, slots: int, *, emptying: bool = False, cells: int | None = None) -> NaiveRuntime:
        return cls([RealSlot() for _ in range(slots)], emptying, cells=cells)

    @property
    def missing(self) -> int:
        """How many cells too few there are."""
        return 0 if self.cells is None else max(0, sum(len(slot.tokens) for slot in self.slots) - self.cells)

    def make_cells(self) -> bool:
        """Those at work take the cells of idle slots, and nobody is told. Whether that was enough, else all are
        killed."""
        for slot in self.slots:
            if self.missing and slot.busy is None:
                slot.tokens = []
        return not self.missing

    def start(self, who: int, ids: list[int], pin: int | None) -> tuple[int, int]:
        """A request arrives: its slot, and how many of its tokens were there."""
        self.clock += 1
        idle = [i for i, slot in enumerate(self.slots) if slot.busy is None]
        if pin is None:
            assert idle, "a request waits in the runtime's own queue"
            best = max(idle, key=lambda i: common(self.slots[i].tokens, ids))
            if 10 * common(self.slots[best].tokens, ids) < len(ids):
                best = min(idle, key=lambda i: self.slots[i].used)
            pin = best
        slot = self.slots[pin]
        assert slot.busy is None, "a request was pinned to a slot at work"
        if self.emptying:
            for i in idle:
                if i != pin:
                    self.slots[i].tokens = []
        cached = min(common(slot.tokens, ids), max(0, len(ids) - 1))
        slot.busy, slot.used = who, self.clock
        slot.tokens = slot.tokens[:cached]
        return pin, cached

    def stop(self, who: int) -> None:
        for slot in self.slots:
            if slot.busy == who:
                slot.busy = None

    def save(self, index: int, disk: Disk, name: str, *, whole: bool = True) -> int:
        slot = self.slots[index]
        assert slot.busy is None, "a save of a slot at work"
        disk.files[name] = list(slot.tokens) if whole else None
        return len(slot.tokens)

    def restore(self, index: int, disk: Disk, name: str) -> int | None:
        slot = self.slots[index]
        assert slot.busy is None, "a restore into a slot at work"
        tokens = disk.files.get(name)
        slot.tokens = list(tokens) if tokens is not None else []
        if self.missing:
            tokens, slot.tokens = None, []
        return None if tokens is None else len(tokens)

    def erase(self, index: int) -> None:
        assert self.slots[index].busy is None, "a slot at work was erased"
        self.slots[index].tokens = []

    def restart(self) -> None:
        for slot in self.slots:
            slot.tokens, slot.busy = [], None
