"""What must be true of slots, files and those who wait for them after every step."""

from __future__ import annotations

from collections.abc import Mapping

from .inject import STARTING, Inject
from .ledger import Ledger
from .queue import WaitingQueue
from .state import Running
from .types import RequestId


def check_inject(
    inject: Inject, queue: WaitingQueue, running: Mapping[RequestId, Running], ledger: Ledger | None
) -> None:
    """Raise AssertionError unless the slots are right, and whoever waits for one has somebody to wait for."""
    slots = inject.slots
    assert slots is None or inject.rules is not None
    assert inject.leaders.keys() <= running.keys() and inject.planned.keys() <= running.keys()
    if inject.store is not None:
        inject.store.check()
    if slots is not None:
        slots.check(running.keys())
        if ledger is not None:
            ledger.check_held(inject.held())
        for run in running.values():
            slot, plan = slots.slot_of(run.rid), run.plan
            assert slot is None or (plan is not None and plan.slot == slot.index), "a request in another slot"
    for section in queue.held():
        why, what = section.gate
        if why == "slot":
            assert slots is not None, "somebody waits for a slot where there are none"
            files = [name for name, _ in inject.unsaved()]
            busy = slots.is_starting or slots.is_saving if what == STARTING[1] else what in running
            assert busy or what in files, "somebody waits for a slot that nobody has"
