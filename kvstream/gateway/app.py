"""The HTTP surface: model routes to the proxy, everything else to a small Quart application.

What stands before both: the Host check on loopback binds. A web page can make a browser send requests to 127.0.0.1
under a name of its own (DNS rebinding); such a request carries that name in its Host header and is turned away.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import trio
from attrs import frozen
from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException
from werkzeug.routing import PathConverter

from .. import __version__
from ..adapters.routes import ROUTES
from ..errors import (
    ForbiddenHostError,
    InvalidRequestError,
    KVStreamError,
    LoopError,
    MethodNotAllowedError,
    RouteNotFoundError,
    RouteUnsupportedError,
)
from .access import Access, AccessSettings, challenge, is_loopback
from .app_ollama import add_ollama_routes
from .asgi import BodyReceiver, Message, Receive, Scope, Send, retry_header, send_empty, send_error, send_refusal
from .dialects import dialect_of
from .listing import model_entry, model_listing
from .metrics import CONTENT_TYPE, Metrics
from .proxy import Proxy
from .request import HOP_HEADER
from .router import Router
from .status import ready_json, status_json

log = logging.getLogger("kvstream.app")

_HOST = re.compile(r"(?:\[(?P<v6>[^\]]*)\]|(?P<name>[^:\[\]]*))(?::[0-9]*)?")


@frozen
class AppSettings:
    """``hosts`` are the accepted Host names, lower case; None accepts any (not a loopback bind). ``header_bytes_max``
    bounds the request head. ``hop`` is our own id: a request that carries it was sent by ourselves."""

    hosts: frozenset[str] | None
    header_bytes_max: int = 64 * 2**10
    hop: str = ""


class App:
    """The ASGI application. ``active`` counts requests in hand, for the drain."""

    def __init__(self, router: Router, proxy: Proxy, metrics: Metrics, settings: AppSettings,
                 extra_status: Callable[[], Mapping[str, Any]], access: Access | None = None) -> None:
        self.access = access or Access()
        self._metrics = metrics
        self._router = router
        self._proxy = proxy
        self._settings = settings
        self._quart = build_quart(router, metrics, extra_status)
        self.active = 0
        self._idle = trio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close"})  # before it was accepted: a 403
            return
        self.active += 1
        answer = _Watched(self.access.wrap(scope, send))
        try:
            await self._dispatch(scope, receive, answer)
        except Exception:
            # hypercorn would answer with an empty body and say nothing
            log.exception("bug while serving %s", scope["path"][:200])
            if not answer.started:
                error = KVStreamError("internal error in the gateway; its log has the details")
                await send_error(send, error, (), dialect_of(scope["path"]).envelope(error))
        finally:
            self.active -= 1
            if not self.active:
                self._idle.set()

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = scope["path"]
        try:
            self._check_head(scope)
            self._check_host(scope)
            allowed = self.access.preflight(scope)
            if allowed is not None:
                await send_empty(send, 204, allowed)
                return
            self._check_hops(scope)
            scope = self.access.admit(scope)
            if route not in self._router.routes:
                if route in ROUTES and scope["method"] == "POST":
                    raise self._unserved(route)
                await self._quart(scope, receive, send)  # type: ignore[arg-type]
                return
            if scope["method"] != "POST":
                raise MethodNotAllowedError(f"{route} takes POST, not {scope['method']}")
            self.access.spend(scope)
        except KVStreamError as error:
            if route in self._router.routes:
                self._metrics.turned_away(route, error)
            headers = challenge(error, scope)
            await send_refusal(send, BodyReceiver(receive), error, headers, dialect_of(route).envelope(error))
            return
        await self._proxy(route, scope, receive, send)

    def _unserved(self, route: str) -> RouteUnsupportedError:
        """Which backends there are, and what they serve instead."""
        kinds = ", ".join(sorted({lane.engine.adapter.kind for lane in self._router.lanes}))
        served = ", ".join(sorted(path for path in self._router.routes if path.startswith("/v1/")))
        return RouteUnsupportedError(
            f"{route} is not served by the backend ({kinds}); it serves {served}. Put a backend behind KVStream that "
            "has this route")

    def _check_head(self, scope: Scope) -> None:
        """hypercorn's own bound only counts a head that is still incomplete after a read of 64 KiB."""
        target = len(scope["raw_path"]) + len(scope["query_string"])
        size = target + sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size > self._settings.header_bytes_max:
            raise InvalidRequestError(
                f"the request head has at least {size} bytes; server.header_bytes_max allows "
                f"{self._settings.header_bytes_max} bytes", status=431)

    def _check_host(self, scope: Scope) -> None:
        if self._settings.hosts is None:
            return
        values = [value for name, value in scope["headers"] if name == b"host"]
        if len(values) == 1 and host_name(values[0].decode("latin-1")) in self._settings.hosts:
            return
        shown = ", ".join(v.decode("latin-1")[:80] for v in values) or "none"
        raise ForbiddenHostError(
            f"Host {shown!r} is not served here; add the name to server.allowed_hosts if it is yours")

    def _check_hops(self, scope: Scope) -> None:
        own = self._settings.hop.encode()
        for name, value in scope["headers"]:
            if own and name == HOP_HEADER.encode() and own in value.replace(b",", b" ").split():
                log.error("a request came back to us: is backend.base_url the address of this KVStream?")
                raise LoopError("this request has been here before: a KVStream's backend.base_url points to itself")

    def reconfigure(self, settings: AppSettings, access: AccessSettings) -> None:
        """For requests that come from now on."""
        self._settings = settings
        self.access.replace(access)

    async def wait_idle(self) -> None:
        """Wait until no request is in hand."""
        while self.active:
            self._idle = trio.Event()
            await self._idle.wait()


