"""The command line: which flags override what, exit codes, and what a person reads."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from kvstream import __version__, cli, config
from kvstream.config import KEYS_BY_PATH, Loaded, ServerConfig
from kvstream.errors import ConfigError, EmbeddedError, PortInUseError
from kvstream.gateway import alive, statusview


def invoke(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli.main, list(arguments), env=env)


class Served:
    """Stands in for ``kvstream.gateway.serve``: keeps what it was given, answers or raises what it was told."""

    def __init__(self) -> None:
        self.loaded: list[Loaded] = []
        self.outcome: int | Exception = 0
        self.collects: list[tuple[bool, bool]] = []

    def run(self, loaded: Loaded) -> int:
        self.loaded.append(loaded)
        self.collects.append((gc.isenabled(), gc.get_freeze_count() > 0))
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Served]:
    monkeypatch.chdir(tmp_path)
    stand_in = Served()
    module = ModuleType("kvstream.gateway.serve")
    module.run = stand_in.run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvstream.gateway.serve", module)
    demo = ModuleType("kvstream.gateway.demo")
    demo.run_demo = lambda loaded, once: stand_in.run(loaded) + (10 if once else 0)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvstream.gateway.demo", demo)
    yield stand_in
    gc.unfreeze()


def changed(served: Served) -> dict[str, object]:
    """The keys that did not keep their default, by what came out of the last run."""
    loaded = served.loaded[-1]
    return {path: loaded.config.get(path) for path, origin in loaded.origins.items() if origin != "default"}


# --- serve ------------------------------------------------------------------------------------------------------------

FLAGS = [
    ("--backend=llamacpp", "backend.type", "llamacpp"),
    ("--backend-url=http://h:1", "backend.base_url", "http://h:1"),
    ("--model=qwen", "backend.model", "qwen"),
    ("--model=missing.gguf", "embedded.model", "missing.gguf"),
    ("--llama-server=/bin/x", "embedded.llama_server", "/bin/x"),
    ("--host=0.0.0.0", "server.host", "0.0.0.0"),
    ("--port=9000", "server.port", 9000),
    ("--gpu-blocks=2048", "memory.num_gpu_blocks", 2048),
    ("--gpu-blocks=auto", "memory.num_gpu_blocks", "auto"),
    ("--cpu-blocks=0", "memory.num_cpu_blocks", 0),
    ("--block-size=32", "memory.block_size", 32),
    ("--max-batch=3", "scheduler.max_batch_size", 3),
    ("--no-prefix-cache", "prefix_cache.enabled", False),
    ("--log-level=debug", "logging.level", "DEBUG"),
]


@pytest.mark.parametrize(("flag", "path", "value"), FLAGS, ids=[flag for flag, _, _ in FLAGS])
def test_a_flag_sets_its_key_and_no_other(flag: str, path: str, value: object, served: Served) -> None:
    assert invoke("serve", flag).exit_code == 0
    assert changed(served) == {path: value}
    assert served.loaded[-1].origins[path] == f"flag {flag.partition('=')[0]}"


@pytest.mark.parametrize(("flag", "path", "value"), FLAGS, ids=[flag for flag, _, _ in FLAGS])
def test_a_flag_beats_environment_and_file(flag: str, path: str, value: object, served: Served) -> None:
    # What the environment says must differ from the flag, and be allowed.
    other = {"backend.type": "llamacpp", "backend.base_url": "http://e:1", "memory.num_gpu_blocks": "7",
             "prefix_cache.enabled": "true", "logging.level": "ERROR", "memory.block_size": "8"}.get(path, "5")
    env = {KEYS_BY_PATH[path].env: other}
    assert invoke("serve", env=env).exit_code == 0
    assert served.loaded[-1].origins[path].startswith("env ")
    assert invoke("serve", flag, env=env).exit_code == 0
    assert served.loaded[-1].config.get(path) == value


def test_flags_not_given_leave_environment_and_file_alone(served: Served) -> None:
    # KVStream 0.1's flags overwrote host, port, backend, memory and the prefix cache with their own defaults.
    Path("kvstream.toml").write_text('[memory]\nnum_gpu_blocks = 99\n[server]\nhost = "::1"\nport = 1\n', "utf-8")
    env = {"KVSTREAM_SERVER__PORT": "2", "KVSTREAM_PREFIX_CACHE__ENABLED": "false", "KVSTREAM_LOGGING__LEVEL": "ERROR",
           "KVSTREAM_SCHEDULER__MAX_BATCH_SIZE": "3"}
    assert invoke("serve", "--block-size", "8", env=env).exit_code == 0
    assert changed(served) == {
        "memory.num_gpu_blocks": 99, "server.host": "::1", "server.port": 2, "prefix_cache.enabled": False,
        "logging.level": "ERROR", "scheduler.max_batch_size": 3, "memory.block_size": 8}


def test_config_names_the_file(served: Served) -> None:
    Path("other.toml").write_text("[server]\nport = 7\n", "utf-8")
    Path("kvstream.toml").write_text("[server]\nhost = 'h'\n", "utf-8")
    assert invoke("serve", "--config", "other.toml").exit_code == 0
    assert changed(served) == {"server.port": 7}


@pytest.mark.parametrize(("arguments", "path"), [
    (["--model", "here"], "embedded.model"),  # an existing file, whatever its name
    (["--model", "./here"], "embedded.model"),
    (["--model", "org/model"], "backend.model"),
    (["--model", "qwen3:8b"], "backend.model"),
    (["--model", "./mine", "--backend-url", "http://h:1"], "backend.model"),
    (["--model", "dir", "--backend", "openai", "--backend-url", "http://h:1"], "backend.model"),
    (["--model", "x.gguf", "--backend", "llamacpp"], "embedded.model"),
    (["--model", "x.gguf", "--backend-url", "http://h:1"], "backend.model"),
    (["--model", "x.gguf", "--backend", "openai", "--backend-url", "http://h:1"], "backend.model"),
])
def test_a_model_is_a_file_to_start_or_a_name_to_ask_for(arguments: list[str], path: str, served: Served) -> None:
    Path("here").write_text("GGUF", "utf-8")
    Path("dir").mkdir()
    assert invoke("serve", *arguments).exit_code == 0
    assert served.loaded[-1].config.get(path) == arguments[1]


@pytest.mark.parametrize(("model", "said"), [
    ("", "is empty"), (" ", "is empty"), ("./nothing", "{here}/nothing does not exist"),
    ("../nothing", "/nothing does not exist"), ("~/m/x.bin", "{home}/m/x.bin does not exist"),
    ("~nobody9/x", "~nobody9/x does not exist"), ("/nothing", "/nothing does not exist"),
    ("dir", "{here}/dir is a folder"), ("./dir/", "{here}/dir is a folder"), ("org/dir", "{here}/org/dir is a folder"),
])
def test_a_mistyped_path_does_not_become_a_name(model: str, said: str, served: Served,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    Path("dir").mkdir()
    Path("org/dir").mkdir(parents=True)
    result = invoke("serve", "--model", model)
    assert result.exit_code == 2 and not served.loaded and len(result.stderr.splitlines()) == 1
    assert said.format(here=Path.cwd(), home="/home/me") in result.stderr and "a name" in result.stderr.replace(
        "the name", "a name")


# --- exit codes and messages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("outcome", "code", "said"), [
    (0, 0, ""),
    (1, 1, ""),
    (ConfigError(["a.b: wrong", "c.d: wrong too"]), 2, "kvstream: a.b: wrong\nkvstream: c.d: wrong too\n"),
    (PortInUseError("127.0.0.1:8080 is in use."), 3, "kvstream: 127.0.0.1:8080 is in use.\n"),
    (EmbeddedError("no llama-server"), 1, "kvstream: no llama-server\n"),
    (ExceptionGroup("n", [ExceptionGroup("m", [PortInUseError("taken")])]), 3, "kvstream: taken\n"),
    (ValueError("oops"), 1, "kvstream: internal error: ValueError: oops (set KVSTREAM_TRACEBACK=1 to see where)\n"),
    (ExceptionGroup("n", [PortInUseError("taken"), KeyError("k")]), 1,
     "kvstream: internal error: KeyError: 'k' (set KVSTREAM_TRACEBACK=1 to see where)\n"),
])
def test_exit_codes(outcome: int | Exception, code: int, said: str, served: Served) -> None:
    served.outcome = outcome
    for command in ("serve", "demo"):
        result = invoke(command)
        assert (result.exit_code, result.stderr, result.stdout) == (code, said, "")


def test_the_collector_rests_while_modules_are_imported(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(config, "load_config", lambda *_args, **_options: seen.append(gc.isenabled()))
    assert invoke("serve").exit_code == 0
    assert (seen, served.collects) == ([False], [(True, True)])  # (on, with what was imported out of its sight)


def test_a_wrong_configuration_leaves_the_collector_on(served: Served) -> None:
    assert invoke("serve", "--port=none").exit_code == 2
    assert gc.isenabled()


def test_a_traceback_on_request(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.outcome = ValueError("oops")
    assert "Traceback" not in invoke("serve").stderr
    assert "Traceback" in invoke("serve", env={cli.TRACEBACK_VARIABLE: "1"}).stderr


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(("arguments", "full"), [
    (["check-config"], "1"), (["--help"], "1"), (["demo", "--help"], "12"), (["check-config", "--config=/none"], "2")])
def test_output_that_cannot_be_written_is_one_sentence(arguments: list[str], full: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with FULL.open("wb") as nowhere:
        done = subprocess.run([sys.executable, "-m", "kvstream", *arguments], check=False, text=True, env=env,
                              stdout=nowhere if "1" in full else subprocess.PIPE,
                              stderr=nowhere if "2" in full else subprocess.PIPE)
    assert done.returncode == (1 if "1" in full else 2)
    assert done.stderr in (None, "kvstream: cannot write: No space left on device\n") and not done.stdout


def test_wrong_flags_and_wrong_files_are_told_together(served: Served) -> None:
    Path("kvstream.toml").write_text("[scheduler]\nmax_quue = 1\n", "utf-8")
    result = invoke("serve", "--port", "99999", "--log-level", "loud", env={"KVSTREAM_SERVER__STALL_S": "x"})
    assert result.exit_code == 2 and not served.loaded and result.stdout == ""
    assert result.stderr.splitlines() == [
        "kvstream: kvstream.toml: scheduler.max_quue: unknown key, did you mean max_queue?",
        'kvstream: environment KVSTREAM_SERVER__STALL_S: server.stall_s: must be a number, not "x"',
        "kvstream: --port: server.port: must be at most 65535, not 99999",
        'kvstream: --log-level: logging.level: must be "DEBUG", "INFO", "WARNING" or "ERROR", not "LOUD"']


@pytest.mark.parametrize("arguments", [["serve", "--nope"], ["nope"], ["serve", "extra"], ["serve", "--port"]])
def test_usage_errors(arguments: list[str], served: Served) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2 and "Traceback" not in result.output and result.stderr


def test_a_model_without_its_option(served: Served) -> None:
    result = invoke("serve", "model.gguf")
    assert result.exit_code == 2 and not served.loaded and "given as --model model.gguf" in result.stderr


def test_demo(served: Served) -> None:
    assert invoke("demo", "--once", "--port", "0").exit_code == 10
    assert changed(served) == {"server.port": 0}
    result = invoke("demo", "--port", "x")
    assert (result.exit_code, result.stderr) == (2, 'kvstream: --port: server.port: must be a whole number, not "x"\n')


def test_version_and_help() -> None:
    assert invoke("--version").output.strip() == f"kvstream, version {__version__}"
    for command in ("serve", "status", "health", "check-config", "demo"):
        assert command in invoke("--help").output
        assert invoke(command, "--help").exit_code == 0


def test_short_help_is_not_cut_off() -> None:
    assert "..." not in invoke("--help").output.partition("Commands:")[2]


def test_help_of_serve_names_keys_and_defaults() -> None:
    text = " ".join(invoke("serve", "--help").output.split())
    for path in cli.SERVE_KEYS.values():
        assert f"[{path}" in text
    for said in ("[server.port; default 8080]", "[embedded.model or backend.model]", "no effect yet",
                 "[prefix_cache.enabled; default true]"):
        assert said in text
    assert "a free one where it is taken" in " ".join(invoke("demo", "--help").output.split())


def test_variables_that_set_nothing_are_told(served: Served) -> None:
    result = invoke("serve", env={"KVSTREAM_PORT": "9000"})
    assert (result.exit_code, result.stdout, result.stderr) == (
        0, "", "kvstream: warning: environment KVSTREAM_PORT: sets nothing, did you mean KVSTREAM_SERVER__PORT?\n")
    assert changed(served) == {}


def test_the_version_needs_no_heavy_imports() -> None:
    code = ("import sys; from kvstream.cli import main\n"
            "try: main(['--version'])\nexcept SystemExit: pass\n"
            "heavy = ('trio', 'httpx', 'rich', 'quart', 'hypercorn', 'attrs', 'cattrs')\n"
            "print([name for name in heavy if name in sys.modules])")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [f"kvstream, version {__version__}", "[]"]


def test_python_dash_m() -> None:
    run = subprocess.run([sys.executable, "-m", "kvstream", "--version"], capture_output=True, text=True, check=True)
    assert __version__ in run.stdout


def test_public_names() -> None:
    import kvstream

    assert kvstream.load_config(env={}).config == kvstream.Config()
    assert {"KVStreamEngine", "Token", "Config", "load_config", "__version__"} == set(dir(kvstream))
    with pytest.raises(AttributeError, match="nope"):
        kvstream.nope  # noqa: B018


# --- check-config -----------------------------------------------------------------------------------------------------


def test_check_config_shows_values_and_origins(served: Served) -> None:
    Path("kvstream.toml").write_text("[server]\nport = 7\n", "utf-8")
    env = {"KVSTREAM_SCHEDULER__PRIORITY": "sjf", "KVSTREAM_BACKEND__API_KEY": "sk-secret"}
    lines = [" ".join(line.split()) for line in invoke("check-config", env=env).stdout.splitlines()]
    assert lines[0] == "# file: kvstream.toml"
    assert "port = 7 # kvstream.toml" in lines and "max_queue = 1000 # default" in lines
    assert 'priority = "sjf" # env KVSTREAM_SCHEDULER__PRIORITY' in lines
    assert 'api_key = "***" # env KVSTREAM_BACKEND__API_KEY' in lines

    shown = json.loads(invoke("check-config", "--json", env=env).stdout)
    assert shown["file"] == "kvstream.toml" and set(shown["values"]) == set(KEYS_BY_PATH)
    assert shown["values"]["server.port"] == {"value": 7, "origin": "kvstream.toml", "unit": None}
    assert shown["values"]["backend.api_key"]["value"] == "***"


def test_check_config_with_errors(served: Served) -> None:
    Path("bad.toml").write_text("[server]\nport = 'x'\nprot = 1\n", "utf-8")
    result = invoke("check-config", "--config", "bad.toml")
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 2)
    result = invoke("check-config", "--config", "bad.toml", "--json")
    assert result.exit_code == 2 and len(json.loads(result.stdout)["problems"]) == 2
    result = invoke("check-config", "--config", "missing.toml")
    assert result.exit_code == 2 and "missing.toml: cannot be read" in result.stderr


def test_the_template_is_the_shipped_file() -> None:
    shipped = Path(__file__).resolve().parents[1] / "kvstream.toml"
    assert invoke("check-config", "--template").stdout == shipped.read_text("utf-8")


# --- status and health ------------------------------------------------------------------------------------------------

SNAPSHOT: dict[str, Any] = {
    "version": "0.2.0", "state": "ready",
    "backend": {"kind": "llamacpp", "url": "http://127.0.0.1:8081", "state": "up", "detail": "slow", "more": [1]},
    "capacity": {"mode": "unified", "seats": 4, "pages": 64, "page_tokens": 16, "request_tokens_max": 1024,
                 "source": "/props", "notes": ["asked for 99 pages, the runtime has 64"]},
    "seats": {"total": 4, "used": 2, "draining": 1},
    "pages": {"device": {"total": 64, "free": 10, "held": 50, "cached": 4, "promised": 3}, "host": {"total": 8192}},
    "queue": {"length": 300, "bytes": 999, "requests": [
        {"id": f"req-{n}", "position": n, "age_s": 1.26, "tokens": 77, "priority": "normal"} for n in range(25)]},
    "running": [{"id": "run-1", "phase": "prefill", "tokens": 5, "unknown": {"x": 1}}],
    "prefixes": {"nodes": 3, "tokens": 48}, "counters": {"admitted": 12, "refused": 1},
}


class Fake(ThreadingHTTPServer):
    """A small HTTP server with given replies by path; not a mock of KVStream, only of its wire."""

    daemon_threads = True

    def __init__(self) -> None:
        self.replies: dict[str, tuple[int, bytes]] = {}
        self.is_kvstream = True
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"


class FakeHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, body = self.server.replies.get(self.path, (404, b"no"))  # type: ignore[attr-defined]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if self.server.is_kvstream:  # type: ignore[attr-defined]
            self.send_header("X-KVStream-Version", "0.2.0")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def rendered(snapshot: Any, width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(statusview.render(snapshot))
    return out.getvalue()


def test_status(fake: Fake) -> None:
    fake.replies["/status"] = (200, json.dumps(SNAPSHOT).encode())
    result = invoke("status", "--url", fake.url)
    assert result.exit_code == 0
    for text in ("ready", "llamacpp", "unified", "2 of 4 used", "300 waiting", "asked for 99", "run-1"):
        assert text in result.stdout
    result = invoke("status", "--json", "--url", fake.url + "/")
    assert json.loads(result.stdout) == SNAPSHOT


def test_status_shows_what_matters() -> None:
    text = rendered(SNAPSHOT)
    row = next(line for line in text.splitlines() if "device" in line)
    assert [int(word) for word in row.split() if word.isdigit()] == [64, 10, 50, 4, 3]
    assert "promised is part of free and cached" in text and "host" not in text.replace("127.0.0.1", "")
    assert "req-19" in text and "req-20" not in text and "... and 280 more" in text
    assert "admitted 12, refused 1" in text and "3 nodes, 48 tokens" in text and "up (slow)" in text and "1.3" in text


def test_rows_can_be_told_apart_on_a_narrow_terminal() -> None:
    ids = [f"kvs-0123456789{n:02}" for n in range(3)]
    running = [{"id": name, "phase": "answering", "state": "draining", "age_s": 12.5, "tokens": 12345, "produced": 512,
                "pages": 999, "cached": 12000, "counted": "estimate", "priority": "normal"} for name in ids]
    waiting = [{"position": 1, "id": name, "age_s": 12.5, "tokens": 12345, "counted": "estimate", "priority": "normal",
                "why": "its turn has not come"} for name in ids]
    snapshot = {"running": running, "queue": {"requests": waiting}}
    for width in (80, 100):
        text = rendered(snapshot, width)
        assert all(text.count(name) == 2 for name in ids) and "\N{HORIZONTAL ELLIPSIS}" not in text
        assert max(map(len, text.splitlines())) <= width and "produced" in text and "why" in text
    assert all(column in rendered(snapshot, 140) for column in running[0])


def test_shared_answers_are_counted_once_there_are_some() -> None:
    assert "sharing" not in rendered({**SNAPSHOT, "sharing": {"coalesced": 0, "cached": 0}})
    assert "sharing   coalesced 3\n" in rendered({**SNAPSHOT, "sharing": {"coalesced": 3, "cached": 0}})


def test_the_host_tier_is_shown_once_it_is_used() -> None:
    host = {"total": 8192, "free": 8000, "held": 192}
    assert "host" in rendered({**SNAPSHOT, "pages": {**SNAPSHOT["pages"], "host": host}})


def test_status_of_a_runtime_that_is_not_there_yet() -> None:
    text = rendered({**SNAPSHOT, "state": "loading", "capacity": None, "seats": {"total": 0, "used": 0, "draining": 0},
                     "pages": {"device": {"total": 0, "held": 0}}, "running": [], "queue": {"length": 0, "bytes": 0}})
    assert "capacity  not known yet" in text and "seats" not in text and "tier" not in text and "0 waiting" in text


def test_status_of_a_runtime_that_went_away() -> None:
    assert "as last known" in rendered({**SNAPSHOT, "backend": {"state": "down"}})
    assert "as last known" not in rendered(SNAPSHOT)


@pytest.mark.parametrize(("refused", "shown"), [
    ({}, "refused 0"), ({"queue_full": 0}, "refused 0"), ({"queue_full": 2, "too_long": 1, "x": 0},
                                                         "refused 3 (queue_full 2, too_long 1)")])
def test_counters_by_reason(refused: dict[str, int], shown: str) -> None:
    lines = rendered({**SNAPSHOT, "counters": {"admitted": 1, "refused": refused}}).splitlines()
    assert f"counters  admitted 1, {shown}" in [line.rstrip() for line in lines]


@pytest.mark.parametrize("snapshot", [
    {}, {"pages": {"device": None}, "queue": {"requests": [1, None, {}]}, "running": 7, "capacity": []},
    {"seats": {"used": {"x": 1}}, "counters": {"a": None}, "state": ["x"]}])
def test_status_tolerates_gaps(snapshot: dict[str, Any]) -> None:
    assert "KVStream" in rendered(snapshot)


def test_texts_from_the_server_cannot_steer_the_terminal() -> None:
    evil = "\x1b]0;owned\x07[red]x"
    text = rendered({"state": evil, "backend": {"url": evil}, "running": [{"id": evil}], "capacity": {"notes": [evil]},
                     "pages": {evil: {}}, "counters": {evil: evil}})
    assert "\x1b" not in text and "\x07" not in text and "[red]x" in text
    assert "\x1b" not in rendered({"error": evil})


def test_nothing_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(statusview.time, "sleep")  # nobody may be there to see that it waits for ever
    with Fake() as closed:
        url = closed.url
    for command in (["status"], ["status", "--json"], ["status", "--watch"], ["health"], ["reload"]):
        result = invoke(*command, "--url", url)
        assert result.exit_code == 1 and result.stdout == ""
        asked = f"kvstream: nothing answers at {url}. Is `kvstream serve` running there? "
        assert result.stderr == f"{asked}{alive.ELSEWHERE}\n" and "--url" in alive.ELSEWHERE


def test_a_wrong_file_hides_no_running_kvstream(tmp_path: Path) -> None:
    (tmp_path / "wrong.toml").write_text("[sever]\n", encoding="utf-8")
    for command in ("status", "health"):
        result = invoke(command, "--config", str(tmp_path / "wrong.toml"))
        assert result.exit_code == 2 and "did you mean server?" in result.stderr and "--url" in result.stderr


@pytest.mark.parametrize("reply", [(404, b"no"), (200, b"<html>"), (200, b"[]"), (500, b"{}"), (200, b"[" * 100_000)])
def test_something_else_answers(fake: Fake, reply: tuple[int, bytes]) -> None:
    fake.replies["/status"] = reply
    result = invoke("status", "--url", fake.url)
    assert result.exit_code == 1 and "is not a KVStream's snapshot" in result.stderr


@pytest.mark.parametrize("url", ["nonsense", "ftp://h", "http://", "http://h:x", "http://[::1"])
def test_a_url_that_is_none(url: str) -> None:
    for command in ("status", "health"):
        result = invoke(command, "--url", url)
        assert result.exit_code == 2 and result.stderr.startswith("kvstream: --url must be a URL")


def test_watch_looks_again_and_survives_a_restart(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([(200, json.dumps({"state": "draining"}).encode()), (503, b"")])

    def sleep(seconds: float) -> None:
        assert seconds == statusview.LOOK_EVERY_S
        try:
            fake.replies["/status"] = next(looks)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(statusview.time, "sleep", sleep)
    fake.replies["/status"] = (200, json.dumps({"state": "ready"}).encode())
    result = invoke("status", "--watch", "--json", "--url", fake.url)
    first, second, third = [json.loads(line) for line in result.stdout.splitlines()]
    assert (result.exit_code, first, second) == (0, {"state": "ready"}, {"state": "draining"})
    assert "answers 503" in third["error"]

    # Into a pipe, one snapshot below the other; a server that was there once is waited for.
    fake.replies["/status"] = (200, json.dumps({"state": "ready"}).encode())
    looks = iter([(503, b""), (200, json.dumps({"state": "draining"}).encode())])
    result = invoke("status", "--watch", "--url", fake.url)
    assert (result.exit_code, result.stderr) == (0, "")
    assert re.search(r"ready.*\n\n.*answers 503.*\n\n.*draining", result.stdout, re.DOTALL)


def test_the_key_of_the_environment_is_shown_and_that_of_a_file_only_at_home(
        fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "kvstream.toml"
    port = fake.url.rpartition(":")[2]
    file.write_text(f'[server]\nport = {port}\n[auth]\nmetrics_token = "t0ken"\n', "utf-8")
    fake.replies["/status"] = (200, b"{}")
    seen = []
    real = statusview.open_client
    monkeypatch.setattr(statusview, "open_client", lambda url, key="": seen.append(key) or real(url, key))
    for arguments in (["--config", str(file)], ["--config", str(file), "--url", fake.url]):
        for key in ("", "mine"):
            monkeypatch.setenv("KVSTREAM_KEY", key)
            invoke("status", *arguments)
    assert seen == ["t0ken", "mine", "", "mine"]


@pytest.mark.parametrize(("health", "ready", "code", "said"), [
    ((200, b"{}"), (200, b"{}"), 0, "is alive and ready."),
    ((500, b"{}"), (200, b"{}"), 1, "answers 500 on /health"),
    ((200, b"{}"), (503, b'{"error": {"message": "the model is being loaded"}}'), 1, "not ready: the model is"),
    ((200, b"{}"), (503, b'{"state": "draining"}'), 1, "not ready: draining"),
    ((200, b"{}"), (503, b"\xff"), 1, "not ready: status 503"),
])
def test_health(fake: Fake, health: tuple[int, bytes], ready: tuple[int, bytes], code: int, said: str) -> None:
    fake.replies.update({"/health": health, "/ready": ready})
    result = invoke("health", "--url", fake.url)
    assert result.exit_code == code and said in result.output


def test_the_health_of_something_else(fake: Fake) -> None:
    fake.is_kvstream = False
    fake.replies.update({"/health": (200, b"{}"), "/ready": (200, b"{}")})
    result = invoke("health", "--url", fake.url)
    assert (result.exit_code, result.stderr) == (1, f"kvstream: {fake.url} answers, but that is not a KVStream.\n")


def test_alive_is_asked_of_nothing_but_the_process(fake: Fake) -> None:
    """/ready would ask about the backend; here nobody answers it."""
    fake.replies["/health"] = (200, b"{}")
    assert invoke("health", "--live", "--url", fake.url + "/").stdout == f"{fake.url}/ is alive.\n"
    fake.replies["/health"] = (500, b"{}")
    assert "answers 500 on /health" in invoke("health", "--live", "--url", fake.url).stderr
    fake.replies["/health"], fake.is_kvstream = (200, b"{}"), False
    result = invoke("health", "--live", "--url", fake.url)
    assert result.exit_code == 1 and "that is not a KVStream" in result.stderr
    with Fake() as closed:
        url = closed.url
    result = invoke("health", "--live", "--url", url)
    assert result.exit_code == 1 and f"{url} does not answer" in result.stderr


def test_one_that_says_nothing_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alive, "ANSWER_S_MAX", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        result = invoke("health", "--live", "--url", f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert result.exit_code == 1 and "does not answer: timed out" in result.stderr


@pytest.mark.parametrize("sent", [b"H", b"\x1b]0;evil\x07\r\n\r\n"])
def test_one_that_says_little_is_not_alive(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then, and what would steer a terminal; also when the thread that hangs up is then kept waiting."""
    monkeypatch.setattr(alive, "ANSWER_S_MAX", 0.3 if sent == b"H" else 60.0)  # what is no HTTP is told at once
    hang_up = alive._hang_up
    monkeypatch.setattr(alive, "_hang_up", lambda *given: (hang_up(*given), time.sleep(0.3)))

    def says() -> None:
        connection, _ = little.accept()
        with connection, contextlib.suppress(OSError):
            while True:
                connection.sendall(sent)
                time.sleep(0.02)

    with socket.create_server(("127.0.0.1", 0)) as little:
        threading.Thread(target=says, daemon=True).start()
        result = invoke("health", "--live", "--url", f"http://127.0.0.1:{little.getsockname()[1]}")
    assert result.exit_code == 1 and ("timed out" if sent == b"H" else r"\x1b]0;evil\x07") in result.stderr


