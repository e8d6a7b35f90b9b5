"""A child process that has the simulated driver and PyCUDA, and runs the scenes it is sent.

``python -m tests.cuda.driver.worker FD DRIVER SITE``: pickled requests come in over FD, answers go back. A scene is a
function of any importable module, called as ``scene(sim, *args, **kwargs)``.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.cuda.driver import control


def check_pycuda(site: str) -> None:
    sys.path.append(site)
    import pycuda.driver as cuda

    if Path(site) not in Path(cuda.__file__).parents:
        raise RuntimeError(f"another pycuda is in the way: {cuda.__file__}")
    cuda.init()
    name = cuda.Device(0).name()
    if name != "KVStream simulated device":
        raise RuntimeError(f"pycuda sees {name!r}, not the simulated driver")


def play(sim: control.Sim, request: dict[str, Any]) -> Any:
    sim.reset(request["seed"], request["policy"])
    image = request["image"]
    sim.kernels = Path(image).read_bytes() if image else None
    sim.checked = request["checked"]
    scene: Any = importlib.import_module(request["module"])
    for name in request["name"].split("."):
        scene = getattr(scene, name)
    result = scene(sim, *request["args"], **request["kwargs"])
    gc.collect()
    reports = sim.reports()
    if reports:
        raise control.Reported("the simulated driver reports:\n  " + "\n  ".join(reports))
    if sim.get("contexts"):
        raise control.Reported("a context was left behind; pop and detach it in a finally")
    return result


def main() -> None:
    faulthandler.enable()
    fd, driver, site = sys.argv[1:]
    connection = Connection(int(fd))
    try:
        sim = control.load(Path(driver))
        check_pycuda(site)
    except BaseException:
        connection.send(("broken", traceback.format_exc()))
        return
    connection.send(("ready", None))
    while True:
        try:
            request = connection.recv()
        except EOFError:
            break
        faulthandler.dump_traceback_later(request["timeout_s"] / 2)  # before the parent loses patience
        try:
            answer = ("result", play(sim, request))
        except BaseException:
            # PyCUDA's own stack of contexts may still hold one: nothing after a failure can be trusted in here.
            seen = "".join(f"\nreported: {line}" for line in sim.reports())
            connection.send(("error", traceback.format_exc() + seen))
            break
        finally:
            faulthandler.cancel_dump_traceback_later()
        connection.send(answer)
    sys.stderr.flush()
    os._exit(0)  # not through PyCUDA's teardown, which aborts when a context is still on its stack


if __name__ == "__main__":
    main()
