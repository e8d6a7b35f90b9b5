"""Whether a model file is whole, by its own table."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
from gguf import GGML_QUANT_SIZES

from kvstream.gateway.gguf_size import ARRAY, BLOCKS, STRING, shortfall


def text(word: bytes) -> bytes:
    return struct.pack("<Q", len(word)) + word


def model(align: int = 32, kind: int = 8) -> bytes:
    """One array of strings, one of numbers, two tensors: the table names the last one first."""
    words = struct.pack("<IIQ", ARRAY, STRING, 2) + text(b"a") + text(b"bcd")
    values = [text(b"general.alignment") + struct.pack("<II", 4, align), text(b"words") + words,
              text(b"ids") + struct.pack("<IIQ3I", ARRAY, 4, 3, 1, 2, 3),
              text(b"name") + struct.pack("<I", STRING) + text(b"m")]
    tensors = [text(b"b") + struct.pack("<IQQIQ", 2, 64, 3, kind, 128), text(b"a") + struct.pack("<IQIQ", 1, 8, 0, 0)]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + b"".join(values + tensors)
    return head + bytes(-len(head) % align) + bytes(128 + 6 * 34)


@pytest.mark.parametrize("align", [32, 64])
def test_a_file_that_broke_off(tmp_path: Path, align: int) -> None:
    path, whole = tmp_path / "m.gguf", model(align)
    path.write_bytes(whole)
    assert shortfall(path) == ""
    for size in (len(whole) - 1, len(whole) - 203, len(whole) - 320):
        path.write_bytes(whole[:size])
        assert f"it has {size:,} bytes" in shortfall(path) and f"{len(whole):,} at least" in shortfall(path)
    for size in (5, 30, 60, 100, 200):
        path.write_bytes(whole[:size])
        assert "ends within its own header; download it again" in shortfall(path), size
    path.write_bytes(model(align, kind=99)[:-203])
    assert shortfall(path) == "", "of a type that we do not know the first byte is there"


def test_what_is_no_model_says_nothing(tmp_path: Path) -> None:
    path, rng = tmp_path / "m.gguf", random.Random(1)
    assert shortfall(path) == ""
    for content in (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), b"GGUF" + struct.pack(">IQQ", 3, 1, 1), bytes(100)):
        path.write_bytes(content)
        assert shortfall(path) == ""
    nested = struct.pack("<IQ", ARRAY, 1) * 5000
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + text(b"deep") + struct.pack("<I", ARRAY) + nested)
    assert shortfall(path) == ""
    for _ in range(300):  # nothing but an answer comes of damage
        damaged = bytearray(model())
        for _ in range(3):
            damaged[rng.randrange(4, 250)] = rng.randrange(256)
        path.write_bytes(damaged)
        shortfall(path)


def test_sizes_are_those_of_ggml() -> None:
    theirs = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
    assert {kind: sizes for kind, sizes in BLOCKS.items() if kind in theirs} == {
        kind: theirs[kind] for kind in BLOCKS if kind in theirs} and len(set(BLOCKS) & set(theirs)) > 25
