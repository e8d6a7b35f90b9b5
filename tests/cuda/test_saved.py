"""Saved pages as bytes and files: they go on in another cache with the same bits; nothing else is taken for them."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from kvstream.cuda import saved as files
from kvstream.cuda.cache import KVCache
from kvstream.cuda.fake_device import FakeDevice
from kvstream.cuda.fake_kernels import KERNELS
from kvstream.cuda.records import Saved
from kvstream.errors import StepError
from tests.cuda.streaming import Shape, opening_of, values
from tests.cuda.test_streaming import fewest

SHAPE = Shape(layers=2, kv_heads=1, q_heads=2, k_type="q5_1", v_type="iq4_nl")
GEOMETRY = SHAPE.geometry()
TOKENS = 75


def step(cache: KVCache, sequence: int, new: int) -> list[bytes]:
    start, outputs = cache.tokens(sequence), []
    cache.begin_step([(sequence, new)])
    for layer in range(GEOMETRY.layers):
        k, v, q = (np.stack([values("a", at, layer, 0, what, number) for at in range(start, start + new)])
                   for what, number in (("k", GEOMETRY.row_values), ("v", GEOMETRY.row_values),
                                        ("q", GEOMETRY.q_heads * GEOMETRY.head_size)))
        cache.append(layer, k, v)
        outputs.append(cache.attend(layer, q).tobytes())
    cache.end_step()
    return outputs


def opened(cells: int | None, **more: Any) -> KVCache:
    return KVCache(FakeDevice(KERNELS), GEOMETRY, opening_of(GEOMETRY, cells, sequences_max=1, **more))


@pytest.fixture(scope="module")
def some() -> tuple[Saved, list[bytes]]:
    """75 tokens, and what comes out for the next ten."""
    cache = opened(None)
    sequence = cache.create()
    step(cache, sequence, 60)
    step(cache, sequence, TOKENS - 60)
    kept = cache.save(sequence)
    return kept, step(cache, sequence, 10)


def same(one: Saved, other: Saved) -> bool:
    return (one.geometry, one.tokens, len(one.data)) == (other.geometry, other.tokens, len(other.data)) and all(
        np.array_equal(a, b) for a, b in zip(one.data, other.data, strict=True))


def test_a_sequence_goes_on_in_another_cache(some: tuple[Saved, list[bytes]], tmp_path: Path) -> None:
    kept, expected = some
    path = tmp_path / "one.kv"
    files.write_file(path, kept)
    files.write_file(path, kept)  # over the old one
    assert [file.name for file in tmp_path.iterdir()] == ["one.kv"]
    assert path.read_bytes() == files.pack(kept) and path.stat().st_size > kept.nbytes
    for cells, page in ((None, 0), (fewest(SHAPE, 1), 3)):
        cache = opened(cells)
        for _ in range(page):
            cache.create(5)  # so that it gets other pages
        again = files.read_file(path)
        assert same(again, kept)
        sequence = cache.load(again)
        assert cache.tokens(sequence) == TOKENS and step(cache, sequence, 10) == expected
        assert same(cache.save(cache.load(again)), kept)
        cache.close()


@pytest.mark.parametrize("tokens", [0, 1, 32])
def test_sequences_of_any_length(tokens: int) -> None:
    cache = opened(None)
    sequence = cache.create()
    if tokens:
        step(cache, sequence, tokens)
    kept = cache.save(sequence)
    assert same(files.unpack(files.pack(kept)), kept) and kept.nbytes == tokens * 2 * (48 + 36)
    assert cache.tokens(cache.load(files.unpack(files.pack(kept)))) == tokens


def test_a_file_that_was_cut_short_says_so(some: tuple[Saved, list[bytes]]) -> None:
    data = files.pack(some[0])
    for size in (0, 1, 22, 23, 26, 27, 60, 250, len(data) // 2, len(data) - 33, len(data) - 1):
        with pytest.raises(StepError, match="saved pages were cut short"):
            files.unpack(data[:size])
    with pytest.raises(StepError, match=r"are too long: 12,\d+ bytes of 12,\d+ for 75 tokens"):
        files.unpack(data + b"\0")


def test_a_file_that_was_changed_anywhere_is_refused(some: tuple[Saved, list[bytes]]) -> None:
    data = files.pack(some[0])
    for place in (*range(300), *range(300, len(data), 97), len(data) - 1):
        changed = bytearray(data)
        changed[place] ^= 1
        with pytest.raises(StepError, match=r"saved pages|no pages that KVStream saved"):
            files.unpack(changed)


@pytest.mark.parametrize(("change", "why"), [
    ({"layers": 0}, "layers is 0"), ({"k_type": "q9_9"}, "q9_9"), ({"tokens": -1}, "not whole"), ({"more": 1}, "more"),
    ({"tokens": 1.5}, "not whole"), ({"head_size": "64"}, "not whole"), ({"tokens": True}, "not whole"),
    ({"layers": 10**12}, "cut short"), ({"tokens": 10**3500}, "too large")])
def test_headers_that_make_no_sense(some: tuple[Saved, list[bytes]], change: dict[str, Any], why: str) -> None:
    described = files._description(some[0]) | change
    header = json.dumps(described).encode()
    with pytest.raises(StepError, match=why):
        files.unpack(files.MAGIC + files.LENGTH.pack(len(header)) + header)
    for header in (b"", b"[]", b"{}", b"\xff", b"null", b"[" * 4096):
        with pytest.raises(StepError, match="damaged"):
            files.unpack(files.MAGIC + files.LENGTH.pack(len(header)) + header)
    with pytest.raises(StepError, match="a header of 4294967295 bytes"):
        files.unpack(files.MAGIC + files.LENGTH.pack(0xFFFFFFFF))


def test_a_model_of_a_billion_layers_and_no_token_is_refused_at_once(some: tuple[Saved, list[bytes]]) -> None:
    header = json.dumps(files._description(some[0]) | {"layers": 10**9, "tokens": 0}).encode()
    data = files.MAGIC + files.LENGTH.pack(len(header)) + header
    with pytest.raises(StepError, match="damaged: 1,000,000,000 layers"):
        files.unpack(data + hashlib.sha256(data).digest())


def test_two_threads_may_save_the_same_file(some: tuple[Saved, list[bytes]], tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(files.write_file, tmp_path / "one.kv", some[0]) for _ in range(60)]:
            done.result()
    assert same(files.read_file(tmp_path / "one.kv"), some[0]) and len(list(tmp_path.iterdir())) == 1


def test_other_files_and_folders(some: tuple[Saved, list[bytes]], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("something else that is long enough to be one", "utf-8")
    with pytest.raises(StepError, match=r"text: these are no pages that KVStream saved"):
        files.read_file(tmp_path / "text")
    with pytest.raises(StepError, match=r"cannot be read from .*nothing"):
        files.read_file(tmp_path / "nothing")
    with pytest.raises(StepError, match="cannot be saved as"):
        files.write_file(tmp_path / "nowhere" / "file", some[0])
    with pytest.raises(StepError, match="cannot be saved as"):
        files.write_file(tmp_path, some[0])
    assert [file.name for file in tmp_path.iterdir()] == ["text"]


def test_pages_of_another_geometry_are_refused(some: tuple[Saved, list[bytes]]) -> None:
    again = files.unpack(files.pack(some[0]))
    for change in ({"layers": 1}, {"q_heads": 1}, {"page_tokens": 64}, {"v_type": "q4_0"}, {"k_type": "q5_0"}):
        geometry = evolve(SHAPE, **change).geometry()
        cache = KVCache(FakeDevice(KERNELS), geometry, opening_of(geometry, None, sequences_max=1))
        before = cache.stats()
        with pytest.raises(StepError, match="these pages are of Geometry"):
            cache.load(again)
        assert cache.stats() == before
        cache.close()
    short = opened(None, context_max=64)
    with pytest.raises(StepError, match="75 tokens were saved, this cache was opened for 64"):
        short.load(again)
    short.close()
