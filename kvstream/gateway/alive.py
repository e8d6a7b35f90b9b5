"""``kvstream health --live``: whether the process serves, asked as cheaply as it can be answered.

For probes that restart what fails them (HEALTHCHECK of a container, a supervisor). Such a probe must fail for no other
reason: not because the runtime is busy or away, and not because a file was changed to one that cannot be read (what
runs goes on with what it read before). And it runs every few seconds for as long as the machine is up, beside a runtime
that wants every core: so neither httpx nor rich is imported, which takes half of the processor time away.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from urllib.parse import urlsplit

from ..config import ServerConfig
from ..errors import BackendUnavailableError, ConfigError, KVStreamError

VERSION_HEADER = "x-kvstream-version"  # on every answer of a KVStream
ANSWER_S_MAX = 4.0  # less than the time-out of the image's HEALTHCHECK: the sentence is to be said before the kill
ELSEWHERE = "--url names another place; so do --config and KVSTREAM_SERVER__PORT, as they were when it was started."


def url_of(server: ServerConfig) -> str:
    """Where a KVStream with this configuration is found from its own machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)
    if server.port == 0:
        raise ConfigError("server.port is 0, so the port is not known beforehand; give --url")
    return f"http://{f'[{host}]' if ':' in host else host}:{server.port}"


def live_line(url: str) -> str:
    """One sentence. *Errors*: KVStreamError unless a KVStream answers on /health; ConfigError for a URL that is none.
    """
    connection, path = _connection(url)
    late = threading.Event()
    patience = threading.Timer(ANSWER_S_MAX, _hang_up, [connection, late])  # each byte has ANSWER_S_MAX of its own
    patience.daemon = True
    patience.start()
    try:
        connection.request("GET", f"{path}/health", headers={"connection": "close"})
        if late.is_set():  # maybe before there was anything to hang up
            raise TimeoutError
        reply = connection.getresponse()
    except UnicodeError as error:
        raise ConfigError(f"--url must be a URL such as http://127.0.0.1:8080, not {url!a}") from error
    except (OSError, http.client.HTTPException) as error:
        said = "timed out" if late.is_set() else str(error) or type(error).__name__
        said = ascii(said)[1:-1]  # it may be what came, and that must not steer a terminal
        raise BackendUnavailableError(f"{url} does not answer: {said[:200]}. {ELSEWHERE}") from error
    finally:
        patience.cancel()
        connection.close()
    if reply.getheader(VERSION_HEADER) is None:
        raise KVStreamError(f"{url} answers, but that is not a KVStream.")
    if reply.status != 200:
        raise KVStreamError(f"{url} answers {reply.status} on /health: not healthy.")
    return f"{url} is alive."


def _hang_up(connection: http.client.HTTPConnection, late: threading.Event) -> None:
    late.set()  # first: what the other thread reads next is the end of the stream, and it must know why
    sock = getattr(connection, "sock", None)
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def _connection(url: str) -> tuple[http.client.HTTPConnection, str]:
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    try:
        parts = urlsplit(url)
        kind, host, port = kinds[parts.scheme], parts.hostname, parts.port
        if host:
            return kind(host, port, timeout=ANSWER_S_MAX), parts.path.rstrip("/")
    except (KeyError, ValueError):
        pass
    raise ConfigError(f"--url must be a URL such as http://127.0.0.1:8080, not {url!r}")
