"""The nouns of the core: frozen values that the scheduler, the adapters and the shell pass to each other.

A *page* is a fixed number of tokens of KV and the unit of accounting. A *seat* is a place in the running batch.
Nothing here does I/O, reads a clock or draws a random number.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal, NewType

from attrs import field, frozen

RequestId = NewType("RequestId", int)
PageId = NewType("PageId", int)


class PoolMode(Enum):
    """How a runtime lays out its KV memory; it decides what can go wrong, hence what is reserved.

    * ``SPLIT``: every slot owns a context. A request is bounded by that context; other requests cannot hurt it.
    * ``UNIFIED``: one pool for all slots, and running out of it ends *every* running request. The sum of prompt and
      reserved answer over the running requests must fit.
    * ``UNKNOWN``: the figures are configured, or the runtime pages and preempts by itself (vLLM). Running out costs
      speed, not requests.
    """

    SPLIT = "split"
    UNIFIED = "unified"
    UNKNOWN = "unknown"


@frozen
class Limits:
    """What a backend can hold. ``pages`` counts device pages of ``page_tokens`` tokens each.

    ``request_tokens_max`` caps prompt + answer of one request (None: not known). ``shares_prefix`` says whether two
    *running* sequences with a common prefix occupy its pages once (vLLM) or each for itself (llama.cpp slots). When
    it is False a cached prefix can be taken over by one running request, never by two at a time.
    ``context_varies``: the runtime chooses the context by model and request, so ``request_tokens_max`` is what it has
    now and no proof that a longer prompt cannot fit.
    ``source`` says in words where the figures come from. ``host_pages`` is the size of the host tier.
    """

    mode: PoolMode
    seats: int
    pages: int
    page_tokens: int
    request_tokens_max: int | None = None
    shares_prefix: bool = False
    host_pages: int = 0
    source: str = "configured"
    context_varies: bool = False


@frozen
class PageKey:
    """Names one full page of a prompt: a hash chained over all pages before it, and the page's own content.

    ``digest`` is a hint for lookup; ``content`` (packed token ids or UTF-8 text of the page) is compared on a hit, so
    a hash collision cannot hand one prompt the pages of another.
    """

    digest: bytes = field(repr=lambda d: d.hex()[:8])
    content: bytes = field(repr=lambda c: f"{len(c)} bytes")


class CountSource(Enum):
    """How a prompt's length and page keys were obtained."""

    EXACT = "exact"
    ESTIMATED = "estimated"


class Priority(Enum):
    """Priority classes, most urgent first."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


class EndReason(Enum):
    """Why a request left the scheduler, as the shell reports it."""

    FINISHED = "finished"
    CANCELLED = "cancelled"  # the client left, or gave up
    FAILED = "failed"  # the runtime or the network
    STALLED = "stalled"  # the client stopped reading
    TRUNCATED = "truncated"  # we ended it for lack of pages
    PREEMPTED = "preempted"  # it gave way, and goes on later: its client is still there


class RefuseReason(Enum):
    """Why the scheduler turned a request away. Each maps to one error of ``kvstream.errors``."""

    TOO_LONG = "too_long"  # can never fit: 400 context_length_exceeded
    QUEUE_FULL = "queue_full"
    QUEUE_BYTES = "queue_bytes"
    TIMEOUT = "timeout"  # waited until its deadline
    CLOSING = "closing"  # draining
    BACKEND_DOWN = "backend_down"
    SHED = "shed"  # it would wait past its deadline, so it is told now: 503 with the time when it would fit


Why = Literal[
    "seat",  # the lane is full
    "pages",  # the next in line lacks KV pages, or this one would delay it
    "narrowed",  # the lane is held narrow: its backend failed, or comes back
    "backend",  # the backend is not there, or its capacity is not known yet
    "client",  # its client has as many seats as it may
    "model",  # another model is being served, and only one at a time may be
    "cold",  # the first request of its model goes alone, until it is loaded
    "retry",  # the runtime is about to let go of this very prompt: its slot will have it in cache
    "leader",  # another request computes a prefix that this one shares
    "long_prefill",  # as many long prompts are being read as may at a time
    "slot",  # no slot of the runtime is known to be idle, or the one with its prefix is about to be
    "preempted",  # it gave way to a request that has not started yet
]
"""Why a request waits."""

HOLDS: tuple[Why, ...] = ("client", "model", "cold", "retry", "leader", "long_prefill", "slot", "preempted")
"""Those that hold a request back although there may be a seat for it."""


class AccountingBug(Exception):
    """The core was told, or has computed, something that cannot be: a page dropped twice, one request submitted
    twice. Never raised for load. The process should end: corrupt accounting must not keep serving."""


class Tier(Enum):
    """Where pages live."""

    DEVICE = "device"
    HOST = "host"


# --- hard inject: the runtime's slots, and their KV in files ----------------------------------------------------------


@frozen
class SlotRules:
    """How the slots of a runtime may be used. Known after the self-check; without it nothing is pinned or saved.

    ``slots`` counts them. ``pinned``: a request may name the slot it runs in. Where it may not (a runtime that empties
    idle slots), a restore is followed by a request that the runtime places by itself. ``identity`` is hex text that
    begins the name of every file: files of another model, context or build have another one. ``token_bytes`` and
    ``fixed_bytes`` are what a saved slot costs on disk, 0 while unknown.
    """

    slots: int
    pinned: bool = True
    identity: str = ""
    token_bytes: float = 0.0
    fixed_bytes: int = 0


SaveWhy = Literal[
    "evict",  # another request is about to overwrite the slot
    "fork",  # waiting requests share what was just read
    "hot",  # it was reused, and the slot is idle
    "swap",  # a victim gives way
    "drain",  # KVStream stops
]
"""Why a slot is saved."""


@frozen
class SaveSpec:
    """One slot to one file. ``name`` matches ``[a-z0-9]{1,80}.kv``. ``keys`` name the full pages that the slot is known
    to hold from its start, ``tokens`` is the least it must hold: a save of fewer is thrown away."""

    name: str
    keys: tuple[PageKey, ...] = field(repr=lambda keys: f"{len(keys)} pages")
    tokens: int
    why: SaveWhy


@frozen
class SlotPlan:
    """What a granted request does, in this order, with the slot that is its own from the grant until the runtime was
    seen to be done with it: ``save`` what it holds; ``erase`` these slots (a unified pool needs the cells); ``restore``
    the file of that name into it; with ``read_first`` read the prompt without answering and wait for ``Proceed``; send
    the request. ``slot`` None: the runtime chooses. ``tokens_cached`` is what is promised of the prompt, from the slot
    itself or from the file."""

    slot: int | None
    tokens_cached: int = 0
    save: SaveSpec | None = None
    erase: tuple[int, ...] = ()
    restore: str | None = None
    read_first: bool = False


@frozen
class SavedPrefix:
    """One file of the store. ``tokens`` it holds (at least those of ``keys``), ``bytes`` on disk, ``used_at`` on the
    scheduler's clock, ``hits`` how often it was restored to use."""

    name: str
    keys: tuple[PageKey, ...] = field(repr=lambda keys: f"{len(keys)} pages")
    tokens: int
    bytes: int
    used_at: float = 0.0
    hits: int = 0
