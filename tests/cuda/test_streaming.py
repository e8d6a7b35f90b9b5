"""Streamed equals resident, bit for bit: any pool, any width, any company. On the fake device here, under PyCUDA in
``test_streaming_pycuda``.

Each comparison is with a run in which everything stays on the device. The counters say that what was to be streamed was
streamed; without them a path that silently is not used would pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from kvstream.cuda.fake_device import FakeDevice
from kvstream.cuda.fake_kernels import KERNELS
from kvstream.cuda.layout import cells_min
from kvstream.cuda.policy import Split
from kvstream.cuda.types import KVType
from tests.cuda.streaming import Played, Script, Shape, opening_of, play, same


def feed(**tokens: int) -> tuple[str, tuple[tuple[str, int], ...]]:
    return "feed", tuple(tokens.items())


def on_fake(shape: Shape, cells: int | None, script: Script, seed: int | None = None, lazily: bool = True,
            **more: Any) -> Played:
    geometry = shape.geometry()
    return play(FakeDevice(KERNELS, seed=seed), geometry, opening_of(geometry, cells, **more), script, lazily=lazily)


def fewest(shape: Shape, sequences: int, rows_max: int = 64) -> int:
    return cells_min(shape.geometry(), rows_max, sequences)


SMALL = Shape(layers=2, kv_heads=1, q_heads=2)
TINY = Shape(layers=2, kv_heads=1, q_heads=1)

# The same tokens of "a", in steps of several widths: rows that do not divide pages, and a verify step of seven.
ONE: Script = (feed(a=40), feed(a=37), *[feed(a=1)] * 6, feed(a=7), feed(a=33), *[feed(a=1)] * 3)
BY_TOKEN: Script = (feed(a=64), feed(a=13), *[feed(a=1)] * 49)
BY_SEVEN: Script = (feed(a=21), *[feed(a=7)] * 15)

FOUR: Script = (feed(a=45, b=3), feed(c=60), feed(d=33, a=1, b=1), *[feed(a=1, b=1, c=1, d=1)] * 3,
                feed(b=40, d=3), feed(d=1, a=7, c=7), feed(a=1, b=1, c=1, d=1))

# Everything that can happen to a sequence between its steps.
LIFE: Script = (
    feed(a=60), feed(a=10), ("fork", "a", "b"), feed(a=1, b=1), feed(b=33), ("cut", "b", 66), feed(b=2, a=1),
    ("cut", "a", 20), feed(a=30, b=1), ("swap", "a"), feed(a=1), ("swap", "b"), feed(a=1, b=5), ("fork", "b", "c"),
    ("drop", "b"), feed(c=1, a=1), ("abandon", (("a", 40), ("c", 1))), feed(c=3, a=1), ("cut", "c", 64),
    ("fork", "c", "d"), feed(c=1), feed(d=1, a=1), ("drop", "a"), feed(d=34, c=1), ("cut", "c", 0), feed(c=5, d=1))


def pools(shape: Shape, tokens: int, sequences: int = 1) -> range:
    """Numbers of cells from one that everything passes through, to every page of every layer having its own."""
    geometry = shape.geometry()
    return range(fewest(shape, sequences), geometry.layers * geometry.pages(tokens) + fewest(shape, sequences))


def test_pools_from_one_ring_cell_to_all_resident() -> None:
    """Every size of pool that there is. A larger one never streams more."""
    resident = on_fake(SMALL, None, ONE, sequences_max=1)
    same(SMALL, resident, resident, False)
    seen = []
    for cells in pools(SMALL, 126):
        for seed in (None, cells):
            played = on_fake(SMALL, cells, ONE, seed, sequences_max=1)
            pages = played.stats.counters["in_pages"]
            same(SMALL, played, resident, pages > 0)
        assert played.stats.counters["host_waits"] == 0
        seen.append(pages)
    assert seen == sorted(seen, reverse=True) and seen[0] > seen[2] > 0 == seen[-1]
    for seed in range(8):
        played = on_fake(SMALL, fewest(SMALL, 1), ONE, seed, sequences_max=1)
        same(SMALL, played, resident, True)
        counters = played.stats.counters
        assert counters["cross_layer_prefetches"] > 0 and counters["waits"] > counters["batches"] > 0


@pytest.mark.parametrize("script", [BY_TOKEN, BY_SEVEN], ids=["by token", "by seven"])
def test_the_width_of_a_step_changes_nothing(script: Script) -> None:
    resident = on_fake(SMALL, None, ONE, sequences_max=1)
    same(SMALL, on_fake(SMALL, None, script, sequences_max=1), resident, False)
    same(SMALL, on_fake(SMALL, fewest(SMALL, 1), script, 3, sequences_max=1), resident, True)


def alone(script: Script, name: str) -> Script:
    lines = [("feed", tuple((one, new) for one, new in line[1] if one == name)) for line in script]
    return tuple(line for line in lines if line[1])


def together(played: Iterable[Played]) -> Played:
    """What several have given, each of which was alone."""
    outputs: dict[Any, bytes] = {}
    for one in played:
        assert not outputs.keys() & one.outputs.keys()
        outputs |= one.outputs
    return Played(outputs, one.stats, one.fed)


def test_four_sequences_in_one_pool_are_each_as_alone() -> None:
    expected = together(on_fake(SMALL, None, alone(FOUR, name), sequences_max=1) for name in "abcd")
    for cells in (fewest(SMALL, 4), fewest(SMALL, 4) + 3, None):
        same(SMALL, on_fake(SMALL, cells, FOUR, 5), expected, cells is not None)


def test_the_life_of_sequences() -> None:
    """Fork, truncate, drop, save and load, and steps that are given up: the bits are those of all-resident."""
    resident = on_fake(SMALL, None, LIFE, lazily=False)
    for cells in (fewest(SMALL, 4), fewest(SMALL, 4) + 4, None):
        for lazily in (False, True):
            played = on_fake(SMALL, cells, LIFE, 7, lazily)
            stats = played.stats
            same(SMALL, played, resident, stats.counters["in_pages"] > 0)  # a loaded sequence comes in at any size
            assert stats.counters["in_pages"] > 0
            # c has 5 tokens and d 98; nothing else is left
            assert stats.sequences == 2 and stats.host_pages - stats.host_pages_free == 1 + 4


def wandering_split(cells: int) -> Any:
    """For ``Opening.split``: another one for each step."""
    turns = cycle(((0, 0), (3, 0), (0, 3), (1, 1), (2, 0), (0, 1)))
    return lambda active: Split(0, cells - 2 - sum(turn := next(turns)), turn)


def test_repartition_under_load() -> None:
    """The split changes with every step, while transfers run. What stays keeps its cell: nothing is loaded twice."""
    resident = on_fake(SMALL, None, ONE, sequences_max=1)
    cells = fewest(SMALL, 1) + 3
    for seed in (None, *range(6)):
        played = on_fake(SMALL, cells, ONE, seed, sequences_max=1, split=wandering_split(cells))
        same(SMALL, played, resident, True)
        assert played.stats.repartitions > 10


@pytest.mark.parametrize("kind", KVType, ids=str)
def test_every_type_and_the_oracle(kind: KVType) -> None:
    """Each type once as K and once as V, against float64 on what the types leave of the inputs."""
    other = tuple(KVType)[(kind.code + 4) % len(KVType)]
    worst = 0.0

    def oracle(out: Any, expected: Any) -> None:
        nonlocal worst
        worst = max(worst, float(np.abs(out - expected).max()))

    shape = evolve(SMALL, k_type=str(kind), v_type=str(other))
    geometry = shape.geometry()
    script: Script = (feed(a=62), feed(a=50), feed(a=1), feed(a=7), feed(a=1))
    resident = play(FakeDevice(KERNELS), geometry, opening_of(geometry, None, sequences_max=1), script,
                    oracle=oracle)
    assert worst < 1e-5
    same(shape, on_fake(shape, fewest(shape, 1), script, 1, sequences_max=1), resident, True)


def test_a_table_that_is_too_small_gives_way_to_the_running_form() -> None:
    resident = on_fake(SMALL, None, ONE, sequences_max=1)
    for cells in (None, fewest(SMALL, 1)):
        same(SMALL, on_fake(SMALL, cells, ONE, 2, sequences_max=1, table_slots=1), resident, cells is not None)
