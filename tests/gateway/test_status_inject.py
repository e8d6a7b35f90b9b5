"""What an operator sees of hard inject: /status, ``kvstream status`` and ``kvstream doctor``."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvstream.adapters.advice import Advice
from kvstream.adapters.base import HttpReply
from kvstream.core.scheduler import Scheduler
from kvstream.core.snapshot import RunningView, SlotView, StoreView
from kvstream.core.types import RequestId
from kvstream.gateway import statusview
from kvstream.gateway.metrics import Metrics
from kvstream.gateway.selfview import advise_kvstream
from kvstream.gateway.settings import engine_settings
from kvstream.gateway.status_inject import inject_json, preemption_json
from tests.gateway.conftest import config_of

TOLD = {"mode": "hard-unpinned", "why": "it empties idle slots", "missing": ["-np 4 -c 8192", "--cache-ram 0"],
        "notes": ["its prompt cache in RAM is on"], "ram_cache": True, "identity": "00ff", "restore_ineffective": False,
        "again_s": None}


def block(told: Any = TOLD) -> dict[str, Any]:
    snapshot = evolve(
        Scheduler(engine_settings(config_of()).scheduler).snapshot(0.0),
        slots=(SlotView(0, RequestId(7), 1234, "owned"), SlotView(1, None, 0, "idle")),
        store=StoreView(files=3, bytes=5 * 2**20, bytes_max=2**30, pages=9, tokens=4321, evicted=2))
    return inject_json(told, "inject.mode is off", snapshot, lambda rid: f"req-{rid}")


def shown(inject: Any) -> str:
    out = io.StringIO()
    snapshot = {"version": "1", "state": "up", "backend": {"kind": "llamacpp"}, "inject": inject}
    Console(file=out, width=200).print(statusview.render(snapshot))
    return out.getvalue()


def advice(inject: Any) -> list[Advice]:
    lane = {"name": "a", "state": "up", "backend": {"kind": "llamacpp", "url": "http://h:1"}, "inject": inject}
    return [one for one in advise_kvstream(HttpReply(200, {}, json.dumps({"lanes": [lane]}).encode()), "1", "1",
                                           ready=True) if "ard inject" in one.text]


def test_a_lanes_block() -> None:
    found = block()
    assert json.loads(json.dumps(found)) == found
    assert {**TOLD, "slots": found["slots"], "store": found["store"]} == found
    assert found["slots"] == [{"slot": 0, "state": "owned", "tokens": 1234, "request": "req-7",
                               "cached": None},
                              {"slot": 1, "state": "idle", "tokens": 0, "request": None}]
    assert found["store"]["files"] == 3 and found["store"]["bytes_max"] == 2**30
    off = block(None)
    assert (off["mode"], off["why"], off["missing"]) == ("soft", "inject.mode is off", [])


def test_the_terminal_shows_mode_reason_flags_slots_and_files() -> None:
    text = shown(block())
    for words in ("hard-unpinned: it empties idle slots", "-np 4 -c 8192, --cache-ram 0", "prompt cache in RAM",
                  "0: busy (req-7), 1,234 tokens", "1: idle, 0 tokens", "3 files, 5 of 1,024 MiB, 4,321 tokens"):
        assert words in text, words
    assert "inject" not in shown(None) and "inject" not in shown({})
    assert "again in 12 s" in shown({"mode": "soft", "why": "x", "again_s": 12.3})
    assert "\x1b" not in shown({"mode": "soft", "why": "\x1b[31m", "notes": ["\x1b"], "missing": ["\x1b"]})


def test_a_slot_at_work_is_told_by_who_runs_there_and_what_was_there() -> None:
    snapshot = evolve(
        Scheduler(engine_settings(config_of()).scheduler).snapshot(0.0), slots=(SlotView(0, RequestId(7), 0, "owned"),),
        running=(RunningView(RequestId(7), 512, 32, 432, 1.0, False, ""),))
    told = inject_json(TOLD, "", snapshot, lambda rid: f"req-{rid}")
    assert told["slots"] == [{"slot": 0, "state": "owned", "tokens": 512, "request": "req-7", "cached": 432}]
    assert "0: busy (req-7), 432 of its 512 tokens were there" in shown(told)
    gone = inject_json(TOLD, "", evolve(snapshot, running=()), lambda rid: f"req-{rid}")
    assert "0: busy (req-7)\n" in shown(gone) and "0 tokens" not in shown(gone)


def test_what_saved_kv_achieves() -> None:
    metrics = Metrics()
    meter = metrics.inject.lane("a")
    metrics.inject.lane("b").admitted("cold")
    for how in ("reused", "reused", "forked"):
        meter.admitted(how)  # type: ignore[arg-type]
    meter.saved("fork", ok=True, bytes=5)
    meter.saved("evict", ok=False)
    meter.restored(ok=True)
    meter.cache_seen("restored", promised=100, found=90)
    meter.cache_seen("reused", promised=1000, found=1001)
    meter.preempted("swap")
    told = {**meter.totals(), "swapped_out": 1}
    assert told["admissions"] == {"reused": 2, "restored": 0, "forked": 1, "cold": 0, "unpinned": 0}
    assert (told["saves"].get("fork"), told["saves_failed"], told["restores"]) == (1, 1, {"ok": 1, "failed": 0})
    assert (told["tokens_promised"], told["tokens_kept"], told["preemptions"]["swap"]) == (1100, 1090, 1)
    text = shown({**block(), "totals": told})
    assert "prompts   2 reused, 1 forked; 1,090 of 1,100 promised tokens kept\n" in text
    assert ("moved     saves: 1 fork; 1 failed; 1 restored; gave way: 1 swap, of which 0 went on, "
            "1 swapped out now\n") in text


def test_long_lines_go_on_below_themselves_and_one_file_is_one() -> None:
    slots = [{"slot": n, "state": "idle", "tokens": 4321, "request": None} for n in range(8)]
    out = io.StringIO()
    snapshot = {"version": "1", "inject": {"mode": "hard", "why": "it works", "slots": slots, "store": {
        "files": 1, "replaced": 6, "evicted": 0}}, "counters": {f"counter_{n}": n for n in range(12)},
        "capacity": {"mode": "split", "seats": 4, "notes": ["of this there is so much to be said " * 4]}}
    Console(file=out, width=80).print(statusview.render(snapshot))
    lines = out.getvalue().split("\n")
    assert max(map(len, lines)) <= 80
    for label in ("capacity", "slots", "counters"):
        at = next(n for n, line in enumerate(lines) if line.startswith(label))
        assert lines[at + 1].startswith(" " * 10) and lines[at + 1][10] != " ", label
    assert "1 file, " in out.getvalue() and "6 replaced, 0 evicted" in out.getvalue()


FIELDS = st.sampled_from(
    ["mode", "why", "missing", "notes", "slots", "store", "slot", "state", "tokens", "bytes", "again_s", "totals",
     "saves", "restores", "admissions", "preemptions", "ok", "request", "cached"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=6), max_leaves=12)


@given(ANYTHING)
def test_whatever_another_version_says_is_shown_somehow(inject: Any) -> None:
    shown(inject)
    shown({"mode": "hard", "slots": [inject], "store": inject, "missing": inject, "notes": inject, "again_s": inject})
    advice(inject)


@pytest.mark.parametrize(("told", "severity", "words"), [
    ({"mode": "hard", "why": "it works"}, "ok", "it works"),
    ({"mode": "hard", "why": "it works", "missing": ["--cache-ram 0"]}, "note", "--cache-ram 0"),
    ({"mode": "hard-unpinned", "why": "emptied", "missing": ["-np 4"]}, "note", "-np 4"),
    ({"mode": "soft", "why": "it has none", "missing": ["--slot-save-path DIR"]}, "warning", "--slot-save-path DIR"),
    ({"mode": "soft", "why": "it sleeps"}, "note", "it sleeps"),
    ({"mode": "soft", "why": "no effect", "restore_ineffective": True}, "warning", "is off: no effect"),
])
def test_doctor_tells_what_a_running_kvstream_found_out(told: dict[str, Any], severity: str, words: str) -> None:
    (found,) = advice(told)
    assert found.severity == severity and words in f"{found.text} {found.remedy}"


@pytest.mark.parametrize(("policy", "modes", "active", "how"), [
    ("swap", ["soft", "hard"], True, "swap"), ("swap", ["hard-unpinned", "soft"], True, "recompute"),
    ("recompute", ["hard"], True, "recompute"), ("swap", ["soft"], False, None), ("swap", [], False, None),
    ("off", ["hard"], False, None),
])
def test_whether_preemption_can_act(policy: str, modes: list[str], active: bool, how: str | None) -> None:
    told = preemption_json(policy, modes)
    assert (told["policy"], told["active"], told["how"]) == (policy, active, how) and told["why"]
