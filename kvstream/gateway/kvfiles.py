"""The store's files on disk: their names, and every operation on them in one place.

A directory may hold other people's files too. Only names of these forms are ever touched::

    kvtTTTTTTTTNNNNNN.kv        being written by the runtime for the store with token T
    kvsKEYxTTTTTTTTNNNNNN.kv    written, verified; it counts once a manifest names it
    KEY.kv.json                 the manifest: this file alone decides whether, and where, KEY is kept
    KEY.kv.TTTTTTTTNNNNNN.tmp   a manifest on its way
    kvstreamcheckNNNNNNNN.kv    being looked at by a self-check
    kvstream-TTTTTTTT.lock      held by the store with token T as long as it lives
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from hashlib import blake2b
from pathlib import Path
from typing import Final

from attrs import frozen

from .filelock import bury

NAME: Final = re.compile(r"[a-z0-9]{1,80}\.kv")
TEMPORARY: Final = re.compile(r"kvt(?P<token>[0-9a-f]{8})[0-9a-f]{6}\.kv")
DATA: Final = re.compile(r"kvs(?P<stem>[a-z0-9]{1,60})x(?P<token>[0-9a-f]{8})[0-9a-f]{6}\.kv")
MANIFEST: Final = re.compile(r"(?P<name>[a-z0-9]{1,80}\.kv)\.json")
MANIFEST_DRAFT: Final = re.compile(r"[a-z0-9]{1,80}\.kv\.(?P<token>[0-9a-f]{8})[0-9a-f]{6}\.tmp")
OWNED: Final = re.compile(r"s[0-9a-f]+x[0-9a-f]+\.kv")  # the state of a request that gave way; see core.saved
LOCK: Final = re.compile(r"kvstream-(?P<token>[0-9a-f]{8})\.lock")
CHECK: Final = re.compile(r"kvstreamcheck[0-9a-f]{0,8}\.kv|kvstream-probe\.bin")
STEM_CHARS_MAX: Final = 60
NUMBER_MAX: Final = 0xFFFFFF
MANIFEST_BYTES_MAX: Final = 32 * 2**20  # a million token ids are 5.6 MB


def manifest_name(name: str) -> str:
    return f"{name}.json"


def stem_of(name: str) -> str:
    """What of a name is repeated in the name of its data file."""
    stem = name.removesuffix(".kv")
    return stem if len(stem) <= STEM_CHARS_MAX else blake2b(stem.encode(), digest_size=16).hexdigest()


def temporary_name(token: str, number: int) -> str:
    return f"kvt{token}{number & NUMBER_MAX:06x}.kv"


def data_name(name: str, token: str, number: int) -> str:
    return f"kvs{stem_of(name)}x{token}{number & NUMBER_MAX:06x}.kv"


def draft_name(name: str, token: str, number: int) -> str:
    return f"{name}.{token}{number & NUMBER_MAX:06x}.tmp"


@frozen
class FileState:
    """What tells a changed file without reading it."""

    size: int
    mtime_ns: int


class Disk:
    """Every operation that the store does on files; all block, all raise ``OSError``. Tests put failures in here."""

    def names(self, folder: Path) -> list[str]:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))

    def state(self, path: Path) -> FileState:
        found = path.stat()
        return FileState(found.st_size, found.st_mtime_ns)

    def read(self, path: Path, limit: int, offset: int = 0) -> bytes:
        """At most ``limit`` bytes."""
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(limit)

    def write(self, path: Path, data: bytes) -> None:
        """A new file that only its owner can read: prompts are private."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)

    def make_private(self, path: Path) -> None:
        path.chmod(0o600)

    def rename(self, old: Path, new: Path) -> None:
        """Atomic, over what is there."""
        old.replace(new)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def free_bytes(self, folder: Path) -> int:
        return shutil.disk_usage(folder).free


def sweep(disk: Disk, folder: Path, *, referenced: frozenset[str], ours: str = "", kept: frozenset[str] = frozenset(),
          unread: frozenset[str] = frozenset()) -> int:
    """Remove what no living store is about to use: temporary files, drafts, and data that no manifest names. ``ours``
    is our own token and ``kept`` what we still want of it. Data of the stems in ``unread`` may belong to a manifest
    that we could not read. Gives the bytes freed. *Errors*: ``OSError`` of listing the folder; others are skipped."""
    alive: dict[str, bool] = {}
    freed = 0
    names = disk.names(folder)
    for name in names:
        found = TEMPORARY.fullmatch(name) or MANIFEST_DRAFT.fullmatch(name) or DATA.fullmatch(name)
        if found is None or name in referenced or name in kept or found.groupdict().get("stem") in unread:
            continue
        token = found["token"]
        if token != ours:
            if token not in alive:
                alive[token] = not bury(folder, token)
            if alive[token]:
                continue
        with contextlib.suppress(OSError):
            size = disk.state(folder / name).size
            disk.remove(folder / name)
            freed += size
    for name in names:
        found = LOCK.fullmatch(name)
        if found is not None and found["token"] != ours:
            bury(folder, found["token"])
    return freed
