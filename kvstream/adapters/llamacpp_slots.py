"""The slot calls of ``llama-server``: what its slots hold, saving, restoring and erasing them, reading a prompt alone.

What is known of them, measured on b11549 and kept as golden transcripts (``tests/adapters/golden/llamacpp/slot_*``):

* A slot's number wraps around: ``/slots/6`` of four slots is slot 2, and the answer says 6. Nothing tells the mistake,
  so whoever asks must know how many slots there are.
* A call on a slot at work waits until it is idle, without a word, and is carried out also when nobody waits any more.
* A restore that fails in any way leaves the slot empty. All reasons have the same text.
* ``n_predict: 0`` makes one token all the same and leaves exactly the prompt in the slot; the token is not kept.
* Of a prompt that the slot has in full, the last token is computed again: ``cache_n`` is one less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from attrs import evolve, frozen

from . import llamacpp_identity, llamacpp_resume, messages, responses
from .base import Decoder, Failed, HttpCall, HttpReply, ProxyRequest, UsageNumbers
from .bodies import dumps
from .chunks import as_count, prompt_seconds, seconds_of, usage_numbers
from .failure import error_in, failed_reply
from .frames import StreamPlan
from .framing import EVENT_BYTES_MAX
from .llamacpp_count import has_media
from .llamacpp_state import slots_of
from .native import NativeDecoder
from .routes import route_of
from .slot_calls import Identity, Legs, PromptWork, ResumeDecoder, SlotDone, SlotView

_PINNED_FORMS = frozenset(("chat", "completions", "messages", "responses", "native"))
_COUNTS = ("n_saved", "n_restored", "n_erased")
_BYTES = ("n_written", "n_read")
_TIMES = ("save_ms", "restore_ms")
# Of the last frame of a prompt that is only read. Without this it repeats the whole prompt as text.
_FIELDS = ("index", "content", "stop", "stop_type", "id_slot", "tokens_evaluated", "timings")


class Server(Protocol):
    """What is needed of ``LlamaCppBackend``."""

    @property
    def model(self) -> str: ...

    def headers(self, forwarded: tuple[tuple[str, str], ...] = (), accept: str = "") -> tuple[tuple[str, str], ...]: ...

    def get(self, path: str) -> HttpCall: ...

    def of_model(self, path: str) -> str: ...


def slot_call(server: Server, slot: int, action: str, **fields: str) -> HttpCall:
    """A router wants the model in the body of every slot call, also of one that needs no other field."""
    body = fields | ({"model": server.model} if server.model else {})
    return HttpCall("POST", f"/slots/{slot}?action={action}", server.headers((), "application/json"), dumps(body))


@frozen
class LlamaCppSlots:
    """See ``SlotCalls``."""

    server: Server

    def look(self) -> HttpCall:
        return self.server.get(self.server.of_model("/slots"))

    def read_look(self, reply: HttpReply) -> tuple[SlotView, ...] | None:
        """A slot that was never used tells no tokens, also when a file was restored into it: that is None, not 0."""
        rows = slots_of(reply)
        if not rows or sorted(row["id"] for row in rows) != list(range(len(rows))):
            return None
        views = [
            SlotView(row["id"], row.get("is_processing") is not False, _count(row.get("n_prompt_tokens")),
                     _count(row.get("id_task")))
            for row in rows]
        return tuple(sorted(views, key=lambda view: view.slot))

    def save(self, slot: int, name: str) -> HttpCall:
        return slot_call(self.server, slot, "save", filename=name)

    def restore(self, slot: int, name: str) -> HttpCall:
        return slot_call(self.server, slot, "restore", filename=name)

    def erase(self, slot: int) -> HttpCall:
        return slot_call(self.server, slot, "erase")

    def read_done(self, reply: HttpReply) -> SlotDone | Failed:
        data = reply.json()
        if reply.status != 200 or error_in(data) is not None:
            return evolve(failed_reply(reply), status=reply.status)
        done = _done(data) if isinstance(data, dict) else None
        if done is None:
            return Failed("backend_protocol", "the backend answered a slot call with something else", reply.status)
        return done

    # --- reading a prompt ---

    def read_prompt(self, ids: Sequence[int], slot: int | None) -> HttpCall:
        body: dict[str, Any] = {
            "prompt": list(ids), "n_predict": 0, "cache_prompt": True, "stream": True, "return_progress": True,
            "temperature": 0, "response_fields": _FIELDS}
        if slot is not None:
            body["id_slot"] = slot
        if self.server.model:
            body["model"] = self.server.model
        return HttpCall("POST", "/completion", self.server.headers((), "text/event-stream"), dumps(body))

    def prompt_decoder(self) -> Decoder:
        return NativeDecoder(StreamPlan(True, False, progress_asked=False, event_bytes_max=EVENT_BYTES_MAX))

    def prompt_work(self, data: object) -> PromptWork | None:
        return prompt_work(data)

    # --- who may use a slot ---

    def pinnable(self, request: ProxyRequest, *, router: bool = False) -> bool:
        view = request.view
        model = self.server.model
        if route_of(request.route).form not in _PINNED_FORMS or is_several(view):
            return False
        if view.get("lora"):
            return False  # what the slot then holds is of other weights
        return not (router and model and request.model and request.model != model)

    def reuses(self, request: ProxyRequest) -> bool:
        view = request.view
        turns = view.get("input" if route_of(request.route).form == "responses" else "messages")
        return view.get("cache_prompt") in (None, True) and not view.get("lora") and not has_media(turns)

    # --- identity ---

    def identity_calls(self, replies: Mapping[str, HttpReply | None]) -> Sequence[tuple[str, HttpCall]]:
        get, of_model = self.server.get, self.server.of_model
        return llamacpp_identity.identity_calls(
            replies, props=get(of_model("/props")), lora=get(of_model("/lora-adapters")), models=get("/v1/models"),
            plain=get("/props") if self.server.model else None)

    def read_identity(self, replies: Mapping[str, HttpReply | None], files: Mapping[str, str]) -> Identity | None:
        return llamacpp_identity.read_identity(replies, files, self.server.model)

    def model_path(self, replies: Mapping[str, HttpReply | None]) -> str:
        return llamacpp_identity.model_path(replies.get("props"))

    # --- resuming ---

    def can_resume(self, request: ProxyRequest) -> bool:
        return llamacpp_resume.can_resume(request)

    def resume(self, request: ProxyRequest, ids: Sequence[int], *, slot: int | None, made: int) -> HttpCall | None:
        return llamacpp_resume.resume(self.server, request, ids, slot, made)

    def resume_decoder(self, request: ProxyRequest, like: object, before: Legs) -> ResumeDecoder:
        return llamacpp_resume.ResumeDecoder(request, like, before)

    def detokenize(self, ids: Sequence[int]) -> HttpCall:
        return llamacpp_resume.detokenize(self.server, ids)

    def read_text(self, reply: HttpReply) -> str | None:
        return llamacpp_resume.read_text(reply)

    def tokenize(self, text: str) -> HttpCall:
        return llamacpp_resume.tokenize(self.server, text)

    def read_ids(self, reply: HttpReply) -> tuple[int, ...] | None:
        return llamacpp_resume.read_ids(reply)


def is_several(view: Mapping[str, Any]) -> bool:
    """Whether it takes more than one slot: several choices, or several prompts. A list of numbers, or of numbers and
    strings, is one prompt; a list of strings, lists or objects is as many as it has."""
    if any(view.get(name) not in (None, 0, 1) for name in ("n", "n_cmpl")):
        return True
    prompt = view.get("prompt")
    return isinstance(prompt, list) and len(prompt) > 1 and not any(isinstance(part, int) for part in prompt)


def prompt_work(data: object) -> PromptWork | None:
    """See ``SlotCalls.prompt_work``. Of messages it is the first frame that tells, and no frame tells the seconds."""
    if not isinstance(data, dict):
        return None
    holders = [data, *(data[name] for name in ("response", "message") if isinstance(data.get(name), dict))]
    numbers = next((found for holder in holders if (found := _numbers(holder)) is not None), None)
    if numbers is None or numbers.cached is None or numbers.cached > numbers.prompt:
        return None
    seconds = prompt_seconds(data.get("timings"))
    return PromptWork(numbers.cached, numbers.prompt - numbers.cached, seconds, _count(data.get("id_slot")))


def _numbers(holder: Mapping[str, Any]) -> UsageNumbers | None:
    usage = holder.get("usage")
    if isinstance(usage, dict) and "input_tokens" in usage:
        return messages.usage_of(usage) if "cache_read_input_tokens" in usage else responses.usage_of(usage)
    return usage_numbers(holder)


def _done(data: Mapping[str, Any]) -> SlotDone | None:
    slot = _count(data.get("id_slot"))
    tokens = next((_count(data[name]) for name in _COUNTS if name in data), None)
    if slot is None or tokens is None:
        return None
    written = next((as_size(data[name]) for name in _BYTES if name in data), 0)
    timings = data.get("timings")
    taken = [timings[name] for name in _TIMES if name in timings] if isinstance(timings, dict) else []
    return SlotDone(slot, tokens, written, seconds_of(taken[0]) if taken else None)


def _count(value: Any) -> int | None:
    """A number of something, or None: 0 is one, what is no number is none."""
    return as_count(value) if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def as_size(value: Any) -> int:
    """Bytes from somebody else's JSON: anything odd is 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**53 else 0
