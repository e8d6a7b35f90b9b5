"""``kvstream service uninstall``: what ``install`` wrote for systemd goes; what may be wanted again stays."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from attrs import frozen

from .errors import KVStreamError
from .service import PROGRAM, Places, text_of

UNITS = ("kvstream.socket", "kvstream.service")
DROP_INS = ("gpu.conf", "lan.conf")


@frozen
class Found:
    """``ours`` are the files and links to remove, ``kept`` what is in their places and was written by somebody else,
    ``units`` what systemd is to stop."""

    ours: tuple[Path, ...]
    kept: tuple[Path, ...]
    units: tuple[str, ...]


def find(places: Places) -> Found:
    """*Errors*: ``OSError``."""
    folder = places.units
    ours, kept, units = [], [], []
    files = [*((folder / name, name) for name in UNITS),
             *((folder / "kvstream.service.d" / name, name) for name in DROP_INS)]
    for path, name in files:
        if not os.path.lexists(path):
            continue
        if not path.is_symlink() and path.read_bytes().startswith(_first_line(name)):
            ours.append(path)
            if name in UNITS:
                units.append(name)
        else:
            kept.append(path)
    # What `systemctl enable` made; it does the same, but an image's systemd cannot be asked.
    ours += [link for link in sorted(folder.glob("*.wants/*")) if link.name in units and link.is_symlink()]
    drop_ins = folder / "kvstream.service.d"
    if drop_ins.is_dir():
        kept += sorted(set(drop_ins.iterdir()) - {*ours, *kept})  # `systemctl edit`
    return Found(tuple(ours), tuple(kept), tuple(units))


def systemd_runs(places: Places) -> bool:
    """Whether a systemd runs that could be running the service: sd_booted(3), and the same for a user's."""
    if places.user:
        return (Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}") / "systemd").is_dir()
    return places.root == Path("/") and Path("/run/systemd/system").is_dir()


def _first_line(name: str) -> bytes:
    """By which a file of ours is known, of whatever release and with whatever path in it."""
    return text_of(name).partition("\n")[0].encode()


def remove(found: Found) -> list[str]:
    """What was removed, in words. *Errors*: ``KVStreamError``."""
    done = []
    try:
        for path in found.ours:
            path.unlink(missing_ok=True)  # systemd has removed its links
            done.append(f"{path}: removed")
        for folder in {path.parent for path in found.ours if path.name in DROP_INS}:
            if not any(folder.iterdir()):
                folder.rmdir()
    except OSError as error:
        raise KVStreamError(f"cannot remove {error.filename}: {error.strerror}; a system service is removed by root "
                            "(sudo), --user needs no rights") from error
    return done


def left(places: Places, found: Found) -> list[str]:
    """What is there still, as lines: one is a command that removes it."""
    lines = [f"{path}: is not from `kvstream service install`, and stays" for path in found.kept]
    there = [str(path) for path in _own_places(places) if os.path.lexists(path)]
    if there:
        lines.append("Left, with configuration, keys and saved KV; to remove it too:")
        lines.append("  rm -r " + " ".join(map(shlex.quote, there)))
    return lines


def _own_places(places: Places) -> list[Path]:
    if places.user:
        homes = (("XDG_STATE_HOME", ".local/state"), ("XDG_CACHE_HOME", ".cache"))
        return [places.config.parent,
                *(Path(os.environ.get(name) or Path.home() / usual) / "kvstream" for name, usual in homes)]
    # With DynamicUser the state is in private/, and a link leads there.
    names = ("/etc/kvstream", "/var/lib/kvstream", "/var/lib/private/kvstream", "/var/cache/kvstream",
             "/var/cache/private/kvstream", PROGRAM, f"{PROGRAM}.pyz")
    return [places.on_disk(Path(name)) for name in names]
