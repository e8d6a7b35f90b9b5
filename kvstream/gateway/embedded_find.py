"""What the embedded llama.cpp needs before it starts: the server, the model, its command line, a place on disk.

Everything here is synchronous and finished in milliseconds; every fault is an ``EmbeddedError`` that says what to do.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import socket
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

from attrs import field, frozen

from ..errors import EmbeddedError
from .embedded_child import clean_environment, read_flags

FROZEN_SUBCOMMAND = "_llama-child"
INSTANCES_MAX = 64
LINES_MAX = 50
LINE_BYTES_MAX = 2000
FILE_BYTES_MAX = 10 * 1024 * 1024

# "0.01.096.420 I srv    load_model: initializing, n_slots = 4": when, how grave, who, and then the words.
_PREFIX = re.compile(r"^\d+\.\d+\.\d+\.\d+ [A-Z] +\S+ +\S+: ")

Kind = Literal["llama-server", "xllamacpp"]


def _path(value: str | os.PathLike[str]) -> Path:
    return Path(value).expanduser()


def _path_or_none(value: str | os.PathLike[str] | None) -> Path | None:
    return _path(value) if value else None


def _text(value: str | os.PathLike[str] | None) -> str:
    return os.fspath(value) if value else ""


def _words(value: Sequence[str]) -> tuple[str, ...]:
    return tuple(value)


@frozen
class EmbeddedSpec:
    """What to run. ``context_tokens`` is per slot; ``threads`` 0 leaves the choice to llama.cpp; no ``llama_server``
    means: look on PATH, then for the xllamacpp wheel. ``extra_args`` are further ``llama-server`` flags."""

    model: Path = field(converter=_path)
    llama_server: str = field(default="", converter=_text)
    slots: int = 4
    context_tokens: int = 4096
    batch_tokens: int = 512
    threads: int = 0
    state_dir: Path | None = field(default=None, converter=_path_or_none)
    load_timeout_s: float = 600.0
    restart_backoff_s_max: float = 30.0
    extra_args: tuple[str, ...] = field(default=(), converter=_words)


@frozen
class FoundServer:
    """``path`` is the binary; for the wheel it is empty, for it runs in a child of our own executable."""

    kind: Kind
    path: str = ""


def find_server(spec: EmbeddedSpec) -> FoundServer:
    """The binary the spec names, else ``llama-server`` on PATH, else the xllamacpp wheel.

    *Errors*: ``EmbeddedError`` when the named one is missing or not executable, or when there is none at all.
    """
    if spec.llama_server:
        named = str(Path(spec.llama_server).expanduser())
        path = shutil.which(named)
        if path is None:
            fault = "is not executable" if Path(named).is_file() else "was not found"
            raise EmbeddedError(f"the llama.cpp server {named} {fault}; check embedded.llama_server (--llama-server)")
        return FoundServer("llama-server", str(Path(path).absolute()))
    path = shutil.which("llama-server")
    if path is not None:
        return FoundServer("llama-server", str(Path(path).absolute()))
    if importlib.util.find_spec("xllamacpp") is not None:
        return FoundServer("xllamacpp")
    raise EmbeddedError(
        "there is no llama.cpp server to run the model: run `pip install 'kvstream[embedded]'`,"
        " or put llama-server on PATH, or name it with --llama-server"
    )


def check_model(model: Path) -> None:
    """Refuse what cannot be a model before anything is started; llama.cpp's own words for it are many and unclear."""
    try:
        with model.open("rb") as file:
            magic = file.read(4)
    except FileNotFoundError:
        raise EmbeddedError(f"the model file {model} does not exist") from None
    except OSError as error:
        raise EmbeddedError(f"the model file {model} cannot be read: {error.strerror}") from error
    if magic != b"GGUF":
        raise EmbeddedError(f"{model} is not a GGUF model (it starts with {magic!r}, not with b'GGUF')")


def server_flags(
    spec: EmbeddedSpec, *, port: int, slot_dir: Path, known: frozenset[str] | None = None
) -> tuple[str, ...]:
    """The launch that suits KVStream (``runtimes.md`` 1.7), as ``llama-server`` flags.

    An explicit ``-np`` gives each slot a KV of its own. ``--cache-ram 0``: the host prompt cache can overwrite the KV
    of a running stream when a request is pinned to a slot. ``-b 512``: a long prompt holds up others for one batch.
    ``known`` is what this build's ``--help`` lists; a flag it lacks is left out, where its absence means the same or
    only costs comfort (builds without ``--cache-ram`` have no such cache).
    """
    flags: list[str] = ["-m", str(spec.model), "-np", str(spec.slots), "-c", str(spec.slots * spec.context_tokens)]
    flags += ["-b", str(spec.batch_tokens), "--host", "127.0.0.1", "--port", str(port)]
    if spec.threads > 0:
        flags += ["-t", str(spec.threads)]
    optional: list[tuple[str, ...]] = [
        ("--cache-ram", "0"),
        ("--slot-save-path", f"{slot_dir}{os.sep}"),
        ("--metrics",),
        ("--no-webui",),
        # A file path is nobody's business on the other side of the gateway; llama.cpp splits an alias at commas.
        ("--alias", spec.model.stem.replace(",", "_")),
        # Without it every web page in the user's browser may read from this port.
        ("--cors-origins", f"http://127.0.0.1:{port}"),
    ]
    for words in optional:
        if known is None or words[0] in known:
            flags += words
    return (*flags, *spec.extra_args)


def self_command() -> list[str]:
    """The command that reaches ``embedded_child.main`` in a new process, from source, zipapp or frozen executable."""
    if getattr(sys, "frozen", False):
        return [sys.executable, FROZEN_SUBCOMMAND]
    # -P: a file named xllamacpp.py in the current folder must not be what we run.
    return [sys.executable, "-P", "-m", "kvstream.gateway.embedded_child"]


