"""What a runtime can hold, from what it says and what the operator says."""

from __future__ import annotations

import json
from typing import Any

from kvstream.adapters import LlamaCppBackend, OpenAIBackend
from kvstream.adapters.base import CapacityQuery, CapacityReport, HttpCall, HttpReply
from kvstream.adapters.llamacpp_state import empty_slot, streams_of
from kvstream.core.types import PoolMode
from tests.adapters.transcripts import load_all

REPLIES = {f"{case.backend}/{case.case}": case.reply for case in load_all() if case.meta["kind"] == "reply"}
PROPS, SLOTS, METRICS = (REPLIES[f"llamacpp/reply_{name}"] for name in ("props", "slots", "metrics"))
SPLIT, UNIFIED = REPLIES["llamacpp/reply_probe_split"], REPLIES["llamacpp/reply_probe_unified"]
NO_SAVE = REPLIES["llamacpp/reply_probe_no_save_path"]
QUERY = CapacityQuery(page_tokens=16)


def reply(data: Any, status: int = 200) -> HttpReply:
    return HttpReply(status, {}, json.dumps(data).encode())


def ask(
    backend: Any, answers: dict[str, HttpReply | None], query: CapacityQuery = QUERY
) -> tuple[CapacityReport, list[str]]:
    """Play the rounds of questions as the gateway does; the report and the names that were asked."""
    replies: dict[str, HttpReply | None] = {}
    while calls := backend.capacity_calls(replies):
        assert not replies.keys() & {name for name, _ in calls}
        replies |= {name: answers.get(name) for name, _ in calls}
    return backend.read_capacity(replies, query), list(replies)


def llama(
    probe: HttpReply | None = SPLIT, query: CapacityQuery = QUERY, **options: Any
) -> tuple[CapacityReport, list[str]]:
    answers = {"props": PROPS, "slots": SLOTS, "metrics": METRICS, "probe": probe}
    return ask(LlamaCppBackend("http://h", **options), answers, query)


def test_the_empty_slot_probe_tells_split_from_unified() -> None:
    assert (streams_of(SPLIT), streams_of(UNIFIED)) == (4, 1)
    assert (streams_of(SPLIT, 4), streams_of(UNIFIED, 4), streams_of(SPLIT, 2)) == (4, 1, None)
    # a model with a sliding window has two caches (68 and 44 bytes on the real server, 52 with two slots)
    for size, slots, streams in ((68, 4, 4), (44, 4, 1), (52, 2, 2)):
        assert streams_of(reply({"n_saved": 0, "n_written": size}), slots) == streams
    for size in (0, 28, 32, 33, 88, -8):  # 88: a recurrent model, which has no pool of KV
        assert streams_of(reply({"n_saved": 0, "n_written": size}), 4) is None, size
    report, asked = llama(SPLIT)
    limits = report.limits
    assert asked == ["props", "slots", "metrics", "probe"]
    assert (limits.mode, limits.seats, limits.pages, limits.request_tokens_max) == (PoolMode.SPLIT, 4, 512, 2048)
    assert not limits.shares_prefix and report.notes == () and "empty-slot probe" in limits.source
    limits = llama(UNIFIED)[0].limits
    assert (limits.mode, limits.seats, limits.pages, limits.request_tokens_max) == (PoolMode.UNIFIED, 4, 128, 2048)


def test_case_38_without_a_probe_the_pool_is_counted_once_and_the_note_says_how_to_do_better() -> None:
    for probe in (NO_SAVE, None, reply({"n_saved": 33, "n_written": 48}), reply({"n_saved": 0, "n_written": 40})):
        report, _ = llama(probe)
        assert (report.limits.mode, report.limits.pages) == (PoolMode.UNIFIED, 128)
        assert "-np N" in report.notes[0] and "--slot-save-path" in report.notes[0]
    assert "no --slot-save-path" in llama(NO_SAVE)[0].limits.source


