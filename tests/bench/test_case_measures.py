"""Cases 66 to 70: what the numbers mean. Exact, because the clock is virtual."""

from __future__ import annotations

import pytest
import trio

from kvstream.bench.plan import Kind
from kvstream.bench.slo import parse_slo
from kvstream.bench.target import learn_lengths
from tests.bench.conftest import (
    DONE,
    ROLE,
    delta,
    ending,
    frame,
    load,
    measured,
    measured_group,
    only_record,
    target_of,
    usage,
    writes,
)
from tests.fakes import Script, open_runtime
from tests.fakes.upstream import bytewise

near = pytest.approx


async def test_case_66_the_first_token_is_not_the_role(autojump_clock: trio.abc.Clock) -> None:
    script = [(0.010, ROLE), (0.0, b": ping\n\n"), (0.200, delta(content="")), (0.290, delta(content="a")),
              (0.1, delta(content="b"))]
    async with open_runtime() as runtime:
        runtime.script(Script(script=writes(script, ending())))
        record = await only_record(runtime)
    assert record.outcome == "full"
    assert (record.ttfb, record.ttft, record.ttfa) == (near(0.010), near(0.500), near(0.500))
    assert record.e2e == near(0.600)


async def test_case_66_on_completions(autojump_clock: trio.abc.Clock) -> None:
    def text(value: str, finish: str | None = None) -> bytes:
        return frame({"choices": [{"index": 0, "text": value, "finish_reason": finish}]})

    script = [(0.1, text("")), (0.2, text("x")), (0.1, text("y")), (0.1, text("", "length")), (0.0, DONE)]
    async with open_runtime() as runtime:
        runtime.script(Script(script=script))
        record = await only_record(runtime, load(route="/v1/completions", output_tokens=2))
    assert (record.ttfb, record.ttft) == (near(0.1), near(0.3)) and record.outcome == "full"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_case_67_reasoning_is_a_first_token_and_no_answer(name: str, autojump_clock: trio.abc.Clock) -> None:
    script = [(0.01, ROLE), (0.19, delta(**{name: "let me"})), (1.0, delta(**{name: " think"})),
              (0.8, delta(content="42")), (0.1, delta(content="!"))]
    async with open_runtime() as runtime:
        runtime.script(Script(script=writes(script, ending())))
        record = await only_record(runtime)
    assert (record.ttft, record.ttfa) == (near(0.2), near(2.0))
    assert record.tpot == near(1.9 / 3)


async def test_case_67_tool_calls_alone(autojump_clock: trio.abc.Clock) -> None:
    def call(name: str, arguments: str) -> bytes:
        return delta(tool_calls=[{"index": 0, "id": "c1", "type": "function",
                                  "function": {"name": name, "arguments": arguments}}])

    script = [(0.1, ROLE), (0.1, call("", "")), (0.2, call("look", "")), (0.3, call("", "{}"))]
    async with open_runtime() as runtime:
        runtime.script(Script(script=writes(script, ending("tool_calls"))))
        record = await only_record(runtime)
    assert (record.ttft, record.ttfa) == (near(0.4), None)
    assert record.chunks == 2


async def test_case_68_several_tokens_in_a_chunk(autojump_clock: trio.abc.Clock) -> None:
    """100 tokens in 25 chunks of 40 ms: 25 gaps minus one, 99 token times."""
    script = [(0.04, delta(content="a b c d")) for _ in range(25)]
    async with open_runtime() as runtime:
        runtime.script(Script(script=writes(script, ending(tokens=100))), times=None)
        group = await measured_group(runtime, load(output_tokens=100))
    tpot, gap, itl = (group.latencies[name] for name in ("tpot", "gap", "itl"))
    assert (tpot.n, tpot.p50, tpot.estimated) == (1, near(24 * 0.04 / 99), False)
    assert (gap.n, gap.p50, gap.estimated) == (24, near(0.04), False)
    assert (itl.n, itl.mean, itl.estimated) == (24, near(tpot.p50), True)
    assert group.output_tokens == 100 and not group.output_estimated


