"""A target before the load: does it answer, what is it, which model, and how long are words for its tokenizer."""

from __future__ import annotations

import json
from typing import Any

import trio
from attrs import field, frozen

from ..adapters.base import HttpCall, HttpReply
from ..errors import BackendRefusedError, BackendTimeoutError, BackendUnavailableError, KVStreamError
from ..gateway.ports import Upstream
from .answer import AnswerReader, message_of
from .plan import Load
from .prompts import COMPLETIONS, Lengths, learnt, request_body, text_of
from .words import WORDS

VERSION_HEADER = "x-kvstream-version"
LOOK_TIMEOUT_S = 10.0
COUNTS_MAX = 96  # calls for finding the words that are more than one token
LEARN_WORDS = (16, 144)


@frozen
class Target:
    """``upstream`` performs its calls; ``headers`` go with each (and hold the key, so they are never shown)."""

    label: str
    url: str
    upstream: Upstream = field(repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    kind: str = "openai-compatible"
    model: str = ""
    lengths: Lengths = field(factory=lambda: Lengths("estimated"), repr=False)

    def call(self, path: str, body: bytes) -> HttpCall:
        return HttpCall("POST", path, (("content-type", "application/json"), *self.headers), body)

    async def ask(self, method: str, path: str, value: Any = None) -> HttpReply:
        """A small call. *Errors*: KVStreamError when there is no answer."""
        body = b"" if value is None else json.dumps(value).encode()
        headers = (("content-type", "application/json"), *self.headers) if body else self.headers
        return await self.upstream.request(HttpCall(method, path, headers, body), timeout_s=LOOK_TIMEOUT_S)


async def describe(target: Target) -> tuple[str, list[str]]:
    """(what it is, the models it offers).

    *Errors*: BackendUnavailableError when nothing answers there. *Cancellation*: safe.
    """
    try:
        reply = await target.ask("GET", "/v1/models")
    except BackendTimeoutError as error:
        raise BackendUnavailableError(
            f"{target.url} did not answer GET /v1/models within {LOOK_TIMEOUT_S:g} s") from error
    except BackendRefusedError as error:
        raise BackendUnavailableError(
            f"nothing answers at {target.url}: the connection was refused. Is a server running there?") from error
    except KVStreamError as error:
        raise BackendUnavailableError(f"nothing answers at {target.url}: {error}") from error
    if reply.status in (401, 403):
        raise BackendUnavailableError(f"{target.url} wants a key ({reply.status}): give --api-key")
    value = reply.json()
    data = value.get("data") if isinstance(value, dict) else None
    models = [entry["id"] for entry in data if isinstance(entry, dict) and isinstance(entry.get("id"), str)
              ] if isinstance(data, list) else []
    if VERSION_HEADER in reply.headers:
        return f"KVStream {reply.headers[VERSION_HEADER]}", models
    server = reply.headers.get("server", "")
    return server or "openai-compatible", models


class Counter:
    """Asks a target for the length of a prompt, in whichever way it knows; the first that worked is kept."""

    def __init__(self, target: Target, route: str) -> None:
        self._target = target
        self._route = route
        self._way: Any = None
        self.calls = 0

    async def count(self, text: str) -> int | None:
        """Tokens of a prompt that consists of ``text``; None when the target cannot count. *Errors*: none."""
        self.calls += 1
        for way in (self._way,) if self._way else (self._llamacpp, self._vllm, self._anthropic):
            try:
                tokens = await way(text)
            except KVStreamError:
                continue
            if tokens:
                self._way = way
                return int(tokens)
        return None

    async def _value(self, path: str, value: Any) -> dict[str, Any]:
        reply = await self._target.ask("POST", path, value)
        found = reply.json() if reply.status == 200 else None
        estimated = reply.headers.get("x-kvstream-count", "exact") != "exact"
        return found if isinstance(found, dict) and not estimated else {}

    async def _llamacpp(self, text: str) -> int | None:
        """Render as the server would, then tokenize as it would."""
        content = text
        if self._route != COMPLETIONS:
            content = (await self._value("/apply-template", {"messages": _user(text)})).get("prompt", "")
        if not content:
            return None
        asked = {"content": content, "add_special": True, "parse_special": True}
        tokens = (await self._value("/tokenize", asked)).get("tokens")
        return len(tokens) if isinstance(tokens, list) else None

    async def _vllm(self, text: str) -> int | None:
        asked: dict[str, Any] = {"prompt": text} if self._route == COMPLETIONS else {"messages": _user(text)}
        count = (await self._value("/tokenize", {"model": self._target.model, **asked})).get("count")
        return count if isinstance(count, int) else None

    async def _anthropic(self, text: str) -> int | None:
        if self._route == COMPLETIONS:
            return None
        asked = {"model": self._target.model, "messages": _user(text)}
        count = (await self._value("/v1/messages/count_tokens", asked)).get("input_tokens")
        return count if isinstance(count, int) else None


async def learn_lengths(target: Target, load: Load) -> Lengths:
    """What words cost at this target, by the best way it offers. *Errors*: none."""
    counter = Counter(target, load.route)
    overhead = await counter.count(text_of(()))
    if overhead is not None:
        words = await _one_token_words(counter, WORDS, overhead)
        if len(words) >= len(WORDS) // 4:
            return Lengths("exact", float(overhead), 1.0, words)
    pairs = [(count, await _prompt_tokens(target, load, count)) for count in LEARN_WORDS]
    (few, few_tokens), (many, many_tokens) = pairs
    if few_tokens and many_tokens and many_tokens > few_tokens:
        return learnt((few, few_tokens), (many, many_tokens))
    return Lengths("estimated")


async def _one_token_words(counter: Counter, words: tuple[str, ...], overhead: int) -> tuple[str, ...]:
    """Those of ``words`` that are one token each: a row with as many tokens as words has only such, another is halved.
    When too many calls would be needed the rest is given up."""
    if counter.calls > COUNTS_MAX:
        return ()
    tokens = await counter.count(text_of(words))
    if tokens is None:
        return ()
    if tokens - overhead == len(words):
        return words
    if len(words) == 1:
        return ()
    half = len(words) // 2
    return (*await _one_token_words(counter, words[:half], overhead),
            *await _one_token_words(counter, words[half:], overhead))


async def _prompt_tokens(target: Target, load: Load, count: int) -> int | None:
    """The length of a prompt of ``count`` words as the usage of an answer of one token tells it."""
    body = request_body(load, target.model, _user(text_of(WORDS[-count:])), 1)
    reader = AnswerReader()
    try:
        with trio.move_on_after(load.timeout_s):
            async with target.upstream.open(target.call(load.route, body)) as response:
                while response.status == 200 and (data := await response.receive()):
                    reader.feed(data, 0.0)
    except KVStreamError:
        return None
    return reader.usage.prompt if reader.usage is not None else None


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def error_words(body: bytes) -> str:
    """What an error body says."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return body[:200].decode("utf-8", "replace")
    return message_of(value["error"] if isinstance(value, dict) and value.get("error") else value)
