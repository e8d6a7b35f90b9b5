"""For Windows and macOS: PyInstaller's folder in a zip, which is unpacked wherever its owner likes.

    python build/onedir.py FILE.zip [--work FOLDER]

There is no launcher for these systems: scanners for viruses distrust programs that unpack programs, and macOS checks a
folder sooner than a file that writes one. PyCUDA stays out. Nothing of this has been run on either of them; on Linux it
makes such a zip too, and that has been tried.

What was made is tried before it is packed: its version, its parts, its licences.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path
from zipapp import EPOCH

from executable import ROOT, bundle, environment, environment_python

LOCKS = {"win32": "executable-windows", "darwin": "executable-macos"}
TRIED = (("--version",), ("doctor", "--parts"), ("licenses", "--short"), ("serve", "--help"))


def program(folder: Path) -> Path:
    return folder / ("kvstream.exe" if sys.platform == "win32" else "kvstream")


def tried(folder: Path) -> None:
    for words in TRIED:
        done = subprocess.run([program(folder), *words], env=environment(), capture_output=True, text=True, check=False)
        if done.returncode or not done.stdout:
            sys.exit(f"kvstream {' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        print(f"kvstream {' '.join(words)}:\n{done.stdout}")


def write(folder: Path, file: Path) -> None:
    """Sorted, without times, with the right to execute where there is one."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file() or path.is_symlink()):
            about = zipfile.ZipInfo(f"kvstream/{path.relative_to(folder).as_posix()}", EPOCH)
            about.create_system = 3  # Unix, so that the modes count
            about.compress_type = zipfile.ZIP_DEFLATED
            if path.is_symlink():
                about.external_attr = 0o120777 << 16
                archive.writestr(about, path.readlink().as_posix())
            else:
                about.external_attr = (0o100755 if path.stat().st_mode & 0o100 else 0o100644) << 16
                archive.writestr(about, path.read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description="PyInstaller's folder in a zip.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--work", type=Path, default=ROOT / "dist" / "work-onedir")
    given = parser.parse_args()
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    python = environment_python(work, LOCKS.get(sys.platform, "executable"))
    folder = bundle(python, work, cuda="")
    tried(folder)
    given.file.parent.mkdir(parents=True, exist_ok=True)
    write(folder, given.file)
    print(f"{given.file}: {given.file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
