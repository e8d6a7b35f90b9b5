"""Every key of the configuration has an effect that somebody can see, and one test here that shows it.

A key that is read, checked and then forgotten is worse than none. ``EFFECTS`` is the table; a key without an entry
fails ``test_every_key_has_its_effect_shown``. Almost all run in memory on the virtual clock: the whole gateway from
``open_gateway`` down, its ASGI application called directly, a fake runtime behind it. What is about sockets (addresses,
connections, half-close, pooling) runs over TCP in real time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from kvstream.adapters.base import ProxyRequest
from kvstream.config import KEYS, Config, Loaded
from kvstream.errors import ConfigError, EmbeddedError
from kvstream.gateway.embedded import EmbeddedServer, backoff_s
from kvstream.gateway.embedded_find import find_server, server_flags
from kvstream.gateway.embedded_place import claim_place
from kvstream.gateway.engine import Engine
from kvstream.gateway.logs import set_up_logging
from kvstream.gateway.metrics import Metrics
from kvstream.gateway.serve import Gateway, open_gateway
from kvstream.gateway.settings import embedded_spec, engine_settings, make_adapter
from tests.fakes import FakeRuntime, FakeUpstream, Script, open_runtime
from tests.fakes.client import connect, fetch, open_request, send_request
from tests.fakes.server import open_server
from tests.gateway.conftest import HANG_S
from tests.gateway.effects import EFFECTS, effect
from tests.gateway.effects_inject import *  # noqa: F403
from tests.gateway.effects_preempt import *  # noqa: F403

CHAT = "/v1/chat/completions"


def test_every_key_has_its_effect_shown() -> None:
    assert {key.path for key in KEYS} == set(EFFECTS)
    assert all(callable(globals().get(name)) for name in EFFECTS.values())
    assert len(set(EFFECTS.values())) == len(EFFECTS), "two tests of one name: only one of them runs"


# --- a gateway in memory ----------------------------------------------------------------------------------------------


def configured(keys: Mapping[str, Any]) -> Config:
    config = Config()
    for path, value in ({"server.port": 0} | dict(keys)).items():
        section, _, name = path.partition(".")
        config = attrs.evolve(config, **{section: attrs.evolve(getattr(config, section), **{name: value})})
    return config


@attrs.define
class Answer:
    """What the application sent for one call, and when."""

    status: int = 0
    headers: dict[str, str] = attrs.field(factory=dict)
    writes: list[tuple[float, bytes]] = attrs.field(factory=list)
    began: float = 0.0
    ended: float = 0.0

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.writes)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of the error this is, plain or as the last frame of a stream."""
        found = self.body.removesuffix(b"\n\n").rpartition(b"data: ")[2]
        return str(json.loads(found)["error"]["code"])

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@attrs.define
class Front:
    """A running gateway, its fake runtime, and a client of its ASGI application."""

    gateway: Gateway
    runtime: FakeRuntime
    upstream: FakeUpstream
    nursery: trio.Nursery

    @property
    def engine(self) -> Engine:
        return self.gateway.engine

    async def call(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None, *,
                   reads: bool = True, answer: Answer | None = None) -> Answer:
        """One request to its end. ``reads=False``: the client never takes what is sent to it."""
        answer = answer or Answer()
        answer.began = trio.current_time()
        given = {"host": "localhost", "content-length": str(len(body))} | dict(headers or {})
        scope = {
            "type": "http", "http_version": "1.1", "method": method, "scheme": "http", "path": path,
            "raw_path": path.encode(), "query_string": b"", "root_path": "", "extensions": {},
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
        }
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            await trio.lowlevel.checkpoint()
            if messages:
                return messages.pop()
            await trio.sleep_forever()
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            await (trio.lowlevel.checkpoint() if reads else trio.sleep_forever())
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
            elif message.get("body"):
                answer.writes.append((trio.current_time() - answer.began, message["body"]))

        await self.gateway.app(scope, receive, send)
        answer.ended = trio.current_time()
        return answer

    async def chat(self, text: str = "hello", tokens: int | None = 4, *, stream: bool = True, reads: bool = True,
                   headers: Mapping[str, str] | None = None, answer: Answer | None = None, **more: Any) -> Answer:
        """A chat; with ``answer_tokens=None`` the fake takes a hundredth of a second per token."""
        limit = {} if tokens is None else {"max_tokens": tokens}
        body = {"messages": [{"role": "user", "content": text}], "stream": stream, **limit, **more}
        return await self.call("POST", CHAT, json.dumps(body).encode(), headers, reads=reads, answer=answer)

    def start(self, text: str = "hello", tokens: int | None = 4, **more: Any) -> Answer:
        """The same in the background; the answer fills up as it comes."""
        answer = Answer()

        async def run() -> None:
            await self.chat(text, tokens, answer=answer, **more)

        self.nursery.start_soon(run)
        return answer

    async def status(self) -> Any:
        return (await self.call("GET", "/status")).json

    def sent(self, index: int = -1) -> Any:
        """The body of a model call as the runtime got it."""
        return self.runtime.journal.calls[index].request.json


PLAIN = {"inject.mode": "off"}  # what is about something else is asserted on the calls of a lane without it


@asynccontextmanager
async def front(keys: Mapping[str, Any] | None = None, **knobs: Any) -> AsyncIterator[Front]:
    """A gateway with ``keys`` in front of a fake runtime with ``knobs``; its capacity is known when this returns."""
    config = configured(PLAIN | dict(keys or {}))
    async with open_runtime(dialect=config.backend.type, **knobs) as runtime, trio.open_nursery() as nursery:
        upstream, metrics = FakeUpstream(runtime), Metrics()
        settings = attrs.evolve(engine_settings(config), raise_bugs=True)
        engine = Engine(make_adapter(config, "http://fake"), upstream, settings, metrics)
        metrics.watch(engine)
        await nursery.start(engine.run)
        async with open_gateway(Loaded.of(config), engine=engine, metrics=metrics) as gateway:
            await engine.watcher.wait_known()
            await trio.sleep(0.01)
            yield Front(gateway, runtime, upstream, nursery)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def served(keys: Mapping[str, Any] | None = None, **knobs: Any) -> AsyncIterator[tuple[int, FakeRuntime]]:
    """The same over TCP, in real time: the gateway's port, and the runtime."""
    async with open_runtime(**knobs) as runtime, open_server(runtime) as server:
        config = configured(PLAIN | {"backend.base_url": server.base_url} | dict(keys or {}))
        async with open_gateway(Loaded.of(config)) as gateway:
            await gateway.engine.watcher.wait_known()
            yield gateway.server.ports[0], runtime


def body(text: str = "hello", tokens: int = 4, *, stream: bool = True) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "stream": stream, "max_tokens": tokens}


# --- server -----------------------------------------------------------------------------------------------------------


@effect("server.host")
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere 127.0.0.2 is no loopback address by itself")
async def test_only_the_given_address_is_listened_on() -> None:
    async with served({"server.host": "127.0.0.2"}) as (port, _):
        await (await connect(port, host="127.0.0.2")).aclose()
        with pytest.raises(OSError):
            await connect(port)


@effect("server.port")
async def test_the_given_port_is_taken() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    async with served({"server.port": free}) as (port, _):
        assert port == free
        assert (await fetch(free, "GET", "/health"))[0] == 200


@effect("server.keepalive_s")
@pytest.mark.parametrize(("seconds", "pings"), [(2.0, [2.0, 4.0]), (3.0, [3.0]), (0.0, [])])
async def test_silence_is_broken_by_comments(autojump_clock: Any, seconds: float, pings: list[float]) -> None:
    async with front({"server.keepalive_s": seconds}) as gw:
        gw.runtime.script(Script(first_byte_after=5))
        answer = await gw.chat()
        assert [t for t, data in answer.writes if data.startswith(b":")] == pytest.approx(pings, abs=0.1)
        assert answer.body.endswith(b"data: [DONE]\n\n")


