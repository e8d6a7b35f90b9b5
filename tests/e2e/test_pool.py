"""Case 38 on the real thing: one pool of KV for all slots, and more asked of it than it holds.

Four answers of 500 tokens after prompts of about 60 need 2240 tokens, the pool has 1024. Direct, llama.cpp lets all
four in, and when the pool is full it ends every one of them. Through the gateway they are let in as they fit.
"""

from __future__ import annotations

from typing import Any

import trio

from tests.e2e.conftest import Start
from tests.e2e.requests import finish, ids, whole
from tests.fakes.real import RealLlama

EXCEEDED = "Context size has been exceeded."


async def four_at_once(port: int) -> list[list[Any]]:
    """The events of four streams that started together."""
    answers: list[list[Any]] = [[] for _ in range(4)]

    async def one(i: int) -> None:
        answers[i] = await whole(port, ids(60, 300, first=i + 1))

    with trio.fail_after(240):
        async with trio.open_nursery() as nursery:
            for i in range(4):
                nursery.start_soon(one, i)
    return answers


async def test_four_big_answers_finish_where_direct_all_die(unified: RealLlama, start: Start) -> None:
    direct = await four_at_once(unified.port)
    assert [answer[-1].get("error", {}).get("message") for answer in direct] == [EXCEEDED] * 4
    await unified.idle()

    with start(unified.base_url) as gateway:
        capacity = (await gateway.status())["capacity"]
        assert (capacity["mode"], capacity["pages"] * capacity["page_tokens"]) == ("unified", 1024)
        through = await four_at_once(gateway.port)
        assert [finish(answer) for answer in through] == ["length"] * 4
        for answer in through:
            texts = [event for event in answer if event and event["choices"][0]["text"]]
            assert len(texts) > 250  # not cut short to make room: every one got its 300 tokens
        status = await gateway.settled()
        assert status["counters"]["truncated"] == 0 and status["counters"]["admitted"] == 4
        assert EXCEEDED not in gateway.text()
