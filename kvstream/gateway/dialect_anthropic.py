"""The dialect of ``/v1/messages``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..errors import KVStreamError
from .ports import Answer

_TYPES: Mapping[int, str] = MappingProxyType({
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"})
"""Their types by our statuses. Theirs for an overload is 529, which other software does not know: we keep 503."""


class AnthropicDialect:
    """See :class:`dialects.Dialect`."""

    media_type = b"text/event-stream; charset=utf-8"
    ping = b'event: ping\ndata: {"type": "ping"}\n\n'
    keeps_whole = False

    def empty_delta(self, answer: Answer) -> bytes:
        return self.ping  # an event of the API itself

    def envelope(self, error: KVStreamError, request_id: str = "") -> dict[str, Any]:
        kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id or None}

    def error_frame(self, error: KVStreamError) -> bytes:
        return event("error", self.envelope(error))

    def usage_frame(self, answer: Answer) -> bytes:
        return b""  # every stream has it; there is nothing to ask for

    def length_frames(self, answer: Answer, whole: dict[str, Any] | None) -> bytes:
        last: dict[str, Any] = answer.last_data if isinstance(answer.last_data, dict) else {}
        frames = b""
        if last.get("type") in ("content_block_start", "content_block_delta"):
            frames = event("content_block_stop", {"type": "content_block_stop", "index": last.get("index", 0)})
        ending = {"stop_reason": "max_tokens", "stop_sequence": None}
        return frames + event("message_delta", {
            "type": "message_delta", "delta": ending, "usage": {"output_tokens": answer.tokens}}) + event(
            "message_stop", {"type": "message_stop"})

    def completed(self, whole: dict[str, Any], answer: Answer) -> dict[str, Any]:
        if answer.truncated:
            whole = whole | {"stop_reason": whole.get("stop_reason") or "max_tokens"}
        usage = whole.get("usage") or {}
        if not usage.get("output_tokens"):
            known = answer.usage
            cached = known.cached or 0 if known else 0
            prompt, completion = (known.prompt, known.completion) if known else (answer.tokens_prompt, answer.tokens)
            whole = whole | {"usage": {
                "cache_read_input_tokens": cached, "input_tokens": prompt - cached} | usage | {
                "output_tokens": completion}}
        return whole


def event(name: str, data: dict[str, Any]) -> bytes:
    """A named server-sent event."""
    return b"event: " + name.encode() + b"\ndata: " + json.dumps(data).encode() + b"\n\n"