@effect("server.drain_s")
@pytest.mark.parametrize("seconds", [1.0, 4.0])
async def test_a_drain_waits_that_long_for_streams(autojump_clock: Any, seconds: float) -> None:
    async with front({"server.drain_s": seconds}, answer_tokens=None, n_ctx=10**6) as gw:
        answer = gw.start(tokens=100_000)
        await trio.sleep(0.5)
        began = trio.current_time()
        await gw.gateway.drain()
        assert trio.current_time() - began == pytest.approx(seconds, abs=0.2)
        assert answer.code == "shutting_down"


@effect("server.drain_queued")
@pytest.mark.parametrize(("word", "status"), [("refuse", 503), ("finish", 200)])
async def test_a_drain_refuses_or_finishes_who_waits(autojump_clock: Any, word: str, status: int) -> None:
    async with front({"server.drain_queued": word, "scheduler.max_batch_size": 1}, answer_tokens=None) as gw:
        running = gw.start(tokens=200)
        await trio.sleep(0.1)
        waiting = gw.start(tokens=10)
        await trio.sleep(0.1)
        await gw.gateway.drain()
        assert (running.status, waiting.status) == (200, status)
        assert ("retry-after" in waiting.headers) == (status == 503)


@effect("server.body_bytes_max")
async def test_a_larger_body_is_413_with_limit_and_unit(autojump_clock: Any) -> None:
    async with front({"server.body_bytes_max": 2000}) as gw:
        assert (await gw.chat("x" * 1000)).status == 200
        refused = await gw.chat("x" * 2000)
        assert (refused.status, refused.code) == (413, "body_too_large")
        assert "2000 bytes" in refused.json["error"]["message"]


@effect("server.header_bytes_max")
@pytest.mark.parametrize(("limit", "good"), [(1024, False), (65536, True)])
async def test_a_larger_request_head_is_refused(limit: int, good: bool) -> None:
    async with served({"server.header_bytes_max": limit}) as (port, _):
        answer = await open_request(port, "GET", "/health", headers=[("X-Long", "x" * 5000)])
        assert answer.status == (200 if good else 431)
        assert good or "1024 bytes" in (await answer.read_json())["error"]["message"]
        await answer.close()


@effect("server.connections_max")
async def test_one_connection_too_many_is_503() -> None:
    async with served({"server.connections_max": 1}) as (port, _):
        first = await open_request(port, "GET", "/health")
        await first.read_all()
        second = await open_request(port, "GET", "/health")
        assert second.status == 503 and "retry-after" in second.headers
        assert (await second.read_json())["error"]["code"] == "too_many_connections"
        await first.close()
        await second.close()
        with trio.fail_after(HANG_S):
            while (await fetch(port, "GET", "/health"))[0] != 200:
                await trio.sleep(0.01)


@effect("server.stall_s")
@pytest.mark.parametrize("seconds", [2.0, 6.0])
async def test_a_reader_that_reads_nothing_loses_its_seat(autojump_clock: Any, seconds: float) -> None:
    keys = {"server.stall_s": seconds, "server.stream_buffer_bytes": 1024}
    async with front(keys, answer_tokens=None, n_ctx=10**6) as gw:
        gw.start(tokens=100_000, reads=False)
        await trio.sleep(0.1)
        began = trio.current_time()
        while gw.engine.streams:
            await trio.sleep(0.05)
        assert trio.current_time() - began == pytest.approx(seconds, abs=0.3)
        gw.nursery.cancel_scope.cancel()


@effect("server.stream_buffer_bytes")
@pytest.mark.parametrize(("size", "low", "high"), [(4096, 1, 30), (65536, 100, 600)])
async def test_so_much_is_kept_for_a_slow_reader(autojump_clock: Any, size: int, low: int, high: int) -> None:
    async with front({"server.stream_buffer_bytes": size, "server.stall_s": 100}, answer_tokens=None,
                     n_ctx=10**6) as gw:
        gw.start(tokens=100_000, reads=False)
        await trio.sleep(10)
        (stream,) = gw.engine.streams.values()
        assert low <= stream.tokens <= high
        gw.nursery.cancel_scope.cancel()


@effect("server.allowed_hosts")
@pytest.mark.parametrize(("allowed", "status"), [((), 403), (("my.box",), 200)])
async def test_names_to_accept_on_loopback(autojump_clock: Any, allowed: tuple[str, ...], status: int) -> None:
    async with front({"server.allowed_hosts": allowed}) as gw:
        assert (await gw.chat(headers={"host": "my.box:8080"})).status == status
        assert (await gw.chat(headers={"host": "evil.example"})).status == 403


@pytest.mark.parametrize(("allowed", "status"), [((), 200), (("my.box",), 403)])
async def test_elsewhere_any_name_until_some_are_given(autojump_clock: Any, allowed: tuple[str, ...],
                                                       status: int) -> None:
    """As in a container, which listens on 0.0.0.0 and is published on the host's loopback address."""
    async with front({"server.host": "0.0.0.0", "server.allowed_hosts": allowed}) as gw:
        for host in ("my.box:8080", "localhost:8080", "127.0.0.1"):
            assert (await gw.chat(headers={"host": host})).status == 200
        assert (await gw.chat(headers={"host": "evil.example"})).status == status


@effect("server.half_close")
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a half-close cannot be told from a close")
@pytest.mark.parametrize(("word", "served_"), [("tolerate", True), ("disconnect", False)])
async def test_a_half_closed_client_is_served_or_gone(word: str, served_: bool) -> None:
    async with served({"server.half_close": word}) as (port, runtime):
        runtime.script(Script(first_byte_after=0.5 if served_ else 600.0))
        response = await send_request(port, "POST", CHAT, body())
        with trio.fail_after(HANG_S):
            await runtime.journal.until(lambda journal: journal.calls and journal.calls[0].headers_at)
            await response.half_close()
            if served_:
                await response.read_head()
                assert (await response.read_events())[-1] == b"data: [DONE]"
            else:
                await runtime.journal.until(lambda journal: journal.calls[0].closed_at)
        await response.close()


@effect("server.audio_max")
@pytest.mark.parametrize(("places", "seconds"), [(1, 20), (2, 10)])
async def test_how_many_sounds_are_heard_at_once(autojump_clock: Any, places: int, seconds: float) -> None:
    path, kind = "/v1/audio/transcriptions", {"content-type": "multipart/form-data; boundary=b"}
    async with front({"server.audio_max": places}) as gw:
        gw.runtime.script(Script(script=[(10, b"{}")], headers=(("content-type", "application/json"),)), path=path,
                          times=None)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(gw.call, "POST", path, b"--b--", kind)
        assert trio.current_time() - began == pytest.approx(seconds, abs=1)


@effect("server.cors_origins")
async def test_a_web_page_of_a_named_origin_may_read_answers(autojump_clock: Any) -> None:
    async with front({"server.cors_origins": ("https://chat.example",)}) as gw:
        for origin, shown in (("https://chat.example", "https://chat.example"), ("https://evil.example", None)):
            answer = await gw.chat(headers={"origin": origin, "content-type": "application/json"})
            assert (answer.status, answer.headers.get("access-control-allow-origin")) == (200, shown)


@effect("server.public_metrics")
@pytest.mark.parametrize(("public", "status"), [(False, 403), (True, 200)])
async def test_pages_are_shown_beyond_loopback_only_on_demand(
        autojump_clock: Any, public: bool, status: int) -> None:
    async with front({"server.host": "0.0.0.0", "server.public_metrics": public}) as gw:
        for page in ("/metrics", "/status"):
            assert (await gw.call("GET", page)).status == status
        assert (await gw.chat()).status == 200


# --- auth -------------------------------------------------------------------------------------------------------------


