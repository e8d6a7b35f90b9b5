"""``/status``, ``/metrics`` and the terminal's view of several backends."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import trio
from rich.console import Console

from kvstream.gateway import statusview
from tests.fakes import Script
from tests.gateway.conftest import chat
from tests.gateway.several import open_rigs, open_several

A: dict[str, Any] = {"name": "big", "knobs": {"model": "qwen3"}, "aliases": ("gpt-4o=qwen3",)}
B: dict[str, Any] = {"name": "small", "type": "openai", "knobs": {"model": "llama3.2"}}


def shown(snapshot: dict[str, Any]) -> str:
    out = io.StringIO()
    Console(file=out, width=120, highlight=False).print(statusview.render(snapshot))
    return out.getvalue()


async def test_status_has_every_lane_and_the_first_at_the_top(autojump_clock: Any) -> None:
    async with open_several(A, B) as several:
        several.runtimes[1].script(Script(itl=1.0, tokens=9))
        call = several.start(chat(model="llama3.2"))
        await trio.sleep(1)
        status = await several.status()
        first, second = status["lanes"]
        assert (first["name"], second["name"]) == ("big", "small")
        assert first["models"] == ["qwen3", "gpt-4o"] and second["models"] == ["llama3.2"]
        assert {k: v for k, v in status.items() if k in first} == first
        assert second["seats"]["used"] == 1 and first["seats"]["used"] == 0 and len(second["running"]) == 1
        text = shown(status)
        assert text.index("big") < text.index("small") and "qwen3, gpt-4o" in text and "0/4" in text
        assert "running" in text.rpartition("small")[2]
        await call.ended.wait()


async def test_one_lane_is_shown_as_it_was(autojump_clock: Any) -> None:
    async with open_several(A) as several:
        status = await several.status()
        assert shown(status) == shown({k: v for k, v in status.items() if k != "lanes"})
        assert "backends" not in shown(status)


async def test_a_configuration_that_is_not_in_force_is_told() -> None:
    for lanes in ([], [{"name": "a"}, {"name": "b"}]):
        text = shown({"lanes": lanes, "config": {"error": "x.toml: line 3: \x1b[31mnot TOML", "restart": []}})
        assert "x.toml: line 3" in text and "\x1b" not in text
        assert "server.port" in shown({"lanes": lanes, "config": {"error": None, "restart": ["server.port"]}})


async def test_gauges_have_the_backends_name(autojump_clock: Any) -> None:
    async with open_several(A, B) as several:
        text = (await several.get("/metrics")).body.decode()
        for name, seats in (("big", 4), ("small", 16)):
            assert f'kvstream_seats{{backend="{name}",state="total"}} {seats}.0' in text
            assert f'kvstream_backend_state{{backend="{name}",state="up"}} 1.0' in text
            assert f'kvstream_queue_length{{backend="{name}"}} 0.0' in text
        assert text.count("# TYPE kvstream_seats ") == 1


@pytest.mark.usefixtures("patient")
async def test_health_names_those_that_are_not_up() -> None:
    async with open_rigs(A, B, upstream={"keepalive_expiry_s": 0.01}) as rig:
        url = rig.gateway.url
        assert await trio.to_thread.run_sync(statusview.health_line, url) == f"{url} is alive and ready."
        await rig.fakes[1].pause()
        await rig.until(lambda: not rig.gateway.router.lanes[1].engine.ready)
        line = await trio.to_thread.run_sync(statusview.health_line, url)
        assert line == f"{url} is alive and ready; not up: small (down)."
        assert json.loads((await rig.get("/ready"))[1])["lanes"] == {"big": "up", "small": "down"}
