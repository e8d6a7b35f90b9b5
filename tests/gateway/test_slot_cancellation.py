"""For every step of a plan: hang there, let the client leave, and look at the books.

A slot call that was sent is carried out whether or not somebody waits. So leaving in the middle of one gives seat, slot
and pages back when the call has ended, or when it has been given up waiting for; never before, and never not at all.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import trio

from kvstream.adapters.base import HttpCall, HttpReply
from kvstream.adapters.slot_calls import SlotDone
from kvstream.core.messages import SlotsLook
from kvstream.core.types import SavedPrefix, SaveSpec
from kvstream.errors import BackendTimeoutError
from kvstream.gateway.kvstore import KvStore
from kvstream.gateway.ports import Upstream, UpstreamResponse
from kvstream.gateway.slotlane import SlotLane
from tests.fakes.script import Script
from tests.gateway.hardlane import PAGE, actions, check_wire, hard, open_hard
from tests.gateway.lane import Lane, chat, read, request
from tests.gateway.test_case_slots import fill, text, usage_of

CALL_S_MAX = 20.0
KEEP = KvStore.keep


class Hanging:
    """An upstream that holds a call of one kind: ``save``, ``restore``, ``erase``, ``process`` or ``read``."""

    def __init__(self, inner: Upstream) -> None:
        self._inner = inner
        self.place = ""
        self.hang_s = 999.0
        self.reached = trio.Event()

    def _kind(self, call: HttpCall) -> str:
        if "action=" in call.path:
            return call.path.rpartition("=")[2]
        return {"/props": "process", "/completion": "read"}.get(call.path, "")

    async def _hang(self, call: HttpCall) -> None:
        if self.place and self._kind(call) == self.place:
            self.reached.set()
            await trio.sleep(self.hang_s)

    async def request(self, call: HttpCall, *, timeout_s: float) -> HttpReply:
        with trio.move_on_after(timeout_s) as bound:
            await self._hang(call)
        if bound.cancelled_caught:
            raise BackendTimeoutError(f"no answer within {timeout_s:g} s")
        return await self._inner.request(call, timeout_s=timeout_s)

    @asynccontextmanager
    async def open(self, call: HttpCall,
                   content: AsyncIterable[bytes] | None = None) -> AsyncIterator[UpstreamResponse]:
        await self._hang(call)
        async with self._inner.open(call, content) as response:
            yield response


@asynccontextmanager
async def open_hanging(tmp_path: Path, **more: Any) -> AsyncIterator[tuple[Lane, Hanging]]:
    found: list[Hanging] = []

    def wrap(inner: Upstream) -> Upstream:
        found.append(Hanging(inner))
        return found[0]

    told = hard(tmp_path, inject={"call_s_max": CALL_S_MAX, "slow_save_s": 60.0}, slot_idle_s_max=10)
    async with open_hard(tmp_path, told, wrap=wrap, **{"slots": 1, "prefill_rate": 200.0, **more}) as lane:
        yield lane, found[0]


async def leave_at(lane: Lane, hanging: Hanging, content: str) -> None:
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            async def client() -> None:
                async with lane.engine.open_stream(request(content, max_tokens=4)) as stream:
                    await read(stream)

            nursery.start_soon(client)
            await hanging.reached.wait()
            await trio.sleep(0.2)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("place", ["save", "restore", "read", "process"])
async def test_leaving_in_the_middle_of_a_plan(place: str, tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    async with open_hanging(tmp_path) as (lane, hanging):
        await fill(lane, "amber", "birch")
        await trio.sleep(2)  # silence: whether it is the same process has to be asked
        hanging.place = place
        await leave_at(lane, hanging, text("cedar" if place in ("save", "read") else "amber"))
        left = trio.current_time()
        hanging.place = ""
        await lane.until_empty(within_s=CALL_S_MAX + 5)
        if place in ("save", "restore"):
            assert trio.current_time() - left > 1, "not before the call has ended"
        lane.check()
        assert await chat(lane, text("delta"), max_tokens=4), "the next one is served"
        prompt, cached = await usage_of(lane, text("delta"))
        assert cached >= 0.9 * prompt, "by a slot that is used as before"
        check_wire(lane.runtime)


async def test_leaving_while_cells_are_made_free(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    async with open_hanging(tmp_path, slots=3, unified=True, n_ctx=1200) as (lane, hanging):
        await fill(lane, "amber", "birch", "cedar")
        hanging.place = "erase"
        await leave_at(lane, hanging, text("delta", 700))
        hanging.place = ""
        await lane.until_empty(within_s=CALL_S_MAX + 5)
        lane.check()
        assert await chat(lane, text("ember", 700), max_tokens=4)
        check_wire(lane.runtime)


async def test_a_call_that_ends_gives_its_slot_back_at_once(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """Left after 0.2 s of a restore of 3 s: the slot is free when that has ended, and holds what was restored."""
    async with open_hanging(tmp_path) as (lane, hanging):
        await fill(lane, "amber", "birch")
        hanging.place, hanging.hang_s = "restore", 3.0
        await leave_at(lane, hanging, text("amber"))
        left = trio.current_time()
        hanging.place = ""
        await lane.until_empty(within_s=3.5)
        assert trio.current_time() - left > 2
        restores = len(actions(lane.runtime, "restore"))
        prompt, cached = await usage_of(lane, text("amber"))
        assert cached >= 0.9 * prompt and len(actions(lane.runtime, "restore")) == restores
        check_wire(lane.runtime)


@pytest.mark.parametrize("place", ["save", "restore", "erase"])
async def test_a_call_without_an_answer_costs_its_request_that_time(
    place: str, tmp_path: Path, autojump_clock: trio.abc.Clock
) -> None:
    more = {"slots": 3, "unified": True, "n_ctx": 1200} if place == "erase" else {}
    async with open_hanging(tmp_path, **more) as (lane, hanging):
        await fill(lane, "amber", "birch", *(("cedar",) if more else ()))
        hanging.place = place
        began = trio.current_time()
        content = text("amber") if place == "restore" else text("delta", 700 if more else 300)
        assert await chat(lane, content, max_tokens=4)
        assert CALL_S_MAX <= trio.current_time() - began < 3 * CALL_S_MAX + 20
        hanging.place = ""
        await lane.until_empty(within_s=15)
        lane.check()
        check_wire(lane.runtime)


@pytest.mark.parametrize("fault", [
    {"status": 500, "script": [(0, b"{}")]}, {"status": 503, "script": [(0, b"{}")]}, {"end": "cut", "tokens": 0},
    {"end": "error_event", "tokens": 0}, {"end": "eof_no_finish", "tokens": 0}])
async def test_a_prompt_that_cannot_be_read_first_is_read_with_its_request(
    fault: dict[str, Any], tmp_path: Path, autojump_clock: trio.abc.Clock
) -> None:
    """Also for those that waited for it: nobody waits for ever, and nobody is sent to a slot at work."""
    async with open_hanging(tmp_path, slots=4) as (lane, _):
        lane.runtime.script(Script(**fault), when=lambda r: r.path == "/completion", times=None)
        done: list[bool] = []

        async def one(number: int) -> None:
            done.append(bool(await chat(lane, text("amber") + f" {number}", max_tokens=4)))

        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:
                for number in range(3):
                    nursery.start_soon(one, number)
        assert done == [True] * 3
        await lane.until_empty(within_s=5)
        lane.check()
        check_wire(lane.runtime)


async def test_the_gateway_stops_in_the_middle_of_a_restore(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    async with open_hanging(tmp_path) as (lane, hanging):
        await fill(lane, "amber", "birch")
        hanging.place = "restore"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave_at, lane, hanging, text("amber"))
            await hanging.reached.wait()
            nursery.cancel_scope.cancel()
    # the block above ends at once: nothing is shielded


async def test_a_slot_is_not_probed_while_somebody_is_on_his_way_there(
        tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """Another process is noticed after a request was given its slot and before it came there. Its slot looks
    idle until then, and what tells the layout of the pool would meet it there."""
    async with open_hanging(tmp_path, slots=2) as (lane, hanging):
        await fill(lane, "amber")
        hanging.place, hanging.hang_s = "read", 0.5
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fill, lane, "cedar")
            await hanging.reached.wait()
            hanging.place = ""
            known = len(lane.runtime.journal.entries)
            lane.runtime.restart(load_s=0.0)
            lane.engine.watcher.other_process()
        await trio.sleep(5)
        sent = [entry.request.target for entry in lane.runtime.journal.entries[known:]]
        touched = [at for at, target in enumerate(sent) if target.startswith("/slots/")]
        assert touched and sent.index("/completion") < touched[0], sent
        check_wire(lane.runtime)
        await lane.until_empty(within_s=CALL_S_MAX + 5)
        lane.check()


async def _keep_slowly(self: KvStore, spec: SaveSpec, done: SlotDone) -> SavedPrefix:
    await trio.sleep(3.0)
    return await KEEP(self, spec, done)


@pytest.mark.parametrize("place", ["save", "restore"])
async def test_what_was_displaced_is_kept_when_who_displaced_it_leaves(
        place: str, tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """It leaves while the runtime writes, or while the file is looked at and its own is being restored. What the
    slot held is nowhere else then."""
    async with open_hanging(tmp_path) as (lane, hanging):
        await fill(lane, "amber", "birch")
        hanging.hang_s = 1.0
        with mock.patch.object(KvStore, "keep", _keep_slowly):
            hanging.place = place
            await leave_at(lane, hanging, text("amber"))
            hanging.place = ""
            await trio.sleep(5)
        await lane.until_empty(within_s=CALL_S_MAX + 5)
        await fill(lane, "delta")
        prompt, cached = await usage_of(lane, text("birch"))
        assert cached >= prompt - PAGE, "its file is offered"
        lane.check()
        check_wire(lane.runtime)


async def test_a_file_that_is_looked_at_while_the_server_restarts_is_offered_afterwards(
        tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """The files are listed for the next process when this one is not among them yet, and what is listed is told
    after it was kept."""
    look = SlotLane.look

    async def look_slowly(self: SlotLane) -> SlotsLook | None:
        await trio.sleep(4.0)
        return await look(self)

    async with open_hanging(tmp_path) as (lane, _):
        await fill(lane, "amber", "birch")
        with mock.patch.object(KvStore, "keep", _keep_slowly), mock.patch.object(SlotLane, "look", look_slowly):
            await fill(lane, "amber")
            lane.runtime.restart(load_s=0.0)
            lane.engine.watcher.other_process()
            await trio.sleep(10)
        prompt, cached = await usage_of(lane, text("birch"))
        assert cached >= prompt - PAGE
        lane.check()
        check_wire(lane.runtime)
