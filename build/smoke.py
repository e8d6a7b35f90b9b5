"""Shows that a built file works: ``just smoke``. Each line is one thing that was tried, and how it went.

    python build/smoke.py FILE [--model M.gguf] [--libcuda-absent] [--only NAME,NAME]

Everything runs in temporary folders and on loopback, with a canned backend of the tests. Nothing of the caller's
settings and cache is used. Exit code 1 if anything failed.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
START_S_MAX, STOP_S_MAX = 120.0, 60.0
Serving = tuple[subprocess.Popen[bytes], int, Path]  # the process, its port, its log
SLOW = {"chunks": 40, "gap_ms": 100}  # a stream of four seconds


class Failed(Exception):
    """What was seen instead."""


class NotTried(Exception):
    """Why this machine does not permit it."""


def check(true: object, seen: object) -> None:
    if not true:
        raise Failed(str(seen)[-1500:])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Place:
    """A file under trial, and a folder for all that it leaves. ``inside`` is how the file itself sees a path of ours:
    roots.py tries it in other systems, by ``prefix``."""

    prefix: tuple[str, ...] = ()

    def __init__(self, file: Path, folder: Path) -> None:
        self.file, self.folder, self.cache = file, folder, folder / "cache"

    def inside(self, path: Path) -> str:
        return str(path)

    def env(self, **more: str) -> dict[str, str]:
        return {"PATH": "/usr/bin:/bin", "HOME": self.inside(self.folder), "LANG": "C.UTF-8",
                "KVSTREAM_CACHE_DIR": self.inside(self.cache), **more}

    def command(self, *args: str, file: Path | None = None) -> list[str]:
        return [*self.prefix, self.inside(file or self.file), *args]

    def run(self, *args: str, file: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*args, file=file), env=self.env(**more), cwd=self.folder, text=True,
                              stdin=subprocess.DEVNULL, capture_output=True, timeout=START_S_MAX)

    def run_on_a_mount(self, options: str) -> subprocess.CompletedProcess[str]:
        """``--version`` with its cache on an empty tmpfs with these options. *Errors*: ``NotTried``."""
        mount = self.folder / "mount"
        mount.mkdir(exist_ok=True)
        script = f'mount -t tmpfs -o {options},mode=0700 none "{mount}" && echo mounted && "{self.file}" --version'
        done = subprocess.run(["unshare", "--mount", "--map-root-user", "sh", "-c", script], capture_output=True,
                              env=self.env(KVSTREAM_CACHE_DIR=str(mount / "c")), text=True, timeout=START_S_MAX)
        if not done.stdout.startswith("mounted"):
            raise NotTried(done.stderr.strip())
        return done

    @contextlib.contextmanager
    def serving(self, *args: str, until: str = "/ready", **more: str) -> Iterator[Serving]:
        port, log = free_port(), self.folder / "serve.log"
        with log.open("wb") as out:
            process = subprocess.Popen(self.command("serve", "--port", str(port), *args), env=self.env(**more),
                                       cwd=self.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                       start_new_session=True)
        try:
            wait_for(lambda: answers(port, until) or process.poll() is not None, START_S_MAX, log)
            check(process.poll() is None, log.read_text("utf-8"))
            yield process, port, log
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(true: Callable[[], bool], seconds: float, log: Path | None = None) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        seen = log.read_text("utf-8") if log is not None else ""
        check(time.monotonic() < deadline, f"not within {seconds:.0f} s; {seen}")
        time.sleep(0.02)


def answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


class Stream:
    """A streamed chat; the first bytes of its answer have come."""

    def __init__(self, port: int, **more: object) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=STOP_S_MAX)
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}], **more}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        self._response = self._connection.getresponse()
        check(self._response.status == 200, self._response.status)
        self._first = self._response.readline()

    def rest(self) -> str:
        text = (self._first + self._response.read()).decode()
        self._connection.close()
        return text


def said(text: str) -> str:
    """What the model said, from a whole stream."""
    check(text.rstrip().endswith("data: [DONE]"), text)
    frames = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    answer = "".join(choice["delta"].get("content") or "" for frame in frames for choice in frame.get("choices", ()))
    check(answer, text)
    return answer


# --- what is tried ----------------------------------------------------------------------------------------------------


def first_start(place: Place, _backend: str, _args: argparse.Namespace) -> str:
    began = time.monotonic()
    done = place.run("--version")
    check(done.returncode == 0 and done.stdout.startswith("kvstream, version"), done)
    unpacked = sum(path.stat().st_size for path in place.cache.rglob("*") if path.is_file() and not path.is_symlink())
    return f"{time.monotonic() - began:.2f} s, {unpacked / 1e6:.1f} MB unpacked"


def parts(place: Place, _backend: str, args: argparse.Namespace) -> str:
    report = json.loads(place.run("doctor", "--parts", "--json").stdout)
    check(report["form"] == "executable" and report["file"] == place.inside(place.file), report)
    wrong = {row["name"]: row["problem"] for row in report["parts"] if row["problem"]}
    check("the executable does not have it" in wrong.pop("matplotlib", ""), report)
    if args.libcuda_absent:
        check(wrong.pop("pycuda", "").startswith("there is no NVIDIA driver"), report)
    check(not wrong, wrong)
    return ", ".join(f"{row['name']} {row['version']}" for row in report["parts"] if row["version"])


def small_commands(place: Place, _backend: str, _args: argparse.Namespace) -> str:
    check(place.run("doctor").returncode in (0, 1), "doctor")
    check("kvstream" in place.run("serve", "--help").stdout, "help")
    check("llama.cpp" in place.run("licenses", "--short").stdout, "licences")
    check(place.run("check-config").returncode == 0, "check-config")
    done = place.run("completion", "bash")
    check("_KVSTREAM_COMPLETE=bash_complete" in done.stdout, done)
    words = {"COMP_WORDS": "kvstream che", "COMP_CWORD": "1", "_KVSTREAM_COMPLETE": "bash_complete"}
    check("check-config" in place.run(**words).stdout, "completion")
    renamed = place.folder / "another name"
    shutil.copy(place.file, renamed)
    done = place.run(file=renamed, **words)
    check("check-config" in done.stdout, done)
    return "doctor, help, licenses, check-config, completion (also when renamed)"


def streamed(place: Place, backend: str, _args: argparse.Namespace) -> str:
    with place.serving("--backend", "openai", "--backend-url", backend) as (process, port, _):
        text = Stream(port).rest()
        check(text.rstrip().endswith("data: [DONE]") and " token" in text, text)
        check(answers(port, "/metrics") and answers(port, "/status"), "metrics, status")
        exe = Path(f"/proc/{process.pid}/exe").resolve()
        check(any(folder.samefile(place.cache) for folder in exe.parents), exe)
    return "a stream to its end, metrics, status; the pid is the server's"


def terminated(place: Place, backend: str, _args: argparse.Namespace, group: bool = False) -> str:
    with place.serving("--backend", "openai", "--backend-url", backend) as (process, port, log):
        stream = Stream(port, canned=SLOW)
        (os.killpg if group else os.kill)(process.pid, signal.SIGTERM)
        text = stream.rest()
        check(text.rstrip().endswith("data: [DONE]") and text.count(" token") == SLOW["chunks"], text)
        code = process.wait(STOP_S_MAX)
        check(code == 0, f"exit code {code}: {log.read_text('utf-8')}")
    return "the stream came to its end, exit code 0"


def terminated_as_a_group(place: Place, backend: str, args: argparse.Namespace) -> str:
    return terminated(place, backend, args, group=True)


def killed(place: Place, backend: str, _args: argparse.Namespace) -> str:
    with place.serving("--backend", "openai", "--backend-url", backend) as (process, port, _):
        stream = Stream(port, canned=SLOW)
        process.kill()
        process.wait(STOP_S_MAX)
        with contextlib.suppress(http.client.HTTPException, OSError):
            stream.rest()
        check(not group_of(process.pid), "a process is left")
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", port))
    names = sorted(path.name for path in place.cache.iterdir())
    check(len(names) == 1, names)
    return "no process left, the port free, one folder in the cache"


def group_of(pid: int) -> list[str]:
    done = subprocess.run(["ps", "-o", "pid=,stat=", "-g", str(pid)], capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if " Z" not in line]


def bench(place: Place, backend: str, _args: argparse.Namespace) -> str:
    few = ("--total-requests=8", "--concurrency=2", "--prompt-len=16", "--output-len=8")
    done = place.run("bench", "--url", backend, *few, "--plot=r.svg", "--report=r.html")
    check(done.returncode == 0 and "8 of 8 requests" in done.stdout, done)
    swept = place.run("bench", "kv", "--simulate=h200", "--model-geometry=smollm2-135m", "--max-context=4K",
                      "--min-context=2K", "--step=2K", "--decode-tokens=8", "--output=sweep")
    check(swept.returncode == 0, swept)
    for file in ("r.svg", "r.html", "sweep/kv-stream-sweep.svg", "sweep/kv-stream-sweep.html"):
        check("</svg>" in (place.folder / file).read_text("utf-8"), file)
    refused = place.run("bench", "--url", backend, *few, "--plot=r.png")
    check(refused.returncode == 2 and "the executable does not have it" in refused.stderr, refused)
    return "pictures and pages of bench and bench kv; a PNG is refused in a sentence"


def twenty_times(place: Place, backend: str, _args: argparse.Namespace) -> str:
    for _ in range(20):
        with place.serving("--backend", "openai", "--backend-url", backend) as (process, _, log):
            process.terminate()
            code = process.wait(STOP_S_MAX)
            check(code == 0, f"exit code {code}: {log.read_text('utf-8')}")
    return "twenty starts and stops, each with exit code 0"


def embedded(place: Place, _backend: str, args: argparse.Namespace) -> str:
    if args.model is None:
        raise NotTried("no --model")
    with place.serving("--model", str(args.model), KVSTREAM_EMBEDDED__CONTEXT_TOKENS="512") as (process, port, log):
        text = said(Stream(port, max_tokens=8).rest())
        process.terminate()
        code = process.wait(STOP_S_MAX)
        check(code == 0, f"exit code {code}: {log.read_text('utf-8')}")
        check(not group_of(process.pid), "the llama.cpp child is left")
    return f"llama.cpp answered {text!r} and ended with us"


def odd_places(place: Place, _backend: str, _args: argparse.Namespace) -> str:
    seen = []
    for options, words in (("noexec", "noexec"), ("size=20m", "too small"), ("ro", "Read-only")):
        done = place.run_on_a_mount(options)
        check(done.returncode == 126 and words in done.stderr, done)
        seen.append(words)
    return f"{', '.join(seen)}: each a sentence and exit code 126"


def truncated(place: Place, _backend: str, _args: argparse.Namespace) -> str:
    """At the end, in the middle, and before there is anything of the archive."""
    cut, whole = place.folder / "cut", place.file.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 2_000_000):
        cut.write_bytes(whole[:size])
        cut.chmod(0o755)
        done = place.run("--version", file=cut)
        check(done.returncode == 126 and "Download it again" in done.stderr, done)
    cut.unlink()
    return f"three times: {done.stderr.strip()}"


def six_first_starts(place: Place, _backend: str, _args: argparse.Namespace) -> str:
    cache = place.folder / "six"
    started = [subprocess.Popen(place.command("--version"), env=place.env(KVSTREAM_CACHE_DIR=place.inside(cache)),
                                cwd=place.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
               for _ in range(6)]
    try:
        for process in started:
            out = process.communicate(timeout=START_S_MAX)[0]
            check(process.returncode == 0 and out.startswith("kvstream, version"), out)
        names = sorted(path.name for path in cache.iterdir())
        check(len(names) == 1, names)
    finally:
        for process in started:
            process.kill()
            process.wait()
        shutil.rmtree(cache, ignore_errors=True)
    return "all ran; one folder is left"


TRIED = (first_start, parts, small_commands, streamed, terminated, terminated_as_a_group, killed, bench, twenty_times,
         embedded, odd_places, truncated, six_first_starts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Shows that a built file works.")
    parser.add_argument("file", type=Path, nargs="?", default=ROOT / "dist" / "kvstream")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--libcuda-absent", action="store_true", help="there is no NVIDIA driver here")
    parser.add_argument("--only", default="", help="names, divided by commas")
    args = parser.parse_args()
    args.model = args.model and args.model.resolve()
    failed = 0
    port = free_port()
    canned = ROOT / "tests" / "measure" / "canned_backend.py"
    backend = subprocess.Popen([sys.executable, canned, str(port), "--chunks", "8"], stdin=subprocess.DEVNULL)
    try:
        wait_for(lambda: answers(port, "/health"), START_S_MAX)
        with tempfile.TemporaryDirectory(prefix="kvstream-smoke-") as folder:
            place = Place(args.file.resolve(), Path(folder))
            for trial in TRIED:
                if args.only and trial.__name__ not in args.only.split(","):
                    continue
                name = trial.__name__.replace("_", " ")
                try:
                    print(f"ok      {name}: {trial(place, f'http://127.0.0.1:{port}', args)}", flush=True)
                except NotTried as error:
                    print(f"-       {name}: not tried: {error}", flush=True)
                except (Failed, OSError, ValueError, http.client.HTTPException, subprocess.TimeoutExpired) as error:
                    failed += 1
                    print(f"FAILED  {name}: {type(error).__name__} {error}", flush=True)
    finally:
        backend.terminate()
        backend.wait()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