async def test_case_68_what_comes_after_the_last_token_is_no_token_time(autojump_clock: trio.abc.Clock) -> None:
    script = [*[(0.04, delta(content="a"))] * 4, (2.0, delta("length")), (1.0, usage(64, 4)), (0.5, DONE)]
    async with open_runtime() as runtime:
        runtime.script(Script(script=script))
        record = await only_record(runtime)
    assert (record.tpot, record.gaps, record.e2e) == (near(0.04), near((0.04,) * 3), near(3.66))


async def test_case_68_without_usage_it_is_an_estimate(autojump_clock: trio.abc.Clock) -> None:
    script = [(0.04, delta(content="a")) for _ in range(25)]
    async with open_runtime() as runtime:
        runtime.script(Script(script=writes(script, ending(tokens=None))), times=None)
        result = await measured(runtime, load(output_tokens=25))
    group = result.targets[0].whole
    assert group.output_estimated and group.output_tokens == 25
    assert group.latencies["tpot"].estimated and group.latencies["tpot"].p50 == near(0.04)
    assert any("did not tell its token counts" in remark for remark in result.remarks)


async def test_case_69_prompts_are_new_so_no_cache_answers(autojump_clock: trio.abc.Clock) -> None:
    async with open_runtime(slots=1) as runtime:
        group = await measured_group(runtime, load(requests=10, prompt_tokens=200))
        prompts = [call.request.body for call in runtime.journal.calls if call.inference]
    assert len(set(prompts)) == 10
    assert group.cached is not None and group.cached.known == 10
    assert group.cached.share < 0.05  # the chat template and the first word


async def test_case_69_a_shared_prefix_is_reported(autojump_clock: trio.abc.Clock) -> None:
    async with open_runtime(slots=1) as runtime:
        target = target_of(runtime)
        wanted = load(requests=20, prompt_tokens=400, shared_prefix=0.8)
        assert (await learn_lengths(target, wanted)).source == "exact"
        group = await measured_group(runtime, wanted)
    # 19 of 20 find 80 % of their prompt there
    assert group.cached is not None and group.cached.share == near(0.8 * 0.95, abs=0.05)


async def test_case_69_warm_ups_do_not_count(autojump_clock: trio.abc.Clock) -> None:
    from kvstream.bench.runner import warm_up

    async with open_runtime() as runtime:
        runtime.script(Script(first_byte_after=60.0, itl=0.01))  # the first request loads the model
        target, wanted = target_of(runtime), load(requests=5, warmup=1)
        assert [record.outcome for record in await warm_up(target, wanted)] == ["full"]
        group = await measured_group(runtime, wanted)
        assert sum(call.inference for call in runtime.journal.calls) == 6
    assert group.requests == 5 and group.latencies["ttft"].max < 1.0


async def test_case_69_shorter_answers_are_their_own_class(autojump_clock: trio.abc.Clock) -> None:
    async with open_runtime(answer_tokens=None, decode_rate=100) as runtime:
        runtime.script(Script(tokens=5), times=3)
        result = await measured(runtime, load(requests=10, output_tokens=50))
    whole, short = result.targets[0].whole, result.targets[0].short
    assert (whole.full, whole.short) == (7, 3)
    assert whole.latencies["e2e"].n == 7 and whole.latencies["e2e"].p50 > 0.49
    assert short is not None and short.latencies["e2e"].n == 3 and short.latencies["e2e"].max < 0.2
    assert any("3 answers ended before the asked length" in remark for remark in result.remarks)


async def test_case_69_only_short_answers(autojump_clock: trio.abc.Clock) -> None:
    async with open_runtime(answer_tokens=8) as runtime:
        result = await measured(runtime, load(requests=3, output_tokens=50, ignore_eos=False))
    whole = result.targets[0].whole
    assert (whole.full, whole.short, whole.latencies_of) == (0, 3, "short") and whole.latencies["e2e"].n == 3
    assert any("all 3 answers ended" in remark for remark in result.remarks)


