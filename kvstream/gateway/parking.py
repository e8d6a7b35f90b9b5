"""Streams that give way and go on later: the shell's half of preemption (the scheduler's is ``core.preempt``).

Theory of operation. ``Preempt`` closes the upstream of a running stream: its leg ends, the stream does not. Its client
stays, reads keepalives, and sees nothing. When the scheduler admits it again, its next leg continues the answer over
token ids: those of the prompt, and those of *exactly the text that was sent*. Whatever the runtime made beyond that, or
what was still on its way, is made again.

Which ids these are is settled by the runtime's own ``/detokenize``: of those that the saved file tells (its page keys
are made of them) or the frames, as many as say the text; the few missing ones, or all where nobody tells any, are the
tokens of the text. So no character is lost or said twice. In the worst case (a tokenizer that puts a blank before every
text) the model continues after a text that differs by that blank, which the client never sees.

A stream whose client has no frame yet is sent again as it came. One that has its finish reason, or a tool call, is
``Bound``: it runs on.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Mapping, Sequence

import trio
from attrs import frozen

from ..adapters.base import Adapter, Decoder, Done, HttpCall, ProxyRequest
from ..adapters.routes import route_of
from ..adapters.slot_calls import Legs, PromptWork, ResumeDecoder, SlotCalls
from ..adapters.whole import DONE_FRAME
from ..core.messages import Bound, Ended, Event, Preempt, Refuse, SlotSaved
from ..core.types import EndReason, RefuseReason, RequestId
from ..errors import BackendProtocolError, KVStreamError, TotalTimeoutError
from .count import PromptCount, count_exact
from .lane_settings import EngineSettings
from .metrics_inject import InjectMeter
from .ports import Upstream
from .said import Said
from .stream import Stream

log = logging.getLogger("kvstream.preempt")

ID_BYTES = 4
HALF = "\ufffd"  # what the runtime says for bytes that are no whole character


@frozen
class NextLeg:
    """The continuation of an answer over ``ids``, of which ``made`` were answered. See :class:`leg.Leg`."""

    stream: Stream
    calls: SlotCalls
    ids: Sequence[int]
    made: int
    slot: int | None = None

    def call(self, *, stream: bool, include_usage: bool) -> HttpCall:
        call = self.calls.resume(self.stream.request, self.ids, slot=self.slot, made=self.made)
        assert call is not None, "there is something left to ask for"
        return call

    @property
    def is_over(self) -> bool:
        """Whether the client's limit leaves nothing to ask for."""
        return self.calls.resume(self.stream.request, (), slot=None, made=self.made) is None

    def decoder(self, content_type: str) -> Decoder:
        return self.open_decoder()

    def open_decoder(self) -> ResumeDecoder:
        said = self.stream.said
        assert said is not None
        legs = Legs(self.stream.tokens_prompt, self.made, said.cached, said.prompt_s, said.answer_s)
        said.decoder = self.calls.resume_decoder(self.stream.request, self.stream.last_data, legs)
        return said.decoder

    def answer(self, body: bytes, answer: object) -> bytes:
        return body


