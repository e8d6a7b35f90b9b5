"""The KV files of the runtime's slots: which there are, which one serves a prompt, what may be written, what must go.

Theory of operation. The store knows three kinds of files. A *prefix* is on disk and may be restored for anybody whose
prompt begins with its pages. An *owned* file is the state of a request that gave way (swap): only that request uses it,
and it goes with it. A *pending* one is planned: its name, bytes and pages are set aside from ``plan_save`` until
``saved`` says how it ended, so that two plans cannot be promised the same room. Nothing is offered before ``saved`` has
heard that it is on disk, whole.

Two bounds hold over all three: bytes on disk, and host pages (``num_cpu_blocks``), which are taken from the host pool
of the ledger where there is one. Room is made *before* a write: ``plan_save`` names the files to be deleted first, the
ones that the new one replaces, then the least recently used. What somebody is about to restore (``hold``) and what is
owned is never given up for room. A file that turns out larger than expected is paid for after the write in the same
way.

A longer file of the same beginning replaces a shorter one, but only once it is on disk: a failed write loses nothing.
The shorter one stays if it is in use anyway, or hot and much cheaper to read.

Whether computing is dearer than writing is not asked here (``placement`` does); only whether it adds anything: content
that a file has already, all but a sixteenth, is not written again.

Names: the identity, then the digest of the last page; ``s`` before that and the number of the request behind it for an
owned file. So equal content has one name, and no file of another model, context or build can be named by accident.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, inf
from typing import Final

from attrs import define, evolve

from .messages import SlotSaved
from .pool import PagePool
from .savedindex import SavedIndex
from .types import PageId, PageKey, RequestId, SavedPrefix, SaveSpec, SaveWhy, SlotRules, Tier

TOKENS_MIN: Final = 64  # a shorter prefix is read again as fast as it is restored
GAIN_SHARE: Final = 16  # what a file would add to one that is there: less than one part in so many is nothing
HOT_HITS: Final = 2  # a prefix restored so often is hot
MUCH_SMALLER: Final = 4  # a hot one stays beside a file of so many times its tokens
NAME_MAX: Final = 80


@define(eq=False, slots=True)
class _Place:
    """What a file takes. ``spec`` while it is pending, ``entry`` once it is on disk."""

    bytes: int
    pages: tuple[PageId, ...]
    owner: RequestId | None = None
    spec: SaveSpec | None = None
    entry: SavedPrefix | None = None


class SavedStore:
    """``pages_max`` pages of the host tier (``host``: the pool they are counted in, whose own total then decides) and
    ``bytes_max`` bytes on disk bound all files; 0 of either: nothing is saved. A file unused for ``ttl_s`` goes.
    ``tokens_min``: a shorter prefix is not saved. Times are seconds on the caller's clock."""

    def __init__(
        self, pages_max: int, bytes_max: int, *, page_tokens: int = 16, ttl_s: float = inf,
        tokens_min: int = TOKENS_MIN, host: PagePool | None = None,
    ) -> None:
        self.host = host if host is not None else PagePool(pages_max, Tier.HOST)
        self.bytes_max = bytes_max
        self.evicted = 0
        self.replaced = 0
        self._page_tokens = page_tokens
        self._ttl_s = ttl_s
        self._tokens_min = tokens_min
        self._rules = SlotRules(0)
        self._token_bytes = 0.0  # learned
        self._places: dict[str, _Place] = {}
        self._index = SavedIndex()
        self._holds: dict[RequestId, str] = {}
        self._bytes = 0
        self._due: float | None = None  # when the next file expires, None: to be found out

    # --- questions --------------------------------------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        """On disk, and about to be."""
        return self._bytes

    @property
    def pages(self) -> int:
        """Host pages of all files, those about to be written included."""
        return sum(len(place.pages) for place in self._places.values())

    def entries(self) -> tuple[SavedPrefix, ...]:
        """The files on disk, owned ones too."""
        return tuple(place.entry for place in self._places.values() if place.entry is not None)

    def get(self, name: str) -> SavedPrefix | None:
        place = self._places.get(name)
        return None if place is None else place.entry

    def match(self, keys: Sequence[PageKey]) -> tuple[SavedPrefix, int] | None:
        """The file that holds the longest beginning of a prompt, and how many of its pages; contents are compared. Of
        several the one with the fewest bytes. One look per page of the prompt."""
        return self._index.match(keys)

    def owned(self, rid: RequestId) -> SavedPrefix | None:
        """The state of a request that gave way, once it is on disk."""
        return next((p.entry for p in self._places.values() if p.owner == rid and p.entry is not None), None)

    def bytes_for(self, tokens: int) -> int:
        """What a file of so many tokens is expected to take, 0 while nobody knows."""
        each = max(self._rules.token_bytes, self._token_bytes)
        return ceil(each * tokens) + self._rules.fixed_bytes if each else 0

    # --- writing ----------------------------------------------------------------------------------------------------

    def plan_save(
        self, keys: Sequence[PageKey], tokens: int, why: SaveWhy, now: float, rid: RequestId | None = None
    ) -> tuple[SaveSpec, tuple[str, ...]] | None:
        """A save of ``tokens`` whose first pages are ``keys``, and the files to forget before it is written; they are
        gone from here already. With ``rid`` (swap) it becomes the state of that request. None: it would add nothing,
        or there is no room for it even so. What else the same plan restores has to be held before."""
        if not self._rules.identity or not self.bytes_max or tokens < 1:
            return None
        keys = tuple(keys)
        if rid is None and (not keys or tokens < self._tokens_min or self._has(keys, tokens, why)):
            return None
        name = self._name(keys, rid)
        size = self.bytes_for(tokens)
        pages = max(len(keys), ceil(tokens / self._page_tokens))
        if name is None or name in self._places:
            return None
        gone = self._make_room(size, pages, keys if rid is None else (), tokens)
        if gone is None:
            return None
        spec = SaveSpec(name, keys, tokens, why)
        self._place(name, _Place(size, self.host.overdraw(pages), rid, spec))
        return spec, gone

    def saved(self, event: SlotSaved, now: float) -> tuple[str, ...]:
        """How a save ended; the files to forget: those it replaces, those that do not fit any more, or itself if it is
        not what was planned. A failed one leaves everything as it was."""
        place = self._places.get(event.name)
        if place is None or place.spec is None:
            # Nobody waits for it any more (cleared, abandoned), so nobody would ever delete it either.
            return (event.name,) if event.ok and place is None else ()
        spec, keys = place.spec, event.keys or place.spec.keys
        if not event.ok:
            self._drop(event.name)
            return ()
        if event.tokens < spec.tokens or keys[: len(spec.keys)] != spec.keys:
            self._drop(event.name)
            return (event.name,)
        if event.bytes > self._rules.fixed_bytes:
            self._token_bytes = (event.bytes - self._rules.fixed_bytes) / event.tokens
        if event.bytes > self.bytes_max:
            self._drop(event.name)
            return (event.name,)
        place.spec = None
        place.entry = SavedPrefix(event.name, keys, event.tokens, event.bytes, used_at=now)
        self._resize(place, event.bytes, max(len(keys), ceil(event.tokens / self._page_tokens)))
        if place.owner is not None:
            return self._fit(keep=event.name)
        self._index.add(place.entry)
        return (*self._replace(place.entry), *self._fit(keep=event.name))

    def abandon(self, name: str) -> None:
        """A planned save will not be made, or nobody will hear of it: its room is free again."""
        place = self._places.get(name)
        if place is not None and place.spec is not None:
            self._drop(name)

    # --- using ------------------------------------------------------------------------------------------------------

    def hold(self, name: str, rid: RequestId) -> None:
        """``rid`` is about to restore it: it is not given up for room until ``release``."""
        if name in self._places:
            self._holds[rid] = name
            self._due = None

    def release(self, rid: RequestId) -> None:
        """It restores nothing any more. Idempotent."""
        if self._holds.pop(rid, None) is not None:
            self._due = None

    def used(self, name: str, now: float) -> None:
        """A restore of it worked: a hit."""
        place = self._places.get(name)
        if place is None or place.entry is None:
            return
        place.entry = evolve(place.entry, used_at=max(now, place.entry.used_at), hits=place.entry.hits + 1)
        self._due = None
        if place.owner is None:
            self._index.add(place.entry)

    def failed(self, name: str) -> None:
        """A restore of it failed, so it is gone."""
        self.forget(name)

    def forget(self, name: str) -> None:
        """The file is gone, or about to be. Idempotent. One that is only planned stays planned: see ``abandon``."""
        place = self._places.get(name)
        if place is not None and place.spec is None:
            self._drop(name)

    def forget_owned(self, rid: RequestId) -> tuple[str, ...]:
        """The request that gave way is back, or left: its state is of no use. The file to forget, if it is on disk; one
        that is being written is forgotten when ``saved`` comes."""
        names = [name for name, place in self._places.items() if place.owner == rid]
        gone = tuple(name for name in names if self._places[name].entry is not None)
        for name in names:
            self._drop(name)
        return gone

    # --- the whole --------------------------------------------------------------------------------------------------

    def set_rules(self, rules: SlotRules | None) -> tuple[str, ...]:
        """Other rules hold. Of another identity nothing that was known is offered. Files to forget: as ``clear``."""
        before, self._rules = self._rules, rules if rules is not None else SlotRules(0)
        if before.identity == self._rules.identity:
            return ()
        self._token_bytes = 0.0
        return self.clear()

    def set_pages(self, page_tokens: int) -> tuple[str, ...]:
        """The page size. Keys of another one mean nothing, so the files cannot be found: they go."""
        if page_tokens == self._page_tokens:
            return ()
        self._page_tokens = page_tokens
        names = tuple(entry.name for entry in self.entries())
        self.clear()
        return names

    def load(self, entries: Iterable[SavedPrefix]) -> tuple[str, ...]:
        """These files are on disk, and no other prefixes. Planned and owned ones stay. Files to forget: what does not
        fit, the least recently used first, and those that have no keys to be found by."""
        for entry in self.entries():
            if self._places[entry.name].owner is None:
                self._drop(entry.name)
        gone: list[str] = []
        for entry in sorted(entries, key=lambda e: e.used_at):
            if entry.name in self._places:
                continue  # being written anew, or somebody's own
            if not entry.keys:
                gone.append(entry.name)
                continue
            pages = max(len(entry.keys), ceil(entry.tokens / self._page_tokens))
            self._place(entry.name, _Place(entry.bytes, self.host.overdraw(pages), entry=entry))
            self._index.add(entry)
        return (*gone, *self._fit())

    def clear(self) -> tuple[str, ...]:
        """Nothing is known any more. Prefixes stay on disk, for when their identity comes back; the files of requests
        that gave way are to be forgotten, nobody will ask for them."""
        gone = tuple(name for name, place in self._places.items() if place.owner is not None and place.spec is None)
        for name in list(self._places):
            self._drop(name)
        self._holds.clear()
        return gone

    def expire(self, now: float) -> tuple[str, ...]:
        """To be forgotten: files that nobody used for the time to live, and what is over a bound and was in use when
        it came to be so."""
        due = self.next_expiry()
        if due is None or due > now:
            return self._fit()
        return (*self._give_up([e.name for e in self._idle() if e.used_at + self._ttl_s <= now]), *self._fit())

    def next_expiry(self) -> float | None:
        """When the next file expires; None: never."""
        if self._due is None:
            self._due = min((entry.used_at + self._ttl_s for entry in self._idle()), default=inf)
        return self._due if self._due < inf else None

    def check(self) -> None:
        """Raise AssertionError if bytes, pages or the index are not those of the files."""
        places = self._places
        assert self._bytes == sum(place.bytes for place in places.values()), "bytes of files miscounted"
        pages = [page for place in places.values() for page in place.pages]
        assert len(pages) == len(set(pages)), "two files share a host page"
        assert all(self.host.count(page) for page in pages), "a file without its host pages"
        assert all((place.spec is None) != (place.entry is None) for place in places.values())
        assert all(place.entry.name == name for name, place in places.items() if place.entry is not None)
        assert all(name in places for name in self._holds.values()), "a hold on a file that is gone"
        self._index.check([e for e in self.entries() if places[e.name].owner is None])

    # --- inside -----------------------------------------------------------------------------------------------------

    def _has(self, keys: tuple[PageKey, ...], tokens: int, why: SaveWhy) -> bool:
        """Whether a file has it already, or all but too little; or will in a moment."""
        planned = (place.spec for place in self._places.values() if place.spec is not None and place.owner is None)
        if any(spec.keys[: len(keys)] == keys for spec in planned):
            return True
        found = self._index.match(keys)
        if found is None:
            return False
        gain = 1 if why == "fork" else max(1, len(keys) // GAIN_SHARE)
        return len(keys) - found[1] < gain

    def _name(self, keys: tuple[PageKey, ...], rid: RequestId | None) -> str | None:
        identity = self._rules.identity
        name = f"s{identity}x{rid:x}.kv" if rid is not None else f"{identity}{keys[-1].digest.hex()}.kv"
        return name if len(name) <= NAME_MAX + len(".kv") else None

    def _idle(self) -> list[SavedPrefix]:
        """Files that may be given up, the least recently used first."""
        held = set(self._holds.values())
        idle = [p.entry for n, p in self._places.items() if p.entry is not None and p.owner is None and n not in held]
        return sorted(idle, key=lambda entry: (entry.used_at, entry.hits, entry.name))

    def _make_room(self, size: int, pages: int, keys: tuple[PageKey, ...], tokens: int) -> tuple[str, ...] | None:
        """Give up files until so much is free; None, and nothing changed, if that cannot be."""
        idle = self._idle()
        # First what this one will replace anyway.
        idle.sort(key=lambda e: not (_is_replaced(e, tokens) and e.keys == keys[: len(e.keys)]))
        gone, is_enough = self._first_of(idle, size, pages)
        return self._give_up(gone) if is_enough else None

    def _fit(self, keep: str = "") -> tuple[str, ...]:
        """Give up files until both bounds hold again; the one to keep last of all."""
        if self._bytes <= self.bytes_max and self.host.held <= self.host.total:
            return ()
        gone, _ = self._first_of(sorted(self._idle(), key=lambda entry: entry.name == keep), 0, 0)
        return self._give_up(gone)

    def _first_of(self, entries: list[SavedPrefix], size: int, pages: int) -> tuple[list[str], bool]:
        """The first files that must go for both bounds to hold beside ``size`` bytes and ``pages`` more, and whether
        they do hold then."""
        bytes_over, pages_over = self._bytes + size - self.bytes_max, self.host.held + pages - self.host.total
        gone: list[str] = []
        for entry in entries:
            if bytes_over <= 0 and pages_over <= 0:
                break
            place = self._places[entry.name]
            bytes_over -= place.bytes
            pages_over -= len(place.pages)
            gone.append(entry.name)
        return gone, bytes_over <= 0 and pages_over <= 0

    def _replace(self, entry: SavedPrefix) -> tuple[str, ...]:
        """Give up the shorter files of which this one is a continuation."""
        held = set(self._holds.values())
        names = [other.name for other in self._index.beginnings(entry)
                 if other.name not in held and _is_replaced(other, entry.tokens)]
        for name in names:
            self._drop(name)
        self.replaced += len(names)  # nothing is lost by that
        return tuple(names)

    def _give_up(self, names: Sequence[str]) -> tuple[str, ...]:
        for name in names:
            self._drop(name)
        self.evicted += len(names)
        return tuple(names)

    def _place(self, name: str, place: _Place) -> None:
        self._places[name] = place
        self._bytes += place.bytes
        self._due = None

    def _resize(self, place: _Place, size: int, pages: int) -> None:
        self._bytes += size - place.bytes
        place.bytes = size
        self._due = None
        if pages > len(place.pages):
            place.pages += self.host.overdraw(pages - len(place.pages))

    def _drop(self, name: str) -> None:
        place = self._places.pop(name)
        self._due = None
        self._bytes -= place.bytes
        self.host.drop(place.pages)
        self._index.remove(name)
        for rid in [rid for rid, held in self._holds.items() if held == name]:
            del self._holds[rid]


def _is_replaced(shorter: SavedPrefix, tokens: int) -> bool:
    """Whether a file of so many tokens with the same beginning makes this one useless."""
    return not (shorter.hits >= HOT_HITS and shorter.tokens * MUCH_SMALLER <= tokens)
