"""``kvstream bench kv`` with PyCUDA on the simulated driver: scenes for ``test_bench_kv``."""

from __future__ import annotations

import json
from contextlib import chdir
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from kvstream import cli
from kvstream.bench import kv, kvplot
from kvstream.bench.kvgpu import Machine
from kvstream.bench.kvpoint import Setup
from kvstream.cuda.device import Device, PyCudaDevice

TINY = {"name": "tiny", "layers": 2, "kv_heads": 2, "q_heads": 2, "head_size": 64, "weights_mib": 1}
ARGUMENTS = ("--model-geometry=tiny.json", "--page-tokens=32", "--ubatch-size=33", "--decode-tokens=8",
             "--cache-type-k=f32", "--cache-type-v=f32", "--pool-step-mib=1", "--margin-mib=0", "--output=out")


def bench_kv(sim: Any, folder: str, *arguments: str, settings: dict[str, int]) -> tuple[int, str, list[bool]]:
    """As it is typed in ``folder``, with the simulated driver's image instead of the packaged one and without pictures:
    exit code, output, and of every device that was opened whether it is closed."""
    opened: list[PyCudaDevice] = []

    def open_gpu(setup: Setup) -> Device:
        opened.append(PyCudaDevice(sim.kernels, allow_managed="managed" in setup.baselines))
        return opened[-1]

    for name, value in settings.items():
        sim.set(name, value)
    Path(folder, "tiny.json").write_text(json.dumps(TINY), "utf-8")
    before: Any = kv.Machine, kvplot.write_pictures
    kv.Machine, kvplot.write_pictures = (lambda: Machine(open_gpu)), lambda *_, **__: None  # type: ignore[assignment, misc]
    try:
        with chdir(folder):
            done = CliRunner().invoke(cli.main, ["bench", "kv", *ARGUMENTS, *arguments])
    finally:
        kv.Machine, kvplot.write_pictures = before  # type: ignore[misc]
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert sim.get("pageable_copies") == 0 and sim.get("streams_destroyed_with_work") == 0
    return done.exit_code, done.output, [device._closed for device in opened]
