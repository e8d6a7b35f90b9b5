"""One leg of a stream: the call that a pump makes for it, and how the answer to that call is read.

A stream has one leg, or several where it was preempted and resumed. Its client sees nothing of that: the buffer stays
the same, the events of all legs are one answer. A leg that ended because its stream gave way does not settle it.
"""

from __future__ import annotations

from typing import Protocol

from attrs import frozen

from ..adapters.base import Decoder, HttpCall
from .stream import Stream


class Leg(Protocol):
    """What a pump is given."""

    def call(self, *, stream: bool, include_usage: bool) -> HttpCall:
        """The upstream call. ``stream``: ask for a stream; ``include_usage`` as in ``Adapter.encode``."""
        ...

    def decoder(self, content_type: str) -> Decoder:
        """Reads the answer to it."""
        ...


@frozen
class FirstLeg:
    """The client's own request, in the slot that it was given (None: the runtime chooses)."""

    stream: Stream
    slot: int | None = None

    def call(self, *, stream: bool, include_usage: bool) -> HttpCall:
        """See :class:`Leg`."""
        return self.stream.adapter.encode(
            self.stream.request, stream=stream, include_usage=include_usage, slot=self.slot)

    def decoder(self, content_type: str) -> Decoder:
        """See :class:`Leg`."""
        return self.stream.adapter.decoder(self.stream.request, content_type=content_type)
