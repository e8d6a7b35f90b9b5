"""What systemd is told and hands over: a fake notify socket, sockets given to a process, `kvstream reload`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from kvstream.config import Loaded
from kvstream.errors import ConfigError, KVStreamError
from kvstream.gateway import activation, reloading
from kvstream.gateway.activation import at_address, take_sockets
from kvstream.gateway.embedded import EmbeddedSnapshot
from kvstream.gateway.engine import Engine
from kvstream.gateway.machine import started, takes_hangup
from kvstream.gateway.notify import Notifier, take_notifier
from kvstream.gateway.pulse import Pulse
from kvstream.gateway.supervision import Supervision
from tests.fakes import Script, open_runtime
from tests.fakes.client import open_request
from tests.fakes.server import open_server
from tests.gateway.conftest import CHAT, HANG_S, chat, config_of, data_of, open_rig
from tests.gateway.test_case_reload import reloading as reloading_gateway

posix = pytest.mark.skipif(sys.platform == "win32", reason="Unix sockets")
pytestmark = posix


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    """systemd's end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.setblocking(False)
        yield sock


def heard(listener: socket.socket) -> list[str]:
    """The lines of all messages there are."""
    lines = []
    while True:
        try:
            lines += listener.recv(65536).decode().split("\n")
        except BlockingIOError:
            return lines


async def hear(listener: socket.socket, lines: list[str], true: Callable[[], object]) -> None:
    """Adds what comes to ``lines`` until ``true``."""
    with trio.fail_after(2 * HANG_S):
        while not true():
            lines += heard(listener)
            await trio.sleep(0.01)


# --- the protocol -----------------------------------------------------------------------------------------------------


def test_what_is_taken_from_the_environment_is_no_childs() -> None:
    environ = {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid()), "A": "b"}
    notifier = take_notifier(environ)
    assert environ == {"A": "b"} and notifier and notifier.watchdog_s == 3.0
    for usec, pid in (("3000000", "1"), ("0", ""), ("x", ""), ("", ""), ("9" * 5000, ""), ("-3", "")):
        notifier = take_notifier({"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": usec, "WATCHDOG_PID": pid})
        assert notifier and notifier.watchdog_s is None
    for path in ("", "vsock:2:1", "@", "relative"):
        assert not take_notifier({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "3000000"})
    Notifier().tell("READY=1")


def test_what_could_not_be_sent_goes_with_the_next(tmp_path: Path) -> None:
    notifier = Notifier(str(tmp_path / "notify"))
    notifier.tell("READY=1", "STATUS=a\nb")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.setblocking(False)
        notifier.tell("WATCHDOG=1")
        assert heard(sock) == ["READY=1", "STATUS=a b", "WATCHDOG=1"]


