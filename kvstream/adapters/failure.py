"""What a runtime's complaint means: error bodies and error frames of all known runtimes become one ``Failed``.

Texts are matched because the status codes lie: the same overflow is a 400 here, a 500 there and an event in a 200
stream elsewhere. The order of the rules matters; each says where its text was seen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from attrs import evolve

from .base import Failed, HttpReply

MESSAGE_CHARS_MAX = 600

# "Context size has been exceeded." is missing on purpose: that is llama.cpp's unified pool overflowing under several
# requests (T2), not this client's prompt being too long.
_TOO_LONG = re.compile(
    r"exceeds the available context size"  # llama.cpp
    r"|n_keep.*n_ctx|greater than the context length"  # LM Studio
    r"|maximum context length"  # vLLM, Foundry Local, OpenAI
    r"|longer than the context length|exceeds the context length"  # Ollama
    r"|prompt is too long",  # Anthropic dialects
    re.IGNORECASE | re.DOTALL,
)
# "error loading model ..." (Ollama, out of memory) is the end of loading: waiting for it would never end.
_LOADING = re.compile(r"(?<!error )(?<!failed )loading model|model is loading|server loading", re.IGNORECASE)
_NO_MODEL = re.compile(
    r"model\b.{0,200}\b(not found|does not exist|not loaded|is not available)|no models? loaded"
    r"|model not (found|loaded)|No OpenAIService provider found|try pulling it first",
    re.IGNORECASE | re.DOTALL,
)
# Faults of the request that a runtime reports as its own (500): never retried, never held against the backend.
_CLIENT_FAULT = re.compile(
    r"(image|audio|video) input is not supported|does not support (image|audio|video|tools)"  # llama.cpp, Ollama
    r"|tool calling requires model-published|tool calls require distinct model-published",  # Foundry Local
    re.IGNORECASE,
)
_BUSY = re.compile(r"server busy, please try again", re.IGNORECASE)  # Ollama, also with two spaces after it
_NO_ROUTE = re.compile(
    r"^Unexpected endpoint or method"  # LM Studio, with status 200
    r"|^File Not Found|^Not Found\b|^404 page not found|^Cannot POST "  # llama.cpp, vLLM, Ollama, Node
    r"|server does not support (embeddings|reranking|infill|completions|chat|this)"  # llama.cpp: a flag is missing
    r"|^Infill is not supported by this model|model does not support audio input"
    r"|does not support (embeddings|generate|chat|rerank)\b|does not support Embeddings API",  # Ollama, vLLM
    re.IGNORECASE,
)
_SOURCE_ENDING = re.compile(r"[/\\].*\.(?:cpp|cc|cu|h|hpp|py|go|rs|cs)(?::\d+)*[:;,)\]]*$")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ufffd]+")

_CONTEXT_TYPES = frozenset({"exceed_context_size_error", "context_length_exceeded"})
_AUTH_TYPES = frozenset({"authentication_error", "permission_error", "invalid_api_key"})
_BUSY_TYPES = frozenset({"unavailable_error", "overloaded_error", "rate_limit_error", "rate_limit_exceeded"})


def sanitise(text: str) -> str:
    """A message fit for a client and a log line: one line, no control characters, no source places, bounded."""
    words = _UNPRINTABLE.sub(" ", text[: 4 * MESSAGE_CHARS_MAX]).split()
    text = " ".join(word for word in words if not _SOURCE_ENDING.search(word))
    return text if len(text) <= MESSAGE_CHARS_MAX else text[: MESSAGE_CHARS_MAX - 1] + "\u2026"


def error_in(data: Any) -> Any:
    """The error inside a parsed frame or body; None when it is no error. ``"error": null`` and ``{}`` are none."""
    if not isinstance(data, Mapping):
        return None
    if data.get("error"):
        return data["error"]
    if data.get("object") == "error" and "message" in data:  # vLLM before 0.10
        return data
    return None


def failed_reply(reply: HttpReply) -> Failed:
    """Translate a reply that is not 2xx, or a 200 whose body is an error."""
    data = reply.json()
    error = error_in(data)
    if error is None and isinstance(data, Mapping):
        error = data if "message" in data else data.get("detail", data.get("errorMessage"))
    if error is None:
        error = _words_of(reply)
    return evolve(failed(error, status=reply.status), retry_after_s=_retry_after(reply.headers))


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds of a ``Retry-After``. Its other form, a date, needs a clock, and no runtime is known to use it."""
    text = headers.get("retry-after", "").strip()
    return float(text) if text.isdecimal() and text.isascii() and len(text) <= 9 else None


