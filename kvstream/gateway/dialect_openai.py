"""The dialect of chat completions and completions, and of every route that says errors as OpenAI does."""

from __future__ import annotations

import json
from typing import Any

from ..adapters.routes import route_of
from ..errors import KVStreamError
from .ports import Answer


class OpenAIDialect:
    """See :class:`dialects.Dialect`."""

    media_type = b"text/event-stream; charset=utf-8"
    ping = b": ping\n\n"
    keeps_whole = False

    def envelope(self, error: KVStreamError, request_id: str = "") -> dict[str, Any]:
        return error.envelope()

    def empty_delta(self, answer: Answer) -> bytes:
        last = answer.last_data
        if not isinstance(last, dict) or "id" not in last:
            return self.ping  # a chunk needs the id of the others, and there are none yet
        empty: dict[str, Any] = {"text": ""} if route_of(answer.request.route).form == "completions" else {"delta": {}}
        return _frame(answer, choices=[{"index": 0, "finish_reason": None} | empty])

    def error_frame(self, error: KVStreamError) -> bytes:
        return b"data: " + json.dumps(error.envelope()).encode() + b"\n\n"

    def usage_frame(self, answer: Answer) -> bytes:
        return _frame(answer, choices=[], usage=usage_numbers(answer))

    def length_frames(self, answer: Answer, whole: dict[str, Any] | None) -> bytes:
        empty: dict[str, Any] = {"text": ""} if route_of(answer.request.route).form == "completions" else {"delta": {}}
        finish = _frame(answer, choices=[{"index": 0, "finish_reason": "length"} | empty])
        return finish + (self.usage_frame(answer) if answer.request.include_usage else b"") + b"data: [DONE]\n\n"

    def completed(self, whole: dict[str, Any], answer: Answer) -> dict[str, Any]:
        if answer.truncated:
            for choice in whole.get("choices", ()):
                choice["finish_reason"] = choice.get("finish_reason") or "length"
        return whole if whole.get("usage") else whole | {"usage": usage_numbers(answer)}


def usage_numbers(answer: Answer) -> dict[str, Any]:
    """``usage`` for a client whose runtime did not put it where clients look; marked when it is our estimate."""
    return usage_spelt(answer, "prompt", "completion")


def usage_spelt(answer: Answer, read: str, written: str) -> dict[str, Any]:
    """Token counts with an API's own words for what was read and what was written."""
    usage = answer.usage
    prompt, completion = (usage.prompt, usage.completion) if usage else (answer.tokens_prompt, answer.tokens)
    numbers: dict[str, Any] = {
        f"{read}_tokens": prompt, f"{written}_tokens": completion, "total_tokens": prompt + completion}
    if usage is None:
        return numbers | {"estimated": True}
    return numbers if usage.cached is None else numbers | {f"{read}_tokens_details": {"cached_tokens": usage.cached}}


def _frame(answer: Answer, **fields: Any) -> bytes:
    """A chunk in the likeness of the runtime's last one."""
    last: dict[str, Any] = answer.last_data if isinstance(answer.last_data, dict) else {}
    head = {key: last[key] for key in ("id", "object", "created", "model", "system_fingerprint") if key in last}
    return b"data: " + json.dumps(head | fields).encode() + b"\n\n"
