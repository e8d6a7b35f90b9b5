"""Answers that are kept: whose, which, how many, and that a kept one is the one that was."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from kvstream.adapters.base import Delta, ProxyRequest
from kvstream.core.types import CountSource
from kvstream.gateway.answer_cache import AnswerCache, CacheBounds
from kvstream.gateway.flight import EVENT_BYTES
from kvstream.gateway.request import CHAT
from tests.fakes import Script
from tests.gateway.conftest import chat, data_of, metric, open_lane, text_of

COLD: dict[str, Any] = {"temperature": 0}
ON = {"response_cache": {"enabled": True}}
USAGE = {"stream_options": {"include_usage": True}}


async def test_a_kept_answer_is_the_one_that_was(autojump_clock: Any) -> None:
    async with open_lane(**ON) as lane:
        first = await lane.post(chat(**COLD, **USAGE))
        again = await lane.post(chat(**COLD, **USAGE))
        assert len(lane.runtime.journal.calls) == 1
        assert again.body == first.body and again.headers["content-type"] == first.headers["content-type"]
        assert (first.headers["x-kvstream-cache"], again.headers["x-kvstream-cache"]) == ("miss", "hit")
        usage = [v["usage"] for v in data_of(again.body)[:-1] if v.get("usage")]
        assert usage and usage == [v["usage"] for v in data_of(first.body)[:-1] if v.get("usage")]
        whole = json.loads((await lane.post(chat(**COLD, stream=False))).body)
        assert whole["choices"][0]["message"]["content"] == text_of(first.body)
        assert whole["usage"]["total_tokens"] == usage[0]["total_tokens"]
        plain = await lane.post(chat(**COLD))
        assert text_of(plain.body) == text_of(first.body) and data_of(plain.body)[-1] == "[DONE]"
        assert not [v for v in data_of(plain.body)[:-1] if not v["choices"]]
        assert len(lane.runtime.journal.calls) == 1
        assert metric(lane.metrics, "kvstream_response_cache_total", result="hit") == 3
        assert metric(lane.metrics, "kvstream_response_cache_total", result="miss") == 1
        assert (await lane.status())["sharing"] == {"coalesced": 0, "cached": 3}
        assert metric(lane.metrics, "kvstream_requests_total", route=CHAT, outcome="served") == 4
        assert metric(lane.metrics, "kvstream_response_cache_bytes") > 0
        assert lane.idle()


async def test_off_unless_wanted_and_never_for_what_draws_lots(autojump_clock: Any) -> None:
    async with open_lane() as lane:
        for _ in range(2):
            assert "x-kvstream-cache" not in (await lane.post(chat(**COLD))).headers
        assert len(lane.runtime.journal.calls) == 2
    async with open_lane(**ON) as lane:
        for _ in range(2):
            assert "x-kvstream-cache" not in (await lane.post(chat())).headers
        assert len(lane.runtime.journal.calls) == 2


async def test_without_sharing_there_is_keeping(autojump_clock: Any) -> None:
    async with open_lane(**ON, coalesce={"enabled": False}) as lane:
        calls = [lane.start(chat(**COLD)) for _ in range(2)]
        for call in calls:
            await call.ended.wait()
            assert call.status == 200 and "x-kvstream-coalesced" not in call.headers
        assert len(lane.runtime.journal.calls) == 2
        assert (await lane.post(chat(**COLD))).headers["x-kvstream-cache"] == "hit"


@pytest.mark.parametrize("script", [
    Script(end="cut", tokens=3), Script(end="error_event", tokens=3), Script(end="done_no_finish", tokens=3),
    Script(status=500)])
async def test_what_did_not_end_well_is_not_kept(autojump_clock: Any, script: Script) -> None:
    async with open_lane(**ON) as lane:
        lane.runtime.script(script)
        await lane.post(chat(**COLD))
        good = await lane.post(chat(**COLD))
        assert good.headers["x-kvstream-cache"] == "miss" and good.status == 200
        assert len(lane.runtime.journal.calls) == 2


async def test_an_answer_whose_client_left_is_not_kept(autojump_clock: Any) -> None:
    async with open_lane(**ON, knobs={"answer_tokens": 200}) as lane:
        call = lane.start(chat(**COLD))
        await trio.sleep(0.5)
        call.leave()
        await call.ended.wait()
        assert (await lane.post(chat(**COLD))).headers["x-kvstream-cache"] == "miss"


async def test_one_clients_answers_are_not_anothers(autojump_clock: Any) -> None:
    async with open_lane(**ON, auth={"keys": ("one", "two")}) as lane:
        for key, result in (("one", "miss"), ("two", "miss"), ("one", "hit"), ("two", "hit")):
            call = await lane.post(chat(**COLD), headers=[("x-api-key", key)])
            assert call.headers["x-kvstream-cache"] == result
        assert (await lane.post(chat(**COLD))).status == 401


# --- the cache itself -------------------------------------------------------------------------------------------------

REQUEST = ProxyRequest(CHAT, b"{}", {}, stream=True)


class Source:
    adapter = None
    count_source = CountSource.EXACT
    tokens_prompt = tokens = 1
    usage = last_data = None


def kept(cache: AnswerCache) -> int:
    return sum(entry.size for entry in cache._kept.values())


def test_the_least_recently_used_goes_first() -> None:
    cache = AnswerCache(CacheBounds(entries=2, bytes=10**6))
    for key in (b"a", b"b"):
        cache.keep(key, [Delta(key)], Source(), 0.0)  # type: ignore[arg-type]
    assert cache.find(b"a", REQUEST, 1.0)
    cache.keep(b"c", [Delta(b"c")], Source(), 2.0)  # type: ignore[arg-type]
    assert cache.find(b"b", REQUEST, 3.0) is None
    assert cache.find(b"a", REQUEST, 3.0) and cache.find(b"c", REQUEST, 3.0) and len(cache) == 2


def test_bytes_are_counted_both_ways() -> None:
    size = EVENT_BYTES + 1000
    cache = AnswerCache(CacheBounds(entries=100, bytes=3 * size))
    for number in range(10):
        cache.keep(b"%d" % number, [Delta(b"x" * 1000)], Source(), 0.0)  # type: ignore[arg-type]
        assert cache.size == kept(cache) <= 3 * size
    cache.keep(b"9", [Delta(b"x" * 10)], Source(), 0.0)  # type: ignore[arg-type]
    assert cache.size == kept(cache) == 2 * size + EVENT_BYTES + 10
    cache.keep(b"big", [Delta(b"x" * 4 * size)], Source(), 0.0)  # type: ignore[arg-type]
    assert cache.find(b"big", REQUEST, 0.0) is None and len(cache) == 3
    assert cache.find(b"9", REQUEST, 299.0) and cache.find(b"9", REQUEST, 300.0) is None
    assert cache.size == kept(cache) == 2 * size
    cache.clear()
    assert cache.size == len(cache) == 0
