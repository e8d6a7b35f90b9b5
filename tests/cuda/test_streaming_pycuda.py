"""Streamed equals resident, bit for bit, with the real kernels and the real PyCUDA on the simulated driver.

The fast build runs many orders of the streams, the checked one sees every access of every kernel. A report of either
fails the test. ``just gpu`` plays the same scripts on a real device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from kvstream.cuda.device import PyCudaDevice
from kvstream.cuda.layout import HEAD_SIZES
from kvstream.cuda.types import KVType
from tests.cuda.driver.control import POLICIES
from tests.cuda.driver.pool import Simulated
from tests.cuda.streaming import Digest, Played, Script, Shape, opening_of, play, same
from tests.cuda.test_streaming import (
    BY_SEVEN,
    BY_TOKEN,
    FOUR,
    LIFE,
    ONE,
    SMALL,
    TINY,
    alone,
    feed,
    fewest,
    on_fake,
    pools,
    together,
    wandering_split,
)

TYPES = tuple(map(str, KVType))
SHORT: Script = (feed(a=40), feed(a=30), feed(a=1), feed(a=7), feed(a=1))
MIXED, PLAIN = (("q8_0", "q4_0"), ("f16", "iq4_nl")), (("bf16", "f32"),)
LONGER: Script = (feed(a=60), feed(a=64), feed(a=30), feed(a=1), feed(a=7), feed(a=1))


def on_pycuda(sim: Any, shape: Shape, cells: int | None, script: Script, lazily: bool = True, **more: Any) -> Played:
    """A scene: what ``play`` gives. The driver's own count of copies must be that of the cache."""
    geometry = shape.geometry()
    sim.clear_counters()
    played = play(PyCudaDevice(sim.kernels), geometry, opening_of(geometry, cells, **more), script, lazily=lazily)
    counters = played.stats.counters
    assert sim.get("call:cuMemcpyHtoDAsync") >= counters["in_calls"] + counters["table_calls"]
    assert sim.get("call:cuMemcpyDtoHAsync") >= counters["out_calls"]
    assert sim.get("call:cuStreamWaitEvent") == counters["waits"] and sim.get("pageable_copies") == 0
    return played


def digests(sim: Any, shapes: Sequence[Shape], script: Script, more: int | None, rows_max: int = 64) -> list[Digest]:
    """A scene: each shape in the smallest pool and so many cells ``more``, or with everything resident (None)."""
    return [on_pycuda(sim, shape, None if more is None else fewest(shape, 1, rows_max) + more, script, sequences_max=1,
                      rows_max=rows_max).digest() for shape in shapes]


def same_streamed_and_resident(simulated: Simulated, shapes: Sequence[Shape], script: Script = SHORT,
                               policies: Sequence[str] = ("uniform", "newest")) -> None:
    runs = [{"more": None, "policy": "oldest"}, *({"more": 0, "policy": policy, "seed": 3} for policy in policies)]
    resident, *streamed = simulated.each(digests, runs, shapes=shapes, script=script, kernels="kv", timeout_s=300)
    for found in streamed:
        for shape, one, expected in zip(shapes, found, resident, strict=True):
            same(shape, one, expected, True)
            assert expected.stats.counters["in_pages"] == 0


@pytest.mark.parametrize("k_type", TYPES)
def test_all_pairs_of_types(simulated: Simulated, k_type: str) -> None:
    same_streamed_and_resident(simulated, [evolve(SMALL, k_type=k_type, v_type=v_type) for v_type in TYPES])


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_all_shapes(simulated: Simulated, head_size: int) -> None:
    """Groups that do and do not divide a tile, several KV heads in one row, two sizes of page, two and three layers."""
    for page_tokens, script in ((32, SHORT), (64, LONGER)):
        shapes = [
            Shape(layers, kv_heads, q_heads, head_size, k_type, v_type, page_tokens)
            for kv_heads, q_heads, layers, kinds in ((1, 1, 3, MIXED), (1, 5, 2, PLAIN), (2, 6, 2, MIXED + PLAIN),
                                                     (2, 16, 2, PLAIN), (3, 12, 3, PLAIN))
            for k_type, v_type in kinds if kv_heads * head_size % 32 == 0 or kinds is PLAIN]
        assert len(shapes) >= 5
        same_streamed_and_resident(simulated, shapes, script, ("uniform",))


def test_the_page_of_the_product(simulated: Simulated) -> None:
    """256 tokens, heads of 256, six query heads to a KV head."""
    shape = Shape(2, 1, 6, 256, "q8_0", "q4_0", 256)
    script: Script = (*[feed(a=64)] * 8, feed(a=50), feed(a=1), feed(a=7))
    resident, *streamed = simulated.each(
        on_pycuda, [{"cells": cells, "seed": 5} for cells in (None, fewest(shape, 1), fewest(shape, 1) + 1)],
        shape=shape, script=script, kernels="kv", sequences_max=1, context_max=1024)
    for played in streamed:
        same(shape, played, resident, True)


