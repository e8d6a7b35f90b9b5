"""Anthropic's ``/v1/messages``: its stream, and the answer in one piece.

::

    message_start (prompt's tokens) · [content_block_start · content_block_delta* · content_block_stop]*
                                    · message_delta (stop_reason, answer's tokens) · message_stop

The end is ``message_stop``. A stream that gave its ``stop_reason`` and then ends is complete; before that it is cut.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attrs import define, field

from .base import Delta, Done, Finished, UpstreamEvent, Usage, UsageNumbers
from .chunks import as_count, parse_json
from .frames import TRUNCATED, NamedDecoder, StreamPlan, named_frame

_STOP_FRAME = named_frame("message_stop", {"type": "message_stop"})
_PIECES = ("text", "thinking", "partial_json")  # what of a delta is output; a signature is none


class MessagesDecoder(NamedDecoder):
    """Events of a stream."""

    def __init__(self, plan: StreamPlan) -> None:
        super().__init__(plan)
        self._finished = False
        self._usage: dict[str, Any] = {}
        self._told = False

    def ended(self) -> UpstreamEvent:
        return Done(_STOP_FRAME, synthesised=True) if self._finished else TRUNCATED

    def read_event(self, raw: bytes, kind: str, data: dict[str, Any], events: list[UpstreamEvent]) -> None:
        if kind == "message_stop":
            self.closed = True
            if self._usage and not self._told:
                events.append(Usage(b"", usage_of(self._usage)))
            events.append(Done(raw, unfinished=not self._finished))
            return
        tokens, text = _output(kind, data)
        events.append(Delta(raw, data, tokens, text))
        if kind == "message_start":
            message = data.get("message")
            self._count(message if isinstance(message, dict) else {})
        elif kind == "message_delta":
            if self._count(data):
                self._told = True
                events.append(Usage(b"", usage_of(self._usage)))
            delta = data.get("delta")
            reason = delta.get("stop_reason") if isinstance(delta, dict) else None
            if isinstance(reason, str) and reason:
                self._finished = True
                events.append(Finished(reason))

    def _count(self, holder: Mapping[str, Any]) -> bool:
        """Each report has only what changed. The first one knows nothing of the answer, so it is none for others: an
        answer that is cut would count as empty."""
        usage = holder.get("usage")
        if not isinstance(usage, dict):
            return False
        self._usage.update({key: value for key, value in usage.items() if value is not None})
        return True


def usage_of(usage: Mapping[str, Any]) -> UsageNumbers:
    """``input_tokens`` leaves out what came from a cache or went into one."""
    read, made = (as_count(usage.get(f"cache_{way}_input_tokens")) for way in ("read", "creation"))
    cached = read if "cache_read_input_tokens" in usage else None
    return UsageNumbers(as_count(usage.get("input_tokens")) + read + made, as_count(usage.get("output_tokens")), cached)


def _output(kind: str, data: Mapping[str, Any]) -> tuple[int, str]:
    """(whether something was generated, the answer text) of an event."""
    if kind == "content_block_start":
        block = data.get("content_block")
        if not isinstance(block, Mapping):
            return 0, ""
        text = block.get("text")
        text = text if isinstance(text, str) else ""
        return int(bool(text) or block.get("type") not in ("text", "thinking")), text
    delta = data.get("delta")
    if kind != "content_block_delta" or not isinstance(delta, Mapping):
        return 0, ""
    text = delta.get("text")
    return int(any(bool(delta.get(name)) for name in _PIECES)), text if isinstance(text, str) else ""


@define
class _Block:
    """A content block in the making."""

    head: dict[str, Any]
    pieces: dict[str, list[str]] = field(factory=dict)
    lists: dict[str, list[Any]] = field(factory=dict)

    def add(self, delta: Mapping[str, Any]) -> None:
        for key, value in delta.items():
            if key == "type":
                continue
            if isinstance(value, str):
                self.pieces.setdefault(key, []).append(value)
            elif delta.get("type") == "citations_delta":
                self.lists.setdefault("citations", []).append(value)

    def result(self) -> dict[str, Any]:
        done = dict(self.head)
        for key, pieces in self.pieces.items():
            text = "".join(pieces)
            if key == "partial_json":
                done["input"] = (parse_json(text.encode("utf-8", "surrogatepass")) or {}) if text else {}
            else:
                done[key] = f"{done.get(key) or ''}{text}"
        return done | {key: [*(done.get(key) or ()), *values] for key, values in self.lists.items()}


class MessagesAssembler:
    """The message in one piece. ``prefix``: text that a runtime puts before a whole answer and leaves out of a
    stream."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._message: dict[str, Any] = {}
        self._blocks: dict[int, _Block] = {}
        self._whole: dict[str, Any] | None = None

    def feed(self, event: UpstreamEvent) -> None:
        if not isinstance(event, Delta) or not isinstance(event.data, Mapping):
            return
        data = event.data
        kind = data.get("type")
        if kind == "message":
            self._whole = dict(data)
        elif kind == "message_start" and isinstance(data.get("message"), Mapping):
            self._message = dict(data["message"])
        elif kind == "message_delta":
            self._end(data)
        elif kind == "content_block_start" and isinstance(data.get("content_block"), Mapping):
            self._blocks[as_count(data.get("index"))] = _Block(dict(data["content_block"]))
        elif kind == "content_block_delta" and isinstance(data.get("delta"), Mapping):
            self._blocks.setdefault(as_count(data.get("index")), _Block({"type": "text"})).add(data["delta"])

    def _end(self, data: Mapping[str, Any]) -> None:
        if isinstance(data.get("delta"), Mapping):
            self._message.update(data["delta"])
        if isinstance(data.get("usage"), Mapping):
            held = self._message.get("usage")
            self._message["usage"] = (dict(held) if isinstance(held, Mapping) else {}) | dict(data["usage"])

    def result(self) -> dict[str, Any]:
        if self._whole is not None:
            return self._whole
        content = [self._blocks[index].result() for index in sorted(self._blocks)]
        if self._prefix:
            text = next((block for block in content if block.get("type") == "text"), None)
            if text is None:
                content.insert(0, {"type": "text", "text": self._prefix})
            else:
                text["text"] = self._prefix + (text.get("text") or "")
        head = {"type": "message", "role": "assistant", "stop_reason": None, "stop_sequence": None}
        return head | self._message | {"content": content}


