"""Who sends when: clients, turns, targets that take turns, pauses after failures."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
import trio
from attrs import evolve

from kvstream.bench.main import Options, prepare
from kvstream.bench.plan import Kind
from kvstream.bench.record import BlockResult, Record
from kvstream.bench.result import Result, class_of, result_of
from kvstream.bench.runner import run_load, warm_up
from kvstream.bench.slo import Slo, parse_slo
from kvstream.bench.verdict import saturation
from kvstream.errors import BackendUnavailableError
from tests.bench.conftest import Quiet, load, measured, measured_group, target_of
from tests.fakes import FakeRuntime, Script, open_runtime

near = pytest.approx


async def test_a_closed_loop_has_so_many_clients_and_no_more(autojump_clock: trio.abc.Clock) -> None:
    async with open_runtime(slots=16) as runtime:
        group = await measured_group(runtime, load(requests=50, concurrency=7))
    assert group.full == 50 and runtime.in_flight_max == 7


async def test_the_measures_are_right_for_a_known_pace(autojump_clock: trio.abc.Clock) -> None:
    async with open_runtime(slots=2) as runtime:
        runtime.script(Script(first_byte_after=0.5, itl=0.04), times=None)
        group = await measured_group(runtime, load(requests=100, output_tokens=26, concurrency=2))
    found = group.latencies
    assert (found["ttft"].p50, found["ttft"].p99) == (near(0.5), near(0.5))
    assert (found["tpot"].p50, found["itl"].p99, found["gap"].max) == (near(0.04), near(0.04), near(0.04))
    assert found["e2e"].p50 == near(1.5, rel=0.03)
    assert group.output_tokens == 2600
    assert group.output_tokens_per_s == near(2600 / group.wall_s) == near(2 * 26 / 1.5, rel=0.05)
    assert not any(summary.estimated for summary in found.values())


async def test_a_duration_begins_nothing_after_it_and_finishes_what_runs(autojump_clock: trio.abc.Clock) -> None:
    async with open_runtime(slots=2) as runtime:
        runtime.script(Script(first_byte_after=3.0, itl=0.01), times=None)
        result = await measured(runtime, load(requests=None, duration_s=10.0, concurrency=2))
    records = result.targets[0].records
    assert max(record.started for record in records) < 10 and len(records) == 8
    assert all(record.outcome == "full" for record in records)
    assert result.targets[0].whole.wall_s == near(12.2, rel=0.02) and not result.run.partial


async def test_turns_carry_their_history(autojump_clock: trio.abc.Clock) -> None:
    async with open_runtime(slots=2) as runtime:
        result = await measured(runtime, load(requests=12, turns=3, concurrency=2, prompt_tokens=80, turn_tokens=20))
        calls = [call.request.json["messages"] for call in runtime.journal.calls if call.inference]
    records = result.targets[0].records
    assert len(records) == 12 and {record.talk for record in records} == {0, 1, 2, 3}
    assert sorted(len(messages) for messages in calls) == [1] * 4 + [3] * 4 + [5] * 4
    longest = next(messages for messages in calls if len(messages) == 5)
    assert [message["role"] for message in longest] == ["user", "assistant", "user", "assistant", "user"]
    assert longest[1]["content"] and any(messages == longest[:3] for messages in calls)
    assert set(result.targets[0].classes) == {"turn 1", "turn 2", "turn 3"}
    lengths = [result.targets[0].classes[f"turn {n}"].prompt_length for n in (1, 2, 3)]
    assert [round(found.p50) for found in lengths if found] == sorted(round(found.p50) for found in lengths if found)


async def test_a_failed_turn_ends_its_conversation(autojump_clock: trio.abc.Clock) -> None:
    async with open_runtime(slots=1) as runtime:
        runtime.script(Script(status=500, script=[(0.0, b"")]))
        result = await measured(runtime, load(requests=6, turns=3))
    assert [(record.talk, record.turn) for record in result.targets[0].records] == [(0, 0), (1, 0), (1, 1), (1, 2)]


async def test_after_a_refusal_a_client_pauses_as_long_as_it_is_told(autojump_clock: trio.abc.Clock) -> None:
    async with open_runtime() as runtime:
        for after in ("2", "3600"):
            runtime.script(Script(status=503, script=[(0.0, b"")], headers=(("Retry-After", after),)))
        result = await measured(runtime, load(requests=3))
    starts = [record.started for record in result.targets[0].records]
    assert [starts[1] - starts[0], starts[2] - starts[1]] == [near(2.0), near(5.0)]


async def test_an_end_marker_is_the_end(autojump_clock: trio.abc.Clock) -> None:
    """A server that does not end the body after ``[DONE]`` makes nobody wait."""
    async with open_runtime() as runtime:
        runtime.script(Script(end="keep_open_after_done"))
        result = await measured(runtime, load(requests=2))
    assert [record.outcome for record in result.targets[0].records] == ["full", "full"]
    assert (result.targets[0].records[0].e2e or 9) < 0.5


async def compared(left: FakeRuntime, right: FakeRuntime, slo: Slo | None = None, **more: Any) -> tuple[Result, Quiet]:
    wanted = load(**{"requests": 60, "rounds": 5, "concurrency": 4, **more})
    targets, watch = [target_of(left, "slow"), target_of(right, "fast")], Quiet()
    return result_of(wanted, slo or Slo(), targets, await run_load(targets, wanted, watch)), watch


async def test_targets_take_turns_and_never_run_at_once(autojump_clock: trio.abc.Clock) -> None:
    async with open_runtime(decode_rate=50) as left, open_runtime(decode_rate=100) as right:
        result, watch = await compared(left, right, output_tokens=20, slo=parse_slo("e2e:300ms"))
    assert watch.blocks == [("slow", 0), ("fast", 0), ("fast", 1), ("slow", 1), ("slow", 2), ("fast", 2), ("fast", 3),
                            ("slow", 3), ("slow", 4), ("fast", 4)]
    spans = sorted((block.began_s, block.began_s + block.wall_s) for block in result.run.blocks)
    assert all(earlier[1] <= later[0] for earlier, later in pairwise(spans))
    slow, fast = result.targets
    assert [record.talk for record in slow.records] == [record.talk for record in fast.records] == list(range(60))
    bodies = [{call.request.body for call in runtime.journal.calls if call.inference} for runtime in (left, right)]
    assert len(bodies[0]) == len(bodies[1]) == 60 and not bodies[0] & bodies[1]
    ratios = {ratio.measure: ratio for ratio in result.comparisons[0].ratios}
    tpot, output = ratios["tpot.p50"], ratios["output_tokens_per_s"]
    assert (tpot.median, tpot.low, tpot.high, tpot.rounds) == (near(0.5), near(0.5), near(0.5), 5) and tpot.clear
    assert output.overall == near(2.0, rel=0.1) and output.low <= output.median <= output.high and output.clear
    assert "goodput_per_s" not in ratios  # the base kept no bound at all: no ratio of nothing
    assert "fast served 60 requests within the SLO, slow none." in result.sentences


async def test_no_difference_is_called_none(autojump_clock: trio.abc.Clock) -> None:
    async with open_runtime(decode_rate=50) as left, open_runtime(decode_rate=50.2) as right:
        result, _ = await compared(left, right)
    assert any(line.startswith("No clear difference: fast gave 1.00 times") for line in result.sentences)


async def test_one_round_has_no_spread(autojump_clock: trio.abc.Clock) -> None:
    async with open_runtime(decode_rate=50) as left, open_runtime(decode_rate=100) as right:
        result, _ = await compared(left, right, rounds=1)
    assert any("one round, so the spread is not known" in line for line in result.sentences)
    assert not any(ratio.clear for ratio in result.comparisons[0].ratios)


async def test_failures_of_one_side_are_told_with_the_ratio(autojump_clock: trio.abc.Clock) -> None:
    async with open_runtime() as left, open_runtime() as right:
        left.script(Script(end="cut", tokens=1), times=7)
        result, _ = await compared(left, right)
    assert "Requests that failed: 7 of 60 with slow, 0 of 60 with fast." in result.sentences
    assert any("7 requests failed and are in no latency" in remark for remark in result.remarks)


def open_block(came: list[float], took: list[float | None]) -> BlockResult:
    """An open loop: when each was due, and how long it took (None: it failed)."""
    records = [Record(target="t", round=0, talk=n, turn=0, kind="all", prompt_asked=1, output_asked=1, intended=at,
                      started=at, ended=at + (1.0 if s is None else s), outcome="error" if s is None else "full")
               for n, (at, s) in enumerate(zip(came, took, strict=True))]
    return BlockResult("t", 0, 0.0, 100.0, records)


def test_saturation_is_told_from_noise() -> None:
    came = [n * 0.5 for n in range(41)]  # 20 in the second half
    late: list[float | None] = [0.4] * 37 + [2.0] * 4  # four of the last are still running at the end
    found = saturation([open_block(came, late)])
    assert found is not None and found.saturated is False and found.served_per_s < 0.9 * found.offered_per_s
    growing = saturation([open_block(came, [0.4 + n * 0.5 for n in range(41)])])
    assert growing is not None and growing.saturated is True
    failing = saturation([open_block(came, [0.4, None] * 20 + [0.4])])  # half of what comes is turned away
    assert failing is not None and failing.saturated is True


# --- before the run ---------------------------------------------------------------------------------------------------


def options(**more: Any) -> Options:
    return Options(urls=("http://fake",), **{"load": load(warmup=1), **more})


async def test_targets_name_themselves_apart(autojump_clock: trio.abc.Clock) -> None:
    async with open_runtime() as runtime:
        watch = Quiet()
        known = await prepare([target_of(runtime, label) for label in ("", "mine", "")], options(), watch)
    assert [target.label for target in known] == ["fake", "mine", "fake-2"]
    assert {target.model for target in known} == {"fake-model"}
    assert {target.lengths.source for target in known} == {"exact"} and len(watch.said) == 3


async def test_exact_lengths_are_shared_by_targets_of_the_same_model(autojump_clock: trio.abc.Clock) -> None:
    async with open_runtime() as left, open_runtime(tokenizer=False, usage_style="none") as right:
        known = await prepare([target_of(right, "gateway"), target_of(left, "direct")], options(), Quiet())
        assert [target.lengths.source for target in known] == ["exact", "exact"]
    async with open_runtime() as left, open_runtime(tokenizer=False, model="other") as right:
        known = await prepare([target_of(right, "gateway"), target_of(left, "direct")], options(), Quiet())
        assert [target.lengths.source for target in known] == ["learnt", "exact"]


async def test_a_target_that_serves_no_warm_up_is_not_measured(autojump_clock: trio.abc.Clock) -> None:
    body = json.dumps({"error": {"message": "unknown field \x1b[31mignore_eos"}}).encode()
    async with open_runtime() as runtime:
        runtime.script(Script(status=400, script=[(0.0, body)]), times=None)
        with pytest.raises(BackendUnavailableError, match="no warm-up request: http_400, unknown field") as caught:
            await prepare([target_of(runtime)], options(), Quiet())
    assert "\x1b" not in str(caught.value) and "--no-ignore-eos" in str(caught.value)


async def test_the_model_and_the_shortest_prompt(autojump_clock: trio.abc.Clock) -> None:
    async with open_runtime() as runtime:
        watch = Quiet()
        (known,) = await prepare([target_of(runtime)], options(load=load(prompt_tokens=3, warmup=1), model="m"), watch)
        sent = [call.request.json for call in runtime.journal.calls if call.inference]
    assert known.model == "m" and {body["model"] for body in sent} == {"m"}
    assert any("the shortest prompt has about" in line for line in watch.said)


async def test_a_warm_up_of_every_class(autojump_clock: trio.abc.Clock) -> None:
    kinds = (Kind("short", 0.9, 64, 2), Kind("long", 0.1, 300, 2))
    async with open_runtime() as runtime:
        records = await warm_up(target_of(runtime), load(kinds=kinds, warmup=2))
    assert [record.kind for record in records] == ["short", "long"]
    assert [class_of(load(kinds=kinds, turns=2), evolve(record, turn=1)) for record in records] == [
        "short, turn 2", "long, turn 2"]
