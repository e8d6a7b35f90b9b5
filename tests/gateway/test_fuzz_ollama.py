"""The HTTP surface under wrong input, with Ollama behind it: its routes, and the translated ones."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from trio.testing import MockClock

from kvstream.adapters.routes import OLLAMA_ROUTES
from tests.gateway.conftest import open_lane
from tests.gateway.test_fuzz_surface import METHODS, bodies, heads, one, throw_all, wires

KNOBS = {"dialect": "ollama", "model": "m", "slots": 1, "n_ctx": 4096, "decode_rate": 1000}
PATHS = (*sorted(OLLAMA_ROUTES), "/api/tags", "/api/show", "/api/ps", "/api/pull", "/api/", "/", "/v1/models")


@given(st.lists(st.tuples(st.sampled_from(METHODS), st.sampled_from(PATHS), bodies(), heads), min_size=1, max_size=6))
@example([("POST", "/api/chat", b'{"model":"m","options":{"num_predict":NaN}}', [])])
@example([("POST", "/api/generate", b'{"model":"m","prompt":"x","options":{"num_predict":1e400}}', [])])
@hypothesis_settings(deadline=None, suppress_health_check=list(HealthCheck))
def test_nearly_right_requests_are_answered_and_leave_nothing(calls: list[Any]) -> None:
    async def main() -> None:
        async with open_lane(knobs=KNOBS, backend={"type": "ollama"}, scheduler={"max_wait_s": 20.0}) as lane:
            for method, path, body, headers in calls:
                await one(lane, method, path, body, headers)
            with trio.fail_after(120):
                while not lane.idle():
                    await trio.sleep(0.1)
            lane.engine.scheduler.check_invariants()

    trio.run(main, clock=MockClock(autojump_threshold=0))


@given(st.lists(st.tuples(wires(PATHS), st.sampled_from(["leave", "stay", "half-close"])), min_size=2, max_size=8))
@hypothesis_settings(deadline=None, max_examples=10, suppress_health_check=list(HealthCheck))
def test_spoilt_bytes_never_break_the_server(caplog: pytest.LogCaptureFixture, connections: list[Any]) -> None:
    throw_all(caplog, connections, knobs=KNOBS, backend={"type": "ollama"})
