"""What a runtime lacks, and the flag that gives it."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
from attrs import evolve

from kvstream.adapters.advice import GIB, Advice, Machine, Tried, advise
from kvstream.adapters.base import HttpReply
from kvstream.adapters.identify import identify, next_call
from kvstream.adapters.llamacpp_flags import ServerFlags, is_llama_server
from tests.adapters.runtimes import LLAMA, PROPS, RUNTIMES, reply


def replies_of(name: str, **props: Any) -> dict[str, HttpReply | None]:
    table = dict(RUNTIMES[name])
    if props:
        table["/props"] = (200, LLAMA, PROPS | props)
    replies: dict[str, HttpReply | None] = {}
    while (path := next_call(replies)) is not None:
        replies[path] = reply(table, path)
    return replies


def advice(name: str, machine: Machine | None = None, **props: Any) -> list[Advice]:
    replies = replies_of(name, **props)
    identity = identify(replies)
    assert identity is not None
    return advise(identity, replies, machine or Machine())


def about(word: str, found: list[Advice]) -> Advice:
    (one,) = [one for one in found if word in one.text or word in one.remedy]
    return one


def flags(*argv: str, **environment: str) -> Machine:
    return Machine(memory_bytes=64 * GIB, flags=ServerFlags.read(("llama-server", *argv), environment))


# --- case 55 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("machine", "severity", "words"), [
    (Machine(memory_bytes=16 * GIB), "warning", ("8,192 MiB", "50%", "16.0 GiB")),  # the flag cannot be seen
    (Machine(memory_bytes=16 * GIB, flags=ServerFlags()), "warning", ("8,192 MiB", "the default", "16.0 GiB")),
    (Machine(memory_bytes=16 * GIB, flags=ServerFlags(cache_ram_given=6000)), "warning", ("6,000 MiB",)),
    (Machine(memory_bytes=16 * GIB, flags=ServerFlags(cache_ram_given=2048)), "ok", ("2,048 MiB",)),
    (Machine(memory_bytes=16 * GIB, flags=ServerFlags(cache_ram_given=0)), "ok", ("off",)),
    (Machine(memory_bytes=16 * GIB, flags=ServerFlags(cache_ram_given=-1)), "warning", ("no limit",)),
    (Machine(memory_bytes=64 * GIB), "ok", ("64.0 GiB",)),
    (Machine(), "note", ("not known",)),
    (Machine(memory_bytes=16 * GIB, local=False), "note", ("not known",)),  # it is another machine's memory
])
def test_case_55_the_prompt_cache_against_the_memory(machine: Machine, severity: str, words: tuple[str, ...]) -> None:
    found = about("prompt cache", advice("llamacpp", machine))
    assert found.severity == severity and all(word in found.text for word in words), found
    assert severity == "ok" or "--cache-ram" in found.remedy


def test_case_55_the_number_that_fits_is_named() -> None:
    assert "--cache-ram 2048" in about("prompt cache", advice("llamacpp", Machine(memory_bytes=16 * GIB))).remedy
    assert "--cache-ram 1024" in about("prompt cache", advice("llamacpp", Machine(memory_bytes=8 * GIB))).remedy
    assert about("prompt cache", advice("llamacpp router", Machine(memory_bytes=8 * GIB))).severity == "warning"


def test_case_55_the_first_advice_is_none_at_all() -> None:
    for machine in (Machine(memory_bytes=16 * GIB), Machine(), Machine(flags=ServerFlags(cache_ram_given=-1))):
        assert about("prompt cache", advice("llamacpp", machine)).remedy.startswith(
            "start llama-server with --cache-ram 0;")


@pytest.mark.parametrize(("unified", "words"), [(False, "32,768 tokens each (split KV)"), (True, "share one KV pool")])
def test_what_kvstream_found_is_not_contradicted(unified: bool, words: str) -> None:
    found = advice("llamacpp", Machine(tried=Tried(slots=True, unified=unified, ram_cache=False)),
                   default_generation_settings={"n_ctx": 32768})
    text = " ".join(f"{one.text} {one.remedy}" for one in found)
    assert words in text and "cache in host memory is off, as KVStream found" in text
    assert "cannot be seen" not in text and "not visible" not in text and "--slot-save-path" not in text
    seen = advice("llamacpp", evolve(flags("-np", "4"), tried=Tried(slots=True, unified=True, ram_cache=True)))
    assert not [one for one in seen if "split KV" in one.text or "--slot-save-path" in one.text + one.remedy]


# --- llama.cpp --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("machine", "props", "word", "severity", "remedy"), [
    (flags(), {}, "share one KV pool", "warning", "-np 4 -c 32768"),
    (flags("-np", "4", "-kvu"), {}, "because of --kv-unified", "warning", "-np 4"),
    (flags("-np", "4"), {}, "split KV", "ok", ""),
    (flags(LLAMA_ARG_N_PARALLEL="4"), {}, "split KV", "ok", ""),
    (flags("-np", "-1"), {}, "share one KV pool", "warning", "-np 4"),
    (Machine(), {}, "cannot be seen from here.", "note", "-np 4"),
    (flags(), {"total_slots": 1}, "one slot", "note", "-np 4 -c 32768"),
    (flags(), {}, "no --slot-save-path", "warning", "--slot-save-path DIR"),
    (flags(), {}, "no --slot-save-path", "warning", "llama-server -np 4 -c 32768 --cache-ram 0 --slot-save-path DIR"),
    (flags("--slot-save-path", "/d", "-np", "4", "--cache-ram", "0"), {}, "--slot-save-path is set", "ok", ""),
    (flags("--slot-save-path", "/d", "--cache-ram", "0"), {}, "--slot-save-path is set", "ok", ""),
    (flags("--slot-save-path", "/d"), {}, "empties its idle slots", "warning", "-np 4 -c 32768 --cache-ram 0 --slot"),
    (flags("--slot-save-path", "/d", "--no-cache-idle-slots"), {}, "moves KV", "note", "--slot-save-path /d"),
    (flags("--slot-save-path", "/d", "-np", "4"), {}, "moves KV", "note", "-np 4 -c 32768 --cache-ram 0"),
    (Machine(), {}, "Whether it has --slot-save-path", "note", "--slot-save-path DIR"),
    (flags(), {"endpoint_slots": False}, "--no-slots", "warning", "without --no-slots"),
    (flags(), {"endpoint_metrics": False}, "no /metrics", "note", "--metrics"),
    (flags(), {}, "batches of 2,048", "note", "-b 512"),
    (flags(), {"is_sleeping": True}, "sleeps", "note", "--sleep-idle-seconds"),
    (flags(), {"modalities": {"vision": True, "audio": False}}, "vision", "note", ""),
    (flags(), {"default_generation_settings": {"n_ctx": 2048}}, "are little", "note", "-c 32768"),
])
def test_each_lack_and_its_flag(machine: Machine, props: dict[str, Any], word: str, severity: str, remedy: str) -> None:
    found = about(word, advice("llamacpp", machine, **props))
    assert (found.severity, remedy in found.remedy) == (severity, True), found


def test_a_server_as_recommended_has_nothing_to_be_told() -> None:
    machine = flags("-np", "4", "-c", "32768", "--cache-ram", "0", "--slot-save-path", "d", "--metrics", "-b", "512")
    assert {one.severity for one in advice("llamacpp", machine, endpoint_metrics=True)} == {"ok"}


@pytest.mark.parametrize(("name", "word", "severity"), [
    ("llamacpp locked", "backend.api_key", "problem"),
    ("llamacpp loading", "loading", "note"),
    ("llamacpp router", "router", "note"),
    ("openai locked", "backend.api_key", "problem"),
    ("openai", "backend.seats", "note"),
    ("vllm", "--max-num-seqs", "note"),
    ("vllm", "told by /metrics", "ok"),
    ("foundry", "phi-4-generic-cpu:1", "ok"),
    ("foundry", "new port", "note"),
    ("lmstudio", "4 requests at once", "ok"),
    ("lmstudio", "longer prompts fail", "warning"),
    ("lmstudio old", "older than 0.4", "note"),
    ("ollama", "num_ctx", "note"),
    ("ollama", "8,192 tokens of context", "ok"),
])
def test_other_runtimes(name: str, word: str, severity: str) -> None:
    assert about(word, advice(name)).severity == severity


@pytest.mark.parametrize(("variables", "severity", "word"), [
    (None, "note", "does not tell"), ({}, "warning", "one request at a time"),
    ({"OLLAMA_NUM_PARALLEL": "4"}, "ok", "OLLAMA_NUM_PARALLEL is 4")])
def test_how_many_ollama_runs_at_once(variables: dict[str, str] | None, severity: str, word: str) -> None:
    found = about("OLLAMA_NUM_PARALLEL", advice("ollama", Machine(ollama=variables)))
    assert found.severity == severity and word in found.text


def test_nothing_loaded_at_foundry_is_a_problem() -> None:
    replies = replies_of("foundry") | {"/models/loaded": HttpReply(200, {}, b"[]")}
    identity = identify(replies)
    assert identity is not None
    assert about("foundry model load", advise(identity, replies, Machine())).severity == "problem"


@pytest.mark.parametrize("name", sorted(RUNTIMES))
def test_every_finding_is_a_sentence_and_says_what_to_do(name: str) -> None:
    for machine in (Machine(), flags(), Machine(memory_bytes=8 * GIB, local=False, ollama={})):
        for one in advice(name, machine):
            assert one.text.endswith(".") and not one.remedy.endswith(".")
            assert one.remedy or one.severity in ("ok", "note"), one


@pytest.mark.parametrize("value", [
    None, 3, [], {"total_slots": "4", "default_generation_settings": 3, "modalities": []},
    {"models": [{"loaded_instances": [{"config": {"parallel": {}}}]}]}, {"models": [{"loaded_instances": 3}]}])
def test_any_answer_can_be_advised_on(value: object) -> None:
    for name in RUNTIMES:
        replies = replies_of(name)
        identity = identify(replies)
        assert identity is not None
        for path in replies:
            spoilt = replies | {path: HttpReply(200, {}, json.dumps(value).encode())}
            advise(attrs.evolve(identity, state="up"), spoilt, flags())


# --- flags ------------------------------------------------------------------------------------------------------------


def test_flags_as_llama_cpp_reads_them() -> None:
    read = ServerFlags.read
    assert read((), {}) == ServerFlags() and ServerFlags().unified and ServerFlags().cache_ram_mib == 8192
    assert read(("x", "--port", "9", "--port", "10"), {"LLAMA_ARG_PORT": "11"}).port == 10
    assert read((), {"LLAMA_ARG_PORT": "11"}).port == 11
    assert read(("--cache-ram", "x", "-b"), {}) == ServerFlags()
    assert read(("-cram", "5", "-b", "128", "--metrics", "--mmproj", "p"), {}) == ServerFlags(
        cache_ram_given=5, batch=128, metrics=True, mmproj="p")
    assert read((), {"LLAMA_ARG_ENDPOINT_METRICS": "1", "LLAMA_ARG_KV_UNIFIED": "false"}) == ServerFlags(
        metrics=True, unified_given=False)
    assert not read(("-np", "2"), {}).unified and read(("-np", "2", "--kv-unified"), {}).unified


@pytest.mark.parametrize(("argv", "expected"), [
    (("/usr/bin/llama-server", "-m", "x"), True), (("C:\\x\\llama-server.exe",), True), (("llama-cli",), False),
    (("kvstream", "_llama-child", "--serve"), True), ((), False), (("vim", "llama-server.cpp"), False),
    (("/py", "-P", "-m", "kvstream.gateway.embedded_child", "--serve"), True)])
def test_which_process_is_a_llama_server(argv: tuple[str, ...], expected: bool) -> None:
    assert is_llama_server(argv) is expected


def test_messages_name_keys_of_kvstream_itself() -> None:
    from kvstream.adapters import llamacpp

    assert "backend.kv" in llamacpp._HOW_TO_KNOW and "kv_unified" not in llamacpp._HOW_TO_KNOW
