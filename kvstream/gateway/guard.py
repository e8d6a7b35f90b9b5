"""The guard of a lane: stops sending requests to a backend that fails or hangs, and tries it again.

Theory of operation. Every end of a request passes here before its seat returns, so the step that frees the seat also
knows whether the door is still open: between a trial that failed and the next request there is no gap. The breaker
(``core.breaker``) decides, the scheduler is told how many it may admit (``Narrowed``), the queue waits meanwhile.

What counts against a backend is its own doing: refused and reset connections, truncated streams, silence before the
first event or in mid-answer, a 5xx or an error frame that it has no excuse for. Not: what is wrong with a request, what
a client or its reader did, "busy" and "loading" (they pass by themselves), an answer that is not what the API promises
(the wrong thing listens there; a pause mends nothing), and a full unified pool (it is the sum of requests that were
each in order).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio

from ..core.breaker import Breaker, Circuit
from ..core.messages import Event, Narrowed
from ..errors import (
    BackendTimeoutError,
    BackendUnavailableError,
    BackendWedgedError,
    KVStreamError,
    StreamTruncatedError,
    TotalTimeoutError,
    UpstreamFailedError,
)
from .lane_settings import EngineSettings
from .logs import backend_logger
from .stream import Stream

OPEN_S_MAX = 60.0
ASK_AGAIN_S = 1.0
FLOW_S = 5.0  # a trial whose tokens flow for so long need not come to its end


def is_backend_fault(stream: Stream, error: KVStreamError | None) -> bool:
    """Whether a request failed by the backend's own doing."""
    if error is None or stream.left or stream.cut is not None or stream.truncated:
        return False
    if isinstance(error, BackendUnavailableError):
        return stream.sent  # else it only waited for a backend that then went away
    if isinstance(error, BackendTimeoutError):
        return not isinstance(error, TotalTimeoutError)
    if isinstance(error, UpstreamFailedError):
        return "context size has been exceeded" not in error.message.lower()
    return isinstance(error, StreamTruncatedError)


class Guard:
    """See the module. ``post`` hands an event to the scheduler."""

    def __init__(self, settings: EngineSettings, post: Callable[[Event], None], name: str = "") -> None:
        self._log = backend_logger(name)
        self._breaker = Breaker(settings.breaker_faults, settings.breaker_open_s, OPEN_S_MAX)
        self._post = post
        self._changed = trio.Event()
        self.last_progress = float("-inf")  # when data of any answer last came, or work was seen otherwise
        self.wedged = False  # since the last opening

    # --- what the engine reports --------------------------------------------------------------------------------------

    def admitted(self, stream: Stream) -> None:
        self._breaker.admitted(stream.rid)

    def progress(self, stream: Stream) -> None:
        """Data of an answer came."""
        now = self.last_progress = trio.current_time()
        if self._breaker.trial != stream.rid or stream.first_token is None:
            return
        if (self.wedged or now - stream.first_token >= FLOW_S) and self._breaker.success(stream.rid):
            self._tell()

    def ended(self, stream: Stream, error: KVStreamError | None, *, known_down: bool) -> None:
        """A request that had been admitted is over. To be called before its seat returns. An outage that is
        ``known_down`` counts once, however many requests met it."""
        if is_backend_fault(stream, error) and not known_down:
            assert error is not None
            changed = self._breaker.fault(stream.rid, trio.current_time(), error.code)
        elif stream.completed and error is None:
            changed = self._breaker.success(stream.rid)
        else:
            self._breaker.undecided(stream.rid)
            return
        if changed:
            self._tell()

    def backend_returned(self) -> None:
        """The backend was away and is back: what it did before says little, so the rest of a pause is not waited."""
        if self._breaker.allow_trial():
            self._tell()

    def wedge(self, now: float) -> None:
        """The backend computes nothing. It gets its trial when, after the pause, its health route answers; the first
        token of that closes the breaker again."""
        self.wedged = True
        if self._breaker.trip(now, BackendWedgedError.code):
            self._tell()

    # --- what others may see ------------------------------------------------------------------------------------------

    @property
    def circuit(self) -> Circuit:
        return self._breaker.state

    def status(self, now: float) -> dict[str, Any]:
        """For ``/status``: the state, why it was last opened, and how long it stays so (seconds)."""
        breaker = self._breaker
        left = round(max(0.0, breaker.until - now), 3) if breaker.state is Circuit.OPEN else None
        return {"state": breaker.state.value, "faults": breaker.faults, "why": breaker.why or None,
                "opened": breaker.opened, "open_for_s": left, "wedged": self.wedged}

    # --- tasks --------------------------------------------------------------------------------------------------------

    async def run(self, answers: Callable[[], Awaitable[bool]]) -> None:
        """Task body: give an open breaker its trial when the pause is over; a wedged backend must also say that it is
        well: ``answers`` asks it."""
        while True:
            with trio.move_on_at(self._breaker.until):
                await self._changed.wait()
            self._changed = trio.Event()
            if trio.current_time() >= self._breaker.until and self.wedged and not await answers():
                await trio.sleep(ASK_AGAIN_S)
                continue
            if self._breaker.tick(trio.current_time()):
                self._tell()

    def _tell(self) -> None:
        breaker = self._breaker
        if breaker.state is Circuit.OPEN:
            self._log.warning("backend: no more requests for %.1f s (%s)", breaker.until - trio.current_time(),
                              breaker.why)
        elif breaker.state is Circuit.HALF_OPEN:
            self._log.info("backend: one request is let through to try it")
        else:
            self.wedged = False
            self._log.info("backend: serves again")
        self._post(Narrowed(breaker.seats))
        self._changed.set()
