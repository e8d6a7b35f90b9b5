"""A streamed answer on its way to its client: the runtime's frames, and between them those that are ours."""

from __future__ import annotations

import trio
from attrs import field, frozen

from ..adapters.base import AnswerAssembler, Done, Failed, UpstreamEvent, Usage
from ..adapters.compat import Compat
from ..errors import KVStreamError
from .asgi import Headers, Send, start_stream
from .dialects import Dialect
from .media import MediaSettings
from .ports import Answer
from .request import answer_tokens


@frozen
class ProxySettings:
    """What the routes are told. 0 turns ``keepalive_s`` off, and so does the mode ``off``."""

    keepalive_s: float = 15.0
    keepalive_mode: str = "comment"
    compat: Compat = field(factory=Compat)
    body_bytes_max: int = 64 * 2**20
    body_gap_s: float = 30.0
    answer_bytes_max: int = 64 * 2**20
    forward_authorization: bool = True
    media: MediaSettings = field(factory=MediaSettings)


def queue_header(answer: Answer, arrived: float) -> Headers:
    """How long a request waited for its seat, in milliseconds, once it has one."""
    if answer.granted is None:
        return []
    # One that joined another's call waited only from its own arrival on.
    return [(b"x-kvstream-queue-ms", b"%.1f" % (max(0.0, answer.granted - arrived) * 1000))]


class StreamedAnswer:
    """Writes one answer. The status is committed with the first frame or the first keepalive, whichever comes first; an
    error before that is a proper HTTP error, after it an error frame and no end marker.

    The wait in the queue is a header; where a keepalive sent the headers before it was known, it is a comment.
    """

    def __init__(self, answer: Answer, dialect: Dialect, send: Send, headers: Headers, settings: ProxySettings,
                 arrived: float) -> None:
        self._answer = answer
        self._dialect = dialect
        self._send = send
        self._headers = headers
        self._empty_deltas = settings.keepalive_mode == "empty-delta"
        off = settings.keepalive_mode == "off" or not (dialect.ping or self._empty_deltas)
        self._keepalive_s = (0 if off else settings.keepalive_s) or float("inf")
        self._ping_at = trio.current_time() + self._keepalive_s
        self._usage_due = answer.request.include_usage  # asked for, and not sent yet
        self._started = False
        self._arrived = arrived
        self._wait_told = not dialect.media_type.startswith(b"text/event-stream")  # or nothing to tell it with
        self._rewriter = settings.compat.rewriter(answer.request.route)
        self._kept: AnswerAssembler | None = None

    async def run(self) -> None:
        """To the last byte.

        *Errors*: ``KVStreamError``, only while nothing was sent. *Cancellation*: leaves the stream as it is.
        """
        ended_well = False
        try:
            while events := await self._next():
                if self._rewriter is not None:
                    events = self._rewriter.feed(events)
                data = self._bytes(events)
                ended_well = ended_well or any(isinstance(e, Done) for e in events)
                self._keep(events)
                if data:
                    await self._write(data)
            if self._answer.truncated and not ended_well:
                whole = self._kept.result() if self._kept is not None else None
                await self._write(self._dialect.length_frames(self._answer, whole))
        except KVStreamError as error:
            if not self._started:
                raise
            if not self._answer.error_forwarded:
                await self._write(self._dialect.error_frame(error))
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _keep(self, events: list[UpstreamEvent]) -> None:
        """Put the answer together on the side, where its end may have to repeat it. Only an answer without a limit of
        its own is ever cut."""
        if not self._dialect.keeps_whole or answer_tokens(self._answer.request) is not None:
            return
        if self._kept is None:
            self._kept = self._answer.adapter.assembler(self._answer.request)
        for event in events:
            self._kept.feed(event)

    async def _next(self) -> list[UpstreamEvent]:
        """The next events. Pings go by what was *sent*: events that are not for the client do not put one off."""
        while True:
            with trio.move_on_at(self._ping_at):
                return await self._answer.get()
            data = self._dialect.empty_delta(self._answer) if self._empty_deltas else self._dialect.ping
            self._ping_at = trio.current_time() + self._keepalive_s
            if data:  # lines of JSON have no ping, and no empty one before the first
                await self._write(data)

    def _bytes(self, events: list[UpstreamEvent]) -> bytes:
        frames: list[bytes] = []
        for event in events:
            if isinstance(event, Usage) and event.standalone:
                if not self._answer.request.include_usage:
                    continue
                self._usage_due = False
            if isinstance(event, Done) and self._usage_due:
                frames.append(self._dialect.usage_frame(self._answer))
            if isinstance(event, Failed) and event.raw:
                if not self._started and not frames:
                    continue  # first of all comes an error: the HTTP status will say it
                self._answer.error_forwarded = True
            raw = getattr(event, "raw", b"")
            if raw:
                frames.append(raw)
        if frames and self._started and not self._wait_told:
            frames[:0] = [b": queued-ms " + value + b"\n\n" for _, value in self._wait()]
        return b"".join(frames)

    def _wait(self) -> Headers:
        wait = queue_header(self._answer, self._arrived)
        self._wait_told = self._wait_told or bool(wait)
        return wait

    async def _write(self, data: bytes) -> None:
        if not self._started:
            self._started = True
            await start_stream(self._send, self._dialect.media_type, [*self._headers, *self._wait()])
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._ping_at = trio.current_time() + self._keepalive_s
