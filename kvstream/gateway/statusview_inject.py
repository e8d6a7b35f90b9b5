"""Hard inject in ``kvstream status``. As tolerant as ``statusview``: a field that is missing is a gap, not an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from .statusview_lines import Labelled, labelled

MIB = 1024 * 1024
SLOTS_MAX = 16


def inject_parts(inject: Mapping[str, Any]) -> list[RenderableType]:
    """Lines about one lane's slots and files; nothing from a server that does not tell of them."""
    mode = inject.get("mode")
    if not isinstance(mode, str):
        return []
    line = Text(f"{_plain(mode)}: {_plain(inject.get('why') or '-')}")
    again = inject.get("again_s")
    if isinstance(again, (int, float)):
        line.append(f" (again in {again:.0f} s)")
    if inject.get("restore_ineffective") is True:
        line.stylize("yellow")
    missing = [_plain(flag) for flag in _list(inject, "missing")]
    if missing:
        line.append(f"\nbetter with: {', '.join(missing)}", style="yellow")
    for note in _list(inject, "notes"):
        line.append(f"\nnote: {_plain(note)}", style="yellow")
    parts: list[RenderableType] = [Labelled("inject", line)]
    slots = [slot for slot in _list(inject, "slots") if isinstance(slot, dict)]
    if slots:
        parts.append(labelled("slots", "; ".join(map(_slot, slots[:SLOTS_MAX])) + (
            f" and {len(slots) - SLOTS_MAX} more" if len(slots) > SLOTS_MAX else "")))
    store = inject.get("store")
    if isinstance(store, dict):
        size = f"{_mib(store, 'bytes')} of {_mib(store, 'bytes_max')} MiB"
        files = "1 file" if store.get("files") == 1 else f"{_count(store, 'files')} files"
        replaced = f"{_count(store, 'replaced')} replaced, " if "replaced" in store else ""
        parts.append(labelled("saved", f"{files}, {size}, {_count(store, 'tokens')} tokens, "
                                       f"{replaced}{_count(store, 'evicted')} evicted"))
    totals = inject.get("totals")
    return parts + (_totals(totals) if isinstance(totals, dict) else [])


def _totals(totals: Mapping[str, Any]) -> list[RenderableType]:
    """Where prompts came from, and what was moved for that; nothing of what did not happen."""
    parts: list[RenderableType] = []
    came = _kinds(totals.get("admissions"))
    if came:
        kept = ""
        if totals.get("tokens_promised"):
            kept = f"; {_count(totals, 'tokens_kept')} of {_count(totals, 'tokens_promised')} promised tokens kept"
        parts.append(labelled("prompts", came + kept))
    saves, restores = _kinds(totals.get("saves")), _table(totals, "restores")
    moved = [f"saves: {saves}"] if saves else []
    moved += [f"{_count(totals, 'saves_failed')} failed"] if totals.get("saves_failed") else []
    moved += [f"{_count(restores, 'ok')} restored"] if restores.get("ok") else []
    moved += [f"{_count(restores, 'failed')} not restored"] if restores.get("failed") else []
    gave_way = _kinds(totals.get("preemptions"))
    if gave_way:
        moved.append(f"gave way: {gave_way}, of which {_count(totals, 'resumed')} went on, "
                     f"{_count(totals, 'swapped_out')} swapped out now")
    return [*parts, labelled("moved", "; ".join(moved))] if moved else parts


def _kinds(counts: Any) -> str:
    """Counts by kind, but those that are 0."""
    found = counts if isinstance(counts, dict) else {}
    return ", ".join(f"{number:,} {_plain(kind)}" for kind, number in found.items()
                     if isinstance(number, int) and number)


def _slot(slot: Mapping[str, Any]) -> str:
    """A slot at work holds what it is computing, of which nobody knows how far it is: said is what it began with."""
    request, at = slot.get("request"), _count(slot, "slot")
    if request is None:
        return f"{at}: {_plain(slot.get('state') or '-')}, {_count(slot, 'tokens')} tokens"
    busy = f"{at}: busy ({_plain(request)})"
    if slot.get("cached") is None:
        return busy + (f", {_count(slot, 'tokens')} tokens" if slot.get("tokens") else "")
    return f"{busy}, {_count(slot, 'cached')} of its {_count(slot, 'tokens')} tokens were there"


def _table(of: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = of.get(name)
    return value if isinstance(value, dict) else {}


def _list(of: Mapping[str, Any], name: str) -> list[Any]:
    value = of.get(name)
    return value if isinstance(value, list) else []


def _count(of: Mapping[str, Any], name: str) -> str:
    value = of.get(name)
    return f"{value:,}" if isinstance(value, int) else "-"


def _mib(of: Mapping[str, Any], name: str) -> str:
    value = of.get(name)
    return f"{value / MIB:,.0f}" if isinstance(value, (int, float)) else "-"


def _plain(value: Any) -> str:
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(value))
