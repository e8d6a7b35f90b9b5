"""What an adapter offers for hard inject: the calls that read, save and restore a runtime's slots, as values.

Like the rest of an adapter it is pure. A backend without slots has none of this (``Adapter.slots`` is None), so a new
adapter need not know it exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from attrs import field, frozen

from .base import Decoder, Failed, HttpCall, HttpReply, ProxyRequest, UpstreamEvent


@frozen
class SlotView:
    """One slot as the runtime shows it. ``tokens`` it holds, None where it does not tell; ``task`` changes with every
    request it serves."""

    slot: int
    busy: bool
    tokens: int | None = None
    task: int | None = None


@frozen
class SlotDone:
    """A slot call that worked: tokens saved, restored or erased; bytes of the file; seconds the runtime took. ``slot``
    is the number that was asked for: a runtime that has fewer may have taken another one without saying so."""

    slot: int
    tokens: int
    bytes: int = 0
    seconds: float | None = None


@frozen
class PromptWork:
    """What reading a prompt cost: tokens found in the slot, tokens computed, seconds for those, and the slot."""

    cached: int
    computed: int
    seconds: float | None
    slot: int | None = None


@frozen
class Identity:
    """What must be equal for a saved slot to mean the same in another process: ``digest`` (16 hex digits) over
    ``facts``, which are kept in words for a person to read. ``context`` tokens per slot, ``slots``. ``router``: the
    server has other models too, so a request that names another one is not for these slots."""

    digest: str
    facts: Mapping[str, str] = field(factory=dict)
    context: int = 0
    slots: int = 0
    router: bool = False


@frozen
class Legs:
    """What the parts of an answer that came before used: its prompt, how much of that was ``cached`` (None: not told),
    ``completion`` tokens that the client has, and seconds of reading and answering."""

    prompt: int
    completion: int
    cached: int | None = None
    prompt_s: float = 0.0
    answer_s: float = 0.0


class ResumeDecoder(Decoder, Protocol):
    """The decoder of a continuation. ``own`` is the runtime's last frame as it came, whose numbers are of this part
    alone."""

    own: object

    def at_limit(self) -> list[UpstreamEvent]:
        """The events that end an answer whose limit was reached just when it was stopped."""
        ...


class SlotCalls(Protocol):
    """The slot calls of one adapter. Every ``read_`` takes any reply at all and never raises."""

    def look(self) -> HttpCall: ...
    def read_look(self, reply: HttpReply) -> tuple[SlotView, ...] | None: ...

    def save(self, slot: int, name: str) -> HttpCall: ...
    def restore(self, slot: int, name: str) -> HttpCall: ...
    def erase(self, slot: int) -> HttpCall: ...

    def read_done(self, reply: HttpReply) -> SlotDone | Failed:
        """The answer to any of the three. ``Failed.status`` is the runtime's own."""
        ...

    def read_prompt(self, ids: Sequence[int], slot: int | None) -> HttpCall:
        """Read a prompt into a slot and answer nothing; what the slot has of it already is not read again. A stream, so
        that closing it stops the runtime."""
        ...

    def prompt_decoder(self) -> Decoder:
        """For the answer to :meth:`read_prompt`: ``Progress`` and ``Done`` or ``Failed``; the numbers are those of
        :meth:`prompt_work` on the data of its last ``Delta``."""
        ...

    def prompt_work(self, data: object) -> PromptWork | None:
        """What reading the prompt cost, from the last frame (or the whole answer) of any route; None: not told."""
        ...

    def pinnable(self, request: ProxyRequest, *, router: bool = False) -> bool:
        """Whether it may be told its slot: it takes exactly one, of the model that the slots are of. ``router`` as in
        ``Identity``."""
        ...

    def reuses(self, request: ProxyRequest) -> bool:
        """Whether a prefix that its slot holds would be used, and whether what it leaves there is its prompt's tokens
        and nothing else. Where not, its keys promise nothing, however exactly they were counted."""
        ...

    def identity_calls(self, replies: Mapping[str, HttpReply | None]) -> Sequence[tuple[str, HttpCall]]:
        """As ``Adapter.capacity_calls``. Wakes no sleeping model."""
        ...

    def read_identity(self, replies: Mapping[str, HttpReply | None], files: Mapping[str, str]) -> Identity | None:
        """``files`` are facts that only the shell can have, each in words: size and mtime of :meth:`model_path`, the
        layout of the KV memory. All of them count. With none the identity holds for one process of the runtime only,
        since nothing else tells its weights from others. None while the runtime does not tell."""
        ...

    def model_path(self, replies: Mapping[str, HttpReply | None]) -> str:
        """The model's file as the runtime names it, from the same replies; empty when it does not."""
        ...

    # --- resuming ---

    def can_resume(self, request: ProxyRequest) -> bool:
        """Whether an answer to this request could be stopped and continued without its client being able to tell."""
        ...

    def resume(self, request: ProxyRequest, ids: Sequence[int], *, slot: int | None, made: int) -> HttpCall | None:
        """Continue after ``ids`` (prompt and the answer so far), of which ``made`` tokens were answered. None: the
        client's limit leaves nothing to ask for, see :meth:`ResumeDecoder.at_limit`."""
        ...

    def resume_decoder(self, request: ProxyRequest, like: object, before: Legs) -> ResumeDecoder:
        """Turns the continuation into events whose frames look like those of the answer so far: ``like`` is its last
        parsed frame, ``before`` what the parts before it used. No role frame; usage is the sum."""
        ...

    def detokenize(self, ids: Sequence[int]) -> HttpCall: ...

    def read_text(self, reply: HttpReply) -> str | None:
        """The text of the tokens of :meth:`detokenize`; bytes that are no whole character are U+FFFD."""
        ...

    def tokenize(self, text: str) -> HttpCall:
        """Tokens of a text in the middle of a sequence. Their own text need not be the same: ask."""
        ...

    def read_ids(self, reply: HttpReply) -> tuple[int, ...] | None: ...
