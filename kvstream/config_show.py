"""The configuration as text: the commented template, and the effective values with their origins."""

from __future__ import annotations

import json
import textwrap
from typing import Any, get_type_hints

from .config import KEYS, Config, Loaded
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
    for section, section_type in get_type_hints(Config).items():
        lines.append(f"\n[{section}]  # {(section_type.__doc__ or '').strip()}")
        for about in (about for about in KEYS if about.section == section):
            text = about.description + bounds(about)
            lines.extend(textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="#   ",
                                       break_long_words=False, break_on_hyphens=False))
            lines.append(f"#{about.name} = {about.show(about.default)}")
    return "\n".join(lines) + "\n"


def effective_toml(loaded: Loaded) -> str:
    """The values in effect as TOML, each with its origin as a comment; secrets masked."""
    lines = [f"# file: {loaded.path or 'none'}"]
    for section in get_type_hints(Config):
        lines.append(f"\n[{section}]")
        for about in (about for about in KEYS if about.section == section):
            setting = f"{about.name} = {about.show(loaded.config.get(about.path))}"
            lines.append(f"{setting:<44}  # {loaded.origins[about.path]}")
    return "\n".join(lines) + "\n"


def effective_json(loaded: Loaded) -> str:
    """The same for programs: ``{"file", "values": {"section.key": {value, origin, unit}}}``."""
    values = {about.path: {"value": _plain(about, loaded.config.get(about.path)),
                           "origin": loaded.origins[about.path], "unit": about.unit or None} for about in KEYS}
    return json.dumps({"file": str(loaded.path) if loaded.path else None, "values": values}, indent=2)


def _plain(about: Key, value: Any) -> Any:
    return SECRET_SHOWN if about.secret and value else value
