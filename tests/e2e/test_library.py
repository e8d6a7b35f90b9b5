"""KVStream inside a program, in front of the real server; the README's own example first."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import httpx
import pytest
import trio

from kvstream import KVStreamEngine
from kvstream.adapters import LlamaCppBackend
from tests.e2e.process import ROOT, environment, patience
from tests.e2e.requests import busy
from tests.fakes.real import RealLlama

_EXAMPLE = re.compile(r"<!-- example: library -->\n```python\n(.*?)```", re.DOTALL)
MESSAGES = [{"role": "user", "content": "Say hi."}]


def engine_for(llama: RealLlama) -> KVStreamEngine:
    return KVStreamEngine(backend=LlamaCppBackend(base_url=llama.base_url), max_batch_size=4)


async def test_the_readme_example_runs(llama: RealLlama, tmp_path: Path) -> None:
    """As it stands there, in a process of its own; only the address is another."""
    found = _EXAMPLE.findall((ROOT / "README.md").read_text("utf-8"))
    assert len(found) == 1, "the README has one library example"
    code, changed = re.subn(r'base_url="[^"]*"', f'base_url="{llama.base_url}"', found[0])
    assert changed == 1
    script = tmp_path / "example.py"
    script.write_text(code, "utf-8")
    with trio.fail_after(patience(90)):
        done = await trio.run_process([sys.executable, str(script)], env=environment({}), cwd=tmp_path,
                                      capture_stdout=True, capture_stderr=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert len(done.stdout.decode().split()) > 5
    await busy(llama, 0, within_s=1)


async def test_text_messages_and_generate_give_tokens_and_a_finish(llama: RealLlama) -> None:
    async with engine_for(llama) as engine:
        async with engine.open_stream("The capital of France is", max_tokens=4, temperature=0) as tokens:
            text = [token async for token in tokens]
        async with engine.open_stream(MESSAGES, max_tokens=4, temperature=0) as tokens:
            chat = [token async for token in tokens]
        async with engine.generate(MESSAGES, max_tokens=4, temperature=0) as generated:
            again = [token async for token in generated]
    assert "Paris" in "".join(token.text for token in text)
    for answer in (text, chat, again):
        assert [token.finish_reason for token in answer] == [None] * (len(answer) - 1) + ["length"]
        assert all(token.text for token in answer[:-1]) and len(answer) == 5
    assert [token.text for token in chat] == [token.text for token in again]


@pytest.mark.parametrize("how", ["break", "error", "generate"])
async def test_leaving_early_stops_the_runtime(llama: RealLlama, how: str) -> None:
    async with engine_for(llama) as engine:
        opened = engine.generate if how == "generate" else engine.open_stream
        try:
            async with opened(MESSAGES, max_tokens=1500, ignore_eos=True) as tokens:
                async for _ in tokens:
                    await busy(llama, 1)
                    if how == "error":
                        raise ZeroDivisionError
                    break
        except ZeroDivisionError:
            pass
        await busy(llama, 0, within_s=1)
        with trio.fail_after(patience(2)):
            while engine.engine.scheduler.snapshot(trio.current_time()).seats.used:
                await trio.sleep(0.01)
        assert not engine.engine.streams


async def test_serve_puts_the_same_engine_on_the_network(llama: RealLlama) -> None:
    async with engine_for(llama) as engine, trio.open_nursery() as nursery:
        url = await nursery.start(lambda task_status: engine.serve(port=0, task_status=task_status))
        async with (engine.open_stream(MESSAGES, max_tokens=1500, ignore_eos=True) as tokens,
                    httpx.AsyncClient(trust_env=False, verify=False, timeout=60) as client):
            assert (await tokens.__anext__()).text
            status = (await client.get(f"{url}/status")).json()
            assert [entry["id"] for entry in status["running"]] == ["library"]
            answer = await client.post(f"{url}/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 3})
            assert answer.json()["usage"]["completion_tokens"] == 3
        nursery.cancel_scope.cancel()
    await busy(llama, 0, within_s=1)
