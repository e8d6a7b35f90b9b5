"""``just bin``: dist/kvstream, one file with everything in it.

    python build/executable.py [--work FOLDER] [--into FILE] [--without-cuda] [--glibc 2.35] [--sbom]

In order: an environment from build/executable.lock, in WORK (dist/work) and kept there until the lock changes; PyCUDA
from its source; PyInstaller's folder (kvstream.spec); the licences of what is in it; symbols stripped, each library
loaded; the glibc it needs compared with what is promised; the launcher compiled; both packed. The last line says what
came of it. DESIGN.md tells why.

Needs a shared Python 3.11 (Debian's, or pyenv with --enable-shared), gcc and g++, binutils, libzstd-dev, and a CUDA
toolkit's headers or pip to fetch them. Two builds of the same sources on the same system are the same bytes, wherever
checkout and WORK lie (`just release --twice` proves it).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import floor

BUILD = Path(__file__).resolve().parent
ROOT = BUILD.parent
GLIBC = "2.36"  # Debian 12; a release is built where 2.31 is enough (DESIGN.md)
# No time and no chance: PyInstaller writes the one into archives, and sets of names come out in an order by the other.
# Modules are not compressed twice: the file becomes smaller (38.1 to 34.9 MB), and starts take less time.
FIXED = {"SOURCE_DATE_EPOCH": "1767225600", "PYTHONHASHSEED": "1", "LC_ALL": "C.UTF-8", "TZ": "UTC",
         "PYINSTALLER_ZLIB_COMPRESSION_LEVEL": "0"}


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, **FIXED, **more}


def run(title: str, command: list[str | Path], **more: str) -> None:
    began = time.monotonic()
    print(f"{title} ...", flush=True)
    done = subprocess.run(command, env=environment(**more), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace", check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{title}: ended with {done.returncode}")
    last = (done.stdout.strip().splitlines() or [""])[-1]
    print(f"  {time.monotonic() - began:.0f} s. {last}", flush=True)


def environment_python(work: Path, name: str = "executable") -> Path:
    """The Python of an environment with what NAME.lock lists, made anew when that or this Python is another."""
    lock = BUILD / f"{name}.lock"
    folder, stamp = work / f"{name}-venv", work / f"{name}-venv.stamp"
    facts = hashlib.sha256(lock.read_bytes() + sys.version.encode() + sys.prefix.encode()).hexdigest()
    python = folder / "Scripts" / "python.exe" if sys.platform == "win32" else folder / "bin" / "python"
    if not stamp.is_file() or stamp.read_text("utf-8") != facts:
        shutil.rmtree(folder, ignore_errors=True)
        run("environment", [sys.executable, "-m", "venv", folder])
        run("packages", [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet",
                         "--no-deps", "--require-hashes", "--only-binary", ":all:", "--requirement", lock])
        stamp.write_text(facts, "utf-8")
    return python


def pycuda(python: Path, cache: Path, *, plain: bool = True) -> str:
    """The folder with PyCUDA, compiled once per version of everything it is compiled against. What is not
    ``plain`` is for tests: it is compiled faster, to other bytes."""
    code = ("import sys; from pathlib import Path; from tests.cuda.driver.build import Builder;"
            f"print(Builder(Path(sys.argv[1]), plain={plain}).pycuda())")
    done = subprocess.run([python, "-c", code, cache], env=environment(PYTHONPATH=str(ROOT)), text=True,
                          capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stderr}\nPyCUDA cannot be built here; --without-cuda leaves it out")
    return done.stdout.strip().splitlines()[-1]


def bundle(python: Path, work: Path, cuda: str) -> Path:
    """PyInstaller's folder, ready to be packed."""
    folder = work / "bundle" / "kvstream"
    run("bundle", [python, "-m", "PyInstaller", "--noconfirm", "--clean", "--log-level", "WARN", "--workpath",
                   work / "pyinstaller", "--distpath", folder.parent, BUILD / "kvstream.spec"], KVSTREAM_PYCUDA=cuda)
    kept = folder / "_internal" / "kvstream"
    run("licences", [python, BUILD / "notices.py", folder, kept / "notices.txt"], PYTHONPATH=cuda)
    if sys.platform == "linux":
        run("strip", [python, BUILD / "strip_list.py", folder])
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description="One file with everything in it.")
    parser.add_argument("--work", type=Path, default=ROOT / "dist" / "work")
    parser.add_argument("--into", type=Path, default=ROOT / "dist" / "kvstream")
    parser.add_argument("--glibc", default=GLIBC, help="the version that the file may need at most")
    parser.add_argument("--without-cuda", action="store_true", help="leave PyCUDA out")
    parser.add_argument("--sbom", action="store_true", help="also write WORK/sbom.json (CycloneDX)")
    given = parser.parse_args()
    work, into = given.work.resolve(), given.into.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if not (ROOT / "kvstream" / "cuda" / "kernels" / "kv.fatbin").is_file() and not given.without_cuda:
        sys.exit("kvstream/cuda/kernels/kv.fatbin is missing: `just kernels` builds it")
    python = environment_python(work)
    cuda = "" if given.without_cuda else pycuda(python, Path(os.environ.get("KVSTREAM_CUDA_CACHE", work / "cuda")))
    folder = bundle(python, work, cuda)
    if given.sbom:
        cyclonedx = environment_python(work, "release").with_name("cyclonedx-py")
        run("sbom", [python, BUILD / "sbom.py", cyclonedx, folder, work], PYTHONPATH=cuda)
    run("glibc", [python, BUILD / "floor.py", folder, "--glibc", given.glibc])
    run("launcher", [python, BUILD / "launcher" / "compile.py", work / "launcher"])
    needed = floor.highest(floor.by_program(folder))
    run("pack", [python, BUILD / "pack.py", folder, work / "launcher", into, "--glibc", needed])
    print(f"{into}: {into.stat().st_size / 1e6:.1f} MB, sha256 {hashlib.sha256(into.read_bytes()).hexdigest()}")


if __name__ == "__main__":
    main()