async def test_case_70_a_stall_shows_from_the_intended_start(autojump_clock: trio.abc.Clock) -> None:
    """Open loop, 10 requests/s, one seat; once 5 s of silence. Whoever came in those 5 s waited too."""
    async with open_runtime(slots=1, prefill_rate=1e6, decode_rate=400) as runtime:
        runtime.script(Script(first_byte_after=5.0, itl=0.001), when=lambda r: len(runtime.journal.calls) == 100)
        result = await measured(runtime, load(requests=300, rate=10.0, arrivals="poisson", concurrency=1))
    records, whole = result.targets[0].records, result.targets[0].whole
    assert whole.full == 300
    assert whole.latencies["e2e"].p99 > 4.0 and whole.latencies["e2e"].p50 < 0.1
    late = [record for record in records if record.e2e is not None and record.e2e > 0.5]
    assert len(late) > 30  # about 45 requests were due in those seconds
    # measured from the moment of sending, as it is done wrongly, one request alone was slow
    assert sum((record.ended or 0) - record.started > 0.5 for record in records) == 1


async def test_case_70_the_cap_is_in_the_latency(autojump_clock: trio.abc.Clock) -> None:
    async with open_runtime(slots=8, prefill_rate=1e6, decode_rate=4) as runtime:
        result = await measured(runtime, load(requests=5, rate=10.0, arrivals="constant", concurrency=1))
    records = result.targets[0].records
    assert [record.intended for record in records] == near([0, 0.1, 0.2, 0.3, 0.4])
    assert max(record.e2e or 0 for record in records) == near(5 * 0.75 - 0.4, rel=0.01)


async def test_case_70_errors_have_counts_and_no_latencies(autojump_clock: trio.abc.Clock) -> None:
    async with open_runtime(slots=1, decode_rate=100) as runtime:
        runtime.script(Script(status=500, script=[(30.0, b'{"error":{"message":"boom"}}')]))
        runtime.script(Script(status=503, script=[(20.0, b'{"error":{"message":"later"}}')],
                              headers=(("Retry-After", "1"),)))
        runtime.script(Script(status=429, script=[(0.0, b"no")]))
        runtime.script(Script(end="error_event", tokens=2))
        runtime.script(Script(end="eof_no_finish", tokens=2))
        runtime.script(Script(end="done_no_finish", tokens=2))
        runtime.script(Script(end="cut", tokens=2))
        runtime.script(Script(refuse=True))
        runtime.script(Script(hang_at_token=1, first_byte_after=0.1, itl=0.1))
        runtime.script(Script(first_byte_after=100.0, itl=0.1))
        runtime.script(Script(script=[(0.0, b"{}")], headers=(("Content-Type", "application/json"),)))
        runtime.script(Script(script=[(0.0, b"data: {oops\n\n"), (0.0, DONE)]))
        group = await measured_group(runtime, load(requests=20, timeout_s=40.0))
    assert (group.full, group.refused, group.timeouts, group.errors) == (8, 1, 2, 9)
    assert group.by_kind == {
        "truncated": 3, "http_500": 1, "http_503": 1, "http_429": 1, "error_event": 1, "closed_without_answer": 1,
        "timeout_in_answer": 1, "timeout_before_first_token": 1, "not_a_stream": 1, "malformed": 1}
    assert group.failed == 12 and group.goodput.met == 8
    assert all(found.n <= 8 * 3 for found in group.latencies.values()) and group.latencies["e2e"].n == 8
    assert group.latencies["e2e"].max < 1.0


async def test_case_70_a_backend_that_is_not_there(autojump_clock: trio.abc.Clock) -> None:
    async with open_runtime(refuse=True) as runtime:
        result = await measured(runtime, load(requests=4, concurrency=2))
    assert result.targets[0].whole.by_kind == {"connection_refused": 4} and result.exit_code == 1


async def test_case_70_saturation_has_a_banner_and_an_exit_code(autojump_clock: trio.abc.Clock) -> None:
    async with open_runtime(slots=1, prefill_rate=1e6, decode_rate=20) as runtime:  # 6.7 requests/s of 4 tokens
        over = await measured(runtime, load(requests=200, rate=10.0, concurrency=None))
    async with open_runtime(slots=1, prefill_rate=1e6, decode_rate=20) as runtime:
        under = await measured(runtime, load(requests=200, rate=2.5, concurrency=None))
        short = await measured(runtime, load(requests=4, rate=100.0, concurrency=None))
    assert over.exit_code == 4 and any(remark.startswith("SATURATED") for remark in over.remarks)
    found = over.targets[0].saturation
    assert found is not None and found.offered_per_s == near(10, rel=0.2) and found.served_per_s == near(6.67, rel=0.1)
    assert under.exit_code == 0 and not any("SATURATED" in remark for remark in under.remarks)
    assert short.exit_code == 0 and any("too short to tell" in remark for remark in short.remarks)


