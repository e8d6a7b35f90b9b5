"""Cases 44 to 47 and 56 in a whole lane: what the runtime cannot do is found out, said, and costs nobody anything."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import trio

from kvstream.adapters.base import HttpCall
from kvstream.gateway.slotplace import SlotPlace
from kvstream.gateway.verify import QUIET_S
from tests.fakes.journal import Entry, FakeRequest
from tests.fakes.script import Script
from tests.gateway.conftest import CHAT
from tests.gateway.conftest import chat as one_chat
from tests.gateway.hardlane import actions, check_wire, hard, open_hard, slot_of
from tests.gateway.lane import Lane, chat, open_lane
from tests.gateway.parklane import HIGH, LOW, body_of, open_one, until_tokens

WORDS = ["amber", "birch", "cedar", "dune", "ember", "fjord", "grove", "heath", "islet", "jade"]


def text(seed: int, words: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words))


def count(lane: Lane, name: str, **labels: str) -> float:
    return lane.metrics.registry.get_sample_value(f"kvstream_{name}", {"backend": "default", **labels}) or 0.0


def mode(lane: Lane) -> str:
    return lane.engine.inject.mode


def status(lane: Lane) -> Mapping[str, Any]:
    told = lane.engine.inject.status(trio.current_time())[0]
    assert told is not None
    return told


def identity_of(lane: Lane) -> str:
    inject = lane.engine.inject.lane
    assert inject is not None and inject.rules is not None
    return inject.rules.identity


def ours(lane: Lane) -> list[Entry]:
    """Clients' requests on the wire."""
    return [entry for entry in lane.runtime.journal.calls if entry.request.path != "/completion"]


async def take_turns(lane: Lane, turns: int, began: int = 0) -> list[float]:
    """Two conversations that share nothing take turns on one slot; how long each turn took."""
    took = []
    for turn in range(began, began + turns):
        at = trio.current_time()
        await chat(lane, text(turn % 2, 400 + 10 * turn), max_tokens=2)
        took.append(trio.current_time() - at)
        await trio.sleep(1)
    return took


@asynccontextmanager
async def same_model() -> AsyncIterator[None]:
    """The model's file can be seen, and stays as it is: identity outlives a process of the runtime."""
    async def facts(self: SlotPlace, path: str) -> dict[str, str]:
        await trio.lowlevel.checkpoint()
        return {"model": path}

    with mock.patch.object(SlotPlace, "model_facts", facts):
        yield


