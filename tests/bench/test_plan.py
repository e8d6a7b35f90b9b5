"""The plan and the prompts: the same for the same seed, and never the same prompt twice."""

from __future__ import annotations

import json
from itertools import islice, pairwise
from typing import Any

import attrs
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from kvstream.bench import dice
from kvstream.bench.plan import Kind, Load, Talk, block_of, parse_mix, rounds_of
from kvstream.bench.prompts import Lengths, learnt, message, request_body, text_of
from kvstream.bench.slo import parse_slo
from kvstream.bench.target import describe, learn_lengths
from kvstream.bench.words import WORDS
from kvstream.errors import BackendUnavailableError, ConfigError
from tests.bench.conftest import load, measured, target_of
from tests.fakes import open_runtime
from tests.fakes.tokens import Tokenizer

MIX = parse_mix("short:0.8:64:32,long:0.2:1500:64")


def test_the_words() -> None:
    assert len(WORDS) == len(set(WORDS)) == 512
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)


def test_a_mixture() -> None:
    assert MIX == (Kind("short", 0.8, 64, 32), Kind("long", 0.2, 1500, 64))
    kinds = [talk.kind.name for talk in islice(block_of(load(kinds=MIX, requests=None), 1, 0, 0), 1000)]
    assert kinds.count("long") == pytest.approx(200, abs=3)
    for start in range(0, 980, 20):  # every stretch has the mixture, so that short rounds are alike
        assert 2 <= kinds[start:start + 20].count("long") <= 6


@pytest.mark.parametrize("text", ["", "a", "a:1:2", "a:x:1:1", "a:0:1:1", "a:inf:1:1", "a:1:0:1", "a:1:1:0", ":1:1:1",
                                  "a:1:1:1,a:1:1:1", "a:1:1:1,", "a:-1:5:5"])
def test_a_wrong_mixture(text: str) -> None:
    with pytest.raises(ConfigError, match="--mix"):
        parse_mix(text)


def test_bounds() -> None:
    assert parse_slo("ttft:2s, tpot:80ms").bounds == (("ttft", 2.0), ("tpot", 0.08))
    assert str(parse_slo("ttft:2s,tpot:80ms")) == "ttft <= 2 s, tpot <= 80 ms"


@pytest.mark.parametrize("text", ["", "ttft", "ttft:2", "ttft:2m", "itl:2s", "ttft:-1s", "ttft:2s,"])
def test_wrong_bounds(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        parse_slo(text)


@given(st.integers(1, 300), st.integers(1, 7), st.integers(0, 99))
def test_rounds_share_the_talks(requests: int, rounds: int, seed: int) -> None:
    wanted = load(requests=requests, rounds=rounds, seed=seed, concurrency=4)
    count = rounds_of(wanted, 2)
    assert 1 <= count <= rounds
    numbers: list[int] = []
    for number in range(count):
        talks = list(block_of(wanted, count, number, len(numbers)))
        assert len(talks) >= 4 or requests < 4  # no round lighter than the clients
        numbers += [talk.number for talk in talks]
    assert numbers == list(range(requests))


def test_one_target_has_one_round() -> None:
    assert rounds_of(load(requests=50, rounds=5), 1) == 1
    assert rounds_of(load(requests=50, rounds=5, concurrency=16), 2) == 3
    assert rounds_of(load(requests=None, duration_s=60.0, rounds=5, concurrency=64), 3) == 5


def test_arrivals() -> None:
    constant = list(block_of(load(requests=5, rate=4.0, arrivals="constant"), 1, 0, 0))
    assert [talk.starts_s for talk in constant] == [0, 0.25, 0.5, 0.75, 1.0]
    poisson = list(block_of(load(requests=4000, rate=10.0), 1, 0, 0))
    gaps = [(b.starts_s or 0) - (a.starts_s or 0) for a, b in pairwise(poisson)]
    assert sum(gaps) / len(gaps) == pytest.approx(0.1, rel=0.05)
    assert sum(gap > 0.1 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)  # as an exponential has
    timed = list(block_of(load(requests=None, duration_s=3.0, rate=10.0, arrivals="constant"), 1, 0, 0))
    assert len(timed) == 30
    assert poisson == list(block_of(load(requests=4000, rate=10.0), 1, 0, 0))
    assert poisson != list(block_of(load(requests=4000, rate=10.0, seed=2), 1, 0, 0))


@given(st.integers(), st.text(max_size=9), st.integers(0, 400), st.integers(0, 400))
def test_a_longer_row_begins_with_the_shorter(seed: int, name: str, few: int, many: int) -> None:
    short, long = sorted((few, many))
    assert list(dice.words(WORDS, long, seed, name))[:short] == list(dice.words(WORDS, short, seed, name))


def test_chance_is_even() -> None:
    draws = [dice.draw(7, "x", n) for n in range(4000)]
    assert all(0 <= d < 1 for d in draws)
    assert sum(draws) / 4000 == pytest.approx(0.5, abs=0.02)
    for tenth in range(10):
        assert sum(tenth / 10 <= d < tenth / 10 + 0.1 for d in draws) == pytest.approx(400, abs=90)


def messages(wanted: Load, target: str = "a", count: int = 50) -> list[str]:
    talks = [Talk(number, wanted.kinds[0], 1) for number in range(count)]
    return [message(wanted, Lengths("estimated"), target, talk, 0) for talk in talks]


def test_prompts_are_unique_over_talks_turns_targets_seeds_and_warm_ups() -> None:
    wanted = load(prompt_tokens=1)  # the shortest there is
    texts = messages(wanted) + messages(wanted, "b") + messages(attrs.evolve(wanted, seed=2))
    texts += [message(wanted, Lengths("estimated"), "a", Talk(n, wanted.kinds[0], 2), 1) for n in range(50)]
    texts += [message(wanted, Lengths("estimated"), "a", Talk(-1 - n, wanted.kinds[0], 1), 0) for n in range(50)]
    assert len(set(texts)) == len(texts) == 250
    assert messages(wanted) == messages(wanted)


def test_the_shared_part() -> None:
    wanted = load(prompt_tokens=230, shared_prefix=0.8)
    one, two = (text.split() for text in messages(wanted, count=2))
    assert len(one) == len(two) == 201
    assert one[:161] == two[:161] and one[161:165] != two[161:165]
    warm_up = message(wanted, Lengths("estimated"), "a", Talk(-1, wanted.kinds[0], 1), 0).split()
    assert one[1:9] != warm_up[1:9]  # or the first measured request would find it in the cache
    other = messages(wanted, "b", 1)[0].split()
    assert one[1:9] != other[1:9]  # another target behind the same cache shares nothing with it
    assert messages(attrs.evolve(wanted, shared_prefix=1.0))[0] != messages(attrs.evolve(wanted, shared_prefix=1.0))[1]


def test_the_body() -> None:
    body = json.loads(request_body(load(), "m", [{"role": "user", "content": "x"}], 9))
    assert body == {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "temperature": 0,
                    "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    plain = json.loads(request_body(load(route="/v1/completions", ignore_eos=False), "", [{"content": "x"}], 9))
    assert plain["prompt"] == "x" and not {"model", "messages", "ignore_eos"} & set(plain)


# --- lengths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dialect", "route"), [("llamacpp", "/v1/chat/completions"), ("llamacpp", "/v1/completions"),
                                                ("openai", "/v1/chat/completions"), ("openai", "/v1/completions")])
