"""Sockets that systemd listens on and hands over (kvstream.socket).

They stay open while KVStream restarts, so that nobody is refused meanwhile: whoever connects waits in the kernel's
queue. What is served is where they listen; ``server.host`` and ``server.port`` then say nothing, and the configuration
that the rest of the gateway sees has the real address, because by that it decides who may come in.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, MutableMapping, Sequence

import attrs

from ..config import Config, Loaded
from ..errors import ConfigError
from .access import is_loopback

log = logging.getLogger("kvstream.serve")

FIRST_FD = 3
FDS_MAX = 64


def take_sockets(environ: MutableMapping[str, str]) -> list[socket.socket]:
    """The listening sockets that this process was started with; usually none. The variables that tell of them are
    taken out of ``environ``, and no child inherits them.

    *Errors*: ``ConfigError`` for what cannot be served.
    """
    pid, count = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdecimal() or count == "0":
        return []
    if len(count) > len(str(FDS_MAX)) or int(count) > FDS_MAX:
        raise ConfigError(f"systemd hands over {count[:20]} sockets; KVStream takes at most {FDS_MAX}")
    fds = range(FIRST_FD, FIRST_FD + int(count))
    try:
        for fd in fds:
            os.set_inheritable(fd, False)
        sockets = [socket.socket(fileno=fd) for fd in fds]
    except OSError as error:
        raise ConfigError(f"LISTEN_FDS={count}, but what is open there is not a socket: {error.strerror}") from error
    problems = [problem for sock in sockets if (problem := _problem(sock))]
    if problems:
        for sock in sockets:
            sock.close()
        raise ConfigError(problems)
    return sockets


def _problem(sock: socket.socket) -> str:
    if sock.family == getattr(socket, "AF_UNIX", None):
        return (f"systemd hands over the Unix socket {sock.getsockname()}; KVStream serves TCP only: ListenStream= in "
                "kvstream.socket takes ADDRESS:PORT")
    if (sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM
            or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)):
        return (f"systemd hands over a socket that does not listen for TCP (descriptor {sock.fileno()}); "
                "kvstream.socket takes ListenStream=, and Accept=no")
    return ""


def at_address(loaded: Loaded, sockets: Sequence[socket.socket]) -> Loaded:
    """``loaded``, now and whenever it is read again, with the address of ``sockets`` as what the server listens on."""
    if not sockets:
        return loaded
    found = [sock.getsockname()[:2] for sock in sockets]
    host, port = next((pair for pair in found if not is_loopback(pair[0])), found[0])
    server = loaded.config.server
    if server.port != port:
        log.warning("systemd's socket listens on port %d; server.port = %d says otherwise, and `kvstream status` looks "
                    "there", port, server.port)

    def there(config: Config) -> Config:
        return attrs.evolve(config, server=attrs.evolve(config.server, host=host, port=port))

    again = loaded.again
    return attrs.evolve(loaded, config=there(loaded.config),
                        again=None if again is None else lambda: _evolved(again(), there))


def _evolved(loaded: Loaded, there: Callable[[Config], Config]) -> Loaded:
    return attrs.evolve(loaded, config=there(loaded.config))
