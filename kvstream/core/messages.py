"""What goes into ``Scheduler.step`` and what comes out: frozen messages, no behaviour.

Events say what happened; actions say what the shell must do. Times are seconds on one monotonic clock, given by the
caller. Token counts include special tokens.
"""

from __future__ import annotations

from typing import Union

from attrs import frozen

from .table import PageTable
from .types import CountSource, EndReason, Limits, PageKey, Priority, RefuseReason, RequestId

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
    """The runtime is done with a request that ended while draining."""

    rid: RequestId


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


Event = Union[Submitted, Recounted, Produced, Ended, SeatIdle, BackendUp, BackendDown, Closing, Narrowed, Warmed]

# --- actions --------------------------------------------------------------------------------------------------------


@frozen
class Admit:
    """Start it. ``table`` holds its pages, ``tokens_cached`` of its prompt are expected in the runtime's cache,
    ``reserved`` pages more are promised to its answer. ``slot`` is the llama.cpp slot to pin, None for any."""

    rid: RequestId
    table: PageTable
    tokens_cached: int
    reserved: int = 0
    slot: int | None = None


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


Action = Union[Admit, Refuse, Truncate]
