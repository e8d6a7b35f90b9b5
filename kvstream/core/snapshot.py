"""What an operator may see of a scheduler at one moment: frozen copies, safe to hand to any task."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from .ledger import Ledger
from .pool import PagePool
from .saved import SavedStore
from .slots import SlotMap
from .state import Running, Tally, Waiting
from .types import Limits, Priority, RefuseReason, RequestId, Tier, Why


@frozen
class WaitingView:
    """``position`` counts from 1, the next to be admitted if nothing held it back; ``why`` says what does."""

    rid: RequestId
    position: int
    age_s: float
    tokens: int
    priority: Priority
    client: str
    why: Why
    group: str

    @classmethod
    def of(cls, waiting: Waiting, position: int, now: float, why: Why) -> WaitingView:
        age_s = now - waiting.arrived
        return cls(
            waiting.rid, position, age_s, waiting.tokens, waiting.priority, waiting.client, why, waiting.group)


@frozen
class RunningView:
    """``tokens`` is prompt + answer so far, ``tokens_cached`` the part of the prompt expected in the runtime's cache,
    ``age_s`` the time since admission."""

    rid: RequestId
    tokens: int
    pages: int
    tokens_cached: int
    age_s: float
    draining: bool
    client: str

    @classmethod
    def of(cls, run: Running, now: float) -> RunningView:
        table = run.table
        age_s = now - run.admitted
        return cls(run.rid, table.length, table.pages_held, run.tokens_cached, age_s, run.draining, run.client)


@frozen
class Seats:
    """``total`` may be used, ``used`` are taken, of which ``draining`` wait for the runtime to notice the end."""

    total: int
    used: int
    draining: int


@frozen
class TierPages:
    """Distinct pages: total + overdrawn = free + held. ``cached`` are held by the tree alone and can be evicted;
    ``promised`` are set aside for answers, out of free and cached."""

    tier: Tier
    total: int
    free: int
    held: int
    cached: int
    promised: int
    overdrawn: int

    @classmethod
    def of(cls, pool: PagePool, cached: int = 0) -> TierPages:
        return cls(pool.tier, pool.total, pool.free, pool.held, cached, pool.promised, pool.overdrawn)


@frozen
class Counters:
    """Totals since the start."""

    admitted: int
    refused: Mapping[RefuseReason, int]
    ended: int
    prefix_tokens_accounted: int
    pages_evicted: int
    truncated: int
    backfilled: int
    held: Mapping[Why, int]
    preempted: int = 0
    resumed: int = 0

    @classmethod
    def of(cls, tally: Tally, ledger: Ledger | None) -> Counters:
        return cls(
            admitted=tally.admitted,
            refused=dict(tally.refused),
            ended=tally.ended,
            prefix_tokens_accounted=ledger.tokens_cached if ledger else 0,
            pages_evicted=ledger.evicted if ledger else 0,
            truncated=tally.truncated,
            backfilled=tally.backfilled,
            held=dict(tally.held),
            preempted=tally.preempted,
            resumed=tally.resumed,
        )


@frozen
class SlotView:
    """One slot of the runtime: ``owner`` runs in it, ``tokens`` of which we know what they are are in it. ``state`` is
    "owned", "saving", "idle" or "unknown" (somebody we do not know may be at work in it)."""

    slot: int
    owner: RequestId | None
    tokens: int
    state: str


@frozen
class StoreView:
    """Files of saved KV; ``bytes`` and ``pages`` include those that are being written. ``evicted`` (for room, or unused
    for too long) and ``replaced`` (by a longer one that begins with it) count since the start."""

    files: int
    bytes: int
    bytes_max: int
    pages: int
    tokens: int
    evicted: int
    replaced: int = 0

    @classmethod
    def of(cls, store: SavedStore | None) -> StoreView | None:
        if store is None:
            return None
        entries = store.entries()
        tokens = sum(entry.tokens for entry in entries)
        return cls(len(entries), store.bytes, store.bytes_max, store.pages, tokens, store.evicted,
                   store.replaced)


def slot_views(slots: SlotMap | None) -> tuple[SlotView, ...]:
    """The slots for people; none where nothing is pinned."""
    if slots is None:
        return ()
    return tuple(SlotView(slot.index, slot.owner, slot.tokens, slot.state) for slot in slots.slots)


@frozen
class Snapshot:
    """``waiting`` is capped, ``waiting_total`` is not. ``held`` counts those that wait behind a gate, by its reason
    (none while the backend is not there).
    ``limit`` is how many may run while the lane is narrowed (None: it is not). ``limits`` is None before the first
    ``BackendUp``. ``slots`` is empty where nothing is pinned, ``store`` None where nothing is saved."""

    now: float
    waiting: tuple[WaitingView, ...]
    waiting_total: int
    waiting_bytes: int
    held: Mapping[Why, int]
    limit: int | None
    running: tuple[RunningView, ...]
    up: bool
    closing: bool
    seats: Seats
    pages: tuple[TierPages, ...]
    prefix_nodes: int
    prefix_tokens: int
    limits: Limits | None
    overdrawn: int
    ends_per_s: float | None
    counters: Counters
    slots: tuple[SlotView, ...] = ()
    store: StoreView | None = None

    @property
    def draining(self) -> int:
        return self.seats.draining
