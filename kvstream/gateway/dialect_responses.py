"""The dialect of ``/v1/responses``."""

from __future__ import annotations

from typing import Any

from ..errors import KVStreamError
from .dialect_anthropic import event
from .dialect_openai import OpenAIDialect, usage_spelt
from .ports import Answer


class ResponsesDialect(OpenAIDialect):
    """See :class:`dialects.Dialect`. HTTP errors are those of every OpenAI route."""

    keeps_whole = True

    def empty_delta(self, answer: Answer) -> bytes:
        return self.ping  # every event of this API changes the answer

    def error_frame(self, error: KVStreamError) -> bytes:
        """The API's own error event has flat fields; the client raises on an ``error`` object. So it has both."""
        detail = error.envelope()["error"]
        flat = {key: detail[key] for key in ("code", "message", "param")}
        return event("error", {"type": "error", **flat, "error": detail})

    def usage_frame(self, answer: Answer) -> bytes:
        return b""  # it is on the last event; there is nothing to ask for

    def length_frames(self, answer: Answer, whole: dict[str, Any] | None) -> bytes:
        response = self.completed(whole or {}, answer)
        return event("response.incomplete", {"type": "response.incomplete", "response": response})

    def completed(self, whole: dict[str, Any], answer: Answer) -> dict[str, Any]:
        if answer.truncated:
            whole = whole | {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return whole if whole.get("usage") else whole | {"usage": usage_of(answer)}


def usage_of(answer: Answer) -> dict[str, Any]:
    """``usage`` as this API has it; marked when it is our estimate."""
    return usage_spelt(answer, "input", "output")
