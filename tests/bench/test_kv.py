"""``kvstream bench kv`` as it is typed: its folder, going on where it stopped, flags that are wrong."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from attrs import evolve
from click.testing import CliRunner, Result

from kvstream import cli
from kvstream.bench import kv, kvplot
from kvstream.bench.kvfiles import COLUMNS, RESULTS, TABLE
from kvstream.bench.kvmodel import MODELS, PROFILES
from kvstream.bench.kvpoint import Point, Setup, Told
from kvstream.bench.kvsim import layout_of, simulate

ARGUMENTS = ("--simulate=rtx-5070-ti", "--max-context=24K", "--pool-mib=256", "--decode-tokens=64", "--output=out")
PROMPTS = [8192, 16384, 24576 - 64]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["bench", "kv", *arguments])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "out"


@cache
def a_point() -> Point:
    return simulate(Setup(PROFILES["h200"], MODELS["smollm2-135m"], decode_tokens=4, pool_mib=64), 1024)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, watched: Callable[[int | None], list[int]]) -> list[int]:
    """How many points each picture had, instead of pictures; every point's figures are those of one."""
    watched(None)
    drawn: list[int] = []
    monkeypatch.setattr(kvplot, "write_pictures", lambda folder, points, *_, **__: drawn.append(len(points)))
    return drawn


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], list[int]]:
    """The prompts that are simulated; Ctrl-C comes in the middle of the one named."""
    def watch(stop_at: int | None) -> list[int]:
        prompts: list[int] = []

        def stand_in(setup: Setup, prompt: int, told: Told) -> Point:
            layout_of(setup, prompt + setup.decode_tokens)  # what does not fit is refused
            prompts.append(prompt)
            told(1, 2)
            if prompt == stop_at:
                raise KeyboardInterrupt
            return evolve(a_point(), prompt_tokens=prompt)

        monkeypatch.setattr(kv, "simulate", stand_in)
        return prompts

    return watch


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / TABLE).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_sweep_and_its_folder(folder: Path) -> None:
    done = invoke(*ARGUMENTS)
    assert done.exit_code == 0, done.output
    assert [int(row["prompt_tokens"]) for row in rows(folder)] == PROMPTS
    assert tuple(rows(folder)[0]) == COLUMNS
    assert {file.name for file in folder.iterdir()} == {RESULTS, TABLE, kvplot.PICTURE, kvplot.PAGE, kvplot.RASTER}
    assert (folder / kvplot.RASTER).read_bytes().startswith(b"\x89PNG")
    for name in (kvplot.PICTURE, kvplot.PAGE):
        text = (folder / name).read_text("utf-8")
        assert "<svg" in text and "SIMULATED: rtx-5070-ti" in text
    assert all(f"<td>{prompt:,}</td>" in (folder / kvplot.PAGE).read_text("utf-8") for prompt in PROMPTS)
    about, *points = [json.loads(line) for line in (folder / RESULTS).read_text("utf-8").splitlines()]
    assert about["settings"]["card"]["name"] == "rtx-5070-ti" and len(points) == 3
    assert {row["source"] for row in rows(folder)} == {about["settings"]["source"]} == {"simulated"}
    for prompt in PROMPTS:
        assert f"{prompt:,}" in done.output
    assert "SIMULATED" in done.output and "written to out" in done.output


def test_files_are_whole_after_every_point(folder: Path, drawn: list[int],
                                           watched: Callable[[int | None], list[int]]) -> None:
    prompts = watched(PROMPTS[2])
    stopped = invoke(*ARGUMENTS)
    assert stopped.exit_code == 130 and "PARTIAL" in stopped.output
    assert prompts == PROMPTS and drawn == [1, 2]
    assert [int(row["prompt_tokens"]) for row in rows(folder)] == PROMPTS[:2]
    again = watched(None)
    assert invoke(*ARGUMENTS).exit_code == 0
    assert again == PROMPTS[2:] and drawn == [1, 2, 3]
    assert [int(row["prompt_tokens"]) for row in rows(folder)] == PROMPTS
    assert not list(folder.glob("*.new"))


def test_a_finished_sweep_is_not_run_again_and_may_be_extended(folder: Path, drawn: list[int],
                                                               watched: Callable[[int | None], list[int]]) -> None:
    first = invoke(*ARGUMENTS)
    before = (folder / TABLE).read_bytes()
    prompts = watched(None)
    second = invoke(*ARGUMENTS)
    assert second.exit_code == 0 and not prompts and (folder / TABLE).read_bytes() == before
    assert second.stdout == first.stdout and drawn == [1, 2, 3, 3], "but its pictures are drawn again"
    assert invoke(*ARGUMENTS, "--max-context=32K", "--min-context=4K", "--step=4K").exit_code == 0
    assert prompts == [4096, 12288, 20480, 24576, 28672, 32768 - 64]
    assert [int(row["prompt_tokens"]) for row in rows(folder)] == sorted({*PROMPTS, *prompts})


@pytest.mark.parametrize(("flag", "words"), [
    ("--pool-mib=320", "pool_mib was 256 and is 320"), ("--cache-type-v=q8_0", "v_type was 'q4_0' and is 'q8_0'"),
    ("--simulate=rtx-5060-ti", "card was"), ("--model-geometry=llama-3.1-8b", "model was"),
    ("--ubatch-size=256", "ubatch_tokens was 512 and is 256"), ("--decode-tokens=32", "decode_tokens was 64")])
