"""Page tables: values, forks, copy on write, and the cost of growth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstream.core.pool import PagePool
from kvstream.core.table import CHUNK_PAGES, PageTable
from kvstream.core.types import AccountingBug, PageId


def grown(table: PageTable, tokens: int, pool: PagePool) -> PageTable:
    appended = table.append(tokens, pool)
    assert appended is not None
    return appended.table


@given(st.lists(st.integers(0, 400), max_size=12), st.integers(1, 5))
def test_growth_is_a_list_of_pages(steps: list[int], page_tokens: int) -> None:
    pool, table, length = PagePool(10_000), PageTable(page_tokens), 0
    for tokens in steps:
        before = tuple(table.pages())
        table, length = grown(table, tokens, pool), length + tokens
        assert tuple(table.pages())[: len(before)] == before
    assert table.length == length
    assert table.pages_held == pool.held == len(tuple(table.pages())) == -(-length // page_tokens)
    assert all(len(chunk) == CHUNK_PAGES for chunk in table.chunks) and len(table.tail) < CHUNK_PAGES
    assert table == PageTable.of(tuple(table.pages()), length, page_tokens)
    assert table.first_pages(3) == tuple(table.pages())[:3]


def test_a_fork_copies_the_last_page_when_it_is_written() -> None:
    pool = PagePool(10)
    table = grown(PageTable(4), 6, pool)
    fork = table
    pool.share(fork.pages())
    appended = fork.append(1, pool)
    assert appended is not None
    assert appended.copied == (1, 2)
    assert tuple(appended.table.pages()) == (0, 2)
    assert [pool.count(PageId(p)) for p in range(3)] == [2, 1, 1]
    again = table.append(1, pool)  # the other one owns its page alone now
    assert again is not None and again.copied is None


def test_copy_on_write_at_a_chunk_border() -> None:
    pool = PagePool(200)
    table = grown(PageTable(4), 4 * CHUNK_PAGES - 1, pool)
    pool.share(table.pages())
    appended = table.append(2, pool)
    assert appended is not None and appended.copied == (CHUNK_PAGES - 1, CHUNK_PAGES)
    assert appended.table.pages_held == CHUNK_PAGES + 1
    assert pool.held == CHUNK_PAGES + 2


def test_a_full_shared_page_is_never_copied() -> None:
    pool = PagePool(10)
    table = grown(PageTable(4), 8, pool)
    pool.share(table.pages())
    appended = table.append(1, pool)
    assert appended is not None and appended.copied is None and len(appended.taken) == 1


def test_nothing_changes_when_pages_are_short() -> None:
    pool = PagePool(2)
    table = grown(PageTable(4), 6, pool)
    assert table.append(3, pool) is None
    pool.share(table.pages())
    assert table.append(1, pool) is None  # no page for the copy
    assert [pool.count(PageId(p)) for p in range(2)] == [2, 2]


@pytest.mark.parametrize(("pages", "length", "page_tokens"), [(2, 4, 4), (0, 1, 4), (1, 1, 0)])
def test_a_table_fits_its_pages(pages: int, length: int, page_tokens: int) -> None:
    with pytest.raises(AccountingBug):
        PageTable.of([PageId(i) for i in range(pages)], length, page_tokens)


def test_negative_growth_is_a_bug() -> None:
    with pytest.raises(AccountingBug):
        PageTable(4).append(-1, PagePool(1))


class ForkMachine(RuleBasedStateMachine):
    """Sequences that fork and write. Model: the text each one ought to read back, kept in page memory that is really
    written and really copied; a missing copy shows as another sequence's letter."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(40)
        self.memory: dict[PageId, list[int]] = {}
        self.tables: list[PageTable] = []
        self.texts: list[list[int]] = []
        self.letter = 0

    @rule()
    def start(self) -> None:
        self.tables.append(PageTable(3))
        self.texts.append([])

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), tokens=st.integers(0, 8))
    def write(self, data: st.DataObject, tokens: int) -> None:
        i = data.draw(st.integers(0, len(self.tables) - 1))
        start = self.tables[i].length
        appended = self.tables[i].append(tokens, self.pool)
        if appended is None:
            return
        for page in appended.taken:
            self.memory[page] = [-1] * 3
        if appended.copied is not None:
            self.memory[appended.copied[1]] = list(self.memory[appended.copied[0]])
        self.tables[i] = appended.table
        pages = list(appended.table.pages())
        for place in range(start, start + tokens):
            self.letter += 1
            self.memory[pages[place // 3]][place % 3] = self.letter
            self.texts[i].append(self.letter)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.tables) - 1))
        self.pool.share(self.tables[i].pages())
        self.tables.append(self.tables[i])
        self.texts.append(list(self.texts[i]))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.tables) - 1))
        self.pool.drop(self.tables.pop(i).pages())
        self.texts.pop(i)

    @invariant()
    def everybody_reads_its_own_text(self) -> None:
        self.pool.check()
        for table, text in zip(self.tables, self.texts, strict=True):
            pages = list(table.pages())
            assert [self.memory[pages[i // 3]][i % 3] for i in range(len(text))] == text
        assert self.pool.held == len({page for table in self.tables for page in table.pages()})


TestForkMachine = ForkMachine.TestCase
