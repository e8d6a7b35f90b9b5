"""KVStream inside a program: the same engine, without the HTTP surface in front.

::

    async with KVStreamEngine(backend=LlamaCppBackend(base_url="http://127.0.0.1:8081")) as engine:
        async with engine.open_stream("Explain paging in one sentence.") as tokens:
            async for token in tokens:
                print(token.text, end="")
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import attrs
import trio
from attrs import frozen

from ..adapters.base import Adapter, Delta, Finished, UpstreamEvent
from ..config import Config, Loaded
from ..core.types import Priority
from .engine import Engine
from .metrics import Metrics
from .request import CHAT, COMPLETIONS, parse_request
from .serve import open_gateway
from .settings import engine_settings
from .stream import Stream
from .upstream import HttpUpstream


@frozen
class Token:
    """A piece of answer text as the runtime sent it, usually one token.

    ``token_id`` is None where the runtime does not tell. The last item has an empty text and the ``finish_reason``.
    """

    text: str
    token_id: int | None = None
    finish_reason: str | None = None


class KVStreamEngine:
    """A scheduler with true page accounting in front of one backend.

    ``backend`` is an adapter (``kvstream.adapters``). ``num_gpu_blocks`` pages of ``block_size`` tokens lower what the
    runtime has (None: take all of it); at most ``max_batch_size`` requests run at once. ``config`` holds everything
    else. Use as an async context manager; entering waits until the backend has answered once.
    """

    def __init__(self, backend: Adapter, *, num_gpu_blocks: int | None = None, num_cpu_blocks: int | None = None,
                 block_size: int = 16, max_batch_size: int = 16, config: Config | None = None) -> None:
        config = config or Config()
        memory: dict[str, Any] = {"block_size": block_size}
        if num_gpu_blocks is not None:
            memory["num_gpu_blocks"] = num_gpu_blocks
        if num_cpu_blocks is not None:
            memory["num_cpu_blocks"] = num_cpu_blocks
        self.config = attrs.evolve(
            config, memory=attrs.evolve(config.memory, **memory),
            scheduler=attrs.evolve(config.scheduler, max_batch_size=max_batch_size))
        self.backend = backend
        self._stack: AsyncExitStack | None = None
        self._engine: Engine | None = None
        self._metrics = Metrics()

    async def __aenter__(self) -> KVStreamEngine:
        async with AsyncExitStack() as stack:
            upstream = await stack.enter_async_context(HttpUpstream(
                self.backend.base_url, connect_s=self.config.upstream.connect_s,
                keepalive_expiry_s=self.config.upstream.keepalive_expiry_s))
            engine = Engine(self.backend, upstream, engine_settings(self.config), self._metrics)
            self._metrics.watch(engine)
            nursery = await stack.enter_async_context(trio.open_nursery())
            await nursery.start(engine.run)
            stack.callback(nursery.cancel_scope.cancel)
            await engine.watcher.wait_known()
            self._engine, self._stack = engine, stack.pop_all()
        return self

    async def __aexit__(self, *exc: Any) -> bool | None:
        assert self._stack is not None
        self._engine = None
        return await self._stack.__aexit__(*exc)

    @property
    def engine(self) -> Engine:
        """The lane itself: ``scheduler``, ``watcher``, ``streams``. Raises when not entered."""
        if self._engine is None:
            raise RuntimeError("enter it first: async with KVStreamEngine(backend=...) as engine: ...")
        return self._engine

    @asynccontextmanager
    async def open_stream(self, prompt: str | Sequence[Mapping[str, Any]], *, model: str = "",
                          priority: Priority = Priority.NORMAL, **options: Any) -> AsyncIterator[AsyncIterator[Token]]:
        """Queue a prompt (text, or a list of chat messages) and iterate over its answer's tokens.

        ``options`` are fields of the OpenAI request: ``max_tokens``, ``temperature``, ``stop`` ...

        *Resource handling*: leaving the block leaves the queue or stops the runtime, at any point.
        *Errors*: ``KVStreamError``, at entry or from the iteration. *Cancellation*: safe.
        """
        chat = not isinstance(prompt, str)
        body: dict[str, Any] = {"messages": list(prompt)} if chat else {"prompt": prompt}
        if model or self.backend.model:
            body["model"] = model or self.backend.model
        body |= options | {"stream": True}
        incoming = parse_request(CHAT if chat else COMPLETIONS, (), json.dumps(body).encode())
        async with self.engine.open_stream(incoming.proxy, priority=priority, name="library") as stream:
            yield _Tokens(stream)

    @trio.as_safe_channel
    async def generate(self, prompt: str | Sequence[Mapping[str, Any]], **options: Any) -> AsyncGenerator[Token, None]:
        """``open_stream`` as one ``async with``: ``async with engine.generate(...) as tokens: async for ...``."""
        async with self.open_stream(prompt, **options) as tokens:
            async for token in tokens:
                yield token

    async def serve(self, *, host: str | None = None, port: int | None = None,
                    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Put the OpenAI-compatible HTTP surface in front of this engine, until cancelled.

        ``task_status.started`` gets the base URL. *Errors*: see ``connections.cannot_listen``.
        """
        changes: dict[str, Any] = {k: v for k, v in (("host", host), ("port", port)) if v is not None}
        config = attrs.evolve(self.config, server=attrs.evolve(self.config.server, **changes))
        async with open_gateway(Loaded.of(config), engine=self.engine, metrics=self._metrics) as gateway:
            task_status.started(gateway.url)
            await trio.sleep_forever()


class _Tokens:
    """Iterates over the tokens of choice 0 of a stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._ready: list[Token] = []

    def __aiter__(self) -> _Tokens:
        return self

    async def __anext__(self) -> Token:
        while not self._ready:
            events = await self._stream.get()
            if not events:
                if self._stream.truncated:
                    self._stream.truncated = False
                    return Token("", finish_reason="length")
                raise StopAsyncIteration
            self._ready = [token for event in events if (token := _token(event)) is not None]
        return self._ready.pop(0)


def _token(event: UpstreamEvent) -> Token | None:
    if isinstance(event, Delta) and event.text:
        return Token(event.text, _token_id(event.data))
    if isinstance(event, Finished) and event.index == 0:
        return Token("", finish_reason=event.reason)
    return None


def _token_id(data: Any) -> int | None:
    """The id, where a runtime was asked for it (llama.cpp's ``return_tokens``, vLLM's ``return_token_ids``)."""
    if not isinstance(data, dict):
        return None
    choices = data.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else {}
    ids = data.get("tokens") or (first.get("token_ids") if isinstance(first, dict) else None)
    return ids[0] if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], int) else None
