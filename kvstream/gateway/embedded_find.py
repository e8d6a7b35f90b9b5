"""What the embedded llama.cpp needs before it starts: the server, the model, its command line; and the events and the
snapshot in which others see it.

Everything here is synchronous and finished in milliseconds; every fault is a ``ConfigError`` that says what to do:
another start would not help.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Union

from attrs import field, frozen

from ..errors import ConfigError, EmbeddedError
from ..parts import to_add
from .embedded_child import clean_environment, read_flags

FROZEN_SUBCOMMAND = "_llama-child"

LINES_IN_ERROR = 6  # the rest is in the log file, which is named beside them

Kind = Literal["llama-server", "xllamacpp"]
State = Literal["starting", "loading", "up", "restarting", "failed", "stopped"]


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
    means: look on PATH, then for the xllamacpp wheel. ``batch_tokens`` 0 means
    :func:`batch_for_this_machine`. ``extra_args`` are further ``llama-server`` flags. ``slot_bytes_max`` bounds the
    saved KV of all instances that do not run."""

    model: Path = field(converter=_path)
    llama_server: str = field(default="", converter=_text)
    slots: int = 4
    context_tokens: int = 4096
    batch_tokens: int = 0
    threads: int = 0
    state_dir: Path | None = field(default=None, converter=_path_or_none)
    load_timeout_s: float = 600.0
    restart_backoff_s_max: float = 30.0
    extra_args: tuple[str, ...] = field(default=(), converter=_words)
    slot_bytes_max: int = 8 * 2**30


@frozen
class FoundServer:
    """``path`` is the binary; for the wheel it is empty, for it runs in a child of our own executable."""

    kind: Kind
    path: str = ""


def find_server(spec: EmbeddedSpec) -> FoundServer:
    """The binary the spec names, else ``llama-server`` on PATH, else the xllamacpp wheel.

    *Errors*: ``ConfigError`` when the named one is missing or not executable, or when there is none at all.
    """
    if spec.llama_server:
        named = str(Path(spec.llama_server).expanduser())
        path = shutil.which(named)
        if path is None:
            fault = "is not executable" if Path(named).is_file() else "was not found"
            raise ConfigError(f"the llama.cpp server {named} {fault}; check embedded.llama_server (--llama-server)")
        return FoundServer("llama-server", str(Path(path).absolute()))
    path = shutil.which("llama-server")
    if path is not None:
        return FoundServer("llama-server", str(Path(path).absolute()))
    if importlib.util.find_spec("xllamacpp") is not None:
        return FoundServer("xllamacpp")
    raise ConfigError(
        "there is no llama.cpp server to run the model; xllamacpp is one: "
        + to_add("xllamacpp")
        + ", or put llama-server on PATH, or name it with --llama-server"
    )


def wrong_path(error: OSError) -> bool:
    """Whether the path is at fault, or the right to use it; a disk that is full or fails may be well again later."""
    return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM,
                           errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL)


def check_model(model: Path) -> None:
    """Refuse what cannot be a model before anything is started; llama.cpp's own words for it are many and unclear."""
    try:
        with model.open("rb") as file:
            magic = file.read(4)
    except FileNotFoundError:
        from_here = "" if model.is_absolute() else f" ({model} is meant from the folder where KVStream was started)"
        raise ConfigError(f"the model file {model.absolute()} does not exist{from_here}") from None
    except OSError as error:
        kind = ConfigError if wrong_path(error) else EmbeddedError
        raise kind(f"the model file {model.absolute()} cannot be read: {error.strerror}") from error
    if magic != b"GGUF":
        begins = magic.decode("ascii", "backslashreplace")
        raise ConfigError(f"{model} is not a GGUF model (it starts with {begins!r}, not with 'GGUF')")


def batch_for_this_machine(devices: Path = Path("/dev")) -> int:
    """Prompt tokens per batch: 512, or 128 where only the CPU computes.

    Streams that run stand still for one batch of somebody else's prompt. On two CPU cores with a model of 135M that was
    6.7 s at 2,048 tokens, 2.1 s at 512 and 0.6 s at 128, which cost 14 % of the prompt's speed. A GPU reads 512 tokens
    in a fraction of a second, and small batches leave it idle.
    """
    if sys.platform != "linux":
        return 512  # Metal on a Mac; on Windows we cannot tell
    cpu_only = not any(any(devices.glob(pattern)) for pattern in ("nvidia[0-9]*", "kfd", "dri/renderD*"))
    return 128 if cpu_only else 512


