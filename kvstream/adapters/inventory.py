"""The models of a runtime as its listing tells them, one row each. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import frozen

from .base import HttpReply
from .identify import MODELS, Replies, rows_of


@frozen
class ModelRow:
    """One model. ``context`` in tokens for one request, None where it is not told; ``state``: loaded, sleeping, not
    loaded, another word of the runtime's, or empty where it does not say."""

    name: str
    context: int | None = None
    state: str = ""
    aliases: tuple[str, ...] = ()


def models_of(kind: str, replies: Replies) -> list[ModelRow]:
    """What the replies of discovery (``identify.FOLLOW_UP``) tell, in the runtime's order."""
    readers = {"llamacpp": _llamacpp, "ollama": _ollama, "lmstudio": _lmstudio, "foundry": _foundry,
               "foundry-old": _foundry, "vllm": _plain, "openai": _plain, "kvstream": _plain}  # fmt: skip
    reader = readers.get(kind)
    return list(reader(replies)) if reader is not None else []


def _llamacpp(replies: Replies) -> Iterator[ModelRow]:
    """A single server's only model, or a router's with their states."""
    props = _object(replies.get("/props"))
    single = "loaded" if props.get("role") != "router" else ""
    if props.get("is_sleeping") is True:
        single = "sleeping"
    for row in rows_of(replies.get(MODELS)) or ():
        status, meta = row.get("status"), row.get("meta")
        state = _words(status.get("value")) if isinstance(status, Mapping) else single
        context = _count(meta.get("n_ctx")) if isinstance(meta, Mapping) else None
        yield ModelRow(_words(row.get("id")), context, "not loaded" if state == "unloaded" else state, _aliases(row))


def _ollama(replies: Replies) -> Iterator[ModelRow]:
    loaded = {row.get("name"): row for row in rows_of(replies.get("/api/ps"), "models") or ()}
    for row in rows_of(replies.get("/api/tags"), "models") or ():
        name = _words(row.get("name"))
        running = loaded.get(name)
        context = _count(running.get("context_length")) if running is not None else None
        yield ModelRow(name, context, "loaded" if running is not None else "not loaded",
                       (name.removesuffix(":latest"),) if name.endswith(":latest") else ())  # fmt: skip


def _lmstudio(replies: Replies) -> Iterator[ModelRow]:
    rows = rows_of(replies.get("/api/v1/models"), "models")
    if rows is None:
        for row in rows_of(replies.get("/api/v0/models")) or ():
            state = _words(row.get("state")).replace("-", " ")
            yield ModelRow(_words(row.get("id")), _count(row.get("loaded_context_length")), state)
        return
    for row in rows:
        configs = instances_of(row)
        context = _count(configs[0].get("context_length")) if configs else None
        yield ModelRow(_words(row.get("key")), context, "loaded" if configs else "not loaded")


def instances_of(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """How each loaded instance of an LM Studio model is configured; empty when none is loaded."""
    instances = row.get("loaded_instances")
    rows = [row for row in instances if isinstance(row, Mapping)] if isinstance(instances, list) else []
    return [config for row in rows if isinstance(config := row.get("config") or {}, Mapping)]


def _foundry(replies: Replies) -> Iterator[ModelRow]:
    """The list is the whole catalogue; usable is what is loaded."""
    reply = replies.get("/models/loaded") or replies.get("/openai/loadedmodels")
    data = reply.json() if reply is not None and reply.status == 200 else None
    loaded = {name for name in data if isinstance(name, str)} if isinstance(data, list) else None
    names = [_words(row.get("id")) for row in rows_of(replies.get(MODELS)) or ()]
    for name in dict.fromkeys([*sorted(loaded or ()), *names]):
        state = "" if loaded is None else "loaded" if name in loaded else "not loaded"
        yield ModelRow(name, None, state)


def _plain(replies: Replies) -> Iterator[ModelRow]:
    """An alias that a KVStream lists (``alias_of``) is told beside its model, or by itself where that is not listed."""
    rows = list(rows_of(replies.get(MODELS)) or ())
    listed = {_words(row.get("id")) for row in rows if not _words(row.get("alias_of"))}
    folded = [row for row in rows if _words(row.get("alias_of")) and row["alias_of"] in listed]
    for row in rows:
        if row in folded:
            continue
        context = _count(row.get("max_model_len")) or _count(row.get("context_length"))
        meta, status = row.get("meta"), row.get("status")
        if context is None and isinstance(meta, Mapping):
            context = _count(meta.get("n_ctx"))
        state = _words(status.get("value")) if isinstance(status, Mapping) else _words(row.get("state"))
        loaded = "loaded" if row.get("owned_by") in ("vllm", "llamacpp") and not state else state
        name = _words(row.get("id"))
        also = [_words(other.get("id")) for other in folded if other["alias_of"] == name]
        yield ModelRow(name, context, loaded, tuple(dict.fromkeys([*_aliases(row), *also])))


def _aliases(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Other names than the one in the first place."""
    names = row.get("aliases")
    return tuple(n for n in names if isinstance(n, str) and n != row.get("id")) if isinstance(names, list) else ()


def _object(reply: HttpReply | None) -> Mapping[str, Any]:
    data = reply.json() if reply is not None and reply.status == 200 else None
    return data if isinstance(data, dict) else {}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _words(value: Any) -> str:
    return value if isinstance(value, str) else ""
