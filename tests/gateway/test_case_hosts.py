"""Cases 71 and 75: proxies of the environment, and Host headers of other sites."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.client import encode_request, send_raw, send_request
from tests.gateway.conftest import CHAT, chat, error_of, open_rig

DEAD = "http://127.0.0.1:9"


@pytest.mark.parametrize("proxy", [DEAD, "socks5h://127.0.0.1:9", "socks5://127.0.0.1:9", "not a url"])
async def test_case_71_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy)
        monkeypatch.setenv(name.lower(), proxy)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with open_rig() as rig:
        response = await rig.post(chat())
        assert response.status == 200
        await response.read_all()
        await response.close()
        assert (await rig.get("/v1/models"))[0] == 200


@pytest.mark.usefixtures("patient")
async def test_case_71_the_command_line_client_ignores_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    import trio

    from kvstream.gateway import statusview

    for name in ("HTTP_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(name, DEAD)
    async with open_rig() as rig:
        line = await trio.to_thread.run_sync(statusview.health_line, rig.gateway.url)
        assert "ready" in line


# --- 75 ---------------------------------------------------------------------------------------------------------------

BAD = ["evil.example", "localhost.evil.com", "127.0.0.1.evil.com", "evil.example:8080", "", "127.0.0.1@evil.example",
       "[::1].evil.com", "localhost..", "localhost:8080.evil.com", "0.0.0.0", "evil.example:localhost"]  # fmt: skip
GOOD = ["localhost", "localhost.", "LOCALHOST", "127.0.0.1", "127.0.0.1:8080", "localhost:1", "[::1]", "[::1]:8080",
        "my.name", "MY.name:80"]  # fmt: skip
ROUTES: list[tuple[str, str, Any]] = [
    ("POST", CHAT, chat()), ("GET", "/health", b""), ("GET", "/v1/models", b""), ("GET", "/status", b""),
    ("GET", "/metrics", b""), ("GET", "/nowhere", b"")]  # fmt: skip


async def status_of(port: int, route: tuple[str, str, Any], host: str | None) -> tuple[int, bytes]:
    method, path, body = route
    response = await send_raw(port, encode_request(method, path, body, [("Connection", "close")], host=host))
    try:
        return response.status, await response.read_all()
    finally:
        await response.close()


async def test_case_75_other_hosts_are_turned_away() -> None:
    async with open_rig() as rig:
        await rig.until(lambda: rig.runtime.journal.paths("/v1/models"))  # the gateway's own look
        for host in BAD:
            for route in ROUTES:
                status, body = await status_of(rig.port, route, host)
                assert status in (400, 403), (host, route)
                assert error_of(body)["code"] == "host_not_allowed"
        assert rig.runtime.journal.calls == []
        assert len(rig.runtime.journal.paths("/v1/models")) == 1


async def test_case_75_loopback_and_configured_names_pass() -> None:
    async with open_rig(server={"allowed_hosts": ("my.name",)}) as rig:
        for host in GOOD:
            for route in ROUTES[:3]:
                assert (await status_of(rig.port, route, host))[0] == 200, (host, route)


async def test_case_75_two_host_headers() -> None:
    async with open_rig() as rig:
        for pair in (("localhost", "evil.example"), ("evil.example", "localhost"), ("localhost", "localhost")):
            raw = b"GET /health HTTP/1.1\r\nHost: %s\r\nHost: %s\r\n\r\n" % tuple(p.encode() for p in pair)
            response = await send_raw(rig.port, raw)
            assert response.status in (400, 403)
            await response.close()


async def test_case_75_no_host_header_at_all() -> None:
    async with open_rig() as rig:
        for raw in (b"GET /health HTTP/1.1\r\n\r\n", b"GET /health HTTP/1.0\r\n\r\n"):
            response = await send_raw(rig.port, raw)
            assert response.status in (400, 403)
            await response.close()


async def test_case_75_the_absolute_form_does_not_help() -> None:
    async with open_rig() as rig:
        raw = b"GET http://evil.example/health HTTP/1.1\r\nHost: evil.example\r\n\r\n"
        response = await send_raw(rig.port, raw)
        assert response.status in (400, 403)
        await response.close()


async def test_case_75_upstream_sees_its_own_authority_and_nothing_of_the_browser() -> None:
    secret = [("Origin", "http://evil.example"), ("Referer", "http://evil.example/x"), ("Cookie", "session=1"),
              ("X-Conversation-Id", "abc"), ("X-Forwarded-Host", "evil.example"), ("TE", "trailers"),
              ("Proxy-Authorization", "Basic eA=="), ("Accept-Encoding", "gzip")]  # fmt: skip
    async with open_rig() as rig:
        response = await send_request(rig.port, "POST", CHAT, chat(), secret, host="localhost:8080")
        await response.read_head()
        await response.read_all()
        assert response.status == 200
        assert not {"set-cookie", "access-control-allow-origin"} & set(response.headers)
        await response.close()
        for entry in rig.runtime.journal.entries:
            headers = entry.request.headers
            hosts = [value for name, value in entry.request.header_list if name.lower() == "host"]
            assert hosts == [f"127.0.0.1:{rig.fake.port}"]
            assert not {"origin", "referer", "cookie", "x-conversation-id", "x-forwarded-host", "te",
                        "proxy-authorization", "transfer-encoding"} & set(headers)
            assert headers["accept-encoding"] == "identity"
            assert "localhost:8080" not in str(entry.request.header_list)