def server_flags(
    spec: EmbeddedSpec, *, port: int, slot_dir: Path, known: frozenset[str] | None = None
) -> tuple[str, ...]:
    """The launch that suits KVStream (``runtimes.md`` 1.7), as ``llama-server`` flags.

    An explicit ``-np`` gives each slot a KV of its own. ``--cache-ram 0``: the host prompt cache can overwrite the KV
    of a running stream when a request is pinned to a slot. ``-b``: a long prompt holds up others for one batch.
    ``known`` is what this build's ``--help`` lists; a flag it lacks is left out, where its absence means the same or
    only costs comfort (builds without ``--cache-ram`` have no such cache).
    """
    flags: list[str] = ["-m", str(spec.model), "-np", str(spec.slots), "-c", str(spec.slots * spec.context_tokens)]
    flags += ["-b", str(spec.batch_tokens or batch_for_this_machine()), "--host", "127.0.0.1", "--port", str(port)]
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

    *Errors*: ``ConfigError`` when ``extra_args`` has a flag that only a real ``llama-server`` understands.
    """
    if server.kind == "llama-server":
        return [*self_command(), "--exec", "--parent", str(parent), "--", server.path, *flags]
    try:
        read_flags(flags)
    except ValueError as error:
        raise ConfigError(f"embedded.extra_args: {error}; a llama-server on PATH would take any flag") from error
    return [*self_command(), "--serve", "--parent", str(parent), "--", *flags]


def child_environment(server: FoundServer) -> dict[str, str]:
    """Our environment, cleaned, in which the child finds this very copy of the package."""
    env = clean_environment(os.environ)
    # llama.cpp's threads spin at every barrier, and stand in each other's way as soon as anything else is at work on
    # the machine. SmolLM2 on two cores, one of them busy with something else: under 0.6 tokens/s spinning, 35 to 40
    # asleep. Alone on the machine spinning is faster (72 against 56 in one run each): OMP_WAIT_POLICY=active has it.
    env.setdefault("OMP_WAIT_POLICY", "passive")
    if not getattr(sys, "frozen", False):
        root = str(Path(__file__).resolve().parents[2])
        env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH", "")])])
    return env


def free_port() -> int:
    """A loopback port that nobody uses now. Were it taken before the server binds it, the launch would say so."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- what others see --------------------------------------------------------------------------------------------------


@frozen
class Launched:
    pid: int
    port: int
    kind: Kind


@frozen
class Loading:
    """The model is being loaded. ``percent`` only where the server's log tells; ``words`` is its last line."""

    elapsed_s: float
    percent: int | None
    words: str


@frozen
class Up:
    load_s: float


@frozen
class Died:
    """``code`` is the exit code, negative for a signal, None when it did not load in time and was stopped."""

    code: int | None
    last_lines: tuple[str, ...]
    log_path: str = ""


@frozen
class Restarting:
    in_s: float
    restarts: int


EmbeddedEvent = Union[Launched, Loading, Up, Died, Restarting]


@frozen
class EmbeddedSnapshot:
    """``since`` is Trio's clock at the last change of ``state``; ``pid`` is None while there is no child."""

    state: State = "starting"
    kind: Kind | None = None
    pid: int | None = None
    port: int | None = None
    restarts: int = 0
    percent: int | None = None
    words: str = ""
    since: float = 0.0
    last_lines: tuple[str, ...] = ()
    log_path: str = ""


def describe_exit(code: int | None) -> str:
    """An exit code in words a person can search for."""
    if code is None:
        return "did not load the model in time"
    if code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            hint = " (this CPU lacks instructions the build needs)" if name == "SIGILL" else ""
            return f"was killed by {name}{hint}"
    return f"ended with code {code}"


def describe_event(event: EmbeddedEvent) -> str:
    """One line for a log; the last lines of a dead server below it."""
    match event:
        case Launched(pid, port, kind):
            return f"llama.cpp ({kind}) launched as process {pid} on port {port}"
        case Loading(elapsed_s, percent, words):
            share = "" if percent is None else f", {percent} %"
            return f"loading the model: {elapsed_s:.0f} s{share}{': ' + words if words else ''}"
        case Up(load_s):
            return f"llama.cpp is up after {load_s:.1f} s"
        case Died(code, last_lines, log_path):
            shown = [line for line in last_lines if line][-LINES_IN_ERROR:]
            where = f" (log: {log_path})" if log_path else ""
            return "\n  ".join([f"llama.cpp {describe_exit(code)}{where}", *shown])
        case Restarting(in_s, restarts):
            return f"llama.cpp restarts in {in_s:g} s (restart {restarts})"
