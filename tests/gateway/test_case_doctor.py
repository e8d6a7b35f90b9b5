"""``kvstream doctor`` and ``kvstream models`` before real sockets, cases 54, 55 and 57 among them."""

from __future__ import annotations

import importlib.util
import json
import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from click.testing import CliRunner, Result

from kvstream import cli
from kvstream.adapters.advice import GIB
from kvstream.adapters.llamacpp_flags import ServerFlags
from kvstream.config import Config, Loaded, load_config
from kvstream.errors import BackendUnavailableError
from kvstream.gateway import machine
from kvstream.gateway.doctor import Facts, Question, Report, ServerReport, examine, how_to_start, isolation_target
from kvstream.gateway.inventory import list_models
from kvstream.gateway.isolation import CALL_TOKENS, calls_total, judge, seen, try_isolation
from tests.fakes import open_runtime
from tests.fakes.server import open_server
from tests.gateway.conftest import chat, open_rig
from tests.gateway.several import open_rigs

pytestmark = pytest.mark.usefixtures("patient")

BILLING = "x-anthropic-billing-header: cch={}; " + "Keep to the rules of the house. " * 20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def facts(*ports: int, memory: int | None = 64 * GIB, files: int | None = None, flags: ServerFlags | None = None,
          ollama: Mapping[str, str] | None = None) -> Facts:
    return Facts(lambda: memory, lambda: files, lambda port: flags, lambda: ollama, ports)


def ask(known: Facts | None = None, *, url: str | None = None, **keys: Any) -> Question:
    """A question with keys of the configuration; KVStream's own port is a free one unless given."""
    flags = {"server.port": free_port()} | {path.replace("__", "."): value for path, value in keys.items()}
    return Question(load_config(env={}, flags=flags, together=False), url=url, facts=known or facts())


def texts(report: Report, severity: str = "") -> str:
    return "\n".join(f"{one.text} {one.remedy}" for one in report.all_findings()
                     if not severity or one.severity == severity)


async def run(*arguments: str, env: Mapping[str, str] | None = None) -> Result:
    """The command line, in a thread: it brings a Trio of its own."""
    return await trio.to_thread.run_sync(partial(CliRunner().invoke, cli.main, list(arguments), env=env))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # no kvstream.toml of the working directory


# --- the report -------------------------------------------------------------------------------------------------------


async def test_without_any_server_it_says_how_to_start_one() -> None:
    report = await examine(ask())
    assert report.exit_code == 0 and report.servers == ()
    assert "kvstream demo" in texts(report, "note") and "kvstream serve --model" in texts(report, "note")


async def test_case_55_an_unseen_cache_ram_on_a_small_machine() -> None:
    async with open_runtime() as runtime, open_server(runtime) as server:
        report = await examine(ask(facts(server.port, memory=16 * GIB)))
        (found,) = report.servers
        assert (found.kind, found.role, report.exit_code) == ("llamacpp", "found", 0)
        assert "8,192 MiB" in texts(report, "warning") and "--cache-ram 2048" in texts(report, "warning")
        assert "--backend llamacpp --backend-url" in texts(report, "note")
        assert all(entry.request.method == "GET" and entry.request.path != "/slots"
                   for entry in runtime.journal.entries)


async def test_the_configured_backend_is_the_one_advised_on() -> None:
    async with open_runtime() as runtime, open_server(runtime) as one, open_server(runtime) as two:
        report = await examine(ask(facts(two.port), backend__base_url=one.base_url))
        roles = {server.url: (server.role, bool(server.findings)) for server in report.servers}
        assert roles == {one.base_url: ("backend", True), two.base_url: ("found", False)}
        assert report.count("problem") == 0


@pytest.mark.parametrize("others", [True, False])
async def test_a_configured_backend_that_is_away(others: bool) -> None:
    async with open_runtime() as runtime, open_server(runtime) as server:
        known = facts(server.port) if others else facts()
        report = await examine(ask(known, backend__base_url=f"http://127.0.0.1:{free_port()}"))
        assert report.exit_code == 1 and "is not there" in texts(report, "problem")
        assert (server.base_url in texts(report, "problem")) is others


