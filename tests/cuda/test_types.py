"""The nine KV types against the gguf library, which is what the files and the other runtimes follow, and iq4_nl, which
that library cannot encode, against its definition."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstream.cuda.types import LEVELS, LEVELS_BETWEEN, KVType, decode, encode
from kvstream.errors import ConfigError
from tests.cuda.strategies import hard_blocks

QUANTISED = [kind for kind in KVType if kind.block_values > 1]
ENCODED_BY_GGUF = [kind for kind in KVType if kind is not KVType.IQ4_NL]
SCALED = [kind for kind in QUANTISED if kind is not KVType.IQ4_NL]


@pytest.fixture(autouse=True)
def nothing_is_warned_of() -> Iterator[None]:
    """Overflow in f16, NaN and blocks of zeros are ordinary here; numpy must not tell the user's terminal of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def theirs(kind: KVType) -> GGMLQuantizationType:
    return GGMLQuantizationType[kind.name]


def gguf_encode(kind: KVType, values: NDArray[Any]) -> NDArray[np.uint8]:
    with np.errstate(all="ignore"):
        raw = quants.quantize(values, theirs(kind))
    return np.ascontiguousarray(raw).view(np.uint8)


def gguf_decode(kind: KVType, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    # The library takes the plain types as arrays of the type itself.
    plain = {KVType.F32: np.float32, KVType.F16: np.float16}.get(kind, np.uint8)
    with np.errstate(all="ignore"):
        return np.asarray(quants.dequantize(raw.view(plain), theirs(kind)), np.float32)


def same_bits(ours: NDArray[Any], expected: NDArray[Any]) -> bool:
    return ours.shape == expected.shape and ours.tobytes() == expected.tobytes()


def normal_values(seed: int, *shape: int, scale: float = 1.0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)


# --- names and sizes --------------------------------------------------------------------------------------------------


def test_the_types() -> None:
    assert [kind.label for kind in sorted(KVType, key=lambda kind: kind.code)] == [
        "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
    assert [kind.code for kind in KVType] == list(range(9))
    assert [kind.row_bytes(1024) for kind in KVType] == [4096, 2048, 2048, 1088, 768, 704, 640, 576, 576]


@pytest.mark.parametrize("kind", KVType, ids=str)
def test_block_sizes_are_ggmls(kind: KVType) -> None:
    assert (kind.block_values, kind.block_bytes) == gguf.GGML_QUANT_SIZES[theirs(kind)]


@pytest.mark.parametrize("kind", KVType, ids=str)
def test_found_by_name(kind: KVType) -> None:
    assert KVType.of(kind.label) is kind
    assert KVType.of(kind.label.upper()) is kind
    assert str(kind) == kind.label


def test_refusals_say_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"'q6_k' is not known; there are f32, f16, .*iq4_nl"):
        KVType.of("q6_k")
    with pytest.raises(ConfigError, match=r"80 values cannot be stored as q8_0.* 32"):
        KVType.Q8_0.row_bytes(80)
    with pytest.raises(ConfigError):
        KVType.F32.row_bytes(0)
    with pytest.raises(ValueError, match="33 bytes are no row of 32 values of q8_0"):
        decode(KVType.Q8_0, np.zeros(33, np.uint8), 32)


# --- equal to gguf's, bit for bit -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-30, 1e-9, 1e-6, 1e-3, 1.0, 1e3, 1e6, 1e30])
@pytest.mark.parametrize("kind", ENCODED_BY_GGUF, ids=str)
def test_encodes_normal_values_as_gguf(kind: KVType, scale: float) -> None:
    values = normal_values(1, 40, 256, scale=scale)
    assert same_bits(encode(kind, values), gguf_encode(kind, values))


@pytest.mark.parametrize("kind", ENCODED_BY_GGUF, ids=str)
def test_encodes_edges_as_gguf(kind: KVType) -> None:
    for block in hard_blocks():
        assert same_bits(encode(kind, block), gguf_encode(kind, block)), block


@given(raw=st.binary(min_size=512, max_size=512), scale=st.integers(-90, 90), bits=st.sampled_from([2, 6, 9, 16]))
def test_encodes_anything_as_gguf(raw: bytes, scale: int, bits: int) -> None:
    """Integers of few and of many bits, so that some blocks are full of ties. No smaller ones than 2**-90: there gguf
    divides by scales whose reciprocal overflows, and converts NaN to integers."""
    whole = np.frombuffer(raw, np.int16).reshape(8, 32) >> (16 - bits)
    values = whole.astype(np.float32) * np.float32(2.0**scale)
    for kind in ENCODED_BY_GGUF:
        assert same_bits(encode(kind, values), gguf_encode(kind, values)), kind


@pytest.mark.parametrize("kind", KVType, ids=str)
def test_decodes_any_bytes_as_gguf(kind: KVType) -> None:
    """Random bytes are blocks with random scales, also infinite and NaN ones, and every code."""
    raw = np.random.default_rng(2).integers(0, 256, (64, 8 * kind.row_bytes(32)), np.uint8)
    ours, expected = decode(kind, raw, 256), gguf_decode(kind, raw)
    assert np.array_equal(np.isnan(ours), np.isnan(expected))
    assert same_bits(np.nan_to_num(ours, nan=7), np.nan_to_num(expected, nan=7))


@pytest.mark.parametrize("kind", [KVType.F16, KVType.BF16], ids=str)
def test_every_16_bit_pattern(kind: KVType) -> None:
    raw = np.arange(65536, dtype=np.uint16).view(np.uint8)
    values = decode(kind, raw, 65536)
    assert same_bits(values, gguf_decode(kind, raw))
    back = encode(kind, values).view(np.uint16)
    assert np.array_equal(back[~np.isnan(values)], np.arange(65536)[~np.isnan(values)])
    assert np.isnan(decode(kind, back.view(np.uint8), 65536)[np.isnan(values)]).all()
    finite = values[np.isfinite(values)].astype(np.float64)
    halfway = np.sort(finite)[:-1] / 2 + np.sort(finite)[1:] / 2
    halfway = halfway.astype(np.float32)
    beside = [np.nextafter(halfway, np.float32(side)) for side in (np.inf, -np.inf)]
    around = np.concatenate([halfway, *beside])
    assert same_bits(encode(kind, around), gguf_encode(kind, around))


def test_a_nan_stays_a_nan_in_bf16() -> None:
    """Its payload may lie in the 16 bits that are cut off, and rounding must not carry it into the sign."""
    bits = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F808000], np.uint32)
    raw = encode(KVType.BF16, bits.view(np.float32))
    assert same_bits(raw, gguf_encode(KVType.BF16, bits.view(np.float32)))
    assert np.isnan(decode(KVType.BF16, raw, 6)).all()


