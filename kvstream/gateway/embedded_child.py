"""The llama.cpp child process: a guard against outliving KVStream, then the server; and the keeper of what it prints.

Two modes, chosen by the supervisor (``embedded_find.child_argv`` is the only place that writes this command line)::

    --serve --parent PID -- FLAGS...            the xllamacpp wheel serves in this very process
    --exec  --parent PID -- llama-server FLAGS  this process becomes that binary

FLAGS are those of ``llama-server`` in both modes, so that there is one launch recommendation and not two; in the first
mode ``FLAGS`` below maps each to the field of ``xllamacpp.CommonParams`` that llama.cpp's own parser sets.

Why a shim in front of a foreign binary: on Linux ``PR_SET_PDEATHSIG`` must be set by the child itself, after the fork.
A ``preexec_fn`` would do it in a forked copy of a process with threads, which may deadlock. The setting survives exec.
The parent may have died before it was set; hence the look at ``getppid`` after it. Where there is no PDEATHSIG, a
thread waits for the end of stdin: the supervisor holds the other end of that pipe, so it closes however that dies.

Only the standard library is imported at the top: this file is on the path of every start and restart. It is the only
importer of xllamacpp.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

PR_SET_PDEATHSIG = 1

EXIT_USAGE = 2
EXIT_LOAD_FAILED = 1
EXIT_ORPHANED = 3
EXIT_NOT_EXECUTABLE = 127

LINES_MAX = 50
LINE_BYTES_MAX = 2000
FILE_BYTES_MAX = 10 * 1024 * 1024

# "0.01.096.420 I srv    load_model: initializing, n_slots = 4": when, how grave, who, and then the words.
_PREFIX = re.compile(r"^\d+\.\d+\.\d+\.\d+ [A-Z] +\S+ +\S+: ")


class Flag(NamedTuple):
    """A ``llama-server`` flag and the ``CommonParams`` field it means. ``kind`` says how its value is read."""

    names: tuple[str, ...]
    field: str
    kind: str


FLAGS = (
    Flag(("-m", "--model"), "model.path", "str"),
    Flag(("-a", "--alias"), "model_alias", "set"),
    Flag(("-np", "--parallel"), "n_parallel", "int"),
    Flag(("-c", "--ctx-size"), "n_ctx", "int"),
    Flag(("-b", "--batch-size"), "n_batch", "int"),
    Flag(("-ub", "--ubatch-size"), "n_ubatch", "int"),
    Flag(("-t", "--threads"), "cpuparams.n_threads", "int"),
    Flag(("-tb", "--threads-batch"), "cpuparams_batch.n_threads", "int"),
    Flag(("-ngl", "--gpu-layers", "--n-gpu-layers"), "n_gpu_layers", "int"),
    Flag(("-cram", "--cache-ram"), "cache_ram_mib", "int"),
    Flag(("-kvu", "--kv-unified"), "kv_unified", "on"),
    Flag(("-ctk", "--cache-type-k"), "cache_type_k", "ggml_type"),
    Flag(("-ctv", "--cache-type-v"), "cache_type_v", "ggml_type"),
    Flag(("--mmproj",), "mmproj.path", "str"),
    Flag(("--chat-template",), "chat_template", "str"),
    Flag(("--slot-save-path",), "slot_save_path", "str"),
    Flag(("--metrics",), "endpoint_metrics", "on"),
    Flag(("--slots",), "endpoint_slots", "on"),
    Flag(("--no-webui", "--no-ui"), "ui", "off"),
    Flag(("--no-warmup",), "warmup", "off"),
    Flag(("-lv", "--verbosity"), "verbosity", "int"),
    Flag(("--cors-origins",), "cors_origins", "str"),
    Flag(("--host",), "hostnames", "list"),
    Flag(("--port",), "port", "int"),
)


def read_flags(argv: Sequence[str]) -> list[tuple[Flag, str]]:
    """Pairs of flag and value (empty for a switch), in order.

    *Errors*: ``ValueError`` names the flag that is unknown here, or whose value is missing or not a number.
    """
    by_name = {name: flag for flag in FLAGS for name in flag.names}
    pairs: list[tuple[Flag, str]] = []
    words = iter(argv)
    for word in words:
        flag = by_name.get(word)
        if flag is None:
            raise ValueError(f"{word!r} is not a flag that the xllamacpp server takes from here")
        value = ""
        if flag.kind not in ("on", "off"):
            value = next(words, "")
            if not value:
                raise ValueError(f"{word} needs a value")
        if flag.kind == "int":
            try:
                int(value)
            except ValueError:
                raise ValueError(f"{word} needs a whole number, not {value!r}") from None
        pairs.append((flag, value))
    return pairs


def set_params(params: Any, pairs: Sequence[tuple[Flag, str]], ggml_type: Any) -> None:
    """Write the flags into a ``CommonParams``. A field that this wheel does not have is an ``AttributeError``."""
    convert: dict[str, Callable[[str], object]] = {
        "str": str, "int": int, "on": lambda _: True, "off": lambda _: False,
        "list": lambda value: [value], "set": lambda value: {value},
        "ggml_type": lambda value: getattr(ggml_type, f"GGML_TYPE_{value.upper()}"),
    }
    for flag, value in pairs:
        *path, last = flag.field.split(".")
        owner = params
        for name in path:
            owner = getattr(owner, name)
        getattr(owner, last)  # Cython would take an unknown name in silence on some wheels; ask first
        setattr(owner, last, convert[flag.kind](value))


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for every child, from our own.

    PyInstaller points LD_LIBRARY_PATH at its bundle, which breaks a foreign binary. ``LLAMA_ARG_*`` would change the
    launch behind our back (a unified KV pool, another port, a key we do not send): what a person wants goes into
    ``embedded.extra_args``. What systemd tells a service is for this process: a child must neither report in its name
    nor take its sockets.
    """
    dropped = ("_PYI_", "LLAMA_ARG_", "WATCHDOG_", "LISTEN_", "NOTIFY_SOCKET")
    env = {key: value for key, value in environ.items() if not key.startswith(dropped) and key != "LLAMA_API_KEY"}
    original = env.pop("LD_LIBRARY_PATH_ORIG", None)
    if original is not None:
        env["LD_LIBRARY_PATH"] = original
    elif getattr(sys, "frozen", False):
        env.pop("LD_LIBRARY_PATH", None)
    return env


