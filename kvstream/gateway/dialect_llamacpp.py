"""The dialect of llama.cpp's own routes: ``/completion``, ``/infill``, ``/tokenize`` and their like."""

from __future__ import annotations

import json
from typing import Any

from ..errors import KVStreamError
from .dialect_openai import OpenAIDialect
from .ports import Answer


class LlamaCppDialect(OpenAIDialect):
    """See :class:`dialects.Dialect`. A stream is ended by an object with ``stop``, never by ``[DONE]``."""

    def empty_delta(self, answer: Answer) -> bytes:
        last = answer.last_data
        if not isinstance(last, dict) or last.get("stop") is not False:
            return self.ping
        return b"data: " + json.dumps(last | {"content": "", "tokens": []}).encode() + b"\n\n"

    def envelope(self, error: KVStreamError, request_id: str = "") -> dict[str, Any]:
        """llama.cpp's code is the HTTP status, a number; ours stands beside it."""
        return {"error": {"code": error.status, "message": error.message, "type": error.type, "reason": error.code}}

    def error_frame(self, error: KVStreamError) -> bytes:
        return b"data: " + json.dumps(self.envelope(error)).encode() + b"\n\n"

    def usage_frame(self, answer: Answer) -> bytes:
        return b""  # it is on the last object

    def length_frames(self, answer: Answer, whole: dict[str, Any] | None) -> bytes:
        return b"data: " + json.dumps(self._end(answer, {"index": 0, "content": "", "tokens": []})).encode() + b"\n\n"

    def completed(self, whole: dict[str, Any], answer: Answer) -> dict[str, Any]:
        return self._end(answer, whole) if answer.truncated else whole

    def _end(self, answer: Answer, given: dict[str, Any]) -> dict[str, Any]:
        return given | {
            "stop": True, "stop_type": "limit", "stopping_word": "", "truncated": True,
            "tokens_predicted": answer.tokens, "tokens_evaluated": answer.tokens_prompt}
