"""How long a GGUF file has to be, by its own table of tensors: a download that broke off is shorter.

Read only when a server could not load it, whose words for this are about something else. Cheap (a header has some
megabytes), and it trusts nothing: what cannot be read to the end says nothing.

::

    "GGUF" version tensors values - (key type value)* - (name dims shape* type offset)* - padding - the tensors
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Final

# By the number of a type: elements in a block, bytes of one. Of a type that is not here, the first byte is looked for.
BLOCKS: Final = MappingProxyType({
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66), 17: (256, 74),
    18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2),
    26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
})
# Bytes, by the number of a type.
VALUES: Final = MappingProxyType({0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8})
U32, STRING, ARRAY = 4, 8, 9
COUNT_MAX: Final = 2**24  # of anything; a larger one is damage
ALIGNMENT: Final = b"general.alignment"


class _Ends(Exception):
    """The file ends within its header."""


def shortfall(model: Path) -> str:
    """What the file lacks, as a sentence; empty when it has all, or nothing is known. *Errors*: none."""
    try:
        with model.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            try:
                wanted = _wanted(file)
            except _Ends:
                return f"{model} is incomplete: it has {size:,} bytes and ends within its own header; download it again"
    except (OSError, ValueError, OverflowError, struct.error):
        return ""
    if size >= wanted:
        return ""
    return (f"{model} is incomplete: it has {size:,} bytes, and by its own table of tensors {wanted:,} at least; "
            "download it again")


def _wanted(file: BinaryIO) -> int:
    magic, version, tensors, values = _read(file, "<IIQQ")
    if magic != int.from_bytes(b"GGUF", "little") or version not in (2, 3) or max(tensors, values) > COUNT_MAX:
        raise ValueError("another format")
    alignment = 32
    for _ in range(values):
        (length,) = _read(file, "<Q")
        key = file.read(length) if length == len(ALIGNMENT) else b""
        _skip(file, length - len(key))
        (kind,) = _read(file, "<I")
        if key == ALIGNMENT and kind == U32:
            (alignment,) = _read(file, "<I")
        else:
            _skip_value(file, kind)
    end = 0
    for _ in range(tensors):
        (length,) = _read(file, "<Q")
        _skip(file, length)
        (dims,) = _read(file, "<I")
        *shape, kind, offset = _read(file, f"<{_few(dims)}QIQ")
        block, size = BLOCKS.get(kind, (0, 1))
        elements = 1
        for dim in shape:
            elements *= dim
        end = max(end, offset + (-(-elements // block) * size if block else size))
    return file.tell() + -file.tell() % max(1, alignment) + end


def _few(dims: int) -> int:
    if dims > 8:
        raise ValueError("no tensor has so many dimensions")
    return dims


def _read(file: BinaryIO, form: str) -> tuple[int, ...]:
    content = file.read(struct.calcsize(form))
    if len(content) < struct.calcsize(form):
        raise _Ends
    return struct.unpack(form, content)


def _skip(file: BinaryIO, length: int) -> None:
    """Whether there is so much is seen at the next read."""
    file.seek(length, os.SEEK_CUR)


def _skip_value(file: BinaryIO, kind: int) -> None:
    if kind in VALUES:
        _skip(file, VALUES[kind])
    elif kind == STRING:
        _skip(file, *_read(file, "<Q"))
    elif kind == ARRAY:
        kind, count = _read(file, "<IQ")
        if kind in VALUES:
            _skip(file, VALUES[kind] * count)
        elif kind == STRING and count <= COUNT_MAX:
            for _ in range(count):
                _skip(file, *_read(file, "<Q"))
        else:
            raise ValueError("arrays of arrays, which nobody has")
    else:
        raise ValueError("a type that is not known")
