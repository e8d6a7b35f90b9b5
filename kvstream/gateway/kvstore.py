"""The store: KV of slots in files that the runtime writes and reads, with a manifest for each that says what it is.

Where the files are on this machine they are checked, renamed, counted and deleted here (``kvshelf.LocalShelf``). A
runtime on another machine is given names in rotation, and only the manifests are ours (``RemoteShelf``).

A file counts from the moment its manifest is in place, and until that is gone: both are one rename or removal. So a
crash at any step leaves the store as it was before that step. Nothing is synced: this is a cache, a power failure may
take what was saved last, and the checksum tells a torn file from a whole one at its first use after a start.

All state is changed on the event loop; threads only work on files. Nothing here outlives the call that began it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, Union

import trio

from ..adapters.slot_calls import Identity, SlotDone
from ..core.types import SavedPrefix, SaveSpec
from ..errors import StoreError
from .inject_settings import InjectSettings
from .kvfiles import NAME, Disk
from .kvremote import RemoteShelf
from .kvshelf import Draft, Kept, LocalShelf, Pending, ReadIds, Stocked, T, check_promise, token_ids
from .manifest import Manifest, bounded_facts, why_gone
from .saving import Gone, SavingSwitch, StoreMeter, StoreView

log = logging.getLogger("kvstream.store")

THREADS: Final = 2
ABANDONED_MAX: Final = 64
USES_WRITTEN_EVERY_S: Final = 60.0


class KvStore:
    """The saved prefixes of one lane. One owner; methods are called from one task group, in any order.

    ``dir`` is the runtime's slot directory as seen from here, None when it cannot be; then manifests go to
    ``state_dir``. ``page_tokens`` 0: files of any page size are offered. ``read_ids`` reads the token ids that the
    head of a file names. ``wall`` is the wall clock. ``opened`` is called in a thread when the folder was read.
    """

    def __init__(self, dir: Path | None, state_dir: Path, identity: Identity, settings: InjectSettings, *,
                 page_tokens: int = 0, read_ids: ReadIds = token_ids, disk: Disk | None = None,
                 meter: StoreMeter | None = None, wall: Callable[[], float] = time.time,
                 opened: Callable[[], None] = lambda: None) -> None:
        self._settings = settings
        self._identity = identity
        self._page_tokens = page_tokens
        self._wall = wall
        self._meter = meter
        self._shelf: Union[LocalShelf, RemoteShelf] = (
            RemoteShelf(state_dir, disk or Disk(), settings.files_max) if dir is None
            else LocalShelf(dir, disk or Disk(), read_ids))
        self._shelf.opened = opened
        self._kept: dict[str, Kept] = {}
        self._others: list[Stocked] = []
        self._pending: dict[str, Pending] = {}
        self._abandoned: deque[str] = deque(maxlen=ABANDONED_MAX)
        self._switch = SavingSwitch(meter)
        self._uses_written = 0.0
        self._threads = trio.CapacityLimiter(THREADS)
        self._changing = trio.Lock()  # a sweep must not see a file between its two renames
        self._saved = self._dropped = 0
        self._closed = False

    # --- what there is ------------------------------------------------------------------------------------------------

    @property
    def is_local(self) -> bool:
        return isinstance(self._shelf, LocalShelf)

    @property
    def saving(self) -> bool:
        """Whether :meth:`temporary` would give a name now."""
        return not self._closed and self._switch.is_on(trio.current_time())

    @property
    def other_bytes(self) -> int:
        return sum(stocked.manifest.size for stocked in self._others)

    @property
    def why_off(self) -> str:
        """Why nothing is saved now; empty while it is."""
        return "" if self._switch.is_on(trio.current_time()) else self._switch.why

    def view(self) -> StoreView:
        sizes = [kept.manifest.size for kept in self._kept.values()]
        return StoreView(len(sizes), sum(sizes), self.other_bytes, self.why_off, str(self._shelf.folder), self._saved,
                         self._dropped, dict(self._switch.offs))

    async def load(self) -> list[SavedPrefix]:
        """What can be offered. May be called again, after which only what it gives is offered.

        Removes what dead processes left, files of the wrong size, damaged manifests, and what is beyond the quota,
        other models' first. *Errors*: none; a directory that cannot be used is logged and gives nothing.
        *Cancellation*: safe.
        """
        async with self._changing:
            busy, known = frozenset(pending.file for pending in self._pending.values()), frozenset(self._kept)
            try:
                stock = await self._in_thread(lambda: self._shelf.load(busy, known))
            except OSError as error:
                self._kept.clear()
                self._others.clear()
                self._switch.turn_off(
                    "read_only", f"the directory of saved KV {self._shelf.folder} cannot be used:"
                    f" {error.strerror or error}; check inject.dir", trio.current_time())
                return []
            self._dropped += stock.dropped
            if stock.read_only is not None:
                self._switch.failed(stock.read_only, f"nothing can be created in {self._shelf.folder}",
                                    trio.current_time())
            before = self._kept
            self._kept, self._others = {}, []
            for stocked in stock.found:
                name = stocked.manifest.name
                if self._is_ours(stocked.manifest):
                    kept = before.get(name)
                    same = kept and kept.manifest.checksum == stocked.manifest.checksum
                    self._kept[name] = Kept(stocked.manifest, kept.state if kept and same else None)
                else:
                    self._others.append(stocked)
            self._others.sort(key=lambda stocked: stocked.manifest.used)
            self._trim()
        self._tell()
        return [self._prefix(kept.manifest) for kept in self._kept.values()]

    async def reread(self) -> list[SavedPrefix] | None:
        """What can still be offered, if somebody else deleted files (``kvstream cache rm``); else None. *Errors*: none.
        *Cancellation*: safe."""
        async with self._changing:
            kept = dict(self._kept)
            names = await self._in_thread(lambda: self._shelf.vanished([each.manifest for each in kept.values()]))
        lost = [name for name in names if self._kept.get(name) is kept[name]]
        for name in lost:
            self._shelf.remove(self._kept.pop(name).manifest)
        self._tell()
        return [self._prefix(each.manifest) for each in self._kept.values()] if lost else None

    def _is_ours(self, manifest: Manifest) -> bool:
        pages = self._page_tokens or manifest.page_bytes // 4
        return manifest.identity == self._identity.digest and manifest.page_bytes == 4 * pages

    def _prefix(self, manifest: Manifest) -> SavedPrefix:
        age_s = max(0.0, self._wall() - manifest.used)  # a clock that was set back: used just now
        return SavedPrefix(manifest.name, manifest.keys, manifest.tokens, manifest.size,
                           trio.current_time() - age_s, manifest.hits)

    # --- saving -------------------------------------------------------------------------------------------------------

    def temporary(self, name: str, bytes: int = 0) -> str:
        """The file name that the runtime is told to write for ``name``, of about ``bytes``. Then call :meth:`keep`,
        :meth:`failed` or :meth:`abandon`, whatever happens. Makes room at the cost of other models' files.

        *Errors*: ``StoreError`` while saving is off, or when there is no room.
        """
        now = trio.current_time()
        if not NAME.fullmatch(name):
            raise StoreError(f"{name!r} is no name for a file of the store")
        if self._closed:
            raise StoreError("the store is closed")
        self._switch.require(now)
        self._make_room(bytes)
        try:
            free = self._shelf.free_bytes()
            file = self._free_file()
        except OSError as error:
            raise self._switch.failed(error, f"nothing can be created in {self._shelf.folder}", now) from error
        if free is not None and free < bytes:
            self._switch.turn_off(
                "full", f"{self._shelf.folder} has {free / 2**20:.0f} MiB left, and {bytes / 2**20:.0f} are needed;"
                " free some space, or lower inject.disk_bytes_max", now)
            raise StoreError(self._switch.why)
        superseded = self._pending.pop(name, None)
        if superseded is not None:
            self._discard(superseded.file)
        self._pending[name] = Pending(file, bytes)
        return file

    def _free_file(self) -> str:
        """A file name that nobody uses. On a remote disk their number is bounded: the longest unused makes way, and
        its manifest is gone before the runtime is told to write over its file."""
        taken = {pending.file for pending in self._pending.values()}
        file = self._shelf.free_file(taken | {kept.manifest.file for kept in self._kept.values()}
                                     | {stocked.manifest.file for stocked in self._others})
        if file is None and self._others:
            return self._drop_other()
        if file is None and self._kept:
            oldest = min(self._kept.values(), key=lambda kept: kept.manifest.used)
            self.forget(oldest.manifest.name)
            return oldest.manifest.file
        if file is None:
            raise StoreError("all files on the runtime's disk are being written; raise inject.files_max")
        return file

    async def keep(self, spec: SaveSpec, done: SlotDone) -> SavedPrefix:
        """The runtime says that it wrote the file: look at it, and keep it under its name. Its keys may be more than
        those of ``spec``, since the file tells which tokens it holds.

        *Errors*: ``StoreError``; the file is gone then, and what was kept under that name before is still there.
        *Cancellation*: safe; the file is gone, or kept.
        """
        pending = self._pending.get(spec.name)
        if pending is None:
            raise StoreError(f"no save of {spec.name} was begun")
        kept = False
        try:
            check_promise(spec, done)
            await self._write_uses()
            prefix = await self._keep(spec, done, pending.file)
            kept = True
        finally:
            if (now_pending := self._pending.get(spec.name)) is not None and now_pending.file == pending.file:
                del self._pending[spec.name]
            if not kept:
                self._discard(pending.file)
        now = trio.current_time()
        if done.seconds is not None and done.seconds > self._settings.slow_save_s:
            self._switch.turn_off(
                "slow", f"a save of {done.bytes / 2**20:.0f} MiB took {done.seconds:.1f} s, inject.slow_save_s allows"
                f" {self._settings.slow_save_s:g}; a faster disk for --slot-save-path would help", now)
        else:
            self._switch.worked()
        return prefix

    async def _keep(self, spec: SaveSpec, done: SlotDone, file: str) -> SavedPrefix:
        where = self._shelf.folder
        draft = Draft(spec.name, file, done.bytes, done.tokens, spec.keys)
        try:
            written = await self._shelf.examine(draft, self._in_thread)
        except OSError as error:
            what = f"a saved file cannot be read in {where}"
            raise self._switch.failed(error, what, trio.current_time()) from error
        self._pending[spec.name] = Pending(file, written.state.size)
        self._make_room(0)
        now = self._wall()
        manifest = Manifest(
            spec.name, written.file, self._identity.digest, bounded_facts(self._identity.facts), written.keys,
            done.tokens, written.state.size, written.checksum, now, now, why=spec.why)
        async with self._changing:
            old = self._kept.get(spec.name)
            stale = old.manifest.file if old is not None else ""
            try:
                await self._in_thread(lambda: self._shelf.commit(draft, manifest, stale))
            except OSError as error:
                what = f"a file cannot be kept in {where}"
                raise self._switch.failed(error, what, trio.current_time()) from error
            self._kept[spec.name] = Kept(manifest, written.state)
        self._saved += 1
        self._tell("replaced" if stale else None)
        return self._prefix(manifest)

    def failed(self, name: str, why: str) -> None:
        """The runtime could not save: its own words. Several in a row, or a full disk, switch saving off. Never
        raises."""
        self.abandon(name)
        now = trio.current_time()
        if self._shelf.is_nearly_full():
            self._switch.turn_off("full", f"{self._shelf.folder} is full; free some space, or lower"
                                  " inject.disk_bytes_max (kvstream cache gc prunes now)", now)
        else:
            self._switch.fault(why, now)

    def abandon(self, name: str) -> None:
        """Nobody waits for that save any more; the runtime may still write it. Quick, never raises."""
        pending = self._pending.pop(name, None)
        if pending is not None:
            self._discard(pending.file)

    def _discard(self, file: str) -> None:
        """Remove a file that is nobody's, now and later: a runtime that was told to save does so, sooner or later."""
        self._shelf.discard(file)
        self._abandoned.append(file)

    # --- using --------------------------------------------------------------------------------------------------------

    async def offer(self, name: str) -> str:
        """The file name to restore. It is there, has the size it had and, where it was not read since the start or was
        touched meanwhile, the checksum. Reading takes a second for about a gigabyte, in a thread.

        *Errors*: ``StoreError``; the file is forgotten then. *Cancellation*: safe.
        """
        kept = self._kept.get(name)
        if kept is None:
            raise StoreError(f"{name} is not in the store")
        try:
            kept.state = await self._shelf.verify(kept.manifest, kept.state, self._in_thread)
        except (OSError, StoreError) as error:
            if self._kept.get(name) is kept:
                self.forget(name, "bad")
            why = error.strerror or error if isinstance(error, OSError) else error
            log.warning("the saved KV %s cannot be used and is dropped: %s", kept.manifest.file, why)
            raise StoreError(f"the saved KV {name} cannot be used: {why}") from error
        return kept.manifest.file

    def restored(self, name: str, done: SlotDone) -> bool:
        """The runtime says what it read. True: that is what was saved, and counts as a use. False: it is something
        else, or cut off; the file is forgotten, and the slot must be taken as empty."""
        kept = self._kept.get(name)
        if kept is None:
            return False
        good = done.tokens == kept.manifest.tokens and done.bytes in (0, kept.manifest.size)
        if good:
            self.used(name)
        else:
            log.warning("the runtime restored %d tokens from %s, which had %d; it is dropped",
                        done.tokens, kept.manifest.file, kept.manifest.tokens)
            self.forget(name, "bad")
        return good

    def used(self, name: str) -> None:
        """It was restored to use. Written to disk later, once in a while and at :meth:`close`."""
        kept = self._kept.get(name)
        if kept is not None:
            kept.manifest = kept.manifest.touched(self._wall(), kept.manifest.hits + 1)
            kept.unwritten = True

    def forget(self, name: str, why: Literal["quota", "bad"] = "quota") -> None:
        """It is not offered any more, now or after a restart: for room, or because it is ``bad``. Quick, never raises.
        """
        kept = self._kept.pop(name, None)
        if kept is not None:
            self._shelf.remove(kept.manifest)
            self._dropped += why == "bad"
            others = (other.manifest for other in self._kept.values())
            self._tell(why_gone(kept.manifest, others) if why == "quota" else why)

    def close(self) -> None:
        """Write down the last uses, remove what is half done. Quick, idempotent, never raises; saves that the runtime
        is still at are removed by the next store of the directory."""
        if self._closed:
            return
        self._closed = True
        for name in list(self._pending):
            self.abandon(name)
        for file in self._abandoned:
            self._shelf.discard(file)
        self._shelf.write_uses(self._unwritten())
        self._shelf.close()

    # --- room ---------------------------------------------------------------------------------------------------------

    def _total(self) -> int:
        return (sum(kept.manifest.size for kept in self._kept.values()) + self.other_bytes
                + sum(pending.bytes for pending in self._pending.values()))

    def _make_room(self, bytes: int) -> None:
        """Other models' files go, the longest unused first. Our own are the scheduler's to give up, beforehand."""
        limit = self._settings.disk_bytes_max
        while self._others and self._total() + bytes > limit:
            self._drop_other()
        if self._total() + bytes > limit:
            raise StoreError(f"{self._total() + bytes} bytes of saved KV would be more than inject.disk_bytes_max")

    def _trim(self) -> None:
        while self._others and self._total() > self._settings.disk_bytes_max:
            self._drop_other()
        for kept in sorted(self._kept.values(), key=lambda kept: kept.manifest.used):
            if self._total() <= self._settings.disk_bytes_max:
                return
            self.forget(kept.manifest.name)

    def _drop_other(self) -> str:
        stocked = self._others.pop(0)
        self._shelf.remove(stocked.manifest)
        self._tell("identity")
        return stocked.manifest.file

    def _tell(self, gone: Gone | None = None) -> None:
        if self._meter is not None:
            self._meter.store(files=len(self._kept), bytes=sum(kept.manifest.size for kept in self._kept.values()))
            if gone is not None:
                self._meter.evicted(gone)

    # --- last uses ----------------------------------------------------------------------------------------------------

    def _unwritten(self) -> list[Manifest]:
        found = [kept for kept in self._kept.values() if kept.unwritten]
        for kept in found:
            kept.unwritten = False
        return [kept.manifest for kept in found]

    async def _write_uses(self) -> None:
        now = trio.current_time()
        if now - self._uses_written >= USES_WRITTEN_EVERY_S and (manifests := self._unwritten()):
            self._uses_written = now
            await self._in_thread(lambda: self._shelf.write_uses(manifests))

    async def _in_thread(self, work: Callable[[], T], /) -> T:
        return await trio.to_thread.run_sync(work, limiter=self._threads)
