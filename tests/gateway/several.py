"""Several lanes for tests: in memory on the virtual clock, or a whole gateway on loopback before several TCP fakes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import attrs
import trio

from kvstream.config import BackendConfig, Config, Loaded
from kvstream.gateway.access import Access
from kvstream.gateway.app import App, AppSettings
from kvstream.gateway.engine import Engine
from kvstream.gateway.lanes import names_of
from kvstream.gateway.metrics import Metrics
from kvstream.gateway.proxy import Proxy, ProxySettings
from kvstream.gateway.router import Lane as RoutedLane
from kvstream.gateway.router import Router
from kvstream.gateway.serve import open_gateway
from kvstream.gateway.settings import access_settings, engine_settings, make_adapter
from tests.fakes import FakeRuntime, FakeUpstream, open_runtime
from tests.fakes.server import FakeServer, open_server
from tests.gateway.conftest import Lane, Rig, config_of, is_up

Row = Mapping[str, Any]  # of a [[backend]]; "knobs" are those of its fake


@attrs.define(eq=False)
class Several(Lane):
    """The HTTP surface of several lanes; the names of :class:`Lane` are those of the first."""

    router: Router = attrs.field(kw_only=True)
    runtimes: list[FakeRuntime] = attrs.field(kw_only=True)

    @property
    def engines(self) -> list[Engine]:
        return [lane.engine for lane in self.router.lanes]


def config_of_rows(rows: Sequence[Row], urls: Sequence[str], **sections: Mapping[str, Any]) -> Config:
    backends = [BackendConfig(**{"base_url": url} | {k: v for k, v in row.items() if k != "knobs"})
                for row, url in zip(rows, urls, strict=True)]
    return attrs.evolve(config_of(**sections), backend=backends[0], more_backends=tuple(backends[1:]))


@asynccontextmanager
async def open_several(*rows: Row, wait: bool = True, **sections: Mapping[str, Any]) -> AsyncIterator[Several]:
    """Running lanes in memory; with ``wait`` every backend is known to be up, and its models."""
    config = config_of_rows(rows, [f"http://fake-{i}" for i in range(len(rows))], **sections)
    metrics = Metrics()
    async with AsyncExitStack() as stack:
        runtimes = [await stack.enter_async_context(open_runtime(
            **{"dialect": row.get("type", "llamacpp")} | row.get("knobs", {}))) for row in rows]
        lanes = []
        for backend, runtime in zip(config.backends, runtimes, strict=True):
            own = config.of_backend(backend)
            engine = Engine(make_adapter(own, backend.url), FakeUpstream(runtime),
                            attrs.evolve(engine_settings(own), raise_bugs=True), metrics, name=backend.name)
            metrics.watch(engine)
            lanes.append(RoutedLane(engine, names_of(backend)))
        router = Router(lanes)
        settings = ProxySettings(keepalive_s=config.server.keepalive_s)
        proxy = Proxy(router.open_answer, metrics, settings, pick=router.pick)
        app = App(router, proxy, metrics, AppSettings(frozenset({"localhost"})), dict, Access(access_settings(config)))
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        for lane in lanes:
            await nursery.start(lane.engine.run)
            nursery.start_soon(lane.listed.run)
        while wait and not all(is_up(lane.engine) and lane.listed.known for lane in lanes):
            await trio.sleep(0.01)
        upstream = lanes[0].engine.upstream
        assert isinstance(upstream, FakeUpstream)
        yield Several(app, lanes[0].engine, runtimes[0], upstream, nursery, router=router, runtimes=runtimes)


@attrs.define(eq=False)
class SeveralRig(Rig):
    """A gateway on the network before several fakes there; the names of :class:`Rig` are those of the first."""

    runtimes: list[FakeRuntime] = attrs.field(kw_only=True)
    fakes: list[FakeServer] = attrs.field(kw_only=True)


@asynccontextmanager
async def open_rigs(*rows: Row, **sections: Mapping[str, Any]) -> AsyncIterator[SeveralRig]:
    """As ``kvstream serve`` builds it from ``[[backend]]`` tables; all are up."""
    async with AsyncExitStack() as stack:
        runtimes = [await stack.enter_async_context(open_runtime(
            **{"dialect": row.get("type", "llamacpp")} | row.get("knobs", {}))) for row in rows]
        fakes = [await stack.enter_async_context(open_server(runtime)) for runtime in runtimes]
        config = config_of_rows(rows, [fake.base_url for fake in fakes], **sections)
        gateway = await stack.enter_async_context(open_gateway(Loaded.of(config)))
        rig = SeveralRig(gateway, runtimes[0], fakes[0], runtimes=runtimes, fakes=fakes)
        await rig.until(lambda: all(is_up(lane.engine) and lane.listed.known for lane in gateway.router.lanes))
        yield rig
