"""The bounded, ordered queue of waiting requests.

Theory of operation. Every client has a *flow*: its requests sorted by arrival + handicap (see ``policy``), a key that
never changes while a request waits, so plain bisection keeps the list sorted and one request leaving never moves the
others. Between clients the queue is fair: the flow's head competes by

    max(its arrival, the last grant to its client) + handicap

so a client's turn ages from its own last turn, not from when it threw its thousand requests in. A flood and a polite
client with equal handicaps then alternate, and nobody needs a configured share. One client alone (or requests without
a client name, which are one client) are simply in order. Flows are themselves kept in one sorted list, touched only
when a flow's head changes or is granted.

Bisection on a Python list moves pointers, 8 bytes per entry: about 2 us at 10,000 entries, less than a heap costs in
comparisons, and unlike a heap it gives positions and the next candidates for backfill for nothing.

Deadlines live in a heap with lazy deletion, rebuilt when it is mostly stale.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Final

from .state import Waiting
from .types import AccountingBug, RequestId

DEADLINE_SLACK: Final = 64  # stale deadlines tolerated beyond twice the queue's length

Place = tuple[float, int]  # arrival + handicap, order of submission


class Flow:
    """One client's requests, best first."""

    __slots__ = ("entries", "place", "turn")

    def __init__(self) -> None:
        self.entries: list[tuple[float, int, Waiting]] = []
        self.turn = -inf  # when this client was last granted a seat
        self.place: Place = (inf, 0)

    def place_of_head(self) -> Place:
        _, seq, waiting = self.entries[0]
        return max(waiting.arrived, self.turn) + waiting.handicap_s, seq


Standing = tuple[float, int, int, Flow]  # a place, and which entry of which flow stands there; seq makes it unique


class WaitingQueue:
    """All waiting requests of one lane."""

    __slots__ = ("_by_rid", "_deadlines", "_flows", "_order", "bytes")

    def __init__(self) -> None:
        self._by_rid: dict[RequestId, Waiting] = {}
        self._flows: dict[str, Flow] = {}
        self._order: list[Standing] = []  # by the place of each flow's head
        self._deadlines: list[tuple[float, int, Waiting]] = []
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._by_rid)

    def __contains__(self, rid: RequestId) -> bool:
        return rid in self._by_rid

    def __iter__(self) -> Iterator[Waiting]:
        """In order of submission."""
        return iter(list(self._by_rid.values()))

    def get(self, rid: RequestId) -> Waiting | None:
        return self._by_rid.get(rid)

    def add(self, waiting: Waiting) -> None:
        if waiting.rid in self._by_rid:
            raise AccountingBug(f"request {waiting.rid} is already waiting")
        self._by_rid[waiting.rid] = waiting
        self.bytes += waiting.bytes
        self._enter(waiting)
        heappush(self._deadlines, (waiting.deadline, waiting.seq, waiting))

    def remove(self, rid: RequestId, granted: float | None = None) -> Waiting:
        """Take a request out; ``granted`` is the time when it leaves for a seat, its client's turn."""
        waiting = self._by_rid.pop(rid)
        self.bytes -= waiting.bytes
        self._leave(waiting, granted)
        if not self._flows[waiting.client].entries:
            del self._flows[waiting.client]
        if len(self._deadlines) > 2 * len(self._by_rid) + DEADLINE_SLACK:
            self._deadlines = [(w.deadline, w.seq, w) for w in self._by_rid.values()]
            heapify(self._deadlines)
        return waiting

    def reorder(self, waiting: Waiting, handicap_s: float) -> None:
        """Give a waiting request a new handicap (its prompt was counted again)."""
        self._leave(waiting, None)
        waiting.handicap_s = handicap_s
        self._enter(waiting)

    def head(self) -> Waiting | None:
        return self._order[0][3].entries[0][2] if self._order else None

    def upcoming(self, now: float) -> Iterator[Waiting]:
        """Waiting requests in the order in which they would be granted if all grants happened now.

        Lazy, a merge of the flows: the first k cost O(k log k). Do not change the queue while iterating.
        """
        order, opened = self._order, 0
        merged: list[Standing] = []
        while merged or opened < len(order):
            while opened < len(order) and (not merged or order[opened] < merged[0]):
                heappush(merged, order[opened])
                opened += 1
            _, _, index, flow = merged[0]
            yield flow.entries[index][2]
            index += 1
            if index < len(flow.entries):
                _, seq, waiting = flow.entries[index]
                heapreplace(merged, (now + waiting.handicap_s, seq, index, flow))  # nobody arrives later than now
            else:
                heappop(merged)

    def expired(self, now: float) -> Iterator[Waiting]:
        """Requests whose deadline has come, still in the queue: the caller removes each before asking for the next."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, waiting = heappop(self._deadlines)
            if self._by_rid.get(waiting.rid) is waiting:
                yield waiting

    def next_deadline(self) -> float | None:
        while self._deadlines:
            deadline, _, waiting = self._deadlines[0]
            if self._by_rid.get(waiting.rid) is waiting:
                return deadline
            heappop(self._deadlines)
        return None

    def _enter(self, waiting: Waiting) -> None:
        flow = self._flows.get(waiting.client)
        if flow is None:
            flow = self._flows[waiting.client] = Flow()
        insort(flow.entries, (waiting.arrived + waiting.handicap_s, waiting.seq, waiting))
        if flow.entries[0][2] is waiting:
            self._replace(flow)

    def _leave(self, waiting: Waiting, granted: float | None) -> None:
        flow = self._flows[waiting.client]
        # The pair compares below the triple of the same request, so bisection lands on it.
        index = bisect_left(flow.entries, (waiting.arrived + waiting.handicap_s, waiting.seq))
        assert flow.entries[index][2] is waiting
        del flow.entries[index]
        if granted is not None:
            flow.turn = granted
        if index == 0 or granted is not None:
            self._replace(flow)

    def _replace(self, flow: Flow) -> None:
        """Put a flow where its head belongs."""
        if flow.place[0] < inf:
            del self._order[bisect_left(self._order, flow.place)]
        if flow.entries:
            flow.place = flow.place_of_head()
            insort(self._order, (*flow.place, 0, flow))
        else:
            flow.place = (inf, 0)

    def check(self) -> None:
        listed = [entry[2] for flow in self._flows.values() for entry in flow.entries]
        assert len(listed) == len(self._by_rid), "a waiting request is in no flow, or in two"
        assert all(self._by_rid.get(w.rid) is w for w in listed)
        assert self.bytes == sum(w.bytes for w in listed)
        assert {id(flow) for _, _, _, flow in self._order} == {id(flow) for flow in self._flows.values()}
        assert [place[:2] for place in self._order] == sorted(flow.place for flow in self._flows.values())
        for flow in self._flows.values():
            assert flow.place == flow.place_of_head(), "a flow stands where its head does not"
            keys = [entry[:2] for entry in flow.entries]
            assert keys == sorted(keys), "a flow out of order"
        due = {id(entry[2]) for entry in self._deadlines}
        assert all(id(w) in due for w in listed), "a waiting request without a deadline"
