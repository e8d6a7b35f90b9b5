"""Shedding: who is told at once that it would wait in vain, and what it is told. A simulated lane, one step a tenth."""

from __future__ import annotations

from math import ceil

import pytest
from attrs import define, field

from kvstream.core import messages as m
from tests.play import Play, ended, submit

TICK = 0.1


@define
class Lane:
    """A lane whose every service takes ``service_s``. ``refused`` holds (when, why, retry_after_s)."""

    play: Play
    service_s: float = 1.0
    now: float = 0.0
    started: dict[int, float] = field(factory=dict)
    arrived: dict[int, float] = field(factory=dict)
    waited: dict[int, float] = field(factory=dict)
    refused: dict[int, tuple[float, str, float | None]] = field(factory=dict)

    def tick(self, *new: m.Submitted) -> None:
        done = [rid for rid, at in self.started.items() if self.now - at >= self.service_s - 1e-9]
        for rid in done:
            del self.started[rid]
        for event in new:
            self.arrived[event.rid] = self.now
        self.play.now = self.now  # without Play's check of every step: there are hundreds, and the machine does that
        for action in self.play.scheduler.step(self.now, [*(ended(rid) for rid in done), *new]):
            if isinstance(action, m.Admit):
                self.started[action.rid] = self.now
                self.waited[action.rid] = self.now - self.arrived[action.rid]
            elif isinstance(action, m.Refuse):
                self.refused[action.rid] = (self.now, action.why.value, action.retry_after_s)
        self.now = round(self.now + TICK, 6)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK)):
            self.tick()

    def shed(self) -> dict[int, float]:
        """Who was shed, with the retry time in seconds."""
        return {rid: retry or 0.0 for rid, (_, why, retry) in self.refused.items() if why == "shed"}


def lane(*, seats: int = 2, patience_s: float = 20.0, **settings: float) -> Lane:
    return Lane(Play(seats=seats, wait_s_max=patience_s, **{"shed_probe_every": 10**9, **settings}))  # type: ignore[arg-type]


def warmed(**settings: float) -> Lane:
    """A lane of two seats and two ends a second, which has had a queue for a while and still has 10 waiting."""
    it = lane(**settings)
    it.tick(*(submit(i, 16) for i in range(36)))
    it.run(12.0)
    assert it.play.see().waiting_total == 10 and not it.refused
    return it


def test_who_would_wait_past_its_deadline_is_told_when_it_would_not() -> None:
    it = warmed()
    it.tick(*(submit(100 + i, 16) for i in range(40)))
    shed = it.shed()
    assert len(shed) == pytest.approx(10, abs=3)  # 2 a second for 20 s: 40 fit, 10 were there
    assert min(shed) == 140 - len(shed), "an earlier one was shed, a later one was not"
    assert all(retry > 0 for retry in shed.values())
    it.run(40)
    in_vain = [why for _, why, _ in it.refused.values() if why != "shed"]
    assert len(in_vain) <= 1, "somebody was let in who could not be served"
    assert len(it.waited) == 36 + 40 - len(shed) - len(in_vain)
    it.play.scheduler.check_invariants()


def test_coming_back_after_retry_after_is_in_time() -> None:
    """Everybody obeys, in whole seconds as HTTP has it, and is then served within its deadline."""
    it = warmed()
    it.tick(*(submit(100 + i, 16) for i in range(60)))
    back = {rid: round(it.refused[rid][0] + ceil(retry), 6) for rid, retry in it.shed().items()}
    assert len(back) >= 25
    for _ in range(600):
        due = [rid for rid, at in back.items() if at <= it.now]
        for rid in due:
            del back[rid]
        it.tick(*(submit(1000 + rid, 16) for rid in due))
    again = [rid for rid in it.refused if rid >= 1000]
    assert not again, "told to come back, and then refused again"
    assert all(it.waited[rid] <= 20 for rid in it.waited)


def test_the_lane_never_idles_for_those_it_sent_away() -> None:
    it = warmed()
    it.tick(*(submit(100 + i, 16) for i in range(60)))
    first = min(it.shed().values())
    # when the first is due to come back, there are still as many waiting as can be served within its deadline
    it.run(first)
    assert it.play.see().waiting_total >= 2 * 20 - 4


