"""Which runtime answers at an address, from the answers to a few cheap GETs. Pure; ``gateway.discovery`` asks.

Theory of operation. :func:`next_call` names the next GET, given the replies so far; :func:`identify` reads them. The
order matters: LM Studio answers every unknown path with 200 and an error object, so it is told first, and a body is
believed, never a status. llama.cpp and KVStream name themselves in a header of every answer, so the very first GET
tells them. What may wake or load a model (``/slots``, a router's ``/props?model=``, any POST) is never asked.

::

    GET /lmstudio-greeting ── x-kvstream-version ──────────> KVStream
      │                    ── Server: llama.cpp ───────────> llama.cpp      then /props, /v1/models
      │                    ── {"lmstudio": true} ──────────> LM Studio      then /api/v1/models, /api/v0/models
      │                    ── Server: oatpp/... ── /status > Foundry Local  then /models/loaded, /v1/models
    GET / ── "Ollama is running" ──────────────────────────> Ollama         then /api/version, /api/ps, /api/tags
    GET /openai/status ────────────────────────────────────> Foundry 0.8    then /openai/loadedmodels, /v1/models
    GET /props ── total_slots, or "Loading model" ─────────> llama.cpp whose header a proxy took away
    GET /v1/models ── owned_by vllm: vLLM, then /version, /metrics; data: some OpenAI-compatible server
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from .base import HttpReply
from .failure import failed_reply

KVSTREAM_HEADER = "x-kvstream-version"
GREETING, ROOT, OLD_FOUNDRY, PROPS, MODELS = "/lmstudio-greeting", "/", "/openai/status", "/props", "/v1/models"
UNKNOWN_ORDER = (GREETING, ROOT, OLD_FOUNDRY, PROPS, MODELS)

# What is asked of a runtime once it is known, and what KVStream calls its adapter (``[backend] type``).
FOLLOW_UP: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("kvstream", ("/ready", MODELS, "/status")),
    ("llamacpp", (PROPS, MODELS)),
    ("lmstudio", ("/api/v1/models", "/api/v0/models")),
    ("ollama", ("/api/version", "/api/ps", "/api/tags")),
    ("foundry", ("/status", "/models/loaded", MODELS)),
    ("foundry-old", ("/openai/loadedmodels", MODELS)),
    ("vllm", (MODELS, "/version", "/metrics")),
    ("openai", (MODELS,)),
)
TITLES: tuple[tuple[str, str], ...] = (
    ("kvstream", "KVStream"), ("llamacpp", "llama.cpp"), ("lmstudio", "LM Studio"), ("ollama", "Ollama"),
    ("foundry", "Foundry Local"), ("foundry-old", "Foundry Local (0.8 service)"), ("vllm", "vLLM"),
    ("openai", "OpenAI-compatible server"), ("unknown", "something that is no model runtime"),
)  # fmt: skip

Replies = Mapping[str, HttpReply | None]


@frozen
class Identity:
    """What answers. ``state``: up, loading, sleeping, locked (it wants a key) or down (a KVStream that is not ready).

    ``version`` as it says itself, or empty. ``router``: a llama.cpp server for several models.
    """

    kind: str
    state: str = "up"
    version: str = ""
    router: bool = False
    detail: str = ""

    @property
    def title(self) -> str:
        name = dict(TITLES)[self.kind]
        return f"{name} (router)" if self.router else name

    @property
    def is_backend(self) -> bool:
        """Whether KVStream could stand in front of it. Never in front of itself (case 57)."""
        return self.kind not in ("kvstream", "unknown")

    @property
    def backend_type(self) -> str:
        """The value of ``backend.type`` for it, where it has an adapter of its own; else ``openai``."""
        return self.kind if self.kind in ("llamacpp", "ollama") else "openai"


def next_call(replies: Replies) -> str | None:
    """The path to GET next; None when everything worth asking has been asked. A reply of None is a call that failed."""
    kind = _kind(replies)
    if kind is None:
        return next((path for path in UNKNOWN_ORDER if path not in replies), None)
    return next((path for path in dict(FOLLOW_UP)[kind] if path not in replies), None)


def identify(replies: Replies) -> Identity | None:
    """What the replies show; None when nothing answered at all."""
    if all(reply is None for reply in replies.values()):
        return None
    kind = _kind(replies)
    if kind is None:
        locked = any(reply is not None and reply.status in (401, 403) for reply in replies.values())
        return Identity("openai" if locked and _answers_models(replies) else "unknown",
                        "locked" if locked else "up", detail=_server(replies))
    props = _json(replies, PROPS)
    return Identity(kind, _state(kind, replies), _version(kind, replies), props.get("role") == "router",
                    _server(replies) if kind == "openai" else "")


# --- which ------------------------------------------------------------------------------------------------------------


def _kind(replies: Replies) -> str | None:
    """The first rule that fits, in the order of runtimes.md 0.1; None when no rule does (yet)."""
    greeting = replies.get(GREETING)
    headers = {name.lower(): value for reply in replies.values() if reply is not None
               for name, value in reply.headers.items()}  # fmt: skip
    server = headers.get("server", "").lower()
    if KVSTREAM_HEADER in headers:
        return "kvstream"
    if greeting is not None and (_json(replies, GREETING).get("lmstudio") is True or _is_lmstudio_error(greeting)):
        return "lmstudio"
    if server.startswith("llama.cpp"):
        return "llamacpp"
    if "oatpp" in server and ("/status" not in replies or _is_foundry(_json(replies, "/status"))):
        return "foundry"
    root = replies.get(ROOT)
    if root is not None and root.body[:200].strip().startswith(b"Ollama is running"):
        return "ollama"
    if {name.lower() for name in _json(replies, OLD_FOUNDRY)} >= {"endpoints", "modeldirpath"}:
        return "foundry-old"
    props = _json(replies, PROPS)
    if "total_slots" in props or props.get("role") == "router" or _is_loading(replies.get(PROPS)):
        return "llamacpp"
    rows = rows_of(replies.get(MODELS))
    if rows is not None:
        return "vllm" if any(row.get("owned_by") == "vllm" for row in rows) else "openai"
    return None


def _is_lmstudio_error(reply: HttpReply) -> bool:
    data = reply.json()
    return isinstance(data, dict) and str(data.get("error", "")).startswith("Unexpected endpoint or method")


def _is_foundry(data: Mapping[str, Any]) -> bool:
    return {"endpoints", "modelCachePath", "pid"} <= set(data)


def _is_loading(reply: HttpReply | None) -> bool:
    return reply is not None and reply.status == 503 and failed_reply(reply).kind == "model_loading"


def _answers_models(replies: Replies) -> bool:
    reply = replies.get(MODELS)
    return reply is not None and reply.status in (401, 403)


# --- what it says of itself -------------------------------------------------------------------------------------------


def _state(kind: str, replies: Replies) -> str:
    if kind == "kvstream":
        ready = replies.get("/ready")
        return "up" if ready is not None and ready.status == 200 else "down"
    if any(_is_loading(reply) for reply in replies.values()):
        return "loading"
    if kind == "llamacpp" and _json(replies, PROPS).get("is_sleeping") is True:
        return "sleeping"
    asked = [replies.get(path) for path in dict(FOLLOW_UP)[kind]]
    if any(reply is not None and reply.status in (401, 403) for reply in asked):
        return "locked"
    return "up"


def _version(kind: str, replies: Replies) -> str:
    if kind == "kvstream":
        return next((reply.headers[KVSTREAM_HEADER] for reply in replies.values()
                     if reply is not None and KVSTREAM_HEADER in reply.headers), "")  # fmt: skip
    path, name = {"llamacpp": (PROPS, "build_info"), "ollama": ("/api/version", "version"),
                  "vllm": ("/version", "version")}.get(kind, ("", ""))  # fmt: skip
    version = str(_json(replies, path).get(name) or "")
    return "" if version == "b0-unknown" else version  # what wheels of llama.cpp say


def _server(replies: Replies) -> str:
    return next((reply.headers["server"] for reply in replies.values()
                 if reply is not None and reply.headers.get("server")), "")  # fmt: skip


def _json(replies: Replies, path: str) -> Mapping[str, Any]:
    """The object of a good answer; empty for anything else."""
    reply = replies.get(path)
    data = reply.json() if reply is not None and reply.status == 200 else None
    return data if isinstance(data, dict) else {}


def rows_of(reply: HttpReply | None, name: str = "data") -> list[Mapping[str, Any]] | None:
    """The objects in the list ``name`` of an answer; None when there is no such list."""
    data = reply.json() if reply is not None and reply.status == 200 else None
    rows = data.get(name) if isinstance(data, dict) else None
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else None
