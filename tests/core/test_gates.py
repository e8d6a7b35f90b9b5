"""Playbooks of the gates: long prompts, shared cold prefixes, retries, a client's seats. Who is held, why, until when,
and that nobody else is."""

from __future__ import annotations

import pytest

from kvstream.core import messages as m
from kvstream.core.types import EndReason, PoolMode
from tests.play import PAGE, Play, ended, idle, limits, produced, submit

CANCELLED, FAILED = EndReason.CANCELLED, EndReason.FAILED
VLLM = limits(seats=8, pages=1000, mode=PoolMode.UNKNOWN, shares_prefix=True)
SLOTS = limits(seats=8, pages=8 * 100, mode=PoolMode.SPLIT, request_tokens_max=1600)
GATES = {"seats": 8, "pages": 1000, "long_prefill_tokens": 100, "leader_tokens": 3 * PAGE}


# --- long prompts (case 36) -------------------------------------------------------------------------------------------


def test_case_36_one_long_prompt_is_read_at_a_time_and_short_ones_pass() -> None:
    play = Play(**GATES)
    play.step(submit(1, 500), submit(2, 500), submit(3, 500), submit(4, 50), expect=["admit 1", "admit 4"])
    assert play.why == {2: "long_prefill", 3: "long_prefill"}
    assert dict(play.see().held) == {"long_prefill": 2} and play.see().counters.held == {"long_prefill": 2}
    play.step(submit(5, 50), expect=["admit 5"])
    play.step(produced(4), produced(5))
    play.step(produced(1), expect=["admit 2"])
    play.step(produced(1))
    play.step(ended(2, FAILED), expect=["admit 3"])


def test_case_36_the_long_one_is_next_when_its_gate_opens() -> None:
    play = Play(**{**GATES, "seats": 2})
    play.step(submit(1, 500), submit(2, 500), submit(3, 50), expect=["admit 1", "admit 3"])
    play.at(1).step(submit(4, 50), submit(5, 50), submit(6, 50))
    play.step(ended(3), expect=["admit 4"])  # the long one is held, a short one passes
    play.step(produced(1))
    play.step(ended(4), expect=["admit 2"])  # it came before those
    play.step(ended(1), expect=["admit 5"])


def test_a_draining_prompt_is_still_being_read() -> None:
    play = Play(**GATES)
    play.step(submit(1, 500), submit(2, 500), expect=["admit 1"])
    play.step(ended(1, CANCELLED, draining=True))
    play.step(produced(1))  # what was under way to a client that left proves nothing to it
    assert play.why == {2: "long_prefill"}
    play.step(idle(1), expect=["admit 2"])


def test_what_is_cached_does_not_make_a_prompt_long() -> None:
    play = Play(**GATES)
    play.step(submit(1, 160, prompt="a"), expect=["admit 1"])
    play.step(produced(1), ended(1))
    play.step(submit(2, 500), expect=["admit 2"])
    play.step(submit(3, 240, prompt="a"), submit(4, 280, prompt="a"), expect=["admit 3 cached=160"])
    assert play.why == {4: "long_prefill"}  # the cached pages are in use, and slots cannot share


@pytest.mark.parametrize(("most", "running"), [(0, 4), (2, 2), (3, 3)])
def test_so_many_long_prompts(most: int, running: int) -> None:
    play = Play(**GATES, long_prefills_max=most)
    play.step(*(submit(i, 500) for i in range(4)), expect=[f"admit {i}" for i in range(running)])


def test_a_held_long_one_does_not_keep_a_full_lane_from_anybody() -> None:
    """And one that nobody else's tokens can free is refused in time."""
    play = Play(**GATES)
    play.step(submit(1, 500), submit(2, 500, deadline=10), expect=["admit 1"])
    assert play.scheduler.next_deadline() == 10
    play.at(10).step(expect=["refuse 2 timeout"])
    assert not play.see().held


def test_a_request_counted_again_is_judged_anew() -> None:
    play = Play(**GATES)
    play.step(submit(1, 500), submit(2, 500), expect=["admit 1"])
    play.step(m.Recounted(play.see().waiting[0].rid, (), 90), expect=["admit 2"])


# --- a shared cold prefix ---------------------------------------------------------------------------------------------


def test_followers_wait_for_the_first_token_and_hit_the_cache() -> None:
    play = Play(backend=VLLM, **GATES)
    play.step(submit(1, 100, prompt="aaaab"), submit(2, 100, prompt="aaaac"), submit(3, 100, prompt="aaaad"),
              submit(4, 100, prompt="aab"), submit(5, 100), expect=["admit 1", "admit 4", "admit 5"])
    assert play.why == {2: "leader", 3: "leader"}
    play.step(produced(1), expect=["admit 2 cached=64", "admit 3 cached=64"])
    assert play.see().pages[0].held == 7 + 3 + 3 + 7 + 7  # four pages are there once
    play.step(ended(1), ended(2), ended(3), ended(4), ended(5))


