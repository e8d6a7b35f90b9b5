"""Tables and reference counts of host pages, beside a model that keeps every token of every sequence."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstream.cuda.sequences import Change, PageCopy, Sequences
from kvstream.errors import DeviceMemoryError, StepError

PAGE = 4


def test_a_step_takes_pages_for_all_or_for_none() -> None:
    sequences = Sequences(3, PAGE)
    one, other = sequences.create(), sequences.create()
    with pytest.raises(DeviceMemoryError, match=r"4 more host pages of 4 tokens are needed, 3 of 3"):
        sequences.extend([(one, 5), (other, 5)])
    assert sequences.free == 3 and not sequences[one].pages
    sequences.extend([(one, 5), (other, 4)])
    assert sequences.free == 0 and (len(sequences[one].pages), len(sequences[other].pages)) == (2, 1)
    assert sequences[one].tokens == 0
    assert set(sequences.shrink([one, other])) == {0, 1, 2} and sequences.free == 3


def test_a_fork_shares_full_pages_and_copies_the_rest() -> None:
    sequences = Sequences(8, PAGE)
    one = sequences.create(9)
    other, change = sequences.fork(one)
    assert sequences[other].pages[:2] == sequences[one].pages[:2]
    assert change == Change((PageCopy(sequences[one].pages[2], sequences[other].pages[2], 1),))
    assert sequences.fork(sequences.create(8))[1] == Change()


def test_truncation_into_a_shared_page_copies_it() -> None:
    sequences = Sequences(4, PAGE)
    one = sequences.create(12)
    other, _ = sequences.fork(one)
    assert sequences.truncate(one, 12) == Change()
    change = sequences.truncate(one, 6)
    assert change == Change((PageCopy(sequences[other].pages[1], sequences[one].pages[1], 2),))
    assert sequences[one].pages[0] == sequences[other].pages[0] and sequences[one].pages[1] != sequences[other].pages[1]
    assert sequences.truncate(one, 5) == Change()  # it is its own by now
    with pytest.raises(StepError, match="cannot be cut to 6"):
        sequences.truncate(one, 6)


def test_truncation_may_use_the_page_that_it_frees() -> None:
    sequences = Sequences(4, PAGE)
    one = sequences.create(8)
    other, _ = sequences.fork(one)
    sequences.extend([(one, 8)])
    sequences.commit([(one, 8)])
    assert sequences.free == 0
    change = sequences.truncate(one, 6)
    assert change.copies[0].target in change.freed  # what was known of it must be forgotten all the same
    assert sequences.free == 1 and sequences[other].tokens == 8


def test_truncation_without_a_page_for_the_copy_changes_nothing() -> None:
    sequences = Sequences(2, PAGE)
    one = sequences.create(8)
    other, _ = sequences.fork(one)
    with pytest.raises(DeviceMemoryError, match="1 more host pages"):
        sequences.truncate(other, 2)
    assert sequences[other] == sequences[one] and sequences.count(0) == sequences.count(1) == 2


def test_tables_are_runs() -> None:
    sequences = Sequences(64, PAGE)
    ids = [sequences.create() for _ in range(4)]
    for _ in range(8):
        for sequence in ids:
            sequences.extend([(sequence, PAGE)])
            sequences.commit([(sequence, PAGE)])
    breaks = [b - a for sequence in ids for a, b in pairwise(sequences[sequence].pages) if b - a != 1]
    assert not breaks


class Machine(RuleBasedStateMachine):
    """``contents``[page]: what each row of a page holds, as a token with a history; pages nobody holds have none."""

    @initialize(pages=st.integers(1, 12))
    def start(self, pages: int) -> None:
        self.sequences = Sequences(pages, PAGE)
        self.tokens: dict[int, list[Any]] = {}
        self.contents: dict[int, list[Any]] = {}
        self.serial = 0

    def write(self, sequence: int, start: int) -> None:
        found = self.sequences[sequence]
        for position in range(start, len(self.tokens[sequence])):
            page = found.pages[position // PAGE]
            assert self.sequences.count(page) == 1, "a page that others read is written"
            self.contents.setdefault(page, [None] * PAGE)[position % PAGE] = self.tokens[sequence][position]

    def carry_out(self, change: Change) -> None:
        for page in change.freed:
            self.contents.pop(page, None)
        for copy in change.copies:
            self.contents[copy.target] = self.contents[copy.source][: copy.tokens] + [None] * (PAGE - copy.tokens)

    def pick(self, data: Any) -> int:
        return data.draw(st.sampled_from(sorted(self.tokens)))

    @rule()
    def create(self) -> None:
        self.tokens[self.sequences.create()] = []

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), give_up=st.booleans())
    def step(self, data: Any, give_up: bool) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), min_size=1, max_size=3, unique=True))
        batch = [(sequence, data.draw(st.integers(1, 2 * PAGE + 1))) for sequence in chosen]
        before = (self.sequences.free, [self.sequences[sequence] for sequence in chosen])
        try:
            self.sequences.extend(batch)
        except DeviceMemoryError:
            assert (self.sequences.free, [self.sequences[sequence] for sequence in chosen]) == before
            return
        if give_up:
            self.carry_out(Change(freed=self.sequences.shrink(chosen)))
            return
        for sequence, new in batch:
            start = len(self.tokens[sequence])
            for _ in range(new):
                self.serial += 1
                self.tokens[sequence].append(self.serial)
            self.write(sequence, start)
        self.sequences.commit(batch)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        sequence = self.pick(data)
        try:
            other, change = self.sequences.fork(sequence)
        except DeviceMemoryError:
            assert self.sequences.free == 0
            return
        self.tokens[other] = list(self.tokens[sequence])
        self.carry_out(change)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data: Any) -> None:
        sequence = self.pick(data)
        tokens = data.draw(st.integers(0, len(self.tokens[sequence])))
        try:
            change = self.sequences.truncate(sequence, tokens)
        except DeviceMemoryError:
            assert self.sequences.free == 0
            return
        del self.tokens[sequence][tokens:]
        self.carry_out(change)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def drop(self, data: Any) -> None:
        sequence = self.pick(data)
        del self.tokens[sequence]
        self.carry_out(self.sequences.drop(sequence))

    @invariant()
    def every_token_is_where_the_table_says(self) -> None:
        if not hasattr(self, "tokens"):
            return
        for sequence, tokens in self.tokens.items():
            found = self.sequences[sequence]
            assert found.tokens == len(tokens) and len(found.pages) == -(-len(tokens) // PAGE)
            assert [self.contents[found.pages[at // PAGE]][at % PAGE] for at in range(len(tokens))] == tokens
        held = [page for sequence in self.tokens for page in self.sequences[sequence].pages]
        assert self.sequences.free == self.sequences.host_pages - len(set(held))
        assert all(self.sequences.count(page) == held.count(page) for page in range(self.sequences.host_pages))


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase
