"""Case 40: a stream that gives way goes on, and its client cannot tell. Forced at every token, against the fake, whose
model says the same after the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import CHAT, COMPLETIONS
from tests.gateway.parklane import (
    TOKENS,
    body_of,
    check,
    gave_way,
    open_one,
    preempted,
    shape,
    whole,
)

BODIES = [
    (CHAT, {}), (CHAT, {"stream_options": {"include_usage": True}}), (COMPLETIONS, {}),
]


@pytest.mark.parametrize("at", range(1, TOKENS))
@pytest.mark.parametrize(("path", "more"), BODIES)
async def test_case_40_at_every_token_the_text_is_that_of_the_unpreempted_run(
    autojump_clock: Any, tmp_path: Path, path: str, more: dict[str, Any], at: int
) -> None:
    body = body_of(path, max_tokens=TOKENS + 6, **more)
    expected = await whole(tmp_path, path, body)
    async with open_one(tmp_path) as lane:
        call = await preempted(lane, path, body, at)
        assert shape(call) == shape(expected)
        assert gave_way(lane) == (1, 1)
        check(lane)
