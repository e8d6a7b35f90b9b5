"""The process: draining on SIGTERM, leaving at the second one, exit codes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import httpx
import pytest
import trio

from kvstream.gateway.serve import ONE_STOP_S
from tests.e2e.conftest import Start
from tests.e2e.process import GatewayProcess, command, environment, patience
from tests.e2e.requests import busy, chat, finish, ids, post, read_all, stream
from tests.fakes.client import connect
from tests.fakes.real import RealLlama


async def refused(gateway: GatewayProcess) -> None:
    """Wait until the port takes no more connections. Once the drain began, ``/ready`` never says 200."""
    with trio.fail_after(patience(2)):
        while "draining" not in gateway.text():  # before that nobody can know
            await trio.sleep(0.01)
        while True:
            try:
                answer = await gateway.get("/ready")
            except httpx.ConnectError:
                return
            except httpx.HTTPError:
                continue  # caught in the act: accepted, then closed
            assert answer.status_code == 503, "ready while draining"


async def test_sigterm_lets_streams_finish_and_refuses_the_rest(llama: RealLlama, start: Start) -> None:
    """Case 81: listener closed at once, streams complete, queued ones 503 with Retry-After, exit code 0."""
    with start(llama.base_url, scheduler__max_batch_size="2", server__drain_s="60") as gateway:
        streams = [await stream(gateway.port, chat(f"stream {i}", 80)) for i in range(2)]
        with llama.held():
            queued = await post(gateway.port, ids(8, 2, first=1))  # of tokens, so the server is not asked to count
            await gateway.queued(1)
            gateway.terminate()
            await queued.read_head()
            assert queued.status == 503 and int(queued.headers["retry-after"]) >= 1
            assert (await queued.read_json())["error"]["code"] == "shutting_down"
            await refused(gateway)
            with pytest.raises(OSError):
                await connect(gateway.port)
        for response in streams:
            assert finish(await read_all(response)) == "length"
        assert await gateway.exit_code() == 0
        assert "draining" in gateway.text() and gateway.text().rstrip().endswith("stopped")
    await busy(llama, 0, within_s=1)


async def test_ready_says_503_to_who_is_already_connected(llama: RealLlama, start: Start) -> None:
    """A load balancer's connection whose request is on its way when the signal comes is answered, and with 503."""
    with start(llama.base_url, server__drain_s="60") as gateway:
        running = await stream(gateway.port, chat("goes on", 60))
        probe = await connect(gateway.port)
        await probe.send_all(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nExpect: nothing\r\n")
        await trio.sleep(0.1)
        gateway.terminate()
        await refused(gateway)
        answer = b""
        try:
            await probe.send_all(b"Connection: close\r\n\r\n")
            while data := await probe.receive_some():
                answer += data
        except trio.BrokenResourceError:
            pass
        assert answer == b"" or answer.startswith(b"HTTP/1.1 503")
        await running.close()
        assert await gateway.exit_code() == 0


async def test_what_outlasts_drain_s_ends_with_an_error_frame(llama: RealLlama, start: Start) -> None:
    with start(llama.base_url, server__drain_s="0.3") as gateway:
        response = await stream(gateway.port, chat("for ever", 1800))
        await response.read_event()
        gateway.terminate()
        events = await read_all(response)
        assert events[-1]["error"]["code"] == "shutting_down" and None not in events
        assert await gateway.exit_code() == 0
    await busy(llama, 0, within_s=1)


async def test_the_second_signal_leaves_at_once(llama: RealLlama, start: Start) -> None:
    with start(llama.base_url, server__drain_s="600") as gateway:
        response = await stream(gateway.port, chat("for ever", 1800))
        gateway.terminate()
        await refused(gateway)
        await trio.sleep(ONE_STOP_S)
        gateway.terminate()
        assert await gateway.exit_code(within_s=2) == 1
        assert "second signal" in gateway.text()
        await response.close()
    await busy(llama, 0, within_s=1)


def run(*args: str, cwd: Path, **keys: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*args), cwd=cwd, env=environment(keys), capture_output=True, encoding="utf-8",
                          timeout=patience(30))


def test_a_port_in_use_is_exit_code_3(gateway: GatewayProcess, tmp_path: Path) -> None:
    done = run("serve", "--port", str(gateway.port), "--backend-url", "http://127.0.0.1:1", cwd=tmp_path)
    assert done.returncode == 3
    assert str(gateway.port) in done.stderr and "--port" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bad_configuration_is_exit_code_2_with_every_problem(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[server]\nport = 99999\nprot = 1\n[memory]\nblock_size = 3\n", "utf-8")
    done = run("serve", "--config", "bad.toml", cwd=tmp_path)
    assert done.returncode == 2
    for word in ("server.port", "server.prot", "memory.block_size"):
        assert word in done.stderr
    assert "Traceback" not in done.stderr


async def test_a_config_file_is_read(llama: RealLlama, tmp_path: Path, start: Start) -> None:
    """From the working directory, as documented; what is in it shows in ``/status``."""
    folder = tmp_path / f"gateway-{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    (folder / "kvstream.toml").write_text("[memory]\nblock_size = 32\n", "utf-8")
    from tests.e2e.process import start_gateway

    with start_gateway(llama.base_url, folder) as gateway:
        assert (await gateway.status())["capacity"]["page_tokens"] == 32
