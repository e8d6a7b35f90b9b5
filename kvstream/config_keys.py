"""One configuration key as data: what it means, its unit, what it may be. Used by the tree in ``config``.

The same :class:`Key` is what the loader checks against, what ``kvstream check-config`` prints and what the commented
``kvstream.toml`` is held against, so that no two of them can tell different stories.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import attrs

# Bounds for keys that name none of their own. They keep arithmetic exact in double precision and sums of waits finite.
INT_MAX = 2**53
FLOAT_MAX = 1e9

VOLATILE_NAMES = ("anthropic_cch", "dates", "times", "total_tokens")
SECRET_SHOWN = "***"
QUOTE_CHARS_MAX = 60


@attrs.frozen
class Key:
    """What one key means. ``low`` and ``high`` are inclusive and apply to numbers; ``choices`` to words.

    ``check`` returns what is wrong with a value that has the right type and range, or None. ``section`` and ``name``
    are filled in by ``config.KEYS``; a ``secret`` value is never printed.
    """

    description: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    secret: bool = False
    check: Callable[[Any], str | None] | None = None
    section: str = ""
    name: str = ""
    default: Any = None
    type: Any = None

    @property
    def path(self) -> str:
        """``section.name``."""
        return f"{self.section}.{self.name}"

    @property
    def env(self) -> str:
        """The environment variable that sets it."""
        return f"KVSTREAM_{self.section}__{self.name}".upper()

    def problem(self, value: Any) -> str | None:
        """What is wrong with ``value``, which already has the right type; None when it may be used."""
        if isinstance(value, str):
            if self.choices and value not in self.choices:
                return f"must be {one_of(self.choices)}, not {self.quote(value)}"
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            wrong = self._range_problem(value)
            if wrong:
                return wrong
        return self.check(value) if self.check else None

    def _range_problem(self, value: float) -> str | None:
        unit = f" {self.unit}" if self.unit and self.unit != "fraction" else ""  # one does not say "0.5 fraction"
        if isinstance(value, float) and not math.isfinite(value):
            return f"must be a finite number{unit and ' of' + unit}, not {value}"
        low = 0 if self.low is None else self.low
        high = self.high if self.high is not None else INT_MAX if isinstance(value, int) else FLOAT_MAX
        if value < low:
            return f"must be at least {low:g}{unit}, not {self.quote(value)}"
        if value > high:
            return f"must be at most {high:.16g}{unit}, not {self.quote(value)}"
        return None

    def show(self, value: Any) -> str:
        """A value as TOML, with secrets masked (an empty secret is shown as empty: it says that none is set)."""
        return f'"{SECRET_SHOWN}"' if self.secret and value else as_toml(value)

    def quote(self, value: Any) -> str:
        """A value for a message: as ``show``, but never longer than a line."""
        shown = self.show(value)
        return shown if len(shown) <= QUOTE_CHARS_MAX else f"{shown[:QUOTE_CHARS_MAX]}..."


def key(default: Any, description: str, **facts: Any) -> Any:
    """An attrs field that carries a :class:`Key`."""
    about = Key(description, default=default, **facts)
    shown = (lambda value: repr(SECRET_SHOWN if value else value)) if about.secret else True
    return attrs.field(default=default, repr=shown, metadata={"key": about})


def one_of(words: tuple[str, ...]) -> str:
    """``"a", "b" or "c"``."""
    quoted = [as_toml(word) for word in words]
    return quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + " or " + quoted[-1]


def as_toml(value: Any) -> str:
    """A value in TOML's notation. Only the types a configuration key can have."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + "".join(_toml_char(char) for char in value) + '"'
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(as_toml(item) for item in value) + "]"
    return repr(value)


