"""``kvstream serve`` as a child process, as an operator runs it; always killed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import trio
from attrs import frozen

ROOT = Path(__file__).resolve().parents[2]
START_S_MAX = 60.0
PAUSE_S = 8.0  # so long a machine may stand still; what would otherwise go on (1,500 tokens, a drain) takes longer
_LISTENING = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")

# One look at the runtime a second when idle instead of every ten: a pooled connection that has expired is only closed
# when its pool is used again, and the tests that count descriptors should not wait ten seconds for that.
QUICK = {"upstream.health_interval_s": "0.2"}


def patience(seconds: float) -> float:
    """``seconds`` and a pause while the cores are ours; longer when others want them too (our own servers keep two
    busy). The load that the system tells is that of the last minute, so it says nothing of what began just now, and
    nothing ever of a virtual machine that is not given its cores.

    The factor is steep because llama.cpp's threads wait for each other at barriers: with eight other runnable processes
    on two cores a prefill batch was seen to take 12 times as long.
    """
    return PAUSE_S + seconds * max(1.0, 4 * (os.getloadavg()[0] / (os.cpu_count() or 1) - 1))


@frozen
class GatewayProcess:
    """A gateway that serves on ``port``. ``log`` is its stderr so far."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=60) as client:
            return await client.get(self.url + path)

    async def status(self) -> dict[str, Any]:
        value: dict[str, Any] = (await self.get("/status")).json()
        return value

    async def settled(self, within_s: float = 10.0) -> dict[str, Any]:
        """Wait until nothing runs, drains or waits; the status then."""
        with trio.fail_after(patience(within_s)):
            while True:
                status = await self.status()
                if not status["running"] and not status["queue"]["length"] and not status["seats"]["used"]:
                    return status
                await trio.sleep(0.02)

    async def running(self, count: int, within_s: float = 10.0) -> None:
        """Wait until ``count`` requests hold a seat."""
        await self.until(lambda status: status["seats"]["used"] == count, within_s)

    async def queued(self, count: int, within_s: float = 10.0) -> None:
        await self.until(lambda status: status["queue"]["length"] == count, within_s)

    async def until(self, true: Any, within_s: float = 10.0) -> None:
        with trio.fail_after(patience(within_s)):
            while not true(await self.status()):
                await trio.sleep(0.01)

    def descriptors(self) -> int:
        return psutil.Process(self.process.pid).num_fds()

    def text(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def exit_code(self, within_s: float = 10.0) -> int:
        with trio.fail_after(patience(within_s)):
            while (code := self.process.poll()) is None:
                await trio.sleep(0.02)
        return code


def environment(keys: Mapping[str, str]) -> dict[str, str]:
    """Our environment without anybody's settings, plus ``section.key`` values as the variables that set them."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVSTREAM_")}
    env |= {f"KVSTREAM_{path.replace('.', '__')}".upper(): value for path, value in keys.items()}
    # The child runs in a folder of its own (no kvstream.toml) and must find this very copy of the package.
    return env | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH", "")]))}


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "kvstream", *args]


@contextlib.contextmanager
def start_gateway(base_url: str, folder: Path, *, ready: bool = True, **keys: str) -> Iterator[GatewayProcess]:
    """A gateway in front of ``base_url``, with ``keys`` as ``section__key="value"``; waits for ``/ready``."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "gateway.log"
    given = QUICK | {name.replace("__", "."): value for name, value in keys.items()}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command("serve", "--backend", "llamacpp", "--backend-url", base_url, "--port", "0"),
            cwd=folder, env=environment(given), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
    try:
        gateway = GatewayProcess(_port(process, log), process, log)
        _wait(process, log, lambda: not ready or _ok(f"{gateway.url}/ready"))
        yield gateway
    finally:
        process.kill()
        process.wait()


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    _wait(process, log, lambda: _LISTENING.search(log.read_text("utf-8", "replace")))
    found = _LISTENING.search(log.read_text("utf-8", "replace"))
    assert found is not None
    return int(found.group(1))


def _wait(process: subprocess.Popen[bytes], log: Path, true: Any) -> None:
    deadline = time.monotonic() + patience(START_S_MAX)
    while not true():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the gateway did not come up:\n" + log.read_text("utf-8", "replace")[-4000:])
        time.sleep(0.03)


def _ok(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False, verify=False, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
