"""The lanes of a process: opened from the configuration, closed when it no longer has them.

::

    Lanes.nursery
    └─ per lane: HttpUpstream (its pool)
       └─ nursery: engine.run · its kept model list

A lane that is *retired* takes nothing new and is no longer routed to; its streams go on to their ends, those that wait
are still served, and then it is gone. Each lane's task ends its engine before the pool that it stands on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import trio
from attrs import define, field

from ..config import BackendConfig, Config
from .engine import Engine
from .metrics import Metrics
from .names import Names
from .router import Lane
from .settings import engine_settings, make_adapter
from .upstream import HttpUpstream

log = logging.getLogger("kvstream.lanes")


def names_of(backend: BackendConfig) -> Names:
    """What the router is told of a backend's models."""
    return Names(backend.models, backend.alias_table, backend.rewrite_model)


@define(eq=False)
class OpenLane:
    """A lane that runs. ``retired`` tells its task to end when its last request is done."""

    lane: Lane
    retired: trio.Event = field(factory=trio.Event)


class Lanes:
    """See the module. ``hop`` is this process's id in the headers of its calls."""

    def __init__(self, nursery: trio.Nursery, metrics: Metrics, hop: str) -> None:
        self._nursery = nursery
        self._metrics = metrics
        self._hop = hop
        self._open: list[OpenLane] = []

    @property
    def all(self) -> tuple[Lane, ...]:
        """Also those that were retired and still have streams."""
        return tuple(each.lane for each in self._open)

    @property
    def serving(self) -> Mapping[str, OpenLane]:
        """Those that are not retired, by name."""
        return {each.lane.name: each for each in self._open if not each.retired.is_set()}

    @property
    def retiring(self) -> tuple[Lane, ...]:
        """Those that only finish what they have."""
        return tuple(each.lane for each in self._open if each.retired.is_set())

    async def open(self, config: Config, backend: BackendConfig, *, base_url: str = "",
                   restarts: bool = False) -> OpenLane:
        """A lane for ``backend``, which may be down. ``restarts``: whoever started it also starts it again.

        *Errors*: ``ConfigError`` where the backend has no address.
        """
        opened: OpenLane = await self._nursery.start(
            self._run, config.of_backend(backend), base_url or backend.url, restarts)
        return opened

    async def adopt(self, engine: Engine, config: Config) -> OpenLane:
        """A lane for an engine that somebody else runs."""
        opened = OpenLane(Lane(engine, names_of(config.backend)))
        self._open.append(opened)
        self._nursery.start_soon(opened.lane.listed.run)
        return opened

    async def _run(self, config: Config, base_url: str, restarts: bool, *,
                   task_status: trio.TaskStatus[OpenLane]) -> None:
        adapter, backend = make_adapter(config, base_url), config.backend
        async with HttpUpstream(adapter.base_url, connect_s=config.upstream.connect_s,
                                keepalive_expiry_s=config.upstream.keepalive_expiry_s, hop=self._hop) as upstream:
            engine = Engine(adapter, upstream, engine_settings(config), self._metrics, name=backend.name)
            if restarts:
                engine.watcher.expect_restart = lambda: True
            opened = OpenLane(Lane(engine, names_of(backend)))
            self._open.append(opened)
            self._metrics.watch(engine)
            try:
                async with trio.open_nursery() as nursery:
                    await nursery.start(engine.run)
                    nursery.start_soon(opened.lane.listed.run)
                    task_status.started(opened)
                    await opened.retired.wait()
                    await engine.wait_idle()
                    await engine.inject.wait_saved()
                    log.info("backend %s: its last request is done; closed", backend.name)
                    nursery.cancel_scope.cancel()
            finally:
                self._open.remove(opened)
                if not opened.retired.is_set():
                    self._metrics.unwatch(engine)

    def retire(self, opened: OpenLane) -> None:
        """Let a lane finish what it has, and close it then. It refuses newcomers from now on."""
        self._metrics.unwatch(opened.lane.engine)
        opened.lane.engine.close(refuse_waiting=False)
        opened.retired.set()