def die_with_parent(parent: int) -> None:
    """From here on the kernel kills this process when the thread that started it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if sys.platform != "win32" and os.getppid() != parent:
        os._exit(EXIT_ORPHANED)


def on_end_of_stdin(act: Callable[[], None]) -> None:
    """Call ``act`` in a thread once stdin ends, which is when the supervisor is gone or closes it to say so."""

    def watch() -> None:
        try:
            while os.read(0, 4096):
                pass
        except OSError:
            pass
        act()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def serve(flags: Sequence[str]) -> int:
    """Run the xllamacpp server in this process until SIGTERM or the end of stdin.

    Loading holds the GIL from start to end, so no Python handler and no thread of ours runs then: SIGTERM keeps its
    default action (dead at once) until the model is there.
    """
    try:
        import xllamacpp  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        print(f"xllamacpp cannot be imported: {error}", file=sys.stderr, flush=True)
        return EXIT_LOAD_FAILED
    params = xllamacpp.CommonParams()
    set_params(params, read_flags(flags), xllamacpp.ggml_type)
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        # llama.cpp has printed the reason to stderr already.
        print(f"xllamacpp: {error}", file=sys.stderr, flush=True)
        return EXIT_LOAD_FAILED
    # _exit: the destructors would wait for open streams, and nothing in this process needs saving.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    on_end_of_stdin(lambda: os._exit(0))
    threading.Event().wait()
    return int(server is None)  # never reached; keeps the server referenced


def become(command: Sequence[str]) -> int:
    """Turn into ``command``; the setting of ``die_with_parent`` stays. Returns only when that fails."""
    if sys.platform != "linux":
        return run_below(command)
    try:
        os.execve(command[0], list(command), clean_environment(os.environ))
    except OSError as error:
        return _cannot_run(command, error)


def run_below(command: Sequence[str]) -> int:
    """Where there is no PDEATHSIG: run ``command`` below this process, which ends it when stdin ends."""
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=clean_environment(os.environ))
    except OSError as error:
        return _cannot_run(command, error)
    on_end_of_stdin(process.kill)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    return process.wait()


def _cannot_run(command: Sequence[str], error: OSError) -> int:
    print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    return EXIT_NOT_EXECUTABLE

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


# --- the entry --------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """``--serve|--exec --parent PID -- ...``; the exit code of the process."""
    words = list(sys.argv[1:] if argv is None else argv)
    if len(words) < 5 or words[0] not in ("--serve", "--exec") or words[1] != "--parent" or words[3] != "--":
        print("this is the inside of KVStream; run `kvstream serve --model PATH.gguf`", file=sys.stderr)
        return EXIT_USAGE
    die_with_parent(int(words[2]))
    return serve(words[4:]) if words[0] == "--serve" else become(words[4:])


if __name__ == "__main__":
    sys.exit(main())
