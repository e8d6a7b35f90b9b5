"""What attention is, in float64 and without tricks: the oracle that the kernels are compared with.

``attention`` is the textbook's: all scores, a softmax, a weighted sum. ``attention_paged`` reads encoded pages and goes
the kernels' way: each page gives a *partial* result by itself, and a *fold* goes over the partials in page order. The
two are written apart on purpose, and a test holds them against each other.

A query row at position p sees the tokens 0..p of its sequence. Query head h uses KV head h // group.

A partial result of a row over some tokens is (m, l, acc): the largest score, the sum of exp(score - m), and the sum of
exp(score - m) * V. A page of which a row sees nothing gives m = -inf, l = 0, acc = 0 and is skipped by the fold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from .layout import Geometry
from .types import Bytes, decode, encode

Doubles = NDArray[np.float64]
Positions = Sequence[int] | NDArray[Any]


def attention(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], positions: Positions,
              scale: float | None = None) -> Doubles:
    """q[rows, q_heads, D], k and v[tokens, kv_heads, D], positions[rows] -> [rows, q_heads, D].

    ``scale`` multiplies the scores; 1 / sqrt(D) unless given. Tokens that no row sees are not looked at.
    """
    q, k, v = _doubles(q), _doubles(k), _doubles(v)
    rows, q_heads, head_size = q.shape
    group = q_heads // k.shape[1]
    factor = head_size**-0.5 if scale is None else scale
    out = np.zeros((rows, q_heads, head_size))
    for row, position in enumerate(positions):
        seen = int(position) + 1
        if not 1 <= seen <= len(k):
            raise ValueError(f"row {row} is at position {position} of {len(k)} tokens")
        for head in range(q_heads):
            scores = k[:seen, head // group] @ q[row, head] * factor
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ v[:seen, head // group] / weights.sum()
    return out


@frozen(eq=False)
class Partial:
    """(m, l, acc) of every row and head: m[rows, q_heads], l[rows, q_heads], acc[rows, q_heads, D]."""

    m: Doubles
    l: Doubles  # noqa: E741 - the letter that everybody uses for it
    acc: Doubles


def partial(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], positions: Positions, first_token: int,
            scale: float | None = None) -> Partial:
    """The result over the tokens ``first_token`` and following that are given, for rows as in ``attention``."""
    q, k, v = _doubles(q), _doubles(k), _doubles(v)
    rows, q_heads, head_size = q.shape
    kv_heads = k.shape[1]
    factor = head_size**-0.5 if scale is None else scale
    # What lies behind the last visible token may be anything, also NaN, and 0 * NaN is no 0: it is cut off.
    places = np.asarray(positions, np.int64) - first_token
    seen = min(len(k), max(0, int(places.max(initial=-1)) + 1))
    k, v = k[:seen], v[:seen]
    grouped = q.reshape(rows, kv_heads, q_heads // kv_heads, head_size)
    scores = np.einsum("rhgd,thd->rhgt", grouped, k) * factor
    visible = np.arange(seen)[None, None, None, :] <= places[:, None, None, None]
    scores = np.where(visible, scores, -np.inf)
    m = scores.max(axis=-1, initial=-np.inf)
    weights = np.where(visible, np.exp(scores - np.where(np.isfinite(m), m, 0.0)[..., None]), 0.0)
    acc = np.einsum("rhgt,thd->rhgd", weights, v)
    return Partial(m.reshape(rows, q_heads), weights.sum(axis=-1).reshape(rows, q_heads),
                   acc.reshape(rows, q_heads, head_size))


def fold(partials: Iterable[Partial]) -> Doubles:
    """The partials of consecutive pages, in page order -> [rows, q_heads, D]. A row that saw nothing at all is NaN."""
    state: Partial | None = None
    for part in partials:
        state = part if state is None else combine(state, part)
    if state is None:
        raise ValueError("there is nothing to fold")
    with np.errstate(invalid="ignore"):
        return np.divide(state.acc, state.l[..., None])


def combine(state: Partial, part: Partial) -> Partial:
    """The running result after one more page. Where the page, or all before it, shows nothing, the other is it."""
    m = np.maximum(state.m, part.m)
    shift = np.where(np.isfinite(m), m, 0.0)
    old, new = np.exp(state.m - shift), np.exp(part.m - shift)
    return Partial(m, state.l * old + part.l * new, state.acc * old[..., None] + part.acc * new[..., None])


def attention_paged(geometry: Geometry, q: NDArray[Any], k_pages: Sequence[Bytes], v_pages: Sequence[Bytes],
                    positions: Positions, scale: float | None = None) -> Doubles:
    """As ``attention``, over one sequence's encoded pages in page order: u8[k_page_bytes] and u8[v_page_bytes] each."""
    return fold(
        partial(q, *decode_page(geometry, k_page, v_page), positions, index * geometry.page_tokens, scale)
        for index, (k_page, v_page) in enumerate(zip(k_pages, v_pages, strict=True)))


def encode_pages(geometry: Geometry, k: NDArray[Any], v: NDArray[Any]) -> tuple[Bytes, Bytes]:
    """K and V of the tokens of a sequence in one layer, f32[tokens, kv_heads, D] -> u8[pages, k_page_bytes] and
    u8[pages, v_page_bytes]. What no token fills is zero."""
    pages = geometry.pages(len(k))
    encoded = []
    for kind, values, page_bytes in ((geometry.k_type, k, geometry.k_page_bytes),
                                     (geometry.v_type, v, geometry.v_page_bytes)):
        rows = encode(kind, np.reshape(values, (len(values), geometry.row_values)))
        plane = np.zeros((pages, page_bytes), np.uint8)
        for page in range(pages):
            part = rows[page * geometry.page_tokens : (page + 1) * geometry.page_tokens].reshape(-1)
            plane[page, : len(part)] = part
        encoded.append(plane)
    return encoded[0], encoded[1]


def decode_page(geometry: Geometry, k_page: Bytes, v_page: Bytes) -> tuple[Doubles, Doubles]:
    """One page -> K and V, f64[page_tokens, kv_heads, D]."""
    shape = (geometry.page_tokens, geometry.kv_heads, geometry.head_size)
    decoded = []
    for kind, page, row_bytes in ((geometry.k_type, k_page, geometry.k_row_bytes),
                                  (geometry.v_type, v_page, geometry.v_row_bytes)):
        rows = page[: geometry.page_tokens * row_bytes].reshape(geometry.page_tokens, row_bytes)
        decoded.append(_doubles(decode(kind, rows, geometry.row_values)).reshape(shape))
    return decoded[0], decoded[1]


def _doubles(values: NDArray[Any]) -> Doubles:
    return np.asarray(values, np.float64)
