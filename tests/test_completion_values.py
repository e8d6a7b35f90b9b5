"""What completion offers for the value of an option: asked as the shells ask, and once in bash with its own keys."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import click
import pytest
from click.testing import CliRunner

from kvstream import cli, cli_bench, config
from kvstream.bench import kvmodel, kvpoint
from kvstream.cli_completion import VARIABLE

ROOT = Path(__file__).resolve().parents[1]
FILE = "file"


def offered(*words: str) -> list[str]:
    """The values, and the word "file" or "dir" where the shell is to look for those."""
    env = {VARIABLE: "bash_complete", "COMP_WORDS": "\n".join(("kvstream", *words)), "COMP_CWORD": str(len(words))}
    answer = CliRunner().invoke(cli.main, env=env).stdout
    return [value if kind == "plain" else kind for kind, _, value in (row.partition(",") for row in answer.split())]


@pytest.mark.parametrize(("typed", "values"), [
    ("serve --model mod", [FILE]), ("serve --llama-server ./l", [FILE]), ("serve --backend ", ["llamacpp", "ollama",
                                                                                            "openai"]),
    ("serve --backend oll", ["ollama"]), ("serve --log-level d", ["DEBUG"]), ("serve --gpu-blocks ", ["auto"]),
    ("serve --host 1", []), ("bench kv --simulate h", ["h200"]), ("bench kv --simulate ./h", [FILE]),
    ("bench kv --model-geometry ll", ["llama-3.1-8b"]), ("bench kv --cache-type-k q8", ["q8_0"]),
    ("bench --route ch", ["chat"]), ("cache ls --dir ", ["dir"]), ("service install --root ", ["dir"]),
])
def test_values(typed: str, values: list[str]) -> None:
    assert offered(*typed.split(" ")) == values


def leaves(command: click.Command, words: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], click.Command]]:
    below = command.commands.items() if isinstance(command, click.Group) else ()
    return [(words, command), *(leaf for name, one in below for leaf in leaves(one, (*words, name)))]


def test_every_option_that_is_a_file_is_completed_as_one() -> None:
    asked = [(words, option.opts[-1]) for words, command in leaves(cli.main) for option in command.params
             if isinstance(option, click.Option) and (option.opts[-1] == "--config" or str(option.metavar).startswith(
                 ("PATH", "FILE", "DIR")))]
    assert len(asked) > 15
    for words, option in asked:
        assert offered(*words, option, "") in ([FILE], ["dir"]), (words, option)


def test_the_words_are_those_of_the_tables() -> None:
    assert set(cli_bench.CARDS) == set(kvmodel.PROFILES) and set(cli_bench.MODELS) == set(kvmodel.MODELS)
    assert get_args(config.KvType) == cli_bench.KV_TYPES
    assert cli_bench.BASELINES == (kvpoint.ALL_RESIDENT, kvpoint.HOST_ONLY, kvpoint.MANAGED)


@pytest.mark.skipif(shutil.which("bash") is None or sys.platform == "win32", reason="bash is not installed")
def test_bash_finds_files_when_tab_is_pressed(tmp_path: Path) -> None:
    (tmp_path / "my-model.gguf").touch()
    start = "import sys; from kvstream.cli import main; sys.argv[0] = sys.argv.pop(1); main()"
    (tmp_path / "kvstream").write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{start}" "$0" "$@"\n', "utf-8")
    (tmp_path / "kvstream").chmod(0o755)
    (tmp_path / "script").write_text(CliRunner().invoke(cli.main, ["completion", "bash"]).stdout, "utf-8")
    typed = "source ./script\n./kvstream serve --model my-\t\001echo \005\nexit\n"  # Ctrl-A, echo, Ctrl-E
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb", "HISTFILE": ""}
    done = subprocess.run(["bash", "--norc", "-i"], input=typed, env=env, cwd=tmp_path, capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.stdout.split() == ["./kvstream", "serve", "--model", "my-model.gguf"]
