"""The slot calls of llama.cpp: what is asked, and what the real server's answers mean."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstream.adapters import ADAPTERS, LlamaCppBackend
from kvstream.adapters.base import Delta, Done, Failed, HttpCall, HttpReply, Progress, ProxyRequest, Usage
from kvstream.adapters.llamacpp_slots import LlamaCppSlots
from kvstream.adapters.slot_calls import Identity, PromptWork, SlotDone, SlotView
from tests.adapters.test_contract import JSON
from tests.adapters.transcripts import load_all

CASES = {case.case: case for case in load_all() if case.backend == "llamacpp"}
SLOTS = LlamaCppSlots(LlamaCppBackend("http://h"))
ROUTED = LlamaCppSlots(LlamaCppBackend("http://h", model="big", api_key="secret"))
CHAT, COMPLETION, MESSAGES, RESPONSES = "/v1/chat/completions", "/completion", "/v1/messages", "/v1/responses"


def reply(value: Any, status: int = 200) -> HttpReply:
    return HttpReply(status, {}, json.dumps(value).encode())


def asked(route: str, model: str = "", **view: Any) -> ProxyRequest:
    return ProxyRequest(route, b"{}", view, model=model)


# --- calls ------------------------------------------------------------------------------------------------------------


def test_what_is_sent() -> None:
    assert SLOTS.look() == HttpCall("GET", "/slots")
    save = SLOTS.save(2, "a.kv")
    assert (save.method, save.path, save.body) == ("POST", "/slots/2?action=save", b'{"filename":"a.kv"}')
    assert SLOTS.restore(0, "a.kv").path == "/slots/0?action=restore"
    assert (SLOTS.erase(1).path, SLOTS.erase(1).body) == ("/slots/1?action=erase", b"{}")


def test_a_router_is_told_the_model_everywhere_and_loads_none_for_a_look() -> None:
    assert ROUTED.look().path == "/slots?model=big&autoload=false"
    for call in (ROUTED.save(0, "a.kv"), ROUTED.restore(0, "a.kv"), ROUTED.erase(0), ROUTED.read_prompt([1], 0)):
        assert json.loads(call.body)["model"] == "big" and ("authorization", "Bearer secret") in call.headers
    assert [call.path for _, call in ROUTED.identity_calls({})] == ["/props?model=big&autoload=false"]
    more = ROUTED.identity_calls({"props": CASES["reply_props"].reply})
    assert [call.path for _, call in more] == ["/lora-adapters?model=big&autoload=false", "/v1/models", "/props"]


def test_reading_a_prompt_answers_nothing_and_can_be_stopped() -> None:
    call = SLOTS.read_prompt(range(3), 2)
    body = json.loads(call.body)
    assert (call.method, call.path) == ("POST", "/completion")
    assert body["prompt"] == [0, 1, 2] and body["id_slot"] == 2 and body["n_predict"] == 0
    assert body["stream"] is True and body["cache_prompt"] is True and body["return_progress"] is True
    assert "timings" in body["response_fields"] and "stop" in body["response_fields"]
    assert "prompt" not in body["response_fields"]  # it would come back as text, however long
    assert "id_slot" not in json.loads(SLOTS.read_prompt([1], None).body)


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "done"), [
    ("slot_save", SlotDone(1, 40, 923024)), ("slot_restore", SlotDone(2, 40, 923024)), ("slot_erase", SlotDone(2, 40)),
    ("slot_save_empty", SlotDone(3, 0, 48)), ("slot_save_wrapped", SlotDone(9, 40, 923024)),
])
def test_what_was_done(case: str, done: SlotDone) -> None:
    found = SLOTS.read_done(CASES[case].reply)
    assert isinstance(found, SlotDone) and evolve(found, seconds=None) == done
    told = json.loads(CASES[case].response).get("timings")
    assert found.seconds == (pytest.approx(next(iter(told.values())) / 1000) if told else None)


@pytest.mark.parametrize(("case", "status"), [
    ("slot_save_bad_name", 400), ("slot_save_failed", 500), ("slot_restore_missing", 400), ("slot_restore_cut", 400),
    ("slot_no_save_path", 501), ("slot_restore_no_save_path", 501), ("slot_erase_no_save_path", 501),
    ("slot_odd_action", 400), ("slot_odd_id", 400), ("slot_odd_no_body", 400), ("slot_odd_no_name", 400),
    ("reply_loading", 503),
])
def test_what_was_not_done(case: str, status: int) -> None:
    failed = SLOTS.read_done(CASES[case].reply)
    assert isinstance(failed, Failed) and failed.status == status and failed.message


@pytest.mark.parametrize("body", [
    {}, [], None, "ok", {"id_slot": 1}, {"n_saved": 3}, {"id_slot": 1, "n_saved": -1}, {"id_slot": 1, "n_saved": True},
    {"id_slot": 1, "n_saved": "3"}, {"id_slot": None, "n_saved": 3}, {"id_slot": 1, "n_saved": 2.0},
    {"error": {"code": 500, "message": "x"}, "id_slot": 1, "n_saved": 3},
])
def test_a_200_that_tells_nothing_is_no_success(body: Any) -> None:
    assert isinstance(SLOTS.read_done(reply(body)), Failed)


def test_odd_sizes_and_times_are_not_known() -> None:
    base = {"id_slot": 1, "n_saved": 3}
    for value in (-1, True, "9", None, 2**60, float("inf")):
        done = SLOTS.read_done(reply({**base, "n_written": value, "timings": {"save_ms": value}}))
        assert isinstance(done, SlotDone) and done.bytes == 0
        assert done.seconds is None
    assert isinstance(SLOTS.read_done(HttpReply(200, {}, b"<html>")), Failed)
    assert isinstance(SLOTS.read_done(HttpReply(502, {}, b"")), Failed)


def test_a_look_at_the_slots() -> None:
    assert SLOTS.read_look(CASES["reply_slots"].reply) == tuple(SlotView(slot, False) for slot in range(4))
    used = SLOTS.read_look(CASES["reply_slots_used"].reply)
    assert used is not None and any(view.tokens and view.task is not None for view in used)
    restored = SLOTS.read_look(CASES["slot_look_restored"].reply)
    assert restored is not None
    assert restored[2] == SlotView(2, False, None) and restored[1].tokens == 40  # not told is not empty
    rows = [{"id": 1, "is_processing": True, "id_task": 0, "n_prompt_tokens": 0}, {"id": 0, "is_processing": False}]
    assert SLOTS.read_look(reply(rows)) == (SlotView(0, False), SlotView(1, True, 0, 0))
    assert SLOTS.read_look(reply([{"id": 0}])) == (SlotView(0, True),)  # who does not say that it is idle is not


@pytest.mark.parametrize("answer", [
    reply([], 200), reply({}), reply([{"id": 1, "is_processing": False}]), reply([{"id": 0}, {"id": 0}]),
    reply([{"id": 0, "is_processing": False}], 503), HttpReply(501, {}, b"{}"), HttpReply(200, {}, b"?"),
])
def test_no_look(answer: HttpReply) -> None:
    assert SLOTS.read_look(answer) is None


def test_what_reading_a_prompt_cost() -> None:
    for case, cached in (("slot_read_prompt", 0), ("slot_read_prompt_again", 39), ("slot_read_prompt_wiped", 0)):
        decoder = SLOTS.prompt_decoder()
        events = decoder.feed(CASES[case].response) + decoder.finish()
        assert isinstance(events[0], Progress) and isinstance(events[-1], Done)
        work = SLOTS.prompt_work([event for event in events if isinstance(event, Delta)][-1].data)
        assert work is not None and (work.cached, work.computed, work.slot) == (cached, 40 - cached, 1)
        assert work.seconds is not None and 0 < work.seconds < 5
    decoder = SLOTS.prompt_decoder()
    cut = decoder.feed(CASES["slot_read_prompt"].response[:500]) + decoder.finish()
    assert isinstance(cut[-1], Failed)


@pytest.mark.parametrize("case", ["chat_stream", "chat_stream_usage", "completions_stream", "native_stream",
                                  "responses_stream", "messages_stream"])
def test_what_a_prompt_cost_in_any_dialect(case: str) -> None:
    events = CASES[case].decode([CASES[case].response])
    known = [work for event in events if (work := SLOTS.prompt_work(getattr(event, "data", None))) is not None]
    usage = [event.numbers for event in events if isinstance(event, Usage)][-1]
    assert known and usage.cached == known[-1].cached and usage.prompt == known[-1].cached + known[-1].computed
    assert known[-1].seconds == usage.prompt_s
    assert (usage.prompt_s is None) is (case == "messages_stream")  # the only one that does not tell


def test_what_tells_no_cost() -> None:
    for data in (None, 3, "x", [], {}, {"usage": {"prompt_tokens": 5}}, {"timings": {"prompt_n": 5}},
                 {"usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 9}}},
                 {"response": {"usage": None}}, {"usage": {"input_tokens": 3}}):
        assert SLOTS.prompt_work(data) is None, data
    assert SLOTS.prompt_work({"timings": {"cache_n": 2, "prompt_n": 3, "prompt_ms": "x"}}) == PromptWork(2, 3, None)


@given(st.integers(100, 600), JSON, st.binary(max_size=30))
@settings(max_examples=150, deadline=None)
def test_no_reply_makes_it_raise(status: int, data: Any, junk: bytes) -> None:
    for body in (json.dumps(data).encode(), junk):
        answer = HttpReply(status, {}, body)
        assert isinstance(SLOTS.read_done(answer), (SlotDone, Failed))
        SLOTS.read_look(answer)
        SLOTS.prompt_work(answer.json())
        for replies in ({"props": answer}, {"props": CASES["reply_props"].reply, "lora": answer, "models": answer}):
            SLOTS.identity_calls(replies)
            SLOTS.read_identity(replies, {})
            SLOTS.model_path(replies)


def test_who_has_slots() -> None:
    kinds = {name: kind("http://h") for name, kind in ADAPTERS.items()}
    assert {name for name, backend in kinds.items() if backend.slots is not None} == {"llamacpp"}
    assert all((backend.slots is not None) is backend.capabilities.hard_inject for backend in kinds.values())
    assert kinds["llamacpp"].slots == kinds["llamacpp"].slots  # a value, like the rest


# --- who may use a slot -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("route", "view", "may"), [
    (CHAT, {}, True), (CHAT, {"n": 1}, True), (CHAT, {"n": 2}, False), (CHAT, {"n_cmpl": 2}, False),
    ("/v1/completions", {"prompt": "x"}, True), ("/v1/completions", {"prompt": ["x"]}, True),
    ("/v1/completions", {"prompt": ["x", "y"]}, False), (COMPLETION, {"prompt": [1, 2, 3]}, True),
    (COMPLETION, {"prompt": [1, "x", 3]}, True), (COMPLETION, {"prompt": [[1], [2]]}, False),
    (COMPLETION, {"prompt": [{"prompt_string": "x"}, {"prompt_string": "y"}]}, False),
    (MESSAGES, {}, True), (MESSAGES, {"n": 3}, False), (RESPONSES, {"input": "x"}, True),
    ("/v1/embeddings", {"input": "x"}, False), ("/embedding", {}, False), ("/v1/rerank", {}, False),
    ("/infill", {}, False), ("/tokenize", {}, False), (CHAT, {"lora": [{"id": 0, "scale": 1}]}, False),
    (CHAT, {"lora": []}, True), (CHAT, {"cache_prompt": False}, True), (CHAT, {"tools": [{}]}, True),
])
def test_who_may_be_told_its_slot(route: str, view: Mapping[str, Any], may: bool) -> None:
    assert SLOTS.pinnable(asked(route, **view)) is may


def test_on_a_router_another_model_is_not_for_these_slots() -> None:
    for model, may in (("", True), ("big", True), ("small", False)):
        assert ROUTED.pinnable(asked(CHAT, model), router=True) is may
        assert ROUTED.pinnable(asked(CHAT, model))  # a single server does not look at the name
        assert SLOTS.pinnable(asked(CHAT, model), router=True)


def test_whose_slot_holds_what_its_keys_say() -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    assert SLOTS.reuses(asked(CHAT)) and SLOTS.reuses(asked(CHAT, cache_prompt=True))
    assert not SLOTS.reuses(asked(CHAT, cache_prompt=False))
    assert not SLOTS.reuses(asked(CHAT, lora=[{"id": 0, "scale": 1}]))
    assert not SLOTS.reuses(asked(CHAT, messages=image)) and not SLOTS.reuses(asked(RESPONSES, input=image))


# --- identity ---------------------------------------------------------------------------------------------------------

FILES = {"size": "98362432", "mtime_ns": "17", "streams": "4"}


def replies(props: Mapping[str, Any] | None = None, models: Any = None,
            lora: Any = None) -> dict[str, HttpReply | None]:
    told = json.loads(CASES["reply_props"].response) | dict(props or {})
    return {"props": reply(told), "models": CASES["reply_models"].reply if models is None else reply(models),
            "lora": CASES["slot_lora"].reply if lora is None else reply(lora)}


def identity(files: Mapping[str, str] | None = None, slots: LlamaCppSlots = SLOTS, **changed: Any) -> Identity:
    found = slots.read_identity(replies(**changed), FILES if files is None else files)
    assert found is not None
    return found


def meta(**changed: Any) -> Any:
    models = json.loads(CASES["reply_models"].response)
    models["data"][0]["meta"] |= changed
    return models


def test_the_same_server_is_the_same() -> None:
    one = identity()
    assert len(one.digest) == 16 and int(one.digest, 16) >= 0
    assert one == identity() and (one.context, one.slots) == (2048, 4) and not one.router
    assert one.facts["model_path"].endswith(".gguf") and one.facts["lora"] == "none"
    assert SLOTS.model_path(replies()) == one.facts["model_path"]
    assert identity(props={"media_marker": "<__media_other__>"}) == one  # another process with the same file
    assert "token" not in one.facts


@pytest.mark.parametrize("changed", [
    {"props": {"model_path": "/models/other.gguf"}}, {"props": {"build_info": "b11550-abc"}},
    {"props": {"chat_template": "{{ other }}"}}, {"props": {"total_slots": 2}},
    {"props": {"default_generation_settings": {"n_ctx": 4096}}},
    {"lora": [{"id": 0, "path": "/l.gguf", "scale": 1.0}]}, {"files": {**FILES, "mtime_ns": "18"}},
    {"files": {**FILES, "size": "98362433"}}, {"files": {**FILES, "streams": "1"}}, {"files": {}},
    {"models": meta(n_params=1)}, {"models": meta(size=1)}, {"models": meta(ftype="Q8_0")},
    {"models": meta(n_embd=1)}, {"models": meta(n_vocab=1)}, {"models": meta(vocab_type=9)},
    {"models": meta(n_ctx_train=1)},
])
def test_whatever_shapes_kv_makes_another_identity(changed: dict[str, Any]) -> None:
    assert identity(**changed).digest != identity().digest


def test_another_scale_of_a_lora_is_another_identity() -> None:
    one, other = ([{"id": 0, "path": "/l.gguf", "scale": scale}] for scale in (1.0, 0.5))
    assert identity(lora=one).digest != identity(lora=other).digest


def test_where_the_models_file_cannot_be_seen_it_is_good_for_one_process() -> None:
    assert identity({}).digest != identity({}, props={"media_marker": "<__media_other__>"}).digest
    assert "process" in identity({}).facts and "process" not in identity().facts


def test_a_sleeping_server_is_not_woken_and_tells_nothing() -> None:
    sleeping: dict[str, HttpReply | None] = {"props": CASES["reply_props_sleeping"].reply}
    assert SLOTS.identity_calls(sleeping) == () and SLOTS.read_identity({**replies(), **sleeping}, FILES) is None
    assert SLOTS.model_path(sleeping)
    assert [name for name, _ in SLOTS.identity_calls({"props": replies()["props"]})] == ["lora", "models"]
    assert SLOTS.identity_calls(replies()) == ()


def test_what_is_not_told_is_no_identity() -> None:
    for missing in ("props", "models", "lora"):
        assert SLOTS.read_identity({**replies(), missing: None}, FILES) is None, missing
    loading = json.loads(CASES["reply_models"].response)
    loading["data"][0]["meta"] = None
    assert SLOTS.read_identity(replies(models=loading), FILES) is None
    assert SLOTS.read_identity({**replies(), "props": CASES["reply_loading"].reply}, FILES) is None
    two = json.loads(CASES["reply_models"].response)
    two["data"].append({"id": "other", "meta": {}})
    assert SLOTS.read_identity(replies(models=two), FILES) is None  # which of them?
    old = SLOTS.read_identity({**replies(), "lora": HttpReply(404, {}, b"{}")}, FILES)
    assert old is not None and old.facts["lora"] == "not told"


def test_the_model_of_a_router() -> None:
    models = {"data": [{"id": "small", "meta": {"n_params": 1}}, {"id": "y", "aliases": 7},
                       {"id": "x", "aliases": ["big"], "meta": {"n_params": 2}}]}
    answers = replies(models=models) | {"plain": reply({"role": "router", "max_instances": 4})}
    found = ROUTED.read_identity(answers, FILES)
    assert found is not None and found.router and found.facts["n_params"] == "2"
    assert not identity(slots=ROUTED).router
