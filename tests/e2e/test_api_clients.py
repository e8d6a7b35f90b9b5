"""The official Anthropic client, and the official OpenAI client on its other APIs, in front of the real llama.cpp.

Equality with the direct answer is tested on short greedy answers whose prompt is cached for both (``runtimes.md`` 1.5).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
import trio

from tests.e2e.conftest import Start
from tests.e2e.process import GatewayProcess
from tests.fakes.real import RealLlama, start_real

ASK: Any = [{"role": "user", "content": "Name three colours, please."}]
GREEDY: Any = {"temperature": 0, "seed": 7}
MESSAGE: Any = {"model": "any", "messages": ASK, "max_tokens": 10, "extra_body": GREEDY}
RESPONSE: Any = {"model": "any", "input": "Name three colours, please.", "max_output_tokens": 10, "extra_body": GREEDY}
FLEETING = {"id", "created_at", "completed_at"}


def plain(value: Any) -> Any:
    """An answer of a client library without what differs from run to run."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key not in FLEETING}
    return [plain(item) for item in value] if isinstance(value, list) else value


def claude(url: str) -> anthropic.Anthropic:
    # Its own HTTP client: which library that comes from depends on the version.
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=180)


@pytest.fixture
def messages(unpinned: GatewayProcess) -> Iterator[anthropic.Anthropic]:
    with claude(unpinned.url) as client:
        yield client


@pytest.fixture
def messages_direct(llama: RealLlama) -> Iterator[anthropic.Anthropic]:
    with claude(llama.base_url) as client:
        yield client


@pytest.fixture(scope="module")
def embedder() -> Iterator[RealLlama]:
    with start_real(n_ctx=4 * 512, n_parallel=4, embedding=True, pooling_type=1) as server:
        yield server


# --- Anthropic --------------------------------------------------------------------------------------------------------


def test_a_whole_message_equals_the_direct_one(messages: Any, messages_direct: Any) -> None:
    messages_direct.messages.create(**MESSAGE)  # warms a slot for both
    expected = messages_direct.messages.create(**MESSAGE)
    answer = messages.messages.create(**MESSAGE)
    assert plain(answer.model_dump()) == plain(expected.model_dump())
    assert answer.usage.output_tokens == 10 and answer.stop_reason == "max_tokens"


def test_a_streamed_message(messages: Any) -> None:
    whole = messages.messages.create(**MESSAGE)
    with messages.messages.stream(**MESSAGE) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.usage.output_tokens == 10 and final.stop_reason == "max_tokens"


def test_counting_a_message_equals_its_usage(messages: Any) -> None:
    counted = messages.messages.count_tokens(model="any", messages=ASK, system="Be brief.")
    answer = messages.messages.create(**MESSAGE, system="Be brief.")
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_errors_are_anthropics(messages: Any) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        messages.messages.create(**MESSAGE | {"messages": [{"role": "user", "content": "word " * 4000}]})
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert caught.value.body["request_id"].startswith("kvs-") and "2048" in str(caught.value)
    with pytest.raises(anthropic.BadRequestError):
        messages.messages.create(model="any", messages=[], max_tokens=3)


def test_a_tool_is_called(start: Start, tool_llama: RealLlama) -> None:
    from tests.record_routes import tool_cases

    cases = tool_cases()
    with start(tool_llama.base_url) as gateway, claude(gateway.url) as client, openai.OpenAI(
            base_url=f"{gateway.url}/v1", api_key="none", http_client=httpx.Client(trust_env=False)) as other:
        body = cases["messages_tool_use"][1]
        answer = client.messages.create(model="any", **body, extra_body=GREEDY)  # type: ignore[call-overload]
        [block] = answer.content
        assert block.type == "tool_use" and block.input == {"city": "Rome"} and answer.stop_reason == "tool_use"
        with client.messages.stream(model="any", **body, extra_body=GREEDY) as stream:
            assert stream.get_final_message().content[0].input == {"city": "Rome"}  # type: ignore[union-attr]
        body = cases["responses_function_call"][1]
        [call] = other.responses.create(model="any", **body, extra_body=GREEDY).output
        assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Rome"}


@pytest.fixture(scope="module")
def tool_llama() -> Iterator[RealLlama]:
    from tests.record import TOOL_TEMPLATE

    with start_real(n_ctx=4 * 1024, n_parallel=4, use_jinja=True, chat_template=TOOL_TEMPLATE) as server:
        yield server


# --- Responses --------------------------------------------------------------------------------------------------------


def test_a_whole_response_equals_the_direct_one(through: Any, direct: Any) -> None:
    direct.responses.create(**RESPONSE)
    expected = direct.responses.create(**RESPONSE)
    answer = through.responses.create(**RESPONSE)
    assert plain(answer.model_dump()) == plain(expected.model_dump())
    assert answer.usage.output_tokens == 10 and answer.output_text


def test_a_streamed_response(client: Any) -> None:
    whole = client.responses.create(**RESPONSE)
    events = list(client.responses.create(**RESPONSE, stream=True))
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.usage.output_tokens == 10


def test_errors_of_responses_are_openais(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**RESPONSE | {"input": "word " * 4000})
    assert caught.value.code == "context_length_exceeded"


# --- reading only -----------------------------------------------------------------------------------------------------


