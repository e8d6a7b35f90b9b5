"""What became of the requests: a record of each, the rows that every figure is made of. Pure."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from attrs import define, field

from .answer import AnswerReader

Outcome = Literal["full", "short", "refused", "timeout", "error", "cancelled"]
"""``full``: served, as long as asked. ``short``: served, but ended by the model before that. ``refused``: 429 or 503
that says when to come again. ``cancelled``: it was running when the bench was stopped."""


@define
class Record:
    """Times are seconds since the block began. ``intended`` is when the request was meant to be sent; latencies count
    from there, so that a request that had to wait for its predecessors shows that wait."""

    target: str
    round: int
    talk: int
    turn: int
    kind: str
    prompt_asked: int
    output_asked: int
    intended: float
    started: float
    ended: float | None = None
    outcome: Outcome = "cancelled"
    error: str | None = None  # its kind, in a word
    message: str | None = None
    status: int | None = None
    finish: str | None = None
    first_byte: float | None = None
    first_token: float | None = None
    first_answer: float | None = None
    last_token: float | None = None
    chunks: int = 0
    gaps: tuple[float, ...] = ()  # between chunks, seconds
    tokens_prompt: int | None = None
    tokens_output: int | None = None
    tokens_cached: int | None = None
    queue_s: float | None = None  # as a KVStream tells it

    def take(self, answer: AnswerReader) -> None:
        """Note what an answer showed, also one that failed on its way."""
        self.first_byte, self.first_token = answer.first_byte, answer.first_token
        self.first_answer, self.last_token = answer.first_answer, answer.last_token
        times = answer.token_times
        self.chunks = len(times)
        self.gaps = tuple(later - earlier for earlier, later in pairwise(times))
        self.finish = answer.finish
        self.queue_s = answer.queue_s if self.queue_s is None else self.queue_s
        if answer.usage is not None:
            self.tokens_prompt, self.tokens_cached = answer.usage.prompt, answer.usage.cached
            self.tokens_output = answer.usage.completion or None

    @property
    def served(self) -> bool:
        return self.outcome in ("full", "short")

    @property
    def tokens(self) -> int:
        """Answer tokens: the runtime's count, else the number of chunks (see ``estimated``)."""
        return self.chunks if self.tokens_output is None else self.tokens_output

    @property
    def estimated(self) -> bool:
        """The runtime did not say how many tokens it sent; a chunk is taken for one."""
        return self.tokens_output is None

    def _since(self, at: float | None) -> float | None:
        return None if at is None else at - self.intended

    @property
    def ttfb(self) -> float | None:
        """Seconds to the first byte of the body, whatever it says."""
        return self._since(self.first_byte)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token: text, reasoning or tool call."""
        return self._since(self.first_token)

    @property
    def ttfa(self) -> float | None:
        """Seconds to the first text of the answer proper."""
        return self._since(self.first_answer)

    @property
    def e2e(self) -> float | None:
        """Seconds to the end of the answer."""
        return self._since(self.ended)

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for an answer of one token."""
        if self.first_token is None or self.last_token is None or self.tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.tokens - 1)

    @property
    def tokens_per_chunk(self) -> float:
        """How many tokens came in one chunk, on average; never less than 1 (some tokens have no text of their own)."""
        return max(1.0, (self.tokens - 1) / (self.chunks - 1)) if self.chunks > 1 else 1.0


@define
class BlockResult:
    """One block. ``wall_s``: from its beginning to the end of its last request."""

    target: str
    round: int
    began_s: float  # since the run began
    wall_s: float = 0.0
    records: list[Record] = field(factory=list)


@define
class Run:
    """What a run showed so far. ``partial``: it was stopped before its end."""

    rounds: int
    blocks: list[BlockResult] = field(factory=list)
    partial: bool = True

    def records(self, target: str) -> list[Record]:
        return [record for block in self.blocks if block.target == target for record in block.records]

    def wall_s(self, target: str) -> float:
        return sum(block.wall_s for block in self.blocks if block.target == target)
