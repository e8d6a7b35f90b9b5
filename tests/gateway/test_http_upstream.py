"""Connections to the runtime: what is retried, what never is, and how each limit in time is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from kvstream.adapters.base import HttpCall
from kvstream.errors import BackendUnavailableError, StreamTruncatedError
from kvstream.gateway.upstream import HttpUpstream
from tests.fakes import Script, open_runtime
from tests.fakes.server import open_server
from tests.gateway.conftest import CHAT, chat, data_of, error_of, metric, open_lane, open_rig
from tests.gateway.test_case_streams import DONE, STOP, chunk

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Scripted:
    """A raw server: for each request of each connection, what is written; then whether it closes. Journals requests."""

    def __init__(self, *connections: list[tuple[bytes, bool]]) -> None:
        self.plan = list(connections)
        self.requests: list[tuple[int, bytes]] = []
        self.opened = 0

    async def serve(self, *, task_status: trio.TaskStatus[int]) -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        task_status.started(listeners[0].socket.getsockname()[1])
        await trio.serve_listeners(self.connection, listeners)

    async def connection(self, stream: trio.SocketStream) -> None:
        number, self.opened = self.opened, self.opened + 1
        for answer, stays in self.plan[number]:
            data = b""
            while b"\r\n\r\n" not in data or (b"POST" in data and not data.endswith(b"}")):
                more = await stream.receive_some(65536)
                if not more:
                    return
                data += more
            self.requests.append((number, data))
            if answer:
                await stream.send_all(answer)
            if not stays:
                await stream.aclose()
                return
        await trio.sleep_forever()


CALL = HttpCall("POST", CHAT, (), b"{}")


async def run_plan(*connections: list[tuple[bytes, bool]], calls: int = 1) -> tuple[Scripted, list[Any]]:
    server = Scripted(*connections)
    results: list[Any] = []
    async with trio.open_nursery() as nursery:
        port = await nursery.start(server.serve)
        async with HttpUpstream(f"http://127.0.0.1:{port}") as upstream:
            for _ in range(calls):
                try:
                    async with upstream.open(CALL) as response:
                        body = b""
                        while part := await response.receive():
                            body += part
                    results.append((response.status, body))
                except (BackendUnavailableError, StreamTruncatedError) as error:
                    results.append(type(error))
        nursery.cancel_scope.cancel()
    return server, results


async def test_a_stale_kept_connection_is_retried_once_on_a_fresh_one() -> None:
    server, results = await run_plan([(OK, True), (b"", False)], [(OK, True)], calls=2)
    assert results == [(200, b"ok")] * 2
    assert [number for number, _ in server.requests] == [0, 0, 1]


async def test_a_stale_connection_is_retried_only_once() -> None:
    server, results = await run_plan([(OK, True), (b"", False)], [(b"", False)], [(OK, True)], calls=2)
    assert results == [(200, b"ok"), BackendUnavailableError]
    assert [number for number, _ in server.requests] == [0, 0, 1]


async def test_a_post_never_runs_twice_on_a_fresh_connection() -> None:
    server, results = await run_plan([(b"", False)], [(OK, True)])
    assert results == [BackendUnavailableError] and len(server.requests) == 1


@pytest.mark.parametrize("first", [
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok",
    b"HTTP/1.1 200 OK\r\nContent-Le",
])
async def test_nothing_is_repeated_after_the_first_byte(first: bytes) -> None:
    server, results = await run_plan([(OK, True), (first, False)], [(OK, True)], calls=2)
    assert results[0] == (200, b"ok") and results[1] in (StreamTruncatedError, BackendUnavailableError)
    assert [number for number, _ in server.requests] == [0, 0]


async def test_many_stale_connections_need_only_one_retry() -> None:
    """A runtime that closes each connection after its stream without saying so: all pooled ones are stale at once."""
    async with open_runtime() as runtime, open_server(runtime) as fake:
        async with HttpUpstream(fake.base_url) as upstream:
            for _ in range(5):
                async with trio.open_nursery() as nursery:
                    for _ in range(4):
                        nursery.start_soon(_read, upstream)
            assert len(runtime.journal.calls) == 20


async def _read(upstream: HttpUpstream) -> None:
    body = json.dumps(chat()).encode()
    async with upstream.open(HttpCall("POST", CHAT, (), body)) as response:
        while await response.receive():
            pass


async def test_localhost_tries_every_address() -> None:
    async with open_runtime() as runtime, open_server(runtime) as fake:
        async with HttpUpstream(f"http://localhost:{fake.port}") as upstream:
            reply = await upstream.request(HttpCall("GET", "/health"), timeout_s=3)
            assert reply.status == 200


async def test_pooled_connections_expire() -> None:
    async with open_rig(upstream={"keepalive_expiry_s": 0.1, "health_interval_s": 30.0},
                        knobs={"close_after_stream": False}) as rig:
        used = []
        for _ in range(2):
            response = await rig.post(chat())
            await response.read_all()
            used.append(rig.runtime.journal.calls[-1].connection)
            await response.close()
            await trio.sleep(0.3)
        assert used[0] != used[1]


# --- limits in time ---------------------------------------------------------------------------------------------------

TIMES: dict[str, tuple[dict[str, Any], dict[str, Any], float, str, bool]] = {
    "first event, no headers": (
        {"first_event_s": 5.0}, {"headers_after": 60}, 5, "upstream.first_event_s = 5 s", False),
    "first event, headers": (
        {"first_event_s": 5.0}, {"first_byte_after": 60}, 5, "upstream.first_event_s = 5 s", False),
    "stall": ({"stall_s": 4.0}, {"hang_at_token": 3, "itl": 0.1}, 4.2, "upstream.stall_s = 4 s", True),
    "total": ({"total_s": 6.0}, {"itl": 1.0}, 6, "upstream.total_s = 6 s", True),
    "total before the first token": ({"total_s": 6.0}, {"first_byte_after": 60}, 6, "upstream.total_s = 6 s", False),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", TIMES)
async def test_each_limit_in_time_says_which_it_was(autojump_clock: Any, name: str, stream: bool) -> None:
    settings, script, after, text, begun = TIMES[name]
    async with open_lane(upstream=settings, server={"keepalive_s": 0.0}) as lane:
        lane.runtime.script(Script(**script))
        began = trio.current_time()
        call = await lane.post(chat(stream=stream))
        assert trio.current_time() - began == pytest.approx(after, abs=0.3)
        if begun and stream:
            assert call.status == 200 and b"[DONE]" not in call.body
            error = data_of(call.body)[-1]["error"]
        else:
            assert call.status == 504
            error = error_of(call.body)
        assert error["code"] == "backend_timeout" and text in error["message"]
        assert metric(lane.metrics, "kvstream_backend_errors_total", kind="backend_timeout") == 1
        await trio.sleep(3)  # without headers its slot must look idle twice, 1.25 s apart
        assert lane.idle() and not lane.runtime.journal.open_now


@pytest.mark.parametrize("end", [STOP + DONE, STOP])
async def test_a_runtime_that_keeps_the_body_open_after_done_holds_nobody(autojump_clock: Any, end: bytes) -> None:
    """After [DONE] the answer is over. Without it, only the gap tells; what came is kept."""
    async with open_lane(upstream={"stall_s": 5.0}) as lane:
        lane.runtime.script(Script(script=[(0, chunk("a") + end)], end="keep_open_after_done"))
        began = trio.current_time()
        call = await lane.post(chat())
        assert call.body.startswith(chunk("a") + STOP)
        if end.endswith(DONE):
            assert trio.current_time() - began < 0.5 and call.body.endswith(DONE)
        else:
            assert trio.current_time() - began < 5.5
        await trio.sleep(1)
        assert lane.idle()


# --- the first event decides the status -------------------------------------------------------------------------------

FIRST: dict[str, tuple[bytes, int, str]] = {
    "context": (b'{"error":{"message":"the request exceeds the available context size","code":400}}', 400,
                "context_length_exceeded"),
    "LM Studio": (b'{"error":{"message":"Trying to keep the first 9 tokens when n_keep >= n_ctx"}}', 400,
                  "context_length_exceeded"),
    "no model": (b'{"error":{"message":"model \\"x\\" not found, try pulling it first"}}', 404, "model_not_found"),
    "busy": (b'{"error":{"message":"server busy","code":503}}', 503, "overloaded"),
    "auth": (b'{"error":{"message":"Invalid API Key sk-secret","code":401}}', 502, "backend_auth"),
    "image": (b'{"error":{"message":"image input is not supported","code":500}}', 400, "upstream_rejected"),
    "bad field": (b'{"error":{"message":"bad temperature","type":"invalid_request_error","code":400}}', 400,
                  "upstream_rejected"),
    "other": (b'{"error":{"message":"boom","code":500}}', 502, "upstream_error"),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["frame", "event", "status"])
@pytest.mark.parametrize("name", FIRST)
async def test_an_error_as_first_event_is_a_status(autojump_clock: Any, name: str, how: str, stream: bool) -> None:
    payload, status, code = FIRST[name]
    async with open_lane(upstream={"busy_retry_s_max": 0.0}) as lane:
        if how == "status":
            there = json.loads(payload)["error"].get("code", 404 if name == "no model" else 400)
            lane.runtime.script(Script(status=there, script=[(0, payload)]))
        else:
            frame = (b"event: error\n" if how == "event" else b"") + b"data: " + payload + b"\n\n"
            lane.runtime.script(Script(script=[(0, b": hello\n\n"), (0.1, frame)]))
        call = await lane.post(chat(stream=stream))
        assert call.status in {status, 500 if name == "other" else status}
        assert call.headers["content-type"] == "application/json"
        error = error_of(call.body)
        assert error["code"] == code and "sk-secret" not in error["message"]
        assert ("retry-after" in call.headers) is (call.status in (429, 503))
        assert lane.runtime.journal.calls[0].request.path == CHAT and len(lane.runtime.journal.calls) == 1
        await trio.sleep(1)
        assert lane.idle()
