"""What a runtime is believed to cost."""

from __future__ import annotations

import pytest

from kvstream.core.costs import Costs, Rate
from kvstream.core.placement import loss
from kvstream.core.slots import Slot
from kvstream.core.tokens import page_keys


def test_a_rate_is_a_guess_until_something_was_seen() -> None:
    rate = Rate(1000.0, 64)
    assert rate.per_s == 1000.0 and not rate.is_known
    rate.note(500, 5.0)
    assert rate.per_s == 100.0 and rate.is_known


def test_what_is_all_overhead_says_nothing_about_a_rate() -> None:
    rate = Rate(1000.0, 64)
    rate.note(1000, 5.0)
    for _ in range(100):
        rate.note(1, 0.016)
    assert rate.per_s == 200.0


def test_a_rate_follows_and_a_long_event_weighs_more() -> None:
    rate = Rate(1.0, 1)
    rate.note(1000, 10.0)
    rate.note(100, 10.0)
    assert rate.per_s == pytest.approx(900 / 18)
    for _ in range(30):
        rate.note(100, 10.0)
    assert rate.per_s == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize("seconds", [None, 0.0, -1.0, 1e9])
def test_nonsense_is_not_believed(seconds: float | None) -> None:
    rate = Rate(7.0, 1)
    rate.note(100, seconds)
    rate.note(-5, 1.0)
    rate.note(1e18, 1.0)
    assert rate.per_s == 7.0


def test_a_saved_slot_costs_its_bytes_and_the_call() -> None:
    costs = Costs()
    costs.token_bytes, costs.fixed_bytes = 20_000.0, 800
    assert costs.save_s(1000) < costs.save_s(2000)
    costs.save.note(20_000_000, 0.02)
    assert costs.save_s(1000) == pytest.approx(0.02 + 0.002, rel=0.01)
    assert costs.save_s(0) > 0 and costs.restore_s(0) > 0


def test_what_came_since_the_last_file_is_saved_although_it_is_little() -> None:
    """Eighty tokens of 640 are in no file. Whoever overwrites all of it saves them first, or they and the next eighty
    are computed again at every turn (seen: 1.29 times the ideal); whoever goes on in the slot does not."""
    costs = Costs()
    costs.prefill.note(10_000, 40.0)
    costs.token_bytes = 23_056
    keys = page_keys(range(640), 16, b"")
    slot = Slot(0, exact=True, keys=keys, tokens=640)
    assert loss(slot, 0, 16, costs, covered=35, save_min=256)[1]
    assert not loss(slot, 38, 16, costs, covered=35, save_min=256)[1]
    assert not loss(slot, 0, 16, costs, covered=40, save_min=256)[1], "a file has it all"
