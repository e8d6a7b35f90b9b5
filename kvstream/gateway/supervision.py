"""What systemd is told of a gateway, and when.

::

    start    READY=1 once the port is open and, with an embedded llama.cpp, its model is there; until then
             EXTEND_TIMEOUT_USEC while it loads, so that TimeoutStartSec does not have to know how large models are
    always   STATUS= when it is another than before; WATCHDOG=1 twice per WatchdogSec
    reload   RELOADING=1, then READY=1, whatever came of it (STATUS says what is wrong)
    stop     STOPPING=1, and EXTEND_TIMEOUT_USEC by as much as a drain may take

``WATCHDOG=1`` is sent only after the tick of every lane came round once more. A tick that is stuck, a Trio loop that
is, and a process that is stopped all end it, and systemd restarts us. It goes on through the drain, until the process
ends: the task belongs outside the gateway's own nurseries.

For whoever is not started by systemd (the notifier is falsy) nothing here runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

import trio

from .embedded_find import EmbeddedSnapshot
from .notify import Notifier
from .router import Lane
from .stream import Stream

log = logging.getLogger("kvstream.serve")

LOOK_S = 1.0
LOADING_LOOK_S = 0.1
EXTEND_S = 30.0  # said again every LOOK_S
STOP_BEYOND_DRAIN_S = 20.0  # the last frames, the embedded server's end
LOADING = ("starting", "loading")


class WatchedLanes(Protocol):
    """What is to be known of the lanes."""

    @property
    def all(self) -> Sequence[Lane]: ...


class WatchedGateway(Protocol):
    """What is to be known of a gateway."""

    @property
    def lanes(self) -> WatchedLanes: ...
    @property
    def streams(self) -> list[Stream]: ...
    @property
    def refused(self) -> str | None: ...
    def embedded_now(self) -> EmbeddedSnapshot | None: ...
    def drain_s_max(self) -> float: ...


class Supervision:
    """See the module. The other methods may be called at any time, and never wait."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self._gateway: WatchedGateway | None = None
        self._ready = self._stopping = False
        self._status = ""

    async def run(self) -> None:
        """Task body; for ever, unless nobody listens."""
        if not self._notifier:
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look)
            if self._notifier.watchdog_s is not None:
                nursery.start_soon(self._feed, self._notifier.watchdog_s)

    def opened(self, gateway: WatchedGateway) -> None:
        """The port is open."""
        self._gateway = gateway
        self._say()

    def reloading(self, begins: bool) -> None:
        """The configuration is being read again, or that is over."""
        if not self._ready or self._stopping:
            return
        if begins:
            self._notifier.tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}",
                                "STATUS=reading the configuration")
            self._status = ""
        else:
            self._say("READY=1")

    def stopping(self) -> None:
        """A drain begins."""
        self._stopping = True
        more_s = self._gateway.drain_s_max() + STOP_BEYOND_DRAIN_S if self._gateway is not None else EXTEND_S
        self._say("STOPPING=1", f"EXTEND_TIMEOUT_USEC={round(more_s * 1e6)}")

    # --- tasks --------------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        while True:
            extends = () if self._ready or self._stopping else (f"EXTEND_TIMEOUT_USEC={round(EXTEND_S * 1e6)}",)
            self._say(*extends)
            with trio.move_on_after(LOOK_S):
                while not self._ready:
                    await trio.sleep(LOADING_LOOK_S)
                    self._say()
                await trio.sleep_forever()

    async def _feed(self, watchdog_s: float) -> None:
        """Half the time passes between two messages; a lane that is gone while it is asked costs another quarter."""
        stuck = False
        while True:
            with trio.move_on_after(watchdog_s / 4) as waited:
                for lane in self._gateway.lanes.all if self._gateway is not None else ():
                    await lane.engine.pulse.felt()
            if not waited.cancelled_caught:
                stuck = False
                self._notifier.tell("WATCHDOG=1")
                await trio.sleep(watchdog_s / 2)
            elif not stuck:
                stuck = True
                log.error("a scheduler does not come round: systemd is told nothing more until it does")

    # --- what is said -------------------------------------------------------------------------------------------------

    def _say(self, *lines: str) -> None:
        """Send ``lines``, with READY and STATUS if there is news of them."""
        if not (self._ready or self._stopping) and self._is_up():
            self._ready = True
            lines = ("READY=1", *lines)
        status = self._in_words()
        if status != self._status:
            self._status = status
            lines = (*lines, f"STATUS={status}")
        if lines:
            self._notifier.tell(*lines)

    def _is_up(self) -> bool:
        if self._gateway is None:
            return False
        embedded = self._gateway.embedded_now()
        return embedded is None or embedded.state not in LOADING

    def _in_words(self) -> str:
        gateway = self._gateway
        if gateway is None:
            return "starting"
        streams = gateway.streams
        running = sum(stream.lease is not None for stream in streams)
        text = f"{running} running, {len(streams) - running} waiting"
        if self._stopping:
            return f"draining: {text}"
        embedded = gateway.embedded_now()
        if embedded is not None and embedded.state != "up":
            percent = "" if embedded.percent is None else f" {embedded.percent} %"
            text += f"; llama.cpp: {embedded.state}{percent}"
        away = [f"{lane.name} {lane.engine.state}" for lane in gateway.lanes.all if not lane.engine.ready]
        if away:
            text += f"; not ready: {', '.join(away)}"
        if gateway.refused:
            text += f"; the configuration was refused: {gateway.refused}"
        return text
