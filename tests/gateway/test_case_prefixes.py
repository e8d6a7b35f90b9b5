"""Cases 58, 59, 60 and 62: what keeps prompts apart that ought to share their beginning."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from kvstream.adapters.base import ProxyRequest
from kvstream.core.volatile import replaced
from kvstream.gateway.hygiene import HygieneSettings, PrefixHygiene
from tests.fakes import Script
from tests.gateway.conftest import Lane, open_lane

BILLING = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};"
RULES = "You are an agent. Keep to the rules of the house. " * 20


def coding(nonce: str, question: str = "Fix the tests.") -> dict[str, Any]:
    system = [{"type": "text", "text": BILLING.format(nonce)}, {"type": "text", "text": RULES}]
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
            "stream": True, "max_tokens": 2}


def sent(lane: Lane) -> list[bytes]:
    return [entry.request.body for entry in lane.runtime.journal.calls if entry.inference]


async def accounted(lane: Lane) -> int:
    return int((await lane.status())["counters"]["prefix_tokens_accounted"])


@pytest.mark.parametrize("dialect", ["llamacpp", "openai"])
async def test_case_58_a_billing_nonce_keeps_no_prefix_apart(autojump_clock: Any, dialect: Any) -> None:
    """Counted exactly (llama.cpp) and by estimate: the bytes travel unchanged, the page keys are the same, and the
    culprit is named."""
    knobs = {"dialect": dialect, "n_ctx": 65536}
    async with open_lane(knobs=knobs, backend={"type": dialect, "base_url": "http://fake"}) as lane:
        bodies = [coding("fa690"), coding("0b1c2")]
        for body in bodies:
            assert (await lane.post(body)).status == 200
        assert [json.loads(body)["messages"] for body in sent(lane)] == [body["messages"] for body in bodies]
        assert await accounted(lane) > 100
        (finding,) = (await lane.status())["prefix_hygiene"]["findings"]
        assert finding["pattern"] == "anthropic_cch" and finding["where"] == "message 0"
        assert finding["tokens_lost"] > 100 and "anthropic_cch" in finding["remedy"]


async def test_case_58_without_the_pattern_it_does(autojump_clock: Any) -> None:
    async with open_lane(prefix={"volatile": ()}) as lane:
        for nonce in ("fa690", "0b1c2"):
            await lane.post(coding(nonce))
        assert await accounted(lane) < 50  # the name of the header


async def test_case_58_normalized_bodies_are_the_same(autojump_clock: Any) -> None:
    async with open_lane(prefix={"normalize": ("anthropic_cch",)}) as lane:
        for nonce in ("fa690", "0b1c2"):
            await lane.post(coding(nonce))
        first, second = sent(lane)
        assert first == second
        assert BILLING.format("00000") in first.decode()  # the rest of the line is kept
        assert (await lane.status())["prefix_hygiene"]["findings"] == []
        assert lane.runtime.journal.calls[-1].request.json["messages"][0]["content"][1]["text"] == RULES


SSE = (("Content-Type", "text/event-stream"),)
ANSWER = b"".join(f"event: {value['type']}\ndata: {json.dumps(value)}\n\n".encode() for value in (
    {"type": "message_start", "message": {"id": "m", "type": "message", "role": "assistant", "content": [],
                                          "usage": {"input_tokens": 300, "output_tokens": 0}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}},
    {"type": "message_stop"}))


@pytest.mark.parametrize("names", [(), ("anthropic_cch",)])
async def test_case_58_messages_of_claude_code(autojump_clock: Any, names: tuple[str, ...]) -> None:
    """The route that Claude Code really calls."""
    async with open_lane(prefix={"normalize": names}) as lane:
        lane.runtime.script(Script(script=[(0, ANSWER)], headers=SSE), path="/v1/messages", times=None)
        bodies = []
        for nonce in ("fa690", "0b1c2"):
            body = {"model": "m", "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "hello"}],
                    "system": [{"type": "text", "text": BILLING.format(nonce)}, {"type": "text", "text": RULES}]}
            call = await lane.post(body, "/v1/messages")
            assert call.status == 200 and b"message_stop" in call.body
            bodies.append(body["system"])
        got = [entry.request.json["system"] for entry in lane.runtime.journal.paths("/v1/messages")]
        assert (got == bodies) is (not names) and (got[0] == got[1]) is bool(names)
        assert await accounted(lane) > 100
        findings = (await lane.status())["prefix_hygiene"]["findings"]
        assert [found["pattern"] for found in findings] == ([] if names else ["anthropic_cch"])


def test_case_58_in_messages_of_anthropic() -> None:
    """``/v1/messages`` has the system text beside the messages."""
    hygiene = PrefixHygiene(HygieneSettings(normalize=("anthropic_cch",)))

    def request(nonce: str) -> ProxyRequest:
        view = {"model": "m", "max_tokens": 9, "system": [{"type": "text", "text": BILLING.format(nonce)},
                                                          {"type": "text", "text": RULES}],
                "messages": [{"role": "user", "content": "cch=stays; as it is"}]}
        body = json.dumps(view, indent=1).encode()
        return ProxyRequest(route="/v1/messages", body=body, view=view, model="m")

    one, two = request("fa690"), request("0b1c2")
    assert hygiene.canonical(one) == hygiene.canonical(two) == hygiene.normalized(one) == hygiene.normalized(two)
    assert hygiene.normalized(one).body == one.body.replace(b"cch=fa690", b"cch=00000")
    assert hygiene.normalized(one).view == json.loads(hygiene.normalized(one).body)
    for asked in (one, two):
        hygiene.look(asked, "", 300)
    (finding,) = hygiene.status()["findings"]
    assert finding["where"] == "the system text" and finding["pattern"] == "anthropic_cch"
    assert PrefixHygiene(HygieneSettings()).normalized(one) is one


async def talk(lane: Lane, system: str, turns: int) -> None:
    """Turns of one conversation; ``system`` is formatted with the minute and what is left."""
    said: list[dict[str, Any]] = []
    for turn in range(turns):
        said.append({"role": "user", "content": f"question {turn}: how are you?"})
        first = {"role": "system", "content": system.format(minute=30 + turn, left=9000 - 137 * turn)}
        answer = await lane.post({"messages": [first, *said], "stream": False, "max_tokens": 4})
        said.append(json.loads(answer.body)["choices"][0]["message"])
        await trio.sleep(60)


async def test_cases_59_and_60_a_clock_and_a_countdown_are_named(autojump_clock: Any) -> None:
    """Ten turns with a minute clock on line 3 and a countdown after it."""
    system = f"You are an agent.\nBe kind.\nNow: 12:{{minute}}\n<total_tokens>{{left}}</total_tokens>\n{RULES}"
    async with open_lane(knobs={"n_ctx": 65536}) as lane:
        await talk(lane, system, 10)
        status = (await lane.status())["prefix_hygiene"]
        (finding,) = status["findings"]
        at = system.index("{minute}") + 1
        assert finding["text"] == f"prefix diverges at byte {at} of message 0: `…12:3[8|9]…`"
        assert finding["requests"] == 9 and finding["pattern"] == "times"
        assert finding["tokens_lost_total"] > 9 * 200 and finding["tokens_lost"] > 200
        shown = json.dumps(status)
        assert "agent" not in shown and "question" not in shown and len(finding["excerpt"]) < 20
        assert all("Now: 12:3" in body.decode() for body in sent(lane))  # no silent rewriting


async def test_cases_59_and_60_by_option_they_keep_nothing_apart(autojump_clock: Any) -> None:
    system = f"You are an agent.\nBe kind.\nNow: 12:{{minute}}\n<total_tokens>{{left}}</total_tokens>\n{RULES}"
    for names, shared in (((), False), (("times", "total_tokens"), True)):
        async with open_lane(knobs={"n_ctx": 65536}, prefix={"volatile": names}) as lane:
            await talk(lane, system, 4)
            assert (await accounted(lane) > 3 * 200) is shared


async def test_a_good_conversation_gives_no_finding(autojump_clock: Any) -> None:
    async with open_lane(knobs={"n_ctx": 65536}) as lane:
        await talk(lane, RULES, 10)
        assert (await lane.status())["prefix_hygiene"]["findings"] == []


async def test_case_62_shuffled_tools_are_named_and_left_alone(autojump_clock: Any) -> None:
    tools = [{"type": "function", "function": {"name": f"tool_{name}", "description": "It does. " * 10,
                                              "parameters": {"type": "object", "properties": {}}}} for name in "abc"]
    async with open_lane() as lane:
        for order in (tools, tools[::-1]):
            await lane.post({"messages": [{"role": "user", "content": "hello"}], "tools": order, "stream": True})
        (finding,) = (await lane.status())["prefix_hygiene"]["findings"]
        assert finding["kind"] == "tools reordered" and "tools reordered" in finding["text"]
        assert [json.loads(body)["tools"] for body in sent(lane)] == [tools, tools[::-1]]


def test_replacing_costs_nothing_where_there_is_nothing() -> None:
    assert replaced(b'{"system": "plain"}', ("anthropic_cch",)) is None
