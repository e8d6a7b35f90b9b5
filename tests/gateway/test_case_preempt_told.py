"""Case 40: what an operator sees of a request that gives way: in /status while it waits, and in the log."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.gateway.conftest import CHAT, chat
from tests.gateway.parklane import HIGH, LOW, body_of, check, open_one, until_tokens


async def test_case_40_a_request_that_gives_way_is_told_by_name(
    autojump_clock: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvstream")
    async with open_one(tmp_path) as lane:
        call = lane.start(body_of(CHAT, max_tokens=20), CHAT, LOW)
        await until_tokens(lane, 5)
        urgent = lane.start(chat("now", max_tokens=30), headers=HIGH)
        await trio.sleep(0.15)
        told = json.loads((await lane.get("/status")).body)["lanes"][0]
        (row,) = told["queue"]["requests"]
        assert row["why"] == "preempted" and row["produced"] >= 5
        assert told["inject"]["totals"]["swapped_out"] == 1
        assert told["inject"]["totals"]["preemptions"] == {"swap": 1, "recompute": 0}
        assert told["inject"]["slots"][0]["tokens"] > 0
        await urgent.ended.wait()
        await call.ended.wait()
        await check(lane)
        lines = {record.fields["id"]: record.fields for record in caplog.records  # type: ignore[attr-defined]
                 if record.name == "kvstream.request"}
        victim, evictor = lines.pop(row["id"]), next(iter(lines.values()))
        said = [record.getMessage() for record in caplog.records if record.name == "kvstream.preempt"]
        assert said[0].startswith(f"{row['id']} gives way to {evictor['id']} after ") and said[0].endswith("(swap)")
        assert said[1].startswith(f"{row['id']} goes on after 0.") and len(said) == 2
        assert (victim["prompt_from"], victim["preempted"]) == ("cold", 1)
        assert 0 < victim["stood_ms"] <= victim["total_ms"] and victim["queue_ms"] < victim["stood_ms"]
        assert (evictor["prompt_from"], evictor["preempted"], evictor["stood_ms"]) == ("cold", None, None)
