"""Ollama. Chats, completions and embeddings always travel to its *native* routes, whatever the client speaks.

``/v1`` hides an error in mid-stream (case 22) and makes a message of every content part, so a request for
``/v1/chat/completions`` is translated to ``/api/chat`` and its answer back, and likewise ``/v1/completions`` and
``/v1/embeddings``. A client of the native routes has its own bytes passed on and gets Ollama's own lines.

No option is ever added or changed: another ``num_ctx`` (or any of :data:`LOAD_OPTIONS`) makes Ollama load the whole
model anew. ``load_key`` tells which requests can follow each other without that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from attrs import evolve, frozen

from ..core.types import PoolMode
from .assemble import Assembler
from .base import (
    AnswerAssembler,
    Capabilities,
    CapacityQuery,
    CapacityReport,
    Decoder,
    Failed,
    Health,
    HttpCall,
    HttpReply,
    ProxyRequest,
)
from .bodies import dumps, edit
from .capacity import CapacityNotes, smallest
from .ollama_capacity import (
    Loaded,
    fingerprint,
    full_name,
    geometry_note,
    geometry_of,
    loaded_of,
    needs_verbose,
    openai_models,
    pairs_of,
)
from .ollama_request import CHAT, EMBEDDINGS, NATIVE_OF, Unsupported, translated
from .ollama_stream import NativeAssembler, NativeDecoder, OpenAIDecoder
from .ollama_whole import EmbeddingDecoder
from .openai import OpenAIBackend
from .routes import OLLAMA_ROUTES

GENERATE, EMBED, EMBED_OLD = "/api/generate", "/api/embed", "/api/embeddings"
STREAMED = frozenset({"/api/chat", GENERATE})
NATIVE = frozenset({*STREAMED, EMBED, EMBED_OLD})

LOAD_OPTIONS = ("num_ctx", "num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread", "draft_num_predict")
"""Options whose change makes Ollama load the model anew; besides them the field ``shift``."""

SEATS = 1
"""``OLLAMA_NUM_PARALLEL`` is not told and its default is one; more would only wait inside Ollama."""
CONTEXT_DEFAULT = 4096
"""Ollama's smallest default context: what is assumed until a model is loaded."""
SHOWN_MAX = 3
"""Of so many loaded models the geometry is asked."""

CAPABILITIES = Capabilities(
    routes=OLLAMA_ROUTES,
    translated=frozenset(NATIVE_OF),
    passed=frozenset({"/api/tags", "/api/ps", "/api/version", "/api/show"}),
    usage_injected=False,
    loads_on_demand=True,
    cancel="batch",
)
GROUPED = evolve(CAPABILITIES, groups_exclude=True)

_ACCEPT: Mapping[bool, str] = MappingProxyType({True: "application/x-ndjson", False: "application/json"})