def test_two_hundred_orders(simulated: Simulated) -> None:
    """Seeds and policies: whatever the order in which the streams run, the bits are the same."""
    (resident,) = simulated.call(digests, [TINY], SHORT, None, kernels="kv")
    found = simulated.seeds(digests, 200, shapes=[TINY], more=0, script=SHORT, kernels="kv")
    for (one,) in found:
        same(TINY, one, resident, True)
    assert len(found) >= 200 and len({one.stats.counters["in_pages"] for (one,) in found}) == 1


@pytest.mark.parametrize("script", [BY_TOKEN, BY_SEVEN], ids=["by token", "by seven"])
def test_the_width_of_a_step_changes_nothing(simulated: Simulated, script: Script) -> None:
    resident = simulated.call(on_pycuda, SMALL, None, ONE, kernels="kv", sequences_max=1)
    for cells in (None, fewest(SMALL, 1)):
        played = simulated.call(on_pycuda, SMALL, cells, script, kernels="kv", sequences_max=1, seed=2)
        same(SMALL, played, resident, cells is not None)


def test_every_size_of_pool(simulated: Simulated) -> None:
    (resident,) = simulated.call(digests, [SMALL], ONE, None, kernels="kv")
    sizes = [cells - fewest(SMALL, 1) for cells in pools(SMALL, 126)]
    found = simulated.each(digests, [{"more": more, "seed": more, "policy": POLICIES[more % 6]} for more in sizes],
                           shapes=[SMALL], script=ONE, kernels="kv")
    seen = [one.stats.counters["in_pages"] for (one,) in found]
    for (one,), pages in zip(found, seen, strict=True):
        same(SMALL, one, resident, pages > 0)
    assert seen == sorted(seen, reverse=True) and seen[0] > seen[2] > 0 == seen[-1]


def test_the_fake_device_computes_the_same_up_to_rounding(simulated: Simulated) -> None:
    real = simulated.call(on_pycuda, SMALL, None, ONE, kernels="kv", sequences_max=1).outputs
    fake = on_fake(SMALL, None, ONE, sequences_max=1).outputs
    assert real.keys() == fake.keys()
    worst = max(np.abs(np.frombuffer(real[key], np.float32) - np.frombuffer(fake[key], np.float32)).max()
                for key in real)
    assert worst < 1e-5


def test_four_sequences_in_one_pool_are_each_as_alone(simulated: Simulated) -> None:
    expected = together(simulated.call(on_pycuda, SMALL, None, alone(FOUR, name), kernels="kv", sequences_max=1)
                        for name in "abcd")
    for checked, number in ((False, 12), (True, 4)):
        for played in simulated.seeds(on_pycuda, number, shape=SMALL, cells=fewest(SMALL, 4), script=FOUR, kernels="kv",
                                      checked=checked):
            same(SMALL, played, expected, True)


def test_the_life_of_sequences(simulated: Simulated) -> None:
    resident = simulated.call(on_pycuda, SMALL, None, LIFE, kernels="kv", policy="oldest")
    for checked, number in ((False, 9), (True, 3)):
        for lazily in (False, True):
            for played in simulated.seeds(on_pycuda, number, shape=SMALL, cells=fewest(SMALL, 4), script=LIFE,
                                          kernels="kv", checked=checked, lazily=lazily):
                same(SMALL, played, resident, True)


@pytest.mark.parametrize("more", [0, 1, 2])
def test_no_access_is_out_of_order(simulated: Simulated, more: int) -> None:
    """The checked build: each load and store of each kernel, against what was ordered before it."""
    (resident,) = simulated.call(digests, [SMALL], ONE, None, kernels="kv")
    for (found,) in simulated.seeds(digests, 6, shapes=[SMALL], more=more, script=ONE, kernels="kv", checked=True):
        same(SMALL, found, resident, True)


def test_repartition_under_load(simulated: Simulated) -> None:
    (resident,) = simulated.call(digests, [SMALL], ONE, None, kernels="kv")
    for checked, number in ((False, 12), (True, 4)):
        for found in simulated.seeds(wandering, number, kernels="kv", checked=checked):
            same(SMALL, found, resident, True)
            assert found.stats.repartitions > 10


def wandering(sim: Any) -> Digest:
    """A scene: the split changes in every step."""
    cells = fewest(SMALL, 1) + 3
    return on_pycuda(sim, SMALL, cells, ONE, sequences_max=1, split=wandering_split(cells)).digest()
