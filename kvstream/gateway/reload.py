"""Reading the configuration again while serving: on SIGHUP, and when its file changes.

Theory of operation. The file is looked at every ``LOOK_S`` by ``stat`` of what its name leads to, so a rename, a
swapped symlink and a write in place are all seen, on every platform. It is read once it has not changed for
``SETTLE_S``. A file that cannot be used changes nothing: its problems are logged and shown in ``/status`` until there
is a good one.

``plan_reload`` decides, ``Reloader`` acts. What new requests read is replaced (``LIVE``); backends that are new or
changed get a lane, those that are gone or changed are retired (see ``lanes``), one whose names alone changed keeps its
lane with all it knows. The rest was built into the process when it started, and is named as needing a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import trio
from attrs import frozen

from ..config import KEYS, BackendConfig, Config, Loaded
from ..config_keys import Key
from ..errors import ConfigError
from .lanes import Lanes, OpenLane, names_of
from .metrics import Metrics
from .router import Router
from .settings import engine_settings

log = logging.getLogger("kvstream.config")

LOOK_S = 0.5
SETTLE_S = 0.2
SETTLES_MAX = 5  # a file that is written all the time is read all the same

LIVE_SECTIONS = frozenset({"auth", "coalesce", "compat", "response_cache", "logging"})
LIVE = frozenset({
    "server.audio_max", "server.keepalive_s", "server.drain_s", "server.drain_queued", "server.body_bytes_max",
    "server.stream_buffer_bytes", "server.allowed_hosts", "server.cors_origins", "server.public_metrics",
    "server.reload",
    "upstream.first_event_s", "upstream.stall_s", "upstream.total_s", "upstream.non_stream", "upstream.include_usage",
    "upstream.answer_bytes_max", "upstream.forward_authorization", "upstream.down_grace_s",
    "scheduler.max_queue", "scheduler.max_queue_bytes", "scheduler.max_wait_s",
})
Prepare = Callable[[Config], Callable[[], None]]
"""Gets everything ready that is not a lane (*Errors*: ``ConfigError``); the result, called, puts it in force."""
NAME_KEYS = ("models", "aliases", "rewrite_model")


# --- deciding ---------------------------------------------------------------------------------------------------------


@frozen
class Plan:
    """What a new configuration changes. ``config`` is what is in force afterwards: the old one with all that can change
    now. ``live`` and ``restart`` are the keys that differ, ``opened`` and ``retired`` the names of backends."""

    config: Config
    live: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()
    opened: tuple[str, ...] = ()
    retired: tuple[str, ...] = ()


def plan_reload(old: Config, new: Config) -> Plan:
    """How to get from ``old``, which is in force, to ``new`` as far as that goes without a restart."""
    config, live, restart = old, [], []
    for about in KEYS:
        if about.section == "backend" or old.get(about.path) == new.get(about.path):
            continue
        if about.path in LIVE or about.section in LIVE_SECTIONS:
            live.append(about.path)
            config = _with(config, about, new.get(about.path))
        else:
            restart.append(about.path)
    before = {backend.name: backend for backend in old.backends}
    backends, fixed = _backends(old, new)
    kept = {b.name for b in backends if b.name in before and _lane_part(b) == _lane_part(before[b.name])}
    live += [f"backend {b.name}" for b in backends if b.name in kept and b != before[b.name]]
    return Plan(
        attrs.evolve(config, backend=backends[0], more_backends=backends[1:]), tuple(live), (*restart, *fixed),
        tuple(b.name for b in backends if b.name not in kept), tuple(name for name in before if name not in kept))


def _with(config: Config, about: Key, value: object) -> Config:
    section = attrs.evolve(getattr(config, about.section), **{about.name: value})
    return attrs.evolve(config, **{about.section: section})


def _lane_part(backend: BackendConfig) -> BackendConfig:
    """What its lane is made from: all but the names of its models."""
    return attrs.evolve(backend, models=(), aliases=(), rewrite_model=True)


def _backends(old: Config, new: Config) -> tuple[tuple[BackendConfig, ...], list[str]]:
    """(the backends that are to be served, the keys of the embedded server that need a restart). The embedded server,
    if there is one, stays as it was started; only its models may get other names."""
    rows = new.backends[1:] if new.embedded.model else new.backends
    if not old.embedded.model:
        return rows or old.backends, []
    own, fixed = old.backends[0], []
    if new.embedded.model:
        wanted = new.backends[0]
        own = attrs.evolve(own, **{name: getattr(wanted, name) for name in NAME_KEYS})
        fixed = [f"backend.{a.name}" for a in attrs.fields(BackendConfig)
                 if getattr(own, a.name) != getattr(wanted, a.name)]
    return (own, *(row for row in rows if row.name != own.name)), fixed


# --- acting -----------------------------------------------------------------------------------------------------------


class Reloader:
    """Holds the configuration in force. See the module."""

    def __init__(self, loaded: Loaded, metrics: Metrics) -> None:
        self.config = loaded.config
        self._again = loaded.again
        self._path = loaded.path
        self._metrics = metrics
        self._loaded_at = _now()
        self._error: str | None = None
        self._restart: tuple[str, ...] = ()
        self._stopped = False
        self._answered = 0
        self.told: Callable[[bool], None] = lambda begins: None  # when reading begins and when it is over
        self._asked = trio.Event()
        self._seen = self._stamp()

    def status(self) -> dict[str, Any]:
        """For ``/status``."""
        return {"path": str(self._path) if self._path else None, "loaded_at": self._loaded_at, "error": self._error,
                "restart": list(self._restart), "answered": self._answered, "may_reload": self._may_read}

    @property
    def error(self) -> str | None:
        """Why the newest file is not in force."""
        return self._error

    @property
    def _may_read(self) -> bool:
        return self._again is not None and self.config.server.reload != "off"

    def ask(self) -> None:
        """Read it again now: SIGHUP."""
        self._asked.set()

    def stop(self) -> None:
        """Read no more: the gateway drains, and a lane opened now would let newcomers in."""
        self._stopped = True

    async def run(self, lanes: Lanes, router: Router, prepare: Prepare) -> None:
        """Task body: look, read, change the lanes and what ``prepare`` knows of; for ever.

        *Errors*: none; a ``ConfigError`` is noted.
        """
        while True:
            polls = self._again is not None and self.config.server.reload == "auto" and bool(self._stamp())
            with trio.move_on_after(LOOK_S if polls else float("inf")):
                await self._asked.wait()
            asked = self._asked.is_set()
            self._asked = trio.Event()
            if asked and not self._may_read:
                log.warning("SIGHUP: server.reload is off; nothing is read again")
            elif asked or (polls and self._stamp() != self._seen):
                self.told(True)
                await self._settle()
                await self._read(lanes, router, prepare)
                self.told(False)
            self._answered += asked

    async def _settle(self) -> None:
        """Wait until nobody writes any more, as far as that can be seen."""
        for _ in range(SETTLES_MAX):
            self._seen = self._stamp()
            await trio.sleep(SETTLE_S)
            if self._stamp() == self._seen:
                return

    async def _read(self, lanes: Lanes, router: Router, prepare: Prepare) -> None:
        assert self._again is not None
        if self._stopped:
            return
        try:
            loaded = self._again()
            plan = plan_reload(self.config, loaded.config)
            commit = prepare(plan.config)
            await change_lanes(plan, lanes, router)
            commit()
        except ConfigError as error:
            self._error = "; ".join(error.problems)
            self._metrics.config_ok.set(0)
            for problem in error.problems:
                log.error("the configuration stays as it was: %s", problem)
            return
        self.config, self._path = plan.config, loaded.path
        self._error, self._restart, self._loaded_at = None, plan.restart, _now()
        self._metrics.config_ok.set(1)
        log.info("configuration read again: %s", _in_words(plan))
        for path in plan.restart:
            log.warning("restart to apply: %s", path)

    def _stamp(self) -> tuple[Any, ...]:
        """What tells one state of the files from another."""
        return tuple(_state(Path(name)) for name in (self._path, self.config.auth.keys_file) if name)


async def change_lanes(plan: Plan, lanes: Lanes, router: Router) -> None:
    """Open, keep and retire lanes, and hand the router the new ones in one step.

    *Errors*: ``ConfigError``; then nothing was changed.
    """
    before = dict(lanes.serving)
    opened: dict[str, OpenLane] = {}
    try:
        for backend in plan.config.backends:
            if backend.name in plan.opened:
                opened[backend.name] = await lanes.open(plan.config, backend)
    except ConfigError:
        for each in opened.values():
            lanes.retire(each)
        raise
    for name in plan.retired:
        lanes.retire(before[name])
    for backend in plan.config.backends:
        if backend.name not in opened:
            kept = before[backend.name]
            kept.lane.names = names_of(backend)
            kept.lane.engine.reconfigure(engine_settings(plan.config.of_backend(backend)))
    router.lanes = tuple((opened.get(b.name) or before[b.name]).lane for b in plan.config.backends)


def _in_words(plan: Plan) -> str:
    parts = [f"backend {name} {'changed' if name in plan.retired else 'added'}" for name in plan.opened]
    parts += [f"backend {name} removed, its requests are finished" for name in plan.retired if name not in plan.opened]
    return ", ".join([*parts, *plan.live]) or "nothing changed"


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
