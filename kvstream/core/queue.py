"""The bounded, ordered queue of waiting requests.

Theory of operation. Requests stand in *sections* (see ``flows``): one for all that wait for nothing but their turn, and
one for each gate that somebody waits for. The section of a gate is held until ``release``; then its requests compete
again, with the claims they always had. Who was found waiting behind a gate is moved to its section once; after that the
section opens and closes as a whole. So a gate that a thousand requests wait for costs nothing per step, and never keeps
from its turn anybody who does not wait for it.

*Ageing* between classes moves nothing either. A claim that is k times ``ageing_s`` old counts as k classes higher. In
each class the oldest claims come first, so only the heads of the classes are ever compared: by class as aged, then by
claim. A promoted request is then ahead of all of the higher class that came after it, however many.

Bisection on a Python list moves pointers, 8 bytes per entry: about 2 us at 10,000 entries, less than a heap costs in
comparisons, and unlike a heap it gives the next candidates for backfill and the positions for nothing.

Deadlines live in a heap with lazy deletion, rebuilt when it is mostly stale.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from math import ceil, inf
from typing import Final

from .flows import WEIGHT_MAX, WEIGHT_MIN, Flow, Section, Share, Standing, standing
from .state import OPEN, Gate, Waiting
from .types import AccountingBug, Priority, RequestId, Why

DEADLINE_SLACK: Final = 64  # stale deadlines tolerated beyond twice the queue's length
MERGE_MAX: Final = 64  # most requests that are moved back one by one when a gate is gone for good
SHARES_COUNTED_MAX: Final = 256  # clients beyond which ``ahead`` takes a bound instead of adding up


class WaitingQueue:
    """All waiting requests of one lane. ``ageing_s`` of waiting make up for one class."""

    __slots__ = ("_ageing_s", "_by_rid", "_deadlines", "_open", "_pushes", "_sections", "_shares", "_weights", "bytes")

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._by_rid: dict[RequestId, Waiting] = {}
        self._shares: dict[tuple[Priority, str], Share] = {}
        self._weights: tuple[dict[float, int], ...] = tuple({} for _ in Priority)  # clients by weight, per class
        self._sections: dict[Gate, Section] = {OPEN: Section(OPEN)}
        self._open: dict[Gate, Section] = dict(self._sections)
        self._deadlines: list[tuple[float, int, int, Waiting]] = []
        self._pushes = 0  # breaks ties: one that comes back has the number of its first life, which may still be there
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
        share = self._shares.get((waiting.priority, waiting.client))
        if share is None:
            share = self._shares[waiting.priority, waiting.client] = Share(waiting.priority.value)
        share.count += 1
        self._weigh(share, min(max(WEIGHT_MIN, waiting.weight), WEIGHT_MAX))
        self._enter(waiting)
        self._pushes += 1
        heappush(self._deadlines, (waiting.deadline, waiting.seq, self._pushes, waiting))

    def remove(self, rid: RequestId, granted: float | None = None) -> Waiting:
        """Take a request out; ``granted`` is the time when it leaves for a seat, its client's turn."""
        waiting = self._by_rid.pop(rid)
        self.bytes -= waiting.bytes
        self.release(("preempted", rid), for_good=True)  # who gave way to it may have its turn again
        share = self._shares[waiting.priority, waiting.client]
        if granted is not None:
            share.grant(granted, min(self._weights[share.level]))
        self._leave(waiting)
        share.count -= 1
        if not share.count:
            self._weigh(share, None)
            del self._shares[waiting.priority, waiting.client]
        elif granted is not None:
            for flow in share.flows:  # in other sections it stands where its client stood before
                if (flow.claim, flow.place) != (flow.claim_of_head(), flow.place_of_head()):
                    flow.section.replace(flow)
        if len(self._deadlines) > 2 * len(self._by_rid) + DEADLINE_SLACK:
            self._deadlines = [(w.deadline, w.seq, n, w) for n, w in enumerate(self._by_rid.values())]
            heapify(self._deadlines)
        return waiting

    def reorder(self, waiting: Waiting, handicap_s: float) -> None:
        """Give a waiting request a new handicap (its prompt was counted again). What it waits for is found anew."""
        self._leave(waiting)
        waiting.handicap_s, waiting.gate = handicap_s, OPEN
        self._enter(waiting)

    # --- gates ------------------------------------------------------------------------------------------------------

    def hold(self, waiting: Waiting, gate: Gate) -> bool:
        """``gate`` is closed, and this request waits for it. Whether that is new for this request."""
        fresh = waiting.gate != gate
        if fresh:
            self._leave(waiting)
            waiting.gate = gate
            self._enter(waiting)
        section = self._sections[gate]
        section.why = gate[0]
        self._open.pop(gate, None)
        return fresh

    def release(self, gate: Gate, *, for_good: bool = False) -> bool:
        """``gate`` has opened, ``for_good`` if it will not close again. Whether anybody waited for it."""
        section = self._sections.get(gate)
        if section is None or section.why is None:
            return False
        section.why = None
        self._open[gate] = section
        if for_good and section.count <= MERGE_MAX:
            for waiting in self.behind(gate):
                self._leave(waiting)
                waiting.gate = OPEN
                self._enter(waiting)
        return True

    def holds(self, gate: Gate) -> int:
        """How many requests are held back by ``gate``."""
        section = self._sections.get(gate)
        return 0 if section is None or section.why is None else section.count

    def behind(self, gate: Gate) -> list[Waiting]:
        """Who stands in the section of ``gate``."""
        section = self._sections.get(gate)
        return [] if section is None else [entry[2] for flow in section.flows.values() for entry in flow.entries]

    def held(self) -> Iterator[Section]:
        """The sections that are held back."""
        return (section for section in self._sections.values() if section.why is not None)

    def held_by_why(self) -> dict[Why, int]:
        """How many requests are held back, by reason."""
        counts: dict[Why, int] = {}
        for section in self.held():
            if section.why is not None:
                counts[section.why] = counts.get(section.why, 0) + section.count
        return counts

    def best_of(self, section: Section, now: float) -> Standing:
        """Who is first in a section, which is never empty."""
        best = section.best(now, self._ageing_s)
        assert best is not None
        return best

    def why(self, waiting: Waiting) -> Why | None:
        """The gate that holds a request back; None when only its place does."""
        return self._sections[waiting.gate].why

    # --- order ------------------------------------------------------------------------------------------------------

    def head(self, now: float) -> Waiting | None:
        """The request that is to be granted next."""
        found: Standing | None = None
        for section in self._open.values():
            best = section.best(now, self._ageing_s)
            if best is not None and (found is None or best < found):
                found = best
        return None if found is None else found[4].entries[0][2]

    def upcoming(self, now: float, *, held: bool = False) -> Iterator[Waiting]:
        """Waiting requests in the order in which they would be granted if all grants happened now; with ``held`` also
        those behind a gate, as if it were open.

        Lazy, a merge of the flows: the first k cost O(k log k). Do not change the queue while iterating.
        """
        sections = self._sections if held else self._open
        orders = [order for section in sections.values() for order in section.orders if order]
        merged = [(*standing(order[0][2], now, self._ageing_s), number) for number, order in enumerate(orders)]
        heapify(merged)
        opened = [1] * len(orders)
        shown: set[Share] = set()  # clients that had their turn
        while merged:
            _, _, _, index, flow, number = merged[0]
            level, at = flow.share.level, max(index, 0)
            _, seq, waiting = flow.entries[at]
            if index == 0 and flow.share in shown:  # its client's turn came in another section: its claim would be now
                heapreplace(merged, (level, now + waiting.handicap_s, seq, -1, flow, number))
            else:
                yield waiting
                shown.add(flow.share)
                if at + 1 < len(flow.entries):
                    _, seq, waiting = flow.entries[at + 1]
                    heapreplace(merged, (level, now + waiting.handicap_s, seq, at + 1, flow, number))
                else:
                    heappop(merged)
            if index == 0 and opened[number] < len(orders[number]):
                heappush(merged, (*standing(orders[number][opened[number]][2], now, self._ageing_s), number))
                opened[number] += 1

    def ahead(self, waiting: Waiting) -> int:
        """How many requests will be granted before this one, if nobody comes any more: those of its own client before
        it, for each turn of its client the due turns of the others of its class, and all of the classes above."""
        share = self._shares[waiting.priority, waiting.client]
        place = waiting.arrived + waiting.handicap_s, waiting.seq
        mine = sum(bisect_left(flow.entries, place) for flow in share.flows)
        rounds = mine + 1
        if len(self._shares) > SHARES_COUNTED_MAX:
            return mine + min(len(self) - share.count, rounds * len(self._shares))
        others = 0
        for other in self._shares.values():
            if other.level < share.level:
                others += other.count
            elif other.level == share.level and other is not share:
                others += min(other.count, ceil(rounds * (other.weight or 1) / (share.weight or 1)))
        return mine + others

    # --- deadlines --------------------------------------------------------------------------------------------------

    def expired(self, now: float) -> Iterator[Waiting]:
        """Requests whose deadline has come, still in the queue: the caller removes each before asking for the next."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, _, waiting = heappop(self._deadlines)
            if self._by_rid.get(waiting.rid) is waiting:
                yield waiting

    def next_deadline(self) -> float | None:
        while self._deadlines:
            deadline, _, _, waiting = self._deadlines[0]
            if self._by_rid.get(waiting.rid) is waiting:
                return deadline if deadline < inf else None
            heappop(self._deadlines)
        return None

    # --- inside -----------------------------------------------------------------------------------------------------

    def _enter(self, waiting: Waiting) -> None:
        section = self._sections.get(waiting.gate)
        if section is None:
            section = self._sections[waiting.gate] = self._open[waiting.gate] = Section(waiting.gate)
        section.enter(waiting, self._shares[waiting.priority, waiting.client])

    def _weigh(self, share: Share, weight: float | None) -> None:
        """A client's weight is this from now on, or it has nothing waiting any more."""
        weights = self._weights[share.level]
        if weight != share.weight:
            if share.weight is not None:
                weights[share.weight] -= 1
                if not weights[share.weight]:
                    del weights[share.weight]
            if weight is not None:
                weights[weight] = weights.get(weight, 0) + 1
            share.weight = weight

    def _leave(self, waiting: Waiting) -> None:
        section = self._sections[waiting.gate]
        section.leave(waiting)
        if not section.count and section.gate != OPEN:
            del self._sections[section.gate]
            self._open.pop(section.gate, None)

    def check(self) -> None:
        """Raise AssertionError unless lists, places, bytes and deadlines agree."""
        listed = [
            entry[2]
            for section in self._sections.values()
            for flow in section.flows.values()
            for entry in flow.entries
        ]
        assert len(listed) == len(self._by_rid), "a waiting request is in no flow, or in two"
        assert all(self._by_rid.get(w.rid) is w for w in listed)
        assert self.bytes == sum(w.bytes for w in listed)
        for gate, section in self._sections.items():
            section.check()
            assert section.count or gate == OPEN, "an empty section is kept"
            assert (section.why is None) == (gate in self._open), "a section both held and open, or neither"
        flows: list[Flow] = [flow for section in self._sections.values() for flow in section.flows.values()]
        assert sum(len(share.flows) for share in self._shares.values()) == len(flows), "a flow of no client"
        for (priority, client), share in self._shares.items():
            assert share.level == priority.value
            assert share.count == sum(len(flow.entries) for flow in share.flows) > 0, f"{client!r} miscounted"
        for level, weights in enumerate(self._weights):
            heavy = [share.weight for share in self._shares.values() if share.level == level]
            assert sum(weights.values()) == len(heavy) and set(weights) == set(heavy), "weights miscounted"
        due = {id(entry[3]) for entry in self._deadlines}
        assert all(id(w) in due for w in listed), "a waiting request without a deadline"
