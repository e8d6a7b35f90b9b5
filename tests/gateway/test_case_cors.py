"""Case 76: web pages, by an allow-list of their origins."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.fakes import Script
from tests.gateway.conftest import CHAT, chat, error_of, open_lane, open_rig

GOOD, EVIL = "https://chat.example", "https://evil.example"
KEY = "kvs-0123456789"


def asks(origin: str, *more: tuple[str, str], method: str = "POST") -> list[tuple[str, str]]:
    return [("Origin", origin), ("Access-Control-Request-Method", method), *more]


def acao(call: Any) -> Any:
    return call.headers.get("access-control-allow-origin")


async def test_case_76_a_preflight_needs_no_key(autojump_clock: Any) -> None:
    async with open_lane(server={"cors_origins": (GOOD,)}, auth={"keys": (KEY,)}) as lane:
        wanted = ("Authorization, X-API-Key,anthropic-version, content-type, X-KVStream-Priority, x-stainless-os, "
                  "x-evil, cookie, x-kvstream-(evil), x-kvstream-")
        call = await lane.request("OPTIONS", CHAT, headers=asks(GOOD, ("Access-Control-Request-Headers", wanted)))
        assert (call.status, call.body, acao(call)) == (204, b"", GOOD)
        assert call.headers["access-control-allow-headers"] == (
            "authorization, x-api-key, anthropic-version, content-type, x-kvstream-priority, x-stainless-os")
        assert "POST" in call.headers["access-control-allow-methods"]
        assert int(call.headers["access-control-max-age"]) > 0
        assert "Origin" in call.headers["vary"]
        assert "access-control-allow-private-network" not in call.headers
        assert "access-control-allow-credentials" not in call.headers


async def test_case_76_a_private_network_is_allowed_when_asked_for(autojump_clock: Any) -> None:
    private = ("Access-Control-Request-Private-Network", "true")
    async with open_lane(server={"cors_origins": (GOOD,)}) as lane:
        call = await lane.request("OPTIONS", CHAT, headers=asks(GOOD, private))
        assert (call.status, call.headers["access-control-allow-private-network"]) == (204, "true")
        call = await lane.request("OPTIONS", CHAT, headers=asks(EVIL, private))
        assert "access-control-allow-private-network" not in call.headers


@pytest.mark.parametrize("origin", [
    EVIL, "https://chat.example.evil.example", "https://chat.exampleevil", "http://chat.example", "null", "",
    "https://chat.example:8443", "https://CHAT.example", f"{GOOD}, {EVIL}", f"{GOOD}/", "*"])
async def test_case_76_a_foreign_origin_is_told_nothing(autojump_clock: Any, origin: str) -> None:
    async with open_lane(server={"cors_origins": (GOOD,)}) as lane:
        for call in (await lane.request("OPTIONS", CHAT, headers=asks(origin)),
                     await lane.post(chat(), headers=[("Origin", origin)])):
            assert acao(call) is None and call.headers["vary"] == "Origin"
            assert not any(name.startswith("access-control-") for name in call.headers)


async def test_case_76_two_origins_are_none(autojump_clock: Any) -> None:
    async with open_lane(server={"cors_origins": (GOOD,)}) as lane:
        assert acao(await lane.post(chat(), headers=[("Origin", GOOD), ("Origin", EVIL)])) is None


async def test_case_76_answers_errors_and_streams_carry_it(autojump_clock: Any) -> None:
    origin = [("Origin", GOOD)]
    key = [("x-api-key", KEY)]
    auth = {"keys": (KEY,)}
    async with open_lane(server={"cors_origins": (GOOD,)}, auth=auth, scheduler={"max_queue": 0, "max_batch_size": 1},
                         knobs={"answer_tokens": 200}) as lane:
        seen = {}
        running = lane.start(chat(), headers=origin + key)
        while not running.status:
            await trio.sleep(0.05)
        for status, call in (
                (200, running), (401, await lane.post(chat(), headers=origin)),
                (429, await lane.post(chat("b"), headers=origin + key)),
                (400, await lane.post(b"{", headers=origin + key)),
                (404, await lane.request("GET", "/nope", headers=origin + key)),
                (405, await lane.request("GET", CHAT, headers=origin + key)),
                (403, await lane.request("GET", "/health", headers=[*origin, ("Host", "evil.example")])),
                (200, await lane.request("GET", "/health", headers=origin))):
            seen[call.status] = call
            assert (call.status, acao(call)) == (status, GOOD)
            assert "retry-after" in call.headers["access-control-expose-headers"]
        assert {200, 400, 401, 403, 404, 405, 429} <= set(seen)
        await running.ended.wait()
        lane.runtime.script(Script(status=500, script=[(0, b'{"error": {"message": "boom"}}')]))
        call = await lane.post(chat("c"), headers=origin + key)
        assert (call.status >= 500, acao(call)) == (True, GOOD)


async def test_case_76_without_origins_nothing_changes(autojump_clock: Any) -> None:
    async with open_lane() as lane:
        call = await lane.request("OPTIONS", CHAT, headers=asks(GOOD))
        assert call.status == 405 and error_of(call.body)
        assert not any(name.startswith("access-control-") or name == "vary" for name in call.headers)


async def test_case_76_any_origin_when_it_says_so(autojump_clock: Any) -> None:
    async with open_lane(server={"cors_origins": ("*",)}) as lane:
        assert acao(await lane.request("OPTIONS", CHAT, headers=asks(EVIL))) == "*"
        assert acao(await lane.post(chat(), headers=[("Origin", EVIL)])) == "*"


async def test_case_76_options_without_a_preflight_needs_a_key(autojump_clock: Any) -> None:
    async with open_lane(server={"cors_origins": (GOOD,)}, auth={"keys": (KEY,)}) as lane:
        call = await lane.request("OPTIONS", CHAT, headers=[("Origin", GOOD)])
        assert (call.status, acao(call)) == (401, GOOD)


async def test_case_76_over_the_wire() -> None:
    async with open_rig(server={"cors_origins": (GOOD,)}) as rig:
        answer = await rig.post(chat(), headers=[("ORIGIN", GOOD)])
        assert answer.headers["access-control-allow-origin"] == GOOD
        assert (await answer.read_events())[-1] == b"data: [DONE]"
        await answer.close()
        assert not any("origin" in entry.request.headers for entry in rig.runtime.journal.entries)


@pytest.mark.parametrize(("origin", "kind", "status"), [
    (EVIL, "text/plain", 403), (EVIL, "text/plain;charset=UTF-8", 403), (EVIL, None, 403), (EVIL, "", 403),
    (EVIL, "application/x-www-form-urlencoded", 403), (EVIL, "Multipart/Form-Data; boundary=x", 403),
    ("null", None, 403),
    (EVIL, "application/json", 200),  # a browser asks first, and is refused
    (GOOD, "text/plain", 200), ("http://localhost", "text/plain", 200), (None, "text/plain", 200), (None, None, 200)])
async def test_case_76_a_forged_form_makes_nobody_work(
        autojump_clock: Any, origin: str | None, kind: str | None, status: int) -> None:
    async with open_lane(server={"cors_origins": (GOOD,)}) as lane:
        headers = [(name, value) for name, value in (("Origin", origin), ("Content-Type", kind)) if value is not None]
        call = await lane.post(chat(), headers=headers)
        assert call.status == status
        assert len(lane.runtime.journal.calls) == (status == 200)


async def test_case_76_every_header_of_ours_can_be_read(autojump_clock: Any) -> None:
    settings = {"server": {"cors_origins": (GOOD,)}, "response_cache": {"enabled": True}}
    async with open_lane(**settings) as lane:
        for body in (chat(temperature=0), chat(temperature=0), chat(), chat(stream=False)):
            call = await lane.post(body, headers=[("Origin", GOOD)])
            exposed = call.headers["access-control-expose-headers"].split(", ")
            ours = {name for name in call.headers if name.startswith("x-") and name != "x-accel-buffering"}
            assert ours <= set(exposed)
