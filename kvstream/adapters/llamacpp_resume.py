"""Continuing an answer of ``llama-server`` after it was stopped, so that its client cannot tell.

Theory of operation. The continuation is a ``/completion`` over token ids: the prompt's, and those of exactly the text
that the client has. The runtime then samples the next token as it would have done, since penalties and the like look at
all tokens in the slot. Its frames are put into the likeness of the answer's last one (same id, same ``created``, no
second role), and the numbers at the end are sums: the prompt counts once, what the parts before were made of is added.

Where it may be cut:

* *Between frames, anywhere.* The server sends whole characters, and holds back text that could be the beginning of a
  stop string, until it knows. So what was sent never ends in half a character nor in a part of a stop string that is
  still possible (measured, ``tests/e2e/test_preemption.py``): the continuation starts with the first byte of either.
* *Not* where the text is not all there is: tool calls, reasoning, log probabilities. And not where a second sampler
  would begin anew: a grammar, a seed, mirostat.

What is not known to be harmless is not continued: a field that is in no list here makes a request unpreemptible, which
costs nobody anything but the seat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from attrs import evolve

from .base import Delta, Done, Finished, HttpCall, HttpReply, Progress, ProxyRequest, UpstreamEvent, Usage, UsageNumbers
from .bodies import dumps
from .chunks import as_count
from .frames import StreamPlan
from .framing import EVENT_BYTES_MAX
from .llamacpp_count import are_ids, has_media
from .native import NativeDecoder, numbers_of
from .routes import route_of
from .slot_calls import Legs
from .whole import DONE_FRAME, frame_of

_FORMS: Final = frozenset(("chat", "completions", "native"))
# Travel on as they are. All have the same name on every route.
_SAMPLING: Final = frozenset((
    "temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p", "top_n_sigma", "xtc_probability",
    "xtc_threshold", "typical_p", "repeat_last_n", "repeat_penalty", "presence_penalty", "frequency_penalty",
    "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "min_keep",
    "ignore_eos", "logit_bias", "samplers", "n_cache_reuse"))
# Say nothing about what the next token is, once the prompt is made of ids.
_SPENT: Final = frozenset((
    "model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n_predict",
    "stop", "id_slot", "cache_prompt", "return_tokens", "user", "metadata", "store", "service_tier",
    "safety_identifier", "prompt_cache_key", "chat_template_kwargs", "add_generation_prompt", "tool_choice",
    "parallel_tool_calls"))
# Fine while they ask for nothing.
_OFF: Final = frozenset((
    "tools", "functions", "function_call", "grammar", "json_schema", "logprobs", "top_logprobs", "n_probs",
    "post_sampling_probs", "lora", "image_data", "echo", "suffix", "mirostat", "return_progress", "timings_per_token",
    "response_fields"))
_ONE: Final = frozenset(("n", "n_cmpl", "best_of"))
_REASONS: Final = {"limit": "length"}.get


class Server(Protocol):
    """What is needed of ``LlamaCppBackend``."""

    @property
    def model(self) -> str: ...

    def headers(self, forwarded: tuple[tuple[str, str], ...] = (), accept: str = "") -> tuple[tuple[str, str], ...]: ...


def can_resume(request: ProxyRequest) -> bool:
    """See ``SlotCalls.can_resume``."""
    view, form = request.view, route_of(request.route).form
    if form not in _FORMS or has_media(view.get("messages")):
        return False
    prompt = view.get("prompt")
    if form != "chat" and not (isinstance(prompt, str) or (isinstance(prompt, list) and prompt and are_ids(prompt))):
        return False
    return all(_is_harmless(name, value, form) for name, value in view.items())


def _is_harmless(name: str, value: Any, form: str) -> bool:
    if name in _SAMPLING:
        return True
    if name == "n_predict":
        return form == "native"
    if name == "stop":
        return value is None or isinstance(value, list) or (isinstance(value, str) and form != "native")
    if name in _SPENT:
        return True
    if name in _OFF:
        return not value
    if name in _ONE:
        return value in (None, 0, 1)
    if name == "seed":
        return value is None or value == -1
    if name == "response_format":
        return value is None or (isinstance(value, Mapping) and value.get("type") == "text")
    return False


def tokens_left(request: ProxyRequest, made: int) -> int | None:
    """How many more tokens the client's own limit allows; None without one."""
    route = route_of(request.route)
    # Where a field has an older and a newer name and both are given, the last one counts.
    limits = [value for name in reversed(route.limits) if (value := request.view.get(name)) is not None]
    if not limits or not isinstance(limits[0], (int, float)) or limits[0] < 0:
        return None
    return max(0, int(limits[0]) - made)


