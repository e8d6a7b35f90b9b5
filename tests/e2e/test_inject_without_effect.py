"""Hard inject before a real server on which restoring has no effect (issue 4, section 6.5): it switches itself off, by
the self-check where a short prompt shows it, else by what requests report; no request is harmed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trio

from tests.e2e.process import GatewayProcess, patience, start_gateway
from tests.e2e.requests import finish, whole
from tests.e2e.test_slot_calls import ids
from tests.fakes.real import RealLlama, start_real
from tests.fakes.tiny_gguf import make

OFF = "hard inject: soft: restoring a slot has no effect"
ANSWER = 4


async def said(gateway: GatewayProcess, words: str) -> None:
    with trio.fail_after(patience(30)):
        while words not in gateway.text():
            await trio.sleep(0.05)


async def asked_together(port: int, common: int) -> list[list[Any]]:
    """The events of four answers whose prompts share 1,500 tokens."""
    answers: list[list[Any]] = [[] for _ in range(4)]

    async def one(place: int) -> None:
        body = {"prompt": ids(1500, common) + ids(50, 30 + place), "max_tokens": ANSWER, "temperature": 0,
                "stream": True, "ignore_eos": True}
        answers[place] = await whole(port, body)

    with trio.fail_after(patience(60)):
        async with trio.open_nursery() as nursery:
            for place in range(4):
                nursery.start_soon(one, place)
    return answers


def unharmed(answers: list[list[Any]]) -> None:
    for answer in answers:
        assert finish(answer) == "length"
        timings = next(event["timings"] for event in answer if event and "timings" in event)
        assert timings["cache_n"] + timings["prompt_n"] == 1550 and timings["predicted_n"] == ANSWER


def server(tmp_path: Path, **params: Any) -> Any:
    return start_real(n_ctx=4 * 2048, n_parallel=4, model=str(make("gemma3", tmp_path / "m.gguf")), **params)


def gateway_of(llama: RealLlama, tmp_path: Path) -> Any:
    return start_gateway(llama.base_url, tmp_path / "gateway", inject__dir=f"{llama.slots_dir}/",
                         inject__read_first_s="0.05", inject__save_tokens_min="64", inject__misses_max="3")


async def test_the_self_check_sees_a_window_without_checkpoints(tmp_path: Path) -> None:
    with server(tmp_path, n_ctx_checkpoints=0) as llama, gateway_of(llama, tmp_path) as gateway:
        await said(gateway, OFF)
        unharmed(await asked_together(gateway.port, 1))
        assert "hard inject: hard" not in gateway.text()


async def test_what_a_short_check_cannot_see_the_requests_show(tmp_path: Path) -> None:
    """With ``--swa-full`` a whole prompt is found again, also the check's, but no part of a long one."""
    with server(tmp_path, swa_full=True) as llama, gateway_of(llama, tmp_path) as gateway:
        await said(gateway, "hard inject: hard:")
        for common in range(1, 4):
            unharmed(await asked_together(gateway.port, common))
            await gateway.settled(patience(10))
        assert OFF in gateway.text() and gateway.text().count("hard inject: soft") == 1  # one line
        before = len(list(llama.slots_dir.glob("*.kv")))
        unharmed(await asked_together(gateway.port, 9))
        assert len(list(llama.slots_dir.glob("*.kv"))) <= before  # nothing more is saved
