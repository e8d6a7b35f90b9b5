"""The process: all wiring, signals, and the order in which things start and stop.

::

    trio.run(main)
    └─ root nursery
       ├─ supervision         what systemd is told; outlives the rest
       ├─ signal watcher      first signal: drain; second: leave at once; SIGHUP: read the configuration again
       ├─ reloader            the same when its file changes
       ├─ embedded server     (with --model) llama.cpp as a supervised child
       ├─ lanes               one engine per backend: tick, health, slots, one pump per request
       └─ server.run          listeners, one task per connection

Draining: the listeners close and ``/ready`` says 503 at once; queued requests are refused (or finish, by
``server.drain_queued``); streams go on until ``server.drain_s``, then each ends with an error frame; exit code 0.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Sized
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import attrs
import trio
from attrs import define

from ..config import Config, Loaded
from ..errors import ShuttingDownError
from .access import Access
from .activation import at_address, take_sockets
from .app import App, AppSettings, accepted_hosts
from .coalesce import Coalescer
from .connections import Server, open_sockets
from .embedded import Died, EmbeddedEvent, EmbeddedServer, EmbeddedSnapshot, Loading, Restarting, describe_event
from .engine import Engine
from .lanes import Lanes, OpenLane
from .logs import set_up_logging
from .machine import process_json
from .metrics import Metrics
from .notify import Notifier, take_notifier
from .proxy import Proxy
from .reload import Reloader
from .router import Router
from .settings import access_settings, access_warnings, coalesce_settings, embedded_spec, proxy_settings
from .status_inject import preemption_json
from .stream import Stream
from .supervision import Supervision

log = logging.getLogger("kvstream.serve")

LOADING_LOG_S = 5.0
FILES_BESIDE = 128  # listeners, logs, the embedded server's pipes, the pool
HANGUP = getattr(signal, "SIGHUP", None)  # Windows has none
# Signals this close are one stop: timeout(1), and a terminal beside a supervisor, send two at once.
ONE_STOP_S = 0.5
LAST_FRAMES_S = 2.0  # after drain_s: time for the error frames to leave

OnEmbedded = Callable[[EmbeddedEvent], None]


# --- a running gateway ------------------------------------------------------------------------------------------------


@define
class Gateway:
    """A gateway that serves. ``url`` is where. ``router`` has the lanes that take requests, ``lanes`` all there are."""

    url: str
    router: Router
    lanes: Lanes
    server: Server
    app: App
    reloader: Reloader
    coalescer: Coalescer
    embedded: EmbeddedServer | None = None

    @property
    def config(self) -> Config:
        """What is in force; a reload changes it."""
        return self.reloader.config

    @property
    def engine(self) -> Engine:
        """That of the first lane."""
        return self.router.lanes[0].engine

    @property
    def streams(self) -> list[Stream]:
        """The requests in hand, of all lanes."""
        return [stream for lane in self.lanes.all for stream in lane.engine.streams.values()]

    @property
    def refused(self) -> str | None:
        """Why the configuration in force is not that of the file."""
        return self.reloader.error

    def embedded_now(self) -> EmbeddedSnapshot | None:
        """The embedded server as it is known now, if there is one."""
        return self.embedded.snapshot() if self.embedded is not None else None

    def drain_s_max(self) -> float:
        """How long :meth:`drain` may take."""
        return self.config.server.drain_s + LAST_FRAMES_S + self.config.inject.drain_save_s

    async def drain(self) -> None:
        """Stop taking requests, let those in hand finish within ``server.drain_s``, end the rest with an error.

        *Cancellation*: a second signal cancels this; nothing else is needed then.
        """
        config = self.config.server
        self.reloader.stop()
        await self.server.stop_listening()
        for lane in self.lanes.all:
            lane.engine.close(refuse_waiting=config.drain_queued == "refuse")
        with trio.move_on_after(config.drain_s) as streams:
            for lane in self.lanes.all:
                await lane.engine.wait_idle()
            await self.app.wait_idle()
            streams.deadline = float("inf")
            await self._save()
            return
        log.warning("server.drain_s = %g s are over; ending %s", config.drain_s, counted(self.streams, "request"))
        for lane in self.lanes.all:
            lane.engine.abort(ShuttingDownError("the gateway is shutting down", retry_after_s=5))
        with trio.move_on_after(LAST_FRAMES_S):
            await self.app.wait_idle()
        await self._save()

    async def _save(self) -> None:
        """What the runtimes hold and is worth it goes to disk; each lane has its own bound."""
        async with trio.open_nursery() as nursery:
            for lane in self.lanes.all:
                nursery.start_soon(lane.engine.inject.wait_saved)


@asynccontextmanager
async def open_gateway(loaded: Loaded, *, engine: Engine | None = None, metrics: Metrics | None = None,
                       on_embedded: OnEmbedded | None = None,
                       sockets: Sequence[socket.socket] = ()) -> AsyncIterator[Gateway]:
    """Everything between a configuration and a listening port, taken down on leaving.

    With ``engine`` (and its ``metrics``) an engine that already runs is put on the network; without, a lane is made for
    each backend of the configuration, and with ``embedded.model`` the backend of the first too. ``sockets``, if there
    are any, listen already.

    *Errors*: see ``cannot_listen``; ``ConfigError``, ``EmbeddedError``. *Cancellation*: safe at any point.
    """
    loaded = at_address(loaded, sockets)
    config = loaded.config
    metrics = metrics or Metrics()
    reloader = Reloader(loaded, metrics)
    hop = secrets.token_hex(8)
    async with AsyncExitStack() as stack:
        sockets = sockets or open_sockets(config.server.host, config.server.port)
        for sock in sockets:
            stack.callback(sock.close)
        embedded: EmbeddedServer | None = None
        base_url = ""
        if engine is None and config.embedded.model:
            embedded = EmbeddedServer(embedded_spec(config), on_event=on_embedded or EmbeddedLog())
            base_url = await (await _enter_nursery(stack)).start(embedded.run)
            config = reloader.config = attrs.evolve(config, backend=attrs.evolve(config.backend, type="llamacpp"))
        lanes = Lanes(await _enter_nursery(stack), metrics, hop)
        if engine is not None:
            router = Router([(await lanes.adopt(engine, config)).lane])
        else:
            opened: list[OpenLane] = []
            for backend in config.backends:
                ours = embedded is not None and not opened
                opened.append(await lanes.open(_with_slot_dir(config, embedded) if ours else config, backend,
                                               base_url=base_url if ours else "", restarts=ours))
            router = Router([each.lane for each in opened])
        coalescer = Coalescer(router.open_answer, metrics, coalesce_settings(config))
        await (await _enter_nursery(stack)).start(coalescer.run)
        proxy = Proxy(coalescer.open_answer, metrics, proxy_settings(config), pick=router.pick)
        app = App(router, proxy, metrics, _app_settings(config, hop), lambda: _extra_status(reloader, lanes, embedded),
                  Access(access_settings(config)))
        for warning in access_warnings(config):
            log.warning("%s", warning)

        def prepare(new: Config) -> Callable[[], None]:
            access, old = access_settings(new), reloader.config

            def commit() -> None:
                app.reconfigure(_app_settings(new, hop), access)
                proxy.reconfigure(proxy_settings(new))
                if new != old:
                    coalescer.replace(coalesce_settings(new))
                if new.logging != old.logging:
                    set_up_logging(new.logging.level, new.logging.format)

            return commit

        if engine is None:
            (await _enter_nursery(stack)).start_soon(reloader.run, lanes, router, prepare)
        server = _make_server(config, app, metrics, list(sockets))
        await (await _enter_nursery(stack)).start(server.run)
        host = config.server.host
        url = f"http://{f'[{host}]' if ':' in host else host}:{server.ports[0]}"
        yield Gateway(url, router, lanes, server, app, reloader, coalescer, embedded)


async def _enter_nursery(stack: AsyncExitStack) -> trio.Nursery:
    """A nursery that is cancelled and waited for when the stack unwinds to here. Each part has its own, so that what
    was started later is gone before what it stands on: connections, then pumps, then the pool, then llama.cpp."""
    nursery = await stack.enter_async_context(trio.open_nursery())
    stack.callback(nursery.cancel_scope.cancel)
    return nursery


def _app_settings(config: Config, hop: str) -> AppSettings:
    server = config.server
    return AppSettings(accepted_hosts(server.host, server.allowed_hosts), server.header_bytes_max, hop)


def _make_server(config: Config, app: App, metrics: Metrics, sockets: list[Any]) -> Server:
    settings = config.server
    return Server(app, sockets, metrics, connections_max=settings.connections_max,  # type: ignore[arg-type]
                  header_bytes_max=settings.header_bytes_max, stall_s=settings.stall_s,
                  tolerate_half_close=settings.half_close == "tolerate")


def _with_slot_dir(config: Config, embedded: EmbeddedServer | None) -> Config:
    """Where the embedded server saves KV need not be found out, and on some systems could not be."""
    slot_dir = config.inject.dir or (embedded.slot_dir if embedded is not None else "")
    return attrs.evolve(config, inject=attrs.evolve(config.inject, dir=slot_dir))


def _extra_status(reloader: Reloader, lanes: Lanes, embedded: EmbeddedServer | None) -> Mapping[str, Any]:
    config = reloader.config
    extra: dict[str, Any] = {
        "process": process_json(),
        "config": reloader.status(),
        "retiring": [{"name": lane.name, "requests": len(lane.engine.streams)} for lane in lanes.retiring],
        "kv_type": config.memory.dtype,
        "attention": config.attention.backend,
        "preemption": preemption_json(
            config.scheduler.preemption_policy, [lane.engine.inject.mode for lane in lanes.all]),
    }
    if embedded is not None:
        snapshot = attrs.asdict(embedded.snapshot())
        extra["embedded"] = snapshot | {"since_s": round(trio.current_time() - snapshot.pop("since"), 3)}
    return extra


class EmbeddedLog:
    """Events of the embedded server as log lines; of a long load one line in a while."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def __call__(self, event: EmbeddedEvent) -> None:
        if isinstance(event, Loading):
            if event.elapsed_s < self._next_s:
                return
            self._next_s = event.elapsed_s + LOADING_LOG_S
        else:
            self._next_s = LOADING_LOG_S
        level = logging.WARNING if isinstance(event, Died | Restarting) else logging.INFO
        log.log(level, "llama.cpp: %s", describe_event(event))


