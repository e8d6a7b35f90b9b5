"""The documents say what is so: commands that exist, variables that are read, one command for README and CI."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest

import kvstream
from kvstream import cli
from kvstream.config import KEYS_BY_PATH, SECTIONS
from kvstream.gateway import statusview

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def text_of(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def fenced(marker: str, language: str) -> str:
    """The fenced block after ``<!-- marker -->`` in the README."""
    found = re.findall(rf"<!-- {marker} -->\n```{language}\n(.*?)```", text_of("README.md"), re.DOTALL)
    assert len(found) == 1, marker
    return str(found[0])


def test_ci_runs_the_readmes_test_command() -> None:
    command = fenced("command: test", "sh").strip()
    assert "\n" not in command
    assert text_of(".ci/run").splitlines()[-1] == command
    for part in ("-m venv", "pip install", "ruff check", "mypy", "-m pytest"):
        assert part in command


def test_the_demo_command_is_one_line() -> None:
    command = fenced("command: demo", "sh").strip()
    assert "\n" not in command and command.endswith("kvstream demo")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_and_flags_exist(name: str) -> None:
    for line in re.findall(r"kvstream ((?:serve|status|health|check-config|demo)\b[^`#\n]*)", text_of(name)):
        command = cli.main.commands[line.split()[0]]
        known = {option for parameter in command.params if isinstance(parameter, click.Option)
                 for option in parameter.opts}
        for flag in re.findall(r"--[a-z-]+", line):
            assert flag in known, line


@pytest.mark.parametrize("name", DOCUMENTS)
def test_variables_and_keys_exist(name: str) -> None:
    text = text_of(name)
    for variable in re.findall(r"KVSTREAM_[A-Z_]+__[A-Z_]+", text):
        assert variable in {about.env for about in KEYS_BY_PATH.values()}
    for section, key in re.findall(rf"`({'|'.join(SECTIONS)})\.([a-z_]+)\b[^(`]*`", text):
        assert f"{section}.{key}" in KEYS_BY_PATH


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_and_recipes_exist(name: str) -> None:
    text = text_of(name)
    for target in re.findall(r"\]\(([A-Za-z][^)#:]*)\)", text):
        assert (ROOT / target).exists(), target
    for path in re.findall(r"`((?:kvstream|tests)/[a-z_/]+\.py)`", text):
        assert (ROOT / path).exists(), path
    recipes = set(re.findall(r"(?m)^([a-z-]+)[^:=\n]*:(?!=)", text_of("Justfile")))
    for recipe in re.findall(r"`just ([a-z-]+)`", text):
        assert recipe in recipes


def test_the_examples_are_python() -> None:
    blocks = re.findall(r"```python\n(.*?)```", text_of("README.md"), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        ast.parse(block)
    for node in ast.walk(ast.parse(fenced("example: library", "python"))):
        if isinstance(node, ast.ImportFrom) and node.module == "kvstream":
            assert {alias.name for alias in node.names} <= set(kvstream.__all__)


def test_the_examples_import_what_exists() -> None:
    for block in re.findall(r"```python\n(.*?)```", text_of("README.md"), re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvstream"):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def test_what_a_newcomer_types_comes_in_order() -> None:
    text = text_of("README.md")
    places = [text.find(words) for words in (
        "git clone", "cd kvstream", "<!-- command: demo -->", ". .venv/bin/activate", "\nkvstream serve --model",
        "pip install openai", "from openai import")]
    assert -1 not in places and places == sorted(places)


def test_the_words_of_status_are_explained() -> None:
    glossary = text_of("README.md").partition("The words of `kvstream status`")[2].partition("\n## ")[0]
    words = " ".join(re.findall(r"(?m)^\| (.*?) \|", glossary))
    for word in (*statusview.PAGE_COLUMNS, "draining", "counted", "exact", "estimated", "accounted", "verified",
                 "host"):
        assert word in words, word


def test_recipes_name_files_of_the_repository() -> None:
    for path in re.findall(r"\}\} (tests/\S+\.py)", text_of("Justfile")):
        assert (ROOT / path).exists(), path


def test_the_licence_is_the_whole_apache_licence() -> None:
    text = text_of("LICENSE")
    assert text.lstrip().startswith("Apache License") and "APPENDIX: How to apply" in text and len(text) > 11_000
    assert PYPROJECT["project"]["license"] == "Apache-2.0"


def test_the_version_has_one_source() -> None:
    assert "version" not in PYPROJECT["project"]
    assert PYPROJECT["tool"]["hatch"]["version"]["path"] == "kvstream/__init__.py"


def test_every_foreign_package_is_declared() -> None:
    """What the house lets in must be installed with it, and nothing else is."""
    declared = {re.split(r"[\[<>=~ .]", wanted)[0].replace("-", "_") for wanted in PYPROJECT["project"]["dependencies"]}
    extras = {re.split(r"[\[<>=~ ]", wanted)[0].replace("-", "_")
              for name in ("embedded", "demo", "plots")
              for wanted in PYPROJECT["project"]["optional-dependencies"][name]}
    used = set()
    for path in (ROOT / "kvstream").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                used |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                used.add(node.module.split(".")[0])
    import sys

    foreign = used - set(sys.stdlib_module_names) - {"kvstream", "pycuda", "numpy", "quart", "werkzeug", "h11"}
    foreign -= {"compression"}  # the standard library's, from 3.14 on
    assert foreign <= declared | extras
