"""Client connections: accepting them, bounding them, and telling a client that left from one that only stopped talking.

hypercorn parses HTTP; this module decides what it is given to parse. Three things are added to a plain socket:

* A bound on open connections; one too many is answered 503 and closed.
* ``send_all`` with a deadline. hypercorn shields its sends from cancellation, so without it a client that never reads
  would keep its task for ever. After ``stall_s`` the socket is closed under it.
* Half-close. A FIN does not say whether the peer still reads: ``printf ... | nc`` shuts down its sending side and waits
  for the answer, a closed browser tab sends the same FIN. The kernel knows once something is sent: a closed peer
  answers with RST. So after a FIN an interim ``102 Processing`` is sent (a client must skip 1xx), if no answer is under
  way already, and the connection counts as gone when the kernel says so, at loopback speed. A peer to whom nothing is
  owed any more, because its requests are all answered, is gone with its FIN.
* A watch for clients that leave while nobody reads. hypercorn stops reading at bytes that follow a request (a stray
  line end, a pipelined request) until that request is answered, and so would not see the FIN behind them.
"""

from __future__ import annotations

import errno
import logging
import socket
import sys
from typing import Any

import h11
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config as HypercornConfig
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ASGIFramework, ConnectionState, LifespanState

from ..errors import ConfigError, KVStreamError, PortInUseError
from .metrics import Metrics

log = logging.getLogger("kvstream.connections")

PROBE = b"HTTP/1.1 102 Processing\r\n\r\n"
GONE_POLL_S = 0.05
UNREAD_POLL_S = 0.2
BACKLOG = 512
_TCP_CLOSE, _TCP_CLOSE_WAIT = 7, 8

FULL = (b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 2\r\nconnection: close\r\n"
        b"content-length: %d\r\n\r\n%s")
FULL_BODY = (b'{"error": {"message": "too many open connections (server.connections_max)", '
             b'"type": "overloaded_error", "code": "too_many_connections", "param": null}}')


class ClientStream(trio.abc.HalfCloseableStream):
    """A client's socket, as hypercorn sees it."""

    def __init__(self, inner: trio.SocketStream, *, stall_s: float, tolerate_half_close: bool) -> None:
        self._inner = inner
        self.socket = inner.socket  # hypercorn asks it for the addresses
        self._stall_s = stall_s
        self._tolerate = tolerate_half_close and sys.platform == "linux"
        self._answering = False  # bytes of an answer went out since the last request bytes came in
        self._owing = 0  # requests that the application has in hand
        self._sending = False
        self._reading = False
        self._probed = False
        self._handed = trio.Event()  # bytes were handed out since :meth:`watch` last looked

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self._answering = self._sending = True
        try:
            with trio.move_on_after(self._stall_s) as waited:
                await self._inner.send_all(data)
        except trio.BusyResourceError as error:  # hypercorn sends one at a time, but closes whenever it likes
            raise trio.BrokenResourceError("the connection is being closed") from error
        finally:
            self._sending = False
        if waited.cancelled_caught:
            await trio.aclose_forcefully(self._inner)
            raise trio.BrokenResourceError(f"the client did not read for {self._stall_s:g} s")

    async def wait_send_all_might_not_block(self) -> None:
        await self._inner.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        self._reading = True
        try:
            data = await self._inner.receive_some(max_bytes)
            if data:
                self._answering = False
                self._handed.set()
            elif self._tolerate:
                await self._wait_gone()
            return data
        finally:
            self._reading = False

    def noting_ends(self, app: AppWrapper) -> AppWrapper:
        """``app``, for this connection: when it returns, the peer has its whole answer."""
        async def noting(*args: Any) -> None:
            self._owing += 1
            try:
                await app(*args)
            finally:
                self._owing -= 1

        return noting  # type: ignore[return-value]

    async def watch(self) -> None:
        """Returns when the peer left while nobody reads. Sleeps without polling as long as somebody does."""
        if sys.platform != "linux":
            await trio.sleep_forever()
        while True:
            await self._handed.wait()
            await trio.sleep(UNREAD_POLL_S)
            if self._reading:
                self._handed = trio.Event()
            elif await self._left_unread():
                return

    async def _left_unread(self) -> bool:
        if self.socket.fileno() < 0:
            return False  # closed by ourselves
        state = self._state()
        if state == _TCP_CLOSE_WAIT and self._tolerate:
            return not await self._probe()
        return state in (_TCP_CLOSE, _TCP_CLOSE_WAIT)

    async def _wait_gone(self) -> None:
        """The peer shut down its sending side. Returns when it is known not to read either, or has all it asked for."""
        while self.socket.fileno() >= 0:
            if self._owing and not await self._probe():
                return
            if self._state() == _TCP_CLOSE:
                return
            await trio.sleep(GONE_POLL_S)
            if not self._owing:
                return  # looked at after the pause, in which the next of several pipelined requests has begun

    async def _probe(self) -> bool:
        """Make a peer that does not read any more say so. False when it is known already."""
        if not (self._answering or self._sending or self._probed):
            self._probed = True
            try:
                await self.socket.send(PROBE)
            except OSError:
                return False
        return True

    def _state(self) -> int:
        """The first byte of struct tcp_info; CLOSE once the peer answered a send with RST."""
        return self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]

    async def send_eof(self) -> None:
        await self._inner.send_eof()

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Http1(H11Protocol):
    """hypercorn's HTTP/1, without the ways out of it, which a server may ignore. An HTTP/2 client that left with its
    window full, and a WebSocket handshake that is none, were never let go."""

    async def _check_protocol(self, event: h11.Request) -> None:
        pass

    async def _create_stream(self, request: h11.Request) -> None:
        headers = [(name, value) for name, value in request.headers if name != b"upgrade"]
        await super()._create_stream(h11.Request(
            method=request.method, target=request.target, headers=headers, http_version=request.http_version))


