"""What the shell asks and tells a scheduler between steps: known prefixes, new bounds of the queue."""

from __future__ import annotations

from attrs import evolve

from tests.play import Play, ended, keys_of, submit


def test_how_much_of_a_prompt_is_known() -> None:
    play = Play(prefix_ttl_s=100.0)
    before = play.see()
    assert play.scheduler.prefix_tokens(keys_of("a", 64), 0) == 0
    play.step(submit(1, 64, prompt="aab"), expect=["admit 1"])
    assert play.scheduler.prefix_tokens(keys_of("aab", 64), 0) == 0, "a prompt is known once it was computed"
    play.step(ended(1))
    for prompt, tokens in (("aab", 64), ("aac", 32), ("b", 0), ("aabb", 64)):
        assert play.scheduler.prefix_tokens(keys_of(prompt, 64), 0) == tokens, prompt
    assert play.scheduler.prefix_tokens(keys_of("aab", 64), 200.0) == 0, "it has expired by then"
    after = play.see()
    assert (before.counters.admitted, after.counters.admitted, play.cached) == (0, 1, 4), "a question changes nothing"


def test_before_the_first_backend_nothing_is_known() -> None:
    assert Play(up=False).scheduler.prefix_tokens(keys_of("a", 64), 0) == 0


def test_new_bounds_of_the_queue_are_for_those_that_come() -> None:
    play = Play(seats=1, queue_max=9)
    play.step(submit(1, 16), submit(2, 16), submit(3, 16), expect=["admit 1"])
    play.scheduler.reconfigure(evolve(play.scheduler.settings, queue_max=2, wait_s_max=5.0, seats_max=3))
    play.step(submit(4, 16), expect=["refuse 4 queue_full"])
    assert play.scheduler.settings.seats_max != 3, "what is built in stays"
    play.scheduler.reconfigure(evolve(play.scheduler.settings, queue_max=3))
    play.at(1).step(submit(5, 16))
    play.at(7).step(expect=["refuse 5 timeout"])
    assert play.waiting == [2, 3]
