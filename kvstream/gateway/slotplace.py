"""What only this machine can tell about a server's slot files and its model: where they are, and whether they changed.

Looking at files takes a thread, so none of it belongs under a deadline that counts the runtime's time.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import trio
from attrs import frozen

from .inject_settings import InjectSettings
from .machine import llama_flags, llama_folder

LOOPBACK: Final = frozenset(("127.0.0.1", "localhost", "::1"))
REMOVE_S_MAX: Final = 1.0


@frozen
class SlotPlace:
    """``folder``: where the server's files may lie as seen from here, empty where nobody knows. ``local``: the server
    is on this machine, as far as its address tells, at ``port``."""

    folder: str
    local: bool
    port: int = 0

    async def is_there(self, name: str = "") -> bool:
        """Whether the folder, or something of that name in it, is there. *Errors*: none."""
        try:
            return bool(self.folder) and await trio.Path(self.folder, name).exists()
        except (OSError, ValueError):
            return False

    async def has(self, name: str, size: int) -> bool:
        """Whether a file that the server just wrote is there. *Errors*: none."""
        try:
            return bool(self.folder) and (await trio.Path(self.folder, name).stat()).st_size == size
        except (OSError, ValueError):
            return False

    async def remove(self, name: str) -> None:
        """Delete a file if it is there. *Errors*: none. Also in a cancelled task."""
        if self.folder:
            with trio.move_on_after(REMOVE_S_MAX) as scope, suppress(OSError, ValueError):
                scope.shield = True
                await trio.Path(self.folder, name).unlink(missing_ok=True)

    async def room(self) -> str:
        """Where a server that cannot save tried to, and what is free there: it does not say itself. *Errors*: none."""
        try:
            usage = await trio.to_thread.run_sync(shutil.disk_usage, self.folder) if self.folder else None
        except (OSError, ValueError):
            return ""
        return "" if usage is None else f" (in {self.folder}, where {usage.free / 2**20:,.0f} MiB are free)"

    async def model_facts(self, path: str) -> Mapping[str, str]:
        """Size and time of the model's file, in words, and where it is if the server does not tell that in full;
        nothing where it is not here. *Errors*: none."""
        if not path or not self.local:
            return {}
        full = Path(path)
        try:
            if not full.is_absolute():
                full = Path(await trio.to_thread.run_sync(llama_folder, self.port), path).absolute()
            stat = await trio.Path(full).stat()
        except (OSError, ValueError):
            return {}
        where = {} if str(full) == path else {"path": str(full)}
        return {"model": f"{stat.st_size} bytes of {stat.st_mtime_ns}", **where}


async def find_place(base_url: str, settings: InjectSettings) -> SlotPlace:
    """As configured, or as a server on this machine was told when it was started. *Errors*: none."""
    parts = urlsplit(base_url)
    local = parts.hostname in LOOPBACK
    if settings.dir or not local:
        return SlotPlace(settings.dir, local, parts.port or 80)
    flags = await trio.to_thread.run_sync(llama_flags, parts.port or 80)
    return SlotPlace(flags.slot_save_path if flags is not None else "", local, parts.port or 80)
