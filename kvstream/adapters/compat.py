"""Repairs that a person may ask for: chat chunks as OpenAI's own, from a runtime whose chunks are not quite.

Off by default: frames travel byte for byte. What is switched on changes a chunk only where it has to, so that a stream
that conforms already is still the same bytes.

Tool calls. OpenAI numbers the calls of an answer 0, 1, ... and tells id, type and name of each once, in its first
piece; an answer that called ends with ``tool_calls``. Here a new call begins with an index not seen before, with a new
id and a name under a known index, or, where a piece has no index, with a name. Every other piece belongs to the call of
its index, or else to the last one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from attrs import define, evolve, field, frozen

from .base import Delta, Finished, UpstreamEvent
from .routes import route_of
from .whole import frame_of, stream_chunks

REASONING = ("reasoning_content", "reasoning")


@frozen
class Compat:
    """``tool_calls``: repair them. ``reasoning``: the name to give the reasoning text, ``pass`` for what came."""

    tool_calls: bool = False
    reasoning: str = "pass"

    def rewriter(self, route: str) -> Rewriter | None:
        """What rewrites the events of one answer; None where nothing is asked for."""
        asked = self.tool_calls or self.reasoning != "pass"
        return Rewriter(self) if asked and route_of(route).form == "chat" else None


@define
class _Calls:
    """The calls of one choice. The dictionaries give our number of a call."""

    count: int = 0
    by_index: dict[int, int] = field(factory=dict)
    by_id: dict[str, int] = field(factory=dict)

    def place(self, piece: Mapping[str, Any]) -> tuple[int, bool]:
        """(our number, whether the call begins here) of a piece."""
        index, name = piece.get("index"), piece.get("id")
        index = index if isinstance(index, int) and not isinstance(index, bool) else None
        name = name if isinstance(name, str) and name else None
        if name is not None and name in self.by_id:
            return self.by_id[name], False
        known = index is not None and index in self.by_index
        told = isinstance(piece.get("function"), Mapping) and bool(piece["function"].get("name"))
        if index is None:
            begins = told or not self.count
        else:  # a new id and a name under a known index: a runtime that says 0 for all its calls
            begins = not known or (name is not None and told)
        if begins:
            number, self.count = self.count, self.count + 1
        else:
            number = self.by_index[index] if index is not None else self.count - 1
        if index is not None:
            self.by_index[index] = number
        if name is not None:
            self.by_id[name] = number
        return number, begins


class Rewriter:
    """Feed every batch of events of one answer; get the same events, repaired."""

    def __init__(self, compat: Compat) -> None:
        self._compat = compat
        self._calls: dict[int, _Calls] = {}

    def feed(self, events: list[UpstreamEvent]) -> list[UpstreamEvent]:
        return [self._event(event) for event in events]

    def _event(self, event: UpstreamEvent) -> UpstreamEvent:
        if isinstance(event, Finished) and self._called(event.index) and event.reason == "stop":
            return evolve(event, reason="tool_calls")
        if not isinstance(event, Delta) or not isinstance(event.data, dict):
            return event
        data = self.repaired(event.data)
        if data == event.data:
            return event
        return evolve(event, data=data, raw=_bytes_of(data, event.raw))

    def _called(self, index: int) -> bool:
        return index in self._calls and self._calls[index].count > 0

    def repaired(self, data: dict[str, Any]) -> dict[str, Any]:
        """A chunk or a whole answer, repaired: a new object, or an equal one."""
        choices = data.get("choices")
        if not isinstance(choices, list):
            return data
        return {**data, "choices": [
            self._choice(place, choice) if isinstance(choice, dict) else choice
            for place, choice in enumerate(choices)]}

    def _choice(self, place: int, choice: dict[str, Any]) -> dict[str, Any]:
        index = choice.get("index")
        index = index if isinstance(index, int) else place
        for part in ("delta", "message"):
            if isinstance(choice.get(part), dict):
                choice = {**choice, part: self._body(index, choice[part], whole=part == "message")}
        if self._compat.tool_calls and choice.get("finish_reason") == "stop" and self._called(index):
            choice = {**choice, "finish_reason": "tool_calls"}
        return choice

    def _body(self, index: int, body: dict[str, Any], *, whole: bool) -> dict[str, Any]:
        target = self._compat.reasoning
        if target != "pass":
            [other] = [name for name in REASONING if name != target]
            if other in body and target not in body:
                body = {target if key == other else key: value for key, value in body.items()}
        calls = body.get("tool_calls")
        if not self._compat.tool_calls or not isinstance(calls, list):
            return body
        held = self._calls.setdefault(index, _Calls())
        return {**body, "tool_calls": [
            _piece(held, index, call, whole) if isinstance(call, dict) else call for call in calls]}


def _piece(held: _Calls, choice: int, piece: dict[str, Any], whole: bool) -> dict[str, Any]:
    """A piece of a call with its number, and with id and type where it begins and nowhere else."""
    number, begins = held.place(piece)
    rest = {key: value for key, value in piece.items() if key not in ("index", "id", "type")}
    head: dict[str, Any] = {} if whole else {"index": number}
    if begins:
        given = piece.get("id")
        head["id"] = given if isinstance(given, str) and given else made_id(choice, number, piece)
        head["type"] = piece.get("type") or "function"
        return head | rest
    # A type repeated without an id is left: it says nothing wrong, and some send it with every piece.
    return head | ({"type": piece["type"]} if "type" in piece else {}) | rest


def made_id(choice: int, number: int, piece: Mapping[str, Any]) -> str:
    """An id for a call that came without one: the same for the same call, different for those of one answer."""
    text = f"{choice}/{number}/{piece.get('function')}"
    return "call_" + hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def _bytes_of(data: dict[str, Any], raw: bytes) -> bytes:
    """The frame of a repaired chunk. A whole answer that was told as chunks is told anew; nothing stays nothing."""
    if not raw:
        return b""
    choices = data["choices"]
    if any(isinstance(choice, dict) and "message" in choice for choice in choices):
        whole = not raw.startswith(b"data:")
        return frame_of(data)[len(b"data: "):].rstrip(b"\n") if whole else frame_of(*stream_chunks(data))
    return frame_of(data)
