"""Case 73: bodies in gzip and zstd, with a cap on what they decode to."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import trio
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from kvstream.errors import BodyTooLargeError, InvalidRequestError, MediaTypeError
from kvstream.gateway.decoding import PARTS_MAX, PIECE_BYTES, BodyDecoder, codings_of
from tests.gateway.conftest import CHAT, chat, error_of, open_lane, open_rig

MB = 2**20
ENCODE: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": zstd.compress}
BODY = json.dumps(chat("a word " * 500)).encode()


def encoded(body: bytes, codings: str) -> bytes:
    for name in codings.split(","):
        body = ENCODE.get(name.strip().lower().removeprefix("x-"), bytes)(body)
    return body


def decode(data: bytes, *codings: str, limit: int = MB, step: int = PIECE_BYTES) -> bytes:
    decoder = BodyDecoder(codings, limit)
    out = [piece for i in range(0, len(data), step) for piece in decoder.feed(data[i : i + step])]
    decoder.finish()
    assert all(len(piece) <= PIECE_BYTES for piece in out)
    return b"".join(out)


@pytest.mark.parametrize("codings", [
    "gzip", "x-gzip", "zstd", "GZIP", "Zstd", "gzip, identity", "identity", "zstd,gzip",
    "gzip, zstd", "gzip,zstd,gzip"])
async def test_case_73_the_runtime_gets_the_decoded_body(autojump_clock: Any, codings: str) -> None:
    async with open_lane() as lane:
        body = encoded(BODY, codings)
        call = await lane.request("POST", CHAT, body, [("Content-Encoding", codings)], parts=7)
        assert call.status == 200
        request = lane.runtime.journal.calls[0].request
        assert request.json["messages"] == json.loads(BODY)["messages"]
        assert "content-encoding" not in request.headers


async def test_case_73_codings_in_several_headers(autojump_clock: Any) -> None:
    async with open_lane() as lane:
        headers = [("Content-Encoding", "gzip"), ("Content-Encoding", "zstd")]
        assert (await lane.request("POST", CHAT, encoded(BODY, "gzip,zstd"), headers)).status == 200


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
async def test_case_73_over_the_wire_and_the_connection_stays(coding: str) -> None:
    async with open_rig() as rig:
        response = await rig.post(encoded(BODY, coding), headers=[("Content-Encoding", coding)])
        assert response.status == 200
        await response.read_all()
        again = await response.again("POST", CHAT, encoded(BODY, coding), [("Content-Encoding", coding)])
        assert again.status == 200
        await again.close()


@pytest.mark.parametrize("coding", ["gzip", "zstd", "gzip,zstd"])
async def test_case_73_the_cap_is_on_the_decoded_size(autojump_clock: Any, coding: str) -> None:
    plain = json.dumps(chat()).encode()
    async with open_lane(server={"body_bytes_max": 100_000}) as lane:
        for size, status in ((100_000, 200), (100_001, 413)):
            body = encoded(plain + b" " * (size - len(plain)), coding)
            assert len(body) < 2000
            call = await lane.request("POST", CHAT, body, [("Content-Encoding", coding)])
            assert call.status == status
        error = error_of(call.body)
        assert error["code"] == "body_too_large" and "100000 bytes" in error["message"]
        call = await lane.request("POST", CHAT, b"x" * 100_001, [("Content-Encoding", coding)])
        assert call.status in (400, 413)


@pytest.mark.parametrize("codings", [("gzip",), ("zstd",), ("gzip", "gzip"), ("zstd", "zstd"), ("gzip", "zstd")])
def test_case_73_a_bomb_costs_what_the_cap_allows(codings: tuple[str, ...]) -> None:
    """300 MB in some kilobytes: refused at the cap, and nothing near 300 MB is ever held or made."""
    bomb = encoded(bytes(300 * MB), ",".join(codings))
    tracemalloc.start()
    made = 0
    with pytest.raises(BodyTooLargeError):
        for piece in BodyDecoder(codings, MB).feed(bomb):
            made += len(piece)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert made <= MB and peak < 12 * MB


def test_case_73_a_bomb_below_is_refused_by_the_coding_it_is_in() -> None:
    """Much comes out of the outer coding and nothing of the inner: the outer one's own cap ends it."""
    empty_members = gzip.compress(b"") * (PARTS_MAX - 1)
    padded = encoded(empty_members + bytes(100 * MB), "zstd")
    with pytest.raises(BodyTooLargeError):
        decode(padded, "gzip", "zstd", limit=MB)


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_case_73_parts_in_a_row_are_one_body_up_to_a_number(coding: str) -> None:
    three = b"".join(encoded(text, coding) for text in (b"one", b"", b"three"))
    for step in (1, 5, 1000):
        assert decode(three, coding, step=step) == b"onethree"
    with pytest.raises(InvalidRequestError, match="parts"):
        decode(encoded(b"", coding) * (PARTS_MAX + 1), coding)


