"""KVStream as a systemd service: the files that make it one, and where they go.

The files in ``systemd/`` are the only ones there are. They name the usual places; what is written has those of this
machine instead, and for a user's manager it ends where the unit says that only the system's understands the rest.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from attrs import define, field, frozen

from .errors import ConfigError, KVStreamError
from .parts import form, own_file

PROGRAM = "/usr/local/bin/kvstream"  # in the unit's text, and where a copy goes
CONFIG = "/etc/kvstream/kvstream.toml"
VARIABLES = "/etc/kvstream/kvstream.env"
ONLY_SYSTEM = "\n# From here on only the system's manager."
# What a service with ProtectHome and PrivateTmp does not see.
HIDDEN = ("/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/")


def text_of(name: str) -> str:
    """One of ``kvstream.service``, ``kvstream.socket``, ``gpu.conf``, ``lan.conf``, as it is shipped."""
    return files("kvstream").joinpath("systemd", name).read_text("utf-8")


@frozen
class Places:
    """Where things are for one manager. ``root``: what stands for ``/`` (an image that is being made)."""

    user: bool
    root: Path = Path("/")

    @property
    def units(self) -> Path:
        return _xdg_config() / "systemd" / "user" if self.user else self.root / "etc" / "systemd" / "system"

    @property
    def config(self) -> Path:
        return _xdg_config() / "kvstream" / "kvstream.toml" if self.user else Path(CONFIG)

    def on_disk(self, path: Path) -> Path:
        """Where a path of the unit is to be written."""
        return self.root / path.relative_to("/")


def _xdg_config() -> Path:
    named = os.environ.get("XDG_CONFIG_HOME", "")
    if named:
        return Path(named)
    try:
        return Path.home() / ".config"
    except RuntimeError as error:  # a user without a line in /etc/passwd, and no HOME
        raise ConfigError("this user has no home folder: set HOME, or XDG_CONFIG_HOME") from error


def from_here(path: Path) -> Path:
    """``path``, absolute. *Errors*: ``ConfigError`` where what it is relative to is gone."""
    try:
        return path.absolute()
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: the folder that this is meant from is gone; give the whole path") from error


def unit(command: Sequence[str], config: Path, *, user: bool = False) -> str:
    """The unit that runs ``command`` (program and first words) with ``config``."""
    text = text_of("kvstream.service")
    if user:
        head, found, tail = text.partition(ONLY_SYSTEM)
        assert found
        install = tail[tail.index("\n[Install]"):].replace("multi-user.target", "default.target")
        # A user's manager has no network-online.target, and no right to raise a hard limit.
        head = re.sub(r"(?m)^(After|Wants)=network-online.target\n", "", head)
        head = head.replace("systemctl edit", "systemctl --user edit")
        text = head + install
    check_words(command[0], (*command, str(config)))
    program = " ".join((word(command[0], program=True), *(word(part) for part in command[1:])))
    text = text.replace(f"={PROGRAM} ", f"={program} ").replace(f" --config {CONFIG}", f" --config {word(str(config))}")
    return text.replace(f"=-{VARIABLES}", f"=-{_escaped(str(config.with_name('kvstream.env')))}")


def check_words(program: str, words: Sequence[str]) -> None:
    """*Errors*: ``ConfigError`` for what cannot be said in a unit: systemd takes no program with a quote or a backslash
    in its name, however it is written, and its lines are UTF-8."""
    for each in words:
        if not each.isprintable() or (each == program and re.search(r"[\"'\\]", each)):
            raise ConfigError(f"{each!a}: systemd cannot take a path with such characters; rename it")


def word(text: str, *, program: bool = False) -> str:
    """One word of an ExecStart line. In the first, the ``program``, no variables are looked for."""
    text = _escaped(text)
    if not program:
        text = text.replace("$", "$$")
    if re.fullmatch(r"[\w./:@%+,=$~-]+", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


# --- which program ----------------------------------------------------------------------------------------------------


@frozen
class Program:
    """What the unit starts. ``copied_from``: the file has to be copied to ``command``'s first word before."""

    command: tuple[str, ...]
    copied_from: Path | None = None


def program(*, user: bool) -> Program:
    """How the service starts what runs here."""
    here, file = form(), own_file()
    if here == "source":
        return Program((sys.executable, "-m", "kvstream"))
    python = (sys.executable,) if here == "zipapp" else ()
    path = Path(file).resolve()
    if user or seen_by_service(path):
        return Program((*python, str(path)))
    return Program((*python, PROGRAM + (".pyz" if here == "zipapp" else "")), copied_from=path)


def seen_by_service(path: Path) -> bool:
    """Whether a service under a user of its own can read ``path``: where it is, and that everybody may."""
    return not hidden_from_service(path) and all(
        each.stat().st_mode & (stat.S_IXOTH if each.is_dir() else stat.S_IROTH) for each in (path, *path.parents))


def hidden_from_service(path: Path) -> bool:
    return f"{path}/".startswith(HIDDEN)


def check_environment() -> None:
    """*Errors*: ``KVStreamError`` where a system service cannot see the Python that runs here, or what it imports."""
    here = form()
    if here == "executable":
        return
    python = Path(sys.executable)
    parts = [python, python.resolve(), Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()]
    if here == "source":
        parts.append(Path(__file__).parent.resolve())
    unseen = [str(path) for path in parts if not seen_by_service(path)]
    if unseen:
        what, other = (("this KVStream is installed", "install it elsewhere (/opt)") if here == "source" else
                       ("the Python of this KVStream is", "start the file with another Python (/usr/bin/python3)"))
        raise KVStreamError(
            f"a system service does not see {unseen[0]}, where {what} (a home folder, or closed to others): use "
            f"--user, {other}, or take the one-file executable")


