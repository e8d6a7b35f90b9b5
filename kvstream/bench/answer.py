"""A streamed answer as its client sees it: what came when, told by events and not by reads. Pure.

A read may hold half an event or twenty; each event has the time of the read that completed it. The first token is the
first piece of anything that was generated: text, reasoning or a tool call, never the role or an empty chunk. The first
answer is the first piece of text that a person reads as the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import define, field

from ..adapters.base import UsageNumbers
from ..adapters.chunks import UsageTally, parse_json, usage_numbers
from ..adapters.failure import error_in
from ..adapters.framing import SseFrame, SseSplitter

QUEUE_NOTE = b": queued-ms "
"""How a KVStream tells the wait in its queue once the headers are gone: a comment, which other clients skip."""

_NOT_GENERATED = frozenset({"role", "reasoning_signature"})
_ANSWER = ("content", "refusal")


@define
class AnswerReader:
    """Feed it the bytes of an answer with the time of each read. Times are the caller's, in seconds."""

    first_byte: float | None = None
    first_token: float | None = None
    first_answer: float | None = None
    last_token: float | None = None
    token_times: list[float] = field(factory=list)  # of every chunk with something generated in it
    text: str = ""
    usage: UsageNumbers | None = None
    finish: str | None = None
    done: bool = False
    queue_s: float | None = None
    error: str | None = None  # the runtime's own words, in the middle of the stream
    malformed: str | None = None
    _splitter: SseSplitter = field(factory=SseSplitter)
    _tally: UsageTally = field(factory=UsageTally)

    def feed(self, data: bytes, at: float) -> None:
        if data and self.first_byte is None:
            self.first_byte = at
        for frame in self._splitter.feed(data):
            self._read(frame, at)
        if self._splitter.error:
            self.malformed = self._splitter.error

    def close(self, at: float) -> None:
        """The body has ended; a last event may lack its empty line."""
        frame = self._splitter.finish()
        if frame is not None:
            self._read(frame, at)

    @property
    def complete(self) -> bool:
        """It came to its end: a choice said why it stopped. Whether ``[DONE]`` followed differs between runtimes."""
        return self.finish is not None and self.error is None and self.malformed is None

    def _read(self, frame: SseFrame, at: float) -> None:
        if frame.data is None:
            if frame.raw.startswith(QUEUE_NOTE):
                self.queue_s = milliseconds(frame.raw[len(QUEUE_NOTE):])
            return
        if frame.data.strip() == b"[DONE]":
            self.done = True
            return
        value = parse_json(frame.data)
        if not isinstance(value, dict):
            self.malformed = f"an event that is no JSON object: {frame.data[:80]!r}"
            return
        error = error_in(value)
        if error is not None:
            self.error = message_of(error)
            return
        self._object(value, at)

    def _object(self, value: Mapping[str, Any], at: float) -> None:
        choices = value.get("choices")
        choices = [c for c in choices if isinstance(c, dict)] if isinstance(choices, list) else []
        numbers = usage_numbers(value)
        if numbers is not None:
            self.usage = self._tally.of_choices(numbers, choices) if choices else self._tally.standalone(numbers)
        generated = False
        for choice in choices:
            text, something = generated_in(choice)
            generated = generated or something
            self.text += text
            if text and self.first_answer is None:
                self.first_answer = at
            reason = choice.get("finish_reason")
            if isinstance(reason, str) and reason:
                self.finish = reason
        if generated:
            self.first_token = at if self.first_token is None else self.first_token
            self.last_token = at
            self.token_times.append(at)


def generated_in(choice: Mapping[str, Any]) -> tuple[str, bool]:
    """(answer text, whether anything was generated) of one choice of a chunk."""
    body = choice.get("delta")
    if not isinstance(body, dict):
        text = choice.get("text")
        return (text, True) if isinstance(text, str) and text else ("", False)
    answer = "".join(body[name] for name in _ANSWER if isinstance(body.get(name), str))
    return answer, any(_says_something(part) for name, part in body.items() if name not in _NOT_GENERATED)


def _says_something(part: Any) -> bool:
    """Text, or something with text in it. A tool call whose name and arguments are still empty says nothing yet; its
    id, index and type are not generated."""
    if isinstance(part, str):
        return bool(part)
    if isinstance(part, list):
        return any(_says_something(item) for item in part)
    if isinstance(part, dict):
        return any(_says_something(item) for name, item in part.items() if name not in ("id", "type"))
    return False


def message_of(error: Any) -> str:
    """The words of an error, as it comes inside a frame or a body."""
    if isinstance(error, dict):
        return str(error.get("message") or error)[:300]
    return str(error)[:300]


def milliseconds(value: bytes | str) -> float | None:
    """A number of milliseconds from somebody else's header or comment, as seconds; None when it is none."""
    try:
        number = float(value)
    except ValueError:
        return None
    return number / 1000 if 0 <= number < 1e12 else None
