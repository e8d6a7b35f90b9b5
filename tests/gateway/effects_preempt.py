"""The effects of the keys of preemption. Imported, and so collected, by ``test_config_effects``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from tests.gateway.conftest import CHAT, chat
from tests.gateway.effects import effect
from tests.gateway.parklane import HIGH, LOW, body_of, gave_way, open_one, until_tokens


@effect("scheduler.preemption_policy")
@pytest.mark.parametrize(("policy", "times", "saves"), [("swap", 1, 1), ("recompute", 1, 0), ("off", 0, 0)])
async def test_how_a_victim_gives_way(
    autojump_clock: Any, tmp_path: Path, policy: str, times: int, saves: int
) -> None:
    async with open_one(tmp_path, scheduler={"preemption_policy": policy}) as lane:
        lane.runtime.journal.entries.clear()
        call = lane.start(body_of(CHAT, max_tokens=30), CHAT, LOW)
        await until_tokens(lane, 5)
        began = trio.current_time()
        await lane.post(chat("now", max_tokens=1), headers=HIGH)
        waited = trio.current_time() - began
        await call.ended.wait()
        assert gave_way(lane) == (times, times) and (waited < 0.2) == (policy != "off")
        queries = [entry.request.query for entry in lane.runtime.journal.entries]
        assert queries.count("action=save") == saves == queries.count("action=restore")


@effect("scheduler.preemptions_max")
@pytest.mark.parametrize("most", [0, 1, 2])
async def test_how_often_it_gives_way(autojump_clock: Any, tmp_path: Path, most: int) -> None:
    async with open_one(tmp_path, scheduler={"preemptions_max": most}) as lane:
        call = lane.start(body_of(CHAT, max_tokens=40), CHAT, LOW)
        for at in (4, 8, 12):
            await until_tokens(lane, at)
            lane.start(chat("now", max_tokens=1), headers=HIGH)
            await trio.sleep(0.1)
        await call.ended.wait()
        assert gave_way(lane) == (most, most)
