"""llama.cpp's own ``/completion`` and ``/infill``: their stream, and the answer in one piece.

Every object has an ``index`` (which prompt of a list), ``content`` and ``stop``; the one with ``stop: true`` is the
last of its index and tells the counts. The stream has no other end marker. With several prompts the end is the end of
the body, since only the runtime knows how many indexes there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import define, field

from .base import Delta, Done, Finished, Ping, Progress, UpstreamEvent, Usage, UsageNumbers
from .chunks import as_count, usage_numbers
from .frames import TRUNCATED, DataDecoder, StreamPlan
from .framing import SseFrame
from .whole import frame_of


class NativeDecoder(DataDecoder):
    """Events of a stream."""

    def __init__(self, plan: StreamPlan) -> None:
        super().__init__(plan)
        self._seen: set[int] = set()
        self._ended: set[int] = set()
        self._counts: dict[int, UsageNumbers] = {}

    @property
    def finished(self) -> bool:
        return bool(self._ended) and self._seen <= self._ended

    def ended(self) -> UpstreamEvent:
        return Done(b"") if self.finished else TRUNCATED

    def read(self, frame: SseFrame, events: list[UpstreamEvent]) -> None:
        if frame.event != b"ping" and frame.data is not None and frame.data.strip() == b"null":
            events.append(Ping(frame.raw))  # before the first token, when several prompts were sent
        else:
            super().read(frame, events)

    def read_object(self, raw: bytes, data: dict[str, Any], events: list[UpstreamEvent]) -> None:
        index = as_count(data.get("index"))
        self._seen.add(index)
        progress = data.get("prompt_progress")
        if isinstance(progress, dict):
            total, cached, done = (as_count(progress.get(key)) for key in ("total", "cache", "processed"))
            events.append(Progress(raw if self.plan.progress_asked else b"", total, cached, done))
            return
        tokens, text = output_of(data)
        events.append(Delta(raw, data, tokens, text if index == 0 else ""))
        if data.get("stop") is not True:
            return
        self._ended.add(index)
        events.append(Finished(str(data.get("stop_type") or "stop"), index))
        self._counts[index] = numbers_of(data)
        events.append(Usage(b"", summed(self._counts)))
        if self.plan.single:
            self.closed = True
            events.append(Done(b""))


def output_of(data: Mapping[str, Any]) -> tuple[int, str]:
    """(pieces of output, text) of one object. Text may be held back while its bytes are no whole character."""
    content, ids = data.get("content"), data.get("tokens")
    text = content if isinstance(content, str) else ""
    return max(int(bool(text)), len(ids) if isinstance(ids, list) else 0), text


def numbers_of(data: Mapping[str, Any]) -> UsageNumbers:
    """From ``timings``, or from the counts of older builds."""
    return usage_numbers(data) or UsageNumbers(
        as_count(data.get("tokens_evaluated")), as_count(data.get("tokens_predicted")))


def summed(counts: Mapping[int, UsageNumbers]) -> UsageNumbers:
    """Over all indexes: every one has read its own prompt."""
    cached = [numbers.cached for numbers in counts.values() if numbers.cached is not None]
    seconds = [numbers.prompt_s for numbers in counts.values() if numbers.prompt_s is not None]
    return UsageNumbers(sum(n.prompt for n in counts.values()), sum(n.completion for n in counts.values()),
                        sum(cached) if cached else None, sum(seconds) if len(seconds) == len(counts) else None)


def whole_events(data: Any, plan: StreamPlan) -> list[UpstreamEvent] | None:
    """Of the object, or the list of them, where a stream was asked for."""
    parts = data if isinstance(data, list) else [data]
    if not parts or not all(isinstance(part, dict) and "content" in part for part in parts):
        return None
    events: list[UpstreamEvent] = []
    counts: dict[int, UsageNumbers] = {}
    for index, part in enumerate(parts):
        numbers = counts[index] = numbers_of(part)
        tokens, text = output_of(part)
        raw = frame_of(part) if plan.stream else b""
        events += [
            Delta(raw, part, max(tokens, numbers.completion, 1), text if index == 0 else ""),
            Finished(str(part.get("stop_type") or "stop"), index),
            Usage(b"", summed(counts))]
    return [*events, Done(b"", synthesised=True)]


@define
class _Part:
    """The answer to one prompt in the making."""

    last: dict[str, Any] = field(factory=dict)
    text: list[str] = field(factory=list)
    ids: list[Any] = field(factory=list)
    probabilities: list[Any] | None = None

    def add(self, data: Mapping[str, Any]) -> None:
        self.last = dict(data)
        if isinstance(data.get("content"), str):
            self.text.append(data["content"])
        if isinstance(data.get("tokens"), list):
            self.ids.extend(data["tokens"])
        more = data.get("completion_probabilities")
        if isinstance(more, list):
            self.probabilities = self.probabilities or []
            self.probabilities.extend(more)

    def result(self, with_ids: bool) -> dict[str, Any]:
        """A stream brings token ids unasked, the answer in one piece does not."""
        done = self.last | {"content": "".join(self.text), "tokens": self.ids if with_ids else []}
        if self.probabilities is not None:
            done["completion_probabilities"] = self.probabilities
        settings = done.get("generation_settings")
        if isinstance(settings, Mapping) and "stream" in settings:
            done["generation_settings"] = {**settings, "stream": False}
        return done


class NativeAssembler:
    """The object in one piece, or the list of them where there are several."""

    def __init__(self, with_ids: bool = False) -> None:
        self._with_ids = with_ids
        self._parts: dict[int, _Part] = {}

    def feed(self, event: UpstreamEvent) -> None:
        if isinstance(event, Delta) and isinstance(event.data, Mapping):
            self._parts.setdefault(as_count(event.data.get("index")), _Part()).add(event.data)

    def result(self) -> Any:
        parts = [self._parts[index].result(self._with_ids) for index in sorted(self._parts)]
        return parts[0] if len(parts) == 1 else parts
