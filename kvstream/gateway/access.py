"""Who may come in: keys, the pages that need one, rates, and the headers that web pages need.

Stands before the model routes and the small pages alike, and refuses before a byte of the body is read. A request that
is let in with a key carries its :class:`Identity` on in the scope, and its key no further: behind here there is nothing
that could be forwarded to a runtime.

What needs a key (any key; ``auth.metrics_token`` for the two pages only)::

                          no [auth]                      [auth]
    /health /ready        open                           open
    /status /metrics      loopback: open; else 403       loopback: open, unless it came through a proxy; else a key
    everything else       open                           a key

``server.public_metrics`` opens the two pages to everybody.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import attrs
import trio
from attrs import field, frozen

from ..config_auth import ClientKey
from ..core.types import Priority
from ..errors import ForbiddenError, KVStreamError, RateLimitedError, UnauthorizedError
from .asgi import Headers, Scope, Send
from .cors import Cors
from .keys import Keys, digest_of
from .request import PRIORITY_HEADER, Incoming

log = logging.getLogger("kvstream.access")

PUBLIC = frozenset({"/health", "/ready"})
PAGES = ("/metrics", "/status")
LOG_EVERY_S = 10.0

_SCOPE_KEY = "kvstream.identity"
_KEY_HEADERS = frozenset({b"authorization", b"x-api-key", b"proxy-authorization"})
_PROXY_HEADERS = frozenset({b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"})
_PRIORITIES: Mapping[str, Priority] = MappingProxyType({p.name.lower(): p for p in Priority})


@frozen
class AccessSettings:
    """``loopback``: only this machine can connect. ``metrics_token``: empty for none."""

    keys: tuple[ClientKey, ...] = ()
    metrics_token: str = field(default="", repr=False)
    origins: tuple[str, ...] = ()
    loopback: bool = True
    public_metrics: bool = False


@frozen
class Identity:
    """A client that showed its key. ``priority`` is the best it may have."""

    key: ClientKey

    @property
    def priority(self) -> Priority:
        return _PRIORITIES[self.key.priority]


class Access:
    """See the module. :meth:`replace` takes new settings while requests are in hand."""

    def __init__(self, settings: AccessSettings | None = None) -> None:
        self.keys = Keys()
        self._refusals = _Counted()
        self.replace(settings or AccessSettings())

    def replace(self, settings: AccessSettings) -> None:
        """Use other keys, origins and rules from now on; whoever is inside stays inside."""
        self._settings = settings
        self._token = digest_of(settings.metrics_token.encode()) if settings.metrics_token else None
        self.keys.replace(settings.keys)
        self.cors = Cors(settings.origins)

    def wrap(self, scope: Scope, send: Send) -> Send:
        """``send`` with the headers that a web page's browser needs on every answer, also on errors."""
        return self.cors.wrap(scope, send)

    def preflight(self, scope: Scope) -> Headers | None:
        """The headers of a 204, when this is a preflight; None when it is an ordinary request.

        *Errors*: ``ForbiddenError`` for an origin that is not allowed.
        """
        if not self.cors.is_preflight(scope):
            return None
        headers = self.cors.preflight(scope)
        if headers is None:
            raise ForbiddenError("this web page's origin is not in server.cors_origins", code="origin_not_allowed")
        return headers

    def admit(self, scope: Scope) -> Scope:
        """Let a request in, as the scope to go on with, or raise. *Errors*: ``UnauthorizedError``,
        ``ForbiddenError``."""
        path = scope["path"]
        if self.cors.is_forged(scope):
            raise ForbiddenError("a web page of an origin that is not in server.cors_origins sent this",
                                 code="origin_not_allowed")
        if path in PUBLIC:
            return scope
        page = is_page(path)
        if page and self._page_is_open(scope):
            return scope
        if not self.keys.enabled and not page:
            return scope
        if not self.keys.enabled and self._token is None:
            raise ForbiddenError(
                f"{path} is not shown on an address that is not loopback; set auth.metrics_token or [auth] keys and "
                "send one, or open it to everybody with server.public_metrics = true")
        try:
            secrets = presented(scope["headers"])
            if page and self._is_token(secrets):
                return scope
            key = self.keys.find(secrets)
            if key is None:
                raise UnauthorizedError(
                    "this key is not known here" if secrets else "a key is needed: send it as 'Authorization: Bearer "
                    "KEY' or 'x-api-key: KEY'")
        except UnauthorizedError:
            self._refusals.count("without a valid key")
            raise
        headers = [pair for pair in scope["headers"] if pair[0] not in _KEY_HEADERS]
        return {**scope, "headers": headers, _SCOPE_KEY: Identity(key)}

    def spend(self, scope: Scope) -> None:
        """A model call is about to be served: it counts against its key's rate. *Errors*: ``RateLimitedError``."""
        identity: Identity | None = scope.get(_SCOPE_KEY)
        if identity is None:
            return
        wait_s = self.keys.try_spend(identity.key, trio.current_time())
        if wait_s is not None:
            self._refusals.count("above the rate of their key")
            raise RateLimitedError(
                f"this key may make {identity.key.rate:g} requests per minute; try again in {wait_s:.3g} s",
                retry_after_s=wait_s)

    def _page_is_open(self, scope: Scope) -> bool:
        """A reverse proxy on this machine makes everybody come from loopback; where there are keys, it is no reason to
        trust. (To add such a header only closes the page to whoever adds it.)"""
        if self._settings.public_metrics:
            return True
        proxied = any(name in _PROXY_HEADERS for name, _ in scope["headers"])
        return self._settings.loopback and not (proxied and self.keys.enabled)

    def _is_token(self, secrets: Iterable[bytes]) -> bool:
        token = self._token
        return token is not None and any(hmac.compare_digest(digest_of(secret), token) for secret in secrets)


