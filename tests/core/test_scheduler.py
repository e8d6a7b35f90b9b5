"""Playbooks: one per decision of kvstream/core/DESIGN.md, and one per trap of the first KVStream."""

from __future__ import annotations

import pytest
from attrs import evolve

from kvstream.core import messages as m
from kvstream.core.scheduler import Scheduler, SchedulerSettings
from kvstream.core.types import AccountingBug, EndReason, PoolMode, Priority, RefuseReason, RequestId
from tests.play import PAGE, Play, ended, idle, keys_of, limits, produced, submit

CANCELLED, FAILED = EndReason.CANCELLED, EndReason.FAILED


# --- capacity -------------------------------------------------------------------------------------------------------


def test_seats_are_the_smaller_of_setting_and_backend() -> None:
    for setting, backend in ((2, 5), (5, 2)):
        play = Play(backend=limits(seats=backend, pages=100), seats_max=setting)
        play.step(submit(1, 16), submit(2, 16), submit(3, 16), expect=["admit 1", "admit 2"])
        assert play.see().seats.total == 2


def test_before_the_first_backend_everything_waits_and_nothing_is_too_long() -> None:
    play = Play(up=False)
    play.step(submit(1, 16), submit(2, 10_000))
    assert play.waiting == [1, 2]
    play.at(1).step(m.BackendUp(play.backend), expect=["refuse 2 too_long tokens=10000 limit=1024", "admit 1"])


def test_too_long_is_said_at_once_with_both_numbers() -> None:
    play = Play(backend=limits(pages=64, request_tokens_max=512))
    play.step(submit(1, 512), expect=["refuse 1 too_long tokens=512 limit=512"])
    play.step(submit(2, 511), expect=["admit 2"])
    play = Play(pages=4)
    play.step(submit(1, 64), expect=["refuse 1 too_long tokens=64 limit=64"])
    play.step(submit(2, 63), expect=["admit 2"])


def test_unified_pool_counts_prompt_answer_and_one_page_of_headroom() -> None:
    """Case 38: two jobs of 1,100 tokens do not fit 2,048 together, although a slot is idle."""
    play = Play(backend=limits(seats=4, pages=128))
    play.step(submit(1, 1100, 50), submit(2, 1100, 50), expect=["admit 1 pages=69 reserved=4"])
    play.at(1).step(ended(1), expect=["admit 2"])


def test_unified_headroom_is_per_request() -> None:
    play = Play(pages=8)  # each: 3 pages of prompt and answer, one of headroom
    play.step(submit(1, 32, 16), submit(2, 32, 16), submit(3, 16, 1), expect=["admit 1 reserved=2", "admit 2"])
    play = Play(pages=7)
    play.step(submit(1, 32, 16), submit(2, 32, 16), expect=["admit 1"])


def test_split_is_bound_by_seats_even_with_a_watermark_and_odd_contexts() -> None:
    """The last of four slots is usable although its pages are all that is left, and more than rounding left."""
    play = Play(
        backend=limits(seats=4, pages=4 * 6, mode=PoolMode.SPLIT, request_tokens_max=100), watermark=0.1
    )  # 100 tokens are 7 pages, 6 full ones
    play.step(*(submit(i, 90, None) for i in range(5)), expect=[f"admit {i}" for i in range(4)])
    for _ in range(60):
        play.step(*(produced(i) for i in range(4)))  # more than the context has: the slot ends it, nothing is cut
    assert play.see().overdrawn == 0
    assert all(run.tokens == 100 for run in play.see().running)


def test_a_huge_answer_limit_is_clamped_to_what_can_exist() -> None:
    play = Play(pages=8)
    play.step(submit(1, 100, 32_000), expect=["admit 1 pages=7 reserved=1"])
    play.step(submit(2, 16, 1))  # waits: the rest of the pool is promised
    play.step(ended(1), expect=["admit 2"])


def test_a_huge_request_is_admitted_on_an_idle_lane_despite_the_watermark() -> None:
    play = Play(pages=100, watermark=0.2)
    play.step(submit(1, 16, 16), submit(2, 1500, 32_000), expect=["admit 1"])
    play.step(ended(1), expect=["admit 2"])


