"""The arithmetic of `just bench-inject`."""

from __future__ import annotations

import pytest

from tests.measure.inject_sums import (
    Fan,
    Turn,
    apart,
    common_prefix,
    fan_of,
    first_difference,
    ratio,
    samples,
    talk_computed,
    talk_ideal,
    total,
)


def test_of_a_fan_the_shared_tokens_count_once() -> None:
    fan = fan_of([[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 3, 7]])
    assert fan == Fan(3, (1, 2, 1))
    assert (fan.ideal, fan.naive, fan.bound(1.5)) == (7, 13, 8.5)


def test_a_prompt_that_is_all_shared_costs_one_token() -> None:
    assert fan_of([[1, 2], [1, 2, 3]]) == Fan(2, (1, 1))


@pytest.mark.parametrize(("rows", "n"), [([[1]], 1), ([[], [1]], 0), ([[1, 2], [1, 3]], 1), (["abc", "abd"], 2)])
def test_common_prefix(rows: list[list[int]], n: int) -> None:
    assert common_prefix(rows) == n


def test_a_talk_computes_its_first_prompt_and_then_what_is_new() -> None:
    turns = [Turn(100, 0, 11), Turn(150, 110, 21), Turn(200, 0, 5)]
    assert talk_ideal(turns) == 100 + (150 - 110) + (200 - 170)
    assert talk_computed(turns) == 100 + 40 + 200


def test_a_turn_computes_at_least_one_token() -> None:
    assert talk_ideal([Turn(100, 0, 11), Turn(105, 104, 1)]) == 101
    assert talk_ideal([Turn(100, 0, 0)]) == 100
    assert talk_ideal([]) == 0


def test_ratio_is_of_medians() -> None:
    assert ratio([1, 100, 3], [2, 1, 1]) == 3


def test_first_difference() -> None:
    assert first_difference("abc", "abc") is None
    assert first_difference("abc", "abd") == 2
    assert first_difference("ab", "abc") == 2


def test_apart() -> None:
    assert apart(0, 0) == 0
    assert apart(99, 100) == pytest.approx(0.01)
    assert apart(1, 0) > 1


def test_samples_and_their_totals() -> None:
    page = samples('# TYPE a counter\na_total{x="1",y="q\\"}"} 2\na_total{y="r",x="2"} 3.5\nllamacpp:b 7\nodd line\n')
    assert total(page, "a_total") == 5.5
    assert total(page, "a_total", x="2") == 3.5
    assert total(page, "llamacpp:b") == 7
    assert total(page, "none") == 0
