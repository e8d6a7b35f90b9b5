"""The two things the engine needs from the outside world, as protocols, so that tests can stand in for both.

``Upstream`` performs calls; its real implementation is ``gateway.upstream.HttpUpstream`` (httpx), its fake an
in-memory runtime that runs on Trio's virtual clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from ..adapters.base import HttpCall, HttpReply


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

    def open(self, call: HttpCall) -> AbstractAsyncContextManager[UpstreamResponse]:
        """Send a call and hand out its answer as soon as the headers are there.

        *Resource handling*: leaving the block closes the connection unless the body was read to its end.
        *Errors*: ``BackendUnavailableError``, ``BackendTimeoutError`` (connect only: the wait for headers is bounded by
        the caller, since a runtime may send them only when a slot starts).
        """
        ...
