"""What runs on this machine: a few cheap GETs to each likely port, all ports at the same time.

Only GETs, a second each, and nothing that wakes or loads a model (``adapters.identify`` says which, and what the
answers mean). A port where nothing listens costs one refused connection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import trio
from attrs import field, frozen

from ..adapters.base import HttpCall, HttpReply
from ..adapters.identify import Identity, identify, next_call
from ..adapters.openai import root_of
from ..errors import BackendRefusedError, KVStreamError
from .upstream import HttpUpstream

# KVStream's and llama.cpp's own, llama.cpp's from 2027 on, Ollama, LM Studio, the README's second server, vLLM, Foundry
LIKELY_PORTS = (8080, 9931, 11434, 1234, 8081, 8000, 5272, 5273)
LOOPBACKS = ("127.0.0.1", "[::1]")
GET_TIMEOUT_S = 1.0
FAR_TIMEOUT_S = 5.0  # of another machine
LOOPBACK_NAMES = frozenset(("127.0.0.1", "localhost", "::1"))
GETS_MAX = 12  # of one address: more than any runtime needs


@frozen
class Found:
    """What answers at ``url``. ``replies`` are those that tell, by path."""

    url: str
    identity: Identity
    replies: Mapping[str, HttpReply | None] = field(repr=False)

    @property
    def port(self) -> int:
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)


@frozen
class Silent:
    """Something listens at ``url`` but gives no HTTP answer in time."""

    url: str
    why: str


def likely_urls(ports: Sequence[int] = LIKELY_PORTS) -> tuple[str, ...]:
    """Every likely port on both loopback addresses."""
    return tuple(f"http://{host}:{port}" for port in dict.fromkeys(ports) for host in LOOPBACKS)


async def look_at(url: str, api_key: str = "", *, timeout_s: float = GET_TIMEOUT_S) -> Found | Silent | None:
    """Who answers at ``url``; None when nobody listens there. ``api_key`` is sent as a bearer token.

    *Errors*: none. *Cancellation*: safe.
    """
    headers = (("authorization", f"Bearer {api_key}"),) if api_key else ()
    replies: dict[str, HttpReply | None] = {}
    why = ""
    async with HttpUpstream(root_of(url), connect_s=timeout_s) as upstream:
        while (path := next_call(replies)) is not None and len(replies) < GETS_MAX:
            try:
                replies[path] = await upstream.request(HttpCall("GET", path, headers), timeout_s=timeout_s)
            except BackendRefusedError:
                if not replies:
                    return None
                replies[path] = None
            except KVStreamError as error:
                replies[path], why = None, error.message
                if all(reply is None for reply in replies.values()):
                    break  # it gave no answer to the first: asking on would only take longer
    identity = identify(replies)
    return Silent(url, why) if identity is None else Found(url, identity, replies)


async def discover(urls: Sequence[str], api_keys: Mapping[str, str] | None = None, *,
                   timeout_s: float = GET_TIMEOUT_S) -> list[Found | Silent]:
    """Everything that answers at ``urls``, in their order. One server on both loopback addresses is there once.

    *Errors*: none. *Cancellation*: safe.
    """
    results: dict[str, Found | Silent | None] = {}

    async def one(url: str) -> None:
        patience = timeout_s if urlsplit(url).hostname in LOOPBACK_NAMES else max(timeout_s, FAR_TIMEOUT_S)
        results[url] = await look_at(url, (api_keys or {}).get(url, ""), timeout_s=patience)

    async with trio.open_nursery() as nursery:
        for url in dict.fromkeys(urls):
            nursery.start_soon(one, url)
    found: list[Found | Silent] = []
    seen: set[tuple[int | None, object]] = set()
    for url in dict.fromkeys(urls):
        result, parts = results[url], urlsplit(url)
        if result is None:
            continue
        is_loopback = parts.hostname in LOOPBACK_NAMES
        same = (parts.port, result.identity if isinstance(result, Found) else "") if is_loopback else (None, url)
        if same not in seen:
            seen.add(same)
            found.append(result)
    return found
