"""What a runtime's complaint means: every text of ``runtimes.md`` section 7, as reply and as frame."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstream.adapters.base import HttpReply
from kvstream.adapters.failure import failed_frame, failed_reply, sanitise


def reply(status: int, body: Any) -> HttpReply:
    return HttpReply(status, {}, body if isinstance(body, bytes) else json.dumps(body).encode())


def error(message: str, **more: Any) -> dict[str, Any]:
    return {"error": {"message": message, **more}}


LLAMA_LONG = error(
    "request (2300 tokens) exceeds the available context size (2048 tokens), try increasing it",
    code=400,
    type="exceed_context_size_error",
)
TOO_LONG = [
    (400, LLAMA_LONG),
    (500, error("the request exceeds the available context size. try increasing the context size", code=500)),
    (
        400,
        {"error": "The number of tokens to keep from the initial prompt is greater than the context length (n_keep: 9"},
    ),
    (400, error("Cannot truncate prompt with n_keep (900) >= n_ctx (512)")),
    (400, error("request requires 9 total tokens (8 + 1) which exceeds the model's maximum context length of 4")),
    (400, error("This model's maximum context length is 4096 tokens. However, you requested 5000", code=400)),
    (400, {"error": "input length is longer than the context length"}),
    (400, error("too long", code="context_length_exceeded")),
    (400, {"object": "error", "message": "maximum context length is 8", "code": 400}),
]
OTHERS: list[tuple[int, Any, str, int]] = [
    (503, error("Loading model", code=503, type="unavailable_error"), "model_loading", 503),
    (503, {"error": "server busy, please try again.  maximum pending requests exceeded"}, "overloaded", 503),
    (503, b"", "overloaded", 503),
    (429, error("Rate limit reached"), "overloaded", 429),
    (404, error("The model `x` does not exist.", type="NotFoundError", code=404), "model_not_found", 404),
    (404, {"error": 'model "x" not found, try pulling it first'}, "model_not_found", 404),
    (400, error("model 'x' not found", type="invalid_request_error"), "model_not_found", 404),
    (400, error("Model not loaded: x:1"), "model_not_found", 404),
    (404, error("No models loaded. Please load a model in the developer page"), "model_not_found", 404),
    (400, error("No OpenAIService provider found for x"), "model_not_found", 404),
    (404, error("File Not Found", code=404, type="not_found_error"), "route_not_supported", 404),
    (500, error("image input is not supported - hint: you may need mmproj", code=500), "upstream_rejected", 400),
    (500, error("structured tool calling requires model-published opening and closing"), "upstream_rejected", 400),
    (501, error("This server does not support embeddings", code=501), "route_not_supported", 404),
    (501, error("The current model does not support audio input.", code=501), "route_not_supported", 404),
    (404, {"detail": "Not Found"}, "route_not_supported", 404),
    (501, error("This server was started without it", code=501), "upstream_rejected", 400),
    (401, error("Invalid API Key", type="authentication_error", code=401), "backend_auth", 502),
    (403, b"forbidden", "backend_auth", 502),
    (422, {"detail": "n is wrong"}, "upstream_rejected", 422),
    (400, error("Field 'temperature': must be number"), "upstream_rejected", 400),
    (500, error("Context size has been exceeded.", code=500, type="server_error"), "upstream_error", 500),
    (500, b"Internal Server Error", "upstream_error", 500),
    (502, b"<html><h1>Bad Gateway</h1></html>", "upstream_error", 502),
    (302, b"", "upstream_error", 502),
    (200, {"error": "Unexpected endpoint or method. (GET /x)"}, "route_not_supported", 404),
]


@pytest.mark.parametrize(("status", "body"), TOO_LONG)
def test_a_prompt_that_does_not_fit(status: int, body: Any) -> None:
    for failed in (failed_reply(reply(status, body)), failed_frame(body, b"raw")):
        assert (failed.kind, failed.status) == ("context_length_exceeded", 400)
    assert failed.raw == b"raw" and failed.message


@pytest.mark.parametrize(("status", "body", "kind", "out"), OTHERS)
def test_the_other_complaints(status: int, body: Any, kind: str, out: int) -> None:
    failed = failed_reply(reply(status, body))
    assert (failed.kind, failed.status, failed.raw) == (kind, out, b"")


@pytest.mark.parametrize(
    ("data", "kind", "status"),
    [
        (error("Context size has been exceeded.", code=500, type="server_error"), "upstream_error", 500),
        (error("Loading model", type="unavailable_error"), "model_loading", 503),
        (error("busy", type="overloaded_error"), "overloaded", 503),
        (error("temperature must be positive", type="invalid_request_error", code=None), "upstream_rejected", 400),
        (error("bad", code="400"), "upstream_rejected", 400),
        (error("key", type="authentication_error"), "backend_auth", 502),
        (error("anything"), "upstream_error", 502),
        ({"error": True}, "upstream_error", 502),
    ],
)
def test_frames_without_a_status(data: Any, kind: str, status: int) -> None:
    failed = failed_frame(data, b"x")
    assert (failed.kind, failed.status, failed.raw) == (kind, status, b"x")


def test_messages_are_fit_for_a_client_and_a_log_line() -> None:
    assert (
        sanitise("/src/x.cpp:12: went wrong\n\tat C:\\src\\y.cc:3:4: (a/b.py) here\x1b[0m") == "went wrong at here [0m"
    )
    assert sanitise("a/b or http://x.h/ is v1.h") == "a/b or http://x.h/ is v1.h"
    assert len(sanitise("x" * 10_000)) == 600
    assert "secret" not in failed_reply(reply(401, error("Incorrect API key provided: sk-secret"))).message
    assert "<" not in failed_reply(reply(502, b"<html>")).message
    assert failed_reply(reply(500, b"")).message == "the backend answered with HTTP 500"
    assert failed_reply(reply(400, b"\xff\xfe bad")).message == "bad"
