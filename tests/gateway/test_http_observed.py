"""What an operator sees: log lines, /status, /metrics, /ready, models; and what must never be seen there."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import trio

from kvstream.gateway.logs import JsonFormatter, TextFormatter
from tests.fakes import Script
from tests.gateway.conftest import CHAT, SOON_S, chat, data_of, error_of, metric, open_lane, open_rig

SECRET = "sk-very-secret-0123456789"
CANARY = "canary-in-the-prompt"


async def test_secrets_are_never_shown(autojump_clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="kvstream")
    backend = {"api_key": "sk-backend-9876543210"}
    async with open_lane(backend=backend) as lane:
        for headers in ([("Authorization", f"Bearer {SECRET}")], [("X-Api-Key", SECRET)]):
            lane.runtime.script(Script(first_byte_after=1))
            call = lane.start(chat(CANARY), headers=headers)
            await trio.sleep(0.5)
            shown = (await lane.get("/status")).body + (await lane.get("/metrics")).body
            await call.ended.wait()
            lane.runtime.script(Script(status=401, script=[(0, f'{{"error":"bad key {SECRET}"}}'.encode())]))
            shown += (await lane.post(chat(CANARY, stream=False), headers=headers)).body
            shown += (await lane.post(b"{" + CANARY.encode(), headers=headers)).body
            shown += (await lane.get("/status")).body + (await lane.get("/metrics")).body
            shown += "\n".join(JsonFormatter().format(r) + TextFormatter().format(r) for r in caplog.records).encode()
            for word in (SECRET, CANARY, "sk-backend", "Bearer"):
                assert word.encode() not in shown
        # the backend got its own key, and nothing of the client's
        assert {e.request.headers.get("authorization") for e in lane.runtime.journal.calls} == {
            "Bearer sk-backend-9876543210"}
        assert all("x-api-key" not in e.request.headers for e in lane.runtime.journal.entries)


async def test_one_log_line_per_request(autojump_clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with open_lane(knobs={"slots": 1}, scheduler={"max_wait_s": 5.0}) as lane:
        await lane.post(chat())
        lane.runtime.script(Script(first_byte_after=20))
        busy = lane.start(chat())
        await trio.sleep(0.1)
        await lane.post(chat("late", stream=False))
        await lane.post(b"{")
        busy.leave()
        await busy.ended.wait()
        await trio.sleep(0.1)
        records = [r for r in caplog.records if r.name == "kvstream.request"]
        lines = [json.loads(JsonFormatter().format(r)) for r in records]
        assert [line["outcome"] for line in lines] == ["served", "refused", "client_error", "cancelled"]
        assert [line["error"] for line in lines] == [None, "queue_timeout", "invalid_request", None]
        for line in lines:
            assert metric(lane.metrics, "kvstream_requests_total", route=CHAT, outcome=line["outcome"]) == 1
        assert metric(lane.metrics, "kvstream_refused_total", reason="queue_timeout") == 1
        assert len({line["id"] for line in lines}) == 4
        assert {line["route"] for line in lines} == {CHAT}
        assert lines[0]["answer_tokens"] == 16 and lines[0]["finish"] == "stop" and lines[0]["ttft_ms"] > 0
        assert lines[1]["queue_ms"] == pytest.approx(5000, abs=100)
        for record in records:
            assert "\n" not in TextFormatter().format(record)


async def test_a_clients_request_id_cannot_forge_a_line(autojump_clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with open_lane() as lane:
        call = await lane.post(chat(model="x\ny\x1b[31m"), headers=[("X-Request-Id", "mine")])
        assert call.headers["x-request-id"].startswith("kvs-")
        for record in caplog.records:
            assert "\x1b" not in TextFormatter().format(record) and "\n" not in TextFormatter().format(record)


async def test_metric_labels_do_not_grow(autojump_clock: Any) -> None:
    async with open_lane(knobs={"slots": 8}) as lane:
        for index in range(8):
            await lane.post(chat(model=f"m{index}", stream=bool(index % 2)))

        async def series() -> set[str]:
            lines = (await lane.get("/metrics")).body.decode().splitlines()
            return {line.rpartition(" ")[0] for line in lines if line[0] != "#"}

        before = await series()
        for index in range(200):
            headers = [("Authorization", f"Bearer k{index}"), ("User-Agent", f"agent {index}")]
            body = chat(f"prompt {index}", model=f"model-{index}", max_tokens=1, stream=False)
            await lane.post(body, headers=headers)
            if index % 20 == 0:
                await lane.get(f"/nowhere/{index}")
        assert await series() == before
        assert metric(lane.metrics, "kvstream_requests_total", route=CHAT, outcome="served") == 208


async def test_status_shows_queue_positions_and_ages(autojump_clock: Any) -> None:
    async with open_lane(knobs={"slots": 1}) as lane:
        lane.runtime.script(Script(first_byte_after=20))
        lane.start(chat("busy"))
        await trio.sleep(1)
        lane.start(chat("one"))
        await trio.sleep(2)
        lane.start(chat("two"), headers=[("X-KVStream-Priority", "high")])
        await trio.sleep(1)
        status = await lane.status()
        queue = status["queue"]
        assert queue["length"] == 2 and queue["bytes"] > 0
        assert [r["position"] for r in queue["requests"]] == [1, 2]
        assert [r["priority"] for r in queue["requests"]] == ["high", "normal"]
        assert [r["age_s"] for r in queue["requests"]] == pytest.approx([1, 3], abs=0.1)
        running = status["running"]
        assert len(running) == 1 and running[0]["phase"] == "prefill"
        assert running[0]["age_s"] == pytest.approx(4, abs=0.1)
        assert status["seats"] == {"total": 1, "used": 1, "draining": 0}
        assert status["backend"]["state"] == "up" and status["capacity"]["source"]
        json.dumps(status)


async def test_health_never_depends_on_the_backend(autojump_clock: Any) -> None:
    async with open_lane(wait=False) as lane:
        lane.runtime.config.health_hang = True
        began = trio.current_time()
        call = await lane.get("/health")
        assert call.status == 200 and trio.current_time() - began < 0.1
        assert (await lane.get("/ready")).status == 503
        assert (await lane.get("/metrics")).status == 200 and (await lane.get("/status")).status == 200
        assert trio.current_time() - began < 0.1


async def test_models_from_the_cache_when_the_backend_is_down() -> None:
    async with open_rig(upstream={"keepalive_expiry_s": 0.01}) as rig:
        status, body, _ = await rig.get("/v1/models")
        assert status == 200 and json.loads(body)["data"][0]["id"] == "fake-model"
        await rig.fake.pause()
        await trio.sleep(0.05)
        began = trio.current_time()
        again = await rig.get("/v1/models")
        assert (again[0], json.loads(again[1])) == (200, json.loads(body))
        assert (await rig.get("/v1/models/fake-model"))[0] == 200
        status, body, _ = await rig.get("/v1/models/none")
        assert status == 404 and error_of(body)["code"] == "model_not_found"
        assert trio.current_time() - began < SOON_S


async def test_models_without_a_cache_say_why() -> None:
    async with open_rig(upstream={"keepalive_expiry_s": 0.01}) as rig:
        await rig.fake.pause()
        await trio.sleep(0.05)
        rig.gateway.router.lanes[0].listed.known = None  # as if it had never been up
        status, body, headers = await rig.get("/v1/models")
        assert status == 503 and error_of(body)["code"] == "backend_unavailable" and int(headers["retry-after"]) >= 1


# --- slow readers -----------------------------------------------------------------------------------------------------


async def test_a_reader_that_stalls_loses_its_lease_while_its_socket_is_stuck(autojump_clock: Any) -> None:
    knobs = {"slots": 1, "decode_rate": 10_000.0, "answer_tokens": None, "n_ctx": 1_000_000}
    async with open_lane(knobs=knobs, server={"stall_s": 5.0, "stream_buffer_bytes": 4096}) as lane:
        call = lane.start(chat(), stuck=True)
        began = trio.current_time()
        await lane.runtime.journal.until(lambda j: j.calls and j.calls[0].closed_at)
        assert trio.current_time() - began == pytest.approx(5, abs=0.5)
        await trio.sleep(1)
        assert lane.idle() and not call.ended.is_set()  # the lease is back, the socket is not
        second = await lane.post(chat(max_tokens=3))
        assert data_of(second.body)[-1] == "[DONE]"
        assert metric(lane.metrics, "kvstream_requests_total", route=CHAT, outcome="stalled") == 1
        call.leave()


async def test_a_stuck_connection_is_closed() -> None:
    knobs = {"slots": 1, "decode_rate": 50_000.0, "answer_tokens": None, "n_ctx": 4_000_000}
    async with open_rig(knobs=knobs, server={"stall_s": 0.5, "stream_buffer_bytes": 65536}) as rig:
        stuck = await rig.send(chat(), receive_buffer=2048)
        await rig.until(lambda: rig.runtime.journal.calls and rig.runtime.journal.calls[0].closed_at)
        await rig.until(rig.idle)
        await rig.until(lambda: rig.engine.metrics.open_connections._value.get() == 0)
        await stuck.close()


async def test_a_request_turned_away_at_the_door_is_logged_and_counted(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_lane() as lane:
        lane.runtime.config.refuse = True
        await trio.sleep(30)  # the watcher finds it gone
        call = await lane.post(chat())
        assert call.status == 503
        [record] = [r for r in caplog.records if r.name == "kvstream.request"]
        line = json.loads(JsonFormatter().format(record))
        assert (line["outcome"], line["error"], line["status"]) == ("refused", "backend_unavailable", 503)
        assert line["id"] == call.headers["x-request-id"]
        assert metric(lane.metrics, "kvstream_requests_total", route=CHAT, outcome="refused") == 1
        assert metric(lane.metrics, "kvstream_refused_total", reason="backend_unavailable") == 1
