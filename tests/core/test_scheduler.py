"""Playbooks of pages: capacity, growth and prefixes, one per decision of kvstream/core/DESIGN.md and one per trap of
the first KVStream."""

from __future__ import annotations

from functools import partial

import pytest
from attrs import evolve

from kvstream.core import messages as m
from kvstream.core.types import CountSource, EndReason, PoolMode
from tests.play import PAGE, Play, ended, idle, limits, produced, submit

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


def test_a_request_that_took_long_to_count_keeps_its_place() -> None:
    play = Play(seats=1)
    play.step(submit(1, 16), expect=["admit 1"])
    play.at(1).step(submit(3, 16))
    play.at(1.5).step(evolve(submit(2, 16), arrived=0.5))
    assert play.waiting == [2, 3]
    assert play.see().waiting[0].age_s == 1.0


def test_an_estimate_alone_does_not_call_a_prompt_too_long() -> None:
    """Only the runtime knows; it gets all the room there is, unless the estimate is beyond all error."""
    play = Play(backend=limits(pages=64, request_tokens_max=512))
    guess = partial(evolve, count_source=CountSource.ESTIMATED)
    exact = partial(evolve, count_source=CountSource.EXACT)
    play.step(exact(submit(1, 600)), expect=["refuse 1 too_long tokens=600 limit=512"])
    play.step(guess(submit(2, 600)), expect=["admit 2"])
    play.step(guess(submit(3, 1025)), expect=["refuse 3 too_long tokens=1025 limit=512"])
    play.step(ended(2))
    play = Play(up=False)
    play.step(guess(submit(1, 1500)))
    play.at(1).step(m.BackendUp(play.backend), expect=["admit 1"])


# --- requests that take several seats ---------------------------------------------------------------------------------


def test_a_request_of_several_choices_takes_several_seats() -> None:
    """Four chats with n = 2 are eight slots' work: two run, or the runtime's own queue fills."""
    play = Play(seats=4)
    two = partial(evolve, seats=2)
    play.step(two(submit(1, 16)), two(submit(2, 16)), two(submit(3, 16)), expect=["admit 1", "admit 2"])
    assert (play.see().seats.used, play.waiting) == (4, [3])
    play.step(ended(1, CANCELLED, draining=True))
    assert play.see().seats.draining == 2
    play.step(idle(1), expect=["admit 3"])
    play.step(ended(2), ended(3))
    assert play.see().seats.used == 0


def test_a_head_that_needs_several_seats_waits_for_them_and_is_not_passed() -> None:
    play = Play(seats=2)
    play.step(submit(1, 16), submit(2, 16), expect=["admit 1", "admit 2"])
    play.step(evolve(submit(3, 16), seats=2), submit(4, 16))
    play.step(ended(1))
    play.step(ended(2), expect=["admit 3"])
    play.step(ended(3), expect=["admit 4"])


def test_more_seats_than_there_are_is_all_of_them() -> None:
    play = Play(seats=2)
    play.step(evolve(submit(1, 16), seats=9), submit(2, 16), expect=["admit 1"])
    play.step(ended(1), expect=["admit 2"])
