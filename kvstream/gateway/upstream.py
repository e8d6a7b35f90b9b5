"""HTTP to the backend: the only place of the gateway that knows httpx.

The transport is used without ``httpx.Client`` on top: no redirects, cookies, environment proxies or decoding stand
between the runtime's bytes and ours, and a call costs less. Foreign exceptions are translated here and nowhere else.

Stale connections: llama.cpp closes an idle connection after 5 s, so pooled ones expire after 3 s. A close can still
cross a request on its way. Then, if the connection was a reused one and not one byte of an answer came, the request was
never read, and is sent once more on a fresh connection; after the first byte nothing is ever repeated. Whether a byte
came, httpcore does not tell apart from a head that broke off, so the bytes are counted below it.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import httpcore
import httpx
import trio

from ..adapters.base import HttpCall, HttpReply
from ..errors import (
    BackendProtocolError,
    BackendRefusedError,
    BackendTimeoutError,
    BackendUnavailableError,
    LoopError,
    StreamTruncatedError,
)
from .request import HOP_HEADER

REPLY_BYTES_MAX = 16 * 1024 * 1024
URLS_MAX = 256
VERSION_HEADER = "x-kvstream-version"  # on every answer of a KVStream

_NEVER_READ = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError, httpx.CloseError)


class HttpUpstream:
    """Calls to one backend. Use as an async context manager; its pool lives as long as the block.

    ``connect_s`` bounds the TCP connect, ``keepalive_expiry_s`` the age of an idle pooled connection. Waiting for
    headers and for bytes is bounded by the caller's cancel scopes, never here: a runtime may be silent for minutes.
    ``hop`` is our process's id, added to the ids that a request came with: whoever finds its own there is in a circle.
    """

    def __init__(self, base_url: str, *, connect_s: float = 5.0, keepalive_expiry_s: float = 3.0,
                 hop: str = "") -> None:
        self.base_url = base_url.rstrip("/")
        self._hop = hop
        self._connect_s = connect_s
        self._urls: dict[str, httpx.URL] = {}
        self._account: Account = ContextVar("bytes seen of an answer")
        secure = self.base_url.startswith("https:")
        self._pooled = _transport(httpx.Limits(
            max_connections=None, max_keepalive_connections=64, keepalive_expiry=keepalive_expiry_s),
            self._account, secure)
        self._unpooled = _transport(httpx.Limits(max_connections=None, max_keepalive_connections=0),
                                    self._account, secure)

    async def __aenter__(self) -> HttpUpstream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        with trio.CancelScope(shield=True), trio.move_on_after(2):
            await self._pooled.aclose()
            await self._unpooled.aclose()

    async def request(self, call: HttpCall, *, timeout_s: float) -> HttpReply:
        """See :meth:`ports.Upstream.request`. The answer may have at most 16 MiB."""
        body = bytearray()
        with trio.move_on_after(timeout_s):
            async with self.open(call) as response:
                while chunk := await response.receive():
                    body += chunk
                    if len(body) > REPLY_BYTES_MAX:
                        raise BackendProtocolError(f"{call.path} answered more than {REPLY_BYTES_MAX} bytes")
                return HttpReply(response.status, response.headers, bytes(body))
        raise BackendTimeoutError(f"{self.base_url}{call.path} did not answer within {timeout_s:g} s")

    @asynccontextmanager
    async def open(self, call: HttpCall, content: AsyncIterable[bytes] | None = None) -> AsyncIterator[HttpxResponse]:
        """See :meth:`ports.Upstream.open`."""
        response = await self._send(call, content)
        try:
            yield HttpxResponse(response)
        finally:
            # httpcore shields its own closing; this is the bound on it.
            with trio.CancelScope(shield=True), trio.move_on_after(2):
                await response.aclose()

    def _url(self, path: str) -> httpx.URL:
        """Parsing a URL costs half of what building a request does, and there are few of them."""
        url = self._urls.get(path)
        if url is None:
            if len(self._urls) >= URLS_MAX:
                self._urls.clear()
            url = self._urls[path] = httpx.URL(self.base_url + path)
        return url

    async def _send(self, call: HttpCall, content: AsyncIterable[bytes] | None) -> httpx.Response:
        # Where one pooled connection is stale the others may be too: the second attempt never takes one. A body that
        # comes in pieces can be sent only once.
        for transport in (self._pooled, self._unpooled) if content is None else (self._unpooled,):
            request = httpx.Request(
                call.method,
                self._url(call.path),
                # As bytes: httpx takes text for ASCII only, but a client's User-Agent or key need not be.
                headers=[(b"accept-encoding", b"identity"), *self._headers(call)],
                content=call.body or content,
                extensions={"timeout": {"connect": self._connect_s, "read": None, "write": None, "pool": None}},
            )
            seen = _Seen()
            self._account.set(seen)
            try:
                return await self._checked(await transport.handle_async_request(request))
            except httpx.ConnectTimeout as error:
                raise BackendTimeoutError(
                    f"no connection to {self.base_url} within {self._connect_s:g} s; is that address right?"
                ) from error
            except httpx.ConnectError as error:
                raise BackendRefusedError(
                    f"cannot connect to the backend at {self.base_url}: is it running? ({_cause(error)})",
                    retry_after_s=2,
                ) from error
            except _NEVER_READ as error:
                if seen.bytes and isinstance(error, httpx.RemoteProtocolError) and _below(error) is not None:
                    raise BackendProtocolError(
                        f"what answers at {self.base_url} does not speak HTTP as it should ({_cause(error)}); is that "
                        "the runtime's address?") from error
                if seen.connected or seen.bytes:
                    raise BackendUnavailableError(
                        f"the backend at {self.base_url} closed the connection without an answer ({_cause(error)})",
                        retry_after_s=2,
                    ) from error
            except (httpx.UnsupportedProtocol, httpx.LocalProtocolError) as error:
                raise BackendProtocolError(f"cannot call {self.base_url}{call.path}: {_cause(error)}") from error
        raise AssertionError("unreachable")

    def _headers(self, call: HttpCall) -> Iterator[tuple[bytes, bytes]]:
        hops = self._hop
        for name, value in call.headers:
            if name == HOP_HEADER and hops:
                hops = f"{value}, {hops}"
            else:
                yield name.encode("ascii"), value.encode("latin-1")
        if hops:
            yield HOP_HEADER.encode(), hops.encode("latin-1")

    async def _checked(self, response: httpx.Response) -> httpx.Response:
        if response.status_code == LoopError.status and VERSION_HEADER in response.headers:
            await response.aclose()
            raise LoopError(f"calls to {self.base_url} come back to this KVStream; set backend.base_url to the "
                            "runtime's own address")
        coding = response.headers.get("content-encoding", "identity")
        if coding.lower() not in ("identity", ""):
            await response.aclose()
            raise BackendProtocolError(
                f"the backend at {self.base_url} compresses its answers ({coding[:40]}), though asked not to")
        return response


class HttpxResponse:
    """An open answer of httpx, as :class:`ports.UpstreamResponse`."""

    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        self.headers: Mapping[str, str] = response.headers
        assert isinstance(response.stream, httpx.AsyncByteStream)
        self._chunks = response.stream.__aiter__()

    async def receive(self) -> bytes:
        """See :meth:`ports.UpstreamResponse.receive`."""
        try:
            async for chunk in self._chunks:
                if chunk:
                    return chunk
        except httpx.HTTPError as error:
            raise StreamTruncatedError(f"the backend broke off its answer ({_cause(error)})") from error
        return b""


class _Seen:
    """What happened below httpcore to the current task's request: a connection made for it, bytes received."""

    connected = False
    bytes = 0


