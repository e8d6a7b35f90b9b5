"""Locks on files that end with the process that holds them, however it dies."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from attrs import frozen

TRIES = 8


def try_lock(fd: int) -> bool:
    """Take the lock of an open file without waiting. False: somebody has it, or this file system has no locks."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@frozen
class Owner:
    """One user of a directory, among others that may use it at the same time. Its ``token`` (8 hex digits) is part of
    the names of files that are nobody else's yet; as long as ``kvstream-TOKEN.lock`` is locked they are not litter."""

    token: str
    fd: int
    path: Path

    @classmethod
    def claim(cls, folder: Path) -> Owner:
        """*Errors*: ``OSError`` when nothing can be created there."""
        for _ in range(TRIES):
            token = secrets.token_hex(4)
            path = lock_path(folder, token)
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:
                continue
            locked = try_lock(fd)
            # Somebody who sweeps may have found the file before its lock, and removed it.
            if os.fstat(fd).st_nlink or sys.platform == "win32":
                return cls(token, fd, path)
            if locked:
                os.close(fd)
        raise OSError("no name for a lock file could be found")

    def release(self) -> None:
        """Idempotent only by its caller. Never raises."""
        try:
            if sys.platform == "win32":
                os.close(self.fd)
                self.path.unlink(missing_ok=True)
            else:
                self.path.unlink(missing_ok=True)  # first: nobody may take over a lock file that is about to go
                os.close(self.fd)
        except OSError:
            pass


def lock_path(folder: Path, token: str) -> Path:
    return folder / f"kvstream-{token}.lock"


def bury(folder: Path, token: str) -> bool:
    """Whether the owner of that token is gone; what is left of its lock is then removed. When in doubt it lives."""
    path = lock_path(folder, token)
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        if not try_lock(fd):
            return False
        if sys.platform != "win32":
            path.unlink(missing_ok=True)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