async def test_several_backends_of_which_one_is_away(tmp_path: Path) -> None:
    async with open_runtime() as runtime, open_server(runtime) as server:
        away = f"http://127.0.0.1:{free_port()}"
        path = tmp_path / "two.toml"
        path.write_text(f'[server]\nport = {free_port()}\n[[backend]]\nbase_url = "{server.base_url}"\n'
                        f'[[backend]]\nname = "b"\nbase_url = "{away}"\n', "utf-8")
        report = await examine(Question(load_config(path, env={}), facts=facts()))
        assert [(one.url, one.role) for one in report.servers] == [(server.base_url, "backend")]
        assert report.count("problem") == 1 and f"{away} is not there" in texts(report, "problem")


async def test_a_backend_of_another_kind() -> None:
    async with open_runtime(dialect="openai") as runtime, open_server(runtime) as server:
        report = await examine(ask(backend__base_url=server.base_url))
        assert "backend.type is llamacpp, but vLLM answers" in texts(report, "problem")
        assert 'set backend.type = "openai"' in texts(report, "problem")
    async with open_runtime() as runtime, open_server(runtime) as server:
        report = await examine(ask(backend__base_url=server.base_url, backend__type="openai"))
        assert report.exit_code == 0 and 'set backend.type = "llamacpp"' in texts(report, "note")


async def test_case_57_kvstream_as_its_own_backend_is_a_problem() -> None:
    async with open_rig() as rig:
        report = await examine(ask(backend__base_url=rig.gateway.url, server__port=rig.port))
        assert "call itself in circles" in texts(report, "problem")
        report = await examine(ask(backend__base_url=rig.gateway.url))  # one in front of another is no circle
        assert report.exit_code == 0 and "is another KVStream" in texts(report, "warning")
        report = await examine(ask(facts(rig.port)))
        assert f"--backend-url {rig.gateway.url}" not in texts(report)


async def test_a_running_kvstream_and_what_is_behind_it() -> None:
    async with open_rig() as rig:
        for nonce in ("fa690", "0b1c2"):
            body = chat(messages=[{"role": "system", "content": BILLING.format(nonce)},
                                  {"role": "user", "content": "hello"}], stream=False, max_tokens=2)
            await (await rig.post(body)).read_all()
        report = await examine(ask(facts(rig.port), server__port=rig.port))
        assert [(one.kind, one.role) for one in report.servers] == [("kvstream", "found"), ("llamacpp", "serves")]
        assert report.exit_code == 0  # its port is its own
        assert "is up" in texts(report, "ok")
        assert "prefix diverges" in texts(report, "warning") and "anthropic_cch" in texts(report, "warning")


async def test_what_the_kvstream_that_was_found_knows_is_not_called_invisible(tmp_path: Path) -> None:
    knobs = {"slots_dir": str(tmp_path), "cell_bytes": 256, "unified": False}
    inject = {"mode": "auto", "dir": str(tmp_path)}
    async with open_rig(knobs=knobs, inject=inject) as rig:
        await rig.until(lambda: rig.engine.inject.active)
        alone = texts(await examine(ask(url=rig.fake.base_url)))
        assert "Whether it has --slot-save-path cannot be seen" in alone and "cannot be seen from here. " in alone
        report = await examine(ask(facts(rig.port), server__port=rig.port))
        assert "Hard inject (hard)" in texts(report) and "tokens each (split KV)" in texts(report)
        for words in ("cannot be seen", "not visible from here", "is off)"):
            assert words not in texts(report), words


async def test_a_kvstream_without_a_backend_is_a_problem() -> None:
    async with open_rig(wait=False, knobs={"refuse": True}) as rig:
        await rig.until(lambda: rig.engine.watcher.backend.state == "down")
        report = await examine(ask(url=rig.gateway.url))
        assert report.exit_code == 1 and "is down" in texts(report, "problem")
        (server,) = [one for one in report.servers if one.kind == "kvstream"]
        assert server.role == "given"


async def test_a_port_that_is_taken() -> None:
    async with open_runtime() as runtime, open_server(runtime) as server:
        report = await examine(ask(server__port=server.port))
        assert f"Port {server.port}, where KVStream would listen, is taken by llama.cpp" in texts(report, "problem")
        assert f"--port {server.port + 1}" in texts(report, "problem")


