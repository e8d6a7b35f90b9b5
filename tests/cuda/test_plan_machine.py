"""Any history of sequences and steps: the checker finds nothing, and repeated plans equal those that are built anew."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstream.cuda import placing
from tests.cuda.world import Split, World, cells_min, revise, wander


class Sequences(RuleBasedStateMachine):
    """Up to three sequences in a pool between the smallest that works and one that holds everything."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.split = Split(1, (0,) * self.world.layers)

    @initialize(layers=st.integers(1, 3), page_tokens=st.sampled_from((1, 2, 4)), sequences=st.integers(1, 3),
                rows=st.integers(3, 10), spare=st.sampled_from((0, 0, 1, 2, 3, 7, 30)))
    def open(self, layers: int, page_tokens: int, sequences: int, rows: int, spare: int) -> None:
        self.sequences, self.rows = sequences, rows
        self.world = World(layers, page_tokens, 24, cells_min(layers, page_tokens, rows, sequences) + spare)
        self.split = Split(1, (0,) * layers)

    def one(self, data: Any) -> int:
        return int(data.draw(st.sampled_from(sorted(self.world.tables))))

    def room(self) -> int:
        return self.world.host_pages - len(self.world.owners)

    @precondition(lambda self: len(self.world.tables) < self.sequences)
    @rule(tokens=st.integers(0, 12))
    def create(self, tokens: int) -> None:
        if -(-tokens // self.world.page_tokens) <= self.room():
            self.world.create(tokens)

    @precondition(lambda self: self.world.tables and len(self.world.tables) < self.sequences)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        if self.room():
            self.world.fork(self.one(data))

    @precondition(lambda self: self.world.tables)
    @rule(data=st.data(), gone=st.integers(1, 20))
    def truncate(self, data: Any, gone: int) -> None:
        sequence = self.one(data)
        if self.room():
            self.world.truncate(sequence, max(0, self.world.tokens[sequence] - gone))

    @precondition(lambda self: self.world.tables)
    @rule(data=st.data())
    def drop(self, data: Any) -> None:
        self.world.drop(self.one(data))

    @rule(ring=st.integers(0, 8), data=st.data())
    def repartition(self, ring: int, data: Any) -> None:
        self.split = Split(ring, tuple(data.draw(st.lists(
            st.integers(0, 12), min_size=self.world.layers, max_size=self.world.layers))))

    @precondition(lambda self: self.world.tables)
    @rule(data=st.data(), ahead=st.booleans(), table_slots=st.sampled_from((None, 0, 5)))
    def step(self, data: Any, ahead: bool, table_slots: int | None) -> None:
        ids = data.draw(st.permutations(sorted(self.world.tables)))[: data.draw(st.integers(1, self.sequences))]
        most = self.rows // len(ids)
        widths = [(sequence, data.draw(st.integers(1, most))) for sequence in ids]
        if self.world.room(widths):
            self.world.step(widths, self.split, ahead, table_slots)

    @precondition(lambda self: self.world.tables)
    @rule(times=st.integers(3, 8))
    def decode(self, times: int) -> None:
        for _ in range(times):
            widths = [(sequence, 1) for sequence in self.world.tables]
            if self.world.room(widths):
                self.world.step(widths, self.split)

    @invariant()
    def nothing_is_wrong(self) -> None:
        assert self.world.checker.faults == []


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=60, stateful_step_count=25, deadline=None,
                                  suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("seed", range(60))
def test_wandering(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer histories than Hypothesis makes, of more shapes; in every second one, small rings are put together too."""
    if seed % 2:
        monkeypatch.setattr(placing, "RING_CELLS_MIN", 2)
        monkeypatch.setattr(placing, "PIECES_MAX", 1)
    dice = random.Random(seed)
    layers, page_tokens, sequences = dice.choice((1, 2, 3, 5)), dice.choice((2, 4)), dice.choice((1, 2, 3))
    rows = max(sequences, dice.choice((1, 3, 7, 9)))
    least = cells_min(layers, page_tokens, rows, sequences)
    world = World(layers, page_tokens, 24, least + dice.choice((0, 0, 1, 2, 5, 20)))
    wander(world, dice, 40, sequences, rows)
    assert world.checker.faults == []


@pytest.mark.parametrize("seed", [*range(30), 318, 441, 641])
def test_rows_written_again_and_again(seed: int) -> None:
    """The last three found a plan that was repeated although what it waited for was elsewhere."""
    assert revise(random.Random(seed)).checker.faults == []
