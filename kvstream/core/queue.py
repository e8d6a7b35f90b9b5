"""The bounded, ordered queue of waiting requests.

Theory of operation. Every class and client has a *flow*: its requests sorted by arrival + handicap (see ``policy``), a
key that never changes while a request waits, so plain bisection keeps the list sorted and one request leaving never
moves the others. Within a class the flows are fair to each other: the head of a flow stands at

    claim + handicap,   claim = max(its arrival, the last grant to its flow)

so a client's turn ages from its own last turn, not from when it threw its thousand requests in. A flood and a polite
client then alternate, and nobody needs a configured share. One client alone (or requests without a client name, which
are one client) are simply in order. The flows of a class are themselves kept in one sorted list, touched only when a
flow's head changes or is granted.

*Ageing* between classes moves nothing either. A claim that is k times ``ageing_s`` old counts as k classes higher. In
each class the oldest claims come first, so only the three heads of the classes are ever compared: by class as aged,
then by claim. A promoted request is then ahead of all of the higher class that came after it, however many.

Bisection on a Python list moves pointers, 8 bytes per entry: about 2 us at 10,000 entries, less than a heap costs in
comparisons, and unlike a heap it gives the next candidates for backfill and the positions for nothing.

Deadlines live in a heap with lazy deletion, rebuilt when it is mostly stale.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Final

from .state import Waiting
from .types import AccountingBug, Priority, RequestId

DEADLINE_SLACK: Final = 64  # stale deadlines tolerated beyond twice the queue's length

Place = tuple[float, int]  # arrival + handicap, order of submission


class Flow:
    """One client's requests of one class, best first."""

    __slots__ = ("claim", "entries", "level", "place", "turn")

    def __init__(self, level: int) -> None:
        self.level = level  # the class's rank, 0 is the most urgent
        self.entries: list[tuple[float, int, Waiting]] = []
        self.turn = -inf  # when this flow was last granted a seat
        self.claim = inf  # since when the head has been next in this flow
        self.place: Place = (inf, 0)

    def claim_of_head(self) -> float:
        return max(self.entries[0][2].arrived, self.turn)

    def place_of_head(self) -> Place:
        _, seq, waiting = self.entries[0]
        return self.claim_of_head() + waiting.handicap_s, seq


# Class as aged, a place, and which entry of which flow stands there; the order of submission makes it unique.
Standing = tuple[int, float, int, int, Flow]


class WaitingQueue:
    """All waiting requests of one lane. ``ageing_s`` of waiting make up for one class."""

    __slots__ = ("_ageing_s", "_by_rid", "_deadlines", "_flows", "_orders", "bytes")

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._by_rid: dict[RequestId, Waiting] = {}
        self._flows: dict[tuple[Priority, str], Flow] = {}
        self._orders: tuple[list[tuple[float, int, Flow]], ...] = tuple([] for _ in Priority)  # by place of the head
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
        if not self._flows[waiting.priority, waiting.client].entries:
            del self._flows[waiting.priority, waiting.client]
        if len(self._deadlines) > 2 * len(self._by_rid) + DEADLINE_SLACK:
            self._deadlines = [(w.deadline, w.seq, w) for w in self._by_rid.values()]
            heapify(self._deadlines)
        return waiting

    def reorder(self, waiting: Waiting, handicap_s: float) -> None:
        """Give a waiting request a new handicap (its prompt was counted again)."""
        self._leave(waiting, None)
        waiting.handicap_s = handicap_s
        self._enter(waiting)

    def head(self, now: float) -> Waiting | None:
        """The request that is to be granted next."""
        best = min((self._standing(order[0][2], now) for order in self._orders if order), default=None)
        return None if best is None else best[4].entries[0][2]

    def upcoming(self, now: float) -> Iterator[Waiting]:
        """Waiting requests in the order in which they would be granted if all grants happened now.

        Lazy, a merge of the flows: the first k cost O(k log k). Do not change the queue while iterating.
        """
        merged = [self._standing(order[0][2], now) for order in self._orders if order]
        heapify(merged)
        opened = [1 for _ in self._orders]
        while merged:
            _, _, _, index, flow = merged[0]
            yield flow.entries[index][2]
            level = flow.level
            if index + 1 < len(flow.entries):
                _, seq, waiting = flow.entries[index + 1]
                # Its claim would be now.
                heapreplace(merged, (level, now + waiting.handicap_s, seq, index + 1, flow))
            else:
                heappop(merged)
            if index == 0 and opened[level] < len(self._orders[level]):
                heappush(merged, self._standing(self._orders[level][opened[level]][2], now))
                opened[level] += 1

    def _standing(self, flow: Flow, now: float) -> Standing:
        level = flow.level
        if level:
            level = max(0, level - int((now - flow.claim) / self._ageing_s)) if self._ageing_s else 0
        return level, flow.place[0], flow.place[1], 0, flow

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
        flow = self._flows.get((waiting.priority, waiting.client))
        if flow is None:
            flow = self._flows[waiting.priority, waiting.client] = Flow(waiting.priority.value)
        insort(flow.entries, (waiting.arrived + waiting.handicap_s, waiting.seq, waiting))
        if flow.entries[0][2] is waiting:
            self._replace(flow)

    def _leave(self, waiting: Waiting, granted: float | None) -> None:
        flow = self._flows[waiting.priority, waiting.client]
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
        order = self._orders[flow.level]
        if flow.place[0] < inf:
            del order[bisect_left(order, flow.place)]
        if flow.entries:
            flow.claim, flow.place = flow.claim_of_head(), flow.place_of_head()
            insort(order, (*flow.place, flow))
        else:
            flow.place = (inf, 0)

    def check(self) -> None:
        """Raise AssertionError unless lists, places, bytes and deadlines agree."""
        listed = [entry[2] for flow in self._flows.values() for entry in flow.entries]
        assert len(listed) == len(self._by_rid), "a waiting request is in no flow, or in two"
        assert all(self._by_rid.get(w.rid) is w for w in listed)
        assert self.bytes == sum(w.bytes for w in listed)
        assert sum(len(order) for order in self._orders) == len(self._flows), "a flow is in no order, or in two"
        for (priority, client), flow in self._flows.items():
            assert flow.level == priority.value
            assert all(entry[2].priority is priority and entry[2].client == client for entry in flow.entries)
            assert (*flow.place, flow) in self._orders[flow.level], "a flow is lost"
            assert (flow.claim, flow.place) == (flow.claim_of_head(), flow.place_of_head()), (
                "a flow stands where its head does not"
            )
            keys = [entry[:2] for entry in flow.entries]
            assert keys == sorted(keys), "a flow out of order"
        for order in self._orders:
            assert [place[:2] for place in order] == sorted(place[:2] for place in order), "flows out of order"
        due = {id(entry[2]) for entry in self._deadlines}
        assert all(id(w) in due for w in listed), "a waiting request without a deadline"
