"""Case 82: the configuration is read again while serving; a bad file changes nothing; a removed backend drains."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from kvstream.config import KEYS, BackendConfig, Config, EmbeddedConfig, load_config
from kvstream.gateway.reload import LIVE, LIVE_SECTIONS, LOOK_S, SETTLE_S, SETTLES_MAX, plan_reload
from kvstream.gateway.serve import Gateway, open_gateway
from tests.fakes import FakeRuntime, Script, open_runtime
from tests.fakes.client import open_request
from tests.fakes.server import FakeServer, open_server
from tests.gateway.conftest import CHAT, HANG_S, chat, data_of, error_of

Write = Callable[[Path, str], None]


def renamed(path: Path, text: str) -> None:
    other = path.with_name("new.toml")
    other.write_text(text, "utf-8")
    other.replace(path)


def swapped(path: Path, text: str) -> None:
    """As Kubernetes does it: the name is a link through a folder, and the folder's link is replaced."""
    version = path.with_name(f"v{len(list(path.parent.iterdir()))}")
    version.mkdir()
    (version / "kvstream.toml").write_text(text, "utf-8")
    link, data = path.with_name("tmp-link"), path.with_name("data")
    link.symlink_to(version.name)
    link.replace(data)
    if not path.is_symlink():
        path.unlink(missing_ok=True)
        path.symlink_to(Path("data") / "kvstream.toml")


def in_place(path: Path, text: str) -> None:
    path.write_text(text, "utf-8")


