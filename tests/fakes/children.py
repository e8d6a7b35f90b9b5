"""llama.cpp's router mode: no model of its own, but a child for each, which is a fake runtime with slots of its own.

Written from documentation (``runtimes.md`` 1.10); no real router was seen. All children write their slot files to the
same place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import attrs
import trio

from . import wire as W

if TYPE_CHECKING:
    from .engine import Engine
    from .front import Wire
    from .journal import Entry, FakeRequest
    from .runtime import FakeRuntime
    from .script import Script


class Children:
    """The models in memory, least recently used first. ``loads`` counts what was loaded, ``evicted`` what had to go."""

    def __init__(self, rt: FakeRuntime) -> None:
        self.rt = rt
        self.loaded: dict[str, FakeRuntime] = {}
        self.loads = self.evicted = 0
        self._loader = trio.Lock()

    @property
    def engines(self) -> list[Engine]:
        return [child.engine for child in self.loaded.values()]

    @property
    def models(self) -> tuple[str, ...]:
        return (self.rt.config.model, *self.rt.config.models)

    def clear(self) -> None:
        for name in list(self.loaded):
            self._drop(name)

    async def route(
        self, r: FakeRequest, wire: Wire, entry: Entry, script: Script | None, inference: bool
    ) -> None:
        """Answer as the router, or hand the request to the child of its model."""
        rt, query = self.rt, parse_qs(r.query)
        body = r.json if isinstance(r.json, dict) else {}
        model = query.get("model", [None])[0] if r.method == "GET" else body.get("model")
        own = r.method == "GET" and (r.path in ("/health", "/v1/health", "/models", "/v1/models")
                                     or (r.path == "/props" and model is None))
        if own:
            await rt.reply(wire, entry, 200, self._own(r.path))
        elif not isinstance(model, str) or not model:
            await rt.reply(wire, entry, 400, _error("model name is missing from the request"))
        elif model not in self.models:
            await rt.reply(wire, entry, 400, _error(f"model '{model}' not found"))
        elif model not in self.loaded and query.get("autoload") == ["false"]:
            await rt.reply(wire, entry, 400, _error("model is not loaded"))
        else:
            await (await self._child(model))._route(r, wire, entry, script, inference)

    def _own(self, path: str) -> Any:
        if path == "/props":
            return {"role": "router", "max_instances": self.rt.config.models_max, "model_alias": "llama-server",
                    "build_info": self.rt.config.build}
        if path.endswith("/health"):
            return {"status": "ok"}
        cards = []
        for name in self.models:
            child = self.loaded.get(name)
            card = {"id": name, "object": "model", "owned_by": "llamacpp", "created": W.CREATED, "aliases": [],
                    "status": {"value": "loaded" if child is not None else "unloaded", "args": []}}
            if child is not None:  # what the child tells of its model is in its card from then on
                card["meta"] = W.models(child.config, child.engine.slots[0].n_ctx)["data"][0]["meta"]
            cards.append(card)
        return {"object": "list", "data": cards}

    async def _child(self, model: str) -> FakeRuntime:
        async with self._loader:
            child = self.loaded.pop(model, None) or await self._load(model)
            self.loaded[model] = child
            return child

    async def _load(self, model: str) -> FakeRuntime:
        rt = self.rt
        while len(self.loaded) >= rt.config.models_max:
            self._drop(next(iter(self.loaded)))
            self.evicted += 1
        self.loads += 1
        await trio.sleep(rt.config.cold_load_s)
        config = attrs.evolve(rt.config, model=model, models=(), router=False, cold_load_s=0.0, load_s=0.0, api_key="")
        child = type(rt)(config)
        child.journal, child.files, child.tokenizer = rt.journal, rt.files, rt.tokenizer
        assert rt._nursery is not None
        await rt._nursery.start(child.run)
        return child

    def _drop(self, name: str) -> None:
        self.loaded.pop(name).engine.clear()


def _error(text: str) -> Any:
    return W.error(400, text, "invalid_request_error")