def test_the_operator_may_state_the_layout_and_then_nothing_is_probed() -> None:
    for unified, mode, pages in ((True, PoolMode.UNIFIED, 128), (False, PoolMode.SPLIT, 512)):
        report, asked = llama(kv_unified=unified)
        assert (report.limits.mode, report.limits.pages, report.notes) == (mode, pages, ()) and "probe" not in asked


def test_a_configured_context_that_is_the_sum_of_the_slots_means_split() -> None:
    report, _ = llama(NO_SAVE, CapacityQuery(page_tokens=16, context_tokens=8192))
    assert (report.limits.mode, report.limits.pages, report.notes) == (PoolMode.SPLIT, 512, ())
    report, _ = llama(NO_SAVE, CapacityQuery(page_tokens=16, context_tokens=2048))
    assert report.limits.mode is PoolMode.UNIFIED
    report, _ = llama(SPLIT, CapacityQuery(page_tokens=16, context_tokens=1000))
    assert report.limits.request_tokens_max == 1000 and report.notes == ()
    report, _ = llama(SPLIT, CapacityQuery(page_tokens=16, context_tokens=5000))
    assert report.limits.request_tokens_max == 2048 and "5000" in report.notes[0]


def slots(*rows: dict[str, Any]) -> HttpReply:
    return reply([{"id": at, "n_ctx": 2048, **row} for at, row in enumerate(rows)])


def test_only_an_idle_and_empty_slot_is_probed() -> None:
    busy, used = {"is_processing": True}, {"is_processing": False, "n_prompt_tokens": 33}
    cleared, fresh = {"is_processing": False, "n_prompt_tokens": 0}, {"is_processing": False}
    assert empty_slot(slots(busy, used)) is None
    assert empty_slot(slots(busy, fresh, cleared, fresh)) == 2
    assert empty_slot(slots(fresh, fresh, used)) == 1
    assert empty_slot(REPLIES["llamacpp/reply_slots_used"]) == 0  # used, then cleared by the server itself
    assert empty_slot(reply({"error": {"message": "off"}}, 501)) is None and empty_slot(None) is None
    for answer, settled in ((slots(busy, busy), False), (reply({}, 501), True), (None, True)):
        answers = {"props": PROPS, "slots": answer, "metrics": METRICS, "erase": reply({"n_erased": 9}), "probe": SPLIT}
        report, asked = ask(LlamaCppBackend("http://h"), answers)
        assert "probe" not in asked and "erase" not in asked
        assert report.limits.mode is PoolMode.UNIFIED and report.notes and report.settled is settled


def test_where_every_idle_slot_holds_something_the_one_with_the_least_is_emptied_for_the_probe() -> None:
    """KVStream started again in front of a server that has been in use must not take a split pool for a unified one."""
    busy = {"is_processing": True, "n_prompt_tokens": 3}
    held = [{"is_processing": False, "n_prompt_tokens": n} for n in (900, 33, 700)]
    answers = {"props": PROPS, "slots": slots(busy, *held), "metrics": METRICS, "probe": SPLIT}
    calls = LlamaCppBackend("http://h", model="a b").capacity_calls({k: v for k, v in answers.items() if k != "probe"})
    [(name, call)] = calls
    assert (name, call.method, call.path) == ("erase", "POST", "/slots/2?action=erase")
    assert json.loads(call.body) == {"model": "a b"}

    report, asked = ask(LlamaCppBackend("http://h"), answers | {"erase": reply({"n_erased": 33})})
    assert asked[-2:] == ["erase", "probe"]
    assert (report.limits.mode, report.limits.pages, report.settled) == (PoolMode.SPLIT, 512, True)
    for refused in (reply({"error": {"message": "no"}}, 501), None):  # then nothing was lost either
        report, asked = ask(LlamaCppBackend("http://h"), answers | {"erase": refused})
        assert asked[-1] == "erase" and report.limits.mode is PoolMode.UNIFIED and report.settled


def test_the_probe_call() -> None:
    calls = LlamaCppBackend("http://h", model="a b").capacity_calls({"props": PROPS, "slots": SLOTS, "metrics": None})
    [(name, call)] = calls
    assert (name, call.method, call.path) == ("probe", "POST", "/slots/3?action=save")
    assert json.loads(call.body) == {"filename": "kvstream-probe.bin", "model": "a b"}


