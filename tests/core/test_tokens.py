"""Page keys and the token estimate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstream.core.tokens import TextSize, TokenEstimator, page_keys, salt, text_keys

START = salt("model")


@given(st.lists(st.integers(0, 2**32 - 1), max_size=60), st.lists(st.integers(0, 9), max_size=60), st.integers(1, 9))
def test_keys_agree_exactly_as_far_as_the_tokens_do(ids: list[int], other: list[int], page_tokens: int) -> None:
    keys, others = page_keys(ids, page_tokens, START), page_keys(other, page_tokens, START)
    assert len(keys) == len(ids) // page_tokens
    for i, (a, b) in enumerate(zip(keys, others, strict=False)):
        same = ids[: (i + 1) * page_tokens] == other[: (i + 1) * page_tokens]
        assert (a == b) == (a.digest == b.digest) == same
    assert page_keys(ids + other, page_tokens, START)[: len(keys)] == keys


@given(st.binary(max_size=200), st.binary(max_size=50), st.integers(1, 4), st.integers(1, 4))
def test_text_is_cut_from_its_start(text: bytes, more: bytes, page_tokens: int, per_token: int) -> None:
    keys = text_keys(text, page_tokens, START, per_token)
    assert len(keys) == len(text) // (page_tokens * per_token)
    assert text_keys(text + more, page_tokens, START, per_token)[: len(keys)] == keys
    assert b"".join(key.content for key in keys) == text[: len(keys) * page_tokens * per_token]


def test_equal_content_in_another_context_has_another_key() -> None:
    keys = page_keys([7] * 8, 4, START)
    assert keys[0].content == keys[1].content and keys[0].digest != keys[1].digest


def test_models_and_clients_do_not_meet() -> None:
    salts = {salt("ab", "c"), salt("a", "bc"), salt("abc"), salt("", "abc"), salt("ab", "c\0"), salt("\ud800")}
    assert len(salts) == 6
    assert salt("ab", "c") == salt("ab", "c")


def test_keys_are_the_same_on_every_machine() -> None:
    assert page_keys([1, 2, 3, 4], 4, START)[0].digest.hex() == "26ce1cbfb5ca5049a74845779a237378"
    assert page_keys([1, 2], 2, START)[0].content == b"\1\0\0\0\2\0\0\0"


def test_a_page_has_tokens() -> None:
    with pytest.raises(ValueError):
        page_keys([1], 0, START)


@pytest.mark.parametrize(("text", "units"), [
    ("", 0), ("Hello, world!", 4), ("naïve café", 2), ("1234567", 3), ("日本語です", 5), ("a_b", 3), ("   \n\t", 0),
    ("🙂🙂", 2),
])
def test_units(text: str, units: int) -> None:
    assert TextSize.of(text) == TextSize(len(text), units)


def test_the_larger_guess_wins() -> None:
    estimator = TokenEstimator()
    assert estimator.estimate("abcdefghijklmnopqrst") == 5  # by characters
    assert estimator.estimate("{[(!?)]}") == 8  # by units
    assert estimator.estimate("日本語です") == 5
    assert estimator.estimate("") == 0


def test_it_learns_slowly_and_returns_a_new_value() -> None:
    before = TokenEstimator()
    after = before.learn(TextSize(500, 120), 100)
    assert (before.chars_per_token, before.units_per_token) == (4.0, 1.0)
    assert after.chars_per_token == pytest.approx(4.2)
    assert after.units_per_token == pytest.approx(1.04)
    assert after.samples == 1


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6)), max_size=30))
def test_no_lesson_drives_the_ratios_out_of_bounds(lessons: list[tuple[int, int, int]]) -> None:
    estimator = TokenEstimator()
    for chars, units, tokens in lessons:
        estimator = estimator.learn(TextSize(chars, units), tokens)
    assert 1.5 <= estimator.chars_per_token <= 8.0
    assert 0.3 <= estimator.units_per_token <= 3.0


@given(st.floats(1.6, 7.9), st.floats(0.4, 2.9))
def test_it_converges(chars_per_token: float, units_per_token: float) -> None:
    estimator = TokenEstimator()
    for _ in range(60):
        estimator = estimator.learn(TextSize(round(1000 * chars_per_token), round(1000 * units_per_token)), 1000)
    assert estimator.chars_per_token == pytest.approx(chars_per_token, rel=0.01)
    assert estimator.units_per_token == pytest.approx(units_per_token, rel=0.01)


def test_useless_samples_are_ignored() -> None:
    estimator = TokenEstimator()
    for chars, units, tokens in ((0, 0, 100), (100, 0, 100), (4, 1, 3), (4, 1, 0)):
        assert estimator.learn(TextSize(chars, units), tokens) is estimator
