"""What the parts of the gateway need of each other, as protocols, so that tests can stand in for each.

``Upstream`` performs calls; its real implementation is ``gateway.upstream.HttpUpstream`` (httpx), its fake an
in-memory runtime that runs on Trio's virtual clock. ``Answer`` is a request in progress as the client's task sees it:
an engine's ``Stream``, or a subscription to one that several clients share. ``OpenAnswer`` is how it is had; what
stands between the proxy and the engines (router, coalescing) takes one and is one.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

from ..adapters.base import Adapter, HttpCall, HttpReply, ProxyRequest, UpstreamEvent, UsageNumbers
from ..core.types import CountSource

if TYPE_CHECKING:
    from .request import Incoming


class UpstreamResponse(Protocol):
    """An open answer. ``headers`` have lower-case names."""

    status: int
    headers: Mapping[str, str]

    async def receive(self) -> bytes:
        """The next bytes of the body; ``b""`` once it has ended properly.

        *Errors*: ``StreamTruncatedError`` when the connection broke before the end of the body.
        *Cancellation*: a cancelled ``receive`` leaves the response usable only for closing.
        """
        ...


class Upstream(Protocol):
    """Performs HTTP calls to one backend."""

    async def request(self, call: HttpCall, *, timeout_s: float) -> HttpReply:
        """A small call, its answer read whole. Idempotent GETs are retried once on a stale connection.

        *Errors*: ``BackendUnavailableError`` (refused, reset), ``BackendTimeoutError``.
        """
        ...

    def open(self, call: HttpCall,
             content: AsyncIterable[bytes] | None = None) -> AbstractAsyncContextManager[UpstreamResponse]:
        """Send a call and hand out its answer as soon as the headers are there. ``content`` is a body that is sent as
        it comes, instead of the call's own; what it raises leaves here as it is.

        *Resource handling*: leaving the block closes the connection unless the body was read to its end.
        *Errors*: ``BackendUnavailableError``, ``BackendTimeoutError`` (connect only: the wait for headers is bounded by
        the caller, since a runtime may send them only when a slot starts).
        """
        ...


class Answer(Protocol):
    """A request in progress, for the task that talks to its client. Read it with :meth:`get`; the rest may be looked
    at at any time and is final once ``get`` returned ``[]`` or raised.

    ``request`` and ``adapter`` are of the lane that serves it, which is certain with the first events. ``tokens`` are
    the answer pieces so far, ``usage`` is what the runtime reported, ``last_data`` the last parsed frame, for a frame
    of our own in its likeness. ``truncated``: we ended it for lack of pages, as if it had reached a token limit.
    ``headers`` are more response headers, which tell how it is served. ``granted``: when it got its seat, by Trio's
    clock. ``error_forwarded``: the client has had the runtime's own error frame; set by the reader.
    """

    @property
    def request(self) -> ProxyRequest: ...
    @property
    def adapter(self) -> Adapter: ...
    @property
    def count_source(self) -> CountSource: ...
    @property
    def tokens_prompt(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def usage(self) -> UsageNumbers | None: ...
    @property
    def truncated(self) -> bool: ...
    @property
    def last_data(self) -> object: ...
    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]: ...
    @property
    def granted(self) -> float | None: ...

    error_forwarded: bool

    async def get(self) -> list[UpstreamEvent]:
        """All events that are there, waiting for the first; ``[]`` at the end.

        *Errors*: any ``KVStreamError`` the request ended with. *Cancellation*: safe; nothing is lost.
        """
        ...


class Backend(Protocol):
    """Where a call that needs no seat goes."""

    @property
    def adapter(self) -> Adapter: ...
    @property
    def upstream(self) -> Upstream: ...


PickBackend = Callable[["Incoming"], Awaitable[tuple[Backend, ProxyRequest]]]
"""The backend for a call that needs no seat, and the request as that backend gets it. *Errors*: ``KVStreamError``, when
there is none."""

OpenAnswer = Callable[["Incoming", str], AbstractAsyncContextManager[Answer]]
"""``open_answer(incoming, request_id)``. Leaving the block, however, leaves the queue or stops the runtime (unless
others still read the same answer). *Errors*: ``KVStreamError`` at entry, when there is nobody to serve it."""
