"""``FakeRuntime``: a small honest llama.cpp-like server without sockets, scriptable per request, with a journal.

The parts: ``engine`` (slots, queue, cache, step loop), ``wire`` (shapes), ``answer`` (one inference request),
this file (routes and status endpoints). The two fronts, ``upstream.FakeUpstream`` and ``server.serve_fake``, hand
requests to :meth:`FakeRuntime.handle`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio

from . import tokens as T
from . import wire as W
from .answer import answer
from .apis import ROUTES, turns_of
from .children import Children
from .engine import Engine
from .front import ClientGone, Wire
from .journal import Entry, FakeRequest, Journal
from .ollama import NATIVE, Ollama
from .ollama_answer import ollama_answer
from .script import Rule, RuntimeConfig, Script
from .slotfiles import slot_action

INFERENCE = ROUTES | {"/v1/chat/completions", "/chat/completions", "/v1/completions", "/completion", "/completions"}
COUNTS = frozenset({"/v1/messages/count_tokens"} | {
    f"{v}{path}/input_tokens" for v in ("", "/v1") for path in ("/chat/completions", "/responses")})
OLLAMA_INFERENCE = NATIVE | {"/v1/chat/completions", "/v1/completions", "/v1/embeddings",
                            "/v1/messages", "/v1/responses"}
SERVER = (("Server", "llama.cpp"),)
JSON = (("Content-Type", "application/json; charset=utf-8"),)


class FakeRuntime:
    """See the module. Use :func:`open_runtime`, or start :meth:`run` in a nursery of your own."""

    def __init__(self, config: RuntimeConfig | None = None, **knobs: Any) -> None:
        self.config = config if config is not None else RuntimeConfig(**knobs)
        self.journal = Journal()
        self.engine = Engine(self.config)
        self.ollama = Ollama(self)
        self.tokenizer = T.Tokenizer()
        self.rules: list[Rule] = []
        self.files: dict[str, list[int]] = {}
        self.children = Children(self)
        self.sleeps = 0
        self._awake_at = 0.0
        self.loads = 0
        self.swaps = self.evicted = 0
        self.present: str | None = None  # the model in memory, where only one fits
        self.loaded = self.config.cold_load_s == 0
        self.ready_at = 0.0
        self.starts = 1
        self._loaded_event = trio.Event()
        self._prompt_before: list[int] = []
        self._nursery: trio.Nursery | None = None

    # --- scripting ---

    def script(
        self,
        script: Script,
        *,
        when: Callable[[FakeRequest], bool] | None = None,
        path: str | None = None,
        times: int | None = 1,
    ) -> None:
        """Let the next matching request (inference only, unless ``path`` or ``when`` says otherwise) follow it."""
        self.rules.append(Rule(script, when, path, times))

    def wedge(self, on: bool = True) -> None:
        """Tokens stop (health and slots go on answering), or continue."""
        for engine in (self.engine, *self.children.engines):
            engine.wedged = on
            engine.wake()

    def restart(self, load_s: float = 0.0) -> None:
        """As if the process had been replaced: everything running dies, every cache is empty."""
        self.engine.clear()
        self.ollama.clear()
        self.children.clear()
        self.starts += 1
        self.ready_at = trio.current_time() + load_s

    @property
    def deferred_max(self) -> int:
        """How deep the runtime's own hidden queue ever got."""
        engines = [self.engine, *self.children.engines, *(runner.engine for runner in self.ollama.runners.values())]
        return max(engine.deferred_max for engine in engines)

    @property
    def in_flight_max(self) -> int:
        """The most inference requests that were inside the runtime at once, queued or running."""
        children = [engine.in_flight_max for engine in self.children.engines]
        return max(self.engine.in_flight_max, self.ollama.in_flight_max, *children)

    @property
    def kills(self) -> int:
        """How often the unified pool overflowed."""
        return self.engine.kills

    @property
    def corruptions(self) -> int:
        """How often the KV of a running request was exchanged under it."""
        return sum(engine.corruptions for engine in (self.engine, *self.children.engines))

    @property
    def busy_pins(self) -> int:
        """How often a request named a slot at work, or was taken up again while it still was."""
        return sum(engine.busy_pins for engine in (self.engine, *self.children.engines))

    def repeated(self, prompt: list[int]) -> list[str]:
        """What an answer to ``prompt`` repeats, by ``config.repeats``: itself, or the prompt that came before it."""
        before, self._prompt_before = self._prompt_before, prompt
        ids = prompt if self.config.repeats == "own" else before if self.config.repeats == "other" else []
        return [self.tokenizer.decode([token]) for token in ids]

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text))

    # --- running ---

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Task body: the step loops, and the requests of the in-memory front."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self.ready_at = trio.current_time() + self.config.load_s
            nursery.start_soon(self.engine.run)
            task_status.started()

    def spawn(self, request: FakeRequest, wire: Wire, connection: int) -> None:
        """Handle a request in the runtime's own nursery: it may outlive its client."""
        if self._nursery is None:
            raise RuntimeError("the fake runtime is not running: use open_runtime() or nursery.start(runtime.run)")
        self._nursery.start_soon(self.handle, request, wire, connection)

    async def handle(self, request: FakeRequest, wire: Wire, connection: int = 0) -> Entry:
        """Answer one request to its end."""
        inference = request.method == "POST" and request.path in self._inference
        entry = self.journal.record(request, connection, inference)
        script = self._match(request, inference)
        deaf = inference and self._deaf(request)
        # at once, not when the watcher is next scheduled: a test may look right after its scope was cancelled
        wire.on_gone = lambda: self._left(entry, wire)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, wire, entry, None if deaf else nursery.cancel_scope)
            try:
                await self._route(request, wire, entry, script, inference)
            except* ClientGone:  # grouped by the nursery of a streamed answer
                self._left(entry, wire)
            finally:
                nursery.cancel_scope.cancel()
        if entry.ended_at is None:
            entry.ended_at = trio.current_time()
            entry.outcome = entry.outcome or ("closed" if entry.closed_at is not None else "done")
        self.journal.touch()
        return entry

    @property
    def _inference(self) -> frozenset[str]:
        return OLLAMA_INFERENCE if self.config.dialect == "ollama" else INFERENCE

    def _deaf(self, request: FakeRequest) -> bool:
        if self.config.deaf == "nonstream" and self.config.dialect == "llamacpp":
            return not (isinstance(request.json, dict) and request.json.get("stream"))
        return self.config.deaf == "all"

    async def _watch(self, wire: Wire, entry: Entry, scope: trio.CancelScope | None) -> None:
        await wire.gone.wait()
        self._left(entry, wire)
        if scope is not None:
            scope.cancel()

    def _left(self, entry: Entry, wire: Wire) -> None:
        if entry.closed_at is None and entry.ended_at is None:
            entry.closed_at, entry.closed_by_reset = trio.current_time(), wire.reset
            self.journal.touch()

    def _match(self, request: FakeRequest, inference: bool) -> Script | None:
        for rule in self.rules:
            if rule.matches(request, inference):
                if rule.times is not None:
                    rule.times -= 1
                return rule.script
        return None

    # --- routes ---

    async def _route(self, r: FakeRequest, wire: Wire, entry: Entry, script: Script | None, inference: bool) -> None:
        c = self.config
        public = r.path in ("/health", "/v1/health")
        if c.api_key and not public and r.headers.get("authorization") != f"Bearer {c.api_key}":
            await self.reply(wire, entry, 401, W.error(401, "Invalid API Key", "authentication_error"))
        elif script is not None and (not inference or not script.slot or script.refuse or script.status != 200):
            await answer(self, r, wire, entry, script)
        elif trio.current_time() < self.ready_at:
            await self.reply(wire, entry, 503, W.error(503, "Loading model", "unavailable_error"))
        elif inference and c.dialect == "ollama":
            await ollama_answer(self, r, wire, entry, script)
        elif c.router:
            await self.children.route(r, wire, entry, script, inference)
        elif inference:
            await self._ensure_loaded(r.json)
            await self._rouse()
            await answer(self, r, wire, entry, script)
        elif (r.path == "/health" and c.health_hang) or (r.path == "/slots" and c.slots_hang):
            await trio.sleep_forever()
        else:
            await self._status(r, wire, entry)

    async def _ensure_loaded(self, body: Any) -> None:
        """The cold start that counts how many requests started it: each does that comes before the first is done."""
        model = body.get("model") if isinstance(body, dict) else None
        if self.config.one_model and model is not None:
            if self.present not in (None, model):
                self.evicted += len(self.engine.running)
                self.engine.clear()
                self.loaded = False
                self.swaps += 1
            self.present = model
        if not self.loaded:
            self.loads += 1
            await trio.sleep(self.config.cold_load_s)
            self.loaded = True

    async def _rouse(self) -> None:
        """Whatever needs the model wakes it."""
        if self.engine.asleep:
            self.engine.forget()
            self.sleeps += 1
            self.engine.used_at = self._awake_at = trio.current_time() + self.config.wake_s
        if trio.current_time() < self._awake_at:  # no checkpoint where there is nothing to wait for
            await trio.sleep_until(self._awake_at)

    async def _status(self, r: FakeRequest, wire: Wire, entry: Entry) -> None:
        c, get = self.config, r.method in ("GET", "HEAD")
        if c.dialect == "ollama":
            await self.ollama.status(r, wire, entry)
            return
        n_ctx = self.engine.slots[0].n_ctx
        if r.path in ("/health", "/v1/health") and get:
            if c.health_status != 200:
                value: Any = W.error(c.health_status, "Loading model", "unavailable_error")
            else:
                value = {} if c.dialect == "openai" else {"status": "ok"}
            await self.reply(wire, entry, c.health_status, value)
        elif r.path in ("/v1/models", "/models") and get:
            await self.reply(wire, entry, 200, W.models(c, n_ctx))
        elif r.path == "/metrics" and get and c.metrics:
            await self._rouse()
            await self.engine.at_leisure()
            more = (("Content-Type", "text/plain; version=0.0.4"), ("Process-Start-Time-Unix", str(self.starts)))
            await self.send(wire, entry, 200, more, W.metrics(c, self.engine))
        elif c.dialect == "openai":
            await self._vllm(r, wire, entry)
        else:
            try:
                await self._llamacpp(r, wire, entry)
            except (TypeError, AttributeError, KeyError) as nonsense:  # a body of another shape than it must have
                await self.reply(wire, entry, 400, W.error(400, repr(nonsense), "invalid_request_error"))

    async def _vllm(self, r: FakeRequest, wire: Wire, entry: Entry) -> None:
        if r.path == "/version" and r.method == "GET":
            await self.reply(wire, entry, 200, {"version": "0.11.0-fake"})
        elif r.path == "/tokenize" and self.config.tokenizer and isinstance(r.json, dict):
            text = T.apply_template(r.json["messages"]) if "messages" in r.json else str(r.json.get("prompt", ""))
            ids = self.tokenizer.encode(text)
            limit = self.config.max_model_len or self.config.n_ctx
            await self.reply(wire, entry, 200, {"count": len(ids), "max_model_len": limit, "tokens": ids})
        else:
            await self.reply(wire, entry, 404, {"detail": "Not Found"})

    async def _llamacpp(self, r: FakeRequest, wire: Wire, entry: Entry) -> None:
        body = r.json if isinstance(r.json, dict) else {}
        route = (r.method, r.path)
        if route == ("GET", "/props"):
            await self.reply(wire, entry, 200, W.props(
                self.config, self.engine.slots[0].n_ctx, self.starts, self.engine.asleep))
        elif route == ("GET", "/slots"):
            await self._rouse()
            await self.engine.at_leisure()
            await self.reply(wire, entry, 200, [W.slot_object(slot) for slot in self.engine.slots])
        elif route == ("POST", "/tokenize") and self.config.tokenizer:
            ids = self.tokenizer.encode(T.content_text(body.get("content")))
            pieces = [{"id": i, "piece": self.tokenizer.decode([i])} for i in ids]
            await self.reply(wire, entry, 200, {"tokens": pieces if body.get("with_pieces") else ids})
        elif route == ("POST", "/detokenize") and self.config.tokenizer:
            await self.reply(wire, entry, 200, {"content": self.tokenizer.decode(body.get("tokens", []))})
        elif route == ("POST", "/apply-template") and self.config.tokenizer:
            await self.reply(wire, entry, 200, {"prompt": T.apply_template(body.get("messages", []))})
        elif r.method == "POST" and r.path in COUNTS and self.config.tokenizer:
            n = self.count(T.apply_template(body["messages"] if "chat" in r.path else turns_of(r.path, body)))
            more = {} if "messages" in r.path else {"object": "response.input_tokens"}
            await self.reply(wire, entry, 200, {"input_tokens": n, **more})
        elif r.method == "POST" and r.path.startswith("/slots/"):
            await self._rouse()
            status, value = await slot_action(self, r, body)
            await self.reply(wire, entry, status, value)
        else:
            await self.reply(wire, entry, 404, W.error(404, "File Not Found", "not_found_error"))

    # --- small answers ---

    async def reply(self, wire: Wire, entry: Entry, status: int, value: Any) -> None:
        await self.send(wire, entry, status, JSON, W.dump(value))

    async def send(
        self, wire: Wire, entry: Entry, status: int, headers: tuple[tuple[str, str], ...], body: bytes
    ) -> None:
        """A whole answer with Content-Length."""
        server = SERVER if self.config.dialect == "llamacpp" else (("Server", "uvicorn"),)
        server = () if self.config.dialect == "ollama" else server
        entry.status, entry.headers_at = status, trio.current_time()
        await wire.head(status, (*server, *headers), len(body))
        if entry.request.method != "HEAD":
            await self.put(wire, entry, body)
        await self.end(wire, entry)

    async def end(self, wire: Wire, entry: Entry, how: str = "done") -> None:
        """End the answer, noting it first: the client may look at the journal as soon as it has the last byte."""
        entry.outcome, entry.ended_at = entry.outcome or how, trio.current_time()
        self.journal.touch()
        if how in ("rst", "cut", "truncated_length", "refused"):
            await wire.abort(reset=how in ("rst", "refused"))
        else:
            await wire.end()

    async def put(self, wire: Wire, entry: Entry, data: bytes) -> None:
        """Write body bytes and note when."""
        await wire.write(data)
        now = trio.current_time()
        if entry.first_byte_at is None:
            entry.first_byte_at = now
        entry.bytes_out += len(data)
        entry.writes.append((now, len(data)))
        self.journal.touch()


def parse_request(method: str, target: str, headers: tuple[tuple[str, str], ...], body: bytes) -> FakeRequest:
    """A request value; ``json`` is None when the body is not JSON."""
    try:
        value = json.loads(body) if body else None
    except ValueError:
        value = None
    return FakeRequest(method, target, headers, body, value)


@asynccontextmanager
async def open_runtime(config: RuntimeConfig | None = None, **knobs: Any) -> AsyncIterator[FakeRuntime]:
    """A running fake runtime; whatever it still does is cancelled at the end of the block."""
    runtime = FakeRuntime(config, **knobs)
    async with trio.open_nursery() as nursery:
        await nursery.start(runtime.run)
        try:
            yield runtime
        finally:
            nursery.cancel_scope.cancel()
