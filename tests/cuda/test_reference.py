"""The oracle against itself written in three ways: loops over numbers, whole matrices, and page by page."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstream.cuda.layout import Geometry
from kvstream.cuda.reference import (
    Partial,
    attention,
    attention_paged,
    combine,
    decode_page,
    encode_pages,
    fold,
    partial,
)
from kvstream.cuda.types import KVType, decode, encode
from tests.cuda.strategies import geometries, kv_values, queries

F64 = NDArray[np.float64]
SMALL = Geometry(1, 2, 6, 64, KVType.F32, KVType.F32, page_tokens=32)


def by_hand(q: F64, k: F64, v: F64, positions: list[int]) -> list[list[list[float]]]:
    """The definition, number by number."""
    group = q.shape[1] // k.shape[1]
    result = []
    for row, position in enumerate(positions):
        heads = []
        for head in range(q.shape[1]):
            scores = [math.fsum(float(a) * float(b) for a, b in zip(q[row, head], k[token, head // group], strict=True))
                      / math.sqrt(q.shape[2]) for token in range(position + 1)]
            top = max(scores)
            weights = [math.exp(score - top) for score in scores]
            heads.append([
                math.fsum(weight * float(v[token, head // group, i]) for token, weight in enumerate(weights))
                / math.fsum(weights) for i in range(q.shape[2])])
        result.append(heads)
    return result


def test_attention_is_its_definition() -> None:
    k, v = kv_values(1, 40, SMALL)
    q = queries(1, 3, SMALL)
    positions = [0, 17, 39]
    assert np.abs(attention(q, k, v, positions) - by_hand(q, k, v, positions)).max() < 1e-13


def test_a_row_sees_itself_and_what_is_before() -> None:
    k, v = kv_values(2, 40, SMALL)
    q = queries(2, 1, SMALL)
    assert np.allclose(attention(q, k, v, [0])[0], v[0].repeat(3, axis=0), rtol=0, atol=1e-15)
    before = attention(q, k, v, [20])
    k[21:], v[21:] = np.nan, np.nan
    assert np.array_equal(attention(q, k, v, [20]), before)
    k[20] += 1
    assert not np.array_equal(attention(q, k, v, [20]), before)


def test_positions_beyond_the_tokens_are_refused() -> None:
    k, v = kv_values(3, 5, SMALL)
    for position in (-1, 5):
        with pytest.raises(ValueError, match=f"at position {position} of 5 tokens"):
            attention(queries(3, 1, SMALL), k, v, [position])


def test_scores_may_be_large() -> None:
    """exp of these scores overflows unless the largest is taken off first."""
    k, v = kv_values(4, 70, SMALL)
    q = queries(4, 2, SMALL) * 1000
    out = attention_paged(SMALL, q, *encode_pages(SMALL, k, v), [69, 40])
    assert np.isfinite(out).all()
    assert np.allclose(out, attention(q, k, v, [69, 40]), rtol=0, atol=1e-11)


def test_the_scale_may_be_given() -> None:
    k, v = kv_values(5, 40, SMALL)
    q = queries(5, 2, SMALL)
    pages = encode_pages(SMALL, k, v)
    expected = attention(q * 2, k, v, [39, 30])
    assert np.allclose(attention(q, k, v, [39, 30], scale=0.25), expected, rtol=0, atol=1e-13)
    assert np.allclose(attention_paged(SMALL, q, *pages, [39, 30], scale=0.25), expected, rtol=0, atol=1e-13)


# --- pages ------------------------------------------------------------------------------------------------------------


@given(geometry=geometries(page_tokens=(32, 64)), tokens=st.integers(1, 150), seed=st.integers(0, 999),
       data=st.data())
def test_paged_equals_dense(geometry: Geometry, tokens: int, seed: int, data: st.DataObject) -> None:
    """Any types, head sizes, groups and widths; rows anywhere, also several in pages that others do not see."""
    k, v = kv_values(seed, tokens, geometry)
    positions = data.draw(st.lists(st.integers(0, tokens - 1), min_size=1, max_size=4))
    q = queries(seed, len(positions), geometry)
    pages = encode_pages(geometry, k, v)
    stored = [
        decode(kind, encode(kind, values.reshape(tokens, -1)), geometry.row_values).reshape(values.shape)
        for kind, values in ((geometry.k_type, k), (geometry.v_type, v))]
    expected = attention(q, *stored, positions)
    assert np.allclose(attention_paged(geometry, q, *pages, positions), expected, rtol=0, atol=1e-12)


# What storing K, and V, in a type costs the result of attention, in units of V's standard deviation, with a margin.
K_COST = {KVType.F32: 1e-13, KVType.F16: 0.0008, KVType.BF16: 0.015, KVType.Q8_0: 0.03, KVType.Q5_1: 0.26,
          KVType.Q5_0: 0.3, KVType.Q4_1: 0.8, KVType.Q4_0: 0.8, KVType.IQ4_NL: 0.8}
V_COST = {KVType.F32: 1e-13, KVType.F16: 0.0006, KVType.BF16: 0.005, KVType.Q8_0: 0.012, KVType.Q5_1: 0.08,
          KVType.Q5_0: 0.09, KVType.Q4_1: 0.16, KVType.Q4_0: 0.19, KVType.IQ4_NL: 0.17}


@pytest.mark.parametrize("k_type", KVType, ids=str)
def test_all_pairs_come_as_near_as_their_types_allow(k_type: KVType) -> None:
    """And no nearer: a pair that decodes another type than was asked for would show."""
    for v_type in KVType:
        geometry = Geometry(1, 2, 6, 80, k_type, v_type, page_tokens=32)
        k, v = kv_values(9, 70, geometry)
        q = queries(9, 3, geometry)
        positions = [69, 40, 64]
        error = np.abs(attention_paged(geometry, q, *encode_pages(geometry, k, v), positions)
                       - attention(q, k, v, positions)).max()
        assert error < K_COST[k_type] + V_COST[v_type], v_type
        assert error > max(K_COST[k_type], V_COST[v_type]) / 4 or k_type is v_type is KVType.F32, v_type


def test_what_no_token_fills_is_never_looked_at() -> None:
    """Cells hold what was there before, and a poisoned f16 is a NaN."""
    for k_type, v_type in itertools.product((KVType.F32, KVType.F16, KVType.Q8_0, KVType.Q4_1), repeat=2):
        geometry = Geometry(1, 2, 4, 64, k_type, v_type, page_tokens=32)
        k, v = kv_values(6, 40, geometry)
        q = queries(6, 2, geometry)
        k_pages, v_pages = encode_pages(geometry, k, v)
        clean = attention_paged(geometry, q, k_pages, v_pages, [39, 38])
        k_pages[1, 8 * geometry.k_row_bytes :] = 0xFF
        v_pages[1, 8 * geometry.v_row_bytes :] = 0xFF
        assert np.array_equal(attention_paged(geometry, q, k_pages, v_pages, [39, 38]), clean)


def test_pages_are_whole_and_come_back() -> None:
    geometry = Geometry(1, 2, 2, 80, KVType.Q8_0, KVType.Q4_0, page_tokens=32)
    k, v = kv_values(7, 33, geometry)
    k_pages, v_pages = encode_pages(geometry, k, v)
    assert k_pages.shape == (2, geometry.k_page_bytes) and v_pages.shape == (2, geometry.v_page_bytes)
    assert not k_pages[1, geometry.k_row_bytes :].any() and not v_pages[1, geometry.v_row_bytes :].any()
    k_back, v_back = decode_page(geometry, k_pages[0], v_pages[0])
    assert k_back.shape == (32, 2, 80)
    assert 0 < np.abs(k_back - k[:32]).max() < 0.2 and 0 < np.abs(v_back - v[:32]).max() < 1


# --- partials ---------------------------------------------------------------------------------------------------------


def test_a_page_without_a_visible_token_changes_nothing() -> None:
    k, v = kv_values(8, 96, SMALL)
    q = queries(8, 2, SMALL)
    parts = [partial(q, k[start : start + 32], v[start : start + 32], [31, 40], start) for start in (0, 32, 64)]
    assert np.isneginf(parts[1].m[0]).all() and np.isfinite(parts[1].m[1]).all()
    assert np.isneginf(parts[2].m).all() and not parts[2].l.any() and not parts[2].acc.any()
    assert np.array_equal(fold(parts), fold(parts[:2]))
    assert np.array_equal(fold([parts[2], *parts[:2]]), fold(parts[:2]))
    assert np.array_equal(fold([parts[2], parts[2], *parts[:2], parts[2]]), fold(parts[:2]))
    assert np.isnan(fold(parts[1:])[0]).all() and np.isfinite(fold(parts[1:])[1]).all()
    assert np.array_equal(fold(parts)[0], fold(parts[:1])[0])


def test_the_fold_scales_both_sides() -> None:
    """By hand: scores 0 and log 3 give weights 1/4 and 3/4, in either order."""
    def part(score: float, value: float) -> Partial:
        return Partial(np.array([[score]]), np.array([[1.0]]), np.array([[[value]]]))

    low, high = part(0.0, 8.0), part(math.log(3), 4.0)
    assert fold([low, high])[0, 0, 0] == pytest.approx(5.0, abs=1e-15)
    assert fold([high, low])[0, 0, 0] == pytest.approx(5.0, abs=1e-15)
    both = combine(low, high)
    assert both.m[0, 0] == math.log(3) and both.l[0, 0] == pytest.approx(4 / 3)


def test_nothing_to_fold() -> None:
    with pytest.raises(ValueError, match="nothing to fold"):
        fold([])


@given(seed=st.integers(0, 99), cuts=st.sets(st.integers(1, 99), max_size=5))
def test_any_cut_gives_the_same(seed: int, cuts: set[int]) -> None:
    k, v = kv_values(seed, 100, SMALL)
    q = queries(seed, 2, SMALL)
    borders = [0, *sorted(cuts), 100]
    parts = [partial(q, k[start:stop], v[start:stop], [99, 50], start) for start, stop in itertools.pairwise(borders)]
    assert np.allclose(fold(parts), attention(q, k, v, [99, 50]), rtol=0, atol=1e-12)