# --- where gguf is not defined, or cannot encode ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", QUANTISED, ids=str)
@pytest.mark.parametrize("tiny", [0.0, 1e-45, 1e-40, 1e-38, 1e-37])
def test_blocks_without_a_usable_scale_are_zeros(kind: KVType, tiny: float) -> None:
    values = np.linspace(-tiny, tiny, 32, dtype=np.float32)
    assert np.array_equal(decode(kind, encode(kind, values), 32), np.zeros(32))


@pytest.mark.parametrize("kind", QUANTISED, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_a_bad_block_harms_no_neighbour(kind: KVType, bad: float) -> None:
    values = normal_values(3, 5, 96)
    good = encode(kind, values)
    values[2, 40] = bad
    raw = encode(kind, values)
    blocks = np.arange(15).reshape(5, 3).repeat(kind.block_bytes, axis=1)
    assert np.array_equal(raw[blocks != 7], good[blocks != 7])


@pytest.mark.parametrize("kind", QUANTISED, ids=str)
def test_error_is_at_most_half_a_step(kind: KVType) -> None:
    """Half a step of the scale, and what f16 does to scale and offset."""
    values = normal_values(4, 64, 128)
    blocks = values.reshape(-1, 32)
    error = np.abs(decode(kind, encode(kind, values), 128).reshape(-1, 32) - blocks).max(axis=1)
    size, spread = np.abs(blocks).max(axis=1), np.ptp(blocks, axis=1)
    # The symmetric types reach one step less on the side that has not the extreme: there the error is a whole step.
    step = {KVType.Q8_0: size / 127 / 2, KVType.Q5_1: spread / 31 / 2, KVType.Q4_1: spread / 15 / 2,
            KVType.Q5_0: size / 16, KVType.Q4_0: size / 8, KVType.IQ4_NL: size * 17 / 127}[kind]
    assert (error <= step + 2 * size / 1024).all()
    assert error.max() > step.max() / 4  # and the bound says something


@pytest.mark.parametrize("kind", [KVType.Q4_1, KVType.Q5_1], ids=str)
def test_of_two_zeros_the_first_is_the_lowest(kind: KVType) -> None:
    """gguf leaves it to numpy, which has its own opinion on every processor; in ggml it is the first."""
    for seed in range(40):
        signs = np.random.default_rng(seed).choice(np.array([0.0, -0.0], np.float32), 32)
        offset = encode(kind, signs)[2:4].view(np.float16)[0]
        assert np.signbit(offset) == np.signbit(signs[0])
        assert not np.signbit(encode(kind, signs)[:2].view(np.float16)[0])
        signs[5] = 1
        assert np.signbit(encode(kind, signs)[2:4].view(np.float16)[0]) == np.signbit(signs[0])


def test_iq4_nl_takes_the_nearest_level() -> None:
    values = normal_values(5, 200, 32)
    values[:100] = np.round(values[:100] * 64) / 64  # many ties
    raw = encode(KVType.IQ4_NL, values)
    codes = np.concatenate([raw[:, 2:] & 15, raw[:, 2:] >> 4], axis=1)
    extreme = np.take_along_axis(values, np.abs(values).argmax(axis=1)[:, None], axis=1)
    inverse = np.float32(1) / (extreme / np.float32(-127))
    steps = (values * inverse).astype(np.float64)
    distance = np.abs(steps[:, :, None] - np.array(LEVELS, np.float64))
    nearest = 15 - distance[:, :, ::-1].argmin(axis=2)  # of two as near, the upper
    assert np.array_equal(codes, nearest)


def test_iq4_nl_borders_belong_to_the_upper_level() -> None:
    """With an extreme of -127 the values are the steps themselves."""
    for code, border in enumerate(LEVELS_BETWEEN):
        below = np.nextafter(np.float32(border), np.float32(-200))
        values = np.array([-127.0, border, below] + [0.0] * 29, np.float32)
        raw = encode(KVType.IQ4_NL, values)
        assert [int(byte & 15) for byte in raw[3:5]] == [code + 1, code]


def test_iq4_nl_scale_fits_best() -> None:
    """Among all f16 scales none gives a smaller error, weighed by the squares of the values."""
    values = normal_values(6, 100, 32).astype(np.float64)
    raw = encode(KVType.IQ4_NL, values)
    codes = np.concatenate([raw[:, 2:] & 15, raw[:, 2:] >> 4], axis=1)
    levels = np.array(LEVELS, np.float64)[codes]
    bits = np.ascontiguousarray(raw[:, :2]).view(np.uint16)[:, 0]

    def error(scales: NDArray[np.uint16]) -> NDArray[np.float64]:
        scale = scales.view(np.float16).astype(np.float64)[:, None]
        return np.asarray((values**2 * (values - scale * levels) ** 2).sum(axis=1))

    for step in (-1, 1):
        assert (error(bits) <= error((bits.astype(np.int32) + step).astype(np.uint16)) * (1 + 1e-4)).all()
    first = values[np.arange(100), np.abs(values).argmax(axis=1)] / -127
    assert error(bits).sum() < 0.98 * error(first.astype(np.float16).view(np.uint16)).sum()


def test_iq4_nl_keeps_levels() -> None:
    """What was decoded once is encoded to the same values again, whatever the scale."""
    codes = np.arange(32) % 16
    for scale in (2.0**-14, 0.0007, 0.25, 1.0, 33.0, 500.0):
        values = np.array(LEVELS, np.float32)[codes] * np.float32(np.float16(scale))
        assert np.array_equal(decode(KVType.IQ4_NL, encode(KVType.IQ4_NL, values), 32), values)


@pytest.mark.parametrize("power", [-4, 8, 20])
def test_iq4_nl_neither_under_nor_overflows(power: int) -> None:
    """As far as f16 scales reach, the size of the values does not matter, although the fit cubes them."""
    values = normal_values(7, 50, 64)
    back = decode(KVType.IQ4_NL, encode(KVType.IQ4_NL, values), 64)
    scaled = decode(KVType.IQ4_NL, encode(KVType.IQ4_NL, values * np.float32(2.0**power)), 64)
    assert np.abs(scaled / np.float32(2.0**power) - back).max() < 1e-6


def test_iq4_nl_vector() -> None:
    """By hand: the extreme -127 makes the first scale 1; all values are levels, so the fit is 1 too (f16 0x3C00)."""
    values = np.array([*LEVELS, *reversed(LEVELS)], np.float32)
    expected = bytes([0x00, 0x3C]) + bytes(low | (15 - low) << 4 for low in range(16))
    assert encode(KVType.IQ4_NL, values).tobytes() == expected


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KVType, ids=str)
def test_shapes(kind: KVType) -> None:
    values = normal_values(8, 3, 5, 64)
    raw = encode(kind, values)
    assert raw.shape == (3, 5, kind.row_bytes(64)) and raw.dtype == np.uint8
    back = decode(kind, raw, 64)
    assert back.shape == (3, 5, 64) and back.dtype == np.float32
    for row in np.ndindex(3, 5):
        assert same_bits(raw[row], encode(kind, values[row]))
        assert same_bits(back[row], decode(kind, raw[row], 64))
    assert encode(kind, values[:0]).shape == (0, 5, kind.row_bytes(64))
    assert decode(kind, raw[:0], 64).shape == (0, 5, 64)


@pytest.mark.parametrize("kind", KVType, ids=str)
def test_strided_and_doubles(kind: KVType) -> None:
    wide = normal_values(9, 6, 128)
    assert same_bits(encode(kind, wide[::2, 32:96]), encode(kind, wide[::2, 32:96].copy()))
    assert same_bits(encode(kind, wide.astype(np.float64)), encode(kind, wide))
    assert same_bits(encode(kind, wide[:, ::2]), encode(kind, wide[:, ::2].copy()))
    square = normal_values(11, 64, 64)
    assert same_bits(encode(kind, square.T), encode(kind, square.T.copy()))
    raw = encode(kind, wide)
    assert same_bits(decode(kind, np.asfortranarray(raw), 128), decode(kind, raw, 128))
    assert same_bits(decode(kind, raw[::-1], 128), decode(kind, raw, 128)[::-1].copy())


@pytest.mark.parametrize("kind", KVType, ids=str)
def test_no_memory_is_shared(kind: KVType) -> None:
    """A pinned page is decoded and then overwritten by the next copy."""
    values = normal_values(10, 32)
    raw = encode(kind, values)
    assert not np.shares_memory(raw, values)
    assert not np.shares_memory(decode(kind, raw, 32), raw)
