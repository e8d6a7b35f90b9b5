"""Reading the configuration: three sources, one strict conversion, every problem at once.

Theory of operation. Each source (file, environment, flags) is turned into a flat mapping ``section.key -> value`` and
checked *completely*, also where a stronger source overrides it: a typo in a file does not become right because a flag
hides it. The layers are then laid over the defaults and the tree is built from the result.

Conversion is strict. cattrs by itself turns 16.9 into 16 and "12" into 12, which makes a mistake in a file silently
something else, so its primitive hooks are replaced. Text from the environment is first read as the key's type.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, Literal, Union, get_args, get_origin

import tomli
from cattrs import Converter
from cattrs.errors import BaseValidationError

from .config import KEYS, KEYS_BY_PATH, SECTION_TYPES, SECTIONS, Config, Loaded
from .config_auth import client_keys
from .config_backends import BACKENDS_MAX, Rows, both_forms, check_backends
from .config_keys import Key, as_toml, one_of
from .errors import ConfigError

FILE_NAME = "kvstream.toml"
FILE_BYTES_MAX = 2**20  # a configuration is some kilobytes; anything larger is another file named by mistake
ENV_PREFIX = "KVSTREAM_"
# Read by others (the 0.1 names by scripts that still set them, Grafana's by its dashboards), or no key at all.
ENV_OTHERS = ("BACKEND", "BACKEND_URL", "CACHE_DIR", "FILE", "KEY", "MODEL", "TRACEBACK")
ENV_OTHER_PREFIXES = ("GRAFANA_", "SERVICE_")  # Kubernetes sets NAME_SERVICE_HOST for a service of that name
TRUE_WORDS = ("true", "1", "yes", "on")
FALSE_WORDS = ("false", "0", "no", "off")


# --- strict conversion ------------------------------------------------------------------------------------------------


class _WrongType(ValueError):
    """The value does not have the key's type; the message says which type that is."""


def _strict(accepted: tuple[type, ...], wanted: str) -> Any:
    def structure(value: Any, to: Any) -> Any:
        if type(value) not in accepted:
            raise _WrongType(wanted)
        return to(value)

    return structure


def _structure_words(value: Any, to: Any) -> Any:
    if not isinstance(value, str):
        raise _WrongType("a string")
    return value  # which words are allowed is Key.problem's business: it can name them


def _structure_int_or_word(value: Any, to: Any) -> Any:
    words = tuple(word for part in get_args(to) for word in get_args(part))  # int has no arguments, Literal its words
    if type(value) is int or value in words:
        return value
    raise _WrongType(f"a whole number or {one_of(words)}")


