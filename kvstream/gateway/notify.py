"""What the manager that started us is told: systemd's notification protocol, which needs no library.

One datagram of lines ``NAME=value`` per message, to the Unix socket in ``NOTIFY_SOCKET`` (a leading ``@`` means an
abstract name). Sending never waits and never fails: a message that cannot be sent now goes with the next one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

UNSENT_MAX = 16


class Notifier:
    """Where to send, and how often the manager wants to be told that we live. Falsy when nobody listens."""

    def __init__(self, path: str = "", watchdog_s: float | None = None) -> None:
        self._path = "\0" + path[1:] if path.startswith("@") else path
        self.watchdog_s = watchdog_s if path else None
        self._unsent: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._path)

    def tell(self, *lines: str) -> None:
        """Send ``lines`` in one message, together with what could not be sent before."""
        if not self._path:
            return
        lines = (*self._unsent, *(" ".join(line.split()) for line in lines))
        self._unsent = []
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.sendto("\n".join(lines).encode(), self._path)
        except OSError:
            self._unsent = list(lines)[-UNSENT_MAX:]


def take_notifier(environ: MutableMapping[str, str]) -> Notifier:
    """Who listens, according to ``environ``. The variables are taken out of it: they are for this process, and a child
    that reported in our name would be believed."""
    path = environ.pop("NOTIFY_SOCKET", "")
    usec, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
    if not path.startswith(("/", "@")) or len(path) < 2 or not hasattr(socket, "AF_UNIX"):
        return Notifier()
    ours = pid in ("", str(os.getpid()))
    return Notifier(path, int(usec) / 1e6 if ours and usec.isdecimal() and int(usec) > 0 else None)
