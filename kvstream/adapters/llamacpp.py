"""llama.cpp's ``llama-server``, single model or router.

Theory of operation of the capacity questions. They are asked in rounds, because each answer decides what may be asked
next: ``/props`` first (a sleeping server must not be asked for ``/slots``, that would wake it), then ``/slots`` and
``/metrics``, then, if there are several slots and nobody stated their layout, the *empty-slot probe*. Nothing in any
JSON answer or metric tells a unified pool from a split one (measured: the answers are equal byte for byte), but the
size of a saved empty slot does: 32 bytes and 4 per stream, one stream for a unified pool, one per slot for a split one.
The probe needs ``--slot-save-path`` and an idle, empty slot; a save on a busy slot would wait for it. Where all idle
slots hold something (KVStream was started again in front of a server in use), the one with the least is emptied: one
conversation is read once more, while a split pool taken for a unified one would cost most of the capacity for as long
as KVStream runs. With no idle slot the answer is not ``settled``, and the questions are asked again later. Without an
answer the pool is taken for unified: a split pool counted once costs speed, a unified one counted slots times kills
every running request (case 38).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import quote

from attrs import frozen

from ..core.types import PoolMode
from .base import (
    AnswerAssembler,
    Capabilities,
    CapacityQuery,
    CapacityReport,
    Health,
    HttpCall,
    HttpReply,
    ProxyRequest,
)
from .bodies import ABSENT, dumps, edit
from .capacity import PAGES_DEFAULT, SEATS_DEFAULT, CapacityNotes, smallest
from .chunks import as_count
from .decode import open_assembler
from .failure import failed_reply
from .llamacpp_count import Ask, are_ids, countable
from .llamacpp_slots import LlamaCppSlots, slot_call
from .llamacpp_state import Props, empty_slot, erased, idle_slot, slots_of, streams_of, work_of
from .openai import OpenAIBackend
from .routes import LLAMACPP_ROUTES, route_of
from .slot_calls import SlotCalls

PROBE_FILE = "kvstream-probe.bin"
_HOW_TO_KNOW = "start llama-server with an explicit -np N and --slot-save-path DIR, or set backend.kv"


@frozen
class LlamaCppBackend(OpenAIBackend):
    """``kv_unified`` states the layout of the KV memory where it cannot be probed."""

    kind: ClassVar[str] = "llamacpp"

    kv_unified: bool | None = None

    @property
    def capabilities(self) -> Capabilities:
        # Usage is not injected: `timings` come unasked on the last chunk, and asking would move them to another one.
        return Capabilities(
            routes=LLAMACPP_ROUTES,
            exact_count=True,
            slots_visible=True,
            usage_injected=False,
            hard_inject=True,
            cached_reported=True,
            cancel="batch",
        )

    @property
    def slots(self) -> SlotCalls | None:
        return LlamaCppSlots(self)

    # --- requests ---

    def changes(self, request: ProxyRequest, *, stream: bool, include_usage: bool, slot: int | None) -> dict[str, Any]:
        changes = OpenAIBackend.changes(self, request, stream=stream, include_usage=include_usage, slot=slot)
        # A client's own pin is dropped: pinning to a slot that is at work corrupts the answer running there (T0), and
        # only the scheduler knows which are idle. The server wraps ids around, so ours must be in range.
        if route_of(request.route).generates:
            changes["id_slot"] = ABSENT if slot is None else slot
        return changes

    # --- state ---

    def health(self) -> HttpCall:
        return self.get("/health")

    def read_health(self, reply: HttpReply) -> str:
        """From ``/health``, or from ``/props``, which also knows about sleep."""
        if reply.status == 200:
            data = reply.json()
            return Health.SLEEPING if isinstance(data, dict) and data.get("is_sleeping") is True else Health.UP
        return Health.LOADING if failed_reply(reply).kind == "model_loading" else Health.DOWN

    def capacity_calls(self, replies: Mapping[str, HttpReply | None]) -> Sequence[tuple[str, HttpCall]]:
        if "props" not in replies:
            return (("props", self.get(self.of_model("/props"))),)
        props = Props.read(replies["props"])
        if props is None or props.sleeping:
            return ()
        if "slots" not in replies:
            return (("slots", self.get(self.of_model("/slots"))), ("metrics", self.get(self.of_model("/metrics"))))
        if "probe" in replies or self.kv_unified is not None or props.slots == 1:
            return ()
        slot = empty_slot(replies["slots"])
        if slot is None:
            slot = idle_slot(replies["slots"])
            if slot is None or not erased(replies.get("erase")):
                return () if slot is None or "erase" in replies else (("erase", slot_call(self, slot, "erase")),)
        return (("probe", slot_call(self, slot, "save", filename=PROBE_FILE)),)

    def read_capacity(self, replies: Mapping[str, HttpReply | None], query: CapacityQuery) -> CapacityReport:
        notes = CapacityNotes(query)
        props = Props.read(replies.get("props"))
        if props is None:
            return self._unknown(replies.get("props"), notes)
        context = smallest(props.context, query.context_tokens)
        if query.context_tokens is not None and query.context_tokens not in (context, props.slots * props.context):
            notes.add(f"context_tokens: {query.context_tokens} configured, but a slot has {props.context}")
        unified, why = self._layout(props, replies, query)
        known = unified is not None
        if unified is None:
            unified = True
            notes.add(
                f"whether the {props.slots} slots share one KV pool cannot be seen ({why}); counting the pool once, "
                f"{props.context} tokens. If it is split there are {props.slots * props.context}: {_HOW_TO_KNOW}"
            )
        mode = PoolMode.UNIFIED if unified else PoolMode.SPLIT
        tokens = props.context if unified else props.context * props.slots
        # Each slot's context is cut into whole pages by itself, since a page cannot lie in two slots.
        real = notes.pages_of(props.context) * (1 if unified else props.slots)
        seats = query.seats if query.seats is not None else self.seats
        pages = notes.narrowed(query.pages, real, "pages", PAGES_DEFAULT)
        return notes.report(
            mode=mode,
            seats=notes.narrowed(seats, props.slots, "seats", SEATS_DEFAULT),
            pages=pages,
            request_tokens_max=context,
            source=f"/props: {props.slots} slots, {mode.value} KV of {tokens} tokens ({why})",
            instance=props.instance(replies.get("metrics")),
            process=props.process,
            slot_files=_slot_files(replies),
            settled=known or slots_of(replies.get("slots")) is None or idle_slot(replies["slots"]) is not None,
        )

    def _layout(
        self, props: Props, replies: Mapping[str, HttpReply | None], query: CapacityQuery
    ) -> tuple[bool | None, str]:
        """(unified or not, or None, and how that is known)."""
        if props.slots == 1:
            return False, "one slot"
        if self.kv_unified is not None:
            return self.kv_unified, "configured"
        probe = replies.get("probe")
        streams = streams_of(probe, props.slots)
        if streams in (1, props.slots):
            return streams == 1, "empty-slot probe"
        if query.context_tokens == props.slots * props.context:
            return False, "the configured context is the sum of the slots'"
        if any(reply is not None and reply.status == 501 for reply in (probe, replies.get("erase"))):
            return None, "the server has no --slot-save-path"
        if "probe" in replies:
            return None, "the probe gave no answer"
        if props.sleeping:
            return None, "the server sleeps"
        if slots_of(replies.get("slots")) is None:
            return None, "--no-slots is set"
        if idle_slot(replies.get("slots")) is None:
            return None, "no slot is idle"
        return None, "not probed"

    def _unknown(self, reply: HttpReply | None, notes: CapacityNotes) -> CapacityReport:
        """``/props`` did not help: the configuration counts, as for a generic backend."""
        query = notes.query
        data = reply.json() if reply is not None and reply.status == 200 else None
        if isinstance(data, dict) and data.get("role") == "router":
            notes.add("the server is a router: set `model`, and load it, to learn the slots of one model")
        elif reply is None:
            notes.add("/props did not answer; using the configured figures")
        else:
            notes.add(f"/props: {failed_reply(reply).message}; using the configured figures")
        seats = query.seats if query.seats is not None else self.seats if self.seats is not None else SEATS_DEFAULT
        pages = query.pages if query.pages is not None else PAGES_DEFAULT
        if query.pages is None and query.context_tokens is not None:
            pages = notes.pages_of(query.context_tokens)  # once: it may be unified
        return notes.report(
            mode=PoolMode.UNKNOWN,
            seats=seats,
            pages=pages,
            request_tokens_max=query.context_tokens,
            source="configured",
        )

    def process(self) -> HttpCall | None:
        return self.get(self.of_model("/props"))

    def read_process(self, reply: HttpReply) -> str:
        props = Props.read(reply)
        return props.process if props is not None else ""

    def busy(self) -> HttpCall | None:
        return self.get(self.of_model("/slots"))

    def read_busy(self, reply: HttpReply) -> frozenset[tuple[int, int]] | None:
        slots = slots_of(reply)
        if slots is None:
            return None
        return frozenset(
            (slot["id"], slot["id_task"] if isinstance(slot.get("id_task"), int) else -1)
            for slot in slots
            if slot.get("is_processing") is True
        )

    def read_work(self, reply: HttpReply) -> Hashable | None:
        return work_of(reply)

    def of_model(self, path: str) -> str:
        """A GET about our model. A single-model server ignores the query; a router must not load the model for it."""
        return f"{path}?model={quote(self.model, safe='')}&autoload=false" if self.model else path

    def assembler(self, request: ProxyRequest) -> AnswerAssembler:
        return open_assembler(request, prefill_of(request.view))

    # --- exact counting ---

    def count_calls(self, request: ProxyRequest) -> HttpCall | tuple[int, ...] | None:
        """Chat: render the client's own body, so that whatever shapes the prompt is there. Messages and responses: the
        server's own count, a number without ids. Everything else: tokenize."""
        what = countable(request)
        if isinstance(what, Ask):
            return self._post(what.path, request, request.body)
        return self._tokenize(request, what) if isinstance(what, str) else what

    def read_count(self, request: ProxyRequest, reply: HttpReply) -> HttpCall | tuple[int, ...] | int | None:
        data = reply.json() if reply.status == 200 else None
        if not isinstance(data, dict):
            return None
        if isinstance(data.get("prompt"), str):
            return self._tokenize(request, data["prompt"])
        if "input_tokens" in data:
            return as_count(data["input_tokens"]) or None
        tokens = data.get("tokens")
        return tuple(tokens) if isinstance(tokens, list) and are_ids(tokens) else None

    def _tokenize(self, request: ProxyRequest, text: str) -> HttpCall:
        # As the server itself does for a prompt; it takes care not to put a second BOS before a rendered one.
        body = dumps({"content": text, "add_special": True, "parse_special": True})
        return self._post("/tokenize", request, body)

    def _post(self, path: str, request: ProxyRequest, body: bytes) -> HttpCall:
        view = request.view if path != "/tokenize" else {"content": ""}
        model = request.model or self.model
        changed = edit(body, view, {"model": model}) if model and not view.get("model") else body
        return HttpCall("POST", path, self.headers(request.headers, "application/json"), changed)


def _slot_files(replies: Mapping[str, HttpReply | None]) -> bool | None:
    """Whether slots can be saved, as far as the probe tells. What it says of a server for media is about media."""
    for reply in (replies.get("probe"), replies.get("erase")):
        if reply is not None and reply.status == 501 and b"multimodal" not in reply.body.lower():
            return False
    return True if streams_of(replies.get("probe")) is not None else None


def prefill_of(view: Mapping[str, Any]) -> str:
    """The text of a last message by the assistant, which the server continues.

    A stream holds the continuation alone, a whole answer begins with this text (measured; parts are joined as here).
    """
    messages = view.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict) or last.get("role") != "assistant" or last.get("tool_calls"):
        return ""
    content = last.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "\n\n".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""
