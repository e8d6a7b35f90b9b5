"""The file of client keys, ``auth.keys_file``: read strictly, every problem at once, each with its line.

::

    [[key]]
    name = "alice"            # letters, digits, dot, dash, underscore; shown in logs and the name seats are shared by
    key = "kvs-3f9c..."       # what she sends; or sha256 = "..." (hex), so that the file holds no secret
    priority = "normal"       # the class of her requests, and the best that she may ask for
    share = 1.0               # weight in the fair share of seats
    rate = 60                 # requests per minute, 0 = no limit

A key is kept as its SHA-256 digest from here on; nothing later can print it.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli
from attrs import field, frozen

from .config import AuthConfig
from .config_keys import as_toml, header_safe, one_of
from .errors import ConfigError

KEYS_MAX = 1000  # every one is compared with every key that comes in
KEY_CHARS_MAX = 512
FILE_BYTES_MAX = 2**20
PRIORITIES = ("high", "normal", "low")
_FIELDS = frozenset({"name", "key", "sha256", "priority", "share", "rate"})
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LONG_QUOTES = ('"""', "'''")
_HEADER = re.compile(r"[ \t]*\[\[[ \t]*key[ \t]*\]\]")

_Wrong = tuple[str, str]  # the field, or "" where none is at fault, and what is wrong


@frozen
class ClientKey:
    """What one key stands for. ``digest`` is the SHA-256 of the key; ``share`` a weight; ``rate`` requests per minute,
    0 = no limit; ``priority`` the class of its requests and the best it may ask for."""

    name: str
    digest: bytes = field(repr=False)
    priority: str = "normal"
    share: float = 1.0
    rate: float = 0.0


def client_keys(auth: AuthConfig) -> tuple[ClientKey, ...]:
    """All keys of a configuration, those of the file first. *Errors*: ``ConfigError`` with every problem."""
    found = read_keys_file(Path(auth.keys_file)) if auth.keys_file else ()
    digests = {entry.digest for entry in found}
    loose = []
    for secret in auth.keys:
        digest = hashlib.sha256(secret.encode()).digest()
        if digest in digests:
            raise ConfigError("auth.keys: has a key that auth.keys_file has too")
        # not by its place in the list: a name must not pass to another client when the list changes
        loose.append(ClientKey(f"key-{digest.hex()[:8]}", digest))
    return (*found, *loose)


def keys_file_warning(auth: AuthConfig) -> str | None:
    """What is doubtful about the file's permissions, for the log; None when only its owner can read it."""
    if not auth.keys_file or os.name != "posix":
        return None
    try:
        mode = Path(auth.keys_file).stat().st_mode
    except OSError:
        return None
    return f"auth.keys_file: {auth.keys_file} can be read by others; chmod 600 it" if mode & 0o077 else None


def read_keys_file(path: Path) -> tuple[ClientKey, ...]:
    """The keys of a file. *Errors*: ``ConfigError`` with every problem, each with its line."""
    text = _read(path)
    try:
        tables = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise ConfigError(f"{path}: line {error.lineno}, column {error.colno}: not TOML: {error.msg}") from error
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: is not a file of keys: {error}") from error
    entries = tables.pop("key", [])
    if tables:
        raise ConfigError(f"{path}: only [[key]] tables belong here, not {next(iter(tables))}")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{path}: each key begins with a line [[key]]")
    if not entries:
        raise ConfigError(f"{path}: has no [[key]]; nobody could use the gateway")
    if len(entries) > KEYS_MAX:
        raise ConfigError(f"{path}: has {len(entries)} keys; {KEYS_MAX} are the most")
    return _checked(path, entries, _blocks(text, len(entries)))


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"auth.keys_file: {path}: cannot be read: {error.strerror or error}") from error
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: is larger than {FILE_BYTES_MAX} bytes")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: line {raw[: error.start].count(10) + 1}: is not UTF-8") from error


