"""The fake runtime in Ollama's clothes, written from documentation (``runtimes.md``, section 2): no real one was seen.

Theory of operation. Every model in memory is a :class:`Runner`: the machine room of ``engine`` with as many slots as
``OLLAMA_NUM_PARALLEL`` (the knob ``slots``), each with a context of its own, and the load options it was started with.
A request takes a runner by model and options. If none fits, one loader (a FIFO lock) waits until the runner in the way
has nothing to do, throws it out and loads: that is Ollama's scheduler. Requests that need a load and find
``load_queue_max`` others waiting are turned away with 503; requests for a loaded model wait without bound in the
engine's deferred queue, which stands for the per-model semaphore. Both waits end when the client leaves.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import trio
from attrs import define, field

from . import wire as W
from .engine import Engine
from .front import Wire
from .journal import Entry, FakeRequest

if TYPE_CHECKING:
    from .runtime import FakeRuntime

NATIVE = frozenset({"/api/chat", "/api/generate", "/api/embed", "/api/embeddings"})
LOAD_OPTIONS = ("num_ctx", "num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread", "draft_num_predict")
BUSY = "server busy, please try again.  maximum pending requests exceeded"
CREATED_AT = "2026-11-29T18:00:00.123456789Z"
TYPES = {400: "invalid_request_error", 404: "not_found_error"}


class Refused(Exception):
    """An error reply."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


@define(eq=False)
class Runner:
    """A model in memory. ``users`` counts the requests that hold it."""

    model: str
    options: tuple[tuple[str, Any], ...]
    context: int
    engine: Engine
    users: int = 0
    used_at: float = 0.0
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    idle: trio.Event = field(factory=trio.Event)


def full_name(model: str) -> str:
    return model if ":" in model else f"{model}:latest"


