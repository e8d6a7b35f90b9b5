"""Looking at stores and pruning them from outside, whether a KVStream uses them or not.

A running one notices a file that is gone when it is about to restore it, and computes instead. What it is writing is
left alone (see ``kvfiles.sweep``). Everything here blocks.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

from attrs import field, frozen

from ..config import Config
from ..errors import StoreError
from .filelock import try_lock
from .kvfiles import CHECK, DATA, MANIFEST, Disk, manifest_name, stem_of, sweep
from .kvfolders import Known, recall
from .kvshelf import MANIFESTS_MAX, read_manifest
from .machine import llama_flags
from .manifest import Manifest, ManifestError
from .statedir import default_state_dir

DEFAULT_URL: Final = "http://127.0.0.1:8081"
LOOPBACK: Final = frozenset(("127.0.0.1", "localhost", "::1"))

SHOWN_CHARS: Final = 16  # of a name's end: the beginning is the same for all of a model
NAMED_CHARS_MIN: Final = 4
CHECK_OLD_S: Final = 600.0  # no check takes so long
UNUSED_S: Final = 30 * 86400.0  # then the names of an empty remote folder are given up

State = Literal["whole", "missing", "wrong size", "elsewhere"]


@frozen
class Folder:
    """``remote``: only manifests are here. ``url`` of the server that writes the files, and ``bytes_max`` that bounds
    them, where a KVStream has noted it."""

    path: Path
    remote: bool = False
    url: str = field(default="", eq=False)
    bytes_max: int | None = field(default=None, eq=False)


@frozen
class Row:
    """One kept file. ``state`` is what its file looks like; ``elsewhere``: it is on a disk that we cannot see."""

    folder: Folder
    manifest: Manifest
    state: State

    @property
    def name(self) -> str:
        return self.manifest.name.removesuffix(".kv")

    @property
    def shown(self) -> str:
        """What of its name is shown."""
        return self.name[-SHOWN_CHARS:]

    @property
    def model_state(self) -> Literal["ok", "changed", "gone", "?"]:
        """Whether the model that it belongs to is still on this machine as it was."""
        facts = self.manifest.facts
        path, known = facts.get("file path", "") or facts.get("model_path", ""), facts.get("file model", "")
        if not path or not known or not Path(path).is_absolute():
            return "?"
        try:
            found = Path(path).stat()
        except FileNotFoundError:
            return "gone"
        except (OSError, ValueError):
            return "?"
        return "ok" if known == f"{found.st_size} bytes of {found.st_mtime_ns}" else "changed"

    @property
    def model(self) -> str:
        facts = self.manifest.facts
        return Path(facts.get("model_path", "")).name or facts.get("model", "") or "?"


@frozen
class Listing:
    """``damaged`` manifests, as ``folder/name: why``."""

    rows: tuple[Row, ...]
    damaged: tuple[str, ...]

    def of(self, folder: Folder) -> Listing:
        """Of one folder only."""
        return Listing(tuple(row for row in self.rows if row.folder == folder), ())

    @property
    def bytes(self) -> int:
        return sum(row.manifest.size for row in self.rows)


def flag_folder(port: int) -> str:
    """The --slot-save-path of the llama.cpp server on that port of this machine; empty when it cannot be seen."""
    flags = llama_flags(port)
    return flags.slot_save_path if flags is not None else ""


def folders_of(config: Config, seen: Callable[[int], str] = flag_folder) -> list[Folder]:
    """Where the KVStream of this configuration keeps files: inject.dir, the folder of a server that runs here, those of
    embedded servers, those that were used before, and the manifests of files that are elsewhere."""
    state = _state_dir(config)
    known = {each.path: each for each in recall(state)}
    found = [Path(config.inject.dir).expanduser()] if config.inject.dir else []
    for backend in config.backends:
        parts = urlsplit(backend.base_url)
        if backend.type == "llamacpp" and not config.inject.dir and (parts.hostname or "127.0.0.1") in LOOPBACK:
            folder = seen(parts.port or 8081)
            found += [Path(folder)] if folder else []
    found += sorted(path for path in _folders(state / "slots") if path.name.isdecimal())
    found += [each.path for each in known.values() if not each.remote and each.path.is_dir()]
    remote = sorted(path for each in _folders(state / "remote") for path in _folders(each))
    unique = list(dict.fromkeys(path.absolute() for path in found))
    return [*(_folder(path, known.get(path)) for path in unique),
            *(_folder(path, known.get(path.parent), remote=True) for path in remote)]


def _folder(path: Path, known: Known | None, *, remote: bool = False) -> Folder:
    return Folder(path, remote) if known is None else Folder(path, remote, known.url, known.bytes_max)


def _state_dir(config: Config) -> Path:
    return Path(config.embedded.state_dir).expanduser() if config.embedded.state_dir else default_state_dir()


def unseen_servers(config: Config, seen: Callable[[int], str] | None = None) -> list[str]:
    """Addresses of servers of this machine that do not run now, or do not show where their files are, and of which
    nothing is known from before."""
    seen = seen or flag_folder
    known = {each.url for each in recall(_state_dir(config))}
    return [backend.base_url or DEFAULT_URL for backend in config.backends
            if backend.type == "llamacpp" and not config.inject.dir and backend.base_url not in known
            and (backend.base_url or not known)
            and ((parts := urlsplit(backend.base_url)).hostname or "127.0.0.1") in LOOPBACK
            and not seen(parts.port or 8081)]


def _folders(path: Path) -> list[Path]:
    try:
        return [entry for entry in path.iterdir() if entry.is_dir() and not entry.is_symlink()]
    except OSError:
        return []


def look(folders: Iterable[Folder]) -> Listing:
    """What is kept there, the latest used first. *Errors*: ``StoreError`` for a folder that cannot be read."""
    disk = Disk()
    rows: list[Row] = []
    damaged: list[str] = []
    for folder in folders:
        try:
            names = [name for name in disk.names(folder.path) if MANIFEST.fullmatch(name)]
        except OSError as error:
            raise StoreError(f"{folder.path} cannot be read: {error.strerror or error}") from error
        for name in names[:MANIFESTS_MAX]:
            try:
                manifest = read_manifest(disk, folder.path, name)
                rows.append(Row(folder, manifest, _state(disk, folder, manifest)))
            except (OSError, ManifestError) as error:
                damaged.append(f"{folder.path / name}: {error}")
    rows.sort(key=lambda row: -row.manifest.used)
    return Listing(tuple(rows), tuple(damaged))


def _state(disk: Disk, folder: Folder, manifest: Manifest) -> State:
    if folder.remote:
        return "elsewhere"
    try:
        size = disk.state(folder.path / manifest.file).size if DATA.fullmatch(manifest.file) else -1
    except FileNotFoundError:
        return "missing"
    return "whole" if size == manifest.size else "wrong size"


def named(listing: Listing, names: Sequence[str]) -> list[Row]:
    """The rows of these names; the beginning or end of a name, or of what is shown of it, is enough where that is
    clear. *Errors*: ``StoreError``."""
    found: dict[tuple[Path, str], Row] = {}
    for name in names:
        wanted = name.removesuffix(".kv")
        rows = [row for row in listing.rows if row.name == wanted]
        if not rows and len(wanted) < NAMED_CHARS_MIN:
            raise StoreError(f"{name!r} is too short; at least {NAMED_CHARS_MIN} characters of a name are needed")
        rows = rows or [row for row in listing.rows
                        if row.name.startswith(wanted) or row.name.endswith(wanted) or row.shown.startswith(wanted)]
        different = {row.name for row in rows}
        if len(different) != 1:
            fault = f"could be any of {len(different)}" if different else "is not in the store"
            raise StoreError(f"{name} {fault}; kvstream cache ls shows what there is")
        found.update({(row.folder.path, row.name): row for row in rows})
    return list(found.values())


def remove(rows: Iterable[Row]) -> int:
    """Delete them, and forget those whose files lie elsewhere; gives the bytes that were freed here. *Errors*:
    ``StoreError`` when one cannot be."""
    disk = Disk()
    freed = 0
    for row in rows:
        try:
            disk.remove(row.folder.path / manifest_name(row.manifest.name))
            if not row.folder.remote and DATA.fullmatch(row.manifest.file):
                disk.remove(row.folder.path / row.manifest.file)
        except OSError as error:
            raise StoreError(f"{row.name} in {row.folder.path} cannot be deleted: {error.strerror or error}") from error
        freed += row.manifest.size if row.state != "elsewhere" else 0
    return freed


def excess(listing: Listing, *, bytes_max: int | None, age_s_max: float | None, now: float) -> list[Row]:
    """What has to go: what can be of no use, what was unused for too long, then the longest unused until the rest fits.
    """
    useless = [row for row in listing.rows if row.state in ("missing", "wrong size")]
    kept = [row for row in listing.rows if row.state not in ("missing", "wrong size")]
    old = [row for row in kept if age_s_max is not None and now - row.manifest.used > age_s_max]
    kept = [row for row in kept if row not in old]
    total = sum(row.manifest.size for row in kept if row.state == "whole")
    large = []
    for row in reversed(kept):
        if bytes_max is None or total <= bytes_max:
            break
        if row.state == "whole":
            large.append(row)
            total -= row.manifest.size
    return [*useless, *old, *large]


def tidy(folders: Iterable[Folder]) -> int:
    """Remove what dead KVStreams left half done, and damaged manifests with their files; gives the bytes. *Errors*:
    ``StoreError``."""
    disk = Disk()
    freed = 0
    for folder in folders:
        if folder.remote:
            drop_unused(folder.path)
            continue
        referenced, unread = set(), set()
        try:
            for name in disk.names(folder.path):
                if not MANIFEST.fullmatch(name):
                    continue
                try:
                    referenced.add(read_manifest(disk, folder.path, name).file)
                except OSError:
                    unread.add(stem_of(name.removesuffix(".json")))
                except ManifestError as error:
                    if error.foreign:
                        unread.add(stem_of(name.removesuffix(".json")))
                    else:
                        disk.remove(folder.path / name)
            freed += _drop_checks(disk, folder.path)
            freed += sweep(disk, folder.path, referenced=frozenset(referenced), unread=frozenset(unread))
        except OSError as error:
            raise StoreError(f"{folder.path} cannot be tidied: {error.strerror or error}") from error
    return freed


def _drop_checks(disk: Disk, folder: Path) -> int:
    """Remove what checks left that could not see this folder; gives the bytes."""
    freed = 0
    for name in disk.names(folder):
        if CHECK.fullmatch(name):
            with contextlib.suppress(OSError):
                state = disk.state(folder / name)
                if time.time() - state.mtime_ns / 1e9 > CHECK_OLD_S:
                    disk.remove(folder / name)
                    freed += state.size
    return freed


def drop_unused(folder: Path, now: Callable[[], float] = time.time) -> None:
    """Remove a folder of manifests that nobody holds and nothing was ever kept in, or not for long. One that was used
    a while ago stays: it has the names under which files lie on the server's disk, which are used again. Never raises.
    """
    with contextlib.suppress(OSError):
        fd = os.open(folder.with_name(f"{folder.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            names = [entry.name for entry in folder.iterdir()]
            if try_lock(fd) and not set(names) - {"id"}:
                changed = folder.stat().st_mtime
                if not names or changed <= (folder / "id").stat().st_mtime or now() - changed > UNUSED_S:
                    (folder / "id").unlink(missing_ok=True)
                    folder.rmdir()
        finally:
            os.close(fd)