@pytest.mark.parametrize("reason", [FAILED, CANCELLED])
def test_the_next_one_leads_when_the_leader_fails(reason: EndReason) -> None:
    play = Play(backend=VLLM, **GATES)
    play.step(*(submit(i, 100, prompt="a") for i in range(3)), expect=["admit 0"])
    play.step(ended(0, reason), expect=["admit 1"])
    assert play.why == {2: "leader"}
    play.step(produced(1), expect=["admit 2 cached=96"])


def test_a_leader_that_is_given_up_leads_no_more_while_it_drains() -> None:
    play = Play(backend=VLLM, **GATES)
    play.step(*(submit(i, 100, prompt="a") for i in range(3)), expect=["admit 0"])
    play.step(ended(0, CANCELLED, draining=True), expect=["admit 1"])
    assert play.why == {2: "leader"}


def test_a_prefix_that_two_computed_at_once_is_kept_once() -> None:
    """Too short to wait for: both have a copy of their own, and the later one cannot be shared while it runs."""
    play = Play(backend=VLLM, **GATES)
    play.step(submit(1, 40, prompt="aab"), submit(2, 40, prompt="aac"), expect=["admit 1", "admit 2"])
    play.step(produced(1), produced(2))
    assert play.see().prefix_nodes == 2
    play.step(submit(3, 40, prompt="aad"), expect=["admit 3 cached=32"])
    play.step(ended(1), ended(2), ended(3))
    assert play.see().pages[0].held == play.cached == 2


def test_a_first_token_of_before_a_restart_fills_no_cache() -> None:
    play = Play(backend=VLLM, **GATES)
    play.step(submit(1, 100, prompt="a"), expect=["admit 1"])
    play.step(m.BackendUp(VLLM, fresh=True), produced(1))
    assert play.see().prefix_nodes == 0


def test_backfill_respects_the_gates() -> None:
    play = Play(seats=8, pages=60, long_prefill_tokens=100, leader_tokens=0)
    play.step(submit(1, 200, 400), submit(2, 90, 800), submit(3, 150, 16), submit(4, 50, 16),
              expect=["admit 1", "admit 4"])
    assert play.why == {2: "pages", 3: "long_prefill"}


def test_only_what_is_not_cached_is_worth_waiting_for() -> None:
    play = Play(backend=VLLM, **GATES)
    play.step(submit(0, 64, prompt="aaaa"), expect=["admit 0"])
    play.step(produced(0))
    # four cached pages and two more in common are less than three; with three more one leads
    play.step(submit(1, 160, prompt="aaaabbc"), submit(2, 160, prompt="aaaabbd"),
              expect=["admit 1 cached=64", "admit 2 cached=64"])
    play.step(submit(3, 160, prompt="aaaaccc"), submit(4, 160, prompt="aaaaccc"), expect=["admit 3"])
    assert play.why == {4: "leader"}
    play.step(produced(3), expect=["admit 4 cached=144"])


def test_slots_cannot_share_so_nobody_waits_for_a_leader() -> None:
    play = Play(backend=SLOTS, **GATES)
    play.step(submit(1, 100, prompt="a"), submit(2, 100, prompt="a"), expect=["admit 1", "admit 2"])


@pytest.mark.parametrize("off", [{"leader_tokens": 0}, {"prefix_enabled": False}, {"prefix_tokens_max": 2 * PAGE},
                                 {"leader_tokens": 6 * PAGE + 1}])
def test_no_leader_where_it_is_off_or_would_not_be_kept(off: dict[str, int]) -> None:
    play = Play(backend=VLLM, **{**GATES, **off})
    play.step(submit(1, 97, prompt="a"), submit(2, 97, prompt="a"), expect=["admit 1", "admit 2"])


def test_ten_thousand_followers_are_looked_at_once() -> None:
    """While a gate is closed a step costs nothing for those behind it."""
    play = Play(backend=VLLM, **GATES, queue_max=20_000)
    play.scheduler.step(0, [submit(i, 100, prompt="a") for i in range(2000)])
    looks = 0
    asked = play.scheduler._admission.gates.gate

    def counted(*args: object) -> object:
        nonlocal looks
        looks += 1
        return asked(*args)  # type: ignore[arg-type]

    play.scheduler._admission.gates = _Looks(play.scheduler._admission.gates, counted)  # type: ignore[assignment]
    for i in range(10):
        play.scheduler.step(1, [submit(5000 + i, 100, prompt="a")])
    assert looks == 10
    play.scheduler.step(2, [produced(0)])
    assert looks == 10 + 7  # seven seats were free


