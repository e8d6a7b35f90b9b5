"""The official clients, Ollama's and OpenAI's, in front of the gateway in front of the fake Ollama, over TCP.

Neither takes a proxy or a host from the environment: ``trust_env=False``, and addresses by name.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import ollama
import openai
import pytest
import trio
from attrs import frozen

from tests.fakes import FakeRuntime, Script
from tests.gateway.conftest import Rig, open_rig

HELLO: Any = [{"role": "user", "content": "hello there"}]
TOOL: Any = {"type": "function", "function": {
    "name": "get_weather", "description": "Weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
ASKED: Any = [{"role": "user", "content": "use get_weather for Oslo"}]


@pytest.fixture(autouse=True)
def hostile_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever took an address from the environment would find nobody there."""
    for name in ("OLLAMA_HOST", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("OLLAMA_API_KEY", "OPENAI_BASE_URL", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


@frozen
class Clients:
    rig: Rig
    own: ollama.AsyncClient
    openai: openai.AsyncOpenAI

    @property
    def runtime(self) -> FakeRuntime:
        return self.rig.runtime


@asynccontextmanager
async def clients(**sections: Any) -> AsyncIterator[Clients]:
    knobs = {"dialect": "ollama", "slots": 1, "n_ctx": 4096, "decode_rate": 1000, "prefill_rate": 1e6,
             "answer_tokens": 5, "models": ("other:7b",)}
    async with open_rig(knobs=knobs, backend={"type": "ollama"}, **sections) as rig:
        http = httpx.AsyncClient(trust_env=False)
        async with openai.AsyncOpenAI(base_url=f"{rig.gateway.url}/v1", api_key="none", max_retries=0, timeout=30,
                                      http_client=http) as theirs:
            yield Clients(rig, ollama.AsyncClient(host=rig.gateway.url, trust_env=False, timeout=30), theirs)
        assert rig.idle()


async def test_ollama_chat_streamed_and_whole() -> None:
    async with clients() as c:
        parts = [part async for part in await c.own.chat("fake-model", HELLO, stream=True)]
        assert [part.done for part in parts] == [False] * 5 + [True]
        assert parts[-1].done_reason == "stop" and parts[-1].eval_count == 5 and parts[-1].prompt_eval_count
        whole = await c.own.chat("fake-model", HELLO)
        assert whole.message.content == "".join(part.message.content or "" for part in parts)
        assert whole.done and whole.eval_count == 5 and whole.message.role == "assistant"
        thought = await c.own.chat("fake-model", HELLO, think=True)
        assert thought.message.thinking and thought.message.content
        shaped = await c.own.chat("fake-model", HELLO, format="json", options={"temperature": 0, "num_predict": 3})
        assert set(json.loads(shaped.message.content or "")) == {"answer"} and shaped.done_reason == "length"


async def test_ollama_tools() -> None:
    async with clients() as c:
        for stream in (False, True):
            answer = await c.own.chat("fake-model", ASKED, tools=[TOOL], stream=stream)  # type: ignore[call-overload]
            messages = [part.message async for part in answer] if stream else [answer.message]
            calls = [call for message in messages for call in message.tool_calls or ()]
            assert [(call.function.name, call.function.arguments) for call in calls] == [
                ("get_weather", {"city": "Oslo"})]
        result = [*ASKED, {"role": "assistant", "tool_calls": [call.model_dump() for call in calls]},
                  {"role": "tool", "tool_name": "get_weather", "content": "rain"}]
        assert (await c.own.chat("fake-model", result, tools=[TOOL])).message.content


async def test_ollama_generate_embed_and_load() -> None:
    async with clients() as c:
        parts = [part async for part in await c.own.generate("fake-model", "once upon", stream=True)]
        whole = await c.own.generate("fake-model", "once upon")
        assert whole.response == "".join(part.response for part in parts) and whole.done_reason == "stop"
        assert (await c.own.generate("fake-model", "")).done_reason == "load"
        assert len((await c.own.embed("fake-model", ["a", "b"])).embeddings) == 2
        assert len((await c.own.embeddings("fake-model", "a")).embedding) == 3
        assert (await c.own.generate("fake-model", "", keep_alive=0)).done_reason == "unload"


async def test_ollama_s_lists() -> None:
    async with clients() as c:
        assert [model.model for model in (await c.own.list()).models] == ["fake-model:latest", "other:7b"]
        assert (await c.own.ps()).models == []
        await c.own.chat("fake-model", HELLO, options={"num_ctx": 2048})
        loaded, = (await c.own.ps()).models
        assert loaded.model == "fake-model:latest" and loaded.context_length == 2048
        shown = await c.own.show("fake-model")
        assert shown.modelinfo is not None and shown.modelinfo["llama.block_count"] == 30
        assert shown.capabilities == ["completion", "tools"]


async def test_ollama_s_errors() -> None:
    async with clients() as c:
        with pytest.raises(ollama.ResponseError, match="nope") as caught:
            await c.own.chat("nope", HELLO)
        assert caught.value.status_code == 404
        with pytest.raises(ollama.ResponseError, match="ask Ollama itself"):
            await c.own.pull("llama3")
        with pytest.raises(ollama.ResponseError, match="ask Ollama itself"):
            await c.own.delete("fake-model")
        c.runtime.script(Script(end="error_event", tokens=3), times=2)
        with pytest.raises(ollama.ResponseError, match="CUDA error"):
            async for _ in await c.own.chat("fake-model", HELLO, stream=True):
                pass
        with pytest.raises(ollama.ResponseError, match="CUDA error") as caught:
            await c.own.chat("fake-model", HELLO)
        assert caught.value.status_code == 502
        c.runtime.script(Script(end="eof_no_finish", tokens=3))
        with pytest.raises(ollama.ResponseError, match="without its last line"):
            async for _ in await c.own.generate("fake-model", "x", stream=True):
                pass


async def test_ollama_s_client_that_leaves_frees_the_seat() -> None:
    async with clients() as c:
        c.runtime.config.answer_tokens, c.runtime.config.decode_rate = None, 50
        stream = await c.own.chat("fake-model", HELLO, stream=True)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        await c.rig.until(lambda: c.rig.idle() and c.runtime.ollama.in_flight == 0)


async def test_ollama_s_own_blocking_client() -> None:
    """The one without async is what most programs use."""
    async with clients() as c:
        def talk() -> str:
            client = ollama.Client(host=c.rig.gateway.url, trust_env=False, timeout=30)
            return "".join(part.message.content or "" for part in client.chat("fake-model", HELLO, stream=True))

        assert len(await trio.to_thread.run_sync(talk)) > 5


async def test_openai_chat_streamed_and_whole() -> None:
    async with clients() as c:
        stream = await c.openai.chat.completions.create(
            model="fake-model", messages=HELLO, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 5
        assert chunks[-2].choices[0].finish_reason == "stop" and len({chunk.id for chunk in chunks}) == 1
        whole = await c.openai.chat.completions.create(model="fake-model", messages=HELLO)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert whole.choices[0].message.content == text and whole.usage == chunks[-1].usage
        form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
        shaped = await c.openai.chat.completions.create(model="fake-model", messages=HELLO, response_format=form)
        assert set(json.loads(shaped.choices[0].message.content or "")) == {"answer"}


async def test_openai_tools() -> None:
    async with clients() as c:
        whole = await c.openai.chat.completions.create(model="fake-model", messages=ASKED, tools=[TOOL])
        call, = whole.choices[0].message.tool_calls or ()
        assert whole.choices[0].finish_reason == "tool_calls" and call.type == "function" and call.id
        assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Oslo"}
        streamed = await c.openai.chat.completions.create(
            model="fake-model", messages=ASKED, tools=[TOOL], stream=True)
        deltas = [chunk.choices[0].delta async for chunk in streamed if chunk.choices]
        called = [one for delta in deltas for one in delta.tool_calls or ()]
        assert [(one.index, one.type) for one in called] == [(0, "function")]
        after = [*ASKED, whole.choices[0].message.model_dump(exclude_none=True),
                 {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
        again = await c.openai.chat.completions.create(model="fake-model", messages=after, tools=[TOOL])
        assert again.choices[0].message.content
        sent = c.runtime.journal.calls[-1].request.json["messages"]
        assert sent[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
        assert sent[2]["tool_name"] == "get_weather"


async def test_openai_completions_embeddings_and_models() -> None:
    async with clients() as c:
        text = await c.openai.completions.create(model="fake-model", prompt="once", max_tokens=3)
        assert text.choices[0].text and text.choices[0].finish_reason == "length"
        parts = [part async for part in await c.openai.completions.create(
            model="fake-model", prompt="once", max_tokens=3, stream=True)]
        assert "".join(part.choices[0].text for part in parts) == text.choices[0].text
        # the client asks for base64 by itself and unpacks it
        rows = (await c.openai.embeddings.create(model="fake-model", input=["a", "b"])).data
        plain = (await c.openai.embeddings.create(model="fake-model", input=["a"], encoding_format="float")).data
        assert len(rows) == 2 and rows[0].embedding == pytest.approx(plain[0].embedding)
        assert [model.id async for model in c.openai.models.list()] == ["fake-model:latest", "other:7b"]


async def test_openai_s_errors() -> None:
    async with clients() as c:
        with pytest.raises(openai.NotFoundError) as missing:
            await c.openai.chat.completions.create(model="nope", messages=HELLO)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError, match="'n' must be 1"):
            await c.openai.chat.completions.create(model="fake-model", messages=HELLO, n=2)
        c.runtime.script(Script(end="error_event", tokens=3))
        with pytest.raises(openai.APIError, match="CUDA error"):
            async for _ in await c.openai.chat.completions.create(model="fake-model", messages=HELLO, stream=True):
                pass
