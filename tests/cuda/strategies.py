"""Geometries and KV values, for all tests of the cuda package."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstream.cuda.layout import HEAD_SIZES, Geometry
from kvstream.cuda.types import KVType


@st.composite
def geometries(draw: st.DrawFn, layers_max: int = 4, page_tokens: tuple[int, ...] = (32, 64, 256)) -> Geometry:
    """Any geometry that is not refused."""
    kv_heads = draw(st.integers(1, 5))
    head_size = draw(st.sampled_from(HEAD_SIZES))
    kinds = [kind for kind in KVType if kv_heads * head_size % kind.block_values == 0]
    return Geometry(
        layers=draw(st.integers(1, layers_max)), kv_heads=kv_heads, q_heads=kv_heads * draw(st.integers(1, 6)),
        head_size=head_size, k_type=draw(st.sampled_from(kinds)), v_type=draw(st.sampled_from(kinds)),
        page_tokens=draw(st.sampled_from(page_tokens)))


def kv_values(seed: int, tokens: int, geometry: Geometry) -> tuple[NDArray[Any], NDArray[Any]]:
    """K and V of one layer, f32[tokens, kv_heads, head_size] each: normal, with a few outliers as real models have."""
    rng = np.random.default_rng(seed)
    shape = (tokens, geometry.kv_heads, geometry.head_size)
    k = rng.standard_normal(shape, np.float32)
    v = rng.standard_normal(shape, np.float32)
    k[rng.random(shape) < 0.01] *= 8
    return k, v


def queries(seed: int, rows: int, geometry: Geometry) -> NDArray[Any]:
    rng = np.random.default_rng([seed, 1])
    return rng.standard_normal((rows, geometry.q_heads, geometry.head_size), np.float32)
