"""Every feature at once, in bad weather: clients with keys that come, leave, hang and retry; backends that die,
restart, wedge, flap, are busy and break off; a configuration that changes meanwhile. See ``storm`` for what must hold.

One seed decides everything, so a failure is replayed by its number: ``STORM_SEED=17 pytest tests/sim/test_storm.py``.
The number of seeds is ``STORM_RUNS`` (``just storm`` sets it high).
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import trio

from tests.sim import storm as s

FIRST = int(os.environ.get("STORM_SEED", "0"))
RUNS = int(os.environ.get("STORM_RUNS", "1" if FIRST else "14"))
CLIENTS = 50


@pytest.mark.parametrize("seed", range(FIRST, FIRST + RUNS))
async def test_storm(seed: int, autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                     caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvstream")
    async with s.open_storm(seed, monkeypatch, tmp_path) as world:
        async with trio.open_nursery() as weather:
            async with trio.open_nursery() as clients:
                for runtime in world.runtimes.values():
                    weather.start_soon(s.befall, world, runtime)
                weather.start_soon(s.reload, world)
                if seed % 4 == 3:
                    weather.start_soon(s.drain, world)
                else:
                    weather.start_soon(s.look, world)
                for _ in range(CLIENTS):
                    clients.start_soon(s.client, world)
            world.ended = True
        await (trio.sleep(s.WAIT_S_MAX) if seed % 4 == 3 else s.calm(world))
        s.settle_accounts(world)
    bugs = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not [record.getMessage() + str(record.exc_text or "") for record in bugs]
    print(seed, dict(world.outcomes), flush=True)
