"""Which runtime it is, by bodies and headers and in few GETs; statuses lie."""

from __future__ import annotations

import json

import pytest

from kvstream.adapters.base import HttpReply
from kvstream.adapters.identify import FOLLOW_UP, TITLES, UNKNOWN_ORDER, Identity, identify, next_call
from kvstream.adapters.inventory import ModelRow, models_of
from tests.adapters.runtimes import RUNTIMES, reply

# What wakes a sleeping llama.cpp, loads a model, or does something else than telling (runtimes.md 0.1, 1.2, 4).
NEVER = ("/slots", "/props?", "/models/load/", "/models/unload", "/openai/load/", "/shutdown", "/api/show")


def ask(name: str, *, deaf: tuple[str, ...] = ()) -> tuple[Identity | None, dict[str, HttpReply | None]]:
    replies: dict[str, HttpReply | None] = {}
    while (path := next_call(replies)) is not None:
        assert len(replies) < 10 and not path.startswith(NEVER)
        replies[path] = None if path in deaf else reply(RUNTIMES[name], path)
    return identify(replies), replies


@pytest.mark.parametrize(("name", "kind", "state", "version", "gets"), [
    ("llamacpp", "llamacpp", "up", "b11549-abc", 3),
    ("llamacpp asleep", "llamacpp", "sleeping", "b11549-abc", 3),
    ("llamacpp loading", "llamacpp", "loading", "", 3),
    ("llamacpp locked", "llamacpp", "locked", "", 3),
    ("llamacpp behind nginx", "llamacpp", "up", "b11549-abc", 5),
    ("llamacpp router", "llamacpp", "up", "", 3),
    ("ollama", "ollama", "up", "0.33.0", 5),
    ("lmstudio", "lmstudio", "up", "", 3),
    ("lmstudio old", "lmstudio", "up", "", 3),
    ("foundry", "foundry", "up", "", 4),
    ("foundry-old", "foundry-old", "up", "", 5),
    ("vllm", "vllm", "up", "0.11.0", 7),
    ("openai", "openai", "up", "", 5),
    ("openai locked", "openai", "locked", "", 5),
    ("website", "unknown", "up", "", 5),
    ("kvstream", "kvstream", "down", "0.2.0", 4),
])
def test_each_runtime_is_known(name: str, kind: str, state: str, version: str, gets: int) -> None:
    identity, replies = ask(name)
    assert identity is not None
    assert (identity.kind, identity.state, identity.version, len(replies)) == (kind, state, version, gets)
    assert identity.router is (name == "llamacpp router")
    assert identity.title


def test_case_57_kvstream_is_never_a_backend() -> None:
    identity, _ = ask("kvstream")
    assert identity is not None and not identity.is_backend
    for name in set(RUNTIMES) - {"kvstream", "website"}:
        identity, _ = ask(name)
        assert identity is not None and identity.is_backend


def test_kvstream_in_front_of_llamacpp_is_kvstream() -> None:
    """Frames and listings of a backend pass through; the header outranks them."""
    replies = {"/lmstudio-greeting": HttpReply(404, {"server": "llama.cpp", "x-kvstream-version": "1"}),
               "/v1/models": reply(RUNTIMES["vllm"], "/v1/models")}
    identity = identify(replies)
    assert identity is not None and identity.kind == "kvstream"


def test_lm_studios_200_for_everything_is_nobody_elses_answer() -> None:
    identity, _ = ask("lmstudio", deaf=("/lmstudio-greeting",))
    assert identity is None or identity.kind in ("lmstudio", "unknown")


@pytest.mark.parametrize("name", sorted(RUNTIMES))
@pytest.mark.parametrize("deaf", [(), *((path,) for path in (*UNKNOWN_ORDER, "/api/ps", "/status", "/models/loaded"))])
def test_a_call_that_fails_ends_nothing(name: str, deaf: tuple[str, ...]) -> None:
    _, replies = ask(name, deaf=deaf)
    for kind, _ in TITLES:
        models_of(kind, replies)


def test_nobody_answers() -> None:
    assert identify({"/lmstudio-greeting": None}) is None
    assert {kind for kind, _ in TITLES} == {kind for kind, _ in FOLLOW_UP} | {"unknown"}


@pytest.mark.parametrize(("name", "rows"), [
    ("llamacpp", [ModelRow("a.gguf", 8192, "loaded", ("small",))]),
    ("llamacpp asleep", [ModelRow("a.gguf", 8192, "sleeping", ("small",))]),
    ("llamacpp router", [ModelRow("a", 4096, "loaded", ("x",)), ModelRow("b", None, "not loaded")]),
    ("llamacpp loading", []),
    ("ollama", [ModelRow("qwen3:latest", 8192, "loaded", ("qwen3",)), ModelRow("gemma3:4b", None, "not loaded")]),
    ("lmstudio", [ModelRow("q/qwen3", 4096, "loaded"), ModelRow("g/gemma", None, "not loaded")]),
    ("lmstudio old", [ModelRow("qwen3", 4096, "loaded"), ModelRow("g", None, "not loaded")]),
    ("foundry", [ModelRow("phi-4-generic-cpu:1", None, "loaded"), ModelRow("qwen-generic-cpu:2", None, "not loaded")]),
    ("foundry-old", [ModelRow("phi", None, "loaded")]),
    ("vllm", [ModelRow("q", 32768, "loaded")]),
    ("openai", [ModelRow("m")]),
    ("website", []),
])
def test_models_with_what_is_told_of_them(name: str, rows: list[ModelRow]) -> None:
    identity, replies = ask(name)
    assert identity is not None
    assert models_of(identity.kind, replies) == rows


@pytest.mark.parametrize("value", [
    None, 3, "x", [], [1], {}, {"data": 1}, {"data": [1, {}]}, {"models": [{}]},
    {"models": [{"loaded_instances": [1], "key": 3}], "data": [{"status": {}, "meta": 1}]}])
def test_any_answer_can_be_read(value: object) -> None:
    for name in RUNTIMES:
        _, replies = ask(name)
        for path in replies:
            spoilt = replies | {path: HttpReply(200, {}, json.dumps(value).encode())}
            next_call(spoilt)
            identify(spoilt)
            for kind, _ in TITLES:
                models_of(kind, spoilt)
