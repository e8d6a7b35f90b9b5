"""Slots of the real server, pinned: nothing of ours ever waits in it, what slots hold is reused, saved at the end, and
found again by another process before another server."""

from __future__ import annotations

import random
from pathlib import Path

import trio

from tests.e2e.process import patience
from tests.e2e.test_inject import ask, gateway_of, hard, settled, system_and_user, words
from tests.fakes.real import RealLlama, real_llama, start_real


async def never_deferred(llama: RealLlama, seen: list[float]) -> None:
    while True:
        seen.append(await llama.metric("requests_deferred"))
        await trio.sleep(0.2)


async def test_a_turn_goes_on_in_the_slot_of_the_one_before(tmp_path: Path) -> None:
    with start_real(n_parallel=2, n_ctx=2 * 1024) as llama:
        with gateway_of(llama, llama.slots_dir, tmp_path) as gateway:
            await hard(gateway)
            talk = system_and_user(words(random.Random(11), 150), "Say something.")
            text, first = await ask(gateway, talk)
            talk += [{"role": "assistant", "content": text}, {"role": "user", "content": "And more of it."}]
            _, second = await ask(gateway, talk)
            assert first.cached < 0.1 * first.prompt
            assert second.cached >= 0.9 * first.prompt
            at = [slot["id"] for slot in await llama.slots() if slot.get("n_prompt_tokens")]
            assert len(at) == 1, "both ran in one slot"


async def test_conversations_that_come_and_go_at_any_moment(tmp_path: Path) -> None:
    """Five on four slots, some leave early: nothing of ours waits in the server, and every seat comes back."""
    with start_real(n_parallel=4, n_ctx=4 * 1024, cache_ram_mib=64) as llama:
        with gateway_of(llama, llama.slots_dir, tmp_path) as gateway:
            await hard(gateway)
            rng, deferred = random.Random(12), list[float]()
            talks = [system_and_user(words(rng, 120), f"Question {n}?") for n in range(5)]

            async def converse(talk: list[dict[str, str]], dice: random.Random) -> None:
                for turn in range(3):
                    with trio.move_on_after(dice.choice([0.05, 0.3, 60.0, 60.0])):
                        text, _ = await ask(gateway, talk, tokens=16)
                        talk += [{"role": "assistant", "content": text}, {"role": "user", "content": f"More, {turn}."}]

            async with trio.open_nursery() as watching:
                watching.start_soon(never_deferred, llama, deferred)
                async with trio.open_nursery() as nursery:
                    for n, talk in enumerate(talks):
                        nursery.start_soon(converse, talk, random.Random(n))
                watching.cancel_scope.cancel()
            await settled(llama, gateway)
            assert deferred and not any(deferred)
            for _ in range(2):  # it may have left early every time
                text, last = await ask(gateway, talks[0])
            assert text and last.cached >= 0.5 * last.prompt


async def test_what_slots_hold_is_saved_at_the_end_and_found_by_the_next(tmp_path: Path) -> None:
    """Nothing was reused, nothing was evicted: it is the drain that saves it."""
    (files := tmp_path / "slots").mkdir()
    talk = system_and_user(words(random.Random(13), 300), "Well?")
    async with real_llama(n_parallel=2, n_ctx=2 * 1024, slot_save_path=f"{files}/") as llama:
        with gateway_of(llama, files, tmp_path) as gateway:
            await hard(gateway)
            await ask(gateway, talk)
            gateway.process.terminate()
            with trio.fail_after(patience(30)):
                while gateway.process.poll() is None:
                    await trio.sleep(0.05)
        assert len(list(files.glob("*.kv"))) == 1
    async with real_llama(n_parallel=2, n_ctx=2 * 1024, slot_save_path=f"{files}/") as llama:
        with gateway_of(llama, files, tmp_path) as gateway:
            await hard(gateway)
            _, turn = await ask(gateway, talk)
            assert turn.cached >= 0.9 * turn.prompt - 16
