"""The contract of a backend adapter: a translator between KVStream and one kind of runtime.

An adapter is pure. It turns what KVStream wants into :class:`HttpCall` values and bytes that came back into events; it
opens no socket, awaits nothing and keeps no clock, so writing one needs neither Trio nor an HTTP library. Differences
between runtimes are data (:class:`Capabilities`), not subclasses that the gateway asks about.

How a call travels::

    ProxyRequest --adapter.encode()--> HttpCall --gateway.upstream--> bytes --Decoder.feed()--> events --> client
                                                                               (raw frame kept, forwarded as it came)
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Union

from attrs import field, frozen

from ..core.types import Limits

if TYPE_CHECKING:
    from .slot_calls import SlotCalls

# --- the request as the gateway read it -------------------------------------------------------------------------------


@frozen
class ProxyRequest:
    """A client's request, read once.

    ``route`` is the canonical path (``/v1/chat/completions``). ``body`` is the client's own bytes, ``view`` the parsed
    JSON object (never mutated). ``stream`` and ``include_usage`` say what the *client* asked for. ``headers`` holds the
    few headers that may be forwarded, names in lower case. ``model`` is the name the client used.
    """

    route: str
    body: bytes = field(repr=lambda b: f"{len(b)} bytes")
    view: Mapping[str, Any] = field(repr=False)
    model: str = ""
    stream: bool = False
    include_usage: bool = False
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)


# --- calls ------------------------------------------------------------------------------------------------------------


@frozen
class HttpCall:
    """One HTTP request to the runtime. ``path`` is relative to the backend's base URL and starts with a slash."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    body: bytes = field(default=b"", repr=lambda b: f"{len(b)} bytes")


@frozen
class HttpReply:
    """A small answer, read whole: status, lower-case headers, body."""

    status: int
    headers: Mapping[str, str] = field(factory=dict)
    body: bytes = b""

    def json(self) -> Any:
        """The body as JSON, or None when it is not JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None


# --- upstream events --------------------------------------------------------------------------------------------------


@frozen
class UsageNumbers:
    """Token counts of one request. ``cached`` is None when the runtime does not report it. ``prompt_s``: how long it
    computed over the prompt's other tokens, None where it does not say; a measurement, so equal counts are equal."""

    prompt: int
    completion: int
    cached: int | None = None
    prompt_s: float | None = field(default=None, eq=False)


@frozen
class Delta:
    """A frame with answer content, or a frame whose content we need not understand.

    ``raw`` is the frame as it came, line endings included. ``tokens`` counts the pieces of generated output in it (0
    for a role-only or unknown frame; a lower bound where a runtime packs several tokens). ``text`` is the answer text
    of choice 0. ``data`` is the parsed object, for assembling a non-stream answer.
    """

    raw: bytes
    data: Any = field(default=None, repr=False)
    tokens: int = 0
    text: str = ""


@frozen
class Progress:
    """Prompt processing progress. ``raw`` is empty when the frame was asked for by us, not by the client."""

    raw: bytes
    total: int
    cached: int
    processed: int


@frozen
class Usage:
    """Token counts. ``standalone`` marks a frame that carries nothing else (``choices: []``): such a frame is dropped
    when the client did not ask for it. Otherwise ``raw`` is empty and the frame travelled with another event."""

    raw: bytes
    numbers: UsageNumbers
    data: Any = field(default=None, repr=False)
    standalone: bool = False


@frozen
class Finished:
    """A choice gave its ``finish_reason``. ``raw`` is empty: the frame travelled as a Delta."""

    reason: str
    index: int = 0


@frozen
class Done:
    """The end marker. ``raw`` is what the client gets; ``synthesised`` when the runtime omitted it after a proper
    finish; ``unfinished`` when it sent the marker without any finish_reason (accepted, but flagged)."""

    raw: bytes
    synthesised: bool = False
    unfinished: bool = False


@frozen
class Ping:
    """A comment or empty frame: proof of life of the connection, never of progress. ``raw`` is there when it is an
    event that the API's clients know; a comment is not forwarded."""

    raw: bytes = b""