def test_one_slot_needs_no_probe_and_a_sleeping_server_is_not_woken() -> None:
    one = reply({**PROPS.json(), "total_slots": 1})
    report, asked = ask(LlamaCppBackend("http://h"), {"props": one, "slots": SLOTS})
    assert (report.limits.mode, report.limits.seats, report.limits.pages) == (PoolMode.SPLIT, 1, 128)
    assert "probe" not in asked
    asleep = reply({**PROPS.json(), "is_sleeping": True})
    report, asked = ask(LlamaCppBackend("http://h"), {"props": asleep})
    assert asked == ["props"] and report.limits.seats == 4 and "sleeps" in report.notes[0]
    assert LlamaCppBackend("http://h").read_health(asleep) == "sleeping"


def test_configuration_only_narrows() -> None:
    report, _ = llama(SPLIT, CapacityQuery(page_tokens=16, pages=100, seats=2, host_pages=7))
    assert (report.limits.pages, report.limits.seats, report.limits.host_pages, report.notes) == (100, 2, 7, ())
    report, _ = llama(SPLIT, CapacityQuery(page_tokens=16, pages=9999, seats=9))
    assert (report.limits.pages, report.limits.seats) == (512, 4)
    assert report.notes == (
        "pages: 9999 configured, but the runtime has 512; using 512",
        "seats: 9 configured, but the runtime has 4; using 4",
    )


def test_pages_do_not_straddle_slots_and_a_tiny_pool_has_one() -> None:
    assert llama(SPLIT, CapacityQuery(page_tokens=1500))[0].limits.pages == 4
    report, _ = llama(UNIFIED, CapacityQuery(page_tokens=5000))
    assert report.limits.pages == 1 and "below one page" in report.notes[0]


def test_a_restart_is_seen() -> None:
    first = llama()[0].instance
    again = HttpReply(200, {**METRICS.headers, "process-start-time-unix": "7"}, METRICS.body)
    report, _ = ask(LlamaCppBackend("http://h"), {"props": PROPS, "slots": SLOTS, "metrics": again, "probe": SPLIT})
    assert first != report.instance == "b0-unknown@7"


def test_a_router_and_a_server_without_props() -> None:
    report, _ = ask(LlamaCppBackend("http://h"), {"props": reply({"role": "router", "max_instances": 4})})
    assert report.limits.mode is PoolMode.UNKNOWN and "router" in report.notes[0]
    report, _ = ask(
        LlamaCppBackend("http://h"), {"props": reply({"error": "no"}, 401)}, CapacityQuery(16, pages=5, seats=3)
    )
    assert (report.limits.pages, report.limits.seats) == (5, 3) and "credentials" in report.notes[0]
    report, _ = ask(LlamaCppBackend("http://h", seats=2), {}, CapacityQuery(16, context_tokens=160))
    assert (report.limits.pages, report.limits.seats, report.limits.request_tokens_max) == (10, 2, 160)


def test_with_a_model_every_get_names_it_and_loads_nothing() -> None:
    backend = LlamaCppBackend("http://h", model="org/m:q4")
    paths = [call.path for _, call in (*backend.capacity_calls({}), *backend.capacity_calls({"props": PROPS}))]
    busy = backend.busy()
    assert busy is not None
    for path in [*paths, busy.path]:
        assert path.endswith("?model=org%2Fm%3Aq4&autoload=false")
    assert LlamaCppBackend("http://h").busy() == HttpCall("GET", "/slots")


def test_busy_slots() -> None:
    backend = LlamaCppBackend("http://h")
    rows = slots({"is_processing": True, "id_task": 9}, {"is_processing": False, "id_task": 8}, {"is_processing": True})
    assert backend.read_busy(rows) == frozenset({(0, 9), (2, -1)})
    assert backend.read_busy(SLOTS) == frozenset()
    assert backend.read_busy(reply({"error": {"code": 501}}, 501)) is None


