"""The nine types in which KV can be stored, and their arithmetic in numpy: what the kernels must do, bit for bit.

A *row* is all the values of one token in one layer, of K or of V. The plain types store one value after the other. The
quantised types cut the row into *blocks* of 32 values; each block begins with an f16 scale ``d`` (and an f16 offset
``m`` in the ``_1`` types), then come the codes:

=========  =====  ==============================================  ==================
type       bytes  after the scale                                 value of a code q
=========  =====  ==============================================  ==================
q8_0       34     32 signed bytes                                 d * q
q5_1       24     m, 32 high bits, 16 bytes of low halves         d * q + m
q5_0       22     32 high bits, 16 bytes of low halves            d * (q - 16)
q4_1       20     m, 16 bytes of halves                           d * q + m
q4_0       18     16 bytes of halves                              d * (q - 8)
iq4_nl     18     16 bytes of halves                              d * LEVELS[q]
=========  =====  ==============================================  ==================

A byte of halves holds value j in its low half and value j + 16 in its high half; high bit j belongs to value j. These
are ggml's formats. Encoding gives the same bits as the ``gguf`` library where that library can encode (all but iq4_nl),
so a page can be checked, saved and read by others.

Every operation is one f32 operation, rounded to nearest even, in the order written here. A product and a sum are two
roundings, never one fused: the kernels are compiled to keep them apart, or the codes of values that lie between two
levels would differ.

Values must be finite. What a block that holds a NaN or an infinity decodes to is not defined, but its neighbours do not
suffer. Where the reciprocal of the scale is not finite (a block of zeros, or of values below 1e-37) the codes are those
of zeros; there ``gguf`` converts NaN to integers, which no two machines do alike.
"""

from __future__ import annotations

