"""Safe backfill: small ones pass a head that lacks pages, and its start does not move."""

from __future__ import annotations

import copy
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstream.core import messages as m
from kvstream.core.policy import Forecast, plan_horizon
from kvstream.core.scheduler import Scheduler, SchedulerSettings
from kvstream.core.types import EndReason, PoolMode, RequestId
from tests.play import Play, ended, limits, produced, submit

# --- playbooks ------------------------------------------------------------------------------------------------------


def blocked(**settings: object) -> Play:
    """20 pages: request 1 holds 10 for 32 more tokens, the head (2) wants 15."""
    play = Play(pages=20, **settings)
    play.step(submit(1, 112, 32), expect=["admit 1 pages=7 reserved=3"])
    play.step(submit(2, 208, 16))
    return play


def test_a_short_one_passes_and_is_over_in_time() -> None:
    play = blocked()
    play.step(submit(3, 64, 32), expect=["admit 3"])  # 7 pages, but over when 1 is
    assert play.see().counters.backfilled == 1
    play.step(*(produced(r, 32) for r in (1, 3)), ended(1), ended(3), expect=["admit 2"])


def test_a_longer_one_passes_only_on_spare_pages() -> None:
    play = blocked()
    play.step(submit(3, 48, 33))  # 6 pages + headroom, 5 spare
    play.step(submit(4, 16, 48), expect=["admit 4"])  # 5 pages
    play.step(submit(5, 1, 14), expect=["admit 5"])  # nothing is spare any more, but it is short
    play.step(ended(5), submit(6, 1, 33))
    play.step(ended(1), expect=["admit 2"])


def test_strict_order_without_backfill() -> None:
    play = blocked(backfill=False)
    play.step(submit(3, 16, 1))
    play.step(ended(1), expect=["admit 2", "admit 3"])


def test_an_unknown_length_is_no_promise_of_pages() -> None:
    play = Play(pages=20, answer_tokens_default=32)
    play.step(submit(1, 112, None), expect=["admit 1 reserved=3"])
    play.step(submit(2, 208, 16))
    play.step(submit(3, 64, 32))  # short, but nobody knows when the head starts
    play.step(submit(4, 32, 32), expect=["admit 4"])  # 5 pages fit beside the head whatever happens
    play.step(ended(1), expect=["admit 2"])


def test_those_of_unknown_length_that_passed_cannot_starve_the_head() -> None:
    """Their own pages must not be counted as room for the next ones."""
    play = Play(pages=100, seats=20, answer_tokens_default=16)
    unknown = {1: 48, 2: 28}  # + 1 page answer + 1 headroom: 50 and 30
    play.step(*(submit(rid, pages * 16, None) for rid, pages in unknown.items()), expect=["admit 1", "admit 2"])
    play.step(submit(10, 58 * 16, 16))  # the head: 60
    play.step(submit(20, 18 * 16, None), expect=["admit 20"])  # 20 of the 40 that are spare at last
    play.step(submit(21, 28 * 16, None), ended(2))  # 30 would fit now, but only 20 are spare
    play.step(submit(22, 18 * 16, None), expect=["admit 22"])
    play.step(submit(23, 1, None))
    play.step(ended(1), expect=None)
    assert 10 in play.running


def test_a_head_that_wants_the_machine_for_itself() -> None:
    play = Play(pages=20, watermark=0.2)
    play.step(submit(1, 112, 32), expect=["admit 1"])
    play.step(submit(2, 300, 32_000))
    play.step(submit(3, 16, 32), submit(4, 16, 33), expect=["admit 3"])
    play.step(ended(1))
    play.step(ended(3), expect=["admit 2"])


def test_a_bounded_number_of_candidates_is_looked_at() -> None:
    play = blocked(backfill_candidates_max=3)
    play.step(*(submit(i, 160, 16) for i in range(10, 13)), submit(20, 16, 1))
    assert play.running == [1]


def test_backfill_does_not_set_the_head_of_its_own_client_back() -> None:
    play = Play(pages=20)
    play.step(submit(1, 112, 32), expect=["admit 1"])
    play.step(submit(2, 208, 16, client="a"))
    play.at(1).step(submit(3, 208, 16, client="b"))
    play.at(2).step(submit(4, 16, 16, client="a"), expect=["admit 4"])
    play.at(3).step(ended(1), ended(4), expect=["admit 2"])