def test_case_73_gzip_may_be_padded_with_zeros_only() -> None:
    assert decode(gzip.compress(b"x") + bytes(100), "gzip", step=3) == b"x"
    with pytest.raises(InvalidRequestError):
        decode(gzip.compress(b"x") + b"junk", "gzip")
    with pytest.raises(InvalidRequestError):
        decode(bytes(10) + gzip.compress(b"x"), "gzip")
    with pytest.raises(InvalidRequestError):
        decode(zstd.compress(b"x") + b"junk", "zstd")


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
@pytest.mark.parametrize("how", ["empty", "cut", "cut at the end", "junk", "flipped", "other"])
async def test_case_73_a_broken_body_is_400(autojump_clock: Any, coding: str, how: str) -> None:
    good = zstd.compress(BODY, options={zstd.CompressionParameter.checksum_flag: 1}) if coding == "zstd" else encoded(
        BODY, coding)
    flipped = bytearray(good)
    flipped[-2] ^= 0x55
    other = encoded(BODY, "gzip" if coding == "zstd" else "zstd")
    body = {"empty": b"", "cut": good[: len(good) // 2], "cut at the end": good[:-1], "junk": b"\x1f\x8b nothing",
            "flipped": bytes(flipped), "other": other}[how]
    async with open_lane() as lane:
        call = await lane.request("POST", CHAT, body, [("Content-Encoding", coding)], parts=3)
        assert call.status == 400
        assert coding in error_of(call.body)["message"]
        assert lane.runtime.journal.calls == []


def test_case_73_a_huge_zstd_window_is_refused() -> None:
    options = {zstd.CompressionParameter.window_log: 27, zstd.CompressionParameter.enable_long_distance_matching: 1}
    compressor = zstd.ZstdCompressor(options=options)
    data = compressor.compress(bytes(random.Random(1).randbytes(1000))) + compressor.flush()
    with pytest.raises(InvalidRequestError):
        decode(data, "zstd")


@given(st.binary(max_size=3000), st.integers(1, 400), st.sampled_from([("gzip",), ("zstd",), ("gzip", "zstd")]))
def test_case_73_any_split_gives_the_same(text: bytes, step: int, codings: tuple[str, ...]) -> None:
    assert decode(encoded(text * 50, ",".join(codings)), *codings, step=step) == text * 50


@given(st.binary(max_size=400), st.sampled_from(["gzip", "zstd"]), st.integers(0, 400))
def test_case_73_no_bytes_raise_anything_else(junk: bytes, coding: str, at: int) -> None:
    data = encoded(b"some text " * 20, coding)
    try:
        decode(data[:at] + junk, coding)
    except (InvalidRequestError, BodyTooLargeError):
        pass


async def test_case_73_others_get_their_turn_while_a_big_body_is_decoded() -> None:
    """Counted, not timed: how often another task runs while 64 MiB are decoded."""
    from kvstream.gateway.asgi import read_body

    body = zlib.compress(bytes(64 * MB), wbits=31)
    turns = 0

    async def receive() -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        return {"type": "http.request", "body": body, "more_body": False}

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        scope = {"headers": [(b"content-encoding", b"gzip")]}
        assert len(await read_body(scope, receive, bytes_max=64 * MB, gap_s=5)) == 64 * MB
        nursery.cancel_scope.cancel()
    assert turns >= 64 * MB // PIECE_BYTES


@pytest.mark.parametrize(("values", "codings"), [
    ([], []), ([b""], []), ([b"identity"], []), ([b" GZIP , identity,zstd"], ["gzip", "zstd"]),
    ([b"gzip", b"zstd"], ["gzip", "zstd"]), ([b",,"], [])])
def test_case_73_the_header_is_read_as_a_list(values: list[bytes], codings: list[str]) -> None:
    assert codings_of(values) == codings


@pytest.mark.parametrize("value", [b"br", b"gzip;q=1", b"gzip zstd", b"deflate", b"\xff", b"gzip,gzip,gzip,gzip"])
def test_case_73_other_codings_are_told_what_is_supported(value: bytes) -> None:
    with pytest.raises(MediaTypeError):
        codings_of([value])
