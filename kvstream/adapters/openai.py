"""Any runtime that speaks the OpenAI API, vLLM in particular: the adapter to fall back on."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar

from attrs import field, frozen

from ..core.types import PoolMode
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
from .bodies import ABSENT, edit
from .capacity import PAGES_DEFAULT, SEATS_DEFAULT, CapacityNotes, smallest
from .decode import open_assembler, open_decoder
from .failure import failed_reply
from .framing import EVENT_BYTES_MAX
from .metrics import samples_of
from .routes import OPENAI_ROUTES, route_of
from .slot_calls import SlotCalls

VLLM_SEATS_DEFAULT = 256
"""vLLM pages and preempts by itself and does not tell ``--max-num-seqs``; this is its usual default."""


# What must never travel, whatever the gateway's allow-list says: our own framing, hop-by-hop headers, what belongs to
# the client's browser, and X-Conversation-Id, which makes llama-server ignore that we hung up (case 6).
HEADERS_DROPPED = frozenset(
    {
        "host",
        "cookie",
        "origin",
        "referer",
        "content-length",
        "content-type",
        "content-encoding",
        "accept",
        "accept-encoding",
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "expect",
        "x-conversation-id",
    }
)
_KEY_HEADERS = frozenset({"authorization", "x-api-key"})


def root_of(base_url: str) -> str:
    """The URL that ``/v1/...`` and ``/health`` hang from. ``http://h:1/v1/`` and ``http://h:1`` mean the same."""
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


@frozen
class OpenAIBackend:
    """``seats`` and ``pages`` are what the operator knows about a runtime that does not tell."""

    kind: ClassVar[str] = "openai"

    base_url: str = field(converter=root_of)
    model: str = ""
    api_key: str = field(default="", repr=False)
    seats: int | None = None
    event_bytes_max: int = EVENT_BYTES_MAX

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(routes=OPENAI_ROUTES, loads_on_demand=True)

    @property
    def slots(self) -> SlotCalls | None:
        return None

    # --- requests ---

    def refusal(self, request: ProxyRequest) -> Failed | None:
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
        stream = stream and route_of(request.route).streams
        changes = self.changes(request, stream=stream, include_usage=include_usage, slot=slot)
        if tokens_max is not None:
            changes.update(_limited(route_of(request.route).limits, request.view, tokens_max))
        body = edit(request.body, request.view, changes)
        accept = "text/event-stream" if stream else "application/json"
        return HttpCall("POST", request.route, self.headers(request.headers, accept), body)

    def changes(self, request: ProxyRequest, *, stream: bool, include_usage: bool, slot: int | None) -> dict[str, Any]:
        """The fields that this runtime must see and the client did not send so. There is no slot to choose here."""
        view, route = request.view, route_of(request.route)
        changes: dict[str, Any] = {}
        if self.model and not view.get("model"):
            changes["model"] = self.model
        if not route.streams:
            return changes
        if stream or view.get("stream"):
            changes["stream"] = stream
        if not route.usage_on_request:
            return changes
        if not stream or not include_usage:
            changes["stream_options"] = ABSENT
        elif not request.stream or self.capabilities.usage_injected:
            options = view.get("stream_options")
            if options is None:
                changes["stream_options"] = {"include_usage": True}
            elif isinstance(options, Mapping):  # anything else is the client's mistake, for the runtime to name
                changes["stream_options"] = {**options, "include_usage": True}
        return changes

    def headers(self, forwarded: tuple[tuple[str, str], ...] = (), accept: str = "") -> tuple[tuple[str, str], ...]:
        """Headers of a call. Our own key replaces the client's, which may be a key for KVStream."""
        headers = [(name, value) for name, value in forwarded if name.lower() not in HEADERS_DROPPED]
        if self.api_key:
            headers = [(name, value) for name, value in headers if name.lower() not in _KEY_HEADERS]
            headers.append(("authorization", f"Bearer {self.api_key}"))
        if accept:
            headers += [("content-type", "application/json"), ("accept", accept)]
        return tuple(headers)

    def get(self, path: str) -> HttpCall:
        return HttpCall("GET", path, self.headers())

    def decoder(self, request: ProxyRequest, *, content_type: str = "") -> Decoder:
        return open_decoder(request, content_type, self.event_bytes_max)

    def assembler(self, request: ProxyRequest) -> AnswerAssembler:
        return open_assembler(request)

    def error(self, reply: HttpReply) -> Failed:
        return failed_reply(reply)

    def plain_call(self, path: str, body: bytes = b"") -> HttpCall:
        return HttpCall("POST", path, self.headers((), "application/json"), body) if body else self.get(path)

    def load_key(self, request: ProxyRequest) -> str:
        return request.model or self.model

    def load_options(self, request: ProxyRequest) -> str:
        return ""

    # --- state ---

    def health(self) -> HttpCall:
        return self.get("/v1/models")

    def read_health(self, reply: HttpReply) -> str:
        if reply.status < 400:
            # LM Studio and gateways answer unknown paths with 200 and an error object.
            return Health.UP if failed_reply(reply).kind != "model_loading" else Health.LOADING
        failure = failed_reply(reply)
        if failure.kind == "model_loading":
            return Health.LOADING
        # A generic backend need not have /v1/models: any answer that is not a 5xx shows that it lives.
        return Health.DOWN if reply.status >= 500 or failure.kind == "backend_auth" else Health.UP

    def models(self) -> HttpCall:
        return self.get("/v1/models")

    def read_models(self, reply: HttpReply) -> dict[str, Any] | None:
        listing = reply.json() if reply.status == 200 else None
        return listing if isinstance(listing, dict) and isinstance(listing.get("data"), list) else None

    def capacity_calls(self, replies: Mapping[str, HttpReply | None]) -> Sequence[tuple[str, HttpCall]]:
        return () if "models" in replies else (("models", self.models()), ("metrics", self.get("/metrics")))

    def read_capacity(self, replies: Mapping[str, HttpReply | None], query: CapacityQuery) -> CapacityReport:
        notes = CapacityNotes(query)
        model_tokens = context_of(replies.get("models"), self.model)
        context = smallest(model_tokens, query.context_tokens)
        if model_tokens is not None and query.context_tokens is not None and query.context_tokens > model_tokens:
            notes.add(f"context_tokens: {query.context_tokens} configured, but the model takes {model_tokens}")
        blocks = VllmBlocks.read(replies.get("metrics"))
        wanted = query.seats if query.seats is not None else self.seats
        if blocks is not None and blocks.tokens:
            return self._vllm(blocks, wanted, context, notes)
        seats = notes.narrowed(wanted, None, "seats", SEATS_DEFAULT)
        if wanted is None:
            notes.add(f"the runtime does not say how many requests it runs at once; assuming {seats} (set seats)")
        if query.pages is not None:
            pages, source = query.pages, "configured"
        elif context is not None:
            pages, source = notes.pages_of(seats * context), f"{seats} seats x {context} tokens of context"
        else:
            pages, source = PAGES_DEFAULT, "default"
            notes.add(f"the runtime does not tell its KV memory; assuming {pages} pages of {query.page_tokens} tokens")
        return notes.report(mode=PoolMode.UNKNOWN, seats=seats, pages=pages, request_tokens_max=context, source=source)

    def _vllm(
        self, blocks: VllmBlocks, wanted: int | None, context: int | None, notes: CapacityNotes
    ) -> CapacityReport:
        real = notes.pages_of(blocks.tokens)
        if blocks.block_tokens != notes.query.page_tokens:
            notes.add(
                f"pages have {notes.query.page_tokens} tokens and vLLM's blocks {blocks.block_tokens}: "
                f"{blocks.blocks} blocks counted as {real} pages"
            )
        if blocks.waiting:
            notes.add(f"{blocks.waiting} requests already wait inside vLLM: somebody uses it past KVStream")
        if wanted is None:
            notes.add(f"vLLM does not tell --max-num-seqs; assuming {VLLM_SEATS_DEFAULT} seats (set seats)")
        return notes.report(
            mode=PoolMode.UNKNOWN,
            seats=wanted if wanted is not None else VLLM_SEATS_DEFAULT,
            pages=notes.narrowed(notes.query.pages, real, "pages", PAGES_DEFAULT),
            request_tokens_max=context,
            source=f"vllm:cache_config_info: {blocks.blocks} blocks of {blocks.block_tokens} tokens",
            shares_prefix=True,
            instance=blocks.instance,
        )

    def process(self) -> HttpCall | None:
        return None

    def read_process(self, reply: HttpReply) -> str:
        return ""

    def busy(self) -> HttpCall | None:
        return None

    def read_busy(self, reply: HttpReply) -> frozenset[tuple[int, int]] | None:
        return None

    def read_work(self, reply: HttpReply) -> Hashable | None:
        return None

    def count_calls(self, request: ProxyRequest) -> HttpCall | tuple[int, ...] | None:
        return None

    def read_count(self, request: ProxyRequest, reply: HttpReply) -> HttpCall | tuple[int, ...] | int | None:
        return None


