"""``just gpu-wheels DIR``: what ``just gpu`` needs on a machine that has a GPU and neither PyCUDA nor a network.

    python build/gpu_wheels.py DIR [--python PATH ...] [--for 3.12 ...]

PyCUDA is compiled for the Python that runs this, and for each ``--python``. For a version that is not on this machine,
``--for`` fetches everything but PyCUDA, whose sources are always there: the other machine compiles them if it has g++,
Python's headers and CUDA's. Wheels are for this machine's processor, and PyCUDA's also for its glibc or a newer one.
Run it once more for another version: what is there stays.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("numpy", "attrs", "rich", "pytest", "pytools", "mako", "platformdirs", "pip", "setuptools", "wheel")
GLIBC = ("2_34", "2_28", "2_27", "2_26", "2_24", "2_17", "2_12", "2_5")
"""Tags of wheels that run on a system of the last years: pip goes by the exact names."""


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *map(str, arguments)]
    if subprocess.run(command, stdin=subprocess.DEVNULL).returncode:
        sys.exit(f"failed: {' '.join(command)}")


def fetch(folder: Path, version: str) -> None:
    platforms = [f"manylinux_{tag}_{platform.machine()}" for tag in GLIBC] + [f"manylinux2014_{platform.machine()}"]
    pip("download", "--dest", folder, "--only-binary", ":all:", "--python-version", version, "--implementation", "cp",
        *(f"--platform={name}" for name in platforms), *PACKAGES)


def fill(folder: Path) -> None:
    """For the Python that runs this."""
    from tests.cuda.driver.build import PYCUDA, Builder

    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    fetch(folder, platform.python_version())
    if not list(folder.glob(f"pycuda-{PYCUDA}.tar.gz")):
        pip("download", "--dest", folder, "--no-deps", "--no-binary", "pycuda", f"pycuda=={PYCUDA}")
    if not list(folder.glob(f"pycuda-{PYCUDA}-{tag}-*.whl")):
        print(f"compiling PyCUDA for {tag}", flush=True)
        with tempfile.TemporaryDirectory() as work:
            shutil.copy2(Builder(Path(work) / "cache").pycuda_wheel(Path(work)), folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", action="append", default=[], help="another Python of this machine")
    parser.add_argument("--for", dest="versions", action="append", default=[], help="another version, as 3.12")
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    given.folder.mkdir(parents=True, exist_ok=True)
    fill(given.folder)
    for version in given.versions:
        fetch(given.folder, version)
    for other in given.python:
        subprocess.run([other, __file__, given.folder], check=True)
    files = sorted(given.folder.iterdir())
    size = sum(file.stat().st_size for file in files) / 2**20
    print(f"{given.folder}: {len(files)} files, {size:.0f} MiB. There: just gpu --wheels {given.folder.name}")


if __name__ == "__main__":
    main()
