"""What a running KVStream tells of itself in ``/status``, as findings. Pure, and tolerant of other versions: a field
that is missing says nothing, and nothing is an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..adapters.advice import Advice, Tried
from ..adapters.base import HttpReply

BREAKER_STATES = MappingProxyType({"breaker_open": "not asked for a while, it failed too often",
                                   "half_open": "being tried again after it failed too often"})
GOOD_STATES = frozenset(("up", "sleeping", "loading", "starting"))


def snapshot_of(reply: HttpReply | None) -> Mapping[str, Any]:
    """The snapshot; empty when there is none to be had."""
    data = reply.json() if reply is not None and reply.status == 200 else None
    return data if isinstance(data, dict) else {}


def lanes_of(snapshot: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """One mapping per backend; the snapshot itself where it has no list of them."""
    lanes = snapshot.get("lanes")
    if isinstance(lanes, list) and lanes:
        return [lane for lane in lanes if isinstance(lane, dict)]
    return [snapshot] if snapshot else []


def backend_urls(snapshot: Mapping[str, Any]) -> list[str]:
    """Where its backends are."""
    urls = [_table(lane, "backend").get("url") for lane in lanes_of(snapshot)]
    return [url for url in urls if isinstance(url, str) and url.startswith(("http://", "https://"))]


def tried_by(lane: Mapping[str, Any]) -> Tried:
    """What one lane of a running KVStream knows of its runtime."""
    inject, capacity = _table(lane, "inject"), _table(lane, "capacity")
    ram_cache, layout = inject.get("ram_cache"), {"unified": True, "split": False}
    works = inject.get("mode") in ("hard", "hard-unpinned")
    return Tried(works or bool(_list(inject, "missing")), layout.get(str(capacity.get("mode"))),
                 ram_cache if isinstance(ram_cache, bool) else None)


def advise_kvstream(reply: HttpReply | None, version: str, own_version: str, *, ready: bool) -> Iterator[Advice]:
    """Everything worth saying about a running KVStream. ``own_version`` is that of this program."""
    if version != own_version:
        yield Advice("note", f"It is version {version or 'unknown'}, this program is {own_version}.",
                     "restart kvstream serve after an update")
    if reply is not None and reply.status in (401, 403):
        yield Advice("note", "Its /status is guarded, so nothing more can be said of it.",
                     "run doctor on its own machine")
        return
    snapshot = snapshot_of(reply)
    good = 0
    lanes = lanes_of(snapshot)
    for lane in lanes:
        of = f" of {_text(lane, 'name')}" if len(lanes) > 1 and lane.get("name") else ""
        backend, state = _table(lane, "backend"), str(lane.get("state") or "")
        where = f"{_text(backend, 'kind')} at {_text(backend, 'url')}"
        if state in ("up", "sleeping"):
            good += 1
            yield Advice("ok", f"Its backend ({where}) is {state}.")
        elif state:
            detail = f" ({_text(backend, 'detail')})" if backend.get("detail") else ""
            why = _table(lane, "breaker").get("why")
            detail = f" ({why})" if why and state in BREAKER_STATES else detail
            yield Advice("note" if state in GOOD_STATES else "problem",
                         f"Its backend ({where}) is {BREAKER_STATES.get(state, state)}{detail}.",
                         "" if state in GOOD_STATES else "look at the runtime's log" if state in BREAKER_STATES else
                         "start the runtime, or set backend.base_url")
        for note in _list(_table(lane, "capacity"), "notes"):
            yield Advice("note", f"Capacity{of}: {_sentence(note)}")
        for row in _list(lane, "options_alternate"):
            if isinstance(row, dict):
                fact, _, cure = _text(row, "warning").partition("; ")
                yield Advice("warning", _sentence(f"Ollama: {fact}"), cure)
        yield from _inject(_table(lane, "inject"), of)
        yield from _hygiene(_table(lane, "prefix_hygiene"))
    if not ready and good:
        yield Advice("problem", "It is alive but not ready.", "kvstream health says why")
    problem = _table(snapshot, "config").get("problem") or _table(snapshot, "reload").get("problem")
    if problem:
        yield Advice("problem", f"Its configuration was changed but not taken: {_sentence(problem)}",
                     "kvstream check-config")


def _inject(inject: Mapping[str, Any], of: str) -> Iterator[Advice]:
    """What it found out about the slots of llama.cpp by trying."""
    mode, why = inject.get("mode"), _text(inject, "why")
    if not isinstance(mode, str):
        return
    missing = ", ".join(str(flag) for flag in _list(inject, "missing"))
    remedy = f"start llama-server with {missing}" if missing else ""
    if inject.get("restore_ineffective") is True:
        yield Advice("warning", f"Hard inject{of} is off: {_sentence(why)}", remedy)
    elif mode == "soft":
        yield Advice("warning" if missing else "note", f"Hard inject{of} is not used: {_sentence(why)}", remedy)
    else:
        yield Advice("note" if missing else "ok", f"Hard inject{of} ({mode}): {_sentence(why)}", remedy)
    for note in _list(inject, "notes"):
        yield Advice("note", f"Hard inject{of}: {_sentence(note)}")


def _hygiene(hygiene: Mapping[str, Any]) -> Iterator[Advice]:
    for found in _list(hygiene, "findings"):
        if isinstance(found, dict):
            times = "once" if found.get("requests") == 1 else f"{_text(found, 'requests')} times"
            cost = f"seen {times}; each time {_text(found, 'tokens_lost')} tokens are read again"
            of = f" of {found['model']}" if found.get("model") else ""
            yield Advice("warning", f"Prompts{of}: {_text(found, 'text')} ({cost}).", _text(found, "remedy"))


def _table(of: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = of.get(name)
    return value if isinstance(value, dict) else {}


def _list(of: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = of.get(name)
    return value if isinstance(value, list) else []


def _text(of: Mapping[str, Any], name: str) -> str:
    value = of.get(name)
    return "-" if value is None else str(value)


def _sentence(value: Any) -> str:
    text = str(value)
    return text if text.endswith(".") else text + "."