def test_embeddings_equal_the_direct_ones(start: Start, embedder: RealLlama) -> None:
    inputs = ["a red apple", "the green tree of the long lane", "x"]
    with start(embedder.base_url) as gateway, openai.OpenAI(
            base_url=f"{gateway.url}/v1", api_key="none", http_client=httpx.Client(trust_env=False)) as client:
        answer = client.embeddings.create(model="any", input=inputs)
        direct = httpx.post(f"{embedder.base_url}/v1/embeddings", json={"input": inputs}, trust_env=False).json()
        assert [item.index for item in answer.data] == [0, 1, 2]
        for item, real in zip(answer.data, direct["data"], strict=True):
            assert item.embedding == pytest.approx(real["embedding"], abs=1e-4)
        assert answer.usage.prompt_tokens == direct["usage"]["prompt_tokens"]
        native = httpx.post(f"{gateway.url}/embedding", json={"content": "x"}, trust_env=False).json()
        assert isinstance(native, list) and native[0]["embedding"]
        text = httpx.get(f"{gateway.url}/metrics", trust_env=False).text
        assert 'kvstream_requests_total{outcome="served",route="/v1/embeddings"} 1.0' in text


def test_a_flag_that_the_server_lacks_is_named_and_is_no_fault_of_the_backend(client: Any, gateway: Any) -> None:
    for _ in range(6):  # more than a breaker would bear
        with pytest.raises(openai.NotFoundError) as caught:
            client.embeddings.create(model="any", input="x")
    assert "--embeddings" in str(caught.value) and caught.value.code == "route_not_supported"
    assert client.chat.completions.create(model="any", messages=ASK, max_tokens=2).choices
    answer = httpx.post(f"{gateway.url}/infill", json={"input_prefix": "a", "input_suffix": "b"}, trust_env=False)
    assert answer.status_code == 404 and "prefix token" in answer.json()["error"]["message"]


def test_a_sound_to_a_model_that_hears_nothing(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.audio.transcriptions.create(model="any", file=("a.wav", b"RIFF" + bytes(5000)))
    assert "audio input" in str(caught.value) and caught.value.code == "route_not_supported"


def test_a_ranking_equals_the_direct_one(start: Start, ranker: RealLlama) -> None:
    request = {"query": "a red apple", "documents": ["an apple that is red", "the sea", "x"]}
    with start(ranker.base_url) as gateway:
        real, ours = (httpx.post(f"{url}/v1/rerank", json=request, trust_env=False, timeout=180).json()
                      for url in (ranker.base_url, gateway.url))
        scores = [[(r["index"], pytest.approx(r["relevance_score"], abs=1e-3)) for r in answer["results"]]
                  for answer in (ours, real)]
        assert scores[0] == scores[1] and ours["usage"] == real["usage"]


@pytest.fixture(scope="module")
def ranker() -> Iterator[RealLlama]:
    with start_real(n_ctx=4 * 512, n_parallel=4, embedding=True, pooling_type=4) as server:
        yield server


# --- llama.cpp's own --------------------------------------------------------------------------------------------------


def test_native_completions_equal_the_direct_ones(llama: RealLlama, gateway: GatewayProcess) -> None:
    for body in ({"prompt": "Once upon a time", "n_predict": 6}, {"prompt": ["One", "Two"], "n_predict": 3}):
        request = body | GREEDY | {"cache_prompt": False}
        real, ours = (httpx.post(f"{url}/completion", json=request, trust_env=False, timeout=180).json()
                      for url in (llama.base_url, gateway.url))
        pairs = zip(real, ours, strict=True) if isinstance(real, list) else [(real, ours)]
        for one, other in pairs:
            for each in (one, other):
                each.pop("id_slot"), each.pop("timings")
            assert one == other


def test_the_light_routes(llama: RealLlama, gateway: GatewayProcess) -> None:
    for path, body in (("/tokenize", {"content": "hello world"}), ("/detokenize", {"tokens": [28120, 905]}),
                       ("/apply-template", {"messages": ASK}), ("/v1/responses/input_tokens", {"input": "hello"}),
                       ("/chat/completions/input_tokens", {"messages": ASK})):
        real, ours = (httpx.post(f"{url}{path}", json=body, trust_env=False) for url in (llama.base_url, gateway.url))
        assert (real.status_code, real.json()) == (ours.status_code, ours.json()), path


# --- leaving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), [
    ("/v1/messages", {"messages": [{"role": "user", "content": "Tell me a long story about a dragon and a princess."}],
                      "max_tokens": 1500, "temperature": 0}), ("/v1/responses", {
        "input": "Name three colours, please.", "max_output_tokens": 1500}),
    ("/completion", {"prompt": "Once upon a time", "n_predict": 1500})])
async def test_leaving_frees_the_real_slot(
        path: str, body: dict[str, Any], stream: bool, llama: RealLlama, gateway: GatewayProcess) -> None:
    await llama.idle(60)
    # Far less than 1,500 tokens take. llama.cpp heeds no `ignore_eos` on /v1/messages: there it may be over soon.
    with trio.move_on_after(0.4 if "messages" in path and not stream else 4):
        async with httpx.AsyncClient(trust_env=False, timeout=180) as client, client.stream(
                "POST", f"{gateway.url}{path}", json=body | {"stream": stream, "ignore_eos": True}) as answer:
            assert stream, "it cannot be over yet"
            async for _ in answer.aiter_bytes():
                assert await llama.busy() == 1
                break
    await llama.idle(20)

