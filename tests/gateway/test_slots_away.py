"""A runtime that is not there: what its slots are said to be, and what a stop says of what they held."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import trio

from tests.gateway.conftest import metric, open_lane
from tests.gateway.hardlane import hard, open_hard
from tests.gateway.lane import chat

SAVED_NOT = "what the slots hold is not saved: the server is away"


@pytest.mark.parametrize("known", [False, True])
async def test_a_server_that_is_away_is_no_fault_of_the_disk(
    tmp_path: Path, autojump_clock: trio.abc.Clock, caplog: pytest.LogCaptureFixture, known: bool
) -> None:
    """Also where only the saves find that out."""
    caplog.set_level(logging.INFO, logger="kvstream")
    async with open_hard(tmp_path, hard(tmp_path), prefill_rate=20.0) as lane:
        for word in ("alpha ", "beta ", "gamma "):
            await chat(lane, word * 300, max_tokens=4)
        lane.runtime.config.refuse = True
        if known:
            await trio.sleep(10)
        lane.engine.close(refuse_waiting=True)
        await lane.engine.inject.wait_saved()
        assert any(SAVED_NOT in line for line in caplog.messages)
        assert not any("tried again" in line for line in caplog.messages)
        assert metric(lane.metrics, "kvstream_inject_saving", backend=lane.engine.name) == 1


async def test_the_slots_of_a_server_that_never_came_are_unknown(autojump_clock: trio.abc.Clock) -> None:
    async with open_lane(wait=False, knobs={"refuse": True}, inject={"mode": "auto"}) as lane:
        await trio.sleep(1)
        told = json.loads((await lane.get("/status")).body)["lanes"][0]["inject"]
        assert (told["mode"], told["why"]) == ("soft", "unknown: the server is away")


async def test_files_that_somebody_deleted_are_not_counted_for_long(
    tmp_path: Path, autojump_clock: trio.abc.Clock
) -> None:
    """As ``kvstream cache rm`` does."""
    async with open_hard(tmp_path, hard(tmp_path), prefill_rate=20.0) as lane:
        for word in ("alpha ", "beta ", "alpha ", "beta "):
            await chat(lane, word * 300, max_tokens=4)
        await trio.sleep(100)

        def files() -> tuple[int, float]:
            store = lane.engine.scheduler.snapshot(trio.current_time()).store
            assert store is not None
            return store.files, metric(lane.metrics, "kvstream_inject_store_files", backend=lane.engine.name)

        before = files()
        assert before[0] > 0 and before[0] == before[1]
        await trio.sleep(200)
        assert files() == before
        for path in (tmp_path / "slots").iterdir():
            path.unlink()
        await trio.sleep(130)
        assert files() == (0, 0)
        lane.engine.scheduler.check_invariants()
