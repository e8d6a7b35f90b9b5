"""The zipapp, made of the command line alone (all of it takes a package registry and half a minute): the gate for old
Pythons, what is in the file and what is not, the same bytes twice, and that it runs."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.build.recipes import BUILD, ROOT, recipe

zipapp = recipe("zipapp")
OURS = ("__init__", "__main__", "errors", "licenses", "parts", "service",
        *sorted(path.stem for path in (ROOT / "kvstream").glob("cli*.py")))


def staged(folder: Path) -> Path:
    """What the command line needs: a few files of ours, click and attrs."""
    (folder / "kvstream").mkdir(parents=True)
    for name in OURS:
        shutil.copy(ROOT / "kvstream" / f"{name}.py", folder / "kvstream")
    shutil.copytree(ROOT / "kvstream" / "systemd", folder / "kvstream" / "systemd")
    for name in ("click", "attrs"):
        found = importlib.metadata.distribution(name)
        for path in found.files or ():
            if path.suffix not in (".pyc", ".so") and ".." not in path.parts:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(path.locate()), folder / path)
    (folder / "click" / "speed.so").write_bytes(b"\x7fELF")
    (folder / "bare" / "inner").mkdir(parents=True)
    (folder / "bare" / "inner" / "module.py").write_text("found = __loader__.archive\n", "utf-8")
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same, built in two places."""
    made = []
    for name in ("one", "two"):
        folder = tmp_path_factory.mktemp(name)
        stage = staged(folder / "stage")
        subprocess.run([sys.executable, BUILD / "zipapp.py", folder / "kvstream.pyz", "--stage", stage], check=True,
                       capture_output=True)
        made.append(folder / "kvstream.pyz")
    return made[0], made[1]


def run(file: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "COVERAGE_PROCESS_START")}
    return subprocess.run([sys.executable, "-S", file, *args], env=env, capture_output=True, text=True, timeout=60)


def test_two_builds_are_the_same_bytes(files: tuple[Path, Path]) -> None:
    assert files[0].read_bytes() == files[1].read_bytes()


def test_it_runs_and_knows_what_it_is(files: tuple[Path, Path]) -> None:
    assert run(files[0], "--version").stdout.startswith("kvstream, version ")
    report = json.loads(run(files[0], "doctor", "--parts", "--json").stdout)
    assert (report["form"], report["file"]) == ("zipapp", str(files[0]))
    xllamacpp = next(row for row in report["parts"] if row["name"] == "xllamacpp")
    assert "-m pip install xllamacpp" in xllamacpp["problem"] and "one-file executable" in xllamacpp["problem"]
    licenses = run(files[0], "licenses", "--short").stdout.splitlines()
    assert [line.split()[0] for line in licenses] == ["KVStream:", "attrs", "click"]
    assert "Redistribution and use" in run(files[0], "licenses").stdout  # click's own words


def test_a_package_without_an_init_is_found(files: tuple[Path, Path]) -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); from bare.inner.module import found; print(found)"
    done = subprocess.run([sys.executable, "-c", code, files[0]], capture_output=True, text=True)
    assert done.stdout.strip() == str(files[0]), done.stderr


def test_bytecode_is_used_without_a_look_at_the_source(files: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(files[0]) as archive:
        names = set(archive.namelist())
        for name in names:
            if name.endswith(".pyc"):
                assert int.from_bytes(archive.read(name)[4:8], "little") == 0b01, name  # by hash, unchecked
            assert str(files[0].parent).encode() not in archive.read(name)
    sources = {name for name in names if name.endswith(".py")}
    assert {f"{name}c" for name in sources} <= names
    assert not any(re.search(r"\.so$|__pycache__|RECORD$|\.pyi$", name) for name in names)


def test_an_old_python_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    ast.parse(zipapp.MAIN, feature_version=(3, 4))
    assert "f\"" not in zipapp.MAIN.partition("from kvstream")[0]
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    with pytest.raises(SystemExit) as stopped:
        exec(compile(zipapp.MAIN, "__main__.py", "exec"), {})
    assert stopped.value.code == 2
    assert capsys.readouterr().err == ("kvstream: this file needs Python 3.11 or newer, and /usr/bin/python3 is 3.10; "
                                       "the one-file executable needs no Python\n")


def test_it_prints_the_unit_that_starts_it(files: tuple[Path, Path]) -> None:
    file = files[0]
    lines = run(file, "service", "print").stdout.splitlines()
    command = f"{sys.executable} /usr/local/bin/kvstream.pyz"
    if str(file).startswith("/tmp/"):  # which a service does not see
        assert f"ExecStart={command} serve --config /etc/kvstream/kvstream.toml" in lines
    assert run(file, "service", "print", "lan").stdout == (ROOT / "kvstream/systemd/lan.conf").read_text("utf-8")
