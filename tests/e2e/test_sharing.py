"""Keys, encoded bodies and shared answers, in front of the real llama.cpp, with the official client."""

from __future__ import annotations

import gzip
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from backports import zstd

from tests.e2e.conftest import Start
from tests.fakes.real import RealLlama

KEY = "kvs-e2e-0123456789"
BODY = {"model": "any", "messages": [{"role": "user", "content": "Name three colours."}], "max_tokens": 24,
        "temperature": 0}


def client_of(url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60,
                         http_client=httpx.Client(trust_env=False, verify=False))


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", trust_env=False, verify=False).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def test_sixteen_identical_requests_with_a_key(llama: RealLlama, start: Start) -> None:
    with start(llama.base_url, auth__keys=KEY) as gateway:
        with pytest.raises(openai.AuthenticationError) as caught:
            client_of(gateway.url, "wrong").chat.completions.create(**BODY)
        assert caught.value.code == "invalid_api_key"
        with client_of(gateway.url, KEY) as client, ThreadPoolExecutor(16) as pool:
            before = metric(gateway.url, "kvstream_prompt_tokens_total")
            answers = list(pool.map(lambda _: client.chat.completions.create(**BODY), range(16)))
            one = answers[0].usage.prompt_tokens
            shared = metric(gateway.url, "kvstream_coalesced_total")
            calls = (metric(gateway.url, "kvstream_prompt_tokens_total") - before) / one
            print(f"16 identical requests: {calls:g} upstream calls, {shared:g} shared")
            assert len({answer.choices[0].message.content for answer in answers}) == 1
            assert calls + shared == 16 and calls <= 3  # threads start when they start: one may come after the end


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_an_encoded_body_reaches_the_model(llama: RealLlama, start: Start, coding: str) -> None:
    encode = {"gzip": gzip.compress, "zstd": zstd.compress}[coding]
    with start(llama.base_url, auth__keys=KEY) as gateway:
        headers = {"content-encoding": coding, "content-type": "application/json", "x-api-key": KEY}
        plain = json.dumps(BODY).encode()
        reply = httpx.post(f"{gateway.url}/v1/chat/completions", content=encode(plain), headers=headers, timeout=60,
                           trust_env=False, verify=False)
        assert reply.status_code == 200 and reply.json()["choices"][0]["message"]["content"]
