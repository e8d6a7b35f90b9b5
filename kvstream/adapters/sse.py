"""The decoder of the OpenAI streaming dialects: chat completions and legacy completions of every runtime.

Theory of operation. ``SseSplitter`` cuts frames; each frame is parsed *as a copy* and turned into events, the first of
which carries the frame's own bytes. The stream is over at ``[DONE]``, at the first error, or at the end of the body;
whatever comes later is ignored. How the body ended is judged in ``finish`` by two facts, whether every choice we saw
gave a ``finish_reason`` and whether ``[DONE]`` came::

    finish_reason   [DONE]    result
    yes             yes       Done
    yes             no        Done(synthesised): the client gets the marker that is missing
    no              yes       Done(unfinished): accepted, but flagged
    no              no        Failed(upstream_stream_truncated)

``WholeDecoder`` serves a runtime that ignored ``stream: true`` and answered with one JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attrs import define, field, frozen

from .base import (
    Decoder,
    Delta,
    Done,
    Failed,
    Finished,
    Ping,
    Progress,
    ProxyRequest,
    UpstreamEvent,
    Usage,
    UsageNumbers,
)
from .failure import error_in, failed_frame
from .framing import EVENT_BYTES_MAX, SseFrame, SseSplitter

DONE_FRAME = b"data: [DONE]\n\n"
_NOT_OUTPUT = frozenset({"role"})


@frozen
class StreamPlan:
    """What a decoder must know about the request. ``progress_asked``: the client itself wants ``prompt_progress``."""

    stream: bool
    include_usage: bool
    progress_asked: bool
    event_bytes_max: int = EVENT_BYTES_MAX


def open_decoder(request: ProxyRequest, content_type: str, event_bytes_max: int = EVENT_BYTES_MAX) -> Decoder:
    """The decoder that fits an answer with this ``Content-Type``."""
    asked = request.view.get("return_progress") is True
    plan = StreamPlan(request.stream, request.include_usage, asked, event_bytes_max)
    if content_type.split(";")[0].strip().lower() == "application/json":
        return WholeDecoder(plan)
    return StreamDecoder(plan)


class StreamDecoder:
    """Events of a ``text/event-stream`` body."""

    def __init__(self, plan: StreamPlan) -> None:
        self._plan = plan
        self._splitter = SseSplitter(plan.event_bytes_max)
        self._choices = _Choices()
        self._closed = False

    def feed(self, data: bytes) -> list[UpstreamEvent]:
        events: list[UpstreamEvent] = []
        for frame in self._splitter.feed(data):
            if self._closed:
                return events
            self._read(frame, events)
        if self._splitter.error and not self._closed:
            self._closed = True
            events.append(Failed("backend_protocol", self._splitter.error, 502))
        return events

    def finish(self) -> list[UpstreamEvent]:
        events: list[UpstreamEvent] = []
        rest = None if self._closed else self._splitter.finish()
        if rest is not None and _is_complete(rest):
            self._read(_ended(rest), events)
        if self._closed:
            return events
        self._closed = True
        if self._choices.finished:
            events.append(Done(DONE_FRAME, synthesised=True))
        else:
            events.append(Failed("upstream_stream_truncated", "the backend's stream ended before it was finished", 502))
        return events

    def _read(self, frame: SseFrame, events: list[UpstreamEvent]) -> None:
        payload = frame.data
        if payload is None or frame.event == b"ping" or not (text := payload.strip()):
            events.append(Ping())
            return
        if text == b"[DONE]":
            self._closed = True
            events.append(Done(frame.raw, unfinished=not self._choices.finished))
            return
        data = parse_json(text)
        if frame.event == b"error" or error_in(data) is not None:
            self._closed = True
            events.append(failed_frame(data if data is not None else text.decode("utf-8", "replace"), frame.raw))
        elif isinstance(data, dict):
            self._read_object(frame.raw, data, events)
        else:
            events.append(Delta(frame.raw, data))

    def _read_object(self, raw: bytes, data: dict[str, Any], events: list[UpstreamEvent]) -> None:
        choices = data.get("choices")
        choices = choices if isinstance(choices, list) else []
        numbers = usage_numbers(data)
        progress = data.get("prompt_progress")
        if isinstance(progress, dict):
            total, cached, done = (as_count(progress.get(key)) for key in ("total", "cache", "processed"))
            events.append(Progress(raw if self._plan.progress_asked else b"", total, cached, done))
            return
        if not choices and numbers is not None:
            events.append(Usage(raw, numbers, data, standalone=True))
            return
        tokens, text, ended = self._choices.read(choices)
        events.append(Delta(raw, data, tokens, text))
        events.extend(ended)
        if numbers is not None:
            events.append(Usage(b"", numbers))


@define
class _Choices:
    """Which choices were seen and which gave a reason to stop."""

    _seen: set[int] = field(factory=set)
    _ended: set[int] = field(factory=set)

    @property
    def finished(self) -> bool:
        """Every choice that was seen ended; with ``n: 2`` one of two is not enough."""
        return bool(self._ended) and self._seen <= self._ended

    def read(self, choices: list[Any]) -> tuple[int, str, list[Finished]]:
        """(pieces of output, text of choice 0, choices that ended) of one chunk."""
        tokens, text = 0, ""
        ended: list[Finished] = []
        for place, choice in enumerate(choices):
            if not isinstance(choice, dict):
                continue
            index = choice.get("index")
            index = index if isinstance(index, int) else place
            self._seen.add(index)
            piece, has_output = output_of(choice)
            tokens += has_output
            if index == 0:
                text += piece
            reason = choice.get("finish_reason")
            if isinstance(reason, str) and reason:
                self._ended.add(index)
                ended.append(Finished(reason, index))
        return tokens, text, ended


def output_of(choice: Mapping[str, Any]) -> tuple[str, bool]:
    """(answer text, whether anything was generated) of one choice of a chunk.

    Anything but the role counts as output: reasoning, tool calls, and fields that we do not know.
    """
    body = choice.get("delta")
    if not isinstance(body, dict):
        body = choice.get("message")
    if isinstance(body, dict):
        content = body.get("content")
        has_output = any(
            value and isinstance(value, (str, list, dict)) for key, value in body.items() if key not in _NOT_OUTPUT
        )
        return content if isinstance(content, str) else "", has_output
    text = choice.get("text")
    return (text, bool(text)) if isinstance(text, str) else ("", False)


def usage_numbers(data: Mapping[str, Any]) -> UsageNumbers | None:
    """Token counts of a chunk or body: ``usage``, or llama.cpp's ``timings``, which come unasked on its last chunk."""
    usage, timings = data.get("usage"), data.get("timings")
    timed_cache = as_count(timings["cache_n"]) if isinstance(timings, dict) and "cache_n" in timings else None
    if isinstance(usage, dict) and "prompt_tokens" in usage:
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return UsageNumbers(
            as_count(usage["prompt_tokens"]),
            as_count(usage.get("completion_tokens")),
            cached if isinstance(cached, int) else timed_cache,
        )
    if isinstance(timings, dict) and "prompt_n" in timings:
        prompt = (timed_cache or 0) + as_count(timings["prompt_n"])
        return UsageNumbers(prompt, as_count(timings.get("predicted_n")), timed_cache)
    return None