def test_draining_counts_as_over_soon() -> None:
    play = blocked()
    play.step(ended(1, EndReason.CANCELLED, draining=True), submit(3, 64, 32))
    play.step(submit(4, 16, 48), expect=["admit 4"])
    play.step(m.SeatIdle(RequestId(1)), expect=["admit 2"])


# --- the plan -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("running", "room", "target", "steps", "spare"), [
    ([(10, 5, False)], 2, 7, 10, 0),
    ([(10, 5, False), (3, 2, False)], 2, 4, 3, 0),
    ([(10, 5, False), (10, 4, False), (3, 2, False)], 0, 3, 10, 8),  # all that end in one step count
    ([(10, 5, False)], 0, 9, 10, 0),  # alone on the machine
    ([(10, 5, False), (inf, 9, False)], 0, 9, inf, 5),
    ([(10, 5, False), (inf, 9, True)], 0, 5, 10, 0),
    ([(10, 5, False), (inf, 9, True)], 0, 9, inf, 0),
])
def test_plan(running: list[Forecast], room: int, target: int, steps: float, spare: int) -> None:
    horizon = plan_horizon(running, room, target)
    assert (horizon.steps, horizon.spare) == (steps, spare)


# --- a small discrete simulation ------------------------------------------------------------------------------------


class Lane:
    """A runtime where every running sequence produces one token per tick and stops at its limit."""

    def __init__(self, scheduler: Scheduler, left: dict[int, int]) -> None:
        self.scheduler = scheduler
        self.left = left  # answer tokens still to come of the running ones
        self.length: dict[int, int] = {}
        self.tick = 0

    def step(self, arrivals: list[m.Submitted]) -> list[int]:
        self.tick += 1
        self.length |= {event.rid: event.tokens_max or 0 for event in arrivals}
        events: list[m.Event] = [produced(rid) for rid in self.left]
        self.left = {rid: left - 1 for rid, left in self.left.items()}
        events += [ended(rid) for rid, left in self.left.items() if left <= 0]
        self.left = {rid: left for rid, left in self.left.items() if left > 0}
        actions = self.scheduler.step(float(self.tick), [*events, *arrivals])
        self.scheduler.check_invariants()
        started = [int(action.rid) for action in actions if isinstance(action, m.Admit)]
        self.left |= {rid: self.length[rid] for rid in started}
        return started

    def start_without_backfill(self, rid: int) -> int:
        """When the request would start if from now on nobody passed it."""
        twin = copy.deepcopy(self)
        settings = twin.scheduler.settings
        twin.scheduler.settings = SchedulerSettings(
            seats_max=settings.seats_max, watermark=settings.watermark, wait_s_max=1e6, backfill=False
        )
        while rid not in twin.step([]):
            assert twin.tick < self.tick + 10_000
        return twin.tick


REQUEST = st.tuples(st.integers(0, 8), st.integers(1, 150), st.integers(1, 60))


@given(
    st.lists(REQUEST, min_size=4, max_size=20),
    st.integers(12, 40),
    st.integers(2, 6),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([PoolMode.UNIFIED, PoolMode.UNKNOWN]),
    st.booleans(),
)
def test_nobody_who_passes_delays_the_head(
    requests: list[tuple[int, int, int]], pages: int, seats: int, watermark: float, mode: PoolMode, prefix: bool
) -> None:
    """The head's start with backfill is never later than without, from the moment it is blocked."""
    settings = SchedulerSettings(seats_max=seats, watermark=watermark, wait_s_max=1e6, prefix_enabled=prefix)
    lane = Lane(Scheduler(settings), {})
    lane.scheduler.step(0.0, [m.BackendUp(limits(seats=seats, pages=pages, mode=mode))])
    arrivals: dict[int, list[m.Submitted]] = {}
    due = 1
    for rid, (gap, tokens, answer) in enumerate(requests):
        due += gap
        arrivals.setdefault(due, []).append(submit(rid, tokens, answer, prompt="abc"[rid % 3]))
    promised: dict[int, int] = {}
    while lane.tick < due or lane.left or lane.scheduler.snapshot(0).waiting_total:
        for rid in lane.step(arrivals.get(lane.tick + 1, [])):
            assert lane.tick <= promised.get(rid, lane.tick), f"head {rid} starts late"
        head = next(iter(lane.scheduler.snapshot(0).waiting), None)
        if head is not None and head.rid not in promised:
            promised[head.rid] = lane.start_without_backfill(head.rid)
        assert lane.tick < 10_000, "somebody is never served"
