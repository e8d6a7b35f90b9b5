"""``kvstream bench`` as it is typed: real sockets, exit codes, Ctrl-C, proxies in the environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import trio
from click.testing import CliRunner, Result

from kvstream import cli
from kvstream.bench import main
from kvstream.bench.files import SCHEMA_FILE
from kvstream.bench.main import Options
from kvstream.bench.prompts import COMPLETIONS
from tests.fakes import Script, open_runtime
from tests.fakes.server import open_server
from tests.gateway.conftest import open_rig

SMALL = ("--prompt-len=40", "--output-len=4", "--concurrency=4", "--total-requests=12")


def environment(**more: str) -> dict[str, str]:
    """Proxies that lead nowhere: a bench of loopback must not ask them."""
    dead = "http://127.0.0.1:9"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVSTREAM_")}
    return {**kept, "HTTP_PROXY": dead, "HTTPS_PROXY": dead, "ALL_PROXY": dead, "NO_PROXY": "", **more}


async def bench(*arguments: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
    with trio.fail_after(300):
        return await trio.run_process([sys.executable, "-m", "kvstream", "bench", *arguments], check=False, cwd=folder,
                                      capture_stdout=True, capture_stderr=True, env=environment())


async def test_a_run_over_real_sockets(tmp_path: Path) -> None:
    async with open_runtime(decode_rate=200) as runtime, open_server(runtime) as server:
        runtime.script(Script(first_byte_after=0.3, itl=0.02), times=None)
        done = await bench("--url", server.base_url, *SMALL, "--json=r.json", "--csv=r.csv", "--plot=r.svg",
                           "--report=r.html", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    value = json.loads((tmp_path / "r.json").read_text("utf-8"))
    jsonschema.validate(value, json.loads(SCHEMA_FILE.read_text("utf-8")))
    whole = value["targets"][0]["whole"]
    assert whole["full"] == 12 and value["targets"][0]["prompt_length"] == "exact"
    assert whole["prompt_length"]["p50"] == whole["prompt_length"]["max"] == 40
    # The fake keeps its pace; what a loaded machine adds has no bound, what it takes away has.
    assert 0.295 < whole["latencies"]["ttft"]["p50"] < 10 and whole["latencies"]["tpot"]["p50"] > 0.019
    assert len((tmp_path / "r.csv").read_text("utf-8").splitlines()) == 13
    assert "12 of 12 served" in (tmp_path / "r.svg").read_text("utf-8")
    page = (tmp_path / "r.html").read_text("utf-8")
    assert "12 of 12 requests" in page and value["when"] in page and value["machine"]["system"] in page
    assert b"12 of 12 requests" in done.stdout and b"warming up" in done.stderr


async def test_direct_and_through_a_kvstream_in_one_run(tmp_path: Path) -> None:
    async with open_rig(knobs={"decode_rate": 200, "slots": 2}) as rig:
        done = await bench("--url", rig.fake.base_url, "--compare", rig.gateway.url, "--label=direct", *SMALL,
                           "--slo=ttft:60s", "--json=r.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    value = json.loads((tmp_path / "r.json").read_text("utf-8"))
    direct, ours = value["targets"]
    assert (direct["label"], ours["label"]) == ("direct", "kvstream") and ours["kind"].startswith("KVStream ")
    assert direct["prompt_length"] == ours["prompt_length"] == "exact"
    assert ours["whole"]["full"] == direct["whole"]["full"] == 12
    assert ours["whole"]["latencies"]["queue"]["n"] == 12 and "queue" not in direct["whole"]["latencies"]
    assert value["comparisons"][0]["ratios"] and b"within the SLO" in done.stdout


async def test_ctrl_c_prints_what_there_is(tmp_path: Path) -> None:
    async with open_runtime(decode_rate=200) as runtime, open_server(runtime) as server:
        argv = [sys.executable, "-m", "kvstream", "bench", "--url", server.base_url, "--prompt-len=40",
                "--output-len=4", "--concurrency=2", "--duration=600", "--json=r.json"]
        async with trio.open_nursery() as nursery:
            process: trio.Process = await nursery.start(
                lambda task_status: trio.run_process(argv, check=False, cwd=tmp_path, env=environment(),
                                                     stdout=(tmp_path / "out").open("wb"), stderr=subprocess.DEVNULL,
                                                     task_status=task_status))
            with trio.fail_after(300):
                while sum(call.outcome == "done" for call in runtime.journal.calls if call.inference) < 6:
                    await trio.sleep(0.02)
                process.send_signal(signal.SIGINT)
                await process.wait()
    assert process.returncode == 130
    assert "PARTIAL" in (tmp_path / "out").read_text("utf-8")
    assert json.loads((tmp_path / "r.json").read_text("utf-8"))["partial"] is True


async def test_nobody_there(tmp_path: Path) -> None:
    done = await bench("--url", "http://127.0.0.1:9", folder=tmp_path)
    assert done.returncode == 1 and b"nothing answers at http://127.0.0.1:9" in done.stderr and not done.stdout


# --- flags ------------------------------------------------------------------------------------------------------------


class Ran:
    def __init__(self) -> None:
        self.options: list[Options] = []
        self.code = 0

    def __call__(self, options: Options) -> int:
        self.options.append(options)
        return self.code


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ran:
    monkeypatch.chdir(tmp_path)
    stand_in = Ran()
    monkeypatch.setattr(main, "run_bench", stand_in)
    return stand_in


def invoke(*arguments: str, **env: str) -> Result:
    return CliRunner().invoke(cli.main, ["bench", *arguments], env=env)


def test_alone_it_measures_the_kvstream_of_this_machine(ran: Ran) -> None:
    assert invoke(KVSTREAM_SERVER__PORT="9123").exit_code == 0
    options = ran.options[0]
    assert options.urls == ("http://127.0.0.1:9123",)
    load = options.load
    assert (load.concurrency, load.requests, load.duration_s, load.rate) == (16, 50, None, None)
    assert [(kind.prompt_tokens, kind.output_tokens) for kind in load.kinds] == [(512, 128)]


def test_prompts_differ_from_run_to_run_unless_a_seed_is_given(ran: Ran) -> None:
    for arguments in ((), (), ("--seed=5",), ("--seed=5",)):
        assert invoke(*arguments).exit_code == 0
    seeds = [options.load.seed for options in ran.options]
    assert seeds[0] != seeds[1] and seeds[2:] == [5, 5]


def test_all_flags(ran: Ran) -> None:
    result = invoke(
        "--url=http://a:1", "--compare=http://b:2/v1", "--compare=http://c:3", "--label=x", "--compare-label=y",
        "--model=m", "--api-key=k", "--concurrency=3", "--total-requests=9", "--duration=7", "--shared-prefix=0.8",
        "--turns=4", "--turn-len=11", "--rate=2.5", "--arrivals=constant", "--slo=ttft:2s,tpot:80ms", "--warmup=2",
        "--seed=4", "--timeout=9", "--rounds=2", "--no-ignore-eos", "--mix=s:1:2:3", "--json=j", "--csv=c",
        "--plot=p.svg", "--report=r.html")
    assert result.exit_code == 0, result.output
    options = ran.options[0]
    load = options.load
    assert options.urls == ("http://a:1", "http://b:2/v1", "http://c:3") and options.labels == ("x", "y")
    assert (options.model, options.api_key, options.json, options.csv, options.plot, options.report) == (
        "m", "k", Path("j"), Path("c"), Path("p.svg"), Path("r.html"))
    assert (load.concurrency, load.requests, load.duration_s, load.shared_prefix, load.turns, load.turn_tokens) == (
        3, 9, 7.0, 0.8, 4, 11)
    assert (load.rate, load.arrivals, load.warmup, load.seed, load.timeout_s, load.rounds, load.ignore_eos) == (
        2.5, "constant", 2, 4, 9.0, 2, False)
    assert dict(options.slo.bounds) == {"ttft": 2.0, "tpot": 0.08} and "'k'" not in repr(options)


def test_defaults_that_depend_on_others(ran: Ran) -> None:
    for arguments in (("--rate=1",), ("--duration=5",), ("--route=completions",)):
        assert invoke(*arguments).exit_code == 0
    rate, duration, completions = (options.load for options in ran.options)
    assert rate.concurrency is None and rate.requests == 50
    assert duration.requests is None and duration.concurrency == 16
    assert completions.route == COMPLETIONS


@pytest.mark.parametrize(("arguments", "words"), [
    (("--mix=a:1:2:3", "--prompt-len=5"), "--mix has the lengths"),
    (("--mix=nonsense",), "--mix"),
    (("--slo=fast",), "--slo"),
    (("--route=completions", "--turns=2"), "--turns needs chat"),
    (("--compare-label=x",), "more --compare-label than --compare"),
    (("--plot=x.gif",), "--plot writes .svg, .png or .pdf"),
    (("--plot=x.html",), "--report writes pages"),
    (("--report=x.pdf",), "--report writes .html"),
    (("--shared-prefix=1.5",), "--shared-prefix"),
    (("--rate=0",), "--rate"),
    (("--concurrency=0",), "--concurrency"),
])
def test_wrong_flags(ran: Ran, arguments: tuple[str, ...], words: str) -> None:
    result = invoke("--url=http://a:1", *arguments)
    assert result.exit_code == 2 and words in result.output and not ran.options


@pytest.mark.parametrize(("arguments", "words"), [
    (("--url=ftp://x",), "must be a URL"),
    (("--url=http://a:1", "--compare=nonsense"), "must be a URL"),
    (("--url=http://a:1", "--json=/no/such/folder/x.json"), "no folder"),
])
def test_what_is_found_before_anything_is_sent(arguments: tuple[str, ...], words: str, tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def nothing(*_: Any) -> Any:
        raise AssertionError("it began")

    monkeypatch.setattr(trio, "run", nothing)
    result = invoke(*arguments)
    assert result.exit_code == 2 and words in result.output, result.output


def test_the_exit_code_is_that_of_the_run(ran: Ran) -> None:
    ran.code = 4
    assert invoke("--url=http://a:1").exit_code == 4
