"""Hard inject inside the scheduler: which slot a request gets, what is done in it first, which files there are.

Theory of operation. Without ``SlotsKnown`` this is inert and nothing is planned. After it there are two modes.

*Pinned* (``slots`` is a map): every request that can name its slot gets one from ``placement``, with a plan of what
happens there first. The others are floats (see ``slots``): they wait while a slot is given away and not yet at work,
and while one is adrift nobody is pinned. *Unpinned* (``slots`` is None, ``rules`` are not): the runtime empties idle
slots and chooses itself. Then all that can be planned is a restore, into whatever slot the shell sees idle, right
before the request.

*Leaders.* A long cold prompt is read first (``read_first``) and those that share it wait. When it is read, it is saved
if somebody waits, and they are let go when the file is there; or at once if it cannot be, and then they do not wait for
anybody else. A slot whose content the next in line want as well is saved before its new owner goes on from it.

What a slot holds changes here only (``put``), so the ledger hears of all that is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from . import messages as m
from .costs import Costs
from .ledger import Ledger
from .placement import Choice, Want, choose, choose_unpinned, erase, favourite, in_the_making
from .queue import WaitingQueue
from .remains import float_remains, remains
from .saved import SavedStore
from .settings import SchedulerSettings
from .slots import Slot, SlotMap
from .state import Gate, Running, Waiting
from .tokens import common_pages
from .types import PageKey, PoolMode, RequestId, SaveSpec, SaveWhy, SlotPlan, SlotRules

STARTING: Final[Gate] = ("slot", "starting")  # a slot is given away or being saved, and this one has none
SHARERS_SOUGHT: Final = 8  # how many of the next in line are asked whether they want the same prefix
FLOAT_PATIENCE_S: Final = 1.0  # how long a float that waits for a quiet moment lets others be given slots


class Inject:
    """Slots, files and costs of one lane. ``queue`` and ``running`` are the scheduler's own. ``leaders`` are running
    requests whose prefix is about to be there for those who wait for it."""

    def __init__(
        self, settings: SchedulerSettings, queue: WaitingQueue, running: dict[RequestId, Running]
    ) -> None:
        self._settings = settings
        self._queue = queue
        self._running = running
        self.rules: SlotRules | None = None
        self.slots: SlotMap | None = None
        self.store: SavedStore | None = None
        self.costs = Costs()
        self.leaders: dict[RequestId, Running] = {}
        self.planned: dict[RequestId, dict[str, SaveSpec]] = {}  # saves of a request's plan that did not end yet
        self.looked_at: dict[str, SaveSpec] = {}  # of a plan, too: written, whatever becomes of the request
        self._choices: dict[RequestId, Choice] = {}  # as long as nothing changes
        self.covers: dict[int, tuple[tuple[PageKey, ...], int]] = {}  # by slot: its keys, and how many a file has
        self.gone: list[tuple[PageKey, ...]] = []  # what slots held and do not any more
        self._float_waits_since = 0.0
        self._left_over = 0  # tokens of requests that ended since the runtime last emptied its idle slots

    # --- questions --------------------------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        return self.rules is not None

    @property
    def can_save(self) -> bool:
        """Whether there may be files at all."""
        store = self.store
        return bool(self.rules and self.rules.identity and store and store.bytes_max and store.host.total)

    def choice(self, waiting: Waiting, ledger: Ledger, now: float) -> Choice:
        """Where this request would go now. Changes nothing."""
        found = self._choices.get(waiting.rid)
        if found is None:
            found = self._choices[waiting.rid] = self._choose(waiting, ledger, now)
        return found

    def cached_tokens(self, waiting: Waiting, ledger: Ledger, now: float) -> int:
        """How much of a waiting request's prompt would not be computed if it were admitted now."""
        return self.choice(waiting, ledger, now).pages * ledger.limits.page_tokens

    def prefix_pages(self, keys: Sequence[PageKey]) -> int:
        """The longest beginning of these pages that a slot or a file holds."""
        found = self.store.match(keys) if self.store is not None and self.is_on else None
        held = (common_pages(keys, slot.keys) for slot in self.slots.slots) if self.slots is not None else ()
        return max(found[1] if found is not None else 0, *held, 0)

    def gate(self, waiting: Waiting, ledger: Ledger, now: float) -> Gate | None:
        """The "slot" gate that is closed for a request."""
        slots = self.slots
        if slots is None:
            return None
        choice = self.choice(waiting, ledger, now)
        if choice.slot is None:
            if not (slots.is_starting or slots.is_saving):
                return None
            if not self._queue.holds(STARTING):
                self._float_waits_since = now
            return STARTING
        if slots.is_starting and self._queue.holds(STARTING) and now - self._float_waits_since >= FLOAT_PATIENCE_S:
            return STARTING  # or those that wait for nobody to be on his way might wait for ever
        want = self._want(waiting, ledger)
        name = in_the_making(want, choice, self.unsaved(), self.costs)
        if name is not None:
            return "slot", name
        run = favourite(want, choice, self._owners(), self.costs, now)
        return None if run is None else ("slot", run.rid)

    def unsaved(self) -> Iterator[tuple[str, tuple[PageKey, ...]]]:
        """Names and pages of files that are being written."""
        for specs in self.planned.values():
            for spec in specs.values():
                yield spec.name, spec.keys
        for spec in self.looked_at.values():
            yield spec.name, spec.keys
        for slot in self.slots.slots if self.slots is not None else ():
            if slot.saving:
                yield slot.saving, slot.keys

    def _choose(self, waiting: Waiting, ledger: Ledger, now: float) -> Choice:
        want, slots = self._want(waiting, ledger), self.slots
        left = self._left_in(waiting)
        if left is not None:
            kept = (waiting.tokens - 1) // want.page_tokens
            return Choice(left, kept, 0.0, promised=kept * want.page_tokens)
        if slots is not None and waiting.pinnable and waiting.seats == 1:
            choice = choose(want, slots.free(), self.costs, self.covered, self.save_min)
            if choice.slot is not None:
                return choice
        pages = len(ledger.cached_run(waiting, now))
        if slots is not None or not waiting.pinnable or waiting.seats > 1:
            return Choice(None, pages, self.costs.read_s(waiting.tokens))
        return choose_unpinned(want, pages, self.costs)

    def _want(self, waiting: Waiting, ledger: Ledger) -> Want:
        size = ledger.limits.page_tokens
        pages = max(0, min(len(waiting.keys), (waiting.tokens - 1) // size)) if self._settings.prefix_enabled else 0
        keys = waiting.keys[:pages]
        own = self.store.owned(waiting.rid) if self.store is not None and waiting.resumes else None
        if own is not None:
            return Want(keys, waiting.tokens, size, True, (own, min(own.tokens, waiting.tokens - 1) // size))
        found = self.store.match(keys) if self.store is not None and waiting.exact and pages else None
        return Want(keys, waiting.tokens, size, waiting.exact, found)

    def _left_in(self, waiting: Waiting) -> Slot | None:
        """The slot that a request which gave way was stopped in, if that still holds all of it."""
        if self.slots is None or waiting.left is None or waiting.left[0] >= len(self.slots.slots):
            return None
        slot, turn = self.slots.slots[waiting.left[0]], waiting.left[1]
        whole = slot.turns == turn and slot.tokens == waiting.tokens - 1 and not slot.doubtful
        return slot if whole and slot.is_free and not self.slots.is_adrift else None

    @property
    def save_min(self) -> int:
        """Fewer tokens are not worth a file; 0: nothing is."""
        return self._settings.save_tokens_min if self.can_save else 0

    def covered(self, slot: Slot) -> int:
        """How many pages of what a slot holds are in a file."""
        keys, pages = self.covers.get(slot.index, ((), 0))
        if keys is not slot.keys:
            found = self.store.match(slot.keys) if self.store is not None and slot.exact else None
            pages = found[1] if found is not None else 0
            self.covers[slot.index] = slot.keys, pages
        return pages

    def _owners(self) -> Iterable[tuple[Slot, Running]]:
        slots = self.slots
        if slots is None:
            return ()
        return [(slot, self._running[slot.owner]) for slot in slots.owned() if slot.owner in self._running]

    # --- giving slots away ------------------------------------------------------------------------------------------

    def grant(self, waiting: Waiting, ledger: Ledger, now: float) -> tuple[SlotPlan, int, list[m.Action]]:
        """A request is admitted: its plan, how many of its prompt's tokens are believed to be cached, and which files
        have to go first."""
        self._doubt_idle(ledger)
        choice, size = self.choice(waiting, ledger, now), ledger.limits.page_tokens
        slots, slot, spec = self.slots, choice.slot, None
        gone: list[m.Action] = []
        if choice.restore is not None and self.store is not None:
            self.store.hold(choice.restore.name, waiting.rid)
        erased = self._erase(waiting, choice, ledger)
        if slots is not None and slot is None:
            slots.let_float(waiting.rid, waiting.seats)
        elif slots is not None and slot is not None:
            spec = self._save_first(waiting, slot, choice, ledger, now, gone)
            slots.take(waiting.rid, slot, now)
            stays = 0 if choice.restore is not None else choice.pages
            doubtful = slot.doubtful
            self.put(slot, slot.keys[:stays], stays * size, slot.exact)
            slot.doubtful = doubtful and bool(stays)  # until it is computed
            slot.hits = slot.hits + 1 if stays else 0
        self._left_over = 0
        plan = SlotPlan(
            slot.index if slot is not None else None, choice.promised, spec, erased,
            choice.restore.name if choice.restore is not None else None,
            self._reads_first(waiting, choice, size))
        self.changed()
        return plan, choice.pages * size, gone

    def started(self, run: Running, plan: SlotPlan) -> None:
        """Its plan is on its way to the shell."""
        run.plan = plan
        if plan.read_first or any(spec.why == "fork" for spec in self.planned.get(run.rid, {}).values()):
            run.reading = plan.read_first
            self.leaders[run.rid] = run

    def _reads_first(self, waiting: Waiting, choice: Choice, size: int) -> bool:
        uncached = waiting.tokens - choice.pages * size
        if waiting.resumes or not (
                waiting.exact and waiting.pinnable and waiting.seats == 1 and waiting.keys and self.can_save):
            return False
        if not 0 < self._settings.leader_tokens <= uncached or not self._settings.prefix_enabled or (
                self.slots is not None and choice.slot is None):
            return False
        return not self.costs.prefill.is_known or self.costs.read_s(uncached) > self._settings.read_first_s

    def _save_first(self, waiting: Waiting, slot: Slot, choice: Choice, ledger: Ledger, now: float,
                    gone: list[m.Action]) -> SaveSpec | None:
        """What the slot holds, if it is about to be lost, or if the next in line want it as well."""
        why: SaveWhy = "evict"
        if choice.restore is None and self._is_wanted(waiting, slot, choice, ledger, now):
            why = "fork"
        elif not choice.save:
            return None
        spec = self.plan_save(slot.keys, len(slot.keys) * ledger.limits.page_tokens, why, now, gone)
        if spec is not None:
            self.planned.setdefault(waiting.rid, {})[spec.name] = spec
        return spec

    def _is_wanted(self, waiting: Waiting, slot: Slot, choice: Choice, ledger: Ledger, now: float) -> bool:
        pages, least = choice.pages, self._settings.leader_tokens
        if not (0 < least <= pages * ledger.limits.page_tokens and choice.promised and self.save_min):
            return False
        if pages > len(slot.keys) or self.covered(slot) >= pages:
            return False  # more than has keys: an answer of its own, left there when it gave way
        last = slot.keys[pages - 1]
        return any(
            other is not waiting and other.exact and len(other.keys) >= pages and other.keys[pages - 1] == last
            for other in islice(self._queue.upcoming(now, held=True), SHARERS_SOUGHT))

    def _erase(self, waiting: Waiting, choice: Choice, ledger: Ledger) -> tuple[int, ...]:
        """Slots whose cells a unified pool needs: a restore fails where there are none, and what the runtime empties by
        itself it does not tell."""
        if ledger.limits.mode is not PoolMode.UNIFIED:
            return ()
        size = ledger.limits.page_tokens
        cells = ledger.limits.pages * size
        used = sum(run.table.length for run in self._running.values())
        need = max(waiting.tokens, choice.restore.tokens if choice.restore is not None else 0) + size
        if self.slots is None:
            short = choice.restore is not None and used + self._left_over + need > cells
            return tuple(range(self.rules.slots)) if short and self.rules is not None else ()
        gone = erase(self.slots.free(), choice.slot, used, need, cells) if choice.slot is not None else ()
        for slot in gone:
            self.put(slot, (), 0, False)
            slot.hits = 0
        return tuple(slot.index for slot in gone)

    def _doubt_idle(self, ledger: Ledger, ended: int = 0) -> None:
        """Answers may have taken the cells of idle slots, which a unified pool does not tell. The most is taken when
        somebody leaves, with ``ended`` tokens, or now."""
        if self.slots is None or ledger.limits.mode is not PoolMode.UNIFIED:
            return
        used = ended + sum(run.table.length for run in self._running.values())
        held = sum(slot.tokens for slot in self.slots.slots if slot.owner is None)
        if used + held > ledger.limits.pages * ledger.limits.page_tokens:
            self.slots.doubt()
            self.changed()

    def plan_save(self, keys: tuple[PageKey, ...], tokens: int, why: SaveWhy, now: float,
                  gone: list[m.Action]) -> SaveSpec | None:
        """A file for that, if there may be one; what has to be deleted first is appended to ``gone``."""
        planned = self.store.plan_save(keys, tokens, why, now) if self.store is not None and self.can_save else None
        if planned is None:
            return None
        spec, names = planned
        gone += [m.Forget(name) for name in names]
        self.covers.clear()
        return spec

    def written(self, rid: RequestId, name: str) -> None:
        """A file of this request's plan is being looked at, and how that ends will be told: not its own any more."""
        spec = self.planned.get(rid, {}).pop(name, None)
        if spec is not None:
            self.looked_at[name] = spec

    # --- ends -------------------------------------------------------------------------------------------------------

    def closed(self, run: Running, ledger: Ledger, now: float, *, idle: bool) -> None:
        """A running request is over; ``idle`` if the runtime was seen to be done with it."""
        if self.store is not None:  # also when it was switched off since its grant
            self.store.release(run.rid)
            for name in self.planned.pop(run.rid, ()):
                self.store.abandon(name)
                self._queue.release(("slot", name), for_good=True)
        self.leaders.pop(run.rid, None)
        if not self.is_on:
            return
        if run.first_at is not None and run.over_at is None:
            self.costs.decode.note(run.produced, now - run.first_at)
        self._left_over += run.tokens + run.produced
        self._doubt_idle(ledger, run.tokens + run.produced)
        slot = self.slots.leave(run.rid, now, idle=idle, left=float_remains(run)) if self.slots is not None else None
        if slot is not None:
            self._leave_content(run, slot, ledger, now)
        if slot is None or slot.keys is not run.keys:
            self.gone.append(run.keys)  # as far as it was not computed, or was gone while it ran
        self._queue.release(("slot", run.rid), for_good=True)
        self.settle()

    def _leave_content(self, run: Running, slot: Slot, ledger: Ledger, now: float) -> None:
        if run.epoch != ledger.epoch or not self._settings.prefix_enabled:
            self.put(slot, (), 0, False)
            return
        left = remains(run, slot, ledger.limits.page_tokens, self.costs.prefill, now)
        if left is not None:
            self.put(slot, *left)

    # --- what happens to them ---------------------------------------------------------------------------------------

    def start(self, rid: RequestId) -> None:
        """A slot of the runtime has this request."""
        run = self._running.get(rid)
        if run is not None:
            run.serving, run.reading = True, False
        if rid in self.leaders:  # its prompt was not read beforehand: that failed
            self.let_go(rid, alone=True)
        if self.slots is not None and self.slots.start(rid):
            self.settle()

    def let_go(self, rid: RequestId, *, alone: bool) -> None:
        """Nobody has to wait for this leader any more; ``alone``: nor for another, for it was no use."""
        self.leaders.pop(rid, None)
        if alone:
            for waiting in self._queue.behind(("leader", rid)):
                waiting.alone = True
        self._queue.release(("leader", rid), for_good=True)

    def share_pages(self, ledger: Ledger) -> None:
        """Slots with a context each hold what they have in common once, as far as pages are counted."""
        ledger.shares_slots = self.slots is not None and ledger.limits.mode is PoolMode.SPLIT

    def keeps(self, rid: RequestId) -> bool:
        """Whether what this running request computes can be found again: not if nobody knows in which slot."""
        return self.slots is None or self.slots.slot_of(rid) is not None

    def tell(self, ledger: Ledger) -> None:
        """Let the ledger forget the cached pages that no slot holds any more."""
        gone, self.gone = self.gone, []
        if gone and self.slots is not None and ledger.tree.size:
            held = self.held()
            for keys in {id(keys): keys for keys in gone}.values():
                ledger.forget(keys, held)

    def held(self) -> list[Sequence[PageKey]]:
        """What the slots hold, or will when those who run in them end."""
        return [] if self.slots is None else [
            *(slot.keys for slot in self.slots.slots), *(run.keys for _, run in self._owners())]

    def put(self, slot: Slot, keys: tuple[PageKey, ...], tokens: int, exact: bool) -> None:
        """The slot holds this now."""
        if slot.keys and common_pages(slot.keys, keys) < len(slot.keys):
            self.gone.append(slot.keys)
        slot.hold(keys, tokens, exact)

    def changed(self) -> None:
        """Whatever was chosen may be chosen otherwise now."""
        self._choices.clear()

    def settle(self) -> None:
        """Open the gate of those who waited for nobody to be on his way to a slot."""
        if self.slots is None or not (self.slots.is_starting or self.slots.is_saving):
            self._queue.release(STARTING)
        self.changed()
