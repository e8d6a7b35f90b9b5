"""Playbooks of a lane's life: ends, draining, the backend going and coming, bounds, closing."""

from __future__ import annotations

import pytest
from attrs import evolve

from kvstream.core import messages as m
from kvstream.core.scheduler import Scheduler, SchedulerSettings
from kvstream.core.types import AccountingBug, EndReason, Priority, RefuseReason, RequestId
from tests.play import Play, ended, idle, keys_of, limits, produced, submit

CANCELLED, FAILED = EndReason.CANCELLED, EndReason.FAILED


# --- ends -----------------------------------------------------------------------------------------------------------


def test_a_client_that_leaves_the_queue_leaves_no_ghost() -> None:
    """0.1.0 admitted it later, to hold a seat for ever."""
    play = Play(seats=1)
    play.step(submit(1, 16), submit(2, 16), submit(3, 16), submit(4, 16), expect=["admit 1"])
    play.step(ended(3, CANCELLED))
    assert play.waiting == [2, 4]
    assert play.see().waiting_total == 2
    play.step(ended(1), expect=["admit 2"])
    play.step(ended(2), expect=["admit 4"])
    play.step(ended(4), ended(3), produced(3), idle(3), m.Recounted(RequestId(3), (), 5))
    assert play.running == []


def test_a_draining_request_keeps_seat_and_pages_until_the_runtime_is_idle() -> None:
    """Case 5."""
    play = Play(seats=1)
    play.step(submit(1, 64), submit(2, 16), expect=["admit 1"])
    play.step(produced(1), ended(1, CANCELLED, draining=True))
    view = play.see()
    assert (view.seats.used, view.seats.draining, view.pages[0].held) == (1, 1, 5)
    play.step(produced(1, 5))
    play.step(idle(1), expect=["admit 2"])
    assert play.see().seats.draining == 0
    assert play.see().prefix_nodes == 4  # its prompt was computed


def test_a_draining_request_can_be_ended_without_waiting_for_the_runtime() -> None:
    play = Play(seats=1)
    play.step(submit(1, 64), submit(2, 16), expect=["admit 1"])
    play.step(ended(1, CANCELLED, draining=True))
    play.step(ended(1, EndReason.FINISHED), expect=["admit 2"])
    assert play.see().prefix_nodes == 0  # the first reason counts
    play.step(idle(2), idle(99))  # not draining, unknown: ignored
    assert play.running == [2]


def test_one_id_twice_is_a_bug() -> None:
    play = Play(seats=1)
    play.step(submit(1, 16), submit(2, 16), expect=["admit 1"])
    for rid in (1, 2):
        with pytest.raises(AccountingBug):
            play.scheduler.step(0, [submit(rid, 16)])


# --- the backend ----------------------------------------------------------------------------------------------------


def test_nothing_is_admitted_while_the_backend_is_down() -> None:
    play = Play(seats=1)
    play.step(submit(1, 16), submit(2, 16, deadline=50), submit(3, 16), expect=["admit 1"])
    play.step(m.BackendDown(), ended(1, FAILED), submit(4, 16))
    play.at(50).step(expect=["refuse 2 timeout"])
    play.at(60).step(m.BackendUp(play.backend), expect=["admit 3"])
    assert play.waiting == [4]


def test_a_backend_that_stays_away_refuses_waiting_and_newcomers() -> None:
    play = Play(seats=1)
    play.step(submit(1, 16), submit(2, 16), expect=["admit 1"])
    play.step(m.BackendDown(refuse=True), submit(3, 16), expect=["refuse 2 backend_down", "refuse 3 backend_down"])
    play.step(m.BackendUp(play.backend), submit(4, 16), ended(1), expect=["admit 4"])


def test_a_fresh_backend_has_no_prefixes_also_those_still_in_use() -> None:
    play = Play()
    play.step(submit(1, 64, prompt="a"), expect=["admit 1"])
    play.step(ended(1))
    play.step(submit(2, 65, prompt="a"), expect=["admit 2 cached=64"])
    play.step(m.BackendUp(play.backend, fresh=True))
    assert play.see().prefix_nodes == 0
    play.step(produced(2), ended(2), submit(3, 65, prompt="a"), expect=["admit 3 cached=0"])
    play.step(ended(3))
    assert play.cached == 4


