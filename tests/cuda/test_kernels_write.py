"""kv_write: rows of f32 become rows of the nine types, bit for bit those of ``types.encode`` and the gguf library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstream.cuda import kernels
from kvstream.cuda.types import LEVELS_BETWEEN, KVType, encode
from tests.cuda.alone import Alone, LaunchError, address_of, open_machine

KINDS = tuple(KVType)


@pytest.fixture(scope="module", params=[False, True], ids=["fast", "checked"])
def machine(request: pytest.FixtureRequest) -> Iterator[Alone]:
    opened = open_machine(request.config, request.param)
    yield opened
    opened.clear()


def write(machine: Alone, k: NDArray[Any], v: NDArray[Any], k_kind: KVType, v_kind: KVType, seed: int = 0
          ) -> tuple[NDArray[Any], NDArray[Any]]:
    """The rows, each to a place of its own; nothing between the places is written."""
    rows, values = k.shape
    planes, addresses = [], []
    for kind in (k_kind, v_kind):
        # Rows of a page are adjacent, and so aligned to what their size is a multiple of: to two bytes for some types.
        step = 16 if kind.block_values == 1 else 4 if kind in (KVType.Q5_1, KVType.Q4_1) else 2
        plane = machine.array(np.full((rows, (kind.row_bytes(values) // step + 9) * step), 0xA7, np.uint8))
        offsets = np.random.default_rng(seed).integers(0, 9, rows) * step
        planes.append(plane)
        starts = address_of(plane) + np.arange(rows) * plane.shape[1] + offsets
        addresses.append(machine.array(starts.astype(np.uint64)))
    machine.launch("kv_write", kernels.write_grid(rows, values), kernels.WRITE_THREADS, 0, machine.array(k),
                   machine.array(v), *addresses, rows, values, k_kind.code, v_kind.code)
    written = []
    for plane, at, kind in zip(planes, addresses, (k_kind, v_kind), strict=True):
        flat, size = plane.reshape(-1), kind.row_bytes(values)
        starts = at.astype(np.int64) - address_of(plane)
        written.append(np.stack([flat[start : start + size] for start in starts]).copy())
        for start in starts:
            flat[start : start + size] = 0xA7
        assert (flat == 0xA7).all(), "bytes beside the rows were written"
    return written[0], written[1]


def rows_of(values: int, rows: int, seed: int = 0) -> NDArray[Any]:
    """Rows of several kinds: normal values, wide ranges, zeros, equal values, ties of each type, one large value."""
    dice = np.random.default_rng(seed)
    made = dice.standard_normal((rows, values)).astype(np.float32)
    made[1::8] *= np.exp2(dice.integers(-12, 12, (len(made[1::8]), values))).astype(np.float32)
    made[2::8] = 0
    made[3::8] = np.float32(0.37)
    made[4::8] = dice.integers(-16, 17, (len(made[4::8]), values)).astype(np.float32) / 2
    made[5::8, ::32] = 1000
    made[6::8] = dice.integers(-127, 128, (len(made[6::8]), values)).astype(np.float32) + np.float32(0.5)
    made[7::8] = np.abs(made[7::8]) + 3
    made[8::16] = dice.choice(np.array(LEVELS_BETWEEN, np.float32), made[8::16].shape)  # ties of iq4_nl: scale 1
    made[8::16, ::32] = -127
    bits = made[::16].view(np.uint32)
    made[::16] = (bits & np.uint32(0xFFFF0000) | np.uint32(0x8000)).view(np.float32)  # ties of bf16
    return made


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("values", [64, 160, 1024])
def test_rows_are_encoded_as_types_says(machine: Alone, kind: KVType, values: int) -> None:
    machine.clear()
    k, v = rows_of(values, 40, 1), rows_of(values, 40, 2)
    other = KINDS[(kind.code + 4) % len(KINDS)]
    got_k, got_v = write(machine, k, v, kind, other)
    assert np.array_equal(got_k, encode(kind, k))
    assert np.array_equal(got_v, encode(other, v))
    assert machine.reports() == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (KVType.F32, KVType.IQ4_NL)], ids=str)
def test_rows_are_encoded_as_the_gguf_library_does(machine: Alone, kind: KVType) -> None:
    gguf = pytest.importorskip("gguf")
    machine.clear()
    k = rows_of(256, 64, 3)
    k[2::8] = 1  # of a block of zeros the library divides by zero
    got, _ = write(machine, k, k, kind, KVType.F32)
    expected = gguf.quants.quantize(k, gguf.GGMLQuantizationType[kind.label.upper()])
    assert np.array_equal(got, expected.view(np.uint8).reshape(got.shape))


@pytest.mark.parametrize("kind", [KVType.F32, KVType.F16, KVType.BF16], ids=str)
@pytest.mark.parametrize("values", [80, 16, 336])
def test_plain_rows_need_not_be_whole_blocks(machine: Alone, kind: KVType, values: int) -> None:
    machine.clear()
    k, v = rows_of(values, 9, 4), rows_of(values, 9, 5)
    got_k, got_v = write(machine, k, v, kind, kind)
    assert np.array_equal(got_k, encode(kind, k)) and np.array_equal(got_v, encode(kind, v))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_is_not_a_number_harms_no_other_block(machine: Alone, kind: KVType) -> None:
    machine.clear()
    k = rows_of(96, 8, 6)
    k[:, 40] = [np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-42, -1e-45, 65504]
    got, _ = write(machine, k, k, kind, KVType.F32)
    expected = encode(kind, k)
    size = kind.row_bytes(32)
    for part in (slice(0, size), slice(2 * size, 3 * size)):
        assert np.array_equal(got[:, part], expected[:, part])


def test_a_row_beyond_its_array_is_reported_in_the_checked_build(request: pytest.FixtureRequest) -> None:
    machine = open_machine(request.config, checked=True)
    k = machine.array(np.zeros((2, 64), np.float32))
    to = machine.array(np.zeros((2, 68), np.uint8))
    addresses = machine.array(np.array([address_of(to), address_of(to) + 70], np.uint64))
    with pytest.raises(LaunchError, match="writes 2 bytes outside of every array"):
        machine.launch("kv_write", kernels.write_grid(2, 64), kernels.WRITE_THREADS, 0, k, k, addresses, addresses, 2,
                       64, KVType.Q8_0.code, KVType.Q8_0.code)