async def test_a_given_url_is_all_that_is_looked_at() -> None:
    async with open_runtime() as runtime, open_server(runtime) as one, open_server(runtime) as two:
        report = await examine(ask(facts(two.port), url=one.base_url))
        assert [(server.url, server.role) for server in report.servers] == [(one.base_url, "given")]
    report = await examine(ask(url=f"http://127.0.0.1:{free_port()}"))
    assert report.exit_code == 1 and "Nothing answers" in texts(report)


@pytest.mark.parametrize(("status", "backend"), [(404, False), (404, True), (200, False)])
async def test_a_web_server_is_no_runtime(status: int, backend: bool) -> None:
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, partial(web_server, status), 0, host="127.0.0.1"))
        url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        report = await examine(ask(backend__base_url=url) if backend else ask(url=url))
        assert report.exit_code == 1
        assert "no model runtime (it calls itself SimpleHTTP/0.6)" in texts(report, "problem")
        assert "a base URL is a runtime's address and port: http://127.0.0.1:8081" in texts(report, "problem")
        nursery.cancel_scope.cancel()


async def web_server(status: int, stream: trio.SocketStream) -> None:
    await stream.receive_some()
    await stream.send_all(b"HTTP/1.1 %d So\r\nServer: SimpleHTTP/0.6\r\nContent-Type: text/html\r\nContent-Length: 4"
                          b"\r\nConnection: close\r\n\r\n<!do" % status)


@pytest.mark.parametrize(("files", "warned"), [(None, False), (10_000, False), (1024, True)])
async def test_too_few_files(files: int | None, warned: bool) -> None:
    report = await examine(ask(facts(files=files)))
    assert ("1,024 files may be open" in texts(report, "warning")) is warned
    assert not warned or "server.connections_max = 448" in texts(report)


async def test_a_wrong_configuration_is_exit_code_2() -> None:
    wrong = ("server.port: must be at most 65535",)
    async with open_runtime() as runtime, open_server(runtime) as server:
        question = Question(None, wrong, ("KVSTREAM_PORT sets nothing",), facts=facts(server.port))
        report = await examine(question)
        assert [one.url for one in report.servers] == [server.base_url] and "--url" in texts(report, "note")
        named = await examine(attrs.evolve(question, url=server.base_url))
        assert named.exit_code == 2 and "--url" not in texts(named, "note")
    assert report.exit_code == 2 and "server.port" in texts(report, "problem")
    assert "KVSTREAM_PORT" in texts(report, "warning")


@pytest.mark.parametrize("there", [True, False])
def test_the_demo_is_named_where_it_can_run(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if there else None)
    assert ("kvstream demo" in how_to_start()) is there and "kvstream serve --model FILE.gguf" in how_to_start()


# --- isolation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("repeats", "mixed"), [("", False), ("own", False), ("other", True)])
async def test_case_54_mixed_sessions_are_reported(repeats: Any, mixed: bool) -> None:
    knobs = {"repeats": repeats, "answer_tokens": 60, "slots": 2, "prefill_rate": 1e6, "decode_rate": 1e5}
    async with open_runtime(**knobs) as runtime, open_server(runtime) as server:
        told: list[tuple[int, int]] = []
        with trio.fail_after(300):
            trial = await try_isolation(server.base_url, rounds=3, progress=lambda *now: told.append(now))
        assert trial.calls == calls_total(3) == len(runtime.journal.calls) and trial.failed == 0
        assert told == [(n, trial.calls) for n in range(1, trial.calls + 1)]
        findings = judge(trial)
        assert ({one.severity for one in findings} == {"problem"}) is mixed
        assert any("--cache-ram 0" in one.text + one.remedy for one in findings)
        lengths = {len(call.request.body) for call in runtime.journal.calls}
        assert min(lengths) > 2000  # long enough to push others out


async def test_case_54_through_kvstream_nothing_is_mixed() -> None:
    async with open_rig(knobs={"repeats": "own", "answer_tokens": 60, "prefill_rate": 1e6, "decode_rate": 1e5}) as rig:
        trial = await try_isolation(rig.gateway.url, rounds=2)
        assert trial.calls == calls_total(2) and not trial.leaks and not trial.failed


