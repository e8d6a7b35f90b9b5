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

from .base import Delta, Done, Progress, UpstreamEvent, Usage, UsageNumbers
from .chunks import Choices, UsageTally, as_count, usage_numbers
from .frames import TRUNCATED, DataDecoder, StreamPlan
from .whole import DONE_FRAME


class StreamDecoder(DataDecoder):
    """Events of a ``text/event-stream`` body."""

    def __init__(self, plan: StreamPlan) -> None:
        super().__init__(plan)
        self._choices = Choices()
        self._tally = UsageTally()

    @property
    def finished(self) -> bool:
        return self._choices.finished

    def ended(self) -> UpstreamEvent:
        return Done(DONE_FRAME, synthesised=True) if self.finished else TRUNCATED

    def read_object(self, raw: bytes, data: dict[str, Any], events: list[UpstreamEvent]) -> None:
        choices = data.get("choices")
        choices = choices if isinstance(choices, list) else []
        numbers = usage_numbers(data)
        progress = data.get("prompt_progress")
        if isinstance(progress, dict):
            total, cached, done = (as_count(progress.get(key)) for key in ("total", "cache", "processed"))
            events.append(Progress(raw if self.plan.progress_asked else b"", total, cached, done))
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
