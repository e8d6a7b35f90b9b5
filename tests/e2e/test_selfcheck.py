"""The self-check of slots on real servers: what each way of starting llama-server allows, and what asking costs."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from kvstream.adapters.base import CapacityQuery, HttpReply
from kvstream.adapters.llamacpp import LlamaCppBackend
from kvstream.gateway.inject_settings import InjectSettings
from kvstream.gateway.selfcheck import check_slots
from kvstream.gateway.slot_ports import SlotsFound
from kvstream.gateway.upstream import HttpUpstream
from tests.fakes.real import RealLlama, real_llama

TOKENS_MAX = 30  # what a check may compute


async def check(llama: RealLlama, **settings: Any) -> SlotsFound:
    """As the lane does it: the capacity first, then the slots."""
    adapter = LlamaCppBackend(llama.base_url)
    async with HttpUpstream(llama.base_url) as upstream:
        replies: dict[str, HttpReply | None] = {}
        while calls := [(n, c) for n, c in adapter.capacity_calls(replies) if n not in replies]:
            for name, call in calls:
                replies[name] = await upstream.request(call, timeout_s=60)
        report = adapter.read_capacity(replies, CapacityQuery(page_tokens=64))
        return await check_slots(adapter, upstream, InjectSettings(check_s_max=60, **settings), report)


SERVERS: list[tuple[dict[str, Any], str, bool, tuple[str, ...]]] = [
    ({"n_parallel": 2}, "hard", False, ()),
    ({"n_parallel": 2, "cache_ram_mib": 8192}, "hard", True, ("--cache-ram 0",)),
    ({"kv_unified": True}, "hard", False, ()),
    ({"kv_unified": True, "cache_ram_mib": 8192}, "hard-unpinned", True, ("-np 4 -c 8192", "--cache-ram 0")),
    ({"n_parallel": 1}, "hard", False, ()),
    ({"n_parallel": 1, "cache_ram_mib": 8192}, "hard", True, ("--cache-ram 0",)),
]


@pytest.mark.parametrize(("params", "mode", "ram", "missing"), SERVERS, ids=str)
async def test_what_a_server_allows(params: dict[str, Any], mode: str, ram: bool, missing: tuple[str, ...]) -> None:
    async with real_llama(**params) as llama:
        before = len(await llama.slots())
        found = await check(llama, dir=str(llama.slots_dir))
        assert (found.mode, found.ram_cache, found.missing, found.settled) == (mode, ram, missing, True), found
        rules = found.rules
        assert rules is not None and found.identity is not None
        assert (rules.slots, rules.pinned, rules.identity) == (before, mode == "hard", found.identity.digest)
        streams = 1 if params.get("kv_unified") else params["n_parallel"]
        assert (rules.token_bytes, rules.fixed_bytes) == (23_056, 48 + 4 * streams + 24 * 30)
        assert "file model" in found.identity.facts
        assert found.slots_dir_hint == str(llama.slots_dir)
        # what it cost is what the server counted, and nothing of it stays: no tokens in a slot, no file
        assert found.computed == await llama.metric("prompt_tokens_total") <= TOKENS_MAX
        assert found.cached == await llama.metric("prompt_tokens_cached_total")
        assert not any(slot.get("n_prompt_tokens") for slot in await llama.slots())
        assert not list(llama.slots_dir.glob("kvstreamcheck*"))


async def test_case_45_without_a_save_path_nothing_is_computed() -> None:
    async with real_llama(slot_save_path="", n_parallel=2) as llama:
        found = await check(llama)
        assert (found.mode, found.missing, found.settled) == ("soft", ("--slot-save-path DIR",), True)
        assert await llama.metric("prompt_tokens_total") == 0
    async with real_llama(slot_save_path="", n_parallel=1) as llama:  # where the capacity needs no probe
        assert (await check(llama)).missing == ("--slot-save-path DIR",)
        assert await llama.metric("prompt_tokens_total") == 0


async def test_slots_that_are_not_shown_are_not_used() -> None:
    async with real_llama(n_parallel=2, endpoint_slots=False) as llama:
        found = await check(llama)
        assert (found.mode, found.rules, found.settled) == ("soft", None, True)
        assert "--no-slots" in found.missing[0]


async def test_a_folder_that_is_not_the_servers_is_no_hint(tmp_path: Any) -> None:
    async with real_llama(n_parallel=2) as llama:
        found = await check(llama, dir=str(tmp_path))
        assert (found.mode, found.slots_dir_hint) == ("hard", "")
        assert any(str(tmp_path) in note for note in found.notes)


@pytest.mark.parametrize("busy", [1, 2])
async def test_a_server_at_work_keeps_what_it_works_on(busy: int) -> None:
    """With one slot at work the other is used; with both there is nothing to ask, and it is asked again later."""
    async with real_llama(n_parallel=2) as llama, trio.open_nursery() as nursery:
        answers: list[Any] = []

        async def stream(first: int) -> None:
            body = {"prompt": [first] * 40, "n_predict": 60 if busy == 1 else 900, "ignore_eos": True, "stream": True,
                    "temperature": 0}
            async with llama.client() as client, client.stream("POST", "/completion", json=body) as response:
                answers.append(len([line async for line in response.aiter_lines() if line.startswith("data:")]))

        for i in range(busy):
            nursery.start_soon(stream, 30 + i)
        while await llama.busy() < busy:
            await trio.sleep(0.02)
        found = await check(llama)
        assert (found.mode, found.settled) == (("hard", True) if busy == 1 else ("soft", False)), found
        if busy == 2:
            nursery.cancel_scope.cancel()  # of them nothing was touched
        nursery.cancel_scope.deadline = trio.current_time() + 120
        while not answers:
            await trio.sleep(0.05)
        assert answers == [61]  # not cut short


