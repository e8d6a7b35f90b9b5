"""Promises of hard inject against what the runtime reports, on the fake: when it is off, for whom, how long."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from attrs import define, evolve

from kvstream.adapters.base import CapacityQuery, CapacityReport, HttpReply
from kvstream.adapters.llamacpp import LlamaCppBackend
from kvstream.core.messages import SlotsKnown, SlotsLost
from kvstream.gateway.inject_settings import InjectSettings
from kvstream.gateway.metrics import Metrics
from kvstream.gateway.selfcheck import check_slots
from kvstream.gateway.slot_ports import SlotsFound
from kvstream.gateway.verify import LOOK_GAP_S, QUIET_S, SlotVerify
from tests.fakes import FakeRuntime, FakeUpstream, open_runtime


@define(eq=False)
class Bench:
    """A verifier before a fake runtime, without an engine."""

    runtime: FakeRuntime
    adapter: LlamaCppBackend
    upstream: FakeUpstream
    verify: SlotVerify
    metrics: Metrics
    settings: InjectSettings
    busy: bool = False
    process: str = ""

    async def check(self) -> SlotsFound:
        report = await self.report()
        fresh, self.process = report.process != self.process, report.process
        found = await check_slots(self.adapter, self.upstream, self.settings, report, stop=lambda: self.busy)
        return self.verify.enter(found, fresh=fresh)

    async def report(self) -> CapacityReport:
        replies: dict[str, HttpReply | None] = {}
        while calls := [(n, c) for n, c in self.adapter.capacity_calls(replies) if n not in replies]:
            for name, call in calls:
                replies[name] = await self.upstream.request(call, timeout_s=5)
        return self.adapter.read_capacity(replies, CapacityQuery(page_tokens=16))

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"kvstream_{name}", {"backend": "one", **labels}) or 0.0

    def mode(self) -> str:
        return next(m for m in ("hard", "hard-unpinned", "soft") if self.count("inject_mode", mode=m))

    def inferences(self) -> int:
        return sum(call.inference for call in self.runtime.journal.entries)


@asynccontextmanager
async def bench(misses_max: int = 3, **knobs: Any) -> AsyncIterator[Bench]:
    async with open_runtime(**knobs) as runtime:
        upstream, metrics, adapter = FakeUpstream(runtime), Metrics(), LlamaCppBackend("http://fake")
        settings = InjectSettings(misses_max=misses_max)
        verify = SlotVerify(adapter, upstream, settings, metrics.inject.lane("one"), "one")
        yield Bench(runtime, adapter, upstream, verify, metrics, settings)


async def test_case_44_restores_without_effect_switch_it_off_for_this_model(
        autojump_clock: object, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvstream")
    async with bench() as b:
        found = await b.check()
        assert (found.mode, b.mode()) == ("hard", "hard")
        assert b.verify.seen("restored", promised=1000, cached=4) is None
        assert b.verify.seen("restored", promised=1000, cached=999) is None  # it works after all
        assert b.verify.seen("restored", promised=1000, cached=4) is None
        assert b.verify.seen("restored", promised=1000, cached=800) is None  # the second in a row
        assert b.verify.seen("restored", promised=1000, cached=4) == SlotsKnown(None)
        assert b.count("restore_ineffective_total") == 4
        assert (b.verify.found.mode, b.verify.found.rules, b.mode()) == ("soft", None, "soft")
        assert "no effect" in b.verify.found.why
        lines = [r for r in caplog.records if "hard inject: soft" in r.getMessage()]
        assert [r.levelname for r in lines] == ["WARNING"]
        # it is remembered: neither a heartbeat nor a new check of the same process or build brings it back
        await trio.sleep(1000)
        assert await b.verify.beat(lambda: 0) is None
        b.runtime.restart()
        assert (await b.check()).mode == "soft"
        # another build is another thing
        b.runtime.config.build = "b1-fake"
        b.runtime.restart()
        assert (await b.check()).mode == b.mode() == "hard"
        assert b.verify.seen("restored", promised=1000, cached=4) is None  # and has its own misses


async def test_a_promise_is_kept_by_nine_tenths_and_the_last_token_is_never_kept(autojump_clock: object) -> None:
    async with bench(misses_max=1) as b:
        await b.check()
        assert b.verify.seen("restored", promised=1000, cached=900) is None
        assert b.verify.seen("restored", promised=1000, cached=899) is None
        assert b.verify.seen("restored", promised=8, cached=7) is None
        assert b.verify.seen("restored", promised=0, cached=0) is None
        assert b.count("restore_ineffective_total") == 0
        assert b.verify.seen("restored", promised=1000, cached=898) == SlotsKnown(None)
        assert b.verify.seen("restored", promised=1000, cached=0) is None  # off is off
        assert b.count("inject_promised_tokens_total", by="restored") == 3008
        assert b.count("inject_kept_tokens_total", by="restored") == 900 + 899 + 7 + 898


async def test_a_promise_that_rests_on_text_counts_when_nothing_at_all_is_kept(autojump_clock: object) -> None:
    async with bench(misses_max=1) as b:
        await b.check()
        for cached in (99, 100, 500):  # a guess may be wrong by as much
            assert b.verify.seen("restored", promised=990, cached=cached, exact=False) is None
        assert b.verify.seen("restored", promised=1000, cached=99, exact=False) == SlotsKnown(None)


async def test_a_slot_that_lost_its_prefix_makes_the_map_stale_and_often_ends_it(autojump_clock: object) -> None:
    async with bench() as b:
        rules = (await b.check()).rules
        assert b.verify.seen("reused", promised=500, cached=0) == SlotsLost()
        assert b.verify.seen("reused", promised=500, cached=500) is None
        assert [b.verify.seen("reused", promised=500, cached=0) for _ in range(3)] == [
            SlotsLost(), SlotsLost(), SlotsKnown(None)]
        assert b.count("inject_slots_lost_total", why="missed") == 4 and b.mode() == "soft"
        await trio.sleep(QUIET_S - 1)
        assert await b.verify.beat(lambda: 0) is None
        await trio.sleep(1)
        assert await b.verify.beat(lambda: 0) == SlotsKnown(rules) and b.mode() == "hard"


async def test_a_stranger_is_seen_twice_before_it_counts_and_must_be_gone_for_a_while(
        autojump_clock: object, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvstream")
    async with bench() as b:
        rules = (await b.check()).rules
        assert b.verify.slots_seen(1, 2) is None  # one may be a request that has just ended
        assert b.verify.slots_seen(1, 2) is None  # at the same moment: the same look
        await trio.sleep(1)
        assert b.verify.slots_seen(2, 2) is None
        await trio.sleep(1)
        assert b.verify.slots_seen(1, 2) is None
        await trio.sleep(1)
        assert b.verify.slots_seen(1, 2) == SlotsKnown(None)
        assert "somebody else" in b.verify.found.why and b.mode() == "soft"
        assert b.count("inject_slots_lost_total", why="foreign") == 1
        await trio.sleep(QUIET_S - 5)
        assert b.verify.slots_seen(0, 1) is None  # still there
        await trio.sleep(QUIET_S - 1)
        assert await b.verify.beat(lambda: 0) is None
        assert 0 < b.verify.status(trio.current_time())["again_s"] <= 1
        await trio.sleep(LOOK_GAP_S)
        assert await b.verify.beat(lambda: 0) == SlotsKnown(rules)
        assert b.verify.status(trio.current_time())["again_s"] is None


async def test_a_heartbeat_sees_a_stranger_at_work(autojump_clock: object) -> None:
    async with bench(decode_rate=10, answer_tokens=None) as b, trio.open_nursery() as nursery:
        rules = (await b.check()).rules

        async def stranger() -> None:
            calls = b.adapter.slots
            assert calls is not None
            call = evolve(calls.read_prompt([1] * 8, None), body=b'{"prompt": "hi", "n_predict": 4000, "stream": true}')
            async with b.upstream.open(call) as response:
                while await response.receive():
                    pass

        nursery.start_soon(stranger)
        await trio.sleep(0.5)
        seen, before = [], len(b.runtime.journal.entries)
        for _ in range(6):
            seen.append(await b.verify.beat(lambda: 1))  # one of ours is there as well, says the scheduler
            await trio.sleep(LOOK_GAP_S / 2)
        assert seen == [None] * 6
        assert sum(e.request.path == "/slots" for e in b.runtime.journal.entries[before:]) == 3  # not every time
        for _ in range(4):
            seen.append(await b.verify.beat(lambda: 0))
            await trio.sleep(LOOK_GAP_S)
        assert SlotsKnown(None) not in seen  # with nothing of ours there, nobody looks: looking keeps it awake
        ours = iter([1, 0, 1, 0])  # what was ours has ended, and the slot works on: that is somebody else's
        assert await b.verify.beat(lambda: next(ours)) is None
        await trio.sleep(LOOK_GAP_S)
        assert await b.verify.beat(lambda: next(ours)) == SlotsKnown(None)
        await trio.sleep(QUIET_S)
        assert await b.verify.beat(lambda: 0) is None  # still there
        b.runtime.engine.clear()  # the stranger goes
        await trio.sleep(QUIET_S)
        assert await b.verify.beat(lambda: 0) == SlotsKnown(rules)


async def test_while_slots_must_not_be_asked_for_they_are_not(autojump_clock: object) -> None:
    async with bench() as b:
        await b.check()
        before = len(b.runtime.journal.entries)
        for _ in range(5):
            assert await b.verify.beat(None) is None
            await trio.sleep(LOOK_GAP_S)
        assert len(b.runtime.journal.entries) == before


async def test_what_is_known_of_one_process_is_not_held_against_another(autojump_clock: object) -> None:
    async with bench(misses_max=2) as b:
        await b.check()
        for _ in range(2):
            b.verify.slots_seen(0, 1)
            await trio.sleep(1)
        assert b.mode() == "soft"
        assert (await b.check()).mode == "soft"  # the same process: the stranger is still there
        assert b.verify.seen("restored", promised=100, cached=0) is None
        b.runtime.restart()
        assert (await b.check()).mode == b.mode() == "hard"
        assert b.verify.seen("restored", promised=100, cached=0) is None  # the first, not the second


async def test_requests_that_come_in_the_middle_end_the_check(autojump_clock: object) -> None:
    """Nothing more is pinned once a request may be in the slot."""
    async with bench(prefill_rate=100) as b, trio.open_nursery() as nursery:
        async def come() -> None:
            await trio.sleep(0.1)  # in the middle of the first prompt
            b.busy = True

        nursery.start_soon(come)
        found = await b.check()
        assert (found.mode, found.settled, b.inferences()) == ("soft", False, 1)


async def test_the_checks_own_tokens_are_counted(autojump_clock: object) -> None:
    async with bench() as b:
        await b.check()
        totals = b.runtime.engine.totals
        assert b.count("runtime_prompt_tokens_total", part="computed", source="reported") == totals["prompt"] > 0
        assert b.count("runtime_prompt_tokens_total", part="cached", source="reported") == totals["cached"] > 0
