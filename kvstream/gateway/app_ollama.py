"""Ollama's small routes for Ollama's clients: its models, what is loaded, its version. They never queue.

They are there as long as a backend is one of Ollama's (``Capabilities.passed``), and go to it as they are. With
several, lists are joined (the first backend's entry of a model counts) and a question about a model goes to the first
that knows it. What changes Ollama's models (pull, create, delete ...) is not for a gateway that many may share: it is
refused in Ollama's own words, with the way to do it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from quart import Response, request
from quart_trio import QuartTrio

from ..adapters.base import HttpReply
from ..errors import (
    InvalidRequestError,
    KVStreamError,
    MethodNotAllowedError,
    RouteNotFoundError,
    RouteUnsupportedError,
)
from .engine import Engine
from .failures import error_of
from .router import Router

TIMEOUT_S = 10.0  # verbose model details are some megabytes
JOINED = ("/api/tags", "/api/ps")
CHANGING = frozenset({"pull", "push", "create", "delete", "copy", "blobs"})
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


def add_ollama_routes(app: QuartTrio, router: Router) -> None:
    """Enter the routes into the application."""

    @app.get("/")
    async def running() -> Response:
        _served_by(router, "/api/version")
        return Response("Ollama is running", content_type="text/plain; charset=utf-8")

    for path in ("/api/version", *JOINED):

        async def told(path: str = path) -> Response:
            return await _told(_served_by(router, path), path)

        app.add_url_rule(path, f"ollama {path}", told, methods=["GET"])

    @app.post("/api/show")
    async def show() -> Response:
        return await _asked(_served_by(router, "/api/show"), "/api/show", await request.body)

    @app.route("/api/<path:rest>", methods=list(METHODS))
    async def other(rest: str) -> Response:
        lanes = _served_by(router, "/api/version")
        if rest.split("/")[0] in CHANGING:
            url = lanes[0].adapter.base_url
            raise RouteUnsupportedError(
                f"KVStream does not change Ollama's models; ask Ollama itself (OLLAMA_HOST={url})")
        if f"/api/{rest}" in lanes[0].adapter.capabilities.passed:
            raise MethodNotAllowedError(f"/api/{rest} does not take {request.method}")
        raise RouteNotFoundError(f"no such route here: /api/{rest[:100]}")


def _served_by(router: Router, path: str) -> list[Engine]:
    """The backends that have this route. *Errors*: ``RouteNotFoundError`` without any."""
    engines = [lane.engine for lane in router.lanes if path in lane.engine.adapter.capabilities.passed]
    if not engines:
        raise RouteNotFoundError(
            f"no such route here, since no backend is an Ollama; {router.what_there_is}")
    return engines


async def _told(engines: Sequence[Engine], path: str) -> Response:
    """What a route without a body tells, of the backends that answer. *Errors*: of the first, if none does."""
    replies: list[HttpReply] = []
    first: KVStreamError | None = None
    for engine in engines:
        try:
            replies.append(await _call(engine, path, b""))
        except KVStreamError as error:
            first = first or error
    if not replies:
        raise first or RouteNotFoundError(path)
    if len(replies) == 1 or path not in JOINED:
        return _as_it_came(replies[0])
    rows: dict[str, Any] = {}
    for reply in replies:
        data = reply.json()
        for row in data.get("models") or () if isinstance(data, dict) else ():
            if isinstance(row, dict):
                rows.setdefault(str(row.get("model") or row.get("name")), row)
    return Response(json.dumps({"models": list(rows.values())}), content_type="application/json")


async def _asked(engines: Sequence[Engine], path: str, body: bytes) -> Response:
    """The answer of the first backend that knows what it is asked; else what the last one said."""
    if not body.strip().startswith(b"{"):
        raise InvalidRequestError("the body must be a JSON object")
    for engine in engines[:-1]:
        try:
            return _as_it_came(await _call(engine, path, body))
        except KVStreamError:
            continue
    return _as_it_came(await _call(engines[-1], path, body))


async def _call(engine: Engine, path: str, body: bytes) -> HttpReply:
    """*Errors*: what Ollama answered with an error status, and what is wrong with reaching it."""
    reply = await engine.upstream.request(engine.adapter.plain_call(path, body), timeout_s=TIMEOUT_S)
    if reply.status >= 400:
        raise error_of(engine.adapter.error(reply))
    return reply


def _as_it_came(reply: HttpReply) -> Response:
    return Response(reply.body, reply.status, content_type=reply.headers.get("content-type", "application/json"))
