"""Which web pages may call the gateway (CORS).

A browser lets a page read an answer of another origin only if the answer names the page's origin, and asks beforehand
(a preflight, which carries no key) for anything beyond a plain form. So the headers go on *every* answer to an allowed
origin: without them a page cannot tell an error from a broken network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .asgi import Headers, Message, Scope, Send

MAX_AGE_S = 600
ANY = "*"
# What pages may send. Client libraries describe themselves in x-stainless-*.
_HEADERS = frozenset({
    "accept", "accept-language", "anthropic-beta", "anthropic-dangerous-direct-browser-access", "anthropic-version",
    "authorization", "cache-control", "content-encoding", "content-language", "content-type", "openai-beta",
    "openai-organization", "openai-project", "user-agent", "x-api-key", "x-request-id",
})
_OWN = re.compile(r"x-(?:kvstream|stainless)-[a-z0-9-]+")
_PLAIN_FORMS = frozenset({b"", b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data"})
_EXPOSED = (b"retry-after, www-authenticate, x-kvstream-cache, x-kvstream-coalesced, x-kvstream-count, "
            b"x-kvstream-queue-ms, x-kvstream-usage, x-kvstream-version, x-request-id")
_VARY_PREFLIGHT = b"Origin, Access-Control-Request-Method, Access-Control-Request-Headers"


class Cors:
    """``origins`` are compared letter by letter; ``*`` among them allows every one; without any, CORS is off."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)
        self._any = ANY.encode() in self._origins

    def wrap(self, scope: Scope, send: Send) -> Send:
        """``send``, with the headers that the request's origin needs on the answer."""
        if not self._origins:
            return send
        extra: Headers = [] if self._any else [(b"vary", b"Origin")]
        allowed = self._allowed(scope)
        if allowed is not None:
            extra += [(b"access-control-allow-origin", allowed), (b"access-control-expose-headers", _EXPOSED)]

        async def send_with(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        return send_with

    def is_preflight(self, scope: Scope) -> bool:
        """Whether a browser asks what a page may do, and CORS is on."""
        return bool(self._origins) and scope["method"] == "OPTIONS" and bool(
            _values(scope, b"origin")) and bool(_values(scope, b"access-control-request-method"))

    def preflight(self, scope: Scope) -> Headers | None:
        """The headers that answer a preflight, beside those of :meth:`wrap`; None for an origin that is not allowed.
        """
        if self._allowed(scope) is None:
            return None
        asked = b",".join(_values(scope, b"access-control-request-headers")).decode("latin-1").lower()
        names = [name for name in map(str.strip, asked.split(",")) if name in _HEADERS or _OWN.fullmatch(name)]
        headers = [(b"access-control-allow-methods", b"GET, POST, OPTIONS"), (b"vary", _VARY_PREFLIGHT),
                   (b"access-control-max-age", str(MAX_AGE_S).encode())]
        if names:
            headers.append((b"access-control-allow-headers", ", ".join(names).encode("latin-1")))
        if _values(scope, b"access-control-request-private-network") == [b"true"]:
            headers.append((b"access-control-allow-private-network", b"true"))
        return headers

    def is_forged(self, scope: Scope) -> bool:
        """Whether a page of a foreign origin sends what a browser lets it send without asking first: a plain form's
        POST. It could not read the answer, but the runtime would work for it."""
        origins = _values(scope, b"origin")
        if scope["method"] in ("GET", "HEAD", "OPTIONS") or not origins or self._allowed(scope) is not None:
            return False
        if [origin.partition(b"://")[2] for origin in origins] == _values(scope, b"host"):
            return False  # a page of this very address, behind a proxy that serves both
        kinds = [kind.split(b";")[0].strip().lower() for kind in _values(scope, b"content-type")]
        return len(kinds) != 1 or kinds[0] in _PLAIN_FORMS

    def _allowed(self, scope: Scope) -> bytes | None:
        origins = _values(scope, b"origin")
        if len(origins) != 1:
            return None
        if self._any:
            return ANY.encode()
        return origins[0] if origins[0] in self._origins else None


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for other, value in scope["headers"] if other == name]