def resume(server: Server, request: ProxyRequest, ids: Sequence[int], slot: int | None, made: int) -> HttpCall | None:
    """See ``SlotCalls.resume``."""
    view, left = request.view, tokens_left(request, made)
    if left == 0:
        return None
    body: dict[str, Any] = {name: value for name, value in view.items() if name in _SAMPLING and value is not None}
    body |= {"prompt": list(ids), "stream": True, "return_tokens": True, "cache_prompt": True}
    stop = view.get("stop")
    if stop:
        body["stop"] = [stop] if isinstance(stop, str) else stop
    if left is not None:
        body["n_predict"] = left
    if slot is not None:
        body["id_slot"] = slot
    model = request.model or server.model
    if model:
        body["model"] = model
    return HttpCall("POST", "/completion", server.headers(request.headers, "text/event-stream"), dumps(body))


# --- the tokens of a text ---------------------------------------------------------------------------------------------


def detokenize(server: Server, ids: Sequence[int]) -> HttpCall:
    """The text of these tokens, as they say it one after another."""
    return _post(server, "/detokenize", {"tokens": list(ids)})


def read_text(reply: HttpReply) -> str | None:
    data = reply.json() if reply.status == 200 else None
    text = data.get("content") if isinstance(data, dict) else None
    return text if isinstance(text, str) else None


def tokenize(server: Server, text: str) -> HttpCall:
    """Tokens of a text in the middle of a sequence. What looks like a control token is text: the model said it so."""
    return _post(server, "/tokenize", {"content": text, "add_special": False, "parse_special": False})


def read_ids(reply: HttpReply) -> tuple[int, ...] | None:
    data = reply.json() if reply.status == 200 else None
    ids = data.get("tokens") if isinstance(data, dict) else None
    return tuple(ids) if isinstance(ids, list) and are_ids(ids) else None


def _post(server: Server, path: str, body: dict[str, Any]) -> HttpCall:
    if server.model:
        body["model"] = server.model
    return HttpCall("POST", path, server.headers((), "application/json"), dumps(body))


# --- the continuation's frames ----------------------------------------------------------------------------------------


