"""The arithmetic of the measurements of hard inject: what had to be computed, what was, and how two texts differ.

Pure, and tested in ``tests/bench/test_inject_sums.py``.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import TypeVar

from attrs import frozen

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? ([-+.\deE]+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

T = TypeVar("T")


@frozen
class Fan:
    """Prompts that begin alike: tokens of what all share, and of what each adds."""

    prefix: int
    suffixes: tuple[int, ...]

    @property
    def ideal(self) -> int:
        """Tokens to compute if the shared ones are computed once."""
        return self.prefix + sum(self.suffixes)

    @property
    def naive(self) -> int:
        return self.prefix * len(self.suffixes) + sum(self.suffixes)

    def bound(self, slack: float) -> float:
        """``slack`` prefixes, and the suffixes."""
        return self.prefix * slack + sum(self.suffixes)


def fan_of(prompts: Sequence[Sequence[int]]) -> Fan:
    """Token ids of every prompt. Of a prompt that is the beginning of all others one token must be computed again."""
    prefix = common_prefix(prompts)
    return Fan(prefix, tuple(max(1, len(prompt) - prefix) for prompt in prompts))


def common_prefix(rows: Sequence[Sequence[T]]) -> int:
    """How many items all rows have in common from the start."""
    n = 0
    for column in zip(*rows, strict=False):
        if any(item != column[0] for item in column):
            break
        n += 1
    return n


@frozen
class Turn:
    """One turn of a conversation as the runtime told it: tokens of the prompt, found in a cache, and answered."""

    prompt: int
    cached: int
    answer: int


def talk_ideal(turns: Sequence[Turn]) -> int:
    """Prompt tokens to compute if a slot had always kept the conversation: all of the first prompt, and of each later
    one what neither the prompt before nor its answer held. The last token of an answer is not in the cache, and one
    token at least is always computed."""
    total = 0
    for before, turn in zip([None, *turns], turns, strict=False):
        held = 0 if before is None else before.prompt + max(0, before.answer - 1)
        total += max(1, turn.prompt - held)
    return total


def talk_computed(turns: Sequence[Turn]) -> int:
    """Prompt tokens that were computed, by what each answer said."""
    return sum(turn.prompt - turn.cached for turn in turns)


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Of the medians."""
    return statistics.median(above) / statistics.median(below)


def first_difference(a: Sequence[T], b: Sequence[T]) -> int | None:
    """Where two rows part; None if one is equal to the other."""
    n = common_prefix([a, b])
    return None if n == len(a) == len(b) else n


def apart(ours: float, theirs: float) -> float:
    """How far two counts of one thing are apart, as a share of the second; 0 when both are 0."""
    return 0.0 if ours == theirs else abs(ours - theirs) / max(abs(theirs), 1e-9)


def samples(page: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """A Prometheus page: values by name and sorted labels."""
    out: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for line in page.splitlines():
        if found := _SAMPLE.match(line):
            labels = tuple(sorted(_LABEL.findall(found[2] or "")))
            out.setdefault(found[1], {})[labels] = float(found[3])
    return out


def total(page: Mapping[str, Mapping[tuple[tuple[str, str], ...], float]], name: str, **labels: str) -> float:
    """The sum of all samples of a name that have these labels; 0 when there are none."""
    return sum(value for key, value in page.get(name, {}).items() if labels.items() <= dict(key).items())
