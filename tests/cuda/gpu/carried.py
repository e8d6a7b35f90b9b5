"""What ``just gpu`` imports, on a machine that may have none of it and no network: from a folder of wheels.

``just gpu-wheels DIR`` (build/gpu_wheels.py) fills such a folder where there is a network. PyCUDA has no wheels of its
own: the folder has one for each Python that filled it, and the sources, from which it is compiled here where there are
a C++ compiler and CUDA's headers. What is installed goes into a folder of its own under the temporary one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

NEEDED = {"numpy": "numpy", "attr": "attrs", "rich": "rich", "pytest": "pytest"}
"""Modules, and the packages they are of."""
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"


def site_for(wheels: Path | None, pycuda: bool) -> str | None:
    """A folder for the children's path, or None: everything is here. Ends the program, with what to do, where something
    is missing and cannot be had."""
    packages = NEEDED | ({"pycuda": "pycuda"} if pycuda else {})
    missing = [package for module, package in packages.items() if importlib.util.find_spec(module) is None]
    if not missing:
        return None
    if wheels is None:
        sys.exit(f"Python {PYTHON} at {sys.executable} lacks {', '.join(missing)}.\nWith a network: "
                 f"{sys.executable} -m pip install {' '.join(missing)} (PyCUDA takes the CUDA toolkit and g++).\n"
                 f"Without: fill a folder elsewhere, by `just gpu-wheels wheels --for {PYTHON}`, bring it here, and "
                 "run `just gpu --wheels wheels`.")
    if not wheels.is_dir():
        sys.exit(f"there is no folder {wheels}")
    return str(installed(wheels.resolve(), missing))


def installed(wheels: Path, missing: list[str]) -> Path:
    names = sorted(path.name for path in wheels.iterdir())
    digest = hashlib.sha256(repr((names, sys.version, missing)).encode()).hexdigest()[:16]
    site = Path(tempfile.gettempdir()) / f"kvstream-gpu-{os.getuid()}-{digest}"
    if (site / "complete").exists():
        return site
    print(f"installing {', '.join(missing)} from {wheels}", flush=True)
    if not any(name.startswith("numpy-") and f"-{TAG}-" in name for name in names) and "numpy" in missing:
        sys.exit(f"{wheels} was not filled for Python {PYTHON}, which this is. {_remedies(names)}")
    found = [wheels]
    with tempfile.TemporaryDirectory() as made:
        if "pycuda" in missing and not any(name.startswith("pycuda-") and f"-{TAG}-" in name for name in names):
            found.append(_compiled(wheels, names, Path(made)))
        command = [*_pip(wheels), "install", "--quiet", "--no-index", "--no-compile", "--disable-pip-version-check",
                   "--upgrade", "--target", str(site)]
        for folder in found:
            command += ["--find-links", str(folder)]
        done = subprocess.run([*command, "--only-binary", ":all:", *missing], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"pip could not install from {wheels}:\n{done.stdout}{done.stderr}\n{_remedies(names)}")
    (site / "complete").touch()
    return site


def _pip(wheels: Path) -> list[str]:
    """A wheel of pip runs as it is, so that this machine needs none."""
    carried = sorted(wheels.glob("pip-*.whl"))
    return [sys.executable, str(carried[-1] / "pip")] if carried else [sys.executable, "-m", "pip"]


def _compiled(wheels: Path, names: list[str], work: Path) -> Path:
    """PyCUDA from its sources: a folder with the wheel."""
    from tests.cuda.driver.build import Builder, BuildFailed, NothingToBuildWith, cuda_root

    if not any(name.startswith("pycuda-") and name.endswith(".tar.gz") for name in names):
        sys.exit(f"{wheels} has no PyCUDA for Python {PYTHON}, and not its sources. {_remedies(names)}")
    if cuda_root() is None:  # or the builder would look for headers in the network
        sys.exit(f"{wheels} has no PyCUDA for Python {PYTHON}, and here are no CUDA headers to compile it with "
                 f"(include/cuda.h; KVSTREAM_CUDA_ROOT names their folder). {_remedies(names)}")
    print(f"compiling PyCUDA for Python {PYTHON}; that takes a minute or two", flush=True)
    try:
        return Builder(work / "cache").pycuda_wheel(
            work, "--no-index", "--find-links", wheels, "--disable-pip-version-check", pip=_pip(wheels)).parent
    except (BuildFailed, NothingToBuildWith) as error:
        sys.exit(f"PyCUDA could not be compiled here: {error}\n{_remedies(names)}")


def _remedies(names: list[str]) -> str:
    tags = sorted({part[2:] for name in names if name.startswith("pycuda-") for part in name.split("-")[2:3]
                   if part.startswith("cp3")}, key=len)
    others = ", ".join(f"python{tag[0]}.{tag[1:]}" for tag in tags)
    return ("One of: run it with a Python for which the folder has PyCUDA"
            + (f" ({others}): `PYTHON={others.split(',')[0]} just gpu ...`" if others else "")
            + f"; fill the folder with a Python {PYTHON} on a machine ({platform.machine()}, glibc "
              f"{platform.libc_ver()[1] or '?'} or older) with a network: `just gpu-wheels DIR --python "
              f"python{PYTHON}`; or by `just gpu-wheels DIR --for {PYTHON}`, with g++, Python's headers and CUDA's "
              "headers here, to compile PyCUDA from the sources that it has.")
