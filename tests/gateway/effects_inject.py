"""The effects of the keys of [inject]. Imported, and so collected, by ``test_config_effects``.

To add one: write it here with ``@effect``, and its name into ``__all__``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import trio

from kvstream.adapters.llamacpp import LlamaCppBackend
from kvstream.core import messages as m
from kvstream.core.scheduler import Scheduler
from kvstream.core.types import EndReason, Limits, PoolMode, RequestId, SlotPlan, SlotRules
from kvstream.errors import StoreError
from kvstream.gateway.metrics import Metrics
from kvstream.gateway.settings import embedded_spec, engine_settings
from kvstream.gateway.slot_ports import SlotsFound
from kvstream.gateway.verify import SlotVerify
from tests.fakes import FakeUpstream, open_runtime
from tests.gateway.effects import effect, inject_config
from tests.gateway.hardlane import actions, hard, open_hard
from tests.gateway.lane import chat
from tests.gateway.test_kvstore import ids_of, kv_file, save, spec_of, store_at
from tests.play import submit

__all__ = [
    "test_a_prompt_that_takes_longer_is_read_first",
    "test_fewer_tokens_are_not_saved",
    "test_a_save_that_is_slower_stops_saving",
    "test_hard_inject_is_off_when_asked",
    "test_saved_files_are_looked_for_there",
    "test_so_many_bytes_of_saved_kv_are_kept",
    "test_so_many_names_are_used_where_files_cannot_be_seen",
    "test_so_many_restores_without_effect_switch_it_off",
    "test_what_slots_hold_is_saved_within_so_long_when_it_stops",
]


def told(**keys: Any) -> dict[str, Any]:
    """What the store is told."""
    inject = engine_settings(inject_config(**keys)).inject
    assert inject is not None
    return {name: getattr(inject, name) for name in ("disk_bytes_max", "files_max", "slow_save_s")}


@effect("inject.mode")
def test_hard_inject_is_off_when_asked() -> None:
    assert engine_settings(inject_config(mode="off")).inject is None
    assert engine_settings(inject_config()).inject is not None


@effect("inject.dir")
def test_saved_files_are_looked_for_there() -> None:
    inject = engine_settings(inject_config(dir="/somewhere")).inject
    assert inject is not None and inject.dir == "/somewhere"


@effect("inject.disk_bytes_max")
async def test_so_many_bytes_of_saved_kv_are_kept(tmp_path: Path) -> None:
    size = len(kv_file(ids_of(1)))
    store = store_at(tmp_path, **told(disk_bytes_max=2 * size))
    await store.load()
    await save(store, tmp_path, ids_of(1))
    await save(store, tmp_path, ids_of(2))
    with pytest.raises(StoreError, match="disk_bytes_max"):
        await save(store, tmp_path, ids_of(3))
    store.close()
    assert embedded_spec(inject_config(disk_bytes_max=2 * size)).slot_bytes_max == 2 * size


@effect("inject.files_max")
async def test_so_many_names_are_used_where_files_cannot_be_seen(tmp_path: Path) -> None:
    from kvstream.adapters.slot_calls import SlotDone

    store = store_at(None, tmp_path, **told(files_max=3))
    await store.load()
    names = set()
    for n in range(8):
        spec = spec_of(ids_of(n))
        names.add(store.temporary(spec.name))
        await store.keep(spec, SlotDone(0, 100, 1000))
    assert len(names) == 3
    store.close()


def planned(*tokens: int, **keys: Any) -> list[SlotPlan]:
    """What is planned for cold prompts of so many tokens, one after the other on one slot that reads 1,000 a second."""
    scheduler = Scheduler(engine_settings(inject_config(**keys)).scheduler)
    limits = Limits(PoolMode.SPLIT, seats=1, pages=256, page_tokens=16, request_tokens_max=4096, host_pages=4096)
    scheduler.step(0.0, [m.BackendUp(limits), m.SlotsKnown(SlotRules(1, identity="ab", token_bytes=1.0)),
                         m.CacheSeen(RequestId(99), 0, 1000, 1.0)])
    plans = []
    for rid, length in enumerate(tokens):
        for action in scheduler.step(0.0, [submit(rid, length, pinnable=True, exact=True)]):
            if isinstance(action, m.Admit) and action.plan is not None:
                plans.append(action.plan)
        scheduler.step(0.0, [m.SlotStarted(RequestId(rid)), m.Produced(RequestId(rid), 1),
                             m.Ended(RequestId(rid), EndReason.FINISHED)])
    return plans


@effect("inject.read_first_s")
def test_a_prompt_that_takes_longer_is_read_first() -> None:
    assert [plan.read_first for plan in planned(800, 1200, read_first_s=1.0)] == [False, True]
    assert [plan.read_first for plan in planned(800, 1200, read_first_s=2.0)] == [False, False]


@effect("inject.save_tokens_min")
def test_fewer_tokens_are_not_saved() -> None:
    assert [plan.save is not None for plan in planned(300, 200, 300, save_tokens_min=250)] == [False, True, False]
    assert [plan.save is not None for plan in planned(300, 200, 300, save_tokens_min=150)] == [False, True, True]


@effect("inject.slow_save_s")
async def test_a_save_that_is_slower_stops_saving(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    store = store_at(tmp_path, **told(slow_save_s=0.5))
    await store.load()
    await save(store, tmp_path, ids_of(1), seconds=0.4)
    assert store.saving
    await save(store, tmp_path, ids_of(2), seconds=0.6)
    assert not store.saving and store.view().files == 2
    store.close()


@effect("inject.misses_max")
async def test_so_many_restores_without_effect_switch_it_off() -> None:
    inject = engine_settings(inject_config(misses_max=2)).inject
    assert inject is not None
    adapter = LlamaCppBackend("http://fake")
    async with open_runtime() as runtime:
        verify = SlotVerify(adapter, FakeUpstream(runtime), inject, Metrics().inject.lane("one"))
        verify.enter(SlotsFound("hard", SlotRules(4)))
        verdicts = [verify.seen("restored", promised=1000, cached=0) for _ in range(2)]
    assert verdicts == [None, m.SlotsKnown(None)] and verify.found.mode == "soft"


@effect("inject.drain_save_s")
async def test_what_slots_hold_is_saved_within_so_long_when_it_stops(
    tmp_path: Path, autojump_clock: trio.abc.Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Two prompts are worth a file, a save takes 3 s: within 7 s both are saved, within 4 s one, within none none."""
    caplog.set_level(logging.INFO, logger="kvstream")
    words = {2: "2 slots were saved, ", 1: "1 slot was saved, ",
             0: "what the slots hold is not saved: inject.drain_save_s = 0 s are over"}
    for index, (allowed, saved) in enumerate(((7.0, 2), (4.0, 1), (0.0, 0))):
        inject = engine_settings(inject_config(drain_save_s=allowed)).inject
        assert inject is not None and inject.drain_save_s == allowed
        (folder := tmp_path / str(index)).mkdir()
        told = hard(folder, inject={"drain_save_s": inject.drain_save_s, "slow_save_s": 60.0})
        async with open_hard(folder, told, prefill_rate=20.0) as lane:
            for word in ("alpha ", "beta "):
                await chat(lane, word * 300, max_tokens=4)
            lane.runtime.config.save_s = 3.0
            began, before = trio.current_time(), len(actions(lane.runtime, "save"))
            lane.engine.close(refuse_waiting=True)
            await lane.engine.inject.wait_saved()
            assert trio.current_time() - began <= allowed + 0.1
            ended = [entry for entry in actions(lane.runtime, "save")[before:] if entry.outcome == "done"]
            assert len(ended) == saved
            assert words[saved] in caplog.messages[-1]

