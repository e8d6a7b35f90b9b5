"""``kvstream reload``: SIGHUP to a running KVStream, and what it made of it, by its own /status."""

from __future__ import annotations

import ipaddress
import os
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from ..errors import ConfigError, KVStreamError
from .machine import started, takes_hangup
from .statusview import fetch, open_client

OUTCOME_S_MAX = 20.0  # a file that is written all the time is read after a second; lanes open at once
LOOK_S = 0.05


def reload_running(url: str, key: str, pid: int | None) -> Iterator[str]:
    """Ask the KVStream at ``url``, which is to be process ``pid`` if that is given; what came of it, in lines.

    *Errors*: ``ConfigError`` when it refuses the file; other ``KVStreamError`` when it cannot be asked, or its answer
    not be seen.
    """
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is None:
        raise KVStreamError("there is no SIGHUP on this system; server.reload = 'auto' reads a changed file anyway")
    with open_client(url, key) as client:
        try:
            snapshot = fetch(client)
            number = _process(snapshot, url, pid)
        except KVStreamError as error:
            if pid is None:
                raise
            _refuse_stranger(pid, error)
            _send(pid, hangup)
            raise KVStreamError(f"process {pid} was asked to reload; what came of it is in its log, since "
                                f"{error.message[0].lower() + error.message[1:]}") from error
        before = _config(snapshot)
        if not before.get("may_reload", True):
            raise KVStreamError("that KVStream reads nothing again: its server.reload is off")
        if snapshot.get("state") == "draining":
            raise KVStreamError("that KVStream is stopping; it reads nothing again")
        _send(number, hangup)
        deadline = time.monotonic() + OUTCOME_S_MAX
        while (after := _config(fetch(client))).get("answered", 0) <= before.get("answered", 0):
            if time.monotonic() > deadline:
                raise KVStreamError(f"process {number} was asked and said nothing for {OUTCOME_S_MAX:g} s; see its log")
            time.sleep(LOOK_S)
    if after.get("error"):
        raise ConfigError([str(after["error"]), "nothing was changed: what was in force before still is"])
    yield f"in force: {after.get('path') or 'the defaults, the environment and the command line; there is no file'}"
    for path in after.get("restart") or ():
        yield f"restart to apply: {path}"


def _config(snapshot: Mapping[str, Any]) -> Mapping[str, Any]:
    config = snapshot.get("config")
    return config if isinstance(config, dict) else {}


def _process(snapshot: Mapping[str, Any], url: str, wanted: int | None) -> int:
    """The process that answers at ``url``. A signal must not meet a stranger: a port may be forwarded from a container
    or another machine, whose process numbers are not ours."""
    told = snapshot.get("process")
    pid, began = (told.get("pid"), told.get("started")) if isinstance(told, dict) else (None, None)
    if not isinstance(pid, int):
        raise KVStreamError(f"{url} does not say which process it is")
    if wanted is not None and wanted != pid:
        raise KVStreamError(f"{url} is another KVStream, process {pid}; say with --url where process {wanted} listens")
    if wanted is not None and None not in (began, started(pid)) and began != started(pid):
        raise KVStreamError(f"{url} is another KVStream, process {pid} of another system or container")
    if wanted is None and not (_is_here(url) and began is not None and began == started(pid)):
        raise KVStreamError(f"the KVStream at {url} is not a process of this machine that can be seen from here; "
                            "run this where it runs, or name its process with --pid")
    return pid


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _refuse_stranger(pid: int, unsure: KVStreamError) -> None:
    """*Errors*: ``KVStreamError`` for a process that is gone, or not seen to be a KVStream: by /status it is not."""
    _send(pid, 0)
    takes = takes_hangup(pid)
    if takes is None:
        raise KVStreamError(f"what process {pid} is cannot be seen here, and SIGHUP kills most programs; nothing was "
                            f"sent: {unsure.message[0].lower() + unsure.message[1:]}") from unsure
    if not takes:
        raise KVStreamError(f"process {pid} is not a KVStream that serves (by its command line, and whether it catches "
                            "SIGHUP, which kills other programs); nothing was sent. --url says where one "
                            "listens") from unsure


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, OverflowError) as error:
        raise KVStreamError(f"there is no process {pid}") from error
    except PermissionError as error:
        raise KVStreamError(f"process {pid} belongs to somebody else: ask as that user, or as root") from error
