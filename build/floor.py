"""Which glibc a folder of programs needs: the highest version that any of them asks for.

    python build/floor.py FOLDER [--glibc 2.35] [--glibcxx 3.4.30]

Lists who asks for the most, and fails above what is promised. Symbol versions are read by binutils' objdump.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

VERSION = re.compile(r"\b(GLIBC|GLIBCXX)_(\d+(?:\.\d+)+)\b")
Version = tuple[int, ...]


def programs(folder: Path) -> Iterator[Path]:
    """Every ELF file, links left out."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as opened:
                if opened.read(4) == b"\x7fELF":
                    yield path


def wanted(symbols: str) -> dict[str, Version]:
    """From what ``objdump -T`` printed: the highest version of each library."""
    highest: dict[str, Version] = {}
    for library, text in VERSION.findall(symbols):
        version = tuple(map(int, text.split(".")))
        highest[library] = max(version, highest.get(library, ()))
    return highest


def by_program(folder: Path) -> dict[str, dict[str, Version]]:
    return {path.relative_to(folder).as_posix(): wanted(subprocess.run(
        ["objdump", "-T", path], capture_output=True, text=True, check=False).stdout) for path in programs(folder)}


def highest(found: dict[str, dict[str, Version]], library: str = "GLIBC") -> str:
    """What all of it needs, as text; 2.0 if nothing is said."""
    return ".".join(map(str, max((versions.get(library, (2, 0)) for versions in found.values()), default=(2, 0))))


def above(found: dict[str, dict[str, Version]], promised: dict[str, Version]) -> list[str]:
    return [f"{name} needs {library}_{'.'.join(map(str, version))}" for name, versions in found.items()
            for library, version in versions.items() if library in promised and version > promised[library]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Which glibc a folder of programs needs.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--glibc", default="")
    parser.add_argument("--glibcxx", default="")
    given = parser.parse_args()
    found = by_program(given.folder)
    if not found:
        sys.exit(f"there is no program in {given.folder}")
    for library in ("GLIBC", "GLIBCXX"):
        asking = sorted(((versions[library], name) for name, versions in found.items() if library in versions),
                        reverse=True)
        for version, name in asking[:5]:
            print(f"{library}_{'.'.join(map(str, version))}  {name}")
    promised = {library: tuple(map(int, text.split(".")))
                for library, text in (("GLIBC", given.glibc), ("GLIBCXX", given.glibcxx)) if text}
    problems = above(found, promised)
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
