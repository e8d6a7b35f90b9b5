"""How long a prompt is and which pages it has: exactly where the runtime can tell, else by a learning estimate."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from attrs import evolve, field, frozen

from ..adapters.base import Adapter, HttpCall, ProxyRequest
from ..adapters.routes import route_of
from ..core.tokens import TextSize, TokenEstimator, page_keys, salt, text_keys
from ..core.types import CountSource, PageKey
from ..errors import KVStreamError
from .ports import Upstream
from .prompts import turns_of
from .request import prompt_text

REPLIES_MAX = 4  # render, tokenize, and some room: a bound on a chain that an adapter decides
MESSAGE_TOKENS = 4  # what a chat template adds around each message, about
SAMPLE_CHARS = 65536
KEY_BYTES_PER_TOKEN = 4


@frozen
class PromptCount:
    """Length in tokens, page keys (capped), and how both were obtained.

    ``ids``: the token ids as the runtime sees them, where they are kept and known. ``exact``: the keys name the pages
    of exactly these ids; not so where the keys see constants in the place of volatile values.
    """

    tokens: int
    keys: tuple[PageKey, ...]
    source: CountSource
    size: TextSize | None = None  # what was estimated from, for learning; None when exact
    ids: array[int] | None = field(default=None, repr=False)
    exact: bool = False


async def count_exact(adapter: Adapter, upstream: Upstream, request: ProxyRequest, *,
                      timeout_s: float) -> tuple[int, ...] | int | None:
    """Token ids of the prompt as the runtime sees it, or their number alone; None when it cannot tell (now).

    *Errors*: none; an unreachable or refusing runtime is a None, the caller estimates.
    *Cancellation*: safe; only idempotent calls are made.
    """
    step: HttpCall | tuple[int, ...] | int | None = adapter.count_calls(request)
    for _ in range(REPLIES_MAX):
        if not isinstance(step, HttpCall):
            return step
        try:
            reply = await upstream.request(step, timeout_s=timeout_s)
        except KVStreamError:
            return None
        step = adapter.read_count(request, reply)
    return None


def keys_of_ids(ids: tuple[int, ...], request: ProxyRequest, *, page_tokens: int, tokens_keyed_max: int,
                client: str) -> PromptCount:
    """The count for exactly known token ids. Only the first ``tokens_keyed_max`` tokens get page keys."""
    if not route_of(request.route).generates:
        tokens_keyed_max = 0  # nothing is kept of a text that was only read
    keys = page_keys(ids[:tokens_keyed_max], page_tokens, salt(request.model, client))
    return PromptCount(len(ids), keys, CountSource.EXACT)


def keys_of_text(request: ProxyRequest, estimator: TokenEstimator, *, page_tokens: int, tokens_keyed_max: int,
                 client: str) -> PromptCount:
    """The count by estimate: the text is split from its start into pieces of equal size, one per page."""
    text = prompt_text(request.route, request.view)
    size = text_size(text)
    tokens = estimator.estimate_size(size) + MESSAGE_TOKENS * turns_of(request.route, request.view)
    keys: tuple[PageKey, ...] = ()
    if tokens_keyed_max and route_of(request.route).generates:
        head = text[: tokens_keyed_max * KEY_BYTES_PER_TOKEN].encode("utf-8", "surrogatepass")
        whole = head[: tokens_keyed_max * KEY_BYTES_PER_TOKEN]
        keys = text_keys(whole, page_tokens, salt(request.model, client), KEY_BYTES_PER_TOKEN)
    return PromptCount(tokens, keys, CountSource.ESTIMATED, size)


class PromptCounter:
    """Counts the prompts of one lane, and learns. ``estimator`` is replaced, never changed.

    ``keeps_ids``: slots of the runtime may be used here (hard inject), so the ids of a prompt are kept, 4 bytes a token
    as long as it lives, and all of its full pages have keys: what a slot holds is known to its end. May be changed at
    any time; it holds for what is counted from then on.
    """

    def __init__(self, adapter: Adapter, upstream: Upstream, *, page_tokens: int, tokens_keyed_max: int,
                 timeout_s: float, canonical: Callable[[ProxyRequest], ProxyRequest],
                 keeps_ids: bool = False) -> None:
        self.keeps_ids = keeps_ids
        self.estimator = TokenEstimator()
        self._adapter = adapter
        self._upstream = upstream
        self._page_tokens = page_tokens
        self._tokens_keyed_max = tokens_keyed_max
        self._timeout_s = timeout_s
        self._canonical = canonical  # volatile values are constants in what the keys are made of

    @property
    def can_be_exact(self) -> bool:
        return self._adapter.capabilities.exact_count

    async def exact(self, request: ProxyRequest, client: str) -> PromptCount | None:
        """The count by the runtime; None when it cannot tell. *Errors*: none. *Cancellation*: safe."""
        seen = self._canonical(request)
        ids = await count_exact(self._adapter, self._upstream, seen, timeout_s=self._timeout_s)
        if ids is None:
            return None
        if isinstance(ids, int):  # the number is the runtime's, the pages go by the text
            return evolve(self.estimate(seen, client), tokens=ids, source=CountSource.EXACT, size=None)
        keyed_max = len(ids) if self.keeps_ids and self._tokens_keyed_max else self._tokens_keyed_max
        count = keys_of_ids(ids, seen, client=client, page_tokens=self._page_tokens, tokens_keyed_max=keyed_max)
        if not (self.keeps_ids and route_of(request.route).generates):
            return count
        if seen is request:
            return evolve(count, ids=array("I", ids), exact=True)
        real = await count_exact(self._adapter, self._upstream, request, timeout_s=self._timeout_s)
        if not isinstance(real, tuple):
            return count
        return evolve(count, tokens=len(real), ids=array("I", real), exact=real == ids)

    def estimate(self, request: ProxyRequest, client: str) -> PromptCount:
        return keys_of_text(self._canonical(request), self.estimator, client=client, page_tokens=self._page_tokens,
                            tokens_keyed_max=self._tokens_keyed_max)

    def learn(self, request: ProxyRequest, count: PromptCount, tokens: int) -> None:
        """Let an estimated prompt teach what its text really cost: ``tokens``, as the runtime reported."""
        if count.size is not None:
            turns = turns_of(request.route, request.view)
            self.estimator = self.estimator.learn(count.size, tokens - MESSAGE_TOKENS * turns)


def text_size(text: str) -> TextSize:
    """The size of a text; of a very long one the units are scaled up from its head, which takes no time to count."""
    size = TextSize.of(text[:SAMPLE_CHARS])
    if len(text) <= SAMPLE_CHARS:
        return size
    return TextSize(len(text), round(size.units * len(text) / SAMPLE_CHARS))