def test_no_word_from_outside_stops_a_message(tmp_path: Path) -> None:
    """systemd ignores messages beyond 4096 bytes, READY=1 in them too; a name of a file need not be UTF-8."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.setblocking(False)
        notifier = Notifier(str(tmp_path / "notify"))
        notifier.tell("READY=1", "STATUS=" + "é" * 500_000, "WATCHDOG=1")
        message = sock.recv(1 << 20).decode()
        assert len(message) < 4096 and message.startswith("READY=1\nSTATUS=éé") and message.endswith("é\nWATCHDOG=1")
        notifier.tell("STATUS=the configuration was refused: jos\udce9.toml: no such key")
        assert heard(sock) == ["STATUS=the configuration was refused: jos?.toml: no such key"]
    Notifier("/a\0b").tell("READY=1")


def test_ready_is_not_lost_while_nobody_listens(tmp_path: Path) -> None:
    notifier = Notifier(str(tmp_path / "notify"))
    notifier.tell("READY=1", "STATUS=starting")
    for n in range(50):
        notifier.tell("WATCHDOG=1", f"STATUS={n}")
    notifier.tell("RELOADING=1")
    notifier.tell("READY=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.setblocking(False)
        notifier.tell("WATCHDOG=1")
        assert heard(sock) == ["STATUS=49", "RELOADING=1", "READY=1", "WATCHDOG=1"]
        notifier.tell("WATCHDOG=1")
        assert heard(sock) == ["WATCHDOG=1"]


def test_an_abstract_socket() -> None:
    if sys.platform != "linux":
        pytest.skip("abstract sockets are Linux's")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        name = f"kvstream-test-{os.getpid()}"
        sock.bind(f"\0{name}")
        sock.setblocking(False)
        take_notifier({"NOTIFY_SOCKET": f"@{name}"}).tell("READY=1")
        assert heard(sock) == ["READY=1"]


# --- what is said, and when -------------------------------------------------------------------------------------------


class Noted(Notifier):
    """Keeps what is told, with its time."""

    def __init__(self, watchdog_s: float | None = None) -> None:
        super().__init__("@nobody", watchdog_s)
        self.told: list[tuple[float, str]] = []

    def tell(self, *lines: str) -> None:
        self.told += [(trio.current_time(), line) for line in lines]

    def times(self, line: str) -> list[float]:
        return [at for at, told in self.told if told.startswith(line)]


@attrs.define(eq=False)
class Seen:
    """A gateway as the supervision sees it."""

    lanes: Any = attrs.field(factory=lambda: SimpleNamespace(all=()))
    streams: list[Any] = attrs.field(factory=list)
    refused: str | None = None
    embedded: EmbeddedSnapshot | None = None

    def embedded_now(self) -> EmbeddedSnapshot | None:
        return self.embedded

    def drain_s_max(self) -> float:
        return 300.0


@asynccontextmanager
async def supervising(notifier: Notifier) -> AsyncIterator[Supervision]:
    supervision = Supervision(notifier)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervision.run)
        yield supervision
        nursery.cancel_scope.cancel()


async def test_it_is_ready_when_the_model_is_there(autojump_clock: trio.testing.MockClock) -> None:
    notifier, gateway = Noted(), Seen()
    async with supervising(notifier) as supervision:
        await trio.sleep(5)
        assert not notifier.times("READY=1") and len(notifier.times("EXTEND_TIMEOUT_USEC=")) >= 4
        gateway.embedded = EmbeddedSnapshot(state="loading", percent=40)
        supervision.opened(gateway)
        await trio.sleep(300)
        assert not notifier.times("READY=1")
        assert max(b - a for a, b in pairwise(notifier.times("EXTEND"))) < 2
        assert any("llama.cpp: loading 40 %" in line for _, line in notifier.told)
        gateway.embedded = EmbeddedSnapshot(state="up")
        await trio.sleep(0.5)
        assert len(notifier.times("READY=1")) == 1
        extended = len(notifier.times("EXTEND"))
        gateway.embedded = EmbeddedSnapshot(state="restarting")
        await trio.sleep(20)
        assert len(notifier.times("READY=1")) == 1 and len(notifier.times("EXTEND")) == extended
        assert notifier.told[-1][1].endswith("llama.cpp: restarting")
        assert len(notifier.times("STATUS=")) < 8  # what has not changed is not said again


async def test_what_a_reload_and_a_stop_say(autojump_clock: trio.testing.MockClock) -> None:
    notifier, gateway = Noted(), Seen()
    async with supervising(notifier) as supervision:
        supervision.reloading(True)
        supervision.reloading(False)  # before it is ready nobody asked for news of that
        assert not notifier.told
        supervision.opened(gateway)
        supervision.reloading(True)
        before = time.monotonic_ns() // 1000
        lines = [line for _, line in notifier.told]
        assert lines[-3] == "RELOADING=1" and 0 <= before - int(lines[-2].removeprefix("MONOTONIC_USEC=")) < 10**7
        gateway.refused = "prot is no key"
        supervision.reloading(False)
        assert [line for _, line in notifier.told][-2] == "READY=1"
        assert notifier.told[-1][1] == "STATUS=0 running, 0 waiting; the configuration was refused: prot is no key"
        gateway.streams = [SimpleNamespace(lease=1), SimpleNamespace(lease=None), SimpleNamespace(lease=1)]
        supervision.stopping()
        assert [line for _, line in notifier.told][-3:] == [
            "STOPPING=1", "EXTEND_TIMEOUT_USEC=320000000", "STATUS=draining: 2 running, 1 waiting"]
        supervision.reloading(True)
        gateway.streams = []
        await trio.sleep(2)
        assert [line for _, line in notifier.told][-1] == "STATUS=draining: 0 running, 0 waiting"


async def test_the_watchdog_is_fed_by_what_it_watches(autojump_clock: trio.testing.MockClock) -> None:
    def lane(pulse: Pulse) -> Any:
        return SimpleNamespace(name="a", engine=SimpleNamespace(pulse=pulse, ready=True, state="up"))

    notifier, gateway = Noted(watchdog_s=10.0), Seen()
    alive = Pulse(lambda: alive.beat() if beats else None)
    beats = True
    gone = Pulse(lambda: None)
    async with supervising(notifier) as supervision:
        supervision.opened(gateway)
        gateway.lanes.all = (lane(alive),)
        await trio.sleep(57)  # fed at 0, 5, 10 ...
        supervision.stopping()  # the drain is watched too
        await trio.sleep(62)
        fed = notifier.times("WATCHDOG=1")
        assert len(fed) == 24 and max(b - a for a, b in pairwise(fed)) <= 5
        gateway.lanes.all = (lane(alive), lane(gone))  # retired, and gone before it answered
        await trio.sleep(2)
        gateway.lanes.all = (lane(alive),)
        await trio.sleep(30)
        fed = notifier.times("WATCHDOG=1")
        assert max(b - a for a, b in pairwise(fed)) == 7.5
        beats = False
        await trio.sleep(6)
        fed = notifier.times("WATCHDOG=1")
        await trio.sleep(60)
        assert notifier.times("WATCHDOG=1") == fed


async def test_a_tick_that_is_gone_is_noticed(monkeypatch: pytest.MonkeyPatch, listener: socket.socket) -> None:
    tick, scopes = Engine._tick, []

    async def mortal(self: Engine) -> None:
        with trio.CancelScope() as scope:
            scopes.append(scope)
            await tick(self)
        await trio.sleep_forever()

    monkeypatch.setattr(Engine, "_tick", mortal)
    async with open_rig() as rig, supervising(Notifier(str(listener.getsockname()), 0.4)) as supervision:
        supervision.opened(rig.gateway)
        lines: list[str] = []
        await hear(listener, lines, lambda: lines.count("WATCHDOG=1") >= 3)
        assert "READY=1" in lines and "STATUS=0 running, 0 waiting" in lines
        scopes[0].cancel()
        await trio.testing.wait_all_tasks_blocked(0.01)  # its last beat, if there was one, was told
        heard(listener)
        await trio.sleep(1)
        assert "WATCHDOG=1" not in heard(listener)


# --- sockets ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[socket.socket], dict[str, str]]]:
    """``handed(sock)``: an environment that hands it over, as a descriptor of its own."""
    def hand(sock: socket.socket) -> dict[str, str]:
        fd = os.dup(sock.fileno())
        os.set_inheritable(fd, True)
        monkeypatch.setattr(activation, "FIRST_FD", fd)
        return {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "x", "A": "b"}

    yield hand


def test_a_listening_socket_is_taken(handed: Callable[[socket.socket], dict[str, str]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as given:
        environ = handed(given)
        taken, = take_sockets(environ)
        with taken:
            assert environ == {"A": "b"} and taken.getsockname() == given.getsockname()
            assert not os.get_inheritable(taken.fileno())


def test_a_socket_for_another_process_is_left_alone(handed: Callable[[socket.socket], dict[str, str]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as given:
        environ = handed(given)
        assert take_sockets({**environ, "LISTEN_PID": "1"}) == []
        assert take_sockets({**environ, "LISTEN_FDS": "0"}) == [] == take_sockets({})
        with pytest.raises(ConfigError, match="at most 64"):
            take_sockets({**environ, "LISTEN_FDS": "65"})
        os.close(activation.FIRST_FD)


def test_what_cannot_be_served_is_refused_in_a_sentence(
        handed: Callable[[socket.socket], dict[str, str]], tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as given:
        given.bind(str(tmp_path / "sock"))
        given.listen()
        with pytest.raises(ConfigError, match=r"sock; KVStream serves TCP only: ListenStream= in kvstream.socket"):
            take_sockets(handed(given))
    with socket.socket(type=socket.SOCK_DGRAM) as udp, socket.socket() as bound:
        for given in (udp, bound):
            given.bind(("127.0.0.1", 0))
            with pytest.raises(ConfigError, match="does not listen for TCP"):
                take_sockets(handed(given))


def test_the_configuration_has_the_address_that_is_served() -> None:
    with socket.create_server(("127.0.0.1", 0)) as near, socket.create_server(("0.0.0.0", 0)) as far:
        loaded = attrs.evolve(Loaded.of(config_of()), again=lambda: Loaded.of(config_of(server={"drain_s": 7.0})))
        there = at_address(loaded, [near, far])
        assert there.again is not None
        for config in (there.config, there.again().config):  # by this it is decided who may come in
            assert (config.server.host, config.server.port) == far.getsockname()[:2]
        assert there.again().config.server.drain_s == 7.0
        assert at_address(loaded, [near]).config.server.host == "127.0.0.1" and at_address(loaded, []) is loaded


# --- the process ------------------------------------------------------------------------------------------------------


# Signals that are blocked stay so through exec: whoever starts it may have blocked some for itself.
BECOME = ("import os, signal, sys; os.dup2(int(sys.argv[1]), 3); os.environ['LISTEN_PID'] = str(os.getpid()); "
          "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGHUP]); "
          "os.execv(sys.executable, [sys.executable, '-m', 'kvstream', *sys.argv[2:]])")


@pytest.mark.usefixtures("patient")
async def test_a_process_under_systemd(listener: socket.socket, tmp_path: Path) -> None:
    """Ready once it listens, on the socket that it was given; fed and told through reload and drain; and who connects
    after it stopped listening is not refused."""
    path = tmp_path / "kvstream.toml"
    async with open_runtime(slots=1) as runtime, open_server(runtime) as fake:
        text = (f'[[backend]]\nname = "a"\nbase_url = "{fake.base_url}"\n'
                '[server]\nreload = "sighup"\ndrain_s = 300\nport = ')
        with socket.create_server(("127.0.0.1", 0)) as given:
            port = given.getsockname()[1]
            path.write_text(text + str(port), "utf-8")
            env = {**os.environ, "NOTIFY_SOCKET": str(listener.getsockname()), "WATCHDOG_USEC": "1000000",
                   "LISTEN_FDS": "1"}
            process = subprocess.Popen(
                [sys.executable, "-c", BECOME, str(given.fileno()), "serve", "--config", str(path)], env=env,
                pass_fds=[given.fileno()], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            try:
                lines: list[str] = []
                await hear(listener, lines, lambda: "READY=1" in lines)
                if sys.platform == "linux":
                    flags = Path(f"/proc/{process.pid}/fdinfo/3").read_text("utf-8").split("flags:")[1].split()[0]
                    assert int(flags, 8) & os.O_CLOEXEC
                with trio.fail_after(HANG_S):
                    while (await open_request(port, "GET", "/ready")).status != 200:
                        await trio.sleep(0.05)
                url = f"http://127.0.0.1:{port}"
                reload = partial(trio.to_thread.run_sync, lambda: list(reloading.reload_running(url, "", process.pid)))
                path.write_text(f"{text}{port}\nconnections_max = 7\n", "utf-8")
                lines += heard(listener)
                lines.clear()
                assert await reload() == [f"in force: {path}", "restart to apply: server.connections_max"]
                await hear(listener, lines, lambda: "READY=1" in lines[1:])
                assert lines.index("RELOADING=1") < lines.index("READY=1")
                path.write_text(f"{text}{port}\nprot = 7\n", "utf-8")
                with pytest.raises(ConfigError, match="prot"):
                    await reload()
                runtime.script(Script(itl=0.01, tokens=20, hang_at_token=3, goes_on=(goes_on := trio.Event())))
                stream = await open_request(port, "POST", CHAT, chat("running"))
                lines.clear()
                process.send_signal(signal.SIGTERM)
                await hear(listener, lines, lambda: "STOPPING=1" in lines)  # behind what was said before it
                del lines[: lines.index("STOPPING=1")]
                await hear(listener, lines, lambda: lines.count("WATCHDOG=1") >= 2)
                assert "STATUS=draining: 1 running, 0 waiting" in lines
                goes_on.set()
                with socket.create_connection(("127.0.0.1", port)):  # the kernel holds it for the next one
                    assert data_of(await stream.read_all())[-1] == "[DONE]"
                await stream.close()
                with trio.fail_after(HANG_S):
                    while process.poll() is None:
                        await trio.sleep(0.02)
                assert process.returncode == 0
            finally:
                process.kill()
                process.wait()
                assert process.stderr is not None
                process.stderr.close()


# --- kvstream reload --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("patient")
async def test_reload_meets_no_stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(reloading.os, "kill", lambda pid, number: sent.append(pid) if number else None)
    monkeypatch.setattr(reloading, "takes_hangup", lambda pid: None if pid == 78 else pid != 79)
    monkeypatch.setattr(reloading, "OUTCOME_S_MAX", 0.3)
    async with reloading_gateway(tmp_path) as gw:
        async def reload(pid: int | None, url: str = gw.gateway.url) -> Any:
            return await trio.to_thread.run_sync(lambda: list(reloading.reload_running(url, "", pid)))

        with pytest.raises(KVStreamError, match=f"was asked to reload.* is another KVStream, process {os.getpid()}"):
            await reload(os.getpid() + 1)
        # Nothing answers there: its pid was named, so it is asked; what came of it cannot be known.
        with pytest.raises(KVStreamError, match="was asked to reload; what came of it is in its log"):
            await reload(77, "http://127.0.0.1:9")
        assert sent == [os.getpid() + 1, 77]
        sent.clear()
        with pytest.raises(KVStreamError, match=r"process 79 is not a KVStream that serves.*nothing was sent"):
            await reload(79)
        for url in (gw.gateway.url, "http://127.0.0.1:9"):
            with pytest.raises(KVStreamError, match="what process 78 is cannot be seen here"):
                await reload(78, url)
        assert sent == []
        monkeypatch.setattr(reloading, "started", lambda pid: 1)  # as seen from another pid namespace
        with pytest.raises(KVStreamError, match="not a process of this machine"):
            await reload(None)
        with pytest.raises(KVStreamError, match="of another system or container"):
            await reload(os.getpid())
        assert sent == [os.getpid()]  # it is one: it was asked
        sent.clear()
        monkeypatch.setattr(reloading, "started", started)
        with pytest.raises(KVStreamError, match="said nothing"):
            await reload(None)
        assert sent == [os.getpid()]
        await gw.change(gw.text(0).replace("port = 0\n", 'port = 0\nreload = "off"\n'),
                        lambda: gw.gateway.config.server.reload == "off")
        with pytest.raises(KVStreamError, match=r"its server\.reload is off"):
            await reload(None)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_what_dies_of_sighup_is_not_sent_it() -> None:
    """By a name, or by a handler alone, nobody is taken for a KVStream."""
    catch = "import signal, time; signal.signal(signal.SIGHUP, lambda *_: None); print(flush=True); time.sleep(60)"
    wait = "import time; print(flush=True); time.sleep(60)"
    for code, words, may in ((wait, ["kvstream", "serve"], False), (catch, ["other", "serve"], False),
                             (catch, ["kvstream", "bench"], False), (catch, ["/x/kvstream.pyz", "serve", "-"], True)):
        with subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, cwd="/") as process:
            try:
                assert process.stdout is not None and process.stdout.readline()
                if "kvstream" in os.path.realpath(sys.executable):
                    pytest.skip("this Python lies in a folder of that name")
                assert takes_hangup(process.pid) is may
                if not may:
                    with pytest.raises(KVStreamError, match="nothing was sent"):
                        list(reloading.reload_running("http://127.0.0.1:9", "", process.pid))
                    assert process.poll() is None
            finally:
                process.kill()
    assert takes_hangup(process.pid) is None
