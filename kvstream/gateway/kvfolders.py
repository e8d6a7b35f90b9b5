"""Which folders of saved KV were used: a small file in the state directory, so that they are found again when their
server is stopped, or was only named on a command line. A hint for people, nothing is decided by it. Blocking."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from attrs import evolve, frozen

from .filelock import try_lock

log = logging.getLogger("kvstream.store")

FILE: Final = "kv-folders.json"
LOCK: Final = "kv-folders.lock"
FOLDERS_MAX: Final = 64
FILE_BYTES_MAX: Final = 2**20
WRITTEN_EVERY_S: Final = 86400.0
LOCK_TRIES: Final = 10
LOCK_TRY_S: Final = 0.02


@frozen
class Known:
    """A folder that a store was opened in for the server at ``url``, bounded by ``bytes_max`` then. ``remote``: only
    manifests are in it, one level deeper. ``used`` is wall time."""

    path: Path
    url: str
    bytes_max: int
    remote: bool
    used: float


def remember(root: Path, known: Known) -> None:
    """Put it first, in place of what was known of that folder; the longest unused make way. Atomic. Never raises."""
    known = evolve(known, url=_without_user(known.url))
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(root / LOCK):
            before = recall(root)
            same = [each for each in before if evolve(each, used=known.used) == known]
            if same and 0 <= known.used - same[0].used < WRITTEN_EVERY_S:
                return
            others = [each for each in before if each.path != known.path]
            _write(root / FILE, [known, *others][:FOLDERS_MAX])
    except (OSError, ValueError) as error:
        log.debug("which folder is used cannot be remembered: %s", error)


def remembering(root: Path, known: Known, wall: Callable[[], float] = time.time) -> Callable[[], None]:
    """:func:`remember`, at the time when it is called."""
    return lambda: remember(root, evolve(known, used=wall()))


def recall(root: Path) -> list[Known]:
    """What is remembered, the latest first; nothing of it need be there. *Errors*: none."""
    try:
        with (root / FILE).open("rb") as file:
            rows = json.loads(file.read(FILE_BYTES_MAX))["folders"]
        return [known for row in rows[:FOLDERS_MAX] if (known := _read(row)) is not None]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def _read(row: Any) -> Known | None:
    try:
        path = Path(row["path"])
        known = Known(path, str(row["url"]), int(row["bytes_max"]), row["remote"] is True, float(row["used"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return known if path.is_absolute() and "\0" not in str(path) else None


def _write(path: Path, folders: list[Known]) -> None:
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    body = {"kvstream": 1, "folders": [
        {"path": str(each.path), "url": each.url, "bytes_max": each.bytes_max, "remote": each.remote, "used": each.used}
        for each in folders]}
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(json.dumps(body, indent=1).encode("ascii"))
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone, or after a while not: then what another remembers at the same moment may be lost."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        for _ in range(LOCK_TRIES):
            if try_lock(fd):
                break
            time.sleep(LOCK_TRY_S)
        yield
    finally:
        os.close(fd)


def _without_user(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
