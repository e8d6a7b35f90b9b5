"""The plan of a step, and how the next one is made of it when nothing but the rows has changed.

Theory of operation. Decoding repeats itself: the same sequences, the same pages, the same split, one row more. What a
step does depends on what it finds in the cells, and not on which rows it writes. So its operations are kept (``Memo``)
beside what it found and what it left; a step that finds the same makes anew only what names rows, a few objects per
layer. The plan of 16 layers with 640 pages each takes milliseconds to build, and a small part of one to repeat.

A page that fills up, a changed split or batch end the repetition; two steps later there is a new one. A few memos are
kept, so that groups of sequences may take turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from attrs import frozen

from .demand import Part, Shares
from .ops import AfterWritten, AwaitSaved, Folding, Op, Save, Saved, Write, Written
from .ring import Held, Residency, Spans

MEMOS_MAX: Final = 8

Rows = tuple[tuple[int, int, int, int], ...]
"""(first row of the step, count, host page, first row in the page)"""


@frozen(slots=True)
class Counts:
    """Pages (of one layer each) and calls. ``uploads`` is all pages that are copied in: ``fetched`` ones stay, the
    others pass. Of them ``early`` are enqueued before their layer's turn, and ``ahead`` for the next step. ``found``
    pass and were there already, ``moved`` are fetched again only to get them out of the ring's way, ``freed`` lost
    their cell without having been attended. ``copies``: runs of pages, two transfers each."""

    uploads: int = 0
    copies: int = 0
    fetched: int = 0
    early: int = 0
    ahead: int = 0
    found: int = 0
    moved: int = 0
    freed: int = 0
    waves: int = 0


@frozen(slots=True)
class Plan:
    """Operations in the order of enqueueing: ``begin`` at once, ``append[l]`` when the new rows of layer l are there,
    ``attend[l]`` when its queries are, ``end`` after the last layer. ``residency`` is for the next step. ``reused``:
    made of the plan before."""

    begin: tuple[Op, ...]
    append: tuple[tuple[Op, ...], ...]
    attend: tuple[tuple[Op, ...], ...]
    end: tuple[Op, ...]
    residency: Residency
    counts: Counts
    reused: bool = False

    def ops(self) -> tuple[Op, ...]:
        """All of them."""
        layers = (op for pair in zip(self.append, self.attend, strict=True) for ops in pair for op in ops)
        return (*self.begin, *layers, *self.end)


@frozen(eq=False, slots=True)
class Memo:
    """A step that finds ``held`` and leaves ``then``. ``again``: rows are written that may be on their way to the host.
    ``before``: of each layer, what comes before its ``Write``, that wait apart. ``cells``: of each layer, the tail's
    cell of each part. ``save``: a name of a record that is not used otherwise."""

    held: Held
    then: Held
    layer_pages: tuple[int, ...]
    ring: int
    parts: tuple[Part, ...]
    fold: Folding
    ahead: bool
    again: bool
    begin: tuple[Op, ...]
    before: tuple[tuple[Op, ...], ...]
    cells: tuple[tuple[int, ...], ...]
    attend: tuple[tuple[Op, ...], ...]
    end: tuple[Op, ...]
    save: int
    counts: Counts

    def fits(self, residency: Residency, split: Shares, parts: tuple[Part, ...], fold: Folding, ahead: bool,
             again: bool) -> bool:
        return (
            residency.held is self.held and split.layer_pages == self.layer_pages and split.ring == self.ring
            and fold == self.fold and ahead == self.ahead and again == self.again and len(parts) == len(self.parts)
            and all(part.sequence == mine.sequence and part.pages == mine.pages and part.first == mine.first
                    for part, mine in zip(parts, self.parts, strict=True)))

    def repeated(self, residency: Residency, rows: Rows, again: tuple[int, ...]) -> Plan:
        append = []
        for layer, cells in enumerate(self.cells):
            write = Write(layer, tuple(
                (row, count, cell, first) for (row, count, _, first), cell in zip(rows, cells, strict=True)))
            saves = [Save(layer, cell, first, count, page)
                     for (_, count, page, first), cell in zip(rows, cells, strict=True)]
            append.append((*self.before[layer], write, Written(layer), AfterWritten(layer), *saves))
        if again:
            append[0] = (Saved(self.save), AwaitSaved(self.save), *append[0])  # covers all that was saved so far
        unsettled = unsettled_after(residency.unsettled, rows, again, bool(again))
        after = Residency(self.then, unsettled, residency.memos)
        return Plan(self.begin, tuple(append), self.attend, self.end, after, self.counts, reused=True)


def rows_of(parts: Iterable[Part], page_tokens: int) -> Rows:
    return tuple(row for part in parts for row in part.rows(page_tokens))


def rewritten(unsettled: Mapping[int, Spans], rows: Rows) -> tuple[int, ...]:
    """The pages in which rows are written that may still be on their way to the host."""
    return tuple(page for _, count, page, first in rows
                 if any(start < first + count and first < end for start, end in unsettled.get(page, ())))


def unsettled_after(
    unsettled: Mapping[int, Spans], rows: Rows, again: Iterable[int], waited: bool,
) -> Mapping[int, Spans]:
    """``waited``: compute has waited for all saves there were; otherwise it knew of those of the pages ``again``."""
    spans = {} if waited else dict(unsettled)
    for page in again:
        spans.pop(page, None)
    for _, count, page, first in rows:
        spans[page] = _with(spans.get(page, ()), first, first + count)
    return MappingProxyType(spans)


def _with(spans: Spans, start: int, end: int) -> Spans:
    if spans and spans[-1][1] == start:
        return (*spans[:-1], (spans[-1][0], end))
    merged: list[tuple[int, int]] = []
    for span in sorted((*spans, (start, end))):
        if merged and span[0] <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], span[1])
        else:
            merged.append(span)
    return tuple(merged)
