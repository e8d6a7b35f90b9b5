"""The events of hard inject: what the runtime, the shell and the disk have done, entered in ``Inject``'s books."""

from __future__ import annotations

from collections.abc import Sequence

from . import messages as m
from .costs import Costs
from .inject import Inject
from .ledger import Ledger
from .queue import WaitingQueue
from .saved import SavedStore
from .settings import SchedulerSettings
from .slots import SlotMap
from .state import Running
from .types import RequestId, SavedPrefix, SlotRules


class SlotEvents:
    """See the module. ``inject``, ``queue`` and ``running`` are the scheduler's own."""

    def __init__(self, settings: SchedulerSettings, inject: Inject, queue: WaitingQueue,
                 running: dict[RequestId, Running]) -> None:
        self._settings = settings
        self._inject = inject
        self._queue = queue
        self._running = running

    def backend_up(self, ledger: Ledger, fresh: bool) -> list[m.Action]:
        """The backend is there with these limits, ``fresh`` as another process."""
        limits = ledger.limits
        if self._inject.store is None:
            self._inject.store = SavedStore(
                limits.host_pages, self._settings.saved_bytes_max, page_tokens=limits.page_tokens,
                tokens_min=self._settings.save_tokens_min, host=ledger.host)
            self._inject.store.set_rules(self._inject.rules)
        gone = self._inject.store.set_pages(limits.page_tokens)
        if fresh and self._inject.slots is not None:
            self._inject.slots.renew()
        elif gone and self._inject.slots is not None:
            self._inject.slots.forget()
        self._inject.share_pages(ledger)
        self._inject.changed()
        return [m.Forget(name) for name in gone]

    def expire(self, now: float) -> list[m.Action]:
        """What was kept over a bound only because it was in use goes when it is not."""
        store = self._inject.store
        return [] if store is None else [m.Forget(name) for name in store.expire(now)]

    def apply(self, event: m.Event, ledger: Ledger | None, now: float) -> list[m.Action]:
        """An event of hard inject."""
        actions: list[m.Action] = []
        match event:
            case m.SlotsKnown(rules):
                actions += self._known(rules, ledger)
            case m.StoreLoaded(entries) if self._inject.store is not None:
                actions += [m.Forget(name) for name in self._inject.store.load(entries)]
            case m.SlotsLost() if self._inject.slots is not None:
                for slot in self._inject.slots.slots:
                    self._inject.put(slot, (), 0, False)
                    slot.empty()
            case m.SlotsLook(tokens, busy) if self._inject.slots is not None:
                self._look(self._inject.slots, tokens, busy)
            case m.SlotStarted(rid):
                self._inject.start(rid)
            case m.Restored():
                self._restored(event, now)
            case m.PromptRead():
                actions += self._prompt_read(event, ledger, now)
            case m.SlotWritten(rid, name):
                self._inject.written(rid, name)
            case m.SlotSaved():
                actions += self._saved(event, now)
            case m.CacheSeen(_, cached, prompt, seconds):
                self._inject.costs.prefill.note(prompt - cached, seconds)
        self._inject.changed()
        return actions

    def _known(self, rules: SlotRules | None, ledger: Ledger | None) -> list[m.Action]:
        before, self._inject.rules = self._inject.rules, rules
        gone = self._inject.store.set_rules(rules) if self._inject.store is not None else ()
        if before is None or rules is None or before.identity != rules.identity:
            self._inject.costs = Costs()
        if before is not None and rules is not None and before.identity != rules.identity and ledger is not None:
            ledger.renew()
        if rules is None or not rules.pinned:
            self._inject.slots = None
        elif self._inject.slots is None or before is None or before.slots != rules.slots:
            self._inject.slots = SlotMap(rules)
            if ledger is not None:
                ledger.renew()
            for run in self._running.values():  # nobody knows where they are
                self._inject.slots.let_float(run.rid, run.seats)
                if run.serving or run.produced:
                    self._inject.slots.start(run.rid)
        else:
            self._inject.slots.rules = rules
            if before.identity != rules.identity:
                self._inject.slots.forget()
        if rules is not None:
            self._inject.costs.token_bytes, self._inject.costs.fixed_bytes = rules.token_bytes, rules.fixed_bytes
        for section in list(self._queue.held()):
            if section.gate[0] in ("slot", "leader"):
                self._queue.release(section.gate, for_good=True)
        if rules is None:
            self._inject.leaders.clear()
        if ledger is not None:
            self._inject.share_pages(ledger)
        return [m.Forget(name) for name in gone]

    def _look(self, slots: SlotMap, tokens: Sequence[int | None], busy: frozenset[int]) -> None:
        held = [slot.keys for slot in slots.slots]
        slots.look(tokens, busy)
        self._inject.gone += [keys for keys, slot in zip(held, slots.slots, strict=True) if keys and not slot.keys]
        self._inject.settle()

    def _restored(self, event: m.Restored, now: float) -> None:
        run = self._running.get(event.rid)
        slot = self._inject.slots.slot_of(event.rid) if self._inject.slots is not None else None
        store = self._inject.store
        entry: SavedPrefix | None = store.get(event.name) if store is not None else None
        if store is not None:
            store.release(event.rid)
        if event.ok:
            self._inject.costs.restore.note(event.bytes, event.seconds)
            if store is not None:
                store.used(event.name, now)
            if slot is not None and entry is not None:
                self._inject.put(slot, entry.keys, entry.tokens, True)
                slot.hits = 1
        else:
            if store is not None:
                store.failed(event.name)
            self._inject.covers.clear()
            if run is not None:
                run.tokens_cached = 0
            if slot is not None:
                self._inject.put(slot, (), 0, False)

    def _prompt_read(self, event: m.PromptRead, ledger: Ledger | None, now: float) -> list[m.Action]:
        run = self._running.get(event.rid)
        self._inject.costs.prefill.note(event.computed, event.seconds)
        if run is None or ledger is None or run.draining:
            return []
        run.reading, run.serving = False, True
        keys = run.keys[: run.tokens // ledger.limits.page_tokens]
        slot = self._inject.slots.slot_of(run.rid) if self._inject.slots is not None else None
        valid = run.epoch == ledger.epoch  # else another process read it, or another model
        if slot is not None and valid:
            self._inject.put(slot, keys, run.tokens, run.exact)
        actions: list[m.Action] = []
        spec = None
        if valid and self._queue.holds(("leader", run.rid)):
            spec = self._inject.plan_save(keys, len(keys) * ledger.limits.page_tokens, "fork", now, actions)
        if spec is None:
            self._inject.let_go(run.rid, alone=True)
        else:
            self._inject.planned.setdefault(run.rid, {})[spec.name] = spec
        return [*actions, m.Proceed(run.rid, spec)]

    def _saved(self, event: m.SlotSaved, now: float) -> list[m.Action]:
        if event.ok:
            self._inject.costs.save.note(event.bytes, event.seconds)
        gone = self._inject.store.saved(event, now) if self._inject.store is not None else ()
        self._inject.covers.clear()
        if self._inject.slots is not None and self._inject.slots.saved(event.slot, event.name):
            slot = self._inject.slots.slots[event.slot]
            # Unless it was lost meanwhile: then it holds nothing.
            if event.ok and slot.keys and len(event.keys) > len(slot.keys) and (
                    event.keys[: len(slot.keys)] == slot.keys):
                self._inject.put(slot, event.keys, event.tokens, True)  # the file told what the answer was
            self._inject.settle()
        rid = event.rid
        self._inject.looked_at.pop(event.name, None)
        spec = self._inject.planned.get(rid, {}).pop(event.name, None) if rid is not None else None
        self._queue.release(("slot", event.name), for_good=True)
        if rid is not None and spec is not None and spec.why == "fork":
            self._inject.let_go(rid, alone=not event.ok or event.name in gone)
        return [m.Forget(name) for name in gone]
