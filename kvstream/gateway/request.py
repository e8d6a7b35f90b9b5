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
from ..core.types import Priority
from ..errors import InvalidRequestError

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

# Everything else a client sends (cookies, hop-by-hop headers, X-Conversation-Id, Origin, Referer, Host ...) ends here.
FORWARDED_HEADERS = frozenset({"accept-language", "user-agent", "x-request-id"})
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
    """Read a model call. ``headers`` are ASGI header pairs. Raises ``InvalidRequestError``."""
    view = _parse_object(body)
    stream = _optional(view, "stream", bool, False)
    options = view.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise InvalidRequestError("'stream_options' must be an object", param="stream_options")
    model = _optional(view, "model", str, "")
    _check_content(route, view)
    for name in ("max_tokens", "max_completion_tokens", "n"):
        _optional(view, name, int, 0)
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
        elif name == PRIORITY_HEADER:
            priority = _priority(raw_value.decode("latin-1"))
        elif name in FORWARDED_HEADERS:
            forwarded.append((name, raw_value.decode("latin-1")))
    request = ProxyRequest(
        route=route, body=body, view=view, model=model, stream=stream,
        include_usage=bool(options and options.get("include_usage")), headers=tuple(forwarded),
    )
    client = hashlib.blake2b(secret, digest_size=8).hexdigest() if secret else ""
    return Incoming(request, client, priority)


def answer_tokens(view: Mapping[str, Any]) -> int | None:
    """The most answer tokens the client allows, over all choices; None without a limit."""
    limit = view.get("max_completion_tokens")
    if limit is None:
        limit = view.get("max_tokens")
    if limit is None or limit < 0:  # llama.cpp reads -1 as "until the context is full"
        return None
    return int(limit) * seats_wanted(view)


def seats_wanted(view: Mapping[str, Any]) -> int:
    """How many slots of the runtime one call takes: every choice (``n``) of every prompt runs in one of its own."""
    prompt = view.get("prompt")
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))
    choices = view.get("n") or 1
    return max(1, int(choices)) * (len(prompt) if several and isinstance(prompt, list) else 1)


def prompt_text(route: str, view: Mapping[str, Any]) -> str:
    """The text of a prompt in one string, for estimating its length and splitting it into stable pieces.

    Images and audio are left out: their base64 is not text, and its size says nothing about tokens.
    """
    if route == COMPLETIONS:
        prompt = view.get("prompt", "")
        return prompt if isinstance(prompt, str) else "\n".join(p for p in prompt or () if isinstance(p, str))
    parts: list[str] = []
    if view.get("tools"):
        parts.append(json.dumps(view["tools"], sort_keys=True))
    for message in view.get("messages") or ():
        parts.append(f"\n{message.get('role', '')}\n")
        content = message.get("content")
        if isinstance(content, str):
            parts.append(content)
        elif isinstance(content, list):
            parts.extend(p["text"] for p in content if isinstance(p, dict) and isinstance(p.get("text"), str))
        if message.get("tool_calls"):
            parts.append(json.dumps(message["tool_calls"], sort_keys=True))
    return "".join(parts)


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


def _check_content(route: str, view: Mapping[str, Any]) -> None:
    if route == CHAT:
        messages = view.get("messages")
        if not isinstance(messages, list):
            raise InvalidRequestError("'messages' must be a list of messages", param="messages")
        if not messages:
            raise InvalidRequestError("'messages' must have at least one message", param="messages")
        for index, message in enumerate(messages):
            if not isinstance(message, dict):
                raise InvalidRequestError(f"messages[{index}] must be an object", param=f"messages[{index}]")
    elif route == COMPLETIONS and not isinstance(view.get("prompt", ""), (str, list)):
        raise InvalidRequestError("'prompt' must be a string or a list", param="prompt")


def _priority(value: str) -> Priority:
    found = _PRIORITIES.get(value.strip().lower())
    if found is None:
        known = ", ".join(_PRIORITIES)
        raise InvalidRequestError(f"{PRIORITY_HEADER}: {value!r} is no priority; use {known}", param=PRIORITY_HEADER)
    return found
