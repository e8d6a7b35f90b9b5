"""A GGUF file whose model claims to know infill: the same tensors, three more tokens named in its metadata.

llama.cpp refuses ``/infill`` unless the vocabulary names a prefix, a suffix and a middle token. What the model then
writes is nonsense; the shape of the answer is what tests are after.
"""

from __future__ import annotations

import struct
from pathlib import Path

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY, _UINT32 = 8, 9, 4
ALIGNMENT = 32
TOKENS = {"prefix": 4, "suffix": 6, "middle": 7}  # control tokens that nothing else uses


def with_infill(source: Path, target: Path) -> Path:
    """Write ``target``. The file is small; it is handled in memory."""
    data = source.read_bytes()
    magic, version, tensors, keys = struct.unpack_from("<4sIQQ", data, 0)
    assert magic == b"GGUF" and version == 3
    place = 24
    for _ in range(keys):
        place = _after_value(data, _after_string(data, place))
    end = place
    for _ in range(tensors):
        end = _after_string(data, end)
        (dimensions,) = struct.unpack_from("<I", data, end)
        end += 4 + 8 * dimensions + 4 + 8
    added = b"".join(
        _string(f"tokenizer.ggml.{name}_token_id") + struct.pack("<II", _UINT32, token)
        for name, token in TOKENS.items())
    head = struct.pack("<4sIQQ", magic, version, tensors, keys + len(TOKENS)) + data[24:place] + added + data[place:end]
    target.write_bytes(_padded(head) + data[len(_padded(data[:end])):])
    return target


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % ALIGNMENT)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _after_string(data: bytes, place: int) -> int:
    return place + 8 + int(struct.unpack_from("<Q", data, place)[0])


def _after_value(data: bytes, place: int) -> int:
    (kind,) = struct.unpack_from("<I", data, place)
    return _after_payload(data, place + 4, kind)


def _after_payload(data: bytes, place: int, kind: int) -> int:
    if kind == _STRING:
        return _after_string(data, place)
    if kind != _ARRAY:
        return place + _SIZES[kind]
    inner, count = struct.unpack_from("<IQ", data, place)
    place += 12
    if inner in _SIZES:
        return place + int(count) * _SIZES[inner]
    for _ in range(count):
        place = _after_payload(data, place, inner)
    return place
