"""When a draining seat is free: the counting of ``SlotWatch``, case by case, with nothing else around it."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise

import trio
from attrs import define, evolve, field

from kvstream.adapters import LlamaCppBackend
from kvstream.adapters.base import HttpCall, HttpReply
from kvstream.core.messages import Event, SlotsLook
from kvstream.core.types import RequestId
from kvstream.errors import BackendTimeoutError
from kvstream.gateway.slotwatch import PREFILL_POLL_S_MIN, UNHEARD_S, AtWork, DrainingSeat, SlotWatch

A, B, C, D = (RequestId(n) for n in range(1, 5))


@define
class Scene:
    """A runtime in which ``working`` slots are busy, and an engine with these streams. Both may change on a look."""

    working: int | None
    started: set[RequestId]
    draining: dict[RequestId, bool]  # rid -> headers had come (and the first token, unless ``prefill``)
    freed: list[tuple[RequestId, bool]] = field(factory=list)
    on_look: Callable[[], None] = lambda: None
    prefill: bool = False
    looks: list[float] = field(factory=list)
    pinned: dict[RequestId, int] = field(factory=dict)
    wants_look: bool = False
    moves: int = 0
    made: int = 0  # tokens, of each that works
    moving: bool = False  # something goes to a slot while we look
    told: list[SlotsLook] = field(factory=list)

    def post(self, event: Event) -> None:
        assert isinstance(event, SlotsLook)
        self.told.append(event)

    def slots_seen(self, working: int) -> None: ...

    def slot_view(self) -> AtWork:
        seats = tuple(DrainingSeat(rid, answered, not self.prefill, 0.0, self.pinned.get(rid))
                      for rid, answered in self.draining.items())
        owned = [self.pinned[rid] for rid in (*self.started, *self.draining) if rid in self.pinned]
        return AtWork({rid: self.pinned.get(rid) for rid in self.started}, seats, frozenset(owned))

    def seat_idle(self, rid: RequestId, *, capped: bool) -> None:
        del self.draining[rid]
        self.freed.append((rid, capped))

    async def request(self, call: HttpCall, *, timeout_s: float) -> HttpReply:
        assert call.path == "/slots"
        self.looks.append(trio.current_time())
        self.moves += self.moving
        await trio.lowlevel.checkpoint()
        if self.working is None:
            raise BackendTimeoutError("no answer")
        slots = [{"id": n, "id_task": n, "is_processing": n < self.working,
                  "next_token": [{"n_decoded": self.made}]} for n in range(8)]
        trio.lowlevel.current_trio_token().run_sync_soon(self.on_look)
        return HttpReply(200, {}, json.dumps(slots).encode())

    def watcher(self) -> SlotWatch:
        return SlotWatch(LlamaCppBackend(base_url="http://fake"), self, self,  # type: ignore[arg-type]
                         idle_poll_s=0.05, idle_s_max=30)

    async def look(self, times: int = 1) -> list[RequestId]:
        watcher = self.watcher()
        seen: frozenset[RequestId] = frozenset()
        for _ in range(times):
            seen = await watcher._sample(seen)
        return [rid for rid, _ in self.freed]


async def test_a_slot_that_works_is_not_freed(autojump_clock: trio.abc.Clock) -> None:
    assert await Scene(1, set(), {D: True}).look() == []
    assert await Scene(3, {A, B}, {D: True}).look() == []


async def test_an_idle_slot_is_freed_at_the_first_look(autojump_clock: trio.abc.Clock) -> None:
    assert await Scene(0, set(), {D: True}).look() == [D]
    assert await Scene(2, {A, B}, {D: True}).look() == [D]


async def test_of_two_draining_one_is_idle(autojump_clock: trio.abc.Clock) -> None:
    scene = Scene(1, set(), {C: True, D: True})
    assert await scene.look() == [C]
    assert await scene.look(3) == [C], "the other still works"
    scene.working = 0
    assert await scene.look() == [C, D]


async def test_a_request_on_its_way_to_a_slot_never_hides_a_draining_one(autojump_clock: trio.abc.Clock) -> None:
    """A (not started: no headers yet) may be what keeps a slot busy; then D is freed once A's headers are here."""
    scene = Scene(1, set(), {D: True})
    assert await scene.look() == []
    scene.started = {A}
    assert await scene.look() == [D]


async def test_a_stream_that_ended_while_we_looked_proves_nothing(autojump_clock: trio.abc.Clock) -> None:
    """The runtime had finished A before it answered; its last bytes reach us a moment later. The busy slot is D's."""
    scene = Scene(1, {A}, {D: True})
    scene.on_look = scene.started.clear
    assert await scene.look() == []


async def test_a_stream_that_started_while_we_looked_proves_nothing(autojump_clock: trio.abc.Clock) -> None:
    scene = Scene(1, set(), {D: True})
    scene.on_look = lambda: scene.started.add(A)
    assert await scene.look() == []