async def test_a_server_that_fails_is_not_asked_on() -> None:
    async with open_runtime(api_key="sesame") as runtime, open_server(runtime) as server:
        trial = await try_isolation(server.base_url)
        assert trial.calls < calls_total() and trial.cut_short
        (found,) = judge(trial)
        assert found.severity == "problem" and "401" in found.text and "KVSTREAM_KEY" in found.remedy
        assert (await try_isolation(server.base_url, rounds=1, api_key="sesame")).failed == 0


@pytest.mark.parametrize(("answer", "expected"), [
    ("it is kvs0a1b2c3d4e", True), ("KVS 0A1B-2C3D 4E!", True), ("kvs0a1b2c", False), ("", False)])
def test_a_canary_is_known_however_it_is_spelt(answer: str, expected: bool) -> None:
    assert seen("kvs0a1b2c3d4e", answer) is expected


def test_whom_to_test() -> None:
    def server(role: str, kind: str = "llamacpp", state: str = "up") -> ServerReport:
        return ServerReport(f"http://h:{role}{kind}".replace("http://h:", "http://") + ":1", kind, "", "", state, role)

    def target(*servers: ServerReport) -> ServerReport | None:
        found = isolation_target(Report("", "", "", servers, ()), Question(Loaded.of(Config())))
        return found and found[0]

    given, backend, found, kvstream = server("given"), server("backend"), server("found"), server("found", "kvstream")
    assert target() is None and target(server("found", "unknown"), server("backend", state="locked")) is None
    assert target(kvstream, found, backend, given) is given
    assert target(kvstream, found, backend) is backend
    assert target(kvstream, found) is found and target(kvstream) is kvstream


# --- models -----------------------------------------------------------------------------------------------------------


async def test_models_of_a_running_kvstream_else_of_the_runtimes() -> None:
    async with open_rig() as rig:
        question = ask(facts(rig.fake.port), server__port=rig.port)
        (group,) = await list_models(question)
        assert group.url == rig.gateway.url and "llamacpp" in group.backend
        assert [(row.name, row.context) for row in group.models] == [("fake-model", 4096)]
        (group,) = await list_models(ask(facts(rig.fake.port)))
        assert group.backend == "llama.cpp" and group.models[0].state == "loaded"
        (group,) = await list_models(ask(facts(rig.port)))  # found elsewhere than where it would be
        assert group.url == rig.gateway.url
    with pytest.raises(BackendUnavailableError, match="kvstream demo"):
        await list_models(ask())


async def test_an_alias_stands_beside_its_model() -> None:
    async with open_rigs({"type": "openai", "knobs": {"model": "qwen3"}, "aliases": ("gpt-4o=qwen3", "x=gone")}) as rig:
        question = ask(url=rig.gateway.url)
        (group,) = await list_models(question)
        assert [(row.name, row.aliases) for row in group.models] == [("qwen3", ("gpt-4o",)), ("x", ())]
        assert [row.name for row in (await examine(question)).servers[0].models] == ["qwen3", "x"]


async def test_models_of_a_kvstream_that_wants_a_key() -> None:
    async with open_rig(auth={"keys": ("alice's",)}) as rig:
        for question in (ask(server__port=rig.port), ask(url=rig.gateway.url)):
            (group,) = await list_models(question, "alice's")
            assert [row.name for row in group.models] == ["fake-model"]
            for key in ("", "bob's"):
                with pytest.raises(BackendUnavailableError, match="KVSTREAM_KEY"):
                    await list_models(question, key)


# --- the command line -------------------------------------------------------------------------------------------------


