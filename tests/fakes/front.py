"""The fake's side of one connection, as the runtime sees it: what both fronts (memory and TCP) implement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import trio

Headers = tuple[tuple[str, str], ...]


class ClientGone(Exception):
    """Writing failed: the client closed."""


class Wire(Protocol):
    """One answer to be written.

    ``gone`` is set as soon as the front knows that the client closed before the end; ``reset`` tells how. The front
    calls ``on_gone`` at the same moment.
    """

    gone: trio.Event
    reset: bool
    on_gone: Callable[[], None]

    async def head(self, status: int, headers: Headers, length: int | None) -> None:
        """Send the status line and headers. ``length`` None: the body ends where :meth:`end` says (chunked)."""
        ...

    async def write(self, data: bytes) -> None:
        """Send body bytes. *Errors*: ``ClientGone``."""
        ...

    async def end(self) -> None:
        """The body ends properly."""
        ...

    async def abort(self, reset: bool) -> None:
        """Break the connection, by RST or by FIN, at any point: also before the head."""
        ...
