"""Case 89: keys, however they are shown; what they open, what they limit, and what never leaves."""

from __future__ import annotations

import base64
import hmac
import logging
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from kvstream.config_auth import ClientKey
from kvstream.core.types import Priority
from kvstream.errors import KVStreamError
from kvstream.gateway import keys as keys_module
from kvstream.gateway import statusview
from kvstream.gateway.access import AccessSettings, Identity, identified, presented
from kvstream.gateway.keys import Keys, digest_of
from kvstream.gateway.request import parse_request
from tests.gateway.conftest import CHAT, HANG_S, chat, error_of, metric, open_lane, open_rig

ALICE, BOB = "kvs-alice-0123456789", "kvs-bob-0123456789"


def keys_file(folder: Path, text: str = "") -> str:
    path = folder / "keys.toml"
    path.write_text(text or f"""
[[key]]
name = "alice"
key = "{ALICE}"
priority = "high"
share = 3

[[key]]
name = "bob"
sha256 = "{digest_of(BOB.encode()).hex()}"
priority = "low"
rate = 6
""", "utf-8")
    path.chmod(0o600)
    return str(path)


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


# --- how a key is shown -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("headers", "status"), [
    ([], 401),
    ([("Authorization", f"Bearer {ALICE}")], 200),
    ([("AUTHORIZATION", f"bearer   {ALICE} ")], 200),
    ([("authorization", f"BEARER {BOB}")], 200),
    ([("X-Api-Key", ALICE)], 200),
    ([("Authorization", basic(f"anybody:{ALICE}"))], 200),
    ([("Authorization", basic(f":{ALICE}").replace("Basic", "bASIC"))], 200),
    ([("Authorization", basic(f"{ALICE}:"))], 401),  # the key is the password
    ([("Authorization", basic(ALICE))], 401),
    ([("Authorization", "Basic !!!")], 401),
    ([("Authorization", "Basic " + base64.b64encode(b"a:\xff\xfe").decode())], 401),
    ([("Authorization", "Bearer")], 401),
    ([("Authorization", "Bearer ")], 401),
    ([("Authorization", "")], 401),
    ([("X-Api-Key", "")], 401),
    ([("X-Api-Key", "   ")], 401),
    ([("Authorization", ALICE)], 401),
    ([("Authorization", f"Digest {ALICE}")], 401),
    ([("Authorization", f"Bearer {ALICE}x")], 401),
    ([("Authorization", f"Bearer {ALICE[:-1]}")], 401),
    ([("Authorization", f"Bearer {ALICE.upper()}")], 401),
    ([("Authorization", f"Bearer {ALICE} {BOB}")], 401),
    ([("Authorization", f"Bearer {ALICE}é")], 401),
    ([("Authorization", "Bearer " + "x" * 40_000)], 401),
    ([("Authorization", f"Bearer {ALICE}"), ("Authorization", "Bearer wrong")], 401),
    ([("Authorization", "Bearer wrong"), ("Authorization", f"Bearer {ALICE}")], 401),
    ([("X-Api-Key", ALICE), ("x-api-key", ALICE)], 401),
    ([("Authorization", f"Bearer {ALICE}"), ("X-Api-Key", ALICE)], 200),
    ([("Authorization", "Bearer placeholder"), ("X-Api-Key", ALICE)], 200),  # SDKs send both, one of them made up
    ([("Authorization", f"Bearer {ALICE}"), ("X-Api-Key", BOB)], 401),  # whose request is it?
    ([("Cookie", f"key={ALICE}")], 401),
])
async def test_case_89_how_a_key_is_shown(
        autojump_clock: Any, tmp_path: Path, headers: list[tuple[str, str]], status: int) -> None:
    async with open_lane(auth={"keys_file": keys_file(tmp_path)}) as lane:
        call = await lane.post(chat(), headers=headers)
        assert call.status == status
        if status == 401:
            assert call.headers["www-authenticate"] == 'Bearer realm="kvstream"'
            error = error_of(call.body)
            assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
            assert ALICE not in call.body.decode() and lane.runtime.journal.calls == []


async def test_case_89_over_the_wire(tmp_path: Path) -> None:
    """The same through sockets and the real configuration; the header's name in any case, a body that nobody reads."""
    async with open_rig(auth={"keys_file": keys_file(tmp_path)}) as rig:
        refused = await rig.post(b"x" * 2_000_000, headers=[("authorization", "Bearer nonsense")])
        with trio.fail_after(HANG_S):
            assert refused.status == 401 and error_of(await refused.read_all())
        await refused.close()
        answer = await rig.post(chat(), headers=[("AuThOrIzAtIoN", f"Bearer {ALICE}")])
        assert answer.status == 200 and (await answer.read_events())[-1] == b"data: [DONE]"
        await answer.close()
        for path, status in (("/health", 200), ("/ready", 200), ("/status", 200), ("/v1/models", 401), ("/nope", 401)):
            assert (await rig.get(path))[0] == status, path