@pytest.mark.parametrize("url", ["nonsense", "ftp://h", "http://", "http://h:x", "http://[::1", "http://a..b", "http://h/é"])
def test_alive_wants_a_url(url: str) -> None:
    result = invoke("health", "--live", "--url", url)
    assert result.exit_code == 2 and result.stderr.startswith("kvstream: --url must be a URL")


def test_a_file_that_is_wrong_by_now_kills_nobody(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fake.replies["/health"] = (200, b"{}")
    where = {"KVSTREAM_SERVER__PORT": str(fake.server_port), "KVSTREAM_SERVER__HOST": "0.0.0.0"}
    assert invoke("health", "--live", env=where).exit_code == 0
    Path("kvstream.toml").write_text("[sever]\n", "utf-8")
    result = invoke("health", "--live", env=where)
    assert result.exit_code == 0 and "did you mean server?" in result.stderr
    result = invoke("health", "--live", env={**where, "KVSTREAM_SERVER__PORT": "x"})
    assert result.exit_code == 2 and "server.port" in result.stderr


def test_asking_whether_it_is_alive_imports_little() -> None:
    code = ("import sys; from kvstream import cli, config_load; from kvstream.gateway import alive;"
            "print([name for name in ('httpx', 'rich', 'trio', 'h11') if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_configured_kvstream_is_looked_at(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fake.replies.update({"/health": (200, b"{}"), "/ready": (200, b"{}")})
    fake.replies["/status"] = (200, json.dumps(SNAPSHOT).encode())
    port = fake.server_port
    # Half a configuration, whose base_url is on the command line of `serve`, tells where KVStream is all the same.
    text = f"[server]\nhost = '0.0.0.0'\nport = {port}\n[backend]\ntype = 'openai'\n"
    Path("kvstream.toml").write_text(text, "utf-8")
    assert invoke("health").stdout == f"http://127.0.0.1:{port} is alive and ready.\n"
    assert json.loads(invoke("status", "--json").stdout) == SNAPSHOT
    other = {"KVSTREAM_SERVER__PORT": "1"}
    assert "nothing answers at http://127.0.0.1:1." in invoke("health", env=other).stderr
    assert invoke("health", "--url", fake.url, env=other).exit_code == 0
    Path("kvstream.toml").rename("other.toml")
    assert invoke("health", "--config", "other.toml").exit_code == 0


@pytest.mark.parametrize(("host", "port", "url"), [
    ("127.0.0.1", 8080, "http://127.0.0.1:8080"), ("0.0.0.0", 1, "http://127.0.0.1:1"), ("::", 2, "http://[::1]:2"),
    ("kv.example", 3, "http://kv.example:3")])
def test_where_a_configuration_listens(host: str, port: int, url: str) -> None:
    assert alive.url_of(ServerConfig(host=host, port=port)) == url


def test_a_port_that_nobody_knows_beforehand() -> None:
    result = invoke("status", env={"KVSTREAM_SERVER__PORT": "0"})
    assert result.exit_code == 2 and "give --url" in result.stderr
