"""Saved files on a disk that only the runtime sees."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

from ..errors import StoreError
from .filelock import try_lock
from .kvfiles import MANIFEST, OWNED, Disk, FileState, manifest_name, sweep
from .kvshelf import Draft, InThread, Shelf, Stock, Stocked, Written
from .manifest import Manifest

REMOTE_MAX: Final = 16


class RemoteShelf(Shelf):
    """Manifests of files on a disk that only the runtime sees: ``files_max`` names, used again and again. Nothing can
    be checked there; but the runtime says how many tokens a restore brought, see ``KvStore.restored``.

    Names begin with an id of this folder, so two KVStreams with one runtime never write the same. The folder is the
    first below ``state_dir`` that nobody uses.
    """

    def __init__(self, state_dir: Path, disk: Disk, files_max: int) -> None:
        super().__init__(state_dir, disk)
        self._state_dir = state_dir
        self._files_max = files_max
        self._lock: int | None = None
        self._prefix = ""
        self._tainted: set[str] = set()  # a save that nobody waits for may still be written over what is there

    def load(self, busy: frozenset[str], known: frozenset[str]) -> Stock:
        """*Errors*: ``OSError`` when nothing can be kept there."""
        self._claim()
        manifests = [name for name in self.disk.names(self.folder) if MANIFEST.fullmatch(name)]
        found, dropped = [], 0
        for _, manifest in self._read(manifests):
            if manifest is None:
                continue
            if OWNED.fullmatch(manifest.name) and manifest.name not in known:
                self.remove(manifest)  # the state of a request of another life: nobody's prefix
            elif manifest.file in self._names():
                found.append(Stocked(manifest))
            else:  # files_max was lowered, or the folder copied
                dropped += 1
                self.remove(manifest)
        sweep(self.disk, self.folder, referenced=frozenset(), ours="")
        self.opened()
        return Stock(tuple(found), dropped)

    def _claim(self) -> None:
        if self._lock is not None:
            return
        self._state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(REMOTE_MAX):
            path = self._state_dir / f"remote-{number}.lock"  # never removed, so removing cannot race with locking
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            if not try_lock(fd):
                os.close(fd)
                continue
            try:
                self.folder = self._state_dir / f"remote-{number}"
                self.folder.mkdir(mode=0o700, exist_ok=True)
                self._prefix = f"kvr{self._id()}"
            except BaseException:
                os.close(fd)
                raise
            self._lock = fd
            return
        raise OSError(errno.EBUSY, f"{REMOTE_MAX} KVStreams use it already")

    def _id(self) -> str:
        path = self.folder / "id"
        with contextlib.suppress(OSError):
            found = self.disk.read(path, 64).decode("ascii", "replace").strip()
            if re.fullmatch(r"[0-9a-f]{8}", found):
                return found
            self.disk.remove(path)
        self.disk.write(path, self.token.encode("ascii"))
        return self.token

    def _names(self) -> list[str]:
        return [f"{self._prefix}{number:06x}.kv" for number in range(self._files_max)]

    def free_file(self, taken: Collection[str]) -> str | None:
        """Quick. None: all are taken. *Errors*: ``OSError`` when nothing can be kept."""
        self._claim()
        return next((name for name in self._names() if name not in taken and name not in self._tainted), None)

    def free_bytes(self) -> int | None:
        return None

    def is_nearly_full(self) -> bool:
        return False

    async def examine(self, draft: Draft, in_thread: InThread) -> Written:
        if draft.bytes < 1:
            raise StoreError("the runtime does not say how much it wrote: not kept")
        return Written(draft.file, draft.keys, "", FileState(draft.bytes, 0))

    def commit(self, draft: Draft, manifest: Manifest, stale: str) -> None:
        """*Errors*: ``OSError``, and everything is as before. ``stale`` is free again."""
        publication = self._publish(manifest)
        try:
            self.disk.rename(publication, self.folder / manifest_name(manifest.name))
        except OSError:
            with contextlib.suppress(OSError):
                self.disk.remove(publication)
            raise

    def discard(self, file: str) -> None:
        """Quick."""
        self._tainted.add(file)

    async def verify(self, manifest: Manifest, known: FileState | None, in_thread: InThread) -> FileState:
        """That the manifest is still there: ``kvstream cache rm`` may have removed it. *Errors*: ``OSError``."""
        await in_thread(lambda: self.disk.state(self.folder / manifest_name(manifest.name)))
        return FileState(manifest.size, 0)

    def close(self) -> None:
        """Quick."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                os.close(self._lock)
            self._lock = None
