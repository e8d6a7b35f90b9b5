"""Facts about this machine that no server tells: its memory, file limits, and how a local server was started.

What a platform does not offer is None; only Linux shows other processes' command lines.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve

from ..adapters.llamacpp_flags import ENVIRONMENT_PREFIX, ServerFlags, is_llama_server

PROCESSES_MAX = 10_000
COMMAND_BYTES_MAX = 128 * 1024
OLLAMA_PREFIX = "OLLAMA_"


def memory_bytes() -> int | None:
    """The memory that processes here can have: the machine's, or a container's share of it."""
    try:
        total: int | None = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        total = _windows_memory()
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text("utf-8").strip()
    except OSError:
        return total
    return min(total, int(limit)) if total is not None and limit.isdecimal() else total


def _windows_memory() -> int | None:
    """From GlobalMemoryStatusEx; not tried on a real Windows."""
    import ctypes
    import struct

    kernel = getattr(getattr(ctypes, "windll", None), "kernel32", None)
    if kernel is None:
        return None
    status = ctypes.create_string_buffer(struct.pack("=II7Q", 64, 0, *(0,) * 7), 64)
    return int(struct.unpack_from("=Q", status, 8)[0]) if kernel.GlobalMemoryStatusEx(status) else None


def files_max() -> int | None:
    """How many files a process may open at most (the hard limit); None when there is no limit, or none to be known."""
    if sys.platform == "win32":
        return None
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def process_json() -> dict[str, Any]:
    """This process for ``/status``, so that `kvstream reload` can tell that it found the right one: a container's
    process 1 is not the machine's."""
    return {"pid": os.getpid(), "started": started(os.getpid())}


def started(pid: int, proc: Path = Path("/proc")) -> int | None:
    """When a process began, in the kernel's ticks; two that had the same number differ in it. None when that cannot be
    seen."""
    try:
        words = (proc / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return int(words[19])
    except (OSError, ValueError, IndexError):
        return None


def takes_hangup(pid: int, proc: Path = Path("/proc")) -> bool | None:
    """Whether a process is a KVStream that serves, by its command line, and catches SIGHUP: others die of it. None when
    that cannot be seen."""
    try:
        status = (proc / str(pid) / "status").read_text("utf-8", "replace")
        caught = int(status.partition("\nSigCgt:")[2].split()[0], 16) >> (signal.SIGHUP - 1) & 1
    except (OSError, ValueError, IndexError):
        return None
    words = _words(proc / str(pid) / "cmdline")
    try:
        words[:1] = [*words[:1], str((proc / str(pid) / "exe").readlink())]  # a file under another name
    except OSError:
        pass
    commands = [number for number, each in enumerate(words) if each in ("serve", "demo")]
    return bool(caught and commands and any("kvstream" in each.lower() for each in words[:commands[0]]))


def llama_flags(port: int, proc: Path = Path("/proc")) -> ServerFlags | None:
    """How the llama.cpp server on ``port`` of this machine was started; None when that cannot be seen, or not for
    sure."""
    found = []
    for pid, argv in _commands(proc):
        if is_llama_server(argv):
            flags = _absolute(ServerFlags.read(argv, _environment(pid, ENVIRONMENT_PREFIX)), pid)
            if flags.port == port:
                found.append(flags)
    return found[0] if found and all(flags == found[0] for flags in found) else None


def llama_folder(port: int, proc: Path = Path("/proc")) -> str:
    """Where the llama.cpp server on ``port`` of this machine runs, which its relative paths are meant from; empty when
    that cannot be seen, or not for sure."""
    found = set()
    for pid, argv in _commands(proc):
        if is_llama_server(argv) and ServerFlags.read(argv, _environment(pid, ENVIRONMENT_PREFIX)).port == port:
            try:
                found.add(str((pid / "cwd").readlink()))
            except OSError:
                return ""
    return found.pop() if len(found) == 1 else ""


def _absolute(flags: ServerFlags, pid: Path) -> ServerFlags:
    """A relative folder is meant from where the server runs; it stays as it is where that cannot be seen."""
    if not flags.slot_save_path or Path(flags.slot_save_path).is_absolute():
        return flags
    try:
        return evolve(flags, slot_save_path=str((pid / "cwd").readlink() / flags.slot_save_path))
    except OSError:
        return flags


def ollama_variables(proc: Path = Path("/proc")) -> Mapping[str, str] | None:
    """The ``OLLAMA_`` variables of a local ``ollama serve``; None when there is none, or it is not ours to look at."""
    for pid, argv in _commands(proc):
        if argv[0].rpartition("/")[2] == "ollama" and "serve" in argv[1:2]:
            return _environment(pid, OLLAMA_PREFIX) if os.access(pid / "environ", os.R_OK) else None
    return None


def _commands(proc: Path) -> Iterator[tuple[Path, list[str]]]:
    try:
        pids = [entry for entry in proc.iterdir() if entry.name.isdecimal()][:PROCESSES_MAX]
    except OSError:
        return
    for pid in pids:
        words = _words(pid / "cmdline")
        if words and words[0]:
            yield pid, words


def _environment(pid: Path, prefix: str) -> dict[str, str]:
    """Only the variables with that prefix: the rest of a process's environment is none of our business."""
    pairs = (word.partition("=") for word in _words(pid / "environ") if word.startswith(prefix))
    return {name: value for name, _, value in pairs}


def _words(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            data = file.read(COMMAND_BYTES_MAX)
    except OSError:  # gone meanwhile, or somebody else's
        return []
    return data.decode("utf-8", "replace").rstrip("\0").split("\0")
