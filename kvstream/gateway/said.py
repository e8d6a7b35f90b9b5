"""What is kept of the answer of a stream that may be preempted, so that it can go on where it stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field

from ..adapters.base import Delta, UpstreamEvent
from ..adapters.slot_calls import PromptWork, ResumeDecoder
from ..core.types import PageKey

_PLAIN = frozenset(("role", "content"))


@define(eq=False)
class Said:
    """``pieces`` of the text that its client has, or will have whatever happens, ``bytes_max`` of it at most. ``ids``
    are the tokens that came with them, where the route tells. ``begun``: the client has a frame, so the request cannot
    simply be sent again. ``cached``, ``prompt_s`` and ``answer_s`` are of the legs before the present one, of which
    there were ``legs``; ``before`` tokens were answered in them. ``keys`` name what a file has of it."""

    bytes_max: int
    pieces: list[str] = field(factory=list, repr=False)
    bytes: int = 0
    ids: list[int] = field(factory=list, repr=False)
    begun: bool = False
    legs: int = 0
    before: int = 0
    cached: int | None = None
    first: PromptWork | None = None
    prompt_s: float = 0.0
    answer_s: float = 0.0
    keys: Sequence[PageKey] = ()
    decoder: ResumeDecoder | None = None  # of the present leg, when it is not the first

    @property
    def text(self) -> str:
        if len(self.pieces) > 1:
            self.pieces = ["".join(self.pieces)]
        return self.pieces[0] if self.pieces else ""

    def with_first(self, work: PromptWork | None) -> PromptWork | None:
        """``work`` of this leg, and what was read in those before: cached is what the first one found."""
        if self.first is None or work is None:
            return work or self.first
        known = [part.seconds for part in (self.first, work) if part.seconds is not None]
        return PromptWork(min(self.first.cached, work.cached), work.computed, sum(known) if known else None, work.slot)

    def note(self, event: UpstreamEvent) -> bool:
        """Take an event that goes to the client; False when the answer can no longer be continued."""
        if not isinstance(event, Delta):
            return True
        self.begun = self.begun or bool(event.raw)
        if event.text:
            self.pieces.append(event.text)
            self.bytes += len(event.text.encode("utf-8", "surrogatepass"))
        if isinstance(event.data, Mapping):
            ids = event.data.get("tokens")
            if isinstance(ids, list):
                self.ids += (token for token in ids if type(token) is int)
        return self.bytes <= self.bytes_max and not _has_more(event.data)


def _has_more(data: Any) -> bool:
    """Whether a chunk holds something that is no text: a tool call, reasoning, or what we do not know."""
    choices = data.get("choices") if isinstance(data, Mapping) else None
    for choice in choices if isinstance(choices, list) else ():
        delta = choice.get("delta") if isinstance(choice, Mapping) else None
        if isinstance(delta, Mapping) and any(value for name, value in delta.items() if name not in _PLAIN):
            return True
    return False