@frozen
class Failed:
    """The runtime, or the stream itself, failed. ``raw`` is the runtime's own error frame, if it sent one.

    ``kind`` is a code of ``kvstream.errors``: ``context_length_exceeded``, ``upstream_error``,
    ``upstream_stream_truncated``, ``backend_protocol``, ``model_not_found``, ``model_loading``, ``overloaded``,
    ``backend_auth``, ``upstream_rejected``, ``route_not_supported``, ``invalid_request``. ``retry_after_s`` is what a
    refusal by status asked for, None if nothing.
    """

    kind: str
    message: str
    status: int = 502
    raw: bytes = b""
    retry_after_s: float | None = None


UpstreamEvent = Union[Delta, Progress, Usage, Finished, Done, Ping, Failed]


class Decoder(Protocol):
    """Turns the bytes of one response body into events. Any split of the bytes gives the same events."""

    def feed(self, data: bytes) -> list[UpstreamEvent]:
        """Take more bytes. Never raises: a frame above the size cap yields ``Failed(backend_protocol)``."""
        ...

    def finish(self) -> list[UpstreamEvent]:
        """The body ended. Before a proper end this yields ``Failed(upstream_stream_truncated)``."""
        ...


class AnswerAssembler(Protocol):
    """Puts the events of a stream together into the answer of a client that did not ask for a stream."""

    def feed(self, event: UpstreamEvent) -> None: ...

    def result(self) -> Any:
        """The answer as the runtime itself would have given it in one piece: an object, or a list of them where the
        route has such answers."""
        ...


# --- what a backend is and can ----------------------------------------------------------------------------------------


@frozen
class Capabilities:
    """What a kind of backend can do, as data.

    ``exact_count``: it can render a chat template and tokenize. ``slots_visible``: it can say whether it is busy after
    a cancel, so seats drain. ``usage_injected``: ask for ``stream_options.include_usage`` on streams whose client did
    not. ``hard_inject``: KV state can be saved and restored. ``cached_reported``: it tells how many prompt tokens came
    from its cache. ``loads_on_demand``: a request may make it load a model, so the first of a cold model goes alone.
    ``cancel``: how closing the socket frees it, ``"fast"``, ``"batch"`` or ``"none"``. ``translated``: of ``routes``,
    those that travel to it in another dialect, so that its own answer is nothing for the client. ``passed``: small
    calls of its own that are handed through without a seat. ``groups_exclude``: what two load keys name cannot be
    loaded side by side.
    """

    routes: frozenset[str]
    exact_count: bool = False
    slots_visible: bool = False
    usage_injected: bool = True
    hard_inject: bool = False
    cached_reported: bool = False
    loads_on_demand: bool = False
    cancel: str = "fast"
    translated: frozenset[str] = frozenset()
    passed: frozenset[str] = frozenset()
    groups_exclude: bool = False


class Health:
    """States of a backend as its adapter reads them from a health reply."""

    UP = "up"
    LOADING = "loading"
    SLEEPING = "sleeping"
    DOWN = "down"


@frozen
class CapacityQuery:
    """What the operator configured, to be combined with what the runtime says. None means "not set"."""

    page_tokens: int
    pages: int | None = None
    seats: int | None = None
    context_tokens: int | None = None
    host_pages: int = 0


@frozen
class CapacityReport:
    """Limits the runtime really has, already narrowed by the configuration, with every correction in words."""

    limits: Limits
    notes: tuple[str, ...] = ()
    settled: bool = True  # False: the runtime was too busy to tell; ask again when it is not
    process: str = ""  # what ``Adapter.read_process`` says of the runtime that was asked
    slot_files: bool | None = None  # whether slots can be saved to files; None: it was not asked
    instance: str = ""  # changes when the runtime restarted (build + start time), for forgetting its cache


