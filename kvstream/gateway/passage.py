"""Calls that need no seat: tokenizing, counting, rendering. They are passed on at once, a few at a time.

They compute over text and touch no KV memory, so the scheduler has nothing to say about them. But a runtime answers
them on its own threads, and a client that sends thousands must not take those from everybody: hence a plain limiter,
bounded in places, in waiters and in time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from ..adapters.failure import unserved
from ..errors import BackendProtocolError, KVStreamError, QueueFullError, QueueTimeoutError
from .asgi import Headers, Send, send_json
from .failures import error_of
from .logs import log_passed, log_turned_away
from .metrics import Metrics
from .ports import PickBackend
from .request import Incoming

LIGHT_PLACES = 16  # llama.cpp answers these on a few threads; a tokenize call takes well under a millisecond
LIGHT_WAITING_MAX = 256
LIGHT_WAIT_S_MAX = 30.0
LIGHT_TIMEOUT_S = 60.0


class Turnstile:
    """At most ``places`` at once; of those who wait at most ``waiting_max``, each for at most ``wait_s_max``."""

    def __init__(self, places: int, *, waiting_max: int, wait_s_max: float, what: str) -> None:
        self.limiter = trio.CapacityLimiter(places)
        self._waiting_max = waiting_max
        self._wait_s_max = wait_s_max
        self._what = what

    @asynccontextmanager
    async def pass_through(self) -> AsyncIterator[None]:
        """Hold a place.

        *Errors*: ``QueueFullError``, ``QueueTimeoutError``. *Cancellation*: safe; the place is given back.
        """
        if self.limiter.statistics().tasks_waiting >= self._waiting_max:
            raise QueueFullError(f"too many {self._what} wait already; try again later", retry_after_s=5)
        token = object()
        with trio.move_on_after(self._wait_s_max) as waited:
            await self.limiter.acquire_on_behalf_of(token)
        if waited.cancelled_caught:
            raise QueueTimeoutError(
                f"no place for {self._what} became free within {self._wait_s_max:g} s; try again later",
                retry_after_s=5)
        try:
            yield
        finally:
            self.limiter.release_on_behalf_of(token)


class Passage:
    """Passes light calls on. ``pick`` says to which backend."""

    def __init__(self, pick: PickBackend, metrics: Metrics) -> None:
        self._pick = pick
        self._metrics = metrics
        self._turnstile = Turnstile(
            LIGHT_PLACES, waiting_max=LIGHT_WAITING_MAX, wait_s_max=LIGHT_WAIT_S_MAX, what="calls that need no seat")

    async def run(self, incoming: Incoming, send: Send, headers: Headers, request_id: str) -> None:
        """Answer one call. *Errors*: ``KVStreamError``, booked already. *Cancellation*: closes the call upstream."""
        request, began = incoming.proxy, trio.current_time()
        try:
            async with self._turnstile.pass_through():
                backend, request = await self._pick(incoming)
                call = backend.adapter.encode(request, stream=False)
                reply = await backend.upstream.request(call, timeout_s=LIGHT_TIMEOUT_S)
            if not 200 <= reply.status < 300:
                raise error_of(unserved(backend.adapter.error(reply), backend.adapter.kind, request.route))
            if not isinstance(answer := reply.json(), dict):  # a page of HTML, an empty or a broken off body
                raise BackendProtocolError("the backend answered 200 with a body that is no JSON object")
            if answer.get("error"):
                raise error_of(unserved(backend.adapter.error(reply), backend.adapter.kind, request.route))
        except KVStreamError as error:
            log_turned_away(request_id, request.route, error)
            self._metrics.turned_away(request.route, error)
            raise
        except trio.Cancelled:  # the client left; it has its line and its count too
            log_passed(request_id, request.route, trio.current_time() - began, "cancelled")
            self._metrics.passed(request.route, "cancelled")
            raise
        log_passed(request_id, request.route, trio.current_time() - began)
        self._metrics.passed(request.route)
        await send_json(send, reply.status, reply.body, headers)
