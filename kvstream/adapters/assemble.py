"""Puts the chunks of a stream together into the answer a client without ``stream`` expects.

KVStream always streams from the runtime (only then does hanging up free it), so for such a client the chunks are merged
here. Unknown fields are merged by their kind rather than dropped, so that a runtime's additions survive: text
grows, lists grow, anything else is replaced by its last value that is not null.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import define, field

from .base import Delta, UpstreamEvent, Usage
from .routes import route_of

# Strings that name something: sent once, or repeated in every chunk, never in pieces.
_NAMES = frozenset({"role", "id", "type", "name", "format", "object", "model", "status", "signature", "expires_at"})
_CHOICE_OWN = frozenset({"index", "delta", "message", "text", "logprobs", "finish_reason"})


class Assembler:
    """Feed every event of one answer, then take ``result()``.

    ``prefix`` is text that the runtime leaves out of a stream but would put before the content of a whole answer.
    """

    def __init__(self, route: str, prefix: str = "") -> None:
        self._route = route
        self._prefix = prefix
        self._top: dict[str, Any] = {}
        self._choices: dict[int, _Choice] = {}

    def feed(self, event: UpstreamEvent) -> None:
        """Take what the event adds to the answer; most events add nothing."""
        if isinstance(event, (Delta, Usage)) and isinstance(event.data, Mapping):
            self._add(event.data)

    def result(self) -> dict[str, Any]:
        """The answer so far, a fresh object."""
        chat = route_of(self._route).form == "chat"
        top = {key: value for key, value in self._top.items() if key != "object"}
        kind = str(self._top.get("object", "chat.completion" if chat else "text_completion"))
        choices = [self._choices[index].result(index, chat, self._prefix) for index in sorted(self._choices)]
        return {"choices": choices, **top, "object": kind.removesuffix(".chunk")}

    def _add(self, data: Mapping[str, Any]) -> None:
        for key, value in data.items():
            if key != "choices" and (value is not None or key not in self._top):
                self._top[key] = value
        choices = data.get("choices")
        for place, choice in enumerate(choices if isinstance(choices, list) else ()):
            if isinstance(choice, Mapping):
                index = choice.get("index")
                self._choices.setdefault(index if isinstance(index, int) else place, _Choice()).add(choice)


@define
class _Text:
    """A string in the making: pieces are joined once, at the end."""

    pieces: list[str] = field(factory=list)


@define
class _Choice:
    """One choice in the making."""

    _body: dict[str, Any] = field(factory=dict)
    _calls: dict[int, dict[str, Any]] = field(factory=dict)
    _text: _Text | None = None
    _logprobs: dict[str, Any] | None = None
    _has_logprobs: bool = False  # even if only as null, which then is the answer's too
    _reason: str | None = None
    _rest: dict[str, Any] = field(factory=dict)
    _whole: bool = False  # it came as one `message`, which lacks no prefix

    def add(self, choice: Mapping[str, Any]) -> None:
        body = choice.get("delta")
        if not isinstance(body, Mapping):
            body = choice.get("message")
            self._whole = isinstance(body, Mapping)
        if isinstance(body, Mapping):
            merge(self._body, {key: value for key, value in body.items() if key != "tool_calls"})
            self._add_calls(body.get("tool_calls"))
        if isinstance(choice.get("text"), str):
            self._text = self._text or _Text()
            self._text.pieces.append(choice["text"])
        if isinstance(choice.get("logprobs"), Mapping):
            if self._logprobs is None:
                self._logprobs = {}
            merge(self._logprobs, choice["logprobs"])
        self._has_logprobs = self._has_logprobs or "logprobs" in choice
        if choice.get("finish_reason") is not None:
            self._reason = choice["finish_reason"]
        for key, value in choice.items():
            if key not in _CHOICE_OWN and (value is not None or key not in self._rest):
                self._rest[key] = value

    def _add_calls(self, calls: Any) -> None:
        for place, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, Mapping):
                index = call.get("index")
                held = self._calls.setdefault(index if isinstance(index, int) else place, {})
                merge(held, {key: value for key, value in call.items() if key != "index"})

    def result(self, index: int, chat: bool, prefix: str) -> dict[str, Any]:
        done: dict[str, Any] = {"index": index, "finish_reason": self._reason}
        if chat:
            message: dict[str, Any] = {"role": "assistant", **finished(self._body)}
            if self._calls:
                message["tool_calls"] = [finished(self._calls[place]) for place in sorted(self._calls)]
            if prefix and not self._whole:
                message["content"] = prefix + (message.get("content") or "")
            if message.get("content") is None:
                message["content"] = None if self._calls or "refusal" in message else ""
            done["message"] = message
        else:
            done["text"] = "".join(self._text.pieces) if self._text else ""
        if self._logprobs is not None:
            done["logprobs"] = finished(self._logprobs)
        elif self._has_logprobs or not chat:
            done["logprobs"] = None
        return {**self._rest, **done}


def merge(held: dict[str, Any], added: Mapping[str, Any]) -> None:
    """Add one delta to what is held. Null adds nothing."""
    for key, value in added.items():
        if value is None:
            held.setdefault(key, None)
        elif isinstance(value, str) and key not in _NAMES:
            if not isinstance(held.get(key), _Text):
                held[key] = _Text()
            held[key].pieces.append(value)
        elif isinstance(value, str):
            held[key] = value or held.get(key, value)
        elif isinstance(value, list):
            if not isinstance(held.get(key), list):
                held[key] = []
            held[key].extend(value)
        elif isinstance(value, Mapping):
            if not isinstance(held.get(key), dict):
                held[key] = {}
            merge(held[key], value)
        else:
            held[key] = value


def finished(held: Mapping[str, Any]) -> dict[str, Any]:
    """The held values as plain JSON."""
    done: dict[str, Any] = {}
    for key, value in held.items():
        if isinstance(value, _Text):
            done[key] = "".join(value.pieces)
        else:
            done[key] = finished(value) if isinstance(value, dict) else value
    return done