class Adapter(Protocol):
    """One kind of runtime. ``base_url`` may have a path. Implementations are frozen attrs classes."""

    kind: str
    base_url: str
    model: str
    api_key: str

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def slots(self) -> SlotCalls | None:
        """The calls of hard inject; None where the runtime has no slots that can be saved."""
        ...

    def refusal(self, request: ProxyRequest) -> Failed | None:
        """Why this runtime can never serve the request, before it queues; None when it may."""
        ...

    def encode(
        self,
        request: ProxyRequest,
        *,
        stream: bool = True,
        slot: int | None = None,
        tokens_max: int | None = None,
        include_usage: bool = True,
    ) -> HttpCall:
        """The upstream call for a client's request.

        The client's own bytes travel on wherever possible: fields are added by splicing, an existing field is changed
        by re-serialising. ``stream`` is what upstream is asked for. ``tokens_max`` is set as a limit only when given.
        ``include_usage=False`` says that this backend refused ``stream_options``: then none is sent, not even the
        client's own.
        Forwards no cookie, no ``X-Conversation-Id``, no hop-by-hop header.
        """
        ...

    def decoder(self, request: ProxyRequest, *, content_type: str = "") -> Decoder:
        """A decoder for the answer to ``encode(request)``.

        ``content_type`` is the answer's header. With ``application/json`` the runtime ignored ``stream: true``: the
        whole object is read and, for a client that streams, re-emitted as chunks.
        """
        ...

    def assembler(self, request: ProxyRequest) -> AnswerAssembler:
        """Assembles the events of ``decoder(request)`` for a client without ``stream``."""
        ...

    def error(self, reply: HttpReply) -> Failed:
        """Translate a non-2xx reply (``runtimes.md`` section 7). Never raises."""
        ...

    def plain_call(self, path: str, body: bytes = b"") -> HttpCall:
        """A call of ``Capabilities.passed``, handed through: a GET, or with a body a POST."""
        ...

    def load_key(self, request: ProxyRequest) -> str:
        """What the runtime must have loaded to serve this request: the model, and where the operator wants requests
        grouped by them, the options whose change makes the runtime load it anew."""
        ...

    def load_options(self, request: ProxyRequest) -> str:
        """The request's own options whose change makes the runtime load the model anew; empty without any."""
        ...

    def health(self) -> HttpCall: ...

    def read_health(self, reply: HttpReply) -> str:
        """One of :class:`Health`."""
        ...

    def models(self) -> HttpCall: ...

    def read_models(self, reply: HttpReply) -> dict[str, Any] | None:
        """The models in the shape of OpenAI's list; None when the reply cannot be read."""
        ...

    def capacity_calls(self, replies: Mapping[str, HttpReply | None]) -> Sequence[tuple[str, HttpCall]]:
        """The next named calls, given the replies so far (at first none); empty when nothing more is wanted.

        Perform them, add each reply to ``replies`` under its name (None for a call that failed), ask again; at the end
        hand all replies to ``read_capacity``. A call may depend on another's reply: what must not be asked of a
        sleeping runtime is not asked.
        """
        ...

    def read_capacity(self, replies: Mapping[str, HttpReply | None], query: CapacityQuery) -> CapacityReport: ...

    def process(self) -> HttpCall | None:
        """A cheap call, safe at any time, whose answer tells a restart of the runtime; None if there is none."""
        ...

    def read_process(self, reply: HttpReply) -> str:
        """A text that is the same as long as the runtime's process lives; empty when the reply does not tell."""
        ...

    def busy(self) -> HttpCall | None:
        """A call that tells which slots work now, or None when the runtime cannot say."""
        ...

    def read_busy(self, reply: HttpReply) -> frozenset[tuple[int, int]] | None:
        """The (slot, task) pairs that are processing; None when the reply does not tell."""
        ...

    def read_work(self, reply: HttpReply) -> Hashable | None:
        """From the same reply: a value that changes whenever the runtime has computed something (read more of a
        prompt, made a token); None when the reply does not tell."""
        ...

    def count_calls(self, request: ProxyRequest) -> HttpCall | tuple[int, ...] | None:
        """First call of exact counting (rendering, or tokenizing at once).

        The ids themselves when the client sent ids; None when the prompt cannot be counted exactly.
        """
        ...

    def read_count(self, request: ProxyRequest, reply: HttpReply) -> HttpCall | tuple[int, ...] | int | None:
        """Next call, or the prompt's token ids, or their number alone, or None when counting did not work."""
        ...