def test_a_shrunk_backend_shows_overdrawn_pages_and_heals() -> None:
    play = Play(pages=64, seats=4)
    play.step(submit(1, 320), submit(2, 320), submit(3, 200), submit(4, 500, deadline=9),
              expect=["admit 1", "admit 2", "admit 3"])
    play.step(m.BackendUp(limits(pages=30, seats=1)), expect=["refuse 4 too_long tokens=500 limit=480"])
    assert play.see().overdrawn == 53 - 30
    play.step(submit(5, 16))
    play.step(ended(1), ended(2))
    assert play.see().overdrawn == 0
    play.step(ended(3), expect=["admit 5"])
    play.step(m.BackendUp(play.backend), submit(6, 500), expect=["admit 6"])


def test_other_page_size_forgets_keys_and_prefixes() -> None:
    play = Play(seats=1)
    play.step(submit(1, 64, prompt="a"), expect=["admit 1"])
    play.step(ended(1), submit(2, 64, prompt="b"), submit(3, 65, prompt="a"), expect=["admit 2"])
    play.step(m.BackendUp(limits(seats=1, pages=32, page_tokens=32)))
    play.step(produced(2), ended(2), expect=["admit 3 cached=0 pages=3"])
    play.step(ended(3))
    assert play.see().prefix_nodes == 0


# --- bounds ---------------------------------------------------------------------------------------------------------


def test_waiting_ends_at_the_deadline_or_the_longest_wait() -> None:
    play = Play(seats=1, wait_s_max=100)
    play.step(submit(1, 16), submit(2, 16, deadline=30), submit(3, 16), expect=["admit 1"])
    assert play.scheduler.next_deadline() == 30
    play.at(29.9).step()
    play.at(30).step(expect=["refuse 2 timeout"])
    assert play.scheduler.next_deadline() == 100
    play.at(100).step(ended(1), expect=["refuse 3 timeout"])  # expiry comes before admission
    assert play.scheduler.next_deadline() == 3600 + 100


def test_retry_after_is_measured() -> None:
    play = Play(seats=1, queue_max=2)
    play.step(submit(0, 16), submit(1, 16), submit(2, 16), expect=["admit 0"])
    actions = play.step(submit(3, 16), expect=["refuse 3 queue_full"])
    assert isinstance(actions[0], m.Refuse) and actions[0].retry_after_s is None  # nothing known: nothing claimed
    for rid in (0, 1, 2, 3):
        play.at(10.0 * (rid + 1)).step(ended(rid), submit(rid + 3, 16), expect=[f"admit {rid + 1}"])
    play.step(submit(9, 16), expect=["refuse 9 queue_full retry=30"])  # two ahead, one each 10 s


def test_queue_bounds_do_not_count_those_that_find_a_seat() -> None:
    play = Play(seats=2, queue_max=1, queue_bytes_max=100)
    play.step(submit(1, 16, size=1000), submit(2, 16, size=1000), submit(3, 16, size=100), submit(4, 16),
              expect=["admit 1", "admit 2", "refuse 4 queue_full"])
    play.step(ended(3, CANCELLED), submit(5, 16, size=101), submit(6, 16, size=100), expect=["refuse 5 queue_bytes"])
    assert play.see().waiting_bytes == 100
    assert play.see().counters.refused == {RefuseReason.QUEUE_FULL: 1, RefuseReason.QUEUE_BYTES: 1}


def test_a_flood_is_answered_at_once() -> None:
    """Case 29."""
    play = Play(seats=2, queue_max=10)
    actions = play.step(*(submit(i, 16) for i in range(1000)), expect=None)
    assert sum(isinstance(a, m.Admit) for a in actions) == 2
    assert sum(isinstance(a, m.Refuse) and a.why is RefuseReason.QUEUE_FULL for a in actions) == 988


