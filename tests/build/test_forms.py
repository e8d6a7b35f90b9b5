"""What the frozen forms need of the code: children are started as ourselves and with a clean environment, and a person
is told what fits the form they have."""

from __future__ import annotations

import ast
import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstream import cli, parts
from kvstream.gateway.demo import own_command
from kvstream.gateway.embedded_child import clean_environment
from kvstream.gateway.embedded_find import self_command

PACKAGE = Path(parts.__file__).parent
# By the name in front of the dot.
SPAWNING = {
    "subprocess": {"Popen", "run", "call", "check_call", "check_output"},
    "trio": {"run_process", "open_process"},
    "os": {"execl", "execle", "execlp", "execlpe", "execv", "execve", "execvp", "execvpe", "spawnl", "spawnv",
           "spawnve", "system", "popen", "posix_spawn", "posix_spawnp", "fork", "forkpty"},
}
WITH_ENVIRONMENT = {"execve", "Popen", "run", "run_process"}


@pytest.fixture
def executable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As if this were the one-file executable, run from a cache."""
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "cache" / "kvstream"))
    monkeypatch.setenv("KVSTREAM_FILE", str(tmp_path / "kvstream-linux"))
    monkeypatch.setattr(sys, "argv", ["kvstream-linux"])
    return tmp_path


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call):
            whose, _, name = ast.unparse(node.func).rpartition(".")
            if name in SPAWNING.get(whose.rpartition(".")[2], ()):
                yield name, node


def test_every_child_gets_a_clean_environment() -> None:
    found = [(path.name, name, node) for path in PACKAGE.rglob("*.py") for name, node in calls(path)]
    assert {name for _, name, _ in found} == WITH_ENVIRONMENT  # and so nobody uses another way to start one
    for file, name, node in found:
        given = node.args[2] if name == "execve" else next(word.value for word in node.keywords if word.arg == "env")
        assert "clean_environment(" in ast.unparse(given) or ast.unparse(given) == "env", (file, node.lineno)


def test_nobody_uses_multiprocessing() -> None:
    """Its children are started with options of Python's, which the executable is not. kvstream.spec leaves out what
    PyInstaller runs before a program for that, and for sources and walks over packages."""
    for path in PACKAGE.rglob("*.py"):
        names = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
        assert not any(name.startswith(("multiprocessing", "pkgutil", "inspect.getsource")) or "ProcessPool" in name
                       for name in names), path
        assert "inspect.getsource" not in path.read_text("utf-8"), path


def test_what_the_bundle_and_systemd_set_is_not_passed_on(executable: Path) -> None:
    ours = {"PATH": "/bin", "LD_LIBRARY_PATH": "/cache/_internal", "_PYI_ARCHIVE_FILE": "x", "NOTIFY_SOCKET": "@x",
            "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "LISTEN_FDS": "1", "LISTEN_PID": "1", "LISTEN_FDNAMES": "x",
            "LLAMA_ARG_PORT": "1"}
    assert clean_environment(ours) == {"PATH": "/bin"}
    assert clean_environment({**ours, "LD_LIBRARY_PATH_ORIG": "/mine"}) == {"PATH": "/bin", "LD_LIBRARY_PATH": "/mine"}


def test_the_executable_starts_itself_and_is_called_what_was_downloaded(executable: Path,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    assert self_command() == [str(executable / "cache" / "kvstream"), "_llama-child"]
    assert parts.form() == "executable"
    assert parts.unpacked_in() == str(executable / "cache")
    monkeypatch.chdir(executable)
    assert own_command() == "kvstream-linux"


def test_a_person_is_told_what_fits_the_form(executable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the executable does not have it" in parts.to_add("matplotlib")
    monkeypatch.setattr(parts, "form", lambda: "zipapp")
    monkeypatch.setattr(sys, "executable", "/opt/my python/bin/python3")
    assert parts.to_add("numpy") == ("`'/opt/my python/bin/python3' -m pip install numpy` adds it to the Python that "
                                     "runs this file; the one-file executable has it")
    assert "executable has it" not in parts.to_add("matplotlib")
    monkeypatch.setattr(parts, "form", lambda: "source")
    assert parts.to_add("numpy") == "`pip install numpy` adds it"
    assert parts.to_add("pycuda") == "`pip install '.[cuda]'` in KVStream's folder adds it"


def test_only_parts_tells_anybody_to_install_a_part_and_never_by_a_name_that_pypi_does_not_have() -> None:
    extras = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert all(any(wanted.startswith(package) for wanted in extras[extra]) for package, extra in parts.EXTRAS.items())
    clients = {"or in Python (pip install openai):"}
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                lines = {line.strip() for line in node.value.splitlines()} - clients
                assert not any("kvstream[" in line for line in lines), file
                assert file.name == "parts.py" or not any("pip install" in line for line in lines), file


def test_of_a_driver_that_is_missing_nobody_says_to_install_pycuda() -> None:
    missing = ImportError("libcuda.so.1: cannot open shared object file: No such file or directory")
    assert parts.problem_of(missing, "pycuda.driver") == parts.NO_DRIVER
    gone = ModuleNotFoundError("No module named 'pycuda'", name="pycuda")
    assert parts.problem_of(gone, "pycuda.driver").startswith("pycuda is not here: `pip install '.[cuda]'`")
    assert parts.problem_of(ImportError("x"), "pycuda.driver") == "pycuda cannot be used: x"


def test_a_missing_part_and_a_missing_driver_are_sentences() -> None:
    cuda = next(part for part in parts.PARTS if part.package == "pycuda")
    missing = ImportError("libcuda.so.1: cannot open shared object file: No such file or directory")
    assert parts.import_problem(missing, cuda) == parts.NO_DRIVER
    gone = ModuleNotFoundError("x", name="pycuda")
    assert parts.import_problem(gone, cuda) == "not here: `pip install '.[cuda]'` in KVStream's folder adds it"
    assert "cannot be used: x" in parts.import_problem(ModuleNotFoundError("x", name="numpy"), cuda)


def test_doctor_tells_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    there, missing = parts.Part("attrs", "attrs", "messages"), parts.Part("no_such.part", "nothing", "a trial")
    monkeypatch.setattr(parts, "PARTS", (there, missing))
    done = CliRunner().invoke(cli.main, ["doctor", "--parts", "--json"])
    report = json.loads(done.output)
    assert done.exit_code == 0 and report["form"] == "source"
    first, second = report["parts"]
    assert (first["name"], first["problem"]) == ("attrs", "") and first["version"]
    assert (second["name"], second["problem"]) == ("nothing", "not here: `pip install nothing` adds it")
    text = CliRunner().invoke(cli.main, ["doctor", "--parts"]).output
    assert "nothing, for a trial: not here: `pip install nothing` adds it" in text and len(text.splitlines()) == 3


def test_licenses_are_those_of_what_is_installed() -> None:
    short = CliRunner().invoke(cli.main, ["licenses", "--short"])
    assert short.exit_code == 0, short.output
    lines = short.output.splitlines()
    assert lines[0] == "KVStream: Apache-2.0"
    assert {"trio", "click", "httpx", "attrs"} <= {line.split()[0] for line in lines}
    assert all(line.rpartition(": ")[2] for line in lines)
    whole = CliRunner().invoke(cli.main, ["licenses"]).output
    assert "Permission is hereby granted" in whole and "Apache License" in whole


def test_doctor_says_where_the_executable_is_unpacked(executable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher takes the first place that has it already, so nobody can tell by the documents."""
    monkeypatch.setattr(parts, "tried", lambda: iter(()))
    place = str(executable / "cache")
    assert f"kvstream-linux, unpacked in {place}\n" in CliRunner().invoke(cli.main, ["doctor", "--parts"]).output
    url = ("doctor", "--url", "http://127.0.0.1:9")
    assert f"\nunpacked in: {place}\n" in CliRunner().invoke(cli.main, url).output
    assert json.loads(CliRunner().invoke(cli.main, [*url, "--json"]).output)["unpacked_in"] == place
    monkeypatch.delenv("KVSTREAM_FILE")
    assert "unpacked in" not in CliRunner().invoke(cli.main, url).output, "an image has nothing but the folder"
