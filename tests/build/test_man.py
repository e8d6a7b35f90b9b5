"""The manual page has every command and every option, and is a page that man can read."""

from __future__ import annotations

import shutil
import subprocess

import click
import pytest
from click.testing import CliRunner

from kvstream import __version__, cli, cli_man

PAGE = cli_man.page(cli.main, __version__)


def plain(text: str) -> str:
    return text.replace("\\-", "-").replace("\\&", "").replace("\\e", "\\")


COMMANDS = dict(cli_man.commands(cli.main))


def test_the_tree_is_walked() -> None:
    assert {("serve",), ("bench",), ("bench", "kv"), ("cache", "rm"), ("licenses",)} <= set(COMMANDS)
    assert not any(word.startswith("_") for path in COMMANDS for word in path)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_and_option_is_there(path: tuple[str, ...]) -> None:
    begins = f'.SS "kvstream {" ".join(path)}"\n'
    assert PAGE.count(begins) == 1
    part = plain(PAGE.partition(begins)[2].partition("\n.S")[0])
    options = [parameter for parameter in COMMANDS[path].params if isinstance(parameter, click.Option)]
    for option in (option for option in options if not option.hidden):
        line = next(line for line in part.splitlines() if line.startswith(".B ") and option.opts[0] in line.split(" ")
                    + line.replace(",", "").split())
        assert all(name in line for name in (*option.opts, *option.secondary_opts))
        assert option.help is None or " ".join(option.help.split())[:40] in " ".join(part.split())
    first = " ".join((COMMANDS[path].help or "").split("\n\n")[0].split())
    assert first in " ".join(part.split())


def test_man_reads_it_without_complaint() -> None:
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    done = subprocess.run(["groff", "-man", "-Tutf8", "-ww", "-z"], input=PAGE, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_form_prints_it() -> None:
    """Through a pipe and with narrow terminals too."""
    done = CliRunner().invoke(cli.main, ["man"], env={"COLUMNS": "40"})
    assert (done.exit_code, done.output) == (0, PAGE)