async def test_prompts_have_exactly_the_asked_length(dialect: Any, route: str,
                                                     autojump_clock: trio.abc.Clock) -> None:
    wanted = load(requests=6, prompt_tokens=128, route=route)
    async with open_runtime(dialect=dialect) as runtime:
        target = target_of(runtime)
        lengths = await learn_lengths(target, wanted)
        assert lengths.source == "exact" and len(lengths.words) == 512
        result = await measured(runtime, wanted, lengths=lengths)
    assert [record.tokens_prompt for record in result.targets[0].records] == [128] * 6


class Spelling(Tokenizer):
    """Words that begin with "gre" are two tokens."""

    def encode(self, text: str) -> list[int]:
        tokens = super().encode(text)
        return [token for one in tokens for token in [one] * (1 + self.decode([one]).startswith(" gre"))]


async def test_words_of_several_tokens_are_left_out(autojump_clock: trio.abc.Clock) -> None:
    async with open_runtime() as runtime:
        runtime.tokenizer = Spelling()
        lengths = await learn_lengths(target_of(runtime), load())
    assert lengths.source == "exact"
    assert {word for word in WORDS if word.startswith("gre")} == set(WORDS) - set(lengths.words) != set()


async def test_without_a_tokenizer_lengths_are_learnt_from_answers(autojump_clock: trio.abc.Clock) -> None:
    wanted = load(requests=3, prompt_tokens=300)
    async with open_runtime(tokenizer=False) as runtime:
        lengths = await learn_lengths(target_of(runtime), wanted)
        assert lengths.source == "learnt" and lengths.per_word == 1.0
        result = await measured(runtime, wanted, lengths=lengths)
    assert {record.tokens_prompt for record in result.targets[0].records} == {300}


async def test_with_nothing_to_go_by_lengths_are_estimated(autojump_clock: trio.abc.Clock) -> None:
    async with open_runtime(tokenizer=False, usage_style="none", dialect="openai") as runtime:
        assert (await learn_lengths(target_of(runtime), load())).source == "estimated"
    async with open_runtime(refuse=True) as runtime:
        assert (await learn_lengths(target_of(runtime), load())).source == "estimated"


def test_learning() -> None:
    lengths = learnt((16, 52), (144, 244))
    assert (lengths.per_word, lengths.overhead) == (1.5, 28)
    assert lengths.words_for(328) == 200
    assert len(text_of(["a", "b"]).split()) == 3


async def test_a_prompt_of_another_length_is_told(autojump_clock: trio.abc.Clock) -> None:
    async with open_runtime() as runtime:
        result = await measured(runtime, load(prompt_tokens=200), lengths=Lengths("estimated", 30, 2.0))
    assert any("were to have 200 tokens and had 9" in remark for remark in result.remarks)


async def test_what_a_target_is(autojump_clock: trio.abc.Clock) -> None:
    async with open_runtime() as runtime:
        assert await describe(target_of(runtime)) == ("llama.cpp", ["fake-model"])
    async with open_runtime(refuse=True) as runtime:
        with pytest.raises(BackendUnavailableError, match="nothing answers at http://fake"):
            await describe(target_of(runtime))
    async with open_runtime(api_key="secret") as runtime:
        with pytest.raises(BackendUnavailableError, match="--api-key"):
            await describe(target_of(runtime))
