"""One step of ``just gpu`` as a process: ``python -m tests.cuda.gpu.child FD``, the task on standard input.

Messages go out over FD, a line of JSON each: ["say", "", text], ["part", name, value], and at the end
["passed", "", ""] or ["failed", "", why].
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.cuda.gpu.bench import Bench


class Tell:
    """What a step has to say, while it runs."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def say(self, text: str) -> None:
        self.send("say", "", text)

    def part(self, name: str, value: Any) -> None:
        """A result that stays, whatever happens later. One of the same name replaces it."""
        self.send("part", name, value)

    def send(self, kind: str, name: str, value: Any) -> None:
        data = json.dumps([kind, name, value], allow_nan=False).encode() + b"\n"
        while data:
            data = data[os.write(self._fd, data) :]


def open_bench(task: Mapping[str, Any]) -> Bench:
    until = time.monotonic() + task["seconds"]
    named = task["simulated"]
    if named is None:
        from kvstream.cuda.device import packaged_image
        from tests.cuda.gpu.bench import RealDriver

        image = Path(task["image"]).read_bytes() if task["image"] else packaged_image()
        real = RealDriver(image)
        return Bench(real, task["size"], until, task["earlier"], real.simulated)
    from tests.cuda.driver import control
    from tests.cuda.driver.worker import check_pycuda

    sim = control.load(Path(named["driver"]))
    check_pycuda(named["site"])
    sim.reset(1, "oldest")
    sim.kernels = Path(task["image"] or named["image"]).read_bytes()
    return Bench(sim, task["size"], until, task["earlier"], simulated=True)


def main() -> None:
    faulthandler.enable()
    tell = Tell(int(sys.argv[1]))
    code = 1
    try:
        task = json.load(sys.stdin)
        bench = open_bench(task)
        module, _, name = task["function"].partition(":")
        getattr(importlib.import_module(module), name)(bench, tell)
        gc.collect()
        reports = bench.driver.reports()
        if reports:
            raise AssertionError("the simulated driver reports:\n" + "\n".join(reports))
        tell.send("passed", "", "")
        code = 0
    except BaseException as error:
        traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f" ({Path(last.filename).name}:{last.lineno})"
        tell.send("failed", "", f"{type(error).__name__}: {error}"[:2000] + where)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not through PyCUDA's teardown, which aborts when a context is still on its stack


if __name__ == "__main__":
    main()
