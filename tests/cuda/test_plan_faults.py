"""The checker is believed because it finds what is wrong: every event taken out of every plan, and planted mistakes.

A record that nobody ever waits for may be missing without harm. The only such records are ``Ready`` of pages copied
ahead for a step that never came.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from attrs import evolve

from kvstream.cuda import ops
from kvstream.cuda.steady import Plan
from tests.cuda.checker import RECORDS, WAITS, is_event
from tests.cuda.ledger import fault
from tests.cuda.world import Split, World, cells_min, evenly, wander

Place = tuple[str, int | None, int]
"""(section, layer, place in it)"""


def places(plan: Plan) -> Iterator[tuple[Place, ops.Op]]:
    """In the order of enqueueing."""
    for at, op in enumerate(plan.begin):
        yield ("begin", None, at), op
    for layer, (append, attend) in enumerate(zip(plan.append, plan.attend, strict=True)):
        for at, op in enumerate(append):
            yield ("append", layer, at), op
        for at, op in enumerate(attend):
            yield ("attend", layer, at), op


def replaced(plan: Plan, place: Place, *instead: ops.Op) -> Plan:
    name, layer, at = place
    sections = getattr(plan, name)
    section = sections if layer is None else sections[layer]
    section = (*section[:at], *instead, *section[at + 1 :])
    if layer is not None:
        section = (*sections[:layer], section, *sections[layer + 1 :])
    return evolve(plan, **{name: section})


def steps(world: World) -> list[tuple[int, Plan]]:
    return [(at, args[0]) for at, (name, *args) in enumerate(world.history) if name == "step"]


def records_awaited(world: World) -> set[tuple[int, Place]]:
    latest: dict[tuple[type, int], tuple[int, Place]] = {}
    found = set()
    for at, plan in steps(world):
        for place, op in places(plan):
            if type(op) in RECORDS:
                latest[type(op), getattr(op, RECORDS[type(op)])] = at, place
            elif type(op) in WAITS:
                field, record = WAITS[type(op)]
                found.add(latest[record, getattr(op, field)])
    return found


def missed(world: World) -> tuple[Counter[str], list[str]]:
    """Take out each event: how many of each kind were reported, and those that were not."""
    awaited, reported, unseen = records_awaited(world), Counter[str](), []
    for at, plan in steps(world):
        for place, op in places(plan):
            if not is_event(op):
                continue
            if type(op) in RECORDS and (at, place) not in awaited:
                assert isinstance(op, ops.Ready), f"a superfluous record: {op}"
            elif world.replayed(at, replaced(plan, place)):
                reported[type(op).__name__] += 1
            else:
                unseen.append(f"step {at} {place} {op}")
    return reported, unseen


EVENTS = {
    "Ready": "uploads are not recorded", "Await": "a kernel does not wait for its pages",
    "Used": "the last use of a cell is not recorded", "AfterUse": "a cell is filled while it is read",
    "Written": "new rows are not recorded", "AfterWritten": "rows are saved before they are written",
    "Saved": "saves are not recorded", "AfterSaved": "a tail is uploaded before its producer",
    "AwaitSaved": "rows are written while they are being saved",
}
"""What each event of a plan is there against."""


# --- a history of each kind -------------------------------------------------------------------------------------------


def decode(cells: int, split: Split, ahead: bool = True) -> World:
    world = World(layers=2, page_tokens=4, cells=cells)
    sequence = world.create(18)
    for _ in range(5):
        world.step([(sequence, 1)], split, ahead)
    return world


def verify() -> World:
    world = World(layers=2, page_tokens=8, cells=7)
    sequence = world.create(20)
    for keep in (1, 4, 2, 4, 1):
        world.step([(sequence, 4)], evenly(2, 1))
        world.truncate(sequence, world.tokens[sequence] - 4 + keep)
    return world


def prefill(cells: int, table_slots: int | None) -> World:
    world = World(layers=3, page_tokens=4, cells=cells)
    sequence = world.create()
    for _ in range(4):
        world.step([(sequence, 11)], evenly(3, 1), table_slots=table_slots)
    return world


def several() -> World:
    world = World(layers=2, page_tokens=4, cells=14)
    one = world.create(13)
    two = world.fork(one)
    three = world.create()
    world.step([(one, 1), (two, 1), (three, 6)], evenly(2, 2))
    world.step([(three, 1), (one, 5)], Split(3, (4, 0)))
    world.truncate(one, 9)
    world.step([(one, 1), (two, 1), (three, 1)], Split(3, (0, 3)))
    world.drop(two)
    world.step([(three, 2), (one, 1)], evenly(2, 1))
    return world


def wandering(seed: int) -> World:
    dice = random.Random(seed)
    layers, sequences = dice.choice((1, 2)), dice.choice((1, 2))
    rows = max(sequences, dice.choice((1, 3, 7)))
    world = World(layers, dice.choice((2, 4)), 24, 0)
    world = World(layers, world.page_tokens, 24, cells_min(layers, world.page_tokens, rows, sequences)
                  + dice.choice((0, 1, 4)))
    wander(world, dice, 10, sequences, rows)
    return world


HISTORIES: dict[str, Callable[[], World]] = {
    "decode through one cell": lambda: decode(3, evenly(2, 0)),
    "decode through a ring": lambda: decode(7, Split(5, (0, 1))),
    "decode without copying ahead": lambda: decode(7, Split(5, (0, 1)), ahead=False),
    "verify": verify,
    "prefill in the smallest pool": lambda: prefill(cells_min(3, 4, 11, 1), 0),
    "prefill in a small pool": lambda: prefill(cells_min(3, 4, 11, 1) + 4, 0),
    "prefill by the table": lambda: prefill(cells_min(3, 4, 11, 1) + 2, None),
    "several sequences": several,
    **{f"wandering {seed}": (lambda seed=seed: wandering(seed)) for seed in range(8)},  # type: ignore[misc]
}


@pytest.mark.parametrize("name", HISTORIES)
def test_a_plan_without_one_of_its_events_is_reported(name: str) -> None:
    world = HISTORIES[name]()
    assert world.checker.faults == []
    reported, unseen = missed(world)
    assert unseen == []
    assert reported["Written"] and reported["AfterWritten"]
    for kind, number in reported.items():
        with fault(f"plans: {kind} left out", EVENTS[kind]) as planted:
            planted.caught_by("plan checker", "plans on paper", number, number)


def test_each_kind_of_event_was_among_them() -> None:
    kinds = Counter(type(op).__name__ for name in ("decode through a ring", "verify", "prefill in the smallest pool")
                    for _, plan in steps(HISTORIES[name]()) for _, op in places(plan) if is_event(op))
    assert set(kinds) == {kind.__name__ for kind in (*RECORDS, *WAITS)}


# --- planted mistakes -------------------------------------------------------------------------------------------------


def first(world: World, kind: type[ops.Op], skip: int = 0) -> tuple[int, Plan, Place, ops.Op]:
    """The first operation of a kind in the last step but one."""
    at, plan = steps(world)[-2]
    place, op = [(place, op) for place, op in places(plan) if isinstance(op, kind)][skip]
    return at, plan, place, op


def ring() -> World:
    return HISTORIES["decode through a ring"]()


def changed(kind: type[ops.Op], change: Callable[[object], object], skip: int = 0,
            make: Callable[[], World] = ring) -> list[str]:
    """What the checker says when one operation is another one (or several, or none)."""
    world = make()
    at, plan, place, op = first(world, kind, skip)
    instead = change(op)
    listed = instead if isinstance(instead, tuple) else (instead,)
    return world.replayed(at, replaced(plan, place, *listed))


def an_upload_too_early() -> list[str]:
    """A cell is reused one step early: its upload goes before the wait."""
    world = ring()
    at, plan, (name, layer, place), wait = first(world, ops.AfterUse)
    section = getattr(plan, name) if layer is None else getattr(plan, name)[layer]
    upload = section[place + 1]
    assert isinstance(upload, ops.Upload)
    swapped = replaced(replaced(plan, (name, layer, place), upload), (name, layer, place + 1), wait)
    return world.replayed(at, swapped)


def a_tail_uploaded_before_it_is_saved() -> list[str]:
    world = ring()
    at, plan, place, save = first(world, ops.Save)
    assert isinstance(save, ops.Save)
    name, layer, _ = place
    free = next(cell for cell in range(world.cells) if all(
        not (isinstance(op, ops.Upload) and op.cell <= cell < op.cell + op.count) for _, op in places(plan)
    ) and cell not in [entry[2] for _, op in places(plan) if isinstance(op, ops.Attend) for entry in op.entries])
    early = ops.Upload(save.layer, save.page, free, 1, 99)
    return world.replayed(at, replaced(plan, (name, layer, 0), early, plan.append[layer or 0][0]))


def two_layers_swapped() -> list[str]:
    world = ring()
    at, plan, _, _ = first(world, ops.Attend)
    return world.replayed(at, evolve(plan, attend=(plan.attend[1], plan.attend[0])))


MISTAKES: dict[str, tuple[Callable[[], list[str]], str]] = {
    "a cell reused one step early": (an_upload_too_early, "may still be reading"),
    "a tail uploaded before its rows are saved": (a_tail_uploaded_before_it_is_saved, "may still be"),
    "two layers swapped": (two_layers_swapped, "is of another layer"),
    "another cell attended": (
        lambda: changed(ops.Attend, lambda op: evolve(op, entries=tuple(
            (sequence, index, (cell + 1) % 7) for sequence, index, cell in op.entries))), "does not hold page"),
    "a page left out": (lambda: changed(ops.Attend, lambda op: evolve(op, entries=op.entries[1:])), "not once"),
    "a page twice": (
        lambda: changed(ops.Attend, lambda op: evolve(op, entries=(*op.entries, op.entries[0]))), "not once"),
    "a wave twice": (lambda: changed(ops.Attend, lambda op: (op, op)), "not once"),
    "a page of the future": (
        lambda: changed(ops.Attend, lambda op: evolve(op, entries=(*op.entries, (1, 9, 0)))), "not in this step"),
    "the last wave not marked": (
        lambda: changed(ops.Attend, lambda op: evolve(op, last=not op.last)), "the waves are not in order"),
    "no fold": (lambda: changed(ops.Fold, lambda op: ()), "0 folds"),
    "another page uploaded": (lambda: changed(ops.Upload, lambda op: evolve(op, page=op.page + 1)), "does not hold"),
    "another layer uploaded": (lambda: changed(ops.Upload, lambda op: evolve(op, layer=1 - op.layer)), "does not hold"),
    "another cell uploaded to": (lambda: changed(ops.Upload, lambda op: evolve(op, cell=op.cell + 1)), ""),
    "an upload left out": (lambda: changed(ops.Upload, lambda op: ()), "does not hold"),
    "an upload past the pool": (lambda: changed(ops.Upload, lambda op: evolve(op, cell=7)), "out of bounds"),
    "too many pages in one copy": (lambda: changed(ops.Upload, lambda op: evolve(op, count=33)), "out of bounds"),
    "rows not saved": (lambda: changed(ops.Save, lambda op: ()), "saved [0] times"),
    "rows saved to another page": (lambda: changed(ops.Save, lambda op: evolve(op, page=op.page + 1)), "saves what is"),
    "rows saved from another cell": (
        lambda: changed(ops.Save, lambda op: evolve(op, cell=(op.cell + 1) % 7)), "saves what is"),
    "rows not written": (lambda: changed(ops.Write, lambda op: evolve(op, rows=())), "written [0]"),
    "rows written to another place": (
        lambda: changed(ops.Write, lambda op: evolve(op, rows=tuple(
            (row, count, cell, first_row + 1) for row, count, cell, first_row in op.rows))), "do not belong there"),
    "rows written to another cell": (
        lambda: changed(ops.Write, lambda op: evolve(op, rows=tuple(
            (row, count, (cell + 1) % 7, first_row) for row, count, cell, first_row in op.rows))), ""),
    "pages out of order": (
        lambda: changed(ops.Attend, lambda op: evolve(op, entries=op.entries[::-1]), 1,
                        lambda: prefill(40, 0)), "not attended in page order"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_reported(name: str) -> None:
    make, expected = MISTAKES[name]
    with fault(f"plans: {name}", "a mistake of the planner") as planted:
        faults = make()
        assert faults and any(expected in text for text in faults), faults
        planted.caught_by("plan checker", "plans on paper")


def test_a_residency_that_is_not_so_is_reported() -> None:
    world = ring()
    at, plan = steps(world)[-1]
    held = plan.residency.held
    cell_of = held.cell_of.copy()
    tail = world.tables[1][-1]
    cell_of[:, tail] = cell_of[::-1, tail]
    wrong = evolve(plan, residency=evolve(plan.residency, held=evolve(held, cell_of=cell_of)))
    with fault("plans: a residency that is not so", "what is resident is noted wrongly") as planted:
        assert any("does not hold page" in text for text in world.replayed(at, wrong))
        planted.caught_by("plan checker", "plans on paper")


def test_a_host_that_does_not_wait_is_reported() -> None:
    world = ring()
    with fault("plans: the host writes a page without waiting", "fork, save or load while copies run") as planted:
        world.checker.host_writes(world.tables[1][-1], 2)
        assert any("while a transfer may be using it" in text for text in world.checker.faults)
        planted.caught_by("plan checker", "plans on paper")
    world = ring()
    world.checker.synchronize()
    world.checker.host_writes(world.tables[1][-1], 2)
    assert world.checker.faults == []
