"""The mutable records of the core: one per waiting and one per running request. Owned by the scheduler alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from attrs import define, field

from .messages import Submitted
from .prefix import PrefixNode
from .table import PageTable
from .types import CountSource, PageKey, Priority, RefuseReason, RequestId, SlotPlan, Why

Gate = tuple[Why | None, int | str]  # why a request waits, and for whom or what
OPEN: Final[Gate] = (None, 0)


@define(eq=False, slots=True)
class Waiting:
    """A request in the queue. ``arrived`` and ``deadline`` are absolute seconds, ``seq`` the order of submission,
    ``handicap_s`` see ``policy``, ``pages`` what it needs if nothing of it is cached (0 until capacity is known),
    ``gate`` what it was last found to wait for. ``alone``: it waited for a leader in vain, and does not again.
    ``preemptible``: it can be stopped and continued. ``resumes``: it was, so ``tokens`` are those of prompt and answer
    so far, ``tokens_max`` what is left, and ``left`` is the slot that has it all if it is still in that turn."""

    rid: RequestId
    keys: tuple[PageKey, ...]
    tokens: int
    tokens_max: int | None
    priority: Priority
    client: str
    bytes: int
    deadline: float
    arrived: float
    seq: int
    count_source: CountSource
    seats: int = 1
    weight: float = 1.0
    group: str = ""
    handicap_s: float = 0.0
    pages: int = 0
    gate: Gate = OPEN
    pinnable: bool = False
    exact: bool = False
    alone: bool = False
    preemptible: bool = False
    resumes: bool = False
    left: tuple[int, int] | None = None

    @classmethod
    def of(cls, event: Submitted, arrived: float, deadline: float, seq: int) -> Waiting:
        return cls(
            rid=event.rid,
            keys=event.keys,
            tokens=event.tokens,
            tokens_max=event.tokens_max,
            priority=event.priority,
            client=event.client,
            bytes=event.bytes,
            deadline=deadline,
            arrived=arrived,
            seq=seq,
            count_source=event.count_source,
            seats=max(1, event.seats),
            weight=event.weight,
            group=event.group,
            pinnable=event.pinnable,
            exact=event.exact,
            preemptible=event.preemptible,
        )


@define(eq=False, slots=True)
class Running:
    """A request with a seat. ``path`` are the locked prefix nodes whose pages start the table, ``promised`` the pages
    still set aside for its answer, ``pages`` the table's and those, ``produced`` its answer tokens, ``epoch`` the life
    of the runtime's cache it began in, ``passed`` the blocked head it was let past. ``filling``: its prompt is still
    being read, as far as we know; ``over_at`` is when its client was done with it, ``first_at`` when its first token
    came. ``plan`` is what it does in the slots: ``reading`` its prompt first, ``serving`` once a slot is known to have
    it. ``asked`` is what it was when it waited."""

    rid: RequestId
    asked: Waiting
    keys: tuple[PageKey, ...]
    tokens: int
    tokens_max: int | None
    client: str
    arrived: float
    admitted: float
    table: PageTable
    path: Sequence[PrefixNode]
    promised: int
    pages: int
    epoch: int
    seats: int = 1
    group: str = ""
    filling: bool = True
    over_at: float | None = None
    passed: RequestId | None = None
    produced: int = 0
    tokens_cached: int = 0
    draining: bool = False
    truncated: bool = False
    exact: bool = False
    plan: SlotPlan | None = None
    reading: bool = False
    serving: bool = False
    first_at: float | None = None
    computed: bool = field(default=False)  # the whole prompt is certainly in the runtime's KV

    @property
    def tokens_left(self) -> int | None:
        """Answer tokens that may still come; None when the client set no limit."""
        return None if self.tokens_max is None else max(0, self.tokens_max - self.produced)


@define(slots=True)
class Tally:
    """What a scheduler has done since it was made."""

    admitted: int = 0
    backfilled: int = 0
    ended: int = 0
    truncated: int = 0
    preempted: int = 0
    resumed: int = 0
    refused: dict[RefuseReason, int] = field(factory=dict)
    held: dict[Why, int] = field(factory=dict)
