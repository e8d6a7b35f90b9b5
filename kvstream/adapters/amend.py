"""Truthful usage of an answer whose prompt was read in a pass before it.

Where several requests wait for one prompt, it is read by itself first (``SlotCalls.read_prompt``), so the runtime finds
all of it in its slot when the request itself comes, and reports a cached prompt to a client who waited for it to be
computed. Here the reports are put right: tokens that the first pass computed are not cached, and its time counts. Only
frames that report something change; all others stay byte for byte, and so do the other fields and lines of those.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from attrs import evolve, frozen

from .base import Decoder, Delta, Progress, UpstreamEvent, Usage, UsageNumbers
from .chunks import COUNT_MAX, as_count, parse_json
from .framing import SseSplitter
from .slot_calls import PromptWork

_REPORTS = (b'"usage"', b'"timings"', b'"prompt_progress"')
_LINE_ENDS = (b"\r\n", b"\n", b"\r")
_Framed = TypeVar("_Framed", Delta, Usage)


@frozen
class Amendment:
    """``first`` is what the pass before cost: of its tokens ``first.cached`` were there already."""

    first: PromptWork

    def numbers(self, numbers: UsageNumbers) -> UsageNumbers:
        """The counts of both passes together."""
        if numbers.cached is None:
            return numbers
        seconds = None if numbers.prompt_s is None or self.first.seconds is None else (
            numbers.prompt_s + self.first.seconds)
        return evolve(numbers, cached=min(numbers.cached, self.first.cached), prompt_s=seconds)

    def data(self, data: Any) -> Any:
        """A parsed frame or a whole answer of any route; the same object where nothing was to be put right."""
        if not isinstance(data, list):
            return self._object(data, ("message", "response"))
        parts = [self._object(part) for part in data]
        return data if all(new is old for new, old in zip(parts, data, strict=True)) else parts

    def answer(self, body: bytes, answer: Any) -> bytes:
        """A whole answer's bytes, of which ``answer`` is the JSON."""
        new = self.data(answer)
        return body if new is answer else compact(new)

    def _object(self, data: Any, inner: tuple[str, ...] = ()) -> Any:
        """Reports stand on top of an object, or in what it carries (``inner``)."""
        if not isinstance(data, dict):
            return data
        changes: dict[str, Any] = {}
        for name, change in (("usage", self._usage), ("timings", self._timings), ("prompt_progress", self._progress),
                             *((name, self._object) for name in inner)):
            held = data.get(name)
            if isinstance(held, dict) and (new := change(held)) is not held:
                changes[name] = new
        return {**data, **changes} if changes else data

    def raw(self, raw: bytes) -> bytes:
        """One frame of a stream, or several; the same bytes where nothing was to be put right."""
        if not any(report in raw for report in _REPORTS):
            return raw
        splitter = SseSplitter(len(raw) + 1)
        frames = splitter.feed(raw)
        if rest := splitter.finish():
            frames.append(rest)
        return b"".join(self._frame(frame.raw, frame.data) for frame in frames)

    def event(self, event: UpstreamEvent) -> UpstreamEvent:
        if isinstance(event, Delta):
            return self._changed(event, data=self.data(event.data), raw=self.raw(event.raw))
        if isinstance(event, Usage):
            return evolve(self._changed(event, data=self.data(event.data), raw=self.raw(event.raw)),
                          numbers=self.numbers(event.numbers))
        if isinstance(event, Progress):
            return evolve(event, raw=self.raw(event.raw), cached=min(event.cached, self.first.cached))
        return event

    def _changed(self, event: _Framed, **fields: Any) -> _Framed:
        same = all(getattr(event, name) is value for name, value in fields.items())
        return event if same else evolve(event, **fields)

    def _frame(self, raw: bytes, text: bytes | None) -> bytes:
        data = parse_json(text.strip()) if text is not None else None
        new = self.data(data)
        return raw if new is data else _with_data(raw, compact(new))

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """OpenAI's and the Responses API tell all of the prompt and how much of it was cached; Anthropic's tells what
        was not cached, so there the difference goes over."""
        changes: dict[str, Any] = {}
        for name in ("prompt_tokens_details", "input_tokens_details"):
            details = usage.get(name)
            if isinstance(details, dict) and (less := self._less(details.get("cached_tokens"))):
                changes[name] = {**details, "cached_tokens": details["cached_tokens"] - less}
        if less := self._less(usage.get("cache_read_input_tokens")):
            changes["cache_read_input_tokens"] = usage["cache_read_input_tokens"] - less
            changes["input_tokens"] = as_count(usage.get("input_tokens")) + less
        return {**usage, **changes} if changes else usage

    def _timings(self, timings: dict[str, Any]) -> dict[str, Any]:
        less = self._less(timings.get("cache_n"))
        ms = timings.get("prompt_ms")
        if not less:
            return timings
        changes: dict[str, Any] = {"cache_n": timings["cache_n"] - less}
        read = changes["prompt_n"] = as_count(timings.get("prompt_n")) + less
        if isinstance(ms, (int, float)) and not isinstance(ms, bool) and ms >= 0 and self.first.seconds is not None:
            total = changes["prompt_ms"] = round(ms + self.first.seconds * 1000, 3)
            rates = {"prompt_per_token_ms": total / read, "prompt_per_second": read / total * 1000 if total else 0.0}
            changes |= {name: value for name, value in rates.items() if name in timings}
        return {**timings, **changes}

    def _progress(self, progress: dict[str, Any]) -> dict[str, Any]:
        """What is shown of the second pass. The first one showed nothing: it was not the client's own call."""
        less = self._less(progress.get("cache"))
        return {**progress, "cache": progress["cache"] - less} if less else progress

    def _less(self, cached: Any) -> int:
        """How many of the tokens reported as cached are not."""
        if not isinstance(cached, int) or isinstance(cached, bool) or not 0 < cached <= COUNT_MAX:
            return 0
        return max(0, cached - self.first.cached)


class AmendedDecoder:
    """A decoder whose events tell the truth about a prompt that was read before. See the module.

    Wrap the outermost decoder with it; the runtime's own figures for this call are gone behind it.
    """

    def __init__(self, decoder: Decoder, first: PromptWork) -> None:
        self._decoder = decoder
        self._amend: Callable[[UpstreamEvent], UpstreamEvent] = Amendment(first).event

    def feed(self, data: bytes) -> list[UpstreamEvent]:
        return [self._amend(event) for event in self._decoder.feed(data)]

    def finish(self) -> list[UpstreamEvent]:
        return [self._amend(event) for event in self._decoder.finish()]


def compact(data: Any) -> bytes:
    """JSON as llama.cpp writes it. A lone surrogate has no UTF-8 form: then all beyond ASCII is escaped."""
    try:
        return json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(data, separators=(",", ":")).encode()


def _with_data(raw: bytes, data: bytes) -> bytes:
    """The same frame with other data: its first line of data has all of it, further ones go, other lines stay."""
    lines, written = [], False
    for line in raw.splitlines(keepends=True):
        if not line.startswith(b"data:"):
            lines.append(line)
        elif not written:
            written = True
            end = next((end for end in _LINE_ENDS if line.endswith(end)), b"")
            lines.append(b"data: " + data + end)
    return b"".join(lines)
