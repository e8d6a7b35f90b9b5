"""``just release``: everything that is handed out, in dist/release, with the sums of it.

    python build/release.py [--root ROOT] [--work FOLDER] [--into FOLDER] [--twice] [what executable.py takes]

kvstream-linux-x86_64 (executable.py), kvstream.pyz (zipapp.py), kvstream.1 (man.py), sbom.json and sbom-pyz.json
(sbom.py), licences.txt and LICENSE, SHA256SUMS. With ``--root`` the executable is built in a folder of Debian 11
(in_root.py, as root) and runs on systems of that age; what is handed out should be.

``--twice`` does all of it again, from a copy of the sources that lies elsewhere, in a work folder that lies elsewhere,
with another umask, another time zone and nothing taken from caches of pip or PyCUDA, and compares every byte. It says
what differs, down to the module. Exit code 1 if anything does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import sbom
from executable import BUILD, ROOT, environment, run
from in_root import HERE

NAME = f"kvstream-{platform.system().lower()}-{platform.machine().lower()}"
SUMS = "SHA256SUMS"
WORK = HERE / "work"


def build(work: Path, into: Path, root: Path | None, options: list[str]) -> None:
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    how = ["executable.py", "--work", work] if root is None else ["in_root.py", root]
    done = subprocess.run([sys.executable, BUILD / how[0], *how[1:], "--into", into / NAME, "--sbom", *options],
                          env=environment(), check=False)
    if done.returncode:
        sys.exit(done.returncode)
    zipapp = into / "kvstream.pyz"
    run("zipapp", [sys.executable, BUILD / "zipapp.py", zipapp])
    run("man", [sys.executable, BUILD / "man.py", into / "kvstream.1"], PYTHONPATH=str(zipapp))  # it has click
    shutil.copyfile(work / "sbom.json", into / "sbom.json")
    sbom.write(sbom.of_the_zipapp(json.loads((work / "environment.json").read_text("utf-8")), zipapp),
               into / "sbom-pyz.json")
    shutil.copyfile(work / "bundle" / "kvstream" / "_internal" / "kvstream" / "notices.txt", into / "licences.txt")
    shutil.copyfile(ROOT / "LICENSE", into / "LICENSE")
    sums(into)


def sums(folder: Path) -> None:
    """As ``sha256sum --check`` reads them."""
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(folder.iterdir())
             if path.name != SUMS]
    (folder / SUMS).write_text("".join(lines), "utf-8")


def again(work: Path, into: Path, root: Path | None, options: list[str]) -> None:
    """The second build. *Errors*: ``CalledProcessError``."""
    sources = work / "a copy of the sources"
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (sources / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, sources / name)
    outside = {name: value for name, value in os.environ.items() if name != "KVSTREAM_CUDA_CACHE"}
    program = sources / "build" / "release.py"
    if root is not None:
        shutil.rmtree(root / WORK)
        options = [*options, "--root", str(root)]
    subprocess.run([sys.executable, program, "--work", work / "work", "--into", into, *options],
                   env={**outside, "TZ": "Pacific/Kiritimati", "PIP_NO_CACHE_DIR": "1"}, umask=0o077, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Everything that is handed out.",
                                     epilog="Other options are executable.py's.")
    parser.add_argument("--work", type=Path, default=ROOT / "dist" / "work")
    parser.add_argument("--into", type=Path, default=ROOT / "dist" / "release")
    parser.add_argument("--root", type=Path, help="made by build/bullseye.sh")
    parser.add_argument("--twice", action="store_true", help="build it again elsewhere, and compare")
    given, options = parser.parse_known_args()
    into, root = given.into.resolve(), given.root.resolve() if given.root is not None else None
    work = given.work.resolve() if root is None else root / WORK
    build(work, into, root, options)
    print((into / SUMS).read_text("utf-8"), end="")
    if given.twice:
        with tempfile.TemporaryDirectory(prefix="kvstream-again-") as folder:
            again(Path(folder), Path(folder) / "release", root, options)
            inside = work / "executable-venv" / "bin" / "python"  # it can look into PyInstaller's program
            python = inside if root is None else Path(sys.executable)
            done = subprocess.run([python, BUILD / "same.py", into, Path(folder) / "release"], check=False)
            if done.returncode:
                sys.exit(done.returncode)


if __name__ == "__main__":
    main()
