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

A usage-only chunk that comes while another choice still runs (llama.cpp with ``n: 2`` sends one per choice) is read but
not forwarded, so that a client gets exactly one, at the end.
"""

from __future__ import annotations

from typing import Any

from .base import Decoder, Delta, Done, Failed, Ping, Progress, ProxyRequest, UpstreamEvent, Usage, UsageNumbers
from .chunks import Choices, UsageTally, as_count, parse_json, usage_numbers
from .failure import error_in, failed_frame
from .framing import EVENT_BYTES_MAX, SseFrame, SseSplitter
from .whole import DONE_FRAME, StreamPlan, WholeDecoder


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
        self._choices = Choices()
        self._tally = UsageTally()
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
            events.append(self._usage_chunk(raw, data, numbers))
            return
        tokens, text, ended = self._choices.read(choices)
        events.append(Delta(raw, data, tokens, text))
        events.extend(ended)
        if numbers is not None:
            events.append(Usage(b"", self._tally.of_choices(numbers, choices)))

    def _usage_chunk(self, raw: bytes, data: dict[str, Any], numbers: UsageNumbers) -> Usage:
        summed = self._tally.standalone(numbers)
        if self._choices.running:
            return Usage(b"", summed, data)
        return Usage(raw, summed, data, standalone=True)


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
