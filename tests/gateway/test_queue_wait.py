"""An answer says how long it waited for its seat: in a header, or in a comment once the headers are gone."""

from __future__ import annotations

import pytest
import trio

from tests.fakes import Script
from tests.gateway.conftest import chat, data_of, open_lane

HEADER = "x-kvstream-queue-ms"


@pytest.mark.parametrize("stream", [True, False])
async def test_the_wait_is_a_header(stream: bool, autojump_clock: trio.abc.Clock) -> None:
    async with open_lane(knobs={"slots": 1}) as lane:
        lane.runtime.script(Script(first_byte_after=4.0, itl=0.01), times=None)
        first = lane.start(chat("one", stream=stream, max_tokens=2))
        await trio.sleep(1.0)
        second = lane.start(chat("two", stream=stream, max_tokens=2))
        await second.ended.wait()
    assert float(first.headers[HEADER]) < 100  # the count of its prompt
    assert float(second.headers[HEADER]) == pytest.approx(3000, abs=100)
    assert second.status == 200 and b"queued-ms" not in second.body


async def test_after_a_keepalive_it_is_a_comment(autojump_clock: trio.abc.Clock) -> None:
    async with open_lane(knobs={"slots": 1}, server={"keepalive_s": 1.0}) as lane:
        lane.runtime.script(Script(first_byte_after=4.0, itl=0.01), times=None)
        lane.start(chat("one", max_tokens=2))
        await trio.sleep(0.5)
        second = lane.start(chat("two", max_tokens=2))
        await second.ended.wait()
    assert HEADER not in second.headers and second.body.startswith(b": ping\n\n")
    notes = [line for line in second.body.split(b"\n") if line.startswith(b": queued-ms ")]
    assert len(notes) == 1 and float(notes[0].split()[-1]) == pytest.approx(3500, abs=100)
    assert second.body.index(notes[0]) < second.body.index(b"data: ") and data_of(second.body)[-1] == "[DONE]"


async def test_who_was_refused_has_no_wait_to_tell(autojump_clock: trio.abc.Clock) -> None:
    async with open_lane(knobs={"slots": 1}, scheduler={"max_wait_s": 2.0}) as lane:
        lane.runtime.script(Script(first_byte_after=9.0, itl=0.01))
        lane.start(chat("one", max_tokens=2))
        await trio.sleep(0.5)
        second = await lane.post(chat("two", max_tokens=2))
    assert second.status == 503 and HEADER not in second.headers