@frozen
class _Block:
    """The lines of one ``[[key]]``. ``first`` is the number of that line, None where it is not known."""

    first: int | None = None
    lines: tuple[str, ...] = ()

    def line_of(self, name: str) -> int | None:
        """Where the field stands; that of the ``[[key]]`` where it is not seen."""
        if self.first is None or any(quotes in line for line in self.lines for quotes in _LONG_QUOTES):
            return self.first
        field_at = re.compile(rf"""[ \t]*["']?{re.escape(name)}["']?[ \t]*=""")
        return next((n for n, line in enumerate(self.lines, self.first) if name and field_at.match(line)), self.first)


def _blocks(text: str, count: int) -> list[_Block]:
    """The lines of each ``[[key]]``; unknown when a string of several lines hides or feigns one."""
    lines = text.split("\n")
    heads = [n for n, line in enumerate(lines) if _HEADER.match(line)]
    if len(heads) != count:
        return [_Block()] * count
    return [_Block(head + 1, tuple(lines[head:end])) for head, end in zip(heads, [*heads[1:], None], strict=True)]


def _checked(path: Path, entries: list[dict[str, Any]], blocks: list[_Block]) -> tuple[ClientKey, ...]:
    problems: list[str] = []
    found: list[ClientKey] = []
    names: set[str] = set()
    digests: set[bytes] = set()
    for number, (entry, block) in enumerate(zip(entries, blocks, strict=True), 1):
        wrong, client = _one(entry)
        if client is not None and client.name in names:
            wrong.append(("name", f"the name {client.name} is taken by another key"))
        if client is not None and client.digest in digests:
            wrong.append(("key" if "key" in entry else "sha256", "the same key as another one"))
        for name, text in wrong:
            line = block.line_of(name)
            problems.append(f"{path}: line {line}: {text}" if line else f"{path}: key {number}: {text}")
        if client is not None:
            found.append(client)
            names.add(client.name)
            digests.add(client.digest)
    if problems:
        raise ConfigError(problems)
    return tuple(found)


def _one(entry: Mapping[str, Any]) -> tuple[list[_Wrong], ClientKey | None]:
    """(problems, the key as far as it has a name and a digest). No message shows a secret."""
    wrong = [(name, f"unknown field {name}; a key has {', '.join(sorted(_FIELDS))}")
             for name in sorted(entry.keys() - _FIELDS)]
    name, priority = entry.get("name"), entry.get("priority", "normal")
    share, rate = entry.get("share", 1.0), entry.get("rate", 0)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        wrong.append(("name", "name must be 1 to 64 letters, digits, dots, dashes or underscores"))
    if priority not in PRIORITIES:
        wrong.append(("priority", f"priority must be {one_of(PRIORITIES)}" + (
            f", not {as_toml(priority)[:40]}" if isinstance(priority, str) else "")))
    if not _number(share) or not 0.001 <= share <= 1000:
        wrong.append(("share", "share must be a number from 0.001 to 1000"))
    if not _number(rate) or not 0 <= rate <= 1e6:
        wrong.append(("rate", "rate must be a number of requests per minute from 0 (no limit) to 1000000"))
    digest = _digest(entry, wrong)
    if wrong or digest is None:
        return wrong, None
    assert isinstance(name, str)
    return wrong, ClientKey(name, digest, priority, float(share), float(rate))


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _digest(entry: Mapping[str, Any], wrong: list[_Wrong]) -> bytes | None:
    secret, digest = entry.get("key"), entry.get("sha256")
    if (secret is None) == (digest is None):
        wrong.append(("", "needs key or sha256") if secret is None else (
            "sha256", "has both key and sha256; only one of them is wanted"))
        return None
    if digest is not None:
        if isinstance(digest, str) and re.fullmatch(r"[0-9a-fA-F]{64}", digest):
            return bytes.fromhex(digest)
        wrong.append(("sha256", "sha256 must be 64 hexadecimal digits"))
        return None
    if (not isinstance(secret, str) or not 1 <= len(secret) <= KEY_CHARS_MAX or " " in secret or header_safe(secret)):
        wrong.append(("key", f"key must be 1 to {KEY_CHARS_MAX} characters of printable ASCII without blanks"))
        return None
    return hashlib.sha256(secret.encode()).digest()