def test_watermark_is_left_free() -> None:
    play = Play(pages=20, watermark=0.25)  # 15 usable; each needs 5
    play.step(*(submit(i, 48, 16) for i in range(4)), expect=["admit 0", "admit 1", "admit 2"])


# --- growth ---------------------------------------------------------------------------------------------------------


def test_growth_redeems_the_promise_first() -> None:
    play = Play(pages=8)
    play.step(submit(1, 16, 32), expect=["admit 1 pages=1 reserved=3"])
    for _ in range(32):
        play.step(produced(1))
    assert play.see().running[0].pages == 3
    assert play.see().pages[0].promised == 1


def test_unified_growth_without_limit_takes_free_then_cached_pages_then_is_truncated_once() -> None:
    play = Play(pages=10, answer_tokens_default=16)
    play.step(submit(1, 48, 16), expect=["admit 1"])
    play.step(produced(1), ended(1))
    assert play.cached == 3
    play.step(submit(2, 16, None), expect=["admit 2 pages=1 reserved=2"])
    grown = 0
    while not play.step(produced(2), expect=None):
        grown += 1
        assert grown < 1000
    view = play.see()
    assert view.counters.truncated == 1
    assert view.running[0].tokens >= 10 * PAGE - PAGE // 2, "cut although pages were left"
    assert view.overdrawn == 0, "cut too late: the pool would have overflowed"
    assert view.prefix_nodes == 0
    for _ in range(4):
        play.step(produced(2))  # tokens that were under way: no second Truncate
    assert play.see().overdrawn == 0
    play.step(ended(2, EndReason.TRUNCATED))


def test_growth_never_takes_what_was_promised_to_another() -> None:
    play = Play(pages=8)
    play.step(submit(1, 16, None), submit(2, 16, 32), expect=["admit 1 reserved=2", "admit 2 reserved=3"])
    truncated = False
    for _ in range(60):
        truncated = truncated or bool(play.step(produced(1), expect=None))
        if truncated:
            break
    assert truncated
    for _ in range(32):
        play.step(produced(2))
    assert play.see().overdrawn == 0


def test_a_request_with_a_limit_that_was_promised_is_never_truncated() -> None:
    play = Play(pages=4)
    play.step(submit(1, 44, 20), expect=["admit 1"])
    for _ in range(20):
        play.step(produced(1))
    assert play.see().overdrawn == 0


def test_unknown_growth_runs_on_overdrawn_and_stops_admission() -> None:
    play = Play(backend=limits(pages=4, seats=4, mode=PoolMode.UNKNOWN))
    play.step(submit(1, 32, None), expect=["admit 1 pages=2 reserved=1"])
    for _ in range(60):
        play.step(produced(1))
    assert play.see().overdrawn == 2
    play.step(submit(2, 16, 1))
    play.step(ended(1, CANCELLED), expect=["admit 2"])
    assert play.see().overdrawn == 0


# --- prefixes -------------------------------------------------------------------------------------------------------


def test_a_finished_prompt_is_reused_but_never_its_last_page() -> None:
    play = Play()
    play.step(submit(1, 64, prompt="a"), expect=["admit 1 cached=0"])
    play.step(ended(1))
    assert play.cached == 4
    play.step(submit(2, 64, prompt="a"), expect=["admit 2 cached=48 pages=4"])
    play.step(ended(2))
    play.step(submit(3, 65, prompt="a"), expect=["admit 3 cached=64"])
    assert play.see().counters.prefix_tokens_accounted == 112


def test_a_hit_is_charged_for_everything_it_does_not_share() -> None:
    """0.1.0 charged a 3,032-token prompt with a 32-token hit nothing at all."""
    play = Play(pages=200)
    play.step(submit(1, 32, prompt="a"), expect=["admit 1"])
    play.step(ended(1))
    play.step(submit(2, 3032, prompt="aab"), expect=["admit 2 cached=32 pages=190"])
    assert play.see().pages[0].held == 190


