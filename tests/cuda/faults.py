"""Deliberate bugs of the part that carries out plans. Each must be noticed: see ``test_faults``.

A fault is an ``Executor`` that forgets a wait or makes a record too early, or a plan that names the wrong page.
``planted(name)`` puts it in place of the real one for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from attrs import evolve

from kvstream.cuda import cache
from kvstream.cuda.arrays import Arrays
from kvstream.cuda.executor import Executor
from kvstream.cuda.ops import STREAM, Attend, Ready, Save, Saved, Upload, Used, Write, Written
from kvstream.cuda.tables import Loads

WAITS = MappingProxyType({
    "compute does not wait for uploads": ("compute", "ready"),
    "copy does not wait for the last use of a cell": ("copy", "used"),
    "copy does not wait for rows to be saved": ("copy", "saved"),
    "save does not wait for new rows": ("save", "written"),
    "compute overwrites rows that are being saved": ("compute", "saved"),
})
"""Name: the stream that would have to wait, and the kind of event."""

RECORDS = MappingProxyType({
    "uploads are recorded before the last one": Ready,
    "uses are recorded before the last one": Used,
    "new rows are recorded before they are written": Written,
    "saves are recorded before the last one": Saved,
})
"""Name: the record that is made one operation of its stream too early."""

STALE = MappingProxyType({
    "uploads are not recorded": "ready",
    "uses are not recorded": "used",
    "new rows are not recorded": "written",
    "saves are not recorded": "saved",
})
"""Name: the kind of record that is left out; who waits for it waits for the one before."""


class Forgetful(Executor):
    """Forgets waits of one kind: all of them, or the one that ``only`` counts to. It does not look which events have
    happened either: what the host has seen is in order for everything that it enqueues afterwards."""

    what = ("", "")
    only: int | None = None
    forgotten = 0
    seen = 0

    def _prune(self) -> None:
        pass

    def _wait(self, stream: Any, name: Any) -> None:
        if (stream.name, name[0]) == self.what:
            type(self).seen += 1
            if self.only is None or self.seen - 1 == self.only:
                type(self).forgotten += 1
                return
        super()._wait(stream, name)


class Hasty(Executor):
    """Makes the records of one kind before the last operation that they are to cover."""

    what: type = Ready
    early: Any = None

    def run(self, ops: Iterable[Any]) -> None:
        stream = getattr(self, STREAM[self.what])
        for op in ops:
            if isinstance(op, Upload | Write | Attend | Save) and STREAM[type(op)] == STREAM[self.what]:
                self.early = self._device.record(stream)
            super().run((op,))

    def _record(self, stream: Any, name: Any, timed: bool = False) -> Any:
        event = super()._record(stream, name, timed)
        if name[0] == self.what.__name__.lower() and self.early is not None:
            self._events[name] = self.early
        return event


class Stale(Executor):
    """Makes the first record of one kind and then no other: who waits for one waits for that. Does not look which
    events have happened."""

    what = ""
    first: Any = None

    def _prune(self) -> None:
        pass

    def _record(self, stream: Any, name: Any, timed: bool = False) -> Any:
        if name[0] != self.what:
            return super()._record(stream, name, timed)
        self.first = self.first or super()._record(stream, name, timed)
        self._events[name] = self.first
        self._recorded.add(name)
        return self.first


def _next_layer(op: Any) -> Any:
    return evolve(op, layer=op.layer ^ 1) if isinstance(op, Upload) else op


def _other_layer_saved(op: Any) -> Any:
    return evolve(op, layer=op.layer ^ 1) if isinstance(op, Save) else op


def _page_beside(op: Any) -> Any:
    return evolve(op, page=op.page + 1 if op.page == 0 else op.page - 1) if isinstance(op, Upload) else op


def _row_beside(op: Any) -> Any:
    return evolve(op, first_token=op.first_token - 1) if isinstance(op, Save) and op.first_token else op


def _cell_beside(op: Any) -> Any:
    if isinstance(op, Write):
        return evolve(op, rows=tuple((row, count, cell ^ 1, first) for row, count, cell, first in op.rows))
    return op


def _one_left_out(op: Any) -> Any:
    return evolve(op, entries=op.entries[1:]) if isinstance(op, Attend) and len(op.entries) > 1 else op


CHANGES: MappingProxyType[str, Callable[[Any], Any]] = MappingProxyType({
    "pages are uploaded from another layer": _next_layer,
    "rows are saved to another layer": _other_layer_saved,
    "the page beside is uploaded": _page_beside,
    "rows are saved one row off": _row_beside,
    "new rows go to the cell beside": _cell_beside,
    "a page is not attended": _one_left_out,
})


class Impatient(Executor):
    """Lets the host read and write pages while transfers are under way."""

    def quiet(self) -> None:
        self._events.clear()


class Careless(Executor):
    """Writes a step's tables over those of the step before last, read or not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        load = self._loads

        def free_staging() -> int:
            load._sent = [None, None]
            return Loads._free_staging(load)

        load._free_staging = free_staging  # type: ignore[method-assign]


