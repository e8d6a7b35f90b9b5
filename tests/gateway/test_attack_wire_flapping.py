"""A backend that comes and goes ten times a second under load: calls end, told as what they were; nothing stays."""

from __future__ import annotations

import json
import logging
from collections import Counter

import pytest
import trio

from tests.gateway.conftest import HANG_S, Rig, chat, data_of, open_rig

CALLS = {
    "/v1/chat/completions": chat(max_tokens=4), "/v1/messages": {
        "model": "m", "max_tokens": 4, "stream": True, "messages": [{"role": "user", "content": "x"}]},
    "/v1/embeddings": {"input": "x"}, "/tokenize": {"content": "x"}, "/completion": {"prompt": "x", "n_predict": 4},
}


async def ask(rig: Rig, path: str, told: Counter[str]) -> None:
    response = await rig.post(CALLS[path], path)
    body = await response.read_all()
    assert not response.truncated and response.status != 500, (path, response.status, body[:200])
    if response.status >= 400:
        assert "error" in json.loads(body)
        assert response.status not in (429, 503) or "retry-after" in response.headers
        told[str(response.status)] += 1
    elif "event-stream" in response.headers["content-type"]:
        last = data_of(body)[-1]
        good = last == "[DONE]" or last.get("type") == "message_stop"
        assert good or "error" in last, (path, body[-300:])
        told["whole" if good else "error frame"] += 1
    else:
        assert json.loads(body)
        told["whole"] += 1
    await response.close()


@pytest.mark.parametrize("how", ["listener", "resets"])
async def test_a_backend_that_flaps_under_load(how: str, caplog: pytest.LogCaptureFixture) -> None:
    told: Counter[str] = Counter()
    knobs = {"slots": 3, "decode_rate": 200.0, "embeddings": True, "close_after_requests": 1}
    async with open_rig(knobs=knobs, scheduler={"max_wait_s": 5.0}, upstream={"breaker_faults": 0}) as rig:
        over = trio.Event()

        async def flap() -> None:
            while not over.is_set():
                if how == "listener":
                    await rig.fake.pause()
                    await trio.sleep(0.1)
                    await rig.fake.resume()
                else:
                    rig.runtime.config.refuse = not rig.runtime.config.refuse
                await trio.sleep(0.1)
            rig.runtime.config.refuse = False

        async def client(number: int) -> None:
            for turn in range(5):
                await ask(rig, list(CALLS)[(number + turn) % len(CALLS)], told)

        with trio.fail_after(4 * HANG_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(flap)
                async with trio.open_nursery() as clients:
                    for number in range(10):
                        clients.start_soon(client, number)
                over.set()
            await rig.until(rig.idle)
            await rig.until(lambda: rig.gateway.app.active == 0)
        rig.engine.scheduler.check_invariants()
        await rig.until(lambda: rig.engine.ready)
        told.clear()
        for path in CALLS:
            await ask(rig, path, told)
        assert told == {"whole": len(CALLS)}
    assert not [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
