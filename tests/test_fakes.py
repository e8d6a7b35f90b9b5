"""The fakes keep their promises: what they script really happens, and what they imitate looks like the real thing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import trio

from kvstream.adapters.base import HttpCall
from kvstream.errors import BackendTimeoutError, BackendUnavailableError, StreamTruncatedError
from tests.fakes import FakeUpstream, Script, at, bytewise, open_runtime
from tests.fakes.client import fetch, open_request, send_raw, send_request
from tests.fakes.real import AVAILABLE, RealLlama, real_llama, start_real
from tests.fakes.server import open_server

CHAT = "/v1/chat/completions"


def body(text: str, *, stream: bool = True, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "stream": stream, **more}


def chat(text: str, **more: Any) -> HttpCall:
    return HttpCall("POST", CHAT, (), json.dumps(body(text, **more)).encode())


async def read(upstream: FakeUpstream, call: HttpCall) -> tuple[int, bytes]:
    async with upstream.open(call) as response:
        out = b""
        while part := await response.receive():
            out += part
        return response.status, out


def frames(data: bytes) -> list[Any]:
    """The JSON values of an SSE body; the end marker stays a string."""
    lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]
    return [line.decode() if line == b"[DONE]" else json.loads(line) for line in lines]


def text_of(data: bytes) -> str:
    chunks = [f for f in frames(data) if isinstance(f, dict) and f.get("choices")]
    return "".join(f["choices"][0]["delta"].get("content") or "" for f in chunks)


# --- the engine, in memory, on the virtual clock ---


async def test_rates_decide_the_time_of_an_answer(autojump_clock: Any) -> None:
    async with open_runtime(prefill_rate=100, decode_rate=10, answer_tokens=5) as runtime:
        prompt = runtime.count("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
        await read(FakeUpstream(runtime), chat("hello"))
        entry = runtime.journal.calls[0]
    assert entry.first_byte_at == pytest.approx(prompt / 100)
    assert entry.ended_at == pytest.approx(prompt / 100 + 4 / 10)
    assert entry.tokens_out == 5


async def test_requests_beyond_the_slots_wait_in_the_hidden_queue(autojump_clock: Any) -> None:
    async with open_runtime(slots=2) as runtime:
        upstream = FakeUpstream(runtime)
        async with trio.open_nursery() as nursery:
            for i in range(7):
                nursery.start_soon(read, upstream, chat(f"request {i}"))
        assert runtime.deferred_max == 5
        assert runtime.in_flight_max == 7
        assert not runtime.journal.open_now
        late = max(runtime.journal.calls, key=lambda entry: entry.headers_at or 0)
        assert (late.headers_at or 0) > 0.4  # headers wait for a slot


async def test_cache_is_reported_truthfully_over_turns(autojump_clock: Any) -> None:
    async with open_runtime(slots=2) as runtime:
        upstream = FakeUpstream(runtime)
        first = frames((await read(upstream, chat("one two three", stream_options={"include_usage": True})))[1])
        answer = "".join(f["choices"][0]["delta"].get("content") or "" for f in first[:-2])
        turns = [
            {"role": "user", "content": "one two three"},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "and four"},
        ]
        call = HttpCall("POST", CHAT, (), json.dumps({"messages": turns, "stream": False}).encode())
        second = (await upstream.request(call, timeout_s=9)).json()
    usage, timings = second["usage"], second["timings"]
    held = first[-2]["usage"]["prompt_tokens"] + first[-2]["usage"]["completion_tokens"] - 1
    assert first[-2]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert usage["prompt_tokens_details"]["cached_tokens"] == timings["cache_n"] == held
    assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]


async def test_long_prefill_delays_everyone_only_with_a_shared_step(autojump_clock: Any) -> None:
    gaps = {}
    for shared in (True, False):
        async with open_runtime(shared_step=shared, prefill_rate=1000, n_ctx=1 << 20, n_batch=2048) as runtime:
            upstream = FakeUpstream(runtime)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read, upstream, chat("short", max_tokens=300, ignore_eos=True))
                await trio.sleep(0.5)
                nursery.start_soon(read, upstream, chat("long " * 3000))
            times = [when for when, _ in runtime.journal.calls[0].writes]
            gaps[shared] = max(b - a for a, b in pairwise(times))
    assert gaps[True] > 2.0
    assert gaps[False] == pytest.approx(0.01)


async def test_unified_overflow_kills_all_and_clears(autojump_clock: Any) -> None:
    async with open_runtime(unified=True, n_ctx=600) as runtime:
        upstream = FakeUpstream(runtime)
        out: list[bytes] = []

        async def go(i: int) -> None:
            out.append((await read(upstream, chat(f"{i} " * 50, max_tokens=500, ignore_eos=True)))[1])

        async with trio.open_nursery() as nursery:
            for i in range(4):
                nursery.start_soon(go, i)
        assert runtime.kills == 1
        assert [frames(data)[-1]["error"]["message"] for data in out] == ["Context size has been exceeded."] * 4
        assert runtime.engine.cells == 0
        assert (await read(upstream, chat("again")))[0] == 200


async def test_split_context_ends_with_length_and_too_long_is_400(autojump_clock: Any) -> None:
    async with open_runtime(slots=2, n_ctx=100) as runtime:
        upstream = FakeUpstream(runtime)
        data = (await read(upstream, chat("hi", ignore_eos=True)))[1]
        assert frames(data)[-2]["choices"][0]["finish_reason"] == "length"
        status, data = await read(upstream, chat("word " * 60))
        error = json.loads(data)["error"]
        assert (status, error["type"], error["n_ctx"]) == (400, "exceed_context_size_error", 50)


async def test_client_leaves_before_the_headers(autojump_clock: Any) -> None:
    async with open_runtime(slots=1) as runtime:
        upstream = FakeUpstream(runtime)
        runtime.script(Script(headers_after=20))
        with trio.move_on_after(1):
            await read(upstream, chat("x"))
        assert runtime.journal.closed_at(0) == trio.current_time() == 1
        assert not runtime.journal.open_now
        await read(upstream, chat("y"))
        assert runtime.journal.calls[0].released_at == 1
        assert trio.current_time() < 2


async def test_nonstream_clients_leave_unnoticed(autojump_clock: Any) -> None:
    async with open_runtime(slots=1) as runtime:
        with trio.move_on_after(0.05):
            await read(FakeUpstream(runtime), chat("x", stream=False, max_tokens=100, ignore_eos=True))
        await runtime.journal.until(lambda j: j.calls[0].released_at)
        assert runtime.journal.closed_at(0) == 0.05
        assert runtime.journal.calls[0].tokens_out == 100


async def test_cancel_takes_effect_after_the_prefill_batch(autojump_clock: Any) -> None:
    async with open_runtime(slots=1, prefill_rate=1000, n_ctx=1 << 20) as runtime:
        with trio.move_on_after(0.1):
            await read(FakeUpstream(runtime), chat("word " * 5000))
        await runtime.journal.until(lambda j: j.calls[0].released_at)
        assert trio.current_time() == pytest.approx(2.048)


async def test_slot_stays_busy_after_close(autojump_clock: Any) -> None:
    async with open_runtime(slots=1, busy_after_close=5) as runtime:
        upstream = FakeUpstream(runtime)
        async with upstream.open(chat("x", ignore_eos=True)) as response:
            await response.receive()
        left = trio.current_time()

        async def busy() -> bool:
            slots = (await upstream.request(HttpCall("GET", "/slots"), timeout_s=1)).json()
            return bool(slots[0]["is_processing"])

        await trio.sleep(4.9)
        assert await busy()
        await trio.sleep(0.2)
        assert not await busy()
        released = runtime.journal.calls[0].released_at or 0
        assert 5 <= released - left <= 5.02


@pytest.mark.parametrize(
    ("end", "reasons", "done", "broken"),
    [
        ("done", 1, True, False), ("eof_no_done", 1, False, False), ("eof_no_finish", 0, False, False),
        ("done_no_finish", 0, True, False), ("cut", 0, False, True), ("rst", 0, False, True),
    ],
)  # fmt: skip
async def test_ends(autojump_clock: Any, end: Any, reasons: int, done: bool, broken: bool) -> None:
    async with open_runtime() as runtime:
        runtime.script(Script(end=end, tokens=3))
        data, failed = b"", False
        async with FakeUpstream(runtime).open(chat("x")) as response:
            try:
                while part := await response.receive():
                    data += part
            except StreamTruncatedError:
                failed = True
        assert failed is broken
        assert data.endswith(b"data: [DONE]\n\n") is done
        chunks = [f for f in frames(data) if isinstance(f, dict)]
        assert sum(f["choices"][0]["finish_reason"] is not None for f in chunks) == reasons
        assert len(text_of(data).split()) == 3
        assert runtime.journal.calls[0].outcome == end


async def test_raw_script_hang_and_keep_open(autojump_clock: Any) -> None:
    async with open_runtime(slots=1) as runtime:
        upstream = FakeUpstream(runtime, split=bytewise)
        runtime.script(Script(script=[(1, b"data: a\n\n"), (2, b"data: b\n\n")]))
        assert await read(upstream, chat("x")) == (200, b"data: a\n\ndata: b\n\n")
        assert trio.current_time() == pytest.approx(3)
        upstream.split = at(1, 5)
        runtime.script(Script(hang_at_token=2))
        with trio.move_on_after(100) as scope:
            await read(upstream, chat("x"))
        assert scope.cancelled_caught
        assert runtime.journal.calls[1].bytes_out > 0
        runtime.script(Script(end="keep_open_after_done"))
        async with upstream.open(chat("x")) as response:
            data = b""
            while not data.endswith(b"[DONE]\n\n"):
                data += await response.receive()
            with trio.move_on_after(100) as scope:
                await response.receive()
            assert scope.cancelled_caught


async def test_wedged_but_healthy(autojump_clock: Any) -> None:
    async with open_runtime() as runtime:
        upstream = FakeUpstream(runtime)
        runtime.wedge()
        runtime.config.slots_hang = True
        with trio.move_on_after(50) as scope:
            await read(upstream, chat("x"))
        assert scope.cancelled_caught
        assert (await upstream.request(HttpCall("GET", "/health"), timeout_s=1)).status == 200
        with pytest.raises(BackendTimeoutError):
            await upstream.request(HttpCall("GET", "/slots"), timeout_s=1)


async def test_loading_refusing_and_cold_start(autojump_clock: Any) -> None:
    async with open_runtime(load_s=3, cold_load_s=2) as runtime:
        upstream = FakeUpstream(runtime)
        assert (await upstream.request(HttpCall("GET", "/health"), timeout_s=1)).status == 503
        assert (await read(upstream, chat("x")))[0] == 503
        await trio.sleep(3)
        async with trio.open_nursery() as nursery:
            for i in range(3):
                nursery.start_soon(read, upstream, chat(f"{i}"))
        assert runtime.loads == 3
        runtime.config.refuse = True
        with pytest.raises(BackendUnavailableError):
            await read(upstream, chat("x"))
        runtime.config.refuse = False
        runtime.script(Script(refuse=True))
        with pytest.raises(BackendUnavailableError):
            await read(upstream, chat("x"))
        runtime.script(Script(status=503, script=[(0, b'{"error":"busy"}')]), times=2)
        assert [(await read(upstream, chat("x")))[0] for _ in range(3)] == [503, 503, 200]


async def test_openai_dialect(autojump_clock: Any) -> None:
    async with open_runtime(dialect="openai", refuse_stream_options=True, gpu_blocks=100) as runtime:
        upstream = FakeUpstream(runtime)
        for path in ("/props", "/slots"):
            assert (await upstream.request(HttpCall("GET", path), timeout_s=1)).status == 404
        assert (await read(upstream, chat("x", stream_options={"include_usage": True})))[0] == 400
        assert frames((await read(upstream, chat("x")))[1])[-1] == "[DONE]"
        metrics = (await upstream.request(HttpCall("GET", "/metrics"), timeout_s=1)).body
        assert b'num_gpu_blocks="100"' in metrics
        card = (await upstream.request(HttpCall("GET", "/v1/models"), timeout_s=1)).json()["data"][0]
        assert card["max_model_len"] == runtime.config.n_ctx


async def test_slot_files(autojump_clock: Any) -> None:
    async with open_runtime(slots=2) as runtime:
        upstream = FakeUpstream(runtime)

        async def act(slot: int, action: str, name: str = "a.bin") -> Any:
            call = HttpCall("POST", f"/slots/{slot}?action={action}", (), json.dumps({"filename": name}).encode())
            return (await upstream.request(call, timeout_s=9)).json()

        assert (await act(0, "save"))["n_written"] == 32 + 4 * 2
        await read(upstream, chat("one two three four", id_slot=0))
        saved = await act(0, "save")
        assert (await act(0, "erase"))["n_erased"] == saved["n_saved"]
        assert (await act(1, "restore"))["n_restored"] == saved["n_saved"]
        reply = await upstream.request(chat("one two three four", stream=False, id_slot=1), timeout_s=9)
        assert reply.json()["timings"]["prompt_n"] == 1
        assert (await act(1, "restore", "none"))["error"]["code"] == 400


# --- over TCP ---


async def test_tcp_stream_and_keep_alive() -> None:
    async with open_runtime(decode_rate=1000, keepalive_close_s=0.2) as runtime, open_server(runtime) as server:
        response = await open_request(server.port, "GET", "/health")
        assert await response.read_json() == {"status": "ok"}
        response = await response.again("POST", CHAT, body("hello", stream=False))
        assert (await response.read_json())["choices"][0]["finish_reason"] == "stop"
        response = await response.again("POST", CHAT, body("hello"))
        assert response.headers["transfer-encoding"] == "chunked"
        events = await response.read_events()
        assert events[-1] == b"data: [DONE]"
        assert not response.truncated
        assert len(runtime.journal.connects) == 1
        idle = await open_request(server.port, "GET", "/health")
        await idle.read_all()
        with trio.fail_after(30):
            assert await idle.stream.receive_some() == b""
        assert runtime.journal.disconnects[-1][2] == "idle"


@pytest.mark.parametrize("how", ["close", "reset", "half_close"])
async def test_tcp_client_leaves(how: str) -> None:
    async with open_runtime(slots=1) as runtime, open_server(runtime) as server:
        response = await open_request(server.port, "POST", CHAT, body("hello", ignore_eos=True))
        for _ in range(3):
            await response.read_event()
        with trio.fail_after(30):
            if how == "reset":
                response.reset()
            else:
                await getattr(response, how)()
            await runtime.journal.until(lambda j: j.calls[0].released_at)
        assert runtime.journal.calls[0].closed_by_reset is (how == "reset")


async def test_tcp_faults() -> None:
    async with open_runtime(decode_rate=1000) as runtime, open_server(runtime) as server:
        runtime.script(Script(end="rst", tokens=2))
        response = await open_request(server.port, "POST", CHAT, body("x"))
        data = await response.read_all()
        assert response.truncated
        assert b"[DONE]" not in data
        runtime.script(Script(end="cut", tokens=2))
        response = await open_request(server.port, "POST", CHAT, body("x"))
        await response.read_all()
        assert response.truncated
        assert not response.reset_by_peer
        runtime.script(Script(end="truncated_length"))
        response = await open_request(server.port, "POST", CHAT, body("x", stream=False))
        await response.read_all()
        assert response.truncated
        runtime.script(Script(refuse=True))
        with pytest.raises(EOFError):
            await open_request(server.port, "POST", CHAT, body("x"))
        await server.pause()
        with pytest.raises(OSError, match="refused"):
            await open_request(server.port, "GET", "/health")
        await server.resume()
        assert (await fetch(server.port, "GET", "/health"))[0] == 200


async def test_tcp_slow_reader_is_felt_by_the_server_not_by_the_slot() -> None:
    big = b"x" * 1024
    async with open_runtime() as runtime, open_server(runtime) as server:
        runtime.script(Script(script=[(0, big)] * 8000))
        response = await send_request(server.port, "POST", CHAT, body("x"), receive_buffer=4096)
        await runtime.journal.until(lambda j: j.calls and j.calls[0].bytes_out > 0)
        await trio.sleep(0.1)
        assert runtime.journal.calls[0].bytes_out < 8000 * len(big)
        await response.close()
        with trio.fail_after(30):
            await runtime.journal.until(lambda j: j.calls[0].closed_at)


async def test_tcp_raw_requests() -> None:
    async with open_runtime() as runtime, open_server(runtime) as server:
        raw = b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"
        assert (await send_raw(server.port, raw)).status == 200
        assert [v for n, v in runtime.journal.entries[0].request.header_list if n == "Host"] == ["a", "b"]
        head = b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunks = head + b'7\r\n{"conte\r\n9\r\nnt":"hi"}\r\n0\r\n\r\n'
        assert len((await (await send_raw(server.port, chunks)).read_json())["tokens"]) == 1


# --- beside the real llama.cpp server ---

needs_real = pytest.mark.skipif(not AVAILABLE, reason="the demo extra is not installed")


@pytest.fixture(scope="module")
def real() -> Iterator[RealLlama]:
    with start_real(n_ctx=1024, n_parallel=2) as server:
        yield server


def shape(value: Any) -> Any:
    """Keys and kinds of values, without what differs by model: the insides of params and templates."""
    if isinstance(value, dict):
        loose = ("params", "generation_settings", "chat_template_caps", "ui_settings", "details")
        return {k: "..." if k in loose else shape(v) for k, v in sorted(value.items()) if k not in ("prompt", "models")}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    if isinstance(value, bool) or value is None:
        return type(value).__name__
    return "number" if isinstance(value, int | float) else type(value).__name__


async def observe(port: int) -> dict[str, Any]:
    """The shapes of everything the gateway reads, by name of the call. Greedy: drawn by lot, a first token may be the
    end of the answer."""
    def body(text: str, **more: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}], "stream": True, "temperature": 0, **more}

    usage = {"stream_options": {"include_usage": True}}
    calls: dict[str, tuple[str, str, Any]] = {
        "health": ("GET", "/health", b""),
        "props": ("GET", "/props", b""),
        "slots fresh": ("GET", "/slots", b""),
        "models": ("GET", "/v1/models", b""),
        "tokenize": ("POST", "/tokenize", {"content": "hello there", "with_pieces": True}),
        "template": ("POST", "/apply-template", {"messages": [{"role": "user", "content": "hi"}]}),
        "save empty": ("POST", "/slots/0?action=save", {"filename": "a.bin"}),
        "chat": ("POST", CHAT, body("hi", stream=False, max_tokens=3)),
        "chat n": ("POST", CHAT, body("hi", stream=False, max_tokens=2, n=2)),
        "chat stream": ("POST", CHAT, body("hi", max_tokens=3)),
        "chat usage": ("POST", CHAT, body("hi", max_tokens=3, **usage)),
        "chat progress": ("POST", CHAT, body("hi you", max_tokens=1, return_progress=True)),
        "text": ("POST", "/v1/completions", {"prompt": "Once upon", "max_tokens": 3, "temperature": 0}),
        "text stream": ("POST", "/v1/completions", {"prompt": "Once upon", "max_tokens": 3, "temperature": 0,
                                                    "stream": True}),
        "native": ("POST", "/completion", {"prompt": "Once upon", "n_predict": 3, "temperature": 0}),
        "native stream": ("POST", "/completion", {"prompt": "Once upon", "n_predict": 3, "temperature": 0,
                                                   "stream": True}),
        "slots used": ("GET", "/slots", b""),
        "bad json": ("POST", CHAT, b"{bad"),
        "no messages": ("POST", CHAT, {}),
        "bad n": ("POST", CHAT, body("hi", n=9)),
        "too long": ("POST", CHAT, body("word " * 600)),
        "unknown path": ("GET", "/nope", b""),
        "wrong method": ("GET", CHAT, b""),
    }
    out: dict[str, Any] = {}
    for name, (method, path, value) in calls.items():
        response = await open_request(port, method, path, value)
        data = await response.read_all()
        await response.close()
        kind = response.headers["content-type"].partition(";")[0]
        if kind == "text/event-stream":
            seen: Any = [shape(frame) for frame in frames(data)]
            seen = [frame for i, frame in enumerate(seen) if i == 0 or frame != seen[i - 1]]  # runs of equal frames
        else:
            seen = shape(json.loads(data))
        out[name] = (response.status, kind, response.headers.get("connection"), seen)
    return out


@pytest.mark.real
@needs_real
async def test_fake_has_the_shapes_of_the_real_server(real: RealLlama) -> None:
    async with open_runtime(slots=2, n_ctx=1024, decode_rate=1000) as runtime, open_server(runtime) as server:
        fake_seen = await observe(server.port)
    real_seen = await observe(real.port)
    for name, seen in real_seen.items():
        assert fake_seen[name] == seen, name
    assert await real.busy() == 0
    assert await real.metric("requests_processing") == 0


@pytest.mark.real
@needs_real
async def test_both_close_the_connection_after_a_stream(real: RealLlama) -> None:
    async def closes(port: int) -> bool:
        response = await open_request(port, "POST", CHAT, body("hi", max_tokens=2))
        await response.read_all()
        assert "connection" not in response.headers
        with trio.move_on_after(4):  # one that stays open is closed after 5 s
            return await response.stream.receive_some() == b""
        return False

    async with open_runtime() as runtime, open_server(runtime) as server:
        assert await closes(server.port)
    assert await closes(real.port)


async def overflow(port: int) -> list[Any]:
    """Four requests that together pass a pool of 256 cells, one of them without a stream; how each ended."""
    out: dict[int, Any] = {}

    async def go(i: int) -> None:
        ask = body(f"{i} " * 10, stream=i > 0, max_tokens=250, ignore_eos=True)
        status, data = await fetch(port, "POST", CHAT, ask)
        out[i] = (status, frames(data)[-1] if i else json.loads(data))

    async with trio.open_nursery() as nursery:
        for i in range(4):
            nursery.start_soon(go, i)
    return [out[i] for i in range(4)]


@pytest.mark.real
@needs_real
async def test_unified_overflow_is_that_of_the_real_server() -> None:
    async with open_runtime(unified=True, n_ctx=256, decode_rate=1000) as runtime, open_server(runtime) as server:
        fake_seen = await overflow(server.port)
        assert runtime.kills == 1
    async with real_llama(n_ctx=256, n_parallel=4, kv_unified=True) as server:
        assert await server.kv_streams() == 1
        assert await overflow(server.port) == fake_seen
        assert (await server.get("/health")).status_code == 200


@pytest.mark.real
@needs_real
async def test_split_is_split(real: RealLlama) -> None:
    await real.post("/slots/0?action=erase", {})
    assert await real.kv_streams() == 2
