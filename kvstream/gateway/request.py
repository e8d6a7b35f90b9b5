"""From bytes to a frozen request, or a 4xx that says what is wrong. Pure.

Only the fields that KVStream needs are looked at; everything else is the runtime's business and travels untouched.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from attrs import frozen

from ..adapters.base import ProxyRequest
from ..adapters.routes import CHAT, COMPLETIONS, Route, route_of
from ..core.types import Priority
from ..errors import InvalidRequestError
from .prompts import FORMS

__all__ = ["CHAT", "COMPLETIONS", "Incoming", "answer_tokens", "parse_request", "prompt_text", "seats_wanted",
           "unread_request"]

# Everything else a client sends (cookies, hop-by-hop headers, X-Conversation-Id, Origin, Referer, Host ...) ends here.
HOP_HEADER = "x-kvstream-hop"  # the ids of the KVStreams that a request came through
FORWARDED_HEADERS = frozenset({"accept-language", "user-agent", "x-request-id", HOP_HEADER})
PRIORITY_HEADER = "x-kvstream-priority"

_PRIORITIES: Mapping[str, Priority] = MappingProxyType({p.name.lower(): p for p in Priority})


@frozen
class Incoming:
    """A parsed request with what only the gateway needs of it. ``client`` is who shares seats fairly with others and
    keeps prefixes apart, ``weight`` the size of its share."""

    proxy: ProxyRequest
    client: str
    priority: Priority
    weight: float = 1.0


def parse_request(route: str, headers: Iterable[tuple[bytes, bytes]], body: bytes, *,
                  forward_authorization: bool = True) -> Incoming:
    """Read a call of ``route``, a path. ``headers`` are ASGI header pairs. Raises ``InvalidRequestError``."""
    row = route_of(route)
    view = _parse_object(body)
    stream = _optional(view, "stream", bool, row.stream_default) and row.streams
    options = view.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise InvalidRequestError("'stream_options' must be an object", param="stream_options")
    model = _optional(view, "model", str, "")
    FORMS[row.form].check(view)
    for name in (*row.limits, "n"):
        _optional(view, name, int, 0)
    forwarded, client, priority = _read_headers(headers, forward_authorization)
    request = ProxyRequest(
        route=route, body=body, view=view, model=model, stream=stream,
        include_usage=bool(options and options.get("include_usage")), headers=forwarded,
    )
    return Incoming(request, client, priority)


def unread_request(route: str, headers: Iterable[tuple[bytes, bytes]], *,
                   forward_authorization: bool = True) -> Incoming:
    """A call of which only the head is read. Raises ``InvalidRequestError``."""
    forwarded, client, priority = _read_headers(headers, forward_authorization)
    return Incoming(ProxyRequest(route=route, body=b"{}", view={}, headers=forwarded), client, priority)


def _read_headers(headers: Iterable[tuple[bytes, bytes]],
                  forward_authorization: bool) -> tuple[tuple[tuple[str, str], ...], str, Priority]:
    """(headers for the runtime, who asks, how urgent it is)."""
    forwarded: list[tuple[str, str]] = []
    secret, priority = b"", Priority.NORMAL
    for raw_name, raw_value in headers:
        name = raw_name.decode("latin-1").lower()
        if name == "authorization":
            secret = raw_value
            if forward_authorization:
                forwarded.append((name, raw_value.decode("latin-1")))
        elif name == "x-api-key":
            secret = secret or raw_value
            if forward_authorization:
                forwarded.append((name, raw_value.decode("latin-1")))
        elif name == PRIORITY_HEADER:
            priority = _priority(raw_value.decode("latin-1"))
        elif name in FORWARDED_HEADERS:
            forwarded.append((name, raw_value.decode("latin-1")))
    client = hashlib.blake2b(secret, digest_size=8).hexdigest() if secret else ""
    return tuple(forwarded), client, priority


def answer_tokens(request: ProxyRequest) -> int | None:
    """The most answer tokens the client allows, over all choices; None without a limit.

    A route without answer tokens has none, but its other documents take room beside the longest, the one that counts
    as the prompt; they are what it may grow by.
    """
    route = route_of(request.route)
    if not route.generates:
        return FORMS[route.form].beside(request.view)
    limit = _limit(route, request.view)
    return None if limit is None else limit * seats_wanted(request)


def _limit(route: Route, view: Mapping[str, Any]) -> int | None:
    """The limit of one choice. OpenAI renamed its field; where both are given the new one counts."""
    named = [value for name in reversed(route.limits) if (value := _field(view, name)) is not None]
    if not named or named[0] < 0:  # llama.cpp reads -1 as "until the context is full"
        return None
    return int(named[0])


def _field(view: Mapping[str, Any], name: str) -> Any:
    """A field, or one of an object in a field: ``options.num_predict``."""
    outer, dot, inner = name.partition(".")
    value = view.get(outer)
    return value.get(inner) if dot and isinstance(value, Mapping) else None if dot else value


def seats_wanted(request: ProxyRequest) -> int:
    """How many slots of the runtime one call takes: every choice of every prompt, every document, runs in its own."""
    return max(1, FORMS[route_of(request.route).form].seats(request.view))


def prompt_text(route: str, view: Mapping[str, Any]) -> str:
    """The text of a prompt in one string, for estimating its length and splitting it into stable pieces."""
    return FORMS[route_of(route).form].text(view)


def _parse_object(body: bytes) -> dict[str, Any]:
    try:
        view = json.loads(body)
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise InvalidRequestError("the body is nested too deeply") from error
    except ValueError as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(view, dict):
        raise InvalidRequestError(f"the body must be a JSON object, not {type(view).__name__}")
    return view


def _optional(view: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """A field that may be absent or null. ``bool`` is no ``int`` here; 16.0 is."""
    value = view.get(name)
    if value is None:
        return default
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InvalidRequestError(f"{name!r} must be {_NAMES[kind]}, not {json.dumps(value)[:40]}", param=name)
    return value


_NAMES: Mapping[type, str] = MappingProxyType({bool: "true or false", int: "an integer", str: "a string"})


def _priority(value: str) -> Priority:
    found = _PRIORITIES.get(value.strip().lower())
    if found is None:
        known = ", ".join(_PRIORITIES)
        raise InvalidRequestError(f"{PRIORITY_HEADER}: {value!r} is no priority; use {known}", param=PRIORITY_HEADER)
    return found
