"""``just zipapp``: KVStream and its Python packages as one file for a Python that is there already.

    python build/zipapp.py [FILE] [--stage FOLDER]

dist/kvstream.pyz runs on any Python from 3.11 on. Nothing that was compiled for one system or one Python is in it: the
packages come from build/zipapp.lock, tomli from its source, and every extension module is left out, which all of these
can do without. What cannot be in it (llama.cpp, numpy, PyCUDA) is used where the Python that runs the file has it.

Beside each source lies its bytecode for the Python that built the file. A zip file has no times that could be compared,
so that bytecode is not checked against the source; other versions of Python compile the sources at each start.
``__main__`` looks at the version before it imports anything, in words that an old Python can read.
"""

from __future__ import annotations

import argparse
import compileall
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from notices import head

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "build" / "zipapp.lock"
EPOCH = (2026, 1, 1, 0, 0, 0)
# Nobody imports these: the command lines and test suites of packages, what only editors read, records of pip.
DROPPED = ("bin", "**/*.so", "**/*.pyd", "**/*.pyi", "**/py.typed", "**/tests", "**/_tests", "**/__pycache__",
           "**/RECORD", "**/INSTALLER", "**/REQUESTED", "**/direct_url.json", "kvstream/**/DESIGN.md",
           "kvstream/cuda/kernels/*.cu*", "kvstream/cuda/kernels/README.md")

MAIN = '''\
# Read by any Python, also by one that cannot run the rest.
import sys

if sys.version_info < (3, 11):
    sys.stderr.write("kvstream: this file needs Python 3.11 or newer, and %s is %d.%d; the one-file executable needs "
                     "no Python\\n" % (sys.executable or "this one", sys.version_info[0], sys.version_info[1]))
    sys.exit(2)

from kvstream.cli import main

main(prog_name="kvstream")
'''


def stage(folder: Path) -> None:
    """The packages, ours among them, in a folder as it will be in the file."""
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet",
                    "--no-compile", "--no-deps", "--require-hashes", "--no-binary", "tomli", "--target", folder,
                    "--requirement", LOCK], check=True)
    shutil.copytree(ROOT / "kvstream", folder / "kvstream", ignore=shutil.ignore_patterns("__pycache__"))


def clear(folder: Path) -> None:
    for pattern in DROPPED:
        for path in sorted(folder.glob(pattern), reverse=True):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def notices(folder: Path) -> None:
    """Writes the licences that ``kvstream licenses`` shows, from the staged packages."""
    code = ("import sys; sys.path.insert(0, sys.argv[1])\n"
            "from importlib.metadata import distributions\n"
            "from kvstream.licenses import notices\n"
            "names = sorted({found.metadata['Name'] for found in distributions(path=[sys.argv[1]])}, key=str.lower)\n"
            "print('\\n'.join(notice.whole() for notice in notices(names)))\n")
    done = subprocess.run([sys.executable, "-S", "-c", code, folder], capture_output=True, text=True, check=True,
                          env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"})
    (folder / "kvstream" / "notices.txt").write_text(f"{head()}\n{done.stdout}", "utf-8")


def compile_all(folder: Path) -> None:
    """Bytecode beside each source, unchecked, with names that do not say where it was built."""
    good = compileall.compile_dir(folder, quiet=1, legacy=True, stripdir=str(folder), workers=1,
                                  invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    if not good:
        sys.exit("a package cannot be compiled")


def write(folder: Path, file: Path) -> None:
    """The same folder gives the same bytes. Folders have entries of their own: by these zipimport knows a package
    that has no ``__init__`` (flask.sansio)."""
    with file.open("wb") as opened:
        opened.write(b"#!/usr/bin/env python3\n")
        with zipfile.ZipFile(opened, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for path in sorted(folder.rglob("*")):
                name = path.relative_to(folder).as_posix()
                about = zipfile.ZipInfo(f"{name}/" if path.is_dir() else name, EPOCH)
                about.external_attr = (0o755 if path.is_dir() else 0o644) << 16
                about.compress_type = zipfile.ZIP_STORED if path.is_dir() else zipfile.ZIP_DEFLATED
                archive.writestr(about, b"" if path.is_dir() else path.read_bytes())
    file.chmod(0o755)


def main() -> None:
    parser = argparse.ArgumentParser(description="KVStream as one file for a Python that is there already.")
    parser.add_argument("file", type=Path, nargs="?", default=ROOT / "dist" / "kvstream.pyz")
    parser.add_argument("--stage", type=Path, help="a folder with the packages, instead of installing them")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvstream-zipapp-") as work:
        folder = Path(work) / "stage"
        if given.stage is None:
            stage(folder)
        else:
            shutil.copytree(given.stage, folder)
        notices(folder)  # by the records that are dropped next
        clear(folder)
        (folder / "__main__.py").write_text(MAIN, "utf-8")
        compile_all(folder)
        given.file.parent.mkdir(parents=True, exist_ok=True)
        write(folder, given.file)
    print(f"{given.file}: {given.file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