class _Looks:
    """The gates, with a counted question."""

    def __init__(self, gates: object, gate: object) -> None:
        self._gates, self.gate = gates, gate

    def __getattr__(self, name: str) -> object:
        return getattr(self._gates, name)


# --- retries ----------------------------------------------------------------------------------------------------------


def test_a_retry_goes_back_to_the_slot_that_holds_its_prefix() -> None:
    play = Play(backend=SLOTS, **GATES)
    play.step(submit(1, 90, prompt="a"), expect=["admit 1"])
    play.at(5).step(produced(1), ended(1, CANCELLED, draining=True), submit(2, 90, prompt="a"), submit(3, 90),
                    expect=["admit 3"])
    assert play.running == [1, 3] and play.why == {2: "retry"}
    play.at(6).step(idle(1), expect=["admit 2 cached=80"])


def test_a_prefix_that_was_not_computed_is_waited_for_but_not_counted() -> None:
    play = Play(backend=SLOTS, **GATES)
    play.step(submit(1, 90, prompt="a"), expect=["admit 1"])
    play.at(5).step(ended(1, CANCELLED, draining=True), submit(2, 90, prompt="a"))
    assert play.why == {2: "retry"}
    play.at(6).step(idle(1), expect=["admit 2 cached=0"])


def test_what_had_hardly_begun_is_not_waited_for() -> None:
    play = Play(backend=SLOTS, **GATES)
    play.step(submit(1, 90, prompt="a"), expect=["admit 1"])
    play.at(0.5).step(ended(1, CANCELLED, draining=True), submit(2, 90, prompt="a"), expect=["admit 2"])


def test_one_waits_for_each_draining_slot_the_others_do_not() -> None:
    play = Play(backend=SLOTS, **GATES)
    play.step(submit(1, 90, prompt="a"), submit(2, 90, prompt="a"), expect=["admit 1", "admit 2"])
    play.at(5).step(produced(1), produced(2), ended(1, CANCELLED, draining=True))
    play.step(submit(3, 90, prompt="a"), submit(4, 90, prompt="a"), submit(5, 90, prompt="a"),
              expect=["admit 4", "admit 5"])
    assert play.why == {3: "retry"}
    play.step(ended(3, CANCELLED), submit(6, 90, prompt="a"))  # it gave up: the next may wait for that slot
    assert play.why == {6: "retry"}
    play.step(idle(1), expect=["admit 6 cached=80"])


def test_a_runtime_that_forgot_is_not_waited_for() -> None:
    play = Play(backend=SLOTS, **GATES)
    play.step(submit(1, 90, prompt="a"), expect=["admit 1"])
    play.at(5).step(produced(1), ended(1, CANCELLED, draining=True))
    play.step(m.BackendUp(SLOTS, fresh=True), submit(2, 90, prompt="a"), expect=["admit 2"])


# --- a client's seats -------------------------------------------------------------------------------------------------


def test_a_client_has_so_many_seats_and_others_pass() -> None:
    play = Play(seats=8, client_seats_max=2)
    play.step(*(submit(i, 16, client="a") for i in range(4)), submit(9, 16, client="b"),
              expect=["admit 0", "admit 1", "admit 9"])
    assert play.why == {2: "client", 3: "client"}
    play.step(ended(0, CANCELLED, draining=True))  # its seat is not free yet
    play.step(idle(0), expect=["admit 2"])
    play.step(ended(9))
    play.step(ended(1), expect=["admit 3"])


def test_a_request_of_more_seats_than_its_client_may_have_runs_alone() -> None:
    play = Play(seats=8, client_seats_max=2)
    play.step(submit(1, 16, client="a"), submit(2, 16, client="a", seats=4), expect=["admit 1"])
    play.step(ended(1), expect=["admit 2"])
    play.step(submit(3, 16, client="a"))
    play.step(ended(2), expect=["admit 3"])


# --- why --------------------------------------------------------------------------------------------------------------


def test_everybody_is_told_why_it_waits() -> None:
    play = Play(up=False)
    play.step(submit(1, 16), submit(2, 16))
    assert set(play.why.values()) == {"backend"}
    play = Play(seats=1)
    play.step(submit(1, 16), submit(2, 16), expect=["admit 1"])
    assert play.why == {2: "seat"}
    play.step(m.BackendDown())
    assert play.why == {2: "backend"}
    play = Play(pages=8)
    play.step(submit(1, 64, 16), submit(2, 64, 16), submit(3, 64, 16), expect=["admit 1"])
    assert play.why == {2: "pages", 3: "pages"}


def test_without_a_backend_nobody_waits_for_a_gate() -> None:
    play = Play(long_prefill_tokens=100)
    play.step(submit(1, 300), submit(2, 300), expect=["admit 1"])
    assert play.see().held == {"long_prefill": 1}
    play.step(m.BackendDown())
    assert play.why == {2: "backend"} and play.see().held == {}