def test_a_lane_that_was_never_busy_says_nothing() -> None:
    """Ends of a lane with nothing to do measure its clients, not how fast it is."""
    it = lane(patience_s=20)
    for i in range(30):
        it.tick(submit(i, 16))
        it.run(3)
    it.tick(*(submit(100 + i, 16) for i in range(30)))
    assert not it.refused
    it.run(30)
    assert not it.refused


def test_ends_of_an_idle_lane_do_not_make_it_look_fast() -> None:
    it = lane(service_window_s=10_000)
    for i in range(60):
        it.tick(submit(1000 + i, 16))
        it.run(1.2)
    it.tick(*(submit(i, 16) for i in range(36)))
    it.run(12)
    it.tick(*(submit(100 + i, 16) for i in range(60)))
    assert len(it.shed()) >= 20


def test_an_idle_hour_does_not_slow_the_estimate() -> None:
    it = warmed(service_window_s=10_000)
    it.run(3600)
    it.tick(*(submit(100 + i, 16) for i in range(30)))
    assert not it.shed()


def test_too_few_ends_are_no_estimate() -> None:
    it = lane(patience_s=4)
    it.tick(*(submit(i, 16) for i in range(30)))
    it.run(3)
    it.tick(submit(100, 16))
    assert 100 not in it.refused  # six ends


def test_a_lane_that_gets_fast_again_stops_shedding() -> None:
    it = warmed(patience_s=20)
    it.service_s = 20.0
    rid = 1000
    while it.now < 120:  # slow: one newcomer a second, nearly all of them shed in the end
        rid += 1
        it.tick(submit(rid, 16))
        it.run(0.9)
    assert any(seen > 1000 for seen in it.shed())
    it.service_s = 0.2
    for _ in range(60):  # fast: ten times what comes
        rid += 1
        it.tick(submit(rid, 16))
        it.run(0.9)
    last = [it.refused.get(r) for r in range(rid - 20, rid + 1)]
    assert last == [None] * 21, "still shedding on a lane that has nothing to do"


def test_an_estimate_cannot_keep_itself_alive() -> None:
    """A lane that stands still: its old ends are forgotten although nobody is let in."""
    it = warmed(patience_s=20, service_window_s=20)
    it.service_s = 1e9
    seen: dict[float, bool] = {}
    rid = 1000
    while it.now < 80:
        rid += 1
        it.tick(submit(rid, 16))
        seen[it.now] = rid in it.shed()
        it.run(0.9)
    assert any(shed for at, shed in seen.items() if 20 < at < 33), "it stands still, and that was seen"
    assert not any(shed for at, shed in seen.items() if at > 40), "nothing is known any more"


@pytest.mark.parametrize("every", [2, 4])
def test_every_so_many_th_is_let_in(every: int) -> None:
    it = warmed(shed_probe_every=every)
    it.tick(*(submit(100 + i, 16) for i in range(80)))
    beyond = 80 - (min(it.shed()) - 100)
    assert len(it.shed()) == pytest.approx(beyond * (every - 1) / every, abs=2)


def test_off_means_that_all_may_wait() -> None:
    it = warmed(shed=False)
    it.tick(*(submit(100 + i, 16) for i in range(80)))
    assert not it.refused


def test_who_is_next_anyway_is_not_shed() -> None:
    """The wait is predicted by place: a high class and another client stand before a flood."""
    it = warmed()
    it.tick(*(submit(100 + i, 16, client="flood", priority="low") for i in range(80)))
    assert len(it.shed()) > 30
    it.tick(submit(500, 16, priority="high"), submit(501, 16, client="polite", priority="low"))
    it.run(20)
    assert it.waited[500] <= 1 and it.waited[501] <= 8


def test_held_back_requests_are_no_sign_of_a_slow_lane() -> None:
    it = lane(seats=4, cold_groups=1, patience_s=30)
    it.tick(*(submit(i, 16, group="a") for i in range(4)))
    for i in range(20):  # one at a time ends, all the others are held for a pioneer
        it.run(3)
        it.tick(submit(10 + i, 16, group=f"g{i}"))
    it.tick(*(submit(100 + i, 16, group="a") for i in range(20)))
    assert not it.refused
