"""Exact ids of a prompt: those that the runtime sees, whether the page keys are of them, and what keeps them costs."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstream.adapters import LlamaCppBackend
from kvstream.adapters.base import ProxyRequest
from kvstream.core.tokens import page_keys, salt
from kvstream.core.types import CountSource
from kvstream.gateway.count import PromptCount, PromptCounter
from kvstream.gateway.hygiene import HygieneSettings, PrefixHygiene
from tests.fakes.runtime import open_runtime
from tests.fakes.upstream import FakeUpstream

BILLING = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};"
PAGE = 16


def asked(route: str, **view: Any) -> ProxyRequest:
    return ProxyRequest(route, json.dumps(view).encode(), view, model="m")


def chat(text: str) -> ProxyRequest:
    return asked("/v1/chat/completions", messages=[{"role": "user", "content": text}])


def coding(nonce: str) -> ProxyRequest:
    system = {"role": "system", "content": BILLING.format(nonce) + " word" * 60}
    return asked("/v1/chat/completions", messages=[system, {"role": "user", "content": "Fix it."}])


async def counted(request: ProxyRequest, *, keeps_ids: bool = True, keyed_max: int = 32,
                  volatile: tuple[str, ...] = ()) -> tuple[PromptCount, int]:
    """(the count, how many calls it took)."""
    async with open_runtime() as runtime:
        hygiene = PrefixHygiene(HygieneSettings(volatile=volatile))
        counter = PromptCounter(
            LlamaCppBackend("http://fake"), FakeUpstream(runtime), page_tokens=PAGE, tokens_keyed_max=keyed_max,
            timeout_s=5, canonical=hygiene.canonical, keeps_ids=keeps_ids)
        count = await counter.exact(request, "alice")
        assert count is not None and count.source is CountSource.EXACT
        return count, len(runtime.journal.paths("/tokenize"))


async def test_ids_are_kept_and_all_pages_have_keys(autojump_clock: object) -> None:
    count, calls = await counted(chat("word " * 300))
    assert count.ids is not None and count.exact and calls == 1
    assert len(count.ids) == count.tokens > 300 and isinstance(count.ids, array)
    assert len(count.keys) == count.tokens // PAGE
    assert count.keys == page_keys(count.ids, PAGE, salt("m", "alice"))
    assert repr(count.ids) not in repr(count)


async def test_without_hard_inject_nothing_is_kept_and_keys_are_capped(autojump_clock: object) -> None:
    count, _ = await counted(chat("word " * 300), keeps_ids=False)
    assert (count.ids, count.exact, len(count.keys)) == (None, False, 2)
    count, _ = await counted(chat("word " * 300), keyed_max=0)  # prefixes are switched off
    assert count.keys == ()


async def test_ids_are_the_runtimes_and_keys_those_without_volatile_values(autojump_clock: object) -> None:
    names = ("anthropic_cch",)
    one, calls = await counted(coding("abc12"), volatile=names)
    other, _ = await counted(coding("fed98"), volatile=names)
    assert calls == 2 and one.keys == other.keys
    assert one.ids != other.ids and not one.exact and not other.exact
    plain, _ = await counted(coding("abc12"))
    assert one.ids == plain.ids and plain.exact and plain.keys != one.keys
    none, calls = await counted(chat("nothing volatile"), volatile=names)
    assert none.exact and calls == 1


async def test_ids_that_the_client_sent_are_kept(autojump_clock: object) -> None:
    count, calls = await counted(asked("/completion", prompt=list(range(40))))
    assert count.ids == array("I", range(40)) and count.exact and calls == 0


@pytest.mark.parametrize(("route", "view"), [
    ("/v1/embeddings", {"input": "a text"}),  # nothing of it is kept
    ("/v1/messages", {"messages": [{"role": "user", "content": "a text"}]}),  # counted by number
])
async def test_prompts_without_ids(route: str, view: dict[str, Any], autojump_clock: object) -> None:
    count, _ = await counted(asked(route, **view))
    assert count.ids is None and not count.exact and count.tokens > 0


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=100))
def test_packed_ids_give_the_keys_of_the_tuple(ids: list[int]) -> None:
    assert page_keys(array("I", ids), PAGE, b"s") == page_keys(tuple(ids), PAGE, b"s")
