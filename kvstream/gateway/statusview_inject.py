"""Hard inject in ``kvstream status``. As tolerant as ``statusview``: a field that is missing is a gap, not an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

MIB = 1024 * 1024
SLOTS_MAX = 16


def inject_parts(inject: Mapping[str, Any]) -> list[RenderableType]:
    """Lines about one lane's slots and files; nothing from a server that does not tell of them."""
    mode = inject.get("mode")
    if not isinstance(mode, str):
        return []
    line = Text(f"inject    {_plain(mode)}: {_plain(inject.get('why') or '-')}")
    again = inject.get("again_s")
    if isinstance(again, (int, float)):
        line.append(f" (again in {again:.0f} s)")
    if inject.get("restore_ineffective") is True:
        line.stylize("yellow")
    missing = [_plain(flag) for flag in _list(inject, "missing")]
    if missing:
        line.append(f"\n          better with: {', '.join(missing)}", style="yellow")
    for note in _list(inject, "notes"):
        line.append(f"\n          note: {_plain(note)}", style="yellow")
    parts: list[RenderableType] = [line]
    slots = [slot for slot in _list(inject, "slots") if isinstance(slot, dict)]
    if slots:
        parts.append(Text("slots     " + ", ".join(map(_slot, slots[:SLOTS_MAX])) + (
            f" and {len(slots) - SLOTS_MAX} more" if len(slots) > SLOTS_MAX else "")))
    store = inject.get("store")
    if isinstance(store, dict):
        size = f"{_mib(store, 'bytes')} of {_mib(store, 'bytes_max')} MiB"
        parts.append(Text(f"saved     {_count(store, 'files')} files, {size}, {_count(store, 'tokens')} tokens, "
                          f"{_count(store, 'evicted')} evicted"))
    return parts


def _slot(slot: Mapping[str, Any]) -> str:
    request = slot.get("request")
    owner = f" {_plain(request)}" if request is not None else ""
    return f"{_count(slot, 'slot')}: {_plain(slot.get('state') or '-')}{owner}, {_count(slot, 'tokens')} tokens"


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
