"""Reading a request's prompt into its slot before the request itself is sent (``read_first``).

To the rest of the gateway this is the request's prefill: it counts as sent, its progress is a sign of life, and where
it is broken off its slot is watched until it is idle. What goes wrong with the reading alone is no fault of the
request: it goes on as if nothing had been read, but never to a slot that may be at work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import trio

from ..adapters.base import Delta, Done, Failed, Ping
from ..adapters.slot_calls import PromptWork, SlotCalls
from ..errors import BackendTimeoutError, KVStreamError, StreamTruncatedError
from .ports import Upstream, UpstreamResponse
from .slotwatch import PREFILL_POLL_S_MIN, PROBE_TIMEOUT_S
from .stream import Stream

log = logging.getLogger("kvstream.slots")


class PromptReader:
    """``progress(stream)`` is told of every sign of life. ``silence_s`` (0: none) bounds how long the runtime may be
    silent, ``idle_s_max`` how long a slot is waited for after reading broke off."""

    def __init__(self, upstream: Upstream, calls: SlotCalls, *, progress: Callable[[Stream], None], silence_s: float,
                 idle_s_max: float) -> None:
        self._upstream = upstream
        self._calls = calls
        self._progress = progress
        self._silence_s = silence_s or float("inf")
        self._idle_s_max = idle_s_max

    async def read(self, stream: Stream, ids: Sequence[int], slot: int | None, *,
                   started: Callable[[], None] = lambda: None) -> PromptWork | None:
        """What it cost; None where it did not work, and the slot is idle. ``started``: headers came, the runtime has
        found a slot for it.

        *Errors*: ``BackendUnavailableError`` where nothing listens or the connection was reset,
        ``BackendTimeoutError``, and whatever broke it off when the slot was not seen idle after that. *Cancellation*:
        closes the connection.
        """
        stream.sent, stream.sent_at = True, trio.current_time()
        with trio.move_on_after(self._silence_s) as silence:
            try:
                async with self._upstream.open(self._calls.read_prompt(ids, slot)) as response:
                    if not 200 <= response.status < 300:
                        work = None  # the request itself will hear the same, and knows what to do
                    else:
                        stream.answered = True
                        started()
                        work = await self._follow(stream, response, silence)
            except StreamTruncatedError as error:
                log.info("request %d: reading its prompt broke off (%s)", stream.rid, error.message)
                silence.deadline = float("inf")
                await self._until_idle(slot, error)
                work = None
            stream.sent = stream.answered = False
            stream.sent_at = None
            return work
        raise BackendTimeoutError(
            f"the backend read no more of a prompt for upstream.first_event_s = {self._silence_s:g} s")

    async def _follow(self, stream: Stream, response: UpstreamResponse, silence: trio.CancelScope) -> PromptWork | None:
        decoder, work = self._calls.prompt_decoder(), None
        while True:
            data = await response.receive()
            events = decoder.feed(data) if data else decoder.finish()
            for event in events:
                if isinstance(event, Failed):
                    raise StreamTruncatedError(event.message)
                if isinstance(event, Delta):
                    work = self._calls.prompt_work(event.data) or work
            if any(not isinstance(event, Ping) for event in events):
                self._progress(stream)
                silence.deadline = trio.current_time() + self._silence_s
            if not data or any(isinstance(event, Done) for event in events):
                return work

    async def _until_idle(self, slot: int | None, error: KVStreamError) -> None:
        """The reading broke off: wait until its slot was seen idle. *Errors*: ``error``, if it was not in time."""
        with trio.move_on_after(self._idle_s_max):
            while True:
                await trio.sleep(PREFILL_POLL_S_MIN)
                try:
                    reply = await self._upstream.request(self._calls.look(), timeout_s=PROBE_TIMEOUT_S)
                except KVStreamError:
                    continue
                rows = self._calls.read_look(reply) or ()
                if rows and not any(row.busy for row in rows if slot in (None, row.slot)):
                    return
        raise error