# --- what is open -----------------------------------------------------------------------------------------------------

PAGES = ("/metrics", "/status")


@pytest.mark.parametrize(("host", "keys", "more", "open_pages", "open_models"), [
    ("127.0.0.1", (), {}, 200, 200),
    ("127.0.0.1", (ALICE,), {}, 200, 401),
    ("::1", (ALICE,), {}, 200, 401),
    ("0.0.0.0", (), {}, 403, 200),
    ("::", (), {}, 403, 200),
    ("10.0.0.7", (), {}, 403, 200),
    ("kv.example", (), {}, 403, 200),
    ("0.0.0.0", (ALICE,), {}, 401, 401),
    ("0.0.0.0", (), {"metrics_token": "scrape"}, 401, 200),
])
async def test_case_89_what_is_open(autojump_clock: Any, host: str, keys: tuple[str, ...], more: dict[str, str],
                                    open_pages: int, open_models: int) -> None:
    async with open_lane(server={"host": host}, auth={"keys": keys, **more}) as lane:
        for path in ("/health", "/ready"):
            assert (await lane.get(path)).status == 200
        for path in PAGES:
            assert (await lane.get(path)).status == open_pages
        assert (await lane.get("/v1/models")).status == open_models
        for path in ("/metrics/", "/status/x", "/nope"):
            assert (await lane.get(path)).status in (401, 403, 404)
        secret = more.get("metrics_token") or (keys[0] if keys else "")
        if secret:
            for value in (f"Bearer {secret}", basic(f"prometheus:{secret}")):
                assert (await lane.request("GET", "/metrics", headers=[("authorization", value)])).status == 200
        if open_pages == 403:
            message = error_of((await lane.get("/metrics")).body)["message"]
            assert "auth.metrics_token" in message and "server.public_metrics" in message


async def test_case_89_a_proxy_on_this_machine_is_not_this_machine(autojump_clock: Any) -> None:
    async with open_lane(auth={"keys": (ALICE,)}) as lane:
        for header in ("X-Forwarded-For", "Forwarded", "Via", "X-Real-IP"):
            call = await lane.request("GET", "/status", headers=[(header, "203.0.113.9")])
            assert call.status == 401
            assert "Basic" in call.headers["www-authenticate"]  # a person may look with a browser


async def test_case_89_the_token_for_metrics_opens_nothing_else(autojump_clock: Any) -> None:
    auth = {"keys": (ALICE,), "metrics_token": "scrape"}
    async with open_lane(server={"host": "0.0.0.0"}, auth=auth) as lane:
        token = [("authorization", "Bearer scrape")]
        assert (await lane.request("GET", "/metrics", headers=token)).status == 200
        assert (await lane.request("GET", "/v1/models", headers=token)).status == 401
        assert (await lane.post(chat(), headers=token)).status == 401


# --- constant time, and a flood ---------------------------------------------------------------------------------------