Account = ContextVar[_Seen]


class _CountingStream(httpcore.AsyncNetworkStream):
    """A connection that counts what it reads, in the account of whoever reads it."""

    def __init__(self, inner: httpcore.AsyncNetworkStream, account: Account) -> None:
        self._inner = inner
        self._account = account

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = await self._inner.read(max_bytes, timeout)
        seen = self._account.get(None)
        if seen is not None:
            seen.bytes += len(data)
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._inner.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def start_tls(self, *args: Any, **options: Any) -> httpcore.AsyncNetworkStream:
        return _CountingStream(await self._inner.start_tls(*args, **options), self._account)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class _CountingBackend(httpcore.AsyncNetworkBackend):
    def __init__(self, account: Account) -> None:
        self._inner = httpcore.TrioBackend()
        self._account = account

    async def connect_tcp(self, *args: Any, **options: Any) -> httpcore.AsyncNetworkStream:
        seen = self._account.get(None)
        if seen is not None:
            seen.connected = True
        return _CountingStream(await self._inner.connect_tcp(*args, **options), self._account)

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


def _transport(limits: httpx.Limits, account: Account, secure: bool) -> httpx.AsyncHTTPTransport:
    # Without TLS there is nothing to verify, and no redirect leads to it; reading the certificates takes 30 ms.
    transport = httpx.AsyncHTTPTransport(trust_env=False, limits=limits, verify=secure)
    # httpx passes every option of its pool through but this one; a test holds that the name is still right.
    transport._pool._network_backend = _CountingBackend(account)
    return transport


def _below(error: BaseException) -> BaseException | None:
    """What httpcore translated (its pool drops the cause). None where it said so itself: a connection was closed."""
    return error.__cause__.__context__ if error.__cause__ else None


def _cause(error: BaseException) -> str:
    """The innermost message that says something: 'All connection attempts failed' hides the errno below it."""
    deepest: BaseException = error
    while (below := deepest.__cause__ or deepest.__context__) is not None:
        deepest = below
    if isinstance(deepest, BaseExceptionGroup):
        deepest = deepest.exceptions[0]
    return str(deepest) or str(error) or type(error).__name__
