"""Runtimes as they answer GETs, for discovery: path -> (status, headers, value). Written from runtimes.md, sections
1 to 5; what a path is not in the table answers with the runtime's own "not found" (LM Studio: with 200)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvstream.adapters.base import HttpReply

Table = Mapping[str, tuple[int, dict[str, str], Any]]
LLAMA = {"server": "llama.cpp"}
UVICORN = {"server": "uvicorn"}
OATPP = {"server": "oatpp/1.3.0"}
EXPRESS = {"x-powered-by": "Express"}

PROPS: dict[str, Any] = {
    "default_generation_settings": {"n_ctx": 8192, "params": {}}, "total_slots": 4, "build_info": "b11549-abc",
    "model_path": "/m/a.gguf", "modalities": {"vision": False, "audio": False}, "endpoint_slots": True,
    "endpoint_metrics": False, "is_sleeping": False,
}
LLAMA_MODELS = {"models": [{"name": "a"}], "object": "list", "data": [
    {"id": "a.gguf", "aliases": ["small", "a.gguf"], "owned_by": "llamacpp", "meta": {"n_ctx": 8192}}]}
LOADING = {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}
NEEDS_KEY = {"error": {"message": "Invalid API Key", "type": "authentication_error", "code": 401}}

RUNTIMES: dict[str, Table] = {
    "llamacpp": {"*": (404, LLAMA, {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}}),
                 "/": (415, LLAMA, ""), "/props": (200, LLAMA, PROPS), "/v1/models": (200, LLAMA, LLAMA_MODELS)},
    "llamacpp asleep": {"*": (404, LLAMA, ""), "/props": (200, LLAMA, PROPS | {"is_sleeping": True}),
                        "/v1/models": (200, LLAMA, LLAMA_MODELS)},
    "llamacpp loading": {"*": (503, LLAMA, LOADING)},
    "llamacpp locked": {"*": (401, LLAMA, NEEDS_KEY)},
    "llamacpp behind nginx": {"*": (404, {"server": "nginx"}, "<html>"), "/props": (200, {"server": "nginx"}, PROPS),
                              "/v1/models": (200, {"server": "nginx"}, LLAMA_MODELS)},
    "llamacpp router": {
        "*": (404, LLAMA, ""), "/props": (200, LLAMA, {"role": "router", "max_instances": 4}),
        "/v1/models": (200, LLAMA, {"data": [
            {"id": "a", "aliases": ["x"], "status": {"value": "loaded"}, "meta": {"n_ctx": 4096}},
            {"id": "b", "status": {"value": "unloaded"}}]})},
    "ollama": {
        "*": (404, {}, "404 page not found"), "/": (200, {}, "Ollama is running"),
        "/api/version": (200, {}, {"version": "0.33.0"}),
        "/api/ps": (200, {}, {"models": [{"name": "qwen3:latest", "context_length": 8192}]}),
        "/api/tags": (200, {}, {"models": [{"name": "qwen3:latest"}, {"name": "gemma3:4b"}]}),
        "/v1/models": (200, {}, {"object": "list", "data": [{"id": "qwen3:latest", "owned_by": "library"}]})},
    "lmstudio": {
        "*": (200, EXPRESS, {"error": "Unexpected endpoint or method. (GET /x)"}),
        "/lmstudio-greeting": (200, EXPRESS, {"lmstudio": True}),
        "/api/v1/models": (200, EXPRESS, {"models": [
            {"key": "q/qwen3", "type": "llm", "max_context_length": 40960,
             "loaded_instances": [{"id": "q", "config": {"context_length": 4096, "parallel": 4}}]},
            {"key": "g/gemma", "type": "llm", "loaded_instances": []}]})},
    "lmstudio old": {
        "*": (200, EXPRESS, {"error": "Unexpected endpoint or method. (GET /x)"}),
        "/api/v0/models": (200, EXPRESS, {"data": [
            {"id": "qwen3", "state": "loaded", "loaded_context_length": 4096}, {"id": "g", "state": "not-loaded"}]})},
    "foundry": {
        "*": (404, OATPP, "server=oatpp/1.3.0 code=404"),
        "/status": (200, OATPP, {"endpoints": ["http://127.0.0.1:5272"], "modelCachePath": "/c", "pid": 7}),
        "/models/loaded": (200, OATPP, ["phi-4-generic-cpu:1"]),
        "/v1/models": (200, OATPP, {"data": [{"id": "phi-4-generic-cpu:1"}, {"id": "qwen-generic-cpu:2"}]})},
    "foundry-old": {
        "*": (404, {"server": "Kestrel"}, ""),
        "/openai/status": (200, {"server": "Kestrel"},
                           {"Endpoints": ["http://x"], "ModelDirPath": "/m", "PipeName": "p"}),
        "/openai/loadedmodels": (200, {"server": "Kestrel"}, ["phi"])},
    "vllm": {
        "*": (404, UVICORN, {"detail": "Not Found"}), "/version": (200, UVICORN, {"version": "0.11.0"}),
        "/v1/models": (200, UVICORN, {"data": [{"id": "q", "owned_by": "vllm", "max_model_len": 32768}]}),
        "/metrics": (200, UVICORN, 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0')},
    "openai": {"*": (404, {"server": "x"}, "no"), "/v1/models": (200, {"server": "x"}, {"data": [{"id": "m"}]})},
    "openai locked": {"*": (401, {"server": "x"}, "no")},
    "website": {"*": (200, {"server": "x"}, "<html>hello</html>")},
    "kvstream": {"*": (404, {"x-kvstream-version": "0.2.0"}, {"error": {}}),
                 "/ready": (503, {"x-kvstream-version": "0.2.0"}, {"status": "loading"})},
}  # fmt: skip


def reply(table: Table, path: str) -> HttpReply:
    status, headers, value = table.get(path, table["*"])
    return HttpReply(status, headers, value.encode() if isinstance(value, str) else json.dumps(value).encode())
