"""What a granted request does when the runtime turns it away for now: "loading" and "busy".

Either way nothing of an answer was sent, so nothing is run twice. The request keeps its seat while it waits. A loading
or busy runtime would turn the next request away too, so a returned seat would only send another one to hear the same,
and the queue would be poured through a closed door, each of its requests into a wait of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from ..adapters.base import Health
from ..core.backoff import pause_s
from ..errors import BackendLoadingError, BackendUnavailableError, OverloadError
from .health import LOADING_POLL_S, BackendWatcher
from .lane_settings import EngineSettings
from .metrics import Metrics
from .stream import Stream


class Patience:
    """``chance`` gives random numbers in [0, 1): requests that were turned away together do not come back together."""

    def __init__(self, watcher: BackendWatcher, settings: EngineSettings, metrics: Metrics,
                 chance: Callable[[], float]) -> None:
        self._watcher = watcher
        self._settings = settings
        self._metrics = metrics
        self._chance = chance

    async def loading(self, stream: Stream) -> None:
        """Wait until a backend that said "loading" is up. One bound over all of a request's attempts, and a pause
        before each: a backend may well say "loading" to requests while its health route says that all is well.

        *Errors*: ``BackendUnavailableError``, ``BackendLoadingError`` when it takes too long. *Cancellation*: safe.
        """
        if stream.loading_since is None:
            stream.loading_since = trio.current_time()
        self._watcher.suspect(Health.LOADING, "a request was answered: loading")
        load_s = self._settings.load_timeout_s
        with trio.move_on_at(stream.loading_since + load_s):
            await trio.sleep(LOADING_POLL_S)
            if await self._watcher.wait_up():
                return
            raise BackendUnavailableError(f"the backend went away: {self._watcher.backend.detail}", retry_after_s=5)
        raise BackendLoadingError(
            f"the model was still loading after upstream.load_timeout_s = {load_s:g} s", retry_after_s=10)

    async def busy(self, stream: Stream, refusal: OverloadError, asked_s: float | None) -> None:
        """Pause before a busy backend is asked again; ``asked_s`` is its ``Retry-After``.

        *Errors*: ``OverloadError`` when there is no time for another attempt. *Cancellation*: safe.
        """
        now = trio.current_time()
        if stream.busy_since is None:
            stream.busy_since = now
        limit_s = self._settings.busy_retry_s_max
        left_s = min(stream.busy_since + limit_s, stream.arrived + self._settings.wait_s_max) - now
        if left_s <= 0 or (asked_s or 0.0) > left_s:
            retry_after_s = asked_s if asked_s is not None else max(2.0, now - stream.busy_since)
            tried = f"; tried {stream.busy_retries + 1} times" if stream.busy_retries else ""
            raise OverloadError(f"the backend is busy{tried}: {refusal.message}", retry_after_s=retry_after_s)
        pause = pause_s(stream.busy_retries, self._chance(), retry_after_s=asked_s)
        stream.busy_retries += 1
        self._metrics.busy_retries.inc()
        await trio.sleep(min(pause, left_s))
