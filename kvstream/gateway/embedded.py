"""The embedded llama.cpp server: started, watched, restarted and never left behind.

Theory of operation
-------------------
``EmbeddedServer.run`` is one task that lives as long as KVStream does. It checks all that can be checked without a
process (server, model file, state directory), picks a loopback port once, and then leads one child after another::

    starting --launch--> loading --/health says 200--> up --child dies--> restarting --backoff over--> loading ...
                            |                                                              |
                            +-- dies, or load_timeout_s passes, before the first `up` ever: failed (EmbeddedError)
    any state --cancelled--> stopped

A model that never came up will not come up the next time, so the first failure before the first ``up`` is final and
carries the server's last lines. After that every death is answered by a restart on the *same port*, so that the gateway
in front needs no news of it: it sees a backend that is down, then loading, then up. The pause doubles from 0.5 s to
``restart_backoff_s_max`` and starts over once a child was up for 60 s.

The child never outlives KVStream. Three things see to it, each enough for its case: leaving ``run`` for any reason
stops the child (SIGTERM, 5 s, SIGKILL; shielded, bounded); on Linux the child asks the kernel for SIGKILL when its
parent dies; elsewhere it watches its stdin. **PDEATHSIG fires when the forking thread ends, not the process.** Trio's
own ``open_process`` forks in a worker thread that goes away when it is idle, which would kill a healthy server after
some seconds; hence a plain ``subprocess.Popen`` here, in the thread that runs Trio (it returns after the exec).
The child is in a session of its own, so that a Ctrl-C in the terminal reaches KVStream alone and streams can drain.

What the child prints goes to a bounded file and a short memory. A reader takes it in at all times, also while the child
is being stopped: a server blocked on a full pipe would not end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import trio
from attrs import evolve

from ..errors import ConfigError, EmbeddedError
from .embedded_child import KeptLog, clean_environment
from .embedded_find import (
    LINES_IN_ERROR,
    Died,
    EmbeddedEvent,
    EmbeddedSnapshot,
    EmbeddedSpec,
    FoundServer,
    Launched,
    Loading,
    Restarting,
    State,
    Up,
    check_model,
    child_argv,
    child_environment,
    describe_event,
    describe_exit,
    find_server,
    free_port,
    server_flags,
)
from .embedded_place import claim_place
from .gguf_size import shortfall

__all__ = [
    "EmbeddedServer", "EmbeddedSpec", "EmbeddedSnapshot", "EmbeddedEvent", "Launched", "Loading", "Up", "Died",
    "Restarting", "describe_event",
]

BACKOFF_S_MIN = 0.5
UP_S_FORGIVES = 60.0
STOP_S = 5.0
KILL_S = 5.0
HELP_S_MAX = 10.0
LOG_DRAIN_S = 1.0
POLL_S = 0.1
LOADING_EVENT_S = 0.5

Probe = Callable[[str], Awaitable[bool]]


# --- the process port -------------------------------------------------------------------------------------------------


class Child(Protocol):
    """A launched process. ``ask_to_stop`` and ``kill`` on a dead one do nothing."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    async def wait(self) -> int: ...
    async def read(self) -> bytes: ...
    def ask_to_stop(self) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


Spawn = Callable[[Sequence[str], Mapping[str, str]], Child]