@frozen
class OllamaBackend(OpenAIBackend):
    """``group_by_load_key``: requests with other load options belong to another group (``load_key``)."""

    kind: ClassVar[str] = "ollama"

    group_by_load_key: bool = False

    @property
    def capabilities(self) -> Capabilities:
        return GROUPED if self.group_by_load_key else CAPABILITIES

    # --- requests ---

    def refusal(self, request: ProxyRequest) -> Failed | None:
        if request.route not in NATIVE_OF:
            return None
        try:
            translated(request.route, request.view, self.model)
        except Unsupported as error:
            return Failed("invalid_request", str(error), 400)
        return None

    def encode(
        self,
        request: ProxyRequest,
        *,
        stream: bool = True,
        slot: int | None = None,
        tokens_max: int | None = None,
        include_usage: bool = True,
    ) -> HttpCall:
        route = NATIVE_OF.get(request.route, request.route)
        if route not in NATIVE:
            return super().encode(
                request, stream=stream, slot=slot, tokens_max=tokens_max, include_usage=include_usage
            )
        streamed = stream and route in STREAMED
        if request.route in NATIVE_OF:
            view: Mapping[str, Any] = translated(request.route, request.view, self.model)
            view = {**view, "stream": stream} if route in STREAMED else view
            body = dumps(view)
        else:
            view, body = request.view, request.body
        changes: dict[str, Any] = {}
        given = view.get("stream")
        if route in STREAMED and (True if given is None else given) is not stream:
            changes["stream"] = stream
        if self.model and not view.get("model"):
            changes["model"] = self.model
        if tokens_max is not None and route in STREAMED:
            changes |= _limited(view, tokens_max)
        return HttpCall("POST", route, self.headers(request.headers, _ACCEPT[streamed]), edit(body, view, changes))

    def decoder(self, request: ProxyRequest, *, content_type: str = "") -> Decoder:
        route = request.route
        if route in STREAMED:
            return NativeDecoder(self.event_bytes_max)
        if route in (EMBED, EMBED_OLD, EMBEDDINGS):
            return EmbeddingDecoder(request, self.event_bytes_max)
        if route in NATIVE_OF:
            return OpenAIDecoder(request, chat=route == CHAT, line_bytes_max=self.event_bytes_max)
        return super().decoder(request, content_type=content_type)

    def assembler(self, request: ProxyRequest) -> AnswerAssembler:
        if request.route in NATIVE or request.route == EMBEDDINGS:
            return NativeAssembler()
        return Assembler(request.route) if request.route in NATIVE_OF else super().assembler(request)

    def load_key(self, request: ProxyRequest) -> str:
        model = full_name(request.model or self.model)
        options = self.load_options(request) if self.group_by_load_key else ""
        return f"{model} {options}" if options else model

    def load_options(self, request: ProxyRequest) -> str:
        if request.route not in NATIVE:
            return ""  # a request of /v1 has no way to name one
        given = request.view.get("options")
        given = given if isinstance(given, Mapping) else {}
        named = [f"{key}={json.dumps(given[key])}" for key in LOAD_OPTIONS if given.get(key) is not None]
        if request.view.get("shift") is False:  # true is what it is without
            named.append("shift=false")
        return " ".join(named)

    # --- state ---

    def health(self) -> HttpCall:
        return self.get("/api/version")

    def read_health(self, reply: HttpReply) -> str:
        data = reply.json()
        told = isinstance(data, dict) and isinstance(data.get("version"), str)
        return Health.UP if reply.status == 200 and told else Health.DOWN

    def models(self) -> HttpCall:
        return self.get("/api/tags")

    def read_models(self, reply: HttpReply) -> dict[str, Any] | None:
        return openai_models(reply)

    def capacity_calls(self, replies: Mapping[str, HttpReply | None]) -> Sequence[tuple[str, HttpCall]]:
        if "ps" not in replies:
            return (("ps", self.get("/api/ps")), ("version", self.health()))
        names = [model.name for model in loaded_of(replies["ps"])[:SHOWN_MAX]]
        asked = [(f"show {name}", self._show(name)) for name in names if f"show {name}" not in replies]
        if asked:
            return asked
        return [
            (f"layers {name}", self._show(name, verbose=True))
            for name in names
            if f"layers {name}" not in replies and needs_verbose(replies[f"show {name}"])
        ]

    def read_capacity(self, replies: Mapping[str, HttpReply | None], query: CapacityQuery) -> CapacityReport:
        notes = CapacityNotes(query)
        loaded = loaded_of(replies.get("ps"))
        wanted = query.seats if query.seats is not None else self.seats
        seats = SEATS if wanted is None else wanted
        if wanted is None:
            notes.add(
                f"Ollama does not tell OLLAMA_NUM_PARALLEL; assuming its default, {seats} (set backend.seats to the "
                "same number if you changed it)"
            )
        known = [model.context for model in loaded if model.context]
        context = smallest(max(known, default=CONTEXT_DEFAULT), query.context_tokens) or CONTEXT_DEFAULT
        if loaded:
            source = f"/api/ps: {', '.join(pairs_of(loaded))}"
            for model in loaded[:SHOWN_MAX]:
                self._describe(model, seats, replies, notes)
        else:
            source = f"no model is loaded; assuming {context} tokens of context"
            notes.add("Ollama tells the context of a model once it is loaded; asked again then")
        if query.context_tokens is None:
            notes.add(
                "the context depends on model and request (num_ctx), so KVStream refuses no prompt for its length; set "
                "backend.context_tokens to have it refused instead of silently cut by Ollama"
            )
        pages = query.pages if query.pages is not None else notes.pages_of(seats * context)
        return notes.report(
            mode=PoolMode.SPLIT,
            seats=seats,
            pages=pages,
            request_tokens_max=context,
            context_varies=query.context_tokens is None,
            source=source,
            instance=_version(replies.get("version")),
            process=fingerprint(loaded),
            settled=bool(loaded),
        )

    def process(self) -> HttpCall | None:
        return self.get("/api/ps")

    def read_process(self, reply: HttpReply) -> str:
        return fingerprint(loaded_of(reply))

    def _show(self, model: str, *, verbose: bool = False) -> HttpCall:
        body = {"model": model, "verbose": True} if verbose else {"model": model}
        return HttpCall("POST", "/api/show", self.headers((), "application/json"), dumps(body))

    def _describe(
        self, model: Loaded, seats: int, replies: Mapping[str, HttpReply | None], notes: CapacityNotes
    ) -> None:
        shape = geometry_of(replies.get(f"show {model.name}")) or geometry_of(replies.get(f"layers {model.name}"))
        if shape is not None:
            notes.add(geometry_note(model, shape, seats))


def _limited(view: Mapping[str, Any], tokens_max: int) -> dict[str, Any]:
    """The answer's limit, never above what the client asked for itself."""
    options = view.get("options")
    options = dict(options) if isinstance(options, Mapping) else {}
    given = options.get("num_predict")
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given <= tokens_max:
        return {}
    return {"options": {**options, "num_predict": tokens_max}}


def _version(reply: HttpReply | None) -> str:
    data = reply.json() if reply is not None else None
    version = data.get("version") if isinstance(data, dict) else None
    return f"ollama {version}" if isinstance(version, str) else "ollama"
