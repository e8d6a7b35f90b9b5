"""What the gateway's case tests stand on: a lane on the virtual clock, and a whole gateway on loopback.

``open_lane``: app, proxy, engine and an in-memory fake runtime, no sockets, so with ``autojump_clock`` forty seconds of
silence cost nothing. ``open_rig``: the gateway as ``kvstream serve`` builds it, on a free port, before the TCP fake.
Both take configuration sections as dictionaries: ``server={"keepalive_s": 0.1}``, and ``knobs`` of the fake.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from attrs import define, field

from kvstream.config import Config, Loaded
from kvstream.gateway import discovery, statusview
from kvstream.gateway.access import Access
from kvstream.gateway.app import App, AppSettings
from kvstream.gateway.coalesce import Coalescer
from kvstream.gateway.engine import Engine
from kvstream.gateway.metrics import Metrics
from kvstream.gateway.proxy import Proxy
from kvstream.gateway.router import Lane as RoutedLane
from kvstream.gateway.router import Router
from kvstream.gateway.serve import Gateway, open_gateway
from kvstream.gateway.settings import (
    access_settings,
    coalesce_settings,
    engine_settings,
    make_adapter,
    proxy_settings,
)
from tests.fakes import FakeRuntime, FakeUpstream, open_runtime
from tests.fakes.client import Pairs, RawResponse, open_request, send_request
from tests.fakes.server import FakeServer, open_server

CHAT = "/v1/chat/completions"
# The machine may stand still for seconds at any point. What hangs is a failure after HANG_S. What must happen at once
# has SOON_S, and the test sees to it that nothing else would bring it about in that time.
HANG_S, SOON_S = 30.0, 15.0
COMPLETIONS = "/v1/completions"
QUICK: dict[str, dict[str, Any]] = {
    "server": {"port": 0},
    "upstream": {"health_interval_s": 0.2, "slot_idle_poll_s": 0.01},
    "inject": {"mode": "off"},  # what is about something else is asserted on the bytes of a lane without it
}


@pytest.fixture(autouse=True)
def no_bug_in_the_log(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """An unexpected exception is logged and answered politely; in a case test it must not pass unseen."""
    if not request.path.name.startswith(("test_case_", "test_http_")):
        yield
        return
    caplog.set_level(logging.INFO, logger="kvstream")
    yield
    bugs = [record for record in caplog.get_records("call") if record.levelno >= logging.ERROR]
    assert not [record.getMessage() + str(record.exc_text or "") for record in bugs]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Discovery and the command line wait as long as a test does. They give who may be there a second, or five, in
    which a server in a process that is kept waiting does not answer."""
    monkeypatch.setattr(statusview, "LOOK_TIMEOUT_S", HANG_S)
    for function in (discovery.look_at, discovery.discover):
        monkeypatch.setitem(function.__kwdefaults__, "timeout_s", HANG_S)


def chat(text: str = "hello", *, stream: bool = True, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "stream": stream, **more}


def data_of(body: bytes) -> list[Any]:
    """The values of the ``data:`` lines; the end marker stays a string."""
    lines = [line[5:].strip() for line in body.split(b"\n") if line.startswith(b"data:")]
    return [line.decode() if line == b"[DONE]" else json.loads(line) for line in lines if line]


def text_of(body: bytes) -> str:
    out = ""
    for value in data_of(body):
        for choice in value.get("choices", ()) if isinstance(value, dict) else ():
            out += choice.get("delta", {}).get("content") or choice.get("text") or ""
    return out


def error_of(body: bytes) -> dict[str, Any]:
    """The error of a JSON envelope, whole: the four fields that an OpenAI client reads."""
    value = json.loads(body)
    assert set(value) == {"error"}
    assert {"message", "type", "code", "param"} <= set(value["error"])
    assert value["error"]["message"] and value["error"]["code"]
    error: dict[str, Any] = value["error"]
    return error


def config_of(**sections: Mapping[str, Any]) -> Config:
    config = Config()
    for name in {*QUICK, *sections}:
        values = {**QUICK.get(name, {}), **sections.get(name, {})}
        config = attrs.evolve(config, **{name: attrs.evolve(getattr(config, name), **values)})
    return config


def metric(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, labels) or 0.0


# --- in memory, on the virtual clock ----------------------------------------------------------------------------------


@define(eq=False)
class Call:
    """One ASGI exchange. ``writes`` holds ``(time, bytes)`` of the body."""

    status: int = 0
    headers: dict[str, str] = field(factory=dict)
    writes: list[tuple[float, bytes]] = field(factory=list)
    started_at: float | None = None
    ended_at: float | None = None
    ended: trio.Event = field(factory=trio.Event)
    stuck: bool = False  # the client reads nothing: a write never ends, until it leaves
    _gone: trio.Event = field(factory=trio.Event)

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.writes)

    def leave(self) -> None:
        """Close the connection."""
        self._gone.set()


