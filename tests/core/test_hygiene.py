"""Volatile values in bodies, and what keeps two prompts apart."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstream.config_keys import VOLATILE_NAMES
from kvstream.core import hygiene as H
from kvstream.core.hygiene import Prompt, RecentPrompts, diagnose
from kvstream.core.volatile import PATTERNS, pattern_at, replaced


def system(text: str, *turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": "system", "content": text},
                         *({"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns))]}


def raw(view: Any, **how: Any) -> bytes:
    return json.dumps(view, **how).encode()


# --- volatile values --------------------------------------------------------------------------------------------------


def test_the_configuration_and_the_core_know_the_same_names() -> None:
    assert set(VOLATILE_NAMES) == set(PATTERNS)


@pytest.mark.parametrize(("name", "text", "expected"), [
    ("anthropic_cch", "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;",
     "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=00000;"),
    ("anthropic_cch", "notcch=fa690; cch=fa 690; cch=;", None),
    ("dates", "Today is 2026-11-29, not 1-2-3.", "Today is 2000-01-01, not 1-2-3."),
    ("dates", "Sunday, November 29, 2026; 29 Nov 2026; 29.11.2026; 2026/11/29", "; ".join(["2000-01-01"] * 4)),
    ("dates", "pi is 3.14159, v12.30.4567, May I?", None),
    ("times", "at 12:34, 12:34:56.789Z, 3:04 PM and 23:59+02:00", "at 00:00, 00:00, 00:00 and 00:00"),
    ("times", "ratio 1:2:3:4 and ::1", None),
    ("total_tokens", "<total_tokens>123456 tokens left</total_tokens>", "<total_tokens>0</total_tokens>"),
    ("total_tokens", "you have 12,345 tokens left", "you have 0 tokens left"),
])
def test_a_pattern_takes_its_value_and_leaves_the_rest(name: str, text: str, expected: str | None) -> None:
    out = replaced(raw(system(text, "hi")), (name,))
    assert (None if out is None else json.loads(out)["messages"][0]["content"]) == expected
    assert out is None or replaced(out, (name,)) is None  # a second time there is nothing left to do


def test_what_a_user_wrote_is_content() -> None:
    text = "cch=abc; on 2026-11-29 at 12:34"
    assert replaced(raw(system("plain", text)), VOLATILE_NAMES) is None
    for view in ({"system": text}, {"instructions": text}, {"system": [{"type": "text", "text": text}]},
                 {"input": [{"role": "developer", "content": [{"type": "input_text", "text": text}]}]}):
        assert replaced(raw(view), VOLATILE_NAMES) is not None


def test_a_value_that_two_patterns_claim_is_replaced_once() -> None:
    out = replaced(raw(system("12:30 tokens left")), VOLATILE_NAMES)
    assert out is not None and json.loads(out)["messages"][0]["content"] == "00:00 tokens left"


@pytest.mark.parametrize("body", [b"", b"[]", b"cch=1;", b'{"system": "cch=a;"', b'{"system" "cch=a;"}', b"\xff cch=a;",
                                  b'{"messages": [1, null, {"content": "cch=a;"}, {"role": 3, "content": 4}]}'])
def test_what_is_no_such_body_is_left_alone(body: bytes) -> None:
    assert replaced(body, VOLATILE_NAMES) is None


TEXT = st.text(st.sampled_from('ab \n"\\\té\U0001f600:;-0123<'), max_size=20)
VALUE = st.sampled_from(["cch=12ab;", "12:30", "2026-11-29", "7 tokens left", "12:30, 2026-11-29; cch=1;", ""])


@given(st.lists(st.tuples(st.sampled_from(["system", "user"]), TEXT, VALUE, TEXT), max_size=4), st.booleans(),
       st.sampled_from([None, 1]), TEXT)
def test_every_other_byte_stays(rows: list[tuple[str, str, str, str]], ascii_only: bool, indent: int | None,
                                extra: str) -> None:
    """The rewritten body is the old one with constants, however the client escapes and spaces its JSON: what is before
    and after a value is compared as bytes, and what it means with a rewriting of the decoded texts."""
    view = {"x": extra, "messages": [
        {"content": f"{a} {value} {b} {value} {a}", "role": role} for role, a, value, b in rows]}
    body = json.dumps(view, ensure_ascii=ascii_only, indent=indent).encode()
    out = replaced(body, VOLATILE_NAMES)
    expected = json.loads(body)
    for message in expected["messages"]:
        for volatile in PATTERNS.values():
            if message["role"] == "system" or volatile.anywhere:
                message["content"] = volatile.pattern.sub(
                    lambda m, v=volatile: m[0].replace(m["value"], v.constant, 1), message["content"])
    assert json.dumps(expected, ensure_ascii=ascii_only, indent=indent).encode() == (body if out is None else out)


def test_the_pattern_of_a_place_is_named() -> None:
    assert pattern_at("it is 12:34 now", 10, 11) == "times"
    assert pattern_at("it is 12:34 now", 14, 15) == ""


# --- what keeps two prompts apart -------------------------------------------------------------------------------------

LONG = "Answer with care. " * 20


def found(old: dict[str, Any], new: dict[str, Any], tokens: int = 1000) -> H.Finding | None:
    result = diagnose(Prompt.read(old), Prompt.read(new), tokens)
    return None if result is None else result[1]


def test_a_value_that_changes_in_the_middle_is_found() -> None:
    finding = found(system(f"You.\nIt is 12:34 now. {LONG}", "hi"), system(f"You.\nIt is 12:35 now. {LONG}", "hi"))
    assert finding is not None
    assert finding.sentence == "prefix diverges at byte 15 of message 0: `…12:3[4|5]…`"
    assert finding.pattern == "times"
    assert 900 < finding.tokens_lost < 1000


@pytest.mark.parametrize(("old", "new"), [
    (("hi",), ("hi", "hello", "and now?")),  # a next turn
    (("hi", "hello", "and now?"), ("hi", "hello", "and then?")),  # its last message again, otherwise
    (("hi",), ("tell me a story",)),  # another conversation
    (("hi", "hello", "x"), ("hi",)),  # back to an earlier turn
    (("Translate cat, please, into French",), ("Translate dog, please, into French",)),  # a template
])
def test_what_is_no_volatile_value_is_no_finding(old: tuple[str, ...], new: tuple[str, ...]) -> None:
    assert found(system(LONG, *old), system(LONG, *new)) is None


def test_a_longer_change_is_content() -> None:
    assert found(system(f"{'a' * 60} {LONG}"), system(f"{'b' * 60} {LONG}")) is not None
    assert found(system(f"{'a' * 90} {LONG}"), system(f"{'b' * 90} {LONG}")) is None


def test_two_values_are_passed() -> None:
    def at(minute: int, left: int) -> dict[str, Any]:
        return system(f"It is 12:{minute}. {LONG} {left} tokens left. {LONG}", "hi")

    one, both = found(at(30, 100), at(31, 100)), found(at(30, 100), at(31, 99))
    assert one is not None and both is not None
    assert both.tokens_lost == pytest.approx(one.tokens_lost, rel=0.05)  # not only up to the second one


def test_of_a_long_value_only_the_length_is_shown() -> None:
    secret = found(system(f"key sk-1234567890abcdef. {LONG}"), system(f"key sk-abcdef1234567890. {LONG}"))
    assert secret is not None
    assert "567890" not in secret.excerpt and "cdef" not in secret.excerpt and len(secret.excerpt) < 50


def test_control_characters_are_not_shown() -> None:
    finding = found(system(f"a\x1b[1m {LONG}"), system(f"a\x1b[2m {LONG}"))
    assert finding is not None and finding.excerpt.isprintable()


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "does " * 20, **more}}


def test_tools_in_another_order() -> None:
    a, b = tool("a"), tool("b")
    other_keys = {"function": a["function"], "type": "function"}
    view = system(LONG, "hi")
    first = {"tools": [a, b], **view}
    for tools, kind in (([b, a], "tools reordered"), ([other_keys, b], "keys of tools reordered")):
        finding = found(first, {"tools": tools, **view})
        assert finding is not None and finding.kind == kind and finding.tokens_lost > 900
    assert found(first, {"tools": [a, tool("c")], **view}) is None
    assert found(first, first) is None


def test_the_nearest_prompt_is_compared_with() -> None:
    """Two conversations by turns: each extends its own, nothing is lost."""
    recent = RecentPrompts()
    for turn in range(3):
        for who in ("red", "blue"):
            assert recent.look(("c", "m"), Prompt.read(system(LONG, who, *[LONG] * turn)), 100) is None


def test_the_latest_of_equals_is_compared_with() -> None:
    recent = RecentPrompts()
    for minute in range(10, 15):
        recent.look(("c", "m"), Prompt.read(system(f"It is 12:{minute}. {LONG}")), 100)
    (finding,) = recent.findings()
    assert finding.excerpt == "…12:1[3|4]…" and finding.requests == 4
    assert finding.tokens_lost_total == 4 * finding.tokens_lost


def test_owners_are_kept_apart() -> None:
    recent = RecentPrompts()
    for owner in (("a", "m"), ("b", "m"), ("a", "n")):
        assert recent.look(owner, Prompt.read(system(f"I am {owner}. {LONG}")), 100) is None
    assert recent.findings() == []


def test_of_many_tools_only_the_first_are_looked_at() -> None:
    many = Prompt.read({"tools": [tool(str(n), x="y" * 10_000) for n in range(100)], **system("hi")})
    assert H.PROMPT_BYTES_MAX <= many.tools_bytes < H.PROMPT_BYTES_MAX + 20_000 and len(many.tools) < 30


def test_memory_is_bounded() -> None:
    recent = RecentPrompts()
    for i in range(200):
        text = f"{i} " + "x" * 300_000
        prompt = Prompt.read(system(text))
        assert len(prompt.flat) == H.PROMPT_BYTES_MAX
        recent.look((str(i % 50), "m"), prompt, 100)
        assert recent.bytes <= H.MEMORY_BYTES_MAX
        kept = [p for prompts in recent._prompts.values() for p in prompts]
        assert sum(len(p.flat) for p in kept) == recent.bytes
    for i in range(200):
        recent.look((f"s{i}", "m"), Prompt.read(system("small")), 1)
    assert sum(map(len, recent._prompts.values())) <= H.PROMPTS_MAX
    for i in range(100):
        for n in (1, 2):
            recent.look(("c", f"m{i}"), Prompt.read(system(f"It is 12:3{n}. {LONG}")), 1)
    assert len(recent.findings()) <= H.FINDINGS_MAX


@given(st.binary(max_size=200), st.binary(max_size=200), st.binary(max_size=200))
def test_the_length_of_a_common_beginning(head: bytes, a: bytes, b: bytes) -> None:
    left, right = head + a, head + b
    n = 0
    while n < min(len(left), len(right)) and left[n] == right[n]:
        n += 1
    assert H._common_bytes(left, right, 0, 0) == n


FIELDS = ["messages", "system", "role", "content", "text", "tools", "tool_calls", "input"]
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                        st.sampled_from(FIELDS),
                        inner, max_size=4), max_leaves=20)


@given(st.dictionaries(st.sampled_from(["messages", "system", "tools", "input", "prompt"]), JSON), JSON)
def test_any_body_can_be_read(view: dict[str, Any], other: Any) -> None:
    recent = RecentPrompts()
    for body in (view, {**view, "system": other}):
        recent.look(("c", "m"), Prompt.read(body), 10)
        replaced(json.dumps(body).encode(), VOLATILE_NAMES)
