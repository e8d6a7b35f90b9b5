"""Several backends: the ``[[backend]]`` tables of a file, and what must hold between backends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import attrs

from .config import KEYS, BackendConfig, Config
from .config_keys import as_toml

BACKENDS_MAX = 64
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", "::"})


class Rows:
    """The tables as they were read, each value checked already."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._origin = ""

    def add(self, row: dict[str, Any], origin: str) -> None:
        self._rows.append(row)
        self._origin = origin

    def several(self, embedded: bool) -> bool:
        """Whether they make more than one backend, together with the embedded one."""
        return len(self._rows) + embedded > 1 and bool(self._rows)

    def put_under(self, values: dict[str, Any], origins: dict[str, str]) -> None:
        """A single table is what ``[backend]`` would be: weaker than a variable or a flag."""
        for name, value in (item for row in self._rows for item in row.items()):
            if f"backend.{name}" not in values:
                values[f"backend.{name}"], origins[f"backend.{name}"] = value, self._origin

    def put_into(self, config: Config, origins: dict[str, str]) -> Config:
        """A configuration with all of them, after the embedded one if there is one."""
        backends = [BackendConfig(**row) for row in self._rows]
        for number, row in enumerate(self._rows, 1):
            origins |= {f"backend[{number}].{about.name}": self._origin if about.name in row else "default"
                        for about in KEYS if about.section == "backend"}
        first = config.backend if config.embedded.model else backends.pop(0)
        return attrs.evolve(config, backend=first, more_backends=tuple(backends))


def both_forms(raw: bytes) -> bool:
    """Whether a file that is no TOML has ``[backend]`` beside ``[[backend]]``, which is why."""
    return all(re.search(form, raw, re.MULTILINE) for form in (rb"^[ \t]*\[[ \t]*backend[ \t]*\]",
                                                               rb"^[ \t]*\[\[[ \t]*backend[ \t]*\]\]"))


def rows_of(config: Config) -> tuple[BackendConfig, ...]:
    """The ``[[backend]]`` tables; empty where there is one backend only, which is ``[backend]``."""
    if not config.more_backends:
        return ()
    return config.more_backends if config.embedded.model else (config.backend, *config.more_backends)


def _places(config: Config) -> Iterator[tuple[str, BackendConfig]]:
    """(how a message calls it, the backend), for those that have an address."""
    rows = rows_of(config)
    if not rows and not config.embedded.model:
        yield "backend", config.backend
    for number, row in enumerate(rows, 1):
        yield f"backend[{number}]", row


def check_backends(config: Config) -> list[str]:
    """Problems of and between the backends."""
    problems: list[str] = []
    names: dict[str, str] = {}
    urls: dict[str, str] = {}
    if config.embedded.model and config.backend.name:
        names[config.backend.name] = "the embedded server"
    for place, backend in _places(config):
        url = backend.url.removesuffix("/v1")
        if not url:
            problems.append(f"{place}.base_url: an {backend.type} backend has no default address; set it, "
                            "for example http://127.0.0.1:8000 (--backend-url)")
        elif url in urls:
            problems.append(f"{place}.base_url: {url} is that of {urls[url]} too; one runtime is one backend "
                            "(models and aliases take several names)")
        elif _is_own(url, config):
            problems.append(f"{place}.base_url: {url} is where KVStream itself is to listen; name the runtime's "
                            "address, or another server.port")
        if backend.name in names:
            problems.append(f"{place}.name: {as_toml(backend.name)} is that of {names[backend.name]} too")
        urls.setdefault(url, place)
        if backend.name:
            names.setdefault(backend.name, place)
    return problems


def _is_own(url: str, config: Config) -> bool:
    """Whether it is certain that this is our own address. Others are noticed by the first call that comes back."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    host, own = (parts.hostname or "").lower(), config.server.host.lower().strip("[]")
    return port == config.server.port and (host == own or (host in _LOOPBACK and own in _LOOPBACK))
