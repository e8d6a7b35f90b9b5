"""Hard inject in ``/status``: how the slots of a lane are used and why, what would make it better, what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attrs import asdict

from ..core.snapshot import RunningView, SlotView, Snapshot
from ..core.types import RequestId

SLOTS_SHOWN_MAX = 64


def inject_json(told: Mapping[str, Any] | None, why_not: str, snapshot: Snapshot,
                name: Callable[[RequestId], str]) -> dict[str, Any]:
    """One lane's block. ``told`` is what ``SlotVerify.status`` says, None where slots are never asked about, and then
    ``why_not`` is the reason. Tokens, bytes and pages as named."""
    block: dict[str, Any] = {"mode": "soft", "why": why_not, "missing": [], "notes": []} | dict(told or {})
    running = {run.rid: run for run in snapshot.running}
    block["slots"] = [_slot(slot, None if slot.owner is None else running.get(slot.owner), name)
                      for slot in snapshot.slots[:SLOTS_SHOWN_MAX]]
    block["store"] = None if snapshot.store is None else asdict(snapshot.store)
    return block


def _slot(slot: SlotView, run: RunningView | None, name: Callable[[RequestId], str]) -> dict[str, Any]:
    """``tokens`` it holds; while a request runs in it that request's, prompt and answer so far, of which ``cached``
    were there when it was admitted. None where that is not known."""
    row = {"slot": slot.slot, "state": slot.state, "tokens": slot.tokens,
           "request": None if slot.owner is None else name(slot.owner)}
    if slot.owner is not None:
        row |= {"tokens": (run.tokens if run is not None else slot.tokens) or None,
                "cached": run.tokens_cached if run is not None else None}
    return row


def preemption_json(policy: str, modes: Iterable[str]) -> dict[str, Any]:
    """The policy, and whether any lane can act on it. A victim is swapped where slots are pinned; where they are not
    it is computed again, and without slots nothing is ever stopped for another."""
    best = {mode for mode in modes if mode != "soft"}
    if policy == "off":
        return {"policy": policy, "active": False, "how": None, "why": "scheduler.preemption_policy is off"}
    if not best:
        return {"policy": policy, "active": False, "how": None,
                "why": "no backend whose slots can be used (see inject): what was stopped could not go on"}
    how = policy if "hard" in best else "recompute"
    return {"policy": policy, "active": True, "how": how,
            "why": "a request of a higher class may stop one of a lower class, which goes on later"}
