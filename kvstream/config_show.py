"""The configuration as text: the commented template, and the effective values with their origins."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from .config import KEYS, SECTION_TYPES, SECTIONS, BackendConfig, Loaded
from .config_backends import rows_of
from .config_keys import INT_MAX, SECRET_SHOWN, Key, one_of

TEMPLATE_HEAD = """\
# KVStream's configuration. Every key is here, commented out, with its default.
#
# A value is taken from the first of these that gives it:
#   1. a command-line flag that was really given      kvstream serve --port 9000
#   2. the environment, KVSTREAM_<SECTION>__<KEY>     KVSTREAM_SERVER__PORT=9000
#      (lists as words separated by commas, or as a TOML array)
#   3. this file: kvstream.toml in the working directory, or --config PATH
#   4. the default
# Unknown keys, wrong types and values out of range are refused, all at once.
# `kvstream check-config` shows the effective values and where each came from.
"""
BACKENDS_EXAMPLE = """\
# Several backends: instead of [backend] a [[backend]] table each, with the keys above. The model
#   that a client names decides; of two that serve it, the one that knows more of the prompt and has
#   less to do. --backend-url and KVSTREAM_BACKEND__... do not say which one, and are refused then.
#   [[backend]]
#   name = "big"
#   base_url = "http://127.0.0.1:8081"
#   aliases = ["gpt-4o=qwen3"]
#
#   [[backend]]
#   name = "small"
#   type = "openai"
#   base_url = "http://127.0.0.1:8000"
#   models = ["llama3.2"]
"""
WIDTH = 100


def bounds(about: Key) -> str:
    """Unit, choices and range in brackets, or nothing."""
    facts = [about.unit] if about.unit else []
    if about.choices:
        facts.append(one_of(about.choices))
    if about.low or about.high is not None:  # "at least 0" needs no mention
        low = 0 if about.low is None else about.low
        facts.append(f"{low:g} to {about.high:.15g}" if about.high is not None and about.high < INT_MAX
                     else f"at least {low:g}")
    return f" [{'; '.join(facts)}]" if facts else ""


def commented_toml() -> str:
    """The text of ``kvstream.toml``: every key commented out, with its meaning and default."""
    lines = [TEMPLATE_HEAD]
    for section, section_type in SECTION_TYPES.items():
        lines.append(f"\n[{section}]  # {(section_type.__doc__ or '').strip()}")
        for about in (about for about in KEYS if about.section == section):
            text = about.description + bounds(about)
            lines.extend(textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="#   ",
                                       break_long_words=False, break_on_hyphens=False))
            lines.append(f"#{about.name} = {about.show(about.default)}")
        if section == "backend":
            lines += ["", *BACKENDS_EXAMPLE.splitlines()]
    return "\n".join(lines) + "\n"


def effective_toml(loaded: Loaded) -> str:
    """The values in effect as TOML, each with its origin as a comment; secrets masked."""
    lines = [f"# file: {loaded.path or 'none'}"]
    rows = rows_of(loaded.config)
    for section in SECTIONS:
        if section == "backend" and rows:
            lines += _rows(loaded, rows)
            continue
        lines.append(f"\n[{section}]")
        for about in (about for about in KEYS if about.section == section):
            setting = f"{about.name} = {about.show(loaded.config.get(about.path))}"
            lines.append(f"{setting:<44}  # {loaded.origins[about.path]}")
    return "\n".join(lines) + "\n"


def _rows(loaded: Loaded, rows: tuple[BackendConfig, ...]) -> list[str]:
    names = [backend.name for backend in loaded.config.backends][-len(rows):]
    lines = []
    for number, (row, name) in enumerate(zip(rows, names, strict=True), 1):
        lines.append(f"\n[[backend]]  # {name}")
        for about in (about for about in KEYS if about.section == "backend"):
            setting = f"{about.name} = {about.show(getattr(row, about.name))}"
            lines.append(f"{setting:<44}  # {loaded.origins.get(f'backend[{number}].{about.name}', 'code')}")
    return lines


def effective_json(loaded: Loaded) -> str:
    """The same for programs: ``{"file", "values": {"section.key": {value, origin, unit}}}``; of several backends the
    keys are ``backend[n].key``, n from 1."""
    rows = rows_of(loaded.config)
    shown = [(about, about.path, loaded.config.get(about.path)) for about in KEYS
             if about.section != "backend" or not rows]
    shown += [(about, f"backend[{number}].{about.name}", getattr(row, about.name))
              for number, row in enumerate(rows, 1) for about in KEYS if about.section == "backend"]
    values = {path: {"value": _plain(about, value), "origin": loaded.origins.get(path, "code"),
                     "unit": about.unit or None} for about, path, value in shown}
    return json.dumps({"file": str(loaded.path) if loaded.path else None, "values": values}, indent=2)


def _plain(about: Key, value: Any) -> Any:
    return SECRET_SHOWN if about.secret and value else value
