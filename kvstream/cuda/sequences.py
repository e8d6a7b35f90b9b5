"""Who owns which page of the host: sequences with their tables, and reference counts.

Theory of operation. A sequence is a table of host pages and a length in tokens. All pages but the last are full and
never change, so any number of sequences may share them; the last one may be written by its sequence only, so it has one
owner from the moment it is written. That is all there is to copy-on-write: ``fork`` shares the full pages and copies
the rest, and ``truncate`` that ends inside a shared page copies the part it keeps.

Nothing here moves bytes. What has to be copied comes back as ``PageCopy``. Pages that nobody holds any more come
back as ``freed``: whoever caches their contents must forget them (one may be the target of a copy already).

Every operation either happens as a whole or raises and changes nothing.

Pages are given out so that tables become runs, since a run of adjacent pages is one transfer: the page after the last
one if it is free, else the beginning of the largest gap, or its middle when another sequence is growing into it.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from ..errors import DeviceMemoryError, StepError


@frozen
class PageCopy:
    """Copy the first ``tokens`` rows of one host page to another, in every layer."""

    source: int
    target: int
    tokens: int


@frozen
class Change:
    """What an operation means for the bytes."""

    copies: tuple[PageCopy, ...] = ()
    freed: tuple[int, ...] = ()


@frozen
class Sequence:
    """Read it, do not keep it: every operation makes a new one. ``len(pages)`` is what ``tokens`` need."""

    pages: tuple[int, ...] = ()
    tokens: int = 0


class Sequences:
    """All sequences over ``host_pages`` pages of ``page_tokens`` tokens."""

    __slots__ = ("_counts", "_ids", "_sequences", "free", "host_pages", "page_tokens")

    def __init__(self, host_pages: int, page_tokens: int) -> None:
        self.host_pages = host_pages
        self.page_tokens = page_tokens
        self.free = host_pages
        self._counts = [0] * host_pages
        self._sequences: dict[int, Sequence] = {}
        self._ids = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._sequences

    def __getitem__(self, sequence: int) -> Sequence:
        found = self._sequences.get(sequence)
        if found is None:
            raise StepError(f"there is no sequence {sequence}")
        return found

    def ids(self) -> tuple[int, ...]:
        """In order of creation."""
        return tuple(self._sequences)

    def count(self, page: int) -> int:
        """How many sequences hold the page."""
        return self._counts[page]

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def create(self, tokens: int = 0) -> int:
        """A new sequence; with ``tokens`` its pages are there, and whoever asked fills them."""
        pages = self._take((), self.pages_for(tokens))
        self._ids += 1
        self._sequences[self._ids] = Sequence(pages, tokens)
        return self._ids

    def fork(self, sequence: int) -> tuple[int, Change]:
        """A second sequence with the same tokens."""
        old = self[sequence]
        rest = old.tokens % self.page_tokens
        shared = old.pages[:-1] if rest else old.pages
        copies: tuple[PageCopy, ...] = ()
        pages = shared
        if rest:
            pages += self._take(shared, 1)
            copies = (PageCopy(old.pages[-1], pages[-1], rest),)
        for page in shared:
            self._counts[page] += 1
        self._ids += 1
        self._sequences[self._ids] = Sequence(pages, old.tokens)
        return self._ids, Change(copies)

    def shares_end(self, sequence: int, tokens: int) -> bool:
        """Whether others hold the page that would be the last one after ``truncate``: then part of it is copied."""
        pages, at = self[sequence].pages, tokens // self.page_tokens
        return bool(tokens % self.page_tokens) and 0 <= at < len(pages) and self._counts[pages[at]] > 1

    def truncate(self, sequence: int, tokens: int) -> Change:
        """Forget all but the first ``tokens``."""
        old = self[sequence]
        if not 0 <= tokens <= old.tokens:
            raise StepError(f"sequence {sequence} has {old.tokens} tokens, it cannot be cut to {tokens}")
        keep = self.pages_for(tokens)
        pages, gone = old.pages[:keep], old.pages[keep:]
        rest = tokens % self.page_tokens
        if not rest or self._counts[pages[-1]] == 1:
            self._sequences[sequence] = Sequence(pages, tokens)
            return Change(freed=self._drop(gone))
        self._need(1, self.free + sum(self._counts[page] == 1 for page in gone))
        freed = self._drop(gone)  # first, since one of them may have to take the copy
        taken = self._take(pages[:-1], 1)
        self._drop(pages[-1:])  # which others still hold
        self._sequences[sequence] = Sequence(pages[:-1] + taken, tokens)
        return Change((PageCopy(pages[-1], taken[0], rest),), freed)

    def drop(self, sequence: int) -> Change:
        old = self[sequence]
        del self._sequences[sequence]
        return Change(freed=self._drop(old.pages))

    def extend(self, wants: Iterable[tuple[int, int]]) -> None:
        """Pages for (sequence, new tokens) of a step: for all of them, or for none. Lengths change with ``commit``."""
        wanted = [(sequence, self.pages_for(self[sequence].tokens + new) - len(self[sequence].pages))
                  for sequence, new in wants]
        self._need(sum(max(0, pages) for _, pages in wanted), self.free)
        for sequence, pages in wanted:
            old = self[sequence]
            if pages > 0:
                self._sequences[sequence] = Sequence(old.pages + self._take(old.pages, pages), old.tokens)

    def commit(self, grown: Iterable[tuple[int, int]]) -> None:
        """The step that wrote these new tokens has ended."""
        for sequence, new in grown:
            old = self[sequence]
            self._sequences[sequence] = Sequence(old.pages, old.tokens + new)

    def shrink(self, sequences: Iterable[int]) -> tuple[int, ...]:
        """Give back what ``extend`` took: the step did not happen. Returns the pages that are free now."""
        freed: list[int] = []
        for sequence in sequences:
            old = self[sequence]
            keep = self.pages_for(old.tokens)
            self._sequences[sequence] = Sequence(old.pages[:keep], old.tokens)
            freed.extend(self._drop(old.pages[keep:]))
        return tuple(freed)

    # --- pages --------------------------------------------------------------------------------------------------------

    def _drop(self, pages: Iterable[int]) -> tuple[int, ...]:
        freed = []
        for page in pages:
            self._counts[page] -= 1
            if not self._counts[page]:
                self.free += 1
                freed.append(page)
        return tuple(freed)

    def _need(self, pages: int, free: int) -> None:
        if pages > free:
            raise DeviceMemoryError(
                f"{pages} more host pages of {self.page_tokens} tokens are needed, {free} of {self.host_pages} are "
                f"free: drop a sequence, save one elsewhere, or open with more host memory")

    def _take(self, before: tuple[int, ...], number: int) -> tuple[int, ...]:
        self._need(number, self.free)
        taken: list[int] = []
        last = before[-1] if before else -1
        for _ in range(number):
            page = last + 1
            if last < 0 or page >= self.host_pages or self._counts[page]:
                page = self._gap()
            self._counts[page] = 1
            taken.append(page)
            last = page
        self.free -= number
        return tuple(taken)

    def _gap(self) -> int:
        """Where a table that cannot go on where it is goes on."""
        best, best_size, start = 0, 0, 0
        for page in range(self.host_pages + 1):
            if page == self.host_pages or self._counts[page]:
                if page - start > best_size:
                    best, best_size = start, page - start
                start = page + 1
        growing = any(sequence.pages and sequence.pages[-1] + 1 == best for sequence in self._sequences.values())
        return best + best_size // 2 if growing else best
