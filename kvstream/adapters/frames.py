"""What the decoders of all event streams have in common: bytes to frames, one end, nothing after it.

A decoder says how a frame is read (``read``) and what it means when the body ends without its end marker (``ended``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from .base import Delta, Done, Failed, Ping, UpstreamEvent
from .chunks import parse_json
from .failure import error_in, failed_frame
from .framing import EVENT_BYTES_MAX, SseFrame, SseSplitter

TRUNCATED = Failed("upstream_stream_truncated", "the backend's stream ended before it was finished", 502)


@frozen
class StreamPlan:
    """What a decoder must know about the request. ``progress_asked``: the client itself wants ``prompt_progress``.
    ``single``: the answer has one choice, so that its end is the end."""

    stream: bool
    include_usage: bool
    progress_asked: bool
    event_bytes_max: int = EVENT_BYTES_MAX
    single: bool = True


class FrameDecoder:
    """Events of a ``text/event-stream`` body. Subclasses set ``closed`` at the end of the answer."""

    def __init__(self, plan: StreamPlan) -> None:
        self.plan = plan
        self.closed = False
        self._splitter = SseSplitter(plan.event_bytes_max)

    def read(self, frame: SseFrame, events: list[UpstreamEvent]) -> None:
        """Add the events of one frame."""
        raise NotImplementedError

    def ended(self) -> UpstreamEvent:
        """What it means that the body ended here, without an end marker."""
        raise NotImplementedError

    def feed(self, data: bytes) -> list[UpstreamEvent]:
        events: list[UpstreamEvent] = []
        for frame in self._splitter.feed(data):
            if self.closed:
                return events
            self.read(frame, events)
        if self._splitter.error and not self.closed:
            self.closed = True
            events.append(Failed("backend_protocol", self._splitter.error, 502))
        return events

    def finish(self) -> list[UpstreamEvent]:
        events: list[UpstreamEvent] = []
        rest = None if self.closed else self._splitter.finish()
        if rest is not None and _is_complete(rest):
            self.read(_ended(rest), events)
        if not self.closed:
            self.closed = True
            events.append(self.ended())
        return events


class DataDecoder(FrameDecoder):
    """A stream of objects without names: OpenAI's chunks and llama.cpp's own."""

    @property
    def finished(self) -> bool:
        """Whether all of the answer that was seen came to its end."""
        raise NotImplementedError

    def read_object(self, raw: bytes, data: dict[str, Any], events: list[UpstreamEvent]) -> None:
        """Add the events of one object."""
        raise NotImplementedError

    def read(self, frame: SseFrame, events: list[UpstreamEvent]) -> None:
        text = frame.data.strip() if frame.data is not None else b""
        if not text or frame.event == b"ping":
            events.append(Ping())
            return
        if text == b"[DONE]":
            self.closed = True
            events.append(Done(frame.raw, unfinished=not self.finished))
            return
        data = parse_json(text)
        if frame.event == b"error" or error_in(data) is not None:
            self.closed = True
            events.append(failed_frame(data if data is not None else text.decode("utf-8", "replace"), frame.raw))
        elif isinstance(data, dict):
            self.read_object(frame.raw, data, events)
        else:
            events.append(Delta(frame.raw, data))


class NamedDecoder(FrameDecoder):
    """A stream of named events, each an object with a ``type``: those of Anthropic and of the Responses API."""

    def read(self, frame: SseFrame, events: list[UpstreamEvent]) -> None:
        text = frame.data.strip() if frame.data is not None else b""
        if not text or frame.event == b"ping":
            # A comment is for whoever speaks HTTP; a ping is an event of the API, and its clients may wait for it.
            events.append(Ping(frame.raw if text else b""))
            return
        data = parse_json(text)
        kind = data.get("type") if isinstance(data, dict) else None
        if kind == "ping":
            events.append(Ping(frame.raw))
        elif frame.event == b"error" or kind == "error" or error_in(data) is not None:
            self.closed = True
            # An error without the name of one is not seen by these clients: we say it ourselves then.
            raw = frame.raw if frame.event == b"error" else b""
            events.append(failed_frame(data if data is not None else text.decode("utf-8", "replace"), raw))
        else:
            self.read_event(frame.raw, str(kind or ""), data if isinstance(data, dict) else {}, events)

    def read_event(self, raw: bytes, kind: str, data: dict[str, Any], events: list[UpstreamEvent]) -> None:
        """Add the events of one event of the API."""
        raise NotImplementedError


def named_frame(name: str, data: Mapping[str, Any]) -> bytes:
    """One named event as bytes."""
    return b"event: " + name.encode() + b"\ndata: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


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
