"""The licences of what KVStream is made with, as each installed distribution tells its own.

The executable and the zipapp carry them as one file, written when they are built (``NOTICES`` beside this module); from
a checkout or a wheel they are read from the installed distributions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib import metadata, resources

from attrs import frozen

from .errors import KVStreamError

NOTICES = "notices.txt"
OWN = "kvstream"
RULE = "-" * 78

_FILE = re.compile(r"(^|/)(licen[cs]es?|copying|notice|authors)[^/]*$|\.dist-info/licenses/", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9._-]+")


@frozen
class Notice:
    """``licence`` is what the distribution calls it, ``texts`` its licence files, each with its name."""

    name: str
    version: str
    licence: str
    texts: tuple[tuple[str, str], ...]

    def whole(self) -> str:
        parts = [RULE, f"{self.name} {self.version}: {self.licence}", RULE, ""]
        for name, text in self.texts:
            parts += [f"[{name}]", "", text.strip(), ""]
        return "\n".join(parts)


def packed() -> str:
    """What was written when this file was built; empty in a checkout or a wheel."""
    try:
        return (resources.files("kvstream") / NOTICES).read_text("utf-8")
    except OSError:
        return ""


def needed(root: str = OWN) -> Iterator[str]:
    """The names of what ``root`` needs and what that needs, as far as it is installed, extras left out; sorted.

    *Errors*: ``KVStreamError`` when ``root`` itself is not installed.
    """
    try:
        metadata.distribution(root)
    except metadata.PackageNotFoundError:
        raise KVStreamError(f"{root} runs from a folder, pip has not installed it: pyproject.toml lists what it needs,"
                            " and each of these brings its licence") from None
    seen: set[str] = set()
    waiting = [root]
    while waiting:
        name = waiting.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in seen:
            continue
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        seen.add(key)
        for line in found.requires or ():
            start = _NAME.match(line)
            if start is not None and "extra ==" not in line:
                waiting.append(start.group())
    return iter(sorted(seen - {root}))


def notices(names: Iterable[str]) -> tuple[Notice, ...]:
    return tuple(_notice(metadata.distribution(name)) for name in names)


def _notice(found: metadata.Distribution) -> Notice:
    about = found.metadata
    said = next((about[name] for name in ("License-Expression", "License") if name in about), "")
    if not said or "\n" in said:  # some put the whole text there
        ends = [line.rpartition("::")[2].strip() for line in about.get_all("Classifier") or () if "License ::" in line]
        said = " and ".join(ends) or said.strip().partition("\n")[0] or "see below"
    texts = [(path.as_posix().rpartition("/")[2], path.read_text("utf-8")) for path in found.files or ()
             if _FILE.search(path.as_posix()) and path.suffix not in (".py", ".pyc", ".so")]
    return Notice(about["Name"], found.version, said, tuple(sorted(set(texts))))
