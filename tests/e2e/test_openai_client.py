"""The official client in front of the gateway gets what it would get from llama.cpp itself.

Equality is tested on short greedy answers with the prompt already cached for both: llama.cpp's greedy text is not
bit-stable between a cold and a cached prefill (``runtimes.md`` 1.5).
"""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.e2e.process import GatewayProcess

MESSAGES: Any = [{"role": "user", "content": "Name three colours, please."}]
GREEDY: Any = {"model": "any", "temperature": 0, "seed": 7}
CHAT: Any = GREEDY | {"messages": MESSAGES, "max_tokens": 12}
TEXT: Any = GREEDY | {"prompt": "The capital of France is", "max_tokens": 8}
TOOLS: Any = [{"type": "function", "function": {
    "name": "get_weather", "description": "Weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]

# What two runs of the same request never have in common.
FLEETING = {"id", "created", "timings"}


def plain(answer: Any) -> Any:
    """An answer of the client library without what differs from run to run."""
    return {key: value for key, value in answer.model_dump().items() if key not in FLEETING}


def text_of(chunks: list[Any]) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def keys(value: Any) -> Any:
    """The shape of a JSON value: its keys, all the way down."""
    if isinstance(value, dict):
        return {key: keys(inner) for key, inner in value.items()}
    return [keys(inner) for inner in value] if isinstance(value, list) else type(value).__name__


VARIANTS = {
    "plain": {},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "two choices": {"n": 2},
    "stop": {"stop": ["e"], "max_tokens": 40},
    "tools": {"tools": TOOLS},
    "tools required": {"tools": TOOLS, "tool_choice": "required"},
    "json": {"response_format": {"type": "json_object"}, "max_tokens": 16},
}


@pytest.mark.parametrize("more", VARIANTS.values(), ids=list(VARIANTS))
def test_a_whole_chat_answer_equals_the_direct_one(through: Any, direct: Any, more: dict[str, Any]) -> None:
    """Non-stream through the gateway is assembled from a stream; no field may be lost, added or changed by that."""
    request = CHAT | more
    direct.chat.completions.create(**request)  # warms a slot for both
    expected = direct.chat.completions.create(**request)
    answer = through.chat.completions.create(**request)
    assert plain(answer) == plain(expected)
    assert keys(answer.model_dump()) == keys(expected.model_dump())


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"stop": ["a"]}, {"echo": True}], ids=str)
def test_a_whole_completion_equals_the_direct_one(through: Any, direct: Any, more: dict[str, Any]) -> None:
    request = TEXT | more
    direct.completions.create(**request)
    expected = direct.completions.create(**request)
    answer = through.completions.create(**request)
    assert plain(answer) == plain(expected)
    assert keys(answer.model_dump()) == keys(expected.model_dump())


@pytest.mark.parametrize("include_usage", [None, False, True])
def test_a_chat_stream_equals_the_direct_one(through: Any, direct: Any, include_usage: bool | None) -> None:
    """Also: exactly one usage chunk when it was asked for, none when not."""
    options = {} if include_usage is None else {"stream_options": {"include_usage": include_usage}}
    list(direct.chat.completions.create(**CHAT, stream=True, **options))
    expected = list(direct.chat.completions.create(**CHAT, stream=True, **options))
    chunks = list(through.chat.completions.create(**CHAT, stream=True, **options))
    assert [plain(chunk) for chunk in chunks] == [plain(chunk) for chunk in expected]
    usages = [chunk for chunk in chunks if not chunk.choices]
    assert len(usages) == (1 if include_usage else 0)
    if include_usage:
        assert usages[0].usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_completion_stream_equals_the_direct_one(through: Any, direct: Any, include_usage: bool) -> None:
    """On this route llama.cpp puts usage on its finish chunk, asked or not. A client that asked gets the chunk of its
    own, which the protocol promises, as well."""
    options = {"stream_options": {"include_usage": include_usage}}
    list(direct.completions.create(**TEXT, stream=True, **options))
    expected = list(direct.completions.create(**TEXT, stream=True, **options))
    chunks = list(through.completions.create(**TEXT, stream=True, **options))
    if include_usage:
        last = chunks.pop()
        assert last.choices == [] and last.usage == chunks[-1].usage
    assert [plain(chunk) for chunk in chunks] == [plain(chunk) for chunk in expected]
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_a_stream_with_tools_equals_the_direct_one(through: Any, direct: Any) -> None:
    """SmolLM2 has no tool template, so no call comes of it; whatever comes is the same as direct."""
    request = CHAT | {"tools": TOOLS, "stream": True}
    list(direct.chat.completions.create(**request))
    expected = [plain(chunk) for chunk in direct.chat.completions.create(**request)]
    assert [plain(chunk) for chunk in through.chat.completions.create(**request)] == expected


async def test_the_async_client_streams_and_assembles(aclient: openai.AsyncOpenAI) -> None:
    async with aclient:
        await aclient.chat.completions.create(**CHAT)
        whole = await aclient.chat.completions.create(**CHAT)
        chunks = [chunk async for chunk in await aclient.chat.completions.create(**CHAT, stream=True)]
        text = await aclient.completions.create(**TEXT)
    assert text_of(chunks) == whole.choices[0].message.content != ""
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert text.choices[0].text


# --- errors, as the client's exceptions -------------------------------------------------------------------------------


def test_a_prompt_that_cannot_fit_is_refused_with_both_numbers(client: Any, direct: Any) -> None:
    """The direct refusal names the same two numbers: KVStream counted the prompt as the runtime does."""
    messages = [{"role": "user", "content": "word " * 2500}]
    with pytest.raises(openai.BadRequestError) as ours:
        client.chat.completions.create(model="any", messages=messages, max_tokens=4)
    with pytest.raises(openai.BadRequestError) as theirs:
        direct.chat.completions.create(model="any", messages=messages, max_tokens=4)
    assert ours.value.code == "context_length_exceeded"
    assert ours.value.body["type"] == "invalid_request_error"
    assert str(theirs.value.body["n_prompt_tokens"]) in ours.value.message
    assert str(theirs.value.body["n_ctx"]) in ours.value.message


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_runtime_itself_refuses_keeps_its_status_and_words(client: Any, direct: Any, stream: bool) -> None:
    request = CHAT | {"temperature": "warm", "stream": stream}
    with pytest.raises(openai.BadRequestError) as theirs:
        direct.chat.completions.create(**request)
    with pytest.raises(openai.BadRequestError) as ours:
        client.chat.completions.create(**request)
    assert ours.value.body["message"] == theirs.value.body["message"]
    assert ours.value.code == "upstream_rejected"
    assert set(ours.value.body) == {"message", "type", "code", "param"}


def test_an_image_on_a_text_model_is_the_clients_fault(client: Any) -> None:
    """llama.cpp calls it a server error; a client would retry that for ever."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="any", messages=[{"role": "user", "content": [image]}], max_tokens=4)


def test_models_are_the_runtimes_own(client: Any, direct: Any) -> None:
    names = [model.id for model in client.models.list().data]
    assert names == [model.id for model in direct.models.list().data]
    assert client.models.retrieve(names[0]).id == names[0]
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("no-such-model")
    assert caught.value.code == "model_not_found"


def test_unknown_routes_and_methods_have_openai_shape(client: Any, gateway: GatewayProcess) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.moderations.create(input="x")
    assert caught.value.code == "route_not_found"
    with httpx.Client(trust_env=False, verify=False) as http:
        wrong = http.get(f"{gateway.url}/v1/chat/completions")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
        assert http.delete(f"{gateway.url}/status").status_code == 405