async def test_without_headers_it_must_look_idle_twice(autojump_clock: trio.abc.Clock) -> None:
    """Its call may still be on its way: idle now does not mean idle in a moment."""
    scene = Scene(0, set(), {D: False})
    assert await scene.look(1) == []
    assert await evolve(scene, freed=[]).look(2) == [D]


async def test_a_runtime_that_does_not_answer_frees_nothing_before_the_cap(autojump_clock: trio.abc.Clock) -> None:
    scene = Scene(None, set(), {D: True})
    assert await scene.look() == []
    await trio.sleep(31)
    await scene.look()
    assert scene.freed == [(D, True)]


async def test_a_cancelled_prefill_is_left_in_peace(autojump_clock: trio.abc.Clock) -> None:
    """Looking more than once a second would keep llama.cpp from noticing that the client left."""
    for prefill, pause in ((True, PREFILL_POLL_S_MIN), (False, 0.05)):
        start = trio.current_time()
        scene = Scene(1, set(), {D: True}, prefill=prefill)
        with trio.move_on_after(10):
            await scene.watcher().run()
        assert scene.looks[0] - start < 0.1, "one early look is free"
        gaps = [after - before for before, after in pairwise(scene.looks)]
        assert len(gaps) > 5 and all(pause <= gap <= pause + 0.1 for gap in gaps)


# --- slots that are known ---------------------------------------------------------------------------------------------


async def test_a_pinned_request_is_watched_by_its_own_row(autojump_clock: trio.abc.Clock) -> None:
    """Slots 0 and 1 work. Whoever was pinned to 2 is done, whoever was pinned to 1 is not, whatever the count says."""
    scene = Scene(2, set(), {C: True, D: True}, pinned={C: 1, D: 2})
    assert await scene.look() == [D]
    assert await scene.look(3) == [D], "slot 1 still works"
    scene.working = 1
    assert await scene.look() == [D, C]


async def test_slots_that_belong_to_somebody_are_not_counted_for_others(autojump_clock: trio.abc.Clock) -> None:
    """Slot 0 is A's, who was pinned to it: the draining D, whose slot nobody knows, is idle."""
    assert await Scene(1, {A}, {D: True}, pinned={A: 0}).look() == [D]
    assert await Scene(2, {A}, {D: True}, pinned={A: 0}).look() == [], "slot 1 may be D's"


async def test_a_pinned_request_without_headers_must_look_idle_for_two_seconds(autojump_clock: trio.abc.Clock) -> None:
    """It may lie in the runtime's socket: nobody is to be pinned to its slot before it has surely come or gone."""
    scene = Scene(0, set(), {D: False}, pinned={D: 3})
    assert await scene.look(100) == [] and trio.current_time() < UNHEARD_S
    await trio.sleep(UNHEARD_S)
    assert await scene.look(1) == [], "one look proves nothing however late"
    assert await scene.look(2) == [D]


async def test_a_pinned_request_without_headers_waits_for_the_batch_that_is_computed(
        autojump_clock: trio.abc.Clock) -> None:
    """The runtime takes nothing up meanwhile, longer than two seconds on a slow CPU; /slots answers all the same."""
    scene = Scene(1, {A}, {D: False}, pinned={A: 0, D: 3})
    with trio.move_on_after(20):
        await scene.watcher().run()
    assert scene.freed == [] and len(scene.looks) > 10
    scene.made = 1
    watcher, seen = scene.watcher(), frozenset[RequestId]()
    for scene.made in (1, 1, 2):
        assert scene.freed == []
        seen = await watcher._sample(seen)
    assert scene.freed == [(D, False)]


async def test_who_left_after_the_look_was_taken_is_not_judged_by_it(autojump_clock: trio.abc.Clock) -> None:
    """D's call was on its way to its idle slot when we looked, and D left before the answer came."""
    scene = Scene(0, {D}, {}, pinned={D: 0})

    def leave() -> None:
        scene.started.clear()
        scene.draining[D] = True

    scene.on_look = leave
    assert await scene.look() == []
    scene.on_look = lambda: None
    assert await scene.look() == [D]


async def test_a_look_is_told_once_and_then_seldom(autojump_clock: trio.abc.Clock) -> None:
    scene = Scene(1, set(), {}, wants_look=True)
    with trio.move_on_after(5):
        await scene.watcher().run()
    assert scene.told[0].busy == {0}
    assert all(after - before > PREFILL_POLL_S_MIN - 0.01 for before, after in pairwise(scene.looks))


async def test_a_look_during_which_something_moved_is_not_told(autojump_clock: trio.abc.Clock) -> None:
    scene = Scene(0, set(), {}, wants_look=True, moving=True)
    with trio.move_on_after(5):
        await scene.watcher().run()
    assert scene.looks and not scene.told
