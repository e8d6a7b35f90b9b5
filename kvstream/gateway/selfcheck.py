"""How the slots of a runtime may be used: found out by using them, when a backend came up and has nothing to do.

Nothing that a server tells says whether restoring a slot has any effect, whether idle slots are emptied behind our
back, or whether it keeps prompts in a cache of its own. A prompt of 16 tokens in one idle slot does, in this order:

1. save it, erase the slot, restore it, read it again: is it found? (not where a model keeps more than plain KV)
2. read only its beginning, save again: two sizes give the bytes of a token and those of a file;
3. read something else in the same slot, then the beginning again: found, so there is a RAM prompt cache;
4. (one pool for all slots) read something in another slot, look: emptied, so idle slots do not keep what they hold.

About 27 tokens are computed, half a second on two cores of a laptop, some milliseconds on a GPU. The slots are those
that hold the least, empty ones as a rule, and are empty afterwards. All prompts are drawn by lot, so that no cache of
the server knows them from an earlier check. Everything is bounded by ``check_s_max``. What cannot be found out now
(no idle slot, no time, asleep) is *not settled*: the slots are the runtime's own affair until it can.

What a short prompt cannot show: a model with a sliding window restores 16 tokens well and 10,000 not at all. That is
for ``verify`` to see.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import trio
from attrs import define, field, frozen

from ..adapters.base import Adapter, CapacityReport, Delta, Failed, Health, HttpCall, HttpReply
from ..adapters.llamacpp import PROBE_FILE
from ..adapters.slot_calls import Identity, PromptWork, SlotCalls, SlotDone, SlotView
from ..core.types import PoolMode, SlotRules
from ..errors import BackendUnavailableError, KVStreamError
from .inject_settings import InjectSettings
from .ports import Upstream
from .rounds import ask_rounds
from .slot_ports import SlotsFound
from .slotplace import SlotPlace, find_place

log = logging.getLogger("kvstream.slots")

PROMPT_TOKENS: Final = 16
SHORT_TOKENS: Final = 4
OTHER_TOKENS: Final = 2
IDS: Final = (10, 250)  # any model has these, whatever they mean to it
KEPT_SHARE: Final = 0.9  # of the tokens that a restore must bring back
CHECK_S_MOST: Final = 60.0
PROBE_S_MAX: Final = 3.0
IDLE_S_MAX: Final = 3.0
IDLE_POLL_S: Final = 0.1
CHECK_NAME: Final = "kvstreamcheck"

SAVE_PATH_FLAG: Final = "--slot-save-path DIR"
NO_RAM_FLAG: Final = "--cache-ram 0"
NO_MEDIA_FLAG: Final = "no --mmproj"
WORKS: Final = "saving and restoring works, requests are pinned to slots"
EMPTIES: Final = ("saving and restoring works, but it empties idle slots whenever a request starts, so requests are "
                  "not pinned and slots keep nothing")
NO_PATH: Final = "it has no --slot-save-path, so KV state cannot be saved and restored"


@frozen
class _Stop(Exception):
    """The check is over before its end."""

    why: str
    missing: tuple[str, ...] = ()
    settled: bool = True


async def check_slots(adapter: Adapter, upstream: Upstream, settings: InjectSettings, report: CapacityReport, *,
                      sleeping: bool = False, stop: Callable[[], bool] = lambda: False,
                      tries: int = 0, rng: random.Random | None = None) -> SlotsFound:
    """Ask the runtime, which should have nothing to do. ``sleeping``: it is not asked anything. ``stop`` is asked
    before every step: a request that comes meanwhile may get our slot, and then nothing may be pinned to it.
    ``tries``: how often it was asked before and did not get done; a slow one is given more time each time.

    *Errors*: none; what goes wrong is a finding. *Cancellation*: safe; a slot may keep the 16 tokens.
    """
    calls = adapter.slots
    if calls is None:
        return SlotsFound("soft", None, "this kind of backend has no slots that can be saved")
    if report.limits.mode is PoolMode.UNKNOWN:
        return SlotsFound("soft", None, "its slots are not known: " + ("; ".join(report.notes) or "it does not tell"))
    if sleeping or await is_asleep(adapter, upstream):
        return SlotsFound("soft", None, "it sleeps; its slots are empty, and looking at them would wake it",
                          settled=False)
    within_s = max(settings.check_s_max, min(CHECK_S_MOST, settings.check_s_max * 4**tries))
    rng, place = rng or random.Random(), await find_place(adapter.base_url, settings)
    # One name for all times where we may not be able to delete it, else one that no other KVStream uses at this
    # moment. A folder that was named may be wrong; the file of the capacity probe shows that it is not.
    sure = await place.is_there(PROBE_FILE if settings.dir else "")
    name = f"{CHECK_NAME}{rng.randrange(16**8):08x}.kv" if sure else f"{CHECK_NAME}.kv"
    check = _Check(adapter, calls, upstream, settings, report, place, name, stop, rng)
    try:
        with trio.fail_after(within_s):
            await check.run()
        return await check.found()
    except _Stop as stop:
        return check.soft(stop.why, stop.missing, settled=stop.settled)
    except trio.TooSlowError:
        return check.soft(f"the self-check was not done within {within_s:g} s; it is made again by itself, with "
                          "more time", settled=False)
    except KVStreamError as error:
        return check.soft(f"the self-check failed: {error.message}", settled=False)
    finally:
        if check.file_bytes:
            await place.remove(name)
        await place.remove(PROBE_FILE)


@define
class _Check:
    """One check, with what it has found so far."""

    adapter: Adapter
    calls: SlotCalls
    upstream: Upstream
    settings: InjectSettings
    report: CapacityReport
    place: SlotPlace
    name: str  # of its file
    stop: Callable[[], bool]
    rng: random.Random
    slots: int = 0
    cached: int = 0
    computed: int = 0
    token_bytes: float = 0.0
    fixed_bytes: int = 0
    file_bytes: int = 0
    ram_cache: bool | None = None
    emptied: bool = False
    notes: list[str] = field(factory=list)

    async def run(self) -> None:
        """The steps in the runtime."""
        slots = await self._look()
        with trio.move_on_after(IDLE_S_MAX):  # what a dead client left ends at its next batch
            while all(view.busy for view in slots):
                await trio.sleep(IDLE_POLL_S)
                slots = await self._look()
        slot, other = _two_idle(slots)
        touched, self.slots = [slot], len(slots)
        long, short = self._prompt(PROMPT_TOKENS), self._prompt(SHORT_TOKENS)
        long = [*short, *long[SHORT_TOKENS:]]
        try:
            await self._can_save(slot)
            full = await self._restore_works(slot, long)
            await self._sizes(slot, short, full)
            self.ram_cache = await self._has_ram_cache(slot, short)
            if self.report.limits.mode is PoolMode.UNIFIED and len(slots) > 1:
                touched += [] if other is None else [other]
                self.emptied = self.ram_cache if other is None else await self._empties_idle(slot, other)
        finally:
            with trio.move_on_after(1) as cleaning:
                cleaning.shield = True
                await self._clean(touched)

    def soft(self, why: str, missing: Sequence[str] = (), *, settled: bool = True) -> SlotsFound:
        return SlotsFound("soft", None, why, missing=(*missing,), notes=tuple(self.notes), settled=settled,
                          ram_cache=self.ram_cache, cached=self.cached, computed=self.computed)

    # --- the steps ----------------------------------------------------------------------------------------------------

    async def _look(self) -> tuple[SlotView, ...]:
        reply = await self._ask(self.calls.look())
        slots = self.calls.read_look(reply)
        if slots is None:
            missing = ("--slots (or no --no-slots)",) if reply.status == 501 else ()
            raise _Stop(f"it does not show its slots ({self.adapter.error(reply).message})", missing,
                        settled=reply.status in (501, 404, 200))
        return slots

    async def _can_save(self, slot: int) -> None:
        """Before anything is computed; not asked again where the capacity probe has asked."""
        if self.report.slot_files is None:
            try:
                await self._save(slot)
            except _Stop as stop:
                if NO_MEDIA_FLAG not in stop.missing:
                    raise
                self.notes.append(stop.why)  # then it is tried once with nothing but text in the slot
        elif self.report.slot_files is False:
            raise _Stop(NO_PATH, (SAVE_PATH_FLAG,))

    async def _restore_works(self, slot: int, prompt: list[int]) -> SlotDone:
        work = await self._read(prompt, slot)
        if work.slot not in (None, slot):
            raise _Stop(f"a request for slot {slot} ran in slot {work.slot}: it takes no id_slot")
        saved = await self._save(slot)
        if saved.tokens < len(prompt):
            raise _Stop(f"of {len(prompt)} tokens in a slot it saved {saved.tokens}", settled=False)
        await self._done(self.calls.erase(slot))
        await self._done(self.calls.restore(slot, self.name))
        again = await self._read(prompt, slot)
        if again.cached < KEPT_SHARE * (len(prompt) - 1):  # the last token is always computed
            raise _Stop("restoring a slot has no effect: the prompt is read again afterwards. That is so with models "
                        "that keep more than plain KV (hybrid, recurrent, or with a sliding window)",
                        ("--swa-full, where the model has a sliding window",))
        return saved

    async def _sizes(self, slot: int, short: list[int], full: SlotDone) -> None:
        """Bytes of a token in a file, and those of the rest; they stay 0 where two sizes do not tell."""
        await self._read(short, slot)
        less = await self._save(slot)
        if not (0 < less.tokens < full.tokens and 0 < less.bytes < full.bytes):
            self.notes.append("how large its files get is not known beforehand")
            return
        self.token_bytes = (full.bytes - less.bytes) / (full.tokens - less.tokens)
        self.fixed_bytes = max(0, round(full.bytes - self.token_bytes * full.tokens))

    async def _has_ram_cache(self, slot: int, short: list[int]) -> bool:
        await self._read(self._prompt(OTHER_TOKENS, unlike=short[0]), slot)
        return (await self._read(short, slot)).cached >= len(short) - 1

    async def _empties_idle(self, slot: int, other: int) -> bool:
        await self._read(self._prompt(1), other)
        views = {view.slot: view for view in await self._look()}
        return slot in views and not views[slot].tokens

    async def found(self) -> SlotsFound:
        """All that was found, after :meth:`run`."""
        identity = await self._identity()
        if identity is None:
            raise _Stop("it does not tell what model it has, so a saved slot could be another's", settled=False)
        hint = self.place.folder if await self.place.has(self.name, self.file_bytes) else ""
        if self.place.folder and not hint:
            self.notes.append(f"its files are not where they were expected: {self.place.folder}")
            await self._warn()
        missing = []
        if self.emptied:
            context = self.report.limits.request_tokens_max
            missing.append(f"-np {self.slots} -c {self.slots * context}" if context else f"-np {self.slots}")
        if self.ram_cache:
            missing.append(NO_RAM_FLAG)
            self.notes.append(
                "its prompt cache in RAM is on: it can put one conversation's text before another's, and moves KV "
                "about behind KVStream's back")
        rules = SlotRules(self.slots, not self.emptied, identity.digest, self.token_bytes, self.fixed_bytes)
        return SlotsFound("hard-unpinned" if self.emptied else "hard", rules, EMPTIES if self.emptied else WORKS,
                          identity=identity, missing=tuple(missing), notes=tuple(self.notes), slots_dir_hint=hint,
                          ram_cache=self.ram_cache, cached=self.cached, computed=self.computed)

    async def _warn(self) -> None:
        if self.settings.dir:
            what = (f"has no {self.name} of {self.file_bytes} bytes, which the server at {self.adapter.base_url} just "
                    "said it saved" if await self.place.is_there() else "is not there")
            log.warning("inject.dir = %r is not the server's --slot-save-path: it %s; its files cannot be checked or "
                        "deleted from here, and inject.files_max names are used in turn", self.settings.dir, what)

    async def _clean(self, slots: Sequence[int]) -> None:
        wrote = self.cached + self.computed > 0 and not self.stop()
        for slot in slots if wrote else ():
            with suppress(KVStreamError):
                await self._ask(self.calls.erase(slot))

    async def _identity(self) -> Identity | None:
        replies = await ask_rounds(self.upstream, self.calls.identity_calls, timeout_s=PROBE_S_MAX)
        facts = dict(await self.place.model_facts(self.calls.model_path(replies)))
        if facts:  # else the identity holds for one process only, whatever else is known
            facts["kv"] = f"{self.report.limits.mode.value}, {self.token_bytes:g} bytes a token"
        return self.calls.read_identity(replies, facts)

    # --- calls --------------------------------------------------------------------------------------------------------

    def _prompt(self, tokens: int, unlike: int = 0) -> list[int]:
        first = self.rng.choice([id for id in range(*IDS) if id != unlike])
        return [first, *(self.rng.randrange(*IDS) for _ in range(tokens - 1))]

    def _go_on(self) -> None:
        if self.stop():
            raise _Stop("requests came in the middle of the self-check", settled=False)

    async def _ask(self, call: HttpCall) -> HttpReply:
        return await self.upstream.request(call, timeout_s=max(CHECK_S_MOST, self.settings.check_s_max))

    async def _save(self, slot: int) -> SlotDone:
        done = await self._done(self.calls.save(slot, self.name), saves=True)
        self.file_bytes = done.bytes
        return done

    async def _done(self, call: HttpCall, *, saves: bool = False) -> SlotDone:
        self._go_on()
        done = self.calls.read_done(await self._ask(call))
        if isinstance(done, SlotDone):
            return done
        if done.status == 501 and "multimodal" in done.message.lower():
            raise _Stop(f"it saves no slots ({done.message})", (NO_MEDIA_FLAG,))
        if done.status == 501:
            raise _Stop(NO_PATH, (SAVE_PATH_FLAG,))
        room = await self.place.room() if saves else ""
        raise _Stop(f"a slot call failed: {done.message}{room}", settled=done.status < 500)

    async def _read(self, prompt: list[int], slot: int) -> PromptWork:
        self._go_on()
        work = await read_prompt(self.upstream, self.calls, prompt, slot)
        self.cached += work.cached
        self.computed += work.computed
        return work


async def read_prompt(upstream: Upstream, calls: SlotCalls, ids: Sequence[int], slot: int | None) -> PromptWork:
    """Read a prompt into a slot, answer nothing; what that cost.

    *Errors*: ``BackendUnavailableError`` and whatever ``Upstream.open`` raises. *Cancellation*: closes the connection,
    which stops the runtime after its batch.
    """
    decoder, last = calls.prompt_decoder(), None
    async with upstream.open(calls.read_prompt(ids, slot)) as response:
        while True:
            data = await response.receive()
            for event in decoder.feed(data) if data else decoder.finish():
                if isinstance(event, Failed):
                    raise BackendUnavailableError(f"a prompt was not read: {event.message}")
                if isinstance(event, Delta) and event.data is not None:
                    last = event.data
            if not data:
                break
    work = calls.prompt_work(last)
    if work is None:
        raise BackendUnavailableError("the backend does not tell what reading a prompt cost")
    return work


async def is_asleep(adapter: Adapter, upstream: Upstream) -> bool:
    """Whether the model sleeps. llama.cpp's health route does not tell, and looking at its slots would wake it.

    *Errors*: none; who does not answer does not sleep. *Cancellation*: safe.
    """
    call = adapter.process()
    try:
        reply = await upstream.request(call, timeout_s=PROBE_S_MAX) if call is not None else None
    except KVStreamError:
        return False
    return reply is not None and adapter.read_health(reply) == Health.SLEEPING


def _two_idle(slots: Sequence[SlotView]) -> tuple[int, int | None]:
    """The idle slots that hold the least, one or two."""
    idle = sorted((view for view in slots if not view.busy), key=lambda view: (view.tokens or 0, -view.slot))
    if not idle:
        raise _Stop("all its slots are busy", settled=False)
    return idle[0].slot, idle[1].slot if len(idle) > 1 else None

