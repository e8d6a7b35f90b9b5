"""The checks of the slot map are worth something only if they fail: each way of being wrong is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstream.core.slots import SlotMap
from kvstream.core.types import RequestId, SlotRules

ONE, TWO, THREE = RequestId(1), RequestId(2), RequestId(3)
RUNNING = {ONE, TWO, THREE}

WRONG: dict[str, Callable[[SlotMap], object]] = {
    "a slot with two owners": lambda slots: setattr(slots.slots[1], "owner", ONE),
    "an owner that is not in the books": lambda slots: setattr(slots.slots[1], "owner", TWO),
    "a slot that is not its owner's": lambda slots: setattr(slots.slots[0], "owner", None),
    "an owner that does not run": lambda slots: slots.take(RequestId(9), slots.slots[1], 0.0),
    "on its way to no slot": lambda slots: slots._starting.add(TWO),
    "started, and no float": lambda slots: slots._started.add(TWO),
    "a float that does not run": lambda slots: slots._floats.update({RequestId(9): 1}),
    "a float with a slot of its own": lambda slots: slots._placed.update({ONE: 1}),
    "a float while somebody is on his way": lambda slots: slots._floats.update({TWO: 1}),
    "saved while somebody runs in it": lambda slots: setattr(slots.slots[0], "saving", "a.kv"),
    "at work and idle": lambda slots: setattr(slots.slots[0], "idle", True),
    "less than nothing": lambda slots: setattr(slots.slots[1], "tokens", -1),
    "pages without tokens": lambda slots: setattr(slots.slots[1], "keys", ("a page",)),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_map_that_is_wrong_is_seen(how: str) -> None:
    slots = SlotMap(SlotRules(3))
    slots.take(ONE, slots.slots[0], 0.0)
    slots.check(RUNNING)
    WRONG[how](slots)
    with pytest.raises(AssertionError):
        slots.check(RUNNING)
