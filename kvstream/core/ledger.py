"""The books of one lane: which pages exist, who holds them, what was promised, what may still be given away.

Theory of operation. The pool counts pages, the tree says which of them are cached prefixes, a ``Running`` holds a
table and a promise. All decisions are made in *room*:

    room = free + evictable - promised

pages that could be handed out without breaking a word given. A request needs its *entitlement*, the pages of prompt
and reserved answer, less those cached pages that running tables hold anyway (only where the runtime shares them). It
is admitted if that fits beside the watermark, or, on an otherwise idle lane, if it fits at all; so whatever passed the
TOO_LONG check can always be served. Cached pages are evicted one by one, least recently used first, at the moment when
a page is really taken, not when it is promised: most promises are not used up.

Then ``promised <= free + evictable`` holds after every step, so a promise can be redeemed whenever it is called for.
Three things may break it, each visible as ``overdrawn`` or a negative room that stops admission until it is healed: the
backend shrank, a runtime of UNKNOWN layout used more than promised, or a unified one ran on before it could be stopped.

*Growth.* SPLIT: a slot's context ends at the cap, whatever is reported beyond it is not counted, and the pool is large
enough for every slot. UNIFIED: the entitlement contains one page of headroom; a request that may want more than it was
promised renews that headroom before it is used up, and if it cannot, it is to be truncated while the last page has half
its room left, because tokens are still under way when we decide. UNKNOWN: it runs on, overdrawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from math import inf
from typing import Final

from .policy import Forecast
from .pool import PagePool
from .prefix import PrefixNode, PrefixTree
from .settings import SchedulerSettings
from .state import Running, Waiting
from .table import PageTable
from .tokens import common_pages
from .types import AccountingBug, CountSource, Limits, PageId, PageKey, PoolMode, Tier

GROWTH_PAGES_MIN: Final = 64  # growth in one report that is taken as it is, also where it overdraws
ESTIMATE_FACTOR_MAX: Final = 2  # the most by which an estimate of a prompt's length is taken to be too high


class Ledger:
    """Pages of a lane whose capacity is known. ``running`` is the scheduler's own number of seats taken."""

    __slots__ = ("_settings", "epoch", "evicted", "host", "limits", "pool", "shares_slots", "tokens_cached", "tree")

    def __init__(self, settings: SchedulerSettings, limits: Limits) -> None:
        self._settings = settings
        self.pool = PagePool(0)
        self.host = PagePool(0, Tier.HOST)
        self.epoch = 0
        self.evicted = 0
        self.tokens_cached = 0
        self.shares_slots = False  # what is in several slots is counted once
        self.limits = limits
        self.tree = self._new_tree()
        self._resize()

    def set_limits(self, limits: Limits, fresh: bool) -> None:
        """The backend came up, or changed. Keys of another page size mean nothing in the old tree."""
        if fresh or limits.page_tokens != self.limits.page_tokens:
            self.renew()
            if limits.page_tokens != self.limits.page_tokens:
                self.limits = limits
                self.tree = self._new_tree()
        self.limits = limits
        self._resize()

    def renew(self) -> None:
        """Whatever is cached, nobody knows where: forget it, and do not register what runs now."""
        self.tree.clear()
        self.epoch += 1

    def _new_tree(self) -> PrefixTree:
        depth = self._settings.prefix_tokens_max // self.limits.page_tokens if self._settings.prefix_enabled else 0
        return PrefixTree(self.pool, pages_max=depth, ttl_s=self._settings.prefix_ttl_s)

    def _resize(self) -> None:
        limits = self.limits
        total = limits.pages
        if limits.mode is PoolMode.SPLIT and limits.request_tokens_max is not None:
            # Seats bind here. Pages per slot rounded down must not deny the last slot its part-filled page.
            total = max(total, limits.seats * self.pages_for(limits.request_tokens_max))
        self.pool.resize(total)
        self.host.resize(limits.host_pages)
        self._make_free(0)

    @property
    def shares(self) -> bool:
        """Whether pages that running requests have in common are counted once."""
        return self.limits.shares_prefix or self.shares_slots

    @property
    def room(self) -> int:
        """Pages that may be given away; negative while overdrawn."""
        return self.pool.total - self.pool.held + self.tree.evictable - self.pool.promised

    @property
    def watermark(self) -> int:
        """Pages that admission leaves alone. A slot's growth needs no one else's pages, hence none when SPLIT."""
        return 0 if self.limits.mode is PoolMode.SPLIT else int(self.pool.total * self._settings.watermark)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.page_tokens)

    def tokens_limit(self) -> int:
        """The longest prompt + answer that one request can have."""
        whole = self.pool.total * self.limits.page_tokens
        cap = self.limits.request_tokens_max
        return whole if cap is None else min(cap, whole)

    def can_fit(self, waiting: Waiting) -> bool:
        """Whether the prompt can ever leave place for even one answer token.

        An estimate is not proof: it is cut to what there is, and the runtime has the last word, unless it is beyond
        what any estimate can be wrong by.
        """
        limit = self.tokens_limit()
        if waiting.tokens < limit:
            return True
        certain = waiting.count_source is CountSource.EXACT or waiting.tokens > ESTIMATE_FACTOR_MAX * limit
        if certain and not self.limits.context_varies:
            return False
        waiting.tokens = limit - 1
        return True

    def entitlement(self, tokens: int, tokens_max: int | None) -> int:
        """Pages of prompt and reserved answer, clamped to what can exist."""
        answer = self._settings.answer_tokens_default if tokens_max is None else tokens_max
        pages = self.pages_for(min(tokens + max(1, answer), max(tokens, self.tokens_limit())))
        if self.limits.mode is PoolMode.UNIFIED:
            pages += 1
        return max(self.pages_for(tokens), min(pages, self.pool.total))

    def cached_run(self, waiting: Waiting, now: float) -> list[PrefixNode]:
        """The cached pages that this request could start from. Never the prompt's last page: the runtime has to
        evaluate at least one token to answer."""
        pages = max(0, min(len(waiting.keys), (waiting.tokens - 1) // self.limits.page_tokens))
        run = self.tree.match(waiting.keys, pages, now)
        if not self.shares:
            # One slot's cells serve one running request. Locks only ever shrink along a path.
            return [] if run and run[0].locks else run
        return run

    def charge(self, waiting: Waiting, run: list[PrefixNode]) -> int:
        """Room that admitting it takes: cached pages count too unless another table holds them already."""
        return waiting.pages - sum(1 for node in run if node.locks)

    def charge_least(self, waiting: Waiting) -> int:
        """The least that ``charge`` could come to, without looking anything up."""
        return waiting.pages - (min(len(waiting.keys), self.tree.locked) if self.shares else 0)

    def available(self, running: int) -> int:
        """The largest charge that fits now, beside ``running`` requests. Negative while anything is overdrawn, since
        nothing evictable is kept then."""
        return self.room - self.watermark if running else self.room

    def open(self, waiting: Waiting, run: list[PrefixNode], now: float, cached: int | None = None) -> Running:
        """Give a request that ``fits`` its table and its promise. ``cached`` tokens of its prompt are expected in the
        runtime (None: those of ``run``)."""
        self.tree.lock(run, now)
        prompt_pages = self.pages_for(waiting.tokens)
        fresh = prompt_pages - len(run)
        self._make_free(fresh)
        taken = self.pool.try_take(fresh, reclaimable=self.tree.evictable)
        promised = waiting.pages - prompt_pages
        if taken is None or not self.pool.try_promise(promised, reclaimable=self.tree.evictable):
            raise AccountingBug(f"request {waiting.rid} fits, yet {fresh} + {promised} pages are not there")
        tokens_cached = len(run) * self.limits.page_tokens if cached is None else cached
        self.tokens_cached += tokens_cached
        return Running(
            rid=waiting.rid,
            asked=waiting,
            keys=waiting.keys,
            tokens=waiting.tokens,
            tokens_max=waiting.tokens_max,
            client=waiting.client,
            group=waiting.group,
            seats=waiting.seats,
            arrived=waiting.arrived,
            admitted=now,
            table=PageTable.of([*(node.page for node in run), *taken], waiting.tokens, self.limits.page_tokens),
            path=run,
            promised=promised,
            pages=waiting.pages,
            epoch=self.epoch,
            tokens_cached=tokens_cached,
            exact=waiting.exact,
        )

    def share_prompt(self, run: Running, now: float) -> None:
        """The prompt of a running request is computed. Where running requests share pages, later ones may use it now,
        not only when this one has ended."""
        if self.shares and run.epoch == self.epoch and self._settings.prefix_enabled:
            full = min(len(run.keys), run.tokens // run.table.page_tokens)
            run.path = self.tree.extend(run.path, run.keys[:full], run.table.first_pages(full), now)

    def grow(self, run: Running, tokens: int) -> bool:
        """Account for answer tokens that are in the runtime's KV already; True when the request must be stopped."""
        mode, cap = self.limits.mode, self.limits.request_tokens_max
        if mode is PoolMode.SPLIT and cap is not None:
            tokens = max(0, min(tokens, cap - run.table.length))
        elif tokens > run.table.page_tokens * GROWTH_PAGES_MIN:
            # No report of ours is that large, so it is a runtime's own count, and nobody checked it: not beyond what
            # one request can have, or one absurd number would have us make a page for each of a billion tokens.
            tokens = min(tokens, max(run.table.page_tokens * GROWTH_PAGES_MIN, self.tokens_limit() - run.table.length))
        appended = run.table.append(tokens, self.pool, partial(self._growth, run))
        assert appended is not None  # growth always finds pages, at worst overdrawn ones
        run.table = appended.table
        return mode is PoolMode.UNIFIED and not run.draining and self._is_at_its_end(run)

    def _growth(self, run: Running, n: int) -> tuple[PageId, ...]:
        # The runtime has used this memory, so there is nothing to refuse: own promise first, then what is free or
        # cached, then pages that do not exist. Not eating other promises in a unified pool is ``_is_at_its_end``.
        kept = min(n, run.promised)
        run.promised -= kept
        run.pages += n - kept
        self._make_free(n)
        return self.pool.redeem(kept) + self.pool.overdraw(n - kept)

    def _is_at_its_end(self, run: Running) -> bool:
        table = run.table
        if run.promised == 0 and self.pool.try_promise(1, reclaimable=self.tree.evictable):
            run.promised = 1
            run.pages += 1
        left = run.tokens_left
        capacity = table.room + run.promised * table.page_tokens
        if run.promised or (left is not None and left <= capacity):
            return False
        return table.room <= table.page_tokens // 2

    def close(self, run: Running, now: float, register: bool) -> None:
        """Take everything back; remember the prompt's full pages as a cached prefix if ``register``."""
        self.pool.release(run.promised)
        run.promised = run.pages = 0
        self.tree.unlock(run.path, now)
        if register and run.epoch == self.epoch and self._settings.prefix_enabled:
            full = min(len(run.keys), run.tokens // run.table.page_tokens)
            self.tree.insert(run.keys[:full], run.table.first_pages(full), now)
        self.pool.drop(run.table.pages())
        run.path, run.table = (), PageTable(run.table.page_tokens)
        self._make_free(0)

    def forget(self, lost: Sequence[PageKey], kept: Iterable[Sequence[PageKey]]) -> None:
        """A slot does not hold the pages ``lost`` any more; ``kept`` is what the others hold, and what this one does
        now. Cached pages that are in none of them are forgotten, and whatever continues them: a node stands for content
        that is somewhere. Tables that run on such pages keep them. O(slots + pages that go)."""
        depth = max((common_pages(lost, keys) for keys in kept), default=0)
        self.evicted += self.tree.prune(lost, depth)
        self._make_free(0)

    def check_held(self, held: Iterable[Sequence[PageKey]]) -> None:
        """Raise AssertionError if a cached page that nobody runs on is in none of the slots that hold these pages."""
        digests = {key.digest for keys in held for key in keys}
        for node in self.tree.nodes():
            assert node.locks or node.key.digest in digests, "a cached page that no slot holds"

    def forecasts(self, running: Iterable[Running], head: Waiting, head_run: list[PrefixNode]) -> list[Forecast]:
        """What each running request gives back towards the head's charge, and when. A draining one is over as soon as
        the runtime notices. Pages that stay with others, or that the head was not charged for, are not counted."""
        rid = head.rid
        return [
            (
                0 if run.draining else inf if run.tokens_max is None else run.tokens_max - run.produced,
                run.pages - self._pages_staying(run, head_run) if run.path else run.pages,
                run.passed == rid,
            )
            for run in running
        ]

    def _pages_staying(self, run: Running, head_run: list[PrefixNode]) -> int:
        if not self.shares:
            return 0
        common = sum(1 for mine, its in zip(run.path, head_run, strict=False) if mine is its)
        return common + sum(1 for node in run.path[common:] if node.locks > 1)

    def expire(self, now: float) -> None:
        self.evicted += self.tree.expire(now, self._settings.expiries_per_step_max)

    def _make_free(self, n: int) -> None:
        """Evict until ``n`` pages are free, or nothing evictable is left."""
        missing = n - (self.pool.total - self.pool.held)
        if missing > 0:
            self.evicted += self.tree.evict(missing)

    def check(self, running: list[Running]) -> None:
        """Every page's count is the number of tables and nodes that name it, and so for locks and promises."""
        self.pool.check()
        self.tree.check()
        assert not (self.pool.overdrawn and self.tree.evictable), "overdrawn although cached pages could be evicted"
        owners: dict[PageId, int] = {}
        for node in self.tree.nodes():
            owners[node.page] = owners.get(node.page, 0) + 1
        locks: dict[int, int] = {}
        for run in running:
            assert run.pages == run.table.pages_held + run.promised, "pages of a running request miscounted"
            assert run.table.length <= run.table.pages_held * run.table.page_tokens, "a table beyond its pages"
            for page in run.table.pages():
                owners[page] = owners.get(page, 0) + 1
            for node in run.path:
                locks[id(node)] = locks.get(id(node), 0) + 1
        assert self.pool.held == len(owners), "a page is held by nobody we know"
        assert all(self.pool.count(page) == n for page, n in owners.items()), "a count that is not its owners"
        assert all(node.locks == locks.get(id(node), 0) for node in self.tree.nodes()), "a lock without a table"
        assert self.pool.promised == sum(run.promised for run in running), "a promise to nobody"