def _structure_texts(value: Any, to: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise _WrongType("a list of strings")
    return tuple(value)


def _is_word(kind: Any) -> bool:
    return get_origin(kind) is Literal


def _is_int_or_word(kind: Any) -> bool:
    # Both spellings of a union: `int | Literal[...]` is typing.Union because Literal is not a class.
    return get_origin(kind) is Union and int in get_args(kind) and NoneType not in get_args(kind)


def make_converter() -> Converter:
    """A cattrs converter that changes no value: an int may become a float, nothing else becomes anything."""
    converter = Converter()
    converter.register_structure_hook(bool, _strict((bool,), "true or false"))
    converter.register_structure_hook(int, _strict((int,), "a whole number"))
    converter.register_structure_hook(float, _strict((int, float), "a number"))
    converter.register_structure_hook(str, _strict((str,), "a string"))
    converter.register_structure_hook_func(_is_word, _structure_words)
    converter.register_structure_hook_func(_is_int_or_word, _structure_int_or_word)
    converter.register_structure_hook_func(lambda kind: kind == tuple[str, ...], _structure_texts)
    return converter


def from_text(about: Key, text: str) -> Any:
    """Read text (an environment variable, a flag) as the type of a key; text that is none is returned as it is, for
    the strict conversion to refuse."""
    kind = about.type
    if kind is bool:
        word = text.strip().lower()
        return True if word in TRUE_WORDS else False if word in FALSE_WORDS else text
    if kind is int or _is_int_or_word(kind):
        return _number(int, text)
    if kind is float:
        return _number(float, text)
    if kind == tuple[str, ...]:
        return _texts(text)
    return text


def _number(kind: type, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        return text


def _texts(text: str) -> Any:
    """A TOML array, or words separated by commas."""
    if text.lstrip().startswith("["):
        try:
            return tomli.loads(f"x = {text}")["x"]
        except tomli.TOMLDecodeError:
            return text
    return [word.strip() for word in text.split(",") if word.strip()]


# --- variables that were meant to be keys ----------------------------------------------------------------------------


def doubtful_variables(env: Mapping[str, str]) -> list[str]:
    """A line for each variable that looks like a key but lacks the double underscore, and so sets nothing. No error:
    the prefix is the program's name, and other programs may use it."""
    spellings: dict[str, list[str]] = {}
    for about in KEYS:
        for spelling in (about.name, f"{about.section}_{about.name}"):
            spellings.setdefault(spelling.upper(), []).append(about.env)
    lines = []
    for variable in sorted(env):
        word = variable.removeprefix(ENV_PREFIX)
        if word == variable or "__" in word or word in ENV_OTHERS or word.startswith(ENV_OTHER_PREFIXES):
            continue
        close = difflib.get_close_matches(word, spellings, n=1, cutoff=0.8)
        if close and "://" not in env[variable]:  # Kubernetes again: KVSTREAM_PORT=tcp://10.0.0.1:8080
            lines.append(f"environment {variable}: sets nothing, did you mean {' or '.join(spellings[close[0]])}?")
    return lines


# --- checking one source ----------------------------------------------------------------------------------------------


def check_value(converter: Converter, about: Key, value: Any) -> tuple[Any, str | None]:
    """The value in the key's type, or what is wrong with it."""
    try:
        structured = converter.structure(value, about.type)
    except (_WrongType, BaseValidationError) as error:
        return None, f"must be {error}, not {about.quote(value) if _simple(value) else _kind(value)}"
    except OverflowError:  # an int beyond the range of a float
        return None, "is too large"
    return structured, about.problem(structured)


def _simple(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str))


def _kind(value: Any) -> str:
    return "a table" if isinstance(value, dict) else "a list" if isinstance(value, list) else type(value).__name__


def _suggest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f", did you mean {close[0]}?" if close else ""


def unknown(path: str) -> str:
    """Why a path is not a key, with the nearest key."""
    section, _, name = path.partition(".")
    if section not in SECTIONS:
        homes = [about.path for about in KEYS if about.name == section]
        hint = f", did you mean {homes[0]}?" if homes else _suggest(section, SECTIONS)
        return f"unknown section{hint}" if name else f"unknown key{hint}"
    hint = _suggest(name, [about.name for about in KEYS if about.section == section])
    homes = [about.path for about in KEYS if about.name == name]
    return f"unknown key{hint or (f', did you mean {homes[0]}?' if homes else '')}"


class _Sources:
    """Collects the layers, weakest first, and every problem on the way."""

    def __init__(self) -> None:
        self.converter = make_converter()
        self.problems: list[str] = []
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {about.path: "default" for about in KEYS}
        self.rows = Rows()  # of [[backend]]
        self.outside: dict[str, str] = {}  # keys of backend that a variable or flag sets -> how that is said

    def take(self, path: str, value: Any, origin: str, where: str) -> None:
        """One value from one source. ``where`` begins a problem's line."""
        checked = self.check(path, value, where)
        if checked is not None:
            (self.values[path],) = checked
            self.origins[path] = origin

    def check(self, path: str, value: Any, where: str) -> tuple[Any] | None:
        """The value in the key's type, in a tuple; None if it is wrong, which is noted."""
        about = KEYS_BY_PATH.get(path)
        structured, wrong = check_value(self.converter, about, value) if about else (None, unknown(path))
        if wrong:
            self.problems.append(f"{where}: {wrong}")
        return None if wrong else (structured,)

    def build(self) -> Config:
        several = self.rows.several(bool(self.values.get("embedded.model")))
        if several:
            self.problems.extend(
                f"{where}: there are several backends, and this does not say which one is meant; set it in the "
                "[[backend]] table of the file" for where in self.outside.values())
        else:
            self.rows.put_under(self.values, self.origins)
        sections = {}
        for section, section_type in SECTION_TYPES.items():
            given = {about.name: self.values[about.path] for about in KEYS
                     if about.section == section and about.path in self.values}
            sections[section] = section_type(**given)
        config = Config(**sections)
        return self.rows.put_into(config, self.origins) if several else config


# --- the three sources ------------------------------------------------------------------------------------------------


def _find_file(path: str | os.PathLike[str] | None) -> Path | None:
    if path is not None:
        return Path(path)
    here = Path(FILE_NAME)
    return here if here.exists() else None


def _read_file(path: Path) -> dict[str, Any]:
    """The file as nested tables. *Errors*: ConfigError, with file and line."""
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: is larger than {FILE_BYTES_MAX} bytes, which no configuration is")
    try:
        return tomli.loads(raw.decode("utf-8-sig"))  # editors on Windows put a byte order mark first
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}: line {line}: is not UTF-8") from error
    except tomli.TOMLDecodeError as error:
        if both_forms(raw):
            raise ConfigError(f"{path}: line {error.lineno}: has both [backend] and [[backend]]; make each backend a "
                              "[[backend]]") from error
        raise ConfigError(f"{path}: line {error.lineno}, column {error.colno}: not TOML: {_in_words(error)}") from error
    except (RecursionError, ValueError) as error:  # ValueError: a number of more digits than Python will read
        raise ConfigError(f"{path}: is not a configuration: {error}") from error


