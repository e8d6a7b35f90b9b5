"""Records how a real llama.cpp server continues an answer that was stopped: ``python tests/record_resume.py``.

Of each case of ``CASES`` the answer as a stream, whole; then, over the token ids of the prompt and of the answer up to
the cut, the continuation that the adapter asks for. Written to ``tests/adapters/resumed/<case>.json`` with the bytes of
both, so that the decoder is tested against what the server really said.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kvstream.adapters import LlamaCppBackend  # noqa: E402
from kvstream.adapters.base import Delta, HttpCall, HttpReply  # noqa: E402
from tests.adapters.transcripts import request_of  # noqa: E402
from tests.fakes.real import start_real  # noqa: E402

CHAT, COMPLETIONS, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
GREEDY: dict[str, Any] = {"model": "smollm2", "temperature": 0, "stream": True}
EMOJI = [{"role": "user", "content": "Repeat exactly: \u00fcber na\u00efve \U0001f680\U0001f389 \u96e8"}]
SAY = [{"role": "user", "content": "Count from one to ten in words."}]
CASES: dict[str, tuple[str, dict[str, Any], int]] = {  # route, body, cut after so many pieces
    "chat": (CHAT, {"messages": SAY, "max_tokens": 24}, 7),
    "chat_usage": (CHAT, {"messages": SAY, "max_tokens": 24, "stream_options": {"include_usage": True}}, 1),
    "chat_eos": (CHAT, {"messages": [{"role": "user", "content": "Say hello in one word."}]}, 5),
    "chat_stop": (CHAT, {"messages": SAY, "max_tokens": 60, "stop": ["3. 3\n4"]}, 8),
    "chat_unicode": (CHAT, {"messages": EMOJI, "max_tokens": 40}, 6),
    "chat_first": (CHAT, {"messages": SAY, "max_tokens": 5}, 0),
    "completions": (COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": 12}, 5),
    "native": (NATIVE, {"prompt": "Once upon a time", "n_predict": 12}, 5),
}
SERVER = LlamaCppBackend("http://x")


def call(client: httpx.Client, made: HttpCall) -> HttpReply:
    headers = dict(made.headers) | {"connection": "close"}  # it closes idle ones, and then the next call would fail
    reply = client.request(made.method, made.path, headers=headers, content=made.body)
    return HttpReply(reply.status_code, dict(reply.headers), reply.content)


def record(client: httpx.Client, route: str, body: dict[str, Any], cut: int) -> dict[str, Any]:
    described = {"route": route, "body": GREEDY | body}
    request, slots = request_of(described), SERVER.slots
    assert slots is not None and slots.can_resume(request)
    step: Any = SERVER.count_calls(request)
    while isinstance(step, HttpCall):
        step = SERVER.read_count(request, call(client, step))
    prompt = tuple(step)
    whole = call(client, SERVER.encode(request)).body
    decoder = SERVER.decoder(request)
    pieces = [e.text for e in [*decoder.feed(whole), *decoder.finish()] if isinstance(e, Delta) and e.text]
    text = "".join(pieces[:cut])
    ids = slots.read_ids(call(client, slots.tokenize(text)))
    assert ids is not None
    assert slots.read_text(call(client, slots.detokenize(ids))) == text
    resumed = slots.resume(request, prompt + ids, slot=None, made=len(ids))
    assert resumed is not None
    return {**described, "prompt": len(prompt), "made": len(ids), "text": text, "asked": json.loads(resumed.body),
            "whole": whole.decode(), "resumed": call(client, resumed).body.decode()}


def main() -> None:
    folder = ROOT / "tests" / "adapters" / "resumed"
    with start_real(n_parallel=1, n_ctx=1024) as real, httpx.Client(base_url=real.base_url, timeout=120) as client:
        for name, (route, body, cut) in CASES.items():
            found = record(client, route, body, cut)
            (folder / f"{name}.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
            print(name, found["made"])


if __name__ == "__main__":
    main()
