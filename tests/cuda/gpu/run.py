"""``just gpu``: everything that is to be seen on a GPU, in one run of less than eight minutes.

    python tests/cuda/gpu/run.py [--wheels DIR] [--json FILE] [--only device,decode] [--build] [--seconds 460]

For a machine with a GPU, a driver that knows CUDA 13 (580 or newer: the image is built with that) and Python 3.11 or
newer, and nothing else: what it lacks of PyCUDA, numpy, attrs, rich and pytest comes from ``--wheels``, a folder that
``just gpu-wheels DIR`` made elsewhere. Each step is a process of its own with a bounded time, so a kernel that faults,
or a step that hangs, costs that step and no other. What is known is written to the JSON file after each step. The exit
code is 0 when every step passed.

``--simulated`` runs the same on the simulated driver (tests/cuda/driver), to test this script: no figure of such a run
means anything, and none is shown.

This file needs nothing but the standard library until the table is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[3]
PASSED, FAILED, LATE, SKIPPED = "passed", "failed", "late", "skipped"
SECONDS = 460.0


class Step(NamedTuple):
    """``function``: module and name of what is called as ``function(bench, tell)``. ``limit_s``: then it is killed. A
    step that is ``needed`` ends the run when it fails: nothing after it could do better."""

    name: str
    function: str
    limit_s: float
    needed: bool = False


STEPS = (
    Step("device", "tests.cuda.gpu.proofs:device", 60, needed=True),
    Step("numerics", "tests.cuda.gpu.proofs:numerics", 60),
    Step("contract", "tests.cuda.gpu.proofs:contract", 60),
    Step("bandwidth", "tests.cuda.gpu.speeds:bandwidth", 40),
    Step("decode", "tests.cuda.gpu.speeds:decode", 150),
    Step("resident", "tests.cuda.gpu.speeds:resident", 40),
    Step("prefill", "tests.cuda.gpu.speeds:prefill", 90),
    Step("bitwise", "tests.cuda.gpu.proofs:bitwise", 320),  # takes what time there is, so it is the last
)


class Options(NamedTuple):
    """``simulated``: paths of the simulated driver, of a folder with PyCUDA and of the kernels' image for it."""

    site: str | None = None
    size: str = "full"
    seconds: float = SECONDS
    json: Path | None = None
    image: str | None = None
    simulated: Mapping[str, str] | None = None


def run(options: Options, steps: Sequence[Step] = STEPS, say: Callable[[str], None] = print) -> dict[str, Any]:
    """All steps, one after the other. What came out, which is also in ``options.json``."""
    begun = time.monotonic()
    report: dict[str, Any] = {"simulated": options.simulated is not None, "size": options.size, "about": about(),
                              "steps": {}}
    if options.simulated is not None:
        say("SIMULATED DRIVER: this tests the script. No time in it is a measurement, and none is shown.")
    dead = ""
    for step in steps:
        left = options.seconds - (time.monotonic() - begun)
        if dead or left < 1:
            why = dead or "no time was left"
            result: dict[str, Any] = {"state": SKIPPED, "seconds": 0.0, "error": why, "parts": {}}
        else:
            say(f"[{time.monotonic() - begun:5.0f} s] {step.name}")
            result = carry_out(step, options, min(step.limit_s, left), report["steps"], say)
        report["steps"][step.name] = result
        # Whichever driver was asked for: what the device itself says counts.
        report["simulated"] |= result["parts"].get("device", {}).get("simulated", False)
        if result["state"] != PASSED:
            say(f"  {step.name} {result['state']}: {result['error']}")
            if step.needed and not dead:
                dead = f"{step.name} {result['state']}"
        report["passed"] = all(one["state"] == PASSED for one in report["steps"].values())
        report["complete"] = len(report["steps"]) == len(steps)
        report["seconds"] = time.monotonic() - begun
        if options.json is not None:
            write_json(options.json, report)
    return report


