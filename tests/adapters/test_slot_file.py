"""The head of a saved slot's file: which tokens it holds, and that nothing else is taken for one."""

from __future__ import annotations

import struct

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstream.adapters.llamacpp_slotfile import head_bytes, read_head

# The first bytes of a file that b11549 wrote of a slot with 401 tokens, and all of one of an empty slot of four.
REAL_HEAD = bytes.fromhex(
    "717367670400000095010000ffffffff0100000091010000f80100003d090000d2180000364000007b690000b202000004010000ee5c0000")
REAL_EMPTY = bytes.fromhex(
    "717367670400000004000000ffffffff0100000000000000000000000400000000000000000000000000000000000000")
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def written(ids: list[int], rest: bytes = b"\0" * 12) -> bytes:
    payload = struct.pack(f"<3I{len(ids)}II", 0xFFFFFFFF, 1, len(ids), *ids, 0)
    return b"qsgg" + struct.pack("<2I", 4, len(payload) // 4) + payload + rest


def before(ids: list[int]) -> bytes:
    return b"qsgg" + struct.pack(f"<2I{len(ids)}I", 2, len(ids), *ids) + b"\0" * 20


def test_the_real_servers_head_is_read() -> None:
    head = read_head(REAL_HEAD)
    assert head is not None and (head.tokens, head.media) == (401, False)
    assert list(head.ids) == [504, 2365, 6354, 16438, 27003, 690, 260, 23790]
    empty = read_head(REAL_EMPTY)
    assert empty is not None and (empty.tokens, list(empty.ids)) == (0, [])


@given(IDS, st.integers(0, 40))
def test_the_promised_number_of_bytes_has_the_promised_ids(ids: list[int], wanted: int) -> None:
    head = read_head(written(ids)[: head_bytes(wanted)])
    assert head is not None and head.tokens == len(ids)
    assert list(head.ids) == ids[:wanted]


@given(IDS, st.integers(0, 3))
def test_a_cut_is_no_more_than_fewer_ids(ids: list[int], odd: int) -> None:
    whole = written(ids, b"")
    for end in range(head_bytes(0), len(whole), 5):
        head = read_head(whole[: end + odd])
        assert head is not None and list(head.ids) == ids[: (end + odd - head_bytes(0)) // 4]


@given(IDS.filter(bool))
def test_the_older_list_of_tokens_is_read_too(ids: list[int]) -> None:
    head = read_head(before(ids))
    assert head is not None and (head.tokens, list(head.ids)) == (len(ids), ids)


def test_ids_end_at_an_image() -> None:
    head = read_head(written([1, 2, 0xFFFFFFFF, 0xFFFFFFFF, 5]))
    assert head is not None and (head.tokens, list(head.ids), head.media) == (5, [1, 2], True)


def test_other_files_are_none() -> None:
    good = written([1, 2, 3])
    assert read_head(good) is not None
    assert read_head(b"ggsq" + good[4:]) is None
    assert read_head(b"GGUF" + good[4:]) is None
    assert read_head(good[:4] + struct.pack("<I", 5) + good[8:]) is None  # a version not seen yet
    assert read_head(good[:4] + struct.pack("<I", 0) + good[8:]) is None
    assert read_head(good[:16] + struct.pack("<I", 2) + good[20:]) is None  # the same, of the payload
    assert read_head(good[:20] + struct.pack("<I", 5) + good[24:]) is None  # more tokens than there is room for
    assert read_head(written([1, 2**31, 3])) is None  # no id
    for cut in (0, 3, 8, 12, 16, 20):
        assert read_head(good[:cut]) is None, cut


@given(st.binary(max_size=80), st.booleans())
@settings(max_examples=300)
def test_no_bytes_make_it_raise(data: bytes, magic: bool) -> None:
    head = read_head(b"qsgg\4\0\0\0" + data if magic else data)
    assert head is None or len(head.ids) <= head.tokens