def identified(incoming: Incoming, scope: Scope) -> Incoming:
    """The request as its key makes it: whose it is, how urgent it may be, how large its share. Without a key it stays
    as it came."""
    identity: Identity | None = scope.get(_SCOPE_KEY)
    if identity is None:
        return incoming
    asked = any(name == PRIORITY_HEADER.encode() for name, _ in scope["headers"])
    best = identity.priority
    priority = max(best, incoming.priority, key=lambda p: p.value) if asked else best
    return attrs.evolve(incoming, client=identity.key.name, priority=priority, weight=identity.key.share)


def presented(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """The keys that a request shows: as Bearer, as the password of Basic, as ``x-api-key``.

    *Errors*: ``UnauthorizedError`` when a header comes twice; which one counts is then a matter of opinion.
    """
    secrets: list[bytes] = []
    seen: set[bytes] = set()
    for name, value in headers:
        if name not in (b"authorization", b"x-api-key"):
            continue
        if name in seen:
            raise UnauthorizedError(f"the header {name.decode()} comes more than once")
        seen.add(name)
        secret = value.strip() if name == b"x-api-key" else _of_scheme(value)
        if secret:
            secrets.append(secret)
    return secrets


def _of_scheme(value: bytes) -> bytes:
    scheme, _, rest = value.strip().partition(b" ")
    if scheme.lower() == b"bearer":
        return rest.strip()
    if scheme.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(rest.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def is_page(path: str) -> bool:
    """Whether a path is one of the pages that tell what goes on here."""
    return any(path == page or path.startswith(f"{page}/") for page in PAGES)


def is_loopback(bind: str) -> bool:
    """Whether only this machine can connect to an address that is listened on."""
    try:
        return ipaddress.ip_address(bind.strip("[]")).is_loopback
    except ValueError:
        return bind.lower() == "localhost"


def challenge(error: KVStreamError, scope: Scope) -> Headers:
    """``WWW-Authenticate`` for a 401. A person at a browser, who can only look at pages, is asked for a password."""
    if not isinstance(error, UnauthorizedError):
        return []
    basic = [(b"www-authenticate", b'Basic realm="kvstream", charset="UTF-8"')] if is_page(scope["path"]) else []
    return [(b"www-authenticate", b'Bearer realm="kvstream"'), *basic]


class _Counted:
    """Refusals in the log: the first at once, then a line in a while with their number. A flood must not fill a disk.
    """

    def __init__(self) -> None:
        self._next: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def count(self, what: str) -> None:
        now = trio.current_time()
        unsaid = self._unsaid.get(what, 0) + 1
        if now < self._next.get(what, float("-inf")):
            self._unsaid[what] = unsaid
            return
        self._unsaid[what], self._next[what] = 0, now + LOG_EVERY_S
        log.warning("turned away: %d request%s %s", unsaid, "" if unsaid == 1 else "s", what)