OTHERS: MappingProxyType[str, type[Executor]] = MappingProxyType({
    "the host does not wait before it touches pages": Impatient,
    "tables are written while they are read": Careless,
})

class Deaf:
    """A device whose ``synchronize`` does not wait."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def synchronize(self, stream: Any = None) -> None:
        pass


class Blind(Arrays):
    """Reads results before they are there."""

    def result(self, address: int, values: int) -> Any:
        real = self._device
        try:
            self._device = Deaf(real)
            return super().result(address, values)
        finally:
            self._device = real


class Hurried(Arrays):
    """Writes a layer's rows over those of the layer before, read or not."""

    def rows_in(self, k: Any, v: Any, rows: int) -> tuple[int, int]:
        self._sent = None
        return super().rows_in(k, v, rows)


ARRAYS: MappingProxyType[str, type[Arrays]] = MappingProxyType({
    "a result is read before its copy is done": Blind,
    "rows are overwritten before they are sent": Hurried,
})

SWAPPED = "two layers are swapped"

STANDS_FOR: MappingProxyType[str, str] = MappingProxyType({
    "compute does not wait for uploads": "a page is read before it is there",
    "copy does not wait for the last use of a cell": "a cell is used again one step early",
    "copy does not wait for rows to be saved": "a tail is uploaded before its producer",
    "save does not wait for new rows": "rows are saved before they are computed",
    "compute overwrites rows that are being saved": "a draft's rows replace those under way",
    **dict.fromkeys(RECORDS, "an event that covers too little"),
    **dict.fromkeys(STALE, "an event that is not recorded"),
    **dict.fromkeys(CHANGES, "an address computed wrongly"),
    "the host does not wait before it touches pages": "a host page is read before its copy is done",
    "tables are written while they are read": "a staging is used again too early",
    "a result is read before its copy is done": "a host buffer is read before its copy is done",
    "rows are overwritten before they are sent": "a host buffer is used again too early",
    SWAPPED: "the order of layers",
})

NAMES = (*WAITS, *RECORDS, *STALE, *CHANGES, *OTHERS, SWAPPED)


@contextmanager
def planted(name: str, only: int | None = None) -> Iterator[type[Executor]]:
    kind, plan_step = Executor, cache.plan_step
    if name in WAITS:
        kind = type("Planted", (Forgetful,), {"what": WAITS[name], "only": only})
    elif name in RECORDS:
        kind = type("Planted", (Hasty,), {"what": RECORDS[name]})
    elif name in STALE:
        kind = type("Planted", (Stale,), {"what": STALE[name]})
    elif name in OTHERS:
        kind = OTHERS[name]

    def changed(*args: Any, **kwargs: Any) -> Any:
        plan, change = plan_step(*args, **kwargs), CHANGES.get(name, lambda op: op)

        def each(ops: Any) -> Any:
            return tuple(map(change, ops))

        attend = tuple(map(each, plan.attend))
        return evolve(plan, begin=each(plan.begin), append=tuple(map(each, plan.append)),
                      attend=attend[::-1] if name == SWAPPED else attend, end=each(plan.end))

    real = cache.Executor, cache.Arrays
    cache.Executor, cache.Arrays = kind, ARRAYS.get(name, Arrays)  # type: ignore[misc]
    cache.plan_step = changed
    try:
        yield kind
    finally:
        (cache.Executor, cache.Arrays), cache.plan_step = real, plan_step  # type: ignore[misc]