@frozen
class VllmBlocks:
    """vLLM's KV pool as its metrics tell it. Data-parallel engines have a pool each; they are summed."""

    blocks: int
    block_tokens: int
    waiting: int
    instance: str

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_tokens

    @classmethod
    def read(cls, reply: HttpReply | None) -> VllmBlocks | None:
        """From ``/metrics``, or None when this is no vLLM or it has not sized its pool yet."""
        if reply is None or reply.status != 200:
            return None
        blocks = block_tokens = 0
        waiting = 0.0
        instance = ""
        for sample in samples_of(reply.body, ("vllm:", "process_start_time_seconds")):
            if sample.name == "vllm:cache_config_info":
                count, size = sample.labels.get("num_gpu_blocks", ""), sample.labels.get("block_size", "")
                if count.isdecimal() and size.isdecimal() and len(count) + len(size) < 30:
                    blocks, block_tokens = blocks + int(count), int(size)
            elif sample.name == "vllm:num_requests_waiting":
                waiting += sample.value
            elif sample.name == "process_start_time_seconds":
                instance = f"vllm@{sample.value:.2f}"
        return cls(blocks, block_tokens, int(waiting), instance) if blocks and block_tokens else None


def context_of(reply: HttpReply | None, model: str) -> int | None:
    """``max_model_len`` of the model in ``/v1/models``; of the first one that has it when no model is configured."""
    data = reply.json() if reply is not None and reply.status == 200 else None
    rows = data.get("data") if isinstance(data, dict) else None
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict) and (not model or row.get("id") == model):
            length = row.get("max_model_len")
            if isinstance(length, int) and length > 0:
                return length
    return None


def _limited(keys: tuple[str, ...], view: Mapping[str, Any], tokens_max: int) -> dict[str, Any]:
    """The answer's limit, never above what the client asked for itself."""
    named = [key for key in keys if isinstance(view.get(key), int) and not isinstance(view[key], bool)]
    if not named:
        return {keys[0]: tokens_max} if keys else {}
    return {key: tokens_max for key in named if not 0 <= view[key] <= tokens_max}
