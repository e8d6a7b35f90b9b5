"""Changes to a client's request body that keep the client's own bytes.

A field that is absent is spliced in right after the opening brace, so everything the client wrote, including number
formats, key order and duplicate keys, travels on untouched. Only a field that must *change* costs a re-serialisation;
it escapes non-ASCII, since a lone surrogate from ``\\ud83d`` has no UTF-8 form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attrs import frozen


@frozen
class Absent:
    """Marks a field to be removed."""


ABSENT = Absent()


def edit(body: bytes, view: Mapping[str, Any], changes: Mapping[str, Any]) -> bytes:
    """``body`` with the top-level fields of ``changes`` set, or removed where the value is ``ABSENT``."""
    wanted: dict[str, Any] = {}
    rewrite = False
    for key, value in changes.items():
        if value is ABSENT:
            if key not in view:
                continue
            rewrite = True
        elif key in view:
            if same(view[key], value):
                continue
            rewrite = True
        wanted[key] = value
    if not wanted:
        return body
    start = body.find(b"{")
    # Anything but white space before the brace is a BOM or another encoding: no place to splice ASCII into.
    if rewrite or start < 0 or body[:start].strip(b" \t\r\n") or b"\0" in body[start : start + 4]:
        return dumps({**{key: value for key, value in view.items() if key not in wanted}, **_present(wanted)})
    added = dumps(wanted)[1:-1]
    return body[: start + 1] + added + (b"," if view else b"") + body[start + 1 :]


def same(one: Any, other: Any) -> bool:
    """Equal as JSON: ``true`` is not ``1``."""
    return type(one) is type(other) and bool(one == other)


def dumps(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def _present(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not ABSENT}
