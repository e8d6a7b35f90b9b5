"""Cases 1-6: the client left, and the runtime's slot is free again."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from kvstream.gateway.slotwatch import PREFILL_POLL_S_MIN
from tests.fakes import Script
from tests.fakes.client import RawResponse, encode_request
from tests.gateway.conftest import CHAT, HANG_S, SOON_S, Lane, Rig, chat, data_of, metric, open_lane, open_rig, text_of

LEAVES = ["close", "reset"]


async def leave(response: RawResponse, how: str) -> None:
    if how == "close":
        await response.close()
    elif how == "reset":
        response.reset()
    else:
        await response.half_close()


def cancelled(of: Lane | Rig, phase: str) -> float:
    return metric(of.engine.metrics, "kvstream_cancelled_total", phase=phase)


def backend_errors(of: Lane | Rig) -> float:
    metrics = of.engine.metrics
    return sum(s.value for m in metrics.backend_errors.collect() for s in m.samples if s.name.endswith("_total"))


# --- on the virtual clock: what is given back, and when ---------------------------------------------------------------


async def test_case_01_non_stream_client_leaves(autojump_clock: Any) -> None:
    async with open_lane(knobs={"slots": 1}) as lane:
        lane.runtime.script(Script(headers_after=20))
        first = lane.start(chat("first", stream=False))
        await trio.sleep(1)
        second = lane.start(chat("second", stream=False))
        left = trio.current_time()
        await trio.sleep(0.1)
        first.leave()
        await second.ended.wait()
        assert lane.runtime.journal.calls[0].closed_at == pytest.approx(left + 0.1, abs=0.01)
        assert second.status == 200
        # it had no headers yet: its slot must look idle twice, and a prefill is not looked at more often than that
        assert trio.current_time() - left < PREFILL_POLL_S_MIN + 0.5
        assert first.status == 0 and not first.writes
        assert lane.idle()
        assert cancelled(lane, "prefill") == 1
        assert backend_errors(lane) == 0


async def test_case_02_streaming_client_leaves(autojump_clock: Any) -> None:
    async with open_lane(knobs={"answer_tokens": 100}) as lane:
        lane.runtime.script(Script(itl=0.2))
        call = lane.start(chat())
        while len(call.writes) < 5:
            await trio.sleep(0.01)
        left = trio.current_time()
        call.leave()
        await call.ended.wait()
        await trio.sleep(0.2)
        entry = lane.runtime.journal.calls[0]
        assert entry.closed_at is not None and entry.closed_at - left < 0.2
        assert lane.idle()
        assert cancelled(lane, "streaming") == 1
        # what was produced is booked although no usage came
        assert 4 <= metric(lane.metrics, "kvstream_answer_tokens_total") <= 6
        assert backend_errors(lane) == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_case_03_client_leaves_before_first_token(autojump_clock: Any, stream: bool) -> None:
    async with open_lane(knobs={"slots": 1}) as lane:
        lane.runtime.script(Script(first_byte_after=30))
        call = lane.start(chat(stream=stream))
        await trio.sleep(2)
        call.leave()
        await trio.sleep(0.5)
        entry = lane.runtime.journal.calls[0]
        assert entry.headers_at is not None and entry.closed_at is not None
        assert entry.closed_at - entry.received_at == pytest.approx(2, abs=0.1)
        assert lane.idle()
        assert cancelled(lane, "prefill") == 1


async def test_case_04_client_leaves_while_queued(autojump_clock: Any) -> None:
    async with open_lane(knobs={"slots": 1}) as lane:
        lane.runtime.script(Script(first_byte_after=5))
        calls = [lane.start(chat("busy"))]
        for name in ("one", "two", "three"):
            await trio.sleep(0.1)
            calls.append(lane.start(chat(name)))
        await trio.sleep(0.5)
        assert (await lane.status())["queue"]["length"] == 3
        calls[2].leave()
        await calls[2].ended.wait()
        await trio.testing.wait_all_tasks_blocked()
        queue = (await lane.status())["queue"]
        assert (queue["length"], [r["position"] for r in queue["requests"]]) == (2, [1, 2])
        for call in calls:
            await call.ended.wait()
        assert lane.runtime.journal.prompts == ["busy", "one", "three"]
        assert cancelled(lane, "queued") == 1
        assert lane.runtime.deferred_max == 0
        assert lane.idle()


async def test_case_05_backend_does_not_notice_the_close(autojump_clock: Any) -> None:
    async with open_lane(knobs={"slots": 1, "busy_after_close": 5.0}) as lane:
        lane.runtime.script(Script(first_byte_after=60))
        first = lane.start(chat("first"))
        await trio.sleep(1)
        name = (await lane.status())["running"][0]["id"]
        first.leave()
        left = trio.current_time()
        second = lane.start(chat("second"))
        await trio.sleep(1)
        status = await lane.status()
        assert status["seats"] == {"total": 1, "used": 1, "draining": 1}
        assert [r["id"] for r in status["running"]] == [name] and name.startswith("kvs-"), "its name, as in the log"
        assert [r["state"] for r in status["running"]] == ["draining"]
        assert lane.runtime.journal.prompts == ["first"]
        await second.ended.wait()
        calls = lane.runtime.journal.calls
        assert 5 <= calls[1].received_at - left < 5.5
        assert lane.runtime.deferred_max == 0 and lane.runtime.in_flight_max == 1
        assert lane.idle()


async def test_case_05_a_slot_that_never_becomes_idle_is_given_up(autojump_clock: Any) -> None:
    async with open_lane(knobs={"slots": 1, "busy_after_close": 500.0}, upstream={"slot_idle_s_max": 3.0}) as lane:
        lane.runtime.script(Script(first_byte_after=60))
        first = lane.start(chat("first"))
        await trio.sleep(1)
        first.leave()
        left = trio.current_time()
        lane.start(chat("second"))
        await lane.runtime.journal.until(lambda j: len(j.calls) == 2)
        assert 3 <= trio.current_time() - left < 4
        assert metric(lane.metrics, "kvstream_slots_not_idle_total") == 1


async def test_case_06_conversation_id_is_not_forwarded(autojump_clock: Any) -> None:
    async with open_lane() as lane:
        call = await lane.post(chat(), headers=[("X-Conversation-Id", "abc"), ("User-Agent", "me/1")])
        assert call.status == 200
        for entry in lane.runtime.journal.entries:
            assert "x-conversation-id" not in entry.request.headers
        assert lane.runtime.journal.calls[0].request.headers["user-agent"] == "me/1"


# --- on loopback: how a departure is noticed --------------------------------------------------------------------------


@pytest.mark.parametrize("how", LEAVES)
@pytest.mark.parametrize("stream", [True, False])
async def test_case_02_a_real_close_is_seen_in_every_phase(how: str, stream: bool) -> None:
    """Queued, before the headers, before the first token, and while an answer is assembled or streamed."""
    async with open_rig(knobs={"slots": 1, "answer_tokens": 10_000}) as rig:
        rig.runtime.script(Script(headers_after=30))
        rig.runtime.script(Script(first_byte_after=30))
        journal = rig.runtime.journal
        for index in range(3):  # before the headers, before the first token, in mid-answer
            response = await rig.send(chat(f"phase {index}", stream=stream))
            await rig.until(lambda n=index: len(journal.calls) > n and (n != 1 or journal.calls[n].headers_at))
            if index == 2:
                await rig.until(lambda: journal.calls[2].writes)
            waiting = await rig.send(chat("queued", stream=stream))
            await rig.until(lambda: len(rig.engine.streams) == 2)
            await leave(waiting, how)
            await rig.until(lambda: len(rig.engine.streams) == 1, SOON_S)
            await leave(response, how)
            await rig.until(lambda n=index: journal.calls[n].closed_at, SOON_S)
            await rig.until(rig.idle)
        assert journal.prompts == ["phase 0", "phase 1", "phase 2"]
        assert cancelled(rig, "queued") == 3 and cancelled(rig, "prefill") == 2
        assert cancelled(rig, "streaming" if stream else "non_stream") == 1
        assert backend_errors(rig) == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_case_02_a_half_closed_client_that_reads_gets_its_whole_answer(stream: bool) -> None:
    async with open_rig(knobs={"slots": 1}) as rig:
        rig.runtime.script(Script(first_byte_after=0.3))
        first = await rig.send(chat("first", stream=stream))
        await first.half_close()
        second = await rig.send(chat("second", stream=stream))  # half-closed while it queues
        await second.half_close()
        for response in (first, second):
            with trio.fail_after(HANG_S):
                await response.read_head()
                body = await response.read_all()
            assert response.status == 200 and not response.truncated
            if stream:
                assert data_of(body)[-1] == "[DONE]" and text_of(body)
            await response.close()
        await rig.until(rig.idle)
        assert cancelled(rig, "queued") + cancelled(rig, "prefill") + cancelled(rig, "streaming") == 0


async def test_case_02_a_client_that_half_closes_and_then_goes_is_gone() -> None:
    async with open_rig(knobs={"answer_tokens": 10_000}) as rig:
        for number, script in enumerate((Script(headers_after=30), Script())):
            rig.runtime.script(script)
            response = await rig.send(chat("x"))
            await response.half_close()
            await rig.until(lambda n=number: len(rig.runtime.journal.calls) > n)
            await trio.sleep(0.3)
            assert rig.runtime.journal.calls[-1].closed_at is None
            await response.close()
            await rig.until(lambda: rig.runtime.journal.calls[-1].closed_at, SOON_S)
        await rig.until(rig.idle)


async def test_case_02_half_close_can_be_declared_a_disconnect() -> None:
    async with open_rig(server={"half_close": "disconnect"}) as rig:
        rig.runtime.script(Script(headers_after=30))
        response = await rig.send(chat("x"))
        await rig.until(lambda: rig.runtime.journal.calls)
        await response.half_close()
        await rig.until(lambda: rig.runtime.journal.calls[0].closed_at, SOON_S)
        await response.close()


@pytest.mark.parametrize("more", [b"\r\n", encode_request("POST", CHAT, chat("next"))], ids=["line end", "pipelined"])
async def test_case_01_a_client_with_unread_bytes_leaves(more: bytes) -> None:
    """Bytes after the request must not hide that the client left."""
    async with open_rig() as rig:
        rig.runtime.script(Script(headers_after=30))
        response = await rig.send(chat("x", stream=False))
        await response.stream.send_all(more)
        await rig.until(lambda: rig.runtime.journal.calls)
        await trio.sleep(0.05)
        await response.close()
        await rig.until(lambda: rig.runtime.journal.calls[0].closed_at, SOON_S)
        await rig.until(rig.idle)
        assert len(rig.runtime.journal.calls) == 1


async def test_case_01_a_hundred_aborts_leak_nothing() -> None:
    async with open_rig(knobs={"slots": 2}) as rig:
        for index in range(100):
            response = await rig.send(chat(f"x {index}", stream=bool(index % 2), ignore_eos=True, max_tokens=500))
            await trio.sleep(0.002 * (index % 7))
            await leave(response, LEAVES[index % 3 == 0])
        await rig.until(rig.idle)
        await rig.until(lambda: rig.runtime.engine.cells == 0 or not rig.runtime.journal.open_now)
        assert rig.runtime.deferred_max == 0
        open_now = rig.engine.metrics.open_connections
        await rig.until(lambda: open_now._value.get() == 0)
        response = await rig.post(chat("still there"))
        assert data_of(await response.read_all())[-1] == "[DONE]"
        await response.close()
