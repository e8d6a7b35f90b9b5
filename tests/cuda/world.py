"""A host for plans in tests: sequences over pages, steps in any order, and the checker watching.

It stands for the streamer, in the simplest way that is right: pages are taken lowest first, and before the host writes
into pages it waits for all streams. ``history`` has what happened, so that it can be replayed with a plan that was
tampered with.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from attrs import define, evolve, field, frozen

from kvstream.cuda.ops import AwaitSaved, Op, Saved
from kvstream.cuda.plan import plan_step
from kvstream.cuda.ring import Residency
from kvstream.cuda.steady import Plan
from tests.cuda.checker import Checker


@frozen
class Shape:
    layers: int
    page_tokens: int


@frozen
class Split:
    """As of a policy."""

    ring: int
    layer_pages: tuple[int, ...]


def cells_min(layers: int, page_tokens: int, rows: int, sequences: int) -> int:
    """The fewest cells: a tail for each, what new rows can fill in one layer, and one to pass through."""
    several = min(sequences, rows // 2)
    return layers * sequences + several + max(0, rows - 2 * several) // page_tokens + 1


def without_settling(plan: Plan) -> tuple[Op, ...]:
    """Without the wait for rows that are written again, which depends on the rows alone."""
    append = tuple(tuple(op for op in ops if not isinstance(op, Saved | AwaitSaved)) for ops in plan.append)
    return evolve(plan, append=append).ops()


def evenly(layers: int, pages: int, ring: int = 1) -> Split:
    return Split(ring, (pages,) * layers)


@define
class World:
    layers: int = 3
    page_tokens: int = 4
    host_pages: int = 64
    cells: int = 24
    tables: dict[int, tuple[int, ...]] = field(factory=dict)
    tokens: dict[int, int] = field(factory=dict)
    owners: dict[int, int] = field(factory=dict)
    history: list[tuple[Any, ...]] = field(factory=list)
    ids: int = 0
    residency: Residency = field(init=False)
    checker: Checker = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.residency = Residency.empty(self.layers, self.host_pages, self.cells)
        self.checker = self.new_checker()

    def new_checker(self) -> Checker:
        return Checker(self.layers, self.host_pages, self.cells, self.page_tokens)

    def create(self, tokens: int = 0) -> int:
        """A sequence, with tokens that come from elsewhere."""
        self.ids += 1
        self.tables[self.ids], self.tokens[self.ids] = (), tokens
        if tokens:
            self._synchronize()
            self.tables[self.ids] = self._take(-(-tokens // self.page_tokens))
            for index, page in enumerate(self.tables[self.ids]):
                self._did("host_writes", page, min(self.page_tokens, tokens - index * self.page_tokens))
        return self.ids

    def fork(self, sequence: int) -> int:
        table, tokens = self.tables[sequence], self.tokens[sequence]
        self.ids += 1
        self.tokens[self.ids] = tokens
        full = table[: tokens // self.page_tokens]
        for page in full:
            self.owners[page] += 1
        self.tables[self.ids] = full + self._copy_of(table[len(full) :], tokens % self.page_tokens)
        return self.ids

    def truncate(self, sequence: int, tokens: int) -> None:
        table, rest = self.tables[sequence], tokens % self.page_tokens
        keep = table[: -(-tokens // self.page_tokens)]
        self.tokens[sequence] = tokens
        if rest and self.owners[keep[-1]] > 1:
            copy = self._copy_of(keep[-1:], rest)
            self._drop(table[len(keep) - 1 :])
            self.tables[sequence] = keep[:-1] + copy
            return
        self.tables[sequence] = keep
        self._drop(table[len(keep) :])
        if rest:
            self._did("truncated", keep[-1], rest)

    def drop(self, sequence: int) -> None:
        del self.tokens[sequence]
        self._drop(self.tables.pop(sequence))

    def room(self, widths: Iterable[tuple[int, int]]) -> bool:
        """Whether there are host pages for so many new tokens of these sequences."""
        return sum(-(-(self.tokens[sequence] + new) // self.page_tokens) - len(self.tables[sequence])
                   for sequence, new in widths) <= self.host_pages - len(self.owners)

    def step(self, widths: Sequence[tuple[int, int]], split: Split, ahead: bool = True,
             table_slots: int | None = None) -> Plan:
        """New tokens, (sequence, how many)."""
        for sequence, new in widths:
            more = -(-(self.tokens[sequence] + new) // self.page_tokens) - len(self.tables[sequence])
            self.tables[sequence] += self._take(more)
        batch = tuple((sequence, self.tokens[sequence], new) for sequence, new in widths)
        tables = {sequence: self.tables[sequence] for sequence, _ in widths}
        shape = Shape(self.layers, self.page_tokens)
        plan = plan_step(self.residency, split, batch, tables, shape, ahead=ahead, table_slots=table_slots)
        if plan.reused:
            anew = plan_step(evolve(self.residency, memos=()), split, batch, tables, shape, ahead=ahead,
                             table_slots=table_slots)
            assert without_settling(plan) == without_settling(anew), "a plan made of another one is not the same"
            assert plan.residency.held.same(anew.residency.held)
            assert plan.residency.unsettled == anew.residency.unsettled
        self._did("step", plan, batch, tables)
        self.residency = plan.residency
        for sequence, new in widths:
            self.tokens[sequence] += new
        return plan

    def replayed(self, at: int, plan: Plan) -> list[str]:
        """What the checker says when the plan of the step at this place of the history was another one."""
        checker = self.new_checker()
        for index, (name, *args) in enumerate(self.history):
            getattr(checker, name)(*([plan, *args[1:]] if index == at else args))
            if index >= at and checker.faults:
                break
        return checker.faults

    def _did(self, name: str, *args: Any) -> None:
        self.history.append((name, *args))
        getattr(self.checker, name)(*args)

    def _synchronize(self) -> None:
        self._did("synchronize")
        self.residency = self.residency.synchronized()

    def _take(self, number: int) -> tuple[int, ...]:
        free = [page for page in range(self.host_pages) if page not in self.owners]
        assert len(free) >= number, "the test asks for more pages than the host has"
        for page in free[:number]:
            self.owners[page] = 1
        return tuple(free[:number])

    def _copy_of(self, pages: tuple[int, ...], rows: int) -> tuple[int, ...]:
        if not rows:
            return ()
        self._synchronize()
        (copy,) = self._take(1)
        self._did("host_writes", copy, rows, pages[0])
        return (copy,)

    def _drop(self, pages: Iterable[int]) -> None:
        gone = []
        for page in pages:
            self.owners[page] -= 1
            if not self.owners[page]:
                del self.owners[page]
                gone.append(page)
                self._did("truncated", page, 0)
        self.residency = self.residency.without(gone)


def wander(world: World, dice: random.Random, steps: int, sequences: int, rows: int) -> None:
    """Random things, one after the other."""
    split = evenly(world.layers, 2)
    for _ in range(steps):
        ids = list(world.tables)
        what = dice.random()
        if len(ids) < sequences and (what < 0.15 or not ids):
            if world.host_pages - len(world.owners) >= 4:
                world.create(dice.choice((0, 0, 1, world.page_tokens, 2 * world.page_tokens + 1)))
        elif what < 0.2 and len(ids) < sequences and world.host_pages > len(world.owners):
            world.fork(dice.choice(ids))
        elif what < 0.3 and world.host_pages > len(world.owners):
            chosen = dice.choice(ids)
            world.truncate(chosen, max(0, world.tokens[chosen] - dice.choice((1, 2, 3, world.page_tokens, 99))))
        elif what < 0.33:
            world.drop(dice.choice(ids))
        else:
            if dice.random() < 0.2:
                split = Split(dice.randint(0, 6), tuple(dice.randint(0, 8) for _ in range(world.layers)))
            chosen_ids = ids if dice.random() < 0.7 else dice.sample(ids, dice.randint(1, len(ids)))
            wide = dice.choice((1, 1, 1, 2, 3, rows))
            widths = [(sequence, max(1, min(wide, rows // len(chosen_ids)))) for sequence in chosen_ids]
            if world.room(widths):
                world.step(widths, split, dice.random() < 0.8, dice.choice((None, 4)))


def revise(dice: random.Random) -> World:
    """A world in which rows are written again and again, as when drafts are rejected."""
    layers, page_tokens, sequences = dice.choice((2, 3)), dice.choice((4, 8)), dice.choice((1, 2))
    rows = dice.choice((2, 5, 9))
    world = World(layers, page_tokens, 24,
                  cells_min(layers, page_tokens, rows, sequences) + dice.choice((0, 1, 2, 4, 12)))
    for _ in range(sequences):
        world.create(dice.randint(0, 2 * page_tokens))
    splits = [Split(dice.randint(0, 4), tuple(dice.randint(0, 3) for _ in range(layers))) for _ in range(2)]
    split = splits[0]
    for _ in range(25):
        if dice.random() < 0.15:
            split = dice.choice(splits)
        ids = list(world.tables)
        if dice.random() < 0.6:
            sequence = dice.choice(ids)
            world.truncate(sequence, max(0, world.tokens[sequence] - dice.choice((1, 1, 1, 2, 4))))
        chosen = ids if dice.random() < 0.7 else [dice.choice(ids)]
        widths = [(sequence, dice.choice((1, 1, 1, max(1, rows // len(chosen))))) for sequence in chosen]
        if world.room(widths):
            world.step(widths, split, dice.random() < 0.5)
    return world
