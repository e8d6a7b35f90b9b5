"""Where saved files and their manifests lie: on a disk of this machine, or on one that only the runtime sees.

A shelf has no memory of what is on it; ``kvstore.KvStore`` has. Plain methods block and belong into a thread unless
they say that they are quick; those never raise, except for what they name.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
from array import array
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Final, Protocol, TypeVar

from attrs import define, frozen

from ..adapters.llamacpp_slotfile import read_head
from ..adapters.slot_calls import SlotDone
from ..core.types import PageKey, SaveSpec
from ..errors import StoreError
from .filelock import Owner, bury
from .kvfiles import (
    DATA,
    MANIFEST,
    MANIFEST_BYTES_MAX,
    NUMBER_MAX,
    OWNED,
    Disk,
    FileState,
    data_name,
    draft_name,
    manifest_name,
    stem_of,
    sweep,
    temporary_name,
)
from .manifest import Manifest, ManifestError, longer

CHUNK_BYTES: Final = 32 * 2**20
HEAD_BYTES: Final = 4096  # before and around the token ids
NEARLY_FULL_BYTES: Final = 16 * 2**20
MANIFESTS_MAX: Final = 10_000

ReadIds = Callable[[bytes], "Sequence[int] | None"]
"""Token ids from the first bytes of a saved file, at least all of them; None when it is another kind of file."""

T = TypeVar("T")


class InThread(Protocol):
    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


@frozen
class Draft:
    """What the runtime says that it wrote to ``file``; it is to be called ``name``."""

    name: str
    file: str
    bytes: int
    tokens: int
    keys: tuple[PageKey, ...]


@frozen
class Written:
    """What was found: ``file`` is what it is going to be called."""

    file: str
    keys: tuple[PageKey, ...]
    checksum: str
    state: FileState


@frozen
class Stocked:
    manifest: Manifest


@define
class Kept:
    """One that can be offered."""

    manifest: Manifest
    state: FileState | None  # of the file whose checksum was right; None: not read since the start
    unwritten: bool = False  # last use and hits are only here


@frozen
class Pending:
    """One that is being written."""

    file: str
    bytes: int


@frozen
class Stock:
    found: tuple[Stocked, ...]
    dropped: int
    read_only: OSError | None = None


class Shelf:
    """A folder of manifests."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self.folder = folder
        self.disk = disk
        self.token = secrets.token_hex(4)  # replaced by that of a lock, where one can be had
        self._number = 0
        self.opened: Callable[[], None] = lambda: None  # told by every load that found the folder

    def _next(self) -> int:
        self._number += 1
        if self._number > NUMBER_MAX:
            raise StoreError("16 million files were saved; restart KVStream")
        return self._number

    def _read(self, names: Iterable[str]) -> Iterator[tuple[str, Manifest | None]]:
        """(name, manifest) of those that are there; None for one that is not ours to judge or cannot be read. Damaged
        ones are removed."""
        for name in list(names)[:MANIFESTS_MAX]:
            try:
                yield name, read_manifest(self.disk, self.folder, name)
            except OSError:
                yield name, None
            except ManifestError as error:
                if error.foreign:
                    yield name, None
                else:
                    with contextlib.suppress(OSError):
                        self.disk.remove(self.folder / name)

    def _publish(self, manifest: Manifest) -> Path:
        """Write a manifest beside where it will be. *Errors*: ``OSError``, and nothing is left."""
        draft = self.folder / draft_name(manifest.name, self.token, self._next())
        try:
            self.disk.write(draft, manifest.dump())
        except BaseException:
            with contextlib.suppress(OSError):
                self.disk.remove(draft)
            raise
        return draft

    def vanished(self, manifests: Iterable[Manifest]) -> list[str]:
        """The names of those that somebody else deleted."""
        return [manifest.name for manifest in manifests if self._is_away(manifest)]

    def _is_away(self, manifest: Manifest) -> bool:
        try:
            self.disk.state(self.folder / manifest_name(manifest.name))
        except FileNotFoundError:
            return True
        except OSError:
            pass
        return False

    def write_uses(self, manifests: Collection[Manifest]) -> None:
        """Write last use and hits. Never raises: they are a hint for whom to drop first."""
        for manifest in manifests:
            path = self.folder / manifest_name(manifest.name)
            with contextlib.suppress(OSError, StoreError):
                self.disk.state(path)  # it may have been pruned meanwhile
                draft = self._publish(manifest)
                try:
                    self.disk.rename(draft, path)
                except OSError:
                    self.disk.remove(draft)

    def remove(self, manifest: Manifest) -> None:
        """Quick. The manifest first: without it a file is litter, the other way round it would be a promise."""
        with contextlib.suppress(OSError):
            self.disk.remove(self.folder / manifest_name(manifest.name))