class ResumeDecoder:
    """Events of a continuation, in the likeness of what came before. See ``SlotCalls.resume_decoder``."""

    def __init__(self, request: ProxyRequest, like: object, before: Legs) -> None:
        self._native = NativeDecoder(StreamPlan(True, False, progress_asked=False, event_bytes_max=EVENT_BYTES_MAX))
        self.own: object = None
        self._before = before
        self._request = request
        self._form = route_of(request.route).form
        # A client that does not stream gets its usage in any case, from us.
        self._usage_asked = request.include_usage or not request.stream
        self._head = {key: value for key, value in like.items() if key not in ("usage", "timings", "prompt_progress")} \
            if isinstance(like, Mapping) else {}

    def feed(self, data: bytes) -> list[UpstreamEvent]:
        return self._translated(self._native.feed(data))

    def finish(self) -> list[UpstreamEvent]:
        return self._translated(self._native.finish())

    def at_limit(self) -> list[UpstreamEvent]:
        """The end of an answer whose limit was reached before it was stopped: nothing is left to ask for."""
        last = {"index": 0, "content": "", "tokens": [], "stop": True, "stop_type": "limit", "stopping_word": "",
                "truncated": False, "tokens_predicted": 0, "tokens_evaluated": 0,
                "timings": {"cache_n": 0, "prompt_n": 0, "predicted_n": 0}}
        return self.feed(frame_of(last))

    def _translated(self, events: list[UpstreamEvent]) -> list[UpstreamEvent]:
        out: list[UpstreamEvent] = []
        for event in events:
            if isinstance(event, Delta) and isinstance(event.data, dict):
                out += self._delta(event, event.data)
            elif isinstance(event, Done) and self._form != "native":
                out.append(Done(DONE_FRAME))
            elif isinstance(event, Progress):
                out.append(evolve(event, raw=b""))
            elif not isinstance(event, (Finished, Usage)):
                out.append(event)
        return out

    def _delta(self, event: Delta, data: dict[str, Any]) -> list[UpstreamEvent]:
        last = data.get("stop") is True
        if last:
            self.own = data
        if self._form == "native":
            return self._own(event, data, last)
        out: list[UpstreamEvent] = []
        if event.text or not last:
            out.append(self._said(event))
        return out + self._end(data) if last else out

    def _said(self, event: Delta) -> Delta:
        """A frame without text (half a character, perhaps the beginning of a stop string) is not passed on, as on the
        route itself; its token counts."""
        if not event.text:
            return Delta(b"", None, event.tokens, "")
        chunk = self._chunk(event.text, None)
        return Delta(frame_of(chunk), chunk, event.tokens, event.text)

    def _chunk(self, text: str, reason: str | None) -> dict[str, Any]:
        if self._form == "chat":
            choice: dict[str, Any] = {"finish_reason": reason, "index": 0, "delta": {"content": text} if text else {}}
        else:
            choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": reason}
        return {**self._head, "choices": [choice]}

    def _end(self, data: Mapping[str, Any]) -> list[UpstreamEvent]:
        numbers, timings = self._numbers(data), self._timings(data)
        usage: dict[str, Any] = {
            "completion_tokens": numbers.completion, "prompt_tokens": numbers.prompt,
            "total_tokens": numbers.prompt + numbers.completion}
        if numbers.cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": numbers.cached}
        reason = _REASONS(str(data.get("stop_type")), "stop")
        chunk, chat = self._chunk("", reason), self._form == "chat"
        if not chat:
            chunk["usage"] = usage
        if not (chat and self._usage_asked):
            chunk["timings"] = timings
        out: list[UpstreamEvent] = [Delta(frame_of(chunk), chunk), Finished(reason)]
        if not (chat and self._usage_asked):
            return [*out, Usage(b"", numbers)]
        more = {**self._head, "choices": [], "usage": usage, "timings": timings}
        return [*out, Usage(frame_of(more), numbers, more, standalone=True)]

    def _own(self, event: Delta, data: dict[str, Any], last: bool) -> list[UpstreamEvent]:
        """Of ``/completion`` itself: its own frame with the counts of the whole."""
        numbers = self._numbers(data)
        frame = {**data, "tokens_evaluated": numbers.prompt}
        frame["tokens_predicted"] = as_count(data.get("tokens_predicted")) + self._before.completion
        out: list[UpstreamEvent] = []
        if last:
            frame |= {"tokens_predicted": numbers.completion, "timings": self._timings(data)}
            if isinstance(self._request.view.get("prompt"), str) and "prompt" in frame:
                frame["prompt"] = self._request.view["prompt"]
            settings = frame.get("generation_settings")
            limit = tokens_left(self._request, 0)
            if isinstance(settings, Mapping):
                frame["generation_settings"] = {**settings, **{
                    name: -1 if limit is None else limit for name in ("n_predict", "max_tokens") if name in settings}}
            out += [Finished(str(data.get("stop_type") or "stop")), Usage(b"", numbers)]
        return [Delta(frame_of(frame), frame, event.tokens, event.text), *out]

    def _numbers(self, data: Mapping[str, Any]) -> UsageNumbers:
        before = self._before
        return UsageNumbers(before.prompt, before.completion + numbers_of(data).completion, before.cached)

    def _timings(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Of all parts together. Reading the answer again, so that it could go on, was reading too."""
        own = data.get("timings")
        timings: dict[str, Any] = dict(own) if isinstance(own, Mapping) else {}
        cached = self._before.cached or 0
        read, made = max(0, self._before.prompt - cached), self._numbers(data).completion
        prompt_ms = self._before.prompt_s * 1000 + _ms(timings, "prompt_ms")
        made_ms = self._before.answer_s * 1000 + _ms(timings, "predicted_ms")
        return {
            **timings, "cache_n": cached, **_rates("prompt", read, prompt_ms), **_rates("predicted", made, made_ms)}


def _ms(timings: Mapping[str, Any], name: str) -> float:
    value = timings.get(name)
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 1e12 else 0.0


def _rates(name: str, n: int, ms: float) -> dict[str, Any]:
    return {
        f"{name}_n": n, f"{name}_ms": ms, f"{name}_per_token_ms": ms / n if n else 0.0,
        f"{name}_per_second": n / ms * 1000 if ms else 0.0}