# --- the process ------------------------------------------------------------------------------------------------------


async def serve(loaded: Loaded, *, on_ready: Callable[[Gateway], None] | None = None,
                on_embedded: OnEmbedded | None = None, supervision: Supervision | None = None,
                sockets: Sequence[socket.socket] = ()) -> int:
    """Serve until a signal; the exit code. ``on_ready`` is called once the port is open."""
    supervision = supervision or Supervision(Notifier())
    code = 0
    terminal = Terminal()
    with trio.open_signal_receiver(*_signals()) as received:
        if sys.platform != "win32":
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _signals())  # who started us may have blocked them: for itself
        async with open_gateway(loaded, on_embedded=on_embedded, sockets=sockets) as gateway:
            log.info("listening on %s, %s", gateway.url, ", ".join(
                f"backend {lane.name} {lane.engine.adapter.base_url}" for lane in gateway.router.lanes))
            if on_ready is not None:
                on_ready(gateway)
            gateway.reloader.told = supervision.reloading
            supervision.opened(gateway)
            async for number in received:
                if number == HANGUP and not terminal.is_gone():
                    gateway.reloader.ask()
                    continue
                log.info("%s: draining, no new requests; %s; a second signal leaves at once",
                         signal.Signals(number).name, _going(gateway))
                break
            since = trio.current_time()
            supervision.stopping()
            async with trio.open_nursery() as nursery:
                async def second() -> None:
                    nonlocal code
                    await until_second(received, since)
                    log.warning("second signal: leaving at once")
                    code = 1
                    nursery.cancel_scope.cancel()

                nursery.start_soon(second)
                await gateway.drain()
                nursery.cancel_scope.cancel()
    log.info("stopped")
    return code


