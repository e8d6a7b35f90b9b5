"""From records to figures: pure.

Only served requests have latencies. Errors, timeouts, refusals and what was still running when the bench was stopped
are counted by kind and enter no percentile. Answers that ended before the asked length are a class of their own: they
are faster for a reason that is not the server's merit, so latencies are those of the full answers, unless there are
none of those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen

from .record import Record
from .slo import Slo
from .statistics import Summary, summary

MEASURES = ("queue", "ttfb", "ttft", "ttfa", "tpot", "itl", "gap", "e2e")
ITL_EXACT_MAX = 1.05  # more tokens per chunk than this, and the time between two tokens cannot be seen


@frozen
class Goodput:
    """``met`` requests kept every bound: a ``share`` of all that were sent, ``per_s`` of wall clock."""

    slo: str
    met: int
    share: float
    per_s: float


@frozen
class Cached:
    """Of ``known`` requests whose runtime told it: how many prompt tokens came from a cache, and their share."""

    known: int
    tokens: int
    share: float


@frozen
class Group:
    """The figures of some requests. ``wall_s`` is the wall clock of the blocks they ran in. ``latencies_of``: whose
    latencies they are, ``full`` or ``short`` answers."""

    requests: int
    full: int
    short: int
    refused: int
    timeouts: int
    errors: int
    cancelled: int
    by_kind: Mapping[str, int]
    wall_s: float
    served_per_s: float
    output_tokens: int
    output_tokens_per_s: float
    output_estimated: bool
    prompt_tokens: int
    prompt_tokens_per_s: float
    prompt_known: int
    goodput: Goodput
    cached: Cached | None
    latencies_of: str
    latencies: Mapping[str, Summary]
    prompt_length: Summary | None
    output_length: Summary | None

    @property
    def served(self) -> int:
        return self.full + self.short

    @property
    def failed(self) -> int:
        """Sent and not served, for whatever reason but our own stop."""
        return self.refused + self.timeouts + self.errors


def group_of(records: Sequence[Record], wall_s: float, slo: Slo) -> Group:
    """*wall_s*: seconds; 0 gives rates of 0."""
    outcomes = Counter(record.outcome for record in records)
    served = [record for record in records if record.served]
    tokens = sum(record.tokens for record in served)
    prompts = [record.tokens_prompt for record in served if record.tokens_prompt is not None]
    met = sum(slo.met(record) for record in records)
    sent = len(records) - outcomes["cancelled"]
    timed = "full" if outcomes["full"] or not outcomes["short"] else "short"
    return Group(
        requests=len(records), full=outcomes["full"], short=outcomes["short"], refused=outcomes["refused"],
        timeouts=outcomes["timeout"], errors=outcomes["error"], cancelled=outcomes["cancelled"],
        by_kind=kinds_of_failure(records), wall_s=wall_s, served_per_s=_per(len(served), wall_s),
        output_tokens=tokens, output_tokens_per_s=_per(tokens, wall_s),
        output_estimated=any(record.estimated for record in served),
        prompt_tokens=sum(prompts), prompt_tokens_per_s=_per(sum(prompts), wall_s), prompt_known=len(prompts),
        goodput=Goodput(str(slo), met, met / sent if sent else 0.0, _per(met, wall_s)), cached=cached_of(served),
        latencies_of=timed, latencies=latencies_of([record for record in records if record.outcome == timed]),
        prompt_length=summary(map(float, prompts)),
        output_length=summary([float(record.tokens) for record in served],
                              estimated=any(record.estimated for record in served)),
    )


def latencies_of(records: Sequence[Record]) -> dict[str, Summary]:
    """The summaries of what these records know, in seconds."""
    estimated = any(record.estimated for record in records)
    packed = any(record.tokens_per_chunk > ITL_EXACT_MAX for record in records)
    found = {
        "queue": summary(_known(record.queue_s for record in records)),
        "ttfb": summary(_known(record.ttfb for record in records)),
        "ttft": summary(_known(record.ttft for record in records)),
        "ttfa": summary(_known(record.ttfa for record in records)),
        "tpot": summary(_known(record.tpot for record in records), estimated=estimated),
        "itl": summary([gap / record.tokens_per_chunk for record in records for gap in record.gaps],
                       estimated=estimated or packed),
        "gap": summary([gap for record in records for gap in record.gaps]),
        "e2e": summary(_known(record.e2e for record in records)),
    }
    return {name: value for name, value in found.items() if value is not None}


def kinds_of_failure(records: Iterable[Record]) -> dict[str, int]:
    """How often each kind of failure came, the most frequent first."""
    kinds = Counter(record.error or record.outcome for record in records
                    if not record.served and record.outcome != "cancelled")
    return dict(kinds.most_common())


def cached_of(records: Iterable[Record]) -> Cached | None:
    known = [record for record in records if record.tokens_cached is not None and record.tokens_prompt]
    if not known:
        return None
    tokens = sum(record.tokens_cached or 0 for record in known)
    return Cached(len(known), tokens, tokens / sum(record.tokens_prompt or 0 for record in known))


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _per(amount: float, wall_s: float) -> float:
    return amount / wall_s if wall_s > 0 else 0.0
