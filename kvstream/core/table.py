"""The pages of one sequence, as a value.

Theory of operation. A table is frozen; growing returns a new one. Forking a sequence is assignment plus
``pool.share(table.pages())``: both values then name the same pages. The danger of sharing is the last page, which may
be part filled: two sequences would write the same place. So ``append`` itself copies on write: when the last page has
another owner and room left, it takes a fresh page in its stead, drops its hold on the shared one, and says so in
``Appended.copied`` so that whoever owns real memory copies the bytes. A full shared page is never written again and
stays shared.

Growth must not cost more for long sequences (262,144 tokens are 16,384 pages of 16). A plain tuple would be copied
whole for every page. Here the pages are a tuple of full chunks plus a tail of fewer than ``CHUNK_PAGES`` pages: a new
page copies at most one tail, and once per chunk the outer tuple, which is ``CHUNK_PAGES`` times shorter. That is a few
pointers per token at any length people use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Final, Protocol

from attrs import frozen

from .types import AccountingBug, PageId

CHUNK_PAGES: Final = 64


class Pages(Protocol):
    """What ``append`` needs of a pool."""

    def count(self, page: PageId) -> int: ...

    def drop(self, pages: Sequence[PageId]) -> None: ...

    def try_take(self, n: int) -> tuple[PageId, ...] | None: ...


@frozen(slots=True)
class PageTable:
    """``length`` tokens in ``pages_held`` pages of ``page_tokens`` tokens each; the last one may be part filled."""

    page_tokens: int
    length: int = 0
    chunks: tuple[tuple[PageId, ...], ...] = ()
    tail: tuple[PageId, ...] = ()

    @classmethod
    def of(cls, pages: Sequence[PageId], length: int, page_tokens: int) -> PageTable:
        """A table over existing pages. Errors: ``AccountingBug`` when they are not exactly what ``length`` needs."""
        if page_tokens < 1 or len(pages) != -(-length // page_tokens):
            raise AccountingBug(f"{len(pages)} pages of {page_tokens} tokens for a length of {length}")
        cut = len(pages) // CHUNK_PAGES * CHUNK_PAGES
        chunks = tuple(tuple(pages[i : i + CHUNK_PAGES]) for i in range(0, cut, CHUNK_PAGES))
        return cls(page_tokens, length, chunks, tuple(pages[cut:]))

    @property
    def pages_held(self) -> int:
        return len(self.chunks) * CHUNK_PAGES + len(self.tail)

    @property
    def room(self) -> int:
        """Tokens that still fit in the last page."""
        return self.pages_held * self.page_tokens - self.length

    @property
    def last(self) -> PageId | None:
        if self.tail:
            return self.tail[-1]
        return self.chunks[-1][-1] if self.chunks else None

    def pages(self) -> Iterator[PageId]:
        """All pages in order."""
        return chain(chain.from_iterable(self.chunks), self.tail)

    def first_pages(self, n: int) -> tuple[PageId, ...]:
        return tuple(islice(self.pages(), n))

    def append(
        self, tokens: int, pool: Pages, take: Callable[[int], tuple[PageId, ...] | None] | None = None
    ) -> Appended | None:
        """Grow by ``tokens``. None, and nothing changed, when the pages cannot be had.

        The hold on the pages moves to the returned table; this value must not be used any more (unless its pages were
        shared first, that is, forked). ``take`` gets pages elsewhere than from ``pool.try_take``.
        """
        if tokens < 0:
            raise AccountingBug(f"append {tokens} tokens")
        room = self.room
        last = self.last
        copy = last is not None and room > 0 and tokens > 0 and pool.count(last) > 1
        if tokens <= room and not copy:
            return Appended(PageTable(self.page_tokens, self.length + tokens, self.chunks, self.tail))
        fresh = -(-max(0, tokens - room) // self.page_tokens)
        taken = (take or pool.try_take)(fresh + copy)
        if taken is None:
            return None
        base, copied = self, None
        if copy and last is not None:
            base, copied = self._with_last(taken[0]), (last, taken[0])
            pool.drop((last,))
        chunks, tail = _extended(base.chunks, base.tail, taken[copy:])
        return Appended(PageTable(self.page_tokens, self.length + tokens, chunks, tail), taken, copied)

    def _with_last(self, page: PageId) -> PageTable:
        if self.tail:
            return PageTable(self.page_tokens, self.length, self.chunks, (*self.tail[:-1], page))
        chunk = (*self.chunks[-1][:-1], page)
        return PageTable(self.page_tokens, self.length, (*self.chunks[:-1], chunk), ())


def _extended(
    chunks: tuple[tuple[PageId, ...], ...], tail: tuple[PageId, ...], pages: tuple[PageId, ...]
) -> tuple[tuple[tuple[PageId, ...], ...], tuple[PageId, ...]]:
    tail = tail + pages
    if len(tail) < CHUNK_PAGES:
        return chunks, tail
    cut = len(tail) // CHUNK_PAGES * CHUNK_PAGES
    return chunks + tuple(tail[i : i + CHUNK_PAGES] for i in range(0, cut, CHUNK_PAGES)), tail[cut:]


@frozen(slots=True)
class Appended:
    """The grown table, the pages it took, and (from, to) when the last page had to be copied."""

    table: PageTable
    taken: tuple[PageId, ...] = ()
    copied: tuple[PageId, PageId] | None = None
