"""Who goes first, and who may pass a blocked head. Plain functions over numbers.

*Order.* Classes first, each ageing into the next (see ``queue``). Within a class requests are served by arrival +
*handicap*, seconds that are fixed when a request is submitted, so nothing is re-sorted as time goes by. Under ``fcfs``
there is none. Under ``sjf`` it grows with the predicted work towards ``ageing_s``, approached but never reached however
long the job (``work / (work + half)``): short jobs pass long ones, but a long job is passed only by those that arrive
within ``ageing_s`` after it. No starvation, whatever the load.

*Backfill* (EASY). The head lacks pages. Time is counted in steps of one answer token for every running sequence.
``plan_horizon`` asks when enough pages come back for the head if every running request uses its whole answer
(``steps``), and how many pages are left over then (``spare``). A later request may pass if it is over by that time or
if it lives on the spare pages. A running request without a known length gives nothing back before infinity; if the
head depends on such a one, later requests may only use what is spare after everything that ran *before the head was
blocked* has ended. Counting the pages of those that passed it as well would let the unlimited starve the head for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from attrs import frozen

ANSWER_TOKENS_MAX: Final = 2**53  # a client may ask for more than a float can hold


def predicted_work(tokens_uncached: int, answer_tokens: int, prefill_weight: float) -> float:
    """Work of a request in units of one answer token."""
    return tokens_uncached * prefill_weight + min(answer_tokens, ANSWER_TOKENS_MAX)


def handicap_s(work: float, half_work: float, ageing_s: float) -> float:
    """Seconds by which a job stands behind an infinitely short one of the same arrival; half of ``ageing_s`` for a
    job of ``half_work``."""
    return ageing_s * (work / (work + half_work))


# What a running request will give back: after how many more tokens (inf: not known), how many pages, and whether it
# was let past the very head whose start is being planned. A plain tuple: 256 of them are made for one plan.
Forecast = tuple[float, int, bool]


@frozen(slots=True)
class Horizon:
    """The head's predicted start, and the pages that are left over beside it then."""

    steps: float
    spare: int

    def lets_pass(self, steps: float, pages: int) -> bool:
        """Whether a request of that length and size cannot delay the head."""
        return steps <= self.steps < inf or pages <= self.spare


def plan_horizon(running: Sequence[Forecast], room: int, target: int) -> Horizon:
    """When ``room`` pages will have grown to ``target``, and what is spare then.

    A target that all ends together do not reach means that the head wants the machine for itself (the ledger lets a
    lone request ignore the watermark): it starts after the last end, and nothing is spare beside it.
    """
    pages_then, start = room, 0.0
    ends = sorted(running)
    for steps, pages, _ in ends:
        if steps == inf or (pages_then >= target and steps > start):
            break  # not before: all that end in one step are there when the head starts
        pages_then += pages
        start = steps
    if pages_then >= target:
        return Horizon(start, pages_then - target)
    if not ends or ends[-1][0] < inf:
        return Horizon(start, 0)
    return Horizon(inf, max(0, room + sum([pages for _, pages, passed in running if not passed]) - target))