def in_halves(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        for part in (text[: len(text) // 2], text[len(text) // 2 :]):
            file.write(part)
            file.flush()
            os.fsync(file.fileno())


@attrs.define(eq=False)
class Reloading:
    """A gateway from a file, before two fakes."""

    path: Path
    gateway: Gateway
    runtimes: list[FakeRuntime]
    fakes: list[FakeServer]
    write: Write

    @property
    def port(self) -> int:
        return int(self.gateway.url.rpartition(":")[2])

    def text(self, *backends: int, more: str = "", **keys: str) -> str:
        rows = [f'[[backend]]\nname = "{"ab"[i]}"\nbase_url = "{self.fakes[i].base_url}"\n' for i in backends]
        rows += [f'aliases = ["{keys["alias"]}"]\n'] if "alias" in keys else []
        return HEAD + more + "".join(rows)

    async def change(self, text: str, until: Callable[[], object]) -> None:
        self.write(self.path, text)
        await self.until(until)

    async def until(self, true: Callable[[], object]) -> None:
        with trio.fail_after(HANG_S):
            while not true():
                await trio.sleep(0.01)

    @property
    def lanes(self) -> list[str]:
        return [lane.name for lane in self.gateway.router.lanes]

    async def up(self, name: str) -> None:
        lane = next(lane for lane in self.gateway.router.lanes if lane.name == name)
        await self.until(lambda: lane.engine.ready and lane.listed.known)

    async def get(self, path: str) -> Any:
        response = await open_request(self.port, "GET", path, b"", [("Connection", "close")])
        body = await response.read_all()
        await response.close()
        return json.loads(body) if path != "/metrics" else body.decode()


HEAD = ("[server]\nport = 0\n[upstream]\nhealth_interval_s = 0.1\ndown_grace_s = 0.0\n"
        "count_timeout_s = 60\n"
        '[inject]\nmode = "off"\n')  # what is about lanes is asserted on the calls of plain ones


@asynccontextmanager
async def reloading(tmp_path: Path, write: Write = renamed, *backends: int, more: str = "") -> AsyncIterator[Reloading]:
    folder = tmp_path / "etc"
    folder.mkdir()
    path = folder / "kvstream.toml"
    async with AsyncExitStack() as stack:
        runtimes = [await stack.enter_async_context(open_runtime(model=name, answer_tokens=8)) for name in ("ma", "mb")]
        fakes = [await stack.enter_async_context(open_server(runtime)) for runtime in runtimes]
        made = Reloading(path, None, runtimes, fakes, write)  # type: ignore[arg-type]
        write(path, made.text(*(backends or (0,)), more=more))
        made.gateway = await stack.enter_async_context(open_gateway(load_config(path, env={})))
        for name in made.lanes:
            await made.up(name)
        yield made


# --- picked up --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [renamed, swapped, in_place, in_halves])
async def test_case_82_a_changed_file_is_in_force_within_two_seconds(tmp_path: Path, write: Write) -> None:
    assert LOOK_S + SETTLES_MAX * SETTLE_S < 2  # by the clock of a machine that has time
    async with reloading(tmp_path, write) as gw:
        await gw.change(gw.text(0, 1), lambda: gw.lanes == ["a", "b"])
        await gw.up("b")
        assert [e["id"] for e in (await gw.get("/v1/models"))["data"]] == ["ma", "mb"]
        response = await open_request(gw.port, "POST", CHAT, chat(model="mb"))
        assert response.status == 200 and data_of(await response.read_all())[-1] == "[DONE]"
        assert len(gw.runtimes[1].journal.calls) == 1
        await gw.change(gw.text(1), lambda: gw.lanes == ["b"])
        await response.close()


BROKEN = ("[server\n", "[server]\nprot = 1\n", "[backend]\n[[backend]]\n", "[server]\nport = 0\nport = 1\n")


async def test_case_82_a_broken_file_keeps_the_old_one_and_is_seen(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with reloading(tmp_path) as gw:
        before = gw.gateway.config
        loaded_at = (await gw.get("/status"))["config"]["loaded_at"]
        for broken in BROKEN:
            gw.gateway.reloader._error = None
            await gw.change(broken, lambda: gw.gateway.reloader.status()["error"])
            status = (await gw.get("/status"))["config"]
            assert str(gw.path) in status["error"] and status["loaded_at"] == loaded_at
            assert "kvstream_config_ok 0.0" in await gw.get("/metrics")
            assert gw.gateway.config == before and gw.lanes == ["a"]
        response = await open_request(gw.port, "POST", CHAT, chat())
        assert response.status == 200
        await response.close()
        def refusals() -> int:
            return sum(m.startswith("the configuration stays as it was: ") for m in caplog.messages)

        gw.path.unlink()
        await gw.until(lambda: refusals() > len(BROKEN))
        await trio.sleep(LOOK_S + SETTLE_S)
        assert gw.gateway.config == before and refusals() == len(BROKEN) + 1  # each once
        caplog.clear()
        await gw.change(gw.text(0, 1), lambda: gw.lanes == ["a", "b"])
        status = (await gw.get("/status"))["config"]
        assert status["error"] is None and status["path"] == str(gw.path)
        assert "kvstream_config_ok 1.0" in await gw.get("/metrics")


# --- lanes ------------------------------------------------------------------------------------------------------------


async def test_case_82_a_removed_backend_drains(tmp_path: Path) -> None:
    async with reloading(tmp_path, renamed, 0, 1) as gw:
        gw.runtimes[1].config.slots = 1
        gw.runtimes[1].script(Script(itl=0.01, tokens=25, hang_at_token=3, goes_on=(goes_on := trio.Event())))
        stream = await open_request(gw.port, "POST", CHAT, chat("running", model="mb"))
        assert stream.status == 200
        removed = gw.gateway.router.lanes[1]
        await gw.change(gw.text(0), lambda: gw.lanes == ["a"])
        assert (await gw.get("/status"))["retiring"] == [{"name": "b", "requests": 1}]
        assert removed.engine.closing and len(removed.engine.streams) == 1 and removed in gw.gateway.lanes.all
        late = await open_request(gw.port, "POST", CHAT, chat("late", model="mb", stream=False))
        assert gw.runtimes[1].journal.prompts == ["running"], "the removed backend got a new request"
        assert late.status == 200, "a single llama.cpp answers to any name"
        goes_on.set()
        body = await stream.read_all()
        assert not stream.truncated and data_of(body)[-1] == "[DONE]", "the running stream was cut"
        assert len([v for v in data_of(body) if v != "[DONE]" and v["choices"][0]["delta"].get("content")]) == 25
        await gw.until(lambda: removed not in gw.gateway.lanes.all)
        await trio.testing.wait_all_tasks_blocked(0.05)  # what was on its way has arrived
        asked = len(gw.runtimes[1].journal.entries)
        await trio.sleep(0.7)
        assert len(gw.runtimes[1].journal.entries) == asked, "nobody looks at a backend that is gone"
        for response in (stream, late):
            await response.close()


async def test_case_82_a_changed_backend_is_a_new_lane_beside_the_old_one(tmp_path: Path) -> None:
    async with reloading(tmp_path) as gw:
        gw.runtimes[0].script(Script(itl=0.01, tokens=20, hang_at_token=3, goes_on=(goes_on := trio.Event())))
        stream = await open_request(gw.port, "POST", CHAT, chat("running"))
        old = gw.gateway.router.lanes[0]
        await gw.change(gw.text(1).replace('"b"', '"a"'), lambda: gw.gateway.router.lanes[0] is not old)
        assert gw.lanes == ["a"] and len(old.engine.streams) == 1
        response = await open_request(gw.port, "POST", CHAT, chat("new"))
        assert response.status == 200 and gw.runtimes[1].journal.prompts == ["new"]
        assert 'kvstream_seats{backend="a",state="total"}' in await gw.get("/metrics")
        goes_on.set()
        assert data_of(await stream.read_all())[-1] == "[DONE]"
        for each in (stream, response):
            await each.close()


async def test_other_names_keep_the_lane_and_all_it_knows(tmp_path: Path) -> None:
    async with reloading(tmp_path) as gw:
        lane = gw.gateway.router.lanes[0]
        await gw.change(gw.text(0, alias="gpt-4o=ma"), lambda: lane.names.aliases)
        assert gw.gateway.router.lanes[0] is lane and not lane.engine.closing
        response = await open_request(gw.port, "POST", CHAT, chat(model="gpt-4o"))
        assert response.status == 200 and gw.runtimes[0].journal.calls[0].request.json["model"] == "ma"
        await response.close()


async def test_a_request_that_chose_a_lane_just_before_it_was_retired_chooses_again(tmp_path: Path) -> None:
    """Counting takes a while, and the lane is gone when it is done: nothing may wait there for ever."""
    async with reloading(tmp_path) as gw:
        gw.runtimes[0].script(Script(slot=False, goes_on=(goes_on := trio.Event())), path="/apply-template")
        answers: list[int] = []

        async def ask() -> None:
            response = await open_request(gw.port, "POST", CHAT, chat("x"))
            answers.append(response.status)
            await response.close()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await gw.until(lambda: gw.runtimes[0].journal.paths("/apply-template"))
            await gw.change(gw.text(1), lambda: gw.lanes == ["b"])
            goes_on.set()
            await gw.until(lambda: answers)
        assert answers == [200] and gw.runtimes[1].journal.prompts == ["x"]


# --- settings ---------------------------------------------------------------------------------------------------------


async def test_case_82_settings_that_new_requests_read_and_those_that_need_a_restart(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with reloading(tmp_path) as gw:
        more = ('body_bytes_max = 1024\n', '[scheduler]\nmax_queue = 7\nmax_batch_size = 3\n',
                '[auth]\nkeys = ["sk-0123456789abcdef"]\n')
        text = gw.text(0, more="".join(more[1:])).replace("port = 0\n", "port = 1\n" + more[0])
        lane = gw.gateway.router.lanes[0]
        await gw.change(text, lambda: gw.gateway.config.server.body_bytes_max == 1024)
        assert gw.gateway.router.lanes[0] is lane and lane.engine.scheduler.settings.queue_max == 7
        assert lane.engine.scheduler.settings.seats_max == 16 and gw.gateway.config.server.port == 0
        for path in ("server.port", "scheduler.max_batch_size"):
            assert f"restart to apply: {path}" in caplog.messages
        refused = await open_request(gw.port, "POST", CHAT, chat())
        assert refused.status == 401
        key = [("Authorization", "Bearer sk-0123456789abcdef")]
        large = await open_request(gw.port, "POST", CHAT, chat("x" * 2000), key)
        assert large.status == 413 and error_of(await large.read_all())["code"] == "body_too_large"
        good = await open_request(gw.port, "POST", CHAT, chat(), key)
        assert good.status == 200
        assert gw.gateway.reloader.status()["restart"] == ["server.port", "scheduler.max_batch_size"]
        for each in (refused, large, good):
            await each.close()


async def test_a_key_file_that_changes_is_read_again_too(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\nname = "one"\nkey = "sk-0123456789abcdef"\n')
    keys.chmod(0o600)
    async with reloading(tmp_path, renamed, 0, more=f'[auth]\nkeys_file = "{keys}"\n') as gw:

        async def status_with(key: str) -> int:
            response = await open_request(gw.port, "POST", CHAT, chat(), [("Authorization", f"Bearer {key}")])
            await response.close()
            return response.status

        assert await status_with("sk-0123456789abcdef") == 200
        keys.write_text('[[key]]\nname = "two"\nkey = "sk-fedcba9876543210"\n')
        with trio.fail_after(HANG_S):
            while await status_with("sk-fedcba9876543210") != 200:
                await trio.sleep(0.1)
        assert await status_with("sk-0123456789abcdef") == 401


@pytest.mark.parametrize(("word", "by_change", "by_signal"), [
    ("auto", True, True), ("sighup", False, True), ("off", False, False)])
async def test_when_the_file_is_read_again(tmp_path: Path, word: str, by_change: bool, by_signal: bool) -> None:
    async with reloading(tmp_path) as gw:
        text = gw.text(0).replace("port = 0\n", f'port = 0\nreload = "{word}"\n')
        await gw.change(text, lambda: gw.gateway.config.server.reload == word if word != "auto" else True)
        gw.write(gw.path, text + gw.text(1).removeprefix(HEAD))
        for may, ask in ((by_change, False), (by_signal, True)):
            if ask:
                gw.gateway.reloader.ask()
            if may:
                await gw.until(lambda: gw.lanes == ["a", "b"])
            else:
                await trio.sleep(2 * (LOOK_S + SETTLE_S))
                assert gw.lanes == ["a"]


# --- the plan, by itself ----------------------------------------------------------------------------------------------


def backends(*names: str, **changes: Any) -> Config:
    rows = [BackendConfig(base_url=f"http://{name}:1", name=name, **changes) for name in names]
    return attrs.evolve(Config(), backend=rows[0], more_backends=tuple(rows[1:]))


def test_the_plan_of_nothing_is_nothing() -> None:
    for config in (Config(), backends("a", "b")):
        plan = plan_reload(config, config)
        assert not (plan.live or plan.restart or plan.opened or plan.retired)
        assert plan.config.backends == config.backends


def test_the_plan_of_lanes() -> None:
    plan = plan_reload(backends("a", "b"), backends("b", "c"))
    assert (plan.opened, plan.retired) == (("c",), ("a",))
    assert [b.name for b in plan.config.backends] == ["b", "c"]
    plan = plan_reload(backends("a", "b"), backends("a", "b", seats=3))
    assert (plan.opened, plan.retired) == (("a", "b"), ("a", "b"))
    plan = plan_reload(backends("a"), backends("a", aliases=("x=y",)))
    assert (plan.opened, plan.retired, plan.live) == ((), (), ("backend a",))


def test_the_embedded_server_stays_whatever_the_file_says() -> None:
    old = attrs.evolve(backends("x"), embedded=EmbeddedConfig(model="m.gguf"), backend=BackendConfig())
    for new in (backends("x"), attrs.evolve(old, embedded=EmbeddedConfig(model="other.gguf"))):
        plan = plan_reload(attrs.evolve(old, more_backends=()), new)
        assert plan.config.backends[0].name == "embedded" and plan.config.embedded.model == "m.gguf"
        assert "embedded.model" in plan.restart and "embedded" not in plan.retired
    plan = plan_reload(Config(), attrs.evolve(old, more_backends=()))
    assert plan.restart == ("embedded.model",) and not plan.opened and not plan.retired
    plan = plan_reload(old, attrs.evolve(old, backend=BackendConfig(seats=2, aliases=("a=b",))))
    assert plan.restart == ("backend.seats",) and plan.config.backends[0].aliases == ("a=b",)


@pytest.mark.parametrize("about", [about for about in KEYS if about.section != "backend"], ids=lambda about: about.path)
def test_every_key_is_live_or_named(about: Any) -> None:
    """A key that a reload silently ignores would be worse than one that needs a restart."""
    old = Config()
    value = object()
    section = attrs.evolve(getattr(old, about.section), **{about.name: value})
    new = attrs.evolve(old, **{about.section: section})
    if about.path == "embedded.model":
        return
    plan = plan_reload(old, new)
    live = about.path in LIVE or about.section in LIVE_SECTIONS
    assert (plan.live, plan.restart) == (((about.path,), ()) if live else ((), (about.path,)))
    assert (plan.config.get(about.path) is value) is live


def test_every_live_key_exists() -> None:
    assert {about.path for about in KEYS} >= LIVE and {about.section for about in KEYS} >= LIVE_SECTIONS


# --- the process ------------------------------------------------------------------------------------------------------

posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and terminals")
SERVE = "import sys; sys.argv = ['kvstream', 'serve', '--config', sys.argv[1]]; from kvstream.cli import main; main()"
# Runs SERVE in a terminal of its own, tells its process id, and closes the terminal when told to.
IN_TERMINAL = """
import os, pty, signal, sys
pid, terminal = pty.fork()
if pid == 0:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also when the tests themselves run under nohup
    os.dup2(int(sys.argv[3]), 2)
    os.execv(sys.executable, [sys.executable, "-c", sys.argv[1], sys.argv[2]])
print(pid, flush=True)
sys.stdin.readline()
os.close(terminal)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


class Log:
    """The stderr of a process, as far as it came."""

    def __init__(self) -> None:
        self.text = ""

    async def read(self, stream: trio.abc.ReceiveStream) -> None:
        while data := await stream.receive_some():
            self.text += data.decode()

    async def until(self, words: str) -> None:
        with trio.fail_after(2 * HANG_S):
            while words not in self.text:
                await trio.sleep(0.02)


@posix
async def test_case_82_sighup_reads_the_file_again(tmp_path: Path) -> None:
    path, log = tmp_path / "kvstream.toml", Log()
    path.write_text("[server]\nport = 0\nreload = 'sighup'\n")
    async with trio.open_nursery() as nursery:
        process = await trio.lowlevel.open_process([sys.executable, "-c", SERVE, str(path)], stderr=subprocess.PIPE,
                                                   stdout=subprocess.DEVNULL, start_new_session=True)
        assert process.stderr is not None
        nursery.start_soon(log.read, process.stderr)
        try:
            await log.until("listening on")
            path.write_text("[server]\nport = 1\nreload = 'sighup'\n[[backend]]\nname = 'one'\n")
            process.send_signal(signal.SIGHUP)
            await log.until("restart to apply: server.port")
            await log.until("backend one added")
            path.write_text("[server")
            process.send_signal(signal.SIGHUP)
            await log.until("the configuration stays as it was")
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            with trio.fail_after(HANG_S):
                assert await process.wait() == 0
        finally:
            process.kill()


@posix
async def test_a_terminal_that_is_closed_ends_what_was_started_in_it(tmp_path: Path) -> None:
    """It also sends SIGHUP. Whoever closes a window expects the model to leave the memory."""
    path, log = tmp_path / "kvstream.toml", Log()
    path.write_text("[server]\nport = 0\n")
    reading, writing = os.pipe()
    process = await trio.lowlevel.open_process(
        [sys.executable, "-c", IN_TERMINAL, SERVE, str(path), str(writing)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, pass_fds=(writing,))
    os.close(writing)
    assert process.stdin is not None and process.stdout is not None
    child = int(await process.stdout.receive_some())
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(log.read, trio.lowlevel.FdStream(reading))
            await log.until("listening on")
            os.kill(child, signal.SIGHUP)  # not from the terminal
            await log.until("configuration read again: nothing changed")
            await process.stdin.send_all(b"\n")
            with trio.fail_after(HANG_S):
                assert await process.wait() == 0
        assert "SIGHUP: draining" in log.text
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        process.kill()
