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


def hard_blocks() -> NDArray[np.float32]:
    """f32[n, 32] at the borders of the encoders' arithmetic: signs of zero, one value only, equal extremes of both
    signs, values exactly between two codes and one step beside them, and values whose code another rounding changes."""
    ramp = np.arange(32, dtype=np.float32)
    blocks = [
        np.zeros(32), np.full(32, -0.0), np.ones(32), np.full(32, -3.25), ramp, -ramp, ramp - 16,
        ramp - 15.5, 16 - ramp,
        np.where(ramp == 7, 5.0, 0.0), np.where(ramp == 31, -5.0, 0.0), np.where(ramp % 2 == 0, 2.0, -2.0),
        np.where(ramp % 2 == 0, -2.0, 2.0), 2.0 ** (ramp - 16), (-2.0) ** (ramp - 16),
        np.where(ramp == 0, 65504.0 * 8, 1.0), np.where(ramp == 0, 1e38, 1.0), np.where(ramp == 0, 1e38, -1e38),
    ]
    for steps in (254, 30, 16, 62, 32):  # codes of all types meet their ties in one of these
        tied = (np.arange(32) - 15.5) / steps
        tied[0], tied[1] = -0.5, 0.5
        blocks += [tied, np.nextafter(tied.astype(np.float32), np.float32(9)),
                   np.nextafter(tied.astype(np.float32), np.float32(-9))]
    # Largest value, and one whose code is 1 if product and sum are rounded apart, 0 if they are fused: q4_1, then q5_1.
    for large, small in (
            (0.9031129479408264, 0.030103761702775955),
            (0.92111736536026, 0.03070390783250332),
            (1.3690252304077148, 0.04563416913151741),
            (0.8874543905258179, 0.014313778840005398),
            (0.9587249755859375, 0.01546330377459526),
            (0.6660956144332886, 0.010743476450443268),
    ):
        blocks.append(np.where(ramp == 3, large, np.where(ramp == 20, small, 0.0)))
    return np.array(blocks, np.float32)
