"""``kvstream`` from its sources, for test_unit.py: SIGUSR1 makes the scheduler's step never return, SIGUSR2 ends the
tick silently while everything else goes on."""

from __future__ import annotations

import signal
import time
from typing import Any

import trio

from kvstream.cli import main
from kvstream.core.scheduler import Scheduler
from kvstream.gateway.engine import Engine

tick = Engine._tick


def step(*_args: Any) -> None:
    time.sleep(1000)


async def mortal_tick(self: Engine) -> None:
    token = trio.lowlevel.current_trio_token()
    with trio.CancelScope() as scope:
        signal.signal(signal.SIGUSR2, lambda *_: token.run_sync_soon(scope.cancel))
        await tick(self)
    await trio.sleep_forever()


signal.signal(signal.SIGUSR1, lambda *_: setattr(Scheduler, "step", step))
Engine._tick = mortal_tick  # type: ignore[method-assign]
main(prog_name="kvstream")