@effect("auth.keys_file")
async def test_the_keys_of_this_file_are_wanted(autojump_clock: Any, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[[key]]\nname = "alice"\nkey = "kvs-alice"\n', "utf-8")
    async with front({"auth.keys_file": str(path)}) as gw:
        assert (await gw.chat()).status == 401
        assert (await gw.chat(headers={"authorization": "Bearer kvs-alice"})).status == 200


@effect("auth.keys")
async def test_one_of_these_keys_is_wanted(autojump_clock: Any) -> None:
    async with front({"auth.keys": ("one", "two")}) as gw:
        for secret, status in (("one", 200), ("two", 200), ("three", 401)):
            assert (await gw.chat(headers={"x-api-key": secret})).status == status


@effect("auth.metrics_token")
async def test_this_token_opens_the_two_pages_only(autojump_clock: Any) -> None:
    token = {"authorization": "Bearer scrape"}
    async with front({"auth.metrics_token": "scrape", "server.host": "0.0.0.0", "auth.keys": ("one",)}) as gw:
        assert (await gw.call("GET", "/metrics")).status == 401
        assert (await gw.call("GET", "/metrics", headers=token)).status == 200
        assert (await gw.chat(headers=token)).status == 401


@effect("server.reload")
def test_when_a_changed_file_is_read_again() -> None:
    """Over real files and time: see ``test_when_the_file_is_read_again`` in test_case_reload."""
    from tests.gateway.test_case_reload import test_when_the_file_is_read_again as shown

    words = {args[0] for mark in shown.pytestmark for args in mark.args[1]}  # type: ignore[attr-defined]
    assert words == {"auto", "sighup", "off"}


# --- backend ----------------------------------------------------------------------------------------------------------


@effect("backend.type")
@pytest.mark.parametrize(("kind", "asked"), [("llamacpp", "/props"), ("openai", "/v1/models")])
async def test_the_kind_decides_what_is_asked(autojump_clock: Any, kind: str, asked: str) -> None:
    async with front({"backend.type": kind}) as gw:
        assert (await gw.status())["backend"]["kind"] == kind
        assert gw.runtime.journal.paths(asked)
        assert bool(gw.runtime.journal.paths("/props")) is (kind == "llamacpp")


@effect("backend.base_url")
async def test_this_address_is_called() -> None:
    async with open_runtime() as other, open_server(other), served() as (port, runtime):
        assert (await fetch(port, "POST", CHAT, body()))[0] == 200
        assert len(runtime.journal.calls) == 1 and not other.journal.entries


@effect("backend.model")
async def test_a_request_without_a_model_gets_this_one(autojump_clock: Any) -> None:
    async with front({"backend.model": "mine"}) as gw:
        await gw.chat()
        assert gw.sent()["model"] == "mine"
        await gw.chat(model="theirs")
        assert gw.sent()["model"] == "theirs"


@effect("backend.api_key")
async def test_the_runtime_gets_this_key_and_nobody_else_sees_it(autojump_clock: Any) -> None:
    async with front({"backend.api_key": "s3cret"}, api_key="s3cret") as gw:
        answer = await gw.chat(headers={"authorization": "Bearer client"})
        assert answer.status == 200
        assert gw.runtime.journal.calls[0].request.headers["authorization"] == "Bearer s3cret"
        assert b"s3cret" not in (await gw.call("GET", "/status")).body


@effect("backend.seats")
@pytest.mark.parametrize(("seats", "most"), [(0, 4), (2, 2), (9, 4)])
async def test_no_more_requests_are_in_the_runtime(autojump_clock: Any, seats: int, most: int) -> None:
    async with front({"backend.seats": seats}, answer_tokens=None) as gw:
        answers = [gw.start(f"text {i}", 20) for i in range(8)]
        await trio.sleep(30)
        assert [answer.status for answer in answers] == [200] * 8
        assert gw.runtime.in_flight_max == most


@effect("backend.context_tokens")
async def test_a_longer_request_is_refused_with_this_limit(autojump_clock: Any) -> None:
    async with front({"backend.context_tokens": 64}) as gw:
        assert (await gw.chat("word " * 30)).status == 200
        refused = await gw.chat("word " * 90)
        assert refused.code == "context_length_exceeded" and "64" in refused.json["error"]["message"]


@effect("backend.kv")
@pytest.mark.parametrize(("layout", "running"), [("split", 2), ("unified", 1)])
async def test_the_layout_decides_whether_two_big_ones_fit(autojump_clock: Any, layout: str, running: int) -> None:
    async with front({"backend.kv": layout}, slots=4, n_ctx=1024, unified=True, answer_tokens=None) as gw:
        for i in range(2):
            gw.start(f"text {i}", 600)
        await trio.sleep(1)
        status = await gw.status()
        assert status["capacity"]["mode"] == layout
        assert status["seats"]["used"] == running
        gw.nursery.cancel_scope.cancel()


@effect("backend.group_by_load_key")
@pytest.mark.parametrize("grouped", [False, True])
def test_requests_with_other_load_options_are_another_group_only_when_asked(grouped: bool) -> None:
    adapter = make_adapter(configured({"backend.type": "ollama", "backend.group_by_load_key": grouped}), "http://fake")
    keys = set()
    for size in (4096, 8192):
        view = {"model": "m", "options": {"num_ctx": size}}
        keys.add(adapter.load_key(ProxyRequest("/api/chat", json.dumps(view).encode(), view, model="m")))
    assert keys == ({"m:latest num_ctx=4096", "m:latest num_ctx=8192"} if grouped else {"m:latest"})


@effect("backend.name")
@pytest.mark.parametrize(("name", "shown"), [("", "llamacpp"), ("big", "big")])
async def test_a_backend_is_called_so(name: str, shown: str) -> None:
    async with served({"backend.name": name}) as (port, _):
        status = json.loads((await fetch(port, "GET", "/status"))[1])
        assert status["lanes"][0]["name"] == shown
        metrics = (await fetch(port, "GET", "/metrics"))[1].decode()
        assert f'kvstream_seats{{backend="{shown}",state="total"}} 4.0' in metrics


@effect("backend.models")
async def test_a_backend_serves_these_models_and_no_other(autojump_clock: Any) -> None:
    async with front({"backend.models": ("one", "two")}) as gw:
        listed = (await gw.call("GET", "/v1/models")).json
        assert [entry["id"] for entry in listed["data"]] == ["one", "two"]
        assert (await gw.chat(model="two")).status == 200 and gw.sent()["model"] == "two"
        refused = await gw.chat(model="three")
        assert refused.status == 404 and refused.code == "model_not_found"
        assert "one, two" in refused.json["error"]["message"]


@effect("backend.aliases")
async def test_an_alias_is_asked_for_by_its_models_name(autojump_clock: Any) -> None:
    async with front({"backend.aliases": ("gpt-4o=fake-model",)}) as gw:
        assert (await gw.chat(model="gpt-4o")).status == 200
        assert gw.sent()["model"] == "fake-model"
        assert [entry["id"] for entry in (await gw.call("GET", "/v1/models")).json["data"]] == ["fake-model", "gpt-4o"]


@effect("backend.rewrite_model")
@pytest.mark.parametrize(("on", "named"), [(True, b'"model":"gpt-4o"'), (False, b'"model":"fake-model"')])
async def test_the_answer_has_the_alias_or_the_models_name(autojump_clock: Any, on: bool, named: bytes) -> None:
    async with front({"backend.aliases": ("gpt-4o=fake-model",), "backend.rewrite_model": on}) as gw:
        for stream in (True, False):
            answer = (await gw.chat(model="gpt-4o", stream=stream)).body.replace(b'"model": ', b'"model":')
            assert named in answer and answer.count(b'"model":') == answer.count(named)


# --- upstream ---------------------------------------------------------------------------------------------------------


@effect("upstream.connect_s")
async def test_a_connect_that_hangs_is_given_up() -> None:
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # nobody accepts: once the backlog is full, a SYN is dropped and connecting hangs
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        keys = {"upstream.connect_s": 0.2, "backend.base_url": f"http://127.0.0.1:{full.getsockname()[1]}"}
        with trio.fail_after(HANG_S):  # else it is the health probe's own limit of 3 s that is told
            async with open_gateway(Loaded.of(configured(keys))) as gateway:
                await gateway.engine.watcher.wait_known()
                assert "within 0.2 s" in gateway.engine.watcher.backend.detail


@effect("upstream.first_event_s")
@pytest.mark.parametrize("seconds", [2.0, 5.0])
async def test_no_first_event_is_a_504(autojump_clock: Any, seconds: float) -> None:
    async with front({"upstream.first_event_s": seconds}) as gw:
        gw.runtime.script(Script(first_byte_after=100))
        answer = await gw.chat()
        assert (answer.status, answer.code) == (504, "backend_timeout")
        assert answer.seconds == pytest.approx(seconds, abs=0.1)


@effect("upstream.stall_s")
@pytest.mark.parametrize("seconds", [2.0, 5.0])
async def test_a_gap_in_mid_answer_ends_the_stream(autojump_clock: Any, seconds: float) -> None:
    async with front({"upstream.stall_s": seconds}) as gw:
        gw.runtime.script(Script(hang_at_token=3))
        answer = await gw.chat(tokens=50)
        assert (answer.status, answer.code) == (200, "backend_timeout")
        assert answer.seconds == pytest.approx(seconds, abs=0.2)


@effect("upstream.total_s")
@pytest.mark.parametrize(("seconds", "ended"), [(0.0, False), (3.0, True)])
async def test_a_whole_answer_has_a_limit(autojump_clock: Any, seconds: float, ended: bool) -> None:
    async with front({"upstream.total_s": seconds}, answer_tokens=None) as gw:
        answer = await gw.chat(tokens=1000)
        assert answer.seconds == pytest.approx(seconds or 10, abs=0.2)
        assert answer.body.endswith(b"[DONE]\n\n") is not ended
        assert not ended or answer.code == "backend_timeout"


@effect("upstream.load_timeout_s")
@pytest.mark.parametrize(("seconds", "status"), [(3.0, 503), (60.0, 200)])
async def test_a_loading_runtime_is_waited_for(autojump_clock: Any, seconds: float, status: int) -> None:
    async with front({"upstream.load_timeout_s": seconds}, load_s=10) as gw:
        answers = [gw.start(), gw.start(stream=False)]
        await trio.sleep(5)
        late = await gw.chat()
        assert late.status == status and late.seconds < 7
        await trio.sleep(120)
        assert [answer.status for answer in answers] == [status] * 2
        assert ("retry-after" in answers[0].headers) == (status == 503)


@effect("upstream.keepalive_expiry_s")
@pytest.mark.parametrize(("seconds", "reused"), [(0.1, False), (30.0, True)])
async def test_an_idle_connection_is_used_again_for_so_long(seconds: float, reused: bool) -> None:
    keys = {"upstream.keepalive_expiry_s": seconds, "upstream.health_interval_s": 60}
    async with served(keys) as (port, runtime):
        await fetch(port, "GET", "/v1/models")
        before = len(runtime.journal.connects)
        await trio.sleep(0.5)
        await fetch(port, "GET", "/v1/models")
        assert (len(runtime.journal.connects) == before) is reused


@effect("upstream.non_stream")
@pytest.mark.parametrize(("word", "streamed"), [("assemble", True), ("pass", False)])
async def test_a_whole_answer_is_assembled_or_passed_on(autojump_clock: Any, word: str, streamed: bool) -> None:
    async with front({"upstream.non_stream": word}) as gw:
        answer = await gw.chat(stream=False)
        assert answer.json["object"] == "chat.completion" and answer.json["usage"]["completion_tokens"] == 4
        assert bool(gw.sent().get("stream")) is streamed


@effect("upstream.include_usage")
@pytest.mark.parametrize("asked", [True, False])
async def test_usage_is_asked_for_and_taken_out_again(autojump_clock: Any, asked: bool) -> None:
    async with front({"upstream.include_usage": asked, "backend.type": "openai"}) as gw:
        answer = await gw.chat("word " * 100)
        assert ("stream_options" in gw.sent()) is asked
        assert b'"usage"' not in answer.body and b'"choices":[]' not in answer.body
        assert (await gw.status())["estimator"]["samples"] == asked  # what was learnt from it


@effect("upstream.event_bytes_max")
@pytest.mark.parametrize(("limit", "good"), [(1024, False), (8192, True)])
async def test_a_larger_event_is_an_error(autojump_clock: Any, limit: int, good: bool) -> None:
    event = b'data: {"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":"stop"}]}\n\n' % (b"x" * 4000)
    async with front({"upstream.event_bytes_max": limit}) as gw:
        gw.runtime.script(Script(script=[(0, event + b"data: [DONE]\n\n")]))
        answer = await gw.chat()
        assert (answer.body == event + b"data: [DONE]\n\n") is good
        assert good or (answer.status, answer.code) == (502, "backend_protocol")


@effect("upstream.answer_bytes_max")
@pytest.mark.parametrize("word", ["assemble", "pass"])
async def test_a_larger_whole_answer_is_an_error(autojump_clock: Any, word: str) -> None:
    async with front({"upstream.answer_bytes_max": 4000, "upstream.non_stream": word}, answer_tokens=None) as gw:
        assert (await gw.chat(tokens=4, stream=False)).status == 200
        answer = await gw.chat(tokens=2000, stream=False)
        assert (answer.status, answer.code) == (502, "backend_protocol")
        assert "answer_bytes_max" in answer.json["error"]["message"]


@effect("upstream.forward_authorization")
@pytest.mark.parametrize("forward", [True, False])
async def test_the_clients_key_is_passed_on(autojump_clock: Any, forward: bool) -> None:
    async with front({"upstream.forward_authorization": forward}) as gw:
        await gw.chat(headers={"authorization": "Bearer client"})
        sent = gw.runtime.journal.calls[0].request.headers.get("authorization")
        assert sent == ("Bearer client" if forward else None)


@effect("upstream.health_interval_s")
@pytest.mark.parametrize("seconds", [1.0, 4.0])
async def test_health_is_asked_so_often(autojump_clock: Any, seconds: float) -> None:
    async with front({"upstream.health_interval_s": seconds}) as gw:
        gw.runtime.script(Script(hang_at_token=1))
        gw.start()
        await trio.sleep(6 * seconds)  # when idle it is asked five times less often, and was when this began
        before = len(gw.runtime.journal.paths("/health"))
        await trio.sleep(40)
        assert len(gw.runtime.journal.paths("/health")) - before == pytest.approx(40 / seconds, abs=1)
        gw.nursery.cancel_scope.cancel()


@effect("upstream.wedged_s")
@pytest.mark.parametrize("seconds", [20.0, 0.0])
async def test_a_runtime_that_computes_nothing_is_called_wedged(autojump_clock: Any, seconds: float) -> None:
    async with front({"upstream.wedged_s": seconds}, answer_tokens=None) as gw:
        answer = gw.start(tokens=None)
        await trio.sleep(1)
        gw.runtime.wedge()
        await trio.sleep(25)
        assert (await gw.status())["state"] in (("wedged", "half_open") if seconds else ("up",))
        assert (b"backend_wedged" in answer.body) == bool(seconds)
        gw.nursery.cancel_scope.cancel()


@effect("upstream.busy_retry_s_max")
@pytest.mark.parametrize("seconds", [0.0, 10.0])
async def test_a_busy_runtime_is_asked_again_for_so_long(autojump_clock: Any, seconds: float) -> None:
    async with front({"upstream.busy_retry_s_max": seconds}) as gw:
        gw.runtime.script(Script(status=503, script=[(0, b'{"error":"server busy"}')]), times=None)
        answer = await gw.chat()
        assert answer.status == 503 and answer.seconds == pytest.approx(seconds, abs=0.1)
        assert (len(gw.runtime.journal.calls) > 1) == (seconds > 0)


@effect("upstream.down_grace_s")
@pytest.mark.parametrize(("seconds", "statuses"), [(20.0, [200, 503]), (0.0, [503, 503])])
async def test_a_runtime_that_has_just_gone_is_waited_for(
    autojump_clock: Any, seconds: float, statuses: list[int]
) -> None:
    async with front({"upstream.down_grace_s": seconds, "upstream.health_interval_s": 1.0}) as gw:
        gw.runtime.config.refuse = True
        await trio.sleep(6)
        early = gw.start()
        await trio.sleep(20)
        late = await gw.chat()
        gw.runtime.config.refuse = False
        await trio.sleep(3)
        assert [early.status, late.status] == statuses


async def failing(gw: Front, times: int) -> str:
    """The breaker's state after so many answers of 500."""
    gw.runtime.script(Script(status=500, script=[(0, b"{}")]), times=times)
    for _ in range(times):
        assert (await gw.chat()).status == 502
    return str((await gw.status())["breaker"]["state"])


@effect("upstream.breaker_faults")
@pytest.mark.parametrize(("faults", "states"), [(2, ("closed", "open")), (0, ("closed", "closed"))])
async def test_after_so_many_faults_the_runtime_is_left_alone(
    autojump_clock: Any, faults: int, states: tuple[str, str]
) -> None:
    async with front({"upstream.breaker_faults": faults}) as gw:
        assert (await failing(gw, 1), await failing(gw, 1)) == states


@effect("upstream.breaker_open_s")
@pytest.mark.parametrize("seconds", [1.0, 20.0])
async def test_the_runtime_is_left_alone_for_so_long(autojump_clock: Any, seconds: float) -> None:
    async with front({"upstream.breaker_faults": 1, "upstream.breaker_open_s": seconds}) as gw:
        assert await failing(gw, 1) == "open"
        await trio.sleep(seconds - 0.1)
        assert (await gw.status())["breaker"]["state"] == "open"
        await trio.sleep(0.2)
        assert (await gw.status())["breaker"]["state"] == "half_open"


async def cancelled(gw: Front) -> None:
    """A stream whose client left after a moment."""
    with trio.move_on_after(0.5):
        await gw.chat(tokens=1000)


@effect("upstream.slot_idle_poll_s")
@pytest.mark.parametrize("seconds", [0.1, 1.0])
async def test_slots_are_looked_at_so_often_after_a_cancel(autojump_clock: Any, seconds: float) -> None:
    async with front({"upstream.slot_idle_poll_s": seconds}, answer_tokens=None, busy_after_close=10.0) as gw:
        asked = len(gw.runtime.journal.paths("/slots"))
        await cancelled(gw)
        await trio.sleep(5)
        looks = len(gw.runtime.journal.paths("/slots")) - asked
        assert looks == pytest.approx(5 / (seconds + 0.01), rel=0.1, abs=1)
        assert (await gw.status())["seats"]["draining"] == 1


@effect("upstream.slot_idle_s_max")
@pytest.mark.parametrize("seconds", [3.0, 8.0])
async def test_a_slot_that_stays_busy_is_given_up(autojump_clock: Any, seconds: float) -> None:
    async with front({"upstream.slot_idle_s_max": seconds}, answer_tokens=None, busy_after_close=1000.0) as gw:
        await cancelled(gw)
        await trio.sleep(seconds - 0.5)
        assert (await gw.status())["seats"]["draining"] == 1
        await trio.sleep(1)
        assert (await gw.status())["seats"] == {"total": 4, "used": 0, "draining": 0}


@effect("upstream.count_timeout_s")
@pytest.mark.parametrize(("seconds", "how"), [(1.0, "estimated"), (30.0, "exact")])
async def test_counting_that_takes_longer_becomes_an_estimate(autojump_clock: Any, seconds: float, how: str) -> None:
    async with front({"upstream.count_timeout_s": seconds}) as gw:
        reply = json.dumps({"prompt": "hello"}).encode()
        gw.runtime.script(Script(headers_after=5, script=[(0, reply)], slot=False), path="/apply-template")
        answer = await gw.chat()
        assert answer.headers["x-kvstream-count"] == how
        assert answer.writes[0][0] == pytest.approx(min(seconds, 5), abs=0.2)


# --- memory -----------------------------------------------------------------------------------------------------------


@effect("memory.num_gpu_blocks")
@pytest.mark.parametrize(("blocks", "total", "noted"), [("auto", 64, False), (40, 40, False), (1000, 64, True)])
async def test_pages_are_lowered_never_raised(autojump_clock: Any, blocks: Any, total: int, noted: bool) -> None:
    async with front({"memory.num_gpu_blocks": blocks}, n_ctx=1024, unified=True, answer_tokens=None) as gw:
        status = await gw.status()
        assert status["pages"]["device"]["total"] == total
        assert any("1000 configured, but the runtime has 64" in note for note in status["capacity"]["notes"]) is noted
        answers = [gw.start(f"text {i}", 400) for i in range(2)]
        await trio.sleep(1)
        assert (await gw.status())["seats"]["used"] == (2 if total == 64 else 1)
        await trio.sleep(30)
        assert [answer.status for answer in answers] == [200, 200] and gw.runtime.kills == 0


@effect("memory.num_cpu_blocks")
async def test_not_built_yet_host_pages_are_only_visible_in_status(autojump_clock: Any) -> None:
    async with front({"memory.num_cpu_blocks": 77}) as gw:
        assert (await gw.status())["pages"]["host"]["total"] == 77


@effect("memory.block_size")
@pytest.mark.parametrize("size", [16, 64])
async def test_a_page_has_so_many_tokens(autojump_clock: Any, size: int) -> None:
    async with front({"memory.block_size": size}, n_ctx=4096, answer_tokens=None) as gw:
        gw.start("word " * 100, 20)
        await trio.sleep(0.1)
        status = await gw.status()
        assert status["capacity"]["page_tokens"] == size
        assert status["pages"]["device"]["total"] == 4096 // size
        (running,) = status["running"]
        assert (running["pages"] - 1) * size < running["tokens"] <= running["pages"] * size
        await trio.sleep(5)


@effect("memory.dtype")
async def test_an_embedded_server_is_started_with_the_kv_type_others_only_show_it(autojump_clock: Any) -> None:
    async with front({"memory.dtype": "q8_0"}) as gw:
        assert (await gw.status())["kv_type"] == "q8_0"
    assert "-ctk q8_0 -ctv q8_0" in flags({"memory.dtype": "q8_0"})
    assert "-ctk bf16 -ctv bf16" in flags({"memory.dtype": "bfloat16"})
    assert "-ctk" not in flags({})


@effect("memory.watermark")
@pytest.mark.parametrize(("share", "running"), [(0.0, 2), (0.5, 1)])
async def test_pages_are_kept_free_for_growth(autojump_clock: Any, share: float, running: int) -> None:
    async with front({"memory.watermark": share}, n_ctx=1024, unified=True, answer_tokens=None) as gw:
        for i in range(2):
            gw.start(f"text {i}", 300)
        await trio.sleep(0.5)
        assert (await gw.status())["seats"]["used"] == running
        gw.nursery.cancel_scope.cancel()


# --- scheduler --------------------------------------------------------------------------------------------------------


async def order_of(gw: Front, *texts: tuple[str, int], gap_s: float = 0.1) -> list[str]:
    """In which order requests reach the runtime that were made, ``gap_s`` apart, while its only seat was taken."""
    for text, tokens in (("holder", 200), *texts):
        gw.start(text, tokens)
        await trio.sleep(gap_s)
    with trio.fail_after(300):
        await gw.runtime.journal.until(lambda journal: len(journal.calls) > len(texts))
    gw.nursery.cancel_scope.cancel()
    return gw.runtime.journal.prompts[1:]


@effect("scheduler.max_batch_size")
@pytest.mark.parametrize(("size", "most"), [(1, 1), (3, 3), (16, 4)])
async def test_so_many_run_at_once(autojump_clock: Any, size: int, most: int) -> None:
    async with front({"scheduler.max_batch_size": size}, answer_tokens=None) as gw:
        for i in range(6):
            gw.start(f"text {i}", 10)
        await trio.sleep(30)
        assert gw.runtime.in_flight_max == most and len(gw.runtime.journal.calls) == 6


@effect("scheduler.priority")
@pytest.mark.parametrize(("order", "expected"), [("fcfs", ["long", "short"]), ("sjf", ["short", "long"])])
async def test_first_come_or_shortest_first(autojump_clock: Any, order: str, expected: list[str]) -> None:
    async with front({"scheduler.priority": order, "scheduler.max_batch_size": 1}, answer_tokens=None) as gw:
        assert await order_of(gw, ("long", 100), ("short", 5)) == expected


@effect("scheduler.ageing_s")
@pytest.mark.parametrize(("seconds", "expected"), [(0.1, ["long", "short"]), (60.0, ["short", "long"])])
async def test_a_long_request_is_passed_only_for_so_long(
    autojump_clock: Any, seconds: float, expected: list[str]
) -> None:
    keys = {"scheduler.priority": "sjf", "scheduler.ageing_s": seconds, "scheduler.max_batch_size": 1}
    async with front(keys, answer_tokens=None) as gw:
        assert await order_of(gw, ("long", 100), ("short", 5), gap_s=0.5) == expected


@effect("scheduler.max_queue")
async def test_more_waiting_requests_are_429(autojump_clock: Any) -> None:
    async with front({"scheduler.max_queue": 2, "scheduler.max_batch_size": 1}, answer_tokens=None) as gw:
        answers = []
        for i in range(5):
            answers.append(gw.start(f"text {i}", 100))
            await trio.sleep(0.02)
        await trio.sleep(20)
        assert [answer.status for answer in answers] == [200, 200, 200, 429, 429]
        assert answers[3].code == "queue_full" and int(answers[3].headers["retry-after"]) >= 1


@effect("scheduler.max_queue_bytes")
async def test_more_waiting_bytes_are_429(autojump_clock: Any) -> None:
    async with front({"scheduler.max_queue_bytes": 3000, "scheduler.max_batch_size": 1}, answer_tokens=None) as gw:
        answers = []
        for size in (10, 2000, 2000, 10):
            answers.append(gw.start("x" * size, 100))
            await trio.sleep(0.02)
        await trio.sleep(20)
        assert [answer.status for answer in answers] == [200, 200, 429, 200]
        assert "max_queue_bytes" in answers[2].json["error"]["message"]


@effect("scheduler.max_wait_s")
@pytest.mark.parametrize("seconds", [2.0, 5.0])
async def test_a_longer_wait_is_503(autojump_clock: Any, seconds: float) -> None:
    async with front({"scheduler.max_wait_s": seconds, "scheduler.max_batch_size": 1}, answer_tokens=None) as gw:
        gw.start("holder", 1000)
        await trio.sleep(0.1)
        answer = await gw.chat("waits")
        assert (answer.status, answer.code) == (503, "queue_timeout")
        assert answer.seconds == pytest.approx(seconds, abs=0.1)
        assert int(answer.headers["retry-after"]) >= 1
        await trio.sleep(10)


@effect("scheduler.answer_tokens_default")
@pytest.mark.parametrize(("tokens", "running"), [(100, 2), (900, 1)])
async def test_so_much_is_reserved_for_who_sets_no_limit(autojump_clock: Any, tokens: int, running: int) -> None:
    async with front({"scheduler.answer_tokens_default": tokens}, n_ctx=1024, unified=True) as gw:
        for i in range(2):
            gw.runtime.script(Script(first_byte_after=5))
            gw.start(f"text {i}", None)
        await trio.sleep(1)
        assert (await gw.status())["seats"]["used"] == running
        await trio.sleep(20)


@effect("scheduler.backfill")
@pytest.mark.parametrize(("on", "expected"), [(True, ["small", "big"]), (False, ["big", "small"])])
async def test_a_small_request_passes_a_head_that_does_not_fit(
    autojump_clock: Any, on: bool, expected: list[str]
) -> None:
    async with front({"scheduler.backfill": on}, n_ctx=1024, unified=True, answer_tokens=None) as gw:
        # "big" leaves no room for "small" beside it: what is admitted in one step starts in any order
        assert await order_of(gw, ("big", 990), ("small", 20)) == expected


async def reached(gw: Front, *texts: str, after_s: float = 0.2, tokens: int = 4, **more: Any) -> int:
    """How many of these requests, made at once, are in the runtime (or were) after so long."""
    before = len(gw.runtime.journal.calls)
    for text in texts:
        gw.start(text, tokens, **more)
    await trio.sleep(after_s)
    return len(gw.runtime.journal.calls) - before


@effect("scheduler.client_seats_max")
@pytest.mark.parametrize(("most", "running"), [(0, 4), (1, 2), (2, 3)])
async def test_one_client_has_so_many_seats(autojump_clock: Any, most: int, running: int) -> None:
    async with front({"scheduler.client_seats_max": most}, answer_tokens=None) as gw:
        a = {"authorization": "Bearer a"}
        await reached(gw, "a1", "a2", "a3", tokens=500, headers=a)
        gw.start("b", 500, headers={"authorization": "Bearer b"})
        await trio.sleep(0.1)
        assert len(gw.runtime.journal.calls) == running


@effect("scheduler.long_prefills_max")
@pytest.mark.parametrize(("most", "reading"), [(1, 1), (2, 2), (0, 3)])
async def test_so_many_long_prompts_are_read_at_once(autojump_clock: Any, most: int, reading: int) -> None:
    async with front({"scheduler.long_prefills_max": most}, prefill_rate=1000) as gw:
        assert await reached(gw, *(f"{i} " + "w " * 2000 for i in range(3))) == reading


@effect("scheduler.long_prefill_tokens")
@pytest.mark.parametrize(("tokens", "reading"), [(1000, 1), (4000, 3)])
async def test_a_prompt_of_more_tokens_is_long(autojump_clock: Any, tokens: int, reading: int) -> None:
    async with front({"scheduler.long_prefill_tokens": tokens}, prefill_rate=1000) as gw:
        assert await reached(gw, *(f"{i} " + "w " * 2000 for i in range(3))) == reading


@effect("scheduler.leader_tokens")
@pytest.mark.parametrize(("tokens", "reading"), [(256, 1), (2000, 3), (0, 3)])
async def test_a_shared_prefix_is_computed_once(autojump_clock: Any, tokens: int, reading: int) -> None:
    keys = {"scheduler.leader_tokens": tokens, "backend.type": "openai", "scheduler.long_prefills_max": 0}
    async with front(keys, prefill_rate=1000) as gw:
        await gw.chat()  # the first one goes alone anyhow
        assert await reached(gw, *("w " * 2000 + str(i) for i in range(3))) == reading


async def overloaded(gw: Front, count: int) -> list[Answer]:
    """Newcomers of one moment, while a lane that serves 5 a second has 9 waiting; each may wait 2 s."""
    for i in range(20):
        gw.start(f"early {i}", 20)
        await trio.sleep(0.1)
    answers = [gw.start(f"late {i}", 20) for i in range(count)]
    await trio.sleep(5)
    return answers


SLOW = {"scheduler.max_wait_s": 2.0, "scheduler.max_batch_size": 1}


@effect("scheduler.shed")
@pytest.mark.parametrize("on", [True, False])
async def test_who_would_wait_in_vain_is_told_at_once(autojump_clock: Any, on: bool) -> None:
    async with front({"scheduler.shed": on, "scheduler.shed_probe_every": 1000, **SLOW}, answer_tokens=None) as gw:
        answers = await overloaded(gw, 10)
        refused = [answer for answer in answers if answer.status == 503]
        assert len(refused) >= 6
        assert {answer.code for answer in refused} == {"predicted_wait" if on else "queue_timeout"}
        assert all(answer.seconds == pytest.approx(0 if on else 2, abs=0.1) for answer in refused)


@effect("scheduler.shed_probe_every")
@pytest.mark.parametrize(("every", "shed"), [(1, 0), (2, 10), (20, 19)])
async def test_every_so_many_th_waits_all_the_same(autojump_clock: Any, every: int, shed: int) -> None:
    async with front({"scheduler.shed_probe_every": every, **SLOW}, answer_tokens=None) as gw:
        answers = await overloaded(gw, 40)
        seen = [a for a in answers if a.seconds < 0.1 and a.status == 503]
        assert len(seen) == pytest.approx(shed * 36 / 20, abs=4)


@effect("scheduler.cold_after_s")
@pytest.mark.parametrize(("seconds", "running"), [(3.0, 1), (300.0, 3)])
async def test_a_model_not_used_for_so_long_gets_one_request_first(
        autojump_clock: Any, seconds: float, running: int) -> None:
    async with front({"scheduler.cold_after_s": seconds, "backend.type": "openai"}) as gw:
        await gw.chat()
        await trio.sleep(5)
        gw.runtime.script(Script(first_byte_after=1.0))
        assert await reached(gw, "a", "b", "c") == running
        await trio.sleep(2)
        assert len(gw.runtime.journal.calls) == 4


@effect("scheduler.exclusive_models")
@pytest.mark.parametrize(("on", "running"), [(True, 1), (False, 2)])
async def test_one_model_at_a_time(autojump_clock: Any, on: bool, running: int) -> None:
    async with front({"scheduler.exclusive_models": on}, answer_tokens=None) as gw:
        gw.start("a", 100, model="one")
        gw.start("b", 100, model="two")
        await trio.sleep(0.1)
        assert len(gw.runtime.journal.calls) == running


@effect("scheduler.switch_wait_s")
@pytest.mark.parametrize(("seconds", "order"), [(1.0, ["a", "b", "a2"]), (10.0, ["a", "a2", "b"])])
async def test_a_model_is_passed_by_the_one_in_use_only_for_so_long(
        autojump_clock: Any, seconds: float, order: list[str]) -> None:
    keys = {"scheduler.exclusive_models": True, "scheduler.switch_wait_s": seconds}
    async with front(keys, answer_tokens=None) as gw:
        for text, model in (("a", "one"), ("b", "two"), ("a2", "one")):
            gw.start(text, 500, model=model)
            await trio.sleep(1.5)
        await trio.sleep(20)
        assert gw.runtime.journal.prompts == order


# --- prefix cache -----------------------------------------------------------------------------------------------------


@effect("prefix_cache.enabled")
@pytest.mark.parametrize("on", [True, False])
async def test_pages_of_finished_prompts_are_kept(autojump_clock: Any, on: bool) -> None:
    async with front({"prefix_cache.enabled": on}) as gw:
        for _ in range(2):
            await gw.chat("word " * 100)
        status = await gw.status()
        assert (status["prefixes"]["tokens"] >= 96) is on
        assert (status["counters"]["prefix_tokens_accounted"] >= 96) is on
        assert on or status["pages"]["device"]["cached"] == 0


@effect("prefix_cache.max_prefix_length")
@pytest.mark.parametrize(("length", "kept"), [(64, 64), (0, 0), (2048, 192)])
async def test_no_longer_prefix_is_kept(autojump_clock: Any, length: int, kept: int) -> None:
    async with front({"prefix_cache.max_prefix_length": length}) as gw:
        await gw.chat("word " * 190)
        assert (await gw.status())["prefixes"]["tokens"] == kept


@effect("prefix_cache.ttl_seconds")
@pytest.mark.parametrize(("seconds", "kept"), [(10.0, False), (100.0, True)])
async def test_an_unused_prefix_is_forgotten(autojump_clock: Any, seconds: float, kept: bool) -> None:
    async with front({"prefix_cache.ttl_seconds": seconds}) as gw:
        await gw.chat("word " * 100)
        await trio.sleep(20)
        assert ((await gw.status())["prefixes"]["nodes"] > 0) is kept


# --- prefix hygiene ---------------------------------------------------------------------------------------------------


async def ask_by_clock(gw: Front) -> None:
    """Two requests that differ in the time of day, at the start of the prompt."""
    for minute in (30, 31):
        system = {"role": "system", "content": f"It is 12:{minute}. " + "word " * 200}
        body = {"messages": [system, {"role": "user", "content": "hello"}], "max_tokens": 2}
        assert (await gw.call("POST", CHAT, json.dumps(body).encode())).status == 200


@effect("prefix.volatile")
@pytest.mark.parametrize(("names", "shared"), [(("times",), True), ((), False)])
async def test_page_keys_ignore_such_values(autojump_clock: Any, names: tuple[str, ...], shared: bool) -> None:
    async with front({"prefix.volatile": names}) as gw:
        await ask_by_clock(gw)
        assert ((await gw.status())["counters"]["prefix_tokens_accounted"] >= 192) is shared
        bodies = {entry.request.body for entry in gw.runtime.journal.calls if entry.inference}
        assert len(bodies) == 2  # nothing is rewritten


@effect("prefix.normalize")
@pytest.mark.parametrize(("names", "sent"), [(("times",), 1), ((), 2)])
async def test_such_values_are_sent_as_a_constant(autojump_clock: Any, names: tuple[str, ...], sent: int) -> None:
    async with front({"prefix.normalize": names}) as gw:
        await ask_by_clock(gw)
        assert len({entry.request.body for entry in gw.runtime.journal.calls if entry.inference}) == sent


@effect("prefix.diagnose")
@pytest.mark.parametrize("on", [True, False])
async def test_what_keeps_prefixes_apart_is_named(autojump_clock: Any, on: bool) -> None:
    async with front({"prefix.diagnose": on}) as gw:
        await ask_by_clock(gw)
        assert bool((await gw.status())["prefix_hygiene"]["findings"]) is on


@effect("attention.backend")
async def test_not_built_yet_attention_is_only_visible_in_status(autojump_clock: Any) -> None:
    async with front({"attention.backend": "naive"}) as gw:
        assert (await gw.status())["attention"] == "naive"


# --- sharing answers --------------------------------------------------------------------------------------------------


async def two_at_once(gw: Front, **more: Any) -> int:
    """Two identical requests at temperature 0; the calls that the runtime got."""
    before = len(gw.runtime.journal.calls)
    answers = [gw.start("the same", 40, temperature=0, **more) for _ in range(2)]
    await trio.sleep(5)
    assert [answer.status for answer in answers] == [200, 200]
    return len(gw.runtime.journal.calls) - before


@effect("coalesce.enabled")
@pytest.mark.parametrize(("enabled", "calls"), [(True, 1), (False, 2)])
async def test_identical_requests_are_one_call_or_two(autojump_clock: Any, enabled: bool, calls: int) -> None:
    async with front({"coalesce.enabled": enabled}, answer_tokens=None) as gw:
        assert await two_at_once(gw) == calls


@effect("coalesce.history_bytes_max")
@pytest.mark.parametrize(("size", "calls"), [(1024, 2), (2**20, 1)])
async def test_beyond_this_nobody_joins(autojump_clock: Any, size: int, calls: int) -> None:
    async with front({"coalesce.history_bytes_max": size}, answer_tokens=None) as gw:
        first = gw.start("the same", 60, temperature=0)
        await trio.sleep(0.3)
        second = gw.start("the same", 60, temperature=0)
        await trio.sleep(5)
        assert first.body == second.body or calls == 2
        assert len(gw.runtime.journal.calls) == calls


CACHE = {"response_cache.enabled": True}


@effect("response_cache.enabled")
@pytest.mark.parametrize(("enabled", "calls"), [(True, 1), (False, 2)])
async def test_an_answer_is_kept_or_not(autojump_clock: Any, enabled: bool, calls: int) -> None:
    async with front({"response_cache.enabled": enabled}) as gw:
        for _ in range(2):
            assert (await gw.chat(temperature=0)).status == 200
        assert len(gw.runtime.journal.calls) == calls


@effect("response_cache.entries_max")
@pytest.mark.parametrize(("entries", "calls"), [(1, 3), (2, 2)])
async def test_so_many_answers_are_kept(autojump_clock: Any, entries: int, calls: int) -> None:
    async with front(CACHE | {"response_cache.entries_max": entries}) as gw:
        for text in ("a", "b", "a"):
            await gw.chat(text, temperature=0)
        assert len(gw.runtime.journal.calls) == calls


@effect("response_cache.bytes_max")
@pytest.mark.parametrize(("size", "calls"), [(2000, 2), (200_000, 1)])
async def test_so_many_bytes_are_kept(autojump_clock: Any, size: int, calls: int) -> None:
    async with front(CACHE | {"response_cache.bytes_max": size}) as gw:
        for _ in range(2):
            await gw.chat(temperature=0)
        assert len(gw.runtime.journal.calls) == calls


@effect("response_cache.ttl_s")
@pytest.mark.parametrize(("seconds", "calls"), [(5.0, 2), (50.0, 1)])
async def test_answers_are_kept_for_so_long(autojump_clock: Any, seconds: float, calls: int) -> None:
    async with front(CACHE | {"response_cache.ttl_s": seconds}) as gw:
        await gw.chat(temperature=0)
        await trio.sleep(10)
        await gw.chat(temperature=0)
        assert len(gw.runtime.journal.calls) == calls


# --- embedded ---------------------------------------------------------------------------------------------------------


def flags(keys: Mapping[str, Any]) -> str:
    spec = embedded_spec(configured({"embedded.model": "/m/tiny.gguf"} | dict(keys)))
    return " ".join(server_flags(spec, port=1234, slot_dir=Path("/s")))


@effect("embedded.model")
def test_the_model_is_loaded_under_its_own_name() -> None:
    assert "-m /m/other.gguf " in flags({"embedded.model": "/m/other.gguf"})
    assert "--alias other" in flags({"embedded.model": "/m/other.gguf"})


@effect("embedded.llama_server")
def test_the_named_server_is_run(tmp_path: Path) -> None:
    binary = tmp_path / "my-llama"
    binary.write_text("#!/bin/sh\n", "utf-8")
    binary.chmod(0o755)
    assert find_server(embedded_spec(configured({"embedded.llama_server": str(binary)}))).path == str(binary)
    with pytest.raises(ConfigError, match="gone"):
        find_server(embedded_spec(configured({"embedded.llama_server": str(tmp_path / "gone")})))


@effect("embedded.slots")
def test_each_slot_has_a_context_of_its_own() -> None:
    assert "-np 3 -c 12288 " in flags({"embedded.slots": 3})


@effect("embedded.context_tokens")
def test_the_context_is_per_slot() -> None:
    assert "-np 4 -c 2048 " in flags({"embedded.context_tokens": 512})


@effect("embedded.batch_tokens")
def test_prompts_are_read_in_such_batches() -> None:
    assert "-b 128 " in flags({"embedded.batch_tokens": 128})


@effect("embedded.threads")
def test_threads_are_set_or_left_to_the_server() -> None:
    assert "-t 7 " in flags({"embedded.threads": 7})
    assert "-t " not in flags({"embedded.threads": 0})


@effect("embedded.state_dir")
def test_logs_and_slots_go_there(tmp_path: Path) -> None:
    with claim_place(embedded_spec(configured({"embedded.state_dir": str(tmp_path)})).state_dir) as place:
        assert place.slot_dir.is_dir() and tmp_path in place.slot_dir.parents and tmp_path in place.log.parents


@effect("embedded.load_timeout_s")
@pytest.mark.skipif(sys.platform == "win32", reason="the stub is a shell script")
async def test_a_load_that_takes_longer_is_given_up(tmp_path: Path) -> None:
    binary, model = tmp_path / "llama-server", tmp_path / "m.gguf"
    binary.write_text('#!/bin/sh\ncase "$*" in *--help*) exit 0;; esac\nexec sleep 60\n', "utf-8")
    binary.chmod(0o755)
    model.write_bytes(b"GGUF")
    spec = embedded_spec(configured({
        "embedded.model": str(model), "embedded.llama_server": str(binary), "embedded.state_dir": str(tmp_path / "s"),
        "embedded.load_timeout_s": 0.4}))
    with trio.fail_after(30), pytest.RaisesGroup(
            pytest.RaisesExc(EmbeddedError, match=r"within 0\.4 s"), flatten_subgroups=True, allow_unwrapped=True):
        await EmbeddedServer(spec).run()


@effect("embedded.restart_backoff_s_max")
def test_pauses_between_restarts_stop_growing_there() -> None:
    limit = embedded_spec(configured({"embedded.restart_backoff_s_max": 2.5})).restart_backoff_s_max
    assert [backoff_s(deaths, limit) for deaths in (1, 2, 20)] == [0.5, 1.0, 2.5]


@effect("embedded.extra_args")
def test_more_arguments_come_last() -> None:
    assert flags({"embedded.extra_args": ("--jinja", "-fa")}).endswith(" --jinja -fa")


# --- compat -----------------------------------------------------------------------------------------------------------

ODD_CALLS = b"".join(b"data: " + json.dumps(
    {"id": "c", "choices": [{"index": 0, **choice}]}).encode() + b"\n\n" for choice in (
    {"delta": {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, "finish_reason": None},
    {"delta": {"reasoning": "hm"}, "finish_reason": None},
    {"delta": {}, "finish_reason": "stop"})) + b"data: [DONE]\n\n"


async def odd_answer(keys: Mapping[str, Any]) -> str:
    async with front(keys) as gw:
        gw.runtime.script(Script(script=[(0, ODD_CALLS)]))
        return b"".join(data for _, data in (await gw.chat()).writes).decode()


@effect("compat.normalize_tool_calls")
async def test_tool_calls_are_numbered_where_that_is_asked_for(autojump_clock: Any) -> None:
    assert '"index":0,"id":"call_' in await odd_answer({"compat.normalize_tool_calls": True})
    assert await odd_answer({"compat.normalize_tool_calls": False}) == ODD_CALLS.decode()


@effect("compat.reasoning_field")
@pytest.mark.parametrize(("word", "shown"), [("pass", '"reasoning": "hm"'), ("reasoning", '"reasoning": "hm"'),
                                             ("reasoning_content", '"reasoning_content":"hm"')])
async def test_the_reasoning_text_is_called_as_asked(autojump_clock: Any, word: str, shown: str) -> None:
    assert shown in await odd_answer({"compat.reasoning_field": word})


@effect("compat.keepalive_mode")
@pytest.mark.parametrize(("word", "sent"), [
    ("comment", b": ping"), ("empty-delta", b'"delta": {}'), ("off", None)])
async def test_what_keeps_a_stream_alive(autojump_clock: Any, word: str, sent: bytes | None) -> None:
    async with front({"compat.keepalive_mode": word, "server.keepalive_s": 5.0}) as gw:
        gw.runtime.script(Script(itl=8))
        writes = [data for _, data in (await gw.chat(tokens=2)).writes]
        found = [data for data in writes if data.startswith(b": ping") or b'"delta": {}' in data]
        assert (not found) if sent is None else (sent in found[-1])


# --- logging ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def logged(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[Mapping[str, Any]], str]]:
    """What a line at INFO and one at WARNING look like under a configuration."""
    root, ours = logging.getLogger(), logging.getLogger("kvstream")
    before = root.handlers[:], root.level, ours.level

    def write(keys: Mapping[str, Any]) -> str:
        config = configured(keys).logging
        set_up_logging(config.level, config.format)
        ours.info("a request")
        ours.warning("a warning")
        return capsys.readouterr().err

    yield write
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


@effect("logging.level")
def test_what_is_less_severe_is_not_written(logged: Callable[[Mapping[str, Any]], str]) -> None:
    assert "a request" in logged({"logging.level": "INFO"})
    quiet = logged({"logging.level": "WARNING"})
    assert "a request" not in quiet and "a warning" in quiet


@effect("logging.format")
def test_lines_are_for_people_or_machines(logged: Callable[[Mapping[str, Any]], str]) -> None:
    lines = logged({"logging.format": "json"}).splitlines()
    assert [json.loads(line)["message"] for line in lines] == ["a request", "a warning"]
    assert not logged({"logging.format": "text"}).startswith("{")
