"""Records transcripts of the routes beside chat: ``python tests/record_routes.py``; see ``record.py``."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvstream.adapters.base import HttpCall
from tests.fakes.infill import with_infill
from tests.record import HELLO, LONG, TOOL_TEMPLATE, WEATHER, asked, model_path, perform, record_case, save, server

MESSAGES, RESPONSES, NATIVE, INFILL = "/v1/messages", "/v1/responses", "/completion", "/infill"
ASK = "Say hello in one word."
CITIES = ("Paris", "Oslo", "Bern", "Lima", "Rome")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "messages_stream": (MESSAGES, {"messages": HELLO, "max_tokens": 8, "stream": True}),
    "messages_whole": (MESSAGES, {"messages": HELLO, "system": "Be brief.", "max_tokens": 8}),
    "messages_stop_sequence": (MESSAGES, {"messages": HELLO, "max_tokens": 40, "stop_sequences": ["."]}),
    "messages_prefill": (
        MESSAGES, {"messages": [*HELLO, {"role": "assistant", "content": "Hello, my"}], "max_tokens": 6}),
    "responses_stream": (RESPONSES, {"input": ASK, "max_output_tokens": 8, "stream": True}),
    "responses_whole": (RESPONSES, {"input": ASK, "instructions": "Be brief.", "max_output_tokens": 8}),
    "responses_items": (RESPONSES, {"max_output_tokens": 6, "stream": True, "input": [
        {"role": "user", "content": [{"type": "input_text", "text": ASK}]}]}),
    "native_stream": (NATIVE, {"prompt": "Once upon a time", "n_predict": 6, "stream": True}),
    "native_whole": (NATIVE, {"prompt": "Once upon a time", "n_predict": 6}),
    "native_prompts": (NATIVE, {"prompt": ["Once upon", "Two men"], "n_predict": 4}),
    "native_probabilities": (NATIVE, {"prompt": "Once upon", "n_predict": 3, "n_probs": 2, "return_tokens": True}),
    "native_progress": (NATIVE, {"prompt": LONG, "n_predict": 2, "stream": True, "return_progress": True}),
    "error_messages_too_long": (
        MESSAGES, {"messages": [{"role": "user", "content": LONG * 8}], "max_tokens": 4, "stream": True}),
    "error_messages_image": (MESSAGES, {"max_tokens": 4, "stream": True, "messages": [
        {"role": "user", "content": [{"type": "image", "source": {
            "type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}]}]}),
    "error_responses_no_input": (RESPONSES, {"stream": True}),
    "error_infill_unknown": (INFILL, {"input_prefix": "def f(", "input_suffix": "return 1", "stream": True}),
}
INFILL_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "infill_stream": (INFILL, {"input_prefix": "def f(", "input_suffix": "  return 1", "n_predict": 5, "stream": True}),
    "infill_whole": (INFILL, {"input_prefix": "def f(", "input_suffix": "  return 1", "prompt": "x", "n_predict": 5}),
}


def _post(path: str, body: Any) -> HttpCall:
    return HttpCall("POST", path, (), json.dumps(body).encode())


REPLIES = {
    "reply_embeddings_off": _post("/v1/embeddings", {"input": "hello"}),
    "reply_rerank_off": _post("/v1/rerank", {"query": "a", "documents": ["b"]}),
    "reply_audio_off": _post("/v1/audio/transcriptions", {}),
    "reply_count_messages": _post("/v1/messages/count_tokens", {"messages": HELLO}),
    "reply_count_responses": _post("/v1/responses/input_tokens", {"input": ASK}),
}


def tool_cases() -> dict[str, tuple[str, dict[str, Any]]]:
    """A dialogue of calls whose last one is still open, as Anthropic and as the Responses API have it."""
    schema = WEATHER["function"]["parameters"]
    turns: list[dict[str, Any]] = []
    items: list[dict[str, Any]] = []
    for message in [message for city in CITIES for message in asked(city)][:-1]:
        if message["role"] == "user":
            turns.append(message)
            items.append(message)
            continue
        call = message["tool_calls"][0]
        arguments = call["function"]["arguments"]
        turns.append({"role": "assistant", "content": [
            {"type": "tool_use", "id": call["id"], "name": "get_weather", "input": json.loads(arguments)}]})
        items.append({"type": "function_call", "call_id": call["id"], "name": "get_weather", "arguments": arguments})
    about = {"name": "get_weather", "description": "The weather of a city"}
    return {
        "messages_tool_use": (MESSAGES, {
            "messages": turns, "max_tokens": 80, "tools": [{**about, "input_schema": schema}]}),
        "responses_function_call": (RESPONSES, {
            "input": items, "max_output_tokens": 80, "tools": [{"type": "function", **about, "parameters": schema}]}),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        common = {"n_parallel": 4, "cache_ram_mib": 0}
        with server(n_ctx=8192, n_batch=128, n_ubatch=128, **common) as base:
            for name, call in REPLIES.items():
                save(name, perform(base, call), None)
            for case, (route, body) in CASES.items():
                record_case(base, case, route, body)
        with server(n_ctx=4096, use_jinja=True, chat_template=TOOL_TEMPLATE, **common) as base:
            for case, (route, body) in tool_cases().items():
                record_case(base, case, route, body, "with a chat template that knows tools")
        model = with_infill(model_path(), Path(folder) / "infill.gguf")
        with server(n_ctx=4096, model=str(model), **common) as base:
            for case, (route, body) in INFILL_CASES.items():
                record_case(base, case, route, body, "the model file names infill tokens; see tests/fakes/infill.py")


if __name__ == "__main__":
    main()
