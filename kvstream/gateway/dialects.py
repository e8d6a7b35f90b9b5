"""How answers look on the wire, by the path they were asked on: the frames that are KVStream's own.

The runtime's frames travel byte for byte and need nobody who understands them. But some are ours: errors, keepalives,
token counts that a client asked for and its runtime did not send, and the end of an answer that we had to cut. Each API
has its own form for those, and a client of one chokes on another's.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

from ..errors import KVStreamError
from .ports import Answer
from .request import COMPLETIONS


class Dialect(Protocol):
    """The form of one API. All frames are complete, with the empty line (or line end) that ends them."""

    media_type: bytes
    """``Content-Type`` of a streamed answer."""

    @property
    def ping(self) -> bytes:
        """Proof of life for a client that waits; nothing that changes its answer."""
        ...

    def envelope(self, error: KVStreamError) -> dict[str, Any]:
        """The body of an HTTP error."""
        ...

    def error_frame(self, error: KVStreamError) -> bytes:
        """An error after the answer began."""
        ...

    def usage_frame(self, answer: Answer) -> bytes:
        """Token counts that the client asked for and the runtime did not send."""
        ...

    def length_frames(self, answer: Answer) -> bytes:
        """The end of a stream that we had to cut, as if it had reached a token limit."""
        ...

    def completed(self, whole: dict[str, Any], answer: Answer) -> dict[str, Any]:
        """An assembled answer, with what its stream could not bring: estimated usage, or the end that we gave it."""
        ...


class OpenAIDialect:
    """Chat completions and completions."""

    media_type = b"text/event-stream; charset=utf-8"
    ping = b": ping\n\n"

    def envelope(self, error: KVStreamError) -> dict[str, Any]:
        return error.envelope()

    def error_frame(self, error: KVStreamError) -> bytes:
        return b"data: " + json.dumps(error.envelope()).encode() + b"\n\n"

    def usage_frame(self, answer: Answer) -> bytes:
        return _frame(answer, choices=[], usage=usage_numbers(answer))

    def length_frames(self, answer: Answer) -> bytes:
        empty: dict[str, Any] = {"text": ""} if answer.request.route == COMPLETIONS else {"delta": {}}
        finish = _frame(answer, choices=[{"index": 0, "finish_reason": "length"} | empty])
        return finish + (self.usage_frame(answer) if answer.request.include_usage else b"") + b"data: [DONE]\n\n"

    def completed(self, whole: dict[str, Any], answer: Answer) -> dict[str, Any]:
        if answer.truncated:
            for choice in whole.get("choices", ()):
                choice["finish_reason"] = choice.get("finish_reason") or "length"
        return whole if whole.get("usage") else whole | {"usage": usage_numbers(answer)}


OPENAI = OpenAIDialect()


def dialect_of(path: str) -> Dialect:
    """The dialect that a client of ``path`` speaks, also where nothing is served."""
    return OPENAI


def usage_numbers(answer: Answer) -> dict[str, Any]:
    """``usage`` for a client whose runtime did not put it where clients look; marked when it is our estimate."""
    usage = answer.usage
    prompt, completion = (usage.prompt, usage.completion) if usage else (answer.tokens_prompt, answer.tokens)
    numbers: dict[str, Any] = {
        "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    if usage is None:
        return numbers | {"estimated": True}
    return numbers if usage.cached is None else numbers | {"prompt_tokens_details": {"cached_tokens": usage.cached}}


def _frame(answer: Answer, **fields: Any) -> bytes:
    """A chunk in the likeness of the runtime's last one."""
    last: dict[str, Any] = answer.last_data if isinstance(answer.last_data, dict) else {}
    head = {key: last[key] for key in ("id", "object", "created", "model", "system_fingerprint") if key in last}
    return b"data: " + json.dumps(head | fields).encode() + b"\n\n"
