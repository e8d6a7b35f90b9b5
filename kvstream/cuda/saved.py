"""Saved pages of a sequence as bytes and files, for a prefix cache on disk or another process.

Theory of operation. A file is a line that names the format, the length of a header, the header (JSON: geometry and
tokens), the rows of the layers as ``Saved`` has them, and the SHA-256 of everything before it. The geometry says how
many bytes there must be, so a file that was cut short is told from one that was changed. What was read belongs to a
cache of the same geometry only; ``KVCache.load`` asks for that.

These calls block: in Trio they belong into a thread.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from attrs import fields

from ..errors import ConfigError, StepError
from .layout import Geometry
from .records import Saved
from .types import KVType

MAGIC: Final = b"KVStream saved pages 1\n"
LENGTH: Final = struct.Struct("<I")
DIGEST_BYTES: Final = 32
HEADER_BYTES_MAX: Final = 4096
LAYERS_MAX: Final = 65536
NUMBER_MAX: Final = (1 << 63) - 1


def pack(saved: Saved) -> bytes:
    return b"".join(_parts(saved))


def unpack(data: bytes | bytearray | memoryview) -> Saved:
    """*Errors*: ``StepError`` that says whether it is something else, cut short, or changed."""
    view = memoryview(data).cast("B")
    start = len(MAGIC) + LENGTH.size
    if view[: len(MAGIC)] != MAGIC[: len(view)]:
        raise StepError("these are no pages that KVStream saved, or of another version")
    if len(view) < start:
        raise StepError(f"saved pages were cut short: {len(view)} bytes are there")
    (header_bytes,) = LENGTH.unpack(view[len(MAGIC) : start])
    if header_bytes > HEADER_BYTES_MAX:
        raise StepError(f"saved pages are damaged: a header of {header_bytes} bytes")
    body = start + header_bytes
    if len(view) < body:
        raise StepError(f"saved pages were cut short: {len(view)} bytes are there")
    geometry, tokens = _described(bytes(view[start:body]))
    layer_bytes = tokens * (geometry.k_row_bytes + geometry.v_row_bytes)
    end = body + geometry.layers * layer_bytes
    if len(view) != end + DIGEST_BYTES:
        what = "were cut short" if len(view) < end + DIGEST_BYTES else "are too long"
        raise StepError(f"saved pages {what}: {len(view):,} bytes of {end + DIGEST_BYTES:,} for {tokens} tokens")
    if geometry.layers > LAYERS_MAX:  # of no token, or there were more bytes
        raise StepError(f"saved pages are damaged: {geometry.layers:,} layers")
    if hashlib.sha256(view[:end]).digest() != view[end:]:
        raise StepError("saved pages were changed: their checksum is another")
    rows = np.frombuffer(view[body:end], np.uint8)
    return Saved(geometry, tokens, tuple(rows[layer * layer_bytes : (layer + 1) * layer_bytes]
                                         for layer in range(geometry.layers)))


def write_file(path: Path, saved: Saved) -> None:
    """The whole file or none of it. *Errors*: ``StepError`` when it cannot be written."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        try:
            with unfinished.open("xb") as file:
                for part in _parts(saved):
                    file.write(part)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise StepError(f"pages cannot be saved as {path}: {error}") from error


def read_file(path: Path) -> Saved:
    """*Errors*: ``StepError``, as of ``unpack``, and when it cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StepError(f"saved pages cannot be read from {path}: {error}") from error
    try:
        return unpack(data)
    except StepError as error:
        raise StepError(f"{path}: {error.message}") from error


def _parts(saved: Saved) -> Iterator[bytes | memoryview]:
    header = json.dumps(_description(saved)).encode()
    digest = hashlib.sha256()
    rows = (np.ascontiguousarray(part).data for part in saved.data)
    parts: tuple[bytes | memoryview, ...] = (MAGIC, LENGTH.pack(len(header)), header, *rows)
    for part in parts:
        digest.update(part)
        yield part
    yield digest.digest()


def _description(saved: Saved) -> dict[str, Any]:
    geometry = {one.name: getattr(saved.geometry, one.name) for one in fields(Geometry)}
    return {**geometry, "k_type": str(saved.geometry.k_type), "v_type": str(saved.geometry.v_type),
            "tokens": saved.tokens}


def _described(header: bytes) -> tuple[Geometry, int]:
    try:
        told: dict[str, Any] = json.loads(header)
        tokens, kinds = told.pop("tokens"), {name: KVType.of(told.pop(name)) for name in ("k_type", "v_type")}
        if any(type(value) is not int for value in (tokens, *told.values())) or tokens < 0:
            raise ValueError("not whole numbers")
        if max(tokens, *told.values()) > NUMBER_MAX:
            raise ValueError("numbers that are too large")
        return Geometry(**{**told, **kinds}), tokens
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, ConfigError) as error:
        raise StepError(f"saved pages are damaged: {error}") from error