class LocalChild:
    """A child of this process: output in one pipe, and a stdin pipe whose end tells it that we are gone."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdout is not None and self._process.stdin is not None
        self._out, self._in = self._process.stdout, self._process.stdin
        if sys.platform != "win32":
            os.set_blocking(self._out.fileno(), False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    async def wait(self) -> int:
        """*Cancellation*: leaves the child alone."""
        if sys.platform == "linux" and self.poll() is None:
            with contextlib.suppress(OSError):  # a kernel without pidfd: poll below
                fd = os.pidfd_open(self.pid)
                try:
                    await trio.lowlevel.wait_readable(fd)
                finally:
                    os.close(fd)
        while (code := self.poll()) is None:
            await trio.sleep(POLL_S)
        return code

    async def read(self) -> bytes:
        """The next output, ``b""`` at its end."""
        fd = self._out.fileno()
        if sys.platform == "win32":
            # The thread ends with the child, which never outlives its owner.
            return await trio.to_thread.run_sync(os.read, fd, 65536, abandon_on_cancel=True)
        while True:
            await trio.lowlevel.wait_readable(fd)
            with contextlib.suppress(BlockingIOError):
                return os.read(fd, 65536)

    def ask_to_stop(self) -> None:
        with contextlib.suppress(OSError):
            self._in.close()
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._in.close()
        self._out.close()

    def _signal(self, number: signal.Signals) -> None:
        if self.poll() is not None:
            return
        if sys.platform == "win32":
            self._process.terminate()
        else:
            # Its whole session: where there is no exec shim, the server is a child of our child.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)


async def stop_child(child: Child) -> None:
    """End the child and reap it, also when the caller is being cancelled. Takes at most STOP_S + KILL_S."""
    with trio.CancelScope(shield=True):
        if child.poll() is None:
            child.ask_to_stop()
            with trio.move_on_after(STOP_S):
                await child.wait()
        if child.poll() is None:
            child.kill()
            with trio.move_on_after(KILL_S):
                await child.wait()


async def probe_health(base_url: str) -> bool:
    """True when ``GET /health`` answers 200 within 2 s. Spoken by hand: httpx lives in gateway/upstream.py."""
    port = int(base_url.rpartition(":")[2])
    with trio.move_on_after(2), contextlib.suppress(OSError, trio.BrokenResourceError):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            head = b""
            while len(head) < 12 and (more := await stream.receive_some(4096)):
                head += more
            return head.startswith(b"HTTP/1.1 200")
    return False


async def known_flags(server: FoundServer) -> frozenset[str] | None:
    """The words of this build's ``--help``, to leave out flags it does not have; None when it does not say."""
    if server.kind == "xllamacpp":
        return None
    with trio.move_on_after(HELP_S_MAX), contextlib.suppress(OSError):
        done = await trio.run_process(
            [server.path, "--help"], capture_stdout=True, stderr=subprocess.STDOUT, check=False,
            env=clean_environment(os.environ),
        )
        words = frozenset(done.stdout.decode("utf-8", "replace").replace(",", " ").split())
        return words if "--model" in words else None
    return None


def backoff_s(deaths: int, limit_s: float) -> float:
    """The pause after the n-th death in a row (from 1)."""
    return float(min(BACKOFF_S_MIN * 2 ** min(deaths - 1, 30), limit_s))


# --- the supervisor ---------------------------------------------------------------------------------------------------


def _ignore(_event: EmbeddedEvent) -> None:
    pass