class LocalShelf(Shelf):
    """The runtime's slot directory, which we can see. Others may use it at the same time; see ``filelock.Owner``."""

    def __init__(self, folder: Path, disk: Disk, read_ids: ReadIds) -> None:
        super().__init__(folder, disk)
        self._read_ids = read_ids
        self._owner: Owner | None = None

    def _claim(self) -> None:
        if self._owner is None:
            self._owner = Owner.claim(self.folder)
            self.token = self._owner.token

    def load(self, busy: frozenset[str], known: frozenset[str]) -> Stock:
        """*Errors*: ``OSError`` when the folder cannot be listed."""
        read_only = None
        names = self.disk.names(self.folder)
        try:
            self._claim()
        except OSError as error:
            read_only = error
        found, unread, dropped = [], set(), 0
        manifests = [name for name in names if MANIFEST.fullmatch(name)]
        for name, manifest in self._read(manifests):
            if manifest is None:
                unread.add(stem_of(name.removesuffix(".json")))
                continue
            fault = self._is_gone_or_cut(manifest)
            if fault:
                dropped += 1
                self.remove(manifest)
            elif fault is None:
                unread.add(stem_of(manifest.name))
            elif not OWNED.fullmatch(manifest.name) or manifest.name in known:
                found.append(Stocked(manifest))
            elif self._is_left_over(manifest):  # the state of a request of another life: nobody's prefix
                self.remove(manifest)
        unread.update(stem_of(name.removesuffix(".json")) for name in manifests[MANIFESTS_MAX:])
        if read_only is None:
            sweep(self.disk, self.folder, referenced=frozenset(stocked.manifest.file for stocked in found),
                  ours=self.token, kept=busy, unread=frozenset(unread))
        self.opened()
        return Stock(tuple(found), dropped, read_only)

    def _is_gone_or_cut(self, manifest: Manifest) -> bool | None:
        """None: it cannot be seen now."""
        if not DATA.fullmatch(manifest.file):
            return True
        try:
            return self.disk.state(self.folder / manifest.file).size != manifest.size
        except FileNotFoundError:
            return True
        except OSError:
            return None

    def _is_away(self, manifest: Manifest) -> bool:
        return super()._is_away(manifest) or self._is_gone_or_cut(manifest) is True

    def free_file(self, taken: Collection[str]) -> str | None:
        """Quick. *Errors*: ``OSError`` when nothing can be created there."""
        self._claim()
        return temporary_name(self.token, self._next())

    def free_bytes(self) -> int | None:
        """Quick. *Errors*: ``OSError``."""
        return self.disk.free_bytes(self.folder)

    def is_nearly_full(self) -> bool:
        """Quick. So that a save that the runtime could not make may be the disk's fault."""
        with contextlib.suppress(OSError):
            return self.disk.free_bytes(self.folder) < NEARLY_FULL_BYTES
        return False

    async def examine(self, draft: Draft, in_thread: InThread) -> Written:
        """*Errors*: ``OSError``, ``StoreError`` when it is not what the runtime says."""
        path = self.folder / draft.file
        state, keys = await in_thread(lambda: self._look(path, draft))
        checksum = await self._checksum(path, state.size, in_thread)
        return Written(data_name(draft.name, self.token, self._next()), keys, checksum, state)

    def _look(self, path: Path, draft: Draft) -> tuple[FileState, tuple[PageKey, ...]]:
        try:
            state = self.disk.state(path)
        except FileNotFoundError:
            raise StoreError(f"the runtime wrote {draft.bytes} bytes, and they are not in {self.folder}; is inject.dir"
                             " its --slot-save-path?") from None
        if state.size != draft.bytes or state.size < 1:
            raise StoreError(f"the runtime wrote {draft.bytes} bytes, and {path.name} has {state.size}: not kept")
        with contextlib.suppress(PermissionError):  # the runtime runs as somebody else, who decides
            self.disk.make_private(path)
        return state, self._keys(draft, self.disk.read(path, HEAD_BYTES + 8 * draft.tokens))

    def _keys(self, draft: Draft, head: bytes) -> tuple[PageKey, ...]:
        ids = self._read_ids(head)
        if ids is None or not draft.keys:
            return draft.keys
        packed = packed_ids(ids[:draft.tokens])
        known = b"".join(key.content for key in draft.keys)
        if not packed.startswith(known):
            raise StoreError("the saved file holds other tokens than the slot was thought to hold: not kept")
        return draft.keys + longer(draft.keys[-1], packed[len(known):], len(draft.keys[0].content))

    async def _checksum(self, path: Path, size: int, in_thread: InThread) -> str:
        digest = blake2b(digest_size=16)

        def step(offset: int) -> int:
            chunk = self.disk.read(path, CHUNK_BYTES, offset)
            digest.update(chunk)
            return len(chunk)

        offset = 0
        while offset < size:  # step by step, so that a cancel need not wait for gigabytes
            count = await in_thread(lambda at=offset: step(at))  # type: ignore[misc]
            if not count:
                break
            offset += count
        return digest.hexdigest()

    def commit(self, draft: Draft, manifest: Manifest, stale: str) -> None:
        """Two renames, of which the second is what counts; then ``stale``, which the manifest named before, is litter.
        *Errors*: ``OSError``, and everything is as before."""
        data, target = self.folder / manifest.file, self.folder / manifest_name(manifest.name)
        publication = self._publish(manifest)
        try:
            self.disk.rename(self.folder / draft.file, data)
            self.disk.rename(publication, target)
        except OSError:
            for path in (publication, data):
                with contextlib.suppress(OSError):
                    self.disk.remove(path)
            raise
        if stale:
            self.discard(stale)

    def discard(self, file: str) -> None:
        """Quick."""
        with contextlib.suppress(OSError):
            self.disk.remove(self.folder / file)

    def remove(self, manifest: Manifest) -> None:
        super().remove(manifest)
        self.discard(manifest.file)

    async def verify(self, manifest: Manifest, known: FileState | None, in_thread: InThread) -> FileState:
        """That the file is what was kept: ``known`` is how it looked when it was read last. *Errors*: ``StoreError``,
        ``OSError``."""
        path = self.folder / manifest.file
        state = await in_thread(lambda: self.disk.state(path))
        if state.size != manifest.size:
            raise StoreError(f"it has {state.size} bytes instead of {manifest.size}")
        if state != known and await self._checksum(path, state.size, in_thread) != manifest.checksum:
            raise StoreError("its checksum is wrong")
        return state

    def _is_left_over(self, manifest: Manifest) -> bool:
        """Quick. Whether the store that wrote it is gone."""
        found = DATA.fullmatch(manifest.file)
        return found is None or (found["token"] != self.token and bury(self.folder, found["token"]))

    def close(self) -> None:
        """Quick."""
        if self._owner is not None:
            self._owner.release()
            self._owner = None


