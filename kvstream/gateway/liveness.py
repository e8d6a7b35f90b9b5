"""Watches whether what runs moves on, and calls a lane wedged when nothing does (see ``core.liveness`` for when).

The evidence is the answers' own data. Where a lane is quiet for long and the runtime shows its slots, it is also asked
whether they move on, since a long prompt or a tool call that is held back until it is whole shows in nothing else. It
is asked seldom: llama.cpp does not notice departed clients while somebody looks at its slots more than once a second.
A lane is never asked while data flows, and an idle one wakes nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import trio

from ..adapters.base import Adapter
from ..adapters.routes import route_of
from ..core.liveness import PrefillRate, Work, wedged_at
from ..core.types import CountSource, RequestId
from ..errors import BackendWedgedError, KVStreamError
from .guard import Guard
from .lane_settings import EngineSettings
from .metrics import Metrics
from .ports import Upstream
from .stream import Stream

log = logging.getLogger("kvstream.backend")

LOOK_S_MIN = 2.0
LOOK_TIMEOUT_S = 3.0


class Liveness:
    """See the module. ``live`` are the engine's streams, read only."""

    def __init__(self, adapter: Adapter, upstream: Upstream, settings: EngineSettings, metrics: Metrics, guard: Guard,
                 live: Mapping[RequestId, Stream]) -> None:
        self._adapter = adapter
        self._upstream = upstream
        self._settings = settings
        self._metrics = metrics
        self._guard = guard
        self._live = live
        self._rate = PrefillRate()
        self._served: str | None = None  # what was loaded for the last request that was served
        self._served_at = float("-inf")
        self._admitted = trio.Event()

    # --- what the engine reports --------------------------------------------------------------------------------------

    def admitted(self) -> None:
        """A request goes to the runtime."""
        self._admitted.set()

    def ended(self, stream: Stream) -> None:
        """Learn from a request that is over."""
        if stream.first_token is None or stream.sent_at is None or stream.lease is None:
            return
        cold, self._served, self._served_at = self._is_cold(stream), self._loaded_for(stream), trio.current_time()
        if stream.said is not None and stream.said.legs:
            return  # its first token was that of another call
        usage = stream.usage
        cached = usage.cached if usage and usage.cached is not None else stream.lease.tokens_cached
        if not (cold or self._is_silent(stream)):
            self._rate.learn((usage.prompt if usage else stream.tokens_prompt) - cached,
                             stream.first_token - stream.sent_at)

    # --- what runs ----------------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[Stream]:
        """Streams that the runtime has, as far as we would see that it does something for them."""
        return [s for s in self._live.values() if s.sent and s.sent_at is not None and not s.completed
                and not s.blocked and s.scope is not None and not s.scope.cancel_called]

    def _work(self, stream: Stream) -> Work:
        assert stream.sent_at is not None
        if self._is_silent(stream):
            return Work(stream.sent_at, None)
        if stream.leg_token is not None:
            return Work(stream.sent_at, 0)
        if self._is_cold(stream):
            return Work(stream.sent_at, None)
        cached = stream.lease.tokens_cached if stream.lease else 0
        return Work(stream.sent_at, max(1, stream.tokens_prompt - cached))

    def _is_silent(self, stream: Stream) -> bool:
        """Whether it is in the nature of this request that nothing is heard for a time that nobody can foretell."""
        request, capabilities = stream.request, self._adapter.capabilities
        route = route_of(request.route)
        if not (route.generates and route.streams) or (self._settings.passthrough and not request.stream):
            return True
        if request.view.get("tools") and not capabilities.slots_visible:
            return True  # several runtimes hold a tool call back until it is whole
        if stream.first_token is not None:
            return False
        if capabilities.exact_count and stream.count_source is CountSource.ESTIMATED:
            return True  # it could not be counted: most likely it has images
        return _has_media(request.view.get("messages"))

    def _is_cold(self, stream: Stream) -> bool:
        """Whether the runtime may have to load something for it first: another model, the same one with other options
        (whether or not those make a group), or one that nobody has used for long and that was put away."""
        if not self._adapter.capabilities.loads_on_demand or stream.sent_at is None:
            return False
        unused_s = stream.sent_at - self._served_at
        return self._loaded_for(stream) != self._served or unused_s >= self._settings.scheduler.cold_after_s

    def _loaded_for(self, stream: Stream) -> str:
        group = stream.asked.group if stream.asked is not None else ""
        return f"{group} {self._adapter.load_options(stream.request)}"

    # --- task ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Task body: for ever."""
        seen: object = None
        while True:
            running = self.running
            if not running or not self._settings.wedged_s:
                self._admitted = trio.Event()
                if not self._live or not self._settings.wedged_s:
                    await self._admitted.wait()
                else:  # admitted, but waiting for a busy or loading runtime, or for its reader
                    await trio.sleep(self._look_s)
                continue
            now = trio.current_time()
            due = self._due(running)
            if now >= due:
                self._declare(running, now)
                await trio.lowlevel.checkpoint()
                continue
            quiet_from = max(self._guard.last_progress, min(s.sent_at or now for s in running)) + self._look_s
            if now < quiet_from < due:
                seen = None  # a baseline is taken in the silence, or what came before it would pass for life
                await trio.sleep_until(quiet_from)
                continue
            seen = await self._look(seen)
            await trio.sleep_until(max(now, min(now + self._look_s, due)))

    @property
    def _look_s(self) -> float:
        return max(LOOK_S_MIN, self._settings.wedged_s / 4)

    def _due(self, running: Sequence[Stream]) -> float:
        return wedged_at([self._work(s) for s in running], self._guard.last_progress, self._rate,
                         wedged_s=self._settings.wedged_s, start_s_max=self._settings.times.first_event_s)

    async def _look(self, seen: object) -> object:
        """Ask the runtime what its slots have done; if that is more than ``seen``, it lives."""
        call = self._adapter.busy()
        if call is None or any(self._settings.passthrough and not s.request.stream for s in self.running):
            return None
        try:
            found = self._adapter.read_work(await self._upstream.request(call, timeout_s=LOOK_TIMEOUT_S))
        except KVStreamError:
            return seen  # busy or hung: that is the question, and this no answer to it
        if found is not None and seen is not None and found != seen:
            self._guard.last_progress = trio.current_time()
        return found

    def _declare(self, running: Sequence[Stream], now: float) -> None:
        quiet_s = now - max(self._guard.last_progress, min(s.sent_at or now for s in running))
        log.warning("backend wedged: %d running, no token and no progress for %.0f s", len(running), quiet_s)
        self._metrics.wedged.inc()
        self._guard.wedge(now)
        error = BackendWedgedError(
            f"the backend computes nothing: no token and no progress with any prompt for {quiet_s:.0f} s "
            f"(upstream.wedged_s = {self._settings.wedged_s:g} s)", retry_after_s=30)
        for stream in running:
            stream.cut_short(error)


def _has_media(messages: Any) -> bool:
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, Mapping) and message.get("images"):
            return True
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            kind = str(part.get("type")) if isinstance(part, Mapping) else ""
            if "image" in kind or "audio" in kind:
                return True
    return False
