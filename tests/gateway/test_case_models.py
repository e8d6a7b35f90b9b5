"""Case 77: names of models, over several backends; and ``/v1/models``."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from kvstream.adapters.base import Delta, Done, Usage, UsageNumbers
from kvstream.gateway.names import ModelList, Names, listing_of, renamed, target_of
from tests.fakes import Script
from tests.gateway.conftest import SOON_S, chat, data_of, error_of
from tests.gateway.several import Several, open_rigs, open_several

A = {"name": "a", "type": "openai", "knobs": {"model": "llama3.2:latest"}}
B = {"name": "b", "type": "openai", "knobs": {"model": "qwen3"}}


def served(several: Several) -> list[int]:
    return [len(runtime.journal.calls) for runtime in several.runtimes]


# --- which backend, and under which name ------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "lane", "sent"), [
    ("llama3.2:latest", 0, "llama3.2:latest"), ("llama3.2", 0, "llama3.2"), ("qwen3", 1, "qwen3"),
    ("qwen3:latest", 1, "qwen3"), ("", 0, None)])
async def test_case_77_the_name_decides(autojump_clock: Any, asked: str, lane: int, sent: str | None) -> None:
    async with open_several(A, B) as several:
        call = await several.post(chat(**({"model": asked} if asked else {})))
        assert call.status == 200 and data_of(call.body)[-1] == "[DONE]"
        assert served(several) == [lane == 0, lane == 1]
        assert several.runtimes[lane].journal.calls[0].request.json.get("model") == sent


@pytest.mark.parametrize("stream", [True, False])
async def test_case_77_an_alias_goes_there_by_its_own_name_and_comes_back(autojump_clock: Any, stream: bool) -> None:
    async with open_several(A, {**B, "aliases": ("gpt-4o=qwen3",)}) as several:
        call = await several.post(chat(model="gpt-4o", stream=stream))
        assert call.status == 200 and served(several) == [0, 1]
        assert several.runtimes[1].journal.calls[0].request.json["model"] == "qwen3"
        frames = [value for value in data_of(call.body) if value != "[DONE]"] if stream else [json.loads(call.body)]
        assert frames and {frame["model"] for frame in frames} == {"gpt-4o"}
        # the name as it is: the runtime's own bytes
        plain = await several.post(chat(model="qwen3", stream=stream))
        assert b"gpt-4o" not in plain.body


@pytest.mark.parametrize("asked", ["none", "qwen3:7b", "gpt-4o"])
async def test_case_77_unknown_is_a_404_at_once(autojump_clock: Any, asked: str) -> None:
    async with open_several(A, B) as several:
        await trio.sleep(10)  # the lists are old by now
        began = trio.current_time()
        call = await several.post(chat(model=asked))
        assert trio.current_time() - began < 0.05
        error = error_of(call.body)
        assert call.status == 404 and error["code"] == "model_not_found" and error["param"] == "model"
        assert "llama3.2:latest, qwen3" in error["message"] and served(several) == [0, 0]


async def test_case_77_unknown_is_a_404_at_once_also_when_backends_hang(autojump_clock: Any) -> None:
    async with open_several(A, B) as several:
        await trio.sleep(10)
        hang_lists(several, 0)
        began = trio.current_time()
        assert (await several.post(chat(model="none"))).status == 404
        assert trio.current_time() - began < 0.05


async def test_case_77_a_model_that_was_added_meanwhile_is_found(autojump_clock: Any) -> None:
    async with open_several(A, B) as several:
        await trio.sleep(10)
        several.runtimes[1].config.model = "new"
        assert (await several.post(chat(model="new"))).status == 200
        assert served(several) == [0, 1]


async def test_case_77_a_name_that_an_unknown_list_may_have_is_no_404(autojump_clock: Any) -> None:
    async with open_several(A, {**B, "knobs": {"model": "qwen3", "refuse": True}}, wait=False) as several:
        await trio.sleep(1)
        call = await several.post(chat(model="qwen3"))
        assert call.status == 503 and call.headers["retry-after"] and served(several) == [0, 0]
        assert (await several.post(chat(model="llama3.2"))).status == 200  # the other one is as it was
        several.runtimes[1].config.refuse = False
        await trio.sleep(3)
        assert (await several.post(chat(model="qwen3"))).status == 200 and served(several) == [1, 1]


async def test_case_77_a_single_llama_server_answers_to_any_name(autojump_clock: Any) -> None:
    async with open_several({}) as several:
        assert (await several.post(chat(model="whatever"))).status == 200
        assert several.runtime.journal.calls[0].request.json["model"] == "whatever"


async def test_case_77_two_llama_servers_do_not(autojump_clock: Any) -> None:
    async with open_several({"knobs": {"model": "one"}}, {"knobs": {"model": "two"}}) as several:
        assert (await several.post(chat(model="two"))).status == 200 and served(several) == [0, 1]
        assert (await several.post(chat(model="whatever"))).status == 404


async def test_a_route_that_the_models_backend_lacks(autojump_clock: Any) -> None:
    async with open_several(A, {"name": "b", "knobs": {"model": "qwen3"}}) as several:
        call = await several.post(chat(model="llama3.2"), "/chat/completions")
        error = error_of(call.body)
        assert call.status == 404 and error["code"] == "route_not_supported" and "llama3.2" in error["message"]
        assert (await several.post(chat(model="qwen3"), "/chat/completions")).status == 200


# --- /v1/models -------------------------------------------------------------------------------------------------------


def hang_lists(several: Several, *lanes: int) -> None:
    for lane in lanes:
        several.runtimes[lane].script(Script(slot=False, first_byte_after=10**6), path="/v1/models", times=None)


async def listed(several: Several) -> list[str]:
    call = await several.get("/v1/models")
    assert call.status == 200
    return [entry["id"] for entry in json.loads(call.body)["data"]]


async def test_case_77_lists_are_merged_without_duplicates(autojump_clock: Any) -> None:
    rows = (A, {**B, "aliases": ("gpt-4o=qwen3",)}, {**B, "name": "c"})
    async with open_several(*rows) as several:
        assert await listed(several) == ["llama3.2:latest", "qwen3", "gpt-4o"]
        for name, shown in (("gpt-4o", "gpt-4o"), ("qwen3", "qwen3"), ("llama3.2", "llama3.2:latest")):
            assert json.loads((await several.get(f"/v1/models/{name}")).body)["id"] == shown
        assert (await several.get("/v1/models/none")).status == 404


async def test_case_77_a_backend_that_hangs_is_listed_from_memory_within_a_second(autojump_clock: Any) -> None:
    async with open_several(A, B, {**B, "name": "c", "knobs": {"model": "other"}}) as several:
        hang_lists(several, 0, 1)
        began = trio.current_time()
        assert await listed(several) == ["llama3.2:latest", "qwen3", "other"]
        assert trio.current_time() - began < 1.0


async def test_case_77_a_dead_backend_takes_nobody_with_it() -> None:
    async with open_rigs(A, B, upstream={"keepalive_expiry_s": 0.01, "down_grace_s": 0.0}) as rig:
        await rig.fakes[0].pause()
        began = trio.current_time()
        status, body, _ = await rig.get("/v1/models")
        assert status == 200 and [e["id"] for e in json.loads(body)["data"]] == ["llama3.2:latest", "qwen3"]
        assert trio.current_time() - began < SOON_S
        response = await rig.post(chat(model="qwen3"))
        assert response.status == 200 and data_of(await response.read_all())[-1] == "[DONE]"
        await rig.until(lambda: not rig.engine.ready)
        status, body, _ = await rig.get("/ready")
        assert status == 200 and json.loads(body) == {"status": "ready", "lanes": {"a": "down", "b": "up"}}
        dead = await rig.post(chat(model="llama3.2"))
        assert dead.status == 503 and dead.headers["retry-after"]
        await response.close()
        await dead.close()


async def test_a_backend_that_was_never_there_is_left_out(autojump_clock: Any) -> None:
    async with open_several(A, {**B, "knobs": {"refuse": True}}, wait=False) as several:
        await trio.sleep(1)
        assert await listed(several) == ["llama3.2:latest"]
        several.runtimes[0].config.refuse = True
        await trio.sleep(10)
        assert await listed(several) == ["llama3.2:latest"]
        ready = await several.get("/ready")
        assert ready.status == 503 and json.loads(ready.body)["lanes"] == {"a": "down", "b": "down"}


# --- the plain functions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "target"), [
    ("x", "y"), ("x:latest", "y"), ("a", "a"), ("a:latest", "a"), ("b", "b"), ("b:latest", "b:latest"), ("c", None),
    ("a:7b", None), ("", None), ("k", "a")])
def test_what_a_name_becomes(asked: str, target: str | None) -> None:
    names = Names(aliases={"x": "y", "k:latest": "a"})
    assert target_of(asked, names, ("a", "b:latest")) == target


def test_configured_models_stand_for_the_list() -> None:
    names = Names(models=("m",), aliases={"n": "m"})
    known = ModelList.read({"data": [{"id": "m", "owned_by": "x"}, {"id": "hidden"}, {"no": "id"}, 7]})
    assert known is not None and known.names == ("m", "hidden")
    assert target_of("hidden", names, known.names) is None
    assert [(e["id"], e["owned_by"]) for e in listing_of(names, known)] == [("m", "x"), ("n", "x")]
    assert [(e["id"], e.get("alias_of")) for e in listing_of(names, None)] == [("m", None), ("n", "m")]


@pytest.mark.parametrize("answer", [None, [], {}, {"data": {}}, {"data": 1}])
def test_what_is_no_list(answer: Any) -> None:
    assert ModelList.read(answer) is None


def frame(value: Any) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


@pytest.mark.parametrize("value", [
    {"model": "m", "choices": [{"delta": {"content": 'say "model":"m" or {"model": "m"}'}}]},
    {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": '{"model":"m"}'}}]}}], "model": "m"},
    {"type": "message_start", "message": {"role": "assistant", "model": "m"}},
    {"type": "response.completed", "response": {"model": "m", "output": [{"text": '"model":"m"'}]}},
    {"options": {"model": "other"}, "model": "m"},
    {"model": "/models/\u00e9.gguf", "x": "\u2028"}])
def test_only_the_frames_own_model_is_renamed(value: dict[str, Any]) -> None:
    for event in (Delta(frame(value), value), Delta(frame(value)), Done(frame(value)),
                  Usage(frame(value), UsageNumbers(1, 1), value)):
        changed = renamed(event, 'n"ew')
        place = next((v for v in (value.get("message"), value.get("response")) if v), value)
        expected = json.loads(json.dumps(value))
        next((v for v in (expected.get("message"), expected.get("response")) if v), expected)["model"] = 'n"ew'
        assert json.loads(changed.raw[6:]) == expected
        assert getattr(changed, "data", None) in (None, expected)
        assert place["model"] != 'n"ew', "the event itself was changed"


def test_frames_without_a_model_travel_as_they_are() -> None:
    for raw in (b"data: [DONE]\n\n", frame({"error": {"message": "m"}}), frame({"choices": []}), b": ping\n\n", b"{"):
        assert renamed(Delta(raw), "new").raw == raw


# --- other dialects ---------------------------------------------------------------------------------------------------

MESSAGES = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
CALLS = [
    ("llamacpp", "/v1/messages", MESSAGES), ("llamacpp", "/v1/responses", {"input": "hello"}),
    ("llamacpp", "/v1/completions", {"prompt": "hello"}), ("ollama", "/api/embed", {"input": "hello"}),
    ("ollama", "/api/chat", {"messages": MESSAGES["messages"]}), ("ollama", "/api/generate", {"prompt": "hello"}),
    ("ollama", "/v1/chat/completions", {"messages": MESSAGES["messages"]})]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("kind", "path", "body"), CALLS)
async def test_case_77_an_alias_in_every_dialect(
        autojump_clock: Any, kind: str, path: str, body: dict[str, Any], stream: bool) -> None:
    row = {"type": kind, "knobs": {"model": "m:latest", "answer_tokens": 4}, "aliases": ("gpt-4o=m:latest",)}
    async with open_several(row, A) as several:
        plain = await several.post({**body, "model": "m:latest", "stream": stream}, path)
        call = await several.post({**body, "model": "gpt-4o", "stream": stream}, path)
        assert plain.status == call.status == 200, call.body
        sent = several.runtimes[0].journal.calls[-1].request.json["model"]
        assert sent == "m:latest"
        assert plain.body.count(b"m:latest") > 0 and b"m:latest" not in call.body
        assert call.body.count(b"gpt-4o") == plain.body.count(b"m:latest")
        unknown = await several.post({**body, "model": "none", "stream": stream}, path)
        assert unknown.status == 404 and b"none" in unknown.body
