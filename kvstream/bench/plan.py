"""What is sent and when: pure, and the same for the same seed.

A load is a row of *talks*, numbered through the whole run. A talk is one request, or with ``turns`` a conversation
whose history grows. The n-th talk has the same lengths and, in an open loop, the same place in its block for every
target, so targets are compared on the same work; the *texts* differ between targets, since the second would else find
the first one's prompts in the cache of a runtime that both stand in front of.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count
from typing import Literal

from attrs import field, frozen

from ..errors import ConfigError
from .dice import draw, exponential

Arrivals = Literal["constant", "poisson"]
GOLDEN = (math.sqrt(5) - 1) / 2
TURN_SHARE = 4  # a later message of a conversation is this much shorter than the first


@frozen
class Kind:
    """One class of requests: its share of all, and its lengths in tokens."""

    name: str
    weight: float
    prompt_tokens: int
    output_tokens: int


@frozen
class Load:
    """The load of one target. ``requests`` None: as many as fit in ``duration_s`` (seconds). ``rate`` None: a closed
    loop of ``concurrency`` clients; else talks per second, and ``concurrency`` None bounds nothing."""

    kinds: tuple[Kind, ...]
    concurrency: int | None = 16
    requests: int | None = 50
    duration_s: float | None = None
    rate: float | None = None
    arrivals: Arrivals = "poisson"
    shared_prefix: float = 0.0
    turns: int = 1
    turn_tokens: int | None = None
    warmup: int = 1
    rounds: int = 1
    seed: int = 1
    timeout_s: float = 300.0
    ignore_eos: bool = True
    route: str = "/v1/chat/completions"

    @property
    def is_open(self) -> bool:
        """An open loop: requests come when they come, whatever became of those before."""
        return self.rate is not None

    @property
    def talks(self) -> int | None:
        """How many conversations; the requests are rounded up to whole ones."""
        return None if self.requests is None else -(-self.requests // self.turns)

    def message_tokens(self, kind: Kind, turn: int) -> int:
        """The length of the message of a turn (from 0), in tokens."""
        return kind.prompt_tokens if turn == 0 else self.turn_tokens or max(8, kind.prompt_tokens // TURN_SHARE)


@frozen
class Talk:
    """One conversation. ``starts_s``: seconds after its block began, in an open loop."""

    number: int
    kind: Kind
    turns: int
    starts_s: float | None = None


@frozen
class Block:
    """A round of one target: its talks, and how long new ones are begun (seconds; None: until all were)."""

    round: int
    first: int
    talks: int | None
    duration_s: float | None
    load: Load = field(repr=False)

    def __iter__(self) -> Iterator[Talk]:
        """The talks in order, without end when only the duration bounds them."""
        at = 0.0
        for place in count() if self.talks is None else range(self.talks):
            number = self.first + place
            if self.load.rate is not None:
                gap = (exponential(self.load.seed, "arrival", number) if self.load.arrivals == "poisson" else 1.0)
                at += gap / self.load.rate if place else 0.0
                if self.duration_s is not None and at >= self.duration_s:
                    return
            yield Talk(number, kind_of(self.load, number), self.load.turns, at if self.load.is_open else None)


def kind_of(load: Load, number: int) -> Kind:
    """The class of a talk. Multiples of the golden ratio spread so evenly that every stretch has the mixture."""
    total = sum(kind.weight for kind in load.kinds)
    left = (draw(load.seed, "kinds") + number * GOLDEN) % 1.0 * total
    for kind in load.kinds:
        left -= kind.weight
        if left < 0:
            return kind
    return load.kinds[-1]


def rounds_of(load: Load, targets: int) -> int:
    """How many rounds a comparison gets: as many as wanted, but none with fewer requests than there are clients (it
    would measure a lighter load) or shorter than two seconds. One target needs no rounds."""
    if targets == 1:
        return 1
    most = load.rounds
    if load.talks is not None:
        most = min(most, load.talks // (load.concurrency or 1))
    if load.duration_s is not None:
        most = min(most, int(load.duration_s // 2))
    return max(1, most)


def block_of(load: Load, rounds: int, round: int, first: int) -> Block:
    """Block ``round`` (from 0) of ``rounds``; ``first`` is the number of its first talk."""
    talks = None
    if load.talks is not None:
        talks = load.talks * (round + 1) // rounds - load.talks * round // rounds
    duration = None if load.duration_s is None else load.duration_s / rounds
    return Block(round, first, talks, duration, load)


def parse_mix(text: str) -> tuple[Kind, ...]:
    """``short:0.8:64:32,long:0.2:1500:64``: name, weight, prompt and output tokens. *Errors*: ConfigError."""
    kinds: list[Kind] = []
    for part in text.split(","):
        fields = part.strip().split(":")
        try:
            name, weight, prompt, output = fields
            kind = Kind(name.strip(), float(weight), int(prompt), int(output))
        except ValueError as error:
            raise ConfigError(f"--mix: {part.strip()!r} is not name:weight:prompt-tokens:output-tokens") from error
        if not kind.name or not 0 < kind.weight < math.inf or kind.prompt_tokens < 1 or kind.output_tokens < 1:
            raise ConfigError(f"--mix: {part.strip()!r} needs a name, a weight above 0 and lengths of at least 1 token")
        if kind.name in {other.name for other in kinds}:
            raise ConfigError(f"--mix: two classes are called {kind.name!r}")
        kinds.append(kind)
    return tuple(kinds)
