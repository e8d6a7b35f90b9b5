"""Streamed equals resident, bit for bit, with the real kernels and the real PyCUDA on the simulated driver.

The fast build runs many orders of the streams, the checked one sees every access of every kernel. A report of either
fails the test. ``just gpu`` plays the same scripts on a real device.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from kvstream.cuda.device import PyCudaDevice
from kvstream.cuda.layout import HEAD_SIZES
from kvstream.cuda.types import KVType
from tests.cuda.driver.pool import Simulated
from tests.cuda.streaming import Played, Script, Shape, opening_of, play
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
    wandering_split,
)

TYPES = tuple(map(str, KVType))
SHORT: Script = (feed(a=40), feed(a=30), feed(a=1), feed(a=7), feed(a=1))


def on_pycuda(sim: Any, shape: Shape, cells: int | None, script: Script, lazily: bool = True, **more: Any) -> Played:
    """A scene: what ``play`` gives."""
    geometry = shape.geometry()
    played = play(PyCudaDevice(sim.kernels), geometry, opening_of(geometry, cells, **more), script, lazily=lazily)
    assert sim.get("call:cuMemcpyHtoDAsync") >= played.stats.counters["in_calls"]
    return played


def digests(sim: Any, shapes: list[Shape], cells: int | None, script: Script, rows_max: int = 64) -> list[Any]:
    """A scene: of each shape (digest of all outputs, pages streamed)."""
    found = []
    for shape in shapes:
        played = on_pycuda(sim, shape, cells, script, sequences_max=1, rows_max=rows_max)
        text = b"".join(played.outputs[key] for key in sorted(played.outputs))
        found.append((hashlib.sha256(text).hexdigest(), len(played.outputs), played.stats.counters["in_pages"]))
    return found


def same_streamed_and_resident(simulated: Simulated, shapes: list[Shape], checked: bool = False) -> int:
    """Returns how many rows were compared."""
    low = fewest(shapes[0], 1)
    runs = [{"cells": cells, "policy": policy, "seed": 3}
            for cells, policy in ((None, "oldest"), (low, "uniform"), (low, "newest"))]
    resident, *streamed = simulated.each(digests, runs, shapes=shapes, script=SHORT, kernels="kv", checked=checked,
                                         timeout_s=300)
    for found in streamed:
        assert [one[:2] for one in found] == [one[:2] for one in resident]
        assert all(pages > 0 for _, _, pages in found)
    assert all(pages == 0 for _, _, pages in resident)
    return sum(rows for _, rows, _ in resident) * len(streamed)


@pytest.mark.parametrize("k_type", TYPES)
def test_all_pairs_of_types(simulated: Simulated, k_type: str) -> None:
    rows = same_streamed_and_resident(simulated, [evolve(SMALL, k_type=k_type, v_type=v_type) for v_type in TYPES])
    assert rows == len(TYPES) * 79 * SMALL.layers * 2


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_all_head_sizes(simulated: Simulated, head_size: int) -> None:
    """With groups that do and do not divide a tile, pages of 64 tokens, and several KV heads in one row."""
    shapes = [evolve(SMALL, head_size=head_size, kv_heads=kv_heads, q_heads=q_heads, k_type=k_type, v_type=v_type)
              for kv_heads, q_heads, k_type, v_type in ((2, 6, "q8_0", "q4_0"), (1, 5, "f16", "iq4_nl"))
              if kv_heads * head_size % 32 == 0]
    assert same_streamed_and_resident(simulated, shapes) > 0


def test_two_hundred_orders(simulated: Simulated) -> None:
    """Seeds and policies: whatever the order in which the streams run, the bits are the same."""
    resident = simulated.call(digests, [TINY], None, SHORT, kernels="kv")[0]
    found = simulated.seeds(digests, 200, shapes=[TINY], cells=fewest(TINY, 1), script=SHORT, kernels="kv")
    assert {one[0][:2] for one in found} == {resident[:2]}
    assert {one[0][2] for one in found} == {found[0][0][2]} and found[0][0][2] > 0


@pytest.mark.parametrize("script", [BY_TOKEN, BY_SEVEN], ids=["by token", "by seven"])
def test_the_width_of_a_step_changes_nothing(simulated: Simulated, script: Script) -> None:
    resident = simulated.call(on_pycuda, SMALL, None, ONE, kernels="kv", sequences_max=1)
    for cells in (None, fewest(SMALL, 1)):
        assert simulated.call(on_pycuda, SMALL, cells, script, kernels="kv", sequences_max=1,
                              seed=2).outputs == resident.outputs


def test_the_fake_device_computes_the_same_up_to_rounding(simulated: Simulated) -> None:
    real = simulated.call(on_pycuda, SMALL, None, ONE, kernels="kv", sequences_max=1).outputs
    fake = on_fake(SMALL, None, ONE, sequences_max=1).outputs
    assert real.keys() == fake.keys()
    worst = max(np.abs(np.frombuffer(real[key], np.float32) - np.frombuffer(fake[key], np.float32)).max()
                for key in real)
    assert worst < 1e-5


def test_four_sequences_in_one_pool_are_each_as_alone(simulated: Simulated) -> None:
    expected: dict[Any, bytes] = {}
    for name in "abcd":
        expected |= simulated.call(on_pycuda, SMALL, None, alone(FOUR, name), kernels="kv", sequences_max=1).outputs
    for checked, number in ((False, 12), (True, 4)):
        for played in simulated.seeds(on_pycuda, number, shape=SMALL, cells=fewest(SMALL, 4), script=FOUR, kernels="kv",
                                      checked=checked):
            assert played.outputs == expected and played.stats.counters["in_pages"] > 0


def test_the_life_of_sequences(simulated: Simulated) -> None:
    resident = simulated.call(on_pycuda, SMALL, None, LIFE, kernels="kv", policy="oldest")
    for checked, number in ((False, 9), (True, 3)):
        for lazily in (False, True):
            for played in simulated.seeds(on_pycuda, number, shape=SMALL, cells=fewest(SMALL, 4), script=LIFE,
                                          kernels="kv", checked=checked, lazily=lazily):
                assert played.outputs == resident.outputs and played.stats.counters["in_pages"] > 0


@pytest.mark.parametrize("more", [0, 1, 2])
def test_no_access_is_out_of_order(simulated: Simulated, more: int) -> None:
    """The checked build: each load and store of each kernel, against what was ordered before it."""
    resident = simulated.call(digests, [SMALL], None, ONE, kernels="kv")[0]
    for found in simulated.seeds(digests, 6, shapes=[SMALL], cells=fewest(SMALL, 1) + more, script=ONE, kernels="kv",
                                 checked=True):
        assert found[0][:2] == resident[:2] and found[0][2] > 0


def test_repartition_under_load(simulated: Simulated) -> None:
    resident = simulated.call(digests, [SMALL], None, ONE, kernels="kv")[0]
    for checked, number in ((False, 12), (True, 4)):
        for found, moved in simulated.seeds(wandering, number, kernels="kv", checked=checked):
            assert found == resident[:2] and moved > 10


def wandering(sim: Any) -> tuple[Any, int]:
    """A scene: the split changes in every step."""
    cells = fewest(SMALL, 1) + 3
    played = on_pycuda(sim, SMALL, cells, ONE, sequences_max=1, split=wandering_split(cells))
    text = b"".join(played.outputs[key] for key in sorted(played.outputs))
    assert played.stats.counters["in_pages"] > 0
    return (hashlib.sha256(text).hexdigest(), len(played.outputs)), played.stats.repartitions
