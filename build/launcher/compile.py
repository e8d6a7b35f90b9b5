"""Compiles the launcher: static, with zstd where its static library is installed.

    python build/launcher/compile.py FILE [--plain]

Needs gcc (or $CC) and libzstd.a with its header: `apt-get install gcc libc6-dev libzstd-dev`, `dnf install gcc
glibc-static libzstd-static`. ``--plain`` makes a launcher that takes uncompressed archives only, and needs no zstd.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = (HERE / "launcher.c", HERE / "archive.c", HERE / "glibc.c")
# No build id and no paths: two builds are the same file.
FLAGS = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-static", "-s", "-Wl,--build-id=none",
         f"-ffile-prefix-map={HERE}=.")


class NoCompiler(Exception):
    """The launcher cannot be compiled here; the text says what is missing."""


def compiled(into: Path, plain: bool = False, defines: tuple[str, ...] = ()) -> Path:
    """*Errors*: ``NoCompiler`` with what the compiler said."""
    compiler = os.environ.get("CC", "gcc")
    words = [compiler, *FLAGS, *(f"-D{name}" for name in defines), *([] if plain else ["-DWITH_ZSTD"]), "-o", into,
             *SOURCES, *([] if plain else ["-lzstd"])]
    try:
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    except OSError as error:
        raise NoCompiler(f"{compiler}: {error.strerror}") from error
    if done.returncode:
        raise NoCompiler(done.stderr)
    return into


def main() -> None:
    plain = "--plain" in sys.argv[1:]
    into = Path(next(word for word in sys.argv[1:] if not word.startswith("--")))
    try:
        compiled(into, plain)
    except NoCompiler as error:
        sys.exit(f"{error}\nThe launcher needs gcc, libc.a, libzstd.a and zstd.h (Debian: gcc libc6-dev libzstd-dev).")


if __name__ == "__main__":
    main()
