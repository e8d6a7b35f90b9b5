"""What Prometheus gets from a KVStream under load, panel by panel of the Grafana dashboard: ``just test-metrics``.

    python tests/measure/show_metrics.py [--seconds 30] [--picture FILE.png]

Everything is on loopback: a fake llama.cpp whose slots can be saved, a canned backend and one that is away; KVStream
before them; a real Prometheus (Debian's package has it) with build/container/prometheus.yml and its alerts, of which
only the target and the intervals are others. Clients of all kinds come, some leave, too many come at once, the canned
backend is killed at the end. Then each expression of the dashboard is asked for over that time. One without data fails,
unless it is said below why it may be empty. ``--picture`` draws the panels (matplotlib): what Grafana gets to draw, not
how it draws it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import random
import re
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import trio
from figures import console
from processes import HERE, ROOT, Child, environment, free_port, running, workplace
from rich.table import Table

CONTAINER = ROOT / "build" / "container"
sys.path.insert(0, str(CONTAINER))
import dashboard  # noqa: E402
from dashboard import Drawn  # noqa: E402

RATE_INTERVAL = "5s"
KNOBS = {"n_ctx": 8192, "prefill_rate": 1000.0, "decode_rate": 60.0, "answer_tokens": None, "busy_after_close": 0.2,
         "save_s": 0.05, "restore_s": 0.02}
CONFIG = """
[server]
public_metrics = true
[scheduler]
max_queue = 8
max_wait_s = 20
[inject]
read_first_s = 0.05
save_tokens_min = 64
[response_cache]
enabled = true
[[backend]]
name = "slots"
base_url = "{slots}"
aliases = ["plain=fake-model"]
[[backend]]
name = "plain"
type = "openai"
base_url = "{plain}"
models = ["plain"]
[[backend]]
name = "away"
type = "openai"
base_url = "{away}"
models = ["gone"]
"""
WORDS = ("alpha", "beta", "gamma", "delta", "river", "mountain", "cloud", "engine", "paper", "silver", "window")

# Expressions may have no data because of these metrics; all others must have some.
MAY_BE_EMPTY = {
    "kvstream_inject_saving": "the disk does not fail here",
    "kvstream_inject_saving_off_total": "the disk does not fail here",
    "kvstream_inject_slots_lost_total": "the fake llama.cpp is not restarted",
    "kvstream_restore_ineffective_total": "restores of the fake llama.cpp work",
    "kvstream_inject_store_evictions_total": "the store does not get full in this time",
}


# --- the processes ----------------------------------------------------------------------------------------------------


def fake_llama(folder: Path) -> contextlib.AbstractContextManager[Child]:
    port, slots = free_port(), folder / "slots"
    slots.mkdir(mode=0o700)
    argv = [sys.executable, str(HERE / "inject_fake.py"), str(port), str(slots), json.dumps(KNOBS)]
    return running("slots", argv, port, "/health", folder)


def canned(folder: Path) -> contextlib.AbstractContextManager[Child]:
    port = free_port()
    argv = [sys.executable, str(HERE / "canned_backend.py"), str(port), "--chunks", "40"]
    return running("plain", argv, port, "/health", folder)


def gateway(folder: Path, slots: Child, plain: Child) -> contextlib.AbstractContextManager[Child]:
    port, file = free_port(), folder / "kvstream.toml"
    away = f"http://127.0.0.1:{free_port()}"
    file.write_text(CONFIG.format(slots=slots.url, plain=plain.url, away=away), "utf-8")
    argv = [sys.executable, "-m", "kvstream", "serve", "--config", str(file), "--port", str(port)]
    return running("kvstream", argv, port, "/ready", folder, env=environment() | {"XDG_STATE_HOME": str(folder)})


def prometheus(folder: Path, target: Child) -> contextlib.AbstractContextManager[Child]:
    """With the shipped files, but for where KVStream is and how often it is asked."""
    port, file = free_port(), folder / "prometheus.yml"
    text = (CONTAINER / "prometheus.yml").read_text("utf-8")
    assert text.count('"kvstream:8080"') == 1 and text.count(": 10s") == 2
    file.write_text(text.replace("kvstream:8080", f"127.0.0.1:{target.port}").replace(": 10s", ": 1s"), "utf-8")
    shutil.copy(CONTAINER / "alerts.yml", folder)
    argv = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    return running("prometheus", argv, port, "/-/ready", folder)


@contextlib.contextmanager
def everything() -> Iterator[tuple[Child, Child, Child]]:
    """KVStream, the canned backend and Prometheus."""
    with workplace() as folder, fake_llama(folder) as slots, canned(folder) as plain:
        with gateway(folder, slots, plain) as ours, prometheus(folder, ours) as prom:
            yield ours, plain, prom


# --- the load ---------------------------------------------------------------------------------------------------------


def text(dice: random.Random, words: int) -> str:
    return " ".join(dice.choices(WORDS, k=words))


class Clients:
    """All kinds of clients, each a method that sends one request or some."""

    def __init__(self, http: httpx.AsyncClient, dice: random.Random) -> None:
        self._http, self._dice = http, dice
        self._shared = [text(dice, 300) for _ in range(6)]  # more than there are slots
        self._same = text(dice, 40)
        self.answers: dict[int, int] = {}

    async def ask(self, prompt: str, leave_s: float = math.inf, headers: dict[str, str] | None = None,
                  **more: Any) -> None:
        body = {"model": "fake-model", "stream": True, "max_tokens": 24,
                "messages": [{"role": "user", "content": prompt}], **more}
        with trio.move_on_after(leave_s), contextlib.suppress(httpx.HTTPError):
            reply = await self._http.post("/v1/chat/completions", json=body, headers=headers)
            self.answers[reply.status_code] = self.answers.get(reply.status_code, 0) + 1

    async def talk(self) -> None:
        """One of some conversations that come back."""
        await self.ask(self._dice.choice(self._shared) + text(self._dice, 10))

    async def fan_out(self) -> None:
        """Some at once with one long beginning that is new."""
        prompt = text(self._dice, 1000)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(self.ask, prompt + text(self._dice, 5))

    async def leave(self) -> None:
        await self.ask(text(self._dice, 20), leave_s=self._dice.uniform(0.1, 0.6), max_tokens=400)

    async def crowd(self) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(16):
                nursery.start_soon(self.ask, text(self._dice, 30))

    async def same(self) -> None:
        """Two at once, and one later."""
        prompt = self._same if self._dice.random() < 0.3 else text(self._dice, 30)
        same = partial(self.ask, prompt, temperature=0, model="plain", canned={"gap_ms": 10})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(same)
            nursery.start_soon(same)
        await same()

    async def urgent(self) -> None:
        """One for whom another gives way."""
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(partial(self.ask, text(self._dice, 200), max_tokens=300,
                                           headers={"x-kvstream-priority": "low"}))
            await trio.sleep(1.5)
            nursery.start_soon(partial(self.ask, text(self._dice, 20), headers={"x-kvstream-priority": "high"}))

    async def wrong(self) -> None:
        await self.ask(text(self._dice, 4000))
        await self.ask("x", model="gone")
        await self.ask("x", model="nowhere")

    async def plain(self) -> None:
        await self.ask(text(self._dice, 20), model="plain", canned={"gap_ms": 20})


async def load(ours: Child, plain: Child, seconds: float) -> dict[int, int]:
    """Statuses of the answers, with how often each came."""
    async with httpx.AsyncClient(base_url=ours.url, timeout=60, trust_env=False,
                                 limits=httpx.Limits(max_connections=200)) as http:
        clients = Clients(http, random.Random(1))
        kinds: list[tuple[Callable[[], Awaitable[None]], float]] = [
            (clients.talk, 0.5), (clients.fan_out, 6.0), (clients.leave, 1.2), (clients.crowd, 9.0),
            (clients.same, 1.0), (clients.urgent, 8.0), (clients.wrong, 3.0), (clients.plain, 0.6)]
        async with trio.open_nursery() as nursery:
            for kind, every_s in kinds:
                nursery.start_soon(again, nursery, kind, every_s, seconds)
            await trio.sleep(seconds - 3)
            plain.process.kill()  # streams break off, and new ones find nobody
    return clients.answers


async def again(nursery: trio.Nursery, kind: Callable[[], Awaitable[None]], every_s: float, seconds: float) -> None:
    end = trio.current_time() + seconds
    while trio.current_time() < end:
        nursery.start_soon(kind)
        await trio.sleep(every_s)


# --- what Prometheus has ----------------------------------------------------------------------------------------------


Lines = list[tuple[str, list[tuple[float, float]]]]


def asked(prom: Child, path: str, **query: Any) -> Any:
    answer = prom.json(f"/api/v1/{path}?{urlencode(query)}")
    assert answer["status"] == "success", answer
    return answer["data"]


def lines_of(prom: Child, drawn: Drawn, start: float, end: float) -> Lines:
    """As Grafana asks: each line's name and its values over time."""
    expr = drawn.expr.replace("$__rate_interval", RATE_INTERVAL).replace("$backend", ".*")
    found = asked(prom, "query_range", query=expr, start=start, end=end, step=1)["result"]
    lines = []
    for series in found:
        name = re.sub(r"\{\{(\w+)\}\}", lambda label: series["metric"].get(label[1], ""), drawn.legend)  # noqa: B023
        values = [(at, float(value)) for at, value in series["values"] if math.isfinite(float(value))]
        if values:
            lines.append((name, values))
    return lines


