"""Whether a lane lets a request in, and how its backend looks to one that stands before it."""

from __future__ import annotations

import trio

from ..adapters.base import Health
from ..core.breaker import Circuit
from ..errors import BackendLoadingError, BackendUnavailableError
from .guard import Guard
from .health import BackendWatcher
from .lane_settings import EngineSettings


class Door:
    """See the module."""

    def __init__(self, watcher: BackendWatcher, guard: Guard) -> None:
        self._watcher = watcher
        self._guard = guard

    async def check_open(self, settings: EngineSettings, *, hold: bool) -> None:
        """Wait until it is known whether the backend is there. Without ``hold`` one that may return is not waited for.

        *Errors*: ``BackendUnavailableError``, ``BackendLoadingError``. *Cancellation*: safe.
        """
        if self._watcher.backend.state == "starting":
            with trio.move_on_after(settings.wait_s_max):
                await self._watcher.wait_known()
        backend = self._watcher.backend
        if backend.state == Health.DOWN and not (hold and self._watcher.may_return(settings.down_grace_s)):
            raise BackendUnavailableError(f"the backend is not there: {backend.detail}", retry_after_s=2)
        if backend.state == "failed":
            raise BackendLoadingError(f"the backend does not serve: {backend.detail}", retry_after_s=10)

    @property
    def state(self) -> str:
        """The watcher's state, or ``breaker_open``, ``wedged`` and ``half_open`` while the breaker stands before a
        backend that is up."""
        state, circuit = self._watcher.backend.state, self._guard.circuit
        if state not in (Health.UP, Health.SLEEPING) or circuit is Circuit.CLOSED:
            return state
        if circuit is Circuit.HALF_OPEN:
            return "half_open"
        return "wedged" if self._guard.wedged else "breaker_open"

    @property
    def backend_state(self) -> str:
        """The watcher's state, or ``wedged``."""
        state = self._watcher.backend.state
        return "wedged" if self._guard.wedged and state in (Health.UP, Health.SLEEPING) else state
