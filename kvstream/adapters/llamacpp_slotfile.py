"""The head of a file that llama.cpp writes when a slot is saved: which tokens it holds.

Everything is little endian and, up to the KV itself, 32 bits wide::

    "qsgg"  version  words  payload[words]  KV ...

    payload, today:    0xFFFFFFFF  1  n  id * n  media ...
    payload, before:   id * words

A token id is never 0xFFFFFFFF in the older form, so its first word tells the two apart. In the newer form a position
that an image or a sound takes is written as 0xFFFFFFFF: what follows it cannot be named by ids, so reading stops there.
"""

from __future__ import annotations

import sys
from array import array

from attrs import field, frozen

MAGIC = b"qsgg"  # "ggsq" as a number
_VERSIONS = range(1, 5)  # those seen; another one may mean another layout, and not to know costs little
_WORD = 4
_HEAD_WORDS = 3  # magic, version, words
_MARK = 0xFFFFFFFF
_MARKED_WORDS = 3  # the mark, its version, the number of tokens
_PAYLOAD_VERSION = 1
_ID_MAX = 2**31 - 1


@frozen
class SlotFileHead:
    """``tokens`` the slot held, and the first of their ``ids``: as many as the bytes had, and none after the first
    position that is no text (``media``)."""

    tokens: int
    ids: array[int] = field(repr=lambda ids: f"{len(ids)} ids")
    media: bool = False


def head_bytes(tokens: int) -> int:
    """How many bytes from a file's start have the ids of its first ``tokens`` tokens."""
    return _WORD * (_HEAD_WORDS + _MARKED_WORDS + tokens)


def read_head(data: bytes) -> SlotFileHead | None:
    """From the first bytes of a file (:func:`head_bytes`), or all of them. None when this is no such file, or one whose
    layout is not known. Never raises."""
    words = array("I")
    words.frombytes(data[: len(data) - len(data) % words.itemsize])
    if sys.byteorder == "big":
        words.byteswap()
    if data[:_WORD] != MAGIC or len(words) < _HEAD_WORDS or words[1] not in _VERSIONS:
        return None
    length, payload = words[2], words[_HEAD_WORDS:]
    if length and not payload:
        return None  # too short to tell which form it is
    if not length or payload[0] != _MARK:
        return _head(length, payload[:length])
    if len(payload) < _MARKED_WORDS or payload[1] != _PAYLOAD_VERSION or payload[2] > length - _MARKED_WORDS:
        return None
    return _head(payload[2], payload[_MARKED_WORDS : _MARKED_WORDS + payload[2]])


def _head(tokens: int, ids: array[int]) -> SlotFileHead | None:
    for place, token in enumerate(ids):
        if token > _ID_MAX:
            return SlotFileHead(tokens, ids[:place], media=True) if token == _MARK else None
    return SlotFileHead(tokens, ids)
