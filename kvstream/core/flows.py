"""Turns between clients, and sections that can be held back as a whole.

Theory of operation. A *flow* is what one client has waiting in one class and one section, sorted by arrival + handicap
(see ``policy``): a key that never changes while a request waits, so plain bisection keeps the list sorted. Flows are
fair to each other: the head of a flow stands at

    claim + handicap,   claim = max(its arrival, its client's turn)

where the *turn* is the time of the client's last grant: a flood and a polite client alternate, and nobody needs a
configured share. A client of weight w stays where it is for w grants before its turn is over (what is left of a
fraction counts in the next round), so it has w times the turns of a client of weight 1; weights are relative to the
lightest client that waits in the class. Ageing between classes counts from the last grant, whatever the weight: else a
heavy client of a low class, once aged, would take all its turns before the classes above.

A *section* holds requests that wait for one and the same thing (``state.Gate``); ``OPEN`` is for those that wait for
nothing but their place. A section that is held takes no part in who is next; closing or opening one is a flag, however
many requests are in it. Its requests keep their claims, so when it opens they are where they would have been.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from math import inf
from typing import Final

from .state import Gate, Waiting
from .types import Priority, Why

WEIGHT_MIN: Final = 0.01
WEIGHT_MAX: Final = 100.0
ONE: Final = 1 - 1e-9  # a whole grant, but for rounding

Place = tuple[float, int]  # arrival + handicap, order of submission

# Class as aged, a place, and which entry of which flow stands there; the order of submission makes it unique.
Standing = tuple[int, float, int, int, "Flow"]


class Share:
    """What one client has waiting in one class, in all sections together."""

    __slots__ = ("count", "credit", "flows", "granted", "level", "turn", "weight")

    def __init__(self, level: int) -> None:
        self.level = level  # the class's rank, 0 is the most urgent
        self.turn = -inf  # since when this client's next request has been next
        self.granted = -inf  # when it was last granted a seat
        self.weight: float | None = None
        self.credit = 0.0  # grants that are left of this round
        self.count = 0
        self.flows: list[Flow] = []  # as many as there are sections in which it waits

    def grant(self, now: float, lightest: float) -> None:
        """A request leaves for a seat. The caller puts the flows where they belong now."""
        self.granted = now
        if self.credit < ONE:
            self.credit += (self.weight or lightest) / lightest
        self.credit -= 1
        if self.credit < ONE:
            self.turn = now


class Flow:
    """One client's requests of one class in one section, best first."""

    __slots__ = ("claim", "entries", "place", "section", "share")

    def __init__(self, share: Share, section: Section) -> None:
        self.share = share
        self.section = section
        self.entries: list[tuple[float, int, Waiting]] = []
        self.claim = inf  # since when the head has been next in this flow, for ageing
        self.place: Place = (inf, 0)

    def claim_of_head(self) -> float:
        return max(self.entries[0][2].arrived, self.share.granted)

    def place_of_head(self) -> Place:
        _, seq, waiting = self.entries[0]
        return max(waiting.arrived, self.share.turn) + waiting.handicap_s, seq


class Section:
    """The flows of all that wait for one gate, per class in the order of their heads. ``why`` is None while the gate
    is open."""

    __slots__ = ("count", "flows", "gate", "orders", "why")

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.why: Why | None = None
        self.count = 0
        self.flows: dict[tuple[Priority, str], Flow] = {}
        self.orders: tuple[list[tuple[float, int, Flow]], ...] = tuple([] for _ in Priority)

    def enter(self, waiting: Waiting, share: Share) -> None:
        flow = self.flows.get((waiting.priority, waiting.client))
        if flow is None:
            flow = self.flows[waiting.priority, waiting.client] = Flow(share, self)
            share.flows.append(flow)
        self.count += 1
        insort(flow.entries, (waiting.arrived + waiting.handicap_s, waiting.seq, waiting))
        if flow.entries[0][2] is waiting:
            self.replace(flow)

    def leave(self, waiting: Waiting) -> None:
        """Take a request out."""
        flow = self.flows[waiting.priority, waiting.client]
        # The pair compares below the triple of the same request, so bisection lands on it.
        index = bisect_left(flow.entries, (waiting.arrived + waiting.handicap_s, waiting.seq))
        assert flow.entries[index][2] is waiting
        del flow.entries[index]
        self.count -= 1
        if index == 0:
            self.replace(flow)
        if not flow.entries:
            del self.flows[waiting.priority, waiting.client]
            flow.share.flows.remove(flow)

    def replace(self, flow: Flow) -> None:
        """Put a flow where its head belongs."""
        order = self.orders[flow.share.level]
        if flow.place[0] < inf:
            del order[bisect_left(order, flow.place)]
        if flow.entries:
            flow.claim, flow.place = flow.claim_of_head(), flow.place_of_head()
            insort(order, (*flow.place, flow))
        else:
            flow.place = (inf, 0)

    def best(self, now: float, ageing_s: float) -> Standing | None:
        """Who of this section is next, held or not."""
        return min((standing(order[0][2], now, ageing_s) for order in self.orders if order), default=None)

    def check(self) -> None:
        """Raise AssertionError unless flows and orders agree."""
        assert self.count == sum(len(flow.entries) for flow in self.flows.values()), "a section miscounted"
        assert sum(len(order) for order in self.orders) == len(self.flows), "a flow is in no order, or in two"
        for (priority, client), flow in self.flows.items():
            assert flow in flow.share.flows and flow.share.level == priority.value and flow.section is self
            assert all(entry[2].priority is priority and entry[2].client == client for entry in flow.entries)
            assert all(entry[2].gate == self.gate for entry in flow.entries), "a request in a section not its own"
            assert (*flow.place, flow) in self.orders[flow.share.level], "a flow is lost"
            assert (flow.claim, flow.place) == (flow.claim_of_head(), flow.place_of_head()), (
                "a flow stands where its head does not"
            )
            keys = [entry[:2] for entry in flow.entries]
            assert keys == sorted(keys), "a flow out of order"
        for order in self.orders:
            assert [place[:2] for place in order] == sorted(place[:2] for place in order), "flows out of order"


def standing(flow: Flow, now: float, ageing_s: float) -> Standing:
    """Where a flow's head stands among all: by class as aged, then by place."""
    level = flow.share.level
    if level:
        level = max(0, level - int(max(0.0, now - flow.claim) / ageing_s)) if ageing_s else 0
    return level, flow.place[0], flow.place[1], 0, flow