# --- writing ----------------------------------------------------------------------------------------------------------


@define
class Installer:
    """Writes files. ``force`` replaces what is there and differs; ``done`` tells what was written, in words."""

    places: Places
    force: bool = False
    done: list[str] = field(factory=list)
    _to_do: list[tuple[Path, str | Path, int]] = field(factory=list)

    def add(self, path: Path, content: str | Path, mode: int = 0o644) -> None:
        """Plan to write a text, or a copy of a file."""
        self._to_do.append((path, content, mode))

    def check(self) -> None:
        """*Errors*: ``KVStreamError`` naming every file that is there and differs, unless ``force``."""
        differ = [str(path) for path, content, _ in self._to_do if path.exists() and not _is(path, content)]
        if differ and not self.force:
            raise KVStreamError(f"{', '.join(differ)}: there already, with other contents; nothing was written. "
                                "To upgrade, the same with --force: it replaces these, never a configuration "
                                "(`kvstream service print` shows the unit)")

    def write(self) -> None:
        """*Errors*: ``KVStreamError`` for what cannot be written."""
        for path, content, mode in self._to_do:
            new = path.with_name(f".{path.name}.new")  # a running program cannot be written, but replaced
            try:
                if path.exists() and _is(path, content):
                    self.done.append(f"{path}: is there already")
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                if isinstance(content, Path):
                    shutil.copyfile(content, new)
                else:
                    new.write_text(content, "utf-8")
                new.chmod(mode)
                new.replace(path)
            except OSError as error:
                with contextlib.suppress(OSError):
                    new.unlink(missing_ok=True)
                raise cannot(self.places, error, path) from error
            self.done.append(f"{path}: " + (f"copied from {content}" if isinstance(content, Path) else "written"))


def cannot(places: Places, error: OSError, path: Path | None = None) -> KVStreamError:
    """A file that cannot be looked at, or written, in a sentence."""
    hint = ("" if places.user or not isinstance(error, PermissionError) else
            "; a system service is installed by root (sudo), --user needs no rights")
    return KVStreamError(f"cannot write {path or error.filename}: {error.strerror}{hint}")


def _is(path: Path, content: str | Path) -> bool:
    if isinstance(content, Path) and path.is_symlink():
        return False  # it may lead to the very place that the service does not see
    wanted = content.read_bytes() if isinstance(content, Path) else content.encode()
    return path.read_bytes() == wanted


def plan(places: Places, config: Path | None, *, template: str, socket: bool = False, gpu: bool = False,
         lan: bool = False, force: bool = False) -> Installer:
    """Everything that ``kvstream service install`` writes. Without ``config`` the usual one is used, and made from
    ``template`` where there is none.

    *Errors*: ``ConfigError``, ``KVStreamError``.
    """
    if not places.user:
        check_environment()
    installer, found = Installer(places, force), program(user=places.user)
    if found.copied_from is not None:
        installer.add(places.on_disk(Path(found.command[-1])), found.copied_from, 0o755)
    if config is None:
        config = places.config
        if not places.on_disk(config).exists():
            installer.add(places.on_disk(config), template)
    else:
        config = from_here(config)
        if not places.on_disk(config).is_file():
            raise ConfigError(f"--config: there is no file {places.on_disk(config)}")
        if not places.user and hidden_from_service(config):
            raise ConfigError(f"--config: {config} is where a system service does not see it (ProtectHome, PrivateTmp)"
                              f"; {CONFIG} is the usual place")
    folder = places.units
    installer.add(folder / "kvstream.service", unit(found.command, config, user=places.user))
    if socket:
        installer.add(folder / "kvstream.socket", text_of("kvstream.socket"))
    for wanted, name in ((gpu, "gpu.conf"), (lan, "lan.conf")):
        if wanted:
            installer.add(folder / "kvstream.service.d" / name, text_of(name))
    return installer


def faults_of_config(places: Places, config: Path) -> list[str]:
    """Why the service would not start with this configuration, as far as can be told from here. In an image what it
    names is elsewhere, and half of it may come from a drop-in's variables."""
    from .config import load_config

    file, here = places.on_disk(config), places.root == Path("/")
    if not file.exists():
        return []
    try:
        if not places.user and not file.stat().st_mode & stat.S_IROTH:
            return [f"{file}: the service's user may not read it (chmod o+r); keys belong into kvstream.env beside it"]
        found = load_config(file, _variables(file.with_name("kvstream.env")), {}, {}, together=here).config
    except ConfigError as error:
        return error.problems
    model = found.embedded.model
    if model and here and not places.user and hidden_from_service(Path(model).absolute()):
        return [f"embedded.model: {model} is where a system service does not see it; /srv is a place"]
    return []


def _variables(path: Path) -> dict[str, str]:
    """Those of an EnvironmentFile: as far as somebody who may not read it, and its plain lines, tell."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeError):
        return {}
    pairs = (line.strip().partition("=") for line in lines if re.match(r"\s*[A-Za-z_]\w*=", line))
    return {name: value.strip("\"'") for name, _, value in pairs}
