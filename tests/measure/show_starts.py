"""How long KVStream takes to start in each of its forms: `--version`, and to the first byte of a served answer.

    python tests/measure/show_starts.py [--file dist/kvstream] [--pyz dist/kvstream.pyz] [--rounds 10] [--json FILE]

`python -m kvstream` is always there for comparison. The one file starts in two ways: unpacked before (warm), and for
the first time ever (a new cache folder each time). All forms take turns in each round, who begins changes, and medians
are compared within the run: what else happens on the machine happens to all. Seconds, and seconds of processor time,
which hardly depend on what else runs. Ctrl-C ends it early and shows what there is.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen
from figures import summary
from processes import ROOT, START_S_MAX, Child, canned_backend, environment, free_port, workplace
from rich.console import Console
from rich.table import Table

BARS = {"version": 0.15, "served": 0.60}  # warm, of the one file
BODY = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]})


@frozen
class Form:
    """``fresh``: with a cache folder that is new for each start."""

    name: str
    command: tuple[str, ...]
    cache: Path | None = None
    fresh: bool = False

    def env(self) -> dict[str, str]:
        env = environment()
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # or Python from the sources compiles them at each start
        if self.command[0] != sys.executable or "-m" not in self.command:
            env.pop("PYTHONPATH")
        if self.cache is not None:
            if self.fresh:
                shutil.rmtree(self.cache, ignore_errors=True)
            env["KVSTREAM_CACHE_DIR"] = str(self.cache)
        return env


def version_s(form: Form, folder: Path) -> float:
    env = form.env()
    start = time.perf_counter()
    subprocess.run([*form.command, "--version"], env=env, cwd=folder, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def served_s(form: Form, folder: Path, backend: Child) -> float:
    """From the start of the process to the first byte of a streamed answer, which is asked for until it comes."""
    env, port = form.env(), free_port()
    command = [*form.command, "serve", "--backend", "openai", "--backend-url", backend.url, "--port", str(port)]
    with (folder / "served.log").open("wb") as log:
        start = time.perf_counter()
        process = subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log)
        try:
            while not _answered(port):
                if process.poll() is not None or time.perf_counter() - start > START_S_MAX:
                    said = (folder / "served.log").read_text("utf-8")[-2000:]
                    raise SystemExit(f"{form.name} did not serve:\n{said}")
                time.sleep(0.01)  # this process must not take the time of the one it watches
            return time.perf_counter() - start
        finally:
            process.kill()  # how it ends is nobody's question here
            process.wait()


def _answered(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST", "/v1/chat/completions", BODY, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status == 200 and b"data:" in response.read(16)
    except OSError:
        return False
    finally:
        connection.close()


def forms(args: argparse.Namespace, caches: Path) -> list[Form]:
    found = [Form("python -m kvstream", (sys.executable, "-m", "kvstream"))]
    if args.pyz:
        found.append(Form("zipapp", (sys.executable, str(args.pyz.resolve()))))
    if args.file:
        file = (str(args.file.resolve()),)
        found += [Form("one file, warm", file, caches / "warm"),
                  Form("one file, first start ever", file, caches / "new", fresh=True)]
    return found


def processor_s() -> float:
    """Of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rounds(given: Sequence[Form], args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    taken: dict[str, dict[str, list[float]]] = {
        form.name: {name: [] for figure in args.only for name in (figure, f"{figure} cpu")} for form in given}
    with contextlib.suppress(KeyboardInterrupt), workplace() as folder, canned_backend(folder, 4) as backend:
        for form in given:  # the page cache and the warm cache
            version_s(form, folder)
        for number in range(args.rounds):
            place = number % len(given)
            for form in given[place:] + given[:place]:
                for figure in args.only:
                    before = processor_s()
                    took = version_s(form, folder) if figure == "version" else served_s(form, folder, backend)
                    taken[form.name][figure].append(took)
                    taken[form.name][f"{figure} cpu"].append(processor_s() - before)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description="How long KVStream takes to start in each of its forms.")
    for name in ("file", "pyz"):
        default = ROOT / "dist" / ("kvstream" if name == "file" else "kvstream.pyz")
        parser.add_argument(f"--{name}", type=Path, default=default if default.exists() else None)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", nargs="+", choices=("version", "served"), default=("version", "served"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvstream-starts-") as caches:
        taken = rounds(forms(args, Path(caches)), args)
    reference = taken["python -m kvstream"]
    figures = [name for figure in args.only for name in (figure, f"{figure} cpu")]
    if not all(of[name] for of in taken.values() for name in figures):
        raise SystemExit("ended before the first round was over")
    table = Table("form", *(title for figure in figures for title in (figure, "ratio")), title=(
        f"medians of {len(reference[figures[0]])}, seconds (lowest to highest); load {os.getloadavg()[0]:.1f}"))
    for name, of in taken.items():
        cells = []
        for figure in figures:
            this, other = summary(of[figure]), summary(reference[figure])
            cells += [f"{this.show()} ({this.spread()})", f"{this.median / other.median:.2f}"]
        table.add_row(name, *cells)
    Console(width=118).print(table)
    if args.file:
        warm = taken["one file, warm"]
        for figure in args.only:
            most, median = BARS[figure], summary(warm[figure]).median
            print(f"{figure} warm: {median:.3f} s, at most {most} s: {'met' if median <= most else 'MISSED'}")
    if args.json:
        about = {"load": os.getloadavg(), "cpus": os.cpu_count(), "files": {
            str(path): path.stat().st_size for path in (args.file, args.pyz) if path}}
        args.json.write_text(json.dumps({"about": about, "seconds": taken}, indent=1), "utf-8")


if __name__ == "__main__":
    main()