async def until_second(received: AsyncIterator[int], since: float) -> None:
    """Until somebody who knows that a drain began at ``since`` stops it: a signal after ``ONE_STOP_S``."""
    async for number in received:
        if number != HANGUP and trio.current_time() - since >= ONE_STOP_S:
            return


def _going(gateway: Gateway) -> str:
    """What a drain waits for, in words."""
    streams = gateway.streams
    running, settings = [s for s in streams if s.lease is not None], gateway.config.server
    text = "none is running"
    if running:
        text = f"{counted(running, 'running request')} may take {settings.drain_s:g} s more"
    waiting = [s for s in streams if s.lease is None]
    if waiting:
        fate = "refused" if settings.drain_queued == "refuse" else "still served"
        text += f", {counted(waiting, 'waiting request')} will be {fate}"
    return text


def counted(things: Sized, noun: str) -> str:
    """``1 request``, ``2 requests``."""
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def _signals() -> tuple[signal.Signals, ...]:
    if sys.platform == "win32":
        return (signal.SIGINT, signal.SIGBREAK)
    return (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminal:
    """The terminal that we were started in. SIGHUP means "read the configuration again", but also that it was closed,
    and then a KVStream that somebody started by hand is to end, with the model it holds in memory; not under nohup."""

    def __init__(self) -> None:
        kept = sys.platform != "win32" and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._had_one = not kept and self._has_one()

    def is_gone(self) -> bool:
        return self._had_one and not self._has_one()

    def _has_one(self) -> bool:
        try:
            os.close(os.open("/dev/tty", os.O_RDONLY | getattr(os, "O_NOCTTY", 0)))
        except OSError:
            return False
        return True


def raise_file_limit(wanted: int) -> None:
    """Each connection needs a descriptor, and so does its call upstream; the usual soft limit of 1,024 is too low for
    ``server.connections_max``. Done as far as the hard limit lets us."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    if target < wanted:
        log.warning("only %d files may be open (ulimit -n); server.connections_max wants %d", target, wanted)


async def _supervised(loaded: Loaded, notifier: Notifier, sockets: Sequence[socket.socket]) -> int:
    supervision = Supervision(notifier)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervision.run)
        code = await serve(loaded, supervision=supervision, sockets=sockets)
        nursery.cancel_scope.cancel()
    return code


def run(loaded: Loaded) -> int:
    """``kvstream serve``: the exit code of the process. *Errors*: see :func:`open_gateway`."""
    notifier, sockets = take_notifier(os.environ), take_sockets(os.environ)
    if notifier.watchdog_s is not None:
        faulthandler.enable()  # its signal is SIGABRT: the log then says where we were stuck
    set_up_logging(loaded.config.logging.level, loaded.config.logging.format)
    raise_file_limit(2 * loaded.config.server.connections_max + FILES_BESIDE)
    return trio.run(_supervised, loaded, notifier, sockets)
