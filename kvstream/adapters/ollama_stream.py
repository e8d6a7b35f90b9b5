"""Ollama's native answers: lines of JSON, passed on as they are or turned into OpenAI chunks.

Theory of operation. Every answer of the native routes is a run of lines, the last of which has ``done: true``; an
answer in one piece is a run of one. ``_Lines`` cuts and judges: a line with ``error`` ends the answer (Ollama says so
in the middle of a 200 stream, and its ``/v1`` routes swallow it, which is why KVStream never uses those for chats), and
an end of the body before ``done: true`` is a truncation. Ollama ends so without a word when a model repeats one token
more than thirty times.

Two readers stand on that: :class:`NativeDecoder` keeps the lines for a client of the native routes, and
:class:`OpenAIDecoder` makes the frames that a client of ``/v1`` expects. Its ids and times come from the request and
the answer, since an adapter has neither clock nor random numbers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from .assemble import finished, merge
from .base import Delta, Done, Failed, Finished, Ping, ProxyRequest, UpstreamEvent, Usage, UsageNumbers
from .chunks import as_count, parse_json
from .failure import error_in, failed_frame
from .framing import EVENT_BYTES_MAX
from .ndjson import NdjsonSplitter
from .whole import DONE_FRAME, frame_of

TRUNCATED = (
    "Ollama's stream ended without its last line: it crashed, or its guard stopped a model that repeats one token"
)
_TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d)[Tt ](\d\d):(\d\d):(\d\d)(?:\.\d+)?(?:([+-])(\d\d):?(\d\d))?")


class _Lines:
    """Cuts the body and judges how it ends; what a line means is for the subclasses."""

    def __init__(self, line_bytes_max: int = EVENT_BYTES_MAX) -> None:
        self._splitter = NdjsonSplitter(line_bytes_max)
        self._closed = False

    def feed(self, data: bytes) -> list[UpstreamEvent]:
        events: list[UpstreamEvent] = []
        lines = [] if self._closed else self._splitter.feed(data)
        for line in lines:
            if self._take(line, events):
                return events
        if self._splitter.error and not self._closed:
            self._closed = True
            events.append(Failed("backend_protocol", self._splitter.error, 502))
        return events

    def finish(self) -> list[UpstreamEvent]:
        events: list[UpstreamEvent] = []
        if self._closed:
            return events
        rest = self._splitter.finish()
        whole = rest is not None and isinstance(parse_json(rest), dict)
        if not (rest is not None and whole and self._take(rest + b"\n", events)):
            self._closed = True
            events.append(Failed("upstream_stream_truncated", TRUNCATED, 502))
        return events

    def _take(self, line: bytes, events: list[UpstreamEvent]) -> bool:
        """Whether the answer is over with this line."""
        if not line.strip():
            events.append(Ping())
            return False
        data = parse_json(line)
        if not isinstance(data, dict):
            self._closed = True
            events.append(Failed("backend_protocol", "the backend sent a line that is no JSON object", 502))
        elif error_in(data) is not None:
            self._closed = True
            events.append(failed_frame(data, self._shown(line)))
        else:
            self._closed = data.get("done") is True
            self._read(line, data, events)
        return self._closed

    def _shown(self, line: bytes) -> bytes:
        """The part of the runtime's own line that a client may see."""
        return line

    def _read(self, line: bytes, data: dict[str, Any], events: list[UpstreamEvent]) -> None:
        raise NotImplementedError


class NativeDecoder(_Lines):
    """For clients of ``/api/chat`` and ``/api/generate``: every line travels as it came."""

    def _read(self, line: bytes, data: dict[str, Any], events: list[UpstreamEvent]) -> None:
        text, has_output = output_of(data)
        events.append(Delta(line, data, int(has_output), text))
        if self._closed:
            events.append(Finished(reason_of(data)))
            numbers = numbers_of(data)
            if numbers is not None:
                events.append(Usage(b"", numbers))
            events.append(Done(b""))


class NativeAssembler:
    """The lines of a stream as the one object that Ollama gives with ``stream: false``."""

    def __init__(self) -> None:
        self._top: dict[str, Any] = {}
        self._grown: dict[str, Any] = {}

    def feed(self, event: UpstreamEvent) -> None:
        """Take what the event adds; only deltas add anything."""
        if not isinstance(event, Delta) or not isinstance(event.data, Mapping):
            return
        for key, value in event.data.items():
            if key in ("message", "response", "thinking", "tool_calls", "logprobs"):
                merge(self._grown, {key: value})
                self._top.setdefault(key, None)  # its place among the fields
            else:
                self._top[key] = value

    def result(self) -> dict[str, Any]:
        """The answer so far, a fresh object."""
        return {**self._top, **finished(self._grown)}


