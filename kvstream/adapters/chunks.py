"""Reading the objects inside a stream: choices, finish reasons, token counts. Nothing here trusts their shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attrs import define, evolve, field

from .base import Finished, UsageNumbers

_NOT_OUTPUT = frozenset({"role"})
COUNT_MAX = 10**9  # no context is longer, and sums of it stay exact in a float (metrics add counts up as such)
MS_MAX = 10**12


@define
class Choices:
    """Which choices were seen and which gave a reason to stop."""

    _seen: set[int] = field(factory=set)
    _ended: set[int] = field(factory=set)

    @property
    def finished(self) -> bool:
        """Every choice that was seen ended; with ``n: 2`` one of two is not enough."""
        return bool(self._ended) and self._seen <= self._ended

    @property
    def running(self) -> bool:
        """A choice that was seen has not ended."""
        return not self._seen <= self._ended

    def read(self, choices: list[Any]) -> tuple[int, str, list[Finished]]:
        """(pieces of output, text of choice 0, choices that ended) of one chunk."""
        tokens, text = 0, ""
        ended: list[Finished] = []
        for place, choice in enumerate(choices):
            if not isinstance(choice, dict):
                continue
            index = choice.get("index")
            index = index if isinstance(index, int) else place
            self._seen.add(index)
            piece, has_output = output_of(choice)
            tokens += has_output
            if index == 0:
                text += piece
            reason = choice.get("finish_reason")
            if isinstance(reason, str) and reason:
                self._ended.add(index)
                ended.append(Finished(reason, index))
        return tokens, text, ended


def output_of(choice: Mapping[str, Any]) -> tuple[str, bool]:
    """(answer text, whether anything was generated) of one choice of a chunk.

    Anything but the role counts as output: reasoning, tool calls, and fields that we do not know.
    """
    body = choice.get("delta")
    if not isinstance(body, dict):
        body = choice.get("message")
    if isinstance(body, dict):
        content = body.get("content")
        has_output = any(
            value and isinstance(value, (str, list, dict)) for key, value in body.items() if key not in _NOT_OUTPUT
        )
        return content if isinstance(content, str) else "", has_output
    text = choice.get("text")
    return (text, bool(text)) if isinstance(text, str) else ("", False)


def usage_numbers(data: Mapping[str, Any]) -> UsageNumbers | None:
    """Token counts of a chunk or body: ``usage``, or llama.cpp's ``timings``, which come unasked on its last chunk."""
    usage, timings = data.get("usage"), data.get("timings")
    timed_cache = as_count(timings["cache_n"]) if isinstance(timings, dict) and "cache_n" in timings else None
    if isinstance(usage, dict) and "prompt_tokens" in usage:
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return UsageNumbers(
            as_count(usage["prompt_tokens"]),
            as_count(usage.get("completion_tokens")),
            as_count(cached) if isinstance(cached, int) else timed_cache,
            prompt_seconds(timings),
        )
    if isinstance(timings, dict) and "prompt_n" in timings:
        prompt = (timed_cache or 0) + as_count(timings["prompt_n"])
        return UsageNumbers(prompt, as_count(timings.get("predicted_n")), timed_cache, prompt_seconds(timings))
    return None


def prompt_seconds(timings: Any) -> float | None:
    """``prompt_ms`` of llama.cpp's timings in seconds; None where it is not told."""
    return seconds_of(timings.get("prompt_ms")) if isinstance(timings, dict) else None


def seconds_of(ms: Any) -> float | None:
    """Seconds from somebody else's milliseconds; None for what cannot be a time."""
    if not isinstance(ms, (int, float)) or isinstance(ms, bool) or not 0 <= ms < MS_MAX:
        return None
    return ms / 1000


def as_count(value: Any) -> int:
    """A count from somebody else's JSON: anything odd is 0, an absurd one ``COUNT_MAX``."""
    return min(value, COUNT_MAX) if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def parse_json(text: bytes) -> Any:
    """The value, or None when it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


@define
class UsageTally:
    """Adds up token counts when a runtime reports them per choice.

    llama.cpp with ``n: 2`` sends one usage chunk (or one ``timings``) for each choice, with that choice's tokens alone.
    Others send one total at the end. So the counts on chunks with choices are kept per choice, each the latest, and the
    usage-only chunks are summed; prompts are shared, hence never summed.
    """

    _by_choice: dict[int, int] = field(factory=dict)
    _standalone: int = 0

    def of_choices(self, numbers: UsageNumbers, choices: list[Any]) -> UsageNumbers:
        """The counts so far, given those on a chunk with ``choices``."""
        first = choices[0] if choices and isinstance(choices[0], dict) else {}
        index = first.get("index")
        self._by_choice[index if isinstance(index, int) else 0] = numbers.completion
        return evolve(numbers, completion=sum(self._by_choice.values()))

    def standalone(self, numbers: UsageNumbers) -> UsageNumbers:
        """The counts so far, given those of a usage-only chunk."""
        self._standalone += numbers.completion
        return evolve(numbers, completion=self._standalone)
