"""Doctor, discovery and prefix hygiene in front of the real llama.cpp."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from kvstream.config import load_config
from kvstream.gateway.doctor import Facts, Question, Report, run_examination
from kvstream.gateway.inventory import run_listing
from tests.e2e.conftest import Start
from tests.e2e.process import GatewayProcess
from tests.fakes.real import RealLlama

RULES = "You are an agent. Keep to the rules of the house and answer with care. " * 8


def question(url: str) -> Question:
    return Question(load_config(env={}), url=url, facts=Facts(ports=()))


def texts(report: Report) -> str:
    return "\n".join(one.text for one in report.all_findings())


def test_the_real_server_is_known_and_not_woken(llama: RealLlama) -> None:
    report = run_examination(question(llama.base_url))
    (server,) = report.servers
    assert (server.kind, server.state, report.exit_code) == ("llamacpp", "up", 0)
    assert "4 slots; each may use up to 2,048 tokens" in texts(report) and "--cache-ram" in texts(report)
    assert [row.context for row in server.models] == [2048]


def test_kvstream_before_it_and_its_models(gateway: GatewayProcess, llama: RealLlama) -> None:
    report = run_examination(question(gateway.url))
    assert {one.kind: one.role for one in report.servers} == {"kvstream": "given", "llamacpp": "serves"}
    assert report.exit_code == 0, texts(report)
    (group,) = run_listing(question(gateway.url))
    assert [row.context for row in group.models] == [2048] and llama.base_url in group.backend


def cached(url: str, nonce: str, who: str) -> int:
    """Prompt tokens that llama.cpp found in its cache, of a prompt whose first line has a nonce."""
    body: dict[str, Any] = {"max_tokens": 1, "temperature": 0, "messages": [
        {"role": "system", "content": f"{who}: x-anthropic-billing-header: cc_version=2.1; cch={nonce};\n{RULES}"},
        {"role": "user", "content": "Say yes."}]}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120, trust_env=False).json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("names", ["", "anthropic_cch"])
def test_case_58_what_a_nonce_costs_at_the_runtime(llama: RealLlama, start: Start, names: str) -> None:
    """By default the prefix ends at the nonce, and the finding says so; normalized it is found again whole."""
    with start(llama.base_url, prefix__normalize=names) as gateway:
        who = f"agent {names or 'plain'}"
        cached(gateway.url, "fa690", who)
        again = cached(gateway.url, "0b1c2", who)
        assert (again > 100) is bool(names), again
        report = run_examination(question(gateway.url))
        assert ("prefix diverges" in texts(report)) is (not names)
