"""What a request that is over leaves in the runtime's slot, as far as that can be known."""

from __future__ import annotations

from typing import Final

from .costs import Rate
from .slots import Slot
from .state import Running
from .tokens import common_pages
from .types import PageKey

GUESS_WRONG: Final = 4  # how many times as many or as few tokens a prompt may have that was counted by guess
READ_SHARE: Final = 0.5  # of the time since its admission that a prompt given up was certainly read in


def remains(run: Running, slot: Slot, page_tokens: int, prefill: Rate, now: float,
            ) -> tuple[tuple[PageKey, ...], int, bool] | None:
    """(keys of full pages, tokens, whether they are the runtime's own ids) that are in its own slot now; None: what the
    map says of it holds on. ``prefill`` is in tokens per second."""
    if run.computed:
        return _full(run, page_tokens), run.tokens + max(0, run.produced - 1), run.exact
    # It may have been begun although nobody saw it. What it shares with what was there is there either way, but for the
    # last token, which is always computed again.
    shared, read = min(common_pages(slot.keys, run.keys), (run.tokens - 1) // page_tokens), 0
    if run.serving and prefill.is_known:
        end = now if run.over_at is None else run.over_at
        read = run.tokens_cached + int(READ_SHARE * prefill.per_s * (end - run.admitted))
    pages = max(shared, min(read, run.tokens) // page_tokens)
    if pages > shared:
        return run.keys[:pages], pages * page_tokens, False
    return (slot.keys[:shared], shared * page_tokens, slot.exact) if shared < len(slot.keys) else None


def float_remains(run: Running) -> tuple[int, float]:
    """How few and how many tokens it left in the slot that the runtime chose for it, as far as can be guessed."""
    wrong = 1 if run.exact else GUESS_WRONG
    whole = run.computed and run.seats == 1
    return run.tokens // wrong if whole else 0, run.tokens * wrong + run.produced


def _full(run: Running, page_tokens: int) -> tuple[PageKey, ...]:
    """The keys of the full pages of a prompt, the same object where those are all."""
    full = run.tokens // page_tokens
    return run.keys if len(run.keys) <= full else run.keys[:full]
