"""Which prompt prefixes the runtime is believed to hold, as a tree of pages.

Theory of operation. A node is one full page of some prompt after all the pages above it. Children are found by chain
digest and then compared by content, so a hash collision is a miss, never a mix-up. Each node is one owner of its page
in the pool; running tables are the others.

*Locked* nodes are used by running tables. A table always uses a run of nodes from the root, so the locked nodes form a
subtree at the root, and everything below an unlocked node is unlocked: every unlocked node can be evicted sooner or
later, leaf first. Hence ``evictable + locked == size`` with ``evictable`` simply counting unlocked nodes, and a parent
can never go before its child.

*Order of eviction.* A use stamps the whole path, so a parent's stamp is never older than its child's. Unlocked leaves
sit in a heap by stamp; when a leaf goes, its parent may become one and is pushed. Heap entries are never removed, only
recognised as stale (the node is gone, locked, has children or a newer stamp), and the heap is rebuilt when it is
mostly stale. That is O(log n) per page. Expiry by TTL, counted from the last use, takes from the same heap: its oldest
leaf is the oldest node of all.

Times are seconds on the caller's clock and must not run backwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final

from .pool import PagePool
from .types import AccountingBug, PageId, PageKey

HEAP_SLACK: Final = 64  # stale entries tolerated beyond twice the size


class PrefixNode:
    """One cached page. Read only outside this file."""

    __slots__ = ("attached", "children", "key", "locks", "page", "parent", "stamp")

    def __init__(self, key: PageKey, page: PageId, parent: PrefixNode | None, stamp: float) -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.children: dict[bytes, PrefixNode] = {}
        self.stamp = stamp
        self.locks = 0  # running tables that use it
        self.attached = True  # False once the tree gave it up (cleared) while a table still ran on it


class PrefixTree:
    """Cached prefixes whose pages belong to ``pool``. ``pages_max`` bounds the depth, ``ttl_s`` the idle time."""

    def __init__(self, pool: PagePool, *, pages_max: int, ttl_s: float = inf) -> None:
        self._pool = pool
        self._pages_max = pages_max
        self._ttl_s = ttl_s
        self._roots: dict[bytes, PrefixNode] = {}
        self._heap: list[tuple[float, int, PrefixNode]] = []
        self._pushes = 0
        self.size = 0
        self.evictable = 0

    @property
    def pages_max(self) -> int:
        """The deepest path that is remembered."""
        return self._pages_max

    @property
    def locked(self) -> int:
        return self.size - self.evictable

    def match(self, keys: Sequence[PageKey], pages_max: int, now: float) -> list[PrefixNode]:
        """The longest cached run of ``keys`` from its start, at most ``pages_max`` pages. Changes nothing."""
        found: list[PrefixNode] = []
        children = self._roots
        for key in keys[:pages_max]:
            node = children.get(key.digest)
            if node is None or node.key.content != key.content:
                break
            if not node.locks and node.stamp + self._ttl_s <= now:
                break
            found.append(node)
            children = node.children
        return found

    def lock(self, nodes: Sequence[PrefixNode], now: float) -> None:
        """A table starts to use this run (as ``match`` returned it): it becomes an owner of the pages."""
        for node in nodes:
            if not node.attached:
                raise AccountingBug("lock of a node that is not in the tree")
            if not node.locks:
                self.evictable -= 1
            node.locks += 1
            node.stamp = now
        self._pool.share([node.page for node in nodes])

    def unlock(self, nodes: Sequence[PrefixNode], now: float) -> None:
        """The table is done with the run. Its hold on the *pages* is the table's to drop."""
        for node in reversed(nodes):
            if node.locks < 1:
                raise AccountingBug("unlock of a node that is not locked")
            node.locks -= 1
            if node.attached:
                node.stamp = now
                if not node.locks:
                    self.evictable += 1
                    self._push(node)

    def insert(self, keys: Sequence[PageKey], pages: Sequence[PageId], now: float) -> int:
        """Remember that ``pages`` hold the content ``keys``; returns how many pages were new.

        Known pages keep their node (the caller's duplicate stays the caller's). A collision ends the walk: what lies
        below it cannot be told apart.
        """
        children, parent, added = self._roots, None, 0
        for key, page in zip(keys[: self._pages_max], pages, strict=False):
            node = children.get(key.digest)
            if node is None:
                node = PrefixNode(key, page, parent, now)
                self._pool.share((page,))
                children[key.digest] = node
                added += 1
            elif node.key.content != key.content:
                break
            node.stamp = now
            parent, children = node, node.children
        self.size += added
        self.evictable += added
        if parent is not None:
            self._push(parent)
        return added

    def extend(
        self, path: Sequence[PrefixNode], keys: Sequence[PageKey], pages: Sequence[PageId], now: float
    ) -> Sequence[PrefixNode]:
        """Remember the pages of a table that runs on ``path`` and goes on using them: the longer path it has locked.

        ``keys`` and ``pages`` are the table's from its start. The walk ends at a page that is known already as somebody
        else's copy: the table does not use that one, so it cannot lock what lies below.
        """
        children = path[-1].children if path else self._roots
        parent, added = path[-1] if path else None, []
        for node in path:
            node.stamp = now
        for key, page in zip(keys[len(path) : self._pages_max], pages[len(path) :], strict=False):
            if key.digest in children:
                break
            node = PrefixNode(key, page, parent, now)
            node.locks = 1
            self._pool.share((page,))
            children[key.digest] = node
            added.append(node)
            parent, children = node, node.children
        self.size += len(added)
        return [*path, *added] if added else path

    def evict(self, n: int) -> int:
        """Give up to ``n`` unlocked pages back to the pool, least recently used first, tails first."""
        done = 0
        while done < n and (leaf := self._oldest()) is not None:
            self._remove(leaf)
            done += 1
        return done

    def prune(self, keys: Sequence[PageKey], depth: int) -> int:
        """Forget what lies on the path ``keys`` below its first ``depth`` pages, with all that continues it; returns
        how many pages that were. What running tables use stays until they are done."""
        node: PrefixNode | None = None
        children = self._roots
        for key in keys[: depth + 1]:
            node = children.get(key.digest)
            if node is None or node.key.content != key.content:
                return 0
            children = node.children
        if node is None or len(keys) <= depth:
            return 0
        done, stack = 0, [node]
        while stack:
            node = stack.pop()
            if node.locks:
                stack.extend(node.children.values())
            else:
                done += self._cut(node)
        return done

    def expire(self, now: float, pages_max: int) -> int:
        """Give up what was not used for ``ttl_s``, at most ``pages_max`` pages in one call."""
        done = 0
        while done < pages_max and (leaf := self._oldest()) is not None and leaf.stamp + self._ttl_s <= now:
            self._remove(leaf)
            done += 1
        return done

    def next_expiry(self) -> float | None:
        """When the oldest unlocked page expires."""
        leaf = self._oldest() if self._ttl_s < inf else None
        return None if leaf is None else leaf.stamp + self._ttl_s

    def clear(self) -> None:
        """Forget everything. Tables that run on cached pages keep the pages, not the nodes."""
        nodes = list(self.nodes())
        for node in nodes:
            node.attached = False
        self._pool.drop([node.page for node in nodes])
        self._roots, self._heap = {}, []
        self.size = self.evictable = 0

    def nodes(self) -> Iterator[PrefixNode]:
        """Every node, parents before children."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _push(self, node: PrefixNode) -> None:
        if node.locks or node.children or not node.attached:
            return
        self._pushes += 1  # breaks ties, so that nodes themselves are never compared
        heappush(self._heap, (node.stamp, self._pushes, node))
        if len(self._heap) > 2 * self.size + HEAP_SLACK:
            live = {id(n): (stamp, push, n) for stamp, push, n in self._heap if self._is_live(stamp, n)}
            self._heap = list(live.values())
            heapify(self._heap)

    def _is_live(self, stamp: float, node: PrefixNode) -> bool:
        return node.attached and not node.locks and not node.children and node.stamp == stamp

    def _oldest(self) -> PrefixNode | None:
        while self._heap:
            stamp, _, node = self._heap[0]
            if self._is_live(stamp, node):
                return node
            heappop(self._heap)
        return None

    def _remove(self, leaf: PrefixNode) -> None:
        siblings = self._roots if leaf.parent is None else leaf.parent.children
        del siblings[leaf.key.digest]
        leaf.attached = False
        self.size -= 1
        self.evictable -= 1
        self._pool.drop((leaf.page,))
        if leaf.parent is not None:
            self._push(leaf.parent)

    def _cut(self, top: PrefixNode) -> int:
        """Remove an unlocked node with everything below it, which is unlocked too."""
        siblings = self._roots if top.parent is None else top.parent.children
        del siblings[top.key.digest]
        nodes, stack = [], [top]
        while stack:
            node = stack.pop()
            node.attached = False
            nodes.append(node)
            stack.extend(node.children.values())
        self.size -= len(nodes)
        self.evictable -= len(nodes)
        self._pool.drop([node.page for node in nodes])
        if top.parent is not None:
            self._push(top.parent)
        return len(nodes)

    def check(self) -> None:
        """Counts, shape, order of stamps and reachability of every evictable leaf."""
        nodes = list(self.nodes())
        assert self.size == len(nodes), "tree size"
        assert self.evictable == sum(1 for node in nodes if not node.locks), "evictable"
        live = {id(node) for stamp, _, node in self._heap if self._is_live(stamp, node)}
        for node in nodes:
            assert node.attached
            assert self._pool.count(node.page) >= 1 + node.locks, "a cached page without its owners"
            if node.parent is not None:
                assert node.parent.stamp >= node.stamp, "a parent older than its child"
                assert node.parent.locks >= node.locks, "a locked child below an unlocked parent"
            assert node.locks or node.children or id(node) in live, "a leaf that would never be evicted"
