"""``kvstream models``: the models that clients can name, by the server that has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import trio
from attrs import frozen

from ..adapters.inventory import ModelRow, models_of
from ..errors import BackendUnavailableError
from .alive import url_of
from .discovery import Found, discover
from .doctor import Question, how_to_start, look_around
from .selfview import lanes_of, snapshot_of


@frozen
class ModelGroup:
    """Models of one server. ``url`` is where clients find it, ``title`` what it is, ``backend`` what serves them."""

    url: str
    title: str
    backend: str
    models: tuple[ModelRow, ...]


async def list_models(question: Question, key: str = "") -> list[ModelGroup]:
    """``key`` is shown to the KVStream that is named or configured, and to no other server.

    *Errors*: ``BackendUnavailableError`` when there is no server, or it wants another key. *Cancellation*: safe.
    """
    server = question.config.server
    first = question.url or (url_of(server) if server.port else None)
    found = [] if first is None else [one for one in await discover([first], {first: key})
                                      if isinstance(one, Found) and one.identity.kind == "kvstream"]
    if not found:
        around = [one for one in await look_around(question) if isinstance(one, Found)]
        selves = [one for one in around if one.identity.kind == "kvstream"]
        found = selves or [one for one in around if one.identity.is_backend]
    if not found:
        where = f"at {question.url}" if question.url else "on this machine"
        raise BackendUnavailableError(f"no KVStream and no model runtime answers {where}. {how_to_start()}.")
    groups = [group for one in found for group in _groups(one)]
    locked = next((one for one in found if _wants_key(one)), None)
    if locked is not None and not groups:  # no list and no word would look like a server without models
        raise BackendUnavailableError(f"{locked.url} does not list its models: it wants a key, or another one. "
                                      "It is taken from KVSTREAM_KEY")
    return groups


def run_listing(question: Question, key: str = "") -> list[ModelGroup]:
    """:func:`list_models` for who has no event loop. *Errors*: the same."""
    return trio.run(list_models, question, key)


def _wants_key(one: Found) -> bool:
    reply = one.replies.get("/v1/models")
    return one.identity.kind == "kvstream" and reply is not None and reply.status in (401, 403)


def _groups(one: Found) -> list[ModelGroup]:
    rows = models_of(one.identity.kind, one.replies)
    if one.identity.kind != "kvstream":
        return [ModelGroup(one.url, one.identity.title, one.identity.title, tuple(rows))]
    lanes = lanes_of(snapshot_of(one.replies.get("/status")))
    groups: dict[int, list[ModelRow]] = {}
    for row in rows:
        index = next((i for i, lane in enumerate(lanes) if _names(lane) & {row.name, *row.aliases}), 0)
        groups.setdefault(index, []).append(_completed(row, lanes[index] if lanes else {}))
    return [ModelGroup(one.url, one.identity.title, _backend(lanes[index] if lanes else {}), tuple(groups[index]))
            for index in sorted(groups)]


def _names(lane: Mapping[str, Any]) -> set[str]:
    names = lane.get("models")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _backend(lane: Mapping[str, Any]) -> str:
    backend = lane.get("backend")
    return f"{backend.get('kind')} {backend.get('url')}" if isinstance(backend, dict) else "KVStream"


def _completed(row: ModelRow, lane: Mapping[str, Any]) -> ModelRow:
    """What a listing leaves out and the lane knows: how long a request may be."""
    capacity = lane.get("capacity")
    most = capacity.get("request_tokens_max") if isinstance(capacity, dict) else None
    return attrs.evolve(row, context=most) if row.context is None and isinstance(most, int) else row
