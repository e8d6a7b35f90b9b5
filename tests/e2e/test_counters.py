"""Issue 4, 6.6: what KVStream counts of prompts, computed and cached, against the real server's own counters."""

from __future__ import annotations

import random
import re

import httpx
import trio

from tests.e2e.conftest import Start
from tests.e2e.test_inject import hard
from tests.fakes.real import RealLlama, real_llama

WORDS = ["amber", "birch", "cedar", "dune", "ember", "fjord", "grove", "heath", "islet", "jade"]


def text(seed: int, words: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words))


def counted(metrics: str, part: str) -> float:
    """Over all sources of one part."""
    pattern = rf'^kvstream_runtime_prompt_tokens_total\{{[^}}]*part="{part}"[^}}]*\}} (\S+)$'
    return sum(float(value) for value in re.findall(pattern, metrics, re.M))


async def mixed_run(url: str) -> None:
    """Conversations that grow, share a beginning, go to other routes, and some clients that leave in mid-answer."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, verify=False, timeout=120) as client:
        async def talk(seed: int) -> None:
            said = text(1, 150) + " " + text(seed, 30)
            for turn in range(3):
                body = {"messages": [{"role": "user", "content": said}], "max_tokens": 5, "temperature": 0.9,
                        "stream": turn != 1}
                (await client.post("/v1/chat/completions", json=body)).raise_for_status()
                said += " " + text(seed + turn, 20)

        async def complete(seed: int) -> None:
            body = {"prompt": text(seed, 60), "max_tokens": 5, "temperature": 0.9}
            (await client.post("/v1/completions", json=body)).raise_for_status()

        async def leave(seed: int) -> None:
            body = {"messages": [{"role": "user", "content": text(seed, 80)}], "max_tokens": 400, "stream": True}
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                async for _ in response.aiter_lines():
                    if "content" in _ and '"content":null' not in _:
                        break

        async with trio.open_nursery() as nursery:
            for seed in range(10, 13):
                nursery.start_soon(talk, seed)
            nursery.start_soon(complete, 20)
            nursery.start_soon(complete, 21)
            nursery.start_soon(leave, 30)
            nursery.start_soon(leave, 31)


async def test_our_counters_and_the_servers_agree(start: Start) -> None:
    async with real_llama(n_parallel=4, n_ctx=4 * 2048, n_batch=128) as llama:
        await compare(llama, start)


async def compare(llama: RealLlama, start: Start) -> None:
    with start(llama.base_url) as gateway:
        await hard(gateway)
        status = await gateway.status()
        assert status["inject"]["mode"] == "hard", status["inject"]
        assert status["preemption"]["active"] is True
        await mixed_run(gateway.url)
        await llama.idle(60)
        await trio.sleep(1)
        metrics = httpx.get(f"{gateway.url}/metrics", trust_env=False, verify=False).text
        ours = {part: counted(metrics, part) for part in ("computed", "cached")}
        theirs = {"computed": await llama.metric("prompt_tokens_total"),
                  "cached": await llama.metric("prompt_tokens_cached_total")}
        print(ours, theirs)
        assert ours["computed"] > 500 and ours["cached"] > 500
        for part, value in theirs.items():
            assert abs(ours[part] - value) <= 0.02 * value, (part, ours, theirs)
        hows = re.findall(r'^kvstream_inject_admissions_total\{[^}]*how="(\w+)"\} (\S+)$', metrics, re.M)
        assert sum(float(value) for _, value in hows) == 3 * 3 + 4
        status = await gateway.status()
        assert {slot["state"] for slot in status["inject"]["slots"]} == {"idle"}
        assert status["inject"]["store"] is not None