def failed_frame(data: Any, raw: bytes) -> Failed:
    """Translate an error frame of a stream. ``data`` is the parsed frame, or its text when it is not JSON."""
    error = error_in(data)
    if error is None:
        error = data
    return failed(error, status=0, raw=raw)


def failed(error: Any, *, status: int, raw: bytes = b"") -> Failed:
    """Map an error value (object, string, anything) and an HTTP status (0: none, it came in a stream)."""
    message, words, code = _read(error)
    shown = status
    if not 400 <= status <= 599:
        status = code if 400 <= code <= 599 else 0
    shown = status or shown
    text = sanitise(message) or (f"the backend answered with HTTP {shown}" if shown else "the backend gave no reason")
    kind, out = _kind(text, words, status)
    if kind == "backend_auth":
        # Not the runtime's text: it may quote the key, and a client would take it for a problem with its own.
        text = f"the backend refused KVStream's credentials (HTTP {status or 401}); check the backend's api_key"
    return Failed(kind, text, out, raw)


def unserved(failed: Failed, kind: str, path: str) -> Failed:
    """The same failure; where the backend does not serve the route at all, it says which backend and which route."""
    if failed.kind != "route_not_supported":
        return failed
    return evolve(failed, message=f"the backend ({kind}) does not serve {path}: {failed.message.rstrip('.')}. "
                                  "Use another route, or start or choose a backend that has this one")


def _kind(text: str, words: frozenset[str], status: int) -> tuple[str, int]:
    if words & _CONTEXT_TYPES or _TOO_LONG.search(text):
        return "context_length_exceeded", 400
    if status in (401, 403, 407) or words & _AUTH_TYPES:
        return "backend_auth", 502
    if _NO_ROUTE.search(text) and status in (0, 200, 400, 404, 405, 500, 501):
        return "route_not_supported", 404
    if _CLIENT_FAULT.search(text):
        return "upstream_rejected", 400
    if status in (0, 500, 503) and _LOADING.search(text):
        return "model_loading", 503
    if words & {"model_not_found"} or (status in (0, 400, 404) and _NO_MODEL.search(text)):
        return "model_not_found", 404
    if status in (429, 503, 529) or (status == 0 and (words & _BUSY_TYPES or _BUSY.search(text))):
        return "overloaded", 429 if status == 429 else 503
    if status == 499:  # Ollama: the request was cancelled, and not by a client of ours: it is being stopped
        return "upstream_error", 502
    if status == 501:  # llama.cpp: this server was started without what the request needs; a retry cannot help
        return "upstream_rejected", 400
    if 400 <= status <= 499:
        return "upstream_rejected", status
    if "invalid_request_error" in words and status == 0:
        return "upstream_rejected", 400
    return "upstream_error", status if 500 <= status <= 599 else 502


def _read(error: Any) -> tuple[str, frozenset[str], int]:
    """(message, type and code words, numeric code) of an error value in any of the known shapes."""
    if isinstance(error, str):
        return error, frozenset(), 0
    if not isinstance(error, Mapping):
        return json.dumps(error)[:MESSAGE_CHARS_MAX], frozenset(), 0
    inner = error.get("error")
    if isinstance(inner, (Mapping, str)) and "message" not in error:
        return _read(inner)
    message = error.get("message")
    if not isinstance(message, str):
        message = json.dumps(message if message is not None else dict(error))
    code = 0
    words = set()
    for key in ("code", "status", "status_code", "type"):
        value = error.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            code = code or value
        elif isinstance(value, str):
            words.add(value)
            code = code or (int(value) if value.isdecimal() and len(value) == 3 else 0)
    return message, frozenset(words), code


def _words_of(reply: HttpReply) -> str:
    """The text of a body that is not JSON. Pages are not quoted: a proxy's HTML helps nobody in an error message."""
    text = reply.body[: 8 * MESSAGE_CHARS_MAX].decode("utf-8", "replace").strip()
    if text.startswith("<"):
        return f"the backend answered with HTTP {reply.status} and a page of HTML"
    return text
