"""``just bin-old ROOT``: the executable for older systems, built in a Debian 11 folder that build/bullseye.sh has made.

    python build/in_root.py ROOT [--into FILE] [--without-cuda] [--sbom]

Packages are fetched here, by this machine's pip and by the hashes of executable.lock and compiled.lock. Then
build/executable.py does its work inside, with these sources mounted read-only, a network of its own with nothing in it,
and paths that are the same for whoever builds: two builds from one ROOT are the same bytes. As root. Everything mounted
is gone when it ends, however that happens.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
from pathlib import Path

BUILD = Path(__file__).resolve().parent
PROJECT = BUILD.parent
GLIBC = "2.31"
HERE = Path("srv")  # below ROOT: the sources, packages, what is being made
# pip goes by the exact names. The newest is what Debian 11 can run.
TAGS = ("2_31", "2_28", "2_27", "2_26", "2_24", "2_17", "2_12", "2_5", "2014", "2010", "1")

# $1: the root; $2: the sources; then what to run.
MOUNTED = """
root=$1 sources=$2; shift 2
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/tmp"
mount --bind "$sources" "$root/srv/kvstream"
mount -o remount,ro,bind "$root/srv/kvstream"
exec chroot "$root" env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
    PIP_NO_INDEX=1 PIP_FIND_LINKS=/srv/packages PIP_ROOT_USER_ACTION=ignore "$@"
"""


def pip(*words: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", *map(str, words)]
    if subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode:
        sys.exit(f"failed: {' '.join(command)}")


def fetch(folder: Path, with_cuda: bool, with_sbom: bool) -> None:
    """Wheels for the Python inside; for PyCUDA its source, what builds it, and CUDA's headers."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tags = [f"manylinux{'_' * ('_' in tag)}{tag}_{platform.machine()}" for tag in TAGS]
    common = ("download", "--no-deps", "--require-hashes", "--dest", folder, "--requirement")
    for lock in ("executable", *(["release"] if with_sbom else [])):
        pip(*common, BUILD / f"{lock}.lock", "--only-binary", ":all:", "--implementation", "cp", "--python-version",
            "3.11", *(f"--platform={tag}" for tag in tags))
    if with_cuda:
        pip(*common, BUILD / "compiled.lock", "--no-binary", "pycuda")


def inside(root: Path, *command: str) -> int:
    apart = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child"]
    return subprocess.run([*apart, "sh", "-euc", MOUNTED, "sh", root, PROJECT, *command], stdin=subprocess.DEVNULL,
                          check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description="The executable for older systems.")
    parser.add_argument("root", type=Path, help="made by build/bullseye.sh")
    parser.add_argument("--into", type=Path, default=PROJECT / "dist" / "kvstream")
    parser.add_argument("--without-cuda", action="store_true", help="leave PyCUDA out")
    parser.add_argument("--sbom", action="store_true", help="also write ROOT/srv/work/sbom.json")
    given = parser.parse_args()
    root = given.root.resolve()
    if not (root / "usr" / "local" / "bin" / "python3.11").exists():
        sys.exit(f"{root} has no Python 3.11: build/bullseye.sh {root}")
    for name in ("kvstream", "work"):
        (root / HERE / name).mkdir(parents=True, exist_ok=True)
    fetch(root / HERE / "packages", not given.without_cuda, given.sbom)
    made = root / HERE / "work" / "kvstream"
    made.unlink(missing_ok=True)
    code = inside(root, "python3.11", "/srv/kvstream/build/executable.py", "--work", "/srv/work", "--into",
                  "/srv/work/kvstream", "--glibc", GLIBC, *(["--without-cuda"] if given.without_cuda else []),
                  *(["--sbom"] if given.sbom else []))
    if code:
        sys.exit(code)
    given.into.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(made, given.into)
    print(given.into)


if __name__ == "__main__":
    main()