def test_case_89_every_key_is_compared_whatever_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the clock: the number of comparisons, their length, and who compares."""
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return real(a, b)

    monkeypatch.setattr(keys_module.hmac, "compare_digest", compare)
    keys = Keys([ClientKey(f"k{i}", digest_of(f"secret-{i}".encode())) for i in range(20)])
    for secret in (b"secret-0", b"secret-19", b"secret-", b"", b"x" * 500, b"\xff\xfe"):
        compared.clear()
        keys.find([secret])
        assert compared == [(32, 32)] * 20


async def test_case_89_a_flood_of_wrong_keys_is_cheap(
        autojump_clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    """No body is parsed, nothing queues, nothing is learnt by the runtime, and the log does not grow with it."""
    async with open_lane(auth={"keys": (ALICE,)}) as lane:
        asked = len(lane.runtime.journal.entries)
        for i in range(500):
            assert (await lane.post(b"{not json", headers=[("authorization", f"Bearer guess-{i}")])).status == 401
        assert metric(lane.metrics, "kvstream_requests_total", route=CHAT, outcome="client_error") == 500
        assert len(lane.runtime.journal.entries) - asked < 5 and lane.idle()
        lines = [r for r in caplog.records if r.name == "kvstream.access"]
        assert len(lines) == 1 and lines[0].levelno == logging.WARNING
        await trio.sleep(11)
        await lane.post(chat(), headers=[("authorization", "Bearer guess")])
        assert caplog.records[-1].getMessage() == "turned away: 500 requests without a valid key"
        assert "guess" not in caplog.text and ALICE not in caplog.text


# --- who a client is --------------------------------------------------------------------------------------------------


def incoming(entry: ClientKey, *headers: tuple[bytes, bytes]) -> Any:
    scope = {"headers": list(headers), "kvstream.identity": Identity(entry)}
    return identified(parse_request(CHAT, headers, b'{"messages": [{"role": "user"}]}'), scope)


@pytest.mark.parametrize(("allowed", "asked", "given"), [
    ("high", None, Priority.HIGH), ("high", b"low", Priority.LOW), ("high", b"high", Priority.HIGH),
    ("normal", None, Priority.NORMAL), ("normal", b"high", Priority.NORMAL), ("normal", b"low", Priority.LOW),
    ("low", None, Priority.LOW), ("low", b"high", Priority.LOW), ("low", b"normal", Priority.LOW),
])
def test_case_89_priority_is_capped_by_the_key(allowed: str, asked: bytes | None, given: Priority) -> None:
    entry = ClientKey("alice", digest_of(b"x"), allowed, share=2.5)
    headers = [(b"x-kvstream-priority", asked)] if asked else []
    found = incoming(entry, *headers)
    assert (found.client, found.priority, found.weight) == ("alice", given, 2.5)


async def test_case_89_the_scheduler_sees_name_share_and_class(autojump_clock: Any, tmp_path: Path) -> None:
    async with open_lane(auth={"keys_file": keys_file(tmp_path)}, knobs={"answer_tokens": 400}) as lane:
        call = lane.start(chat(), headers=[("x-api-key", ALICE), ("X-KVStream-Priority", "normal")])
        await trio.sleep(0.5)
        (stream,) = lane.engine.streams.values()
        assert (stream.client, stream.priority) == ("alice", Priority.NORMAL)
        call.leave()


async def test_case_89_no_key_of_a_client_ever_reaches_the_runtime(autojump_clock: Any, tmp_path: Path) -> None:
    for backend in ({}, {"api_key": "backend-key"}):
        async with open_lane(auth={"keys_file": keys_file(tmp_path)}, backend=backend,
                             knobs={"api_key": backend.get("api_key", "")}) as lane:
            for headers in ([("authorization", f"Bearer {ALICE}")], [("x-api-key", BOB)],
                            [("authorization", basic(f"me:{ALICE}")), ("x-api-key", ALICE),
                             ("proxy-authorization", f"Bearer {ALICE}")]):
                assert (await lane.post(chat(), headers=headers)).status == 200
            for entry in lane.runtime.journal.entries:
                text = repr(entry.request.headers) + entry.request.body.decode()
                assert ALICE not in text and BOB not in text
                assert "x-api-key" not in entry.request.headers
                if not backend:
                    assert "authorization" not in entry.request.headers


# --- rates ------------------------------------------------------------------------------------------------------------


async def test_case_89_above_its_rate_a_key_gets_429_and_a_true_retry_after(
        autojump_clock: Any, tmp_path: Path) -> None:
    async with open_lane(auth={"keys_file": keys_file(tmp_path)}) as lane:
        bob, alice = [("x-api-key", BOB)], [("x-api-key", ALICE)]
        statuses = [(await lane.post(chat(stream=False), headers=bob)).status for _ in range(6)]
        assert statuses == [200] * 6
        refused = await lane.post(chat(stream=False), headers=bob)
        assert refused.status == 429
        assert error_of(refused.body)["code"] == "rate_limit_exceeded"
        wait = int(refused.headers["retry-after"])
        assert 1 <= wait <= 10
        assert (await lane.post(chat(), headers=alice)).status == 200
        assert (await lane.request("GET", "/v1/models", headers=bob)).status == 200  # only model calls count
        await trio.sleep(wait - 2)
        assert (await lane.post(chat(), headers=bob)).status == 429  # it did not ask for more than is needed
        await trio.sleep(2)
        assert (await lane.post(chat(), headers=bob)).status == 200
        assert (await lane.post(chat(), headers=bob)).status == 429
        assert metric(lane.metrics, "kvstream_refused_total", reason="rate_limit_exceeded") == 3


@pytest.mark.parametrize("rate", [0.5, 1.0, 7.0, 600.0])
def test_case_89_the_promised_second_is_the_right_one(rate: float) -> None:
    entry = ClientKey("k", digest_of(b"k"), rate=rate)
    keys = Keys([entry])
    now = 1000.0
    taken = 0
    while keys.try_spend(entry, now) is None:
        taken += 1
    assert taken == max(1, int(rate))
    wait = keys.try_spend(entry, now)
    assert wait is not None and wait == pytest.approx(60 / rate)
    assert keys.try_spend(entry, now + wait * 0.99) is not None
    assert keys.try_spend(entry, now + wait * 1.001) is None


def test_case_89_no_rate_is_no_limit() -> None:
    entry = ClientKey("k", digest_of(b"k"))
    assert all(Keys([entry]).try_spend(entry, 0.0) is None for _ in range(10_000))


# --- other keys while it runs -----------------------------------------------------------------------------------------


async def test_case_89_keys_change_without_a_restart(autojump_clock: Any) -> None:
    async with open_lane(auth={"keys": (ALICE,)}, knobs={"answer_tokens": 100}) as lane:
        running = lane.start(chat(), headers=[("x-api-key", ALICE)])
        await trio.sleep(0.3)
        lane.app.access.replace(AccessSettings(keys=(ClientKey("bob", digest_of(BOB.encode())),)))
        assert (await lane.post(chat(), headers=[("x-api-key", ALICE)])).status == 401
        assert (await lane.post(chat(), headers=[("x-api-key", BOB)])).status == 200
        await running.ended.wait()
        assert running.body.endswith(b"data: [DONE]\n\n")


def test_case_89_a_reload_gives_nobody_a_fresh_minute() -> None:
    entry = ClientKey("k", digest_of(b"k"), rate=1)
    keys = Keys([entry])
    assert keys.try_spend(entry, 0.0) is None
    keys.replace([attrs.evolve(entry)])
    assert keys.try_spend(entry, 1.0) is not None
    keys.replace([attrs.evolve(entry, rate=2)])
    assert keys.try_spend(attrs.evolve(entry, rate=2), 1.0) is None


def test_case_89_nothing_prints_a_key() -> None:
    settings = AccessSettings(keys=(ClientKey("k", digest_of(ALICE.encode())),), metrics_token="t0ken")
    shown = repr(settings) + repr(Identity(settings.keys[0]))
    assert "t0ken" not in shown and repr(settings.keys[0].digest) not in shown


def test_case_89_unreadable_bytes_are_no_key() -> None:
    assert presented([(b"authorization", b"Bearer \xff\x00"), (b"x-api-key", "schlüssel".encode())]) == [
        b"\xff\x00", "schlüssel".encode()]


@pytest.mark.usefixtures("patient")
async def test_case_89_the_command_line_shows_its_key() -> None:
    async with open_rig(server={"host": "0.0.0.0"}, auth={"keys": (ALICE,), "metrics_token": "scrape"}) as rig:
        url = f"http://127.0.0.1:{rig.port}"
        for key, good in (("", False), ("wrong", False), ("scrape", True), (ALICE, True)):
            with statusview.open_client(url, key) as client:
                if good:
                    assert (await trio.to_thread.run_sync(statusview.fetch, client))["version"]
                else:
                    with pytest.raises(KVStreamError, match="KVSTREAM_KEY"):
                        await trio.to_thread.run_sync(statusview.fetch, client)


# --- two keys, one floods ---------------------------------------------------------------------------------------------


async def test_case_89_one_key_that_floods_makes_another_wait_for_one_service_time(autojump_clock: Any) -> None:
    """Whatever else it sends: without keys, a client that calls itself by sixty names would have sixty shares."""
    async with open_lane(auth={"keys": (ALICE, BOB)}, scheduler={"max_batch_size": 2},
                         knobs={"slots": 2, "answer_tokens": 100}) as lane:
        flood = [lane.start(chat(f"text {i}"), headers=[("x-api-key", ALICE), ("user-agent", f"agent {i}")])
                 for i in range(60)]
        await trio.sleep(3)
        began = trio.current_time()
        other = await lane.post(chat("mine"), headers=[("x-api-key", BOB)])
        assert other.status == 200
        assert trio.current_time() - began < 3  # a service takes about one second: one to wait for, one of its own
        assert sum(call.ended.is_set() for call in flood) < 20
        for call in flood:
            call.leave()


async def test_case_89_a_bigger_share_is_served_more_often(autojump_clock: Any, tmp_path: Path) -> None:
    async with open_lane(auth={"keys_file": keys_file(tmp_path, f"""
[[key]]
name = "big"
key = "{ALICE}"
share = 3

[[key]]
name = "small"
key = "{BOB}"
""")}, scheduler={"max_batch_size": 1}, knobs={"slots": 1, "answer_tokens": 50}) as lane:
        calls = {key: [lane.start(chat(f"{key} {i}"), headers=[("x-api-key", key)]) for i in range(40)]
                 for key in (ALICE, BOB)}
        await trio.sleep(15)
        big, small = (sum(call.ended.is_set() for call in calls[key]) for key in (ALICE, BOB))
        assert big + small > 15 and 2 <= big / small <= 4.5
        for call in (*calls[ALICE], *calls[BOB]):
            call.leave()
