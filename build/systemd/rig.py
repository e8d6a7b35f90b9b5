"""KVStream as a service in a machine of nspawn.py, and clients of it on this side."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator

from nspawn import Machine
from smoke import Failed, Stream, answers, check, free_port, wait_for

DROPIN = "/etc/systemd/system/kvstream.service.d/test.conf"
CONFIG = "/etc/kvstream/kvstream.toml"
QUICK = "RestartSec=0.5\n"  # what is tried, and not how long systemd waits


class Trial:
    """The machine, with KVStream installed in it, in front of a canned backend here."""

    def __init__(self, machine: Machine, backend: str, model: bool) -> None:
        self.machine, self.backend, self.has_model = machine, backend, model
        self.port = free_port()

    def configure(self, text: str = "", service: str = "", unit: str = "") -> None:
        """The configuration, and lines of [Service] and [Unit]; the service is stopped before."""
        m = self.machine
        m.systemctl("stop", "kvstream.socket", "kvstream.service", check=False)
        m.systemctl("reset-failed", "kvstream.service", check=False)
        m.write(DROPIN, f"[Unit]\n{unit}\n[Service]\n{QUICK}{service}\n")
        m.write(CONFIG, text or self.toml())
        m.systemctl("daemon-reload")

    def toml(self, more: str = "") -> str:
        return f'[server]\nport = {self.port}\n{more}\n[[backend]]\ntype = "openai"\nbase_url = "{self.backend}"\n'

    def start(self) -> float:
        began = time.monotonic()
        done = self.machine.systemctl("start", "kvstream", check=False)
        check(done.returncode == 0, done.stderr + self.machine.journal("kvstream"))
        return time.monotonic() - began

    def show(self, *names: str) -> dict[str, str]:
        return self.machine.show("kvstream", *names)

    @property
    def pid(self) -> int:
        return int(self.show("MainPID")["MainPID"])

    def pids(self) -> list[int]:
        """The service's main process, and its children."""
        if not (main := self.pid):
            return []
        words = self.machine.run("cat", f"/proc/{main}/task/{main}/children", check=False).stdout.split()
        return [main, *(int(word) for word in words)]

    def kill(self, name: str, pid: int) -> None:
        self.machine.run("sh", "-c", f"kill -{name} {pid}")  # the shell's own: /bin/kill is not there

    def serves(self, seconds: float = 30) -> None:
        try:
            wait_for(lambda: answers(self.port, "/ready"), seconds)
        except Failed as error:
            raise Failed(f"{error}: {self.machine.journal('kvstream')}") from error

    def restarted(self, before: int, seconds: float = 40) -> float:
        """Seconds until another process serves, by itself."""
        began = time.monotonic()
        wait_for(lambda: self.pid not in (0, before) and self.show("ActiveState")["ActiveState"] == "active", seconds)
        self.serves()
        return time.monotonic() - began

    def get(self, path: str) -> dict[str, object]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request("GET", path)
        value: dict[str, object] = json.loads(connection.getresponse().read())
        connection.close()
        return value


@contextlib.contextmanager
def load(t: Trial, workers: int = 4) -> Iterator[dict[str, int]]:
    """Short requests, each on a connection of its own; how each ended is counted."""
    counts: dict[str, int] = {}
    lock, over = threading.Lock(), threading.Event()

    def work() -> None:
        while not over.is_set():
            try:
                ended = "whole" if "[DONE]" in Stream(t.port, canned={"chunks": 3, "gap_ms": 20}).rest() else "cut"
            except Failed as error:
                ended = f"status {error}"
            except OSError as error:
                ended = type(error).__name__
            except http.client.HTTPException as error:
                ended = type(error).__name__
            with lock:
                counts[ended] = counts.get(ended, 0) + 1

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        over.set()
        for thread in threads:
            thread.join()
