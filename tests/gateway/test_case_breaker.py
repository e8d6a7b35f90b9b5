"""Cases 41 and 42: what is never tried again, and when a backend is left alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from tests.fakes import Script
from tests.gateway.conftest import Call, Lane, chat, data_of, metric, open_lane

BROKEN = Script(status=500, script=[(0, b'{"error":{"message":"the GPU fell off","type":"server_error"}}')])


async def break_it(lane: Lane, faults: int = 5) -> list[Call]:
    """Let so many requests fail, one after the other."""
    lane.runtime.script(BROKEN, times=faults)
    return [await lane.post(chat(f"broken {n}")) for n in range(faults)]


async def circuit(lane: Lane) -> str:
    shown = (await lane.status())["breaker"]["state"]
    assert metric(lane.metrics, "kvstream_breaker_state", backend="default", state=shown) == 1
    return str(shown)


# --- 42 ---------------------------------------------------------------------------------------------------------------


async def test_case_42_five_faults_open_it_and_one_trial_closes_it(autojump_clock: Any) -> None:
    async with open_lane(knobs={"slots": 4}) as lane:
        assert [call.status for call in await break_it(lane)] == [502] * 5
        assert await circuit(lane) == "open"
        ready = await lane.get("/ready")
        assert ready.status == 503 and json.loads(ready.body)["status"] == "breaker_open"
        sent = len(lane.runtime.journal.calls)
        lane.runtime.script(Script(first_byte_after=3.0))
        waiting = [lane.start(chat(f"waiting {n}")) for n in range(20)]
        await trio.sleep(4.5)
        assert len(lane.runtime.journal.calls) == sent, "nothing goes to a backend that is left alone"
        await trio.sleep(1.0)
        assert await circuit(lane) == "half_open" and (await lane.get("/ready")).status == 200
        await trio.sleep(1.5)
        assert len(lane.runtime.journal.calls) == sent + 1, "one trial, whoever waits"
        for call in waiting:
            await call.ended.wait()
        assert [call.status for call in waiting] == [200] * 20
        assert await circuit(lane) == "closed"
        assert lane.runtime.in_flight_max == 4 and lane.idle()


async def test_case_42_it_outlasts_a_runtime_at_work_for_a_client_it_cannot_hear(autojump_clock: Any) -> None:
    """``non_stream = "pass"``, one slot, an answer without a bound: the runtime works on until its context is full."""
    async with open_lane(knobs={"slots": 1, "n_ctx": 2048, "decode_rate": 20.0, "answer_tokens": None},
                         upstream={"non_stream": "pass", "first_event_s": 5.0, "slot_idle_s_max": 3.0,
                                   "breaker_faults": 2, "breaker_open_s": 1.0}) as lane:
        first = lane.start(chat("for nobody", stream=False))
        await trio.sleep(1.0)
        first.leave()
        unheard = lane.runtime.journal.calls[0]
        while (await lane.status())["breaker"]["opened"] < 3:
            assert (await lane.post(chat("who waits", stream=False, max_tokens=3))).status == 504
        await lane.runtime.journal.until(lambda j: unheard.ended_at is not None)
        assert unheard.closed_at is not None and unheard.ended_at - unheard.closed_at > 90.0
        assert (await lane.status())["breaker"]["why"] == "backend_timeout" and await circuit(lane) != "closed"
        assert (await lane.post(chat("after all", stream=False, max_tokens=3))).status == 200
        assert trio.current_time() - unheard.ended_at < 10.0, "when it can serve it does, without a restart"
        assert await circuit(lane) == "closed" and not lane.runtime.engine.in_flight and lane.idle()


async def test_case_42_a_failed_trial_opens_it_again_for_longer(autojump_clock: Any) -> None:
    async with open_lane() as lane:
        await break_it(lane)
        began = trio.current_time()
        lane.runtime.script(BROKEN, times=2)
        waiting = [lane.start(chat(f"waiting {n}")) for n in range(20)]
        for call in waiting:
            await call.ended.wait()
        assert sum(b"[DONE]" in call.body for call in waiting) == 18
        tried = [entry.received_at - began for entry in lane.runtime.journal.calls[5:8]]
        assert tried == pytest.approx([5, 15, 35], abs=0.5)
        assert (await lane.status())["breaker"]["opened"] == 3 and lane.idle()


async def test_case_42_a_trial_that_is_cancelled_decides_nothing(autojump_clock: Any) -> None:
    async with open_lane() as lane:
        await break_it(lane)
        lane.runtime.script(Script(first_byte_after=60.0))
        first, second = lane.start(chat("leaves")), lane.start(chat("stays"))
        await trio.sleep(6)
        assert len(lane.runtime.journal.calls) == 6
        first.leave()
        await second.ended.wait()
        assert second.status == 200 and await circuit(lane) == "closed"


async def test_case_42_a_long_trial_closes_it_when_its_tokens_have_flowed_for_a_while(autojump_clock: Any) -> None:
    async with open_lane() as lane:
        await break_it(lane)
        lane.runtime.script(Script(itl=1.0, tokens=100))
        lane.start(chat("long", max_tokens=100))
        await trio.sleep(9)
        assert await circuit(lane) == "half_open", "a first token is no answer: streams break later"
        await trio.sleep(3)
        assert await circuit(lane) == "closed"


def says(status: int, message: str, kind: str = "invalid_request_error") -> Script:
    return Script(status=status, script=[(0, json.dumps({"error": {"message": message, "type": kind}}).encode())])


@pytest.mark.parametrize("script", [
    says(400, "bad field"), says(404, "no such thing"), says(413, "too large"), says(422, "cannot be processed"),
    says(400, "the request exceeds the available context size", "exceed_context_size_error"),
    says(500, "This model's maximum context length is 4096 tokens", "server_error"),
    says(500, "Context size has been exceeded.", "server_error"),
    says(500, "image input is not supported", "server_error"),
    says(501, "not supported by this server", "not_supported_error"),
    says(401, "Invalid API Key", "authentication_error"),
    says(429, "slow down", "rate_limit_error"),
], ids=lambda script: f"{script.status} {script.script[0][1][12:40]!r}")
async def test_case_42_what_is_not_the_backends_fault_never_counts(autojump_clock: Any, script: Script) -> None:
    async with open_lane() as lane:
        lane.runtime.script(script, times=20)
        for n in range(20):
            call = await lane.post(chat(f"wrong {n}"))
            assert call.status != 200
        breaker = (await lane.status())["breaker"]
        assert breaker["state"] == "closed" and breaker["faults"] == 0


FAULTS = {
    "cut": (Script(end="cut", tokens=3), {}),
    "reset": (Script(end="rst", tokens=3), {}),
    "no end": (Script(end="eof_no_finish", tokens=3), {}),
    "error frame": (Script(end="error_event", tokens=3), {}),
    "reset before the answer": (Script(refuse=True), {}),
    "silence before the first token": (Script(hang_at_token=0), {"first_event_s": 2.0}),
    "silence in mid-answer": (Script(hang_at_token=3), {"stall_s": 2.0}),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_case_42_the_backends_faults(autojump_clock: Any, fault: str) -> None:
    script, upstream = FAULTS[fault]
    async with open_lane(upstream=upstream) as lane:
        lane.runtime.script(script, times=5)
        for n in range(5):
            assert await circuit(lane) == "closed"
            call = await lane.post(chat(f"fails {n}"))
            assert call.status >= 500 or b'"error"' in call.body
        assert await circuit(lane) == "open"


# --- 41 ---------------------------------------------------------------------------------------------------------------


async def test_case_41_nothing_is_repeated_once_the_body_began(autojump_clock: Any) -> None:
    async with open_lane() as lane:
        lane.runtime.script(Script(end="rst", tokens=1))
        call = await lane.post(chat("once"))
        assert call.status == 200 and b"[DONE]" not in call.body
        assert data_of(call.body)[-1]["error"]["code"] == "upstream_stream_truncated"
        await trio.sleep(60)
        assert lane.runtime.journal.prompts == ["once"]


async def test_case_41_a_client_that_loses_patience_is_no_fault(autojump_clock: Any) -> None:
    async with open_lane(knobs={"slots": 1}) as lane:
        lane.runtime.script(Script(first_byte_after=30.0), times=10)
        for n in range(10):
            call = lane.start(chat(f"impatient {n}"))
            await trio.sleep(2)
            call.leave()
            await call.ended.wait()
        breaker = (await lane.status())["breaker"]
        assert breaker["state"] == "closed" and breaker["faults"] == 0


async def test_case_41_a_reader_that_stalls_is_no_fault(autojump_clock: Any) -> None:
    async with open_lane(server={"stall_s": 1.0, "stream_buffer_bytes": 1024}, knobs={"answer_tokens": 200}) as lane:
        for n in range(6):
            call = lane.start(chat(f"stuck {n}", max_tokens=200), stuck=True)
            await trio.sleep(5)
            call.leave()
        assert (await lane.status())["breaker"]["state"] == "closed"


async def test_case_41_an_answer_cut_by_the_operators_own_bound_is_no_fault(autojump_clock: Any) -> None:
    async with open_lane(upstream={"total_s": 2.0}) as lane:
        lane.runtime.script(Script(itl=0.5, tokens=100), times=6)
        for n in range(6):
            await lane.post(chat(f"long {n}", max_tokens=100))
        breaker = (await lane.status())["breaker"]
        assert breaker["state"] == "closed" and breaker["faults"] == 0 and breaker["opened"] == 0
