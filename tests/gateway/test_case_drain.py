"""Case 81: SIGTERM drains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from kvstream.config import Config
from kvstream.gateway import serve
from kvstream.gateway.embedded import KILL_S, STOP_S
from kvstream.gateway.serve import HANGUP, LAST_FRAMES_S, ONE_STOP_S, until_second
from tests.fakes import FakeRuntime, Script, open_runtime
from tests.fakes.client import RawResponse, connect, open_request, send_request
from tests.fakes.server import open_server
from tests.gateway.conftest import CHAT, HANG_S, SOON_S, Rig, chat, data_of, error_of, open_rig, text_of

posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")


async def three_streams_two_queued(rig: Rig, goes_on: trio.Event) -> tuple[list[RawResponse], list[RawResponse]]:
    for _ in range(3):
        rig.runtime.script(Script(itl=0.01, tokens=12, hang_at_token=3, goes_on=goes_on))
    streams = [await rig.post(chat(f"running {i}")) for i in range(3)]
    queued = [await rig.send(chat(f"queued {i}", stream=bool(i))) for i in range(2)]
    await rig.until(lambda: len(rig.engine.streams) == 5)
    return streams, queued


async def check_whole(response: RawResponse) -> None:
    body = await response.read_all()
    assert not response.truncated and data_of(body)[-1] == "[DONE]" and text_of(body)


@pytest.mark.parametrize("queued_by", ["refuse", "finish"])
async def test_case_81_drain(queued_by: str) -> None:
    async with open_rig(knobs={"slots": 3}, server={"drain_queued": queued_by, "drain_s": 60.0}) as rig:
        streams, queued = await three_streams_two_queued(rig, goes_on := trio.Event())
        idle = await open_request(rig.port, "GET", "/health")  # a kept connection, to ask /ready on
        await idle.read_all()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.gateway.drain)
            await rig.until(lambda: rig.engine.closing)
            with pytest.raises(OSError):
                await connect(rig.port)
            goes_on.set()
            for response in streams:
                await check_whole(response)
            for response in queued:
                await response.read_head()
                body = await response.read_all()
                if queued_by == "finish":
                    assert response.status == 200
                else:
                    assert response.status == 503 and error_of(body)["code"] == "shutting_down"
                    assert int(response.headers["retry-after"]) >= 1
        assert rig.idle()
        expected = {"running 0", "running 1", "running 2"}
        expected |= {"queued 0", "queued 1"} if queued_by == "finish" else set()
        assert set(rig.runtime.journal.prompts) == expected
        for response in (*streams, *queued, idle):
            await response.close()


async def test_case_81_ready_and_newcomers_on_a_kept_connection() -> None:
    """A keep-alive client that is still connected is told: /ready 503, calls 503 with Retry-After."""
    async with open_rig(server={"drain_s": 60.0}) as rig:
        rig.runtime.script(Script(itl=0.01, tokens=40, hang_at_token=3, goes_on=(goes_on := trio.Event())))
        stream = await rig.post(chat("running"))
        rig.engine.close(refuse_waiting=True)
        status, body, headers = await rig.get("/ready")
        assert (status, json.loads(body)["status"]) == (503, "draining") and headers["retry-after"]
        assert (await rig.get("/health"))[0] == 200
        assert (await rig.status())["state"] == "draining"
        for streamed in (True, False):
            late = await rig.post(chat("late", stream=streamed))
            assert late.status == 503 and error_of(await late.read_all())["code"] == "shutting_down"
            assert int(late.headers["retry-after"]) >= 1
            await late.close()
        goes_on.set()
        await check_whole(stream)
        await stream.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_case_81_at_the_timeout_an_error_then_the_end(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "LAST_FRAMES_S", 60.0)  # they leave at once: it is not waited out
    async with open_rig(server={"drain_s": 0.3}, knobs={"answer_tokens": 100_000}) as rig:
        response = await rig.send(chat("endless", stream=stream, ignore_eos=True))
        await rig.until(lambda: rig.runtime.journal.calls and rig.runtime.journal.calls[0].writes)
        began = trio.current_time()
        await rig.gateway.drain()
        assert 0.3 <= trio.current_time() - began < 0.3 + SOON_S
        await response.read_head()
        body = await response.read_all()
        if stream:
            assert response.status == 200 and not response.truncated
            assert data_of(body)[-1]["error"]["code"] == "shutting_down" and b"[DONE]" not in body
        else:
            assert response.status == 503 and error_of(body)["code"] == "shutting_down"
        await rig.until(rig.idle)
        await response.close()


async def test_case_81_an_idle_gateway_drains_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "LAST_FRAMES_S", 60.0)
    async with open_rig(server={"drain_s": 60.0}) as rig:
        kept = await open_request(rig.port, "GET", "/health")
        await kept.read_all()
        began = trio.current_time()
        await rig.gateway.drain()
        assert trio.current_time() - began < SOON_S
        with trio.fail_after(HANG_S):
            assert await kept.stream.receive_some(1) == b""  # an idle kept connection is closed
        await kept.close()


# --- the process ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(runtime: FakeRuntime, base_url: str, **env: str) -> AsyncIterator[tuple[trio.Process, int]]:
    """``kvstream serve`` as a process, and its port."""
    command = [sys.executable, "-m", "kvstream", "serve", "--backend-url", base_url, "--port", "0"]
    settings = {f"KVSTREAM_{name}": value for name, value in env.items()}
    process = await trio.lowlevel.open_process(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE,
                                               env={**os.environ, **settings})
    try:
        assert process.stderr is not None
        seen = b""
        with trio.fail_after(2 * HANG_S):
            while b"listening on http://127.0.0.1:" not in seen or not seen.endswith(b"\n"):
                data = await process.stderr.receive_some()
                assert data, seen
                seen += data
        port = int(seen.partition(b"listening on http://127.0.0.1:")[2].partition(b",")[0].split()[0])
        with trio.fail_after(HANG_S):
            while (await open_request(port, "GET", "/ready")).status != 200:
                await trio.sleep(0.05)
        yield process, port
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def ended(process: trio.Process) -> int:
    with trio.fail_after(HANG_S):
        return await process.wait()


async def queue_of(port: int) -> int:
    response = await open_request(port, "GET", "/status")
    length = json.loads(await response.read_all())["queue"]["length"]
    await response.close()
    return int(length)


@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_case_81_first_signal_drains_with_exit_code_0(number: signal.Signals) -> None:
    async with open_runtime(slots=1) as runtime, open_server(runtime) as fake:
        async with serving(runtime, fake.base_url, SERVER__DRAIN_S="300") as (process, port):
            runtime.script(Script(itl=0.01, tokens=10, hang_at_token=3, goes_on=(goes_on := trio.Event())))
            stream = await open_request(port, "POST", CHAT, chat("running"))
            queued = await send_request(port, "POST", CHAT, chat("queued", stream=False))
            with trio.fail_after(HANG_S):
                while await queue_of(port) < 1:
                    await trio.sleep(0.02)
                process.send_signal(number)
                await queued.read_head()
            assert queued.status == 503
            with pytest.raises(OSError):
                await connect(port)
            goes_on.set()
            await check_whole(stream)
            assert await ended(process) == 0
            await stream.close()
            await queued.close()


@posix
async def test_case_81_timeout_then_exit_code_0_and_second_signal_at_once() -> None:
    async with open_runtime(slots=2, answer_tokens=None) as runtime, open_server(runtime) as fake:
        async with serving(runtime, fake.base_url, SERVER__DRAIN_S="0.5") as (process, port):
            stream = await open_request(port, "POST", CHAT, chat("endless"))
            process.send_signal(signal.SIGTERM)
            body = await stream.read_all()
            assert data_of(body)[-1]["error"]["code"] == "shutting_down" and not stream.truncated
            assert await ended(process) == 0
            await stream.close()
        async with serving(runtime, fake.base_url, SERVER__DRAIN_S="600") as (process, port):
            stream = await open_request(port, "POST", CHAT, chat("endless"))
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)  # from timeout(1) and a terminal, say: the same stop
            await trio.sleep(ONE_STOP_S + 0.2)
            assert process.poll() is None
            with trio.fail_after(HANG_S):
                while process.poll() is None:  # on a slow machine the first two came only just now
                    process.send_signal(signal.SIGTERM)
                    await trio.sleep(ONE_STOP_S)
            assert process.returncode != 0
            await stream.close()
        await runtime.journal.until(lambda j: not j.open_now)


@posix
async def test_case_81_a_client_that_reads_nothing_cannot_hold_the_exit() -> None:
    async with open_runtime(answer_tokens=None, decode_rate=50_000.0, n_ctx=4_000_000) as runtime:
        async with open_server(runtime) as fake:
            async with serving(runtime, fake.base_url, SERVER__DRAIN_S="0.5", SERVER__STALL_S="30") as (process, port):
                stuck = await send_request(port, "POST", CHAT, chat("endless"), receive_buffer=2048)
                await trio.sleep(1)
                process.send_signal(signal.SIGTERM)
                code = await ended(process)
                assert code in (0, 1)
                await stuck.close()


async def test_case_81_signals_that_come_together_are_one(autojump_clock: trio.testing.MockClock) -> None:
    send, received = trio.open_memory_channel[int](9)
    began, ended_at = trio.current_time(), []

    async def drain() -> None:
        await until_second(received, began)
        ended_at.append(trio.current_time() - began)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(drain)
        for at, number in ((0.0, signal.SIGINT), (0.1, signal.SIGTERM), (0.4, 15), (7.0, HANGUP), (9.0, 15)):
            await trio.sleep_until(began + at)
            if number is not None:  # Windows has no SIGHUP
                send.send_nowait(number)
    assert ended_at == [pytest.approx(9.0)]
    send.close()


def test_case_81_the_unit_waits_longer_than_the_drain() -> None:
    units = [*(Path(__file__).resolve().parents[2] / "build").rglob("*.service")]
    assert units
    for unit in units:
        lines: dict[str, Any] = dict(ln.split("=", 1) for ln in unit.read_text("utf-8").splitlines() if "=" in ln)
        whole_s = Config().server.drain_s + LAST_FRAMES_S + Config().inject.drain_save_s + STOP_S + KILL_S
        assert float(lines["TimeoutStopSec"].rstrip("s")) > whole_s