async def test_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"KVSTREAM_SERVER__PORT": str(free_port())}
    async with open_runtime(model="\x1b[31mred") as runtime, open_server(runtime) as server:
        shown = await run("doctor", "--url", server.base_url, env=env)
        assert shown.exit_code == 0, shown.output
        assert "llama.cpp" in shown.output and "-> " in shown.output and "\x1b" not in shown.output
        assert max(len(line) for line in shown.output.splitlines()) > 100  # a pipe is not wrapped
        value = json.loads((await run("doctor", "--url", server.base_url, "--json", env=env)).output)
        assert value["servers"][0]["kind"] == "llamacpp" and value["exit_code"] == 0 and value["counts"]["problem"] == 0
        listed = await run("models", "--url", server.base_url, env=env)
        assert listed.exit_code == 0 and "red" in listed.output and "\x1b" not in listed.output
        groups = json.loads((await run("models", "--url", server.base_url, "--json", env=env)).output)
        assert groups[0]["models"][0]["context"] == 4096
    gone = await run("models", "--url", server.base_url, env=env)
    assert gone.exit_code == 1 and "answers at" in gone.output
    assert (await run("doctor", "--url", server.base_url, env=env)).exit_code == 1
    assert (await run("doctor", "--url", "nonsense", env=env)).exit_code == 2
    wrong = await run("doctor", "--url", server.base_url, env={"KVSTREAM_SERVER__PORT": "x"})
    assert wrong.exit_code == 2 and "server.port" in wrong.output
    assert (await run("models", env={"KVSTREAM_SERVER__PORT": "x"})).exit_code == 2


async def test_the_command_for_isolation() -> None:
    knobs = {"repeats": "other", "answer_tokens": 60, "prefill_rate": 1e6, "decode_rate": 1e5}
    async with open_runtime(**knobs) as runtime, open_server(runtime) as server:
        env = {"KVSTREAM_SERVER__PORT": str(free_port())}
        result = await run("doctor", "--isolation", "--url", server.base_url, env=env)
        assert result.exit_code == 1 and "sessions see each other's text" in result.output
        assert f"of {calls_total()} calls" in result.output and f"isolation: {calls_total()} calls of" in result.output
    assert f"{calls_total()} model calls of some {CALL_TOKENS} tokens" in " ".join(
        (await run("doctor", "--help")).output.split())


async def test_isolation_behind_a_key() -> None:
    knobs = {"repeats": "own", "prefill_rate": 1e6, "decode_rate": 1e5}
    async with open_runtime(api_key="sesame", **knobs) as runtime, open_server(runtime) as server:
        env = {"KVSTREAM_SERVER__PORT": str(free_port()), "KVSTREAM_KEY": "sesame"}
        ok = await run("doctor", "--isolation", "--url", server.base_url, env=env)
        assert f"in {calls_total()} answers nobody saw" in ok.output
        wrong = await run("doctor", "--isolation", "--url", server.base_url, env=env | {"KVSTREAM_KEY": "simsim"})
        assert "the test is not complete" in wrong.output and "in KVSTREAM_KEY" in " ".join(wrong.output.split())


# --- the machine ------------------------------------------------------------------------------------------------------


def process(proc: Path, pid: int, *argv: str, **environment: str) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in argv))
    words = [f"{name}={value}" for name, value in ({"SECRET": "x"} | environment).items()]
    (folder / "environ").write_bytes(b"".join(word.encode() + b"\0" for word in words))


def test_the_flags_of_a_local_server_are_read(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    assert machine.llama_flags(8080, proc) is None
    process(proc, 1, "/bin/llama-server", "--port", "8081", "--cache-ram", "0", LLAMA_ARG_N_PARALLEL="2")
    process(proc, 2, "llama-server", "-b", "64")
    process(proc, 3, "vim", "--port", "8082")
    process(proc, 4)
    (proc / "self").mkdir()
    first = machine.llama_flags(8081, proc)
    assert first is not None and (first.cache_ram_given, first.parallel) == (0, 2)
    assert machine.llama_flags(8080, proc) == ServerFlags(batch=64)
    assert machine.llama_flags(8082, proc) is None
    process(proc, 5, "llama-server", "-b", "65")
    assert machine.llama_flags(8080, proc) is None  # two claim that port: nobody knows


def test_ollamas_variables_and_no_others_are_read(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    assert machine.ollama_variables(proc) is None
    process(proc, 1, "/usr/bin/ollama", "run", "x")
    assert machine.ollama_variables(proc) is None
    process(proc, 2, "/usr/bin/ollama", "serve", OLLAMA_NUM_PARALLEL="4")
    assert machine.ollama_variables(proc) == {"OLLAMA_NUM_PARALLEL": "4"}


def test_this_machine_has_memory() -> None:
    memory = machine.memory_bytes()
    assert memory is None or memory > 2**26
    files = machine.files_max()
    assert files is None or files > 0
    assert attrs.evolve(Facts(), ports=()).ports == ()
