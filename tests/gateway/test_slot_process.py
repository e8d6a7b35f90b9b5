"""Another process behind the same address, between two requests and faster than anybody looks (case 56)."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.gateway.hardlane import actions, check_wire, open_hard, slot_of
from tests.gateway.test_case_slots import fill, text, usage_of


async def test_case_56_what_was_in_a_slot_is_restored_from_its_file(
    tmp_path: Path, autojump_clock: trio.abc.Clock
) -> None:
    async with open_hard(tmp_path, slots=2, prefill_rate=200.0) as lane:
        await fill(lane, "amber", "birch", "cedar")  # amber is in a file, the others are in the slots
        await trio.sleep(1.5)
        lane.runtime.restart()
        for name, found in (("amber", True), ("birch", False)):
            restored = len(actions(lane.runtime, "restore"))
            prompt, cached = await usage_of(lane, text(name))
            assert (cached >= 0.9 * prompt) == found, name
            restored = len(actions(lane.runtime, "restore")) - restored
            assert restored == (2 if found else 0), "the check's own, and the file's"
        assert lane.metrics.registry.get_sample_value(
            "kvstream_inject_slots_lost_total", {"backend": "default", "why": "missed"}) in (None, 0.0)
        lane.check()
        check_wire(lane.runtime)


@pytest.mark.parametrize("quiet_s", [1.5, 15.0])
async def test_case_56_another_model_gets_no_file_of_the_one_before(
    quiet_s: float, tmp_path: Path, autojump_clock: trio.abc.Clock
) -> None:
    """Same geometry, other weights: llama.cpp would restore it without a word, and say something else from then on."""
    async with open_hard(tmp_path, slots=1, prefill_rate=200.0) as lane:
        await fill(lane, "amber", "birch")
        await trio.sleep(1.5)
        other = tmp_path / "other.gguf"
        other.write_bytes(b"GGUF and more")
        lane.runtime.config.model_path = str(other)
        lane.runtime.restart()
        await trio.sleep(quiet_s - 1.5)
        calls = len(lane.runtime.journal.entries)
        prompt, cached = await usage_of(lane, text("amber"))
        assert cached < 0.1 * prompt
        told = [entry.request.json["filename"] for entry in lane.runtime.journal.entries[calls:]
                if entry.request.query == "action=restore"]
        assert all(name.startswith("kvstreamcheck") for name in told), "only the self-check's own file"
        await fill(lane, "birch")
        prompt, cached = await usage_of(lane, text("amber"))
        assert cached >= 0.9 * prompt, "its own file, of now"
        check_wire(lane.runtime)


async def test_case_56_a_model_that_slept_has_lost_its_slots(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """It is asked before the prompt is counted, which wakes it; what was in a file is restored."""
    async with open_hard(tmp_path, slots=2, prefill_rate=200.0, sleep_idle_s=30.0) as lane:
        await fill(lane, "amber", "birch", "cedar")
        await trio.sleep(100)
        assert lane.runtime.engine.asleep, "nothing of ours keeps it awake"
        before = len(actions(lane.runtime, "restore"))
        prompt, cached = await usage_of(lane, text("amber"))
        assert cached >= 0.9 * prompt and len(actions(lane.runtime, "restore")) == before + 1
        prompt, cached = await usage_of(lane, text("birch"))
        assert slot_of(lane.runtime.journal.calls[-1]) is not None
        lane.check()
        check_wire(lane.runtime)
