"""Runs the plan: who sends when, and what became of it.

Theory of operation. The run is a row of blocks, never two at once: in every round each target gets one, the order
rotating from round to round, so that what the machine does meanwhile (warms up, throttles, gets other work) hits all
alike. A block is a closed loop (``concurrency`` workers, each sending its next request when the last has ended) or an
open one (a task per arrival, at its time, however many are still running).

One task owns one request: it makes the record, and whatever happens the record says it. A record is "cancelled" until
it is known better, so a run that is stopped in the middle needs no clean-up. Latencies count from the intended start:
in a closed loop that is when the request was sent, in an open one when it was due.

Waiting for headers and bytes is bounded here, by one timeout for the whole request. A worker whose request failed
pauses, so that a target that refuses everything is not asked a thousand times a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import trio

from ..errors import (
    BackendRefusedError,
    BackendTimeoutError,
    BackendUnavailableError,
    KVStreamError,
    StreamTruncatedError,
)
from ..gateway.ports import UpstreamResponse
from .answer import AnswerReader, milliseconds
from .plan import Block, Load, Talk, block_of, rounds_of
from .prompts import message, request_body
from .record import BlockResult, Record, Run
from .target import Target, error_words

QUEUE_HEADER = "x-kvstream-queue-ms"
PAUSE_S, PAUSE_S_MAX = 0.2, 5.0  # after a failure, and the longest that a Retry-After is heeded
SETTLE_S = 2.0  # after a block with requests that were given up: a runtime may compute on for a batch
CLOSE_S = 1.0  # between the end marker and the end of the body
ERROR_BYTES_MAX = 65536


class Watch(Protocol):
    """Who looks on while it runs."""

    def block_began(self, target: str, block: Block, rounds: int) -> None: ...

    def request_ended(self, record: Record) -> None: ...

    def block_ended(self) -> None: ...


async def warm_up(target: Target, load: Load) -> list[Record]:
    """The requests that are not measured, one after the other, one of each class at least. *Errors*: none; the records
    tell."""
    result = BlockResult(target.label, -1, 0.0)
    block = Block(-1, 0, None, None, load)
    for number in range(load.warmup):
        kind = load.kinds[number % len(load.kinds)]
        await _Block(target, block, result).talk(Talk(-1 - number, kind, 1), None)
    return result.records


async def run_load(targets: Sequence[Target], load: Load, watch: Watch, run: Run | None = None) -> Run:
    """Every block, in turn. ``run`` is filled while it goes on, so that a caller who cancels has what there is.

    *Cancellation*: safe; requests that run are closed and stay "cancelled".
    """
    run = Run(rounds_of(load, len(targets))) if run is None else run
    began = trio.current_time()
    first = [0 for _ in targets]
    for round in range(run.rounds):
        for turn in range(len(targets)):
            place = (round + turn) % len(targets)
            block = block_of(load, run.rounds, round, first[place])
            result = BlockResult(targets[place].label, round, trio.current_time() - began)
            run.blocks.append(result)
            watch.block_began(targets[place].label, block, run.rounds)
            await _Block(targets[place], block, result, watch).run()
            first[place] += len({record.talk for record in result.records})
            watch.block_ended()
            if len(targets) > 1 and any(not record.served for record in result.records):
                await trio.sleep(SETTLE_S)
    run.partial = False
    return run


class _Block:
    def __init__(self, target: Target, block: Block, result: BlockResult, watch: Watch | None = None) -> None:
        self._target = target
        self._block = block
        self._load = block.load
        self._result = result
        self._watch = watch
        self._zero = trio.current_time()

    def _now(self) -> float:
        return trio.current_time() - self._zero

    async def run(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                if self._load.is_open:
                    await self._arrivals(nursery)
                else:
                    talks = iter(self._block)
                    for _ in range(self._load.concurrency or 1):
                        nursery.start_soon(self._client, talks)
        finally:
            # Of a block that was stopped, the time until then: its last request has no end of its own.
            ends = [record.ended for record in self._result.records]
            self._result.wall_s = self._now() if None in ends else max((end for end in ends if end), default=0.0)

    async def _client(self, talks: Iterator[Talk]) -> None:
        """One of the clients of a closed loop."""
        for talk in talks:
            if self._over():
                return
            await self.talk(talk, None)

    async def _arrivals(self, nursery: trio.Nursery) -> None:
        limit = trio.CapacityLimiter(self._load.concurrency) if self._load.concurrency else None
        for talk in self._block:
            assert talk.starts_s is not None
            await trio.sleep_until(self._zero + talk.starts_s)
            nursery.start_soon(self.talk, talk, limit)

    def _over(self) -> bool:
        return self._block.duration_s is not None and self._now() >= self._block.duration_s

    async def talk(self, talk: Talk, limit: trio.CapacityLimiter | None) -> None:
        """One conversation: each turn as soon as the last was answered, until one fails."""
        if limit is not None:
            async with limit:
                await self._turns(talk)
        else:
            await self._turns(talk)

    async def _turns(self, talk: Talk) -> None:
        messages: list[dict[str, str]] = []
        for turn in range(talk.turns):
            content = message(self._load, self._target.lengths, self._target.label, talk, turn)
            messages.append({"role": "user", "content": content})
            body = request_body(self._load, self._target.model, messages, talk.kind.output_tokens)
            now = self._now()
            intended = talk.starts_s if talk.starts_s is not None and turn == 0 else now
            record = Record(
                target=self._target.label, round=self._result.round, talk=talk.number, turn=turn, kind=talk.kind.name,
                prompt_asked=self._load.message_tokens(talk.kind, turn), output_asked=talk.kind.output_tokens,
                intended=intended, started=now)
            self._result.records.append(record)
            reader = AnswerReader()
            pause_s = await self._send(record, body, reader)
            if self._watch is not None:
                self._watch.request_ended(record)
            if not record.served:
                if not self._load.is_open:
                    await trio.sleep(pause_s)
                return
            if turn + 1 == talk.turns or self._over():
                return
            messages.append({"role": "assistant", "content": reader.text})

    async def _send(self, record: Record, body: bytes, reader: AnswerReader) -> float:
        """Send one request and note how it ended. Returns how long its client should pause if it failed, in seconds."""
        pause_s = PAUSE_S
        try:
            with trio.move_on_after(self._load.timeout_s) as scope:
                async with self._target.upstream.open(self._target.call(self._load.route, body)) as response:
                    record.status = response.status
                    record.queue_s = milliseconds(response.headers.get(QUEUE_HEADER, ""))
                    if response.status != 200:
                        pause_s = await self._refused(record, response)
                    else:
                        await self._read(record, reader, response)
        except KVStreamError as error:
            if not reader.complete:
                _fail(record, _kind(error), str(error))
        finally:
            record.take(reader)
        record.ended = self._now() if record.ended is None else record.ended
        if scope.cancelled_caught and record.error is None and not reader.done:
            record.outcome, record.error = "timeout", _when(record)
            record.message = f"no end within {self._load.timeout_s:g} s"
        elif record.error is None:
            _judge(record, reader)
        return pause_s

    async def _read(self, record: Record, reader: AnswerReader, response: UpstreamResponse) -> None:
        content_type = response.headers.get("content-type", "")
        if "json" in content_type and "event-stream" not in content_type:
            _fail(record, "not_a_stream", f"asked for a stream, got {content_type}")
            return
        while data := await response.receive():
            reader.feed(data, self._now())
            if reader.done:
                record.ended = self._now()
                with trio.move_on_after(CLOSE_S):  # read to the end, so that the connection can be used again
                    while await response.receive():
                        pass
                return
        record.ended = self._now()
        reader.close(record.ended)

    async def _refused(self, record: Record, response: UpstreamResponse) -> float:
        """An answer other than 200. Returns the pause that it asks for, or ours."""
        body = b""
        while len(body) < ERROR_BYTES_MAX and (data := await response.receive()):
            body += data
        after = response.headers.get("retry-after")
        _fail(record, f"http_{response.status}", error_words(body))
        if response.status in (429, 503) and after is not None:
            record.outcome = "refused"
            return min(PAUSE_S_MAX, float(after)) if after.strip().isdigit() else PAUSE_S
        return PAUSE_S


def _fail(record: Record, kind: str, words: str) -> None:
    record.outcome, record.error, record.message = "error", kind, words


def _when(record: Record) -> str:
    return "timeout_before_first_token" if record.first_token is None else "timeout_in_answer"


def _judge(record: Record, reader: AnswerReader) -> None:
    """A body that ended: served, or what it lacks."""
    if reader.error is not None:
        _fail(record, "error_event", reader.error)
    elif reader.malformed is not None:
        _fail(record, "malformed", reader.malformed)
    elif reader.finish is None:
        _fail(record, "truncated", "the stream ended without a finish_reason")
    elif not record.chunks:
        _fail(record, "empty", f"an answer without a single token ({reader.finish})")
    else:
        # An answer that reached the limit is full, whatever the count of a runtime that counts otherwise.
        record.outcome = "full" if reader.finish == "length" or record.tokens >= record.output_asked else "short"


def _kind(error: KVStreamError) -> str:
    if isinstance(error, BackendRefusedError):
        return "connection_refused"
    if isinstance(error, BackendTimeoutError):
        return "connect_timeout"
    if isinstance(error, StreamTruncatedError):
        return "truncated"
    if isinstance(error, BackendUnavailableError):
        return "closed_without_answer"
    return error.code