@define(eq=False)
class Lane:
    """A lane and its HTTP surface."""

    app: App
    engine: Engine
    runtime: FakeRuntime
    upstream: FakeUpstream
    nursery: trio.Nursery

    @property
    def metrics(self) -> Metrics:
        return self.engine.metrics

    def idle(self) -> bool:
        return is_idle(self.engine)

    async def request(self, method: str, path: str, body: Any = b"", headers: Pairs = (), *, call: Call | None = None,
                      parts: int = 1) -> Call:
        """Run an exchange to its end."""
        call = call or Call()
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        step = max(1, -(-len(content) // parts))
        messages = [{"type": "http.request", "body": content[i : i + step], "more_body": i + step < len(content)}
                    for i in range(0, max(1, len(content)), step)]
        messages.reverse()

        async def receive() -> dict[str, Any]:
            await trio.lowlevel.checkpoint()
            if messages and not call._gone.is_set():
                return messages.pop()
            await call._gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            await trio.lowlevel.checkpoint()
            if message["type"] == "http.response.start":
                call.status, call.started_at = message["status"], trio.current_time()
                call.headers = {n.decode(): v.decode() for n, v in message["headers"]}
            elif call.stuck:
                with trio.CancelScope(shield=True):  # as hypercorn does
                    await call._gone.wait()
            elif message.get("body"):
                call.writes.append((trio.current_time(), message["body"]))

        pairs = [(b"host", b"localhost"), *((n.lower().encode(), v.encode()) for n, v in headers)]
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
                 "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http", "headers": pairs,
                 "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "extensions": {}, "state": {}}
        try:
            await self.app(scope, receive, send)
        finally:
            call.ended_at = trio.current_time()
            call.ended.set()
        return call

    def start(self, body: Any, path: str = CHAT, headers: Pairs = (), *, stuck: bool = False) -> Call:
        """A POST in the background."""
        call = Call(stuck=stuck)

        async def run() -> None:
            await self.request("POST", path, body, headers, call=call)

        self.nursery.start_soon(run)
        return call

    async def post(self, body: Any, path: str = CHAT, headers: Pairs = ()) -> Call:
        return await self.request("POST", path, body, headers)

    async def get(self, path: str) -> Call:
        return await self.request("GET", path)

    async def status(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((await self.get("/status")).body)
        return value


def is_idle(engine: Engine) -> bool:
    """Whether nothing waits, runs, drains or holds a page that is not merely cached."""
    now = engine.scheduler.snapshot(trio.current_time())
    tier = now.pages[0]
    return (not now.running and not now.waiting and now.seats.used == 0 and not engine.streams
            and tier.held == tier.cached and tier.promised == 0)


def is_up(engine: Engine) -> bool:
    return engine.scheduler.snapshot(trio.current_time()).limits is not None


@asynccontextmanager
async def open_lane(*, split: Any = None, wait: bool = True, knobs: Any = None,
                    **sections: Mapping[str, Any]) -> AsyncIterator[Lane]:
    """A running lane; with ``wait`` the backend is known to be up."""
    config = config_of(**sections)
    async with open_runtime(**(knobs or {})) as runtime:
        metrics = Metrics()
        upstream = FakeUpstream(runtime, split=split)
        settings = attrs.evolve(engine_settings(config), raise_bugs=True)
        engine = Engine(make_adapter(config, "http://fake"), upstream, settings, metrics)
        metrics.watch(engine)
        router = Router([RoutedLane(engine)])
        coalescer = Coalescer(router.open_answer, metrics, coalesce_settings(config))
        proxy = Proxy(coalescer.open_answer, metrics, proxy_settings(config), pick=router.pick)
        app = App(router, proxy, metrics, AppSettings(frozenset({"localhost"})), dict,
                  Access(access_settings(config)))
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            await nursery.start(coalescer.run)
            nursery.start_soon(router.lanes[0].listed.run)
            while wait and not is_up(engine):
                await trio.sleep(0.01)
            yield Lane(app, engine, runtime, upstream, nursery)
            nursery.cancel_scope.cancel()


# --- on loopback ------------------------------------------------------------------------------------------------------


@define(eq=False)
class Rig:
    """A gateway on the network before a fake on the network."""

    gateway: Gateway
    runtime: FakeRuntime
    fake: FakeServer

    @property
    def port(self) -> int:
        return int(self.gateway.url.rpartition(":")[2])

    @property
    def engine(self) -> Engine:
        return self.gateway.engine

    def idle(self) -> bool:
        return is_idle(self.engine)

    async def until(self, true: Any, within_s: float = HANG_S) -> None:
        """Wait until ``true()``."""
        with trio.fail_after(within_s):
            while not true():
                await trio.sleep(0.005)

    async def send(self, body: Any, path: str = CHAT, headers: Pairs = (), **more: Any) -> RawResponse:
        """POST without waiting for an answer."""
        return await send_request(self.port, "POST", path, body, headers, **more)

    async def post(self, body: Any, path: str = CHAT, headers: Pairs = (), **more: Any) -> RawResponse:
        return await open_request(self.port, "POST", path, body, headers, **more)

    async def get(self, path: str, headers: Pairs = ()) -> tuple[int, bytes, dict[str, str]]:
        response = await open_request(self.port, "GET", path, b"", [*headers, ("Connection", "close")])
        try:
            return response.status, await response.read_all(), response.headers
        finally:
            await response.close()

    async def status(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((await self.get("/status"))[1])
        return value


@asynccontextmanager
async def open_rig(*, wait: bool = True, knobs: Any = None, **sections: Mapping[str, Any]) -> AsyncIterator[Rig]:
    """A running gateway; with ``wait`` its backend is known to be up."""
    async with open_runtime(**(knobs or {})) as runtime, open_server(runtime) as fake:
        backend = {"base_url": fake.base_url, **sections.pop("backend", {})}
        async with open_gateway(Loaded.of(config_of(backend=backend, **sections))) as gateway:
            rig = Rig(gateway, runtime, fake)
            if wait:
                await rig.until(lambda: is_up(gateway.engine))
            yield rig