from enum import Enum
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the 16 codes of iq4_nl stand for, in units of the scale: dense around zero, where most values are."""

LEVELS_BETWEEN = tuple((low + high) / 2 for low, high in pairwise(LEVELS))
"""Halfway between two levels (exact in f32). A value on the border takes the upper level."""

LEVELS_MIN = 1e-15
"""A block of iq4_nl whose values are all smaller than this is all zero bytes: their cubes leave f32."""


class KVType(Enum):
    """``code`` is what the kernels are given; it never changes, since saved pages name it."""

    F32 = (0, "f32", 1, 4)
    F16 = (1, "f16", 1, 2)
    BF16 = (2, "bf16", 1, 2)
    Q8_0 = (3, "q8_0", 32, 34)
    Q5_1 = (4, "q5_1", 32, 24)
    Q5_0 = (5, "q5_0", 32, 22)
    Q4_1 = (6, "q4_1", 32, 20)
    Q4_0 = (7, "q4_0", 32, 18)
    IQ4_NL = (8, "iq4_nl", 32, 18)

    def __init__(self, code: int, label: str, block_values: int, block_bytes: int) -> None:
        self.code = code
        self.label = label
        self.block_values = block_values
        self.block_bytes = block_bytes

    def __str__(self) -> str:
        return self.label

    @classmethod
    def of(cls, label: str) -> KVType:
        """The type of that name, whatever its case. Raises ConfigError with the names that there are."""
        for kind in cls:
            if kind.label == label.lower():
                return kind
        raise ConfigError(f"KV type {label!r} is not known; there are {', '.join(kind.label for kind in cls)}")

    def row_bytes(self, values: int) -> int:
        """Bytes of a row of so many values. Raises ConfigError when the row is no whole number of blocks."""
        if values < 1 or values % self.block_values:
            raise ConfigError(f"a row of {values} values cannot be stored as {self}: it takes multiples of "
                              f"{self.block_values}")
        return values // self.block_values * self.block_bytes


def encode(kind: KVType, values: NDArray[Any]) -> Bytes:
    """f32[..., n] -> u8[..., kind.row_bytes(n)]. The last axis is a row."""
    rows: Floats = np.ascontiguousarray(values, np.float32)
    row_bytes = kind.row_bytes(rows.shape[-1])
    with np.errstate(all="ignore"):
        if kind.block_values == 1:
            raw = _encode_plain(kind, rows)
        else:
            raw = _encode_blocks(kind, rows.reshape(-1, kind.block_values))
    return raw.reshape(*rows.shape[:-1], row_bytes)


def decode(kind: KVType, raw: NDArray[Any], values: int) -> Floats:
    """u8[..., kind.row_bytes(values)] -> f32[..., values]: the inverse of ``encode``, up to rounding."""
    rows: Bytes = np.ascontiguousarray(raw, np.uint8)
    if rows.shape[-1] != kind.row_bytes(values):
        raise ValueError(f"{rows.shape[-1]} bytes are no row of {values} values of {kind}")
    with np.errstate(all="ignore"):
        if kind.block_values == 1:
            plain = _decode_plain(kind, rows)
        else:
            plain = _decode_blocks(kind, rows.reshape(-1, kind.block_bytes))
    return plain.reshape(*rows.shape[:-1], values)


# --- plain types ------------------------------------------------------------------------------------------------------


def _encode_plain(kind: KVType, rows: Floats) -> Bytes:
    if kind is KVType.F32:
        return rows.copy().view(np.uint8)
    if kind is KVType.F16:
        return rows.astype(np.float16).view(np.uint8)
    bits = rows.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + (np.uint32(0x7FFF) + odd)) >> np.uint32(16)
    # Rounding could carry a NaN into an infinity, or past the sign: it is cut instead, and marked quiet.
    quiet = (bits >> np.uint32(16)) | np.uint32(0x0040)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, quiet, rounded).astype(np.uint16).view(np.uint8)


def _decode_plain(kind: KVType, rows: Bytes) -> Floats:
    if kind is KVType.F32:
        return rows.view(np.float32).copy()
    if kind is KVType.F16:
        return rows.view(np.float16).astype(np.float32)
    return (rows.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


# --- encoding blocks --------------------------------------------------------------------------------------------------


def _encode_blocks(kind: KVType, blocks: Floats) -> Bytes:
    """f32[n, 32] -> u8[n, block_bytes]."""
    if kind is KVType.Q8_0:
        return _encode_q8(blocks)
    if kind is KVType.IQ4_NL:
        return _encode_levels(blocks)
    top = 31 if kind in (KVType.Q5_0, KVType.Q5_1) else 15
    if kind in (KVType.Q4_1, KVType.Q5_1):
        lowest = _picked(blocks, blocks.argmin(axis=1))
        scale = (_picked(blocks, blocks.argmax(axis=1)) - lowest) / np.float32(top)
        codes = (blocks - lowest) * _reciprocal(scale) + np.float32(0.5)
        head = np.concatenate([_f16(scale), _f16(lowest)], axis=1)
    else:
        # The value of largest magnitude is put at the lower end, which reaches one step further than the upper one.
        half = (top + 1) // 2
        scale = _extreme(blocks) / np.float32(-half)
        codes = blocks * _reciprocal(scale) + np.float32(half + 0.5)
        head = _f16(scale)
    whole: Bytes = codes.astype(np.uint8).clip(0, top)
    if top == 31:
        high = np.packbits(whole >> np.uint8(4), axis=1, bitorder="little")
        return np.concatenate([head, high, _halves(whole & np.uint8(15))], axis=1)
    return np.concatenate([head, _halves(whole)], axis=1)


def _encode_q8(blocks: Floats) -> Bytes:
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    steps = blocks * _reciprocal(scale)
    # Half away from zero, as C's roundf, which is not numpy's rounding.
    size = np.abs(steps)
    whole = np.floor(size)
    whole = np.where(size - whole >= np.float32(0.5), whole + np.float32(1), whole)
    codes = np.copysign(whole, steps).astype(np.int8)
    return np.concatenate([_f16(scale), codes.view(np.uint8)], axis=1)


def _encode_levels(blocks: Floats) -> Bytes:
    """iq4_nl: the nearest level of each value for a first scale, then the scale that fits those levels best.

    The fit weighs an error by the square of its value: it is sum(w q x) / sum(w q q) with w = x x and q the level,
    value after value, w q first. So does ggml, where it is given no weights of its own.
    """
    extreme = _extreme(blocks)
    first = extreme / np.float32(LEVELS[0])
    steps = blocks * _reciprocal(first)
    codes = np.searchsorted(np.array(LEVELS_BETWEEN, np.float32), steps, side="right").astype(np.uint8)
    levels = np.array(LEVELS, np.float32)[codes]
    above = np.zeros(len(blocks), np.float32)
    below = np.zeros(len(blocks), np.float32)
    for index in range(blocks.shape[1]):
        value, level = blocks[:, index], levels[:, index]
        weighted = value * value * level
        above = above + weighted * value
        below = below + weighted * level
    raw = np.concatenate([_f16((above / below)[:, None]), _halves(codes)], axis=1)
    return np.where(np.abs(extreme) < np.float32(LEVELS_MIN), np.uint8(0), raw)


def _reciprocal(scale: Floats) -> Floats:
    inverse = np.float32(1) / scale
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _extreme(blocks: Floats) -> Floats:
    """The value of largest magnitude of each block with its sign; the first of several."""
    return _picked(blocks, np.abs(blocks).argmax(axis=1))


def _picked(blocks: Floats, where: NDArray[np.intp]) -> Floats:
    """One value of each block, f32[n, 1]. Picked by index: which of 0 and -0 is the smaller, numpy's ``min`` decides
    otherwise on other processors, and here it is the first."""
    picked: Floats = np.take_along_axis(blocks, where[:, None], axis=1)
    return picked


def _f16(column: Floats) -> Bytes:
    return column.astype(np.float16).view(np.uint8)


def _halves(codes: Bytes) -> Bytes:
    return codes[:, :16] | (codes[:, 16:] << np.uint8(4))


# --- decoding blocks --------------------------------------------------------------------------------------------------


def _decode_blocks(kind: KVType, blocks: Bytes) -> Floats:
    """u8[n, block_bytes] -> f32[n, 32]."""
    scale = _column(blocks, 0)
    if kind is KVType.Q8_0:
        return scale * blocks[:, 2:].view(np.int8).astype(np.float32)
    codes = np.concatenate([blocks[:, -16:] & 15, blocks[:, -16:] >> 4], axis=1)
    if kind is KVType.IQ4_NL:
        return scale * np.take(np.array(LEVELS, np.float32), codes)
    if kind in (KVType.Q5_0, KVType.Q5_1):
        codes = codes | (np.unpackbits(blocks[:, -20:-16], axis=1, bitorder="little") << 4)
    if kind in (KVType.Q4_1, KVType.Q5_1):
        return scale * codes.astype(np.float32) + _column(blocks, 2)
    return scale * (codes.astype(np.float32) - np.float32(8 if kind is KVType.Q4_0 else 16))


def _column(blocks: Bytes, start: int) -> Floats:
    """The f16 at that byte of every block, as f32[n, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)