def test_health_states() -> None:
    backend = LlamaCppBackend("http://h")
    assert backend.health() == HttpCall("GET", "/health")
    assert backend.read_health(REPLIES["llamacpp/reply_health"]) == "up"
    assert backend.read_health(REPLIES["llamacpp/reply_loading"]) == "loading"
    assert backend.read_health(HttpReply(500, {}, b"")) == "down"
    other = OpenAIBackend("http://h")
    assert other.read_health(REPLIES["openai/vllm_reply_models"]) == "up"
    assert other.read_health(REPLIES["openai/openai_key_refused"]) == "down"
    assert other.read_health(HttpReply(404, {}, b"")) == "up"
    assert other.read_health(HttpReply(502, {}, b"")) == "down"


VLLM = {"models": REPLIES["openai/vllm_reply_models"], "metrics": REPLIES["openai/vllm_reply_metrics"]}


def test_vllm_is_read_from_its_metrics() -> None:
    report, asked = ask(OpenAIBackend("http://h"), VLLM)
    limits = report.limits
    assert asked == ["models", "metrics"]
    assert (limits.mode, limits.pages, limits.seats, limits.request_tokens_max) == (PoolMode.UNKNOWN, 2756, 256, 4096)
    assert limits.shares_prefix and report.instance == "vllm@1700000000.25"
    assert any("3 requests" in note for note in report.notes) and any("max-num-seqs" in note for note in report.notes)


def test_vllm_blocks_become_pages_of_our_size_and_configuration_narrows() -> None:
    report, _ = ask(OpenAIBackend("http://h", seats=8), VLLM, CapacityQuery(page_tokens=64, pages=100))
    assert (report.limits.pages, report.limits.seats) == (100, 8)
    assert any("2756 blocks counted as 689 pages" in note for note in report.notes)
    report, _ = ask(OpenAIBackend("http://h"), VLLM, CapacityQuery(page_tokens=64, pages=10_000, context_tokens=9000))
    assert report.limits.pages == 689 and report.limits.request_tokens_max == 4096
    assert any("10000 configured" in note for note in report.notes) and any("9000" in note for note in report.notes)


def test_vllm_engines_are_summed_and_an_unsized_pool_is_none() -> None:
    row = b'vllm:cache_config_info{block_size="16",engine="%d",num_gpu_blocks="%s"} 1.0\n'
    metrics = HttpReply(200, {}, row % (0, b"10") + row % (1, b"20") + b"garbage{\nvllm:x nan_nan\n")
    assert ask(OpenAIBackend("http://h"), {"metrics": metrics})[0].limits.pages == 30
    metrics = HttpReply(200, {}, row % (0, b"None"))
    assert ask(OpenAIBackend("http://h"), {"metrics": metrics})[0].limits.source == "default"


def test_a_generic_backend_is_what_the_operator_says_with_stated_defaults() -> None:
    report, _ = ask(OpenAIBackend("http://h"), {})
    limits = report.limits
    assert (limits.mode, limits.seats, limits.pages, limits.request_tokens_max) == (PoolMode.UNKNOWN, 4, 2048, None)
    assert len(report.notes) == 2 and not limits.shares_prefix
    report, _ = ask(OpenAIBackend("http://h"), {}, CapacityQuery(16, seats=2, context_tokens=1600))
    assert (report.limits.pages, report.limits.seats, report.limits.request_tokens_max) == (200, 2, 1600)
    report, _ = ask(OpenAIBackend("http://h"), {}, CapacityQuery(16, pages=7))
    assert report.limits.pages == 7 and report.limits.source == "configured"


def test_the_context_of_the_configured_model_counts() -> None:
    models = reply({"data": [{"id": "a", "max_model_len": 10}, {"id": "b", "max_model_len": 20}, {"id": "c"}]})
    for model, context in (("", 10), ("b", 20), ("c", None)):
        report, _ = ask(OpenAIBackend("http://h", model=model), {"models": models})
        assert report.limits.request_tokens_max == context