async def test_case_44_restores_without_effect_cost_three_requests_and_no_more(
        tmp_path: Path, autojump_clock: trio.abc.Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvstream")
    one_slot = {"slots": 1, "n_ctx": 4000, "prefill_rate": 500.0}
    async with open_hard(tmp_path, restore_s=0.5, **one_slot) as lane:
        await take_turns(lane, 6)
        assert mode(lane) == "hard" and actions(lane.runtime, "restore")
        lane.runtime.config.restore_mode = "noop_200"
        began = trio.current_time()
        await take_turns(lane, 8, began=6)
        assert mode(lane) == "soft" and "no effect" in status(lane)["why"] and status(lane)["restore_ineffective"]
        assert count(lane, "restore_ineffective_total") == 3 and count(lane, "inject_mode", mode="soft") == 1
        assert len([e for e in actions(lane.runtime, "restore") if e.received_at >= began]) == 3
        said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert len([line for line in said if "no effect" in line]) == 1, said
        before = len(lane.runtime.journal.entries)
        took = await take_turns(lane, 6, began=14)
        later = lane.runtime.journal.entries[before:]
        assert not any(entry.request.path.startswith("/slots/") or slot_of(entry) is not None for entry in later)
        check_wire(lane.runtime)
    async with open_lane(**one_slot) as lane:
        plain = await take_turns(lane, 20)
    assert took == pytest.approx(plain[14:], rel=0.05)


@pytest.mark.parametrize("slots", [1, 4])
async def test_case_45_without_a_save_path_there_is_one_slot_call_ever(
        tmp_path: Path, autojump_clock: trio.abc.Clock, slots: int) -> None:
    async with open_hard(tmp_path, slots=slots, restore_mode="501") as lane:
        await take_turns(lane, 8)
        await trio.sleep(1000)  # nor is it asked again when nothing runs
        await take_turns(lane, 2)
        assert mode(lane) == "soft" and status(lane)["missing"] == ["--slot-save-path DIR"]
        assert len([e for e in lane.runtime.journal.entries if e.request.path.startswith("/slots/")]) == 1
        assert all(slot_of(entry) is None for entry in ours(lane))


async def test_case_46_a_prompt_with_an_image_is_neither_saved_nor_restored(
        tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with_image = [{"role": "user", "content": [{"type": "text", "text": text(1, 400)}, image]}]
    async with open_hard(tmp_path, mmproj="media", slots=1, n_ctx=4000) as lane:
        assert mode(lane) == "hard"  # of text
        before = len(lane.runtime.journal.entries)
        for _ in range(3):
            await chat(lane, messages=with_image, max_tokens=2)
            await trio.sleep(5)
        assert not [e for e in lane.runtime.journal.entries[before:] if e.request.path.startswith("/slots/")]
        await take_turns(lane, 6)
        assert mode(lane) == "hard" and actions(lane.runtime, "restore")
        failed = [e for e in actions(lane.runtime, "save") if e.status == 501]
        assert not failed, "a slot with an image in it was to be saved"


async def grow(lane: Lane, turns: int, began: int = 0) -> None:
    """A conversation that grows, a few seconds between its turns."""
    for turn in range(began, began + turns):
        await chat(lane, text(5, 400 + 20 * turn), max_tokens=2)
        await trio.sleep(8)


def last_call(lane: Lane) -> Entry:
    return ours(lane)[-1]


@pytest.mark.parametrize(("load_s", "wait_s", "restored"), [
    (0.0, 0.0, True), (0.0, 15.0, True), (1.0, 15.0, True),
    (1.0, 0.0, False),  # it comes while the model loads, is counted by estimate, and promised nothing
])
async def test_case_56_after_a_restart_nothing_is_relied_on_and_what_was_saved_is_offered(
        tmp_path: Path, autojump_clock: trio.abc.Clock, load_s: float, wait_s: float, restored: bool) -> None:
    async with same_model(), open_hard(tmp_path, prefill_rate=500.0) as lane:
        await grow(lane, 3)
        assert actions(lane.runtime, "save") and mode(lane) == "hard"
        lane.runtime.restart(load_s=load_s)
        at = trio.current_time()
        await trio.sleep(wait_s)
        await grow(lane, 1, began=3)
        assert mode(lane) == "hard" and last_call(lane).status == 200
        restores = [e for e in actions(lane.runtime, "restore") if e.received_at >= at and identity_of(lane)
                    in e.request.json["filename"]]
        assert bool(restores) == restored
        if not load_s and not wait_s:  # seen by the request itself, before the watcher looked
            assert count(lane, "inject_slots_lost_total", why="restart") == 1
        assert count(lane, "inject_slots_lost_total", why="missed") == count(lane, "restore_ineffective_total") == 0
        assert (last_call(lane).jobs[0].cached > 350) == restored
        await grow(lane, 1, began=4)
        assert last_call(lane).jobs[0].cached > 350
        check_wire(lane.runtime)


async def test_case_56_what_was_planned_for_the_process_before_is_planned_again(
        tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """It restarts in the instant in which a request, which is to find its prompt in its slot, gets there."""
    async with same_model(), open_hard(tmp_path, prefill_rate=500.0) as lane:
        await grow(lane, 3)

        def restarts(request: FakeRequest) -> bool:
            if request.path != CHAT:
                return False
            lane.runtime.restart()
            return True

        loading = b'{"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}'
        lane.runtime.script(Script(status=503, script=[(0, loading)]), when=restarts)
        await grow(lane, 1, began=3)
        assert count(lane, "inject_slots_lost_total", why="missed") == count(lane, "restore_ineffective_total") == 0
        assert last_call(lane).status == 200 and last_call(lane).jobs[0].cached > 350
        check_wire(lane.runtime)


async def test_case_56_a_swapped_model_gets_nothing_of_the_other_ones(
        tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    async with same_model(), open_hard(tmp_path, prefill_rate=500.0) as lane:
        await grow(lane, 3)
        identity = identity_of(lane)
        lane.runtime.config.model, lane.runtime.config.model_path = "another", "/models/another.gguf"
        lane.runtime.restart()
        at = trio.current_time()
        await grow(lane, 3, began=3)
        assert identity_of(lane) != identity
        named = [e.request.json["filename"] for e in actions(lane.runtime, "restore") if e.received_at >= at]
        assert not any(identity in name for name in named), named
        assert count(lane, "inject_slots_lost_total", why="missed") == count(lane, "restore_ineffective_total") == 0
        check_wire(lane.runtime)


async def test_case_56_after_sleep_nothing_is_relied_on_and_what_was_saved_is_offered(
        tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    async with same_model(), open_hard(tmp_path, prefill_rate=500.0, sleep_idle_s=20.0, wake_s=1.0) as lane:
        await grow(lane, 3)
        await trio.sleep(100)
        assert lane.runtime.engine.asleep, "somebody keeps it awake"
        await grow(lane, 1, began=3)
        assert lane.runtime.sleeps == 1 and mode(lane) == "hard"
        assert count(lane, "inject_slots_lost_total", why="sleep") >= 1
        assert count(lane, "inject_slots_lost_total", why="missed") == count(lane, "restore_ineffective_total") == 0
        assert last_call(lane).jobs[0].cached > 350
        check_wire(lane.runtime)


async def test_a_stranger_makes_it_soft_and_when_he_is_gone_it_is_hard_again(
        tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    async with open_hard(tmp_path, decode_rate=20.0, answer_tokens=None) as lane, trio.open_nursery() as nursery:
        assert mode(lane) == "hard"

        async def stranger() -> None:
            body = b'{"prompt": "hello", "n_predict": 600, "stream": true}'
            async with lane.upstream.open(HttpCall("POST", "/completion", body=body)) as response:
                while await response.receive():
                    pass

        nursery.start_soon(stranger)
        await trio.sleep(3)
        await chat(lane, text(1, 50), max_tokens=300)
        assert mode(lane) == "soft" and "somebody else" in status(lane)["why"]
        before = len(ours(lane))
        await chat(lane, text(1, 60), max_tokens=4)
        assert slot_of(ours(lane)[before]) is None
        with trio.fail_after(200):
            while mode(lane) != "hard":
                await trio.sleep(1)
        assert trio.current_time() >= 30 + QUIET_S - 10  # an idle lane looks every ten seconds
        await chat(lane, text(1, 70), max_tokens=4)
        assert slot_of(last_call(lane)) is not None
        check_wire(lane.runtime)


async def test_alone_it_never_takes_itself_for_a_stranger(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """Clients that leave, choices side by side, streams that end while somebody looks."""
    told = hard(tmp_path, health_interval_s=1.0)
    async with open_hard(tmp_path, told, slots=3, decode_rate=50.0, busy_after_close=1.5) as lane:
        async with trio.open_nursery() as nursery:
            async def one(seed: int) -> None:
                rng = random.Random(seed)
                for turn in range(12):
                    with trio.move_on_after(rng.choice([0.3, 1.0, 1000.0])):
                        more = {"n": 2} if rng.random() < 0.2 else {}
                        await chat(lane, text(seed, 30 + turn), max_tokens=rng.choice([4, 60]), **more)
                    await trio.sleep(rng.random())

            for seed in range(8):
                nursery.start_soon(one, seed)
        assert mode(lane) == "hard" and count(lane, "inject_slots_lost_total", why="foreign") == 0
        check_wire(lane.runtime)


async def test_the_servers_counters_and_ours_agree(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """Prompt tokens, computed and cached: of the check, of prompts read before they are answered, of turns."""
    async with open_hard(tmp_path, slots=2, prefill_rate=500.0) as lane:
        await grow(lane, 3)
        async with trio.open_nursery() as nursery:
            for i in range(3):
                nursery.start_soon(chat, lane, text(9, 500) + f" {i}")
        await trio.sleep(20)
        totals = lane.runtime.engine.totals
        for part, name in (("computed", "prompt"), ("cached", "cached")):
            assert count(lane, "runtime_prompt_tokens_total", part=part, source="reported") == totals[name] > 0, part
        assert count(lane, "inject_admissions_total", how="forked") >= 1
        hows = ("reused", "restored", "forked", "cold", "unpinned")
        assert sum(count(lane, "inject_admissions_total", how=how) for how in hows) == 6


async def test_metrics_and_status_of_a_request_that_gave_way(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    async with open_one(tmp_path) as lane:
        def value(name: str, **labels: str) -> float:
            return lane.metrics.registry.get_sample_value(f"kvstream_{name}", {"backend": "default", **labels}) or 0.0

        call = lane.start(body_of(CHAT, max_tokens=60), CHAT, LOW)
        await until_tokens(lane, 5)
        urgent = lane.start(one_chat("now", max_tokens=50), headers=HIGH)
        await trio.sleep(0.2)
        assert (value("preemptions_total", how="swap"), value("swapped_out")) == (1, 1)
        inject = (await lane.status())["inject"]
        assert inject["mode"] == "hard" and inject["store"]["files"] == 1
        assert [slot["state"] for slot in inject["slots"]] == ["owned"]
        await urgent.ended.wait()
        await call.ended.wait()
        assert (value("preempted_resumed_total"), value("swapped_out")) == (1, 0)
        assert value("inject_saves_total", why="swap", outcome="ok") == 1
