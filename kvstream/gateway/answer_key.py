"""Which requests have one and the same answer. Pure.

A request is *deterministic* when it says ``temperature: 0`` itself, or when its answer is no sampled text at all
(embeddings, rankings). Its key is what decides the answer: path, model and every field of the body but how the answer
travels; and whose request it is, so that nothing passes from one client to another.

Greedy answers are equal up to numerics: a runtime that batches differently may round differently, and then one word in
a thousand answers differs, with and without KVStream.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import attrs

from ..adapters.routes import SEAT, Route, route_of
from .request import Incoming

BODY_BYTES_MAX = 2**20  # a larger body would be written again only to be compared
# What travels to the runtime with a request and has no bearing on its answer.
_SILENT_HEADERS = frozenset({"user-agent", "x-request-id"})
# Samplers that draw lots also at temperature 0, and answers that the runtime keeps or builds on.
_LOTS = ("dynatemp_range", "xtc_probability")
_STATE = ("background", "conversation", "previous_response_id")

_PROMPTS = ("messages", "prompt", "input")


def answer_key(incoming: Incoming, *, twins: bool) -> bytes | None:
    """A digest that only requests with the same answer share; None for a request that is not deterministic.

    ``twins``: a stream and a whole answer are the same but for how they travel, where a stream's pieces can be put
    together and the runtime is always asked for a stream.
    """
    request = incoming.proxy
    route = route_of(request.route)
    if len(request.body) > BODY_BYTES_MAX or not _is_deterministic(route, request.view):
        return None
    twins = twins and _has_twins(route)
    view = _without_travel(request.view) if twins else request.view
    headers = sorted(pair for pair in request.headers if pair[0] not in _SILENT_HEADERS)
    # Whatever else the gateway knows of a request (client, class, share) must be the same too.
    beside = [repr(getattr(incoming, a.name)) for a in attrs.fields(Incoming) if a.name != "proxy"]
    shape = None if twins else [request.stream, request.include_usage]
    try:
        # in the client's own order: the order of a tool's properties ends up in the prompt
        text = json.dumps([request.route, request.model, view, headers, beside, shape], separators=(",", ":"))
    except (RecursionError, ValueError):
        return None
    return hashlib.blake2b(text.encode(), digest_size=32).digest()


def _is_deterministic(route: Route, view: Mapping[str, Any]) -> bool:
    if route.access != SEAT:
        return False
    if route.dialect == "ollama" and (view.get("keep_alive") is not None or not any(view.get(n) for n in _PROMPTS)):
        return False  # it is about what stays loaded, not only about an answer
    if not route.generates:
        return True
    if any(view.get(name) for name in (*_LOTS, *_STATE)):
        return False
    options = view.get("options") if route.dialect == "ollama" else view
    if not isinstance(options, Mapping):
        return False
    temperature = options.get("temperature")
    return isinstance(temperature, (int, float)) and not isinstance(temperature, bool) and temperature == 0


def _has_twins(route: Route) -> bool:
    return route.streams and route.end == "[DONE]"


def _without_travel(view: Mapping[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in view.items() if name not in ("stream", "stream_options")}
    options = view.get("stream_options")
    if isinstance(options, Mapping):
        others = {name: value for name, value in options.items() if name != "include_usage"}
        if others:
            rest["stream_options"] = others
    return rest
