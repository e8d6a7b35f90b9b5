"""Takes the symbols for debuggers out of the shared libraries of a folder, and loads each one afterwards.

    python build/strip_list.py FOLDER

Left alone: everything in a folder called NAME.libs, whose files auditwheel has rearranged so that strip leaves what no
loader takes (numpy's OpenBLAS is one); and programs, because one of them carries the Python code behind its symbols.
The loading is the proof. It runs with the Python of this script, which must be that of the folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# A library of the driver, which is never in the folder: whoever needs it cannot be loaded here, and that is right.
FROM_THE_DRIVER = "libcuda.so.1"
LOAD = "import ctypes, os, sys\nctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW)"


def libraries(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.so*")):
        if path.is_file() and not path.is_symlink() and path.read_bytes()[:4] == b"\x7fELF":
            yield path


def rearranged(path: Path, folder: Path) -> bool:
    return any(part.endswith(".libs") for part in path.relative_to(folder).parts[:-1])


def load_problem(path: Path, folder: Path) -> str:
    """Empty if the library can be loaded, else what the loader said."""
    beside = folder / "_internal" if (folder / "_internal").is_dir() else folder
    done = subprocess.run([sys.executable, "-c", LOAD, path], capture_output=True, text=True, check=False,
                          env={**os.environ, "LD_LIBRARY_PATH": str(beside)})
    said = done.stderr.strip().splitlines()[-1:] or [f"ended with {done.returncode}"]
    return "" if done.returncode == 0 or FROM_THE_DRIVER in said[0] else said[0]


def main() -> None:
    folder = Path(sys.argv[1])
    before = after = 0
    for path in libraries(folder):
        size = path.stat().st_size
        if not rearranged(path, folder):
            subprocess.run(["strip", "--strip-unneeded", path], check=True)
            before, after = before + size, after + path.stat().st_size
    problems = [f"{path.relative_to(folder)}: {problem}" for path in libraries(folder)
                if (problem := load_problem(path, folder))]
    print(f"stripped from {before / 1e6:.1f} to {after / 1e6:.1f} MB")
    if problems:
        sys.exit("cannot be loaded any more:\n" + "\n".join(problems))


if __name__ == "__main__":
    main()
