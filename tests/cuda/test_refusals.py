"""Calls with something wrong in them: each is a ``StepError`` that says what, and afterwards everything is as before.

A conversation in which every wrong call is made wherever it can be made gives the bits of one without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from kvstream.cuda.cache import KVCache
from kvstream.cuda.fake_device import FakeDevice
from kvstream.cuda.fake_kernels import KERNELS
from kvstream.cuda.records import Saved
from kvstream.errors import StepError
from tests.cuda.streaming import opening_of, values
from tests.cuda.test_streaming import SMALL, TINY, fewest

SHAPE = SMALL
GEOMETRY = SHAPE.geometry()
HEADS, SIZE = GEOMETRY.kv_heads, GEOMETRY.head_size


def wrong_arrays(rows: int, heads: int) -> Iterator[tuple[Any, str]]:
    right = np.ones((rows, heads, SIZE), np.float32)
    nan, infinite = right.copy(), right.astype(np.float64)
    nan[-1, 0, 3], infinite[0, 0, 0:2] = np.nan, 1e300
    yield right[:, :, :-1], "has .* values, the step has"
    yield np.ones((rows + 1, heads, SIZE)), "has .* values, the step has"
    yield np.ones((SIZE, rows, heads)), "has the shape"
    yield from ((right.astype(kind), "is of") for kind in (complex, "S", object, bool))
    yield None, "is of object"
    yield [[1.0], [1.0, 2.0]], "is no array"
    yield nan, "1 values of . are not finite"
    yield infinite, "2 values of . are not finite"
    yield 0, "which is no address"
    yield -4096, "which is no address"


class Disturbed:
    """Makes wrong calls, or none."""

    def __init__(self, cache: KVCache, really: bool) -> None:
        self.cache, self.really, self.made = cache, really, 0

    def refused(self, why: str, call: Callable[..., Any], *args: Any) -> None:
        if self.really:
            before = self.cache.stats()
            with pytest.raises(StepError, match=why):
                call(*args)
            assert self.cache.stats() == before, why
            self.made += 1

    def between(self, one: int, saved: Saved) -> None:
        cache, refused = self.cache, self.refused
        for call in (cache.end_step, cache.abandon_step):
            refused("no step", call)
        refused("no step", cache.append, 0, 4096, 4096)
        refused("no step", cache.attend, 0, 4096)
        for call in (cache.fork, cache.drop, cache.save, cache.tokens):
            refused("no sequence 99", call, 99)
        refused("no sequence 99", cache.truncate, 99, 0)
        for batch, why in (([(99, 1)], "no sequence 99"), ([(one, 1), (99, 1)], "no sequence 99"), ([], "at least one"),
                           ([(one, 0)], "at least one"), ([(one, -1)], "at least one"),
                           ([(one, 65)], "opened for 2 and 64"), ([(one, 1), (one, 2)], "twice")):
            refused(why, cache.begin_step, batch)
        for tokens in (1000, -1):
            refused(f"cannot be cut to {tokens}", cache.truncate, one, tokens)
        for tokens in (513, -1):
            refused(f"a sequence of {tokens} tokens", cache.create, tokens)
        refused("this cache has", cache.load, evolve(saved, geometry=TINY.geometry()))
        refused("are not 1 tokens", cache.load, evolve(saved, tokens=1))

    def during(self, one: int, wanted: str) -> None:
        cache, refused = self.cache, self.refused
        refused("under way", cache.begin_step, [(one, 1)])
        for call in (cache.save, cache.drop, cache.fork):
            refused("under way", call, one)
        refused(f"Next is {wanted}", cache.end_step)


def test_wrong_calls_are_refused_and_change_nothing() -> None:
    assert conversation(True) == conversation(False)


def conversation(disturbed: bool) -> list[bytes]:
    cache = KVCache(FakeDevice(KERNELS, seed=3), GEOMETRY, opening_of(GEOMETRY, fewest(SHAPE, 2), sequences_max=2))
    wrong = Disturbed(cache, disturbed)
    outputs = []
    one, other = cache.create(), cache.create()
    saved = cache.save(one)
    for batch in ([(one, 50)], [(other, 7)], [(one, 40)], [(one, 1), (other, 1)], [(other, 20), (one, 7)]):
        wrong.between(one, saved)
        rows = sum(new for _, new in batch)
        inputs = [[np.concatenate([np.stack([values(str(sequence), cache.tokens(sequence) + at, layer, 0, what, number)
                                             for at in range(new)]) for sequence, new in batch])
                   for what, number in (("k", GEOMETRY.row_values), ("v", GEOMETRY.row_values),
                                        ("q", GEOMETRY.q_heads * SIZE))] for layer in range(GEOMETRY.layers)]
        cache.begin_step(batch)
        for layer, (k, v, q) in enumerate(inputs):
            wrong.during(one, "append")
            wrong.refused("Next is append", cache.attend, layer, q)
            wrong.refused("Next is append", cache.append, layer + 1, k, v)
            for given, why in wrong_arrays(rows, HEADS):
                wrong.refused(why, cache.append, layer, given, v)
                wrong.refused(why, cache.append, layer, k, given)
            cache.append(layer, k, v)
            wrong.during(one, "attend")
            wrong.refused("Next is attend", cache.append, layer, k, v)
            wrong.refused("Next is attend", cache.attend, layer + 1, q)
            wrong.refused("which is no address", cache.attend, layer, q, -8)
            for given, why in wrong_arrays(rows, GEOMETRY.q_heads):
                wrong.refused(why, cache.attend, layer, given)
            outputs.append(cache.attend(layer, q).tobytes())
        wrong.refused("Next is end_step", cache.append, 0, k, v)
        wrong.refused("Next is end_step", cache.attend, 0, q)
        cache.end_step()
    assert cache.stats().counters["in_pages"] > 0
    assert (wrong.made > 500) == disturbed
    cache.close()
    return outputs


def test_values_may_come_in_other_shapes_and_types() -> None:
    """Three rows of two heads: as one, with the heads as one, as three dimensions; f16, f64 and integers."""
    shape = evolve(SHAPE, kv_heads=2, q_heads=4)
    geometry = shape.geometry()
    numbers = np.random.default_rng(1).integers(-3, 4, (3, 2, 64))
    found = set()
    for make in (lambda n: n.astype(np.float32), lambda n: n.reshape(3, -1).astype(np.float16),
                 lambda n: n.reshape(-1).astype(np.float64), lambda n: n, lambda n: n.tolist(),
                 lambda n: np.asfortranarray(n.astype(np.float32))):
        cache = KVCache(FakeDevice(KERNELS), geometry, opening_of(geometry, None))
        cache.begin_step([(cache.create(), 3)])
        cache.append(0, make(numbers), make(numbers[::-1]))
        found.add(cache.attend(0, make(np.concatenate([numbers, numbers], axis=1))).tobytes())
        cache.close()
    assert len(found) == 1


def test_a_row_that_is_no_number_on_the_device_harms_no_other() -> None:
    """Of addresses nothing can be looked at before they are used."""
    shape = GEOMETRY.q_heads * SIZE
    found = []
    for bad in (False, True):
        device = FakeDevice(KERNELS)
        cache = KVCache(device, GEOMETRY, opening_of(GEOMETRY, None, sequences_max=1))
        host, at = device.pinned(3 * shape * 4), device.alloc(6 * shape * 4)
        q = host.view(np.float32).reshape(3, shape)
        q[:] = values("q", 0, 0, 0, "q", 3 * shape).reshape(3, shape)
        q[1, 5] = np.nan if bad else q[1, 5]
        device.copy_in(cache.compute, at, host)
        cache.begin_step([(cache.create(), 3)])
        cache.append(0, *(values("k", 0, 0, 0, what, 3 * GEOMETRY.row_values) for what in "kv"))
        assert cache.attend(0, at, at + 3 * shape * 4) == at + 3 * shape * 4
        out = device.pinned(3 * shape * 4)
        device.copy_out(cache.compute, out, at + 3 * shape * 4)
        device.synchronize()
        found.append(out.view(np.float32).reshape(3, GEOMETRY.q_heads, SIZE).copy())
        cache.close()
    right, wrong = found
    assert np.array_equal(right[0], wrong[0]) and np.array_equal(right[2], wrong[2])
    assert np.isnan(wrong[1, 0]).all() and np.array_equal(right[1, 1:], wrong[1, 1:]) and np.isfinite(right).all()
