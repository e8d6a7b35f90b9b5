"""Packing: the same folder gives the same bytes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.build.recipes import recipe

pack = recipe("pack")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "tree"
    (made / "_internal" / ("d" * 90) / ("e" * 90)).mkdir(parents=True)
    (made / "_internal" / ("d" * 90) / ("e" * 90) / "long").write_bytes(b"x" * 1000)
    (made / "kvstream").write_bytes(b"program")
    (made / "kvstream").chmod(0o755)
    return made


def test_two_packings_are_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    launcher, again = tmp_path / "launcher", tmp_path / "again"
    launcher.write_bytes(b"head")
    shutil.copytree(folder, again)
    for path in again.rglob("*"):
        os.utime(path, (1, 1))
    (again / "_internal").chmod(0o700)
    digests = {pack.pack(tree, launcher, tmp_path / f"{name}.bin", level=3)
               for name, tree in (("one", folder), ("two", again))}
    assert len(digests) == 1
    assert (tmp_path / "one.bin").read_bytes() == (tmp_path / "two.bin").read_bytes()
    (again / "kvstream").write_bytes(b"another")
    assert pack.pack(again, launcher, tmp_path / "two.bin", level=3) not in digests


def test_what_the_launcher_could_not_make_is_refused(folder: Path) -> None:
    (folder / "away").symlink_to("../../etc/passwd")
    with pytest.raises(pack.Unpackable, match="leads to"):
        pack.archive(folder)
    (folder / "away").unlink()
    os.mkfifo(folder / "pipe")
    with pytest.raises(pack.Unpackable, match="pipe is neither"):
        pack.archive(folder)
    (folder / "pipe").unlink()
    (folder / "kvstream").unlink()
    with pytest.raises(pack.Unpackable, match="no kvstream"):
        pack.archive(folder)
