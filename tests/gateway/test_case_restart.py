"""Case 83: a backend goes away with a full queue, comes back, and goes away again."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from kvstream.adapters.base import HttpCall
from kvstream.errors import BackendRefusedError
from tests.fakes import Script
from tests.gateway.conftest import CHAT, Call, Lane, chat, error_of, open_lane, open_rig

UPSTREAM = {"health_interval_s": 0.5}


async def all_ended(calls: list[Call]) -> None:
    for call in calls:
        await call.ended.wait()


def die(lane: Lane) -> None:
    """The process ends: what runs is cut, and nobody listens any more."""
    lane.runtime.restart()
    lane.runtime.config.refuse = True


def served(calls: list[Call]) -> list[bool]:
    return [call.status == 200 and b"[DONE]" in call.body for call in calls]


async def test_case_83_the_queue_outlives_a_restart(autojump_clock: Any) -> None:
    async with open_lane(knobs={"slots": 2, "decode_rate": 20.0, "answer_tokens": None}, upstream=UPSTREAM) as lane:
        running = [lane.start(chat(f"running {n}", max_tokens=60)) for n in range(2)]
        await trio.sleep(1)
        waiting = [lane.start(chat(f"waiting {n}", max_tokens=8)) for n in range(5)]
        await trio.sleep(0.5)
        die(lane)
        await all_ended(running)
        assert served(running) == [False, False], "what ran is lost, and its client is told"
        await trio.sleep(1)
        newcomer = lane.start(chat("newcomer", max_tokens=8))
        await trio.sleep(2)
        assert not any(call.ended.is_set() for call in [*waiting, newcomer])
        lane.runtime.config.refuse = False
        await all_ended([*waiting, newcomer])
        assert all(served([*waiting, newcomer]))
        assert set(Counter(lane.runtime.journal.prompts).values()) == {1}, "nothing ran twice"
        assert lane.idle()


async def test_case_83_it_dies_again_while_it_is_being_tried(autojump_clock: Any) -> None:
    async with open_lane(knobs={"slots": 2, "decode_rate": 20.0, "answer_tokens": None}, upstream=UPSTREAM) as lane:
        running = [lane.start(chat(f"running {n}", max_tokens=60)) for n in range(2)]
        await trio.sleep(1)
        waiting = [lane.start(chat(f"waiting {n}", max_tokens=40)) for n in range(5)]
        await trio.sleep(0.5)
        die(lane)
        await trio.sleep(3)
        lane.runtime.script(Script(first_byte_after=5.0))
        lane.runtime.config.refuse = False
        await trio.sleep(1.5)
        tried = [prompt for prompt in lane.runtime.journal.prompts if prompt.startswith("waiting")]
        assert len(tried) == 1, "one goes first"
        die(lane)
        await trio.sleep(3)
        lane.runtime.config.refuse = False
        await all_ended([*running, *waiting])
        assert sum(served(waiting)) == 4, "the one that ran when it died is told so; the others are served"
        assert set(Counter(lane.runtime.journal.prompts).values()) == {1}, "nothing ran twice"
        assert lane.idle()


async def test_case_83_no_herd_on_its_return(autojump_clock: Any) -> None:
    """Sixteen wait, the backend returns: one is let in, and the others as it shows that it works."""
    async with open_lane(knobs={"slots": 16, "n_ctx": 65536}, upstream=UPSTREAM) as lane:
        lane.runtime.config.refuse = True
        await trio.sleep(3)
        calls = [lane.start(chat(f"n {n}")) for n in range(16)]
        await trio.sleep(2)
        lane.runtime.script(Script(first_byte_after=5.0), times=None)
        lane.runtime.config.refuse = False
        await trio.sleep(4)
        assert len(lane.runtime.journal.calls) == 1
        await all_ended(calls)
        assert all(served(calls)) and len(lane.runtime.journal.calls) == 16


async def test_case_83_who_was_let_in_when_nobody_listened_goes_back_to_its_place(autojump_clock: Any) -> None:
    """All sixteen seats are granted in the instant of the fall, before anybody knows of it."""
    async with open_lane(knobs={"slots": 16, "n_ctx": 65536}, upstream={"health_interval_s": 5.0}) as lane:
        lane.runtime.config.refuse = True
        calls = [lane.start(chat(f"n {n:02}")) for n in range(16)]
        await trio.sleep(2)
        assert not any(call.ended.is_set() for call in calls)
        status = await lane.status()
        assert status["queue"]["length"] == 16 and status["seats"]["used"] == 0
        assert status["breaker"]["state"] == "closed", "one outage is one fault, however many met it"
        late = lane.start(chat("late"))
        await trio.sleep(0.1)
        lane.runtime.config.refuse = False
        await all_ended([*calls, late])
        assert all(served([*calls, late]))
        assert sorted(lane.runtime.journal.prompts[:16]) == [f"n {n:02}" for n in range(16)]
        assert lane.runtime.journal.prompts[16:] == ["late"] and lane.idle()


async def test_case_83_waiting_is_bounded_and_after_the_grace_newcomers_hear_at_once(autojump_clock: Any) -> None:
    async with open_lane(upstream={**UPSTREAM, "down_grace_s": 10.0}, scheduler={"max_wait_s": 40.0}) as lane:
        lane.runtime.config.refuse = True
        began = trio.current_time()
        early = lane.start(chat("early"))
        await trio.sleep(20)
        late = await lane.post(chat("late"))
        assert late.status == 503 and error_of(late.body)["code"] == "backend_unavailable"
        assert int(late.headers["retry-after"]) >= 1 and trio.current_time() - began < 20.1
        await early.ended.wait()
        assert trio.current_time() - began == pytest.approx(40, abs=1)
        assert early.status in (503, 200) and b"queue_timeout" in early.body  # 200: a keepalive comment came first
        assert lane.runtime.journal.calls == [] and lane.idle()


async def test_case_83_a_client_may_leave_while_nobody_listens(autojump_clock: Any) -> None:
    async with open_lane(upstream=UPSTREAM) as lane:
        lane.runtime.config.refuse = True
        calls = [lane.start(chat(f"n {n}")) for n in range(3)]
        await trio.sleep(2)
        for call in calls:
            call.leave()
        await trio.sleep(0.1)
        assert lane.idle()
        lane.runtime.config.refuse = False
        await trio.sleep(5)
        assert lane.runtime.journal.calls == []


async def test_case_83_a_backend_that_never_was_there_is_not_waited_for(autojump_clock: Any) -> None:
    async with open_lane(wait=False, knobs={"refuse": True}) as lane:
        await trio.sleep(0.5)
        began = trio.current_time()
        assert (await lane.post(chat())).status == 503 and trio.current_time() - began < 0.1


async def test_case_83_health_says_yes_and_nobody_listens(autojump_clock: Any) -> None:
    """Something else answers the health route: a request does not go round for ever."""
    async with open_lane(upstream=UPSTREAM) as lane:
        inner = lane.upstream.open

        @asynccontextmanager
        async def only_health(call: HttpCall) -> AsyncIterator[Any]:
            await trio.lowlevel.checkpoint()
            if call.path == CHAT:
                raise BackendRefusedError("connection refused")
            async with inner(call) as response:
                yield response

        lane.upstream.open = only_health  # type: ignore[method-assign]
        call = await lane.post(chat())
        assert b'"backend_unavailable"' in call.body and lane.runtime.journal.calls == []
        assert lane.idle()


async def test_case_83_over_sockets() -> None:
    """The same with a real listener that goes away and comes back, in a second."""
    gone = {"keepalive_expiry_s": 0.0}  # the fake goes on serving connections that are open
    async with open_rig(knobs={"slots": 1, "decode_rate": 200.0}, upstream=gone) as rig, trio.open_nursery() as nursery:
        bodies: list[bytes] = []

        async def ask(text: str) -> None:
            response = await rig.post(chat(text))
            bodies.append(await response.read_all())
            await response.close()

        rig.runtime.script(Script(first_byte_after=30.0))
        nursery.start_soon(ask, "running")
        await rig.until(lambda: rig.runtime.journal.calls)
        for n in range(5):
            nursery.start_soon(ask, f"waiting {n}")
        await rig.until(lambda: len(rig.engine.streams) == 6)
        await rig.fake.pause()
        rig.runtime.restart()
        await rig.until(lambda: rig.engine.watcher.backend.state == "down")
        await trio.sleep(0.3)
        assert len(rig.engine.streams) == 5
        await rig.fake.resume()
        await rig.until(lambda: len(bodies) == 6)
        assert sum(b"[DONE]" in body for body in bodies) == 5
        assert set(Counter(rig.runtime.journal.prompts).values()) == {1}
        await rig.until(rig.idle)