def carry_out(step: Step, options: Options, limit_s: float, earlier: Mapping[str, Any],
              say: Callable[[str], None]) -> dict[str, Any]:
    """One step in a child process. Its parts are kept as they come, whatever happens to it later."""
    task = {"function": step.function, "size": options.size, "image": options.image, "seconds": limit_s * 0.85,
            "simulated": options.simulated, "earlier": {name: one["parts"] for name, one in earlier.items()}}
    result: dict[str, Any] = {"state": FAILED, "seconds": 0.0, "error": "", "parts": {}}
    begun = time.monotonic()
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile("w+") as told:
        json.dump(task, told)
        told.seek(0)
        reading, writing = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.cuda.gpu.child", str(writing)], cwd=ROOT, stdin=told, stdout=errors,
            stderr=errors, pass_fds=[writing], env=environment(options.site), start_new_session=True)
        os.close(writing)
        try:
            ended = _listen(reading, begun + limit_s, result, say)
        finally:
            os.close(reading)
            if process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5 if result["state"] == PASSED else 0.2)
            with contextlib.suppress(ProcessLookupError):  # whatever it has started is of its own session
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        result["seconds"] = time.monotonic() - begun
        if not ended:
            result["state"], result["error"] = LATE, f"not done within {limit_s:.0f} s"
        elif result["state"] == FAILED and not result["error"]:
            errors.seek(0)
            words = errors.read().decode(errors="replace")[-3000:]
            result["error"] = f"the process ended with {process.returncode}; it had written:\n{words}"
    return result


def _listen(reading: int, until: float, result: dict[str, Any], say: Callable[[str], None]) -> bool:
    """Messages of the child, until it has no more. False: it did not end in time."""
    buffer = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reading, selectors.EVENT_READ)
        while (left := until - time.monotonic()) > 0:
            if not selector.select(left):
                continue
            data = os.read(reading, 65536)
            if not data:
                return True
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                kind, name, value = json.loads(line)
                if kind == "say":
                    say(f"  {value}")
                elif kind == "part":
                    result["parts"][name] = value
                else:  # "passed" or "failed"
                    result["state"], result["error"] = kind, value
    return False


def environment(site: str | None) -> dict[str, str]:
    paths = [str(ROOT), *([site] if site else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", "utf-8")
    unfinished.replace(path)


def about() -> dict[str, Any]:
    """Where this ran, apart from what the device itself says."""
    wanted = "name,driver_version,pcie.link.gen.max,pcie.link.width.max,memory.total,mig.mode.current"
    return {
        "commit": _said("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "changed": bool(_said("git", "-C", str(ROOT), "status", "--porcelain")),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "python": platform.python_version(),
        "system": platform.platform(), "cores": os.cpu_count(), "command": sys.argv[1:],
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "nvidia_smi": _said("nvidia-smi", f"--query-gpu={wanted}", "--format=csv,noheader")}


def _said(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def simulated() -> dict[str, str]:
    """Builds the simulated driver, and what else its children need."""
    from tests.cuda.driver.build import Builder

    cache = os.environ.get("KVSTREAM_CUDA_CACHE") or f"{tempfile.gettempdir()}/kvstream-cuda-{os.getuid()}"
    builder = Builder(Path(cache))
    return {"driver": str(builder.driver()), "site": str(builder.pycuda()), "image": str(builder.image("kv", False))}


def main(arguments: Sequence[str] | None = None, steps: Sequence[Step] = STEPS) -> int:
    """The exit code."""
    if sys.version_info < (3, 11):  # noqa: UP036 - whoever starts this may have any
        sys.exit(f"KVStream needs Python 3.11 or newer, this is {platform.python_version()}: run it with another, "
                 "as in `PYTHON=python3.12 just gpu`")
    sys.path.insert(0, str(ROOT))
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--wheels", type=Path, help="a folder that `just gpu-wheels` made")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    parser.add_argument("--only", help=f"of {','.join(step.name for step in steps)}")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--build", action="store_true", help="compile the kernels first, if nvcc is here")
    parser.add_argument("--simulated", action="store_true", help="on the simulated driver, to test this script")
    given = parser.parse_args(arguments)
    if given.build and shutil.which("nvcc"):
        subprocess.run([sys.executable, str(ROOT / "build" / "kernels.py")], check=True)
    from tests.cuda.gpu.carried import site_for

    begun = time.monotonic()
    site = site_for(given.wheels, pycuda=not given.simulated)
    if time.monotonic() - begun > given.seconds / 4:
        print("installing took a good part of the time; what was installed is kept, so run it again for all of it")
    names = given.only.split(",") if given.only else [step.name for step in steps]
    unknown = set(names) - {step.name for step in steps}
    if unknown:
        parser.error(f"there is no step {', '.join(sorted(unknown))}")
    options = Options(site, given.size, given.seconds - (time.monotonic() - begun), given.json.resolve(),
                      simulated=simulated() if given.simulated else None)
    report = run(options, [step for step in steps if step.name in names], lambda text: print(text, flush=True))
    if site:
        sys.path.insert(1, site)
    from tests.cuda.gpu.table import show

    show(report)
    print(f"everything is in {options.json}")
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
