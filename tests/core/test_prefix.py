"""The prefix tree, alone and beside a naive model."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstream.core.pool import PagePool
from kvstream.core.prefix import PrefixNode, PrefixTree
from kvstream.core.types import AccountingBug, PageKey
from tests.play import keys_of
from tests.strategies import colliding_keys


def put(tree: PrefixTree, pool: PagePool, keys: tuple[PageKey, ...], now: float = 0) -> int:
    """Register a prompt the way the ledger does: a table holds the pages, the tree takes its share, the table drops."""
    pages = pool.try_take(len(keys))
    assert pages is not None
    added = tree.insert(keys, pages, now)
    pool.drop(pages)
    return added


def test_the_longest_run_is_found_and_shared_prefixes_are_stored_once() -> None:
    pool = PagePool(20)
    tree = PrefixTree(pool, pages_max=10)
    assert put(tree, pool, keys_of("aab", 48)) == 3
    assert put(tree, pool, keys_of("aac", 64)) == 2
    assert (tree.size, pool.held) == (5, 5)
    assert len(tree.match(keys_of("aac", 160), 99, 0)) == 4
    assert len(tree.match(keys_of("aac", 160), 3, 0)) == 3
    assert len(tree.match(keys_of("b", 160), 99, 0)) == 0


def test_two_contents_with_one_digest_do_not_mix() -> None:
    pool = PagePool(20)
    tree = PrefixTree(pool, pages_max=10)
    first = (PageKey(b"x", b"one"), PageKey(b"y", b"two"))
    other = (PageKey(b"x", b"ONE"), PageKey(b"y", b"two"))
    put(tree, pool, first)
    assert tree.match(other, 9, 0) == []
    assert put(tree, pool, other) == 0
    assert len(tree.match(first, 9, 0)) == 2
    third = (PageKey(b"x", b"one"), PageKey(b"y", b"TWO"))
    assert len(tree.match(third, 9, 0)) == 1


def test_a_parent_never_expires_before_its_child() -> None:
    """0.1.0 lost long prefixes when a short one under them expired."""
    pool = PagePool(20)
    tree = PrefixTree(pool, pages_max=10, ttl_s=10)
    put(tree, pool, keys_of("ab", 32), now=0)
    put(tree, pool, keys_of("abb", 48), now=5)
    put(tree, pool, keys_of("ac", 32), now=6)
    assert tree.expire(14.9, 99) == 0
    assert tree.next_expiry() == 15
    assert tree.expire(15, 99) == 2  # the b's, leaf first; a was used at 6
    assert len(tree.match(keys_of("ac", 32), 9, 15)) == 2
    assert tree.expire(16, 1) == 1
    assert tree.match(keys_of("a", 16), 9, 16) == []  # due, although there was no time yet to give it up
    assert tree.expire(16, 1) == 1
    assert pool.free == 20


def test_locked_pages_are_neither_evicted_nor_expired() -> None:
    pool = PagePool(20)
    tree = PrefixTree(pool, pages_max=10, ttl_s=10)
    put(tree, pool, keys_of("ab", 48))
    run = tree.match(keys_of("ab", 32), 9, 0)
    tree.lock(run, 0)
    assert (tree.locked, tree.evictable) == (2, 1)
    assert tree.evict(99) == 1
    assert tree.expire(99, 99) == 0
    assert len(tree.match(keys_of("ab", 32), 9, 99)) == 2
    tree.unlock(run, 100)
    pool.drop([node.page for node in run])
    assert tree.next_expiry() == 110
    assert tree.evict(99) == 2
    assert pool.free == 20


def test_clear_lets_tables_keep_their_pages() -> None:
    pool = PagePool(20)
    tree = PrefixTree(pool, pages_max=10)
    put(tree, pool, keys_of("a", 32))
    run = tree.match(keys_of("a", 32), 9, 0)
    tree.lock(run, 0)
    tree.clear()
    assert (tree.size, tree.evictable, pool.held) == (0, 0, 2)
    with pytest.raises(AccountingBug):
        tree.lock(run, 0)
    tree.unlock(run, 0)
    pool.drop([node.page for node in run])
    assert pool.free == 20
    with pytest.raises(AccountingBug):
        tree.unlock(run, 0)
    tree.check()


def test_the_heap_does_not_grow_with_use() -> None:
    pool = PagePool(20)
    tree = PrefixTree(pool, pages_max=10)
    put(tree, pool, keys_of("a", 32))
    for now in range(1000):
        run = tree.match(keys_of("a", 32), 9, now)
        tree.lock(run, now)
        tree.unlock(run, now)
        pool.drop([node.page for node in run])
    assert len(tree._heap) < 200


Path = tuple[tuple[bytes, bytes], ...]


class TreeMachine(RuleBasedStateMachine):
    """Model: a dict from whole paths to [last use, locks]; every question is answered by looking at all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(500)
        self.tree = PrefixTree(self.pool, pages_max=4, ttl_s=10)
        self.now = 0.0
        self.model: dict[Path, list[float]] = {}
        self.runs: list[tuple[list[PrefixNode], list[Path]]] = []

    @staticmethod
    def paths(keys: tuple[PageKey, ...]) -> list[Path]:
        names = [(key.digest, key.content) for key in keys]
        return [tuple(names[: i + 1]) for i in range(len(names))]

    def collides(self, path: Path) -> bool:
        return any(p[:-1] == path[:-1] and p[-1][0] == path[-1][0] and p[-1][1] != path[-1][1] for p in self.model)

    @rule(step=st.sampled_from([0.0, 0.5, 4.0]))
    def pass_time(self, step: float) -> None:
        self.now += step

    @rule(keys=colliding_keys())
    def insert(self, keys: tuple[PageKey, ...]) -> None:
        put(self.tree, self.pool, keys, self.now)
        for path in self.paths(keys)[:4]:
            if self.collides(path):
                break
            self.model.setdefault(path, [self.now, 0])[0] = self.now

    @rule(keys=colliding_keys(), pages_max=st.integers(0, 5))
    def match_and_lock(self, keys: tuple[PageKey, ...], pages_max: int) -> None:
        run = self.tree.match(keys, pages_max, self.now)
        expected = []
        for path in self.paths(keys)[:pages_max]:
            known = self.model.get(path)
            if known is None or (not known[1] and known[0] + 10 <= self.now):
                break
            expected.append(path)
        assert len(run) == len(expected)
        self.tree.lock(run, self.now)
        for path in expected:
            self.model[path] = [self.now, self.model[path][1] + 1]
        self.runs.append((run, expected))

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        run, paths = self.runs.pop(data.draw(st.integers(0, len(self.runs) - 1)))
        self.tree.unlock(run, self.now)
        self.pool.drop([node.page for node in run])
        for path in paths:
            self.model[path] = [self.now, self.model[path][1] - 1]

    def naive_evict(self, n: int, until: float) -> int:
        done = 0
        while done < n:
            leaves = [p for p, (used, locks) in self.model.items() if not locks and used <= until
                      and not any(q[: len(p)] == p and q != p for q in self.model)]
            if not leaves:
                break
            oldest = min(self.model[p][0] for p in leaves)
            ties = [p for p in leaves if self.model[p][0] == oldest]
            kept = [p for p in ties if self.tree_has(p)]
            gone = [p for p in ties if p not in kept]
            assert gone, "something else than the least recently used leaf was evicted"
            del self.model[gone[0]]
            done += 1
        return done

    def tree_has(self, path: Path) -> bool:
        children = self.tree._roots
        node = None
        for digest, content in path:
            node = children.get(digest)
            if node is None or node.key.content != content:
                return False
            children = node.children
        return node is not None

    @rule(n=st.integers(0, 6))
    def evict(self, n: int) -> None:
        done = self.tree.evict(n)
        assert self.naive_evict(n, float("inf")) == done

    @rule()
    def expire(self) -> None:
        done = self.tree.expire(self.now, 99)
        assert self.naive_evict(99, self.now - 10) == done

    @rule(keys=colliding_keys(), depth=st.integers(0, 5))
    def prune(self, keys: tuple[PageKey, ...], depth: int) -> None:
        done = self.tree.prune(keys, depth)
        lost = self.paths(keys)[depth : depth + 1]
        gone = [p for p, (_, locks) in self.model.items() if lost and p[: len(lost[0])] == lost[0] and not locks]
        assert done == len(gone)
        for path in gone:
            del self.model[path]

    @invariant()
    def agree(self) -> None:
        self.tree.check()
        self.pool.check()
        assert self.tree.size == len(self.model)
        assert self.tree.evictable == sum(1 for _, locks in self.model.values() if not locks)
        assert all(self.tree_has(path) for path in self.model)
        assert self.pool.held == len(self.model)


TestTreeMachine = TreeMachine.TestCase
