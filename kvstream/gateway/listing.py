"""What the backends say they serve: a kept list per lane, and all of them as one ``/v1/models``.

A list is read when its backend comes up, when somebody asks for ``/v1/models``, and when a client names a model that
nobody is known to serve. The last good one is kept, so a busy, restarting or dead backend does not hide its models, and
nobody waits for it longer than ``LIST_S_MAX``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from ..adapters.base import Health
from ..errors import BackendUnavailableError, KVStreamError, ModelNotFoundError
from .failures import error_of
from .names import LATEST, ModelList, listing_of

if TYPE_CHECKING:
    from .engine import Engine
    from .router import Lane

LIST_S_MAX = 0.7  # for an answer of ours; the request itself may go on a little, for the next one
FETCH_S_MAX = 5.0
FRESH_S = 2.0


class KeptList:
    """The list of one backend. ``run`` is its task; without it the list stays unknown."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.known: ModelList | None = None
        self.error: KVStreamError | None = None
        self._asked_at = float("-inf")
        self._wanted = trio.Event()
        self._done = trio.Event()

    async def run(self) -> None:
        """Task body: fetch whenever the backend comes up or somebody wants it; for ever."""
        watcher, was_up = self._engine.watcher, False
        while True:
            is_up = watcher.backend.state == Health.UP
            if (is_up and not was_up) or self._wanted.is_set():
                self._wanted = trio.Event()
                await self._fetch()
            was_up = is_up
            async with trio.open_nursery() as nursery:
                for wait in (watcher.wait_change, self._wanted.wait):
                    nursery.start_soon(_first, wait, nursery.cancel_scope)

    async def fetch(self, within_s: float, *, older_s: float = 0.0) -> None:
        """Wait for a list that is at most ``older_s`` old, for ``within_s`` at most. *Errors*: none."""
        if trio.current_time() - self._asked_at <= older_s:
            return
        self._wanted.set()
        with trio.move_on_after(within_s):
            await self._done.wait()

    async def _fetch(self) -> None:
        adapter = self._engine.adapter
        self._asked_at = trio.current_time()
        try:
            answer = await self._engine.upstream.request(adapter.models(), timeout_s=FETCH_S_MAX)
            if answer.status >= 400:
                raise error_of(adapter.error(answer))
            known = ModelList.read(adapter.read_models(answer))
            if known is None:
                raise BackendUnavailableError("the backend's model list cannot be read")
            self.known, self.error = known, None
        except KVStreamError as error:
            self.error = error
        done, self._done = self._done, trio.Event()
        done.set()


async def _first(wait: Any, scope: trio.CancelScope) -> None:
    await wait()
    scope.cancel()


async def refresh(lanes: Sequence[Lane], within_s: float, *, older_s: float = 0.0) -> None:
    """Ask all at the same time."""
    async with trio.open_nursery() as nursery:
        for lane in lanes:
            nursery.start_soon(partial(lane.listed.fetch, within_s, older_s=older_s))


async def model_listing(lanes: Sequence[Lane]) -> dict[str, Any]:
    """One ``/v1/models`` for all: a model that several serve is there once, the first lane's entry.

    *Errors*: the first lane's, when nobody's models are known.
    """
    await refresh(lanes, LIST_S_MAX)
    knowing = [lane for lane in lanes if lane.listed.known is not None or lane.names.models or lane.names.aliases]
    if not knowing:
        errors = [lane.listed.error for lane in lanes if lane.listed.error is not None]
        raise errors[0] if errors else BackendUnavailableError("no backend has told its models yet", retry_after_s=2)
    only = knowing[0]
    if len(lanes) == 1 and only.listed.known is not None and not (only.names.models or only.names.aliases):
        return dict(only.listed.known.whole)  # also what is no part of the OpenAI API, as it came
    entries: dict[str, dict[str, Any]] = {}
    for lane in knowing:
        for entry in listing_of(lane.names, lane.listed.known):
            entries.setdefault(entry["id"], entry)
    return {"object": "list", "data": list(entries.values())}


async def model_entry(lanes: Sequence[Lane], model: str) -> dict[str, Any]:
    """The entry of one model, under any of its names. *Errors*: ``ModelNotFoundError``."""
    entries = [e for e in (await model_listing(lanes))["data"] if isinstance(e, dict)]
    targets = {lane.target(model) for lane in lanes}
    for names in ({model}, {model + LATEST}, targets):
        for entry in entries:
            if any(isinstance(n, str) and n in names for n in (entry.get("id"), *(entry.get("aliases") or ()))):
                return entry
    raise ModelNotFoundError(f"no backend has a model {model[:200]!r}; see GET /v1/models", param="model")