def frames_of(message: Mapping[str, Any]) -> bytes:
    """A whole message as the stream that a client asked for."""
    usage = message.get("usage")
    usage = usage if isinstance(usage, Mapping) else {}
    start = {**message, "content": [], "stop_reason": None, "stop_sequence": None,
             "usage": {**usage, "output_tokens": 0}}
    out = [named_frame("message_start", {"type": "message_start", "message": start})]
    blocks = message.get("content")
    for index, block in enumerate(blocks if isinstance(blocks, list) else ()):
        if not isinstance(block, Mapping):
            continue
        empty, delta = _split(block)
        out.append(named_frame("content_block_start", {
            "type": "content_block_start", "index": index, "content_block": empty}))
        if delta:
            out.append(named_frame("content_block_delta", {
                "type": "content_block_delta", "index": index, "delta": delta}))
        out.append(named_frame("content_block_stop", {"type": "content_block_stop", "index": index}))
    ending = {key: message.get(key) for key in ("stop_reason", "stop_sequence")}
    out.append(named_frame("message_delta", {"type": "message_delta", "delta": ending, "usage": {
        "output_tokens": as_count(usage.get("output_tokens"))}}))
    return b"".join(out)


def whole_events(data: Any, plan: StreamPlan) -> list[UpstreamEvent] | None:
    """Of a whole message where a stream was asked for."""
    if not isinstance(data, dict) or not isinstance(data.get("content"), list):
        return None
    numbers = usage_of(data["usage"]) if isinstance(data.get("usage"), dict) else UsageNumbers(0, 0)
    events: list[UpstreamEvent] = [
        Delta(frames_of(data) if plan.stream else b"", data, max(1, numbers.completion), _text_of(data["content"])),
        Finished(str(data.get("stop_reason") or "end_turn"))]
    if isinstance(data.get("usage"), dict):
        events.append(Usage(b"", numbers))
    return [*events, Done(_STOP_FRAME if plan.stream else b"", synthesised=True)]


def _text_of(blocks: list[Any]) -> str:
    texts = [block.get("text") for block in blocks if isinstance(block, dict)]
    return "".join(text for text in texts if isinstance(text, str))


def _split(block: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the block as it starts, its one delta)."""
    match block.get("type"):
        case "text":
            return {**block, "text": ""}, {"type": "text_delta", "text": block.get("text", "")}
        case "thinking":
            return {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": block.get("thinking", "")}
        case "tool_use":
            pieces = json.dumps(block.get("input", {}))
            return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": pieces}
    return dict(block), {}