class Ollama:
    """Ollama's scheduler and its status routes. ``loads`` lists every load as (model, load options)."""

    def __init__(self, rt: FakeRuntime) -> None:
        self.rt = rt
        self.runners: dict[str, Runner] = {}
        self.loads: list[tuple[str, dict[str, Any]]] = []
        self.in_flight = 0
        self.in_flight_max = 0
        self.pending = 0
        self._loader = trio.Lock()

    @property
    def models(self) -> tuple[str, ...]:
        """Everything that was pulled."""
        return tuple(full_name(name) for name in (self.rt.config.model, *self.rt.config.models))

    # --- the scheduler ---

    @asynccontextmanager
    async def hold(self, body: Mapping[str, Any]) -> AsyncIterator[Runner]:
        """The runner that fits the request, loaded if need be. *Errors*: ``Refused``."""
        name = body.get("model")
        if not isinstance(name, str) or not name:
            raise Refused(400, "model is required")
        if full_name(name) not in self.models:
            raise Refused(404, f"model '{name}' not found")
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        try:
            runner = await self._runner(full_name(name), self._wanted(body))
            runner.users += 1
            try:
                yield runner
            finally:
                runner.users -= 1
                runner.used_at = trio.current_time()
                if not runner.users:
                    runner.idle.set()
                    if body.get("keep_alive") in (0, "0"):
                        self.unload(runner)
        finally:
            self.in_flight -= 1

    def _wanted(self, body: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        options = body.get("options")
        options = options if isinstance(options, Mapping) else {}
        named = [(key, options[key]) for key in LOAD_OPTIONS if options.get(key) is not None]
        return (*named, ("shift", False)) if body.get("shift") is False else tuple(named)

    def _fits(self, model: str, wanted: tuple[tuple[str, Any], ...]) -> Runner | None:
        self._expire()
        runner = self.runners.get(model)
        return runner if runner is not None and runner.options == wanted else None

    async def _runner(self, model: str, wanted: tuple[tuple[str, Any], ...]) -> Runner:
        runner = self._fits(model, wanted)
        if runner is not None and not self.pending:
            return runner
        if self.pending >= self.rt.config.load_queue_max:
            raise Refused(503, BUSY)
        self.pending += 1
        try:
            async with self._loader:
                runner = self._fits(model, wanted)
                return runner if runner is not None else await self._load(model, wanted)
        finally:
            self.pending -= 1

    async def _load(self, model: str, wanted: tuple[tuple[str, Any], ...]) -> Runner:
        c = self.rt.config
        if model in self.runners:
            await self._free(self.runners[model])
        while len(self.runners) >= c.models_max:
            await self._free(next(iter(self.runners.values())))
        await trio.sleep(c.cold_load_s)
        context = dict(wanted).get("num_ctx") or c.n_ctx // c.slots
        engine = Engine(attrs.evolve(c, n_ctx=context * c.slots, unified=False))
        runner = self.runners[model] = Runner(model, wanted, context, engine, used_at=trio.current_time())
        self.loads.append((model, dict(wanted)))
        self.rt.loads = len(self.loads)
        assert self.rt._nursery is not None
        self.rt._nursery.start_soon(self._run, runner)
        return runner

    async def _run(self, runner: Runner) -> None:
        with runner.scope:
            await runner.engine.run()

    async def _free(self, runner: Runner) -> None:
        """Throw a model out once it has nothing to do."""
        while runner.users:
            runner.idle = trio.Event()
            await runner.idle.wait()
        self.unload(runner)

    def unload(self, runner: Runner) -> None:
        if self.runners.get(runner.model) is runner:
            del self.runners[runner.model]
        if not runner.users:
            runner.scope.cancel()

    def clear(self) -> None:
        """As a restart does: everything is thrown out, and what runs dies."""
        for runner in list(self.runners.values()):
            runner.engine.clear()
            del self.runners[runner.model]

    def _expire(self) -> None:
        """Models that were not used for ``keep_alive_s`` are gone; looked at when somebody could tell."""
        for runner in list(self.runners.values()):
            if not runner.users and trio.current_time() - runner.used_at >= self.rt.config.keep_alive_s:
                self.unload(runner)

    # --- status routes ---

    async def status(self, r: FakeRequest, wire: Wire, entry: Entry) -> None:
        rt, body = self.rt, r.json if isinstance(r.json, dict) else {}
        route = (r.method, r.path)
        if r.path == "/" and r.method in ("GET", "HEAD"):
            await rt.send(wire, entry, 200, (("Content-Type", "text/plain; charset=utf-8"),), b"Ollama is running")
        elif r.path == "/api/version" and r.method in ("GET", "HEAD"):
            await rt.reply(wire, entry, 200, {"version": "0.33.0"})
        elif r.path == "/api/tags" and r.method in ("GET", "HEAD"):
            await rt.reply(wire, entry, 200, {"models": [self._card(name) for name in self.models]})
        elif route == ("GET", "/api/ps"):
            self._expire()
            rows = [{**self._card(runner.model), "expires_at": "2026-11-29T18:05:00Z", "size_vram": 96576768,
                     "context_length": runner.context} for runner in self.runners.values()]  # fmt: skip
            await rt.reply(wire, entry, 200, {"models": rows})
        elif route == ("POST", "/api/show"):
            await self._show(body, wire, entry)
        elif route == ("GET", "/v1/models"):
            card = {"object": "model", "created": W.CREATED, "owned_by": "library"}
            data = [{"id": name, **card} for name in self.models]
            await rt.reply(wire, entry, 200, {"object": "list", "data": data})
        else:
            await rt.send(wire, entry, 404, (("Content-Type", "text/plain"),), b"404 page not found")

    def _card(self, name: str) -> dict[str, Any]:
        details = {"parent_model": "", "format": "gguf", "family": "llama", "families": ["llama"],
                   "parameter_size": "134.52M", "quantization_level": "Q4_1"}  # fmt: skip
        return {"name": name, "model": name, "modified_at": CREATED_AT, "size": 96576768,
                "digest": name.encode().hex().ljust(64, "0")[:64], "details": details}  # fmt: skip

    async def _show(self, body: Mapping[str, Any], wire: Wire, entry: Entry) -> None:
        name = body.get("model")
        if not isinstance(name, str) or full_name(name) not in self.models:
            await self.rt.reply(wire, entry, 404, {"error": f"model '{name}' not found"})
            return
        info: dict[str, Any] = {
            "general.architecture": "llama", "llama.block_count": 30, "llama.attention.head_count": 9,
            "llama.attention.head_count_kv": 3, "llama.embedding_length": 576, "llama.context_length": 8192,
        }  # fmt: skip
        if self.rt.config.heads_per_layer:  # arrays of more than five are withheld unless asked for verbosely
            info["llama.attention.head_count_kv"] = [3] * 30 if body.get("verbose") else []
        await self.rt.reply(wire, entry, 200, {
            "license": "", "modelfile": "", "parameters": "", "template": "{{ .Prompt }}",
            "details": self._card(full_name(name))["details"], "model_info": info,
            "capabilities": ["completion", "tools"], "modified_at": CREATED_AT})  # fmt: skip

    # --- errors ---

    async def refuse(self, r: FakeRequest, wire: Wire, entry: Entry, status: int, text: str) -> None:
        """An error reply in the form of the path."""
        entry.outcome = "refused"
        if r.path.startswith("/v1/"):
            error = {"message": text, "type": TYPES.get(status, "api_error"), "param": None, "code": None}
            await self.rt.reply(wire, entry, status, {"error": error})
        else:
            await self.rt.reply(wire, entry, status, {"error": text})


def dump_line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