def _in_words(error: tomli.TOMLDecodeError) -> str:
    """The parser's words, where a person would not know what they mean, in ours."""
    twice = re.fullmatch(r"Cannot declare \((.*?),?\) twice", error.msg)
    if twice:
        name = ".".join(re.findall("'([^']*)'", twice[1]))
        return f"[{name}] is there a second time; put all its keys under one"
    return {"Cannot overwrite a value": "this key or table is there already; it can be given only once",
            "Invalid value": "this is no value; text is written in quotes"}.get(error.msg, error.msg)


def _take_file(sources: _Sources, path: Path) -> None:
    for section, table in _read_file(path).items():
        if section == "backend" and isinstance(table, list) and table and all(isinstance(row, dict) for row in table):
            _take_rows(sources, path, table)
        elif not isinstance(table, dict):
            wrong = "must be a table" if section in SECTIONS else unknown(section)
            sources.problems.append(f"{path}: {section}: {wrong}")
        elif section not in SECTIONS:
            sources.problems.append(f"{path}: {section}: {unknown(section + '.*')}")
        else:
            for name, value in table.items():
                sources.take(f"{section}.{name}", value, str(path), f"{path}: {section}.{name}")


def _take_rows(sources: _Sources, path: Path, rows: list[dict[str, Any]]) -> None:
    """The ``[[backend]]`` tables."""
    if len(rows) > BACKENDS_MAX:
        sources.problems.append(f"{path}: backend: at most {BACKENDS_MAX} backends are served, not {len(rows)}")
    for number, row in enumerate(rows[:BACKENDS_MAX], 1):
        taken: dict[str, Any] = {}
        for name, value in row.items():
            checked = sources.check(f"backend.{name}", value, f"{path}: backend[{number}].{name}")
            if checked is not None:
                (taken[name],) = checked
        sources.rows.add(taken, str(path))


def _take_env(sources: _Sources, env: Mapping[str, str]) -> None:
    for variable, text in sorted(env.items()):
        section, divider, name = variable.removeprefix(ENV_PREFIX).partition("__")
        if not variable.startswith(ENV_PREFIX) or not divider or not section:
            continue  # KVSTREAM_FILE and other single words are not configuration keys
        path = f"{section}.{name}".lower()
        about = KEYS_BY_PATH.get(path)
        value = from_text(about, text) if about else text
        where = f"environment {variable}: {path}"
        sources.take(path, value, f"env {variable}", where)
        if section.lower() == "backend":
            sources.outside[path] = where


def _take_flags(sources: _Sources, flags: Mapping[str, object], names: Mapping[str, str]) -> None:
    for path, value in flags.items():
        about = KEYS_BY_PATH.get(path)
        spelt = names.get(path, path)
        read = from_text(about, value) if about and isinstance(value, str) else value
        where = spelt if spelt == path else f"{spelt}: {path}"
        sources.take(path, read, f"flag {spelt}", where)
        if path.startswith("backend."):
            sources.outside[path] = where


# --- what no single key can say ---------------------------------------------------------------------------------------


def check_together(config: Config) -> list[str]:
    """Problems between keys; also for configurations made in code."""
    problems = []
    backend = config.backend
    if config.embedded.model:
        if backend.type != "llamacpp":
            problems.append(f"embedded.model: starts a llama.cpp server, but backend.type is {as_toml(backend.type)}")
        elif backend.base_url:
            problems.append("embedded.model: starts a server of its own, but backend.base_url names one; set only one, "
                            "or make that one a [[backend]]")
    problems.extend(check_backends(config))
    if config.auth.enabled and "*" in config.server.cors_origins:
        problems.append('server.cors_origins: "*" opens KVStream to every web page, which keys are to prevent; '
                        "name the origins")
    try:
        client_keys(config.auth)
    except ConfigError as error:
        problems.extend(error.problems)
    return problems


def load(path: str | os.PathLike[str] | None, env: Mapping[str, str], flags: Mapping[str, object],
         flag_names: Mapping[str, str], *, together: bool = True) -> Loaded:
    """See ``config.load_config``."""
    sources = _Sources()
    file = _find_file(path)
    if file is not None:
        try:
            _take_file(sources, file)
        except ConfigError as error:  # an unreadable file does not hide what is wrong elsewhere
            sources.problems.extend(error.problems)
    _take_env(sources, env)
    _take_flags(sources, flags, flag_names)
    config = sources.build()
    if together and not sources.problems:  # between keys only once each is right, else one mistake is told twice
        sources.problems.extend(check_together(config))
    if sources.problems:
        raise ConfigError(sources.problems)


    def again() -> Loaded:
        return load(path if file is None else file, env, flags, flag_names, together=together)

    return Loaded(config, MappingProxyType(sources.origins), file, again)
