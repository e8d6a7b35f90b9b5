"""``just gpu`` itself, on the simulated driver: the whole script at its smallest, with one step that fails and one that
hangs among the others."""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstream.cuda.fake_device import FakeDevice, Launch, Memory
from kvstream.cuda.fake_kernels import KERNELS
from kvstream.cuda.types import KVType
from tests.cuda.driver.build import Builder
from tests.cuda.gpu import carried, proofs
from tests.cuda.gpu import run as script
from tests.cuda.gpu.bench import Bench
from tests.cuda.gpu.run import STEPS, Options, Step, main, run

FIGURES = re.compile(r"(bytes|tokens)_per_s|.*ms_(per|all).*|host_us.*|.*_share|open_s|enough_to_.*")


def fails(bench: Bench, tell: Any) -> None:
    """A step."""
    tell.part("so far", {"rows": 3})
    raise AssertionError("planted")


def hangs(bench: Bench, tell: Any) -> None:
    """A step."""
    tell.part("so far", {"rows": 4})
    time.sleep(600)


PLANTED = Step("fails", f"{__name__}:fails", 60), Step("hangs", f"{__name__}:hangs", 4)


def figures(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from figures(inner, key)
    elif isinstance(value, list) and FIGURES.fullmatch(name):
        yield from ((name, inner) for inner in value)
    elif FIGURES.fullmatch(name):
        yield name, value


def test_the_whole_script(cuda_builder: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                          capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KVSTREAM_CUDA_CACHE", str(cuda_builder.cache))
    written: list[int] = []
    monkeypatch.setattr(script, "write_json", lambda path, report, write=script.write_json: (
        written.append(len(report["steps"])), write(path, report)))
    asked = ["--simulated", "--size", "tiny", "--seconds", "400", "--json", str(tmp_path / "gpu.json")]
    assert main(asked, (*STEPS[:2], *PLANTED, *STEPS[2:])) == 1
    assert written == list(range(1, len(STEPS) + 3))  # after each step: nothing that is known is lost
    report = json.loads((tmp_path / "gpu.json").read_text("utf-8"))
    states = {name: step["state"] for name, step in report["steps"].items()}
    assert states == {step.name: "passed" for step in STEPS} | {"fails": "failed", "hangs": "late"}, report
    assert report["simulated"] and report["complete"] and not report["passed"]
    assert report["about"]["cores"] and list(tmp_path.iterdir()) == [tmp_path / "gpu.json"]

    steps = {name: step["parts"] for name, step in report["steps"].items()}
    assert steps["fails"] == {"so far": {"rows": 3}} and steps["hangs"] == {"so far": {"rows": 4}}
    assert "AssertionError: planted (test_gpu.py:" in report["steps"]["fails"]["error"]
    assert steps["numerics"] == {"checked": 9, "wrong": {}}
    assert steps["device"]["device"]["name"].startswith("KVStream simulated device (sm_")
    assert len(steps["contract"]["scenes"]) >= 12
    counts = steps["bitwise"]["counts"]
    assert counts["streamed_rows"] >= 1000 and counts["pages"] > 0 and counts["pairs"] == 2
    assert 0 < max(steps["bitwise"]["float64"].values()) < 1e-5
    decode = list(steps["decode"].values())
    assert [point["h2d_bytes_per_token"] > 0 for point in decode] == [point["share"] < 1 for point in decode]
    assert all(point["host_waits"] == 0 and point["tokens"] >= 3 for point in decode)
    assert steps["resident"]["bare"]["launches_per_token"] == steps["resident"]["enough"]["launches_per_token"]
    assert any(point["h2d_bytes_per_step"] for point in steps["prefill"].values())

    times = list(figures(steps))
    assert len(times) > 50 and all(value is None for _, value in times), times  # no figure where nothing was measured
    shown = capsys.readouterr().out
    assert shown.count("SIMULATED DRIVER") == 3
    for title in ("Steps", "Pinned copies", "Decode, KV only", "Decode, all resident", "Prefill, KV only"):
        assert title in shown
    assert main([*asked, "--only", "contract"]) == 0


def test_known_problems_that_fail_are_listed() -> None:
    """Attention over one type of V is wrong: those pairs are named, the others are tried all the same."""
    def wrong(memory: Memory, launch: Launch) -> None:
        KERNELS["kv_attend_64"](memory, launch)
        if int(launch.args[14]) == KVType.Q5_0.code:
            memory.floats(int(launch.args[6]), 1)[0] += 1  # its table, or state

    class Faked(Bench):
        def open(self) -> Any:
            return FakeDevice({**KERNELS, "kv_attend_64": wrong})

    told: dict[str, Any] = {}
    with pytest.raises(AssertionError, match=r"3 of 9: fake device does not compute .* V q5_0"):
        proofs.numerics(Faked(None, "tiny", 0.0, {}, simulated=True), SimpleNamespace(part=told.__setitem__))
    assert told["checked"] == 9 and {name.split()[0] for name in told["wrong"]} == {
        f"{k_type}/q5_0" for k_type in ("q8_0", "q5_1", "q5_0")}


def test_a_step_that_all_need_ends_the_run(tmp_path: Path) -> None:
    nowhere = {"driver": str(tmp_path / "none"), "site": "", "image": ""}
    said: list[str] = []
    report = run(Options(size="tiny", simulated=nowhere), STEPS, said.append)
    assert [step["state"] for step in report["steps"].values()] == ["failed", *["skipped"] * (len(STEPS) - 1)]
    assert "OSError" in report["steps"]["device"]["error"] and "device failed" in report["steps"]["decode"]["error"]


def test_the_way_of_a_real_driver(cuda_builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyCUDA finds the simulated driver by itself here, as it would a real one; that no figure is shown all the same,
    is because the device says what it is."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(cuda_builder.driver().parent))
    options = Options(str(cuda_builder.pycuda()), "tiny", image=str(cuda_builder.image("kv", False)))
    steps = [step for step in STEPS if step.name in ("device", "resident", "bitwise")]
    report = run(options, steps, lambda text: None)
    assert report["passed"] and report["simulated"], report
    assert report["steps"]["bitwise"]["parts"]["counts"]["streamed_rows"] >= 1000
    assert all(value is None for _, value in figures(report["steps"]))


def test_what_is_missing_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for wheels, said in ((None, "just gpu-wheels"), (tmp_path / "none", "no folder")):
        with pytest.raises(SystemExit, match=said):
            carried.site_for(wheels, pycuda=True)
    (tmp_path / "pycuda-2026.1-cp399-cp399-linux_x86_64.whl").touch()
    with pytest.raises(SystemExit, match=f"not filled for Python {carried.PYTHON}") as refused:
        carried.installed(tmp_path, ["numpy", "pycuda"])
    assert "PYTHON=python3.99 just gpu" in str(refused.value) and platform.machine() in str(refused.value)
    (tmp_path / f"numpy-2.4.6-{carried.TAG}-{carried.TAG}-manylinux_2_28_x86_64.whl").touch()
    with pytest.raises(SystemExit, match=r"no PyCUDA for .* not its sources"):
        carried.installed(tmp_path, ["numpy", "pycuda"])