def test_llama_slots_let_only_one_running_request_take_a_cached_prefix_over() -> None:
    play = Play()
    play.step(submit(1, 64, prompt="a"), expect=["admit 1"])
    play.step(ended(1))
    play.step(submit(2, 65, prompt="a"), submit(3, 65, prompt="a"), expect=["admit 2 cached=64", "admit 3 cached=0"])
    assert play.see().pages[0].held == 10
    play.step(ended(2), ended(3))
    assert play.cached == 4  # the second copy is not kept


def test_vllm_shares_a_cached_prefix_freely_and_counts_it_once() -> None:
    play = Play(backend=limits(pages=16, mode=PoolMode.UNKNOWN, shares_prefix=True))
    play.step(submit(1, 160, 16, prompt="a"), expect=["admit 1"])
    play.step(ended(1))
    play.step(*(submit(i, 161, 16, prompt="a") for i in (2, 3, 4)), expect=[f"admit {i} cached=160" for i in (2, 3, 4)])
    assert play.see().pages[0].held == 13


@pytest.mark.parametrize(("reason", "tokens", "kept"), [
    (EndReason.FINISHED, 0, 4), (CANCELLED, 0, 0), (CANCELLED, 1, 4), (FAILED, 0, 0), (FAILED, 1, 4),
    (EndReason.STALLED, 0, 0), (EndReason.TRUNCATED, 1, 4),
])
def test_only_pages_that_were_certainly_computed_are_remembered(reason: EndReason, tokens: int, kept: int) -> None:
    play = Play()
    play.step(submit(1, 64), expect=["admit 1"])
    play.step(*(produced(1) for _ in range(tokens)))
    play.step(ended(1, reason))
    assert play.cached == play.see().pages[0].held == kept


def test_prefix_bounds_and_switch() -> None:
    play = Play(prefix_tokens_max=32)
    play.step(submit(1, 64), expect=["admit 1"])
    play.step(ended(1))
    assert play.cached == 2
    play = Play(prefix_enabled=False)
    play.step(submit(1, 64, prompt="a"), expect=["admit 1"])
    play.step(ended(1))
    play.step(submit(2, 64, prompt="a"), expect=["admit 2 cached=0"])


def test_two_distinct_prompts_do_not_pin_the_pool() -> None:
    """The worst bug of 0.1.0: cached pages were only given back after an hour."""
    play = Play(pages=16)
    for rid in range(20):
        play.at(rid).step(submit(rid, 7 * PAGE, 16), expect=[f"admit {rid}"])
        play.step(ended(rid))
    assert play.see().counters.pages_evicted > 0


def test_eviction_takes_the_least_recently_used_tail_first() -> None:
    play = Play(pages=12)
    for now, rid, prompt in ((0, 1, "a"), (1, 2, "b")):
        play.at(now).step(submit(rid, 64, 1, prompt=prompt), expect=[f"admit {rid}"])
        play.step(ended(rid))
    play.at(2).step(submit(3, 65, 1, prompt="a"), expect=["admit 3 cached=64"])
    play.step(ended(3))
    play.at(3).step(submit(4, 80, 1, prompt="c"), expect=["admit 4"])  # 5 pages: all but one of "b" stays
    play.step(ended(4, CANCELLED))
    play.step(submit(5, 65, 1, prompt="b"), expect=["admit 5 cached=48"])
    play.step(ended(5, CANCELLED))
    play.step(submit(6, 65, 1, prompt="a"), expect=["admit 6 cached=64"])


def test_a_prefix_lives_from_its_last_use() -> None:
    play = Play(prefix_ttl_s=100)
    play.step(submit(1, 64, prompt="a"), expect=["admit 1"])
    play.step(ended(1))
    assert play.scheduler.next_deadline() == 100
    play.at(90).step(submit(2, 65, prompt="a"), expect=["admit 2 cached=64"])
    play.at(150).step(ended(2))
    play.at(249).step(submit(3, 65, prompt="a"), expect=["admit 3 cached=64"])
    play.step(ended(3))
    play.at(349).step()
    assert play.free == 64
    assert play.scheduler.next_deadline() is None


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
    play = Play(seats=1)
    play.at(10).step(submit(1, 16), submit(2, 16, deadline=12), expect=["admit 1"])
    play.at(5).step()
    play.at(12).step(expect=["refuse 2 timeout"])


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
