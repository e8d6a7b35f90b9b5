"""Compares two builds byte by byte, and names what differs, down to the module inside the program inside the file.

    python build/same.py ONE OTHER

Each is a file or a folder. Exit code 1 if anything differs. PyInstaller's program can only be opened by a Python that
has PyInstaller; for others it differs as a whole.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from inside import members
from pack import PROGRAM

SHOWN_MAX = 40


def where(one: bytes, other: bytes) -> str:
    if len(one) != len(other):
        return f"{len(one)} and {len(other)} bytes"
    places = [at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    at = places[0]
    return f"{len(places)} bytes, from {at} on: {one[max(at - 24, 0):at + 24]!r} {other[max(at - 24, 0):at + 24]!r}"


def files(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))
            if path.is_symlink() or not path.is_dir()}


def of_folders(one: Path, other: Path) -> Iterator[str]:
    here, there = files(one), files(other)
    for name in sorted(here.keys() ^ there.keys()):
        yield f"{name}: only in {one if name in here else other}"
    for name in sorted(here.keys() & there.keys()):
        yield from of_files(here[name], there[name], name)


def of_files(one: Path, other: Path, name: str) -> Iterator[str]:
    if one.is_symlink() or other.is_symlink():
        if not (one.is_symlink() and other.is_symlink() and one.readlink() == other.readlink()):
            yield f"{name}: another link"
        return
    here, there = one.read_bytes(), other.read_bytes()
    if here == there:
        return
    inside = list(of_members(members(one), members(other), name))
    yield from inside or [f"{name}: {where(here, there)}"]


def of_members(here: dict[str, bytes], there: dict[str, bytes], outer: str) -> Iterator[str]:
    for name in sorted(here.keys() ^ there.keys()):
        yield f"{outer}: {name}: only in the {'first' if name in here else 'second'}"
    for name in (name for name in here if name in there and here[name] != there[name]):
        if name == PROGRAM:
            with tempfile.TemporaryDirectory() as folder:
                pair = [Path(folder) / which / name for which in ("one", "other")]
                for path, body in zip(pair, (here[name], there[name]), strict=True):
                    path.parent.mkdir()
                    path.write_bytes(body.partition(b"\n")[2])
                yield from of_files(*pair, f"{outer}: {name}")
        else:
            yield f"{outer}: {name}: {where(here[name], there[name])}"
    if list(here) != list(there) and here.keys() == there.keys():
        yield f"{outer}: the same members in another order"


def differences(one: Path, other: Path) -> list[str]:
    if one.is_dir():
        return list(of_folders(one, other))
    return list(of_files(one, other, one.name))


def main() -> None:
    one, other = Path(sys.argv[1]), Path(sys.argv[2])
    found = differences(one, other)
    for line in found[:SHOWN_MAX]:
        print(line)
    if found:
        sys.exit(f"{one} and {other} differ in {len(found)} places")
    count = len(files(one)) if one.is_dir() else 1
    print(f"the same bytes: {count} files" if count > 1 else "the same bytes")


if __name__ == "__main__":
    main()
