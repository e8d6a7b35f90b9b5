"""Shell completion in the shells themselves: the printed script is sourced, and a key is pressed or as good as that."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SUBCOMMANDS = {"serve", "demo", "status", "health", "doctor", "models", "cache", "completion", "check-config"}
WAIT_S = 60.0  # a guard against hanging: each press of the key starts a Python

OTHER = "kvstream-1.2_linux"

Complete = Callable[[str], set[str]]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a ``kvstream`` that is this source tree, the same under another name and not on the PATH, and the
    three scripts, as that one prints them."""
    for program in (tmp_path / "bin" / "kvstream", tmp_path / OTHER):
        program.parent.mkdir(exist_ok=True)
        start = "import sys; from kvstream.cli import main; sys.argv[0] = sys.argv.pop(1); main()"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{start}" "$0" "$@"\n', "utf-8")
        program.chmod(0o755)
    for shell in ("bash", "zsh", "fish"):
        (tmp_path / f"script.{shell}").write_text(run(tmp_path, str(program), "completion", shell), "utf-8")
    return tmp_path


def environment(place: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("_KVSTREAM")}
    folders = [folder for folder in os.environ["PATH"].split(os.pathsep) if not (Path(folder) / "kvstream").exists()]
    return kept | {"PATH": os.pathsep.join([str(place / "bin"), *folders]), "PYTHONPATH": str(ROOT),
                   "HOME": str(place), "TERM": "dumb", "XDG_CONFIG_HOME": str(place), "XDG_DATA_HOME": str(place)}


def run(place: Path, *argv: str) -> str:
    result = subprocess.run(argv, env=environment(place), cwd=place, capture_output=True, encoding="utf-8",
                            timeout=WAIT_S, check=True)
    assert not result.stderr, result.stderr
    return result.stdout


def bash(place: Path) -> Complete:
    def complete(line: str) -> set[str]:
        words = line.split(" ")
        quoted = " ".join(f"'{word}'" for word in words)
        script = (f"source '{place}/script.bash'; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; "
                  f"_kvstream_completion '{words[0]}'; printf '%s\\n' \"${{COMPREPLY[@]}}\"; "
                  f"complete -p kvstream; complete -p '{OTHER}'")
        *found, first, second = run(place, "bash", "--norc", "-c", script).split("\n")[:-1]
        assert first.endswith("-F _kvstream_completion kvstream")  # it is registered, too
        assert second.endswith(f"-F _kvstream_completion {OTHER}")
        return set(found) - {""}

    return complete


def fish(place: Path) -> Complete:
    def complete(line: str) -> set[str]:
        out = run(place, "fish", "--no-config", "-c", f"source '{place}/script.fish'; complete -C '{line}'")
        return {row.partition("\t")[0] for row in out.splitlines()}

    return complete


SHELLS: list[tuple[str, Callable[[Path], Complete]]] = [("bash", bash), ("fish", fish)]


@pytest.mark.parametrize(("name", "shell"), SHELLS, ids=[name for name, _ in SHELLS])
def test_subcommands_and_options_are_completed(name: str, shell: Callable[[Path], Complete], place: Path) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    complete = shell(place)
    assert complete("kvstream ") >= SUBCOMMANDS
    assert "_llama-child" not in complete("kvstream ")
    assert complete("kvstream doc") == {"doctor"}
    assert {"--url", "--json", "--isolation", "--config"} <= complete("kvstream doctor --")
    assert {"--backend", "--port", "--model"} <= complete("kvstream serve --")
    assert complete("kvstream completion z") == {"zsh"}
    assert complete("kvstream cache ") == {"ls", "rm", "gc"}
    assert {"--all", "--dir", "--json", "--config"} <= complete("kvstream cache rm --")
    (place / "bin" / "kvstream").unlink()
    for renamed in (f"./{OTHER}", f"~/{OTHER}"):  # HOME is that folder
        assert complete(f"{renamed} doc") == {"doctor"}


@pytest.mark.skipif(shutil.which("zsh") is None or sys.platform == "win32", reason="zsh is not installed")
def test_zsh_completes_when_tab_is_pressed(place: Path) -> None:
    import pty

    pid, terminal = pty.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            os.chdir(place)
            os.execvpe("zsh", ["zsh", "-f", "-i"], environment(place))
        os._exit(127)
    seen = ""

    def until(pattern: str) -> None:
        nonlocal seen
        deadline = time.monotonic() + WAIT_S
        while not re.search(pattern, seen):
            assert time.monotonic() < deadline, repr(seen)
            if select.select([terminal], [], [], 0.2)[0]:
                seen += os.read(terminal, 4096).decode("utf-8", "replace")

    def send(text: str) -> None:
        nonlocal seen
        seen = ""
        os.write(terminal, text.encode())

    try:
        send(f"unsetopt zle_bracketed_paste; autoload -Uz compinit; compinit -u -D; source '{place}/script.zsh'; "
             "echo rea''dy\n")
        until(r"ready")
        send("kvstream docto\t")
        until(r"kvstream doctor ")
        send("--isol\t")
        until(r"--isolation ")
        send("\x15kvstream completion fi\t")
        until(r"kvstream completion fish ")
        (place / "bin" / "kvstream").unlink()
        for renamed in (f"./{OTHER}", f"~/{OTHER}"):
            send(f"\x15{renamed} docto\t")
            until(rf"{re.escape(renamed)} doctor ")
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)
