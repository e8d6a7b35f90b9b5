"""What goes into ``Scheduler.step`` and what comes out: frozen messages, no behaviour.

Events say what happened; actions say what the shell must do. Times are seconds on one monotonic clock, given by the
caller. Token counts include special tokens.
"""

from __future__ import annotations

from typing import Union

from attrs import frozen

from .table import PageTable
from .types import (
    CountSource,
    EndReason,
    Limits,
    PageKey,
    Priority,
    RefuseReason,
    RequestId,
    SavedPrefix,
    SaveSpec,
    SlotPlan,
    SlotRules,
)

# --- events ---------------------------------------------------------------------------------------------------------


@frozen
class Submitted:
    """A request wants in.

    ``keys`` name the full pages of the prompt in order (possibly fewer than ``tokens // page_tokens``: pages without
    a key are simply not shared). ``tokens`` is the prompt length, ``tokens_max`` the most answer tokens it may
    produce (None: the client set no limit). ``deadline`` is the absolute time at which a request that still waits is
    refused. ``arrived`` is when it came, which decides its place in the queue (None: now): counting takes time, and a
    long prompt must not lose its place to a short one that came later. ``bytes`` is the size of the held body and
    counts against the queue's byte bound. ``seats`` is how many places of the batch it takes: several choices or
    several prompts run side by side in the runtime. ``client`` is who shares seats fairly with others, ``weight`` the
    size of its share. ``group`` names what the runtime must have loaded to serve it (a model, and its load options).
    ``again`` says that it had its seat, and nobody saw it: it is no newcomer, so no bound of the queue turns it away.
    ``pinnable``: it may name its slot. ``exact``: its keys are of the very token ids that the runtime will see, so a
    promise about them can be kept. ``preemptible``: it can be stopped and resumed, and its client cannot tell.
    """

    rid: RequestId
    keys: tuple[PageKey, ...]
    tokens: int
    tokens_max: int | None
    deadline: float
    priority: Priority = Priority.NORMAL
    client: str = ""
    bytes: int = 0
    count_source: CountSource = CountSource.ESTIMATED
    arrived: float | None = None
    seats: int = 1
    weight: float = 1.0
    group: str = ""
    again: bool = False
    pinnable: bool = False
    exact: bool = False
    preemptible: bool = False


@frozen
class Recounted:
    """A waiting request's prompt has been counted again (exactly, now that the runtime answers)."""

    rid: RequestId
    keys: tuple[PageKey, ...]
    tokens: int
    count_source: CountSource = CountSource.EXACT


@frozen
class Produced:
    """``tokens`` more answer tokens of a running request are in the runtime's KV."""

    rid: RequestId
    tokens: int


@frozen
class Ended:
    """A request is over, waiting or running, for any reason. Idempotent: an unknown rid is ignored.

    ``tokens`` is the exact answer length when the runtime reported one (None: trust what ``Produced`` added up to).
    ``draining`` says that the runtime may still be busy with it: seat and pages stay taken until ``SeatIdle``.
    """

    rid: RequestId
    reason: EndReason
    tokens: int | None = None
    draining: bool = False


@frozen
class SeatIdle:
    """The runtime is done with a request that ended while draining; ``capped``: it was not seen to be, but waiting for
    that has been given up, so its slot may still be at work."""

    rid: RequestId
    capped: bool = False


@frozen
class BackendUp:
    """The backend answers, with these limits. Also sent when the limits changed. ``fresh`` says that the runtime was
    restarted or lost its KV, so cached prefixes are forgotten. ``ramp`` says that it comes back from an outage: one
    request is admitted first, and every sign of life doubles how many may run, up to all seats."""

    limits: Limits
    fresh: bool = False
    ramp: bool = False


@frozen
class Narrowed:
    """At most ``seats`` requests that were admitted after this may run at a time; 0 admits none, None lifts it.
    Requests that run already are not touched. A later one replaces it, and counts anew."""

    seats: int | None


@frozen
class Warmed:
    """The runtime is known to have loaded ``group``: its requests need no pioneer."""

    group: str


@frozen
class BackendDown:
    """The backend does not serve now. Nothing is admitted; waiting requests wait, until their deadline, for
    ``BackendUp``. With ``refuse`` they and all newcomers are refused at once (BACKEND_DOWN)."""

    refuse: bool = False


@frozen
class Closing:
    """Drain: refuse newcomers; with ``refuse_waiting`` also those in the queue."""

    refuse_waiting: bool = True


# --- events of hard inject ------------------------------------------------------------------------------------------


@frozen
class SlotsKnown:
    """The self-check is done: slots may be used by these rules, or (None) not at all. A change of ``identity`` makes
    every saved prefix of another one invisible."""

    rules: SlotRules | None


