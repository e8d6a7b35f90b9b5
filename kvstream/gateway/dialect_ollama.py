"""The dialect of Ollama's own routes: lines of JSON, errors that are a plain text.

There is no ping. NDJSON has no comments, and a blank line breaks readers that parse every line (Ollama's own Python
client is one). Ollama itself says nothing while it loads a model, so its clients are used to silence, and a request
that waits in our queue can still be refused with a proper status. ``empty_delta`` is for those who want proof of life
all the same: Ollama sends such lines itself.
"""

from __future__ import annotations

import json
from typing import Any

from ..errors import KVStreamError
from .ports import Answer


class OllamaDialect:
    """See :class:`dialects.Dialect`."""

    media_type = b"application/x-ndjson"
    ping = b""
    keeps_whole = False

    def envelope(self, error: KVStreamError, request_id: str = "") -> dict[str, Any]:
        return {"error": error.message}

    def empty_delta(self, answer: Answer) -> bytes:
        head = _head(answer)
        return _line(head | _nothing(answer) | {"done": False}) if head else b""  # clients want a model and a time

    def error_frame(self, error: KVStreamError) -> bytes:
        return _line(self.envelope(error))

    def usage_frame(self, answer: Answer) -> bytes:
        return b""  # it is on the last line

    def length_frames(self, answer: Answer, whole: dict[str, Any] | None) -> bytes:
        return _line(_head(answer) | _nothing(answer) | _end(answer))

    def completed(self, whole: dict[str, Any], answer: Answer) -> dict[str, Any]:
        return whole | _end(answer) if answer.truncated else whole


def _head(answer: Answer) -> dict[str, Any]:
    """Model and time of the runtime's last line."""
    last = answer.last_data
    return {key: last[key] for key in ("model", "created_at") if key in last} if isinstance(last, dict) else {}


def _nothing(answer: Answer) -> dict[str, Any]:
    chat = answer.request.route == "/api/chat"
    return {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}


def _end(answer: Answer) -> dict[str, Any]:
    return {"done": True, "done_reason": "length", "prompt_eval_count": answer.tokens_prompt,
            "eval_count": answer.tokens}


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