class Parking:
    """See the module. ``post`` hands an event to the scheduler; ``streams`` are those in hand."""

    def __init__(self, adapter: Adapter, upstream: Upstream, settings: EngineSettings, post: Callable[[Event], None],
                 meter: InjectMeter | None, streams: Mapping[RequestId, Stream]) -> None:
        self._adapter = adapter
        self._upstream = upstream
        self._settings = settings
        self._post = post
        self._meter = meter
        self._streams = streams

    # --- before -------------------------------------------------------------------------------------------------------

    def open(self, request: ProxyRequest, count: PromptCount) -> Said | None:
        """What a new stream keeps of its answer; None when it will not be preempted."""
        calls = self._adapter.slots
        whole = self._settings.passthrough and not request.stream
        if calls is None or self._settings.inject is None or self._settings.scheduler.preemption == "off" or whole:
            return None
        return Said(self._settings.times.answer_bytes_max) if count.ids and calls.can_resume(request) else None

    def preempt(self, stream: Stream, action: Preempt) -> None:
        """The scheduler wants its place."""
        if stream.said is None or stream.finish_reason is not None or stream.completed or stream.scope is None:
            self.bind(stream)
            return
        evictor = self._streams.get(action.evictor) if action.evictor is not None else None
        log.info("%s gives way to %s after %d tokens (%s)", stream.name, "another" if evictor is None else evictor.name,
                 stream.tokens, "swap" if action.swap else "recompute")
        if self._meter is not None:
            self._meter.preempted("swap" if action.swap else "recompute")
        stream.preempting = action
        stream.scope.cancel()

    def may_park(self, stream: Stream) -> bool:
        """Whether a leg that was stopped is to be followed by another. One that had its finish reason and lacked only
        the end marker gets that from us."""
        if stream.completed or stream.left or stream.cut is not None or stream.truncated:
            return False
        if stream.said is not None and stream.finish_reason is None:
            return True
        chat = route_of(stream.request.route).end == DONE_FRAME[6:].strip().decode()
        stream.buffer.force([Done(DONE_FRAME if chat else b"", synthesised=True)], 0)
        stream.completed = True
        return False

    def bind(self, stream: Stream) -> None:
        """It cannot be preempted any more."""
        stream.said = None
        self._post(Bound(stream.rid))

    # --- between two legs ---------------------------------------------------------------------------------------------

    def leg_over(self, stream: Stream, *, draining: bool) -> None:
        """Its leg ended, and it waits for the next. Synchronous."""
        said = stream.said
        assert said is not None
        if said.cached is None and (said.begun or stream.read is not None or stream.answered):
            read = said.with_first(stream.read or _expected(stream))
            if not said.begun:
                said.first = read
            elif read is not None:
                said.cached = read.cached
        if stream.sent_at is not None and stream.leg_token is not None and stream.last_token is not None:
            said.prompt_s += stream.leg_token - stream.sent_at
            said.answer_s += stream.last_token - stream.leg_token
        self._post(Ended(stream.rid, EndReason.PREEMPTED, stream.tokens - said.before, draining=draining))
        said.before, said.decoder, said.keys = stream.tokens, None, ()
        said.legs += 1
        stream.preempted += stream.preempting is not None
        stream.stopped_at = trio.current_time()
        granted = stream.granted
        stream.give_back()
        stream.granted = granted  # it had its turn, and its client was told how long it waited

    def refusal(self, stream: Stream, action: Refuse) -> KVStreamError | None:
        """What a stream that has begun is told when its time is over; None: what any is."""
        if stream.said is None or not stream.said.legs or action.why is not RefuseReason.TIMEOUT:
            return None
        total_s = self._settings.times.total_s
        return TotalTimeoutError(f"the answer took longer than upstream.total_s = {total_s:g} s: it had given way")

    def saved(self, stream: Stream, event: SlotSaved) -> None:
        """Its state is in a file."""
        if event.ok and stream.said is not None and stream.lease is None:
            stream.said.keys = event.keys

    # --- the next leg -------------------------------------------------------------------------------------------------

    async def next_leg(self, stream: Stream) -> NextLeg | None:
        """How its answer goes on; None: as it began, for its client has nothing of it.

        *Errors*: ``KVStreamError`` of a runtime that cannot be asked. *Cancellation*: safe.
        """
        said, calls = stream.said, self._adapter.slots
        if stream.stopped_at is not None:
            stood_s = trio.current_time() - stream.stopped_at
            stream.stood_s, stream.stopped_at = stream.stood_s + stood_s, None
            log.info("%s goes on after %.1f s", stream.name, stood_s)
        if said is None or calls is None or not said.begun:
            return None
        if self._meter is not None:
            self._meter.preempted_resumed()
        prompt: Sequence[int] | None = stream.prompt.ids if stream.prompt is not None else None
        if prompt is None:
            found = await count_exact(self._adapter, self._upstream, stream.request,
                                      timeout_s=self._settings.count_timeout_s)
            prompt = found if isinstance(found, tuple) else None
        if prompt is None:
            raise BackendProtocolError("the tokens of the prompt cannot be had any more, so the answer cannot go on")
        answer = await self._answer_ids(calls, said, prompt)
        return NextLeg(stream, calls, (*prompt, *answer), len(answer))

    async def _answer_ids(self, calls: SlotCalls, said: Said, prompt: Sequence[int]) -> tuple[int, ...]:
        """Tokens that say exactly the text that was sent."""
        text = said.text
        if not text:
            return ()
        for known in (tuple(said.ids), _ids_of(said.keys, prompt)):
            if known:
                found = await self._cut(calls, known, text, said.before)
                if found is not None:
                    return found
        return await self._tokens(calls, text)

    async def _cut(self, calls: SlotCalls, ids: tuple[int, ...], text: str, guess: int) -> tuple[int, ...] | None:
        """As many of these as say the text, and what is missing at its end; None when they say something else."""
        low, high, at = 0, len(ids), min(guess, len(ids))
        while low <= high:
            said = await self._text(calls, ids[:at])
            if said == text:
                return ids[:at]
            if text.startswith(said.rstrip(HALF)):
                low = at + 1
            else:
                high = at - 1
            at = (low + high + 1) // 2
        if high < len(ids):
            return None
        rest = text[len(await self._text(calls, ids)):]
        whole = ids + await self._tokens(calls, rest)
        return whole if await self._text(calls, whole) == text else None

    async def _text(self, calls: SlotCalls, ids: Sequence[int]) -> str:
        reply = await self._upstream.request(calls.detokenize(ids), timeout_s=self._settings.count_timeout_s)
        text = calls.read_text(reply)
        if text is None:
            raise BackendProtocolError(f"the backend does not say the text of tokens ({reply.status})")
        return text

    async def _tokens(self, calls: SlotCalls, text: str) -> tuple[int, ...]:
        reply = await self._upstream.request(calls.tokenize(text), timeout_s=self._settings.count_timeout_s)
        ids = calls.read_ids(reply)
        if ids is None:
            raise BackendProtocolError(f"the backend does not tell the tokens of a text ({reply.status})")
        return ids


def _expected(stream: Stream) -> PromptWork | None:
    """What its leg found of the prompt, as far as anybody knows."""
    lease = stream.lease
    if lease is None:
        return None
    restored = lease.plan is None or lease.plan.restore is None or stream.restored
    cached = lease.tokens_cached if restored else 0
    took = None if stream.sent_at is None else trio.current_time() - stream.sent_at
    return PromptWork(cached, max(0, stream.tokens_prompt - cached), took)


def _ids_of(keys: Sequence[object], prompt: Sequence[int]) -> tuple[int, ...]:
    """The tokens of the answer in these pages, which are made of token ids; none if they are of another prompt."""
    packed = b"".join(getattr(key, "content", b"") for key in keys)
    ids = array("I", packed[: len(packed) - len(packed) % ID_BYTES])
    return tuple(ids[len(prompt):]) if list(ids[: len(prompt)]) == list(prompt) else ()
