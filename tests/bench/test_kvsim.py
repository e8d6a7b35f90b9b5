"""The simulated card beside what was published of the original, and what the simulation rests on."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from attrs import evolve

from kvstream.bench.kvcard import Card
from kvstream.bench.kvmodel import FITTED_TO, MODELS, PROFILES, Model, Profile, Published, model_from, profile_from
from kvstream.bench.kvpoint import PUBLISHED, Setup, first_streamed
from kvstream.bench.kvrun import Step, decoded
from kvstream.bench.kvsim import DECODED, layout_of, page_entry_ms, pool_of, simulate
from kvstream.errors import ConfigError

MODEL = MODELS[FITTED_TO]
NEW, OLD = PROFILES["rtx-5070-ti"], PROFILES["rtx-5060-ti"]
ON_NEW, ON_OLD = Setup(NEW, MODEL, pool_mib=2048), Setup(OLD, MODEL, pool_mib=2528)


@cache
def steps_of(setup: Setup, context: int) -> tuple[Step, ...]:
    with Card(setup.profile, setup.model, layout_of(setup, context + setup.decode_tokens)) as card:
        return tuple(decoded(card, setup, context, min(setup.decode_tokens, DECODED)))


def usual_ms(setup: Setup, context: int) -> float:
    return sum(step.ms for step in steps_of(setup, context)[-16:]) / 16


def computed_ms(setup: Setup, context: int) -> float:
    """What a token takes without any copy."""
    return setup.profile.decode_ms(setup.model) + setup.profile.attention_ms(setup.model, context + 32)


def published(profile: Profile, context: int) -> Published:
    point = profile.published_at(context)
    assert point is not None
    return point


@pytest.mark.parametrize("profile", [NEW, OLD], ids=lambda profile: profile.name)
def test_the_constants_are_those_of_the_published_figures(profile: Profile) -> None:
    """Without any copy they give what was measured where nothing had to be copied, and are nowhere slower by more than
    0.2 %: what is faster in the simulation is so because of how it copies."""
    setup = Setup(profile, MODEL)
    for point in profile.published:
        computed = 1e3 / (profile.decode_ms(MODEL) + profile.attention_ms(MODEL, point.context))
        assert computed > point.decode_tps * 0.998
    first = profile.published[0]
    assert 1e3 / computed_ms(setup, first.context) == pytest.approx(first.decode_tps, rel=0.002)


@pytest.mark.parametrize("context", [81920, 98304, 131072])
def test_copies_are_hidden_up_to_131k(context: int) -> None:
    exposed = usual_ms(ON_NEW, context) - computed_ms(ON_NEW, context)
    assert exposed <= 0.01 * usual_ms(ON_NEW, context)  # 3 % is what was asked
    assert sum(step.bytes for step in steps_of(ON_NEW, context)) > 0


@pytest.mark.parametrize("context", [81920, 98304, 131072, 163584])
def test_decode_beside_the_published_figures(context: int) -> None:
    """At least as fast; where the constants alone allow no more than was measured, within the price of the waves."""
    ours, theirs = 1e3 / usual_ms(ON_NEW, context), published(NEW, context).decode_tps
    assert ours >= min(theirs, 0.995e3 / computed_ms(ON_NEW, context))
    if context > 100_000:
        assert ours > theirs


@pytest.mark.parametrize("context", [98304, 147456, 180224])
def test_decode_on_the_older_card(context: int) -> None:
    """With the pool that it has beside the same weights at 8K: nothing of ours grows with the context but the KV."""
    assert 1e3 / usual_ms(ON_OLD, context) > published(OLD, context).decode_tps


def test_beyond_the_link_decides() -> None:
    usual = steps_of(ON_NEW, 163584)[-16:]
    copies = sum(NEW.copy_ms(step.bytes) + step.calls * NEW.call_ms for step in usual) / 16
    token = usual_ms(ON_NEW, 163584)
    assert copies > computed_ms(ON_NEW, 163584) and token < copies * 1.06
    assert token == pytest.approx(55.8, rel=0.25)  # what the original took


def test_the_ring_becomes_as_small_as_it_may_be() -> None:
    """By the published rule 397 cells; once the link and the layers have been timed, less."""
    setup = evolve(ON_NEW, decode_tokens=24)
    with Card(NEW, MODEL, layout_of(setup, 163584 + 24)) as card:
        card.open_at(163584)
        card.decode(2)
        before = card.split()
        card.decode(22)
        after = card.split()
    assert before[1] > 380 > 350 > after[1] and after[0] > before[0]


def test_entering_a_page_costs_no_reload() -> None:
    layout = layout_of(ON_NEW, 131072 + 256)
    token = usual_ms(ON_NEW, 131072)
    entering, reloading = (page_entry_ms(ON_NEW, layout, 131072, reload) for reload in (False, True))
    assert entering < token * 1.03
    assert reloading > token + 0.75 * NEW.copy_ms(layout.cells * layout.geometry.page_bytes)


def test_a_context_that_fits_is_never_copied() -> None:
    steps = steps_of(ON_NEW, 65536)
    assert sum(step.bytes + step.calls for step in steps[1:]) == 0
    assert usual_ms(ON_NEW, 65536) == pytest.approx(computed_ms(ON_NEW, 65536), rel=0.003)


def test_where_streaming_begins() -> None:
    layout = layout_of(ON_NEW, 163584)
    first = first_streamed(ON_NEW, layout)
    assert first == (layout.cells - 16) // 16 * 256 + 256
    small = layout_of(Setup(NEW, MODEL), 8192)
    assert first_streamed(ON_NEW, small) > 8192


def test_a_prefill_goes_on_where_the_one_before_ended() -> None:
    setup = evolve(ON_NEW, pool_mib=256)
    with Card(NEW, MODEL, layout_of(setup, 16384)) as card:
        card.open_at(0)
        steps = card.prefill(512, 8)
        assert card.tokens == 4096 and sum(step.bytes for step in steps[:4]) == 0
        for step, (start, end) in zip(steps, pairwise(range(0, 4097, 512)), strict=True):
            assert step.compute_ms == pytest.approx(sum(NEW.prefill_step_ms(MODEL, 512, (start + end) / 2)))
            assert step.ms == pytest.approx(step.compute_ms, rel=0.02)
        assert len(card.decode(9, for_s=0.0)) == 1 and len(card.decode(9, for_s=0.04)) == 4 and card.tokens == 4101


def test_a_point() -> None:
    setup = Setup(NEW, MODEL, pool_mib=224, decode_tokens=64)
    told: list[tuple[int, int]] = []
    point = simulate(setup, 8192, lambda done, total: told.append((done, total)))
    assert told == [(number, 7) for number in range(1, 8)]
    assert (point.context_capacity, point.prompt_tokens, point.decode_tokens, point.pool_mib) == (8256, 8192, 64, 224)
    assert point.streaming_active and point.stream_first_active_tokens is not None
    assert point.stream_first_active_tokens < 8192
    assert point.prefill_tps == pytest.approx(8192e3 / point.prompt_ms)
    assert point.decode_tps == pytest.approx(64e3 / point.predicted_ms)
    assert point.decode_tps <= point.baseline_decode_tps
    assert 0 < point.h2d_mib_per_token < 33 * 16 * 425984 / 2**20 and point.h2d_calls_per_token > 0
    assert point.copy_ms > NEW.copy_ms(round(point.h2d_mib_per_token * 2**20)) > 0
    assert 0 <= point.overlap_pct <= 100 and 0 <= point.miss_rate <= 1
    assert point.predicted_decode_tps <= point.baseline_decode_tps * 1.001
    assert point.page_entry_reload_ms > point.page_entry_ms >= point.compute_ms * 0.99
    assert point.published_decode_tps is None


def test_an_h200_with_a_small_pool_is_bound_by_its_link() -> None:
    setup = Setup(PROFILES["h200"], MODEL, pool_mib=1024)
    usual = steps_of(setup, 65536)[-16:]
    copies = sum(setup.profile.copy_ms(step.bytes) + step.calls * setup.profile.call_ms for step in usual)
    assert copies / sum(step.ms for step in usual) > 0.9


# --- pools ------------------------------------------------------------------------------------------------------------


def test_the_automatic_pool() -> None:
    """As large as memory allows, and no larger than of use."""
    auto = Setup(NEW, MODEL)
    free = NEW.pool_free_mib(MODEL, 64.0)
    assert free - 32 < pool_of(auto, 196608) <= free and pool_of(auto, 196608) % 32 == 0
    small = pool_of(auto, 8192)
    assert small % 32 == 0 and small < 400
    assert first_streamed(auto, layout_of(auto, 8192)) > 8192
    assert pool_of(evolve(auto, margin_mib=64 + free - 100), 196608) == 96
    with pytest.raises(ConfigError, match="leaves"):
        pool_of(evolve(auto, margin_mib=64 + free), 196608)


def test_the_published_pools() -> None:
    theirs = evolve(ON_OLD, pool_mib=PUBLISHED)
    assert [pool_of(theirs, context + 256) for context in (1, 8192, 36864, 65536, 122880, 180224, 200000)] == [
        2528, 2528, 2384, 2240, 2000, 1760, 1760]
    assert layout_of(theirs, 8192 + 256).cells == 2528 * 2**20 // 425984 or layout_of(theirs, 180480).cells == (
        1760 * 2**20 // 425984), "theirs held pages alone"
    with pytest.raises(ConfigError, match="no published"):
        pool_of(Setup(PROFILES["h200"], MODEL, pool_mib=PUBLISHED), 8192)


def test_a_pool_that_is_too_small_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="is too small: 19 cells"):
        simulate(evolve(ON_NEW, pool_mib=20), 8192)


# --- cards and models -------------------------------------------------------------------------------------------------


def test_other_models_are_scaled() -> None:
    model = MODELS["llama-3.1-8b"]
    assert NEW.attention_ms(model, 1000) == pytest.approx(0.174 * 32 * 32 * 128 / (16 * 24 * 256))
    assert NEW.decode_ms(model) == pytest.approx(4692 * 2**20 / 896e6)
    assert NEW.prefill_step_ms(model, 1, 0)[0] == pytest.approx(0.684 * 4692 / 13107)


def test_a_card_and_a_model_of_ones_own() -> None:
    card = {"name": "x", "h2d_gib_s": 12, "hbm_gb_s": 300, "c0_ms": 30, "c1_ms_per_1k_tokens": 0.3, "prefill_ms": 1,
            "prefill_ms_per_1k": 0.01, "usable_mib": 7000}
    assert profile_from(card, "x.json") == Profile(**card, basis="x.json")  # type: ignore[arg-type]
    model = {"name": "m", "layers": 8, "kv_heads": 2, "q_heads": 4, "head_size": 64, "weights_mib": 500}
    assert model_from(model, "m.json") == Model(**model)  # type: ignore[arg-type]


@pytest.mark.parametrize(("change", "words"), [
    ({"layers": 1.5}, "layers must be a whole number"), ({"layers": True}, "layers must be"), ({"name": ""}, "a text"),
    ({"weights_mib": -1}, "weights_mib must be a number"), ({"heads": 3}, "heads is no field"), ({"name": 3}, "a text"),
])
def test_wrong_fields(change: dict[str, object], words: str) -> None:
    model = {"name": "m", "layers": 8, "kv_heads": 2, "q_heads": 4, "head_size": 64, "weights_mib": 500}
    with pytest.raises(ConfigError, match=words):
        model_from(model | change, "m.json")


def test_wrong_cards() -> None:
    with pytest.raises(ConfigError, match="h2d_gib_s must be more than 0"):
        profile_from({"h2d_gib_s": 0}, "x")
    with pytest.raises(ConfigError, match="usable_mib is missing"):
        profile_from({}, "x")
    with pytest.raises(ConfigError, match="no JSON object"):
        model_from([], "m.json")
