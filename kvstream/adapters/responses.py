"""OpenAI's ``/v1/responses``: its stream, and the answer in one piece.

``response.created`` ... deltas ... and then one of ``response.completed``, ``response.incomplete`` (cut at a limit) and
``response.failed``, each with the whole response and its token counts. There is no ``[DONE]``, and none is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from .base import Delta, Done, Finished, UpstreamEvent, Usage, UsageNumbers
from .chunks import as_count, prompt_seconds
from .failure import failed_frame
from .frames import TRUNCATED, NamedDecoder, StreamPlan, named_frame
from .framing import SseFrame

_ENDS = frozenset(("response.completed", "response.incomplete"))
_KEPT = frozenset(("response.output_text.delta", "response.function_call_arguments.delta"))


class ResponsesDecoder(NamedDecoder):
    """Events of a stream."""

    def ended(self) -> UpstreamEvent:
        return TRUNCATED

    def read(self, frame: SseFrame, events: list[UpstreamEvent]) -> None:
        if frame.data is not None and frame.data.strip() == b"[DONE]":  # some send it all the same
            self.closed = True
            events.append(Done(frame.raw, unfinished=True))
            return
        super().read(frame, events)

    def read_event(self, raw: bytes, kind: str, data: dict[str, Any], events: list[UpstreamEvent]) -> None:
        response = data.get("response")
        response = response if isinstance(response, dict) else {}
        if kind == "response.failed":
            self.closed = True
            events.append(failed_frame(response, raw))
        elif kind in _ENDS:
            self.closed = True
            events.append(Delta(raw, data))
            events.extend(ending_of(response, data.get("timings")))
            events.append(Done(b""))
        else:
            tokens, text = _output(kind, data)
            events.append(Delta(raw, data, tokens, text))


def ending_of(response: Mapping[str, Any], timings: object = None) -> list[UpstreamEvent]:
    """Usage and reason of a response that is over; llama.cpp's ``timings`` stand beside it in the last event."""
    usage = response.get("usage")
    events: list[UpstreamEvent] = []
    if isinstance(usage, Mapping):
        events.append(Usage(b"", evolve(usage_of(usage), prompt_s=prompt_seconds(timings))))
    details = response.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, Mapping) else None
    return [*events, Finished(str(reason or response.get("status") or "completed"))]


def usage_of(usage: Mapping[str, Any]) -> UsageNumbers:
    details = usage.get("input_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
    return UsageNumbers(as_count(usage.get("input_tokens")), as_count(usage.get("output_tokens")),
                        as_count(cached) if isinstance(cached, int) else None)


def _output(kind: str, data: Mapping[str, Any]) -> tuple[int, str]:
    """(whether something was generated, the answer text) of an event: text, reasoning, arguments of tools."""
    if kind.endswith(".delta"):
        delta = data.get("delta")
        text = delta if kind == "response.output_text.delta" and isinstance(delta, str) else ""
        return int(bool(delta)), text
    if kind == "response.output_item.added":
        item = data.get("item")
        return int(isinstance(item, Mapping) and str(item.get("type", "")).endswith("_call")), ""
    return 0, ""


class ResponsesAssembler:
    """The response in one piece. It stands in the last event; before that, from what came so far."""

    def __init__(self) -> None:
        self._response: dict[str, Any] = {}
        self._items: dict[str, dict[str, Any]] = {}
        self._pieces: dict[str, list[str]] = {}
        self._over = False

    def feed(self, event: UpstreamEvent) -> None:
        if not isinstance(event, Delta) or not isinstance(event.data, Mapping):
            return
        data = event.data
        kind = str(data.get("type", ""))
        if data.get("object") == "response":
            self._response, self._over = dict(data), True
        elif isinstance(data.get("response"), Mapping):
            self._response.update(data["response"])
            self._over = kind in _ENDS
        elif kind.startswith("response.output_item.") and isinstance(data.get("item"), Mapping):
            item = dict(data["item"])
            self._items[str(item.get("id"))] = item
        elif kind in _KEPT and isinstance(data.get("delta"), str):
            self._pieces.setdefault(str(data.get("item_id")), []).append(data["delta"])

    def result(self) -> dict[str, Any]:
        response = {"object": "response"} | self._response
        if self._over:
            if response.get("status") == "completed" and "created_at" in response:
                response.setdefault("completed_at", response["created_at"])  # as llama.cpp does in one piece
            return response
        return response | {"output": [self._item(name, item) for name, item in self._items.items()]}

    def _item(self, name: str, item: dict[str, Any]) -> dict[str, Any]:
        """An item that was cut, with what came of it."""
        if item.get("status") == "completed" or name not in self._pieces:
            return item
        text = "".join(self._pieces[name])
        if item.get("type") == "function_call":
            return item | {"arguments": text, "status": "incomplete"}
        part = {"type": "output_text", "annotations": [], "logprobs": [], "text": text}
        return item | {"content": [part], "status": "incomplete"}


def frames_of(response: Mapping[str, Any]) -> bytes:
    """A whole response as the stream that a client asked for: its items, each in one piece."""
    head = {**response, "status": "in_progress", "output": [], "usage": None}
    out = [named_frame("response.created", {"type": "response.created", "response": head})]
    items = response.get("output")
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, Mapping):
            out += _item_frames(index, item)
    name = "response.incomplete" if response.get("status") == "incomplete" else "response.completed"
    out.append(named_frame(name, {"type": name, "response": response}))
    return b"".join(out)


def _item_frames(index: int, item: Mapping[str, Any]) -> list[bytes]:
    place = {"item_id": item.get("id"), "output_index": index}
    empty: dict[str, Any] = {key: value for key, value in (("content", []), ("arguments", "")) if key in item}
    told = [("response.output_item.added", {"output_index": index, "item": {**item, **empty, "status": "in_progress"}})]
    parts = item.get("content")
    for part_index, part in enumerate(parts if isinstance(parts, list) else ()):
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            told.append(("response.output_text.delta", {**place, "content_index": part_index, "delta": part["text"]}))
    if isinstance(item.get("arguments"), str):
        told.append(("response.function_call_arguments.delta", {**place, "delta": item["arguments"]}))
    told.append(("response.output_item.done", {"output_index": index, "item": dict(item)}))
    return [named_frame(name, {"type": name, **data}) for name, data in told]


def whole_events(data: Any, plan: StreamPlan) -> list[UpstreamEvent] | None:
    """Of a whole response where a stream was asked for."""
    if not isinstance(data, dict) or not isinstance(data.get("output"), list):
        return None
    if data.get("status") == "failed":
        return [failed_frame(data, b"")]
    usage = data.get("usage")
    tokens = usage_of(usage).completion if isinstance(usage, dict) else 0
    raw = frames_of(data) if plan.stream else b""
    return [Delta(raw, data, max(1, tokens), _text_of(data["output"])), *ending_of(data), Done(b"", synthesised=True)]


def _text_of(items: list[Any]) -> str:
    texts: list[str] = []
    for item in items:
        content = item.get("content") if isinstance(item, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") == "output_text" and isinstance(part.get("text"), str):
                texts.append(part["text"])
    return "".join(texts)
