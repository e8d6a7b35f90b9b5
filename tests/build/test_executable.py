"""The executable, built as ``just bin`` builds it and then tried: does it start, serve, end, and say what it cannot.

What ``just bin`` does besides is left out for its time: the smallest compression, and the glibc, which is that of this
machine. ``just smoke`` and ``just show-roots`` try more.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.build.recipes import BUILD, recipe
from tests.cuda.driver.pool import cache_folder

TRIED = ("first_start", "parts", "streamed", "terminated", "killed", "odd_places", "truncated")
HANG_S = 600.0  # against hanging only


def missing() -> str:
    if sys.platform != "linux":
        return "the launcher is for Linux"
    if not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        return "PyInstaller needs a Python with a shared library"
    programs = [name for name in ("gcc", "g++", "strip", "objdump", "dpkg") if shutil.which(name) is None]
    return f"{', '.join(programs)}: not installed" if programs else ""


def launcher(into: Path) -> bool:
    """Compiled; whether it takes uncompressed archives only, as zstd's static library is not installed."""
    compiler = recipe("launcher/compile")
    try:
        compiler.compiled(into)
    except compiler.NoCompiler:
        compiler.compiled(into, plain=True)
        return True
    return False


def no_libcuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return False


@pytest.mark.slow
def test_the_executable_is_built_and_works(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if why := missing():
        assert not os.environ.get("CI"), why  # a proof that silently does not run is a failure there
        pytest.skip(why)
    executable = recipe("executable")
    python = executable.environment_python(tmp_path)
    folder = executable.bundle(python, tmp_path, executable.pycuda(python, cache_folder(request.config), plain=False))
    plain = launcher(tmp_path / "launcher")
    recipe("pack").pack(folder, tmp_path / "launcher", tmp_path / "kvstream", plain, level=1)
    options = ["--only", ",".join(TRIED), *(["--libcuda-absent"] if no_libcuda() else [])]
    done = subprocess.run([sys.executable, BUILD / "smoke.py", tmp_path / "kvstream", *options], capture_output=True,
                          text=True, timeout=HANG_S)
    shutil.rmtree(tmp_path)  # half a gigabyte
    fine = [line for line in done.stdout.splitlines() if line.startswith(("ok ", "- "))]
    assert done.returncode == 0 and len(fine) == len(TRIED), done.stdout + done.stderr