def child_argv(server: FoundServer, flags: Sequence[str], *, parent: int) -> list[str]:
    """The whole command line of the child.

    *Errors*: ``EmbeddedError`` when ``extra_args`` has a flag that only a real ``llama-server`` understands.
    """
    if server.kind == "llama-server":
        return [*self_command(), "--exec", "--parent", str(parent), "--", server.path, *flags]
    try:
        read_flags(flags)
    except ValueError as error:
        raise EmbeddedError(f"embedded.extra_args: {error}; a llama-server on PATH would take any flag") from error
    return [*self_command(), "--serve", "--parent", str(parent), "--", *flags]


def child_environment(server: FoundServer) -> dict[str, str]:
    """Our environment, cleaned, in which the child finds this very copy of the package."""
    env = clean_environment(os.environ)
    if not getattr(sys, "frozen", False):
        root = str(Path(__file__).resolve().parents[2])
        env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH", "")])])
    return env


def free_port() -> int:
    """A loopback port that nobody uses now. Were it taken before the server binds it, the launch would say so."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- the place on disk ------------------------------------------------------------------------------------------------


@frozen
class Place:
    """Where one running instance keeps its files."""

    slot_dir: Path
    log: Path


def default_state_dir() -> Path:
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base else Path.home() / ".local" / "state") / "kvstream"


@contextmanager
def claim_place(state_dir: Path | None) -> Iterator[Place]:
    """Claim the lowest free instance number below the state directory, for as long as the block runs.

    Two KVStreams must not write each other's slot files. Each holds an OS lock on ``slots/N.lock``, which ends with
    the process however it dies; a lock can tell a dead owner where a process number cannot (numbers are used again,
    and containers that share a volume have numbers of their own). Slot files of every unlocked number are stale: no
    running KVStream knows what is in them. Lock files are never removed, so removing cannot race with locking.

    *Errors*: ``EmbeddedError`` when the directory cannot be written.
    """
    root = default_state_dir() if state_dir is None else state_dir
    try:
        for folder in (root, root / "slots", root / "logs"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        claim = _claim(root)
    except OSError as error:
        raise EmbeddedError(
            f"the state directory {root} cannot be written ({error.strerror}: {error.filename});"
            " set embedded.state_dir to a directory of yours"
        ) from error
    if claim is None:
        raise EmbeddedError(f"{INSTANCES_MAX} KVStreams run from the state directory {root} already")
    fd, place = claim
    try:
        yield place
    finally:
        shutil.rmtree(place.slot_dir, ignore_errors=True)
        os.close(fd)


def _claim(root: Path) -> tuple[int, Place] | None:
    """Lock the lowest free number; sweep the slot files of every number nobody holds."""
    claim: tuple[int, Place] | None = None
    for number in range(INSTANCES_MAX):
        lock_file, slot_dir = root / "slots" / f"{number}.lock", root / "slots" / str(number)
        if claim is not None and not lock_file.exists():
            break  # numbers are claimed from below: beyond the first unused one there are none
        fd = os.open(lock_file, os.O_RDWR | os.O_CREAT, 0o600)
        if not _try_lock(fd):
            os.close(fd)
            continue
        shutil.rmtree(slot_dir, ignore_errors=True)
        if claim is None:
            slot_dir.mkdir(mode=0o700)
            suffix = f"-{number}" if number else ""
            claim = fd, Place(slot_dir, root / "logs" / f"llama-server{suffix}.log")
        else:
            os.close(fd)
    return claim


def _try_lock(fd: int) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


# --- what the child prints -----------------------------------------------------------------------------------------


class KeptLog:
    """The log of one child after another.

    The file rotates at ``bytes_max`` to ``NAME.1``, the one before is dropped. A full disk costs the file its newest
    lines and nobody else anything: the memory goes on. Use as a context manager.
    """

    def __init__(self, path: Path, *, bytes_max: int = FILE_BYTES_MAX) -> None:
        self.path = path
        self._bytes_max = bytes_max
        self._lines: deque[str] = deque(maxlen=LINES_MAX)
        self._partial = b""
        self._file: BinaryIO | None = None
        self._open()

    def __enter__(self) -> KeptLog:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._close()

    def write(self, chunk: bytes) -> None:
        """Take output in any split; lines are put together here."""
        if self._size and self._size + len(chunk) > self._bytes_max:
            self._rotate()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.write(chunk)
        self._size += len(chunk)
        *whole, self._partial = (self._partial + chunk).split(b"\n")
        self._partial = self._partial[-LINE_BYTES_MAX:]
        for line in whole:
            self._lines.append(line[:LINE_BYTES_MAX].decode("utf-8", "replace").rstrip())

    def end_line(self) -> None:
        """The child is gone: what it left without a newline is its last line."""
        if self._partial:
            self.write(b"\n")

    def last_lines(self) -> tuple[str, ...]:
        """At most 50, oldest first."""
        return tuple(self._lines)

    def progress(self) -> tuple[int | None, str]:
        """Percent, where this build prints a dot for each, and the last line without its prefix."""
        dots = self._partial.strip(b" ")
        percent = min(len(dots), 100) if dots and not dots.strip(b".") else None
        last = next((line for line in reversed(self._lines) if line.strip(" .")), "")
        return percent, _PREFIX.sub("", last)

    def _rotate(self) -> None:
        self._close()
        with contextlib.suppress(OSError):
            self.path.replace(self.path.with_name(self.path.name + ".1"))
        self._open()

    def _open(self) -> None:
        self._size = 0
        with contextlib.suppress(OSError):
            self._file = self.path.open("ab", buffering=0)
            self._size = self._file.tell()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
