"""The decoder for a runtime that ignored ``stream: true`` and answered with one JSON object.

The object becomes one ``Delta``. For a client that streams it is re-emitted as the chunks that a streaming runtime
would have sent, ``[DONE]`` included; for any other client nothing is synthesised and the assembler takes the object.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from .base import Delta, Done, Failed, UpstreamEvent, Usage
from .chunks import Choices, parse_json, usage_numbers
from .failure import error_in, failed_frame
from .frames import StreamPlan

WholeReader = Callable[[Any, StreamPlan], "list[UpstreamEvent] | None"]

DONE_FRAME = b"data: [DONE]\n\n"


class HeldBody:
    """A body that is read when it is all there. Bounded: above ``bytes_max`` it is a protocol error."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held: bytearray | None = bytearray()

    def events(self, text: bytes, data: Any) -> list[UpstreamEvent]:
        """Of the whole body, as it came and as JSON; None when it is none."""
        raise NotImplementedError

    def feed(self, data: bytes) -> list[UpstreamEvent]:
        if self._held is None:
            return []
        self._held += data
        if len(self._held) <= self._bytes_max:
            return []
        self._held = None
        return [Failed("backend_protocol", f"the answer is larger than {self._bytes_max} bytes", 502)]

    def finish(self) -> list[UpstreamEvent]:
        if self._held is None:
            return []
        text, self._held = bytes(self._held), None
        data = parse_json(text)
        if error_in(data) is not None:
            return [failed_frame(data, b"")]
        return self.events(text, data)


class WholeDecoder(HeldBody):
    """Events of one JSON value. ``read`` makes events of it; None says that it is no answer of this route."""

    def __init__(self, plan: StreamPlan, read: WholeReader | None = None) -> None:
        super().__init__(plan.event_bytes_max)
        self._plan = plan
        self._read = read or chat_events

    def events(self, text: bytes, data: Any) -> list[UpstreamEvent]:
        events = self._read(data, self._plan)
        if events is None:
            return [Failed("backend_protocol", "the backend answered 200 with a body that is no completion", 502)]
        return events


def chat_events(data: Any, plan: StreamPlan) -> list[UpstreamEvent] | None:
    """Of a chat or a completion."""
    if not isinstance(data, dict) or not isinstance(data.get("choices"), list):
        return None
    choices = Choices()
    tokens, piece, ended = choices.read(data["choices"])
    numbers = usage_numbers(data)
    raw = frame_of(*stream_chunks(data)) if plan.stream else b""
    if numbers is not None:
        tokens = max(tokens, numbers.completion)
    events: list[UpstreamEvent] = [Delta(raw, data, tokens, piece), *ended]
    if numbers is not None:
        shown = plan.stream and plan.include_usage
        chunk = {**_head(data), "choices": [], "usage": data["usage"]} if shown and "usage" in data else None
        events.append(Usage(frame_of(chunk) if chunk else b"", numbers, chunk, standalone=chunk is not None))
    events.append(Done(DONE_FRAME if plan.stream else b"", synthesised=True, unfinished=not choices.finished))
    return events


def frame_of(*chunks: Mapping[str, Any]) -> bytes:
    """Chunks as the bytes of a stream."""
    return b"".join(b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n" for chunk in chunks)


def _head(data: Mapping[str, Any]) -> dict[str, Any]:
    head = {key: value for key, value in data.items() if key not in ("choices", "usage")}
    if head.get("object") == "chat.completion":
        head["object"] = "chat.completion.chunk"
    return head


def stream_chunks(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The chunks a streaming runtime would have sent: per choice one with its content, one with its finish reason."""
    chunks: list[dict[str, Any]] = []
    for choice in data["choices"]:
        if not isinstance(choice, dict):
            continue
        rest = {key: value for key, value in choice.items() if key not in ("message", "finish_reason")}
        message = choice.get("message")
        if isinstance(message, dict):
            delta = {key: value for key, value in message.items() if value is not None}
            if isinstance(delta.get("tool_calls"), list):
                delta["tool_calls"] = [
                    {"index": index, **call} for index, call in enumerate(delta["tool_calls"]) if isinstance(call, dict)
                ]
            rest["delta"] = delta
        empty: dict[str, Any] = {"delta": {}} if isinstance(message, dict) else {"text": ""}
        ending = {"index": choice.get("index", 0), **empty, "finish_reason": choice.get("finish_reason")}
        chunks.append({**_head(data), "choices": [{**rest, "finish_reason": None}]})
        chunks.append({**_head(data), "choices": [ending]})
    return chunks
