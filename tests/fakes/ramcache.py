"""llama.cpp's host prompt cache (``--cache-ram``): states that slots gave up, taken back by the prompt they fit best.

The rules are those of the real server's slot choice: a state moves (it is in a slot or here, never in both), one that
is the beginning of another is not kept, and a state is only taken when it fits the prompt better than what the slot
holds, by the share of itself that is kept as well as by the share of the prompt that it covers.
"""

from __future__ import annotations

from attrs import define, field

KEEP_MIN = 0.25  # of a state: one that would lose more is left alone


def common_prefix(a: list[int], b: list[int]) -> int:
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])


@define(eq=False)
class RamCache:
    """See the module."""

    states: list[list[int]] = field(factory=list)

    def save(self, kv: list[int]) -> None:
        if not kv or any(state[: len(kv)] == kv for state in self.states):
            return
        self.states = [state for state in self.states if kv[: len(state)] != state]
        self.states.append(list(kv))

    def take(self, held: list[int], prompt: list[int]) -> list[int] | None:
        """The state that fits ``prompt`` better than ``held`` does, if there is one; it is no longer here then."""
        kept, covered, best = _fit(held, prompt), _cover(held, prompt), None
        for state in self.states:
            keep, cover = _fit(state, prompt), _cover(state, prompt)
            if keep >= KEEP_MIN and keep > kept and cover > covered:
                kept, covered, best = keep, cover, state
        if best is not None:
            self.states.remove(best)
        return best


def _fit(state: list[int], prompt: list[int]) -> float:
    return common_prefix(state, prompt) / len(state) if state else 0.0


def _cover(state: list[int], prompt: list[int]) -> float:
    return common_prefix(state, prompt) / max(1, len(prompt))
