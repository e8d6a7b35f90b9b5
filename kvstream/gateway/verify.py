"""Whether hard inject keeps its promises, for one lane: what the self-check found, and what was seen of it since.

Three things can take the slots away from the scheduler, and each gives them back in its own time:

* *A restore that has no effect.* The runtime says 200, then reads the whole prompt. After ``misses_max`` of them in a
  row restoring is off for this model, build and layout, as long as this process lives: nothing about them changes by
  itself. Another model or build is checked anew.
* *Somebody else uses the runtime.* More of its slots work than we have requests there, in two looks in a row: then
  nobody knows what the slots hold, and a pin may meet a stranger's running answer. Nothing is pinned, saved or restored
  until nobody was seen for ``QUIET_S``.
* *Slots do not hold what they should*, ``misses_max`` times in a row, for a reason that we do not see. The same.

One promise that a slot did not keep means only that the map of the slots is stale: it is forgotten (``SlotsLost``).

A promise that rests on exact token ids must be kept up to ``KEPT_SHARE``, one that rests on text only counts as missed
when next to nothing was there: how many tokens a text has was guessed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, Union

import trio
from attrs import evolve

from ..adapters.base import Adapter
from ..core.messages import SlotsKnown, SlotsLost
from ..errors import KVStreamError
from .inject_settings import InjectSettings
from .logs import backend_logger
from .metrics_inject import By, InjectMeter
from .ports import Upstream
from .selfcheck import PROBE_S_MAX, is_asleep
from .slot_ports import SlotsFound

KEPT_SHARE: Final = 0.9
GUESSED_KEPT_SHARE: Final = 0.5
GUESSED_MISSED_SHARE: Final = 0.1
QUIET_S: Final = 30.0
LOOK_GAP_S: Final = 2.0  # asking /slots more often than once a second keeps llama.cpp from noticing a client that left
SIGHTINGS: Final = 2
SIGHTING_GAP_S: Final = 0.5  # two looks in a row at one moment are one look
SIGHTING_S_MAX: Final = 10.0

NOT_CHECKED: Final = SlotsFound("soft", None, "not checked yet", settled=False)
Verdict = Union[SlotsKnown, SlotsLost, None]
"""What the scheduler must be told, if anything."""


class SlotVerify:
    """See the module. What a self-check found is entered; :attr:`found` is what is left of it."""

    def __init__(self, adapter: Adapter, upstream: Upstream, settings: InjectSettings, meter: InjectMeter,
                 name: str = "") -> None:
        self._adapter = adapter
        self._upstream = upstream
        self._settings = settings
        self._meter = meter
        self._log = backend_logger(name)
        self._checked = NOT_CHECKED
        self._off: dict[frozenset[tuple[str, str]], str] = {}  # what the model is -> why
        self._misses: dict[By, int] = {"restored": 0, "reused": 0}
        self._sightings = 0
        self._sighted_at = self._looked_at = float("-inf")
        self._shunned: tuple[float, str] | None = None  # until when, and why
        self._told = ""
        meter.mode("soft")

    def enter(self, found: SlotsFound, *, fresh: bool = True) -> SlotsFound:
        """A self-check found this; what of it may be used. ``fresh``: of a process of the runtime that was not checked
        before, so what was seen of another one is forgotten; what was off for this model stays off."""
        self._checked = found
        if fresh:
            self._misses = {"restored": 0, "reused": 0}
            self._shunned, self._sightings = None, 0
        if found.cached or found.computed:
            self._meter.prompt_read(cached=found.cached, computed=found.computed)
        self._tell()
        return self.found

    async def beat(self, ours: Callable[[], int] | None) -> Verdict:
        """To be called with every heartbeat while the backend is up: looks whether somebody else is there. ``ours``
        counts our requests in the runtime; None: ``/slots`` must not be asked now. *Errors*: none. *Cancellation*:
        safe."""
        now = trio.current_time()
        watched = self._checked.rules is not None and ours is not None and now - self._looked_at >= LOOK_GAP_S
        if watched and ours is not None and await self._should_look(ours()):
            self._looked_at = now
            call = self._adapter.busy()
            try:
                reply = await self._upstream.request(call, timeout_s=PROBE_S_MAX) if call is not None else None
            except KVStreamError:
                return None
            working = self._adapter.read_busy(reply) if reply is not None else None
            if working is not None:
                verdict = self.slots_seen(ours(), len(working))
                if verdict is not None:
                    return verdict
        return self._quiet_again()

    async def _should_look(self, ours: int) -> bool:
        """With nothing of ours there nobody looks: looking would keep the runtime from going to sleep."""
        return ours > 0 or (self._shunned is not None and not await is_asleep(self._adapter, self._upstream))

    # --- what is seen -------------------------------------------------------------------------------------------------

    def seen(self, by: By, *, promised: int, cached: int, exact: bool = True) -> Verdict:
        """The runtime reported ``cached`` tokens of a prompt of which ``promised`` were to come from the slot itself
        or, after a restore that it said had worked, from a file. ``exact``: the promise rests on token ids."""
        if promised <= 0 or self.found.rules is None:
            return None
        self._meter.cache_seen(by, promised=promised, found=cached)
        if cached + 1 >= (KEPT_SHARE if exact else GUESSED_KEPT_SHARE) * promised:  # the last is always computed
            self._misses[by] = 0
            return None
        if not exact and cached >= GUESSED_MISSED_SHARE * promised:
            return None
        self._misses[by] += 1
        if by == "restored":
            self._meter.restore_ineffective()
            return self._switch_off() if self._misses[by] >= self._settings.misses_max else None
        self._meter.slots_lost("missed")
        if self._misses[by] < self._settings.misses_max:
            return SlotsLost()
        self._misses[by] = 0
        return self._shun(f"slots did not hold what they should, {self._settings.misses_max} times in a row")

    def slots_seen(self, ours: int, theirs: int) -> Verdict:
        """Somebody looked: so many slots worked, and so many requests of ours were there."""
        now = trio.current_time()
        if theirs <= ours:
            self._sightings = 0
            return None
        if now - self._sighted_at < SIGHTING_GAP_S:
            return None
        self._sightings = self._sightings + 1 if now - self._sighted_at < SIGHTING_S_MAX else 1
        self._sighted_at = now
        if self._shunned is not None:
            self._shunned = (now + QUIET_S, self._shunned[1])
            return None
        if self._sightings < SIGHTINGS or self.found.rules is None:
            return None
        self._meter.slots_lost("foreign")
        return self._shun("somebody else uses this server: more of its slots work than it has requests from here")

    def _switch_off(self) -> SlotsKnown:
        times = self._settings.misses_max
        self._off[_model_of(self._checked)] = (
            f"restoring a slot has no effect here: {times} times in a row the prompt was read again. That is so with "
            "hybrid and recurrent models, and with a sliding window unless the server has --swa-full")
        self._tell(logging.WARNING)
        return SlotsKnown(None)

    def _shun(self, why: str) -> SlotsKnown:
        self._shunned = (trio.current_time() + QUIET_S, why)
        self._tell(logging.WARNING)
        return SlotsKnown(None)

    def _quiet_again(self) -> Verdict:
        if self._shunned is None or trio.current_time() < self._shunned[0]:
            return None
        self._shunned, self._sightings = None, 0
        self._tell()
        return SlotsKnown(self.found.rules) if self.found.rules is not None else None

    # --- what is so now -----------------------------------------------------------------------------------------------

    @property
    def found(self) -> SlotsFound:
        """What was found, less what was seen since."""
        checked = self._checked
        off = self._off.get(_model_of(checked)) if checked.rules is not None else None
        why = off or (self._shunned[1] if self._shunned is not None and checked.rules is not None else None)
        return checked if why is None else evolve(checked, mode="soft", rules=None, why=why)

    @property
    def is_unchecked(self) -> bool:
        """Nobody could be asked so far."""
        return self._checked is NOT_CHECKED

    def status(self, now: float) -> Mapping[str, Any]:
        """For ``/status``, in words. ``again_s``: seconds until slots that are shunned are used again."""
        found = self.found
        off = self._checked.rules is not None and _model_of(self._checked) in self._off
        again = None if self._shunned is None or off else round(max(0.0, self._shunned[0] - now), 1)
        return {
            "mode": found.mode, "why": found.why, "missing": list(found.missing), "notes": list(found.notes),
            "ram_cache": found.ram_cache, "identity": found.identity.digest if found.identity is not None else None,
            "restore_ineffective": off, "again_s": again}

    def _tell(self, level: int = logging.INFO) -> None:
        found = self.found
        self._meter.mode(found.mode)
        told = f"hard inject: {found.mode}: {found.why}"
        if told != self._told:
            self._told = told
            better = f" (better with {', '.join(found.missing)})" if found.missing else ""
            self._log.log(level, "%s%s", told, better)


def _model_of(found: SlotsFound) -> frozenset[tuple[str, str]]:
    """What is known of model, build and layout; not which process it was."""
    facts = found.identity.facts if found.identity is not None else {}
    return frozenset((name, value) for name, value in facts.items() if name != "process")