def read_manifest(disk: Disk, folder: Path, name: str) -> Manifest:
    """*Errors*: ``OSError``, ``ManifestError``."""
    data = disk.read(folder / name, MANIFEST_BYTES_MAX + 1)
    if len(data) > MANIFEST_BYTES_MAX:
        raise ManifestError("it is too long")
    manifest = Manifest.load(data)
    if manifest_name(manifest.name) != name:
        raise ManifestError("it has another name")
    return manifest


def packed_ids(ids: Sequence[int]) -> bytes:
    """Token ids as page keys have them, up to the first that is none: there is a picture."""
    numbers = array("I", ids)
    with contextlib.suppress(ValueError):
        del numbers[numbers.index(0xFFFFFFFF):]
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def token_ids(head: bytes) -> Sequence[int] | None:
    """What llama.cpp's files tell of themselves."""
    found = read_head(head)
    return None if found is None else found.ids


def check_promise(spec: SaveSpec, done: SlotDone) -> None:
    """*Errors*: ``StoreError`` when the slot held less than it was saved for, or nobody knows what."""
    if done.tokens < 1 or done.tokens < spec.tokens:
        raise StoreError(f"the slot held {done.tokens} tokens when it was saved, not {spec.tokens}: not kept")
    if not spec.keys or len({len(key.content) for key in spec.keys}) != 1 or len(spec.keys[0].content) % 4:
        raise StoreError("nothing is known of what the slot holds: not kept")
