"""One leg of a stream: the call that a pump makes for it, and how the answer to that call is read.

A stream has one leg, or several where it was preempted and resumed. Its client sees nothing of that: the buffer stays
the same, the events of all legs are one answer. A leg that ended because its stream gave way does not settle it.
"""

from __future__ import annotations

from typing import Any, Protocol

from attrs import frozen

from ..adapters.amend import AmendedDecoder, Amendment
from ..adapters.base import Decoder, HttpCall
from ..adapters.slot_calls import PromptWork
from .stream import Stream


class Leg(Protocol):
    """What a pump is given."""

    def call(self, *, stream: bool, include_usage: bool) -> HttpCall:
        """The upstream call. ``stream``: ask for a stream; ``include_usage`` as in ``Adapter.encode``."""
        ...

    def decoder(self, content_type: str) -> Decoder:
        """Reads the answer to it."""
        ...

    def answer(self, body: bytes, answer: Any) -> bytes:
        """The body of an answer that is handed through whole, of which ``answer`` is the JSON."""
        ...


@frozen
class FirstLeg:
    """The client's own request, in the slot that it was given (None: the runtime chooses). ``read``: what it cost to
    read its prompt beforehand, without which the client would be told that all of it was cached."""

    stream: Stream
    slot: int | None = None
    read: PromptWork | None = None

    def call(self, *, stream: bool, include_usage: bool) -> HttpCall:
        """See :class:`Leg`."""
        return self.stream.adapter.encode(
            self.stream.request, stream=stream, include_usage=include_usage, slot=self.slot)

    def decoder(self, content_type: str) -> Decoder:
        """See :class:`Leg`."""
        decoder = self.stream.adapter.decoder(self.stream.request, content_type=content_type)
        return decoder if self.read is None else AmendedDecoder(decoder, self.read)

    def answer(self, body: bytes, answer: Any) -> bytes:
        """See :class:`Leg`."""
        return body if self.read is None else Amendment(self.read).answer(body, answer)
