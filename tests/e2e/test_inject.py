"""Hard inject on the real server, small: what the server's own counters say was computed. No times."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.e2e.process import GatewayProcess, patience, start_gateway
from tests.e2e.requests import whole
from tests.fakes.real import RealLlama, start_real
from tests.measure.inject_sums import Turn, fan_of, talk_ideal

SLOTS, CONTEXT = 4, 1024
WORDS_TEXT = ("alpha beta gamma delta epsilon river mountain cloud engine paper silver window garden market signal "
              "forest harbor lantern meadow orbit")
WORDS = WORDS_TEXT.split()
COMPUTED, CACHED = "prompt_tokens_total", "prompt_tokens_cached_total"


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def system_and_user(system: str, user: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealLlama, GatewayProcess]]:
    """A server with four slots, and a gateway before it that may pin, save and restore."""
    with start_real(n_parallel=SLOTS, n_ctx=SLOTS * CONTEXT) as llama:
        with gateway_of(llama, llama.slots_dir, tmp_path_factory.mktemp("inject")) as gateway:
            yield llama, gateway


def gateway_of(llama: RealLlama, files: Path, folder: Path) -> Any:
    return start_gateway(llama.base_url, folder, inject__dir=f"{files}/", inject__read_first_s="0.05",
                         inject__save_tokens_min="64", scheduler__leader_tokens="64")


async def hard(gateway: GatewayProcess) -> None:
    """Wait for the self-check, for the next one too where a busy machine lets the first take too long."""
    with trio.fail_after(patience(20)):
        while "hard inject: hard:" not in gateway.text():
            soft = [line for line in gateway.text().splitlines() if "hard inject: soft" in line]
            assert all("it is made again by itself" in line for line in soft), gateway.text()
            await trio.sleep(0.05)


async def ask(gateway: GatewayProcess, messages: list[dict[str, str]], tokens: int = 8) -> tuple[str, Turn]:
    """A streamed chat: its text, and what its usage says."""
    body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}}
    events = await whole(gateway.port, body)
    assert events[-1] is None, events
    text = "".join(choice["delta"].get("content") or "" for event in events[:-1] for choice in event["choices"])
    usage = events[-2]["usage"]
    return text, Turn(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"],
                      usage["completion_tokens"])


async def settled(llama: RealLlama, gateway: GatewayProcess) -> None:
    """Nothing runs, and what is saved at leisure is saved."""
    await gateway.settled(30)
    await trio.sleep(0.5)
    await llama.idle(patience(30))


async def prompt_ids(llama: RealLlama, messages: list[dict[str, str]]) -> list[int]:
    text = (await llama.post("/apply-template", {"messages": messages})).json()["prompt"]
    body = {"content": text, "add_special": True, "parse_special": True}
    ids: list[int] = (await llama.post("/tokenize", body)).json()["tokens"]
    return ids


async def test_a_cold_prefix_that_four_ask_about_is_computed_once(served: tuple[RealLlama, GatewayProcess]) -> None:
    llama, gateway = served
    await hard(gateway)
    prefix = words(random.Random(1), 400)
    chats = [system_and_user(prefix, f"Question {i}: {i * 7919}?") for i in range(4)]
    fan = fan_of([await prompt_ids(llama, messages) for messages in chats])
    before = await llama.metric(COMPUTED)
    turns: list[Turn] = []

    async def one(messages: list[dict[str, str]]) -> None:
        turns.append((await ask(gateway, messages))[1])

    async with trio.open_nursery() as nursery:
        for messages in chats:
            nursery.start_soon(one, messages)
    await settled(llama, gateway)
    computed = await llama.metric(COMPUTED) - before
    print(f"4 requests, prefix of {fan.prefix}: {computed:g} tokens computed, ideal {fan.ideal}, alone {fan.naive}")
    assert computed <= 1.15 * fan.ideal
    told = sum(turn.prompt - turn.cached for turn in turns)
    assert fan.ideal - 4 <= told <= 1.15 * fan.ideal  # usage is truthful: who read the prefix was not given it


async def test_six_conversations_on_four_slots_are_computed_once(served: tuple[RealLlama, GatewayProcess]) -> None:
    llama, gateway = served
    await hard(gateway)
    rng = random.Random(2)
    talks = [[{"role": "system", "content": words(rng, 200)}] for _ in range(6)]
    turns: list[list[Turn]] = [[] for _ in talks]
    before = await llama.metric(COMPUTED)

    async def client(mine: range) -> None:
        for turn in range(3):
            for i in mine:
                talks[i].append({"role": "user", "content": f"Turn {turn} of {i}: {words(random.Random(i), 12)}?"})
                text, told = await ask(gateway, talks[i])
                talks[i].append({"role": "assistant", "content": text})
                turns[i].append(told)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(client, range(0, 6, 2))
        nursery.start_soon(client, range(1, 6, 2))
    await settled(llama, gateway)
    computed, ideal = await llama.metric(COMPUTED) - before, sum(map(talk_ideal, turns))
    everything = sum(turn.prompt for told in turns for turn in told)
    print(f"6 conversations: {computed:g} tokens computed, ideal {ideal}, all {everything}")
    assert computed <= 1.15 * ideal


async def test_damaged_files_cost_time_and_nothing_else(served: tuple[RealLlama, GatewayProcess]) -> None:
    llama, gateway = served
    await hard(gateway)
    rng = random.Random(3)
    talks = [system_and_user(words(rng, 150), f"Question {i}?") for i in range(6)]
    for messages in talks:
        await ask(gateway, messages)
    await settled(llama, gateway)
    files = list(llama.slots_dir.glob("*.kv"))
    assert files, "nothing was saved"
    for i, file in enumerate(files):
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2] if i % 2 else data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    for messages in talks:
        text, _ = await ask(gateway, messages)
        assert text
    assert (await gateway.settled())["state"] == "up"


async def test_a_restart_of_both_finds_the_prefix_again(tmp_path: Path) -> None:
    files = tmp_path / "slots"
    files.mkdir()
    prefix = words(random.Random(4), 400)
    seen: list[tuple[float, Turn]] = []
    for number in range(2):
        with start_real(n_parallel=SLOTS, n_ctx=SLOTS * CONTEXT, slot_save_path=f"{files}/") as llama:
            with gateway_of(llama, files, tmp_path / f"gateway{number}") as gateway:
                await hard(gateway)
                for i in range(2 - number):  # the second time before the restart makes it worth keeping
                    await settled(llama, gateway)
                    before = await llama.metric(COMPUTED)
                    _, turn = await ask(gateway, system_and_user(prefix, f"Question {number}{i}?"))
                    await settled(llama, gateway)
                    seen.append((await llama.metric(COMPUTED) - before, turn))
                with trio.fail_after(patience(20)):  # it was used again: a slot at rest is saved
                    while not list(files.glob("*.kv")) and not number:
                        await trio.sleep(0.1)
                gateway.terminate()
                assert await gateway.exit_code(20) == 0
    (cold, _), _, (restored, turn) = seen
    print(f"cold {cold:g} tokens computed, after the restart {restored:g} of {turn.prompt}")
    assert cold > 400 and restored <= 0.1 * turn.prompt
    assert turn.cached >= 0.9 * turn.prompt
