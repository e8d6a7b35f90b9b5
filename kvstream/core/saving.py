"""Saving slots that nobody uses: what was used again, when the lane is quiet (hot), and what is worth it before the
end (drain). One at a time, for a save keeps its slot from everybody, and the runtime from its work.
"""

from __future__ import annotations

from math import inf
from typing import Final

from . import messages as m
from .inject import Inject
from .ledger import Ledger
from .placement import SAVE_SHARE
from .queue import WaitingQueue
from .slots import Slot

HOT_IDLE_S: Final = 5.0  # a slot used again is saved when its next user has not come by then


def background(inject: Inject, queue: WaitingQueue, ledger: Ledger, now: float, closing: bool) -> list[m.Action]:
    """The save that is worth making now, if any."""
    slots, actions = inject.slots, list[m.Action]()
    if slots is None or not _is_quiet(inject, queue):
        return actions
    ripe = [slot for slot in slots.free() if _ripe_at(inject, slot, closing) <= now]
    for slot in sorted(ripe, key=lambda slot: (-slot.hits, -slot.tokens, slot.index)):
        slot.tried = True
        spec = inject.plan_save(
            slot.keys, len(slot.keys) * ledger.limits.page_tokens, "drain" if closing else "hot", now, actions)
        if spec is not None:
            slots.save(slot, spec.name)
            return [*actions, m.SaveSlot(slot.index, spec)]
    return actions


def next_save(inject: Inject, queue: WaitingQueue) -> float | None:
    """When ``background`` has something to do although nothing happens."""
    slots = inject.slots
    if slots is None or not _is_quiet(inject, queue):
        return None
    due = min((_ripe_at(inject, slot, False) for slot in slots.free()), default=inf)
    return None if due == inf else due


def _is_quiet(inject: Inject, queue: WaitingQueue) -> bool:
    slots = inject.slots
    return slots is not None and inject.can_save and not slots.is_saving and not len(queue)


def _ripe_at(inject: Inject, slot: Slot, closing: bool) -> float:
    """When this slot is to be saved; infinite: never as it is."""
    costs, least = inject.costs, inject.save_min
    if slot.tried or slot.doubtful or not slot.exact or not slot.keys or slot.tokens < least:
        return inf
    if inject.covered(slot) >= len(slot.keys) or costs.save_s(slot.tokens) >= SAVE_SHARE * costs.read_s(slot.tokens):
        return inf
    if closing:
        return -inf
    return slot.used_at + HOT_IDLE_S if slot.hits else inf