class _Connection(TCPServer):
    """hypercorn's connection, whose idle timer (75 s) does not outlive a client that has gone."""

    _over = False

    async def _read_data(self) -> None:
        given = self.protocol
        self.protocol = _Http1(  # type: ignore[assignment]
            given.app, given.config, given.context, given.task_group, given.state, given.ssl, given.client,
            given.server, given.send)
        await super()._read_data()
        self._over = True
        await self.idle_task.stop()

    async def _idle_timeout(self) -> None:
        if not self._over:
            await super()._idle_timeout()


class Server:
    """The listening side. ``run`` serves until cancelled; ``stop_listening`` closes the listeners at once."""

    def __init__(self, app: ASGIFramework, sockets: list[socket.socket], metrics: Metrics, *, connections_max: int,
                 header_bytes_max: int, stall_s: float, tolerate_half_close: bool) -> None:
        self._app = ASGIWrapper(app)
        self._listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(s)) for s in sockets]
        self._metrics = metrics
        self._connections_max = connections_max
        self._stall_s = stall_s
        self._tolerate = tolerate_half_close
        self._context = WorkerContext(None)
        self._accepting = trio.CancelScope()
        self._open = 0
        self._streams: set[ClientStream] = set()
        config = HypercornConfig()
        config.h11_max_incomplete_size = header_bytes_max
        config.include_server_header = False
        config.include_date_header = True
        config.accesslog = config.errorlog = None
        config.keep_alive_timeout = 75.0
        config.keep_alive_max_requests = sys.maxsize
        config.read_timeout = None
        self._config = config

    @property
    def ports(self) -> list[int]:
        return [listener.socket.getsockname()[1] for listener in self._listeners]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Task body. Connections go on after ``stop_listening``; cancel to end them."""
        async with trio.open_nursery() as connections:
            with self._accepting:
                await trio.serve_listeners(
                    self._connection, self._listeners, handler_nursery=connections,
                    task_status=task_status)  # type: ignore[arg-type]
            try:
                await trio.sleep_forever()
            finally:
                for stream in self._streams:  # hypercorn shields its sends: a client that does not read would keep us
                    stream.socket.close()

    async def stop_listening(self) -> None:
        """No new connections; idle ones are closed, those with a request go on."""
        self._accepting.cancel()
        for listener in self._listeners:
            await listener.aclose()
        await self._context.terminated.set()

    async def _connection(self, inner: trio.SocketStream) -> None:
        if self._open >= self._connections_max:
            with trio.move_on_after(1):
                try:
                    await inner.send_all(FULL % (len(FULL_BODY), FULL_BODY))
                    await inner.send_eof()
                    await inner.receive_some(65536)
                except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
                    pass  # it left first; an exception here would end all other connections
            await inner.aclose()
            return
        self._open += 1
        self._metrics.open_connections.inc()
        stream = ClientStream(inner, stall_s=self._stall_s, tolerate_half_close=self._tolerate)
        self._streams.add(stream)
        state = ConnectionState(LifespanState())
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_when_gone, stream, nursery.cancel_scope)
                await _Connection(stream.noting_ends(self._app), self._config, self._context, state, stream)  # type: ignore[arg-type]
                nursery.cancel_scope.cancel()
        except Exception:
            log.exception("bug while serving a connection; it was closed")  # one client's bytes must not end all others
        finally:
            self._streams.remove(stream)
            self._open -= 1
            self._metrics.open_connections.dec()


async def _cancel_when_gone(stream: ClientStream, scope: trio.CancelScope) -> None:
    await stream.watch()
    scope.cancel()


def cannot_listen(host: str, port: int, error: OSError | UnicodeError) -> KVStreamError:
    """What is wrong and what to do. An address or a name may be there a little later (a network that comes up), which
    is not the configuration's fault; a right that is missing will be missing the next time too."""
    reason = error.strerror or error if isinstance(error, OSError) else "that is no name"
    text = f"cannot listen on {host}:{port}: {reason}. "
    number = None if isinstance(error, socket.gaierror | UnicodeError) else error.errno
    if number == errno.EACCES and sys.platform != "win32":
        return ConfigError(text + "Ports below 1024 usually need root, or CAP_NET_BIND_SERVICE: choose another with "
                           "--port")
    if number in (errno.EADDRINUSE, errno.EACCES):
        return PortInUseError(
            text + "Another program may have the port: choose one with --port, or stop that program")
    return KVStreamError(text + "server.host (--host) is to be an address or a name of this machine")


def open_sockets(host: str, port: int) -> list[socket.socket]:
    """Listening sockets on every address of ``host``. *Errors*: see :func:`cannot_listen`."""
    sockets: list[socket.socket] = []
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, proto, _, address in dict.fromkeys(infos):
            sock = socket.socket(family, kind, proto)
            sockets.append(sock)
            if sys.platform != "win32":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if port == 0 and len(sockets) > 1:
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            sock.bind(address)
            sock.listen(BACKLOG)
    except (OSError, UnicodeError) as error:
        for sock in sockets:
            sock.close()
        raise cannot_listen(host, port, error) from error
    return sockets
