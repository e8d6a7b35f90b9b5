"""One request from the queue to its last byte, as the client's task holds it.

States of a :class:`Stream`: *queued* (no scope yet) -> *granted* (the scope exists, made by the tick in the very step
that admitted it, so that there is no moment in which leaving would be lost) -> *over*. Leaving is one synchronous act
in each: queued, an ``Ended`` is posted; granted, the scope is cancelled and the pump posts it.
"""

from __future__ import annotations

import trio
from attrs import define, frozen

from ..adapters.base import Adapter, ProxyRequest, UpstreamEvent, UsageNumbers
from ..adapters.slot_calls import PromptWork
from ..core.messages import Admit, Preempt, Submitted
from ..core.types import CountSource, EndReason, Priority, RequestId
from ..errors import BackendError, KVStreamError, OverloadError, ReaderStalledError
from .buffer import EventBuffer
from .count import PromptCount
from .metrics_inject import How
from .said import Said


@frozen
class StreamTimes:
    """Bounds in seconds, 0 = none. ``first_event_s``: from sending to the first data event. ``gap_s``: between data
    events. ``total_s``: from the grant to the end. ``stall_s``: how long a reader may leave a full buffer unread."""

    first_event_s: float = 600.0
    gap_s: float = 120.0
    total_s: float = 0.0
    stall_s: float = 30.0
    answer_bytes_max: int = 64 * 2**20


@define(eq=False)
class Stream:
    """A request in the gateway's hands. Made by ``Engine.open_stream``; read with :meth:`get`."""

    rid: RequestId
    request: ProxyRequest
    adapter: Adapter  # of the lane that serves it
    client: str
    priority: Priority
    arrived: float
    buffer: EventBuffer[UpstreamEvent]
    name: str = ""  # the request id of the log line and the X-Request-Id header
    tokens_prompt: int = 0
    tokens_max: int | None = None
    count_source: CountSource = CountSource.ESTIMATED
    prompt: PromptCount | None = None
    asked: Submitted | None = None  # what the scheduler was told
    said: Said | None = None  # of its answer, if it may be preempted
    hold: bool = True  # a backend that is not there for the moment is waited for
    # -- filled at the grant
    scope: trio.CancelScope | None = None
    lease: Admit | None = None
    granted: float | None = None
    slot: int | None = None  # the one its call is pinned to
    restored: bool = False  # a file was restored into its slot
    read: PromptWork | None = None  # what reading its prompt beforehand cost
    how: How | None = None  # where its prompt came from, at its first leg
    preempted: int = 0  # how often it gave way
    stopped_at: float | None = None  # since when it stands still between two legs
    stood_s: float = 0.0  # how long it did so before
    requeued: int = 0  # how often it went back to the queue, since nobody listened
    loading_since: float | None = None  # when the backend first turned it away because it loads
    busy_since: float | None = None  # the same, because it is busy
    busy_retries: int = 0
    # -- filled by the pump
    sent: bool = False  # the call went out: the runtime may be working on it
    sent_at: float | None = None
    answered: bool = False  # headers came: a slot has it
    blocked: bool = False  # the pump waits for the reader, and does not see what the runtime does meanwhile
    first_token: float | None = None
    last_token: float | None = None
    leg_token: float | None = None  # the first of the present leg
    tokens: int = 0  # answer pieces seen
    usage: UsageNumbers | None = None
    finish_reason: str | None = None
    unfinished: bool = False
    completed: bool = False  # a proper end was seen
    last_data: object = None  # the last parsed frame, for a frame of our own in its likeness
    usage_data: object = None  # that of the last frame with usage
    # -- how it ended
    left: bool = False  # the client went
    cut: KVStreamError | None = None  # we ended it: drain, pool, abort
    truncated: bool = False
    preempting: Preempt | None = None  # it gives way: the end of its present leg is not its own
    headers: tuple[tuple[bytes, bytes], ...] = ()  # more headers that tell how it is served
    error_forwarded: bool = False  # the runtime's own error frame went to the client
    outcome: str | None = None
    ended: float | None = None

    async def get(self) -> list[UpstreamEvent]:
        """All events that are there, waiting for the first; ``[]`` at the end.

        *Errors*: any ``KVStreamError`` the request ended with: refused, failed upstream, stalled, cut.
        *Cancellation*: safe; nothing is lost.
        """
        return await self.buffer.get()

    @property
    def swapped_out(self) -> bool:
        """It was preempted, its state is in a file, and it has no place yet to go on."""
        return self.lease is None and self.said is not None and bool(self.said.keys)

    @property
    def phase(self) -> str:
        """``queued``, ``prefill``, ``streaming`` or ``non_stream``: where a request is now, for the metrics."""
        if self.lease is None:
            return "queued"
        if self.first_token is None:
            return "prefill"
        return "streaming" if self.request.stream else "non_stream"

    def cut_short(self, error: KVStreamError | None) -> None:
        """End a granted stream from our side; with None its end looks like reaching the token limit."""
        if self.scope is not None and self.outcome is None:
            self.cut, self.truncated = error, error is None
            self.scope.cancel()

    def give_back(self) -> None:
        """It has no seat any more and waits again, for its first leg or for the next one."""
        self.lease = self.scope = self.granted = self.preempting = self.slot = self.read = None
        self.sent = self.answered = self.blocked = self.restored = False
        self.sent_at = self.leg_token = None


def end_reason(stream: Stream, error: BaseException | None) -> EndReason:
    """Why a pump ended, for the scheduler."""
    if stream.completed and error is None:
        return EndReason.FINISHED
    if stream.truncated:
        return EndReason.TRUNCATED
    if stream.left:
        return EndReason.CANCELLED
    if isinstance(error, ReaderStalledError):
        return EndReason.STALLED
    return EndReason.FAILED


def outcome_of(stream: Stream, error: KVStreamError | None) -> str:
    """How a request ended, in a word: ``served``, ``cancelled``, ``refused``, ``client_error``, ``upstream_error``,
    ``stalled``, ``cut``."""
    if stream.outcome == "finished":
        return "served"
    if stream.outcome in ("cancelled", "stalled"):
        return stream.outcome
    if stream.outcome == "truncated" or (stream.cut is not None and not isinstance(stream.cut, BackendError)):
        return "cut"
    if stream.outcome != "failed":
        return "refused"
    return "client_error" if error is not None and error.status < 500 else "upstream_error"


def outcome_of_refusal(error: KVStreamError) -> str:
    """The same for a request that was turned away at the door: its own fault, or ours."""
    return "client_error" if error.status < 500 and not isinstance(error, OverloadError) else "refused"
