"""Which slot a request gets, and what is done in it first: the choice by what it is estimated to cost, in seconds.

    cost = prompt tokens to compute / rate  +  bytes to restore / rate  +  what is lost of what is overwritten

A slot that holds the longest beginning of the prompt costs nothing but the rest; a saved prefix costs its bytes; an
empty slot costs the whole prompt. What is overwritten is lost to somebody who may come back for it: a share of the
time to compute it again, or the time to save it where that is less; nothing if a file has it, or if the newcomer goes
on from it. So a conversation is not thrown away for a system prompt that the newcomer shares with it, unless nobody
misses it.

The functions look and decide; nothing is taken, held or planned here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import Final

from attrs import field, frozen

from .costs import Costs
from .slots import Slot
from .state import Running
from .tokens import common_pages
from .types import PageKey, SavedPrefix

RETURN_SHARE: Final = 0.5  # how likely somebody comes back for what a slot holds
SAVE_SHARE: Final = 0.25  # a save may cost so much of the time to compute it again
SAVING_WORTH: Final = 2.0  # a prompt that takes so many times longer to compute than to save waits for its file
RESTORE_SHARE: Final = 0.9  # a restore has to be so much cheaper than doing without


@frozen
class Want:
    """What a request brings: the pages that could be found in a cache, ``tokens`` of its prompt, the page size, and
    whether its keys are the runtime's own tokens. ``found``: the file with the longest beginning, and its pages."""

    keys: tuple[PageKey, ...] = field(repr=False)
    tokens: int
    page_tokens: int
    exact: bool
    found: tuple[SavedPrefix, int] | None = None


@frozen
class Choice:
    """A slot (None: of the runtime's choice), what is restored into it, and what that is worth: ``pages`` of the prompt
    are believed to be there then, and the whole costs ``seconds``. ``save``: what is overwritten is worth a file.
    ``promised`` tokens can be relied on."""

    slot: Slot | None
    pages: int = 0
    seconds: float = inf
    restore: SavedPrefix | None = None
    save: bool = False
    promised: int = 0


def choose(want: Want, free: Iterable[Slot], costs: Costs, covered: Callable[[Slot], int], save_min: int) -> Choice:
    """The cheapest slot. ``covered`` pages of what a slot holds are in a file; fewer than ``save_min`` tokens are not
    worth one (0: nothing is). Without a free slot the choice has none, and costs infinitely much."""
    best, cheapest = Choice(None), (inf, inf)
    file = want.found[0] if want.found is not None else None
    for slot in free:
        pages = common_pages(want.keys, slot.keys)
        for kept, restore in ((pages, None), (want.found[1] if want.found else 0, file)):
            if restore is None:
                stays, seconds = kept, 0.0
            elif kept > pages and want.exact:
                stays, seconds = common_pages(slot.keys, restore.keys), costs.restore_s(restore.bytes)
                seconds += (1 / RESTORE_SHARE - 1) * costs.read_s((kept - pages) * want.page_tokens)
            else:
                continue
            lost, save = loss(slot, stays, want.page_tokens, costs, covered(slot), save_min)
            seconds += lost + costs.read_s(max(1, want.tokens - kept * want.page_tokens))
            if (seconds, slot.used_at) < cheapest:
                cheapest = seconds, slot.used_at
                sure = want.exact and (restore is not None or (slot.exact and not slot.doubtful))
                best = Choice(slot, kept, seconds, restore, save, kept * want.page_tokens if sure else 0)
    return best


def choose_unpinned(want: Want, pages: int, costs: Costs) -> Choice:
    """Where the runtime places requests itself and has ``pages`` of the prompt, as far as anybody knows: whether a
    restore pays."""
    without = costs.read_s(max(1, want.tokens - pages * want.page_tokens))
    if want.found is not None and want.exact and want.found[1] > pages:
        file, found = want.found
        seconds = costs.restore_s(file.bytes) + costs.read_s(max(1, want.tokens - found * want.page_tokens))
        if seconds < RESTORE_SHARE * without:
            return Choice(None, found, seconds, file, promised=found * want.page_tokens)
    return Choice(None, pages, without)


def loss(slot: Slot, stays: int, page_tokens: int, costs: Costs, covered: int, save_min: int) -> tuple[float, bool]:
    """What it costs that only ``stays`` pages of a slot's content stay, and whether to save it first."""
    if len(slot.keys) <= stays:
        return 0.0, False
    lost = max(0, slot.tokens - max(stays, covered) * page_tokens)
    if covered >= len(slot.keys):
        lost = 0  # but for an answer, which nobody but its own conversation wants
    again = costs.read_s(lost)
    save = costs.save_s(slot.tokens)
    # Much is overwritten, and some of it has come since the last file: little each time, but computed again each time.
    worth = 0 < save_min <= slot.tokens - stays * page_tokens and lost >= page_tokens
    if slot.exact and not slot.doubtful and worth and save < SAVE_SHARE * again:
        return save, True
    return RETURN_SHARE * again, False


def favourite(
    want: Want, best: Choice, owned: Iterable[tuple[Slot, Running]], costs: Costs, now: float
) -> Running | None:
    """The running request whose slot is worth waiting for: what is estimated to be left of it, and the rest of the
    prompt then, take less than the best that can be had now."""
    patience, found = best.seconds, None
    for _, run in owned:
        pages = common_pages(want.keys, run.keys[: run.tokens // want.page_tokens])
        if pages <= best.pages or run.draining:
            continue
        seconds = costs.read_s(max(1, want.tokens - pages * want.page_tokens)) + rest_s(run, costs, now)
        if seconds < patience:
            patience, found = seconds, run
    return found


def in_the_making(
    want: Want, choice: Choice, files: Iterable[tuple[str, tuple[PageKey, ...]]], costs: Costs
) -> str | None:
    """Of ``files`` that are being written the one that is worth waiting for: else whoever comes in the moment in which
    his prefix is saved would compute it again."""
    for name, keys in files if want.exact else ():
        more = (common_pages(want.keys, keys) - choice.pages) * want.page_tokens
        if more > 0 and costs.read_s(more) > SAVING_WORTH * costs.save_s(len(keys) * want.page_tokens):
            return name
    return None


def rest_s(run: Running, costs: Costs, now: float) -> float:
    """How long a running request is estimated to run on; infinite if nobody knows."""
    left = run.tokens_left
    if left is None or not costs.decode.is_known or not costs.prefill.is_known:
        return inf
    reading = max(0.0, costs.read_s(run.tokens - run.tokens_cached) - (now - run.admitted)) if run.filling else 0.0
    return reading + costs.answer_s(left)


def erase(free: Iterable[Slot], chosen: Slot | None, used: int, need: int, cells: int) -> tuple[Slot, ...]:
    """Which idle slots of a unified pool must give up their cells, the least recently used first, so that ``need`` are
    free beside the ``used`` ones of running requests."""
    others = sorted((slot for slot in free if slot is not chosen and slot.tokens), key=lambda slot: slot.used_at)
    held = sum(slot.tokens for slot in others)
    gone = []
    for slot in others:
        if used + held + need <= cells:
            break
        held -= slot.tokens
        gone.append(slot)
    return tuple(gone)