class OpenAIDecoder(_Lines):
    """For clients of ``/v1/chat/completions`` and ``/v1/completions``: the lines as OpenAI's chunks."""

    def __init__(self, request: ProxyRequest, *, chat: bool, line_bytes_max: int = EVENT_BYTES_MAX) -> None:
        super().__init__(line_bytes_max)
        self._chat = chat
        self._key = hashlib.blake2b(request.body, digest_size=8)
        self._head: dict[str, Any] = {}
        self._calls = 0

    def _shown(self, line: bytes) -> bytes:
        return b""  # the client speaks another dialect; the gateway says it in that

    def _read(self, line: bytes, data: dict[str, Any], events: list[UpstreamEvent]) -> None:
        if not self._head:
            self._begin(line, data, events)
        body, text = self._body(data)
        # An empty line is proof of progress all the same: Ollama is at work on what it holds back.
        events.append(self._chunk(body, tokens=1, text=text) if body else Delta(b""))
        if not self._closed:
            return
        reason = "tool_calls" if self._calls else {"length": "length"}.get(reason_of(data), "stop")
        events += [self._chunk({}, reason=reason), Finished(reason)]
        numbers = numbers_of(data)
        if numbers is not None:
            total = numbers.prompt + numbers.completion
            usage = {"prompt_tokens": numbers.prompt, "completion_tokens": numbers.completion, "total_tokens": total}
            chunk = {**self._head, "choices": [], "usage": usage}
            events.append(Usage(frame_of(chunk), numbers, chunk, standalone=True))
        events.append(Done(DONE_FRAME))

    def _begin(self, line: bytes, data: Mapping[str, Any], events: list[UpstreamEvent]) -> None:
        self._key.update(line)
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{self._key.hexdigest()}",
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": seconds_of(data.get("created_at")),
            "model": data.get("model", ""),
            "system_fingerprint": "fp_ollama",
        }
        if self._chat:
            events.append(self._chunk({"role": "assistant", "content": ""}))

    def _body(self, data: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """(what a delta says, the answer text in it) of one line."""
        message = data.get("message")
        holder = message if self._chat and isinstance(message, Mapping) else data
        text = holder.get("content" if holder is message else "response")
        text = text if isinstance(text, str) else ""
        if not self._chat:
            return ({"text": text} if text else {}), text
        body: dict[str, Any] = {"content": text} if text else {}
        thought = holder.get("thinking")
        if isinstance(thought, str) and thought:
            body["reasoning"] = thought
        calls = holder.get("tool_calls")
        if isinstance(calls, list) and calls:
            body["tool_calls"] = [self._call(call) for call in calls]
        return body, text

    def _call(self, call: Any) -> dict[str, Any]:
        """Ollama sends calls whole, with arguments as an object, and not always with an id."""
        function = call.get("function") if isinstance(call, Mapping) else None
        function = function if isinstance(function, Mapping) else {}
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments if arguments is not None else {})
        index, self._calls = self._calls, self._calls + 1
        given = call.get("id") if isinstance(call, Mapping) else None
        name = given if isinstance(given, str) and given else f"call_{self._key.hexdigest()[:12]}{index}"
        function_out = {"name": function.get("name", ""), "arguments": text}
        return {"index": index, "id": name, "type": "function", "function": function_out}

    def _chunk(self, body: dict[str, Any], *, tokens: int = 0, text: str = "", reason: str | None = None) -> Delta:
        choice: dict[str, Any] = {"index": 0, "delta": body} if self._chat else {"index": 0, "text": "", **body}
        chunk = {**self._head, "choices": [{**choice, "finish_reason": reason}]}
        return Delta(frame_of(chunk), chunk, tokens, text)


def output_of(data: Mapping[str, Any]) -> tuple[str, bool]:
    """(answer text, whether anything was generated) of a native line."""
    message = data.get("message")
    holder = message if isinstance(message, Mapping) else data
    text = holder.get("content" if holder is message else "response")
    text = text if isinstance(text, str) else ""
    return text, bool(text or holder.get("thinking") or holder.get("tool_calls"))


def reason_of(data: Mapping[str, Any]) -> str:
    """``done_reason``; servers before 0.1.40 do not give one. ``load`` and ``unload`` answer an empty prompt."""
    reason = data.get("done_reason")
    return reason if isinstance(reason, str) and reason else "stop"


def numbers_of(data: Mapping[str, Any]) -> UsageNumbers | None:
    """Token counts of a last line. A count of zero is left out by Ollama; without the prompt's there is nothing that
    may be believed (older runners left it out when the prompt was cached)."""
    prompt = as_count(data.get("prompt_eval_count"))
    return UsageNumbers(prompt, as_count(data.get("eval_count"))) if prompt else None


def seconds_of(created_at: Any) -> int:
    """Unix seconds of an RFC 3339 time; 0 when it is none."""
    found = _TIME.match(created_at) if isinstance(created_at, str) else None
    if found is None:
        return 0
    year, month, day, hour, minute, second = (int(part) for part in found.groups()[:6])
    # Days since 1970-01-01 in the Gregorian calendar; the year is taken to begin in March, so that leap days come last.
    year, month = (year - 1, month + 9) if month < 3 else (year, month - 3)
    days = 365 * year + year // 4 - year // 100 + year // 400 + (153 * month + 2) // 5 + day - 1 - 719468
    sign, hours, minutes = found.groups()[6:]
    offset = (int(hours) * 60 + int(minutes)) * (-60 if sign == "-" else 60) if sign else 0
    return max(0, days * 86400 + hour * 3600 + minute * 60 + second - offset)
