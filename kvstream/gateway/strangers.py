"""Files of KV in a folder that no manifest there names: shown, never deleted by name or by ``--all``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from attrs import frozen

from ..errors import StoreError
from .kvfiles import CHECK, DATA, MANIFEST, TEMPORARY, Disk
from .kvshelf import read_manifest
from .manifest import ManifestError
from .prune import Folder

REMOTE: Final = re.compile(r"kvr[0-9a-f]{14}\.kv")

KINDS: Final = (
    (REMOTE, "written by its server for a KVStream that does not see this folder (inject.dir would let it)"),
    (TEMPORARY, "being written for a KVStream, or left by one that died"),
    (DATA, "of a KVStream, without a manifest that can be read"),
    (CHECK, "left by the check of a KVStream"))
OTHERS: Final = "of another program"


@frozen
class Strangers:
    """So many files of one kind; ``whose`` says it in words."""

    folder: Folder
    whose: str
    files: int
    bytes: int


def strangers(folders: Iterable[Folder]) -> list[Strangers]:
    """What lies there and is not listed. *Errors*: ``StoreError`` for a folder that cannot be read."""
    disk = Disk()
    found: dict[tuple[Folder, str], list[int]] = {}
    for folder in folders:
        if folder.remote:
            continue
        try:
            names = disk.names(folder.path)
        except OSError as error:
            raise StoreError(f"{folder.path} cannot be read: {error.strerror or error}") from error
        listed = _listed(disk, folder, names)
        for name in names:
            if name in listed or not (name.endswith(".kv") or CHECK.fullmatch(name)):
                continue
            whose = next((words for form, words in KINDS if form.fullmatch(name)), OTHERS)
            try:
                found.setdefault((folder, whose), []).append(disk.state(folder.path / name).size)
            except OSError:
                continue  # gone meanwhile
    return [Strangers(folder, whose, len(sizes), sum(sizes)) for (folder, whose), sizes in found.items()]


def _listed(disk: Disk, folder: Folder, names: Iterable[str]) -> set[str]:
    listed = set()
    for name in names:
        if MANIFEST.fullmatch(name):
            try:
                listed.add(read_manifest(disk, folder.path, name).file)
            except (OSError, ManifestError):
                continue
    return listed
