"""Who reads an answer: the decoder and the assembler of each form of route."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from attrs import frozen

from . import messages, native, ollama_stream, responses
from .assemble import Assembler
from .base import AnswerAssembler, Decoder, ProxyRequest, UsageNumbers
from .chunks import usage_numbers
from .frames import FrameDecoder, StreamPlan
from .framing import EVENT_BYTES_MAX
from .routes import route_of
from .sse import StreamDecoder
from .whole import WholeDecoder, WholeReader, chat_events


@frozen
class Reading:
    """How the answers of one form are read: as a stream, in one piece where a stream was asked for, and put together.
    ``assembler`` is given the request and the text that the runtime leaves out of a stream."""

    stream: Callable[[StreamPlan], FrameDecoder]
    whole: WholeReader
    assembler: Callable[[ProxyRequest, str], AnswerAssembler]


def _native(request: ProxyRequest, prefix: str) -> AnswerAssembler:
    return native.NativeAssembler(with_ids=request.view.get("return_tokens") is True)


_CHAT = Reading(StreamDecoder, chat_events, lambda request, prefix: Assembler(request.route, prefix))
_NATIVE = Reading(native.NativeDecoder, native.whole_events, _native)

READINGS: Mapping[str, Reading] = MappingProxyType({
    "chat": _CHAT,
    "completions": _CHAT,
    "messages": Reading(messages.MessagesDecoder, messages.whole_events,
                        lambda request, prefix: messages.MessagesAssembler(prefix)),
    "responses": Reading(responses.ResponsesDecoder, responses.whole_events,
                         lambda request, prefix: responses.ResponsesAssembler()),
    "native": _NATIVE,
    "infill": _NATIVE,
})
"""By the form of a route; those that cannot stream are in none."""


def open_decoder(request: ProxyRequest, content_type: str, event_bytes_max: int = EVENT_BYTES_MAX) -> Decoder:
    """The decoder that fits an answer with this ``Content-Type``."""
    reading = READINGS[route_of(request.route).form]
    plan = StreamPlan(request.stream, request.include_usage, request.view.get("return_progress") is True,
                      event_bytes_max, single=_is_single(request.view))
    if content_type.split(";")[0].strip().lower() == "application/json":
        return WholeDecoder(plan, reading.whole)
    return reading.stream(plan)


def open_assembler(request: ProxyRequest, prefix: str = "") -> AnswerAssembler:
    """What puts the events of a stream together; ``prefix`` as in :class:`assemble.Assembler`."""
    reading = READINGS.get(route_of(request.route).form)
    return reading.assembler(request, prefix) if reading else Assembler(request.route)  # nothing to put together


def usage_of_whole(answer: Any) -> UsageNumbers | None:
    """Token counts of an answer in one piece, of whatever form; of a list of them, added up."""
    if isinstance(answer, list):
        known = {index: numbers for index, item in enumerate(answer) if (numbers := usage_of_whole(item)) is not None}
        return native.summed(known) if known else None
    if not isinstance(answer, dict):
        return None
    if "prompt_eval_count" in answer:
        return ollama_stream.numbers_of(answer)
    usage = answer.get("usage")
    if isinstance(usage, dict) and "input_tokens" in usage:
        return messages.usage_of(usage) if answer.get("type") == "message" else responses.usage_of(usage)
    return usage_numbers(answer)


def _is_single(view: Mapping[str, Any]) -> bool:
    """One prompt and one choice: the first end is the end."""
    prompt = view.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(item, int) for item in prompt)
    return not several and all(view.get(name) in (None, 0, 1) for name in ("n", "n_cmpl"))
