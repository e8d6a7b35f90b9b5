"""The fake's other routes have the shapes of the real server, as recorded in the golden transcripts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstream.adapters import LlamaCppBackend
from kvstream.adapters.base import Delta, Done, HttpCall
from tests.adapters.transcripts import GOLDEN, load
from tests.fakes import FakeUpstream, open_runtime

CASES = ["messages_stream", "messages_whole", "responses_stream", "responses_items", "native_stream", "infill_stream"]


def shape(value: Any) -> Any:
    """The keys of a JSON value, all the way down; of settings only that they are there."""
    if isinstance(value, dict):
        return {key: "settings" if key == "generation_settings" else shape(item) for key, item in value.items()}
    return [shape(item) for item in value[:1]] if isinstance(value, list) else type(value).__name__


def events_of(events: list[Any]) -> list[Any]:
    """The shapes of a stream's events, repeated ones once."""
    found: list[Any] = []
    for event in events:
        if isinstance(event, Delta):
            name = event.data.get("type") or event.data.get("stop")
            entry = (name, shape(event.data))
            if not found or found[-1] != entry:
                found.append(entry)
        elif isinstance(event, Done):
            found.append("done")
    return found


async def play(upstream: FakeUpstream, call: HttpCall) -> tuple[str, bytes]:
    body = b""
    async with upstream.open(call) as response:
        while data := await response.receive():
            body += data
        return response.headers["content-type"], body


@pytest.mark.parametrize("name", CASES)
async def test_streams_and_whole_answers_have_the_recorded_shapes(name: str, autojump_clock: Any) -> None:
    case = load(GOLDEN / "llamacpp" / name)
    assert case.request is not None
    backend = LlamaCppBackend("http://h")
    async with open_runtime(answer_tokens=None) as runtime:
        upstream = FakeUpstream(runtime)
        kind, body = await play(upstream, backend.encode(case.request))
        decoder = backend.decoder(case.request, content_type=kind)
        assert events_of(decoder.feed(body) + decoder.finish()) == events_of(case.decode([case.response]))
        _, whole = await play(upstream, backend.encode(case.request, stream=False))
        direct = json.loads((case.folder / "direct.json").read_text("utf-8"))
        assert shape(json.loads(whole)) == shape(direct)
