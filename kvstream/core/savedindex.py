"""Which saved file holds the longest beginning of a prompt: a tree of pages with the files that pass through each.

Children are found by chain digest and then compared by content, so a hash collision is a miss, never a mix-up: what
lies below one cannot be told apart, and is not in the index. Every page remembers the cheapest file that passes through
it, so an answer costs one look per page of the prompt. Pages hold nothing in the ledger: a file's bytes are its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from .types import PageKey, SavedPrefix


class _Page:
    __slots__ = ("best", "children", "files", "key", "parent")

    def __init__(self, key: PageKey, parent: _Page | None) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[bytes, _Page] = {}
        self.files: dict[str, SavedPrefix] = {}
        self.best: SavedPrefix | None = None  # of the files through here, the one that costs least to read


class SavedIndex:
    """Files by their page keys. ``entry.keys`` may be empty: then it is never found."""

    def __init__(self) -> None:
        self._roots: dict[bytes, _Page] = {}
        self._ends: dict[str, _Page | None] = {}

    def add(self, entry: SavedPrefix) -> None:
        """Put it in; one of that name is replaced."""
        self.remove(entry.name)
        children, end = self._roots, None
        for key in entry.keys:
            page = children.get(key.digest)
            if page is None:
                page = children[key.digest] = _Page(key, end)
            elif page.key.content != key.content:
                break
            page.files[entry.name] = entry
            if page.best is None or _cost(entry) < _cost(page.best):
                page.best = entry
            children, end = page.children, page
        self._ends[entry.name] = end

    def remove(self, name: str) -> None:
        page = self._ends.pop(name, None)
        while page is not None:
            del page.files[name]
            if not page.files:
                del (self._roots if page.parent is None else page.parent.children)[page.key.digest]
            elif page.best is not None and page.best.name == name:
                page.best = min(page.files.values(), key=_cost)
            page = page.parent

    def match(self, keys: Sequence[PageKey]) -> tuple[SavedPrefix, int] | None:
        """The file with the longest run of ``keys`` from their start, and how many pages that is. Of several the one
        that costs least to read."""
        children, found, depth = self._roots, None, 0
        for key in keys:
            page = children.get(key.digest)
            if page is None or page.key.content != key.content:
                break
            found, depth, children = page.best, depth + 1, page.children
        return None if found is None else (found, depth)

    def beginnings(self, entry: SavedPrefix) -> list[SavedPrefix]:
        """The other files that hold a beginning of this one and nothing else."""
        found: list[SavedPrefix] = []
        page = self._ends.get(entry.name)
        while page is not None:
            for name, other in page.files.items():
                # One that a collision cut short has more than the index knows.
                if name != entry.name and self._ends[name] is page and other.keys[-1] == page.key:
                    found.append(other)
            page = page.parent
        return found

    def clear(self) -> None:
        self._roots, self._ends = {}, {}

    def check(self, entries: Sequence[SavedPrefix]) -> None:
        """Raise AssertionError unless the index has exactly these files, each on its own path."""
        assert set(self._ends) == {entry.name for entry in entries}, "files and index differ"
        pages = list(self._roots.values())
        while pages:
            page = pages.pop()
            assert page.files, "a page without a file"
            assert page.best is not None and page.files.get(page.best.name) is page.best, "the best of a page is gone"
            assert _cost(page.best) == min(map(_cost, page.files.values())), "not the cheapest"
            for child in page.children.values():
                assert child.parent is page and child.files.keys() <= page.files.keys(), "a file off its path"
                pages.append(child)


def _cost(entry: SavedPrefix) -> tuple[int, int, str]:
    return entry.bytes, entry.tokens, entry.name