class EmbeddedServer:
    """One llama.cpp server under supervision.

    ``on_event`` is called synchronously in the supervising task; an exception from it ends ``run``. ``probe`` and
    ``spawn`` are the outside world and replaceable in tests.
    """

    def __init__(
        self,
        spec: EmbeddedSpec,
        *,
        on_event: Callable[[EmbeddedEvent], None] = _ignore,
        probe: Probe = probe_health,
        spawn: Spawn = LocalChild,
    ) -> None:
        self.spec = spec
        self.base_url = ""
        self.slot_dir = ""  # where it saves KV, once it was launched
        self._on_event = on_event
        self._probe = probe
        self._spawn = spawn
        self._snapshot = EmbeddedSnapshot()
        self._log: KeptLog | None = None
        self._ever_up = False

    def snapshot(self) -> EmbeddedSnapshot:
        """What is known now, with the last 50 lines the server printed."""
        lines = self._log.last_lines() if self._log is not None else ()
        return evolve(self._snapshot, last_lines=lines)

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Supervise until cancelled. ``task_status`` gets the base URL once the first child is launched.

        *Errors*: ``ConfigError`` when there is nothing to launch; ``EmbeddedError`` when the model does not come up the
        first time.
        *Cancellation*: returns when the child is gone and reaped, within STOP_S + KILL_S.
        *Resource handling*: child, log file and instance lock belong to this call.
        """
        try:
            await self._supervise(task_status)
        except (EmbeddedError, ConfigError):
            self._become("failed")
            raise
        finally:
            if self._snapshot.state != "failed":
                self._become("stopped")

    async def _supervise(self, task_status: trio.TaskStatus[str]) -> None:
        self._become("starting")
        server = find_server(self.spec)
        check_model(self.spec.model)
        known = await known_flags(server)
        with claim_place(self.spec.state_dir, self.spec.slot_bytes_max) as place, KeptLog(place.log) as log:
            self._log = log
            port = free_port()
            flags = server_flags(self.spec, port=port, slot_dir=place.slot_dir, known=known)
            argv = child_argv(server, flags, parent=os.getpid())
            self.base_url, self.slot_dir = f"http://127.0.0.1:{port}", str(place.slot_dir)
            self._snapshot = evolve(self._snapshot, kind=server.kind, port=port, log_path=str(place.log))
            env = child_environment(server)
            told = False

            def launched(child: Child) -> None:
                nonlocal told
                self._become("loading", pid=child.pid)
                self._on_event(Launched(child.pid, port, server.kind))
                if not told:
                    told = True
                    task_status.started(self.base_url)

            deaths = 0
            while True:
                code, up_s = await self._live(argv, env, log, launched)
                self._on_event(Died(code, log.last_lines(), self._snapshot.log_path))
                if not self._ever_up:
                    raise self._never_came_up(code)
                deaths = 1 if up_s >= UP_S_FORGIVES else deaths + 1
                pause_s = backoff_s(deaths, self.spec.restart_backoff_s_max)
                self._snapshot = evolve(self._snapshot, restarts=self._snapshot.restarts + 1)
                self._become("restarting")
                self._on_event(Restarting(pause_s, self._snapshot.restarts))
                await trio.sleep(pause_s)

    async def _live(
        self, argv: Sequence[str], env: Mapping[str, str], log: KeptLog, launched: Callable[[Child], None]
    ) -> tuple[int | None, float]:
        """One child from launch to its end: its exit code (None: stopped, too slow) and how long it was up."""
        try:
            child = self._spawn(argv, env)
        except OSError as error:
            raise EmbeddedError(f"cannot start {argv[0]}: {error.strerror}") from error
        reading = trio.CancelScope(shield=True)

        async def keep_log() -> None:
            with reading:
                while chunk := await child.read():
                    log.write(chunk)

        code: int | None = None
        up_s = 0.0
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(keep_log)
                try:
                    launched(child)
                    if await self._wait_until_up(child, log):
                        up_at = trio.current_time()
                        code = await child.wait()
                        up_s = trio.current_time() - up_at
                    else:
                        code = child.poll()
                finally:
                    await stop_child(child)
                    # The child's death is the end of its output, unless a grandchild holds the pipe.
                    reading.deadline = trio.current_time() + LOG_DRAIN_S
        finally:
            log.end_line()
            child.close()
        return code, up_s

    async def _wait_until_up(self, child: Child, log: KeptLog) -> bool:
        """Poll /health until it is 200 (True), the child is dead, or the time is over (False)."""
        began = told = trio.current_time()
        while (elapsed := trio.current_time() - began) < self.spec.load_timeout_s:
            healthy = await self._probe(self.base_url)
            if child.poll() is not None:
                return False
            percent, words = log.progress()
            if healthy:
                self._ever_up = True
                self._become("up", pid=child.pid)
                self._on_event(Up(trio.current_time() - began))
                return True
            self._snapshot = evolve(self._snapshot, percent=percent, words=words)
            if trio.current_time() - told >= LOADING_EVENT_S:
                told = trio.current_time()
                self._on_event(Loading(elapsed, percent, words))
            with trio.move_on_after(POLL_S):
                await child.wait()
        return False

    def _never_came_up(self, code: int | None) -> EmbeddedError:
        shown = [line for line in (self._log.last_lines() if self._log else ()) if line][-LINES_IN_ERROR:]
        what = describe_exit(code) if code is not None else f"did not load it within {self.spec.load_timeout_s:g} s"
        lines = "\n  ".join(["its last lines:", *shown]) if shown else "it printed nothing."
        if short := shortfall(self.spec.model):  # llama.cpp calls it a fault of its parameters
            lines = f"{short}; {lines}"
        return EmbeddedError(
            f"the llama.cpp server ({self._snapshot.kind}) for {self.spec.model.name} {what}; {lines}\n"
            f"(log: {self._snapshot.log_path})"
        )

    def _become(self, state: State, *, pid: int | None = None) -> None:
        now = trio.current_time()
        self._snapshot = evolve(self._snapshot, state=state, since=now, pid=pid, percent=None, words="")
