"""What the manager that started us is told: systemd's notification protocol, which needs no library.

One datagram of lines ``NAME=value`` per message, to the Unix socket in ``NOTIFY_SOCKET`` (a leading ``@`` means an
abstract name). Sending never waits and never fails: a message that cannot be sent now goes with the next one. systemd
ignores all of a message that is longer than 4096 bytes, and a status names what others named: lines are cut.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

LINE_BYTES_MAX = 1000
USEC_DIGITS_MAX = 18


class Notifier:
    """Where to send, and how often the manager wants to be told that we live. Falsy when nobody listens."""

    def __init__(self, path: str = "", watchdog_s: float | None = None) -> None:
        self._path = "\0" + path[1:] if path.startswith("@") else path
        self.watchdog_s = watchdog_s if path else None
        self._unsent: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._path)

    def tell(self, *lines: str) -> None:
        """Send ``lines`` in one message, together with what could not be sent before."""
        if not self._path:
            return
        for line in lines:  # of each name the last, in the order in which they were said: of READY=1 and RELOADING=1
            name = line.partition("=")[0]  # systemd takes the last, too
            self._unsent.pop(name, None)
            self._unsent[name] = " ".join(line.split())
        message = b"\n".join(map(_short, self._unsent.values()))
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.sendto(message, self._path)
        except (OSError, ValueError):  # ValueError: a path with a 0 in it
            return
        self._unsent = {}


def _short(line: str) -> bytes:
    """Names of files may be no UTF-8, and then are no reason to fail."""
    return line.encode("utf-8", "replace")[:LINE_BYTES_MAX].decode("utf-8", "ignore").encode()


def take_notifier(environ: MutableMapping[str, str]) -> Notifier:
    """Who listens, according to ``environ``. The variables are taken out of it: they are for this process, and a child
    that reported in our name would be believed."""
    path = environ.pop("NOTIFY_SOCKET", "")
    usec, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
    if not path.startswith(("/", "@")) or len(path) < 2 or not hasattr(socket, "AF_UNIX"):
        return Notifier()
    ours = pid in ("", str(os.getpid())) and usec.isdecimal() and len(usec) <= USEC_DIGITS_MAX
    return Notifier(path, int(usec) / 1e6 if ours and int(usec) > 0 else None)
