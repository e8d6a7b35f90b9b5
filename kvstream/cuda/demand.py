"""What a step asks of the pool: whose new rows go where, the order of its pages, how many of each layer are kept."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Protocol

from attrs import field, frozen

from ..core.types import AccountingBug


class Shares(Protocol):
    """What is needed of a policy's split: cells for pages in transit, and of each layer how many of the step's first
    pages (tails not counted) are to be resident."""

    @property
    def ring(self) -> int: ...

    @property
    def layer_pages(self) -> tuple[int, ...]: ...


@frozen(slots=True)
class Part:
    """One sequence in a step. Its ``new`` tokens are rows ``row`` and on of the step's input; ``pages`` are the host
    pages that it needs at the end of the step, and the ones from index ``first`` on are written."""

    sequence: int
    row: int
    before: int
    new: int
    pages: tuple[int, ...]
    first: int

    def rows(self, page_tokens: int) -> list[tuple[int, int, int, int]]:
        """(row of the step, count, host page, first row in that page) for each page that is written."""
        after, found = self.before + self.new, []
        for index in range(self.first, len(self.pages)):
            start = max(self.before, index * page_tokens)
            end = min(after, (index + 1) * page_tokens)
            found.append((self.row + start - self.before, end - start, self.pages[index], start - index * page_tokens))
        return found


@frozen
class Demand:
    """``parts`` in the order of sequences. ``pages``: what may pass, in order, each page once. ``tails``: the last page
    of each sequence, which has a cell in every layer. ``filled``: places in ``pages`` of those that are written as
    well."""

    parts: tuple[Part, ...]
    pages: tuple[int, ...]
    tails: tuple[int, ...]
    filled: tuple[int, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        place = {page: at for at, page in enumerate(self.pages)}
        object.__setattr__(self, "filled", tuple(sorted(
            place[page] for part in self.parts for page in part.pages[part.first : -1])))

    def filled_beyond(self, kept: int) -> int:
        """How many of the filled pages are not among the first ``kept``."""
        return len(self.filled) - bisect_left(self.filled, kept)


def parts_of(batch: Sequence[tuple[int, int, int]], tables: Mapping[int, tuple[int, ...]],
             page_tokens: int) -> tuple[Part, ...]:
    """Rows are in the order of the batch, parts in the order of sequences."""
    parts, row = [], 0
    for sequence, before, new in batch:
        pages, needed = tables[sequence], -(-(before + new) // page_tokens)
        if before < 0 or new < 1 or len(pages) < needed:
            raise AccountingBug(f"sequence {sequence} with {len(pages)} pages: {before} tokens and {new} new ones")
        parts.append(Part(sequence, row, before, new, pages if len(pages) == needed else pages[:needed],
                          before // page_tokens))
        row += new
    parts.sort(key=lambda part: part.sequence)
    return tuple(parts)


def demand_of(parts: tuple[Part, ...]) -> Demand:
    """Errors: ``AccountingBug`` when a sequence is there twice, or a page that is written belongs to two."""
    pages = dict.fromkeys(page for part in parts for page in part.pages)
    written = [page for part in parts for page in part.pages[part.first :]]
    owners = {page: part.sequence for part in parts for page in part.pages[part.first :]}
    shared = [page for part in parts for page in part.pages if owners.get(page, part.sequence) != part.sequence]
    if shared or len(set(written)) < len(written) or len({part.sequence for part in parts}) < len(parts):
        raise AccountingBug(f"pages with two writers or a reader beside the writer: {shared or written}")
    tails = tuple(part.pages[-1] for part in parts)
    for page in tails:
        del pages[page]
    return Demand(parts, tuple(pages), tails)


@frozen
class Kept:
    """Of each layer, how many of the first pages are kept; cells for pages that fill up and are not kept (``zone``);
    and the number of pages of all layers that pass."""

    layer_pages: tuple[int, ...]
    zone: int
    passing: int

    @property
    def ring_min(self) -> int:
        return self.zone + (1 if self.passing else 0)


def kept_of(layer_pages: Sequence[int], demand: Demand, cells: int) -> Kept:
    """What the split asks for, as far as the pool can do it. Errors: ``AccountingBug`` when even the fewest cells are
    not there (``layout.plan_layout`` sees to that)."""
    layers, pages = len(layer_pages), len(demand.pages)
    room = cells - layers * len(demand.tails)
    kept = _kept([min(most, pages) for most in layer_pages], demand)
    if sum(kept.layer_pages) + kept.ring_min <= room:
        return kept
    total = room - len(demand.filled) - 1
    if total < 0:
        raise AccountingBug(f"{cells} cells are too few for {len(demand.tails)} sequences in {layers} layers, with "
                            f"{len(demand.filled)} pages filled in one step")
    return _kept(_levelled(kept.layer_pages, total), demand)


def _kept(layer_pages: Sequence[int], demand: Demand) -> Kept:
    beyond = [demand.filled_beyond(kept) for kept in layer_pages]
    passing = len(layer_pages) * len(demand.pages) - sum(layer_pages) - sum(beyond)
    return Kept(tuple(layer_pages), max(beyond, default=0), passing)


def _levelled(wanted: Sequence[int], total: int) -> list[int]:
    """The largest are cut to one level, so that the sum is the total."""
    low, high = 0, max(wanted)
    while low < high:
        level = (low + high + 1) // 2
        if sum(min(want, level) for want in wanted) <= total:
            low = level
        else:
            high = level - 1
    spare = total - sum(min(want, low) for want in wanted)
    cut = []
    for want in wanted:
        more = 1 if spare and want > low else 0
        spare -= more
        cut.append(min(want, low) + more)
    return cut
