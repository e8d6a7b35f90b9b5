"""What each slot of a runtime holds, and whose it is.

Theory of operation. A request that may name its slot owns that slot from its ``Admit`` until the runtime was seen to be
done with it. So nobody can be sent to a slot that is at work, and what is restored into a slot is still there when its
request comes: ownership is the lock, there is no other. A slot is given away only when nobody owns it *and* it was
seen idle since somebody last ran in it.

*Floats* are running requests whose slot the runtime chooses: several choices at once, embeddings, other models. While
it is not known where one of them sits (it is *adrift*), no slot is known to be idle. It is known when a look at the
slots, taken after the last of them started, shows exactly so many busy slots without an owner as they take; or when all
have ended. Until somebody looked after that, every slot that nobody owns is *doubtful*: it may hold what it held, but
no promise is made about it.

The other way round a float may be put into any idle slot, hence never while an owned slot is not at work yet
(``starting``) or is being saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from math import inf
from typing import Final

from attrs import define

from .types import PageKey, RequestId, SlotRules

LEFT_MAX: Final = 64  # of floats that ended adrift, how many are told apart
NEAR_TOKENS: Final = 1  # the last token of an answer may or may not be in the slot


@define(eq=False, slots=True)
class Slot:
    """``keys`` name the full pages that it holds from its start, of ``tokens`` tokens in all; ``exact`` if they are of
    the runtime's own token ids. ``owner`` runs in it, or ``saving`` is the file that it is being saved to. ``idle``: it
    was seen idle since somebody last ran in it. ``hits`` counts how often what it holds was used again, ``turns``
    how often it was given away, or lost what it held."""

    index: int
    owner: RequestId | None = None
    saving: str = ""
    idle: bool = True
    doubtful: bool = False
    exact: bool = False
    keys: tuple[PageKey, ...] = ()
    tokens: int = 0
    used_at: float = -inf
    hits: int = 0
    turns: int = 0
    tried: bool = False  # to save it, which was not worth it or failed

    @property
    def is_free(self) -> bool:
        return self.owner is None and not self.saving and self.idle

    @property
    def state(self) -> str:
        """One word for people."""
        if self.owner is not None:
            return "owned"
        if self.saving:
            return "saving"
        return "idle" if self.idle else "unknown"

    def hold(self, keys: tuple[PageKey, ...], tokens: int, exact: bool) -> None:
        """It holds this now."""
        self.keys, self.tokens, self.exact = keys, tokens, exact
        self.doubtful = self.tried = False

    def empty(self) -> None:
        self.hold((), 0, False)
        self.hits = 0
        self.turns += 1


class SlotMap:
    """The slots of one runtime. Read only outside the core; ``rules`` as the self-check found them."""

    def __init__(self, rules: SlotRules) -> None:
        self.rules = rules
        self.slots = [Slot(index) for index in range(rules.slots)]
        self._owned: dict[RequestId, Slot] = {}
        self._starting: set[RequestId] = set()
        self._floats: dict[RequestId, int] = {}  # those adrift, and how many slots each takes
        self._started: set[RequestId] = set()  # those of them that a slot is known to have
        self._placed: dict[RequestId, int] = {}  # floats whose slots are known to be among the busy ones
        self._lost = 0  # floats that ended, and nobody saw it: their slots may be at work
        self._left: list[tuple[int, float]] = []  # how few and how many tokens those that ended adrift left somewhere

    # --- questions --------------------------------------------------------------------------------------------------

    def slot_of(self, rid: RequestId) -> Slot | None:
        return self._owned.get(rid)

    def free(self) -> Iterator[Slot]:
        """Those that may be given away now."""
        return (slot for slot in self.slots if slot.is_free) if not self.is_adrift else iter(())

    def owned(self) -> Iterator[Slot]:
        return iter(self._owned.values())

    @property
    def is_adrift(self) -> bool:
        """Whether no slot is known to be idle, because somebody runs in one that nobody knows."""
        return bool(self._floats or self._lost)

    @property
    def is_starting(self) -> bool:
        """Whether a slot was given away in which its request has not started."""
        return bool(self._starting)

    @property
    def is_saving(self) -> bool:
        return any(slot.saving for slot in self.slots)

    @property
    def wants_look(self) -> bool:
        """Whether a look at the slots would tell something: taken now, nothing of ours is on its way to any."""
        if self._starting or self._started != self._floats.keys():
            return False
        if self._floats or self._lost or any(slot.doubtful for slot in self.slots if slot.owner is None):
            return True
        return sum(slot.state == "unknown" for slot in self.slots) > sum(self._placed.values())

    # --- who has it -------------------------------------------------------------------------------------------------

    def take(self, rid: RequestId, slot: Slot, now: float) -> None:
        """``rid`` owns it from now on."""
        assert slot.is_free and not self.is_adrift
        slot.owner, slot.idle, slot.used_at, slot.turns = rid, False, now, slot.turns + 1
        self._owned[rid] = slot
        self._starting.add(rid)

    def let_float(self, rid: RequestId, slots: int) -> None:
        """``rid`` runs in ``slots`` slots of the runtime's choice."""
        assert not self._starting and not self.is_saving
        self._floats[rid] = slots

    def start(self, rid: RequestId) -> bool:
        """The runtime has it in its slot. Whether an owned slot is at work by that."""
        if rid in self._floats:
            self._started.add(rid)
        if rid not in self._starting:
            return False
        self._starting.remove(rid)
        return True

    def leave(self, rid: RequestId, now: float, *, idle: bool, left: tuple[int, float] = (0, inf)) -> Slot | None:
        """``rid`` is over; ``idle`` if the runtime was seen to be done with it. ``left``: how few and how many tokens
        its slot holds now, if it was a float. The slot that was its own."""
        self._starting.discard(rid)
        self._started.discard(rid)
        slot = self._owned.pop(rid, None)
        if slot is not None:
            slot.owner, slot.idle, slot.used_at = None, idle, now
            return slot
        if self._floats.pop(rid, None) is not None:
            self._lost += not idle
            self._left.append(left)
            if len(self._left) > LEFT_MAX:
                self._left = [(min(least for least, _ in self._left), max(most for _, most in self._left))]
            self.doubt()
        self._placed.pop(rid, None)
        return None

    def save(self, slot: Slot, name: str) -> None:
        """It is being saved, with no request in it."""
        assert slot.is_free and not self.is_adrift
        slot.saving = name

    def saved(self, index: int, name: str) -> bool:
        """That is over. Whether it was so."""
        slot = self.slots[index] if 0 <= index < len(self.slots) else None
        if slot is None or not slot.saving or slot.saving != name:
            return False
        slot.saving = ""
        return True

    # --- what is in it ----------------------------------------------------------------------------------------------

    def look(self, tokens: Sequence[int | None], busy: Set[int]) -> None:
        """What the slots were seen to hold, and which were busy."""
        strangers = {slot.index for slot in self.slots if slot.owner is None and slot.index in busy}
        if not self._starting and self._started == self._floats.keys():
            if len(strangers) == sum(self._floats.values()):
                self._placed.update(self._floats)
                self._floats, self._started, self._lost = {}, set(), 0
            elif not self._floats:
                self._lost = 0
        for slot in self.slots:
            if slot.owner is not None or slot.saving:
                continue
            seen = tokens[slot.index] if slot.index < len(tokens) else None
            slot.idle = slot.index not in busy
            if slot.is_free and seen is not None and not slot.keys:
                slot.tokens = seen  # nobody knows of what, but in a unified pool they take cells
            elif not slot.idle or seen is None or abs(seen - slot.tokens) > NEAR_TOKENS or self._may_be_left(seen):
                slot.empty()
            slot.doubtful = False
        if not self.is_adrift:
            self._left.clear()

    def _may_be_left(self, seen: int) -> bool:
        """Whether a slot of so many tokens may be one that a float ran in: its number of tokens is all that tells."""
        return any(least - NEAR_TOKENS <= seen <= most + NEAR_TOKENS for least, most in self._left)

    def doubt(self) -> None:
        """What nobody runs in may hold something else now."""
        for slot in self.slots:
            slot.doubtful = slot.doubtful or (slot.owner is None and bool(slot.keys))

    def forget(self) -> None:
        """Nothing is known of what the slots hold. Who owns them is."""
        for slot in self.slots:
            slot.empty()

    def renew(self) -> None:
        """It is another process: its slots are empty, and idle but for those whose owner has not heard of it."""
        self.forget()
        self._lost = 0
        self._left.clear()
        for slot in self.slots:
            slot.idle = slot.owner is None

    def check(self, running: Set[RequestId]) -> None:
        """Raise AssertionError unless each slot has one owner that runs, and nobody shares one with a float."""
        owners = [slot.owner for slot in self.slots if slot.owner is not None]
        assert len(owners) == len(set(owners)) and set(owners) == self._owned.keys(), "a slot with two owners"
        assert all(slot.owner == rid for rid, slot in self._owned.items()), "a slot that is not its owner's"
        assert self._owned.keys() <= running, "a slot whose owner does not run"
        assert len(owners) <= len(self.slots), "more slots owned than there are"
        assert self._starting <= self._owned.keys() and self._started <= self._floats.keys() <= running
        assert not self._floats.keys() & self._owned.keys() and not self._placed.keys() & self._owned.keys()
        assert not (self._floats and self._starting), "a float may be put into a slot that somebody is on his way to"
        for slot in self.slots:
            assert not (slot.saving and slot.owner is not None), "a slot saved while somebody runs in it"
            assert slot.owner is None or not slot.idle, "a slot at work that counts as idle"
            assert slot.tokens >= 0 and (slot.tokens or not slot.keys), "pages without tokens"
