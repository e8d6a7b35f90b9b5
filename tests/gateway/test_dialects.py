"""The frames that are KVStream's own, in the dialect of each path."""

from __future__ import annotations

import json

import pytest

from kvstream.adapters.routes import ROUTES
from kvstream.errors import (
    BackendTimeoutError,
    BodyTooLargeError,
    ContextLengthError,
    InvalidRequestError,
    KVStreamError,
    QueueFullError,
    QueueTimeoutError,
    RouteUnsupportedError,
    UpstreamFailedError,
)
from kvstream.gateway.dialects import DIALECTS, dialect_of
from tests.gateway.conftest import open_lane

MESSAGES = "/v1/messages"


@pytest.mark.parametrize("path", sorted(ROUTES))
def test_every_route_has_a_dialect_and_its_errors_are_json(path: str) -> None:
    dialect = dialect_of(path)
    assert dialect is DIALECTS[ROUTES[path].dialect]
    body = dialect.envelope(QueueFullError("full"), "kvs-1")
    error = json.loads(json.dumps(body))["error"]
    native = ROUTES[path].dialect == "ollama"  # its errors are plain texts, its frames are lines
    assert (error if native else error["message"]) == "full"
    assert dialect.error_frame(QueueFullError("full")).endswith(b"\n" if native else b"\n\n")


@pytest.mark.parametrize(("error", "kind"), [
    (InvalidRequestError("x"), "invalid_request_error"), (ContextLengthError("x"), "invalid_request_error"),
    (RouteUnsupportedError("x"), "not_found_error"), (BodyTooLargeError("x"), "request_too_large"),
    (QueueFullError("x"), "rate_limit_error"), (QueueTimeoutError("x"), "overloaded_error"),
    (BackendTimeoutError("x"), "timeout_error"), (UpstreamFailedError("x"), "api_error"),
    (InvalidRequestError("x", status=408), "invalid_request_error"), (KVStreamError("x"), "api_error"),
    (KVStreamError("x", status=401), "authentication_error"), (KVStreamError("x", status=403), "permission_error"),
])
def test_anthropic_has_a_type_for_every_status(error: KVStreamError, kind: str) -> None:
    assert dialect_of(MESSAGES).envelope(error, "kvs-1") == {
        "type": "error", "error": {"type": kind, "message": "x"}, "request_id": "kvs-1"}
    assert dialect_of(MESSAGES).error_frame(error).startswith(b"event: error\ndata: {")


async def test_a_route_that_no_backend_serves_is_refused_in_the_dialect_of_its_path(autojump_clock: object) -> None:
    async with open_lane(knobs={"dialect": "openai"}, backend={"type": "openai"}) as lane:
        for path in ("/infill", "/apply-template", "/tokenize"):
            call = await lane.post({"prompt": "x"}, path)
            assert call.status == 404, path
            error = json.loads(call.body)["error"]
            assert error["code"] == 404 and error["reason"] == "route_not_supported"
            assert path in error["message"] and "openai" in error["message"]
        assert not lane.runtime.journal.calls
        assert (await lane.post({}, "/v1/nothing")).status == 404


def test_an_unknown_path_below_messages_is_refused_as_anthropic_clients_read_it() -> None:
    assert dialect_of("/v1/messages/batches") is DIALECTS["anthropic"]
    assert dialect_of("/v1/nothing") is DIALECTS["openai"]