def _toml_char(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return char if char >= " " and char != "\x7f" else f"\\u{ord(char):04x}"


# --- checks that a range cannot express -------------------------------------------------------------------------------


def power_of_two(value: int) -> str | None:
    """Pages are addressed by shifting, and a runtime's own batch is a power of two as well."""
    return None if value > 0 and value & (value - 1) == 0 else f"must be a power of two, not {value}"


def zero_or_batch(value: int) -> str | None:
    return None if value == 0 or value >= 32 else f"must be 0 or at least 32, not {value}"


def http_url(value: str) -> str | None:
    """Empty, or an http(s) URL without credentials, query or fragment: it appears in /status and in logs."""
    if not value:
        return None
    try:
        parts = urlsplit(value)
        port_ok = parts.port is None or parts.port > 0
    except ValueError:
        return "must be a URL such as http://127.0.0.1:8081"
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_ok or value != value.strip():
        return "must be a URL such as http://127.0.0.1:8081"
    if parts.username is not None or parts.password is not None:
        return "must not contain a user name or password; put a key into backend.api_key"
    if parts.query or parts.fragment:
        return "must not contain a query or fragment"
    return None


def host_name(value: str) -> str | None:
    """An address to bind or compare with: a name or an IP address, no scheme, no port."""
    if not value or any(char.isspace() or char in "/@?#" for char in value):
        return f"must be a host name or an IP address, not {as_toml(value)}"
    return None


def host_names(value: tuple[str, ...]) -> str | None:
    return next((wrong for wrong in map(host_name, value) if wrong), None)


def volatile_names(value: tuple[str, ...]) -> str | None:
    """Names of patterns; what they match is in ``core.volatile``."""
    wrong = next((name for name in value if name not in VOLATILE_NAMES), None)
    return None if wrong is None else f"may contain {one_of(VOLATILE_NAMES)}, not {as_toml(wrong)}"
def lane_name(value: str) -> str | None:
    """Empty, or a short word: it is a label of metrics."""
    if value and not re.fullmatch(r"[a-z0-9_-]{1,32}", value):
        return f"must be 1 to 32 of a-z, 0-9, _ and -, not {as_toml(value)[:QUOTE_CHARS_MAX]}"
    return None


def model_names(value: tuple[str, ...]) -> str | None:
    return None if all(name and name == name.strip() for name in value) else "must not have empty names"


def alias_lines(value: tuple[str, ...]) -> str | None:
    """Each ``alias=model``, no alias twice. The first "=" divides: a model's name may have more of them."""
    aliases = set()
    for line in value:
        alias, divider, model = line.partition("=")
        if not divider or not alias or not model or alias != alias.strip() or model != model.strip():
            return f'each must be "alias=model", not {as_toml(line)[:QUOTE_CHARS_MAX]}'
        if alias in aliases:
            return f"has {as_toml(alias)[:QUOTE_CHARS_MAX]} twice"
        aliases.add(alias)
    return None


def header_safe(value: str) -> str | None:
    """It becomes the value of an HTTP header."""
    if value.isascii() and value.isprintable() and value == value.strip():
        return None
    return "must be printable ASCII without blanks at its ends"


def secrets_safe(value: tuple[str, ...]) -> str | None:
    """Keys of clients: each must survive an HTTP header, and none may be given twice."""
    if any(not secret or " " in secret or header_safe(secret) for secret in value):
        return "must be keys of printable ASCII without blanks"
    return "must not name a key twice" if len(set(value)) < len(value) else None


def origins(value: tuple[str, ...]) -> str | None:
    return next((wrong for wrong in map(_origin, value) if wrong), None)


def _origin(value: str) -> str | None:
    """``scheme://host`` or ``scheme://host:port`` in the form a browser sends, which is compared letter by letter."""
    scheme, divider, host = value.partition("://")
    if value == "*":
        return None
    if not divider or not scheme or not host or not value.isascii() or any(c.isspace() or c in "/@?#*,;" for c in host):
        return f'must be origins such as "https://chat.example" (no slash at the end) or "*", not {as_toml(value)}'
    if value != value.lower():
        return f"must be in lower case, as browsers send it, not {as_toml(value)}"
    if (scheme, host.rpartition(":")[2]) in (("http", "80"), ("https", "443")):
        return f"must not name the usual port, which browsers leave out: {as_toml(value)}"
    return None
