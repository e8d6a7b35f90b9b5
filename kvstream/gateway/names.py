"""Models by name: which names a lane serves, and what becomes of a name on its way to the runtime and back. Pure.

A name is matched as an alias, else as it is, else by ``x`` = ``x:latest``. The runtime is asked for the name it lists;
one without a tag is left alone where the list has it with ``:latest``, since such a runtime takes both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from attrs import evolve, frozen

from ..adapters.base import Delta, Done, Progress, ProxyRequest, UpstreamEvent, Usage
from ..adapters.bodies import edit

LATEST = ":latest"
NAMES_SHOWN_MAX = 10
_MODEL_FIELD = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.)*")')


@frozen
class Names:
    """What the configuration says about a backend's models. See ``BackendConfig``."""

    models: tuple[str, ...] = ()
    aliases: Mapping[str, str] = MappingProxyType({})
    rewrite: bool = True


@frozen
class ModelList:
    """A backend's ``/v1/models``: its entries as they came, and the whole answer they came in."""

    entries: tuple[Mapping[str, Any], ...] = ()
    whole: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    def read(cls, answer: Any) -> ModelList | None:
        """None when it is no model list."""
        rows = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(rows, list):
            return None
        return cls(tuple(row for row in rows if isinstance(row, dict) and isinstance(row.get("id"), str)), answer)

    @property
    def names(self) -> tuple[str, ...]:
        """The ids, and the names that the runtime itself takes for them (llama.cpp's ``aliases``)."""
        found = []
        for row in self.entries:
            also = row.get("aliases")
            found += [row["id"], *(a for a in (also if isinstance(also, list) else ()) if isinstance(a, str))]
        return tuple(dict.fromkeys(found))


def target_of(asked: str, names: Names, listed: Sequence[str]) -> str | None:
    """What to ask the backend for when a client asks for ``asked``; None when it does not serve that."""
    base = asked.removesuffix(LATEST)
    for alias in (asked, base, base + LATEST):
        if alias in names.aliases:
            return names.aliases[alias]
    known = names.models or listed
    if asked in known or base + LATEST in known:
        return asked
    return base if base in known else None


def listing_of(names: Names, known: ModelList | None) -> list[dict[str, Any]]:
    """The entries that clients are shown of a backend: its models, then its aliases with their ``alias_of``."""
    entries = {row["id"]: dict(row) for row in (known.entries if known else ())}
    if names.models:
        entries = {name: entries.get(name) or _entry(name) for name in names.models}
    for alias, model in names.aliases.items():
        entries[alias] = {**(entries.get(model) or _entry(model)), "id": alias, "alias_of": model}
        entries[alias].pop("aliases", None)
    return list(entries.values())


def _entry(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "kvstream"}


def asked_for(request: ProxyRequest, model: str) -> ProxyRequest:
    """The request with another model in it; itself when it is the same."""
    if model == request.model:
        return request
    body = edit(request.body, request.view, {"model": model})
    return evolve(request, body=body, view={**request.view, "model": model}, model=model)


def renamed(event: UpstreamEvent, model: str) -> UpstreamEvent:
    """An event of an answer with ``model`` as the name of its model: the frame changes in that one place."""
    if isinstance(event, Delta | Usage):
        return evolve(event, raw=_in_frame(event.raw, event.data, model), data=renamed_data(event.data, model))
    if isinstance(event, Progress | Done):
        return evolve(event, raw=_in_frame(event.raw, None, model))
    return event


def renamed_data(data: Any, model: str) -> Any:
    """The parsed frame with ``model`` where it names its own: at the top, or in Anthropic's ``message`` and the
    Responses API's ``response``."""
    if not isinstance(data, dict):
        return data
    if isinstance(data.get("model"), str):
        return {**data, "model": model}
    for inner in ("message", "response"):
        if isinstance(data.get(inner), dict) and isinstance(data[inner].get("model"), str):
            return {**data, inner: {**data[inner], "model": model}}
    return data


def _in_frame(raw: bytes, data: Any, model: str) -> bytes:
    """The first ``"model":"..."`` whose value is the frame's own model. In text of the answer such a pair has escaped
    quotes, so it is not taken for one."""
    own = _own_model(data if data is not None else _data_in(raw))
    if own is None:
        return raw
    for found in _MODEL_FIELD.finditer(raw):
        try:
            value = json.loads(found[1])
        except ValueError:
            continue
        if value == own:
            return raw[: found.start(1)] + json.dumps(model).encode() + raw[found.end(1) :]
    return raw


def _data_in(raw: bytes) -> Any:
    """The object in a frame that nobody has parsed yet."""
    for line in raw.splitlines():
        text = line.removeprefix(b"data:").strip()
        if text.startswith(b"{"):
            try:
                return json.loads(text)
            except (ValueError, RecursionError):
                return None
    return None


def _own_model(data: Any) -> str | None:
    for place in (data, *((data.get("message"), data.get("response")) if isinstance(data, dict) else ())):
        if isinstance(place, dict) and isinstance(place.get("model"), str):
            return str(place["model"])
    return None
