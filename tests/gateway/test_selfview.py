"""What doctor makes of a KVStream's snapshot, of this version or another."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvstream.adapters.advice import Advice
from kvstream.adapters.base import HttpReply
from kvstream.gateway import statusview
from kvstream.gateway.selfview import advise_kvstream, backend_urls, lanes_of

FINDING = {"text": "prefix diverges at byte 3 of message 0: `…a[b|c]…`", "requests": 4, "tokens_lost": 700,
           "remedy": 'set prefix.normalize = ["times"]', "model": "m"}


def lane(state: str = "up", url: str = "http://127.0.0.1:1", **more: Any) -> dict[str, Any]:
    backend = {"kind": "llamacpp", "url": url, "state": state, "detail": "gone"}
    return {"name": "a", "state": state, "backend": backend} | more


def advice(*lanes: dict[str, Any], ready: bool = True, version: str = "1", status: int = 200) -> list[Advice]:
    snapshot = {"version": version} | lanes[0] | {"lanes": list(lanes)}
    return list(advise_kvstream(HttpReply(status, {}, json.dumps(snapshot).encode()), version, "1", ready=ready))


def the(severity: str, found: list[Advice]) -> str:
    (one,) = [one for one in found if one.severity == severity]
    return f"{one.text} {one.remedy}"


def test_a_healthy_one_has_nothing_to_be_told() -> None:
    assert [one.severity for one in advice(lane(), lane("sleeping"))] == ["ok", "ok"]


def test_each_backend_has_its_finding() -> None:
    found = advice(lane(), lane("down", "http://127.0.0.1:2"))
    assert "127.0.0.1:2) is down (gone)" in the("problem", found) and "127.0.0.1:1" in the("ok", found)
    assert backend_urls({"lanes": [lane(), lane(url="http://h:2"), lane(url="file:///x"), {}]}) == [
        "http://127.0.0.1:1", "http://h:2"]


@pytest.mark.parametrize(("state", "severity", "words"), [
    ("loading", "note", "is loading"), ("wedged", "problem", "is wedged"),
    ("breaker_open", "problem", "failed too often (500)"), ("half_open", "problem", "tried again")])
def test_states(state: str, severity: str, words: str) -> None:
    assert words in the(severity, advice(lane(state, breaker={"why": "500"}), ready=False))


def test_alive_but_not_ready() -> None:
    assert "not ready" in the("problem", advice(lane(), ready=False))


def test_what_it_noted_is_passed_on() -> None:
    found = advice(lane(capacity={"notes": ["set seats"]}, prefix_hygiene={"findings": [FINDING]}))
    assert the("note", found).startswith("Capacity: set seats.")
    named = advice(lane(name="big", capacity={"notes": ["set seats"]}), lane(name="small"))
    assert the("note", named).startswith("Capacity of big: set seats.")
    assert "a[b|c]" in the("warning", found) and "seen 4 times" in the("warning", found)
    assert "prefix.normalize" in the("warning", found)
    turns = advice(lane(options_alternate=[{"warning": "options alternate for q: a and b; let them agree"}]))
    assert the("warning", turns) == "Ollama: options alternate for q: a and b. let them agree"


def test_another_version_and_a_guarded_page() -> None:
    assert "version 2" in the("note", advice(lane(), version="2"))
    assert "guarded" in the("note", advice(lane(), status=401))


def test_status_names_what_keeps_prefixes_apart() -> None:
    console = Console(file=io.StringIO(), width=200)
    console.print(statusview.render(lane(prefix_hygiene={"findings": [FINDING]})))
    assert "prefix diverges at byte 3" in console.file.getvalue()  # type: ignore[attr-defined]


NAMES = st.sampled_from(["lanes", "backend", "state", "capacity", "notes", "prefix_hygiene", "findings", "url",
                         "breaker", "options_alternate"])
VALUES = st.recursive(st.none() | st.integers() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3)
                      | st.dictionaries(NAMES, inner, max_size=4), max_leaves=12)


@given(VALUES)
def test_any_snapshot_can_be_read(value: Any) -> None:
    list(advise_kvstream(HttpReply(200, {}, json.dumps(value).encode()), "1", "1", ready=False))
    if isinstance(value, dict):
        lanes_of(value)
        backend_urls(value)
