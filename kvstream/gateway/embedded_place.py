"""Where a running embedded llama.cpp keeps its files: saved KV, which outlives it, and the log."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attrs import frozen

from ..errors import ConfigError, EmbeddedError, StoreError
from .embedded_find import wrong_path
from .filelock import try_lock
from .kvfiles import DATA, MANIFEST
from .prune import Folder, excess, look, remove, tidy
from .statedir import default_state_dir

log = logging.getLogger("kvstream.embedded")

INSTANCES_MAX = 64


@frozen
class Place:
    """Where one running instance keeps its files."""

    slot_dir: Path
    log: Path


@contextmanager
def claim_place(state_dir: Path | None, slot_bytes_max: int = 8 * 2**30) -> Iterator[Place]:
    """Claim the lowest free instance number below the state directory, for as long as the block runs.

    Two KVStreams must not write each other's slot files. Each holds an OS lock on ``slots/N.lock``, which ends with
    the process however it dies; a lock can tell a dead owner where a process number cannot (numbers are used again,
    and containers that share a volume have numbers of their own). Lock files are never removed, so removing cannot race
    with locking.

    What was kept in ``slots/N`` stays for whoever has that number next, as a rule the same. At the start what nobody
    kept is removed, and the files of all numbers that nobody holds are brought within ``slot_bytes_max`` together: the
    longest unused go.

    *Errors*: ``ConfigError`` when the directory cannot be written, ``EmbeddedError`` when its disk is full or fails.
    """
    root = default_state_dir() if state_dir is None else state_dir
    try:
        for folder in (root, root / "slots", root / "logs"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        claim = _claim(root, slot_bytes_max)
    except OSError as error:
        kind = ConfigError if wrong_path(error) else EmbeddedError
        raise kind(
            f"the state directory {root} cannot be written ({error.strerror}: {error.filename});"
            " set embedded.state_dir to a directory of yours"
        ) from error
    if claim is None:
        raise EmbeddedError(f"{INSTANCES_MAX} KVStreams run from the state directory {root} already")
    fd, place = claim
    try:
        yield place
    finally:
        _tidy(place.slot_dir)
        os.close(fd)


def _claim(root: Path, slot_bytes_max: int) -> tuple[int, Place] | None:
    """Lock the lowest free number; prune the slot files of every number nobody holds. The others are held only while
    they are tidied, or an instance that starts now would pass them over."""
    claim: tuple[int, Place] | None = None
    free: list[Folder] = []
    for number in range(INSTANCES_MAX):
        lock_file, slot_dir = root / "slots" / f"{number}.lock", root / "slots" / str(number)
        if claim is not None and not lock_file.exists():
            break  # numbers are claimed from below: beyond the first unused one there are none
        fd = os.open(lock_file, os.O_RDWR | os.O_CREAT, 0o600)
        if not try_lock(fd):
            os.close(fd)
            continue
        _tidy(slot_dir)
        if slot_dir.is_dir():
            free.append(Folder(slot_dir))
        if claim is None:
            slot_dir.mkdir(mode=0o700, exist_ok=True)
            suffix = f"-{number}" if number else ""
            claim = fd, Place(slot_dir, root / "logs" / f"llama-server{suffix}.log")
        else:
            os.close(fd)
    try:
        remove(excess(look(free), bytes_max=slot_bytes_max, age_s_max=None, now=time.time()))
    except StoreError as error:
        log.warning("saved KV of earlier runs could not be pruned: %s", error)
    return claim


def _tidy(slot_dir: Path) -> None:
    """Remove what no store kept, and the folder when that was all. Only we put files there. Never raises."""
    try:
        for entry in slot_dir.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif not (MANIFEST.fullmatch(entry.name) or DATA.fullmatch(entry.name)):
                entry.unlink(missing_ok=True)
        tidy([Folder(slot_dir)])
        slot_dir.rmdir()
    except (OSError, StoreError):
        pass  # not there, or not empty: that is what it is for
