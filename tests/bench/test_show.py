"""What a person and a program get: the page at 80 and 120 columns, JSON by its schema, CSV, a picture."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import trio
from rich.console import Console

from kvstream import parts
from kvstream.bench import plots
from kvstream.bench.files import COLUMNS, SCHEMA_FILE, as_json, write_csv, write_json
from kvstream.bench.plan import Kind
from kvstream.bench.progress import BarWatch, LineWatch
from kvstream.bench.record import Run
from kvstream.bench.report import show
from kvstream.bench.result import Result, result_of
from kvstream.bench.runner import run_load
from kvstream.bench.slo import parse_slo
from kvstream.bench.verdict import seconds
from kvstream.errors import ConfigError
from tests.bench.conftest import Quiet, load, target_of
from tests.fakes import Script, open_runtime

SCHEMA = json.loads(SCHEMA_FILE.read_text("utf-8"))
KINDS = (Kind("short", 0.8, 64, 8), Kind("long", 0.2, 400, 16))
BAD = Script(status=500, script=[(0.0, b'{"error":{"message":"no \x1b[2J memory \xe2\x80\xae here"}}')])


async def rich_result(*, partial: bool = False, targets: int = 2, watch: Any = None, **more: Any) -> Result:
    """Two targets, two classes, failures, short answers, an SLO, rounds: everything that can be shown."""
    wanted = load(**{"kinds": KINDS, "requests": 40, "rounds": 3, "concurrency": 4, **more})
    async with open_runtime(decode_rate=50) as left, open_runtime(decode_rate=100) as right:
        left.script(BAD, times=2)
        left.script(Script(tokens=2), times=2)
        right.script(Script(status=429, script=[(0.0, b"")], headers=(("Retry-After", "1"),)))
        right.script(Script(first_byte_after=99.0), times=1)
        known = [target_of(left, "direct"), target_of(right, "kvstream"), target_of(right, "third")][:targets]
        run = Run(3 if targets > 1 else 1)
        with trio.move_on_after(0.3 if partial else 10000.0):
            await run_load(known, wanted, watch or Quiet(), run)
    return result_of(wanted, parse_slo("ttft:2s,tpot:15ms"), known, run)


def page(result: Result, width: int) -> str:
    out = io.StringIO()
    show(result, Console(file=out, width=width))
    return out.getvalue()


def json_of(result: Result) -> Any:
    """As a reader of the file gets it."""
    return json.loads(json.dumps(as_json(result), allow_nan=False))


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("targets", [1, 2, 3])
async def test_the_page_fits(width: int, targets: int, autojump_clock: trio.abc.Clock) -> None:
    text = page(await rich_result(targets=targets, timeout_s=30.0), width)
    assert max(len(line) for line in text.splitlines()) <= width
    for word in ("Requests", "Latency", "By class", "Not served", "within the SLO", "first token", "per token",
                 "whole answer", "http_500", "errors", "of these short", "Few samples"):
        assert word in text, word
    if targets > 1:
        assert "kvstream / direct" in text and "time to first token, p99" in text and "timed out" in text
        assert "\u2026" not in text  # nothing is cut off
    assert "\x1b" not in text and "\u202e" not in text


async def test_an_open_loop_has_its_rows(autojump_clock: trio.abc.Clock) -> None:
    text = page(await rich_result(targets=1, rate=50.0, requests=200, concurrency=None), 80)
    assert "open loop, 50/s poisson" in text and "offered/s, 2nd half" in text and "SATURATED: direct" in text


async def test_a_stopped_run_is_marked_everywhere(autojump_clock: trio.abc.Clock) -> None:
    result = await rich_result(partial=True)
    assert "PARTIAL" in page(result, 80) and "cut by our stop" in page(result, 80)
    value = json_of(result)
    assert value["partial"] and value["exit_code"] == 130
    jsonschema.validate(value, SCHEMA)


async def test_a_run_stopped_before_it_began(autojump_clock: trio.abc.Clock) -> None:
    async with open_runtime() as runtime:
        target = target_of(runtime)
    result = result_of(load(), parse_slo("ttft:1s"), [target], Run(1))
    assert "served none of 0 requests" in page(result, 80)
    jsonschema.validate(json_of(result), SCHEMA)


@pytest.mark.parametrize("more", [{}, {"rate": 5.0}, {"requests": None, "duration_s": 3.0},
                                  {"turns": 2, "kinds": KINDS[:1]}])
async def test_json_follows_its_schema(more: dict[str, Any], tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    result = await rich_result(**more)
    write_json(result, tmp_path / "r.json")
    value = json.loads((tmp_path / "r.json").read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(value, SCHEMA, cls=jsonschema.Draft202012Validator)
    assert len(value["requests"]) == sum(target["whole"]["requests"] for target in value["targets"]) > 0
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(value | {"more": 1}, SCHEMA)


def test_the_schema_has_every_field_and_no_other() -> None:
    properties = SCHEMA["properties"]["requests"]["items"]["properties"]
    assert set(properties) == {*COLUMNS, "gaps"}


async def test_csv_has_a_row_per_request(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    result = await rich_result()
    write_csv(result, tmp_path / "r.csv")
    rows = list(csv.DictReader((tmp_path / "r.csv").open(encoding="utf-8", newline="")))
    assert len(rows) == 80 and tuple(rows[0]) == COLUMNS
    failed = next(row for row in rows if row["outcome"] == "error")
    assert (failed["ttft"], failed["error"], failed["status"]) == ("", "http_500", "500")
    served = next(row for row in rows if row["outcome"] == "full")
    assert float(served["ttft"]) > 0 and int(served["tokens"]) == int(served["output_asked"])


async def test_a_key_is_in_no_file(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    from attrs import evolve

    result = await rich_result(targets=1)
    target = evolve(result.targets[0].target, headers=(("authorization", "Bearer sk-secret"),))
    result = evolve(result, targets=(evolve(result.targets[0], target=target),))
    assert "sk-secret" not in json.dumps(as_json(result)) + page(result, 120) + repr(target)


async def test_the_picture(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    plots.write_plot(await rich_result(), tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "r.png").stat().st_size > 20_000
    plots.write_plot(await rich_result(partial=True, targets=1), tmp_path / "p.png")


async def test_a_picture_of_nothing(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    async with open_runtime() as runtime:
        result = result_of(load(), parse_slo("ttft:1s"), [target_of(runtime)], Run(1))
    plots.write_plot(result, tmp_path / "r.png")


@pytest.mark.parametrize(("form", "words"), [
    ("source", "`pip install '.[plots]'` in KVStream's folder adds it"),
    ("zipapp", "-m pip install matplotlib` adds it to the Python"),
    ("executable", "the executable does not have it; a KVStream that pip has installed can")])
def test_without_matplotlib_a_png_says_what_to_do(monkeypatch: pytest.MonkeyPatch, form: str, words: str) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(parts, "form", lambda: form)
    with pytest.raises(ConfigError) as refused:
        plots.check_plot(Path("r.png"))
    assert words in str(refused.value) and "--plot r.png needs matplotlib" in str(refused.value)
    assert "A file that ends in .svg needs nothing" in str(refused.value)
    plots.check_plot(Path("r.svg"))
    plots.check_report(Path("r.html"))


async def test_progress_on_a_terminal_and_elsewhere(autojump_clock: trio.abc.Clock) -> None:
    out = io.StringIO()
    with LineWatch(Console(file=out, width=80)) as lines:
        await rich_result(watch=lines)
    assert "direct, round 1 of 3: 13 requests ended, 2 failed" in out.getvalue().splitlines()
    out = io.StringIO()
    with BarWatch(Console(file=out, width=80, force_terminal=True)) as bars:
        bars.say("warming up")
        await rich_result(watch=bars)
    assert "direct, round 1 of 3" in out.getvalue() and "warming up" in out.getvalue()


def test_times_for_a_person() -> None:
    assert [seconds(value) for value in (0.0, 0.0012, 0.0123, 0.123, 0.9996, 1.234, 12.34, 123.4)] == [
        "0.00 ms", "1.20 ms", "12.3 ms", "123 ms", "1.00 s", "1.23 s", "12.3 s", "123 s"]