def excuse(drawn: Drawn) -> str:
    return "; ".join(why for name, why in MAY_BE_EMPTY.items() if re.search(rf"\b{name}\b", drawn.expr))


def show(results: list[tuple[Drawn, Lines]]) -> int:
    """The table, and how many have no data without an excuse."""
    table = Table("panel", "line", "lines", "lowest", "highest", title="the dashboard's expressions")
    failed, panel = 0, ""
    for drawn, lines in results:
        values = [value for _, line in lines for _, value in line]
        title, panel = drawn.panel if drawn.panel != panel else "", drawn.panel
        if values:
            table.add_row(title, drawn.legend, str(len(lines)), f"{min(values):.4g}", f"{max(values):.4g}")
        else:
            failed += not excuse(drawn)
            table.add_row(title, drawn.legend, "0", excuse(drawn) or "NO DATA", "")
    console.print(table)
    return failed


def picture(results: list[tuple[Drawn, Lines]], start: float, file: Path) -> None:
    from matplotlib.figure import Figure

    panels: dict[str, list[tuple[str, list[tuple[float, float]]]]] = {}
    for drawn, lines in results:
        panels.setdefault(drawn.panel, []).extend(lines)
    figure = Figure(figsize=(18, 3 * -(-len(panels) // 3)), layout="constrained")
    for n, (title, lines) in enumerate(panels.items()):
        axes = figure.add_subplot(-(-len(panels) // 3), 3, n + 1, title=title)
        for name, values in lines[:12]:
            axes.plot([at - start for at, _ in values], [value for _, value in values], label=name)
        if lines:
            axes.legend(fontsize=6)
    figure.savefig(file, dpi=70)


def main() -> None:
    parser = argparse.ArgumentParser(description="What Prometheus gets from a KVStream under load.")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--picture", type=Path, help="a PNG of the panels")
    args = parser.parse_args()
    if args.picture and importlib.util.find_spec("matplotlib") is None:
        sys.exit("--picture needs matplotlib: pip install matplotlib")
    if shutil.which("prometheus") is None:
        sys.exit("not tried: prometheus is not installed (Debian's package of that name has it)")
    with everything() as (ours, plain, prom):
        start = time.time()
        answers = trio.run(load, ours, plain, args.seconds)
        time.sleep(2.5)  # two scrapes more
        end = time.time()
        (target,) = asked(prom, "targets")["activeTargets"]
        (series,) = asked(prom, "query", query='count({job="kvstream"})')["result"]
        console.print(f"Prometheus {asked(prom, 'status/buildinfo')['version']}: target {target['health']}, "
                      f"{series['value'][1]} series; answers by status: {dict(sorted(answers.items()))}")
        rules = asked(prom, "rules")["groups"][0]["rules"]
        console.print("alerts: " + ", ".join(f"{rule['name']} {rule['state']}" for rule in rules))
        healthy = target["health"] == "up" and all(rule["health"] == "ok" for rule in rules)
        results = [(drawn, lines_of(prom, drawn, start, end)) for drawn in dashboard.expressions()]
        failed = show(results)
        if args.picture:
            picture(results, start, args.picture)
    console.print(f"{len(results)} expressions, {failed} without data and without a reason")
    sys.exit(0 if healthy and not failed else 1)


if __name__ == "__main__":
    main()
