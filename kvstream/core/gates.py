"""Who has to wait although there are a seat and pages: gates, each bounded by the life of a running request.

Theory of operation. ``Gates.gate`` is asked about the request that would be admitted next and names the first gate that
is closed for it; the queue then puts it aside with all that wait for the same, and the next in line is looked at. A
gate is closed only by requests that *run*, so when one of them gets its first token or ends, the gate opens in the
same step and those behind it stand where their claims put them. Hence nobody is forgotten behind a gate, an idle lane
has none, and a held request delays nobody else.

* ``long_prefill``: a prompt of many uncached tokens stalls the streams that decode beside it, so few are read at once.
* ``leader``: somebody reads a prefix that this one shares and that is nowhere cached. Where running requests share
  pages it waits for the first token, and then pays only for its own rest. Where slots are saved and restored it waits
  for the file of a prompt that is read first. Elsewhere a second copy is needed anyhow, so waiting would help nobody.
* ``retry``: a request that gave up is still at work in the runtime, with a prefix that this one shares. Its slot will
  have that in its cache in a moment; another slot would start from nothing. One request waits for each such slot.
* ``slot``: see ``inject``; what counts as cached there is what placement finds in a slot or a file.
* ``client``: its client has its share of seats. And ``cold`` and ``model``: see ``groups``.

Whether two prompts share their first n pages is one comparison, since keys are chained. What counts is the part that is
not cached anyway and can be: ``n = pages cached + pages of leader_tokens``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from .groups import Groups
from .inject import Inject
from .ledger import Ledger
from .queue import WaitingQueue
from .settings import SchedulerSettings
from .state import Gate, Running, Waiting
from .types import RequestId

LONG: Final[Gate] = ("long_prefill", 0)
RETRY_WORTH_S: Final = 1.0  # a prompt given up sooner is read again as soon


class Gates:
    """The gates of one lane. ``running`` is the scheduler's own."""

    __slots__ = ("_clients", "_draining", "_filling", "_inject", "_long", "_queue", "_running", "_settings", "groups")

    def __init__(
        self, settings: SchedulerSettings, queue: WaitingQueue, running: dict[RequestId, Running], inject: Inject
    ) -> None:
        self._inject = inject
        self._settings = settings
        self._queue = queue
        self._running = running
        self.groups = Groups(settings, queue)
        self._long: set[RequestId] = set()  # long prompts being read, also for clients that have left
        self._filling: dict[RequestId, Running] = {}  # prompts being read for clients that want them
        self._draining: dict[RequestId, Running] = {}
        self._clients: dict[str, int] = {}  # seats by client

    def gate(self, waiting: Waiting, ledger: Ledger, now: float) -> Gate | None:
        """The gate that keeps this request from being admitted now, were there place for it."""
        cap = self._settings.client_seats_max
        if cap:
            used = self._clients.get(waiting.client, 0)
            if used and used + min(waiting.seats, cap) > cap:
                return "client", waiting.client
        gate = self.groups.gate(waiting, now)
        if gate is not None:
            return gate
        inject = self._inject
        leaders = inject.leaders if inject.is_on else self._filling if ledger.limits.shares_prefix else {}
        gate = inject.gate(waiting, ledger, now) if inject.slots is not None else None
        many = self._is_long_closed and waiting.tokens > self._settings.long_prefill_tokens
        if not (many or self._draining or leaders):
            return gate
        cached = inject.choice(waiting, ledger, now).pages if inject.is_on else len(ledger.cached_run(waiting, now))
        first = self._first_shared(waiting, cached, ledger)
        if first is not None:
            other = _sharing(self._draining.values(), waiting, first, ledger.epoch)
            if other is not None and _is_worth(other):
                retry: Gate = "retry", other.rid
                if waiting.gate == retry or not self._queue.holds(retry):
                    return retry
            if leaders and not waiting.alone:
                other = _sharing(leaders.values(), waiting, first, ledger.epoch)
                if other is not None:
                    return "leader", other.rid
        if gate is not None:
            return gate
        return LONG if many and self._is_long(waiting.tokens, cached, ledger) else None

    def _first_shared(self, waiting: Waiting, cached: int, ledger: Ledger) -> int | None:
        """The page that two prompts must have in common to be worth waiting for; None if there is no such page, or
        it would not be kept. The last page of a prompt is never taken from the cache."""
        tokens = self._settings.leader_tokens
        if not tokens or not self._settings.prefix_enabled:
            return None
        page = cached + ledger.pages_for(tokens) - 1
        kept = min(len(waiting.keys), ledger.tree.pages_max, (waiting.tokens - 1) // ledger.limits.page_tokens)
        return page if page < kept else None

    @property
    def _is_long_closed(self) -> bool:
        return 0 < self._settings.long_prefills_max <= len(self._long)

    def _is_long(self, tokens: int, cached: int, ledger: Ledger) -> bool:
        return tokens - cached * ledger.limits.page_tokens > self._settings.long_prefill_tokens

    # --- what happens to running requests ---------------------------------------------------------------------------

    def started(self, run: Running, now: float) -> None:
        self._clients[run.client] = self._clients.get(run.client, 0) + run.seats
        self.groups.started(run, now)
        self._filling[run.rid] = run
        if run.tokens - run.tokens_cached > self._settings.long_prefill_tokens:
            self._long.add(run.rid)

    def alive(self, run: Running, now: float) -> bool:
        """A first token: its prompt has been read. Whether somebody waited for that."""
        run.filling = False
        self.groups.alive(run, now)
        return self._read(run)

    def was_read(self, run: Running) -> bool:
        """Its prompt has been read, but no token of its answer made. Whether somebody waited for that."""
        if run.rid not in self._long:
            return False
        self._long.remove(run.rid)
        return self._queue.release(LONG)

    def over(self, run: Running, now: float) -> None:
        """Its client is done with it; the runtime drains."""
        run.over_at = now
        self._filling.pop(run.rid, None)
        self._inject.leaders.pop(run.rid, None)
        self._queue.release(("leader", run.rid), for_good=True)
        self.groups.over(run, now)
        self._draining[run.rid] = run

    def closed(self, run: Running, now: float) -> None:
        """It holds nothing any more."""
        run.filling = False
        self._read(run)
        if self._draining.pop(run.rid, None) is not None:
            self._queue.release(("retry", run.rid), for_good=True)
        self.groups.over(run, now)
        self.groups.closed(run)
        left = self._clients[run.client] - run.seats
        if left:
            self._clients[run.client] = left
        else:
            del self._clients[run.client]
        if self._settings.client_seats_max:
            self._queue.release(("client", run.client))

    def _read(self, run: Running) -> bool:
        self._filling.pop(run.rid, None)
        opened = self._queue.release(("leader", run.rid), for_good=True)
        return self.was_read(run) or opened

    def check(self) -> None:
        """Raise AssertionError unless what the gates count is so, and every one that is closed has its reason."""
        running = self._running
        self.groups.check(running)
        assert self._long <= running.keys() and self._filling.keys() <= running.keys()
        assert set(self._draining) == {rid for rid, run in running.items() if run.draining}
        assert set(self._filling) == {r for r, run in running.items() if run.filling and not run.draining}
        most = self._settings.long_prefills_max
        assert not most or len(self._long) <= most, "too many long prompts are being read"
        seats: dict[str, int] = {}
        for run in running.values():
            seats[run.client] = seats.get(run.client, 0) + run.seats
        assert seats == self._clients, "seats of a client miscounted"
        for section in self._queue.held():
            why, what = section.gate
            assert why != "long_prefill" or self._is_long_closed, "somebody waits for a gate that is open"
            leaders = self._inject.leaders if self._inject.is_on else self._filling
            assert why != "leader" or (what in self._filling and what in leaders), "a leader that does not lead"
            assert why != "retry" or (what in self._draining and section.count == 1), "a retry for nothing"
            assert why != "client" or what in self._clients, "a client held back although it has no seat"


def _sharing(runs: Iterable[Running], waiting: Waiting, page: int, epoch: int) -> Running | None:
    """One of ``runs`` whose prompt is the same up to and with ``page``, in the runtime's present life."""
    digest = waiting.keys[page].digest
    for run in runs:
        if len(run.keys) > page and run.keys[page].digest == digest and run.epoch == epoch:
            return run
    return None


def _is_worth(run: Running) -> bool:
    """Whether so much of a draining request's prompt was read that its slot is worth waiting for."""
    return run.computed or (run.over_at is not None and run.over_at - run.admitted >= RETRY_WORTH_S)