class _Watched:
    """``send``, and whether an answer has begun.

    The last message is shielded. While hypercorn handles it, it tells the app that the exchange is over, on which the
    app's tasks are cancelled, this one too, and hypercorn would not come to start its timer for the idle connection.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def __call__(self, message: Message) -> None:
        self.started = True
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        with trio.CancelScope(shield=last):  # bounded: see ClientStream.send_all
            await self._send(message)


def host_name(host: str) -> str:
    """The name part of a Host header, lower case: without port, brackets and a trailing dot; "" if malformed."""
    found = _HOST.fullmatch(host.strip().lower())
    return (found["v6"] or found["name"].removesuffix(".")) if found else ""


def accepted_hosts(bind: str, allowed: tuple[str, ...]) -> frozenset[str] | None:
    """Which Host names a bind accepts: the loopback names, its own and ``allowed``; None for any, which is what an
    address that is not loopback accepts while nobody names some. One that names some is as a rule a container, whose
    0.0.0.0 is published on the host's loopback address, where web pages are to be kept out all the same."""
    if not is_loopback(bind) and not allowed:
        return None
    return frozenset({"localhost", "127.0.0.1", "::1", bind.lower().strip("[]"), *(host_name(h) for h in allowed)})


class _ModelName(PathConverter):
    """Anything: llama.cpp without an alias names its model by the path of its file, which begins with a slash."""

    regex = ".+"
    part_isolating = False  # werkzeug guesses it from the slashes in the regex


def build_quart(router: Router, metrics: Metrics, extra_status: Callable[[], Mapping[str, Any]]) -> QuartTrio:
    """The routes that are not model calls. They never queue."""
    app = QuartTrio("kvstream")
    app.config["MAX_CONTENT_LENGTH"] = 65536
    app.url_map.merge_slashes = False  # a double slash in a model's name is not to be redirected away
    app.url_map.converters["model"] = _ModelName

    @app.get("/health")
    async def health() -> Response:
        return reply({"status": "ok", "version": __version__})

    @app.get("/ready")
    async def ready() -> Response:
        value, good = ready_json(router.lanes)
        response = reply(value, 200 if good else 503)
        if not good:
            response.headers["retry-after"] = "2"
        return response

    @app.get("/status")
    async def status() -> Response:
        shared = {"sharing": metrics.sharing()}
        return reply(status_json(router.lanes, trio.current_time()) | shared | dict(extra_status()))

    @app.get("/metrics")
    async def exposition() -> Response:
        return Response(metrics.exposition(), content_type=CONTENT_TYPE)

    @app.get("/v1/models")
    async def list_models() -> Response:
        return reply(await model_listing(router.lanes))

    @app.get("/v1/models/<model:model>")
    async def one_model(model: str) -> Response:
        return reply(await model_entry(router.lanes, model))

    @app.errorhandler(HTTPException)
    async def http_error(error: HTTPException) -> Response:
        return error_reply(http_failure(error, router))

    @app.errorhandler(KVStreamError)
    async def failure(error: KVStreamError) -> Response:
        return error_reply(error)

    add_ollama_routes(app, router)
    return app


def http_failure(error: HTTPException, router: Router) -> KVStreamError:
    """An error of the framework as one of ours."""
    if error.code == 404:
        return RouteNotFoundError(f"no such route here; {router.what_there_is}")
    if error.code == 405:
        return MethodNotAllowedError("this route does not take that method")
    return KVStreamError(error.description or "request failed", status=error.code or 500)


def reply(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value), status, {"X-KVStream-Version": __version__}, content_type="application/json")


def error_reply(error: KVStreamError) -> Response:
    response = reply(dialect_of(request.path).envelope(error), error.status)
    for name, value in retry_header(error):
        response.headers[name.decode()] = value.decode()
    return response