def test_results_of_other_settings_are_not_continued(folder: Path, drawn: list[int], flag: str, words: str) -> None:
    assert invoke(*ARGUMENTS, "--max-context=9K").exit_code == 0
    before = (folder / RESULTS).read_bytes()
    other = invoke(*ARGUMENTS, "--max-context=9K", flag)
    assert other.exit_code == 2 and words in other.output and "another --output" in other.output
    assert (folder / RESULTS).read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff\xfe", b'{"kind": "metadata", "format": 0}\n',
                                     b'{"kind": "metadata", "format": 1, "settings": {}}\n{"kind": "measurement"}\n'])
def test_a_folder_that_cannot_be_continued(folder: Path, drawn: list[int], content: bytes) -> None:
    folder.mkdir()
    (folder / RESULTS).write_bytes(content)
    done = invoke(*ARGUMENTS)
    assert done.exit_code == 2 and RESULTS in done.output and (folder / RESULTS).read_bytes() == content


def test_a_card_and_a_model_from_files(folder: Path, drawn: list[int]) -> None:
    Path("card.json").write_text(json.dumps(
        {"name": "mine", "h2d_gib_s": 12, "hbm_gb_s": 300, "c0_ms": 30, "c1_ms_per_1k_tokens": 0.3, "prefill_ms": 1,
         "prefill_ms_per_1k": 0.01, "usable_mib": 7000}), "utf-8")
    Path("model.json").write_text(json.dumps(
        {"name": "small", "layers": 8, "kv_heads": 2, "q_heads": 4, "head_size": 64, "weights_mib": 500}), "utf-8")
    done = invoke("--simulate=card.json", "--model-geometry=model.json", "--max-context=9K", "--output=out")
    assert done.exit_code == 0, done.output
    assert "mine" in done.output and "small" in done.output


@pytest.mark.parametrize(("arguments", "words"), [
    (("--pool-mib=published",), "for a card that is named with --simulate"),
    (("--reserve-mib=some",), "a number of MiB or model"),
    (("--other-ms=1,2,3",), "one or two numbers of ms, or a card"),
    (("--other-ms=-1",), "one or two numbers of ms, or a card"),
    (("--baseline=all-resident,best",), "no baseline 'best'; there are all-resident, host-only, managed"),
    (("--simulate=h200", "--full-prefill"), "--full-prefill is for a GPU"),
    (("--simulate=h200", "--other-ms=3"), "--other-ms is for a GPU"),
    (("--simulate=rtx-9",), "no card 'rtx-9' and no such file"),
    (("--simulate=h200", "--model-geometry=gpt"), "no model 'gpt' and no such file"),
    (("--simulate=h200", "--cache-type-k=q2"), "q2"),
    (("--simulate=h200", "--pool-mib=much"), "auto or published"),
    (("--simulate=h200", "--pool-mib=published"), "no published figures"),
    (("--simulate=h200", "--page-tokens=100"), "multiple of"),
    (("--simulate=rtx-5070-ti", "--pool-mib=20"), "too small"),
    (("--simulate=h200", "--max-context=8K"), "no room for a prompt"),
    (("--simulate=h200", "--max-context=1.5K"), "no number of tokens"),
    (("--simulate=h200", "--ubatch-size=32"), "--ubatch-size"),
])
def test_wrong_flags(folder: Path, drawn: list[int], arguments: tuple[str, ...], words: str) -> None:
    more = () if any(argument.startswith("--max-context") for argument in arguments) else ("--max-context=24K",)
    done = invoke(*arguments, *more, "--output=out")
    assert "measures on a GPU" not in done.output, "options are checked first"
    assert done.exit_code == 2 and words in done.output, done.output
    assert not (folder / RESULTS).exists()


def test_flags_of_the_other_bench_are_refused(folder: Path) -> None:
    done = CliRunner().invoke(cli.main, ["bench", "--url=http://a:1", "kv", *ARGUMENTS])
    assert done.exit_code == 2 and "--url has no meaning for bench kv" in done.output


def test_without_matplotlib_all_is_there_but_the_png(folder: Path, monkeypatch: pytest.MonkeyPatch,
                                                     watched: Callable[[int | None], list[int]]) -> None:
    watched(None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert invoke(*ARGUMENTS).exit_code == 0
    assert len(rows(folder)) == 3
    assert {file.name for file in folder.iterdir()} == {RESULTS, TABLE, kvplot.PICTURE, kvplot.PAGE}


def test_without_a_gpu_it_says_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", None)
    monkeypatch.setitem(sys.modules, "pycuda.driver", None)
    done = invoke("--max-context=24K", "--output=out")
    assert done.exit_code == 2 and len(done.output.strip().splitlines()) == 1, done.output
    for words in ("on a GPU", "pycuda is not here: `pip install '.[cuda]'`", "--simulate rtx-5070-ti"):
        assert words in done.output
    assert not folder.exists()


def test_help() -> None:
    done = invoke("--help")
    assert done.exit_code == 0
    for flag in ("--simulate", "--model-geometry", "--max-context", "--pool-mib", "--output"):
        assert flag in done.output
    group = CliRunner().invoke(cli.main, ["bench", "--help"])
    assert "kv " in group.output and "--concurrency" in group.output