@frozen
class StoreLoaded:
    """These files are on disk, all of the present identity. Replaces what was known of the store."""

    entries: tuple[SavedPrefix, ...]


@frozen
class SlotsLost:
    """The slots hold nothing any more, or nobody knows what: the runtime slept, was restarted, or others used it."""


@frozen
class SlotsLook:
    """A look at the slots, taken while no call of ours was on its way to any: ``tokens`` that each holds (None: not
    told), and which are ``busy``."""

    tokens: tuple[int | None, ...]
    busy: frozenset[int]


@frozen
class SlotStarted:
    """The headers of a running request came: a slot has it."""

    rid: RequestId


@frozen
class Restored:
    """The restore of a running request's plan was carried out, or failed: then the slot is empty and the file gone."""

    rid: RequestId
    name: str
    ok: bool
    bytes: int = 0
    seconds: float = 0.0


@frozen
class PromptRead:
    """A request with ``read_first`` has its whole prompt in its slot, which is idle, and waits for ``Proceed``.
    ``cached`` of its tokens were there before, ``computed`` were not, which took ``seconds``."""

    rid: RequestId
    cached: int
    computed: int
    seconds: float


@frozen
class SlotWritten:
    """The runtime wrote the file of a plan's save, and the request goes on while it is looked at: ``SlotSaved`` will
    come, also after the request is over."""

    rid: RequestId
    name: str


@frozen
class SlotSaved:
    """A save ended. ``keys`` are those of the spec, or more where the file told them; ``rid`` is who does not go on
    before it: whose plan or state it was, but nobody after ``SlotWritten``."""

    slot: int
    name: str
    ok: bool
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    keys: tuple[PageKey, ...] = ()
    rid: RequestId | None = None


@frozen
class CacheSeen:
    """What the runtime reported for a running request: ``cached`` of ``prompt`` tokens were not computed, the others
    took ``seconds`` (None: not told)."""

    rid: RequestId
    cached: int
    prompt: int
    seconds: float | None = None


@frozen
class Bound:
    """A request can no longer be preempted: its answer has something that cannot be continued."""

    rid: RequestId


Event = Union[
    Submitted, Recounted, Produced, Ended, SeatIdle, BackendUp, BackendDown, Closing, Narrowed, Warmed, Bound,
    SlotsKnown, StoreLoaded, SlotsLost, SlotsLook, SlotStarted, Restored, PromptRead, SlotWritten, SlotSaved,
    CacheSeen]

# --- actions --------------------------------------------------------------------------------------------------------


@frozen
class Admit:
    """Start it. ``table`` holds its pages, ``tokens_cached`` of its prompt are expected in the runtime's cache,
    ``reserved`` pages more are promised to its answer. ``plan`` is what happens in the runtime's slots first, None
    without hard inject. ``resumes``: it was preempted, and goes on after the tokens that its client has."""

    rid: RequestId
    table: PageTable
    tokens_cached: int
    reserved: int = 0
    plan: SlotPlan | None = None
    resumes: bool = False

    @property
    def slot(self) -> int | None:
        """The llama.cpp slot to pin, None for any."""
        return self.plan.slot if self.plan is not None else None


@frozen
class Refuse:
    """Turn it away. ``tokens`` and ``limit`` fill the message of TOO_LONG; ``retry_after_s`` is a truthful wait."""

    rid: RequestId
    why: RefuseReason
    retry_after_s: float | None = None
    tokens: int = 0
    limit: int = 0


@frozen
class Truncate:
    """End this running stream now (finish_reason "length"): in a unified pool its next page would be taken from the
    runtime's other requests and kill them all. The shell answers with ``Ended(TRUNCATED)``."""

    rid: RequestId


@frozen
class Preempt:
    """Stop this running stream's upstream; its client stays. The shell answers with ``Ended(PREEMPTED, draining)`` and,
    once the slot was seen idle, ``SeatIdle``. ``swap``: a ``SaveSlot`` of its slot will follow.
    ``evictor``: who it gives way to."""

    rid: RequestId
    swap: bool
    evictor: RequestId | None = None


@frozen
class Proceed:
    """Answer to ``PromptRead``: save the slot first if ``save`` says so (and report ``SlotSaved``), then go on."""

    rid: RequestId
    save: SaveSpec | None = None


@frozen
class SaveSlot:
    """Save an idle slot, which is kept free for that, and report ``SlotSaved``. ``rid``: the preempted request whose
    state it is."""

    slot: int
    spec: SaveSpec
    rid: RequestId | None = None


@frozen
class Forget:
    """Delete this file of the store, before anything that follows in the same list is done."""

    name: str


Action = Union[Admit, Refuse, Truncate, Preempt, Proceed, SaveSlot, Forget]
