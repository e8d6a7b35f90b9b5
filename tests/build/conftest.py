"""A launcher compiled once per run, and one files made with it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest

from tests.build.recipes import recipe

WAIT_S = 60.0  # against hanging only
UMASK = 0o027  # not the launcher's own

# What the launcher becomes in these tests: says who it is, and waits or ends as it is told.
PROGRAM = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
int main(int argc, char **argv) {
    const char *file = getenv("KVSTREAM_FILE");
    mode_t mask = umask(0);
    umask(mask);
    printf("pid=%d argv0=%s file=%s umask=%o argc=%d\n", getpid(), argv[0], file ? file : "", mask, argc);
    for (int n = 1; n < argc; n++)
        printf("arg=%s\n", argv[n]);
    fflush(stdout);
    if (argc > 1 && strcmp(argv[1], "wait") == 0)
        getchar();
    return argc > 2 ? atoi(argv[2]) : 0;
}
"""


@attrs.frozen
class Launchers:
    """The launcher as it is shipped, or without zstd where that is not installed, and the same for odd places."""

    folder: Path
    program: Path
    plain: bool

    def compiled(self, name: str = "launcher", *defines: str) -> Path:
        into = self.folder / name
        if not into.exists():
            recipe("launcher/compile").compiled(into, self.plain, defines)
        return into

    @property
    def shared(self) -> Path:
        """Where `at_home` looks for shared folders instead of /var/tmp and the like."""
        return self.folder / "shared"

    def at_home(self) -> Path:
        return self.compiled("at-home", f'SHARED_FOLDERS="{self.shared}/first","{self.shared}/second"')


@pytest.fixture(scope="session", params=["zstd", "plain"])
def launchers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launchers:
    folder = tmp_path_factory.mktemp(f"launcher-{request.param}")
    source = folder / "program.c"
    source.write_text(PROGRAM, "utf-8")
    made = Launchers(folder, folder / "program", request.param == "plain")
    try:
        subprocess.run(["gcc", "-o", made.program, source], check=True)
        made.compiled()
    except FileNotFoundError:
        pytest.skip("gcc is not installed")
    except recipe("launcher/compile").NoCompiler as error:
        missing = "libzstd.a and zstd.h (libzstd-dev)" if not made.plain else "libc.a"
        pytest.skip(f"{missing} are not installed: {str(error).splitlines()[-1]}")
    return made


@attrs.frozen
class OneFile:
    """A packed file and how it is started: with nothing of the caller's environment but what is given."""

    path: Path
    folder: Path
    digest: str

    def start(self, *args: str, **environment: str | Path) -> subprocess.Popen[str]:
        env = {"PATH": os.environ["PATH"], **{name: str(value) for name, value in environment.items()}}
        return subprocess.Popen([self.path, *args], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True, umask=UMASK)

    def run(self, *args: str, **environment: str | Path) -> subprocess.CompletedProcess[str]:
        with self.start(*args, **environment) as process:
            out, err = process.communicate("\n", timeout=WAIT_S)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


Make = Callable[..., OneFile]


@pytest.fixture
def make(launchers: Launchers, tmp_path: Path) -> Iterator[Make]:
    """``make(launcher=..., extra=...)``: a small folder, packed. ``extra`` makes its contents other ones, ``glibc`` is
    what it needs."""
    launchers.shared.mkdir()

    def one(launcher: Path | None = None, extra: bytes = b"", name: str = "kvstream", glibc: int = 0) -> OneFile:
        folder = tmp_path / f"tree-{name}"
        (folder / "_internal" / "deep").mkdir(parents=True)
        (folder / "kvstream").write_bytes(launchers.program.read_bytes())
        (folder / "kvstream").chmod(0o755)
        (folder / "_internal" / "deep" / "data").write_bytes(bytes(range(256)) * 5000 + extra)
        (folder / "_internal" / "empty").write_bytes(b"")
        (folder / "_internal" / "link").symlink_to("deep/data")
        file = tmp_path / name
        digest = recipe("pack").pack(folder, launcher or launchers.compiled(), file, launchers.plain, level=1,
                                     glibc=glibc)
        return OneFile(file, folder, digest[:32])

    yield one
    shutil.rmtree(launchers.shared)