def as_count(value: Any) -> int:
    """A count from somebody else's JSON: anything odd is 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def parse_json(text: bytes) -> Any:
    """The value, or None when it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_complete(rest: SseFrame) -> bool:
    """Whether the bytes after the last empty line are a whole event whose end was merely left out."""
    text = (rest.data or b"").strip()
    return text == b"[DONE]" or isinstance(parse_json(text), dict)


def _ended(rest: SseFrame) -> SseFrame:
    """The same frame with the empty line that a client needs to see it."""
    if rest.raw.endswith((b"\r\r", b"\n\r")):
        return rest
    missing = b"\n" if rest.raw.endswith((b"\n", b"\r")) else b"\n\n"
    return SseFrame(rest.raw + missing, rest.event, rest.data)


class WholeDecoder:
    """Events of one JSON object. Bounded: a body above the cap is a protocol error."""

    def __init__(self, plan: StreamPlan) -> None:
        self._plan = plan
        self._held: bytearray | None = bytearray()

    def feed(self, data: bytes) -> list[UpstreamEvent]:
        if self._held is None:
            return []
        self._held += data
        if len(self._held) <= self._plan.event_bytes_max:
            return []
        self._held = None
        return [Failed("backend_protocol", f"the answer is larger than {self._plan.event_bytes_max} bytes", 502)]

    def finish(self) -> list[UpstreamEvent]:
        if self._held is None:
            return []
        text, self._held = bytes(self._held), None
        data = parse_json(text)
        if error_in(data) is not None:
            return [failed_frame(data, b"")]
        if not isinstance(data, dict) or not isinstance(data.get("choices"), list):
            return [Failed("backend_protocol", "the backend answered 200 with a body that is no completion", 502)]
        return self._events(data)

    def _events(self, data: dict[str, Any]) -> list[UpstreamEvent]:
        choices = _Choices()
        tokens, piece, ended = choices.read(data["choices"])
        numbers = usage_numbers(data)
        raw = frame_of(*_chunks(data)) if self._plan.stream else b""
        if numbers is not None:
            tokens = max(tokens, numbers.completion)
        events: list[UpstreamEvent] = [Delta(raw, data, tokens, piece), *ended]
        if numbers is not None:
            shown = self._plan.stream and self._plan.include_usage
            chunk = {**_head(data), "choices": [], "usage": data["usage"]} if shown and "usage" in data else None
            events.append(Usage(frame_of(chunk) if chunk else b"", numbers, chunk, standalone=chunk is not None))
        events.append(Done(DONE_FRAME if self._plan.stream else b"", synthesised=True, unfinished=not choices.finished))
        return events


def frame_of(*chunks: Mapping[str, Any]) -> bytes:
    """Chunks as the bytes of a stream."""
    return b"".join(b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n" for chunk in chunks)


def _head(data: Mapping[str, Any]) -> dict[str, Any]:
    head = {key: value for key, value in data.items() if key not in ("choices", "usage")}
    if head.get("object") == "chat.completion":
        head["object"] = "chat.completion.chunk"
    return head


def _chunks(data: Mapping[str, Any]) -> list[dict[str, Any]]:
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
