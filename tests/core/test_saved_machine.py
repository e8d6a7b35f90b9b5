"""The store of KV files beside a naive disk, with KVStream dying between any two steps.

After every step: what is offered is on disk, whole, and begins with the pages it is said to; what was said to be saved
is offered until it was said to be forgotten; both bounds hold; nothing held or owned was given up for room.
"""

from __future__ import annotations

from math import inf

from attrs import define
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstream.core.messages import SlotSaved
from kvstream.core.pool import PagePool
from kvstream.core.saved import SavedStore
from kvstream.core.types import RequestId, SavedPrefix, SaveSpec, SlotRules, Tier
from tests.core.naive_slots import Disk, common, ids_of, keys_for
from tests.play import PAGE
from tests.strategies import prompts

PAGES, BYTES, EACH = 24, 3500, 10


@define
class Write:
    """A save under way. ``told`` is what will be reported, None while the runtime has not done it."""

    spec: SaveSpec
    ids: list[int]
    rid: RequestId | None
    told: SlotSaved | None = None


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.disk = Disk()
        self.now = 0.0
        self.identity = "aa"
        self.writes: list[Write] = []
        self.said: set[str] = set()  # saved, as far as the store was told, and not forgotten since
        self.owners: dict[str, RequestId] = {}
        self.held: dict[RequestId, str] = {}
        self.next_rid = 0
        self.store = self.begin()

    def begin(self) -> SavedStore:
        self.host = PagePool(PAGES, Tier.HOST)
        store = SavedStore(0, BYTES, page_tokens=PAGE, ttl_s=40.0, tokens_min=PAGE, host=self.host)
        store.set_rules(SlotRules(2, identity=self.identity, token_bytes=EACH))
        return store

    def forget(self, names: tuple[str, ...]) -> None:
        for name in names:
            assert name not in self.held.values(), "a file that somebody is about to restore was given up"
            self.disk.forget(name)
            self.said.discard(name)

    @rule(prompt=prompts, tokens=st.integers(1, 160), swap=st.booleans(), fork=st.booleans())
    def plan_one(self, prompt: str, tokens: int, swap: bool, fork: bool) -> None:
        self.plan(prompt, tokens, swap, fork)

    def plan(self, prompt: str, tokens: int, swap: bool, fork: bool) -> Write | None:
        ids = ids_of(prompt, tokens)
        rid = None
        if swap:
            self.next_rid += 1
            rid = RequestId(self.next_rid)
        planned = self.store.plan_save(
            keys_for(ids), tokens, "swap" if swap else "fork" if fork else "evict", self.now, rid)
        if planned is not None:
            spec, gone = planned
            assert not self.owners.keys() & set(gone)
            self.forget(gone)
            assert spec.name not in self.disk.files or spec.name not in self.said, "a good file is overwritten"
            if rid is not None:
                self.owners[spec.name] = rid
            self.writes.append(Write(spec, ids, rid))
            return self.writes[-1]
        return None

    @rule(prompt=prompts, tokens=st.integers(16, 160), swap=st.booleans(), more=st.sampled_from([0, 0, 500]))
    def save(self, prompt: str, tokens: int, swap: bool, more: int) -> None:
        """All of it at once, as it mostly is: or a machine of single steps is busy with them."""
        one = self.plan(prompt, tokens, swap, True)
        if one is not None:
            self.write(one, "whole", more)
            self.tell(one)

    @precondition(lambda self: any(not write.told for write in self.writes))
    @rule(data=st.data(), how=st.sampled_from(["whole", "failed", "short", "more"]), more=st.sampled_from([0, 500]))
    def write_one(self, data: st.DataObject, how: str, more: int) -> None:
        self.write(data.draw(st.sampled_from([write for write in self.writes if not write.told])), how, more)

    def write(self, one: Write, how: str, more: int) -> None:
        """The runtime and the shell do it: temporary name, check, rename, manifest."""
        ids, name, ok = list(one.ids), one.spec.name, how in ("whole", "more", "short")
        if how == "more":
            ids += ids_of("c", 2 * PAGE)
        if how == "short":
            ids = ids[:-1]
        if ok:
            self.disk.files[name] = ids
            self.disk.listed[name] = keys_for(ids)
        size = len(ids) * EACH + more
        keys = keys_for(ids) if how == "more" else one.spec.keys
        one.told = SlotSaved(0, name, ok, len(ids), size, 0.1, keys, one.rid)

    @precondition(lambda self: any(write.told for write in self.writes))
    @rule(data=st.data())
    def tell_one(self, data: st.DataObject) -> None:
        self.tell(data.draw(st.sampled_from([write for write in self.writes if write.told])))

    def tell(self, one: Write) -> None:
        self.writes.remove(one)
        assert one.told is not None
        if one.told.ok:
            self.said.add(one.spec.name)
        self.forget(self.store.saved(one.told, self.now))
        if one.spec.name not in self.said:
            self.owners.pop(one.spec.name, None)

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.writes))
        self.store.abandon(one.spec.name)

    @invariant()
    def the_longest_beginning_is_found(self) -> None:
        for prompt in ("a", "b", "ab", "aab", "abc", "ba"):
            self.look_up(ids_of(prompt, 160))

    def look_up(self, ids: list[int]) -> None:
        found = self.store.match(keys_for(ids))
        best = max((common(ids, other or []) // PAGE for name, other in self.disk.files.items()
                    if name in self.said and name not in self.owners), default=0)
        assert (found[1] if found else 0) == best, "not the longest beginning"
        if found is not None:
            real = self.disk.files[found[0].name]
            assert real is not None and common(ids, real) >= found[1] * PAGE, "a wrong prefix is offered"

    @rule(prompt=prompts, rid=st.integers(100, 103).map(RequestId))
    def hold(self, prompt: str, rid: RequestId) -> None:
        found = self.store.match(keys_for(ids_of(prompt, 160)))
        if found is not None:
            self.store.hold(found[0].name, rid)
            self.held[rid] = found[0].name

    @precondition(lambda self: self.held)
    @rule(data=st.data(), ok=st.booleans())
    def restored(self, data: st.DataObject, ok: bool) -> None:
        rid = data.draw(st.sampled_from(sorted(self.held)))
        name = self.held.pop(rid)
        if ok:
            self.store.used(name, self.now)
        else:  # the shell deletes it
            self.disk.forget(name)
            self.said.discard(name)
            self.store.failed(name)
            self.held = {r: n for r, n in self.held.items() if n != name}
        self.store.release(rid)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def owner_is_done(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.owners)))
        self.forget(self.store.forget_owned(self.owners.pop(name)))

    @rule(step=st.sampled_from([1.0, 30.0]))
    def wait(self, step: float) -> None:
        self.now += step
        self.forget(self.store.expire(self.now))
        due = self.store.next_expiry()
        assert due is None or due > self.now

    @rule()
    def kvstream_dies(self) -> None:
        """Whoever comes next finds what has a manifest; states of requests that gave way are swept away."""
        self.writes, self.held, self.owners = [], {}, {}
        self.store = self.begin()
        self.said = set()
        for name in list(self.disk.files):
            if name not in self.disk.listed or name.startswith("s"):
                self.disk.forget(name)
        self.load()

    def load(self) -> None:
        found = [SavedPrefix(name, keys, len(self.disk.files[name] or ()), EACH * len(self.disk.files[name] or ()))
                 for name, keys in self.disk.listed.items() if name.startswith(self.identity)]
        self.said |= {entry.name for entry in found}
        self.forget(self.store.load(found))

    @rule(identity=st.sampled_from(["aa", "bb"]))
    def other_model(self, identity: str) -> None:
        if identity != self.identity:
            self.identity = identity
            gone = self.store.set_rules(SlotRules(2, identity=identity, token_bytes=EACH))
            self.held, self.said = {}, set()
            self.forget(gone)
            self.owners = {}
            self.load()

    @invariant()
    def what_is_offered_is_there(self) -> None:
        self.forget(self.store.expire(self.now))  # as in every step of the scheduler
        self.store.check()
        self.host.check()
        for entry in self.store.entries():
            real = self.disk.files.get(entry.name)
            assert real is not None and keys_for(real)[: len(entry.keys)] == entry.keys, "a wrong prefix is offered"
            assert len(real) == entry.tokens
        assert {entry.name for entry in self.store.entries()} == self.said, "something saved was lost"
        assert self.host.held <= PAGES and self.host.held == self.store.pages
        assert self.store.bytes <= BYTES or self.is_stuck()
        assert self.store.next_expiry() != inf

    def is_stuck(self) -> bool:
        """Nothing could be given up for a file that grew: all the rest is held, owned or being written."""
        busy = set(self.held.values()) | self.owners.keys()
        return all(entry.name in busy for entry in self.store.entries())


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=max(60, settings.default.max_examples), stateful_step_count=50)