async def test_case_70_events_not_reads(autojump_clock: trio.abc.Clock) -> None:
    """Byte by byte, and everything in one read: the same tokens."""
    whole = b"".join(data for _, data in writes([(0.0, ROLE), (0.0, delta(content="a\u2028b")),
                                                 (0.0, delta(content="雨c"))], ending()))
    for options in ({}, {"split": bytewise}):
        async with open_runtime() as runtime:
            runtime.script(Script(script=[(0.5, whole)]))
            record = await only_record(runtime, **options)
        assert (record.outcome, record.chunks, record.tokens, record.ttft) == ("full", 2, 4, near(0.5)), options


async def test_what_was_running_when_it_stopped_is_cancelled(autojump_clock: trio.abc.Clock) -> None:
    from kvstream.bench.record import Run
    from kvstream.bench.result import result_of
    from kvstream.bench.runner import run_load
    from kvstream.bench.slo import Slo
    from tests.bench.conftest import Quiet

    async with open_runtime(slots=4, decode_rate=10) as runtime:
        target, wanted, run = target_of(runtime), load(requests=None, duration_s=1000.0, concurrency=4), Run(1)
        with trio.move_on_after(3.3):
            await run_load([target], wanted, Quiet(), run)
        result = result_of(wanted, Slo(), [target], run)
    whole = result.targets[0].whole
    assert result.run.partial and result.exit_code == 130
    assert whole.cancelled == 4 and whole.full >= 20 and whole.failed == 0
    assert whole.latencies["e2e"].n == whole.full and whole.wall_s == near(3.3)


async def test_goodput_is_all_bounds_or_nothing(autojump_clock: trio.abc.Clock) -> None:
    def answer(first_s: float, gap_s: float) -> Script:
        return Script(script=writes([(first_s, delta(content="a"))], [(gap_s, delta(content="b"))] * 3, ending()))

    async with open_runtime(slots=1) as runtime:
        for first_s, gap_s in ((1.0, 0.05), (3.0, 0.05), (1.0, 0.2), (1.99, 0.079)):
            runtime.script(answer(first_s, gap_s))
        runtime.script(Script(status=500, script=[(0.0, b"")]))
        result = await measured(runtime, load(requests=5), parse_slo("ttft:2s,tpot:80ms"))
    goodput = result.targets[0].whole.goodput
    assert (goodput.met, goodput.share) == (2, near(0.4))
    assert goodput.per_s == near(2 / result.targets[0].whole.wall_s)


async def test_queue_wait_and_cached_tokens_as_a_kvstream_tells_them(autojump_clock: trio.abc.Clock) -> None:
    early = writes([(0.1, ROLE), (0.0, delta(content="a")), (0.0, delta("length")),
                    (0.0, usage(100, 4, 60)), (0.0, DONE)])
    late = [(0.1, b": ping\n\n"), (0.1, b": queued-ms 20000\n\n"), *early]
    async with open_runtime() as runtime:
        runtime.script(Script(script=early, headers=(("X-KVStream-Queue-Ms", "250"),)))
        runtime.script(Script(script=late))
        group = await measured_group(runtime, load(requests=2))
    assert (group.latencies["queue"].n, group.latencies["queue"].max) == (2, near(20.0))
    assert group.latencies["queue"].p50 == near(10.125)
    assert group.cached is not None and (group.cached.known, group.cached.share) == (2, near(0.6))


async def test_classes_have_figures_of_their_own(autojump_clock: trio.abc.Clock) -> None:
    kinds = (Kind("short", 0.8, 64, 4), Kind("long", 0.2, 640, 8))
    async with open_runtime(slots=1, prefill_rate=1000, decode_rate=100) as runtime:
        result = await measured(runtime, load(kinds=kinds, requests=20))
    classes = result.targets[0].classes
    assert {name: group.requests for name, group in classes.items()} == {"short": 16, "long": 4}
    assert classes["long"].latencies["ttft"].p50 > 5 * classes["short"].latencies["ttft"].p50