def test_closing_refuses_newcomers_and_the_queue_and_ends_empty() -> None:
    play = Play(seats=1)
    play.step(submit(1, 16), submit(2, 16), expect=["admit 1"])
    play.step(m.Closing(refuse_waiting=False), submit(3, 16), expect=["refuse 3 closing"])
    play.step(ended(1), expect=["admit 2"])
    play.step(m.Closing(), submit(4, 16), expect=["refuse 4 closing"])
    play.step(ended(2))
    view = play.see()
    assert view.closing and not view.waiting and not view.running
    assert view.pages[0].held == view.pages[0].cached
    play = Play(seats=1)
    play.step(submit(1, 16), submit(2, 16), expect=["admit 1"])
    play.step(m.Closing(), expect=["refuse 2 closing"])


# --- other ----------------------------------------------------------------------------------------------------------


def test_recounting_moves_what_a_waiting_request_needs() -> None:
    play = Play(up=False)
    play.step(submit(1, 900), submit(2, 16))
    play.step(m.BackendUp(play.backend), m.Recounted(RequestId(1), keys_of(1, 2000), 2000),
              m.Recounted(RequestId(2), keys_of(2, 33), 33), expect=["refuse 1 too_long", "admit 2 pages=3"])
    play.step(m.Recounted(RequestId(2), (), 1))  # running: too late, ignored


def test_the_snapshot_is_capped_and_positions_count_from_one() -> None:
    play = Play(seats=1, waiting_shown_max=3)
    play.step(*(submit(i, 16) for i in range(10)), expect=["admit 0"])
    view = play.at(7).see()
    assert view.waiting_total == 9
    assert [(w.rid, w.position, w.age_s) for w in view.waiting] == [(1, 1, 7), (2, 2, 7), (3, 3, 7)]


def test_a_clock_that_runs_backwards_stands_still() -> None:
    play = Play(seats=1, wait_s_max=100)
    play.at(10).step(submit(1, 16), expect=["admit 1"])
    play.at(5).step(submit(2, 16))
    assert play.scheduler.next_deadline() == 110
    play.at(110).step(expect=["refuse 2 timeout"])


def test_degenerate_requests() -> None:
    play = Play()
    play.step(submit(1, 0, 0), submit(2, 1, 0), expect=["admit 1 pages=0", "admit 2 pages=1"])
    play.step(evolve(submit(3, 64), keys=keys_of(3, 640)), expect=["admit 3"])  # more keys than pages
    play.step(ended(1), ended(2), ended(3))
    assert play.cached == 4


def test_settings_are_checked() -> None:
    for bad in ({"seats_max": 0}, {"order": "lifo"}, {"watermark": 1.0}, {"wait_s_max": 0}, {"queue_max": -1}):
        with pytest.raises(ValueError):
            SchedulerSettings(**bad)  # type: ignore[arg-type]


def test_a_new_scheduler_says_nothing() -> None:
    scheduler = Scheduler(SchedulerSettings())
    assert scheduler.step(0.0, []) == []
    assert scheduler.next_deadline() is None
    view = scheduler.snapshot(0.0)
    assert view.limits is None and view.pages == () and view.seats.total == 0
    assert Priority.HIGH.value < Priority.LOW.value


def test_who_comes_back_unseen_is_no_newcomer() -> None:
    """The queue was filled meanwhile, or is closed to new ones: it was let in before that."""
    play = Play(seats=1, pages=64, queue_max=1)
    play.step(submit(1, 16), expect=["admit 1"])
    play.step(submit(2, 16))
    play.step(m.BackendDown(), ended(1, CANCELLED), evolve(submit(1, 16), again=True), expect=[])
    play.step(m.Closing(refuse_waiting=False), ended(1), evolve(submit(1, 16), again=True), expect=[])
    play.step(m.Closing(refuse_waiting=True), ended(1), evolve(submit(1, 16), again=True), expect=None)
    assert not play.scheduler.snapshot(1).waiting_total
