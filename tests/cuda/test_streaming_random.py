"""Conversations that nobody thought of: sequences that are fed, forked, cut, dropped, saved, loaded and given up at
random, in random geometries and pools, under splits that wander and schedules of all kinds, equal to all-resident.

``just fuzz-cuda`` plays many times as many. The number in a failure replays it: ``conversation(number)``.
"""

from __future__ import annotations

import os
import random
from itertools import count
from typing import Any

import pytest
from attrs import frozen

from kvstream.cuda.device import Device, PyCudaDevice
from kvstream.cuda.fake_device import FakeDevice
from kvstream.cuda.fake_kernels import KERNELS
from kvstream.cuda.policy import Split
from kvstream.cuda.types import KVType
from tests.cuda.driver.pool import Simulated
from tests.cuda.streaming import Digest, Line, Script, Shape, opening_of, play, same
from tests.cuda.test_streaming import fewest

TOKENS_MAX = 200
FUZZ = int(os.environ.get("CUDA_FUZZ") or 1)


@frozen
class Conversation:
    shape: Shape
    script: Script
    rows_max: int
    sequences: int
    more: int  # cells beyond the fewest
    table_slots: int
    splits: int  # 0: the policy's; otherwise the seed of those that wander
    lazily: bool
    wide: str


def conversation(seed: int) -> Conversation:
    dice = random.Random(seed)
    kv_heads, head_size = dice.choice((1, 1, 2)), dice.choice((64, 64, 80, 96))
    kinds = [kind for kind in KVType if kv_heads * head_size % kind.block_values == 0]
    shape = Shape(dice.choice((1, 2, 2, 3)), kv_heads, kv_heads * dice.choice((1, 2, 3)), head_size,
                  str(dice.choice(kinds)), str(dice.choice(kinds)), 32)
    rows_max, sequences = dice.choice((8, 40, 64)), dice.choice((1, 2, 4))
    return Conversation(shape, lines(dice, dice.randint(6, 16), rows_max, sequences), rows_max, sequences,
                        dice.choice((0, 0, 1, 2, 3, 5, 8)), dice.choice((1, 16, 256)),
                        dice.choice((0, dice.randrange(1, 1000))), dice.random() < 0.7,
                        dice.choice(("exact", "exact", "tensor")))


def lines(dice: random.Random, number: int, rows_max: int, sequences_max: int) -> Script:
    made: list[Line] = []
    tokens: dict[str, int] = {}
    names = (f"s{n}" for n in count())
    while len(made) < number:
        what, live = dice.random(), list(tokens)
        if not live or what < 0.6:
            batch = widths(dice, tokens, rows_max, sequences_max, next(names) if len(live) < 5 else "")
            if batch:
                made.append(("feed", batch))
                for name, new in batch:
                    tokens[name] = tokens.get(name, 0) + new
        elif what < 0.68 and len(live) < 5:
            fork = next(names)
            made.append(("fork", one := dice.choice(live), fork))
            tokens[fork] = tokens[one]
        elif what < 0.82:
            one = dice.choice(live)
            tokens[one] = max(0, tokens[one] - dice.choice((0, 1, 1, 2, 3, 6, 33, 200)))
            made.append(("cut", one, tokens[one]))
        elif what < 0.88:
            made.append(("swap", dice.choice(live)))
        elif what < 0.92:
            one = dice.choice(live)
            made.append(("drop", one))
            del tokens[one]
        elif batch := widths(dice, tokens, rows_max, sequences_max):
            made.append(("abandon", batch))
    return tuple(made)


def widths(dice: random.Random, tokens: dict[str, int], rows_max: int, sequences_max: int,
           new_name: str = "") -> tuple[tuple[str, int], ...]:
    """New tokens for some of the sequences, perhaps for a new one too."""
    names = dice.sample(list(tokens), dice.randint(0, min(len(tokens), sequences_max)))
    if new_name and len(names) < sequences_max and dice.random() < 0.4:
        names.append(new_name)
    batch, room = [], rows_max
    for at, name in enumerate(names):
        most = min(room - (len(names) - 1 - at), TOKENS_MAX - tokens.get(name, 0))
        new = min(most, dice.choice((1, 1, 1, 2, 3, 7, 33, 64)))
        if new > 0:
            batch.append((name, new))
            room -= new
    return tuple(batch)


def wandering(seed: int, layers: int) -> Any:
    dice = random.Random(seed)
    return lambda active: Split(0, dice.randint(0, 4), tuple(dice.randint(0, 5) for _ in range(layers)))


def played(device: Device, talk: Conversation, streamed: bool) -> Digest:
    geometry = talk.shape.geometry()
    cells = fewest(talk.shape, talk.sequences, talk.rows_max) + talk.more if streamed else None
    split = wandering(talk.splits, geometry.layers) if streamed and talk.splits else None
    return play(device, geometry, opening_of(geometry, cells, rows_max=talk.rows_max, sequences_max=talk.sequences,
                                             context_max=256, table_slots=talk.table_slots, split=split,
                                             wide=talk.wide),
                talk.script, lazily=talk.lazily).digest()


def compared(seed: int, found: Digest, resident: Digest) -> bool:
    """Returns whether anything was streamed; in the largest pools of the shortest conversations nothing is."""
    streamed = found.stats.counters["in_pages"] > 0
    same(conversation(seed).shape, found, resident, streamed)
    return streamed


def test_random_conversations() -> None:
    streamed = [compared(seed, played(FakeDevice(KERNELS, seed=seed), conversation(seed), True),
                         played(FakeDevice(KERNELS), conversation(seed), False)) for seed in range(24 * FUZZ)]
    assert sum(streamed) > len(streamed) / 2


def both(sim: Any, first: int = 0) -> tuple[int, Digest, Digest]:
    """A scene: (which conversation, streamed under the schedule at hand, resident). The conversation's number is the
    schedule's seed and ``first``."""
    number = first + sim.seed
    found = played(PyCudaDevice(sim.kernels), conversation(number), True)
    sim.schedule(sim.seed, "oldest")
    resident = played(PyCudaDevice(sim.kernels), conversation(number), False)
    return number, found, resident


@pytest.mark.parametrize(("checked", "number", "first"), [(False, 24, 1_000_000), (True, 12, 2_000_000)],
                         ids=["fast", "checked"])
def test_random_conversations_with_pycuda(simulated: Simulated, checked: bool, number: int, first: int) -> None:
    found = simulated.seeds(both, number, first=first, kernels="kv", checked=checked)
    streamed = [compared(*one) for one in found]
    assert sum(streamed) > len(streamed) / 2
