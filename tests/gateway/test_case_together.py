"""Features that meet: what the storm (``tests/sim/test_storm.py``) or thinking about it found, each by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from kvstream.gateway.coalesce import Coalescer
from kvstream.gateway.settings import coalesce_settings
from tests.fakes import Script
from tests.gateway.conftest import Lane, chat, config_of, open_lane
from tests.gateway.several import open_several
from tests.sim.storm import open_storm

A: dict[str, Any] = {"name": "a", "knobs": {"model": "m"}}
B: dict[str, Any] = {"name": "b", "knobs": {"model": "m"}}
COLD: dict[str, Any] = {"temperature": 0}


async def test_case_51_the_trial_of_one_lane_stays_there_although_another_could_serve_it(autojump_clock: Any) -> None:
    """Itself it is the request for which a half open lane takes no second one."""
    async with open_several(A, B, upstream={"breaker_open_s": 0.5}) as several:
        first = several.engines[0]
        for trials in range(1, 11):
            first.guard.wedge(trio.current_time())
            await trio.sleep(1)
            assert first.state == "half_open"
            assert (await several.post(chat(f"question {trials}", model="m"))).status == 200
            assert len(several.runtimes[0].journal.calls) == trials and first.state == "up"


def coalescer_of(lane: Lane) -> Coalescer:
    found = lane.app._proxy._open_answer.__self__  # type: ignore[attr-defined]
    assert isinstance(found, Coalescer)
    return found


async def test_case_82_an_answer_under_way_at_a_reload_is_not_kept(autojump_clock: Any) -> None:
    """Another backend may answer otherwise: what was kept is forgotten, and what comes from before is not kept then."""
    on = {"response_cache": {"enabled": True}}
    async with open_lane(**on) as lane:
        before = lane.start(chat(**COLD))
        await trio.sleep(0.05)
        coalescer_of(lane).replace(coalesce_settings(config_of(**on)))
        await before.ended.wait()
        after = await lane.post(chat(**COLD))
        assert after.headers["x-kvstream-cache"] == "miss" and len(lane.runtime.journal.calls) == 2


async def test_case_82_nobody_joins_a_call_from_before_a_reload(autojump_clock: Any) -> None:
    """It may go to a backend that is no longer there, or by an alias that means another model now."""
    async with open_lane() as lane:
        calls = [lane.start(chat(**COLD)), lane.start(chat(**COLD))]
        await trio.sleep(0.05)
        coalescer_of(lane).replace(attrs.evolve(coalesce_settings(config_of())))
        calls.append(lane.start(chat(**COLD)))
        for call in calls:
            await call.ended.wait()
        assert [call.headers["x-kvstream-coalesced"] for call in calls].count("leader") == 2
        assert len({call.body.count(b"data:") for call in calls}) == 1 and len(lane.runtime.journal.calls) == 2
        await trio.sleep(1)
        assert lane.idle() and not coalescer_of(lane)._flights


@pytest.mark.parametrize("refuse", [True, False])
async def test_case_82_a_lane_that_only_finishes_also_finishes_who_went_back_to_the_queue(
        autojump_clock: Any, refuse: bool) -> None:
    """Retired, or draining with ``drain_queued = "finish"``, while its backend is restarted; and its queue is full."""
    async with open_lane(scheduler={"max_queue": 2}, knobs={"slots": 1}, backend={"seats": 1},
                         upstream={"health_interval_s": 60.0}) as lane:
        await lane.post(chat("zeroth"))
        lane.runtime.config.refuse, lane.upstream.connect_s = True, 0.1
        calls = [lane.start(chat(f"number {i}")) for i in range(3)]
        while len(lane.engine.streams) < 3:
            await trio.sleep(0.01)
        lane.engine.close(refuse_waiting=refuse)
        await trio.sleep(2)
        lane.runtime.config.refuse = False
        for call in calls:
            await call.ended.wait()
        assert [call.status for call in calls] == ([503] * 3 if refuse else [200] * 3)


async def test_case_84_who_waits_for_a_backend_that_is_away_is_told_so(autojump_clock: Any) -> None:
    """Also where a gate held the request before."""
    knobs = {"prefill_rate": 100.0, "n_batch": 64}
    async with open_lane(scheduler={"long_prefill_tokens": 50}, knobs=knobs) as lane:
        long = "word " * 200
        lane.start(chat("first " + long))
        await trio.sleep(0.5)
        lane.start(chat("second " + long))
        await trio.sleep(0.2)
        assert [w.why for w in lane.engine.scheduler.snapshot(trio.current_time()).waiting] == ["long_prefill"]
        lane.runtime.config.refuse = True
        lane.engine.watcher.suspect("down", "connection refused")
        await trio.sleep(0.05)
        assert [w.why for w in lane.engine.scheduler.snapshot(trio.current_time()).waiting] == ["backend"]


async def test_case_47_a_gateway_that_drains_is_not_opened_again_by_a_reload(
        autojump_clock: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A new lane knows nothing of the drain; over connections that are still open it would be asked."""
    async with open_storm(2, monkeypatch, tmp_path) as world:
        mine = [("Authorization", "Bearer alice-secret")]
        world.surface.start(chat("a long one", model="shared", max_tokens=100), headers=mine)
        await trio.sleep(0.2)
        world.surface.nursery.start_soon(world.gateway.drain)
        await trio.sleep(0.1)
        row = attrs.evolve(world.config.more_backends[0], seats=1)
        world.config = attrs.evolve(world.config, more_backends=(row, *world.config.more_backends[1:]))
        world.gateway.reloader.ask()
        await trio.sleep(1)
        late = await world.surface.post(chat("late", model="only-b"), headers=mine)
        assert late.status == 503 and b"shutting_down" in late.body


@pytest.mark.parametrize("wedged", [True, False])
async def test_case_51_who_waits_behind_a_breaker_that_opens_goes_to_the_other_lane(
        autojump_clock: Any, wedged: bool) -> None:
    """It waited out ``max_wait_s`` beside an idle lane that serves the same model."""
    rows = ({"name": name, "knobs": {"model": "m", "slots": 1}} for name in "ab")
    async with open_several(*rows, upstream={"wedged_s": 5.0, "breaker_faults": 2, "breaker_open_s": 60.0}) as several:
        if wedged:
            several.runtimes[0].wedge()
        else:
            several.runtimes[0].script(Script(end="cut", tokens=2), times=None)
        calls = [several.start(chat(f"question {i}", model="m")) for i in range(8)]
        for call in calls:
            await call.ended.wait()
            assert call.ended_at is not None and call.started_at is not None
            assert call.ended_at < 20.0 + (several.engines[0].watcher.backend.since)
        assert sum(call.body.endswith(b"[DONE]\n\n") for call in calls) >= 6
