"""Attacks on hard inject: what happens in the gaps between two steps of a plan, before the fake."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import trio
from attrs import evolve

from kvstream.errors import KVStreamError
from kvstream.gateway.draining import DrainingSeats
from tests.gateway.hardlane import actions, check_wire, open_hard
from tests.gateway.lane import chat, read, request
from tests.gateway.test_case_slots_checked import same_model, text


@pytest.mark.parametrize("up_s", [0, 3600])
@pytest.mark.parametrize("hold", [True, False])
async def test_what_was_planned_for_the_process_before_is_planned_again(
        tmp_path: Path, autojump_clock: trio.abc.Clock, hold: bool, up_s: int) -> None:
    """However long that one was up (it is not away, so it need not return), and also where another backend could be
    asked (without ``hold`` a request does not wait for one that is away)."""
    async with same_model(), open_hard(tmp_path, slots=1, n_ctx=4000, prefill_rate=500.0, answer_tokens=None) as lane:
        for name in (1, 2, 1, 2):
            await chat(lane, text(name, 400), max_tokens=2)
        assert actions(lane.runtime, "restore")
        await trio.sleep(up_s)
        async with trio.open_nursery() as nursery:

            async def runs() -> None:
                with pytest.raises(KVStreamError):
                    await chat(lane, text(2, 420), max_tokens=1000)

            nursery.start_soon(runs)
            await trio.sleep(3)
            async with lane.engine.open_stream(request(text(1, 460), max_tokens=2), hold=hold) as stream:
                await trio.sleep(1)
                lane.runtime.restart()
                events = await read(stream)
        assert events and stream.completed
        check_wire(lane.runtime)



@pytest.mark.parametrize("dies", [0.0, 2.0, 60.0])
async def test_what_the_process_before_was_doing_gets_a_moment_to_end_before_this_one_is_checked(
        tmp_path: Path, autojump_clock: trio.abc.Clock, dies: float) -> None:
    """As when reading a prompt broke off, or a client left: whether its slot is idle is asked once a second or so. An
    unsettled check is made again when nothing is in hand, which under load is never."""
    async with same_model(), open_hard(tmp_path, prefill_rate=500.0) as lane:
        sight = lane.engine.sight
        gone = trio.current_time() + dies
        with mock.patch.object(DrainingSeats, "__bool__", lambda _: trio.current_time() < gone):
            report = lane.engine.watcher.backend.capacity
            assert report is not None
            began = trio.current_time()
            await sight.check(evolve(report, process="another"), sleeping=False)
            took = trio.current_time() - began
        assert took < 8
        assert lane.engine.inject.mode == ("hard" if dies < 5 else "soft")


async def test_a_fork_is_saved_from_a_slot_that_somebody_who_left_is_still_restoring_into(
        tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """Where nothing is pinned the runtime may put the next request into just that slot: its large file is being read
    through for its checksum, and nothing was asked of the runtime yet."""
    async with same_model(), open_hard(tmp_path, slots=3, unified=True, cache_ram=True, prefill_rate=200.0) as lane:
        assert lane.engine.inject.mode == "hard-unpinned"

        async def pair(name: int) -> None:
            async with trio.open_nursery() as nursery:
                for number in range(2):
                    nursery.start_soon(lambda n=number: chat(lane, text(name, 300) + f" and {n}", max_tokens=4))

        await pair(1)
        lane.runtime.restart()
        await trio.sleep(30)
        inject = lane.engine.inject.lane
        assert inject is not None and inject.store is not None
        offer, slow = inject.store.offer, [8.0]

        async def offer_slowly(name: str) -> str:
            await trio.sleep(slow.pop() if slow else 0)
            return await offer(name)

        with mock.patch.object(inject.store, "offer", offer_slowly), trio.fail_after(60):
            with trio.move_on_after(0.5):
                await chat(lane, text(1, 300) + " again", max_tokens=4)
            assert not slow and lane.engine.inject.jobs, "it left in the middle of its restore"
            await pair(2)
            await lane.until_empty(30)
        check_wire(lane.runtime)


@pytest.mark.parametrize("unified", [False, True])
async def test_a_runtime_that_dies_while_it_reads_a_prompt_is_asked_before_it_gets_that_prompt_again(
        tmp_path: Path, autojump_clock: trio.abc.Clock, unified: bool) -> None:
    async with same_model(), open_hard(
            tmp_path, slots=2, n_ctx=8000, prefill_rate=100.0, unified=unified, cache_ram=unified) as lane:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: chat(lane, text(1, 400), max_tokens=20))
            await trio.sleep(2)
            reading = lane.runtime.journal.entries[-1]
            assert reading.request.json["n_predict"] == 0 and reading.ended_at is None
            lane.runtime.restart(load_s=2.0)
            at = len(lane.runtime.journal.entries)
        later = [e for e in lane.runtime.journal.entries[at:] if e.request.method == "POST"]
        first = next(n for n, e in enumerate(later) if "amber" in e.prompt)
        assert any(e.request.path.startswith("/slots/") for e in later[:first]), "not asked about its slots"
        assert lane.engine.inject.mode == ("hard-unpinned" if unified else "hard")
        check_wire(lane.runtime)
